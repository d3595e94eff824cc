"""The step size that made a run diverge: compares the run's with those planned at its start.

a step size above 1.5 times the planned one is at fault
else, with two levels, x's is at fault if its ratio to y's is above 1.5 times the planned ratio
else, the constants at the last finite point are measured: a function may be more curved there
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from fedstrata.advice.constants import operations
from fedstrata.advice.recommend import conditions
from fedstrata.core.method import Method
from fedstrata.core.types import PyTree
from fedstrata.problems.measured import Conditions, NoRule
from fedstrata.solving.endings import step_sizes
from fedstrata.solving.result import Result

TOO_LONG = 1.5
MUCH = 10.0  # times the curvature at the start, if no rule tells which steps are too long
MOST = 2e11  # the most operations for a message: seconds on two cores


def at_fault(result: Result) -> str:
    """A sentence with the step size to lower, and its new value; empty if the constants do not show it."""
    with suppress(Exception):  # the words on why a run diverged must not fail
        return _at_fault(result)
    return ""


def _at_fault(result: Result) -> str:
    method, data = result.known_method, result.data
    if method is None or result.problem is None or result.start is None:
        return ""
    if data is None or data.source is not None or operations(result.problem, data, *result.start) > MOST:
        return ""
    try:
        at = _conditions(result, *result.start)
        its = type(method).practical(at)
    except NoRule:
        return ""
    mine, planned = first_steps(method), first_steps(its.method)
    both = [(name, mine[name], planned[name]) for name in planned if name in mine]
    reasons, over = "; ".join(its.reasons), [each for each in both if each[1] > TOO_LONG * each[2]]
    if over:
        alone = "" if len(over) > 1 else " alone"
        words = " and ".join(f"{name}{alone}, {now:.3g}, to {to:.3g}" for name, now, to in over)
        return f"Lower {words}: the constants at the start allow no more ({reasons})."
    if "lower" in at.constants.levels and len(both) > 1:
        (x, x_now, x_planned), (y, y_now, y_planned) = both[:2]
        allowed = x_planned / y_planned * y_now
        if x_now > TOO_LONG * allowed:
            return (
                f"Lower {x} alone, {x_now:.3g}, to {allowed:.3g}: with {y}={y_now:.3g}, x moves too fast "
                "for y to follow."
            )
    return _on_the_way(result, at, mine)


def _on_the_way(result: Result, begun: Conditions, mine: dict[str, float]) -> str:
    """The function with too much curvature at the last finite point for steps that suit the start."""
    at = _conditions(result, result.x, result.y)
    grown = {
        name: level.L / begun[name].L
        for name, level in at.constants.levels.items()
        if name in begun.constants.levels and begun[name].L > 0
    }
    name = max(grown, key=lambda each: grown[each], default="")
    try:
        planned = first_steps(type(result.method).practical(at).method)
        shorter = [f"{each}={to:.3g}" for each, to in planned.items() if mine.get(each, 0) > TOO_LONG * to]
        known = grown.get(name, 0) > TOO_LONG and bool(shorter)
    except NoRule:
        shorter, known = [], grown.get(name, 0) > MUCH
    if not known:
        return ""
    rule = f", where the rule takes {', '.join(shorter)}" if shorter else ""
    return (
        f"The constants at the start allow these steps, but on the way the curvature of {name!r} grew from "
        f"{begun[name].L:.3g} to {at[name].L:.3g}{rule}. Take shorter steps, keep x in a set, or take "
        '"auto", which measures again on its way.'
    )


def _conditions(result: Result, x: PyTree, y: PyTree) -> Conditions:
    """The constants at a point; the inner values of a composition are no part of it."""
    y = y if result.problem.has_y else None
    part = 1.0 if result.participation is None else result.participation
    return conditions(result.problem, result.data, x, y, weights=result.weights, participation=part)


def first_steps(method: Method) -> dict[str, float]:
    """The step sizes in the first round."""
    found = step_sizes(method.at(0))
    return {name: float(np.max(value)) for name, value in found.items() if isinstance(value, float | list)}
