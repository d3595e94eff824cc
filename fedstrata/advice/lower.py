"""The lower level of a problem over its pooled data, and how its solution is found."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from fedstrata.core import tree
from fedstrata.core.types import Array, Function, PyTree, Real
from fedstrata.data.storage import Placed
from fedstrata.estimators import vi

NEWTON_STEPS = 50
PROJECTED_STEPS = 20_000
CG_STEPS = 1_000


@dataclass(frozen=True)
class Level:
    """A problem over its pooled data, as functions of ``(x, y, data)``."""

    upper: Function  # f
    lower: Function  # G
    project: Function | None  # P_Y(y, x, data)
    symmetric: bool  # whether ∇_y G is
    spread: Function = lambda y, data: y  # a result's y as the lower level's
    gather: Function = lambda y, data: y  # and back


def newton(level: Level, data: Placed, x: PyTree, y: PyTree, tolerance: float) -> tuple[PyTree, Array, Array]:
    """Newton's method; a step is halved until the residual falls. y(x), the first and the last residual."""
    new, first, after = _newton_step(level, data, x, y, 1.0)
    last, aim = first, tolerance * (1 + first)
    for _ in range(NEWTON_STEPS):
        if not after < last:
            break
        y, last = new, after
        if last <= aim:
            break
        new, _, after = _newton_step(level, data, x, y, aim)
    return y, first, last


@partial(jax.jit, static_argnums=0)
def _newton_step(level: Level, data: Placed, x: PyTree, y: PyTree, aim: Real) -> tuple[PyTree, Array, Array]:
    """A step, and the residuals before and after it; ``aim`` is the residual that is wanted in the end."""
    slope = level.lower(x, y, data)
    before = tree.norm(slope)
    # no more accuracy than the step can use, so that far from the solution products are saved
    accuracy = jnp.maximum(jnp.minimum(0.1, jnp.sqrt(before)), 0.1 * aim / jnp.maximum(before, aim))
    direction, _ = cg(level, x, y, data, slope, accuracy)

    def shorter(state: tuple[Array, PyTree, Array]) -> tuple[Array, PyTree, Array]:
        length = state[0] / 2
        new = tree.axpy(-length, direction, y)
        return length, new, tree.norm(level.lower(x, new, data))

    def unfinished(state: tuple[Array, PyTree, Array]) -> Array:
        return ~(state[2] < (1 - 1e-4 * state[0]) * before) & (state[0] > 1e-6)

    _, new, after = jax.lax.while_loop(unfinished, shorter, (jnp.asarray(2.0), y, before))
    return new, before, after


def cg(level: Level, x: PyTree, y: PyTree, data: Placed, b: PyTree, accuracy: Real) -> tuple[PyTree, Array]:
    """``[∇_y G]⁻¹ b`` and the relative residual."""

    def product(v: PyTree) -> PyTree:
        return jax.jvp(lambda y: level.lower(x, y, data), (y,), (v,))[1]

    # Norms of the whole decide when to stop: entry by entry, those that are zero all along would be 0/0.
    v, _ = jax.scipy.sparse.linalg.cg(product, b, tol=accuracy, maxiter=CG_STEPS)
    return v, tree.norm(tree.sub(product(v), b)) / jnp.maximum(tree.norm(b), jnp.finfo(float).tiny)


@partial(jax.jit, static_argnums=0)
def extragradient(
    level: Level, data: Placed, x: PyTree, y: PyTree, tolerance: Real
) -> tuple[PyTree, Array, Array, Array]:
    """y(x), the residual ‖y − P(y − sG(y))‖/s at the start and at the end, and the step s."""

    def G(y: PyTree) -> PyTree:
        return level.lower(x, y, data)

    def onto(y: PyTree) -> PyTree:
        return y if level.project is None else level.project(y, x, data)

    scale = 1 + vi.residual(G, onto, y)
    found = vi.extragradient(G, onto, y, tol=0.1 * tolerance, scale=scale, max_steps=PROJECTED_STEPS)
    first, last = (vi.residual(G, onto, at, found.alpha) / found.alpha for at in (y, found.y))
    return found.y, first, last, found.alpha


@partial(jax.jit, static_argnums=0)
def natural_residual(level: Level, data: Placed, x: PyTree, y: PyTree, step: Real) -> PyTree:
    """The natural residual as a vector, y − P_Y(y − s G(x, y))."""
    moved = tree.axpy(-step, level.lower(x, y, data), y)
    return tree.sub(y, moved if level.project is None else level.project(moved, x, data))
