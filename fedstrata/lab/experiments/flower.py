"""An experiment inside Flower: a site lives in one message of a Flower run, and dials our own server.

    1  server's part: ask every node who it is
    2  client's part: its site's name, and a request for a certificate; its key stays at the node
    3  server's part: sign the requests by an authority of this run alone, listen, tell the nodes where
    4  client's part: dial, and answer until all is done

Flower provides the authentication of nodes, run control and logs; exchanges take our own connections, as a
message of Flower starts a process at the node. Where a node can reach no port but Flower's, `Post` sends them
as messages of Flower: a site is then a new process in each, which continues from its disk. What a site
answers with which data is said at the node (`--node-config`), never in the app, which holds no code but the
names of these two parts.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedstrata.engines.network import kits, wire
from fedstrata.engines.network.audit import Audit, Audited
from fedstrata.engines.network.grpc_site import serve
from fedstrata.engines.network.transport import Failure, Outcome, Request, answer_of
from fedstrata.lab.experiments.approval import SitePolicy, host_of
from fedstrata.lab.experiments.net import AUDIT, done, execute, plan_of, refuse_runs, run_name, served_by
from fedstrata.lab.experiments.networked import Server, opener_of_site
from fedstrata.lab.experiments.settings import settings_of
from fedstrata.support.compiled import keep_compiled
from fedstrata.support.writing import locked, write_atomically

try:
    from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
except ImportError as error:
    raise ValueError(f'This needs `pip install "fedstrata[flower]"` ({error}).') from error

log = logging.getLogger("fedstrata.network")
RECORD, MESSAGES, ANSWER = "fedstrata", "messages", "answer"
LOOK = 5.0  # seconds between two looks at Flower's nodes
LOST = 300.0  # seconds without a request after which a site that cannot reach the server gives up
DAYS = 30  # that a run's certificates are valid
client, server = ClientApp(), ServerApp()


def _content(facts: Mapping[str, Any]) -> RecordDict:
    return RecordDict({RECORD: ConfigRecord(dict(facts))})


@client.query()  # type: ignore[untyped-decorator]
def introduce(message: Message, context: Context) -> Message:
    """Which site this node is, with a request for a certificate for its own key."""
    kit, name = Path(str(context.node_config["kit"])), str(context.node_config["site"])
    if not (kit / kits.KEY).exists():
        kits.request(kit, name)
    facts = {"site": name, "request": (kit / kits.REQUEST).read_bytes()}
    return Message(content=_content(facts), reply_to=message)


@client.train()  # type: ignore[untyped-decorator]
def reside(message: Message, context: Context) -> Message:
    """The site, for the length of the run."""
    config, told = context.node_config, message.content[RECORD]
    kit, name = Path(str(config["kit"])), str(config["site"])
    for file in (kits.AUTHORITY, kits.CERTIFICATE):
        write_atomically(kit / file, told[file])
    keep_compiled()
    settings = settings_of(kit)
    definition = plan_of(settings.experiment, kit, False, None, str(config.get("set", "")).split()).experiment
    data = str(config["data"]) if "data" in config else None
    valid, label = float(config.get("valid-fraction", 0.0)), str(config.get("label", "y"))
    opens, _ = opener_of_site(definition, settings.sites, name, data, label, valid, data is None, kit)
    if MESSAGES in told:
        with _alone(kit):
            host = host_of(kit, kit / "state", definition, opens, steady=data is not None)
            for one in told[MESSAGES]:
                answer = host.answer(one, settings.message_bytes)
                if "error" in wire.unpack(answer, settings.message_bytes)[0]:
                    break
        return Message(content=_content({ANSWER: answer}), reply_to=message)
    host = host_of(kit, kit / "state", definition, opens, steady=data is not None, once=True)

    def ended() -> bool:
        return time.monotonic() - host.heard > LOST

    rates = SitePolicy.of(kit).rates
    serve(host, kit, told["address"], settings.message_bytes, ended, host.resting, rates)
    return Message(content=_content({"answered": host.answered}), reply_to=message)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait for an earlier message's process, which may be late."""
    end = time.monotonic() + LOST
    while True:
        try:
            with locked(folder, "An earlier message's process"):
                yield
            return
        except BlockingIOError:
            if time.monotonic() > end:
                raise
            time.sleep(0.5)


