"""The lower level of a problem over its pooled data: its solution y(x), and the derivative through it.

F(x) = f(x, y(x)),   y(x) solves  G(x, y) = 0,  or on a set  y = P_Y(y − s G(x, y))

1  y(x): if y has no set and G = ∇_y h, Newton's method on h with truncated conjugate gradients, which follows
   directions of negative curvature, so that it converges to minimisers only; else accelerated projections
   (if G is a gradient) or extragradient steps, then Newton's method on R(x, ·), see 2
2  free:     ∇_y G v = ∇_y f by CG,   ∇F = ∇_x f − ∇_x Gᵀ v
   on a set: R(x, y) = y − P_Y(y − s G(x, y)) is differentiated,
             ∇_y R · ∂y/∂x = −∇_x R by GMRES,   ∇F = ∇_x f + (∂y/∂x)ᵀ ∇_y f
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jax.flatten_util import ravel_pytree

from fedstrata.advice.spectrum import extremes
from fedstrata.core import tree
from fedstrata.core.term import Applied
from fedstrata.core.types import Array, Function, PyTree, Real, Weights
from fedstrata.data.storage import Placed
from fedstrata.estimators import vi
from fedstrata.support.digest import current
from fedstrata.support.frozen import jit

NEWTON_STEPS = 60
PROJECTED_STEPS = 20_000
CG_STEPS = 1_000
SHARPENING = 20  # steps of Newton's method on a natural residual
CLOSE = 1e-4  # relative to the length of y


T = TypeVar("T")


class NotCertifiable(TypeError):
    """A point cannot be judged; the message is the reason."""


def kept(build: Callable[[Any, Weights], T]) -> Callable[[Any, Weights], T]:
    """Build only once for a problem and weights, so that a second certificate compiles nothing."""

    @lru_cache(maxsize=16)
    def cached(problem: Any, weights: Weights, now: str) -> T:
        return build(problem, weights)

    def get(problem: Any, weights: Weights) -> T:
        try:
            return cached(problem, weights, current(problem))
        except TypeError:  # a set that holds arrays cannot be hashed
            return build(problem, weights)

    return get


@dataclass(frozen=True)
class Pooled:
    """A problem with a lower level over its pooled data, as functions of ``(x, y, data)``."""

    upper: Function  # f
    lower: Function  # G
    project: Function | None  # P_Y(y, x, data)
    potential: Function | None  # h, if G = ∇_y h
    spread: Function = lambda y, data: y  # from a result's y to the lower level's
    gather: Function = lambda y, data: y  # and back

    @property
    def free(self) -> bool:
        """Whether y(x) is an unconstrained minimiser."""
        return self.project is None and self.potential is not None


class Solved(NamedTuple):
    """A solution of a lower level.

    Attributes:
        y: the solution.
        first, last: ‖G‖ at the start and at the solution; on a set ‖y − P_Y(y − s G)‖/s.
        away: the estimated distance to an exact solution.
        step: s.
    """

    y: PyTree
    first: Array
    last: Array
    away: Array
    step: Array

    @property
    def close(self) -> bool:
        """Whether y is close enough to an exact solution."""
        size = np.sqrt(sum(np.vdot(leaf, leaf) for leaf in map(np.asarray, jax.tree.leaves(self.y))))
        return bool(self.away <= CLOSE * (size + CLOSE)) and bool(np.isfinite(self.last))


def solve_lower(level: Pooled, data: Placed, x: PyTree, y: PyTree, tolerance: float) -> Solved:
    """y(x) from a start."""
    if level.free:
        return _newton(level, data, x, y, tolerance)
    found = Solved(*_on_set(level, level.potential is not None, data, x, y, tolerance))
    if level.potential is not None and not jnp.isfinite(found.last):  # accelerated steps left G's domain
        found = Solved(*_on_set(level, False, data, x, y, tolerance))
    return _sharpened(level, data, x, found, tolerance)


def hypergradient(
    level: Pooled, data: Placed, x: PyTree, solved: Solved, tolerance: float
) -> tuple[Array, PyTree]:
    """F, and ∇F through the solution."""
    if level.free:
        return _adjoint(level, data, x, solved.y, tolerance)
    return _forward(level, data, x, solved.y, solved.step, tolerance)


def spectrum(level: Pooled, data: Placed, x: PyTree, y: PyTree) -> tuple[float, float, PyTree]:
    """The smallest and the largest curvature of h at y, and the direction of the smallest."""
    return extremes(Applied(_along, level), y, (x, y, data))


def _along(level: Pooled, v: PyTree, at: tuple[PyTree, PyTree, Placed]) -> PyTree:
    x, y, data = at
    return _product(level, data, x, y, v)


# Minimisers


class _Iterate(NamedTuple):
    """An iterate of Newton's method, the length of the last full step, and whether one was taken."""

    y: PyTree
    first: Array
    last: Array
    moved: Array
    good: Array
    steps: Array


