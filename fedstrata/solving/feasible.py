"""Runs that end outside of the set of x: of the one that all clients share, or of a client's own.

Methods that pull towards a set instead of projecting onto it end where the pull and the slope are in balance,
and the objective there may be lower than any in the set. So do the means of points that clients project onto
sets of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedstrata.core import tree
from fedstrata.core.method import Method
from fedstrata.core.problem import Problem
from fedstrata.core.types import PyTree
from fedstrata.data.storage import Placed

ROUNDING = 1e-4  # how far outside, relative to ‖x‖, a projection may leave a float32
FEWEST = 20  # rounds that clients' own sets are looked at after: fewer are a trial


def ended_outside(problem: Problem, found: Sequence[tuple[Method, PyTree]], data: Placed | None) -> list[str]:
    """One warning about all runs whose x is outside; none where none is.

    Clients' own sets are looked at where their ``data`` is at hand.
    """
    shared = problem.set_of_x.shared
    if not found or problem.set_of_x.trivial or (data is None and not shared):
        return []
    away = [(*_outside(problem, x, data), method) for method, x in found]
    far = [each for each in away if each[0] > ROUNDING * (each[1] + ROUNDING)]
    if not far:
        return []
    distance, length, whose, method = max(far, key=lambda each: each[0] / (each[1] + ROUNDING))
    others = f" In all, {len(far)} of the {len(found)} runs did." if len(far) > 1 else ""
    eta = method.describe().get("eta")
    nearer = f" A smaller eta (it is {eta:g}) ends nearer to the set." if isinstance(eta, float) else ""
    if not shared:
        return [
            f"{type(method).__name__} ended outside of clients' own sets: x is {distance:.3g} from that of "
            f"client {whose}, and ‖x‖ = {length:.3g}. The problem asks for a point of all of them, and means "
            "of points that each client projects onto its own are none. The penalty of FedRZO and its kin "
            f"draws towards all of them, and the smaller its eta, the nearer x ends.{others}"
        ]
    name = "project" if "project" in problem.sets else "project_x"
    return [
        f"{type(method).__name__} ended outside of the set: x is {distance:.3g} from it, and ‖x‖ = "
        f"{length:.3g}. The objective there may be lower than any in the set: take "
        f"problem.{name}(result.x) for a point of it.{nearer}{others}"
    ]


def _outside(problem: Problem, x: PyTree, data: Placed | None) -> tuple[float, float, int]:
    """The distance from the set, of clients' own sets the largest, ‖x‖, and whose set that is."""
    project, length = problem.set_of_x, float(tree.norm(x))
    if project.shared or data is None:
        return float(tree.norm(tree.sub(x, project(x)))), length, 0
    gaps = data.each_client(lambda client: tree.norm(tree.sub(x, project(x, client))))
    return float(gaps.max()), length, int(gaps.argmax())
