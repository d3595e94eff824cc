"""Distributionally robust learning in one line: the worst case over weights of the samples.

    problem = fs.dro.kl(loss, lam=1.0)                        # instead of fs.Minimization(loss)
    result  = fs.solve(problem, fs.FedDRO(eta=0.1, beta=0.5, I=4), data, x0, rounds=100)

    min_x  max_q  E[q ℓ(x, ξ)] − penalty(q)   over densities q of the samples

Each function returns a `Composition` ``h(x) + f(g(x))``, for FedDRO, DSFedDRO, GCIVR, MBSGD, FedMSA and
PDSGD (in epigraph form); FastDRO uses its `Risk`. ``problem.minimax(data)`` is the same problem as a
`Minimax`; give it ``weights="size"`` if `fedstrata.solve` gets these weights.

| | h | g | f | variables |
|---|---|---|---|---|
| `kl` | | exp(ℓ/λ), in the log domain | λ log g | x |
| `chi2` | ℓ + ℓ²/(2λ) | ℓ | −g²/(2λ) | x |
| `cvar`, `kl_cvar`, `chi2(…, nonnegative=True)` | | η, excess(ℓ − η) | their sum | x, η |
| `chi2_ball` | | η, (ℓ − η)₊² | η + √((1+2ρ) g) | x, η |
| `mean_semideviation` | | two levels: ℓ̄; (ℓ − ℓ̄)₊² | ℓ̄ + λ√(g + δ) | x |
| `group` | | ℓ·1_j, 1_j of each group j | λ log mean_j exp(g_j/(λ·1̄_j)) | x |

If the risk has a threshold η, the main variable is `Lifted` (x, η): start from a plain x0, with η = 0, or
from ``Lifted(x0, eta)``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core.problem import FUNCTION, Mean, known_weights
from fedstrata.core.term import Applied
from fedstrata.core.types import Array, Function, PyTree, Real, Weights
from fedstrata.data.federated import DataError, FederatedData
from fedstrata.problems import risks
from fedstrata.problems._parameters import pytree
from fedstrata.problems.classes import Composition, Minimax
from fedstrata.problems.levels import LogMeanExp
from fedstrata.problems.sets import Set, Simplex
from fedstrata.problems.terms import per_sample
from fedstrata.support.words import misspelt


class Lifted(NamedTuple):
    """The main variable of a risk that has a threshold."""

    x: PyTree
    eta: Any  # η


class Dual(NamedTuple):
    """A minimax form, for ``fs.solve(problem, method, data, x0, y0=y0, …)``.

    Attributes:
        problem: the `Minimax`, which records the clients' weights it was made for.
        data: the data, with the index in y of each sample.
        y0: the dual variable of equal weights.
    """

    problem: Minimax
    data: FederatedData
    y0: Any


@dataclass(frozen=True)
class DRO(Composition):
    """A composition for the worst case of a loss over weights of the samples.

    Attributes:
        loss: ``loss(x, sample)``, with x without η.
        risk: the risk of a sample of losses, see `fedstrata.problems.risks`.
    """

    loss: Function = field(metadata=FUNCTION, kw_only=True)
    risk: risks.Risk = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        per_sample(self.loss, "The loss of a robust problem", "every sample is weighed by its own loss")

    @property
    def assumes(self) -> str:  # type: ignore[override]
        """The assumptions of the methods' theory, and whether this risk violates them."""
        words = super().assumes
        return words if self.risk.smooth else f"{words}; this risk has a kink: let step sizes decrease"

    @property
    def lifted(self) -> bool:
        """Whether the main variable is (x, η)."""
        return self.risk.lifted

    def start_x(self, x: PyTree) -> PyTree:
        """Add η = 0 if it is missing."""
        return x if isinstance(x, Lifted) or not self.lifted else Lifted(x, 0.0)

    def measure(self, mean: Mean, x: PyTree, y: PyTree) -> dict[str, Any]:
        """The objective; for χ² with the centred variance, which is accurate for large losses too."""
        if type(self.risk) is not risks.Chi2:
            return super().measure(mean, x, y)
        loss = self.loss
        centre = mean(loss, x)
        variance = mean(lambda x, centre, sample: (loss(x, sample) - centre) ** 2, x, centre)
        return {"objective": centre + variance / (2 * self.risk.lam)}

    def weights(self, losses: Array) -> jax.Array:
        """The worst-case weights of samples with these losses; they sum to one."""
        return self.risk.weights(losses)

    def minimax(self, data: FederatedData, weights: Weights = "uniform") -> Dual:
        """``min_x max_y``, where y has one entry per sample: its density q (for a semideviation, ζ).

        Args:
            data: the clients' samples.
            weights: the clients' weights, as given to `fedstrata.solve`; they define the set of y.
        """
        data, shares = _indexed(data, weights)
        risk, loss = self.risk, self.loss
        if isinstance(risk, risks.Semideviation):
            lam = risk.lam

            def deviation(x: PyTree, zeta: jax.Array, sample: PyTree) -> jax.Array:
                q = 1 + lam * (zeta[sample["index"]] - jnp.vdot(jnp.asarray(shares, zeta.dtype), zeta))
                return q * loss(x, sample)

            halves = HalfBall(shares)
            return Dual(Minimax(deviation, None, halves, made_for=weights), data, np.zeros(len(shares)))

        def payoff(x: PyTree, q: jax.Array, sample: PyTree) -> jax.Array:
            mine = q[sample["index"]]
            return mine * loss(x, sample) - risk.penalty(mine)

        densities = Densities(shares, risk.low, risk.high, risk.radius)
        return Dual(Minimax(payoff, None, densities, made_for=weights), data, np.ones(len(shares)))


