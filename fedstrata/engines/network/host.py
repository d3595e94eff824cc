"""A site's requests apart from its phases: it opens runs of its own text, joins them, answers or refuses.

The server's requests, by their ``op``:

    open      a run by its number in the text; the reply says how much data of which form there is
    keys      its key for the masks of a secure run, signed; see `fedstrata.engines.network.masks`
    join      which clients these are, and where the run stands; in a secure run, with the keys of all sites
    exchange  see `fedstrata.engines.network.site`
    memory    what the clients remember, where the site allows it
    done      the experiment has ended: its states are kept until another one begins
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import json
import logging
import math
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np

from fedstrata.core.types import PyTree
from fedstrata.data.federated import DataError, FederatedData
from fedstrata.engines.identity import differences
from fedstrata.engines.network import wire
from fedstrata.engines.network.allowance import Allowance
from fedstrata.engines.network.answering import Around, Ended, Party
from fedstrata.engines.network.audit import Audit
from fedstrata.engines.network.masks import Masker
from fedstrata.engines.network.rules import START, Asks, Rules, start_of
from fedstrata.engines.network.site import EVERYTHING, Place, Site
from fedstrata.engines.network.states import Forgotten, SiteRefused, numbers_in
from fedstrata.engines.network.text import Text
from fedstrata.engines.network.wire import Arrays, Header
from fedstrata.engines.programs import key_of
from fedstrata.support.writing import write_atomically

if TYPE_CHECKING:
    from fedstrata.engines.network.kits import Identity

log = logging.getLogger("fedstrata.network")
MOST_CLIENTS, MOST_SAMPLES = 10**6, 2**31 - 1  # of a federation; samples are counted in int32
MOST_TEXTS = 8  # texts whose compiled phases are kept
FINISHED = "finished"  # a file in a run's folder, once its experiment has ended
_MOST_NAMES = wire.HEADER_LIMIT // 4  # bytes of columns' names


class Opened(Protocol):
    """One run of a site's own text, with its own samples."""

    @property
    def data(self) -> FederatedData:
        """Its samples."""

    def text(self, clients: int, server: PyTree) -> tuple[Text, Mapping[str, Any]]:
        """The posed run in a federation with this number of clients, and its identity."""

    def asks(self) -> Asks:
        """The requests that it would make to the site."""


