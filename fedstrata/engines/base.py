"""What engines share: the verbs' book-keeping, one round, one measurement, and the protocol.

An engine decides where phases run; nothing mathematical happens here. A `Setup` holds what is fixed for a
run, a
`FedBase` is made anew for every round and threads the clients' memory through the verbs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core import counting
from fedstrata.core.client import Client, Samples
from fedstrata.core.counting import settle, traffic
from fedstrata.core.federated import FederatedData
from fedstrata.core.method import Method, Remember
from fedstrata.core.problem import Problem, positional
from fedstrata.core.types import Integer, PyTree


@dataclass(frozen=True)
class Setup:
    """What is fixed for a run: the problem, who takes part, how replies are weighted, what is measured."""

    problem: Problem
    clients: int
    participants: int
    weights: str = "uniform"
    metrics: tuple[tuple[str, Callable[..., Any]], ...] = ()
    measure_problem: bool = True


class Carry(NamedTuple):
    """What passes from round to round: the method's state and the clients' memory."""

    state: PyTree
    memory: PyTree


class Advanced(NamedTuple):
    """What an engine returns after some rounds.

    Attributes:
        carry: state and memory after the last round.
        history: metric → values, one per evaluation.
        counts: the tally's counts after each evaluation (increments).
        bad_round: the first round whose state was not finite, or −1.
    """

    carry: Carry
    history: dict[str, np.ndarray]
    counts: list[Any]
    bad_round: int


class Engine(Protocol):
    """Where a method runs."""

    def place(self, data: FederatedData) -> FederatedData:
        """Put the data where the phases run."""

    def place_carry(self, carry: Carry, clients: int) -> Carry:
        """Put state and memory (leading axis: clients) where they belong."""

    def fetch(self, carry: Carry, clients: int) -> Carry:
        """State and memory as host arrays, for results and checkpoints."""

    def agree(self, value: Any) -> Any:
        """The first process's value in every process: decisions that depend on clocks go through this."""

    def begin(self, setup: Setup, method: Method, carry: Carry, seed: int, data: FederatedData) -> Any:
        """The method's exchanges before the first round: ``(carry, counts)``."""

    def advance(
        self,
        setup: Setup,
        method: Method,
        carry: Carry,
        seed: int,
        data: FederatedData,
        first: int,
        rounds: np.ndarray,
    ) -> Advanced:
        """From round ``first`` on, ``rounds[j]`` rounds before the j-th evaluation."""


class ClientError(RuntimeError):
    """A phase failed; the message names round, phase and client."""


