"""Regularisers with their proximal maps and Moreau envelopes.

    prox(x, step) = argmin_y r(y) + ‖x − y‖²/(2 step)
    envelope(x, μ) =  min_y  r(y) + ‖x − y‖²/(2μ),      its gradient (x − prox(x, μ))/μ

`jax.grad` of an envelope uses that formula, also for nonconvex regularisers, where it holds if the minimiser
is unique. The regularisers here compute it without the difference x − prox(x, μ), which would lose all digits
if μ is small relative to x. A point may be a pytree; weights are checked, broadcast and leaves as in
`fedstrata.problems.sets`.

>>> from fedstrata.problems import prox
>>> huber = prox.L1(1.0)
>>> x = jnp.array([3.0, 0.1])
>>> huber.prox(x, 0.5), float(huber.envelope(x, 0.5))
(Array([2.5, 0. ], dtype=float32), 2.76)
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fedstrata.core import tree
from fedstrata.core.types import PyTree, Real
from fedstrata.problems._parameters import Checked, entries, number, pytree, real, scalar, static
from fedstrata.problems.sets import HIGHEST, MoreauIndicator, Set, contains
from fedstrata.support.points import as_floats
from fedstrata.support.words import misspelt


class Regularizer(Checked, abc.ABC):
    """A function r with a proximal map."""

    finite: ClassVar[bool] = True  # False for the indicator of a set

    @abc.abstractmethod
    def value(self, x: PyTree) -> jax.Array:
        """``r(x)``."""

    def prox(self, x: PyTree, step: Real) -> PyTree:
        """``argmin_y r(y) + ‖x − y‖²/(2 step)``.

        Args:
            x: the point.
            step: the step size, greater than 0.

        Raises:
            ValueError: if the step is not positive and finite.
        """
        return self._prox(as_floats(x, "x"), scalar(step, "step", above=0))

    @abc.abstractmethod
    def _prox(self, x: PyTree, step: Real) -> PyTree: ...

    def _pull(self, x: PyTree, mu: Real) -> PyTree:
        """``(x − prox(x, μ))/μ``, a subgradient at prox(x, μ); subclasses may avoid the difference."""
        return jax.tree.map(lambda a, p: (a - p) / jnp.asarray(mu, a.dtype), x, self._prox(x, mu))

    def envelope(self, x: PyTree, mu: Real) -> jax.Array:
        """``min_y r(y) + ‖x − y‖²/(2μ)``, differentiable in x, μ and the weights.

        Args:
            x: the point.
            mu: the smoothing parameter μ > 0.

        Raises:
            ValueError: if μ is not positive and finite.
        """
        return _envelope(self, as_floats(x, "x"), scalar(mu, "mu", above=0))

    def envelope_grad(self, x: PyTree, mu: Real) -> PyTree:
        """``(x − prox(x, μ))/μ``."""
        return self._pull(as_floats(x, "x"), scalar(mu, "mu", above=0))


@jax.custom_jvp
def _envelope(r: Regularizer, x: PyTree, mu: Real) -> jax.Array:
    half = tree.norm(r._pull(x, mu), squared=True) / 2  # ‖x − y‖²/(2μ²)
    return r.value(r._prox(x, mu)) + jnp.asarray(mu, half.dtype) * half


@_envelope.defjvp
def _envelope_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    """Danskin: the minimiser does not contribute to the derivative of the minimum."""
    r, x, mu = primals
    d_r, d_x, d_mu = tangents
    y, pull = r._prox(x, mu), r._pull(x, mu)
    value, by_r = jax.jvp(lambda r: r.value(y), (r,), (d_r,))
    half = tree.norm(pull, squared=True) / 2
    mu, d_mu = jnp.asarray(mu, half.dtype), jnp.asarray(d_mu, half.dtype)
    return value + mu * half, by_r + tree.dot(pull, d_x) - half * d_mu


def _abs(x: jax.Array) -> jax.Array:
    """|x| with the derivative 0 at 0; that of `jnp.abs` is 1, which would move zeros of a sparse point."""
    return x * jnp.sign(x)


def _soft(x: jax.Array, threshold: jax.Array) -> jax.Array:
    return jnp.sign(x) * jax.nn.relu(jnp.abs(x) - threshold)


def _up_to(x: jax.Array, most: jax.Array) -> jax.Array:
    return jnp.where(jnp.abs(x) > most, jnp.sign(x) * most, x)


class _Entrywise(Regularizer):
    """A sum over all entries; each parameter is one number, or has one for every entry.

    A subclass gives the value of one entry, its prox, and (x − prox)/μ.
    """

    _added: Callable[..., jax.Array]  # (x, *parameters)
    _nearest: Callable[..., jax.Array]  # (x, step, *parameters)
    _slope: Callable[..., jax.Array]  # (x, μ, *parameters)

    def value(self, x: PyTree) -> jax.Array:
        x = as_floats(x, "x")
        sums = jax.tree.map(lambda *leaves: self._added(*leaves).sum(), x, *self._parameters(x))
        return jax.tree.reduce(jnp.add, sums)

    def _prox(self, x: PyTree, step: Real) -> PyTree:
        return self._each(self._nearest, x, step)

    def _pull(self, x: PyTree, mu: Real) -> PyTree:
        return self._each(self._slope, x, mu)

    def _each(self, function: Callable[..., jax.Array], x: PyTree, step: Real) -> PyTree:
        def leaf(x: jax.Array, *parameters: jax.Array) -> jax.Array:
            return function(x, jnp.asarray(step, x.dtype), *parameters)

        return jax.tree.map(leaf, x, *self._parameters(x))

    def _parameters(self, x: PyTree) -> list[PyTree]:
        return [self.fitted(f.name, x) for f in fields(self)]  # type: ignore[arg-type]


@pytree
class L1(_Entrywise):
    """``weight · ‖x‖₁``; its envelope is Huber's function.

        prox: sign(x) · max(|x| − step · weight, 0)

    Args:
        weight: a number ≥ 0, or one per entry.
    """

    weight: PyTree = entries(default=1.0, minimum=0)

    def _added(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        return weight * _abs(x)

    def _nearest(self, x: jax.Array, step: jax.Array, weight: jax.Array) -> jax.Array:
        return _soft(x, step * weight)

    def _slope(self, x: jax.Array, mu: jax.Array, weight: jax.Array) -> jax.Array:
        return _up_to(x / mu, weight)


@pytree
class L2Squared(_Entrywise):
    """``weight/2 · ‖x‖₂²``.

        prox: x/(1 + step · weight)

    Args:
        weight: a number ≥ 0, or one per entry.
    """

    weight: PyTree = entries(default=1.0, minimum=0)

    def _added(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        return 0.5 * weight * x**2

    def _nearest(self, x: jax.Array, step: jax.Array, weight: jax.Array) -> jax.Array:
        return x / (1 + step * weight)

    def _slope(self, x: jax.Array, mu: jax.Array, weight: jax.Array) -> jax.Array:
        return weight * self._nearest(x, mu, weight)


@pytree
class ElasticNet(_Entrywise):
    """``l1 · ‖x‖₁ + l2/2 · ‖x‖₂²``.

        prox: soft(x, step · l1)/(1 + step · l2)

    Args:
        l1: at least 0; one per entry is possible.
        l2: at least 0; one per entry is possible.
    """

    l1: PyTree = entries(default=1.0, minimum=0)
    l2: PyTree = entries(default=1.0, minimum=0)

    def _added(self, x: jax.Array, l1: jax.Array, l2: jax.Array) -> jax.Array:
        return l1 * _abs(x) + 0.5 * l2 * x**2

    def _nearest(self, x: jax.Array, step: jax.Array, l1: jax.Array, l2: jax.Array) -> jax.Array:
        return _soft(x, step * l1) / (1 + step * l2)

    def _slope(self, x: jax.Array, mu: jax.Array, l1: jax.Array, l2: jax.Array) -> jax.Array:
        # the slopes of both parts at the prox
        return _up_to(x / mu, l1) + l2 * self._nearest(x, mu, l1, l2)


@pytree
class LogSum(_Entrywise):
    """``weight · Σ log(1 + |x|/ε)``, the log-sum penalty (nonconvex).

    With λ = step · weight, the larger nonzero stationary point is ``t = (|x| − ε + √((|x| + ε)² − 4λ))/2``:

        √λ ≤ ε:   prox = 0 if |x| ≤ λ/ε, else sign(x) · t; the problem is convex, the envelope smooth
        √λ > ε:   prox = sign(x) · t if t is real, positive and better than 0 (the smaller stationary point is
                  a local maximum), else 0; prox jumps, and the envelope has a kink there

    (Prater-Bennette, Shen, Tripp: The proximity operator of the log-sum penalty, 2022.)

    Args:
        weight: a number ≥ 0, or one per entry.
        epsilon: a number ε > 0, or one per entry.

    Raises:
        ValueError: for a negative weight, an ε that is not positive, a NaN or an infinity.
    """

    weight: PyTree = entries(default=1.0, minimum=0)
    epsilon: PyTree = entries(default=1.0, above=0)

    def _added(self, x: jax.Array, weight: jax.Array, epsilon: jax.Array) -> jax.Array:
        return weight * jnp.log1p(_abs(x) / epsilon)

    def _nearest(self, x: jax.Array, step: jax.Array, weight: jax.Array, epsilon: jax.Array) -> jax.Array:
        return _log_threshold(x, step * weight, epsilon)

    def _slope(self, x: jax.Array, mu: jax.Array, weight: jax.Array, epsilon: jax.Array) -> jax.Array:
        y = self._nearest(x, mu, weight, epsilon)
        return jnp.where(y == 0, x / mu, jnp.sign(y) * weight / (epsilon + jnp.abs(y)))


def _log_threshold(x: jax.Array, lam: jax.Array, epsilon: jax.Array) -> jax.Array:
    size = jnp.abs(x)
    excess = size * epsilon - lam
    discriminant = (size - epsilon) ** 2 + 4 * excess  # (|x| + ε)² − 4λ, without its cancellation
    solvable = discriminant > 0
    root = jnp.sqrt(jnp.where(solvable, discriminant, 1))
    # Two forms of the same root of t² + (ε − |x|)t = |x|ε − λ: each is accurate where the other cancels.
    large = size >= epsilon
    t = jnp.where(large, (size - epsilon + root) / 2, 2 * excess / jnp.where(large, 1, epsilon - size + root))
    gain = lam * jnp.log1p(jax.nn.relu(t) / epsilon) + t * (t / 2 - size)
    convex = jnp.sqrt(lam) <= epsilon
    chosen = jnp.where(convex, excess > 0, (t > 0) & (gain < 0)) & solvable
    return jnp.where(chosen, jnp.sign(x) * jnp.minimum(t, size), 0)  # not beyond x by rounding


@pytree
class LHalf(_Entrywise):
    """``weight · Σ |x|^½`` (nonconvex).

    With λ = step · weight:

        prox: 2x/3 · (1 + cos(2π/3 − 2φ/3)),  cos φ = λ/4 · (3/|x|)^{3/2},  where |x| > 3/2 · λ^{2/3};  else 0

    The prox jumps from 0 to λ^{2/3} at the threshold, where the envelope has a kink.
    (Xu, Chang, Xu, Zhang: L½ regularization: a thresholding representation theory and a fast solver, 2012.)

    Args:
        weight: a number ≥ 0, or one per entry.
    """

    weight: PyTree = entries(default=1.0, minimum=0)

    def _added(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        # The derivative is infinite at 0; it is set to 0 there, like that of |x|, so that it is never NaN.
        return weight * jnp.where(x == 0, 0, jnp.sqrt(jnp.where(x == 0, 1, jnp.abs(x))))

    def _nearest(self, x: jax.Array, step: jax.Array, weight: jax.Array) -> jax.Array:
        return _half_threshold(x, step * weight)

    def _slope(self, x: jax.Array, mu: jax.Array, weight: jax.Array) -> jax.Array:
        y = self._nearest(x, mu, weight)
        root = jnp.sqrt(jnp.where(y == 0, 1, jnp.abs(y)))
        return jnp.where(y == 0, x / mu, jnp.sign(y) * weight / (2 * root))


def _half_threshold(x: jax.Array, lam: jax.Array) -> jax.Array:
    jump = jnp.cbrt(lam) ** 2
    chosen = jnp.abs(x) > 1.5 * jump
    cosine = (3 * jump / jnp.where(chosen, jnp.abs(x), 3)) ** 1.5 / 4
    phi = jnp.arccos(jnp.where(chosen, cosine, 0))
    part = jnp.minimum(2 / 3 * (1 + jnp.cos(2 / 3 * (np.pi - phi))), 1)  # not beyond x by rounding
    return jnp.where(chosen, part * x, 0)


@pytree
class GroupLasso(Regularizer):
    """``Σ_g weight_g · ‖x_g‖₂`` over disjoint groups of entries.

        prox: x_g · max(1 − step · weight_g/‖x_g‖, 0)

    Args:
        weight: a number ≥ 0, or one per group in the sorted order of the labels. (For weights √|g|:
            ``np.sqrt(np.unique(groups, return_counts=True)[1])``.)
        groups: a label per entry of x, or a pytree of labels like x.

    Raises:
        ValueError: for a negative weight, a NaN or an infinity, no labels, or a wrong number of weights.

    >>> GroupLasso(1.0, groups=[0, 0, 1]).prox(jnp.array([3.0, 4.0, 0.5]), 1.0)
    Array([2.4, 3.2, 0. ], dtype=float32)
    """

    weight: Real
    groups: Any
    count: int = static()

    def __init__(self, weight: Real, groups: Any) -> None:
        weight = real(weight, "GroupLasso: weight", minimum=0)
        labels = [np.ravel(leaf) for leaf in jax.tree.leaves(groups)]
        if sum(map(len, labels)) == 0:
            raise ValueError("GroupLasso: groups must have a label per entry of x, but is empty.")
        names, labels_of = np.unique(np.concatenate(labels), return_inverse=True)
        if isinstance(groups, list | tuple) and np.ndim(groups[0]) and len(names) == len(labels_of):
            raise ValueError(
                "GroupLasso: groups must have a label for each entry of x, as in groups=[0, 0, 1, 1], but "
                f"lists the entries of each group, {groups!r}."
            )
        groups = labels_of
        if np.shape(weight) not in ((), (len(names),)):
            raise ValueError(
                f"GroupLasso: weight must be a number or have one per group, {len(names)}, "
                f"but has shape {np.shape(weight)}."
            )
        object.__setattr__(self, "weight", weight)
        object.__setattr__(self, "groups", groups)
        object.__setattr__(self, "count", len(names))

    def value(self, x: PyTree) -> jax.Array:
        flat, _ = ravel_pytree(as_floats(x, "x"))
        return jnp.sum(jnp.asarray(self.weight, flat.dtype) * self._norms(flat))

    def _prox(self, x: PyTree, step: Real) -> PyTree:
        flat, unravel = ravel_pytree(x)
        norms = self._norms(flat)
        threshold = jnp.asarray(step, flat.dtype) * jnp.asarray(self.weight, flat.dtype)
        kept = norms > threshold
        factor = jnp.where(kept, 1 - threshold / jnp.where(kept, norms, 1), 0)
        return unravel(factor[self.groups] * flat)

    def _pull(self, x: PyTree, mu: Real) -> PyTree:
        flat, unravel = ravel_pytree(x)
        norms, mu = self._norms(flat), jnp.asarray(mu, flat.dtype)
        weight = jnp.asarray(self.weight, flat.dtype)
        kept = norms > mu * weight
        factor = jnp.where(kept, weight / jnp.where(kept, norms, 1), 1 / mu)
        return unravel(factor[self.groups] * flat)

    def _norms(self, flat: jax.Array) -> jax.Array:
        if flat.shape != self.groups.shape:
            raise ValueError(
                f"GroupLasso: groups has {self.groups.size} labels, but the point has {flat.size} entries."
            )
        squared = jax.ops.segment_sum(flat**2, self.groups, self.count)
        return jnp.where(squared > 0, jnp.sqrt(jnp.where(squared > 0, squared, 1)), 0)


@pytree
class NuclearNorm(Regularizer):
    """``weight · Σ σ(x)``, the sum of the singular values.

        prox: U · max(Σ − step · weight, 0) · Vᵀ   with x = U Σ Vᵀ

    The matrices are the last two axes of every leaf; the value is the sum over leaves and leading axes. The
    derivative of prox (not of the envelope) needs distinct singular values.

    Args:
        weight: a number ≥ 0.

    Raises:
        ValueError: for a negative weight, a NaN or an infinity, or a leaf that is not a matrix.
    """

    weight: Real = number(default=1.0, minimum=0)

    def value(self, x: PyTree) -> jax.Array:
        x = as_floats(x, "x")
        norms = [jnp.linalg.svd(self._matrix(leaf), compute_uv=False).sum() for leaf in jax.tree.leaves(x)]
        return jax.tree.reduce(jnp.add, tree.scale(self.weight, norms))

    def _prox(self, x: PyTree, step: Real) -> PyTree:
        return self._of_singular_values(lambda sigma, step, weight: _soft(sigma, step * weight), x, step)

    def _pull(self, x: PyTree, mu: Real) -> PyTree:
        return self._of_singular_values(lambda sigma, mu, weight: _up_to(sigma / mu, weight), x, mu)

    def _of_singular_values(self, function: Callable[..., jax.Array], x: PyTree, step: Real) -> PyTree:
        def leaf(x: jax.Array) -> jax.Array:
            U, sigma, V = jnp.linalg.svd(self._matrix(x), full_matrices=False)
            sigma = function(sigma, jnp.asarray(step, x.dtype), jnp.asarray(self.weight, x.dtype))
            return jnp.matmul(U * sigma[..., None, :], V, precision=HIGHEST)

        return jax.tree.map(leaf, x)

    def _matrix(self, leaf: jax.Array) -> jax.Array:
        if leaf.ndim < 2:
            raise ValueError(f"NuclearNorm needs a matrix, but the point has shape {leaf.shape}.")
        return leaf


@pytree
class Indicator(Regularizer):
    """0 in a set, ∞ outside it.

        prox: P_X(x);   envelope: dist²(x, X)/(2μ)

    Args:
        set: the set X.
        tolerance: the distance at which a point still counts as inside, relative to max(1, ‖x‖).

    Raises:
        TypeError: if ``set`` is not a set.
    """

    set: Set
    tolerance: float = static()
    finite: ClassVar[bool] = False

    def __init__(self, set: Set, tolerance: float = 1e-5) -> None:
        if not isinstance(set, Set):
            raise TypeError(f"Indicator takes a set, e.g. fs.sets.Box(0, 1), but got {set!r}.")
        object.__setattr__(self, "set", set)
        object.__setattr__(self, "tolerance", tolerance)

    def value(self, x: PyTree) -> jax.Array:
        x = as_floats(x, "x")
        size = tree.norm(x)
        inside = contains(self.set, x, self.tolerance * jnp.maximum(size, 1))
        return jnp.where(inside, 0, jnp.inf).astype(size.dtype)

    def _prox(self, x: PyTree, step: Real) -> PyTree:
        return self.set(x)

    def envelope(self, x: PyTree, mu: Real) -> jax.Array:
        return MoreauIndicator(self.set, mu)(x)


if not TYPE_CHECKING:  # for type checkers, a module with __getattr__ has every name
    __getattr__ = misspelt(__name__)
