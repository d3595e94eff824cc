"""The step size that made a run diverge: compares the run's with those planned at its start.

a step size above 1.5 times the planned one is at fault
else, with two levels, x's is at fault if its ratio to y's is above 1.5 times the planned ratio
"""

from __future__ import annotations

import numpy as np

from fedstrata.advice.constants import operations
from fedstrata.advice.recommend import conditions
from fedstrata.core.method import Method
from fedstrata.problems.measured import NoRule
from fedstrata.solving.endings import step_sizes
from fedstrata.solving.result import Result

TOO_LONG = 1.5
MOST = 2e11  # operations that a message is worth: seconds on two cores


def at_fault(result: Result) -> str:
    """A sentence with the step size to lower, and its new value; empty if the constants do not tell."""
    method, data = result.known_method, result.data
    if method is None or result.problem is None or result.start is None:
        return ""
    if data is None or data.source is not None or operations(result.problem, data, *result.start) > MOST:
        return ""
    try:
        part = 1.0 if result.participation is None else result.participation
        at = conditions(result.problem, data, *result.start, weights=result.weights, participation=part)
        its = type(method).practical(at)
    except NoRule:
        return ""
    mine, planned = _steps(method), _steps(its.method)
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
    return ""


def _steps(method: Method) -> dict[str, float]:
    """The step sizes in the first round."""
    found = step_sizes(method.at(0))
    return {name: float(np.max(value)) for name, value in found.items() if isinstance(value, float | list)}
