"""The practical rule of the methods that take values of F: their step, radius and directions.

b = min(n, 32) orthogonal directions, on both sides:  E‖g‖² = (n/b) ‖∇F^η‖²,  with b = n it is ∇F^η itself
own directions of p participants     γ = 1/(L (1 + (n/b − 1)/p))
directions that all share            γ = 1/(L n/b)
η ≥ ε_f √n/(10⁻³ ‖∇F‖), below which a difference is lost in the rounding ε_f of F
on a set the pull (x − P(x))/η has the curvature 1/η, and leaves x about η ‖∇F‖ outside
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fedstrata.methods._shared.schedules import fading, falling
from fedstrata.problems.measured import Conditions, Measured

MOST = 32  # directions of a step
WIDE = 1e-2  # η, relative to the way ahead
ACCURATE = 1e-3  # of the first gradient: the error that rounding may leave
OUTSIDE = 5e-3  # of a set, relative to the way ahead
NARROWS = 1e-3  # how far η falls at kinks


class Values(NamedTuple):
    """What the rule says.

    Attributes:
        options: of the method: the step γ, the radius η and the directions.
        rate: of the error's fall.
        reasons: in words.
        fades: whether γ falls.
    """

    options: dict[str, Any]
    rate: float
    reasons: tuple[str, ...]
    fades: bool = False


def by_values(at: Conditions, F: Measured, *, own: bool) -> Values:
    """Steps along values of F.

    Args:
        at: the problem's constants.
        F: of them those of the function that is made small.
        own: whether every client draws directions of its own.
    """
    n, way = at.dimension, max(F.reach, at.constants.scale_x * np.sqrt(at.dimension)) or 1.0
    b = min(n, MOST)
    growth = 1 + (n / b - 1) / at.participants if own else n / b
    rounding = F.rounding * np.sqrt(n) / (ACCURATE * F.gradient) if F.gradient > 0 else 0.0
    eta: Any = max(WIDE * way, rounding)
    options: dict[str, Any] = {"directions": b, "orthogonal": True, "two_sided": True}
    reasons = [f"{b} orthogonal directions a step, on both sides; eta from the way ahead and from rounding"]
    if F.kinked:
        first = F.reach / (F.gradient or 1.0) / growth
        options |= {"gamma": falling(first, at.rounds), "eta": falling(eta, at.rounds, NARROWS)}
        return Values(options, 0.0, (*reasons, "F has kinks: gamma and eta fall geometrically"), True)
    L = 1 / F.step
    gamma = 1 / (growth * L)
    if not at.problem.set_of_x.trivial:
        eta = max(min(eta, OUTSIDE * way / F.gradient if F.gradient > 0 else eta), rounding)
        gamma = 1 / (growth * L + 1 / eta)
        reasons.append("gamma below eta, as the pull to the set needs")
    rate = gamma * max(F.mu, 0.0)
    if at.partial:
        options |= {"gamma": fading(gamma, rate / 2), "eta": eta}
        return Values(options, 0.0, (*reasons, "gamma fades, as the choice of clients is noise"), True)
    return Values(options | {"gamma": gamma, "eta": eta}, rate, (*reasons, f"gamma = 1/(L·{growth:.3g})"))
