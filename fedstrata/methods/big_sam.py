"""BiG-SAM: bilevel gradients and sequential averaging (Sabach, Shtern 2017), a centralised reference.

    min_x f(x)   over   x ∈ argmin h,   f strongly convex

    1  y ← P(x − t ∇h(x)),            t = 1/L_h
    2  z ← x − s ∇f(x),               s = 2/(L_f + σ)
    3  x ← α_k z + (1 − α_k) y,       α_k = min(2c/(k (1 − β)), 1),  k = 1, 2, …

β = (L_f − σ)/(L_f + σ) is the contraction factor of line 2 with that step size s. P is the proximal map of
h's regulariser, or the projection onto the set; a regulariser of f enters by its Moreau envelope, which
needs μ.

The clients send both gradients in one exchange and take no local steps, so the iterates are those of a single
machine with all the data. L_h and L_f are estimated (`fedstrata.methods._shared.regularized`).
Reveals only averages. Needs gradients, and products for the scale.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from fedstrata.core import tree
from fedstrata.core.fed import Fed
from fedstrata.core.method import BatchSize, Count, Fraction, Positive, method
from fedstrata.core.types import Integer, Key, PyTree
from fedstrata.methods._shared.regularized import Regularized, Scale
from fedstrata.problems.classes import Selection
from fedstrata.problems.measured import WELL, Conditions, NoRule, Practical


class State(NamedTuple):
    """The iterate and the scale."""

    x: PyTree
    scale: Scale


@method
class BiGSAM(Regularized[State]):
    """Averages of a gradient step on f and one on h, with a weight of the first that decreases like 1/k.

    Args:
        mu_f: the modulus σ of strong convexity of f; None takes L_f, exact for multiples of ½‖x − a‖².
        c: the factor c of α_k, at most 1.
        L_f: the curvature of f; None estimates it.
        mu: the parameter of the Moreau envelope that smooths a secondary regulariser.
        L_h: the curvature of h; None estimates it.
        power_steps: the number of exchanges for the estimates.
        batch_size: samples per gradient; None uses all, as in the paper.
    """

    mu_f: Positive | None = None  # σ
    c: Fraction = 1.0
    L_f: Positive | None = None
    mu: Positive | None = None  # μ
    L_h: Positive | None = None
    power_steps: Count = 20
    batch_size: BatchSize = None

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """The method estimates its scales; σ is f's μ, if it could be measured."""
        if at.problem.f.regularizer is not None:
            raise NoRule("f has a regulariser, and its smoothing parameter mu cannot be chosen by a rule")
        f = at.constants.levels.get("secondary")
        sigma = None if f is None or not f.mu > WELL * f.L else f.mu
        noisy = ("h's step size is constant, so the noise of sampled clients remains",) if at.partial else ()
        why = "f's weight decreases like 1/r; scales are estimated"
        return Practical(cls(mu_f=sigma), 0.0, (why,), doubts=noisy)

    def check(self, problem: Selection, clients: int) -> None:
        super().check(problem, clients)
        if problem.f.regularizer is not None and self.mu is None:
            raise ValueError("BiGSAM needs a differentiable f: give mu, which smooths its regulariser.")
        if self.L_h is not None and self.L_f is None:
            raise ValueError("BiGSAM estimates the curvatures of h and f together: give L_f with L_h.")

    def init(self, problem: Selection, x0: PyTree, y0: PyTree) -> State:
        return State(x0, Scale.unknown(x0))

    def start(self, problem: Selection, fed: Fed, key: Key, state: State) -> State:
        scale = self.scale(problem, fed, key, state.x)
        if self.L_f is not None:
            scale = scale._replace(L_f=jnp.asarray(self.L_f))
        L_f = jnp.maximum(scale.L_f, self.mu_f) if self.mu_f is not None else scale.L_f
        return state._replace(scale=scale._replace(L_f=jnp.where(L_f > 0, L_f, 1)))

    def round(self, problem: Selection, fed: Fed, key: Key, r: Integer, state: State) -> State:
        g_h, g_f = fed.average(self.gradients, key, state.x)
        t, L_f = 1 / state.scale.L_h, state.scale.L_f
        y = tree.axpy(-t, g_h, state.x)  # line 1
        if problem.h.regularizer is not None:
            y = problem.h.regularizer.prox(y, t)
        sigma = L_f if self.mu_f is None else self.mu_f
        z = tree.axpy(-2 / (L_f + sigma), g_f, state.x)  # line 2
        contraction = (L_f - sigma) / (L_f + sigma)
        alpha = jnp.minimum(2 * self.c / ((r + 1) * (1 - contraction)), 1)
        return State(tree.lerp(alpha, problem.project(y), z), state.scale)  # line 3
