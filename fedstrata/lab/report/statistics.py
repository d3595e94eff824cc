"""Groups of runs that differ only in their seed, and what is said about them: means, errors, intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtr, stdtrit

from fedstrata.lab.report.records import ReportError, RunRecord, Scalar, union
from fedstrata.lab.report.specs import Column
from fedstrata.lab.report.typesetting import readable

LEVEL = 0.95
FEW = 3  # seeds: too few for an interval that says anything, so that their runs are shown


def check_keys(runs: Sequence[RunRecord], keys: Iterable[str]) -> None:
    """Refuse keys that no run has.

    Raises:
        ReportError: which key, and which there are.
    """
    known = ["label", "method", *union(run.setting for run in runs)]
    for key in keys:
        if key not in known:
            raise ReportError(f"no run has a {key!r}; runs can be told apart by {known}")


def group(runs: Sequence[RunRecord], keys: Sequence[str]) -> dict[tuple[Scalar, ...], list[RunRecord]]:
    """Runs by their values of ``keys``, in order of appearance; within a group they must differ only in seed.

    A run without a key has None there: some lines of a plot may vary what others do not have.

    Raises:
        ReportError: if a group mixes settings, so that an average over it would not be one over seeds.
    """
    groups: dict[tuple[Scalar, ...], list[RunRecord]] = {}
    for run in runs:
        groups.setdefault(tuple(run.value(key) for key in keys), []).append(run)
    for values, members in groups.items():
        where = ", ".join(f"{key}={value}" for key, value in zip(keys, values, strict=True)) or "all runs"
        for key in ["label", *union(run.setting for run in members)]:
            if len({repr(run.value(key)) for run in members}) > 1:
                raise ReportError(
                    f"{where}: these runs differ in {key!r}, not only in their seed; add {key!r} to the keys "
                    "that tell rows, lines or panels apart, or leave runs out"
                )
        seeds = [run.seed for run in members]
        if len(set(seeds)) < len(seeds):
            raise ReportError(f"{where}: a seed occurs twice in {seeds}; every run needs its own")
    return groups


def name(key: str, value: Scalar) -> str:
    """``FedAvg`` for a label or a method, ``η = 0.1`` for a setting.

    >>> name("label", "FedAvg"), name("eta", 0.1), name("K", None)
    ('FedAvg', 'η = 0.1', 'without K')
    """
    if key == "series":  # of a metric of every client, whose it is
        return show(value).rpartition("/")[2]
    if key in ("label", "method"):
        return show(value)
    return f"without {readable(key)}" if value is None else f"{readable(key)} = {show(value)}"


def show(value: Scalar) -> str:
    """A setting's value as a reader wants it."""
    if value is None:
        return "–"
    return f"{value:g}" if isinstance(value, float) else str(value)


def number(run: RunRecord, column: Column) -> float | None:
    """A run's number in a column, or None where the run has no such metric."""
    if column.reduce == "run":
        return run.seconds
    if column.reduce in ("ledger", "certificate"):
        entry: Any = (run.ledger if column.reduce == "ledger" else run.certificate).get(column.metric)
        return None if entry is None else float(entry)
    series = run.history.get(column.metric)
    if series is None:
        return None
    match column.reduce:
        case "final":
            return float(series[-1])
        case "first":
            return float(series[0])
        case "mean_last":
            return float(np.mean(series[-column.last :]))
        case "reach":
            return _reach(run, series, column)
        case "best":
            return float(series.min() if column.better == "low" else series.max())
        case _:
            return float(series.min() if column.reduce == "min" else series.max())


def _reach(run: RunRecord, series: np.ndarray, column: Column) -> float | None:
    if column.at not in run.history:
        return None
    met = series <= column.target if column.better == "low" else series >= column.target
    return float(run.history[column.at][int(np.argmax(met))]) if met.any() else math.inf


def mean_error(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Mean, and its standard error s/√n, which is NaN for fewer than two values.

    >>> mean_error([1.0, 2.0, 3.0])
    (2.0, 0.5773502691896258)
    """
    array = np.asarray(values, float)
    if not np.isfinite(array).all() or not len(array):
        return (math.inf if np.isposinf(array).any() and not np.isnan(array).any() else math.nan), math.nan
    if len(array) > 1 and (array == array[0]).all():
        return float(array[0]), 0.0  # the mean of equal numbers is rounded, and would leave an error
    error = float(array.std(ddof=1) / math.sqrt(len(array))) if len(array) > 1 else math.nan
    return float(array.mean()), error


class Interval(NamedTuple):
    """Means with the bounds of their confidence interval (NaN for a single seed), or the extreme runs."""

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def t_interval(values: np.ndarray, level: float = LEVEL) -> Interval:
    """Student's interval mean ± t·s/√n over the first axis; of two or three values their extremes."""
    n = len(values)
    with np.errstate(invalid="ignore", over="ignore"):
        mean = values.mean(axis=0)
        if 2 <= n <= FEW:
            return Interval(mean, values.min(axis=0), values.max(axis=0))
        if n < 2:
            nothing = np.full_like(mean, np.nan)
            return Interval(mean, nothing, nothing)
        half = stdtrit(n - 1, 0.5 + level / 2) * values.std(axis=0, ddof=1) / math.sqrt(n)
        return Interval(mean, mean - half, mean + half)


def log_interval(values: np.ndarray, level: float = LEVEL) -> Interval:
    """Student's interval for the mean of the logarithms, taken back: the geometric mean and its bounds.

    NaN where a value is not above zero.

    >>> log_interval(np.array([1.0, 100.0])).mean
    np.float64(10.0)
    """
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        logs = np.log(np.where(values > 0, values, np.nan))
        return Interval(*map(np.exp, t_interval(logs, level)))


def paired_p(ours: Mapping[int, float], theirs: Mapping[int, float]) -> float:
    """The two-sided p-value of the paired t-test over the seeds that both have; 1 where it cannot be made.

    Without spread in the differences it is 0, or 1 where they are all zero.

    >>> round(paired_p({0: 1.0, 1: 2.0, 2: 3.0}, {0: 2.0, 1: 3.5, 2: 4.0}), 4)
    0.0198
    """
    seeds = sorted(ours.keys() & theirs.keys())
    differences = np.array([ours[seed] - theirs[seed] for seed in seeds])
    if len(seeds) < 2 or not np.isfinite(differences).all():
        return 1.0
    mean, error = mean_error(differences)
    if error == 0:
        return float(mean == 0)
    return float(2 * stdtr(len(seeds) - 1, -abs(mean / error)))