class Host(Party):
    """A site's process.

    Args:
        terms: the terms that the server must share before a run is opened, see `fedstrata.engines.identity`.
        opens: returns a run of the text, by its number.
        folder: the folder of the clients' memory.
        share: whether the clients' memory may be fetched.
        secret: known to this site only, such as its private key. It keys the code of the samples that the
            server gets, which recognises them and reveals nothing about them.
        once: whether it ends when the server announces the end.
        audit: the site's account of the requests.
        identity: its certificate, by which other sites know it in secure runs.
        allowance: the privacy budget of its samples over all runs; None: unlimited.
        rules: the rules for runs that it takes part in.
        steady: whether it has the same samples in all runs of an experiment; it then refuses to continue with
            other samples.
        around: a context in which a request with this header is answered.
    """

    def __init__(
        self,
        terms: Mapping[str, Any],
        opens: Callable[[int], Opened],
        folder: Path,
        share: bool = False,
        once: bool = False,
        secret: bytes = b"",
        audit: Audit | None = None,
        identity: Identity | None = None,
        allowance: Allowance | None = None,
        rules: Rules = EVERYTHING,
        steady: bool = False,
        around: Around = nullcontext,
    ) -> None:
        super().__init__(audit, around)
        self.rules, self.steady = rules, steady
        self.terms, self.opens, self.folder = terms, opens, folder
        self.share, self.once, self.secret = share, once, secret
        self.identity, self.allowance = identity, allowance
        self.run: str | None = None
        self.number = -1
        self.opened: Opened | None = None
        self.site: Site | None = None
        self._programs: dict[Any, dict[Any, Any]] = {}
        self.seen = 0  # the highest number of an answered message

    @property
    def showed(self) -> str:
        """See `Party.showed`."""
        return "" if self.site is None else self.site.showed

    def resting(self) -> bool:
        """Whether the policy's hours are over."""
        return not self.rules.open_at(datetime.datetime.now().time())

    def call(self, header: Header, arrays: Arrays) -> tuple[Header, Arrays]:
        """Answer one request."""
        op = wire.value(header, "op", str)
        if self.resting():
            raise SiteRefused("This site does not answer at this time of the day, by its policy.")
        if op == "exchange":
            if self.site is None or header.get("run") != self.run:
                raise SiteRefused("The request is for a run that this site has not joined.")
            if self.audit is not None:
                self.rules.check_answers(self.audit.answered)
            reply = self.site.call(header, arrays)
            self.seen = max(self.seen, reply[0]["seq"])
            return reply
        if op == "open":
            return self._open(header, arrays)
        if op == "keys":
            return self._keys(header)
        if op == "join":
            return self._join(header, arrays)
        if op == "memory":
            return self._memory(header)
        if op == "done":
            for place in filter(Path.is_dir, self.folder.glob(f"{_experiment(self.run)}-*")):
                (place / FINISHED).touch()
            if self.once:
                raise Ended
            log.info("the server says that all is done")
            return {}, []
        raise SiteRefused(f"Unknown request {op!r}.")

    def _open(self, header: Header, arrays: Arrays) -> tuple[Header, Arrays]:
        _compare(wire.value(header, "terms", dict), self.terms)
        run, number = wire.value(header, "run", str), wire.value(header, "number", int)
        if not run.replace("-", "").isalnum() or len(run) > 80:
            raise SiteRefused("The name of the run is not valid.")
        if self.rules.starters is not None:
            self._check_starter(run, header, arrays, self.rules.starters)
        if (run, number) != (self.run, self.number) or self.opened is None:  # else, it only redialled
            self.opened, self.site = None, None
            opened = self.opens(number)
            if self.rules != EVERYTHING:
                self.rules.admit(opened.asks())
            self.run, self.number, self.opened = run, number, opened
            log.info("opened the run %s", run)
        data = self.opened.data
        if self.steady:
            self._check_data(data.fingerprint)
        train, valid = sizes_of(data)
        seen = max([self.seen, *numbers_in(self.folder / run)])
        # Keyed by the site's secret, because a server could guess samples and compare a plain digest.
        code = hmac.new(self.secret, f"{run} {data.fingerprint}".encode(), "sha256").hexdigest()
        told = {"form": form_of(data), "columns": columns_of(data), "seen": seen, "data": code}
        return told, [train, valid]

    def _check_starter(self, run: str, header: Header, arrays: Arrays, names: Collection[str]) -> None:
        """Refuse a run that none of these has signed."""
        asks = f"This site takes part in runs that {' or '.join(names)} starts (`net run … --by KIT`)"
        if not arrays:
            raise SiteRefused(f"{asks}, and nobody has signed this one.")
        try:
            name, signed = self._identity().checked(run, arrays[0].tobytes(), START, sorted(names))
        except ValueError as error:  # `kits.KitError`
            raise SiteRefused(f"{asks}. {error}") from error
        if signed != start_of(header):
            raise SiteRefused(f"{asks}, and {name} has signed another one.")
        if self.audit is not None and run != self.run:
            self.audit.note("started", run=run, by=name)

    def _check_data(self, fingerprint: str) -> None:
        """Refuse other samples than those of the experiment's earlier runs."""
        file = self.folder / f"{_experiment(self.run)}-data" / "fingerprint"
        if not file.is_file():
            write_atomically(file, fingerprint.encode())
        elif file.read_text("utf-8") != fingerprint:
            self.opened = None
            raise SiteRefused(
                "This site's samples are not those with which it took part in the experiment so far. Bring "
                "them back, or begin another run."
            )

    def _keys(self, header: Header) -> tuple[Header, Arrays]:
        if self.run is None or header.get("run") != self.run:
            raise SiteRefused("The request is for a run that this site has not opened.")
        proof = self._identity().proof(self.run, Masker(self.run, self.folder / self.run).public)
        return {}, [np.frombuffer(proof, np.uint8)]

    def _identity(self) -> Identity:
        if self.identity is None:
            raise SiteRefused("Signatures are checked with a certificate of this site, and it has none.")
        return self.identity

    def _masker(self, run: str, proofs: Arrays) -> Masker:
        """This site's part in secure sums with the others, whose keys are checked."""
        masker = Masker(run, self.folder / run)
        try:
            found = [self._identity().checked(run, proof.tobytes()) for proof in proofs]
        except ValueError as error:  # `kits.KitError`, of a package that sites without certificates lack
            raise SiteRefused(str(error)) from error
        if len({name for name, _ in found}) < len(found):
            raise SiteRefused("Two keys belong to one site: a secure sum takes one key of each site.")
        masker.meet([key for _, key in found])
        return masker

    def _join(self, header: Header, arrays: Arrays) -> tuple[Header, Arrays]:
        if self.opened is None or self.run is None or header.get("run") != self.run:
            raise SiteRefused("The request is for a run that this site has not opened.")
        clients = wire.value(header, "clients", int)
        if not arrays or arrays[0].dtype != np.int32 or arrays[0].shape != (self.opened.data.clients,):
            raise SiteRefused("The server and this site disagree on the numbers of its clients.")
        ids, total = np.array(arrays[0]), wire.value(header, "total", int)
        if not (0 < clients <= MOST_CLIENTS and 0 < total <= MOST_SAMPLES):
            raise SiteRefused("The federation has no clients or samples, or more than can be counted.")
        if not ((ids >= 0).all() and (ids < clients).all() and len(set(ids.tolist())) == len(ids)):
            raise SiteRefused("The server and this site disagree on the numbers of its clients.")
        server = blank(header.get("server"))
        text, identity = self.opened.text(clients, server)
        _compare(wire.value(header, "identity", dict), identity)
        place = Place(ids, total)
        site = self.site
        if site is None or site.place.total != place.total or not np.array_equal(site.place.clients, ids):
            masker = self._masker(self.run, arrays[1:]) if text.setup.secure else None
            # Another run has other noise: with the same noise, the difference of two answers would have none.
            secret = hmac.digest(self.secret, f"noise {self.run} {self.number}".encode(), "sha256")
            site = Site(
                text, self.opened.data, place, self.folder / self.run, self._compiled(text, ids),
                secret, masker, self.allowance, self.rules,
            )  # fmt: skip
        anew = False
        if wire.value(header, "fresh", bool):
            self._remove_finished()
            site.states.start()
        elif self.site is not site:
            anew = self._recall(site, wire.numbers(header, "states"), wire.value(header, "anew", bool))
        self.site = site
        return {"anew": anew}, []

    def _compiled(self, text: Text, clients: np.ndarray) -> dict[Any, Any]:
        """The compiled phases of runs that differ in their seed."""
        leaves, structure = jax.tree.flatten((text.method, text.state, text.memory, text.server))
        types = tuple((np.shape(leaf), jax.numpy.result_type(leaf)) for leaf in leaves)
        found = self._programs.setdefault((key_of(text.setup), structure, types, len(clients)), {})
        while len(self._programs) > MOST_TEXTS:
            del self._programs[next(iter(self._programs))]
        return found

    def _remove_finished(self) -> None:
        """Delete the clients' memory of other experiments that have ended; until now it could be fetched."""
        for place in self.folder.glob(f"*/{FINISHED}"):
            if _experiment(place.parent.name) != _experiment(self.run):
                shutil.rmtree(place.parent)

    def _recall(self, site: Site, states: list[int], anew: bool) -> bool:
        """Continue a run after a restart; return whether the site joins as a new one."""
        try:
            site.states.check(states)
        except Forgotten:
            if not anew:
                raise
            log.warning("taken as a new site: nothing was remembered")
            site.states.start(states)
            return True
        return False

    def _memory(self, header: Header) -> tuple[Header, Arrays]:
        if self.allowance is not None:
            raise SiteRefused("This site has a privacy budget, and what clients remember may lack noise.")
        if not self.share:
            raise SiteRefused("This site does not share its clients' memory (`--share` allows it).")
        if self.site is None or header.get("run") != self.run:
            raise SiteRefused("The request is for a run that this site has not joined.")
        if (newest := self.site.states.newest) is None:
            raise Forgotten
        return {}, [np.asarray(leaf) for leaf in jax.tree.leaves(self.site.states.at(newest))]


