"""The transport of NVIDIA FLARE: the same requests, as ``bytes`` in the calls of a Collab job.

FLARE provides connections, certificates, authorisation and audit; a message is opaque to it. (Arrays would
travel by a separate download each; `bytes` go inline.) The job holds no code: its two parts are classes of
this package, which every party allows by name. A site that was restarted cannot rejoin a running job, so a
site that does not answer ends the job, and the run continues from its checkpoint in the next one.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nvflare.apis.job_def import ALL_SITES
from nvflare.collab import collab
from nvflare.collab.api.call_opt import CallOption
from nvflare.collab.api.exceptions import RunAborted
from nvflare.collab.api.group import group
from nvflare.collab.runtime.controller import CollabController
from nvflare.collab.runtime.executor import CollabExecutor
from nvflare.job_config.api import FedJob

from fedstrata.engines.engine import Unfinished
from fedstrata.engines.network import wire
from fedstrata.engines.network.answering import placed
from fedstrata.engines.network.host import Host
from fedstrata.engines.network.transport import Failure, Outcome, Request, answer_of

log = logging.getLogger("fedstrata.network")
SETUP_SECONDS = 600  # for sites to start a job: they load and check their data


class JobAborted(Unfinished):
    """FLARE's job was aborted."""


class Answering:
    """A site's part of a job. A subclass defines the party that answers."""

    def host(self, kit: Path, name: str) -> Host:
        """The site of this name, of the kit in this folder."""
        raise NotImplementedError

    @collab.init  # type: ignore[untyped-decorator]
    def prepare(self) -> None:
        """Set up before the server may ask. A site with unsuitable data reports it when it is asked."""
        self._one, self._host, self._trouble = threading.Lock(), None, ""
        try:
            self._host = self.host(Path(collab.workspace.get_root_dir()), collab.site_name)
        except Exception as error:  # its message may contain samples
            log.error("not ready: %s", placed(error))
            log.debug("the exception's message", exc_info=error)
            self._trouble = f"It is not ready ({type(error).__name__}); the site's log says more."

    @collab.publish  # type: ignore[untyped-decorator]
    def answer(self, message: bytes) -> bytes:
        """A reply to the server, one after the other: a call may come while a late one is under way.

        In a job of FLARE, sites can call each other too, but no site answers another.
        """
        if collab.caller != "server":
            log.warning("refused: asked by %s, which is not the server", collab.caller)
            return wire.pack({"seq": None, "error": "Only the server is answered."}, [])
        with self._one:
            if self._host is None:
                return _refused(message, self._trouble)
            return self._host.answer(message)


def _refused(message: bytes, words: str) -> bytes:
    try:
        number = wire.unpack(message)[0].get("seq")
    except wire.WireError:
        number = None
    return wire.pack({"seq": number, "error": words}, [])


