"""Many runs in one compiled program: the simulated one, vmapped over methods, states and seeds.

Hyper-parameters are leaves of a method, so a grid of step sizes is a batch axis, and so are seeds. One
program does them all side by side, which is what fills a GPU with small problems. Two axes, not one: methods
that share a seed draw the same clients and the same samples, so these are drawn and fetched once for all of
them, which in small problems is most of the work. On a CPU each core has a share of the runs, in a program of
its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core import tree
from fedstrata.core.fed import Setup
from fedstrata.core.method import Method
from fedstrata.core.types import Array, PyTree
from fedstrata.data.federated import FederatedData
from fedstrata.data.storage import Placed, common_structure
from fedstrata.engines.engine import Advanced, Carry, Chunk, Engine, Job
from fedstrata.engines.programs import Program, lanes_of, program, settle
from fedstrata.engines.simulated import Simulated, fitting, send_home, strided, trace_advance, trace_begin
from fedstrata.support.threads import cores


@dataclass(frozen=True)
class Batched(Engine):
    """Runs side by side; methods, carries and seeds have a leading axis of runs, methods outermost.

    A run that diverges stays at its last finite evaluation, and the others continue.

    Args:
        inner: how each of them runs.
        seeds: the number of seeds of every method, the same for all methods.
        own_data: whether every seed has data of its own, stacked on a leading axis.
        turns: groups of runs that are computed one after the other, because all of them did not fit into the
            device's memory.
    """

    inner: Simulated
    seeds: int
    own_data: bool = False
    turns: int = 1

    @property
    def rewrite(self) -> bool:  # type: ignore[override]
        """The inner engine's."""
        return self.inner.rewrite

    @property
    def deterministic(self) -> bool:  # type: ignore[override]
        """As of the engine inside."""
        return self.inner.deterministic

    @classmethod
    def of(cls, chunk: Chunk, runs: int, seeds: int, own_data: bool) -> Batched:
        """An engine of simulated runs, in blocks of ``chunk`` clients."""
        return cls(Simulated(chunk, runs=runs), seeds, own_data)

    def place(self, data: FederatedData, *others: FederatedData) -> Placed:
        """See `Engine.place`; the seeds' own data sets get one structure."""
        if not self.own_data:
            return self.inner.place(data)
        placed = common_structure([self.inner.place(d) for d in (data, *others)[: self.seeds]])
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *placed)

    def output(self, method: Method, carry: Carry, host: Carry) -> tuple[PyTree, PyTree]:
        return Engine.output(self, method, carry, host)  # a look-up on the device for each run is slower

    def outputs(self, methods: list[Method], carry: Carry, hosts: list[Carry]) -> list[tuple[PyTree, PyTree]]:
        """See `Engine.outputs`; all of them go to the device at once."""
        return [method.output(*own) for method, own in zip(methods, jax.device_put(hosts), strict=True)]

    def lane(self, carry: Carry, number: int) -> Carry:
        return tree.row(carry, number)

    def smaller(self) -> Batched | None:
        """The engine with half as many runs side by side; of a single run, with half as large blocks."""
        if self.turns < self.inner.runs:
            return replace(self, turns=2 * self.turns)
        inner = self.inner.smaller()
        return None if inner is None else replace(self, inner=inner)

    def begin(self, job: Job, carry: Carry) -> tuple[Carry, list[Counter[str]]]:
        seeds = np.asarray(job.seed, np.uint32)
        inputs = job.method, carry, seeds
        found = fitting(self, lambda engine: engine._in_parts(_trace_begin, job.setup, inputs, job.data))
        carry, words = found
        words = jax.tree.map(np.asarray, words)
        return carry, [settle(tree.row(words, b), 1) for b in range(len(seeds))]

    def advance(
        self, job: Job, carry: Carry, first: int, rounds: np.ndarray, active: np.ndarray | None = None
    ) -> Advanced:
        seeds = np.asarray(job.seed, np.uint32)
        active = np.ones(len(seeds), bool) if active is None else active
        setup, slots = strided(job.setup, rounds), self.inner.slots(first, rounds)
        inputs = job.method, carry, seeds, active
        carry, *happened = fitting(
            self, lambda engine: engine._in_parts(_trace_advance, setup, inputs, job.data, *slots)
        )
        send_home(carry)
        history, words, bad = jax.device_get(happened)
        return Advanced(carry, lanes_of(rounds, history.tree(), words.tree(), bad))

    def _in_parts(
        self, trace: Callable[..., Any], setup: Setup, inputs: tuple[Any, ...], data: Any, *slots: Any
    ) -> Any:
        """The program for all runs: at once, or part after part."""
        parts, calls = self._parts(len(inputs[2])), []  # equal parts share one program
        for engine, lanes in parts:
            own = inputs if len(parts) == 1 else _some(lanes, inputs)
            its = data
            if self.own_data and len(parts) > 1:
                its = _some(lanes[: engine.seeds] % self.seeds, data)
            args = (*own[:3], its, *own[3:], *slots)
            calls.append((program(trace, engine, setup, args), args))
        if len(parts) == 1:
            run, args = calls[0]
            return run(*args)
        back = np.argsort(np.concatenate([lanes for _, lanes in parts]))
        found = _at_once(calls) if self.turns == 1 else [jax.device_get(run(*args)) for run, args in calls]
        return jax.tree.map(lambda *parts: np.concatenate(parts)[back], *found)

    def _parts(self, runs: int) -> list[tuple[Batched, np.ndarray]]:
        """The runs of each core of a CPU, where XLA runs small operations in one thread, or of each turn.

        Seeds are divided rather than methods, because runs of one seed share their draws.
        """
        number = max(cores() if jax.default_backend() == "cpu" else 1, self.turns)
        grid = np.arange(runs).reshape(-1, self.seeds)
        seeds = _divisor(grid.shape[1], number)
        methods = _divisor(grid.shape[0], number // seeds)
        parts = [part for rows in np.split(grid, methods) for part in np.split(rows, seeds, 1)]
        return [(replace(self, seeds=part.shape[1]), part.ravel()) for part in parts]


def _divisor(length: int, most: int) -> int:
    """The largest number up to ``most`` that divides a length."""
    return next(n for n in range(min(most, length), 0, -1) if length % n == 0)


def _some(lanes: np.ndarray, stacked: Any) -> Any:
    return tree.row(jax.tree.map(np.asarray, stacked), lanes)


def _at_once(calls: list[tuple[Program, tuple[Any, ...]]]) -> list[Any]:
    """The outputs of compiled programs on the host; each runs in a thread, as JAX would run them in turn."""
    double = bool(jax.config.read("jax_enable_x64"))  # threads do not inherit it

    def call(one: tuple[Program, tuple[Any, ...]]) -> Any:
        with jax.enable_x64(double):
            return jax.device_get(one[0](*one[1]))

    if any(run.calls_host for run, _ in calls):  # two at once may wait for each other's threads
        return list(map(call, calls))
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(call, calls))


