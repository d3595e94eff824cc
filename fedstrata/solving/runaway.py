"""Runs that end above where they began, or go on growing, with numbers that are finite all the while.

A metric that solving makes small, a function of x alone (`Problem.objective`), is to end below its start: ten
times above is more than noise. So is a last quarter that is all above the start by a tenth, or that, on
average, has lost a fifth of what was gained on the way: such steps go back and forth.

A metric that follows a second variable too (`Problem.settling`) may rise while that finds its place, but then
it settles: ten times above all of the first half of the run is a run that grows without end, and so is one of
whose quarters each reaches half as far again as the one before: that is how a bilinear game spirals out. So
is it judged, too, where the start of the first kind is zero, or as good as zero beside what came after: a
start at the solution gives no scale, and noise around it must not count as divergence.

A metric that the second variable makes large (`Problem.maximised`) stands still at a saddle point. Where it
rises from quarter to quarter of the run's second half, by more than its noise, y is not yet the worst case
for x: x answers weights that nobody asked for, and looks as good as any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core import tree
from fedstrata.core.method import Method
from fedstrata.core.problem import Problem
from fedstrata.core.types import PyTree

FACTOR = 10.0  # above the start, or above the first half
FACTOR_OF_FEW = 1000.0  # where there are too few evaluations for halves
FEW = 4
MANY = 32  # evaluations that quarters of a run are judged by
WORSE = 0.1  # above the start
LOST = 0.2  # of what was gained
SPIRAL = 1.5  # from quarter to quarter
SOME = 16  # evaluations that a rise is judged by
RISE = 2e-3  # over the second half, of the metric there
# Real hyper-parameters that no step becomes shorter by.
NO_STEPS = ("R", "p", "eta_end", "lam", "mu", "radius", "rho", "tol")

AWAY = "ran away: {metric} ended far above where it began, {start:.4g} → {end:.4g}"
ABOVE = "made it worse: {metric} ended above where it began, {start:.4g} → {end:.4g}"
BACK = "goes back and forth: {metric} fell from {start:.4g} to {best:.4g}, but rose to {mean:.4g} again, the "
BACK += "last quarter's mean"
GROWS = "does not settle: {metric} reaches farther in every quarter of the run, {start:.4g} → {end:.4g}"
RISES = "does not settle: {metric} still rises, {start:.4g} → {end:.4g} in the second half of the run"
SLOW = "y is not yet the worst case for x, so that x is not the solution either. Give more rounds, or longer "
SLOW += "steps of y: where it weighs samples, a weight moves by its loss times its share of all samples."
UNFIT = " A method that does not suit the problem may do so at any step."
CONCAVE = " Where the payoff is not strongly concave in y no step may be short enough: subtract a λ/2‖y‖²."


class Runaway(NamedTuple):
    """A metric's value at the start (where it rises, of the second half), at the end, and what is wrong."""

    metric: str
    start: float
    end: float
    how: str = AWAY

    def __str__(self) -> str:
        return self.how.format(metric=self.metric, start=self.start, end=self.end)


