"""Exchanges with clients whose samples are elsewhere: by an ordered callback, in blocks of clients.

The text is compiled as in the other engines. An exchange leaves its program and comes back with the mean of
the uploads, or their stack; in between, a compiled program goes through the clients, block after block. What
a phase closes over from the round's program is sent along.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from fedstrata.core import counting
from fedstrata.core.fed import Exchange, Fed, Setup
from fedstrata.core.method import Method
from fedstrata.core.types import Array, Integer, PyTree
from fedstrata.data.storage import Placed
from fedstrata.engines.engine import Carry
from fedstrata.engines.rounds import before_rounds, finite, measure, one_round
from fedstrata.engines.simulated import Simulated, SimulatedFed, mean_dtype


class Answers(Protocol):
    """What carries out the exchanges of a run.

    Attributes:
        failure: what went wrong in a callback.
    """

    failure: BaseException | None

    def ask(self, asked: Asked, *arguments: Any) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
        """The mean of the uploads, or their stack, and what was counted."""


@dataclass(frozen=True)
class Blocks(Simulated):
    """The simulated engine on blocks of clients, whose shapes are part of a program."""

    leaves: tuple[Any, ...] = ()
    structure: Any = None

    def form(self) -> tuple[Placed, PyTree]:
        """Shapes of a block's samples and memories."""
        return jax.tree.unflatten(self.structure, self.leaves)

    @property
    def inner(self) -> Simulated:
        """How a block runs."""
        return Simulated(self.chunk)


class Asked(NamedTuple):
    """What is fixed of an exchange when its program is traced.

    Attributes:
        run: ``run(constants, *arguments)`` does a block of clients.
        everyone, weighted: whether all clients are asked, and whether weights are given.
        stacked, evaluation: as of `Exchange`.
        own: whether the clients' slices of an argument take the place of what they remember.
        uploads: shapes of what the program gets.
        factors: how many numbers are counted.
    """

    run: Callable[..., list[Any]]
    everyone: bool
    weighted: bool
    stacked: bool
    evaluation: bool
    own: bool
    uploads: tuple[jax.ShapeDtypeStruct, ...]
    factors: int


class EveryoneFed(Fed):
    """The verbs where samples are elsewhere: every exchange leaves the program."""

    def __init__(self, engine: Blocks, handle: Integer, *args: Any) -> None:
        super().__init__(*args)
        self.engine, self.handle = engine, handle

    def exchange(self, exchange: Exchange) -> tuple[PyTree, PyTree]:
        """See `Fed.exchange`: by a callback, which asks blocks of clients one after the other."""
        number = self.clients if exchange.of is None else exchange.of.shape[0]
        samples, memories = self.engine.form()
        rows = samples.training.rows
        own = self.memory is not None
        if own or exchange.evaluation:
            memories = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype), self.memory
            )
        impl = jax.random.key_impl(exchange.key)
        key, message = jax.random.key_data(exchange.key), exchange.message

        def block(key: Array, message: Any, weights: Array, data: Placed, memory: PyTree) -> Any:
            fed = SimulatedFed(self.engine.inner, self.setup, data, memory, None, 0)
            its = exchange._replace(
                key=jax.random.wrap_key_data(key, impl=impl), message=message, of=data.ids, weights=weights
            )
            (replies, shape), tally = counting.counted(fed.exchange)(its)
            shapes.append((shape, tally.fixed))
            return replies, None if exchange.evaluation else fed.memory, counting.Tally(scaled=tally.scaled)

        shapes: list[Any] = []
        weights = jax.ShapeDtypeStruct((rows,), jnp.result_type(float))
        closed, (replies, _, tally) = jax.make_jaxpr(block, return_shape=True)(
            key, message, weights, samples, memories
        )
        upload, fixed = shapes[-1]
        lead = (number,) if exchange.stacked else ()
        uploads = tuple(
            jax.ShapeDtypeStruct((*lead, *u.shape), u.dtype if exchange.stacked else mean_dtype(u.dtype))
            for u in jax.tree.leaves(upload)
        )
        # A phase may close over values of the round's program: they are sent along.
        keyed = [jnp.issubdtype(c.dtype, jax.dtypes.prng_key) for c in closed.consts]
        constants = [jax.random.key_data(c) if k else c for c, k in zip(closed.consts, keyed, strict=True)]

        def run(constants: list[Any], *arguments: PyTree) -> list[Any]:
            its = [
                jax.random.wrap_key_data(c, impl=impl) if k else c
                for c, k in zip(constants, keyed, strict=True)
            ]
            return jax.core.eval_jaxpr(closed.jaxpr, its, *jax.tree.leaves(arguments))

        asked = Asked(
            jax.jit(run), exchange.of is None, exchange.weights is not None, exchange.stacked,
            exchange.evaluation, own, uploads, len(tally.scaled),
        )  # fmt: skip
        counts = jax.ShapeDtypeStruct((len(tally.scaled),), jnp.int32)
        found, factors = io_callback(
            partial(_ask, asked), (uploads, counts), self.handle, exchange.of, exchange.weights, key,
            jax.tree.leaves(message), constants, jax.tree.leaves(self.memory), ordered=True,
        )  # fmt: skip
        per_client = Counter({name: amount // rows for name, amount in fixed.items()})
        scaled = [(its, factors[j]) for j, (its, _) in enumerate(tally.scaled)]
        counting.book(counting.Tally(per_client, scaled), number)
        return jax.tree.unflatten(jax.tree.structure(replies), found), upload


streams: WeakValueDictionary[int, Answers] = WeakValueDictionary()


def _ask(asked: Asked, handle: Any, *arguments: Any) -> Any:
    """The callback: whatever goes wrong is raised when the program has ended."""
    stream = streams[int(handle)]
    if stream.failure is None:
        try:
            return stream.ask(asked, *jax.tree.map(np.asarray, arguments))
        except BaseException as error:
            stream.failure = error
    return tuple(np.zeros(u.shape, u.dtype) for u in asked.uploads), np.zeros(asked.factors, np.int32)


def trace_start(
    engine: Blocks, setup: Setup, method: Method, state: PyTree, seed: Integer, data: Any, handle: Any, r: Any
) -> Any:
    """The exchanges before the first round, and what was counted."""

    @counting.counted
    def start() -> tuple[PyTree, Array]:
        make_fed: Any = partial(EveryoneFed, engine, handle)
        found = before_rounds(make_fed, setup, method, Carry(state, None), jax.random.key(seed), data).state
        return found, finite(found)

    return start()


def trace_round(
    engine: Blocks, setup: Setup, method: Method, state: PyTree, seed: Integer, data: Any, handle: Any, r: Any
) -> Any:
    """One round, and what was counted."""

    @counting.counted
    def round_once() -> tuple[PyTree, Array]:
        make_fed: Any = partial(EveryoneFed, engine, handle)
        found = one_round(make_fed, setup, method, Carry(state, None), jax.random.key(seed), data, r).state
        return found, finite(found)

    return round_once()


def trace_exact(
    engine: Blocks, setup: Setup, method: Method, carry: Carry, data: Any, handle: Any
) -> dict[str, Array]:
    """The metrics, as means over everyone."""
    make_fed: Any = partial(EveryoneFed, engine, handle)
    return measure(make_fed, setup, method, carry, data)
