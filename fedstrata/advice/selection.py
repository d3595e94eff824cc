"""How good a point is for a `Selection`, min f over X* = argmin h: by projections onto the optima of h.

    z = argmin over X* of ⟨∇f(x), z⟩ + ½‖z − x‖², the projection of x − ∇f(x); x = z at solutions
    p = the projection of x itself; ‖x − p‖ is the distance from X*

With h convex both are limits of strongly convex problems without a constraint, as ε → 0:

    z_ε = argmin_z h(z)/ε + ⟨∇f(x), z⟩ + ½‖z − x‖²

ε goes down from L_h/100 by tens. Newton's method with CG finds z_ε where all is smooth; else accelerated
proximal steps, of one regulariser (in f it takes the place of its part of ∇f) or a set. From ε and ε/10 the
limit is extrapolated, z ≈ z_{ε/10} + (z_{ε/10} − z_ε)/9, until it stays where it is.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedstrata.advice.diagnostics import federated_mean
from fedstrata.advice.lower import Level, newton
from fedstrata.core import tree
from fedstrata.core.types import Array, PyTree, Real, Weights
from fedstrata.data.storage import Placed
from fedstrata.estimators import vi
from fedstrata.estimators.curvature import power_iteration
from fedstrata.problems.classes import Objective, Selection

FIRST, LAST = 1e-2, 1e-8  # ε/L_h
MOST_STEPS = 50_000
POWER_STEPS = 20
ENOUGH = 1e-5  # a limit that moves no more than this, relative to 1 + its distance from x, was found


class Judged(NamedTuple):
    """What was found at x.

    Attributes:
        slope: ∇f(x), of its smooth parts.
        stationarity: ‖x − z‖.
        objective: f(x).
        residual: ‖∇h(x)‖; with a regulariser or a set ‖x − prox(x − s∇h(x))‖/s, s = 1/L_h.
        distance: ‖x − p‖.
        moved: how much z and p moved in the end.
        solved: whether that is little.
    """

    slope: PyTree
    stationarity: float
    objective: float
    residual: float
    distance: float
    moved: float
    solved: bool


def judge(problem: Selection, weights: Weights, data: Placed, x: PyTree, tolerance: float) -> Judged:
    """Measure a point."""
    _check(problem)
    level, L = _level(problem, weights), _curvature(problem, weights, data, x)

    @jax.jit
    def slopes(x: PyTree, data: Placed) -> tuple[Array, PyTree, PyTree]:
        def mean(function: Any, *args: PyTree, part: Any = "train", each: Any = None) -> Any:
            return federated_mean(function, data, part, weights)(*args)

        g_f = jax.grad(lambda x: _smooth(problem.f, weights, data, "valid", x))(x)
        return problem.f.measure(mean, x, part="valid"), g_f, _slope(problem, weights, data, x)

    objective, slope, g = slopes(x, data)
    free = problem.h.regularizer is None and problem.project.trivial
    path = partial(_limit, problem, level, data, x, L, tolerance)
    z, moved_z = path(slope, free and problem.f.regularizer is None, True)
    p, moved_p = path(tree.zeros_like(x), free, False)
    residual = tree.norm(g)
    if not free:
        onto = _prox(problem, tree.axpy(-1 / L, g, x), 1 / L, 0.0, False)
        residual = L * tree.norm(tree.sub(x, onto))
    stationarity, distance = float(tree.norm(tree.sub(x, z))), float(tree.norm(tree.sub(x, p)))
    moved = max(moved_z / (1 + stationarity), moved_p / (1 + distance))
    solved = moved <= max(tolerance, ENOUGH)
    return Judged(slope, stationarity, float(objective), float(residual), distance, moved, solved)


def _check(problem: Selection) -> None:
    if not problem.project.shared:
        raise TypeError("diagnose: a set that differs between clients is no set of x.")
    parts = [problem.h.regularizer is not None, problem.f.regularizer is not None]
    if sum(parts) + (not problem.project.trivial) > 1:
        raise TypeError(
            "diagnose: of a primary regulariser, a secondary one and a set, the problem has more than one, "
            "and the proximal map of their sum is not known. Write one regulariser that is their sum."
        )


def _smooth(level: Objective, weights: Weights, data: Placed, part: Any, x: PyTree) -> Any:
    """A level's value without its regulariser."""
    value: Any = jnp.zeros(())
    if level.loss is not None:
        value = federated_mean(level.loss, data, part, weights)(x)
    return value if level.known is None else value + level.known(x)


