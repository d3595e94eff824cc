"""From settings to runs: one by one, or side by side those that share a program."""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import jax
import numpy as np

from fedstrata.core.types import PyTree
from fedstrata.engines.identity import configuration, host_functions, settings_of
from fedstrata.lab.experiments._display import Display, Watch
from fedstrata.lab.experiments._store import RunStore
from fedstrata.lab.experiments.base import Experiment, Setting, Task
from fedstrata.lab.experiments.errors import ExperimentError
from fedstrata.lab.report import ReportError, RunRecord
from fedstrata.solving.certificate import Certify, certify_at_end
from fedstrata.solving.checkpoint import Checkpoint
from fedstrata.solving.loop import solve
from fedstrata.solving.pose import Posed, pose
from fedstrata.solving.result import BOOKKEEPING, Result
from fedstrata.solving.stopping import Diverged
from fedstrata.solving.sweep import sweep

SWEPT = inspect.signature(sweep).parameters.keys()  # a task with further options is solved by itself
Pair = tuple[Setting, Task]
Answer = TypeVar("Answer")


class SolvedSetting(NamedTuple):
    """A setting's runs and their identity.

    ``remarks`` are what was warned of; ``result`` is there where a `Task` was solved.
    """

    setting: Setting
    runs: list[RunRecord]
    identity: dict[str, Any]
    remarks: tuple[str, ...] = ()
    result: Result | None = None


def identity_of(experiment: Experiment, setting: Setting) -> dict[str, Any]:
    """The identity that a setting's runs would have now."""
    if experiment.records:
        return _text(experiment)
    with _naming(setting, experiment):
        built = experiment.build(setting)
        return _identity(built, setting) if isinstance(built, Task) else _text(experiment)


def posed(task: Task, setting: Setting) -> Posed:
    """A task as `fedstrata.solve` poses it, without warnings, which are given when it is solved."""
    asked = ("weights", "default_metrics", "channel", "dropouts")
    options = {key: task.options[key] for key in asked if key in task.options}
    method, rounds = task.given
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pose(
            task.problem, method, task.data, task.x0, y0=task.y0, rounds=rounds, seed=setting.seed,
            participation=task.participation, eval_every=task.eval_every, metrics=task.metrics, **options,
        )  # fmt: skip


def _identity(task: Task, setting: Setting) -> dict[str, Any]:
    if task.method == "auto":
        return _identity_of_auto(task, setting)
    derived = {} if task.derive is None else host_functions({"derive": task.derive})
    return {**posed(task, setting).identity, "rounds": task.rounds, **derived}


def _identity_of_auto(task: Task, setting: Setting) -> dict[str, Any]:
    """Of a run whose programs are known only when it was measured: the code of its functions instead."""
    functions = {f"problem.{level.name}": level.function for level in task.problem.levels}
    return {
        **configuration(),
        **settings_of("problem", task.problem),
        **host_functions({**functions, **task.metrics}),
        "method": "auto",
        "data": f"contents {task.data.fingerprint}",
        "x0": _bytes(task.x0),
        "y0": _bytes(task.y0),
        "seed": setting.seed,
        "rounds": task.rounds,
        "participation": repr(task.participation),
        **{key: repr(value) for key, value in task.options.items()},
    }


def _text(experiment: Experiment) -> dict[str, Any]:
    """The identity of records that do not come from `fedstrata.solve`: the definition's own code."""
    return host_functions({"build": experiment.build})


def solve_all(
    experiment: Experiment,
    settings: Sequence[Setting],
    store: RunStore,
    display: Display,
    together: bool,
    certify: Certify = "auto",
) -> Iterator[SolvedSetting]:
    """The runs of all settings, each as soon as it is finished."""
    groups: dict[Hashable, list[Pair]] = {}
    for setting in settings:
        display.started(setting)
        with _naming(setting, experiment):
            built = experiment.build(setting)
            if not isinstance(built, Task):
                yield SolvedSetting(setting, _records(built), _text(experiment))
            elif together and built.method != "auto" and built.options.keys() <= SWEPT:
                groups.setdefault(_program(built), []).append((setting, built))
            else:
                with _heard(built) as said:
                    result = _solve(built, setting, store, display)
                yield _solved(built, setting, result, certify, said)
    for group in _products(groups.values()):
        display.started(group[0][0], others=len(group) - 1)
        with _naming(group[0][0], experiment):
            with _heard(group[0][1]) as said:  # of all; the first run keeps it
                results = _sweep(group, store)
            for (setting, task), result in zip(group, results, strict=True):
                yield _solved(task, setting, result, certify, said)
                said = []


def _solved(
    task: Task, setting: Setting, result: Result, certify: Certify, said: Sequence[str]
) -> SolvedSetting:
    # an engine that is an object has its samples elsewhere, and a failed run has its verdict already
    with _heard(task) as more:
        if result.status != "diverged" and isinstance(task.options.get("engine", ""), str):
            certify_at_end(result, certify)
    runs = [_record(task, setting, result)]
    told = [f"{'; '.join(result.notes)}."] if task.method == "auto" else []
    remarks = tuple(dict.fromkeys([*told, *said, *more]))
    return SolvedSetting(setting, runs, _identity(task, setting), remarks, result)


