"""Closed convex sets, each a callable that projects: give one directly as ``project=`` of a problem.

    P_X(x) = argmin_{z ∈ X} ‖x − z‖

A point may be a pytree; it then stands for the vector of all its entries, and the projection has its
structure and dtypes. A parameter may be a number (for every entry), a pytree like the point, or one vector of
all entries. A parameter that is NaN, infinite or out of range raises a ValueError when the set is built.
Parameters are leaves of a pytree: a set may be built inside a traced function, ``project_y=lambda y, x:
Box(-1, -x)(y)``, and `jax.vmap` over stacked sets gives each client its own.

>>> from fedstrata.problems import sets
>>> project = sets.Box(-1.0, 1.0)
>>> project(jnp.array([3.0, -0.5]))
Array([ 1. , -0.5], dtype=float32)
>>> float(sets.distance(sets.Ball(1.0), jnp.array([3.0, 4.0])))
4.0
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.custom_derivatives import SymbolicZero
from jax.flatten_util import ravel_pytree

from fedstrata.core import tree
from fedstrata.core.hyperparameters import Count, Field
from fedstrata.core.types import PyTree, Real
from fedstrata.problems._feasibility import Implied
from fedstrata.problems._parameters import (
    Checked,
    concrete,
    dimension,
    entries,
    number,
    pytree,
    real,
    scalar,
    static,
    vector,
)
from fedstrata.support.points import as_floats
from fedstrata.support.tracing import is_traced
from fedstrata.support.words import misspelt

HIGHEST = jax.lax.Precision.HIGHEST


class Set(Checked, abc.ABC):
    """A closed convex set; calling it projects a point."""

    def __call__(self, x: PyTree) -> PyTree:
        """The point of the set nearest to ``x``, with the structure and dtypes of ``x``."""
        x = as_floats(x, "x")
        # Float64 bounds must neither promote a float32 point nor raise under strict promotion.
        with jax.numpy_dtype_promotion("standard"):
            return jax.tree.map(lambda p, leaf: p.astype(leaf.dtype), self._project(x), x)

    @abc.abstractmethod
    def _project(self, x: PyTree) -> PyTree: ...

    def _points(self) -> tuple[PyTree, ...]:
        """The parameters with one entry per entry of a point."""
        return ()

    def _imply(self, common: Implied) -> None:
        """Add conditions that every point of the set satisfies."""


@pytree
class Whole(Set):
    """The whole space: ``P(x) = x``."""

    def _project(self, x: PyTree) -> PyTree:
        return x


@pytree
class Box(Set):
    """``{x : lower ≤ x ≤ upper}``; ±∞ leaves a side open.

    Args:
        lower: the lower bounds.
        upper: the upper bounds.

    Raises:
        ValueError: if a bound is NaN, or the box is empty.

    >>> Box(0.0, [1.0, np.inf])(jnp.array([2.0, 2.0]))
    Array([1., 2.], dtype=float32)
    """

    lower: PyTree = entries(infinite=True)
    upper: PyTree = entries(infinite=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for low, high in _pairs(self.lower, self.upper):
            if not concrete((low, high)):
                continue
            if np.any(np.greater(low, high)):
                raise ValueError(f"Box: lower = {low} exceeds upper = {high}, so the set is empty.")
            if np.any(np.isposinf(low)) or np.any(np.isneginf(high)):
                raise ValueError("Box: a lower bound of +∞ or an upper bound of −∞ makes the set empty.")

    def _project(self, x: PyTree) -> PyTree:
        return optax.projections.projection_box(x, self.fitted("lower", x), self.fitted("upper", x))

    def _points(self) -> tuple[PyTree, ...]:
        return self.lower, self.upper

    def _imply(self, common: Implied) -> None:
        common.between(self.lower, self.upper)


@pytree
class NonNegative(Set):
    """``{x : x ≥ 0}``."""

    def _project(self, x: PyTree) -> PyTree:
        return optax.projections.projection_non_negative(x)

    def _imply(self, common: Implied) -> None:
        common.between(0.0, np.inf)


@pytree
class Ball(Set):
    """``{x : ‖x − center‖₂ ≤ radius}``.

    Args:
        radius: the radius, at least 0.
        center: the centre.
    """

    radius: Real = number(minimum=0)
    center: PyTree = entries(default=0.0)

    def _project(self, x: PyTree) -> PyTree:
        center = self.fitted("center", x)
        step = tree.sub(x, center)
        radius = jnp.asarray(self.radius, _dtype(x))
        inside = tree.norm(step) <= radius
        # Inside, the branch not taken must stay finite: its derivative is multiplied by zero.
        safe = jax.tree.map(lambda leaf: jnp.where(inside, 1, leaf), step)
        on_sphere = tree.add(center, optax.projections.projection_l2_sphere(safe, radius))
        return jax.tree.map(lambda leaf, p: jnp.where(inside, leaf, p), x, on_sphere)

    def _points(self) -> tuple[PyTree, ...]:
        return (self.center,)

    def _imply(self, common: Implied) -> None:
        common.in_ball(self.center, float(self.radius))


@pytree
class Simplex(Set):
    """``{x : x ≥ 0, Σ x = scale}``.

    Args:
        scale: the sum, greater than 0.

    Raises:
        ValueError: if the scale is not positive and finite.

    >>> Simplex()(jnp.array([2.0, 1.5, -1.0]))
    Array([0.75, 0.25, 0.  ], dtype=float32)
    """

    scale: Real = number(default=1.0, above=0)

    def _project(self, x: PyTree) -> PyTree:
        flat, unravel = ravel_pytree(x)
        return unravel(_simplex(flat, jnp.asarray(self.scale, flat.dtype)))

    def _imply(self, common: Implied) -> None:
        common.between(0.0, np.inf)
        common.at_most([np.ones(common.n), -np.ones(common.n)], [self.scale, -self.scale])


@pytree
class L1Ball(Set):
    """``{x : ‖x‖₁ ≤ radius}``.

    Args:
        radius: the radius, at least 0.
    """

    radius: Real = number(minimum=0)

    def _project(self, x: PyTree) -> PyTree:
        flat, unravel = ravel_pytree(x)
        size = jnp.abs(flat)
        radius = jnp.asarray(self.radius, flat.dtype)
        on_sphere = jnp.sign(flat) * _simplex(size, jnp.where(radius > 0, radius, 1))
        outside = jnp.where(radius > 0, on_sphere, 0)
        return unravel(jnp.where(size.sum() <= radius, flat, outside))

    def _imply(self, common: Implied) -> None:
        common.between(-self.radius, self.radius)


@pytree
class HalfSpace(Set):
    """``{x : ⟨a, x⟩ ≤ b}``.

    Args:
        a: the normal vector, not zero.
        b: the bound; +∞ gives the whole space.

    Raises:
        ValueError: for a zero normal, a NaN, or b = −∞.
    """

    a: PyTree = entries()
    b: Real = number(above=-np.inf, infinite=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if concrete(self.a) and not any(np.any(leaf) for leaf in jax.tree.leaves(self.a)):
            raise ValueError("HalfSpace: a is zero. Give a nonzero a, or use Whole().")

    def _project(self, x: PyTree) -> PyTree:
        a = self.fitted("a", x)
        return optax.projections.projection_halfspace(x, a, jnp.asarray(self.b, _dtype(x)))

    def _points(self) -> tuple[PyTree, ...]:
        return (self.a,)

    def _imply(self, common: Implied) -> None:
        if np.isfinite(self.b):
            common.at_most(vector(self.a, common.n), self.b)


@pytree
class Affine(Set):
    """``{x : A x = b}``, with x the vector of all entries; A may have dependent rows.

    The system is replaced by an equivalent ``Q x = c`` with orthonormal rows (one singular value
    decomposition, in float64 if A is concrete), so that ``P(x) = x − Qᵀ(Q x − c)``. If A or b is traced the
    system cannot be checked, and the set is the set of its least-squares solutions.

    Args:
        A: a matrix with a column per entry of x, or one row as a vector.
        b: a number per row.
        tolerance: the allowed distance of b from the range of A, relative to ‖b‖; None allows a few rounding
            errors.

    Raises:
        ValueError: if the shapes do not fit, for a NaN or an infinity, or if no x solves the system.

    >>> Affine([[1.0, 1.0], [2.0, 2.0]], [2.0, 4.0])(jnp.array([3.0, 1.0]))
    Array([2., 0.], dtype=float32)
    """

    Q: Any
    c: Any

    def __init__(self, A: Any, b: Any, *, tolerance: float | None = None) -> None:
        A = real((jnp if is_traced(A) else np).atleast_2d(A), "Affine: A")
        b = real((jnp if is_traced(b) else np).atleast_1d(b), "Affine: b")
        if A.ndim != 2 or A.size == 0 or b.shape != A.shape[:1]:
            raise ValueError(
                "Affine: A must be a matrix with a column per entry of x, and b must have an entry per "
                f"row, but their shapes are {A.shape} and {b.shape}."
            )
        rounding = max(A.shape) * float(jnp.finfo(A.dtype).eps)
        W, Q = _pseudoinverse_factors(A, rounding)
        if concrete((A, b)):
            c = W.T @ b
            error, size = np.linalg.norm(A @ (Q.T @ c) - b), np.linalg.norm(b)
            few = 10 * rounding * (size + np.linalg.norm(A) * np.linalg.norm(c))
            if error > (few if tolerance is None else tolerance * size):
                raise ValueError(
                    f"Affine: no x solves A x = b; the nearest A x is {error:.3g} away (‖b‖ = {size:.3g}). "
                    "Correct b, or give tolerance= to accept the least-squares solutions."
                )
        else:
            dtype = A.dtype if concrete(b) else b.dtype
            c = jnp.matmul(jnp.asarray(W.T, dtype), jnp.asarray(b, dtype), precision=HIGHEST)
        object.__setattr__(self, "Q", Q)
        object.__setattr__(self, "c", c)

    def _project(self, x: PyTree) -> PyTree:
        flat, unravel = ravel_pytree(x)
        n = self.Q.shape[1]
        if n != flat.size:
            raise ValueError(f"Affine: A has {n} columns, but the point has {flat.size} entries.")
        Q, c = jnp.asarray(self.Q, flat.dtype), jnp.asarray(self.c, flat.dtype)
        residual = jnp.matmul(Q, flat, precision=HIGHEST) - c
        return unravel(flat - jnp.matmul(Q.T, residual, precision=HIGHEST))

    def _points(self) -> tuple[PyTree, ...]:
        return (np.zeros(self.Q.shape[1]),)

    def _imply(self, common: Implied) -> None:
        common.at_most(np.vstack([self.Q, -self.Q]), np.concatenate([self.c, -self.c]))


@pytree
class Product(Set):
    """``X₁ × X₂ × …``: a pytree of sets, one for each part of the point.

    Args:
        sets: a dict, tuple or other pytree with sets as leaves; the point has the same outer structure.

    Raises:
        TypeError: if a leaf is not a set.

    >>> Product({"w": Whole(), "b": NonNegative()})({"w": jnp.array([-1.0]), "b": jnp.array([-1.0])})
    {'b': Array([0.], dtype=float32), 'w': Array([-1.], dtype=float32)}
    """

    sets: Any

    def __post_init__(self) -> None:
        leaves = jax.tree.leaves(self.sets, is_leaf=_is_set)
        if not leaves or not all(map(_is_set, leaves)):
            raise TypeError(
                f"Product takes a pytree of sets, with Whole() for a part without a set; got {self.sets!r}."
            )

    def _project(self, x: PyTree) -> PyTree:
        parts: Any = jax.tree.structure(self.sets, is_leaf=_is_set)
        try:
            pieces = parts.flatten_up_to(x)
        except ValueError as error:
            raise ValueError(
                f"Product: the point has no part for each set in {self.sets!r}: {error}"
            ) from error
        sets = jax.tree.leaves(self.sets, is_leaf=_is_set)
        return parts.unflatten(each(piece) for each, piece in zip(sets, pieces, strict=True))


@pytree
class Intersection(Set):
    """``X₁ ∩ X₂ ∩ …`` by accelerated Dykstra projections.

        1  y ← x − Σ q_i
        2  for every i:  z ← y + q_i,  y ← P_{X_i}(z),  p_i ← z − y
        3  if Σ⟨p_i − q_i, p_i − p_i⁻⟩ < 0:  t ← 1
        4  q ← p + (t − 1)/t⁺ · (p − p⁻),  t ← t⁺ = (1 + √(1 + 4t²))/2

    Lines 1 and 2 with q = p⁻ are Dykstra's sweep, coordinate descent on the dual problem; line 4 is its
    acceleration (Chambolle, Tan & Vaiter 2017), line 3 the restart (O'Donoghue & Candès 2015). The iteration
    stops when ‖p − q‖ ≤ tolerance · max(‖x‖, ‖y‖) (Birgin & Raydan 2005: the change of y alone can stall far
    from the solution), or after the given number of sweeps. It converges linearly for polyhedra, and slowly
    if boundaries meet at a small angle; check the result with `contains`. The projection is differentiable
    in forward mode only; `distance` and `moreau_indicator` in both modes.

    Args:
        *sets: the sets.
        iterations: the largest number of sweeps.
        tolerance: the tolerance, relative to the norm of the point; None: max(16 eps, 1e-12).

    Raises:
        TypeError: if an argument is not a set.
        ValueError: for an invalid option, sets for points of different sizes, or sets that provably have an
            empty intersection: contradictory bounds, infeasible linear constraints, or a ball too far away.

    >>> Intersection(Box(-1.0, 1.0), HalfSpace(1.0, 1.0))(jnp.array([2.0, 2.0]))
    Array([0.5, 0.5], dtype=float32)
    """

    sets: tuple[Set, ...]
    iterations: int = static()
    tolerance: float | None = static()

    def __init__(self, *sets: Set, iterations: int = 1000, tolerance: float | None = None) -> None:
        if not sets or not all(map(_is_set, sets)):
            raise TypeError(f"Intersection takes sets, as in Intersection(Box(0, 1), Ball(2)); got {sets!r}.")
        Field.of(Count).check("Intersection", "iterations", iterations)
        if tolerance is not None and not 0 <= tolerance < np.inf:
            raise ValueError(f"Intersection: tolerance must be finite and at least 0, but is {tolerance!r}.")
        object.__setattr__(self, "sets", sets)
        object.__setattr__(self, "iterations", iterations)
        object.__setattr__(self, "tolerance", tolerance)
        sizes = sorted({n for point in self._points() if (n := dimension(point)) is not None})
        if len(sizes) > 1:
            raise ValueError(f"Intersection: the sets are for points of different sizes: {sizes} entries.")
        if concrete(sets) and (reason := self._contradiction(*sizes)):
            raise ValueError(f"Intersection: the sets have no common point: {reason}.")

    def _project(self, x: PyTree) -> PyTree:
        rounding = float(jnp.finfo(_dtype(x)).eps)
        tolerance = max(16 * rounding, 1e-12) if self.tolerance is None else self.tolerance
        size = tree.norm(x)

        def unfinished(state: tuple[Any, ...]) -> jax.Array:
            sweep, y, *_, change = state
            return (sweep < self.iterations) & (change > tolerance * jnp.maximum(size, tree.norm(y)))

        def dykstra(state: tuple[Any, ...]) -> tuple[Any, ...]:
            sweep, _, last, q, t, _ = state
            y = jax.tree.map(lambda leaf, *parts: leaf - sum(parts), x, *q)  # line 1
            p = []
            for each, increment in zip(self.sets, q, strict=True):  # line 2
                z = tree.add(y, increment)
                y = each(z)
                p.append(tree.sub(z, y))
            change, step = tree.sub(p, q), tree.sub(p, last)
            t = jnp.where(tree.dot(change, step) < 0, 1, t)  # line 3
            t_next = (1 + jnp.sqrt(1 + 4 * t**2)) / 2
            q = tree.axpy((t - 1) / t_next, step, p)  # line 4
            return sweep + 1, y, p, q, t_next, tree.norm(change)

        start = [tree.zeros_like(x) for _ in self.sets]
        state = (0, x, start, start, jnp.ones_like(size), jnp.full_like(size, jnp.inf))
        return jax.lax.while_loop(unfinished, dykstra, state)[1]

    def _points(self) -> tuple[PyTree, ...]:
        return tuple(point for each in self.sets for point in each._points())

    def _imply(self, common: Implied) -> None:
        for each in self.sets:
            each._imply(common)

    def _contradiction(self, n: int | None = None) -> str | None:
        """The reason why the intersection is empty; None if none is found without a point."""
        ragged = any(dimension(p) is None and len(jax.tree.leaves(p)) > 1 for p in self._points())
        if ragged or (n is None and not all(isinstance(each, Box | NonNegative) for each in self.sets)):
            return None
        common = Implied(n or 1)
        self._imply(common)
        return common.contradiction()


@pytree
class MoreauIndicator:
    """``x ↦ dist²(x, X)/(2η)``, the Moreau envelope of the indicator of X; made by `moreau_indicator`."""

    set: Set
    eta: Real

    def __post_init__(self) -> None:
        object.__setattr__(self, "eta", scalar(self.eta, "moreau_indicator: eta", above=0))

    def __call__(self, x: PyTree) -> jax.Array:
        """``dist²(x, X)/(2η)``; `jax.grad` gives `gradient`."""
        value = _half_squared_distance(self.set, as_floats(x, "x"))
        return value / jnp.asarray(self.eta, value.dtype)

    def gradient(self, x: PyTree) -> PyTree:
        """``(x − P_X(x))/η``."""
        x = as_floats(x, "x")
        return jax.tree.map(lambda leaf, p: (leaf - p) / jnp.asarray(self.eta, leaf.dtype), x, self.set(x))


def moreau_indicator(set: Set, eta: Real) -> MoreauIndicator:
    """Smooth the indicator of a set: ``x ↦ dist²(x, X)/(2η)``, with the gradient ``(x − P_X(x))/η``.

    Args:
        set: the set X.
        eta: the smoothing parameter η > 0.

    Returns:
        A function of x, with its gradient as ``.gradient(x)``; `jax.grad` of it is the same.

    Raises:
        ValueError: if η is not positive and finite.

    >>> smooth = moreau_indicator(NonNegative(), eta=0.5)
    >>> smooth(jnp.array([-1.0, 2.0])), smooth.gradient(jnp.array([-1.0, 2.0]))
    (Array(1., dtype=float32), Array([-2.,  0.], dtype=float32))
    """
    return MoreauIndicator(set, eta)


def distance(set: Set, x: PyTree) -> jax.Array:
    """``‖x − P_X(x)‖``; its gradient is ``(x − P_X(x))/distance``, or 0 inside the set."""
    squared = 2 * _half_squared_distance(set, as_floats(x, "x"))
    outside = squared > 0
    return jnp.where(outside, jnp.sqrt(jnp.where(outside, squared, 1)), squared)


def contains(set: Set, x: PyTree, tolerance: Real = 1e-6) -> jax.Array:
    """Whether ``x`` is within ``tolerance`` of the set."""
    return distance(set, x) <= tolerance


@jax.custom_jvp
def _half_squared_distance(set: Set, x: PyTree) -> jax.Array:
    return 0.5 * tree.norm(tree.sub(x, set(x)), squared=True)


def _half_squared_distance_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    """∂/∂x is x − P(x), without differentiating P; the set's parameters are differentiated at fixed x."""
    set, x = primals
    set_dot, x_dot = jax.tree.map(_instantiate, tangents, is_leaf=_is_zero)
    residual = tree.sub(x, set(x))
    tangent = tree.dot(residual, x_dot)
    if not all(map(_is_zero, jax.tree.leaves(tangents[0], is_leaf=_is_zero))):
        tangent -= tree.dot(residual, jax.jvp(lambda s: s(x), (set,), (set_dot,))[1])
    return 0.5 * tree.norm(residual, squared=True), tangent


_half_squared_distance.defjvp(_half_squared_distance_jvp, symbolic_zeros=True)


def _is_zero(tangent: PyTree) -> bool:
    return isinstance(tangent, SymbolicZero)


def _instantiate(tangent: PyTree) -> Any:
    return jnp.zeros(tangent.shape, tangent.dtype) if _is_zero(tangent) else tangent


def _is_set(value: object) -> bool:
    return isinstance(value, Set)


def _dtype(x: PyTree) -> Any:
    return jnp.result_type(*jax.tree.leaves(x))


def _simplex(x: jax.Array, scale: jax.Array) -> jax.Array:
    # Shifting all entries does not change the projection; a maximum of 0 keeps partial sums accurate.
    return optax.projections.projection_simplex(x - jax.lax.stop_gradient(x.max()), scale)


def _pseudoinverse_factors(A: Any, rounding: float) -> tuple[Any, Any]:
    """``W, Q`` with A⁺ = QᵀWᵀ and orthonormal rows of Q (or zero rows if A is traced, to keep the shape)."""
    if concrete(A):
        U, sigma, Q = np.linalg.svd(np.asarray(A, np.float64), full_matrices=False)
        rank = int(np.sum(sigma > rounding * sigma[0]))
        return U[:, :rank] / sigma[:rank], Q[:rank]
    left, singular, right = jnp.linalg.svd(A, full_matrices=False)
    kept = singular > rounding * singular[0]
    return jnp.where(kept, left / jnp.where(kept, singular, 1), 0), jnp.where(kept[:, None], right, 0)


def _pairs(lower: PyTree, upper: PyTree) -> list[tuple[Any, Any]]:
    """Corresponding leaves of two bounds; empty if the correspondence depends on the point."""
    low, high = jax.tree.leaves(lower), jax.tree.leaves(upper)
    structures: list[Any] = [jax.tree.structure(lower), jax.tree.structure(upper)]
    if structures[0] == structures[1]:
        for a, b in zip(low, high, strict=True):
            if () not in (np.shape(a), np.shape(b)) and np.shape(a) != np.shape(b):
                raise ValueError(f"Box: lower has shape {np.shape(a)}, but upper has {np.shape(b)}.")
        return list(zip(low, high, strict=True))
    if len(low) == 1 and np.shape(low[0]) == ():
        return [(low[0], b) for b in high]
    if len(high) == 1 and np.shape(high[0]) == ():
        return [(a, high[0]) for a in low]
    return []


if not TYPE_CHECKING:  # for type checkers, a module with __getattr__ has every name
    __getattr__ = misspelt(__name__)
