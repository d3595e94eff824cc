"""FedAC (Yuan, Ma 2020): federated accelerated stochastic gradient descent.

    min_x  1/m Σ_i E f_i(x, ξ)   over X,  f μ-strongly convex

    1  server: send w, w_ag to the clients that take part
    2  client i, K times:
    3      w_md ← w/β + (1 − 1/β) w_ag;  draw ξ from D_i;  g ← ∇f_i(P_X(w_md), ξ)
    4      w_ag ← w_md − η g
    5      w ← (1 − 1/α) w + w_md/α − γ g
    6  server: w, w_ag ← P_X(the means of the clients'); x is w_ag

    γ = max(η, √(η/(μK)))
    variant I:   α = 1/(γμ),          β = α + 1
    variant II:  α = 3/(2γμ) − 1/2,   β = (2α² − 1)/(α − 1)

The original is unconstrained; here sets enter as in FedAvg.

Reveals only averages. Needs gradients. With one client and K = 1 it is accelerated gradient descent.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedstrata.core import tree
from fedstrata.core.client import Client
from fedstrata.core.counting import loop
from fedstrata.core.fed import Fed
from fedstrata.core.method import BatchSize, Count, Method, Positive, method
from fedstrata.core.types import Integer, Key, PyTree, Real
from fedstrata.estimators.gradients import gradient
from fedstrata.methods._shared.rules import descent, own_sets, scale
from fedstrata.problems.classes import Minimization
from fedstrata.problems.measured import Conditions, NoRule, Practical

FLAT = 1e-4  # relative to L: replaces a smaller μ in `FedAC.practical`


class State(NamedTuple):
    """The server's two sequences."""

    x: PyTree  # w_ag
    w: PyTree


@method
class FedAC(Method[Minimization, State]):
    """``K`` accelerated local steps.

    Args:
        eta: the step size η ≤ 1/L.
        mu: the modulus μ of strong convexity, or a substitute for it.
        K: local steps per round.
        batch_size: samples per gradient; None uses all.
        variant: ``"I"`` or ``"II"``, the two couplings of the paper.
    """

    eta: Positive  # η
    mu: Positive  # μ
    K: Count = 1
    batch_size: BatchSize = None
    variant: Literal["I", "II"] = "I"

    solves = (Minimization,)
    private_samples = True

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """η = 1/L, K = 1, which has no drift, and the measured μ."""
        its = at["loss"]
        if its.kinked:
            raise NoRule("its acceleration assumes a smooth loss")
        if at.compressed:
            raise NoRule("its momentum adds up the errors of compression")
        steps, mu = descent(at, its), max(its.mu, FLAT * scale(its))
        noise = ("acceleration amplifies the noise of sampled clients",) if steps.fades else ()
        rate = 0.0 if steps.fades or not its.mu > 0 else float(np.sqrt(steps.rate))
        return steps.of(cls(steps.gamma, mu), "mu as measured", rate=rate, doubts=noise + own_sets(at))

    def init(self, problem: Minimization, x0: PyTree, y0: PyTree) -> State:
        return State(x0, x0)

    def coupling(self) -> tuple[Real, Real, Real]:
        """α, β and γ."""
        gamma = jnp.maximum(self.eta, jnp.sqrt(self.eta / (self.mu * self.K)))
        if self.variant == "I":
            alpha = 1 / (gamma * self.mu)
            return alpha, alpha + 1, gamma
        alpha = 3 / (2 * gamma * self.mu) - 0.5
        return alpha, (2 * alpha**2 - 1) / (alpha - 1), gamma

    def local_steps(
        self, problem: Minimization, client: Client, key: Key, w: PyTree, w_ag: PyTree
    ) -> tuple[PyTree, ...]:
        """Lines 2 to 5."""
        alpha, beta, gamma = self.coupling()

        def step(both: tuple[PyTree, PyTree], key: Key) -> tuple[PyTree, PyTree]:
            w, w_ag = both
            w_md = tree.lerp(1 / beta, w_ag, w)
            f = client.mean(problem.loss, key, self.batch_size)
            g = gradient(f, problem.project.common(w_md))  # line 3
            w_ag = tree.axpy(-self.eta, g, w_md)  # line 4
            w = tree.axpy(-gamma, g, tree.lerp(1 / alpha, w, w_md))  # line 5
            return problem.project.own(w, client), problem.project.own(w_ag, client)

        return loop(self.K, step, key, (w, w_ag))  # line 2

    def round(self, problem: Minimization, fed: Fed, key: Key, r: Integer, state: State) -> State:
        both = fed.average(self.local_steps, key, state.w, state.x, around=(state.w, state.x))  # line 1
        w, w_ag = (problem.project.common(one) for one in both)  # line 6
        return State(w_ag, w)