def kl(loss: Function, lam: float) -> DRO:
    """``min_x λ log E exp(ℓ(x, ξ)/λ)``: KL-regularised; λ → ∞ is the mean loss, λ → 0 the largest.

    g is tracked as its logarithm, so that losses of 1e3 with λ = 1e-2 do not overflow, even in float32.

    >>> import fedstrata as fs
    >>> problem = fs.dro.kl(lambda x, s: (s["a"] @ x - s["b"]) ** 2, lam=0.5)
    """
    risk = risks.KL(lam)
    return DRO((LogMeanExp(lambda x, sample: loss(x, sample) / lam), lambda u: lam * u), loss=loss, risk=risk)


def chi2(loss: Function, lam: float, nonnegative: bool = False) -> DRO:
    """``min_x E ℓ + Var ℓ/(2λ)``: χ²-regularised.

    This is the worst case over weights as long as none of them is negative, i.e. while no loss is below the
    mean by more than λ. ``nonnegative=True`` enforces it, with a threshold η as another variable. (The
    paper's (5) has the wrong sign and lacks the mean.)
    """
    if nonnegative:
        return _threshold(loss, risks.Chi2Penalty(lam))

    def plain(x: PyTree, sample: PyTree) -> jax.Array:
        value = loss(x, sample)
        return value + value**2 / (2 * lam)

    return DRO((loss, lambda g: -(g**2) / (2 * lam)), plain, loss=loss, risk=risks.Chi2(lam))


def cvar(loss: Function, level: float) -> DRO:
    """``min_{x,η} η + E(ℓ − η)₊/level``: the mean of the worst part ``level`` of the samples."""
    return _threshold(loss, risks.CVaR(level))


def kl_cvar(loss: Function, level: float, lam: float) -> DRO:
    """KL-regularised CVaR: as `kl`, with no weight above 1/``level``; smooth where `cvar` is not."""
    return _threshold(loss, risks.KLCVaR(level, lam))


def chi2_ball(loss: Function, rho: float) -> DRO:
    """``min_{x,η} η + √((1 + 2ρ) E(ℓ − η)₊²)``: the worst case over densities with ½ E(q − 1)² ≤ ρ."""
    risk = risks.Chi2Ball(rho)

    def g(v: Lifted, sample: PyTree) -> tuple[Any, Any]:
        return v.eta, jax.nn.relu(loss(v.x, sample) - v.eta) ** 2

    def f(z: tuple[Any, Any]) -> Any:
        tiny = jnp.finfo(z[1].dtype).tiny  # the root has no derivative at 0
        return z[0] + jnp.sqrt((1 + 2 * rho) * jnp.maximum(z[1], tiny))

    return DRO((g, f), loss=loss, risk=risk)


def mean_semideviation(loss: Function, lam: float, delta: float = 1e-6) -> DRO:
    """``min_x E ℓ + λ √(E(ℓ − E ℓ)₊² + δ)``; three levels; the first passes x on."""
    levels = (
        Applied(_mean, loss),
        Applied(_deviation, loss),
        Applied(_mean_and_root, lam, delta),
    )
    return DRO(levels, loss=loss, risk=risks.Semideviation(lam, delta))