class Gate:
    """Lets nodes in: each is asked who it is, and told where to dial.

    Args:
        grid: Flower's.
        kit: the server's folder for this run, with the run's authority beside it.
        sites: the names of the federation's sites.
        address: what sites dial.
    """

    def __init__(self, grid: Grid, kit: Path, sites: list[str], address: str) -> None:
        self.grid, self.kit, self.sites, self.address = grid, kit, sites, address
        self.authority = kits.Authority.create(kit.parent / kits.AUTHORITY_FOLDER, DAYS)
        self.known: set[int] = set()
        self.asked: dict[str, int] = {}  # messages under way, and their nodes
        self.site_of: dict[int, str] = {}  # nodes that were told where to dial
        self._over = threading.Event()

    def look(self) -> None:
        """Admit new nodes, and those whose site has ended; refuse unknown sites and a name that is taken."""
        fresh = [node for node in self.grid.get_node_ids() if node not in self.known]
        self.known.update(fresh)
        self._push(MessageType.QUERY, {node: {} for node in fresh})
        if not self.asked:
            return
        for reply in self.grid.pull_messages(list(self.asked)):
            node = self.asked.pop(reply.metadata.reply_to_message_id)
            name = self.site_of.pop(node, "")
            if name or reply.has_error():  # a site that ended in the middle of the run is started again
                why = reply.error.reason if reply.has_error() else "it has ended"
                log.warning("Flower's node %d (%s): %s", node, name or "not yet known", why)
                self.known.discard(node)
                continue
            self._admit(node, reply.content[RECORD])

    def _admit(self, node: int, told: Mapping[str, Any]) -> None:
        name = str(told["site"])
        if name not in self.sites or name in self.site_of.values():
            log.warning("Flower's node %d says that it is %r: refused", node, name)
            return
        with tempfile.TemporaryDirectory() as folder:
            (file := Path(folder, kits.REQUEST)).write_bytes(told["request"])
            signed = kits.sign(self.authority, file, Path(folder), self.sites, DAYS)
            facts = {one: (signed / one).read_bytes() for one in (kits.AUTHORITY, kits.CERTIFICATE)}
        self.site_of[node] = name
        self._welcome(node, facts)

    def _welcome(self, node: int, facts: Mapping[str, bytes]) -> None:
        """Tell an admitted node its certificate, and where to dial."""
        self._push(MessageType.TRAIN, {node: {**facts, "address": self.address}})

    def _push(self, kind: str, contents: Mapping[int, Mapping[str, Any]]) -> None:
        self.asked.update(self._pushed(kind, contents))

    def _pushed(self, kind: str, contents: Mapping[int, Mapping[str, Any]]) -> dict[str, int]:
        """Send messages of Flower; their numbers, with the nodes."""
        nodes = list(contents)
        messages = [
            Message(content=_content(contents[node]), message_type=kind, dst_node_id=node) for node in nodes
        ]
        return dict(zip(self.grid.push_messages(messages), nodes, strict=True)) if messages else {}

    @contextmanager
    def open(self) -> Iterator[None]:
        """Look every few seconds for the length of a block."""

        def repeat() -> None:
            while not self._over.is_set():
                try:
                    self.look()
                except Exception as error:  # whatever a lost SuperLink raises: the run does not need it
                    log.warning("Flower's nodes cannot be asked: %s", error)
                self._over.wait(LOOK)

        thread = threading.Thread(target=repeat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def dismiss(self, seconds: float = 60.0) -> None:
        """Wait for the sites' parts to end, so that Flower has their replies."""
        end = time.monotonic() + seconds
        while self.asked and time.monotonic() < end:
            for reply in self.grid.pull_messages(list(self.asked)):
                del self.asked[reply.metadata.reply_to_message_id]
            time.sleep(0.5)


class Post(Gate):
    """A transport by Flower's messages; see `Connected`.

    A site is a new process in each of them: the messages that open and join the run come along every time.
    """

    rejoins = True

    def __init__(self, grid: Grid, kit: Path, sites: list[str], limit: int) -> None:
        super().__init__(grid, kit, sites, "")
        self.names: Sequence[str] = sites
        self.limit = limit
        self.sent, self.received, self.took = [0] * len(sites), [0] * len(sites), [0.0] * len(sites)
        self._there: dict[str, tuple[int, Mapping[str, bytes]]] = {}
        self._before: dict[int, dict[str, Request]] = {}
        self._waiting: tuple[list[str], float] = [], 0.0
        self.heed(lambda: False)

    def look(self) -> None:
        """See `Gate.look`; a node that has left may come back as another one."""
        for node in set(self.site_of) - set(self.grid.get_node_ids()):
            del self._there[self.site_of.pop(node)]
            self.known.discard(node)
        super().look()

    def _welcome(self, node: int, facts: Mapping[str, bytes]) -> None:
        self._there[self.site_of[node]] = node, facts

    def session(self, site: int) -> int | None:
        """See `Transport.session`."""
        node, _ = self._there.get(self.names[site], (None, None))
        return node

    def expires(self, site: int) -> float | None:
        """The certificates of a run are not used to connect."""
        return None

    def waiting(self) -> tuple[list[str], float]:
        """See `Connected.waiting`."""
        names, since = self._waiting
        return names, time.monotonic() - since

    def heed(self, stopping: Callable[[], bool]) -> None:
        """See `Transport.heed`."""
        self._stopping = stopping

    def wait(self, sites: Sequence[int], seconds: float) -> list[int]:
        """See `Transport.wait`."""
        end = time.monotonic() + seconds
        while any(self.session(i) is None for i in sites) and time.monotonic() < end:
            time.sleep(0.1)
        return [i for i in sites if self.session(i) is not None]

    def exchange(self, requests: Mapping[int, Request], timeout: float) -> Outcome:
        """See `Transport.exchange`."""
        began, replies, failures = time.monotonic(), dict[int, Request](), dict[int, Failure]()
        contents: dict[int, dict[str, Any]] = {}
        of: dict[int, int] = {}
        for i, request in requests.items():
            if (there := self._there.get(self.names[i])) is None:
                failures[i] = Failure("away", "its node is not there")
                continue
            node, facts = there
            packed = [wire.pack(*one, self.limit) for one in self._with_earlier(i, request)]
            contents[node], of[node] = {**facts, MESSAGES: packed}, i
            self.sent[i] += sum(map(len, packed))
        left = self._pushed(MessageType.TRAIN, contents)
        while left and time.monotonic() - began < timeout and not self._stopping():
            self._waiting = [self.names[of[node]] for node in left.values()], began
            for reply in self.grid.pull_messages(list(left)):
                i = of[left.pop(reply.metadata.reply_to_message_id)]
                self.took[i] = time.monotonic() - began
                if reply.has_error():
                    failures[i] = Failure("error", wire.said(reply.error.reason))
                    continue
                answer = reply.content[RECORD].get(ANSWER)
                self.received[i] += len(answer) if isinstance(answer, bytes) else 0
                found, number = answer_of(answer, self.limit)
                if isinstance(found, Failure):
                    failures[i] = found
                elif number != requests[i].header["seq"]:
                    failures[i] = Failure("wrong", "it answered another message")
                else:
                    replies[i] = found
            time.sleep(0.1)
        self._waiting = [], 0.0
        late = Failure("late", f"no answer in {timeout:.1f} s")
        return replies, failures | {of[node]: late for node in left.values()}

    def _with_earlier(self, i: int, request: Request) -> list[Request]:
        """A message, after those by which the site's new process comes to where the last one was."""
        op, earlier = request.header["op"], self._before.setdefault(i, {})
        earlier[op] = request
        if op == "open":
            return [request]
        if op != "exchange":
            return [earlier["open"], request]
        join = earlier["join"]
        again = {**join.header, "fresh": False, "states": request.header["states"]}
        return [earlier["open"], Request(again, join.arrays), request]


@server.main()  # type: ignore[untyped-decorator]
def run(grid: Grid, context: Context) -> None:
    """The experiment: certificates for this run, the sites, the report."""
    config = context.run_config
    kit, out, resume = Path(str(config["kit"])), Path(str(config["out"])), bool(config.get("resume", False))
    logging.basicConfig(level=logging.INFO)
    settings = settings_of(kit)
    plan = plan_of(settings.experiment, kit, False, None, str(config.get("set", "")).split())
    if not resume:
        refuse_runs(out)
    with tempfile.TemporaryDirectory() as folder:
        server_kit = Path(folder) / kits.SERVER
        if bool(config.get("messages", False)):
            post = Post(grid, server_kit, settings.sites, settings.message_bytes)
            with post.open(), locked(out, "A server"):
                audited = Audited(post, Audit(out / AUDIT, kits.SERVER))
                serving = Server(plan.experiment, audited, run_name(out), settings.policy, settings.anew)
                execute(serving, plan, out, "flwr run", fresh=not resume)
            return
        gate = Gate(grid, server_kit, settings.sites, settings.address)
        kits.make_kit(gate.authority, server_kit, settings.hosts, DAYS)
        shutil.copy(kit / "federation.toml", server_kit)
        with served_by(server_kit, plan, out) as serving:
            with gate.open():
                execute(serving, plan, out, "flwr run", fresh=not resume)
            done(serving)
            gate.dismiss()


APP = """\
# An app of Flower: `flwr run {folder}`. Each SuperNode says which site it is, and with which data:
#   flower-supernode … --node-config 'kit="/srv/fedstrata" site="zurich" data="clinic:samples"'
# FedStrata is installed where they run; the SuperLink has --disable-runtime-dependency-installation.
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fedstrata-app"
version = "1.0.0"
description = "{experiment}, run by FedStrata"
license = "Apache-2.0"
dependencies = ["fedstrata[flower]"]

[tool.flwr.app]
publisher = "fedstrata"

[tool.flwr.app.components]
serverapp = "fedstrata_app.parts:server"
clientapp = "fedstrata_app.parts:client"

[tool.flwr.app.config]
kit = "{kit}"        # at the server's part: a folder with federation.toml and the experiment
out = "{out}"        # for runs and report
resume = false       # --run-config resume=true continues there
messages = false     # true: exchanges are messages of Flower, where nodes can reach no other port
"""
PARTS = '''\
"""The two parts are FedStrata's own; an app of Flower names them in a module."""

from fedstrata.lab.experiments.flower import client, server

__all__ = ["client", "server"]
'''


def write_app(folder: Path, kit: Path, out: Path) -> Iterable[Path]:
    """The files of the app, in a new folder."""
    package = folder / "fedstrata_app"
    package.mkdir(parents=True)
    texts = {
        folder / "pyproject.toml": APP.format(
            folder=folder, experiment=settings_of(kit).experiment, kit=kit.resolve(), out=out.resolve()
        ),
        package / "__init__.py": "",
        package / "parts.py": PARTS,
    }
    for file, text in texts.items():
        file.write_text(text, "utf-8")
    return texts
