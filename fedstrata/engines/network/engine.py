"""The server's side: the text compiled here, its exchanges carried out by sites.

An exchange is an ordered callback inside the compiled round, so loops, levels and `lax` control flow work
unchanged. A message holds program, position, round, attempt, sequence number, key, and the leaves. A round is
a transaction: all of its clients complete it, or it is rolled back and repeated.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.channels.channelled import with_heard, with_secret
from fedstrata.core import counting, tree
from fedstrata.core.client import opened
from fedstrata.core.fed import Exchange, Setup, visit
from fedstrata.core.hyperparameters import POSITIVE, Count, Whole, check_fields
from fedstrata.core.method import Method
from fedstrata.core.types import PyTree
from fedstrata.data.federated import FederatedData
from fedstrata.data.storage import Outline, SizeGroup, common_size
from fedstrata.engines.engine import Advanced, Carry, Engine, Job, Unfinished, need_two_threads
from fedstrata.engines.metrics import PerClient
from fedstrata.engines.network.masks import FEWEST, Fixed, met, total
from fedstrata.engines.network.site import Place, Site
from fedstrata.engines.network.states import States
from fedstrata.engines.network.text import START_ROUND, Text, reads, shapes
from fedstrata.engines.network.timing import Slot, Timing
from fedstrata.engines.network.transport import Failure, Local, Request, Transport, strange
from fedstrata.engines.programs import key_of
from fedstrata.engines.remote import Call, Prepared, RemoteFed, handle_of, remote_text
from fedstrata.engines.rounds import cohort_of, in_a_loop, secret_of
from fedstrata.support.tracing import compiling

log = logging.getLogger("fedstrata.network")
LOST = 2.0**24  # times larger: numbers added to it in float32 are rounded away


class RoundFailed(Unfinished):
    """Some sites did not complete an exchange; ``failures`` names them and the reasons."""

    def __init__(self, where: str, failures: dict[str, Failure]) -> None:
        words = "; ".join(f"{name}: {failure.why}" for name, failure in failures.items())
        super().__init__(f"{where}: {words}")
        self.failures = failures


class TooFewSites(Unfinished):
    """Fewer sites are present than the run needs to continue."""


@jax.tree_util.register_static
@dataclass(frozen=True)
class AtSites:
    """A placeholder for a variable that stays at the sites, such as personal models."""

    where: str = "at the sites; `fedstrata net collect` fetches it where they allow it"

    def __repr__(self) -> str:
        return f"<{self.where}>"


Seconds = Annotated[float, POSITIVE]


@dataclass(frozen=True)
class Policy:
    """The server's reaction to a site that does not answer.

    Args:
        missing: ``"wait"`` for it, or ``"drop"`` it and repeat the round with the sites that are present,
            which gives the iterates of ``fs.Dropouts(trace=…)``.
        after: the seconds to wait for an absent site before it is dropped.
        min_sites: the fewest sites of a round.
        retries: the number of repetitions of a round if a site answers with an error or an invalid reply.
        first_timeout: seconds for a site's first exchange of a kind, for which it compiles.
        timeout: the fewest seconds for any other; ten times a site's usual time (the 0.9 quantile of its last
            answers), if that is more.
    """

    missing: Literal["wait", "drop"] = "wait"
    after: Seconds = 30.0
    min_sites: Count = 1
    retries: Annotated[int, Whole(0)] = 3
    first_timeout: Seconds = 600.0
    timeout: Seconds = 30.0

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass
class Remote:
    """Remote sites that have joined a run.

    Attributes:
        transport: the transport to the sites.
        members: the numbers of each site's clients.
        sizes: the sizes of all clients.
        form: one client with a single made-up sample.
        fresh: called with whether the run begins, instead of continuing from a checkpoint.
        seen: the highest message number that a site has seen.
        data: each site's code of its samples: other samples have another code.
    """

    transport: Transport
    members: Sequence[np.ndarray]
    sizes: np.ndarray
    form: FederatedData
    fresh: Callable[[bool], None] = lambda fresh: None
    seen: int = 0
    data: Sequence[str] = ()


class Network(Engine):
    """The network engine: phases run at sites, the method's text at the server.

    Args:
        remote: the remote sites; None makes sites in this process.
        clients_per_site: the number of clients of a site in this process.
        policy: the reaction to a site that does not answer.
        programs: compiled programs, shared by runs that differ in their seed.

    Attributes:
        events: the network's events, in order: dicts with round, site and what.
        timing: the sites' response times.
    """

    has_data = False
    encodes = True

    def __init__(
        self, remote: Remote | None = None, *, clients_per_site: int = 1, policy: Policy | None = None,
        programs: dict[Any, Any] | None = None,
    ) -> None:  # fmt: skip
        self.remote, self.clients_per_site = remote, clients_per_site
        self.elsewhere = remote is not None
        self.policy, self.stopping = policy or Policy(), lambda: False
        self.events: list[dict[str, Any]] = []
        self.timing = Timing(self.policy.first_timeout, self.policy.timeout)
        self.failed: Counter[str] = Counter()
        self.attempts = 0
        # Message numbers also grow over restarts of the server. If its clock was set back meanwhile, they
        # start from the numbers that the sites have seen (`Remote.seen`).
        self._clock = time.time_ns() // 1000
        self._round = self._first = START_ROUND
        # Each site's state at the beginning of a round, by rounds; its state of the checkpoint; and its
        # current state, in the middle of a round. No other states are needed again.
        self._begins: dict[int, list[int]] = {}
        self._saved: list[int] = []
        self._now: list[int] = []
        self._turn = 0  # the number of exchanges in this round so far
        self._counts: Counter[str] = Counter()
        self._finite = True
        self.failure: BaseException | None = None
        self._programs: dict[Any, Any] = {} if programs is None else programs
        self._handle = handle_of(self)
        self._large: set[tuple[int, str, int]] = (
            set()
        )  # uploads that were reported as far larger than the others'
        self._absent: set[int] = set()  # dropped
        self._left_out: set[int] = set()  # of some round since the last evaluation
        self._out: set[int] = set()  # of these, for invalid answers: permanently
        self._silent: dict[int, Any] = {}  # of late sites, what was heard before the unanswered message
        self._sites: list[Site] | None = None

    # ---- the interface of an engine

    def place(self, data: FederatedData) -> Outline:
        """Sizes, and the server's own samples. All other samples stay at the sites."""
        need_two_threads("The exchanges of a network")
        self._float = jnp.result_type(float)  # a callback's thread has its own settings
        form = data.sample_of("server")
        server = jax.tree.map(lambda leaf, one: jnp.asarray(leaf, one.dtype), opened(data.server), form)
        self._server = shapes(server)
        if self.remote is None:
            self._data, self.sizes = data, np.asarray(data.sizes)
            self.form = single(data).placed()
            everyone = np.arange(data.clients, dtype=np.int32)
            self.members: Sequence[np.ndarray] = [
                everyone[i : i + self.clients_per_site] for i in range(0, data.clients, self.clients_per_site)
            ]
        else:
            self.sizes, self.members = self.remote.sizes, self.remote.members
            self.form = self.remote.form.placed()
            self.transport = self.remote.transport
            self._clock = max(self._clock, self.remote.seen)
        self._site_of = np.zeros(len(self.sizes), np.int32)
        for site, clients in enumerate(self.members):
            self._site_of[clients] = site
        self._sites = None
        self._begins, self._saved = {}, []
        return Outline(jnp.asarray(self.sizes), server, equal=common_size(self.sizes))

    def carried(self, method: Any, carry: Carry) -> Carry:
        state, memory = with_heard(method, carry)
        noisy = any(channel.noise for channel in getattr(method, "channels", {}).values())
        return Carry(with_secret(state) if self.elsewhere and noisy else state, memory)

    def place_carry(self, carry: Carry) -> Carry:
        """The state, and a placeholder of one client's memory for the programs: clients keep the memory.

        If the sites are in this process, the carry holds a copy of their memory at its round.
        """
        if self.remote is not None:
            self.remote.fresh(True)  # unless `recall` follows: the run then continues from the sites' states
        blank = jax.tree.map(lambda leaf: jnp.zeros((1, *leaf.shape[1:]), leaf.dtype), carry.memory)
        self._placeholder = blank
        return Carry(jax.tree.map(jnp.asarray, carry.state), carry.memory if self.remote is None else blank)

    def fetch(self, carry: Carry, clients: int) -> Carry:
        """The state; and the memory, if the sites are in this process. Of remote sites it is not a number."""
        state = jax.tree.map(np.asarray, carry.state)
        if self.remote is not None:
            return Carry(state, jax.tree.map(partial(_unknown, clients), carry.memory))
        return Carry(state, jax.tree.map(np.asarray, carry.memory))

    def output(self, method: Method, carry: Carry, host: Carry) -> tuple[PyTree, PyTree]:
        """See `Engine.output`; a variable that reads the memory of remote sites stays there."""
        if self.remote is None:
            return super().output(method, carry, host)
        carry = jax.tree.map(jnp.asarray, host)
        parts = []
        for j in (0, 1):
            traced = jax.jit(lambda state, memory, j=j: method.output(state, memory)[j]).trace(*carry)
            parts.append(AtSites() if reads(traced, tuple(carry), 1) else method.output(*carry)[j])
        return parts[0], parts[1]

    def heed(self, stopping: Callable[[], bool]) -> None:
        self.stopping = stopping

    def noted(self, round_number: int) -> dict[str, Any]:
        """See `Engine.noted`: the sites, their states, and the codes of their samples."""
        if self.remote is None:  # a checkpoint has their memory
            return {}
        states = self._begins.get(round_number, self._none)
        return {"sites": list(self.transport.names), "states": states, "data": list(self.remote.data)}

    def recall(self, round_number: int, noted: dict[str, Any]) -> None:
        """See `Engine.recall`: the sites must be the same, with the same samples."""
        if self.remote is None:
            return
        if not noted:
            raise ValueError("The checkpoint does not belong to a run on remote sites: give another folder.")
        if noted["sites"] != list(self.transport.names):
            raise ValueError(
                f"The run has the sites {', '.join(noted['sites'])}, but the federation now has "
                f"{', '.join(self.transport.names)}. Clients are numbered in their order: bring it back."
            )
        pairs = zip(noted["sites"], noted["data"], self.remote.data, strict=True)
        if other := [name for name, before, now in pairs if before != now]:
            why = Failure("error", "it came back with other data")
            raise RoundFailed(f"round {round_number}", dict.fromkeys(other, why))
        self._begins, self._saved = {round_number: noted["states"]}, noted["states"]
        self.remote.fresh(False)

    def saved(self, round_number: int) -> None:
        """See `Engine.saved`: the sites keep the states that they need to return to it."""
        self._saved = self._begins.get(round_number, [])

    @property
    def _none(self) -> list[int]:
        return [0] * len(self.members)

    def release(self) -> None:
        """The run is over: compiled programs are dropped; the engine's reports of it stay."""
        self._programs = {}
        self._sites = None

    def begin(self, job: Job, carry: Carry) -> tuple[Carry, list[Counter[str]]]:
        self._join(job, carry, START_ROUND)
        self._counts = Counter()
        return self._transaction("start", carry, START_ROUND), [+self._counts]

    def advance(
        self, job: Job, carry: Carry, first: int, rounds: np.ndarray, active: np.ndarray | None = None
    ) -> Advanced:
        self._join(job, carry, first)

        def one(carry: Carry, r: int, stop: int) -> tuple[Carry, int, Counter[str], int]:
            self._counts = Counter()
            carry = self._transaction("round", carry, r)
            return carry, r + self._finite, +self._counts, -1 if self._finite else r

        carry, lane = in_a_loop(carry, first, rounds, one, self._measured)
        return Advanced(carry, [lane])

    def _measured(self, carry: Carry, r: int) -> dict[str, Any]:
        values = self._transaction("measure", carry, r)
        if self.policy.missing == "wait":
            return values
        gone, self._left_out = self._left_out | self._absent, set()
        there = {f"present/{name}": float(i not in gone) for i, name in enumerate(self.transport.names)}
        return {**values, **there}

    # ---- a program

    def _join(self, job: Job, carry: Carry, first: int) -> None:
        """Before the first exchange: refuse impossible runs, and make the sites of this process."""
        self._job, (setup, method, *_) = job, job
        for name, metric in setup.metrics:
            if metric.each_client:
                self._check_per_client(name, metric, setup, method)
            elif metric.needs_data:
                raise ValueError(
                    f"The metric {name!r} takes (x, y, data), but the server of a network has no data: "
                    "samples stay at the sites. Give a function of (x, y) or of the state; what is a "
                    "mean over the clients' samples is measured by the problem's own metrics."
                )
        if self.policy.missing == "drop" and method.full_participation is not None:
            raise ValueError(
                f"{type(method).__name__} cannot drop a site ({method.full_participation}): "
                "use the policy 'wait'."
            )
        if setup.secure:
            self._check_secure()
        channels = getattr(method, "channels", {}).values()
        if self.policy.missing == "drop" and any(one.noise or one.examples for one in channels):
            raise ValueError(
                "Noise needs the policy 'wait': a round that is done again without a site shows the others' "
                "uploads twice, and ε counts them once."
            )
        self._first = first  # a chunk may be repeated from here
        if first == START_ROUND or not self._begins:
            self._begins = {first: self._none}
        self._begins = {r: states for r, states in self._begins.items() if r >= first}
        if self.remote is not None or self._sites is not None:
            return
        text = Text.of(setup, method, carry, self._server)
        samples = int(self.sizes.sum())
        self._sites, programs = [], dict[Any, Any]()
        maskers = met("run", len(self.members)) if setup.secure else [None] * len(self.members)
        for clients, masker in zip(self.members, maskers, strict=True):
            place = Place(clients, samples)
            site = Site(text, part(self._data, clients), place, programs=programs, masker=masker)
            site.states = States(tree.row(jax.tree.map(np.asarray, carry.memory), clients))
            self._sites.append(site)
        self.transport = Local(self._sites)

    def _check_secure(self) -> None:
        if self.policy.missing == "drop":
            raise ValueError(
                "secure=True needs the policy 'wait': the difference between the sums of a round with "
                "a site and without it is its upload."
            )
        if len(self.members) < FEWEST:
            raise ValueError(
                f"secure=True needs at least {FEWEST} sites, and there are {len(self.members)}: of two, each "
                "learns the other's upload from the sum."
            )

    def _check_per_client(self, name: str, metric: PerClient, setup: Setup, method: Method) -> None:
        """Refuse a metric of single clients if it would tell the server what an average hides."""
        start, why = f"The metric {name!r} is one for each client", None
        if setup.secure:
            why = "secure=True hides all but sums: the problem's own metrics are means"
        elif method.reveals_on(setup.problem) != "replies":
            why = (
                f"{type(method).__name__} asks for averages alone, which is fit for secure aggregation, and "
                "each client's own value would undo that. The problem's own metrics are means; or measure "
                "with another engine"
            )
        elif metric.part == "test":
            why = "a pooled test set is the server's, not the sites': make it a metric of (x, y, data)"
        elif self.policy.missing == "drop":
            why = "it needs every site, while the policy 'drop' continues without some: use 'wait'"
        if why is not None:
            raise ValueError(f"{start}, but over a network {why}.")

    def _transaction(self, program: str, carry: Carry, r: int) -> Any:
        """A program of the text, repeated until all of its clients have completed it."""
        errors, self._round, self.timing.stretch = 0, r, 1  # the time-out grows within one round only
        self.transport.heed(self.stopping)
        self._readmit()
        while True:
            self.attempts += 1
            # Each attempt starts from the round's initial states; states of a failed attempt are forgotten.
            before, self._now, self._turn = self._counts.copy(), list(self._begins[r]), 0
            try:
                found = self._run(program, carry, r)
                if program != "measure":
                    self._begins[r + 1] = self._now
                    self._left_out |= self._absent
                return found
            except RoundFailed as failed:
                self._counts = before
                errors += any(f.kind in ("error", "wrong") for f in failed.failures.values())
                if any(f.kind == "late" for f in failed.failures.values()):
                    self.timing.stretch *= 2  # it may be slower now than ever before
                for name, failure in failed.failures.items():
                    self.failed[name] += 1
                    if failure.kind == "away":
                        self.timing.forget(self.transport.names.index(name))
                    self.note(name, f"{failure.kind}: {failure.why}")
                self._recover(failed, errors > self.policy.retries)

    def _recover(self, failed: RoundFailed, hopeless: bool) -> None:
        """Wait for the missing sites, or drop them."""
        if self.stopping():
            raise failed
        missing = {self.transport.names.index(name): why.kind for name, why in failed.failures.items()}
        # A dropped site that is asked nevertheless is needed, because the text asks everyone.
        droppable = self.policy.missing == "drop" and not missing.keys() & self._absent
        if hopeless and not droppable:
            raise failed
        if not droppable:
            if not self.transport.rejoins and len(self.transport.wait(list(missing), 0.0)) < len(missing):
                raise failed
            self._wait(list(missing))
            return
        there = self.transport.wait(list(missing), self.policy.after)
        gone = {i for i, kind in missing.items() if i not in there or kind == "late" or hopeless}
        for i in sorted(gone):
            self._absent.add(i)
            if missing[i] != "late":  # a silent site has compiled: when it is asked again, it does not get
                self.timing.forget(i)  # the long time-out of a site that may have been restarted
            if hopeless:
                self._out.add(i)
            self.note(self.transport.names[i], "dropped")
        left = len(self.transport.names) - len(self._absent)
        if left < self.policy.min_sites:
            raise TooFewSites(
                f"round {self._round}: {left} sites are left, and the run may not continue with fewer than "
                f"{self.policy.min_sites}. Bring them back and resume. Last: {failed}"
            ) from failed

    def _wait(self, missing: list[int]) -> None:
        began = time.monotonic()
        told = 0.0
        while away := set(missing) - set(self.transport.wait(missing, 1.0)):
            if self.stopping():
                raise Unfinished("The run was asked to end while it waited for a site.")
            if (waited := time.monotonic() - began) > told + 5:
                told, names = waited, ", ".join(self.transport.names[i] for i in sorted(away))
                log.warning("waiting for %s since %.0f s", names, waited)

    def _readmit(self) -> None:
        """Readmit dropped sites that are back, except those that were dropped for wrong answers.

        A late site is back when it has answered after all, or dialled anew: no round waits for it until then.
        """
        hoped_for = sorted(i for i in self._absent - self._out if self._silent.get(i) != self._heard(i))
        for i in self.transport.wait(hoped_for, 0.0) if hoped_for else ():
            self._absent.discard(i)
            self.note(self.transport.names[i], "readmitted")

    def _heard(self, i: int) -> tuple[int | None, int]:
        """The connection of a site and the bytes received from it: both only grow."""
        return self.transport.session(i), self.transport.received[i]

    def _run(self, program: str, carry: Carry, r: int) -> Any:
        (setup, method, seed, data), cohort = self._job, None
        if program == "round" and self._absent:
            cohort = self._present(r, secret_of(carry.state))
            setup = replace(setup, participants=len(cohort), drawn=setup.participants)
        self._participants = setup.participants
        number = np.int32(max(r, 0))
        arguments = (
            method,
            carry.state,
            np.uint32(seed),
            data,
            number,
            cohort,
            self._placeholder,
            self._handle,
        )
        compiled = self._compiled(program, setup, arguments)
        self.failure = None
        (value, good), tally = jax.block_until_ready(compiled(*arguments))
        if self.failure is not None:
            raise self.failure
        self._finite = bool(good)
        self._counts.update(tally.total())
        if program == "measure":
            return value
        if self._sites is None:  # remote sites: the placeholder of the memory stays
            return Carry(value, carry.memory)
        memories = [site.states.at(now) for site, now in zip(self._sites, self._now, strict=True)]
        return Carry(value, jax.tree.map(lambda *rows: np.concatenate(rows), *memories))

    def _present(self, r: int, secret: Any) -> np.ndarray:
        """This round's clients whose sites are present."""
        setup, _, seed, data = self._job
        cohort = np.arange(setup.clients)
        if setup.participants < setup.clients:
            name = ("cohort", key_of(setup))
            if name not in self._programs:
                drawn = jax.jit(lambda seed, *now: cohort_of(setup, jax.random.key(seed), *now))
                self._programs[name] = drawn
            cohort = np.asarray(self._programs[name](np.uint32(seed), data, np.int32(r), secret))
        cohort = cohort[~np.isin(self._site_of[cohort], list(self._absent))].astype(np.int32)
        if not len(cohort):
            raise TooFewSites(f"round {r}: none of this round's clients is there. Resume when they are back.")
        return cohort

    def _compiled(self, program: str, setup: Setup, arguments: tuple[Any, ...]) -> Any:
        """The executable; it must not read the placeholder of the memory."""
        leaves, structure = jax.tree.flatten(arguments)
        samples, form = jax.tree.flatten(self.form)
        types = tuple(jax.typeof(leaf) for leaf in (*leaves, *samples))
        key = (program, key_of(setup), structure, form, types)
        if key in self._programs:
            return self._programs[key]

        def text(
            method: Any, state: PyTree, seed: Any, data: Any, r: Any, cohort: Any, memory: PyTree, handle: Any
        ) -> Any:
            carry = Carry(state, memory)
            return remote_text(self, program, setup, method, carry, seed, data, handle, r, cohort)

        traced = jax.jit(text).trace(*arguments)
        if reads(traced, arguments, 6):  # `memory` is the seventh
            what = "A metric" if program == "measure" else "The method's text"
            raise ValueError(
                f"{what} reads what the clients remember (their personal models), which stays at the sites. "
                "Measure it as a mean over clients, by the problem's own metrics."
            )
        with compiling():
            compiled = traced.lower().compile()
        self._programs[key] = compiled
        return compiled

    # ---- an exchange, on the host, in the middle of a program

    def prepare(self, fed: RemoteFed, exchange: Exchange) -> Prepared:
        """See `Prepares.prepare`: the shape of an upload, from one client with a made-up sample."""

        def one(samples: int, memory: PyTree) -> PyTree:
            client = self.form.client(0, tree.row(memory, 0), SizeGroup(1, samples, samples))
            return visit(fed.setup, exchange, client)[0].upload

        # An upload whose shape follows the client's samples differs between one of them and two.
        shape = jax.eval_shape(partial(one, 1), fed.memory)
        if exchange.stacked and str(shape) != str(jax.eval_shape(partial(one, 2), fed.memory)):
            raise ValueError(
                f"{exchange.name!r} sends a number for every sample of a client, and the server of "
                "a network does not know how many there are: give the method a batch_size."
            )
        return Prepared(shape)

    def answer(
        self, call: Call, of: Any, weights: Any, key: np.ndarray, message: list[np.ndarray], *values: Any
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Ask the sites, which count their own numbers."""
        of = np.arange(len(self.sizes)) if of is None else of
        if weights is None:
            weights = np.full(len(of), 1 / len(of), self._float)
        return self._exchange(call, key, of, weights, message), np.zeros(0, np.int32)

    def _exchange(
        self, call: Call, key: np.ndarray, of: np.ndarray, weights: np.ndarray, leaves: list[np.ndarray]
    ) -> list[np.ndarray]:
        number = self._tick()
        header = {
            "op": "exchange", "seq": number,
            "what": [call.program, call.k, call.phase, self._participants],
            "round": self._round,
        }  # fmt: skip
        sites = self._site_of[of]
        # A dropped site cannot answer an evaluation of everyone; a round's cohort is chosen without it.
        if call.evaluation and not call.stacked and self._absent:  # the mean of the sites that are present
            there = ~np.isin(sites, list(self._absent))
            sites, of, weights = sites[there], of[there], weights[there] / weights[there].sum()
        rows = {int(i): np.flatnonzero(sites == i) for i in np.unique(sites)}
        shares = self._shares(rows, weights) if self._job[0].secure else None
        if shares is not None:
            header, leaves = {**header, "turn": self._turn}, [shares, *leaves]
        method: Any = self._job[1]
        clip, noise = method.bound(call.place) if shares is not None else (None, None)
        fixed = None if shares is None else Fixed(clip, noise, shares)
        self._turn += 1
        requests = {
            i: Request(
                {**header, "states": self._states(i)}, [of[at].astype(np.int32), weights[at], key, *leaves]
            )
            for i, at in rows.items()
        }
        slots, heard = self._slots(call, rows), {i: self._heard(i) for i in rows}
        replies, failures = self.transport.exchange(requests, self.timing.deadline(slots))
        self._silent |= {i: heard[i] for i, failure in failures.items() if failure.kind == "late"}
        for i, reply in replies.items():
            if why := _wrong(_arrays_of(call, len(rows[i]), fixed), number, self._now[i], reply):
                failures[i] = Failure("wrong", why)
        if fixed is None:
            failures |= self._judged(call, {i: replies[i] for i in replies.keys() - failures.keys()})
        if failures:
            where = f"round {self._round}, {call.program} {call.k} ({call.phase})"
            raise RoundFailed(where, {self.transport.names[i]: why for i, why in failures.items()})
        for i, reply in replies.items():
            self._counts.update(reply.header["counts"])
            self._now[i] = reply.header["state"]
        slow = self.timing.note(slots, [self.transport.took[i] for i in rows])
        if slow is not None:
            last, seconds = self.timing.last[slow], self.timing.waited[slow] / self.timing.last[slow]
            times = f"{last} of {self.timing.timed} exchanges, by {1000 * seconds:.0f} ms"
            self.note(self.transport.names[slow], f"was the last in {times}")
        if fixed is None:
            return _together(call, rows, replies)
        vectors, counts = zip(*(reply.arrays for reply in replies.values()), strict=True)
        counted = total(counts).tolist()
        self._counts.update({name: n for name, n in zip(counting.ORACLES, counted, strict=True) if n})
        ends = np.cumsum([math.prod(u.shape) for u in call.uploads])[:-1]
        parts = np.split(fixed.decode(total(vectors)), ends)
        return [p.reshape(u.shape).astype(u.dtype) for p, u in zip(parts, call.uploads, strict=True)]

    def _shares(self, rows: dict[int, np.ndarray], weights: np.ndarray) -> np.ndarray:
        """The weight of each site's clients in a secure sum; −1 if it is not asked."""
        if len(rows) < FEWEST:
            raise ValueError(
                f"round {self._round}: secure=True needs clients of at least {FEWEST} sites in a sum, and "
                f"here they are of {len(rows)}. Let more clients take part."
            )
        shares = np.full(len(self.members), -1.0)
        for i, at in rows.items():
            shares[i] = weights[at].sum(dtype=np.float64)
        return shares

    def _judged(self, call: Call, replies: dict[int, Request]) -> dict[int, Failure]:
        """The sites whose upload is not finite although others' are; if none is finite, the method diverges.

        Finite numbers have no known limit. An upload so large that the others are lost in float32, so that
        the mean is one site's, is reported once and is not a failure. A metric of each client may be NaN.
        """
        what, names = "evaluation" if call.evaluation else "upload", self.transport.names
        largest = {i: [_largest(u) for u in reply.arrays] for i, reply in sorted(replies.items())}
        strange = [i for i, of in largest.items() if not np.isfinite(of).all()]
        if strange and len(strange) < len(largest):
            if not (call.evaluation and call.stacked):
                return {i: Failure("wrong", f"its {what} is not finite") for i in strange}
            return {}
        for sizes in zip(*largest.values(), strict=True):
            second, first = sorted([0.0, 0.0, *sizes])[-2:]
            i = list(largest)[int(np.argmax(sizes))]
            if first > LOST * second > 0 and (place := (i, call.program, call.k)) not in self._large:
                self._large.add(place)
                times = f"{first / second:.0e} times any other's"
                self.note(names[i], f"its {what} ({call.phase}) is {times}: it determines the mean")
        return {}

    def _states(self, i: int) -> list[int]:
        """The state of a site that a request builds on, and the states that this server may return to."""
        kept = [self._begins[self._round], self._begins[self._first], self._saved]
        return list(dict.fromkeys([self._now[i], *(states[i] for states in kept if states)]))

    def _slots(self, call: Call, rows: dict[int, np.ndarray]) -> list[Slot]:
        # All sites compile again in a round with another number of clients; a site also does if more of its
        # own clients are asked than before, because `Site._prepare` pads their number.
        return [
            Slot(i, call.program, call.k, self._participants, (len(at) - 1).bit_length())
            for i, at in rows.items()
        ]

    def _tick(self) -> int:
        # Microseconds, so that a restarted server, without its counter, starts above all former numbers.
        self._clock = max(self._clock + 1, time.time_ns() // 1000)
        return self._clock

    def note(self, site: str, what: str) -> None:
        """Record an event at a site, for the log and the report."""
        facts = {"round": self._round, "site": site}
        log.warning("round %d: %s: %s", self._round, site, what, extra=facts)
        self.events.append({"round": self._round, "site": site, "what": what})


def single(data: FederatedData) -> FederatedData:
    """One client with one made-up sample of the same form, for shapes."""

    def blank(part: str) -> PyTree:
        return jax.tree.map(lambda leaf: np.zeros((1, *leaf.shape), leaf.dtype), data.sample_of(part))

    return FederatedData.from_clients(
        [blank("train")], valid=None if data.valid is None else [blank("valid")]
    )


def part(data: FederatedData, clients: np.ndarray) -> FederatedData:
    """The samples of some clients."""
    return replace(data.load(clients), test=None, server=None)


def _unknown(clients: int, leaf: Any) -> np.ndarray:
    """A placeholder for remote memory, from which no engine can continue unnoticed."""
    value = np.nan if np.issubdtype(leaf.dtype, np.inexact) else np.iinfo(leaf.dtype).max
    return np.full((clients, *leaf.shape[1:]), value, leaf.dtype)


def _largest(array: np.ndarray) -> float:
    """The largest magnitude in an array of floats; NaN or infinity, if it has one."""
    if not array.size or not jnp.issubdtype(array.dtype, jnp.inexact):
        return 0.0
    array = np.abs(array) if array.dtype.kind == "c" else array
    return float(max(array.max(), -array.min(), key=lambda v: (np.isnan(v), v)))


Wanted = list[tuple[tuple[int, ...], np.dtype]]


def _arrays_of(call: Call, number: int, fixed: Fixed | None) -> Wanted:
    """Shapes and dtypes of the upload of a site with some number of clients."""
    if fixed is not None:
        size = sum(math.prod(u.shape) for u in call.uploads)
        return [((size,), fixed.dtype), ((len(counting.ORACLES),), np.dtype(np.uint64))]
    lead = (number,) if call.stacked else ()
    return [((*lead, *u.shape[len(lead) :]), np.dtype(u.dtype)) for u in call.uploads]


def _wrong(wanted: Wanted, seq: int, state: int, reply: Request) -> str | None:
    """Why a reply cannot be used."""
    found = [(u.shape, u.dtype) for u in reply.arrays]
    if found != wanted:
        return f"it sent {found}, where the text has {wanted}"
    return strange(reply, seq, state)


def _together(call: Call, rows: dict[int, np.ndarray], replies: dict[int, Request]) -> list[np.ndarray]:
    """The replies stacked in the clients' order, or the sum of the sites' weighted sums."""
    found = []
    for j, upload in enumerate(call.uploads):
        value = np.zeros(upload.shape, upload.dtype)
        for i in sorted(rows):  # in a fixed order, so that sums are rounded in the same way
            if call.stacked:
                value[rows[i]] = replies[i].arrays[j]
            else:
                value += replies[i].arrays[j]
        found.append(value)
    return found