def risk_averse(U: Function, lam: float = 1.0, delta: float = 1e-3) -> DRO:
    """The mean of a loss plus λ times its upper semideviation, `mean_semideviation` in FedMSA's symbols.

        min_x  E U(x, ξ) + λ √(E max(0, U(x, ξ) − E U)² + δ)

    (The FedMSA paper omits the square of the max, without which this would be the root of a mean.)

    Args:
        U: ``U(x, sample)``, the loss.
        lam: the risk aversion λ ≥ 0; up to 1 the objective is monotone in U, and convex if U is convex.
        delta: the smoothing δ > 0, which keeps the root differentiable.

    >>> import fedstrata as fs
    >>> problem = fs.risk_averse(lambda x, s: (s["a"] @ x - s["b"]) ** 2, lam=0.5)
    >>> len(problem.levels)
    3
    """
    return mean_semideviation(U, lam, delta)


def _mean(loss: Function, x: PyTree, sample: PyTree) -> tuple[Any, PyTree]:
    """``(ℓ, x)``."""
    return loss(x, sample), x


def _deviation(loss: Function, z: tuple[Any, PyTree], sample: PyTree) -> tuple[Any, Any]:
    """``(ℓ̄, (ℓ − ℓ̄)₊²)``."""
    mean, x = z
    return mean, jax.nn.relu(loss(x, sample) - mean) ** 2


def _mean_and_root(lam: float, delta: float, z: tuple[Any, Any]) -> Any:
    """``ℓ̄ + λ √(s + δ)``; a tracked mean of squares may become slightly negative."""
    return z[0] + lam * jnp.sqrt(jax.nn.relu(z[1]) + delta)


def _threshold(loss: Function, risk: risks.Chi2Penalty | risks.CVaR | risks.KLCVaR) -> DRO:
    """``min_{x,η} η + E excess(ℓ − η)``."""

    def g(v: Lifted, sample: PyTree) -> tuple[Any, Any]:
        return v.eta, risk.excess(loss(v.x, sample) - v.eta)

    return DRO((g, lambda z: z[0] + z[1]), loss=loss, risk=risk)


@dataclass(frozen=True)
class GroupDRO(Composition):
    """The worst case of a loss over weights of groups; see `group`."""

    loss: Function = field(metadata=FUNCTION, kw_only=True)
    groups: int = field(kw_only=True)
    lam: float = field(kw_only=True)
    group_of: Function = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        per_sample(self.loss, "The loss of a robust problem", "every sample is weighed by its own loss")

    def minimax(self, data: FederatedData, weights: Weights = "uniform") -> Dual:
        """``min_x max_q Σ_j q_j E[ℓ | j] − λ Σ_j q_j log(G q_j)``; groups' sizes are taken from the data.

        Args:
            data: the clients' samples.
            weights: the clients' weights, as given to `fedstrata.solve`; the groups' sizes depend on them.
        """
        loss, group_of, lam, G = self.loss, self.group_of, self.lam, self.groups
        sizes = group_sizes(data, G, group_of, weights)

        def payoff(x: PyTree, q: jax.Array, sample: PyTree) -> jax.Array:
            j = group_of(sample)
            return (
                q[j] * loss(x, sample) / jnp.asarray(sizes, q.dtype)[j]
                - lam * (risks.entropy(G * q) / G).sum()
            )

        return Dual(Minimax(payoff, None, Floored(1e-8), made_for=weights), data, np.full(G, 1 / G))


def group(
    loss: Function, groups: int, lam: float, group_of: Function = lambda sample: sample["group"]
) -> GroupDRO:
    """``min_x λ log mean_j exp(E[ℓ | group j]/λ)``: the worst group's loss, smoothed; λ → 0 is the maximum.

    Args:
        loss: ``loss(x, sample)``.
        groups: the number of groups.
        lam: the penalty λ on unequal weights of the groups.
        group_of: a sample's group, 0 … groups − 1; by default its entry ``"group"``.
    """
    if groups < 1 or lam <= 0:
        raise ValueError(
            f"group: groups must be at least 1 and lam positive, but got {groups!r} and {lam!r}."
        )

    def f(z: tuple[jax.Array, jax.Array]) -> jax.Array:
        return lam * (jax.nn.logsumexp(ratio(*z) / lam) - jnp.log(groups))

    return GroupDRO(
        (Applied(by_group, loss, groups, group_of), f),
        loss=loss,
        groups=groups,
        lam=lam,
        group_of=group_of,
    )


