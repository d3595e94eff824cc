"""A warning of the FedRZO family: step sizes at which the pull towards a set, (x − P(x))/η, overshoots."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedstrata.core.method import Moment

LOOKS = 200  # rounds at which schedules are evaluated


def overshooting(method: Any, moment: Moment) -> list[str]:
    """A warning if γ > 2η and x has a set; schedules are evaluated at rounds throughout the run.

    A step multiplies the distance from the set by |1 − γ/η|, which then exceeds 1.

    Args:
        method: with ``gamma`` and ``eta``, numbers or schedules.
        moment: the warning is given only before the run.
    """
    rounds = moment.rounds
    if moment.state is not None or moment.problem.set_of_x.trivial:
        return []
    scheduled = callable(method.gamma) or callable(method.eta)
    looks = np.unique(np.linspace(0, max(rounds - 1, 0), LOOKS if scheduled else 1).astype(int))
    steps = [(at.gamma, at.eta, int(r)) for r in looks for at in [method.at(int(r))]]
    gamma, eta, r = max(((float(g), float(e), r) for g, e, r in steps), key=lambda step: step[0] / step[1])
    if gamma <= 2 * eta:
        return []
    when = f" in round {r}" if scheduled else ""
    return [
        f"{type(method).__name__}: gamma={gamma:g} is more than 2·eta={2 * eta:g}{when}, and x has a set. "
        f"Outside the set, every step with the pull (x − P(x))/eta multiplies the distance from it by "
        f"{gamma / eta - 1:.3g}, and the run diverges. Take gamma ≤ eta, or leave out a set that is never "
        "active."
    ]