@contextmanager
def _heard(task: Task) -> Iterator[list[str]]:
    """Collect the warnings of this block for the report; warnings of other kinds reach the user."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        warnings.filterwarnings("ignore", r"\d+ of the \d+ runs diverged", UserWarning)  # the table says so
        yield said
    for each in caught:
        if not issubclass(each.category, UserWarning):
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        elif not task.silent:
            said.append(str(each.message))


def _records(built: object) -> list[RunRecord]:
    match built:
        case RunRecord():
            return [built]
        case [*runs] if all(type(run) is RunRecord for run in runs):
            return cast("list[RunRecord]", runs)
    raise ExperimentError(
        f"build must return a Task, a RunRecord or a list of them, but returned a {type(built).__name__}."
    )


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
        "y0": task.y0, "rounds": task.rounds, "participation": task.participation, "metrics": task.metrics,
        "eval_every": task.eval_every, "progress": False, "certify": False, **task.options,
    }  # fmt: skip


def _solve(task: Task, setting: Setting, store: RunStore, display: Display) -> Result:
    arguments = {**_arguments(task), "seed": setting.seed}
    if task.method == "auto":
        return solve(task.problem, "auto", task.data, task.x0, **arguments)
    arguments["callbacks"] = (Watch(display), *task.options.get("callbacks", ()))
    solver = functools.partial(solve, task.problem, task.method, task.data, task.x0, **arguments)
    try:
        return _resumed(solver, store.checkpoint([setting], [_identity(task, setting)]))
    except Diverged as error:
        return error.result


def _resumed(solver: Callable[..., Answer], file: Path) -> Answer:
    """The result of `solve` or `sweep`, continued from its checkpoint."""
    answer = solver(checkpoint=Checkpoint(file, overwrite=True), resume=True)
    file.unlink(missing_ok=True)
    return answer


def _program(task: Task) -> Hashable:
    """Equal for tasks that differ at most in real hyper-parameters, seeds and who holds which samples."""
    plain = (task.rounds, task.eval_every, task.participation, *map(repr, sorted(task.options.items())))
    metrics, method = tuple(task.metrics.items()), jax.tree.structure(task.method)
    return task.problem, metrics, method, plain, _bytes((task.x0, task.y0)), task.data.form()


def _bytes(tree: PyTree) -> str:
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def _lane(pair: Pair) -> tuple[int, int]:
    """The data and the seed of a task, which identify its lane."""
    return id(pair[1].data), pair[0].seed


def _products(groups: Iterable[list[Pair]]) -> Iterator[list[Pair]]:
    """The parts of groups that are all combinations of some methods and some lanes; methods outermost."""
    for group in groups:
        by_method: dict[Hashable, dict[Hashable, Pair]] = {}
        for pair in group:
            times = itertools.count()  # one method may stand there twice, under two labels
            while _lane(pair) in (lanes := by_method.setdefault((_bytes(pair[1].method), next(times)), {})):
                pass
            lanes[_lane(pair)] = pair
        by_lanes: dict[Hashable, list[Pair]] = {}
        for lanes in by_method.values():
            by_lanes.setdefault(tuple(lanes), []).extend(lanes.values())
        yield from by_lanes.values()


def _sweep(group: Sequence[Pair], store: RunStore) -> list[Result]:
    task = group[0][1]
    lanes = group[: len(set(map(_lane, group)))]
    methods, datasets = [each.given[0] for _, each in group[:: len(lanes)]], [each.data for _, each in lanes]
    data = task.data if all(data is task.data for data in datasets) else datasets
    arguments = {**_arguments(task), "seeds": [setting.seed for setting, _ in lanes]}
    del arguments["certify"]
    solver = functools.partial(sweep, task.problem, methods, data, task.x0, **arguments)
    settings, made_of = [setting for setting, _ in group], [_identity(each, own) for own, each in group]
    results = _resumed(solver, store.checkpoint(settings, made_of))
    part = 1 / len(group)
    return [replace(r, seconds=part * r.seconds, compiling=part * r.compiling) for r in results]


def _record(task: Task, setting: Setting, result: Result) -> RunRecord:
    """The record of a result."""
    if not result.history:
        name = type(task.method).__name__
        raise ValueError(f"{name}: a metric is not finite at the start, before the first round.")
    if result.status == "diverged":
        result = replace(
            result, history=_cut(result.history, result.ledger.rounds if task.rounds is None else task.rounds)
        )
    if task.derive is not None:
        length = len(result.history["round"])
        more = {name: np.broadcast_to(values, length) for name, values in task.derive(result).items()}
        result = replace(result, history={**result.history, **more})
    label = task.label or str(setting.get("method") or type(task.method).__name__)
    return RunRecord.of(result, label, seed=setting.seed, setting=setting.coordinates)


def _cut(history: Mapping[str, np.ndarray], rounds: int) -> dict[str, np.ndarray]:
    """The history of a run that diverged: its metrics are not numbers at the last round."""
    return {
        name: np.append(values, rounds if name == "round" else values[-1] if name in BOOKKEEPING else np.nan)
        for name, values in history.items()
    }