def _slope(problem: Selection, weights: Weights, data: Placed, x: PyTree) -> PyTree:
    """∇h, of its smooth parts."""
    return jax.grad(lambda x: _smooth(problem.h, weights, data, "train", x))(x)


def _level(problem: Selection, weights: Weights) -> Level:
    try:
        return _cached_level(problem, weights)
    except TypeError:  # a regulariser or set that holds arrays cannot be hashed
        return _cached_level.__wrapped__(problem, weights)


@lru_cache(maxsize=16)
def _cached_level(problem: Selection, weights: Weights) -> Level:
    """``G(z) = ∇h(z)/ε + ∇f(x) + z − x``, strongly monotone with modulus 1; its "x" is (x, ∇f(x), ε)."""

    def G(at: tuple[PyTree, PyTree, Array], z: PyTree, data: Placed) -> PyTree:
        x, slope, eps = at
        g = _slope(problem, weights, data, z)
        return tree.axpy(1 / eps, g, tree.add(slope, tree.sub(z, x)))

    return Level(lambda x, z, data: 0.0, G, None, True)


def _curvature(problem: Selection, weights: Weights, data: Placed, x: PyTree) -> Array:
    """L_h, at x and at the origin."""
    points = jax.tree.map(lambda leaf: jnp.stack([leaf, jnp.zeros_like(leaf)]), x)

    @jax.jit
    def largest(points: PyTree, data: Placed) -> Array:
        def product(v: PyTree) -> PyTree:
            slope = partial(_slope, problem, weights, data)
            return jax.vmap(lambda x, v: jax.jvp(slope, (x,), (v,))[1])(points, v)

        def repeat(times: int, body: Any, carry: Any) -> Any:
            return jax.lax.fori_loop(0, times, body, carry)

        return power_iteration(product, repeat, POWER_STEPS, jax.random.key(0), points).max()

    L = largest(points, data)
    return jnp.where(L > 0, L, 1)


def _prox(problem: Selection, z: PyTree, step: Real, of_f: Real, secondary: bool) -> PyTree:
    """The proximal map of the one part that has one: of h with a step, of f with another; or the set's."""
    if problem.h.regularizer is not None:
        return problem.h.regularizer.prox(z, step)
    if secondary and problem.f.regularizer is not None:
        return problem.f.regularizer.prox(z, of_f)
    return problem.project.common(z)


def _limit(
    problem: Selection,
    level: Level,
    data: Placed,
    x: PyTree,
    L: Array,
    tolerance: float,
    slope: PyTree,
    smooth: bool,
    secondary: bool,
) -> tuple[PyTree, float]:
    """The limit of z_ε, and how much it moved at last."""

    @jax.jit
    def proximal(z: PyTree, at: tuple[PyTree, PyTree, Array], data: Placed) -> PyTree:
        eps = at[2]
        alpha = 1 / (1.2 * L / eps + 1)

        def onto(z: PyTree) -> PyTree:
            return _prox(problem, z, alpha / eps, alpha, secondary)

        scale = 1 + tree.norm(slope)
        options: vi.Options = {"alpha": alpha, "tol": tolerance, "scale": scale, "max_steps": MOST_STEPS}
        return vi.accelerated(lambda z: level.lower(at, z, data), onto, z, **options).y

    eps, z, before, limit = FIRST * L, x, None, None
    moved = jnp.inf
    while eps >= 0.99 * LAST * L:
        at = x, slope, eps
        new = newton(level, data, at, z, tolerance)[0] if smooth else proximal(z, at, data)
        if before is not None:
            further = tree.axpy(1 / 9, tree.sub(new, before), new)
            moved = jnp.inf if limit is None else tree.norm(tree.sub(further, limit))
            limit = further
            if moved <= tolerance * (1 + tree.norm(tree.sub(x, limit))):
                break
        z = before = new
        eps = eps / 10
    return limit, float(moved)
