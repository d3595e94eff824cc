"""The verbs: all that passes between a method's text and its clients.

    fed.average(phase, key, *message)   each client runs phase, the server gets the mean of the uploads
    fed.gather (phase, key, *message)   the same, the server gets every upload
    fed.sample (key, count)             who takes part
    fed.repeat (times, body, carry)     a loop with communication inside

A method is written against `Fed`; an engine makes one for every round. An engine's own `Fed` says in one
function, `Fed.exchange`, how an exchange is carried out; the verbs, the weights and the book-keeping are
here.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp

from fedstrata.core import counting, tree
from fedstrata.core.client import Client, Samples
from fedstrata.core.cohorts import by_weight, threshold
from fedstrata.core.term import Term
from fedstrata.core.types import Array, Function, Integer, Key, Phase, PyTree, Real, Weights
from fedstrata.support.precision import Precision, computing_in
from fedstrata.support.shown import shapes
from fedstrata.support.tracing import transformation

if TYPE_CHECKING:
    from fedstrata.core.problem import Problem

WHOLE = 2.0**30  # what weights that sum to one are multiplied by, where whole ones are needed


class Remember(NamedTuple):
    """The reply of a phase whose client keeps something for its next call."""

    upload: PyTree
    memory: PyTree


class Population(Protocol):
    """The part of the data that a round sees: the clients' sizes, and the samples that are not theirs.

    Attributes:
        equal: the clients' common size, or None if sizes differ.
        server, test: the server's own samples and the pooled test samples, or None.
        every_size: the number of training samples of each client.
        all_samples: the total number of training samples.
    """

    @property
    def equal(self) -> int | None: ...  # noqa: D102 (here and below: see the class)
    @property
    def server(self) -> PyTree: ...  # noqa: D102
    @property
    def test(self) -> PyTree: ...  # noqa: D102
    @property
    def every_size(self) -> Array: ...  # noqa: D102
    @property
    def all_samples(self) -> Array: ...  # noqa: D102

    def sizes_of(self, of: Array | None) -> Array:
        """The numbers of training samples of some clients (None: all)."""

    def seen(self) -> Self:
        """A copy whose server and test samples are converted for functions, see `opened`."""


@dataclass(frozen=True)
class Setup:
    """The fixed part of a run: the problem, participation, weights and metrics.

    ``stride`` is set by engines: the number of rounds that run without a look at the host. ``drawn`` is the
    number of clients drawn for a round, if some of them are missing. ``rate`` is the probability with which
    each client takes part independently; ``participants`` is then the room reserved for them. ``secure``
    hides from the server all but sums, where clients are elsewhere; ``current``: what functions refer to.
    """

    problem: Problem
    clients: int
    participants: int
    weights: Weights = "uniform"
    metrics: tuple[tuple[str, Any], ...] = ()
    measure_problem: bool = True
    stride: int = 1
    drawn: int | None = None
    precision: Precision = "float32"
    rate: float | None = None
    secure: bool = False
    current: str = ""


def by_size(setup: Setup, data: Population) -> bool:
    """Whether clients are drawn and weighted by their sizes, see `fedstrata.core.cohorts`."""
    return setup.weights == "size" and data.equal is None


class Exchange(NamedTuple):
    """One exchange, as an engine gets it.

    Attributes:
        phase: what each client runs, ``phase(problem, client, key, *message) -> upload``.
        key: folded with the client's index, so that a client draws the same in every engine.
        message: what each client is sent.
        of: the clients' indices, ascending; None is everyone, in order, which needs no look-up.
        weights: the uploads' weights, which sum to one; None if all are equal.
        stacked: whether the server gets every upload, or their mean.
        around: a point that both sides know, like the upload, to which a channel may send the difference:
            arrays of the message, or constants; or None.
        evaluation, place: whether it measures, in place of being a step; by which a channel knows it, or "".
    """

    phase: Phase
    key: Key
    message: tuple[PyTree, ...]
    of: Array | None
    weights: Array | None
    stacked: bool
    around: PyTree = None
    evaluation: bool = False
    place: str = ""

    @property
    def name(self) -> str:
        """The phase's name, for messages and for a check that server and site have the same text."""
        inner = self.phase.func if isinstance(self.phase, partial) else self.phase
        return str(getattr(inner, "__name__", type(inner).__name__))


