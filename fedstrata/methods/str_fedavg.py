"""StR-FedAvg: self-tuned regularised federated averaging (Ebrahimi, Qiu, Cui, Yousefian; Algorithm 1).

    min_x f(x)   over   x ∈ argmin h,      h = 1/m Σ_i E h_i(x, ζ),  f = 1/m Σ_i E f_i(x, ξ)

    1  server: γ̃ and η by the rule, from the number R of rounds; γ_ℓ ← γ̃/(γ_g K)
    2  server: send x̂ to the clients that take part
    3  client i, K times from y = x̂:
    4      draw ζ and ξ from D_i, independently
    5      y ← y − γ_ℓ (η ∇f_i(y, ξ)/S_f + ∇h_i(y, ζ)/L_h)
    6  client i: upload y − x̂
    7  server: x̄ ← the mean of the x̂ so far, including this one, with weights θ, θ², …
    8  server: x̂ ← x̂ + γ_g mean(y − x̂)

| rule | γ̃ | η | θ |
|---|---|---|---|
| convex | R^{−a}, a = 1/2 | R^{−b}, b = 1/4 | 1 |
| strongly_convex | (μ_f R)^{−a}, a = 2/3 | p ln R (μ_f R)^{−b}, b = 1/3 | 1/(1 − ηγ̃μ_f/2) |
| weak_sharp | R^{−a}, a = 1/2; with μ_f: p ln R/(μ_f R) | given, ≤ α/(2‖∇f(x*)‖) | 1; with μ_f as above |
| decreasing | 1 | 2/(r+8) in round r | 1 |
| geometric | 1; see below | 0.3 … 1e−6, by a constant factor per round | 1 |

The last two are not in the paper. They shrink the clients' steps and increase γ_g by the same factor,
γ_ℓ = s γ̃/(γ_g K) and γ_g/s, with s = max(8/(r+8), .01), or from 1 to .01 like η: the drift of K local steps
vanishes, and γ̃ is unchanged. With sampled clients or minibatches, γ̃ of "geometric" is 1/(1 + (r − R/2)/√R)
after R/2 rounds, so that the noise vanishes as well. A given γ̃ is not changed. The paper's guarantees are for
x̄, which is the result of the first three; the last two return x̂, because early iterates belong to a larger η.

L_h and S_f are estimated before round 0 (`fedstrata.methods._shared.regularized`); the paper's step ignores
them. μ_f in the table is the modulus of f/S_f. With an estimated L_h the rules' step sizes are bounded by
γ̃ ≤ 1/(1 + ηL_f/S_f) and γ_ℓ ≤ 1/(L_max/L_h + ηL_f/S_f), with the largest curvature L_max of one client's
loss. The original is unconstrained; here sets enter as in FedAvg.

Reveals only averages. Needs gradients, and products for the scale. K = 1 with the rule "decreasing" is the
iteratively regularised gradient method (Solodov 2007).
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core import tree
from fedstrata.core.fed import Fed
from fedstrata.core.method import BatchSize, Count, Moment, NonNegative, Positive, method
from fedstrata.core.types import Integer, Key, PyTree, Real
from fedstrata.methods._shared.regularized import Regularized, Scale, StepSizes
from fedstrata.problems.classes import Selection
from fedstrata.problems.measured import Conditions, Practical

PAPER = ("convex", "strongly_convex", "weak_sharp")
SHORTEST = 0.01  # the smallest s: in float32 the server's step, 1/s times as long, keeps five digits


class State(NamedTuple):
    """The iterate, the weighted average of those before it, and the scale."""

    x: PyTree  # x̂
    average: PyTree  # x̄
    weight: jax.Array  # Σ θ^j/θ^r: the total weight of the average, relative to the newest
    scale: Scale
    rest: PyTree  # the rounding error of the last step, which would accumulate over many short steps


@method
class StRFedAvg(Regularized[State]):
    """Federated averaging on ``h + ηf`` with η tuned to the number of rounds.

    Args:
        rule: the rule for the step size γ̃ and the regularisation weight η; see the table.
        K: local steps per round.
        gamma_g: the server's step size γ_g.
        mu_f: the modulus of strong convexity of f; None takes 1 in the rule "strongly_convex".
        eta: the regularisation weight η instead of the rule's: a number or a function of the round; the first
            η of "geometric".
        eta_end: the last η of "geometric".
        gamma: the step size γ̃ of a round instead of the rule's.
        a: the exponent of γ̃; None takes the rule's.
        b: the exponent of η; None takes the rule's.
        p: the factor of ln R.
        R: the horizon in the rules; None takes the run's number of rounds.
        mu: the parameter of the Moreau envelope that smooths a secondary regulariser; None uses its
            proximal map.
        L_h: the divisor of the primary loss; None estimates its curvature, 1 leaves the loss unscaled.
        power_steps: the number of exchanges for that estimate.
        batch_size: samples per gradient; None uses all.
        returns: the result, ``"average"`` or ``"last"``; None takes the average for the paper's rules.

    >>> import numpy as np, fedstrata as fs
    >>> data = fs.FederatedData.from_clients([{"a": np.array([[0.6, 0.8]]), "b": np.array([1.0])}])
    >>> def residual(x, s):
    ...     return 0.5 * (s["a"] @ x - s["b"]) ** 2
    >>> problem = fs.Selection(residual, lambda x: 0.5 * (x @ x))  # the solution of least norm
    >>> x0 = np.array([5.0, 0.0])
    >>> result = fs.solve(problem, fs.StRFedAvg(rule="geometric"), data, x0, rounds=500, progress=False)
    >>> result.x.round(3)
    Array([0.6, 0.8], dtype=float32)
    """

    rule: Literal["convex", "strongly_convex", "weak_sharp", "decreasing", "geometric"] = "convex"
    K: Count = 1
    gamma_g: Positive = 1.0  # γ_g
    mu_f: Positive | None = None  # μ_f
    eta: NonNegative | None = None  # η
    eta_end: Positive = 1e-6
    gamma: Positive | None = None  # γ̃
    a: Positive | None = None
    b: Positive | None = None
    p: Positive = 1.0
    R: Positive | None = None
    mu: Positive | None = None  # μ
    L_h: Positive | None = None
    power_steps: Count = 20
    batch_size: BatchSize = None
    returns: Literal["average", "last"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rule == "weak_sharp" and self.eta is None:
            raise ValueError(
                "StRFedAvg: the rule 'weak_sharp' needs eta, a constant η below the problem's threshold."
            )
        if self.rule == "geometric" and callable(self.eta):
            raise ValueError("StRFedAvg: the rule 'geometric' is a schedule already; give eta as a number.")
        if self.rule == "geometric" and self.eta is not None and not np.all(self.eta > 0):
            raise ValueError("StRFedAvg: the rule 'geometric' decreases from eta, which must be positive.")

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """The rule "geometric", which estimates all scales; only the horizon must be chosen."""
        return Practical(
            cls("geometric"), 0.0, ("eta decreases from 0.3 to 1e-6 over the rounds",), fades=True
        )

    def tuned(self, r: Integer, S_f: Real = 1.0) -> tuple[Real, Real]:
        """γ̃ and η in round ``r``, by the table, with the modulus of f/S_f."""
        R, mu_f = jnp.asarray(self.R), 1.0 if self.mu_f is None else self.mu_f / S_f
        a, b = (2 / 3, 1 / 3) if self.rule == "strongly_convex" else (1 / 2, 1 / 4)
        a, b = a if self.a is None else self.a, b if self.b is None else self.b
        gamma: Real
        eta: Any  # "weak_sharp" takes the user's
        if self.rule == "strongly_convex":
            gamma, eta = (mu_f * R) ** -a, self.p * jnp.log(R) / (mu_f * R) ** b
        elif self.rule == "weak_sharp" and self.mu_f is not None:
            gamma, eta = self.p * jnp.log(R) / (mu_f * R), self.eta
        elif self.rule in ("convex", "weak_sharp"):
            gamma, eta = R**-a, R**-b
        elif self.rule == "decreasing":
            gamma, eta = 1.0, 2 / (r + 8)
        else:
            first = 0.3 if self.eta is None else self.eta
            gamma, eta = 1.0, first * (self.eta_end / first) ** jnp.clip(r / jnp.maximum(R - 1, 1), 0, 1)
        if self.eta is not None and self.rule != "geometric":
            eta = self.eta
        return gamma if self.gamma is None else self.gamma, eta

    def faded(self, r: Integer) -> Real:
        """The factor of γ̃ of "geometric" in the second half, if clients or samples are drawn."""
        R = jnp.asarray(self.R)
        return 1 / (1 + jnp.maximum(r - R / 2, 0) / jnp.sqrt(R))

    def shortened(self, problem: Selection, r: Integer) -> Real:
        """The factor s of the clients' steps in the last two rules; the server's step is divided by it.

        It is 1 if each client has its own set X_i, because the sum of projected steps is not a multiple of s.
        """
        if self.rule in PAPER or self.K == 1 or self.gamma is not None or not problem.project.shared:
            return 1.0
        if self.rule == "decreasing":
            return jnp.maximum(8 / (r + 8), SHORTEST)
        return SHORTEST ** jnp.clip(r / jnp.maximum(jnp.asarray(self.R) - 1, 1), 0, 1)

    def cautions(self, moment: Moment) -> list[str]:
        return [] if self.rule == "weak_sharp" else self.flat(moment)

    def init(self, problem: Selection, x0: PyTree, y0: PyTree) -> State:
        scale = Scale.unknown(x0)
        return State(x0, x0, jnp.zeros_like(scale.L_h), scale, tree.zeros_like(x0))

    def round(self, problem: Selection, fed: Fed, key: Key, r: Integer, state: State) -> State:
        gamma, eta = self.tuned(r, state.scale.S_f)
        if self.draws(fed) and self.rule == "geometric" and self.gamma is None:
            gamma = self.faded(r)
        steps = self.step_sizes(gamma, eta, state.scale, safe=self.gamma is None)  # line 1
        short = self.shortened(problem, r)
        local = StepSizes(short * steps.h, short * steps.f)
        moved = tree.scale(1 / short, fed.average(self.local_steps, key, state.x, local))  # lines 2–6
        moved = tree.add(moved, state.rest)
        x = self.server_step(problem, state.x, moved, steps)  # line 8
        came = tree.sub(tree.axpy(self.gamma_g, moved, state.x), state.x)
        rest = tree.axpy(-1 / self.gamma_g, came, moved)
        shrink = self.gamma_g * self.K * steps.f * self.modulus(state.scale.S_f) / 2  # ηγ̃μ_f/(2S_f)
        average, weight = averaged(state.average, state.weight, state.x, shrink)  # line 7
        return State(x, average, weight, state.scale, rest)

    def modulus(self, S_f: Real) -> Real:
        """The μ_f of θ; if it is not given, the modulus of f/S_f is 1."""
        if self.rule == "strongly_convex":
            return S_f if self.mu_f is None else self.mu_f
        return self.mu_f if self.rule == "weak_sharp" and self.mu_f is not None else 0.0

    def output(self, state: State, memory: PyTree) -> tuple[PyTree, PyTree]:
        return (state.average if self.returned == "average" else state.x), None

    @property
    def returned(self) -> str:
        """Which iterate is the result."""
        return self.returns or ("average" if self.rule in PAPER else "last")


def averaged(average: PyTree, weight: Real, x: PyTree, shrink: Real) -> tuple[PyTree, jax.Array]:
    """Add a point to an average with the weights θ, θ², …, where θ = 1/(1 − shrink).

    ``weight`` is Σ_{j≤r} θ^j/θ^r, so the weight of the newest point is its reciprocal: weight ← 1 + weight/θ.
    It stays bounded although θ^r would overflow.
    """
    weight = 1 + weight * (1 - jnp.minimum(shrink, 1))
    return tree.lerp(1 / weight, average, x), weight
