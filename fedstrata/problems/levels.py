"""The averaging of a composition's level, and its tracking by a method.

A level's value g(z) is a mean over samples and clients, usually the arithmetic mean of ``level(z,
sample)``. If such values overflow, like KL's exp(ℓ/λ), the level is given by its exponent and marked
`LogMeanExp`: its value is then ``u = log mean exp level(z, sample)``, and methods work with log g instead
of g. A `Tracker` defines the operations:

| | arithmetic | logarithmic, g = exp u |
|---|---|---|
| ``mean(values, weights)`` | Σ w v | log Σ w exp v |
| ``gap(out, u)``, of mean zero at the level's value | out − u | exp(out − u) − 1 |
| ``change(β, a, b)``, a client's upload for ``follow`` | b − (1−β) a | (a, b) |
| ``follow(β, u, change)``: g ← (1−β)(g − a) + b | (1−β) u + change | the same of exponentials |
| ``blend(β, u, b)``: g ← (1−β) g + β b | the same | the same of exponentials |
| ``report(u, b)``, ``step(γ, u, report)``: g ← g + γ (ū − g) | | the same of exponentials |
| ``guard(u, b, floor)``: g ← max(g, floor·b) | u | the same of exponentials |
| ``ratio(u, u⁺)`` of units, for a Jacobian stored in units of u | 1 | exp(u − u⁺), or 0 |

The derivative of ``gap`` with respect to the level's argument, at a tracked u, is that of g in units of u:
both trackers have d gap/du = −1 on average at the level's value, so the chain rule has the same form for g
and u. The logarithmic scale does not overflow: exponents are cut at log(1/ε), where ε is the float's
precision and other weights are negligible, and a tracked value stays above ``floor`` times the newest
estimate, so that its logarithm exists.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from fedstrata.core import tree
from fedstrata.core.term import MeanOf, Term
from fedstrata.core.types import Function, PyTree, Real
from fedstrata.problems.terms import per_sample


@dataclass(frozen=True)
class Tracker:
    """The averaging and tracking of a level's values, here by plain means; see the module's table."""

    def mean(self, values: PyTree, weights: jax.Array) -> PyTree:
        """The level's value from samples' or clients' values, stacked; ``weights`` sum to one."""
        return jax.tree.map(lambda v: jnp.tensordot(weights.astype(v.dtype), v, axes=1), values)

    def gap(self, out: PyTree, value: PyTree) -> PyTree:
        """A residual whose mean over samples is zero if and only if ``value`` is the level's value."""
        return tree.sub(out, value)

    def change(self, beta: Real, before: PyTree, now: PyTree) -> PyTree:
        """A client's upload, whose mean over the clients `follow` takes."""
        return tree.axpy(beta - 1, before, now)

    def follow(self, beta: Real, value: PyTree, change: PyTree, floor: Real | None = None) -> PyTree:
        """``g ← (1−β)(g − a) + b``, with the level's values a and b at the previous and the new point."""
        return tree.axpy(1 - beta, value, change)

    def blend(self, beta: Real, value: PyTree, new: PyTree) -> PyTree:
        """``g ← (1−β) g + β b``, β ≤ 1."""
        return tree.lerp(beta, value, new)

    def report(self, value: PyTree, newest: PyTree) -> PyTree:
        """A client's upload, whose mean over the clients `step` takes."""
        return value

    def step(self, gamma: Real, value: PyTree, report: PyTree, floor: Real) -> PyTree:
        """``g ← g + γ (ū − g)`` with the clients' mean ū; γ may exceed 1."""
        return tree.lerp(gamma, value, report)

    def guard(self, value: PyTree, newest: PyTree, floor: Real) -> PyTree:
        """A tracked value that may lag behind, bounded so that no weight relative to it exceeds 1/floor."""
        return value

    def ratio(self, value: PyTree, new: PyTree) -> PyTree:
        """The factors of a Jacobian's rows when the units change from ``value`` to ``new``.

        Zero where g has decreased to less than a tenth: the old rows would be noise relative to the new ones.
        """
        return jax.tree.map(jnp.ones_like, new)


