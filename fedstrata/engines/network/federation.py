"""The sites of a run: the server opens it there, and they join, again after an absence."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from fedstrata.data.federated import DataError, FederatedData
from fedstrata.data.sources import FromFunction
from fedstrata.engines.network import wire
from fedstrata.engines.network.engine import Remote, RoundFailed
from fedstrata.engines.network.host import MOST_CLIENTS, MOST_SAMPLES, blank
from fedstrata.engines.network.rules import START, start_of
from fedstrata.engines.network.transport import Connected, Failure, Outcome, Request, Through

if TYPE_CHECKING:
    from fedstrata.engines.network.kits import Identity

log = logging.getLogger("fedstrata.network")
FAR = 10 * 365 * 24 * 3600 * 10**6  # microseconds by which the server's clock may have been set back


class Federation(Through):
    """One run over a transport, which the engine uses as its transport.

    Args:
        transport: the transport to the sites.
        run: the run's unique name.
        number: the run's number in the text.
        terms: the terms that every site must share before a run is opened.
        anew: whether a site that lost its state may join again.
        patience: seconds for a site to open or join.
        starter: who starts the run, for sites that ask for a signature.

    Attributes:
        tell: called with a site's name and an event to report.
    """

    def __init__(
        self,
        transport: Connected,
        run: str,
        number: int,
        terms: Mapping[str, Any],
        anew: bool = False,
        patience: float = 600.0,
        starter: Identity | None = None,
    ) -> None:
        super().__init__(transport)
        self.run, self.number, self.terms = run, number, terms
        self.anew, self.patience, self.starter = anew, patience, starter
        self.fresh = True
        self._joined: dict[int, int] = {}  # site → the connection through which it has joined
        self._known: set[int] = set()  # sites that have joined since the run began
        self._sizes: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._forms: dict[int, Any] = {}
        self._columns: dict[int, dict[str, list[str]]] = {}
        self._data: dict[int, str] = {}
        self._seen = 0
        self._posed: dict[str, Any] = {}
        self._keys: list[np.ndarray] = []
        self.tell: Callable[[str, str], None] = lambda name, what: log.warning("%s: %s", name, what)

    def gather(self) -> Remote:
        """Open the run at every site, wait for absent sites, and learn the sizes and form of the data."""
        everyone = list(range(len(self.names)))
        while missing := sorted(set(everyone) - set(self.inner.wait(everyone, 5.0))):
            log.warning("waiting for %s", ", ".join(self.names[i] for i in missing))
        _, failures = self._open(everyone)
        if failures:
            raise RoundFailed(
                f"run {self.number}", {self.names[i]: failure for i, failure in failures.items()}
            )
        if len({repr(form) for form in self._forms.values()}) > 1:
            raise ValueError(
                "The sites' samples differ in form: "
                + "; ".join(f"{self.names[i]}: {form}" for i, form in self._forms.items())
            )
        self._check_columns()
        members, first = [], 0
        for i in everyone:
            members.append(np.arange(first, first + len(self._sizes[i][0]), dtype=np.int32))
            first += len(members[-1])
        sizes = np.concatenate([self._sizes[i][0] for i in everyone])
        if (total := int(sizes.sum(dtype=np.int64))) > MOST_SAMPLES or len(sizes) > MOST_CLIENTS:
            most = max(everyone, key=lambda i: int(self._sizes[i][0].sum(dtype=np.int64)))
            raise ValueError(
                f"The sites say that {len(sizes)} clients have {total} samples, most of them at "
                f"{self.names[most]}; {MOST_CLIENTS} clients and {MOST_SAMPLES} samples can be counted."
            )
        self.members, self.form = members, self._forms[0]
        data = [self._data[i] for i in everyone]
        return Remote(self, members, sizes, made_up(self._forms[0], 1).load(), self.begin, self._seen, data)

    @property
    def sizes(self) -> list[np.ndarray]:
        """The numbers of samples of all clients, and of validation samples."""
        parts = zip(*(self._sizes[i] for i in range(len(self.names))), strict=True)
        return [np.concatenate(part) for part in parts]

    @property
    def columns(self) -> dict[str, list[str]]:
        """The sites' names of columns and classes, if they send them."""
        return {name: words for own in self._columns.values() for name, words in own.items()}

    def _check_columns(self) -> None:
        """Compare the names, because a site's file may have columns of equal shape in another order."""
        for name, what in (("x", "column"), ("y", "class")):
            named = [(self.names[i], own[name]) for i, own in sorted(self._columns.items()) if name in own]
            for site, words in named:
                first, meant = named[0]
                for place, (its, expected) in enumerate(zip_longest(words, meant)):
                    if its != expected:
                        raise ValueError(
                            f"The sites mean different things by {name!r}: its {what} {place} is {its!r} at "
                            f"{site}, {expected!r} at {first}. Give all sites the same, in the same order."
                        )

    def begin(self, fresh: bool) -> None:
        """Set whether the run begins at its sites, or continues; they join again."""
        self.fresh, self._joined, self._known = fresh, {}, set()

    def pose(
        self, total: int, clients: int, server: Any, identity: Mapping[str, Any], secure: bool = False
    ) -> None:
        """Set the run's identity, which every site compares with its own text when it joins.

        In a secure run, each site also gets the keys of all sites, which it checks.
        """
        self._keys = []
        if secure:
            header = {"op": "keys", "run": self.run}
            replies, failures = self._ask({i: Request(header, []) for i in range(len(self.names))})
            if failures:
                where = f"run {self.number}, keys for secure sums"
                raise RoundFailed(where, {self.names[i]: failure for i, failure in failures.items()})
            self._keys = [array for _, reply in sorted(replies.items()) for array in reply.arrays[:1]]
        self._posed = {"total": total, "clients": clients, "server": server, "identity": identity}

    def _open(self, sites: Sequence[int]) -> Outcome:
        header = {"op": "open", "run": self.run, "number": self.number, "terms": self.terms}
        signed = []
        if self.starter is not None:
            proof = self.starter.proof(self.run, start_of(header), START)
            signed.append(np.frombuffer(proof, np.uint8))
        replies, failures = self._ask({i: Request(header, signed) for i in sites})
        for i, reply in list(replies.items()):
            try:
                sizes, form, seen = _described(reply)
                columns, data = _columns(reply), wire.value(reply.header, "data", str)
            except wire.WireError as error:
                failures[i] = Failure("wrong", str(error))
                continue
            if i in self._data and (self._data[i], self._columns[i]) != (data, columns):
                failures[i] = Failure("error", "it came back with other data")
                continue
            self._sizes[i], self._forms[i], self._columns[i], self._data[i] = sizes, form, columns, data
            if seen < time.time_ns() // 1000 + FAR:  # a larger difference is a lie: no clock is so wrong
                self._seen = max(self._seen, seen)
        return replies, failures

    def join(self, sites: Mapping[int, list[int]]) -> dict[int, Failure]:
        """Open and join at sites with a new connection; ``states``: the states that each must know."""
        # A site joins once per connection: after an absence, it may be another process that lacks the state.
        sessions = {i: self.inner.session(i) for i in sites}
        new = [i for i in sites if sessions[i] is not None and self._joined.get(i) != sessions[i]]
        if not new:
            return {}
        _, failures = self._open(new)
        requests = {}
        for i in new:
            if i not in failures:
                fresh = self.fresh and i not in self._known
                header = {"op": "join", "run": self.run, "fresh": fresh, "anew": self.anew, **self._posed}
                requests[i] = Request({**header, "states": sites[i]}, [self.members[i], *self._keys])
        replies, others = self._ask(requests)
        for i, reply in replies.items():
            self._joined[i] = sessions[i]  # type: ignore[assignment]
            self._known.add(i)
            if reply.header.get("anew") is True:
                self.tell(self.names[i], "taken as a new site, as it remembered nothing of the run")
        return {**failures, **others}

    def _ask(self, requests: Mapping[int, Request]) -> Outcome:
        if not requests:
            return {}, {}
        number = time.time_ns() // 1000  # like the engine's own numbers, see `Network`
        numbered = {i: Request({**r.header, "seq": number}, r.arrays) for i, r in requests.items()}
        return self.inner.exchange(numbered, self.patience)

    def exchange(self, requests: Mapping[int, Request], timeout: float) -> Outcome:
        failures = self.join({i: request.header["states"] for i, request in requests.items()})
        asked = {
            i: Request({**request.header, "run": self.run}, request.arrays)
            for i, request in requests.items()
            if i not in failures
        }
        replies, others = self.inner.exchange(asked, timeout)
        return replies, {**failures, **others}

    def memory(self) -> Outcome:
        """The clients' memory, from the sites that allow it."""
        everyone = list(range(len(self.names)))
        failures = self.join({i: [0] for i in everyone})
        header = {"op": "memory", "run": self.run}
        replies, others = self._ask({i: Request(header, []) for i in everyone if i not in failures})
        return replies, {**failures, **others}


