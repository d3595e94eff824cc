"""A Stackelberg–Nash–Cournot game with its exact solution, for tests and for trying out two-stage methods.

A leader sells x, then ñ followers play a Cournot game on a market with random demand p(q, ξ) = a(ξ) − b q:

    followers   max_{0 ≤ y_j ≤ ŷ_j}  y_j p(x + Σ_ℓ y_ℓ, ξ) − ½ c_j y_j²
    leader      min_{0 ≤ x ≤ x̂}      E[½ c_0 x² − x p(x + Σ_ℓ y_ℓ(x, ξ), ξ)]

The followers' game is VI(∏[0, ŷ_j], G) with ``G(x, y, ξ) = (c + b) ⊙ y − a(ξ) + b (x + Σ_ℓ y_ℓ)``, whose
Jacobian diag(c + b) + b 11ᵀ gives μ = min c + b and L ≤ max c + b + b ñ.

Equilibrium. Written with the price p = a − b(x + Σ y_ℓ), a follower's condition is ``y_j = clip(p/(c_j +
b), 0, ŷ_j)``, so that

    φ(p) = p + b Σ_j clip(p/(c_j + b), 0, ŷ_j) = a − b x

and φ is increasing and piecewise linear with knots at 0 and (c_j + b) ŷ_j: its inverse is an interpolation,
exact for active and inactive bounds. If all bounds are inactive, φ(p) = D p with D = 1 + b Σ 1/(c_j + b), and
the leader's optimum is ``x* = E a/(c_0 D + 2b)``.

Leader. The price decreases in x, linearly between knots, so the objective is a convex quadratic on each of at
most N(ñ + 1) + 1 pieces for N samples. Sorting the knots and summing the slopes gives all pieces; the best of
their minimisers is the global optimum.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np

from fedstrata.core.types import Array, PyTree
from fedstrata.data.federated import FederatedData
from fedstrata.problems.classes import MPEC
from fedstrata.problems.sets import Box

Numbers: TypeAlias = np.ndarray | float


@dataclass(frozen=True, eq=False)
class Cournot:
    """The game: a problem with its data, and its closed forms (NumPy, float64).

    Attributes:
        problem: the `MPEC`, with its exact ``solution``; x is one number, y has one entry per follower.
        data: the clients' samples of the demand, ``{"a": a(ξ)}``.
        b: the slope of the demand.
        c0: the leader's cost.
        c: the followers' costs.
        caps: the followers' capacities ŷ.
        x_cap: the leader's capacity x̂.
    """

    problem: MPEC
    data: FederatedData
    b: float
    c0: float
    c: np.ndarray
    caps: np.ndarray
    x_cap: float

    @property
    def demands(self) -> np.ndarray:
        """a(ξ) of all samples of all clients, which have equal numbers of samples."""
        return np.asarray(self.data.train["a"], np.float64).ravel()

    @property
    def monotonicity(self) -> tuple[float, float]:
        """``(μ, L)`` of the followers' map: the extreme eigenvalues of diag(c + b) + b 11ᵀ."""
        eigenvalues = np.linalg.eigvalsh(np.diag(self.c + self.b) + self.b)
        return float(eigenvalues[0]), float(eigenvalues[-1])

    def price(self, x: Numbers, a: Numbers) -> np.ndarray:
        """The market price at equilibrium; arrays of x and of demands are broadcast."""
        knots, values = _knots(self.b, self.c, self.caps)
        return _inverse(np, knots, values, np.asarray(a, np.float64) - self.b * np.asarray(x, np.float64))

    def equilibrium(self, x: Numbers, a: Numbers) -> np.ndarray:
        """The followers' equilibrium y(x, ξ), for arrays of x and of demands; followers on the last axis."""
        return np.clip(self.price(x, a)[..., None] / (self.c + self.b), 0, self.caps)

    def objective(self, x: Numbers) -> np.ndarray:
        """The leader's exact objective, for an array of x."""
        x = np.asarray(x, np.float64)
        return self.c0 * x**2 / 2 - x * self.price(x[..., None], self.demands).mean(-1)

    @property
    def inactive(self) -> bool:
        """Whether every follower is strictly between its bounds at the optimum, for every sample."""
        y = self.equilibrium(self.optimum[0], self.demands)
        return bool(((y > 0) & (y < self.caps)).all())

    @property
    def closed_form(self) -> float:
        """``x* = E a/(c_0 D + 2b)``: the leader's optimum if all bounds of the followers are inactive."""
        D = 1 + self.b * (1 / (self.c + self.b)).sum()
        return float(np.clip(self.demands.mean() / (self.c0 * D + 2 * self.b), 0, self.x_cap))

    @property
    def optimum(self) -> tuple[float, float]:
        """The leader's global optimum ``(x*, f(x*))``, exact up to rounding."""
        knots, values = _knots(self.b, self.c, self.caps)
        slopes = np.concatenate([[1.0], np.diff(knots) / np.diff(values), [1.0]])
        # The price of one sample, as x grows: knots in reverse, slopes −b times those of φ⁻¹.
        at = (self.demands[:, None] - values[None, ::-1]) / self.b
        change = np.broadcast_to(-self.b * np.diff(slopes[::-1]), at.shape) / len(at)
        inside = (at > 0) & (at < self.x_cap)
        order = np.argsort(at[inside], kind="stable")
        left = np.concatenate([[0.0], at[inside][order]])
        right = np.append(left[1:], self.x_cap)
        first = -self.b * slopes[np.searchsorted(values, self.demands)].mean()
        slope = first + np.concatenate([[0.0], np.cumsum(change[inside][order])])
        price = self.price(0.0, self.demands).mean() + np.concatenate(
            [[0.0], np.cumsum(slope * (right - left))[:-1]]
        )
        # ½c₀x² − x(price + slope (x − left)) on [left, right], with slope ≤ 0.
        best = np.clip((price - slope * left) / (self.c0 - 2 * slope), left, right)
        value = self.c0 * best**2 / 2 - best * (price + slope * (best - left))
        piece = int(np.argmin(value))
        return float(best[piece]), float(value[piece])


