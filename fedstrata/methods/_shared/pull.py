"""The pull of the FedRZO family towards a set, (x − P(x))/η, and the step with which it turns into a push."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedstrata.core.method import Moment

LOOKS = 200  # rounds at which schedules are looked at


def overshooting(method: Any, moment: Moment) -> list[str]:
    """A caution where γ > 2η and x has a set; schedules are looked at all along the run.

    A step takes the distance from a set to |1 − γ/η| times itself, which then is more than it was.

    Args:
        method: with ``gamma`` and ``eta``, numbers or schedules.
        moment: nothing is said once the run has begun.
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
        f"Once x is outside, the pull (x − P(x))/eta makes the distance {gamma / eta - 1:.3g} times as large "
        "in every step, and the run diverges. Take gamma ≤ eta, or leave out a set that never holds x back."
    ]
