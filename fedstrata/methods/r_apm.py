"""R-APM: regularised, accelerated proximal steps (Samadi, Burbano, Yousefian 2024), a centralised reference.

    min_x f(x)   over   x ∈ argmin h

    1  x' ← prox_{γ(r_h/L_h + η r_f/S_f)}(z − γ (∇h(z)/L_h + η ∇f(z)/S_f)),  η = R^{−b}, γ = 1/(1 + ηL_f/S_f)
    2  θ' ← (1 + √(1 + 4θ²))/2
    3  z ← x' + (θ − 1)/θ' (x' − x);   x ← x',  θ ← θ'

Nesterov's acceleration (FISTA) on h + ηf, with η tuned to the number R of rounds. With b = 1 the errors of
both levels decrease like 1/R: h + ηf is minimised to O(1/R²), and dividing by η leaves O(1/R) for f.

The clients send both gradients in one exchange and take no local steps, so the iterates are those of a single
machine with all the data. L_h, L_f and S_f, the L_f of smooth parts, are estimated before the first round
(`fedstrata.methods._shared.regularized`). Reveals only averages. Needs gradients, and products for the scale.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedstrata.core import tree
from fedstrata.core.fed import Fed
from fedstrata.core.method import BatchSize, Count, Positive, method
from fedstrata.core.types import Integer, Key, PyTree
from fedstrata.methods._shared.regularized import Regularized, Scale
from fedstrata.problems.classes import Selection
from fedstrata.problems.measured import Conditions, Practical


class State(NamedTuple):
    """The iterate, the extrapolated point, and the scale."""

    x: PyTree
    z: PyTree
    theta: jax.Array  # θ
    scale: Scale


@method
class RAPM(Regularized[State]):
    """Accelerated proximal gradient on ``h + ηf`` with η tuned to the number of rounds.

    Args:
        b: the exponent of η.
        eta: the regularisation weight η instead of the rule's.
        R: the horizon in the rule; None takes the run's number of rounds.
        mu: the parameter of the Moreau envelope that smooths a secondary regulariser; None uses its
            proximal map.
        L_h: the divisor of the primary loss; None estimates its curvature. If given, γ = 1.
        power_steps: the number of exchanges for that estimate.
        batch_size: samples per gradient; None uses all, as in the paper.
    """

    b: Positive = 1.0
    eta: Positive | None = None  # η
    R: Positive | None = None
    mu: Positive | None = None  # μ
    L_h: Positive | None = None
    power_steps: Count = 20
    batch_size: BatchSize = None

    full_participation = "its acceleration accumulates the error of sampled gradients, and diverges."

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """The exponent b = 1: η = 1/R, with which both levels' errors fall like 1/R."""
        return Practical(cls(), 0.0, ("eta = 1/R; scales are estimated",), fades=True)

    def init(self, problem: Selection, x0: PyTree, y0: PyTree) -> State:
        scale = Scale.unknown(x0)
        return State(x0, x0, scale.L_h, scale)

    def round(self, problem: Selection, fed: Fed, key: Key, r: Integer, state: State) -> State:
        g_h, g_f = fed.average(self.gradients, key, state.z)
        eta = jnp.asarray(self.R) ** -self.b if self.eta is None else self.eta
        steps = self.step_sizes(1.0, eta, state.scale, safe=True)
        moved = tree.scale(-1, tree.axpy(steps.h, g_h, tree.scale(steps.f, g_f)))
        x = self.server_step(problem, state.z, moved, steps)  # line 1
        theta = (1 + jnp.sqrt(1 + 4 * state.theta**2)) / 2  # line 2
        z = tree.axpy((state.theta - 1) / theta, tree.sub(x, state.x), x)  # line 3
        return State(x, z, theta, state.scale)