def _described(reply: Request) -> tuple[tuple[np.ndarray, np.ndarray], Any, int]:
    """Sizes and form from a site's reply, and the highest message number that it has seen."""
    arrays, form = reply.arrays, wire.value(reply.header, "form", dict)
    if len(arrays) != 2 or any(a.ndim != 1 or a.dtype != np.int32 for a in arrays):
        raise wire.WireError("The sizes of the clients are not valid.")
    train, valid = arrays
    if len(train) == 0 or (train < 1).any() or (valid < 1).any() or len(valid) not in (0, len(train)):
        raise wire.WireError("The sizes of the clients are not valid.")
    parts = {"train", "valid"} if len(valid) else {"train"}
    if form.keys() != parts or not all(isinstance(entry, dict) for entry in form.values()):
        raise wire.WireError("The description of the arrays is not valid.")
    try:
        made_up(form, 1)
    except DataError as error:
        raise wire.WireError(f"The description of the arrays is not valid: {error}") from error
    return (np.array(train), np.array(valid)), form, wire.value(reply.header, "seen", int)


def _columns(reply: Request) -> dict[str, list[str]]:
    """The names of columns and classes from a site's reply."""
    found = wire.value(reply.header, "columns", dict)
    for words in found.values():
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise wire.WireError("The names of the columns are not valid.")
    return found


def made_up(form: Any, clients: int) -> FederatedData:
    """Data of a form, one sample of zeros per client, for checks and shapes; made when it is read.

    A peer sends the form and the number, and a short message may claim many large samples.
    """

    def source(name: str) -> FromFunction:
        sample = blank(form[name])
        shapes = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in sample.items()}
        one = {k: v[None] for k, v in sample.items()}
        return FromFunction(np.ones(clients, np.int32), lambda _: one, shapes)

    return FederatedData.from_source(source("train"), source("valid") if "valid" in form else None)
