"""From settings to runs: one by one, or side by side those that share a program."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from fedstrata.experiments._display import Display
from fedstrata.experiments._store import Store
from fedstrata.experiments.base import Experiment, ExperimentError, Setting, Task
from fedstrata.report import ReportError, Run
from fedstrata.solving.checkpoint import Checkpoint, CheckpointError
from fedstrata.solving.loop import Diverged, solve
from fedstrata.solving.result import BOOKKEEPING, Result
from fedstrata.solving.sweep import sweep

Pair = tuple[Setting, Task]


def solve_all(
    experiment: Experiment, settings: Sequence[Setting], store: Store, display: Display, together: bool
) -> Iterator[tuple[Setting, list[Run]]]:
    """The runs of all settings, each as soon as it is there."""
    if experiment.run is not None:
        if settings:
            for setting, runs in experiment.run(settings):
                yield setting, _listed(runs)
        return
    groups: dict[Any, list[Pair]] = {}
    for setting in settings:
        display.started(setting)
        with _naming(setting, experiment):
            built = experiment.build(setting)  # type: ignore[misc]  # one of run and build is there
            if not isinstance(built, Task):
                yield setting, _listed(built)
            elif together:
                groups.setdefault(_alike(built), []).append((setting, built))
            else:
                yield setting, [_record(built, setting, _solve(built, setting, store, display))]
    for group in _products(groups.values()):
        display.started(group[0][0], others=len(group) - 1)
        with _naming(group[0][0], experiment):
            for (setting, task), result in zip(group, _sweep(group), strict=True):
                yield setting, [_record(task, setting, result)]


def _listed(runs: Run | Sequence[Run]) -> list[Run]:
    return [runs] if isinstance(runs, Run) else list(runs)


@contextmanager
def _naming(setting: Setting, experiment: Experiment) -> Iterator[None]:
    """Errors about arguments say which setting they are about."""
    try:
        yield
    except ReportError:
        raise
    except (ValueError, TypeError) as error:
        raise ExperimentError(f"{setting.words or experiment.name}: {error}") from error


def _arguments(task: Task) -> dict[str, Any]:
    return {
        "y0": task.y0,
        "rounds": task.rounds,
        "participation": task.participation,
        "metrics": task.metrics,
        "eval_every": task.eval_every,
        "progress": False,
        **task.options,
    }


def _solve(task: Task, setting: Setting, store: Store, display: Display) -> Result:
    posed = (task.problem, task.method, task.data, task.x0)
    arguments = {**_arguments(task), "seed": setting.seed}
    arguments["callbacks"] = (display.advanced, *task.options.get("callbacks", ()))
    saving = Checkpoint(store.checkpoint(setting), overwrite=True)
    try:
        try:
            result = solve(*posed, checkpoint=saving, resume=True, **arguments)
        except CheckpointError:  # of an older version of the experiment
            saving.file.unlink(missing_ok=True)
            result = solve(*posed, checkpoint=saving, **arguments)
    except Diverged as error:
        result = replace(error.result, history=_cut(error.result.history, task.rounds))
    if result.status == "interrupted":
        raise KeyboardInterrupt
    saving.file.unlink(missing_ok=True)
    return result


def _cut(history: Mapping[str, np.ndarray], rounds: int) -> dict[str, np.ndarray]:
    """The history of a run that diverged: its metrics are not numbers at the last round."""
    return {
        name: np.append(values, rounds if name == "round" else values[-1] if name in BOOKKEEPING else np.nan)
        for name, values in history.items()
    }


def _alike(task: Task) -> Any:
    """Equal for tasks that differ at most in real hyper-parameters and seeds."""
    start = hashlib.sha256()
    for leaf in jax.tree.leaves((task.x0, task.y0)):
        start.update(np.asarray(leaf).tobytes())
    plain = (task.rounds, task.eval_every, task.participation, *map(repr, sorted(task.options.items())))
    metrics = tuple(task.metrics.items())
    return task.problem, metrics, jax.tree.structure(task.method), id(task.data), plain, start.hexdigest()


def _products(groups: Iterable[list[Pair]]) -> Iterator[list[Pair]]:
    """The parts of groups that are all combinations of some methods and seeds; methods outermost."""
    for group in groups:
        by_method: dict[Any, list[Pair]] = {}
        for pair in group:
            leaves = tuple(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(pair[1].method))
            by_method.setdefault(leaves, []).append(pair)
        by_seeds: dict[Any, list[Pair]] = {}
        for pairs in by_method.values():
            by_seeds.setdefault(tuple(setting.seed for setting, _ in pairs), []).extend(pairs)
        yield from by_seeds.values()


def _sweep(group: Sequence[Pair]) -> list[Result]:
    task = group[0][1]
    seeds = list(dict.fromkeys(setting.seed for setting, _ in group))
    methods = [other.method for _, other in group[:: len(seeds)]]
    results = sweep(task.problem, methods, task.data, task.x0, seeds=seeds, **_arguments(task))
    return [replace(result, seconds=result.seconds / len(group)) for result in results]


def _record(task: Task, setting: Setting, result: Result) -> Run:
    """The run of a result."""
    if task.derive is not None:
        length = len(result.history["round"])
        more = {name: np.broadcast_to(values, length) for name, values in task.derive(result).items()}
        result = replace(result, history={**result.history, **more})
    label = task.label or str(setting.get("method") or type(task.method).__name__)
    cell = {key: value for key, value in setting.cell.items() if key != "method"}
    return Run.of(result, label, seed=setting.seed, setting=cell)
