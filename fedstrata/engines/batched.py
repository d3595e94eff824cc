"""Many runs in one compiled program: the simulated one, vmapped over methods, states and seeds.

Hyper-parameters are leaves of a method, so a grid of step sizes is a batch axis, and so are seeds. One
program does them all side by side, which is what fills a GPU with small problems.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core import counting
from fedstrata.core.fed import Advanced, Carry, Engine, Setup
from fedstrata.core.federated import FederatedData
from fedstrata.core.method import Method
from fedstrata.core.storage import Placed, alike
from fedstrata.core.types import Array, PyTree
from fedstrata.engines.programs import program
from fedstrata.engines.simulated import Simulated, lane_of, trace_advance, trace_begin


@dataclass(frozen=True)
class Batched(Engine):
    """Runs side by side; methods, carries and seeds have a leading axis of runs.

    Args:
        inner: how each of them runs.
        own_data: whether every run has data of its own, on a leading axis as well.
    """

    inner: Simulated
    own_data: bool = False

    @classmethod
    def of(cls, chunk: int | str | None, own_data: bool) -> Batched:
        """Simulated runs in blocks of so many clients."""
        return cls(Simulated(chunk=chunk), own_data)

    def place(self, data: FederatedData | list[FederatedData]) -> Placed:
        """See `Engine.place`; data of the runs' own are made alike and stacked."""
        if isinstance(data, FederatedData):
            return self.inner.place(data)
        alike_data = alike([self.inner.place(d) for d in data])
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *alike_data)

    def output(self, method: Method, carry: Carry, host: Carry) -> tuple[PyTree, PyTree]:
        """See `Engine.output`."""
        return self.inner.output(method, carry, host)

    def lane(self, carry: Carry, number: int) -> Carry:
        """See `Engine.lane`."""
        return jax.tree.map(lambda leaf: leaf[number], carry)

    def begin(
        self, setup: Setup, method: Method, carry: Carry, seed: Any, data: Placed
    ) -> tuple[Carry, list[Counter[str]]]:
        """See `Engine.begin`."""
        args = (method, carry, np.asarray(seed, np.uint32), data)
        carry, words = program(_trace_begin, self, setup, args)(*args)
        words = jax.tree.map(np.asarray, words)
        return carry, [counting.settle(_at(words, b), 1) for b in range(len(args[2]))]

    def advance(
        self,
        setup: Setup,
        method: Method,
        carry: Carry,
        seed: Any,
        data: Placed,
        first: int,
        rounds: np.ndarray,
        active: np.ndarray | None = None,
    ) -> Advanced:
        """See `Engine.advance`."""
        seeds = np.asarray(seed, np.uint32)
        active = np.ones(len(seeds), bool) if active is None else active
        args = (method, carry, seeds, data, active, *self.inner.slots(first, rounds))
        carry, *happened = program(_trace_advance, self, setup, args)(*args)
        happened = jax.tree.map(np.asarray, happened)
        return Advanced(carry, [lane_of(rounds, *_at(happened, b)) for b in range(len(seeds))])


def _at(stacked: Any, b: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[b], stacked)


def _trace_begin(
    engine: Batched, setup: Setup, method: Method, carry: Carry, seed: Array, data: Placed
) -> Any:
    axes = (0, 0, 0, 0 if engine.own_data else None)
    return jax.vmap(partial(trace_begin, engine.inner, setup), axes)(method, carry, seed, data)


def _trace_advance(
    engine: Batched,
    setup: Setup,
    method: Method,
    carry: Carry,
    seed: Array,
    data: Placed,
    active: Array,
    *rounds: Array,
) -> Any:
    def one(method: Method, carry: Carry, seed: Array, data: Placed, active: Array) -> Any:
        after, *happened = trace_advance(engine.inner, setup, method, carry, seed, data, *rounds)
        # A run that has stopped goes on being computed, for nothing: its carry stays what it was.
        return jax.tree.map(partial(jnp.where, active), after, carry), *happened

    axes = (0, 0, 0, 0 if engine.own_data else None, 0)
    return jax.vmap(one, axes)(method, carry, seed, data, active)