@dataclass(frozen=True)
class Logarithmic(Tracker):
    """The mean of exponentials, stored as its logarithm."""

    def mean(self, values: PyTree, weights: jax.Array) -> PyTree:
        def one(v: jax.Array) -> jax.Array:
            w = weights.astype(v.dtype).reshape(-1, *[1] * (v.ndim - 1))
            # padding has weight zero and an arbitrary value
            return jax.nn.logsumexp(jnp.where(w > 0, v, -jnp.inf), axis=0, b=w)

        return jax.tree.map(one, values)

    def gap(self, out: PyTree, value: PyTree) -> PyTree:
        return jax.tree.map(lambda o, u: _expm1(o - u), out, value)

    def change(self, beta: Real, before: PyTree, now: PyTree) -> PyTree:
        return before, now

    def follow(self, beta: Real, value: PyTree, change: PyTree, floor: Real | None = None) -> PyTree:
        lowest = beta if floor is None else floor

        def one(u: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
            # Both are capped; if both exceed b by more than 1/ε, they count as equal.
            rest = _exp(u - b) - _exp(a - b)
            return b + jnp.log(jnp.maximum(1 + jnp.asarray(1 - beta, b.dtype) * rest, lowest)).astype(b.dtype)

        return jax.tree.map(one, value, *change)

    def blend(self, beta: Real, value: PyTree, new: PyTree) -> PyTree:
        def one(u: jax.Array, b: jax.Array) -> jax.Array:
            weight = jnp.asarray(beta, u.dtype)
            return jnp.logaddexp(u + jnp.log1p(-weight), b + jnp.log(weight))

        return jax.tree.map(one, value, new)

    def report(self, value: PyTree, newest: PyTree) -> PyTree:
        return value, newest

    def step(self, gamma: Real, value: PyTree, report: PyTree, floor: Real) -> PyTree:
        def one(u: jax.Array, mean: jax.Array, b: jax.Array) -> jax.Array:
            weight = jnp.asarray(gamma, b.dtype)
            new = (1 - weight) * _exp(u - b) + weight * _exp(mean - b)
            return b + jnp.log(jnp.maximum(new, jnp.asarray(floor, b.dtype)))

        return jax.tree.map(one, value, *report)

    def guard(self, value: PyTree, newest: PyTree, floor: Real) -> PyTree:
        return jax.tree.map(
            lambda u, b: jnp.maximum(u, b + jnp.log(jnp.asarray(floor, b.dtype))), value, newest
        )

    def ratio(self, value: PyTree, new: PyTree) -> PyTree:
        return jax.tree.map(lambda u, v: jnp.where(u - v <= math.log(10), _exp(u - v), 0), value, new)


def _limit(t: jax.Array) -> float:
    return -math.log(jnp.finfo(t.dtype).eps)


def _exp(t: jax.Array) -> jax.Array:
    return jnp.exp(jnp.minimum(t, _limit(t)))


@jax.custom_jvp
def _expm1(t: jax.Array) -> jax.Array:
    """``exp(t) − 1``, continued linearly beyond the limit, so that its derivative is bounded."""
    cut = jnp.minimum(t, _limit(t))
    return jnp.expm1(cut) + math.exp(_limit(t)) * (t - cut)


@_expm1.defjvp
def _expm1_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    # an explicit rule: terms of the linear branch would cancel only in exact arithmetic
    (t,), (dt,) = primals, tangents
    return _expm1(t), _exp(t) * dt


ARITHMETIC = Tracker()
LOGARITHMIC = Logarithmic()


@dataclass(frozen=True, repr=False)
class LogMeanExp(Term):
    """A level with the value ``log mean exp function(z, sample)``, tracked on the logarithmic scale.

    Args:
        function: the exponent, ``function(z, sample)``.

    >>> import fedstrata as fs
    >>> problem = fs.Composition([fs.LogMeanExp(lambda x, s: s["a"] @ x), lambda u: u])  # log E exp(aᵀx)
    """

    mean: MeanOf | None = field(default=LOGARITHMIC.mean, init=False)

    def __post_init__(self) -> None:
        exponent = per_sample(self.function, "LogMeanExp's function", "it needs every sample's exponent")
        object.__setattr__(self, "function", exponent.function)


def tracker_of(level: Function) -> Tracker:
    """The tracker of a level."""
    term = Term.of(level)
    if term.mean == LOGARITHMIC.mean:
        return LOGARITHMIC
    if term.mean is not None:
        raise TypeError(f"Methods cannot track the mean of {term!r}; use a plain function or LogMeanExp.")
    return ARITHMETIC
