"""How a level of a composition takes its mean, and how a method follows it.

A level's value g(z) is a mean over samples and clients. Usually that is the arithmetic mean of ``level(z,
sample)``. Where such values overflow, as KL's exp(ℓ/λ) does, a level is written with its exponent and
marked `LogMeanExp`: its value is then ``u = log mean exp level(z, sample)``, and all that methods do with g
they do with log g. A `Tracker` says how:

| | arithmetic | logarithmic, g = exp u |
|---|---|---|
| ``mean(values, weights)`` | Σ w v | log Σ w exp v |
| ``gap(out, u)``, of mean zero at the level's value | out − u | exp(out − u) − 1 |
| ``change(β, a, b)``, what a client sends to be followed | b − (1−β) a | (a, b) |
| ``follow(β, u, change)``: g ← (1−β)(g − a) + b | (1−β) u + change | the same of exponentials |
| ``blend(β, u, b)``: g ← (1−β) g + β b | the same | the same of exponentials |
| ``report(u, b)``, ``step(γ, u, report)``: g ← g + γ (ū − g) | | the same of exponentials |
| ``guard(u, b, floor)``: g ← max(g, floor·b) | u | the same of exponentials |
| ``ratio(u, u⁺)``: of units, for a Jacobian kept in units of u | 1 | exp(u − u⁺), or 0 |

The derivative of ``gap`` by the level's argument, at a followed u, is that of g in the units in which u is
kept: both have d gap/du = −1 in the mean at the level's value, so the chain rule of g and u is the
same formula. On the logarithmic scale nothing overflows: exponents are cut at log(1/ε), ε the float's
precision, beyond which weights count for nothing, and a followed value stays above ``floor`` times the
newest estimate, so that it can be taken the logarithm of.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import jax
import jax.numpy as jnp

from fedstrata.core import tree
from fedstrata.core.term import MeanOf, Term
from fedstrata.core.types import Function, PyTree, Real
from fedstrata.problems.terms import per_sample


class Tracker(Protocol):
    """How a level's values are averaged and followed; see the module's table."""

    def mean(self, values: PyTree, weights: jax.Array) -> PyTree:
        """The level's value from samples' or clients' values, stacked; ``weights`` sum to one."""

    def gap(self, out: PyTree, value: PyTree) -> PyTree:
        """A residual whose mean over samples is zero exactly where ``value`` is the level's."""

    def change(self, beta: Real, before: PyTree, now: PyTree) -> PyTree:
        """What a client sends so that `follow` can be done with the clients' mean of it."""

    def follow(self, beta: Real, value: PyTree, change: PyTree, floor: Real | None = None) -> PyTree:
        """``g ← (1−β)(g − a) + b``, with a and b the level's values at the last and the new point."""

    def blend(self, beta: Real, value: PyTree, new: PyTree) -> PyTree:
        """``g ← (1−β) g + β b``, β ≤ 1."""

    def report(self, value: PyTree, newest: PyTree) -> PyTree:
        """What a client sends so that `step` can be done with the clients' mean of it."""

    def step(self, gamma: Real, value: PyTree, report: PyTree, floor: Real) -> PyTree:
        """``g ← g + γ (ū − g)`` with the clients' mean ū; γ may exceed 1."""

    def guard(self, value: PyTree, newest: PyTree, floor: Real) -> PyTree:
        """A followed value that may be behind, for use as a unit: no weight in it exceeds 1/floor."""

    def ratio(self, value: PyTree, new: PyTree) -> PyTree:
        """By what a Jacobian's rows are multiplied when the units change from ``value`` to ``new``.

        Zero where g has fallen to less than a tenth: what was known of the rows is noise beside what is new.
        """


@dataclass(frozen=True)
class Arithmetic:
    """The plain mean."""

    def mean(self, values: PyTree, weights: jax.Array) -> PyTree:  # noqa: D102
        return jax.tree.map(lambda v: jnp.tensordot(weights.astype(v.dtype), v, axes=1), values)

    def gap(self, out: PyTree, value: PyTree) -> PyTree:  # noqa: D102
        return tree.sub(out, value)

    def change(self, beta: Real, before: PyTree, now: PyTree) -> PyTree:  # noqa: D102
        return tree.axpy(beta - 1, before, now)

    def follow(self, beta: Real, value: PyTree, change: PyTree, floor: Real | None = None) -> PyTree:  # noqa: D102
        return tree.axpy(1 - beta, value, change)

    def blend(self, beta: Real, value: PyTree, new: PyTree) -> PyTree:  # noqa: D102
        return tree.lerp(beta, value, new)

    def report(self, value: PyTree, newest: PyTree) -> PyTree:  # noqa: D102
        return value

    def step(self, gamma: Real, value: PyTree, report: PyTree, floor: Real) -> PyTree:  # noqa: D102
        return tree.lerp(gamma, value, report)

    def guard(self, value: PyTree, newest: PyTree, floor: Real) -> PyTree:  # noqa: D102
        return value

    def ratio(self, value: PyTree, new: PyTree) -> PyTree:  # noqa: D102
        return jax.tree.map(jnp.ones_like, new)


