"""Runs that end far above where they began, with numbers that are finite all the while.

A metric that solving makes small, a function of x alone (`Problem.objective`), is to end below its start: ten
times above is no noise of a method that works. A metric that follows a second variable too
(`Problem.settling`) may rise while that finds its place, but then it settles: ten times above all of the
first half of the run is a run that grows without end. So is it judged, too, where the start of the first kind
is zero, or as good as zero beside what came after: a start at the solution gives no scale, and noise around
it is no growth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedstrata.core import tree
from fedstrata.core.method import Method
from fedstrata.core.problem import Problem
from fedstrata.core.types import PyTree

FACTOR = 10.0  # above the start, or above the first half
FACTOR_OF_FEW = 1000.0  # where there are too few evaluations for halves
FEW = 4


class Runaway(NamedTuple):
    """A metric's value at the start, and at the end, far above."""

    metric: str
    start: float
    end: float


def runaway(problem: Problem, method: Method, x0: PyTree, history: Mapping[str, Any]) -> Runaway | None:
    """The metric that ended far above where it should have, if one did."""
    rounding = float(np.sqrt(max(np.finfo(leaf.dtype).eps for leaf in jax.tree.leaves(x0))))
    objective = method.objective_of(problem)
    if objective is not None and objective in history and _inside(problem, x0):
        values = np.asarray(history[objective], float)
        start, end = float(values[0]), float(values[-1])
        if abs(start) <= rounding * np.abs(values).max():
            away = _grows(values, rounding)
        else:
            away = end > start + FACTOR * abs(start) + rounding
        if away:
            return Runaway(objective, start, end)
    for name in problem.settling:
        values = np.asarray(history.get(name, ()), float)
        if _grows(values, rounding):
            return Runaway(name, float(values[0]), float(values[-1]))
    return None


def _grows(values: np.ndarray, rounding: float) -> bool:
    """Whether the end is far above all of the first half; where that is zero, above all that came before."""
    if len(values) < 2:
        return False
    factor = FACTOR if len(values) >= FEW else FACTOR_OF_FEW
    before = np.abs(values[: max(1, len(values) // 2)]).max()
    if before <= rounding * np.abs(values).max():
        before = np.abs(values[:-1]).max()
    return bool(before > 0 and values[-1] > factor * before + rounding)


def _inside(problem: Problem, x0: PyTree) -> bool:
    """Whether the start is a point of the set; outside, an objective may be lower than any inside."""
    project = problem.set_of_x
    if project.trivial:
        return True
    if not project.shared:
        return False
    return bool(tree.norm(tree.sub(x0, project(x0))) <= 1e-5 * (1 + tree.norm(x0)))


def in_words(found: Sequence[tuple[Method, Runaway]], runs: int) -> list[str]:
    """One warning about all runs that ran away; none where none did."""
    if not found:
        return []
    method, (metric, start, end) = found[0]
    steps = {n: v for n, v in method.describe().items() if isinstance(v, float)}
    given = f" ({', '.join(f'{n}={v:g}' for n, v in steps.items())})" if steps else ""
    others = f" So did {len(found) - 1} others of the {runs} runs." if len(found) > 1 else ""
    return [
        f"{type(method).__name__} ran away: {metric} ended far above where it began, {start:.4g} → "
        f"{end:.4g}, though all numbers are finite. Lower the step size{given}, or scale the data.{others}"
    ]