@partial(jit, static_argnums=0)
def _newton(level: Pooled, data: Placed, x: PyTree, y: PyTree, tolerance: Real) -> Solved:
    least = tolerance * tree.norm(y)  # y(x) may be zero

    def goes_on(at: _Iterate) -> Array:
        still = at.moved <= tolerance * jnp.maximum(tree.norm(at.y), least)
        return (at.steps < NEWTON_STEPS) & at.good & ~still

    def step(at: _Iterate) -> _Iterate:
        y, before, after, moved, good = _newton_step(level, data, x, at.y)
        return _Iterate(y, jnp.where(at.steps == 0, before, at.first), after, moved, good, at.steps + 1)

    zero, far = jnp.zeros(()), jnp.full((), jnp.inf)
    at = jax.lax.while_loop(goes_on, step, _Iterate(y, zero, zero, far, far > 0, jnp.zeros((), int)))
    return Solved(at.y, at.first, at.last, at.moved, jnp.ones(()))


def _newton_step(
    level: Pooled, data: Placed, x: PyTree, y: PyTree
) -> tuple[PyTree, Array, Array, Array, Array]:
    """A step down h: residuals before and after, the length of the full step, and whether it was taken."""
    assert level.potential is not None
    potential = jax.value_and_grad(level.potential, argnums=1)
    value, slope = potential(x, y, data)
    before = tree.norm(slope)
    direction, bent = _truncated_cg(lambda v: _product(level, data, x, y, v), slope)
    along, reach = tree.dot(slope, direction), tree.norm(direction)

    def at(length: Array) -> _Step:
        new = tree.axpy(-length, direction, y)
        lower, slope = potential(x, new, data)
        residual = tree.norm(slope)
        # near the solution h changes by less than its rounding, so the residual decides
        flat = jnp.abs(lower - value) <= 1e-11 * jnp.abs(value)
        good = jnp.where(flat, residual < before, lower <= value - 1e-4 * length * along)
        return _Step(length, new, residual, good)

    # a direction of negative curvature has no natural length: try a long step
    first = jnp.where(bent, 10 * jnp.maximum(tree.norm(y) / jnp.where(reach > 0, reach, 1), 1), 1.0)
    found = jax.lax.while_loop(lambda s: ~s.good & (s.length > 1e-12), lambda s: at(s.length / 2), at(first))
    new = jax.tree.map(lambda a, b: jnp.where(found.good, a, b), found.y, y)
    return new, before, jnp.where(found.good, found.residual, before), reach, found.good


class _Step(NamedTuple):
    length: Array
    y: PyTree
    residual: Array
    good: Array


def _product(level: Pooled, data: Placed, x: PyTree, y: PyTree, v: PyTree) -> PyTree:
    return jax.jvp(lambda y: level.lower(x, y, data), (y,), (v,))[1]