def by_group(
    loss: Function, groups: int, group_of: Function, x: PyTree, sample: PyTree
) -> tuple[jax.Array, jax.Array]:
    """``ℓ·1_j`` and ``1_j`` of each group j: the ratio of their means is E[ℓ | j]."""
    value = loss(x, sample)
    member = jax.nn.one_hot(group_of(sample), groups, dtype=value.dtype)
    return member * value, member


def group_sizes(data: FederatedData, groups: int, group_of: Function, weights: Weights) -> np.ndarray:
    """The groups' fractions of the samples, averaged over the clients."""
    sizes = clients_mean(data, lambda sample: jax.nn.one_hot(group_of(sample), groups), weights)
    if (sizes <= 0).any():
        raise DataError(f"These groups have no samples: {np.flatnonzero(sizes <= 0).tolist()}.")
    return sizes


def ratio(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    """The quotient, or 0 for a group without samples so far."""
    seen = denominator > 0
    return jnp.where(seen, numerator / jnp.where(seen, denominator, 1), 0)


def clients_mean(data: FederatedData, function: Function, weights: Weights) -> np.ndarray:
    """The clients' mean of the mean of ``function(sample)``."""
    known_weights(weights)
    placed = data.placed()
    return np.asarray(placed.mean(function, shares=placed.shares(weights)))


def _indexed(data: FederatedData, weights: Weights) -> tuple[FederatedData, np.ndarray]:
    """The data with an index for every sample, and the samples' weights in the clients' mean of means."""
    known_weights(weights)
    if data.source is not None:
        raise DataError(
            "The minimax form needs an index for every sample, which data from a source does not have. If "
            "the data fits into memory, load it: problem.minimax(data.load())."
        )
    if not isinstance(data.train, dict):
        raise DataError(
            "The minimax form adds an index to every sample: samples must be dicts, e.g. {'x': …, 'y': …}."
        )
    own = 1 / data.clients if weights == "uniform" else data.sizes / data.sizes.sum()
    shares = np.repeat(own / data.sizes, data.sizes)
    return replace(data, train={**data.train, "index": np.arange(len(shares), dtype=np.int32)}), shares


@pytree
class Densities(Set):
    """``{q : Σ w q = 1, lower ≤ q ≤ upper, Σ w (q − 1)² ≤ radius}``, with the samples' weights w."""

    shares: Any
    lower: Any = 0.0
    upper: Any = np.inf
    radius: Real = np.inf

    def _project(self, v: jax.Array) -> jax.Array:
        w = jnp.asarray(self.shares, v.dtype)

        def at(theta: Real) -> jax.Array:
            """The projection for a multiplier θ of the ball."""

            def q(mu: Real) -> jax.Array:
                return jnp.clip((v + (theta - mu) * w) / (1 + theta * w), self.lower, self.upper)

            middle = (v - 1) / w
            return q(risks.bisect(lambda mu: jnp.vdot(w, q(mu)) - 1, middle.min(), middle.max()))

        if not np.isfinite(self.radius):
            return at(0.0)

        def outside(theta: jax.Array) -> jax.Array:
            return jnp.vdot(w, (at(theta) - 1) ** 2) - self.radius

        high = jnp.linalg.norm(v - 1) / (jnp.sqrt(self.radius) * w.min())
        theta = risks.bisect(outside, jnp.zeros_like(high), high)
        return at(jnp.where(outside(jnp.zeros_like(high)) > 0, theta, 0))


@pytree
class HalfBall(Set):
    """``{ζ ≥ 0 : Σ w ζ² ≤ 1}``, with the samples' weights w."""

    shares: Any

    def _project(self, v: jax.Array) -> jax.Array:
        w, positive = jnp.asarray(self.shares, v.dtype), jax.nn.relu(v)

        def outside(theta: jax.Array) -> jax.Array:
            return jnp.vdot(w, (positive / (1 + theta * w)) ** 2) - 1

        high = jnp.sqrt(jnp.sum(positive**2 / w))
        theta = risks.bisect(outside, jnp.zeros_like(high), high)
        return positive / (1 + jnp.where(outside(jnp.zeros_like(high)) > 0, theta, 0) * w)


@pytree
class Floored(Set):
    """``{q ≥ floor, Σ q = 1}``: the simplex without its boundary, where the entropy is not differentiable."""

    floor: Real

    def _project(self, v: jax.Array) -> jax.Array:
        floor = jnp.asarray(self.floor, v.dtype)
        return floor + Simplex(1 - v.size * self.floor)(v - floor)


if not TYPE_CHECKING:  # for type checkers, a module with __getattr__ has every name
    __getattr__ = misspelt(__name__)
