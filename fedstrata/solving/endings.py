"""Warnings at the end of a run with finite numbers: the objective far above its start, or x outside its set.

Methods that pull towards a set instead of projecting onto it end where the pull and the slope are in balance,
and the objective there may be lower than any in the set. So do the means of points that clients project onto
sets of their own. `fedstrata.certify` judges whether an answer is good.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedstrata.core import tree
from fedstrata.core.method import Method
from fedstrata.core.problem import Problem
from fedstrata.core.types import PyTree
from fedstrata.data.storage import Placed
from fedstrata.support.words import described, documentation

FACTOR = 10.0  # above the start, or above the first half
ZERO = 1e-6  # relative to the end: a smaller start is a solution, around which there is noise
INSIDE = 1e-5  # how far from its set, relative to 1 + ‖x‖, a start counts as inside
ROUNDING = 1e-4  # how far outside, relative to ‖x‖, a projection may leave a float32
FEWEST = 20  # rounds that clients' own sets are looked at after: fewer are a trial


class Runaway(NamedTuple):
    """The objective at the start and at the end."""

    metric: str
    start: float
    end: float


def runaway(problem: Problem, method: Method, x0: PyTree, history: Mapping[str, Any]) -> Runaway | None:
    """The objective, if it depends on x alone and ended ten times above its start, or above the first half.

    From a start outside of the set it may have to rise, and from one at a value of zero by noise.
    """
    name, project = problem.objective, problem.set_of_x
    if name is None or name not in history or method.judged_as(problem) is not problem:
        return None
    inside = project.trivial or (project.shared and project.distance(x0) <= INSIDE * (1 + tree.norm(x0)))
    if not inside:
        return None
    values = np.asarray(history[name])
    sizes, end = np.abs(values[: max(1, len(values) // 2)]), float(values[-1])
    grown = end > FACTOR * sizes.max() > 0 or end > FACTOR * sizes[0] > FACTOR * ZERO * end
    return Runaway(name, float(values[0]), end) if grown else None


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


def step_sizes(method: Method) -> dict[str, Any]:
    """The hyper-parameters that the docstring calls step sizes, as plain values."""
    names = described("step size", method.hyperparameters, documentation(type(method)))
    return {name: value for name, value in method.describe().items() if name in names}


def steps_in_words(method: Method) -> str:
    """`` (alpha=0.1, beta=0.01)``, or ``""`` if the method has no step sizes."""
    words = [f"{name}={value:g}" for name, value in step_sizes(method).items() if isinstance(value, float)]
    if method.hyperparameters.keys() >= {"gamma"} and vars(method)["gamma"] is None:
        words = ["gamma, which is the rule's own", *words]
    return f" ({', '.join(words)})" if words else ""


def ended_outside(problem: Problem, ended: Sequence[tuple[Method, PyTree]], data: Placed | None) -> list[str]:
    """One warning about all runs whose x is outside its set; empty if none is.

    Clients' own sets are checked only if their ``data`` is available.
    """
    project = problem.set_of_x
    if not ended or project.trivial or (data is None and not project.shared):
        return []
    away = []
    for method, x in ended:
        gaps = project.distance(x) if data is None or project.shared else data.distances(project, x)
        away.append((float(jnp.max(gaps)), float(tree.norm(x)), int(jnp.argmax(gaps)), method))
    far = [each for each in away if each[0] > ROUNDING * (each[1] + ROUNDING)]
    if not far:
        return []
    distance, length, whose, method = max(far, key=lambda each: each[0] / (each[1] + ROUNDING))
    others = f" In all, {len(far)} of the {len(ended)} runs did." if len(far) > 1 else ""
    if not project.shared:
        return [
            f"{type(method).__name__} ended outside of clients' own sets: x is {distance:.3g} from that of "
            f"client {whose}, and ‖x‖ = {length:.3g}. A solution is in the sets of all clients, but a mean "
            "of points that clients project onto their own sets need not be. The penalty of the FedRZO "
            f"methods pulls towards all of them; with a smaller eta, x ends nearer.{others}"
        ]
    eta = method.describe().get("eta")
    nearer = f" A smaller eta (it is {eta:g}) ends nearer to the set." if isinstance(eta, float) else ""
    name = "project" if "project" in problem.sets else "project_x"
    return [
        f"{type(method).__name__} ended outside of the set: x is {distance:.3g} from it, and ‖x‖ = "
        f"{length:.3g}. The objective there may be lower than any in the set: take "
        f"problem.{name}(result.x) for a point of it.{nearer}{others}"
    ]
