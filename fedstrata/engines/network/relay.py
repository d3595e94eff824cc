"""A relay: a site to the server above it, and a server to the sites of its region.

    1  open: open the run at every site of the region; report all of their clients as one site's
    2  exchange: ask the sites whose clients are asked, and wait for all of them
    3  send their sum up or, if single replies are requested, all of them in the clients' order

A relay holds no text and no samples. The sites compare their texts with the server's, as without a relay, and
the server gets a region's mean instead of each site's. Each of the relay's states maps to a state of each
site, on its own disk.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from fedstrata.engines.engine import Unfinished
from fedstrata.engines.network import wire
from fedstrata.engines.network.answering import Around, Ended, Party
from fedstrata.engines.network.audit import Audit
from fedstrata.engines.network.federation import Federation
from fedstrata.engines.network.site import STACKED
from fedstrata.engines.network.states import Forgotten, SiteRefused
from fedstrata.engines.network.transport import Connected, Failure, Request, strange
from fedstrata.engines.network.wire import Arrays, Header
from fedstrata.support.sealed import UNSEALED, is_whole, sealed
from fedstrata.support.writing import write_atomically

log = logging.getLogger("fedstrata.network")
FILE = "relay.json"
AWAY = ("away", "late")  # failures that may be over when the site is asked again


class Relay(Party):
    """A region's server, which answers on behalf of its sites.

    Args:
        transport: the transport to the region's sites.
        folder: the folder of its states.
        audit: the account of the requests from above; the transport has the account of its own requests.
        anew: whether a site of the region that lost its state may join again, if the server allows it too.
        patience: the seconds to wait for an absent site within an exchange.
        once: whether it ends when the server announces the end.
        around: a context in which a request with this header is answered.
    """

    showed = ""

    def __init__(
        self, transport: Connected, folder: Path, *, audit: Audit | None = None, anew: bool = False,
        patience: float = 600.0, once: bool = False, around: Around = nullcontext,
    ) -> None:  # fmt: skip
        super().__init__(audit, around)
        self.transport, self.folder, self.anew, self.patience = transport, folder, anew, patience
        self.once = once
        self.there: Federation | None = None
        self.told: tuple[Header, Arrays] = {}, []
        self.last: tuple[int, tuple[Header, Arrays]] | None = None
        self._states: dict[int, list[int]] = {}  # for each of its states, the sites' states
        self._site_of: dict[int, int] = {}

    def call(self, header: Header, arrays: Arrays) -> tuple[Header, Arrays]:
        """Answer one request.

        Raises:
            SiteRefused: with what a site of the region says.
        """
        op = wire.value(header, "op", str)
        try:
            if op == "open":
                return self._open(header)
            if op == "done":
                return self._done(header)
            if op == "keys":
                raise SiteRefused("Secure sums are not there behind a relay: let its sites dial the server.")
            if self.there is None or header.get("run") != self.there.run:
                raise SiteRefused("The request is for a run that was not opened.")
            if op == "join":
                return self._join(self.there, header, arrays)
            if op == "exchange":
                return self._exchange(self.there, header, arrays)
            if op == "memory":
                return self._memory(self.there)
        except (Unfinished, ValueError) as error:  # messages about the region's sites
            if isinstance(error, wire.WireError):
                raise
            raise SiteRefused(str(error)) from error
        raise SiteRefused(f"Unknown request {op!r}.")

    def _open(self, header: Header) -> tuple[Header, Arrays]:
        run, number = wire.value(header, "run", str), wire.value(header, "number", int)
        if not run.replace("-", "").isalnum() or len(run) > 80:
            raise SiteRefused("The name of the run is not valid.")
        if self.there is None or (self.there.run, self.there.number) != (run, number):
            terms = wire.value(header, "terms", dict)
            there = Federation(self.transport, run, number, terms, self.anew, self.patience)
            remote = there.gather()
            data = hashlib.sha256(" ".join(remote.data).encode()).hexdigest()
            told = {"form": there.form, "columns": there.columns, "seen": remote.seen, "data": data}
            self.told, self.last, self.there = (told, there.sizes), None, there
            self._states = {}
        return self.told

    def _join(self, there: Federation, header: Header, arrays: Arrays) -> tuple[Header, Arrays]:
        clients, total = wire.value(header, "clients", int), wire.value(header, "total", int)
        ends = np.cumsum([len(own) for own in there.members])
        if not arrays or arrays[0].dtype != np.int32 or arrays[0].shape != (ends[-1],):
            raise SiteRefused("The server and this relay disagree on the numbers of its clients.")
        there.members = np.split(np.array(arrays[0]), ends[:-1])
        self._site_of = {int(c): i for i, own in enumerate(there.members) for c in own}
        fresh, states = wire.value(header, "fresh", bool), wire.numbers(header, "states")
        there.anew = self.anew and wire.value(header, "anew", bool)
        there.pose(total, clients, header.get("server"), wire.value(header, "identity", dict))
        taken: list[str] = []
        there.tell = lambda name, what: taken.append(name)
        if fresh:
            there.begin(True)
            self._keep({0: [0] * len(there.names)})
        else:
            if not self._states:
                there.begin(False)
                self._states = self._kept()
            self._at(states)
        if failures := there.join(self._each(states)):
            raise SiteRefused(_words({there.names[i]: why for i, why in failures.items()}))
        if taken:
            log.warning("taken as new sites: %s", ", ".join(taken))
        return {"anew": bool(taken)}, []

    def _exchange(self, there: Federation, header: Header, arrays: Arrays) -> tuple[Header, Arrays]:
        number = wire.value(header, "seq", int)
        if self.last is not None and number <= self.last[0]:
            if number == self.last[0]:
                return self.last[1]
            raise SiteRefused("An old message.")
        states = wire.numbers(header, "states")
        before, of = self._at(states)[0], self._each(states)
        clients, weights, rows = self._rows(arrays)
        requests = {
            i: Request({**header, "states": of[i]}, [clients[at], weights[at], *arrays[2:]])
            for i, at in rows.items()
        }
        replies = self._asked(there, requests, number, before)
        after = [replies[i].header["state"] if i in replies else own for i, own in enumerate(before)]
        state = number if after != before else states[0]
        self._keep({s: self._states[s] for s in states} | {state: after})
        counts: Counter[str] = Counter()
        for reply in replies.values():
            counts.update(reply.header["counts"])
        told: Header = {"seq": number, "counts": dict(counts), "state": state}
        stacked = any(reply.header.get(STACKED) for reply in replies.values())
        self.showed = "each client's own" if stacked else "the region's mean"
        told |= {STACKED: True} if stacked else {}
        self.last = number, (told, _together(rows, replies, stacked))
        return self.last[1]

    def _rows(self, arrays: Arrays) -> tuple[np.ndarray, np.ndarray, dict[int, np.ndarray]]:
        """The clients that are asked, their weights, and the positions of each site's clients among them."""
        if len(arrays) < 3 or arrays[0].ndim != 1 or arrays[1].shape != arrays[0].shape:
            raise SiteRefused("A request without clients, weights or key.")
        clients, weights = arrays[:2]
        if not len(clients) or any(c not in self._site_of for c in clients.tolist()):
            raise SiteRefused("A request for clients that are not this region's.")
        sites = np.array([self._site_of[c] for c in clients.tolist()])
        return clients, weights, {int(i): np.flatnonzero(sites == i) for i in np.unique(sites)}

    def _asked(
        self, there: Federation, requests: Mapping[int, Request], number: int, before: list[int]
    ) -> dict[int, Request]:
        """The replies of all sites: it asks no site again that has answered, and waits for absent ones."""
        replies: dict[int, Request] = {}
        end = time.monotonic() + self.patience
        while True:
            left = {i: request for i, request in requests.items() if i not in replies}
            found, failures = there.exchange(left, max(1.0, end - time.monotonic()))
            for i, reply in found.items():
                if why := strange(reply, number, before[i]):
                    failures[i] = Failure("wrong", why)
                else:
                    replies[i] = reply
            if not failures:
                return dict(sorted(replies.items()))
            named = {there.names[i]: failure for i, failure in failures.items()}
            if time.monotonic() > end or any(failure.kind not in AWAY for failure in named.values()):
                raise SiteRefused(_words(named))
            log.warning("waiting for %s", _words(named))
            self.transport.wait(list(failures), 1.0)

    def _memory(self, there: Federation) -> tuple[Header, Arrays]:
        replies, failures = there.memory()
        if failures:
            raise SiteRefused(_words({there.names[i]: why for i, why in failures.items()}))
        leaves = zip(*(reply.arrays for _, reply in sorted(replies.items())), strict=True)
        return {}, [np.concatenate(parts) for parts in leaves]

    def _done(self, header: Header) -> tuple[Header, Arrays]:
        requests = {i: Request(header, []) for i in range(len(self.transport.names))}
        self.transport.exchange(requests, 5.0)
        if self.once:
            raise Ended
        return {}, []

    # ---- states

    def _at(self, states: list[int]) -> list[list[int]]:
        """The sites' states for some of the relay's states."""
        if unknown := [state for state in states if state not in self._states]:
            raise SiteRefused(
                f"This relay is to go on from the state {unknown[0]}, and does not know it. Was its folder "
                "restored from a backup? Bring back its newest."
            )
        return [self._states[state] for state in states]

    def _each(self, states: list[int]) -> dict[int, list[int]]:
        """Each site's states for these states, without repetition."""
        return {i: list(dict.fromkeys(own)) for i, own in enumerate(zip(*self._at(states), strict=True))}

    def _keep(self, states: dict[int, list[int]]) -> None:
        """Store a new state on disk before it is announced."""
        if states != self._states:
            content = {"states": list(states.items()), "sha256": UNSEALED}
            write_atomically(self._file(), sealed(json.dumps(content).encode()))
        self._states = states

    def _kept(self) -> dict[int, list[int]]:
        file = self._file()
        if not file.is_file():
            raise Forgotten
        if not is_whole(content := file.read_bytes()):
            raise SiteRefused(f"{file} is damaged: it says in which states the sites are. Bring it back.")
        return dict(json.loads(content)["states"])

    def _file(self) -> Path:
        assert self.there is not None
        return self.folder / self.there.run / FILE


def _together(rows: Mapping[int, np.ndarray], replies: Mapping[int, Request], stacked: bool) -> Arrays:
    """The sum of the sites' weighted sums, in one order, or their rows in the clients' order."""
    forms = {tuple((u.dtype, u.shape[stacked:]) for u in reply.arrays) for reply in replies.values()}
    lengths = all(u.shape[:1] == (len(rows[i]),) for i, reply in replies.items() for u in reply.arrays)
    if len(forms) > 1 or (stacked and not lengths):
        raise SiteRefused("The replies of the region's sites differ in form.")
    first, *others = [reply.arrays for reply in replies.values()]
    if not stacked:
        sums = [np.array(u) for u in first]
        for own in others:
            for total, u in zip(sums, own, strict=True):
                total += u
        return sums
    order = np.argsort(np.concatenate([rows[i] for i in replies]))
    return [np.concatenate(own)[order] for own in zip(first, *others, strict=True)]


def _words(failures: Mapping[str, Failure]) -> str:
    return "; ".join(f"{name}: {failure.why}" for name, failure in failures.items())
