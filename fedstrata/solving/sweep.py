"""Many runs at once: the loop of `solve` over an engine that runs methods and seeds side by side."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import jax
import numpy as np

from fedstrata.channels.channel import Buffered, Poisson
from fedstrata.core.method import Method, Moment
from fedstrata.core.problem import Problem
from fedstrata.core.types import PyTree, Weights
from fedstrata.data.federated import FederatedData
from fedstrata.engines.batched import Batched
from fedstrata.engines.engine import Chunk
from fedstrata.engines.metrics import Metric
from fedstrata.solving.channelling import with_channels
from fedstrata.solving.checkpoint import Checkpoint
from fedstrata.solving.loop import Loop, interruption
from fedstrata.solving.pose import (
    MOST_SEEDS,
    Posed,
    check_method,
    checked_callbacks,
    initial_carry,
    pose,
    whole,
)
from fedstrata.solving.progress import Progress
from fedstrata.solving.result import Result
from fedstrata.solving.stopping import Callback
from fedstrata.support.words import spelling


@spelling("sweep")
def sweep(
    problem: Problem,
    methods: Method | Sequence[Method],
    data: FederatedData | Sequence[FederatedData],
    x0: PyTree,
    *,
    y0: PyTree = None,
    rounds: int,
    seeds: Sequence[int] = (0,),
    participation: float | int | Poisson | Buffered = 1.0,
    metrics: Mapping[str, Metric] | None = None,
    eval_every: int = 1,
    checkpoint: str | os.PathLike[str] | Checkpoint | None = None,
    resume: bool = False,
    progress: bool = True,
    weights: Weights = "uniform",
    callbacks: Iterable[Callback] = (),
    default_metrics: bool = True,
    chunk: Chunk = "auto",
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
        checkpoint: as in `fs.solve`; one file for all the runs.
        resume: as in `fs.solve`.
        progress: whether to show a bar.
        weights: as in `fs.solve`.
        callbacks: as in `fs.solve`, called for every run that continues; a true return stops that run.
        default_metrics: as in `fs.solve`.
        chunk: clients per block, as in `fs.engines.Simulated`.

    Returns:
        One result for each method and seed, methods outermost. A run that diverged has the status
        ``"diverged"`` and what there was at its last finite evaluation; it does not stop the others, and a
        warning says how many did.

    Raises:
        Interrupted: on Ctrl-C, with the list of results so far.

    >>> import numpy as np, fedstrata as fs
    >>> data = fs.FederatedData.from_clients([{"a": np.ones((2, 1))}, {"a": np.zeros((2, 1))}])
    >>> problem = fs.Minimization(lambda x, s: 0.5 * ((x - s["a"]) ** 2).sum())
    >>> grid = [fs.FedAvg(gamma=g) for g in (0.1, 0.5, 1.0)]
    >>> results = fs.sweep(problem, grid, data, np.zeros(1), rounds=1, progress=False)
    >>> [round(float(result.x[0]), 3) for result in results]
    [0.05, 0.25, 0.5]
    """
    began = time.perf_counter()
    if not isinstance(seeds, Iterable):
        raise TypeError(f"seeds must be a list, one run for each, such as range(3), but is {seeds!r}.")
    methods = [methods] if isinstance(methods, Method) else list(methods)
    datasets = [data] if isinstance(data, FederatedData) else list(data)
    _check_sweep(methods, datasets, len(seeds))
    per_seed = len(datasets) > 1
    first = pose(
        problem, methods[0], datasets[0], x0, y0=y0, rounds=rounds, participation=participation,
        metrics=metrics, eval_every=eval_every, weights=weights, default_metrics=default_metrics,
    )  # fmt: skip
    numbers = [whole("seed", seed, 0, MOST_SEEDS) for seed in seeds]
    own, late = datasets if per_seed else [], isinstance(participation, Buffered)
    posed = _side_by_side(first, methods, numbers, own, late)
    engine = Batched.of(chunk, len(methods) * len(seeds), len(seeds), own_data=per_seed)
    saving = None if checkpoint is None else Checkpoint.of(checkpoint)
    loop = Loop(posed, engine, began, saving, resume, checked_callbacks(callbacks))
    label = f"{len(posed.methods)} runs"
    stopped = loop.run(Progress(rounds, loop.round, label=label) if progress else None)
    results = loop.results(stopped)
    if stopped is not None:
        raise interruption(stopped, loop, results)
    if diverged := [result for result in results if result.status == "diverged"]:
        warnings.warn(
            f"{len(diverged)} of the {len(results)} runs diverged, {diverged[0].method!r} the first of them: "
            "their results have the status 'diverged' and stand at the last finite evaluation. Lower the "
            "step size, and leave them out of means.",
            stacklevel=3,
        )
    return results


def _side_by_side(
    first: Posed,
    methods: Sequence[Method],
    seeds: Sequence[int],
    datasets: Sequence[FederatedData],
    late: bool,
) -> Posed:
    """A run for every method and seed, methods outermost; ``datasets`` has one per seed, or none."""
    setup, problem = first.setup, first.setup.problem
    planned = [first.methods[0], *(check_method(setup, m, first.rounds) for m in methods[1:])]
    moment = Moment(problem, first.rounds, first.x0)
    for caution in dict.fromkeys(c for m in planned[1:] for c in m.cautions(moment)):
        warnings.warn(caution, stacklevel=4)
    starts = [initial_carry(problem, m, first.x0, first.y0, setup.clients) for m in planned]
    texts = [replace(first, methods=[m], method=m, carry=c) for m, c in zip(planned, starts, strict=True)]
    if late or setup.rate is not None:
        texts = [with_channels(text, None, None, late) for text in texts]
    lanes = [(m, s) for m in range(len(planned)) for s in range(len(seeds))]
    return replace(
        first,
        methods=[planned[m] for m, _ in lanes],
        seeds=[seeds[s] for _, s in lanes],
        method=_stack([texts[m].method for m, _ in lanes]),
        seed=np.array([seeds[s] for _, s in lanes], np.uint32),
        datasets=[datasets[s] for _, s in lanes] if datasets else first.datasets,
        carry=_stack([texts[m].carry for m, _ in lanes]),
    )


def _stack(trees: Sequence[PyTree]) -> PyTree:
    """On the host: a device would take every leaf by itself."""
    return jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *trees)


def _check_sweep(methods: list[Method], datasets: list[FederatedData], seeds: int) -> None:
    if not methods:
        raise ValueError("sweep needs at least one method.")
    if len(datasets) not in (1, seeds):
        raise ValueError(f"There are {len(datasets)} data sets for {seeds} seeds: give one, or one per seed.")
    structures = {jax.tree.structure(m) for m in methods}
    if len(structures) > 1:
        raise ValueError(
            "The methods of a sweep must be of one class and differ in real numbers only: counts, options, "
            "schedules (but for numbers in a jax.tree_util.Partial) and optimisers are part of the program. "
            f"There are {len(structures)} structures: run them one by one."
        )
    forms = {d.form() for d in datasets}
    if len(forms) > 1:
        raise ValueError(
            "The data sets of a sweep must agree in their numbers of clients and samples and in the form of "
            "a sample; run those that differ one by one."
        )
