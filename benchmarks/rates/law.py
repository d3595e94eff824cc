"""A theorem's statement about one quantity, and the slope that is measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import fedstrata as fs

SEEDS = range(16)
LONG = (1024, 4096, 16384)


class Law(NamedTuple):
    """One theorem's statement about one quantity.

    Attributes:
        method: whose.
        theorem: which, and of what paper.
        quantity: what falls or grows.
        against: the variable.
        predicted: its exponent.
        sizes: values of the variable.
        measure: value → quantity.
    """

    method: str
    theorem: str
    quantity: str
    against: str
    predicted: float
    sizes: Sequence[int]
    measure: Callable[[int], float]


def slope(law: Law) -> tuple[float, float, list[float]]:
    """The least-squares slope in log–log, its standard error, and the values."""
    values = [law.measure(size) for size in law.sizes]
    x, y = np.log(law.sizes), np.log(np.maximum(values, 1e-300))
    (rise, start), residual = np.polyfit(x, y, 1), 0.0
    if len(x) > 2:
        residual = float(((y - rise * x - start) ** 2).sum() / (len(x) - 2) / ((x - x.mean()) ** 2).sum())
    return float(rise), math.sqrt(residual), values


def runs(problem: Any, method: Any, data: Any, x0: Any, rounds: int, **options: Any) -> list[fs.Result]:
    """Of all seeds, side by side."""
    options = {"seeds": SEEDS, "progress": False, "default_metrics": False, **options}
    return fs.sweep(problem, method, data, x0, rounds=rounds, **options)


def mean_of(results: Sequence[fs.Result], name: str) -> float:
    """Over rounds and seeds."""
    return float(np.mean([run.history[name].mean() for run in results]))


def exchanges(results: Sequence[fs.Result]) -> float:
    return float(results[0].ledger.exchanges)
