"""Risks of a finite sample: the inner maximum of distributionally robust problems.

    R(ℓ) = max_q  mean(q ℓ) − penalty(q)   over densities q, mean(q) = 1

A density q_i = p_i·m weighs sample i; means use the samples' own weights. A few numbers, the *dual*,
describe the maximiser of a risk: ``q_i = density(ℓ_i, dual)``, so that a client which knows the dual can
weigh its samples.

| risk | penalty or set | density | dual |
|---|---|---|---|
| `KL` (λ) | λ mean(q log q) | exp(ℓ/λ − u) | u = log mean exp(ℓ/λ) |
| `Chi2` (λ) | λ/2 mean((q−1)²), q of any sign | 1 + (ℓ − ℓ̄)/λ | ℓ̄ |
| `Chi2Penalty` (λ) | λ/2 mean((q−1)²), q ≥ 0 | (1 + (ℓ − η)/λ)₊ | η |
| `Chi2Ball` (ρ) | ½ mean((q−1)²) ≤ ρ, q ≥ 0 | (ℓ − η)₊/s | η, s |
| `CVaR` (α) | 0 ≤ q ≤ 1/α | 1/α above η | η, the weight at η |
| `KLCVaR` (α, λ) | λ mean(q log q), q ≤ 1/α | min(exp((ℓ − η)/λ), 1/α) | η |
| `Semideviation` (λ) | q = 1 + λ(ζ − mean ζ), ζ ≥ 0, mean ζ² ≤ 1 | 1 + λ((ℓ − ℓ̄)₊ − c)/s | ℓ̄, s, c |

The rows with η are also minima, R(ℓ) = min_η η + excess, the form that compositions use with η as a variable.
All formulas are stable for large losses: values are shifted before they are exponentiated or squared.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core.hyperparameters import POSITIVE, Number
from fedstrata.core.types import Array, Integer, PyTree

ZERO_OR_MORE = Number("a number ≥ 0", 0.0)


def _mean(values: Array, weights: Array) -> Array:
    return jnp.vdot(weights, values)


def bisect(decreasing: Callable[[Array], Array], low: Array, high: Array) -> Array:
    """The root of a decreasing function in an interval, to floating-point precision."""

    def halve(_: Integer, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bracket
        middle = low + (high - low) / 2
        above = decreasing(middle) > 0
        return jnp.where(above, middle, low), jnp.where(above, high, middle)

    low, high = jnp.broadcast_arrays(low, high)
    steps = 2 * jnp.finfo(low.dtype).nmant
    low, high = jax.lax.fori_loop(0, steps, halve, (low, high))
    return low + (high - low) / 2


@dataclass(frozen=True)
class Risk:
    """Base of the risks: the maximiser for a sample of losses, and the value.

    Attributes:
        lifted: whether the composition's main variable is (x, η).
        additive: whether the composition is one mean over samples of a function of (x, η).
        smooth: whether the risk of smooth losses has a gradient everywhere.
        low, high, radius: the set of densities q: ``low ≤ q ≤ high`` and ``mean((q − 1)²) ≤ radius``.
    """

    lifted: ClassVar[bool] = False
    additive: ClassVar[bool] = False
    smooth: ClassVar[bool] = True
    low: ClassVar[float] = 0.0

    @property
    def high(self) -> float:
        return math.inf

    @property
    def radius(self) -> float:
        return math.inf

    def __post_init__(self) -> None:
        for f in fields(self):
            value, kind = vars(self)[f.name], ZERO_OR_MORE if f.metadata.get("zero", False) else POSITIVE
            if kind.fault(value) is not None or np.ndim(value) > 0:
                raise ValueError(f"{type(self).__name__}: {f.name} must be {kind.words}, but is {value!r}.")
            if f.name == "level" and value > 1:
                raise ValueError(
                    f"{type(self).__name__}: level is a fraction of the samples, in (0, 1], but is {value!r}."
                )

    def dual(self, losses: Array, weights: Array) -> PyTree:
        """The numbers that describe the maximiser; ``weights`` sum to one, and are zero for padding."""
        raise NotImplementedError

    def density(self, loss: Array, dual: PyTree) -> Array:
        """The density q of a loss."""
        raise NotImplementedError

    def penalty(self, q: Array) -> Array:
        """The penalty's integrand."""
        return jnp.zeros_like(q)

    def value(self, losses: Array, weights: Array | None = None) -> Array:
        """R(ℓ); of an additive risk at the dual's η, whose error has a second-order effect."""
        losses, weights = _sample(losses, weights)
        dual = self.dual(losses, weights)
        if self.additive:
            eta = threshold_of(dual)
            return eta + _mean(self.excess(losses - eta), weights)
        q = self.density(losses, dual)
        centre = _mean(losses, weights)  # mean(qℓ) = ℓ̄ + mean(q(ℓ − ℓ̄)), which is accurate for large ℓ̄
        return centre + _mean(q * (losses - centre) - self.penalty(q), weights)

    def excess(self, s: Array) -> Array:
        """Of an additive risk, the function in ``risk = min_η η + mean(excess(ℓ − η))``."""
        raise NotImplementedError

    def weights(self, losses: Array, weights: Array | None = None) -> Array:
        """The worst-case weights p of the samples; they sum to one."""
        losses, weights = _sample(losses, weights)
        return weights * self.density(losses, self.dual(losses, weights))


