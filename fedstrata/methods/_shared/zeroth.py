"""The practical rule of the zeroth-order methods: step size, smoothing radius and directions.

b = min(n, 32) orthogonal directions, on both sides:  E‖g‖² = (n/b) ‖∇F^η‖²,  with b = n it is ∇F^η itself
separate directions, p participants  γ = 1/(L (1 + (n/b − 1)/p))
shared directions                    γ = 1/(L n/b)
η ≥ ε_f √n/(10⁻³ ‖∇F‖), below which differences are lost in the rounding ε_f of F; at y(x) of a condition
number κ it is κ ε_f, for which η grows to a tenth of the distance to go
on a set the pull (x − P(x))/η has curvature 1/η, and x ends about η ‖∇F‖ outside: the pull does not scale
with F, so that in an unsuitable unit of F it is too weak, or so stiff that steps are tiny
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fedstrata.methods._shared.schedules import fading, falling
from fedstrata.problems.measured import Conditions, Measured

MOST = 32  # directions per step, at most
WIDE = 1e-2  # η, relative to the distance to go
WIDEST = 0.1  # η for the rounding of y, relative to the distance to go
ACCURATE = 1e-3  # the error that rounding may leave, relative to the first gradient
OUTSIDE = 5e-3  # the distance from a set, relative to the distance to go
STIFF = 1e3  # the curvature of the pull to a set, relative to F's
NARROWS = 1e-3  # the last η at kinks, relative to the first


class Choice(NamedTuple):
    """The rule's choice.

    Attributes:
        options: the method's step size γ, radius η and directions.
        rate: the rate at which the error decreases.
        reasons: the reasons, in words.
        fades: whether γ decreases.
    """

    options: dict[str, Any]
    rate: float
    reasons: tuple[str, ...]
    fades: bool = False


def value_doubts(at: Conditions) -> tuple[str, ...]:
    """A doubt about methods that use values only, if the loss has gradients."""
    return () if at.problem.without_derivatives else ("methods that use gradients of the loss are faster",)


def by_values(at: Conditions, F: Measured, *, own: bool, condition: float = 1.0) -> Choice:
    """The step size, radius and directions for a function F of which only values are used.

    Args:
        at: the problem's constants.
        F: the constants of the function to minimise.
        own: whether each client draws its own directions.
        condition: the condition number of the lower level, which multiplies rounding.
    """
    n, way = at.dimension, max(F.reach, at.constants.scale_x * np.sqrt(at.dimension)) or 1.0
    b = min(n, MOST)
    growth = 1 + (n / b - 1) / at.participants if own else n / b
    rounding = F.rounding * np.sqrt(n) / (ACCURATE * F.gradient) if F.gradient > 0 else 0.0
    rounding = max(rounding, min(rounding * condition, WIDEST * way)) if condition < np.inf else rounding
    eta: Any = max(WIDE * way, rounding)
    options: dict[str, Any] = {"directions": b, "orthogonal": True, "two_sided": True}
    reasons = [f"{b} orthogonal directions per step, two-sided; eta from the distance to go and rounding"]
    if F.kinked:
        first = F.reach / (F.gradient or 1.0) / growth
        options |= {"gamma": falling(first, at.rounds), "eta": falling(eta, at.rounds, NARROWS)}
        return Choice(options, 0.0, (*reasons, "F has kinks: gamma and eta decrease geometrically"), True)
    L = 1 / F.step
    gamma = 1 / (growth * L)
    if not at.problem.set_of_x.trivial:
        eta = max(min(eta, OUTSIDE * way / F.gradient if F.gradient > 0 else eta), rounding)
        gamma = 1 / (growth * L + 1 / eta)
        reasons.append("gamma below eta, because of the pull to the set")
        if F.gradient > 0 and (eta * F.gradient > 2 * OUTSIDE * way or 1 / eta > STIFF * growth * L):
            unit = OUTSIDE / (WIDE * F.gradient)
            reasons.append(f"the pull does not scale with the loss: multiply the loss by about {unit:.1g}")
    rate = gamma * max(F.mu, 0.0)
    if at.partial:
        options |= {"gamma": fading(gamma, rate / 2), "eta": eta}
        return Choice(
            options, 0.0, (*reasons, "gamma decreases, because the choice of clients adds noise"), True
        )
    return Choice(options | {"gamma": gamma, "eta": eta}, rate, (*reasons, f"gamma = 1/(L·{growth:.3g})"))