def _nested(
    engine: Batched,
    one: Callable[..., Any],
    method: Method,
    carry: Carry,
    seed: Array,
    data: Placed,
    *own: Array,
) -> Any:
    """Map ``one`` over methods, then seeds; what depends on one of them alone is batched over that."""

    def by_method(leaf: Array) -> Array:
        return leaf.reshape(-1, engine.seeds, *leaf.shape[1:])

    first = jax.tree.map(lambda leaf: by_method(leaf)[:, 0], method)  # the same for all of its seeds
    # The seed is mapped over in the inner vmap alone: what only it decides is computed once for all methods.
    over_seeds = jax.vmap(one, (None, 0, 0, 0 if engine.own_data else None, *[0] * len(own)))
    over_all = jax.vmap(over_seeds, (0, 0, None, None, *[0] * len(own)))
    stacked = over_all(
        first, *jax.tree.map(by_method, (carry,)), by_method(seed)[0], data, *map(by_method, own)
    )
    return jax.tree.map(lambda leaf: leaf.reshape(len(seed), *leaf.shape[2:]), stacked)


def _trace_begin(
    engine: Batched, setup: Setup, method: Method, carry: Carry, seed: Array, data: Placed
) -> Any:
    return _nested(engine, partial(trace_begin, engine.inner, setup), method, carry, seed, data)


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
    trace = partial(trace_advance, engine.inner, setup, stay_finite=True)

    def one(method: Method, carry: Carry, seed: Array, data: Placed, active: Array) -> Any:
        after, *happened = trace(method, carry, seed, data, *rounds)
        # A stopped run is still computed, to no effect: its carry is kept.
        return jax.tree.map(partial(jnp.where, active), after, carry), *happened

    return _nested(engine, one, method, carry, seed, data, active)
