"""The two programs of the streamed engine: rounds of which only the cohorts are here, and blocks of everyone.

A *window* has the samples of some rounds' cohorts. Its rounds are the simulated engine's; clients' rows are
found by their numbers, and a round that asks other clients raises when it is traced. An exchange with
everyone leaves the text's program (`fedstrata.engines.remote`), and the host goes through the clients, block
after block, with a program that is made here. What a phase closes over is sent along.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core import counting
from fedstrata.core.fed import Exchange, Fed, Setup
from fedstrata.core.method import Method
from fedstrata.core.types import Array, Integer, Key, PyTree, Weights
from fedstrata.data.storage import Placed
from fedstrata.engines.engine import Carry
from fedstrata.engines.remote import Prepared, RemoteFed, remote_text
from fedstrata.engines.rounds import cohorts_of
from fedstrata.engines.simulated import Simulated, SimulatedFed


class AsksOthers(Exception):
    """A round asks clients outside of its cohort; the message names the phase."""


class CohortFed(SimulatedFed):
    """The verbs in a program that has only the samples of its rounds' cohorts."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._here = [self._chosen]  # arrays by identity: values are not known while a program is traced

    def sample(self, key: Key, count: int) -> Array:
        """See `Fed.sample`; the drawn clients belong to the cohort, so they are here."""
        drawn = super().sample(key, count)
        self._here.append(drawn)
        return drawn

    def exchange(self, exchange: Exchange) -> tuple[PyTree, PyTree]:
        """See `Fed.exchange`; raises `AsksOthers` for clients that may not be here."""
        if exchange.of is None or not any(exchange.of is drawn for drawn in self._here):
            raise AsksOthers(exchange.name)
        return super().exchange(exchange)


@dataclass(frozen=True)
class Cohorts(Simulated):
    """The simulated engine with only cohorts placed."""

    def make_fed(self) -> Callable[..., Fed]:
        return partial(CohortFed, self)


@cache
def drawn_cohorts(
    clients: int, participants: int, weights: Weights, rate: float | None
) -> Callable[..., Array]:
    """The cohorts of some rounds, from the seed and a channel's secret."""
    setup = Setup(None, clients, participants, weights, rate=rate)  # type: ignore[arg-type]

    def of(seed: Integer, rounds: Array, data: Any, secret: Array | None) -> Array | None:
        return cohorts_of(setup, jax.random.key(seed), data, rounds, secret)

    return jax.jit(of)


@dataclass
class Window:
    """The clients of some rounds, on the device."""

    start: int
    stop: int
    clients: np.ndarray
    placed: Placed
    memory: PyTree = None  # where it is on the device


@dataclass(frozen=True)
class Blocks(Simulated):
    """The simulated engine on blocks of clients, whose shapes are part of a program."""

    leaves: tuple[Any, ...] = ()
    structure: Any = None
    program: str = "round"
    encodes: ClassVar[bool] = False  # nothing travels

    def form(self) -> tuple[Placed, PyTree]:
        """Shapes of a block's samples and memories."""
        return jax.tree.unflatten(self.structure, self.leaves)

    @property
    def inner(self) -> Simulated:
        """The engine of a block."""
        return Simulated(self.chunk)

    def prepare(self, fed: RemoteFed, exchange: Exchange) -> Prepared:
        """See `Prepares.prepare`: the program of a block, and the values that a phase closes over."""
        samples, memories = self.form()
        rows = samples.training.rows
        if fed.memory is not None or exchange.evaluation:
            memories = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype), fed.memory
            )
        impl = jax.random.key_impl(exchange.key)
        shapes: list[Any] = []  # what an abstract trace cannot return: counts that are plain numbers

        def block(key: Array, message: Any, weights: Array, data: Placed, memory: PyTree) -> Any:
            inner = SimulatedFed(self.inner, fed.setup, data, memory, None, 0)
            its = exchange._replace(
                key=jax.random.wrap_key_data(key, impl=impl), message=message, of=data.ids, weights=weights
            )
            (replies, shape), tally = counting.counted(inner.exchange)(its)
            shapes.append((shape, tally.fixed))
            return replies, None if exchange.evaluation else inner.memory, counting.Tally(scaled=tally.scaled)

        weights = jax.ShapeDtypeStruct((rows,), jnp.result_type(float))
        # The block's program is fixed here, in the round's trace, where the phase and its closure are known.
        closed, (_, _, tally) = jax.make_jaxpr(block, return_shape=True)(
            jax.random.key_data(exchange.key), exchange.message, weights, samples, memories
        )
        jaxpr, (upload, fixed) = closed.jaxpr, shapes[-1]
        # A phase may close over values of the round's program: they are sent along, and `run` holds none.
        keyed = [jnp.issubdtype(c.dtype, jax.dtypes.prng_key) for c in closed.consts]
        constants = [jax.random.key_data(c) if k else c for c, k in zip(closed.consts, keyed, strict=True)]

        def run(constants: list[Any], *arguments: PyTree) -> list[Any]:
            its = [
                jax.random.wrap_key_data(c, impl=impl) if k else c
                for c, k in zip(constants, keyed, strict=True)
            ]
            return jax.core.eval_jaxpr(jaxpr, its, *jax.tree.leaves(arguments))

        per_client = Counter({name: amount // rows for name, amount in fixed.items()})
        values = (constants, jax.tree.leaves(fed.memory))
        return Prepared(upload, values, jax.jit(run), counting.Tally(per_client, tally.scaled))


def trace_everyone(
    engine: Blocks, setup: Setup, method: Method, carry: Carry, seed: Integer, data: Any, handle: Any, r: Any
) -> Any:
    """The program of the text that the engine names."""
    return remote_text(engine, engine.program, setup, method, carry, seed, data, handle, r)