def _sample(losses: Array, weights: Array | None) -> tuple[Array, Array]:
    losses = jnp.asarray(losses, jnp.result_type(float))
    if weights is None:
        return losses, jnp.full(losses.shape, 1 / losses.size, losses.dtype)
    return losses, jnp.asarray(weights, losses.dtype)


def entropy(q: Array) -> Array:
    """``q log q − q + 1``, whose mean over a density is its KL divergence from the samples."""
    return jax.scipy.special.xlogy(q, q) - q + 1


@dataclass(frozen=True)
class KL(Risk):
    """``λ log mean exp(ℓ/λ)``."""

    lam: float  # λ

    low = 1e-8

    def dual(self, losses: Array, weights: Array) -> Array:
        return jax.nn.logsumexp(losses / self.lam, b=weights)

    def density(self, loss: Array, dual: Array) -> Array:
        return jnp.exp(loss / self.lam - dual)

    def penalty(self, q: Array) -> Array:
        return self.lam * entropy(q)

    def value(self, losses: Array, weights: Array | None = None) -> Array:
        return self.lam * self.dual(*_sample(losses, weights))


@dataclass(frozen=True)
class Chi2(Risk):
    """``mean ℓ + var ℓ/(2λ)``, the maximum over q of any sign; equals `Chi2Penalty` if q ≥ 0."""

    lam: float  # λ

    low = -math.inf

    def dual(self, losses: Array, weights: Array) -> Array:
        return _mean(losses, weights)

    def density(self, loss: Array, dual: Array) -> Array:
        return 1 + (loss - dual) / self.lam

    def penalty(self, q: Array) -> Array:
        return self.lam / 2 * (q - 1) ** 2


@dataclass(frozen=True)
class Chi2Penalty(Chi2):
    """``min_η η + mean((ℓ − η + λ)₊²)/(2λ) − λ/2``."""

    lifted, additive, low = True, True, 0.0

    def dual(self, losses: Array, weights: Array) -> Array:
        low, high = _mean(losses, weights), jnp.max(losses, where=weights > 0, initial=-jnp.inf)
        return bisect(lambda eta: _mean(self.density(losses, eta), weights) - 1, jnp.minimum(low, high), high)

    def density(self, loss: Array, dual: Array) -> Array:
        return jax.nn.relu(1 + (loss - dual) / self.lam)

    def excess(self, s: Array) -> Array:
        return jax.nn.relu(s + self.lam) ** 2 / (2 * self.lam) - self.lam / 2


class Threshold(NamedTuple):
    """A dual with a threshold and one more number."""

    eta: Array
    more: Array


def threshold_of(dual: PyTree) -> Array:
    """η of a dual that has one."""
    return dual.eta if isinstance(dual, Threshold) else dual


@dataclass(frozen=True)
class Chi2Ball(Risk):
    """``min_η η + √((1 + 2ρ) mean((ℓ − η)₊²))``."""

    rho: float  # ρ

    lifted = True

    @property
    def radius(self) -> float:
        return 2 * self.rho

    def dual(self, losses: Array, weights: Array) -> Threshold:
        most = jnp.max(losses, where=weights > 0, initial=-jnp.inf)
        spread = most - jnp.min(losses, where=weights > 0, initial=jnp.inf)
        target = 1 + 2 * self.rho

        def concentration(eta: Array) -> Array:
            """mean(q²) of the density above η; it increases with η, from 1 to that of the maxima alone."""
            above = jax.nn.relu(losses - eta)
            return _mean(above**2, weights) / jnp.maximum(
                _mean(above, weights) ** 2, jnp.finfo(losses.dtype).tiny
            )

        # As η → −∞, mean(q²) − 1 ~ var/(ℓ̄ − η)², which is below 2ρ for all η ≤ low.
        low = most - spread * (1 + 1 / math.sqrt(2 * self.rho)) - 1e-6 * jnp.abs(most)
        eta = bisect(lambda eta: target - concentration(eta), low, most)
        scale = _mean(jax.nn.relu(losses - eta), weights)
        # With few samples, or equal losses, the maxima alone are inside the ball.
        at_most = _mean(losses >= most, weights)
        alone = (1 / jnp.maximum(at_most, jnp.finfo(losses.dtype).tiny) <= target) | (scale <= 0)
        tie = jnp.where(alone, 1 / at_most, 0.0)
        return Threshold(jnp.where(alone, most, eta), jnp.where(alone, -tie, scale))

    def density(self, loss: Array, dual: Threshold) -> Array:
        alone = dual.more < 0
        scale = jnp.where(alone, 1.0, dual.more)
        near = loss >= dual.eta - _tolerance(dual.eta)
        return jnp.where(alone, jnp.where(near, -dual.more, 0.0), jax.nn.relu(loss - dual.eta) / scale)

    def value(self, losses: Array, weights: Array | None = None) -> Array:
        losses, weights = _sample(losses, weights)
        eta = self.dual(losses, weights).eta
        return eta + jnp.sqrt((1 + 2 * self.rho) * _mean(jax.nn.relu(losses - eta) ** 2, weights))


