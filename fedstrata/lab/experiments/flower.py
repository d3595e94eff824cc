"""An experiment inside Flower: a site lives in one message of a Flower run, and dials our own server.

    1  server's part: ask every node who it is
    2  client's part: its site's name, and a request for a certificate; its key stays at the node
    3  server's part: sign the requests by an authority of this run alone, listen, tell the nodes where
    4  client's part: dial, and answer until all is done

Flower provides the authentication of nodes, run control and logs; exchanges take our own connections, as a
message of Flower starts a process at the node. What a site answers with which data is said at the node
(`--node-config`), never in the app, which holds no code but the names of these two parts.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedstrata.engines.network import kits
from fedstrata.engines.network.grpc_site import serve
from fedstrata.lab.experiments.approval import SitePolicy, host_of
from fedstrata.lab.experiments.net import done, execute, plan_of, refuse_runs, served_by
from fedstrata.lab.experiments.networked import opener_of_site
from fedstrata.lab.experiments.settings import settings_of
from fedstrata.support.writing import write_atomically

try:
    from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
except ImportError as error:
    raise ValueError(f'This needs `pip install "fedstrata[flower]"` ({error}).') from error

log = logging.getLogger("fedstrata.network")
RECORD = "fedstrata"
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
    settings = settings_of(kit)
    definition = plan_of(settings.experiment, kit, False, None, str(config.get("set", "")).split()).experiment
    data = str(config["data"]) if "data" in config else None
    valid, label = float(config.get("valid-fraction", 0.0)), str(config.get("label", "y"))
    opens, _ = opener_of_site(definition, settings.sites, name, data, label, valid, data is None, kit)
    host = host_of(kit, kit / "state", definition, opens, steady=data is not None, once=True)

    def ended() -> bool:
        return time.monotonic() - host.heard > LOST

    rates = SitePolicy.of(kit).rates
    serve(host, kit, told["address"], settings.message_bytes, ended, host.resting, rates)
    return Message(content=_content({"answered": host.answered}), reply_to=message)


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
        self._push(MessageType.TRAIN, {node: {**facts, "address": self.address}})

    def _push(self, kind: str, contents: Mapping[int, Mapping[str, Any]]) -> None:
        nodes = list(contents)
        messages = [
            Message(content=_content(contents[node]), message_type=kind, dst_node_id=node) for node in nodes
        ]
        if messages:
            self.asked.update(zip(self.grid.push_messages(messages), nodes, strict=True))

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
