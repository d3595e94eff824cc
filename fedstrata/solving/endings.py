"""Warnings at the end of a run with finite numbers: a metric far above its start, or x outside its set.

**Far above.** A metric that solving makes small, a function of x alone (`Problem.objective`), must not end
ten times above its start. One that also depends on y (`Problem.settling`) may rise while y
approaches its solution, but not to ten times the largest value of the run's first half; the same rule holds
for the first kind if its start is zero, which gives no scale.

**Outside.** Methods that pull towards a set instead of projecting onto it end where the pull and the slope
are in balance, and the objective there may be lower than any in the set. So do the means of points that
clients project onto sets of their own.

`fedstrata.certify` judges whether an answer is good.
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
from fedstrata.data.storage import Placed

FACTOR = 10.0  # above the start, or above the first half
FACTOR_OF_FEW = 1000.0  # where there are too few evaluations for halves
FEW = 16
ROUNDING = 1e-4  # how far outside, relative to ‖x‖, a projection may leave a float32
FEWEST = 20  # rounds that clients' own sets are looked at after: fewer are a trial
# Real hyper-parameters that no step becomes shorter by.
NO_STEPS = ("R", "p", "eta_end", "lam", "mu", "radius", "rho", "tol")


class Runaway(NamedTuple):
    """A metric's value at the start and at the end."""

    metric: str
    start: float
    end: float


def runaway(problem: Problem, method: Method, x0: PyTree, history: Mapping[str, Any]) -> Runaway | None:
    """The metric that ended far above where it should have, if one did."""
    rounding = 100 * float(max(jnp.finfo(leaf.dtype).eps for leaf in jax.tree.leaves(x0)))
    objective = problem.objective if method.judged_as(problem) is problem and _inside(problem, x0) else None
    for name in (objective, *problem.settling):
        values = np.asarray(history.get(name, ()) if name else (), float)
        if len(values) < 2:
            continue
        start, end = float(values[0]), float(values[-1])
        if name == objective and abs(start) > rounding * np.abs(values).max():
            far = end > start + FACTOR * abs(start)
        else:
            far = _grows(values)
        if far:
            return Runaway(str(name), start, end)
    return None


def _grows(values: np.ndarray) -> bool:
    """Whether the end is far above the first half's maximum; if that is zero, the second half is judged."""
    if len(values) < 2:
        return False
    factor = FACTOR if len(values) >= FEW else FACTOR_OF_FEW
    half = max(1, len(values) // 2)
    before = np.abs(values[:half]).max()
    return _grows(values[half:]) if before == 0 else bool(values[-1] > factor * before)


def _inside(problem: Problem, x0: PyTree) -> bool:
    """Whether the start is in the set; outside, the objective may be lower than anywhere inside."""
    project = problem.set_of_x
    if project.trivial:
        return True
    if not project.shared:
        return False
    return bool(tree.norm(tree.sub(x0, project(x0))) <= 1e-5 * (1 + tree.norm(x0)))


def in_words(ended: Sequence[tuple[Method, Runaway]], runs: int) -> list[str]:
    """One warning about all runs that ran away; empty if none did."""
    if not ended:
        return []
    method, its = ended[0]
    others = f" In all, {len(ended)} of the {runs} runs did." if len(ended) > 1 else ""
    return [
        f"{type(method).__name__} ran away: {its.metric} ended far above where it began, {its.start:.4g} → "
        f"{its.end:.4g}, though all numbers are finite. Lower the step size{steps_in_words(method)}, or "
        f"scale the data.{others}"
    ]


def steps_in_words(method: Method) -> str:
    """`` (gamma=0.1, eta=0.01)``, or ``""`` if the method has no step sizes."""
    steps = {n: v for n, v in method.describe().items() if isinstance(v, float) and n not in NO_STEPS}
    words = [f"{n}={v:g}" for n, v in steps.items()]
    if getattr(method, "gamma", 0.0) is None:
        words = ["gamma, which is the rule's own", *words]
    return f" ({', '.join(words)})" if words else ""


def ended_outside(problem: Problem, ended: Sequence[tuple[Method, PyTree]], data: Placed | None) -> list[str]:
    """One warning about all runs whose x is outside its set; empty if none is.

    Clients' own sets are checked only if their ``data`` is available.
    """
    shared = problem.set_of_x.shared
    if not ended or problem.set_of_x.trivial or (data is None and not shared):
        return []
    away = [(*_outside(problem, x, data), method) for method, x in ended]
    far = [each for each in away if each[0] > ROUNDING * (each[1] + ROUNDING)]
    if not far:
        return []
    distance, length, whose, method = max(far, key=lambda each: each[0] / (each[1] + ROUNDING))
    others = f" In all, {len(far)} of the {len(ended)} runs did." if len(far) > 1 else ""
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
    """The distance from the set (the largest, of clients' own sets), ‖x‖, and the client of that set."""
    project, length = problem.set_of_x, float(tree.norm(x))
    if project.shared or data is None:
        return float(tree.norm(tree.sub(x, project(x)))), length, 0
    gaps = data.each_client(lambda client: tree.norm(tree.sub(x, project(x, client))))
    return float(gaps.max()), length, int(gaps.argmax())