@dataclass(frozen=True)
class CVaR(Risk):
    """``min_η η + mean((ℓ − η)₊)/α``: the mean of the worst part α of the samples."""

    level: float  # α

    lifted, additive, smooth = True, True, False

    @property
    def high(self) -> float:
        return 1 / self.level

    def dual(self, losses: Array, weights: Array) -> Threshold:
        order = jnp.argsort(-losses)
        reached = jnp.cumsum(weights[order]) >= self.level * (1 - 4 * jnp.finfo(losses.dtype).eps)
        eta = losses[order][jnp.argmax(reached)]
        margin = _tolerance(eta)
        above = _mean(losses > eta + margin, weights)
        at = _mean(jnp.abs(losses - eta) <= margin, weights)
        return Threshold(eta, jnp.maximum(1 - above / self.level, 0) / at)

    def density(self, loss: Array, dual: Threshold) -> Array:
        margin = _tolerance(dual.eta)
        at = jnp.where(loss > dual.eta + margin, 1 / self.level, dual.more)
        return jnp.where(loss < dual.eta - margin, 0.0, at)

    def excess(self, s: Array) -> Array:
        return jax.nn.relu(s) / self.level


@dataclass(frozen=True)
class KLCVaR(Risk):
    """``max mean(qℓ) − λ mean(q log q)`` over q ≤ 1/α: CVaR smoothed, or KL with bounded weights."""

    level: float  # α
    lam: float  # λ

    lifted, additive, low = True, True, 1e-8

    @property
    def high(self) -> float:
        return 1 / self.level

    def dual(self, losses: Array, weights: Array) -> Array:
        high = self.lam * jax.nn.logsumexp(losses / self.lam, b=weights)  # no weight is capped
        low = jnp.min(losses, where=weights > 0, initial=jnp.inf) + self.lam * math.log(
            self.level
        )  # all weights are
        return bisect(lambda eta: _mean(self.density(losses, eta), weights) - 1, low, high)

    def density(self, loss: Array, dual: Array) -> Array:
        return jnp.exp(jnp.minimum((loss - dual) / self.lam, math.log(1 / self.level)))

    def penalty(self, q: Array) -> Array:
        return self.lam * entropy(q)

    def excess(self, s: Array) -> Array:
        cut = jnp.minimum(s, self.lam * math.log(1 / self.level))
        return self.lam * jnp.expm1(cut / self.lam) + (s - cut) / self.level


class Moments(NamedTuple):
    """The dual of the semideviation."""

    mean: Array  # ℓ̄
    deviation: Array  # s
    excess: Array  # c


@dataclass(frozen=True)
class Semideviation(Risk):
    """``mean ℓ + λ √(mean((ℓ − mean ℓ)₊²) + δ)``."""

    lam: float = field(metadata={"zero": True})  # λ
    delta: float = 1e-6  # δ

    def dual(self, losses: Array, weights: Array) -> Moments:
        mean = _mean(losses, weights)
        above = jax.nn.relu(losses - mean)
        return Moments(mean, jnp.sqrt(_mean(above**2, weights) + self.delta), _mean(above, weights))

    def density(self, loss: Array, dual: Moments) -> Array:
        return 1 + self.lam * (jax.nn.relu(loss - dual.mean) - dual.excess) / dual.deviation

    def value(self, losses: Array, weights: Array | None = None) -> Array:
        dual = self.dual(*_sample(losses, weights))
        return dual.mean + self.lam * dual.deviation


def _tolerance(eta: Array) -> Array:
    """Losses this close count as equal, because programs may round a loss differently."""
    return 8 * jnp.finfo(jnp.asarray(eta).dtype).eps * jnp.abs(eta)