def _truncated_cg(product: Function, b: PyTree) -> tuple[PyTree, Array]:
    """``H⁻¹ b`` by conjugate gradients, which stop if H is not positive; and whether they did."""
    size = tree.norm(b)
    aim = 1e-10 * size

    def step(
        state: tuple[PyTree, PyTree, PyTree, Array, Array],
    ) -> tuple[PyTree, PyTree, PyTree, Array, Array]:
        v, r, p, count, _ = state
        Hp = product(p)
        curved, square = tree.dot(p, Hp), tree.dot(r, r)
        bent = curved <= 1e-14 * tree.norm(Hp) * tree.norm(p)
        length = jnp.where(bent, jnp.where(count == 0, 1.0, 0.0), square / jnp.where(bent, 1, curved))
        v = tree.axpy(length, p, v)
        r = tree.axpy(jnp.where(bent, 0, -length), Hp, r)
        p = tree.axpy(tree.dot(r, r) / jnp.maximum(square, jnp.finfo(square.dtype).tiny), p, r)
        return v, r, p, count + 1, bent

    def unfinished(state: tuple[PyTree, PyTree, PyTree, Array, Array]) -> Array:
        return (tree.norm(state[1]) > aim) & (state[3] < CG_STEPS) & ~state[4]

    first = jax.tree.map(jnp.zeros_like, b), b, b, jnp.zeros((), int), jnp.zeros((), bool)
    v, *_, bent = jax.lax.while_loop(unfinished, step, first)
    return v, bent


# Variational inequalities


@partial(jit, static_argnums=(0, 1))
def _on_set(
    level: Pooled, fast: bool, data: Placed, x: PyTree, y: PyTree, tolerance: Real
) -> tuple[PyTree, Array, Array, Array, Array]:
    def G(y: PyTree) -> PyTree:
        return level.lower(x, y, data)

    def onto(y: PyTree) -> PyTree:
        return y if level.project is None else level.project(y, x, data)

    y = onto(y)
    method = vi.accelerated if fast else vi.extragradient
    probe = vi.residual(G, onto, y)
    scale = jnp.where(probe > 0, probe, 1)
    found = method(G, onto, y, tol=0.1 * tolerance, scale=scale, max_steps=PROJECTED_STEPS)
    first, last = (vi.residual(G, onto, at, found.alpha) / found.alpha for at in (y, found.y))
    # the length of the natural residual estimates the distance to the solution
    moved = tree.sub(found.y, onto(tree.axpy(-found.alpha, G(found.y), found.y)))
    return found.y, first, last, tree.norm(moved), found.alpha


@partial(jit, static_argnums=0)
def natural_residual(level: Pooled, data: Placed, x: PyTree, y: PyTree, step: Real) -> PyTree:
    """The natural residual as a vector, y − P_Y(y − s G(x, y))."""
    moved = tree.axpy(-step, level.lower(x, y, data), y)
    return tree.sub(y, moved if level.project is None else level.project(moved, x, data))


@partial(jit, static_argnums=0)
def _sharpened(level: Pooled, data: Placed, x: PyTree, found: Solved, tolerance: Real) -> Solved:
    """Newton's method on the natural residual, which does not depend on the conditioning."""
    residual = Applied(_residual_at, level)

    def step(state: tuple[Solved, Array, Array]) -> tuple[Solved, Array, Array]:
        at, _, count = state
        y, before, after, moved = _zero_step(residual, at.y, (x, at.step, data))
        better = after < before  # otherwise it is rounding, or the residual has no derivative there
        y = jax.tree.map(lambda new, old: jnp.where(better, new, old), y, at.y)
        last, away = jnp.where(better, after / at.step, at.last), jnp.fmin(moved, at.away)
        still = moved <= tolerance * tree.norm(y)
        return Solved(y, at.first, last, away, at.step), better & ~still, count + 1

    begun = found, jnp.ones((), bool), jnp.zeros((), int)
    return jax.lax.while_loop(lambda state: state[1] & (state[2] < SHARPENING), step, begun)[0]


def _residual_at(level: Pooled, y: PyTree, at: tuple[PyTree, Real, Placed]) -> PyTree:
    x, step, data = at
    return natural_residual(level, data, x, y, step)