class FedBase:
    """The verbs' common part; an engine's own ``fed`` adds `_run` and may replace `repeat`."""

    def __init__(
        self,
        setup: Setup,
        data: FederatedData,
        memory: PyTree,
        cohort: jax.Array | None,
        round_number: Any = 0,
    ) -> None:
        self.setup = setup
        self.data = data
        self.memory = memory
        self.cohort = cohort
        self.round_number = round_number
        self._level = "main"

    @property
    def clients(self) -> int:
        """The number m of all clients."""
        return self.setup.clients

    @property
    def participants(self) -> int:
        """How many clients take part in this round."""
        return self.setup.participants

    @property
    def everyone(self) -> jax.Array:
        """All clients' indices."""
        return jnp.arange(self.clients)

    @property
    def server(self) -> Samples | None:
        """The server's own samples."""
        if self.data.server is None:
            return None
        return Samples(self.data.server, jax.tree.leaves(self.data.server)[0].shape[0])

    def indices(self) -> jax.Array:
        """This round's clients, ascending."""
        return self.everyone if self.cohort is None else self.cohort

    def weights(self) -> jax.Array:
        """Their weights in an average."""
        return self._shares(self.cohort, None)

    def share(self) -> Any:
        """Their part of all clients' weight."""
        if self.cohort is None or self.setup.weights == "uniform":
            return self.participants / self.clients
        sizes = jnp.asarray(self.data.sizes)
        return sizes[self.cohort].sum() / sizes[: self.clients].sum()

    def sample(self, key: jax.Array, count: int) -> jax.Array:
        """``count`` of this round's clients, without replacement, ascending."""
        if not 1 <= count <= self.participants:
            raise ValueError(f"Cannot sample {count} of {self.participants} clients that take part.")
        return jnp.sort(jax.random.choice(key, self.indices(), (count,), replace=False))

    @contextmanager
    def level(self, name: str) -> Iterator[None]:
        """Book the exchanges inside under ``name``."""
        outer, self._level = self._level, name
        try:
            yield
        finally:
            self._level = outer

    def average(
        self,
        phase: Callable[..., Any],
        key: jax.Array,
        *message: PyTree,
        of: Any = None,
        weights: Any = None,
        around: PyTree = None,
        mean: Callable[[PyTree, jax.Array], PyTree] | None = None,
    ) -> PyTree:
        """Each client of ``of`` runs ``phase``; the weighted mean of their uploads."""
        if mean is None:
            return self._exchange(phase, key, message, of, weights, stacked=False)
        uploads = self._exchange(phase, key, message, of, None, stacked=True)
        chosen = self.cohort if of is None else of
        return mean(uploads, self._shares(chosen, weights))

    def gather(
        self,
        phase: Callable[..., Any],
        key: jax.Array,
        *message: PyTree,
        of: Any = None,
        around: PyTree = None,
    ) -> PyTree:
        """The same; every upload, stacked."""
        return self._exchange(phase, key, message, of, None, stacked=True)

    def _exchange(
        self,
        phase: Callable[..., Any],
        key: jax.Array,
        message: tuple[PyTree, ...],
        of: Any,
        weights: Any,
        stacked: bool,
    ) -> PyTree:
        chosen = self.cohort if of is None else of
        number = self.clients if chosen is None else chosen.shape[0]
        message = jax.tree.map(jnp.asarray, message)
        upload, shape = self._run(phase, key, message, chosen, self._weigh(chosen, weights), stacked)
        counting.merge(counting.Tally(fixed=traffic(self._level, message, shape, number)), 1, [])
        return upload

    def _weigh(self, chosen: jax.Array | None, weights: Any) -> jax.Array | None:
        """Normalised weights of the chosen clients; None where they are all equal."""
        if weights is None:
            if self.setup.weights == "uniform":
                return None
            sizes = jnp.asarray(self.data.sizes)
            weights = sizes[: self.clients] if chosen is None else sizes[chosen]
        weights = jnp.asarray(weights, jnp.result_type(float))
        return weights / weights.sum()

    def _shares(self, chosen: jax.Array | None, weights: Any) -> jax.Array:
        """The same, also where they are all equal."""
        number = self.clients if chosen is None else chosen.shape[0]
        shares = self._weigh(chosen, weights)
        return jnp.full((number,), 1 / number) if shares is None else shares

    def _run(
        self,
        phase: Callable[..., Any],
        key: jax.Array,
        message: tuple[PyTree, ...],
        chosen: jax.Array | None,
        weights: jax.Array | None,
        stacked: bool,
    ) -> tuple[PyTree, PyTree]:
        """The uploads' mean or stack, and the shape of one upload; updates ``self.memory``."""
        raise NotImplementedError

    def repeat(self, times: Integer, body: Callable[[Any, PyTree], PyTree], carry: PyTree) -> PyTree:
        """``carry ← body(t, carry)``; memory and counts go along."""

        def step(t: Integer, both: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
            carry, self.memory = both
            carry = body(t, carry)
            return carry, self.memory

        carry, self.memory = counting.repeat(times, step, (carry, self.memory))
        return carry

    def mean(
        self, function: Callable[..., Any], *args: PyTree, part: str = "train", each: PyTree = None
    ) -> PyTree:
        """The full mean over all clients, for metrics, counted nowhere; see `problems.base.Mean`."""
        if part == "server":
            if self.server is None:
                raise ValueError("The data has no part of the server's own.")
            return self.server.full_mean(function).silent(*args)

        def evaluation(problem: Any, client: Client, key: jax.Array, *args: PyTree) -> PyTree:
            own = () if each is None else (client.memory,)
            if part == "client":
                return function(*args, *own, client)
            return getattr(client, part).full_mean(function).silent(*args, *own)

        own_mean = getattr(function, "own_mean", None)
        weights = self._weigh(None, None)
        saved, self.memory = self.memory, each
        with counting.collect():
            value, _ = self._run(evaluation, jax.random.key(0), args, None, weights, own_mean is not None)
        self.memory = saved
        return value if own_mean is None else own_mean(value, self._shares(None, None))


def visit(
    setup: Setup, phase: Callable[..., Any], key: jax.Array, message: tuple[PyTree, ...], client: Client
) -> tuple[Remember, counting.Tally]:
    """Run a phase on one client; what it computed is counted apart."""
    with counting.collect() as counted:
        reply = phase(setup.problem, client, jax.random.fold_in(key, client.index), *message)
    if not isinstance(reply, Remember):
        reply = Remember(reply, None)
    return Remember(jax.tree.map(jnp.asarray, reply.upload), reply.memory), counted


def client_of(setup: Setup, data: FederatedData, index: Integer, memory: PyTree) -> Client:
    """Client ``index`` (may be traced), whose rows are fetched from the stack as needed."""
    size = data.equal if data.equal is not None else data.sizes[index]
    train = Samples(data.train, size, index)
    valid = train
    if data.valid is not None:
        valid = Samples(data.valid, data.valid_equal or data.valid_sizes[index], index)
    fraction = data.sizes[index] / data.sizes[: setup.clients].sum()
    return Client(index, train, valid, memory, fraction)


def cohort_of(setup: Setup, key: jax.Array) -> jax.Array | None:
    """This round's clients: None is everyone."""
    if setup.participants == setup.clients:
        return None
    return jnp.sort(jax.random.choice(key, setup.clients, (setup.participants,), replace=False))


def one_round(
    fed_class: Callable[..., FedBase],
    setup: Setup,
    method: Method,
    carry: Carry,
    key: jax.Array,
    data: FederatedData,
    r: Integer,
) -> Carry:
    """Round ``r`` of a method; a state's dtypes stay what they were."""
    key_cohort, key_round = jax.random.split(jax.random.fold_in(key, r))
    fed = fed_class(setup, data, carry.memory, cohort_of(setup, key_cohort), r)
    state = method.at(r).round(setup.problem, fed, key_round, r, carry.state)
    state = jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), state, carry.state)
    return Carry(state, fed.memory)