@dataclass(frozen=True)
class Logarithmic:
    """The mean of exponentials, kept as its logarithm."""

    def mean(self, values: PyTree, weights: jax.Array) -> PyTree:  # noqa: D102
        def one(v: jax.Array) -> jax.Array:
            w = weights.astype(v.dtype).reshape(-1, *[1] * (v.ndim - 1))
            # a weight of zero belongs to padding, whose value may be anything
            return jax.nn.logsumexp(jnp.where(w > 0, v, -jnp.inf), axis=0, b=w)

        return jax.tree.map(one, values)

    def gap(self, out: PyTree, value: PyTree) -> PyTree:  # noqa: D102
        return jax.tree.map(lambda o, u: _expm1(o - u), out, value)

    def change(self, beta: Real, before: PyTree, now: PyTree) -> PyTree:  # noqa: D102
        return before, now

    def follow(self, beta: Real, value: PyTree, change: PyTree, floor: Real | None = None) -> PyTree:  # noqa: D102
        lowest = beta if floor is None else floor

        def one(u: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
            # Where both exceed b by more than the float can tell from 1, they are taken as equal.
            rest = _exp(u - b) - _exp(a - b)
            return b + jnp.log(jnp.maximum(1 + jnp.asarray(1 - beta, b.dtype) * rest, lowest)).astype(b.dtype)

        return jax.tree.map(one, value, *change)

    def blend(self, beta: Real, value: PyTree, new: PyTree) -> PyTree:  # noqa: D102
        def one(u: jax.Array, b: jax.Array) -> jax.Array:
            weight = jnp.asarray(beta, u.dtype)
            return jnp.logaddexp(u + jnp.log1p(-weight), b + jnp.log(weight))

        return jax.tree.map(one, value, new)

    def report(self, value: PyTree, newest: PyTree) -> PyTree:  # noqa: D102
        return value, newest

    def step(self, gamma: Real, value: PyTree, report: PyTree, floor: Real) -> PyTree:  # noqa: D102
        def one(u: jax.Array, mean: jax.Array, b: jax.Array) -> jax.Array:
            weight = jnp.asarray(gamma, b.dtype)
            new = (1 - weight) * _exp(u - b) + weight * _exp(mean - b)
            return b + jnp.log(jnp.maximum(new, jnp.asarray(floor, b.dtype)))

        return jax.tree.map(one, value, *report)

    def guard(self, value: PyTree, newest: PyTree, floor: Real) -> PyTree:  # noqa: D102
        return jax.tree.map(
            lambda u, b: jnp.maximum(u, b + jnp.log(jnp.asarray(floor, b.dtype))), value, newest
        )

    def ratio(self, value: PyTree, new: PyTree) -> PyTree:  # noqa: D102
        return jax.tree.map(lambda u, v: jnp.where(u - v <= math.log(10), _exp(u - v), 0), value, new)


def _limit(t: jax.Array) -> float:
    return -math.log(jnp.finfo(t.dtype).eps)


def _exp(t: jax.Array) -> jax.Array:
    return jnp.exp(jnp.minimum(t, _limit(t)))


@jax.custom_jvp
def _expm1(t: jax.Array) -> jax.Array:
    """``exp(t) − 1``, continued by its tangent beyond the limit, so that its derivative is bounded."""
    cut = jnp.minimum(t, _limit(t))
    return jnp.expm1(cut) + math.exp(_limit(t)) * (t - cut)


@_expm1.defjvp
def _expm1_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    # by rule: the derivative of the tangent's branch would cancel only in exact arithmetic
    (t,), (dt,) = primals, tangents
    return _expm1(t), _exp(t) * dt


ARITHMETIC = Arithmetic()
LOGARITHMIC = Logarithmic()


@dataclass(frozen=True, repr=False)
class LogMeanExp(Term):
    """A level whose value is ``log mean exp function(z, sample)``, followed on the logarithmic scale.

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
    """How a level is averaged and followed."""
    term = Term.of(level)
    if term.mean == LOGARITHMIC.mean:
        return LOGARITHMIC
    if term.mean is not None:
        raise TypeError(f"No method knows how to follow the mean of {term!r}; LogMeanExp's is known.")
    return ARITHMETIC
