"""Many runs in one compiled program: `solve` vmapped over methods of one structure and over seeds.

Hyper-parameters are leaves of a method, so a grid of step sizes is a batch axis, and so are seeds. One
program does
them all side by side, which is what fills a GPU with small problems.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core import tree
from fedstrata.core.counting import settle
from fedstrata.core.federated import FederatedData
from fedstrata.core.method import Method
from fedstrata.core.problem import Problem
from fedstrata.core.types import PyTree
from fedstrata.engines.base import Carry, Setup
from fedstrata.engines.simulated import EVALUATIONS, Simulated, compiled, trace_advance, trace_begin
from fedstrata.solving.loop import Run, check_arguments, check_point, initial_carry, next_length, plan_of
from fedstrata.solving.progress import Progress
from fedstrata.solving.result import Result


def sweep(
    problem: Problem,
    methods: Method | Sequence[Method],
    data: FederatedData | Sequence[FederatedData],
    x0: PyTree,
    *,
    y0: PyTree = None,
    rounds: int,
    seeds: Sequence[int] = (0,),
    participation: float | int = 1.0,
    metrics: Mapping[str, Callable[..., Any]] | None = None,
    eval_every: int = 1,
    weights: str = "uniform",
    default_metrics: bool = True,
    chunk: int | str | None = "auto",
    progress: bool = True,
) -> list[Result]:
    """Solve a problem with several methods and seeds at once.

    Args:
        problem: as in `fs.solve`.
        methods: one method, or several of one class whose real hyper-parameters differ; counts and
            options agree.
        data: as in `fs.solve`; or one per seed, of equal shapes (each seed its own split).
        x0: the start, the same for all.
        y0: the start of the second variable.
        rounds: as in `fs.solve`.
        seeds: one run for each method and seed.
        participation: as in `fs.solve`.
        metrics: as in `fs.solve`.
        eval_every: as in `fs.solve`.
        weights: as in `fs.solve`.
        default_metrics: as in `fs.solve`.
        chunk: clients per block, as in `fs.engines.Simulated`.
        progress: whether to show a bar.

    Returns:
        One result for each method and seed, methods outermost. A run that diverged has NaNs in its history
        and the
        status ``"diverged"``; it does not stop the others.

    >>> import numpy as np, fedstrata as fs
    >>> data = fs.FederatedData.from_clients([{"a": np.ones((2, 1))}, {"a": np.zeros((2, 1))}])
    >>> problem = fs.Minimization(lambda x, s: 0.5 * ((x - s["a"]) ** 2).sum())
    >>> grid = [fs.FedAvg(gamma=g) for g in (0.1, 0.5, 1.0)]
    >>> results = fs.sweep(problem, grid, data, np.zeros(1), rounds=1, progress=False)
    >>> [round(float(result.x[0]), 3) for result in results]
    [0.05, 0.25, 0.5]
    """
    began = time.perf_counter()
    methods = [methods] if isinstance(methods, Method) else list(methods)
    per_seed = not isinstance(data, FederatedData)
    datasets = [d.cast() for d in (data if per_seed else [data])]  # type: ignore[union-attr]
    _check_alike(methods, datasets, len(seeds) if per_seed else 1)
    setups = [
        check_arguments(
            problem, m, datasets[0], rounds, 0, participation, metrics, eval_every, weights, default_metrics
        )
        for m in methods
    ]
    setup: Setup = setups[0]
    methods = [m.plan(rounds) for m in methods]
    x0, y0 = tree.as_floats(problem.first(x0), "x0"), tree.as_floats(y0, "y0")
    y0 = check_point(problem, datasets[0], x0, y0)
    runs = [(m, s) for m in range(len(methods)) for s in range(len(seeds))]
    engine = Simulated(chunk=chunk)
    batch_method = _stack([methods[m] for m, _ in runs])
    carry = _stack([initial_carry(problem, methods[m], x0, y0, setup.clients) for m, _ in runs])
    batch_seed = np.array([seeds[s] for _, s in runs], np.uint32)
    placed = engine.place(_stack([datasets[s] for _, s in runs]) if per_seed else datasets[0])
    lanes = [Run(carry) for _ in runs]
    data_axis = 0 if per_seed else None

    if hasattr(methods[0], "start"):
        args: tuple[Any, ...] = (batch_method, carry, batch_seed, placed)
        program = compiled(_batched(trace_begin, data_axis, 0), engine, setup, args)
        carry, words = program.call(*args)
        for lane, factors in zip(lanes, np.asarray(words), strict=True):
            lane.counts.update(settle(program.tally, 1, factors.reshape(-1, 2)))
        states = [jax.tree.map(lambda leaf, b=b: np.asarray(leaf[b]), carry.state) for b in range(len(runs))]
        remarks = [r for (m, _), state in zip(runs, states, strict=True) for r in methods[m].remarks(state)]
        for remark in dict.fromkeys(remarks):
            warnings.warn(remark, stacklevel=2)
    evaluations, plan, done = 1, plan_of(0, rounds, eval_every, first=True), 0
    with Progress(rounds, enabled=progress, label=f"{len(runs)} runs") as bar:
        while plan:
            these, plan = plan[:evaluations], plan[evaluations:]
            started = time.perf_counter()
            slots = np.zeros(EVALUATIONS, np.int32)
            slots[: len(these)] = these
            args = (batch_method, carry, batch_seed, placed, np.int32(done), np.int32(len(these)), slots)
            program = compiled(_batched(trace_advance, data_axis, 3), engine, setup, args)
            carry, history, words, _ = program.call(*args)
            history, words = {n: np.asarray(v) for n, v in history.items()}, np.asarray(words)
            now = time.perf_counter()
            for b, lane in enumerate(lanes):
                for j, number in enumerate(these):
                    lane.round += number
                    lane.counts.update(settle(program.tally, number, words[b, j]))
                    lane.record({n: float(v[b, j]) for n, v in history.items()}, now - began)
            done += sum(these)
            bar.update(done, {n: float(np.nanmean(v[:, len(these) - 1])) for n, v in history.items()})
            evaluations = next_length(evaluations, now - started)
    seconds = time.perf_counter() - began
    return [_result(problem, methods[m], data, carry, b, lanes[b], seconds) for b, (m, _) in enumerate(runs)]


_batches: dict[Any, Callable[..., Any]] = {}


def _batched(function: Callable[..., Any], data_axis: int | None, shared: int) -> Callable[..., Any]:
    """``function`` vmapped over method, carry and seed (and data); always the same object."""

    def run(engine: Simulated, setup: Setup, *args: Any) -> Any:
        seen: list[Any] = []

        def one(*args: Any) -> Any:
            outputs, counted = function(engine, setup, *args)
            seen[:] = [counted]
            return outputs

        axes = (0, 0, 0, data_axis, *[None] * shared)
        return jax.vmap(one, in_axes=axes)(*args), seen[0]

    return _batches.setdefault((function, data_axis), run)


def _stack(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves]), *trees)


def _check_alike(methods: list[Method], datasets: list[FederatedData], wanted: int) -> None:
    if not methods:
        raise ValueError("sweep needs at least one method.")
    if len(datasets) != wanted:
        raise ValueError(
            f"There are {len(datasets)} data sets for {wanted} seeds: give one, or one per seed."
        )
    structures = {jax.tree.structure(m) for m in methods}
    if len(structures) > 1:
        raise ValueError(
            "The methods of a sweep must be of one class and differ in real numbers only: counts, options, "
            f"schedules are part of the program. There are {len(structures)} structures: run them one by one."
        )
    shapes = {
        (jax.tree.structure(d), tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(d)))
        for d in datasets
    }
    if len(shapes) > 1:
        raise ValueError("The data sets of a sweep must have equal shapes; run those that differ one by one.")


def _result(
    problem: Problem, method: Method, data: Any, carry: Carry, b: int, run: Run, seconds: float
) -> Result:
    mine = jax.tree.map(lambda leaf: leaf[b], carry)
    x, y = method.output(mine.state, mine.memory)
    status = "diverged" if tree.nonfinite_leaves(mine.state) else "done"
    history = {name: np.asarray(values) for name, values in run.history.items()}
    shared = data if isinstance(data, FederatedData) else None
    return Result(x, y, history, run.ledger(), method, seconds, status, mine.state, problem, shared)