def _experiment(run: str | None) -> str:
    """The common prefix of the names of an experiment's runs."""
    return (run or "").rpartition("-")[0]


def _compare(there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    if other := differences(there, here):
        raise SiteRefused(
            f"The server (there) does not run what this site (here) runs: {'; '.join(other)}. Give both the "
            "same experiment and parameters, and the same version and configuration of JAX."
        )


Form = dict[str, Any]


def sizes_of(data: FederatedData) -> tuple[np.ndarray, np.ndarray]:
    """The clients' numbers of samples, and of validation samples (none: an empty array)."""
    none = np.zeros(0, np.int32)
    valid = none if data.valid_sizes is None else np.asarray(data.valid_sizes, np.int32)
    return np.asarray(data.sizes, np.int32), valid


def form_of(data: FederatedData) -> Form:
    """Names, dtypes and shapes of a sample's arrays, for the header of a message."""
    found: Form = {}
    for part in ("train", "valid"):
        sample = data.sample_of(part)
        if sample is None:
            continue
        if not isinstance(sample, dict) or any(isinstance(leaf, dict) for leaf in sample.values()):
            raise DataError("Samples on a network are dicts of arrays, such as {'x': …, 'y': …}.")
        found[part] = {str(k): [np.dtype(v.dtype).name, list(v.shape)] for k, v in sample.items()}
    return found


def columns_of(data: FederatedData) -> dict[str, list[str]]:
    """The names of the entries of ``x`` and of the classes of ``y``, if the samples came from a table.

    They must be the same at all sites, in the same order. If they would fill a header, their digest is sent.
    """
    found = {}
    for name, attribute in (("x", "features"), ("y", "classes")):
        words = list(getattr(data.preparation, attribute, None) or ())
        if len(plain := json.dumps(words).encode()) > _MOST_NAMES:
            words = [hashlib.sha256(plain).hexdigest()]
        if words:
            found[name] = words
    return found


def blank(form: Any) -> PyTree:
    """Arrays of zeros of a form ``{name: [dtype, shape]}``; None of None.

    Raises:
        wire.WireError: if it is not valid.
    """
    if form is None:
        return None
    arrays = {}
    try:
        for name, (dtype, shape) in form.items():
            valid = (
                type(shape) is list
                and len(shape) <= 31
                and all(type(n) is int and 0 <= n <= wire.LIMIT for n in shape)
            )
            if not valid or math.prod(shape) * wire.DTYPES[dtype].itemsize > wire.LIMIT:
                raise ValueError("shape")
            # One zero, broadcast to the whole array: whatever size a peer describes takes no memory here.
            arrays[name] = np.broadcast_to(np.zeros((), wire.DTYPES[dtype]), tuple(shape))
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # a peer sent it
        raise wire.WireError("The description of the arrays is not valid.") from error
    return arrays