class Channel(Protocol):
    """What happens to uploads on their way, see `fedstrata.channels`."""

    def exchanged(self, fed: Fed, exchange: Exchange) -> PyTree:
        """Carry an exchange out and book it: the mean or the stack of what arrives."""

    def repeat(
        self, loop: Callable[..., PyTree], times: Integer, body: counting.Body, carry: PyTree, until: Any
    ) -> PyTree:
        """``loop(times, body, carry, until)``, with what the channel itself carries from turn to turn."""


class Fed(abc.ABC):
    """The federation as a round sees it. Each round gets a new one, which threads the clients' memory.

    Attributes:
        memory: what the clients remember; every exchange replaces it, and `repeat` carries it through its
            loop.
        gathered: whether the method has asked for single replies.
        channel: what happens to uploads on their way; None is nothing.
        present: a mask of the clients that answer in this round; None: all.
        drawn: a mask of the clients that an independent draw took; the rest of the cohort is padding.
        expected: the number of clients that a mean is divided by; None: those that answer.
        remote: whether clients see only those values of this program that they are sent.
    """

    remote: ClassVar[bool] = False
    encodes: bool = False  # whether uploads travel, so that channels encode them

    def __init__(
        self, setup: Setup, data: Population, memory: PyTree, chosen: Array | None, round_number: Integer = 0
    ) -> None:
        self.setup, self.data, self.memory, self.round_number = setup, data, memory, round_number
        self.gathered = False
        self.channel: Channel | None = None
        self.present: Array | None = None
        self.drawn: Array | None = None
        self.expected: float | None = None
        self._chosen: Array | None = None  # this round's clients; None is everyone
        self._weighted: list[tuple[Array, Array]] = []  # who was drawn by size, and what they count for
        self._everyone: list[Array] = []  # draws of all clients: these very arrays need no look-up
        self._level = "main"
        self._inside = transformation()  # of JAX, where the verbs of this turn are traced
        if chosen is not None:
            self.take(chosen)

    @abc.abstractmethod
    def exchange(self, exchange: Exchange) -> tuple[PyTree, PyTree]:
        """Carry it out: the mean or the stack of the uploads, and the shape of one; replaces ``memory``."""

    def take(self, chosen: Array) -> None:
        """Set this round's clients."""
        self._chosen = chosen
        if by_size(self.setup, self.data):
            theta = threshold(self.data.every_size, self.setup.drawn or self.setup.participants)
            self._weighted.append((chosen, theta.counts(self.data.sizes_of(chosen))))

    @property
    def clients(self) -> int:
        """The number m of all clients."""
        return self.setup.clients

    @property
    def participants(self) -> int:
        """How many clients take part in this round (static)."""
        return self.clients if self._chosen is None else self.setup.participants

    @property
    def everyone(self) -> Array:
        """All clients' indices, for ``of=`` where participation does not apply."""
        return jnp.arange(self.clients)

    @property
    def cohort(self) -> Array:
        """This round's clients, ascending: the order in which `gather` stacks."""
        return self.everyone if self._chosen is None else self._chosen

    @property
    def cohort_weights(self) -> Array:
        """The weights of this round's clients in an average; they sum to one."""
        return self.weights_of(self._chosen)

    @property
    def cohort_sizes(self) -> Array | None:
        """Their sizes, before any correction for the draw; None if all weights are equal."""
        return None if self.setup.weights == "uniform" else self.data.sizes_of(self._chosen)

    @property
    def cohort_share(self) -> Real:
        """This round's share of all clients' weight: the weight of its mean in a mean over everyone."""
        here, sizes = self.answering(self._chosen), self.cohort_sizes
        if here is not None and self.expected is not None:
            return self.expected / self.clients
        if sizes is not None and not (here is None and self._chosen is None):
            return jnp.sum(sizes, where=here) / self.data.all_samples
        return (self.participants if here is None else here.sum()) / self.clients

    @property
    def server(self) -> Samples | None:
        """The server's own samples, or None."""
        held = self.data.server
        return None if held is None else Samples(held, jax.tree.leaves(held)[0].shape[0])

    def answering(self, of: Array | None) -> Array | None:
        """A mask of which of these clients (None: everyone) answer; None: all."""
        here = self.present
        if of is not None:
            here = here if here is None else here[of]
            if self.drawn is not None:
                here = self.drawn[of] if here is None else here & self.drawn[of]
        return here

    def weights_of(self, of: Array | None, given: Array | None = None) -> Array:
        """The weights of these clients (None: everyone) in an average, or given ones; they sum to one."""
        weights = self._unequal(of, given)
        number = self.clients if of is None else of.shape[0]
        return jnp.full((number,), 1 / number) if weights is None else weights

    def at_work(self, steps: Any, of: Array | None = None, given: Array | None = None) -> Array | None:
        """The weights of an average that leaves out clients without local steps.

        A client with zero steps does not take part, and the others' weights are scaled up. If no client has
        steps to do, all weights stay: the mean of unmoved points.

        Args:
            steps: H, one for all clients or one for each.
            of: which clients; None is this round's.
            given: their weights, where they are not the run's.

        Returns:
            Weights for `average`; the given ones if it is known beforehand that everyone works.
        """
        if isinstance(steps, int):
            return given
        working = jnp.broadcast_to(jnp.asarray(steps) > 0, (self.clients,))
        of = self._chosen if of is None else of
        weights = self.weights_of(of, given)
        shares = jnp.where(working if of is None else working[of], weights, 0)
        return jnp.where(shares.sum() > 0, shares, weights)

    def _unequal(self, of: Array | None, given: Array | None) -> Array | None:
        """Like `weights_of`, but None if all are equal: a plain mean is cheaper, and exact."""
        if given is None and self.setup.weights != "uniform":
            given = next((counts for drawn, counts in self._weighted if drawn is of), None)
            given = self.data.sizes_of(of) if given is None else given
        if (here := self.answering(of)) is not None:  # who does not answer counts for nothing
            weights = jnp.where(here, 1 if given is None else given, 0).astype(jnp.result_type(float))
            if self.expected is not None and of is not None:
                if given is not None:
                    raise ValueError(
                        "With noise and fs.Poisson, means are divided by the expected number of clients. "
                        "That needs equal weights and the same number of local steps at all clients."
                    )
                return weights * (self.participants / (of.shape[0] * self.expected))
            return weights / jnp.where(weights.sum() > 0, weights.sum(), 1)
        if given is None:
            return None
        weights = jnp.asarray(given, jnp.result_type(float))
        return weights / weights.sum()

    def sample(self, key: Key, count: int) -> Array:
        """Draw ``count`` of this round's clients without replacement; returned in ascending order.

        Clients with weights are drawn and weighted as `fedstrata.core.cohorts` says. Their weights are found
        by the identity of the returned array, so pass it to ``of=`` unchanged.
        """
        if not 1 <= count <= self.participants:
            raise ValueError(
                f"Cannot sample {count} of {self.participants} clients that take part in a round: lower the "
                "number of clients that the method chooses among them (FedMSA's clients=), or raise "
                "participation."
            )
        if by_size(self.setup, self.data):
            lengths = self.data.every_size
            if self._chosen is not None:
                lengths = jnp.round(self.cohort_weights * WHOLE).astype(lengths.dtype)
            return self._drawn(key, self.cohort, lengths, count)
        if count < self.participants:
            return self._drawn(key, self.cohort, None, count)
        if self._chosen is not None:
            return self._chosen
        self._everyone.append(self.everyone)
        return self._everyone[-1]

    def redraw(self, key: Key) -> Array | None:
        """Draw a new cohort of this round's size from all clients; None: everyone."""
        if self.drawn is not None:
            raise ValueError("This method draws clients inside a round, which fs.Poisson does not support.")
        if self.participants == self.clients:
            return None
        lengths = self.data.every_size if by_size(self.setup, self.data) else None
        return self._drawn(key, self.everyone, lengths, self.participants)

    def _drawn(self, key: Key, of: Array, lengths: Array | None, count: int) -> Array:
        if lengths is None:
            return jnp.sort(jax.random.choice(key, of, (count,), replace=False))
        theta = threshold(lengths, count)
        places = by_weight(key, lengths, count, theta)
        self._weighted.append((of[places], theta.counts(lengths[places])))
        return self._weighted[-1][0]

    def average(
        self, phase: Phase, key: Key, *message: PyTree, of: Array | None = None,
        weights: Array | None = None, around: PyTree = None,
    ) -> PyTree:  # fmt: skip
        """Each client of ``of`` (None: this round's) runs ``phase``; the server gets the weighted mean.

        Args:
            phase: the client's part.
            key: the random key.
            message: what the server sends.
            of: the clients, each of them once.
            weights: their weights, if not the run's; they need not sum to one.
            around: for an upload that is a point: a point of the same form that both sides know (x̄), made of
                arrays of the message or constants. The mean does not depend on it; a channel that clips,
                compresses or masks acts on the difference to it.
        """
        return self._exchanged(phase, key, message, of, weights, False, around)

    def gather(
        self, phase: Phase, key: Key, *message: PyTree, of: Array | None = None, around: PyTree = None
    ) -> PyTree:
        """Like `average`, but the server gets every upload, stacked in the order of ``of``."""
        self.gathered = True
        return self._exchanged(phase, key, message, of, None, True, around)

    def _exchanged(
        self, phase: Phase, key: Key, message: tuple[PyTree, ...], of: Array | None, weights: Array | None,
        stacked: bool, around: PyTree,
    ) -> PyTree:  # fmt: skip
        if not jnp.issubdtype(jnp.result_type(key), jax.dtypes.prng_key):
            verb = "gather" if stacked else "average"
            raise TypeError(
                f"fed.{verb}(phase, key, *message) takes the round's random key, or one split from it."
            )
        if transformation() != self._inside:
            raise TypeError(
                "Verbs of fed inside a loop, map, branch or jit of JAX count as one exchange: use fed.repeat."
            )
        of = self._chosen if of is None else of
        of = None if any(of is everyone for everyone in self._everyone) else of
        message = jax.tree.map(jnp.asarray, message)
        unequal = None if stacked else self._unequal(of, weights)
        exchange = Exchange(phase, key, message, of, unequal, stacked, around)
        if self.channel is not None:
            return self.channel.exchanged(self, exchange)
        uploads, shape = self.exchange(exchange)
        self.book(exchange, shape)
        return uploads

    def book(self, exchange: Exchange, upload: PyTree) -> None:
        """Book what an exchange sends, by shapes; an engine that sees it travel may count it there."""
        number = self.clients if exchange.of is None else exchange.of.shape[0]
        known_singly = exchange.stacked or (number == 1 < self.clients)
        counts = counting.traffic(self._level, exchange.message, upload, number, known_singly)
        counting.book(counting.Tally(counts))

    def repeat(
        self, times: Integer, body: counting.Body, carry: PyTree, until: counting.Until | None = None
    ) -> PyTree:
        """``carry ← body(t, carry)``, whose body may call verbs; ends before a turn with ``until(carry)``."""
        outside = self._inside

        def inside(t: Integer, carry: PyTree) -> PyTree:
            self._inside = transformation()
            return body(t, carry)

        loop = self.turns if self.channel is None else partial(self.channel.repeat, self.turns)
        carry, self._inside = loop(times, inside, carry, until), outside
        return carry

    def turns(
        self, times: Integer, body: counting.Body, carry: PyTree, until: counting.Until | None
    ) -> PyTree:
        """Run `repeat`; engines override it."""

        # The memory belongs to this object, not to the method's carry: it goes along unseen.
        def step(t: Integer, both: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
            carry, self.memory = both
            carry = body(t, carry)
            return carry, self.memory

        stop = None if until is None else lambda both: until(both[0])
        carry, self.memory = counting.repeat(times, step, (carry, self.memory), stop)
        return carry

    def mean(self, function: Function, *args: PyTree, part: str = "train", each: PyTree = None) -> PyTree:
        """The full mean over all clients, for metrics and not counted; see `fedstrata.core.problem.Mean`."""
        if part == "server":
            if self.server is None:
                raise ValueError("The data has no server part: give server=, or a loader's server_fraction.")
            return self.server.full_mean(function).silent(*args)
        own_mean = Term.of(function).mean
        value = self._evaluated(function, args, part, each, own_mean is not None)
        return value if own_mean is None else own_mean(value, self.weights_of(None))

    def means(self, function: Function, *args: PyTree, part: str = "train", each: PyTree = None) -> PyTree:
        """The full mean of each client, stacked; for metrics and not counted."""
        return self._evaluated(function, args, part, each, True)

    def _evaluated(
        self, function: Function, args: tuple[PyTree, ...], part: str, each: PyTree, stacked: bool
    ) -> PyTree:
        def evaluation(problem: Problem, client: Client, key: Key, *args: PyTree) -> PyTree:
            own = () if each is None else (client.memory,)
            if part == "client":
                return function(*args, *own, client)
            samples = {"train": client.train, "valid": client.valid}[part]
            return samples.full_mean(function).silent(*args, *own)

        unequal = None if stacked else self._unequal(None, None)
        exchange = Exchange(evaluation, jax.random.key(0), args, None, unequal, stacked, evaluation=True)
        saved, self.memory = self.memory, each  # a client's own slice of `each` reaches it as its memory
        (value, _), _ = counting.counted(self.exchange)(exchange)
        self.memory = saved
        return value

    @contextmanager
    def everybody(self) -> Iterator[None]:
        """Let all clients take part in the exchanges of this block."""
        chosen, self._chosen = self._chosen, None
        try:
            yield
        finally:
            self._chosen = chosen

    @contextmanager
    def level(self, name: str, most: int | None = None) -> Iterator[None]:
        """Book this block's exchanges, at most ``most`` of them, under a name (``"lower"``) in the ledger."""
        outer, self._level = self._level, name
        try:
            yield
        finally:
            self._level = outer


def visit(setup: Setup, exchange: Exchange, client: Client) -> tuple[Remember, counting.Tally]:
    """Run an exchange's phase on one client; returns its reply and its tally."""
    key = jax.random.fold_in(exchange.key, client.index)
    precision = "float32" if exchange.evaluation and setup.precision == "bfloat16" else setup.precision
    with computing_in(precision):
        reply, tally = counting.counted(exchange.phase)(setup.problem, client, key, *exchange.message)
    if not isinstance(reply, Remember):
        reply = Remember(reply, None)
    elif reply.memory is not None and not tree.same_structure(reply.memory, client.memory):
        raise TypeError(
            f"{exchange.name} returns Remember(upload, memory) with the memory {shapes(reply.memory)}, but "
            f"clients begin with {shapes(client.memory)}. The method's memory(problem, x0, y0) returns what "
            "every client remembers before the first round, of the same structure."
        )
    return Remember(jax.tree.map(jnp.asarray, reply.upload), reply.memory), tally