def newton_zero(maps: Function, z: PyTree, data: Placed) -> PyTree:
    """A zero of ``maps(z, data)`` near z, by Newton's method with GMRES.

    Raises:
        NotCertifiable: if it does not find one.
    """
    first = before = float("inf")
    for count in range(NEWTON_STEPS):
        new, before, after, moved = _zero_step(maps, z, data)
        first = before if count == 0 else first
        if not after < before:
            break
        z = new
        if moved <= 1e-10 * tree.norm(z):
            break
    if not min(after, before) <= 1e-6 * max(first, 1e-300) and not moved <= 1e-6 * tree.norm(z):
        raise NotCertifiable("the equations have no zero that Newton's method finds, or many")
    return z


@partial(jit, static_argnums=0)
def _zero_step(maps: Function, z: PyTree, data: Placed) -> tuple[PyTree, Array, Array, Array]:
    """A damped step, the residuals before and after it, and the length of the full one."""
    flat, unravel = ravel_pytree(z)

    def G(z: Array) -> Array:
        return ravel_pytree(maps(unravel(z), data))[0]

    b = G(flat)
    operator = lx.FunctionLinearOperator(lambda v: jax.jvp(G, (flat,), (v,))[1], jax.eval_shape(lambda: flat))
    solver = lx.GMRES(rtol=1e-10, atol=0.0, max_steps=CG_STEPS, restart=min(flat.size, 60))
    d = lx.linear_solve(operator, b, solver, throw=False).value
    before = jnp.linalg.norm(b)

    def shorter(state: tuple[Array, Array]) -> tuple[Array, Array]:
        return state[0] / 2, jnp.linalg.norm(G(flat - state[0] / 2 * d))

    one = jnp.ones((), flat.dtype)
    length, after = jax.lax.while_loop(
        lambda s: ~(s[1] < (1 - 1e-4 * s[0]) * before) & (s[0] > 1e-6),
        shorter,
        (one, jnp.linalg.norm(G(flat - d))),
    )
    return unravel(flat - length * d), before, after, jnp.linalg.norm(d)


# Hypergradients


@partial(jit, static_argnums=0)
def _adjoint(level: Pooled, data: Placed, x: PyTree, y: PyTree, tolerance: Real) -> tuple[Array, PyTree]:
    value, (f_x, f_y) = jax.value_and_grad(level.upper, argnums=(0, 1))(x, y, data)
    product = partial(_product, level, data, x, y)
    # the norm of all entries decides when to stop: entries that are always zero would give 0/0
    v, _ = jax.scipy.sparse.linalg.cg(product, f_y, tol=tolerance, maxiter=CG_STEPS)
    (indirect,) = jax.vjp(lambda x: level.lower(x, y, data), x)[1](v)
    return value, tree.sub(f_x, indirect)


@partial(jit, static_argnums=0)
def _forward(
    level: Pooled, data: Placed, x: PyTree, y: PyTree, step: Real, tolerance: Real
) -> tuple[Array, PyTree]:
    """One linear system for every coordinate of x, so that projections need only forward derivatives."""

    def residual(x: PyTree, y: PyTree) -> PyTree:
        return natural_residual(level, data, x, y, step)

    def product(v: PyTree) -> PyTree:
        return jax.jvp(lambda y: residual(x, y), (y,), (v,))[1]

    operator = lx.FunctionLinearOperator(product, jax.eval_shape(lambda: y))
    solver = lx.GMRES(rtol=tolerance, atol=tolerance * 1e-3, max_steps=CG_STEPS)
    flat, unravel = ravel_pytree(x)
    value, (f_x, f_y) = jax.value_and_grad(level.upper, argnums=(0, 1))(x, y, data)

    def one(direction: Array) -> Array:
        b = tree.scale(-1, jax.jvp(lambda x: residual(x, y), (x,), (unravel(direction),))[1])
        return tree.dot(f_y, lx.linear_solve(operator, b, solver, throw=False).value)

    indirect = jax.lax.map(one, jnp.eye(flat.size, dtype=flat.dtype))
    return value, tree.add(f_x, unravel(indirect))