class FlareServer:
    """A transport within a job's server; see `Transport`. Made where FLARE's call context is known.

    Args:
        names: the sites of the federation.
        limit: the most bytes of a message.
    """

    rejoins = False

    def __init__(self, names: Sequence[str], limit: int = wire.LIMIT) -> None:
        self._context, self.limit = collab.context, limit
        there = {client.name: client for client in collab.clients}
        if missing := [name for name in names if name not in there]:
            raise Unfinished(f"The sites {missing} are not in the job.")
        self.names: Sequence[str] = list(names)
        self._proxies = [there[name] for name in names]
        self.sent, self.received = [0] * len(self.names), [0] * len(self.names)
        self.took = [0.0] * len(self.names)
        self._gone: set[int] = set()

    def session(self, site: int) -> int | None:
        """A site has one connection for the whole job, until it is gone."""
        return None if site in self._gone else 1

    def expires(self, site: int) -> None:
        """FLARE manages its own certificates."""

    def waiting(self) -> tuple[list[str], float]:
        """FLARE's own console shows this."""
        return [], 0.0

    def exchange(self, requests: Mapping[int, Request], timeout: float) -> Outcome:
        replies: dict[int, Request] = {}
        failures = {i: Failure("away", "it has left the job") for i in requests if i in self._gone}
        answers: dict[int, Any] = {}
        calls = []
        for i, request in requests.items():
            if i not in failures:
                message = wire.pack(*request, self.limit)
                self.sent[i] += len(message)
                option = CallOption(timeout=timeout, blocking=False)
                calls.append((i, group(self._context, [self._proxies[i]], option).answer(message)))
        began = time.monotonic()
        try:
            for i, results in calls:
                for _, answer in results:
                    answers[i], self.took[i] = answer, time.monotonic() - began  # at most: in their order
                for error in results.failures.values():
                    failures[i] = self._failed(i, error, timeout)
        except RunAborted as error:
            raise JobAborted("FLARE's job was aborted; what was done is saved.") from error
        for i, answer in answers.items():
            self.received[i] += len(answer) if isinstance(answer, bytes) else 0
            found, number = answer_of(answer, self.limit)
            if isinstance(found, Failure):
                failures[i] = found
            elif number != requests[i].header["seq"]:
                failures[i] = Failure("wrong", "it answered another message")
            else:
                replies[i] = found
        return replies, failures

    def _failed(self, i: int, error: Any, timeout: float) -> Failure:
        if self._context.is_aborted():
            raise JobAborted("FLARE's job was aborted; what was done is saved.")
        self._gone.add(i)
        if isinstance(getattr(error, "cause", None), TimeoutError) or "timed out" in str(error):
            return Failure("late", f"no answer in {timeout:.1f} s")
        return Failure("away", wire.said(error))

    def wait(self, sites: Sequence[int], seconds: float) -> list[int]:
        """See `Transport.wait`; a site that is gone does not come back."""
        return [i for i in sites if i not in self._gone]

    def heed(self, stopping: Callable[[], bool]) -> None:
        """See `Transport.heed`; FLARE's own console aborts a job."""

    def close(self) -> None:
        """FLARE ends the job itself."""


def job(name: str, sites: Sequence[str], server: Any, site: Any, properties: Mapping[str, Any]) -> FedJob:
    """A job without code: two parts by the names of their classes. All of the sites must be there."""
    made = FedJob(name=name, min_clients=len(sites), mandatory_clients=list(sites))
    made.set_app_packages(["fedstrata"])
    at_server = made.to_server(server, id="fedstrata_server")
    controller = CollabController(
        server_obj_id=at_server, collab_obj_ids=[], props=dict(properties), sync_task_timeout=SETUP_SECONDS
    )
    made.to_server(controller, id="controller")
    at_site = made.to(site, ALL_SITES, id="fedstrata_site")
    made.to(CollabExecutor(client_obj_id=at_site, collab_obj_ids=[]), ALL_SITES, id="executor", tasks=["*"])
    return made


def folders() -> tuple[Path, Path]:
    """Within a job: the party's kit, and the job's own folder, which its submitter can download."""
    context = collab.context
    number = context.backend.engine.new_context().get_job_id()
    return Path(context.workspace.get_root_dir()), Path(context.workspace.get_run_dir(number))


def allow(kit: Path, classes: Sequence[type]) -> Path:
    """Allow a party's FLARE to make objects of these classes, and of Collab's own, in jobs without code.

    FLARE no longer sends a site's error log to the server, because exceptions' messages may contain samples.
    """
    local = kit / "local"
    file = local / "resources.json"
    found = file if file.is_file() else local / "resources.json.default"
    resources = json.loads(found.read_text("utf-8"))
    wanted = [f"{c.__module__}.{c.__qualname__}" for c in (*classes, CollabController, CollabExecutor)]
    allowed = resources.setdefault("class_allow_list", [])
    allowed += [name for name in wanted if name not in allowed]
    if "allow_log_streaming" in resources:
        resources["allow_log_streaming"] = False
    file.write_text(json.dumps(resources, indent=2) + "\n", "utf-8")
    return file