def runaway(problem: Problem, method: Method, x0: PyTree, history: Mapping[str, Any]) -> Runaway | None:
    """The metric that ended far above where it should have, if one did."""
    rounding = float(np.sqrt(max(jnp.finfo(leaf.dtype).eps for leaf in jax.tree.leaves(x0))))
    objective = problem.objective if method.judged_as(problem) is problem else None
    if objective is not None and objective in history and _inside(problem, x0):
        values = np.asarray(history[objective], float)
        start, end = float(values[0]), float(values[-1])
        if abs(start) <= rounding * np.abs(values).max():
            how = AWAY if _grows(values, rounding) else None
        else:
            how = AWAY if end > start + FACTOR * abs(start) + rounding else _fell_back(values, rounding)
        if how is not None:
            return Runaway(objective, start, end, how)
    for name in problem.settling:
        values = np.asarray(history.get(name, ()), float)
        if _grows(values, rounding):
            return Runaway(name, float(values[0]), float(values[-1]))
        if _spirals(values, rounding):
            return Runaway(name, float(values[0]), float(values[-1]), GROWS)
    for name in problem.maximised:
        values = np.asarray(history.get(name, ()), float)
        if _rises(values, rounding):
            return Runaway(name, float(values[len(values) // 2]), float(values[-1]), RISES)
    return None


def _grows(values: np.ndarray, rounding: float) -> bool:
    """Whether the end is far above all of the first half; where that is as good as zero, by the second."""
    if len(values) < 2:
        return False
    factor = FACTOR if len(values) >= FEW else FACTOR_OF_FEW
    half = max(1, len(values) // 2)
    before = np.abs(values[:half]).max()
    if before <= rounding * np.abs(values).max() and len(values) > half + 1:
        return values[-1] > factor * np.abs(values[:-1]).max() > 0 or _grows(values[half:], rounding)
    return bool(before > 0 and values[-1] > factor * before + rounding)


def _fell_back(values: np.ndarray, rounding: float) -> str | None:
    """Whether the last quarter lies above the start, or on average far above what was reached before."""
    if len(values) < MANY:
        return None
    before, last = np.split(values, [-(len(values) // 4)])
    start, best = values[0], values.min()
    if last.min() > start + WORSE * abs(start) + rounding:
        return ABOVE
    gained, mean = start - before.min(), last.mean()
    reached = before.min() - best < LOST / 4 * gained  # or it fell late, which is not falling back
    if reached and gained > max(WORSE * abs(start), rounding) and mean - best > LOST * (start - best):
        return BACK.replace("{best:.4g}", f"{best:.4g}").replace("{mean:.4g}", f"{mean:.4g}")
    return None


def _spirals(values: np.ndarray, rounding: float) -> bool:
    """Whether every quarter reaches farther from zero than the one before, by a factor, up to the end."""
    if len(values) < MANY:
        return False
    reach = np.array([np.abs(quarter).max() for quarter in np.array_split(values, 4)])
    return bool(reach[0] > rounding and (reach[1:] > SPIRAL * reach[:-1]).all())


def _rises(values: np.ndarray, rounding: float) -> bool:
    """Whether each quarter of the second half is above the one before, by more than both swing."""
    if len(values) < SOME:
        return False
    half = values[len(values) // 2 :]
    quarters = np.array_split(half, 4)
    mean, swing = (np.array([f(quarter) for quarter in quarters]) for f in (np.mean, np.std))
    scale = max(RISE * np.abs(half).max(), rounding * np.abs(values).max())
    return bool(mean[-1] - mean[0] > scale and (np.diff(mean) > swing[1:] + swing[:-1]).all())


def _inside(problem: Problem, x0: PyTree) -> bool:
    """Whether the start is a point of the set; outside, an objective may be lower than any inside."""
    project = problem.set_of_x
    if project.trivial:
        return True
    if not project.shared:
        return False
    return bool(tree.norm(tree.sub(x0, project(x0))) <= 1e-5 * (1 + tree.norm(x0)))


def in_words(found: Sequence[tuple[Method, Runaway]], runs: int) -> list[str]:
    """One warning about all runs that ran away, and one about those that rise; none where none did."""
    away = [each for each in found if each[1].how != RISES]
    slow = [each for each in found if each[1].how == RISES]
    return [_in_words(few, runs) for few in (away, slow) if few]


def _in_words(found: Sequence[tuple[Method, Runaway]], runs: int) -> str:
    method, its = found[0]
    others = f" In all, {len(found)} of the {runs} runs did." if len(found) > 1 else ""
    if its.how == RISES:
        return f"{type(method).__name__} {its}: {SLOW}{others}"
    cause = CONCAVE if its.metric == "payoff" else UNFIT if its.how == ABOVE else ""
    return (
        f"{type(method).__name__} {its}, though all numbers are finite. Lower the step size"
        f"{steps_in_words(method)}, or scale the data.{cause}{others}"
    )


def steps_in_words(method: Method) -> str:
    """`` (gamma=0.1, eta=0.01)``, or nothing where no number of the method is a step."""
    steps = {n: v for n, v in method.describe().items() if isinstance(v, float) and n not in NO_STEPS}
    words = [f"{n}={v:g}" for n, v in steps.items()]
    if getattr(method, "gamma", 0.0) is None:
        words = ["gamma, which is the rule's own", *words]
    return f" ({', '.join(words)})" if words else ""
