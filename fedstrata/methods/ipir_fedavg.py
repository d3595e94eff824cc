"""IPIR-FedAvg: inexactly projected, iteratively regularised (Ebrahimi, Qiu, Cui, Yousefian; Algorithm 2).

    min_y f(y)   over   X = argmin h,   f nonconvex;   by   min_y F_λ(y) = f(y) + dist²(y, X)/(2λ)

    1  round t:
    2      x^t ≈ P_X(y^t): R_t rounds of StR-FedAvg on h(x) + η_t ½‖x − y^t‖²
    3      y^{t+1} ← y^t − γ (∇f(y^t)/S_f + (y^t − x^t)/λ)

| inner | R_t | γ̃_t | η_t | starts at | x^t is |
|---|---|---|---|---|---|
| paper | t | t^{−7/12} | 2 ln t/t^{5/12} | y^t | the θ-weighted average, θ = 1/(1 − ηγ̃/2) |
| weak_sharp | t | 2 ln t/t | given, ≤ α/(2‖∇F_λ‖) | y^t | the same average |
| warm | fixed | 1 | 1/(t+10) | x^{t−1} + y^t − y^{t−1} | the last iterate |

The first two are cases i and ii of Theorem 3; the second is for a weakly sharp argmin h, h − h* ≥ α dist.
Here t stands for max(t, 1) in R_t and t^{−7/12}, and for max(t, 2) next to a logarithm. The paper does not
say where the inner rounds start. Its η_t keeps x^t far from P_X(y^t) for any practical number of rounds; the
warm rule tracks the projection as y moves. The paper's (3) prints dist²/λ, but its gradient is that of
dist²/(2λ). The theory needs γ ≤ 3λ/(4(L_f λ + 2)), with L_f the curvature of f/S_f. For S_f and regularisers
see `fedstrata.methods._shared.regularized`. If f does not depend on data, line 3 needs no exchange.

The result's x is y^t and its y is x^{t−1}. Inner rounds count as lower-level; each draws a new cohort.
Reveals only averages. Needs gradients, and products for the scale.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedstrata.core import tree
from fedstrata.core.client import Client
from fedstrata.core.fed import Fed
from fedstrata.core.method import BatchSize, Count, Moment, Positive, method
from fedstrata.core.types import Integer, Key, PyTree, Real
from fedstrata.methods._shared.regularized import Regularized, Scale, StepSizes, direction
from fedstrata.methods.str_fedavg import averaged
from fedstrata.problems.classes import Selection
from fedstrata.problems.measured import Conditions, Practical

NEAR = 0.01  # λ in `IPIRFedAvg.practical`


class State(NamedTuple):
    """The iterate, its inexact projection, the start of the next inner rounds, and the scale."""

    x: PyTree  # y^t
    y: PyTree  # x^{t−1}
    warm: PyTree
    scale: Scale


@method
class IPIRFedAvg(Regularized[State]):
    """Gradient steps on f and on the distance to argmin h, with projections computed by inner rounds.

    Args:
        gamma: the step size γ.
        lam: the parameter λ of the Moreau envelope; smaller values end closer to argmin h.
        inner: ``"paper"``, ``"weak_sharp"`` (which needs ``eta``) or ``"warm"``; see the table.
        inner_rounds: R_t of the warm rule.
        K: local steps per inner round.
        gamma_g: the server's step size γ_g in an inner round.
        eta: the regularisation weight η_t instead of the rule's: a number or a function of the round.
        mu: the parameter of the Moreau envelope that smooths a secondary regulariser; None uses its
            proximal map.
        L_h: the divisor of the primary loss; None estimates its curvature, 1 leaves the loss unscaled.
        power_steps: the number of exchanges for that estimate.
        batch_size: samples per gradient; None uses all.
    """

    gamma: Positive  # γ
    lam: Positive  # λ
    inner: Literal["paper", "weak_sharp", "warm"] = "paper"
    inner_rounds: Count = 30
    K: Count = 1
    gamma_g: Positive = 1.0  # γ_g
    eta: Positive | None = None  # η
    mu: Positive | None = None  # μ
    L_h: Positive | None = None
    power_steps: Count = 20
    batch_size: BatchSize = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inner == "weak_sharp" and self.eta is None:
            raise ValueError(
                "IPIRFedAvg: inner='weak_sharp' needs eta, a constant η below a threshold of the problem."
            )

    def tuned(self, t: Integer) -> tuple[Integer, Real, Real]:
        """R_t, γ̃_t and η_t, by the table."""
        later = jnp.maximum(t, 2)
        eta = 1 / (t + 10) if self.inner == "warm" else 2 * jnp.log(later) * later ** (-5 / 12)
        if self.eta is not None:
            eta = self.eta
        if self.inner == "warm":
            return self.inner_rounds, 1.0, eta
        if self.inner == "weak_sharp":
            return jnp.maximum(t, 1), 2 * jnp.log(later) / later, eta
        return jnp.maximum(t, 1), jnp.maximum(t, 1) ** (-7 / 12), eta

    def cautions(self, moment: Moment) -> list[str]:
        return [] if self.inner == "weak_sharp" else self.flat(moment)

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """The warm rule, λ = 0.01, so that y is about 1 % of f's slope away, and γ = 3λ/(4(λ + 2))."""
        why = "lam = 0.01, gamma by the theorem's bound for f/S_f, inner rounds that follow y"
        return Practical(cls(3 * NEAR / (4 * (NEAR + 2)), NEAR, "warm"), 0.0, (why,), cost=31.0)

    def init(self, problem: Selection, x0: PyTree, y0: PyTree) -> State:
        return State(x0, x0, x0, Scale.unknown(x0))

    def inner_steps(
        self, problem: Selection, client: Client, key: Key, x: PyTree, anchor: PyTree, steps: StepSizes
    ) -> PyTree:
        return self.local_steps(_near(problem, anchor), client, key, x, steps)

    def secondary_gradient(self, problem: Selection, client: Client, key: Key, y: PyTree) -> PyTree:
        return direction(problem.f, client.valid, key, self.batch_size, y, self.mu)

    def inner_loop(self, problem: Selection, fed: Fed, key: Key, t: Integer, state: State) -> PyTree:
        """Line 2."""
        rounds, gamma, eta = self.tuned(t)
        anchor, inner = state.x, _near(problem, state.x)
        one = jnp.ones_like(state.scale.L_h)  # the distance's curvature
        steps = self.step_sizes(gamma, eta, state.scale._replace(L_f=one, S_f=one), safe=True)
        shrink = self.gamma_g * self.K * steps.f / 2  # ηγ̃/2

        def body(j: Integer, carry: tuple[PyTree, PyTree, Real]) -> tuple[PyTree, PyTree, Real]:
            x, average, weight = carry
            key_cohort, key_j = jax.random.split(jax.random.fold_in(key, j))
            moved = fed.average(self.inner_steps, key_j, x, anchor, steps, of=fed.redraw(key_cohort))
            average, weight = averaged(average, weight, x, shrink)
            return self.server_step(inner, x, moved, steps), average, weight

        x = state.warm if self.inner == "warm" else state.x
        with fed.level("lower"):
            last, average, _ = fed.repeat(rounds, body, (x, x, jnp.zeros_like(state.scale.L_h)))
        return last if self.inner == "warm" else average

    def round(self, problem: Selection, fed: Fed, key: Key, r: Integer, state: State) -> State:
        key_inner, key_f = jax.random.split(key)
        x, y = self.inner_loop(problem, fed, key_inner, r, state), state.x
        if problem.f.loss is None:
            g = direction(problem.f, None, key_f, None, y, self.mu)
        else:
            g = fed.average(self.secondary_gradient, key_f, y)
        pull, S_f = tree.scale(1 / self.lam, tree.sub(y, x)), state.scale.S_f
        new = tree.axpy(-self.gamma, tree.axpy(1 / S_f, g, pull), y)  # line 3
        if problem.f.regularizer is not None and self.mu is None:
            new = problem.f.regularizer.prox(new, self.gamma / S_f)
        return State(new, x, tree.add(x, tree.sub(new, y)), state.scale)


def _near(problem: Selection, anchor: PyTree) -> Selection:
    """The problem of line 2, whose f is ½‖x − anchor‖²."""
    return dataclasses.replace(problem, secondary=lambda x: tree.norm(tree.sub(x, anchor), squared=True) / 2)