def before_rounds(
    fed_class: Callable[..., FedBase],
    setup: Setup,
    method: Any,
    carry: Carry,
    key: jax.Array,
    data: FederatedData,
) -> Carry:
    """The method's exchanges before the first round, with all clients."""
    fed = fed_class(setup, data, carry.memory, None, 0)
    state = method.at(0).start(setup.problem, fed, jax.random.fold_in(key, 2**31 - 1), carry.state)
    state = jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), state, carry.state)
    return Carry(state, fed.memory)


def measure(
    fed_class: Callable[..., FedBase], setup: Setup, method: Method, carry: Carry, data: FederatedData
) -> dict[str, Any]:
    """All metrics at the current point: the problem's own and the user's."""
    x, y = method.output(carry.state, carry.memory)
    values: dict[str, Any] = {}
    with counting.collect():
        if setup.measure_problem:
            fed = fed_class(setup, data, carry.memory, None, 0)
            values.update(setup.problem.measure(fed.mean, x, y))
        for name, metric in setup.metrics:
            arguments = {1: (carry.state,), 2: (x, y)}.get(positional(metric), (x, y, data))
            try:
                values[name] = metric(*arguments)
            except Exception as error:
                raise TypeError(
                    f"The metric {name!r} cannot be evaluated: {type(error).__name__}: {error}\n"
                    "A metric is a function of the state, of (x, y) or of (x, y, data)."
                ) from error
    for name, value in values.items():
        if jnp.shape(value) != ():
            raise TypeError(f"The metric {name!r} must be one number, but has the shape {jnp.shape(value)}.")
    return {name: jnp.asarray(value, jnp.result_type(float)) for name, value in values.items()}


__all__ = ["Advanced", "Carry", "ClientError", "Engine", "FedBase", "Setup", "settle"]
