"""Runs that end outside of the set of x that all clients share.

Methods that pull towards a set instead of projecting onto it end where the pull and the slope are in balance,
and the objective there may be lower than any in the set.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedstrata.core import tree
from fedstrata.core.method import Method
from fedstrata.core.problem import Problem
from fedstrata.core.types import PyTree

ROUNDING = 1e-4  # how far outside, relative to ‖x‖, a projection may leave a float32


def ended_outside(problem: Problem, found: Sequence[tuple[Method, PyTree]]) -> list[str]:
    """One warning about all runs whose x is outside; none where none is."""
    if not found or problem.set_of_x.trivial or not problem.set_of_x.shared:
        return []
    away = [(*_outside(problem, x), method) for method, x in found]
    far = [each for each in away if each[0] > ROUNDING * (each[1] + ROUNDING)]
    if not far:
        return []
    distance, length, method = max(far, key=lambda each: each[0] / (each[1] + ROUNDING))
    others = f" So did {len(far) - 1} others of the {len(found)} runs." if len(far) > 1 else ""
    eta = method.describe().get("eta")
    nearer = f" A smaller eta (it is {eta:g}) ends nearer to the set." if isinstance(eta, float) else ""
    name = "project" if "project" in problem.sets else "project_x"
    return [
        f"{type(method).__name__} ended outside of the set: x is {distance:.3g} from it, and ‖x‖ = "
        f"{length:.3g}. The objective there may be lower than any in the set: take "
        f"problem.{name}(result.x) for a point of it.{nearer}{others}"
    ]


def _outside(problem: Problem, x: PyTree) -> tuple[float, float]:
    """The distance from the set, and ‖x‖."""
    return float(tree.norm(tree.sub(x, problem.set_of_x(x)))), float(tree.norm(x))