def cournot_game(
    followers: int = 10,
    b: float = 1.0,
    clients: int = 5,
    samples: int = 100,
    seed: int = 0,
    *,
    demand: tuple[float, float] = (7.5, 12.5),
    costs: tuple[float, float] = (0.09, 0.11),
    caps: tuple[float, float] = (2.0, 4.0),
    x_cap: float = 10.0,
) -> Cournot:
    """A game with costs, capacities and demands drawn uniformly, by default as in the paper's section 6.4.

    Args:
        followers: the number ñ of followers.
        b: the slope of the demand.
        clients: the number of clients.
        samples: the number of samples of a client.
        seed: the seed of the draw.
        demand: the range of a(ξ).
        costs: the range of c_0 and c_j.
        caps: the range of the followers' capacities.
        x_cap: the leader's capacity.

    >>> import fedstrata as fs
    >>> game = fs.cournot_game(followers=20, b=0.5)
    >>> x, value = game.optimum
    >>> game.inactive, abs(x - game.closed_form) < 1e-9
    (True, True)
    """
    for name, value in (("followers", followers), ("clients", clients), ("samples", samples)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, but is {value}.")
    for name, (low, high) in (("demand", demand), ("costs", costs), ("caps", caps)):
        if not 0 < low <= high:
            raise ValueError(f"{name} must be a range (low, high) of positive numbers, but is {(low, high)}.")
    if b <= 0 or x_cap <= 0:
        raise ValueError(f"b and x_cap must be positive, but are {b} and {x_cap}.")
    rng = np.random.default_rng(seed)
    all_costs = rng.uniform(*costs, size=followers + 1)
    y_caps = rng.uniform(*caps, size=followers)
    a = rng.uniform(*demand, size=(clients, samples))
    c0, c = float(all_costs[0]), all_costs[1:]
    data = FederatedData.from_clients([{"a": row} for row in a])
    return Cournot(_problem(b, c0, c, y_caps, x_cap), data, b, c0, c, y_caps, x_cap)


def _problem(b: float, c0: float, c: np.ndarray, caps: np.ndarray, x_cap: float) -> MPEC:
    knots, values = _knots(b, c, caps)

    def total(y: Array) -> Array:  # a product with ones is several times faster than a sum on a CPU
        return jnp.dot(y, jnp.ones_like(y), precision="highest")

    def leader(x: Array, y: Array, sample: dict[str, Array]) -> Array:
        return c0 * x**2 / 2 - x * (sample["a"] - b * (x + total(y)))

    def follower(x: Array, y: Array, sample: dict[str, Array]) -> Array:
        return jnp.asarray(c + b, y.dtype) * y + (b * (x + total(y)) - sample["a"])

    def solution(x: Array, sample: dict[str, Array]) -> Array:
        z = sample["a"] - b * x
        p = _inverse(jnp, jnp.asarray(knots, z.dtype), jnp.asarray(values, z.dtype), z)
        return jnp.clip(p / jnp.asarray(c + b, z.dtype), 0, jnp.asarray(caps, z.dtype))

    return MPEC(leader, follower, project_x=Box(0.0, x_cap), project_y=Box(0.0, caps), solution=solution)


def _knots(b: float, c: np.ndarray, caps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The knots of φ, ascending from 0, and its values there."""
    knots = np.concatenate([[0.0], np.sort((c + b) * caps)])
    order = np.argsort((c + b) * caps)
    # Below the k-th knot the first k followers are at their capacity; the others sell p/(c_j + b).
    full = np.concatenate([[0.0], np.cumsum(caps[order])])
    rest = np.concatenate([[0.0], np.cumsum(1 / (c + b)[order])])
    return knots, knots + b * (np.append(0.0, full[:-1]) + knots * np.append(rest[-1], rest[-1] - rest[:-1]))


def _inverse(xp: ModuleType, knots: PyTree, values: PyTree, z: PyTree) -> PyTree:
    """φ⁻¹(z): an interpolation between the knots, of slope 1 outside."""
    return xp.interp(z, values, knots) + xp.minimum(z, 0) + xp.maximum(z - values[-1], 0)
