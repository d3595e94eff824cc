"""Solvers of a strongly monotone variational inequality VI(Y, G): the lower level of a two-stage problem.

    find y ∈ Y with ⟨G(y), z − y⟩ ≥ 0 for all z ∈ Y,   or   y = P_Y(y − αG(y)) for one (and so every) α > 0

For a μ-strongly monotone, L-Lipschitz G, and κ = L/μ:

    projection      y ← P_Y(y − αG(y))                                  α = μ/L²: O(κ²) steps for each digit
    extragradient   ȳ ← P_Y(y − αG(y)),  y ← P_Y(y − αG(ȳ))             α < 1/L:  O(κ) steps, two G each
    accelerated     y⁺ ← P_Y(z − αG(z)),  z ← y⁺ + (t−1)/t⁺ (y⁺ − y)    α = 1/L:  O(√κ) steps
    newton          y ← P_Y(y − R'(y)⁻¹R(y)),  R(y) = y − P_Y(y − αG(y))     a few steps for any κ

Newton's method solves with the whole Jacobian of R: a step costs eight values and one for each entry of y. A
step that does not reduce ‖R‖ by a tenth is one of extragradient instead, so that it converges from anywhere.
G must have derivatives, and P_Y almost everywhere.

The accelerated method restarts its sequence t if ⟨z − y⁺, y⁺ − y⟩ > 0 (O'Donoghue & Candès 2015), so it does
not need μ. Its rate is that of convex optimisation: G must be a gradient (with a symmetric Jacobian), as in a
potential game; the other methods do not need symmetry.

If the step size α is not given, the solvers estimate it. Power iterations on differences of G give the first
estimate: the smallest observed co-coercivity ⟨ΔG, Δy⟩/‖ΔG‖², which is at least μ/L² (1/L for a gradient), or
0.7 ‖Δy‖/‖ΔG‖ for extragradient. The solvers reduce it if it is too large: projection halves it when the
residual grows, which cannot happen below the co-coercivity; extragradient keeps α ‖G(y) − G(ȳ)‖ ≤ 0.7 ‖y −
ȳ‖, and repeats a step at which it was above ‖y − ȳ‖; the accelerated method halves it when the residual does
not decrease, and if that does not help, for lack of symmetry, it continues as the projection method.

The solvers take a number of steps (which may be traced), or stop when

    ‖y − P_Y(y − αG(y))‖/α ≤ tol · scale       (scale: ‖G‖ at the start, if not given)

or when the left side reaches the level of rounding. Several stacked inequalities are one inequality on the
product of their sets, with the worst μ and L: give the stacked map, projection and start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fedstrata.core import tree
from fedstrata.core.types import Integer, PyTree, Real

Map = Callable[[PyTree], PyTree]

MAX_STEPS = 10_000
POWER_STEPS = 4
SAFETY = 0.7  # of the largest stable step size of extragradient
SHORTEST = 1e-2  # by which one of its steps may shorten the next
ENOUGH = 0.9  # of the least residual so far: what a Newton step must reach
LONGER, PARTS = (
    (1.0, 1e2, 1e4),
    (1.0, 0.3),
)  # α of Newton's steps, in units of extragradient's, and their lengths
FAILURES = 12  # failures after which the accelerated method drops its momentum


class Options(TypedDict, total=False):
    """Keyword arguments that all solvers take.

    Attributes:
        alpha: the step size; None estimates it.
        steps: the number of steps, possibly traced; None stops by ``tol``.
        tol: the residual to reach, relative to ``scale``. Default 1e-6.
        max_steps: the largest number of steps if ``steps`` is None.
        scale: the scale of the residual; None: ‖G‖ at the start.
        probe: the first direction of the step size estimate; None takes one without symmetry.
    """

    alpha: Real | None
    steps: Integer | None
    tol: Real
    max_steps: int
    scale: Real | None
    probe: PyTree


class Solution(NamedTuple):
    """The result of a solver.

    Attributes:
        y: the point.
        steps: the number of steps taken.
        values: the number of evaluations of G.
        residual: ``‖y − P_Y(y − αG(y))‖/α``, at ``y`` or one step before.
        alpha: the final step size.
    """

    y: PyTree
    steps: jax.Array
    values: jax.Array
    residual: jax.Array
    alpha: jax.Array


def residual(G: Map, project: Map, y: PyTree, alpha: Real = 1.0) -> jax.Array:
    """The natural residual ``‖y − P_Y(y − αG(y))‖``; zero only at the solution."""
    return _norm(tree.sub(y, project(tree.axpy(-alpha, G(y), y))))


def projection(G: Map, project: Map, y: PyTree, **options: Unpack[Options]) -> Solution:
    """The projection method, from ``y``, with the map ``G`` and the projection ``project`` onto Y."""

    def step(run: _Run, first: Real | None) -> _Run:
        y = project(tree.axpy(-run.alpha, G(run.y), run.y))
        moved = _norm(tree.sub(y, run.y))
        alpha = run.alpha if first is None else jnp.where(moved >= run.moved, run.alpha / 2, run.alpha)
        # A smaller step moves less: the distance is scaled to be comparable with the next one.
        return _Run(y, run.k + 1, moved * (alpha / run.alpha), alpha)

    return _solve(step, G, y, _cocoercivity, **options)


def extragradient(G: Map, project: Map, y: PyTree, **options: Unpack[Options]) -> Solution:
    """The extragradient method (Korpelevich 1976)."""

    def step(run: _Run, first: Real | None) -> _Run:
        at_y = G(run.y)
        middle = project(tree.axpy(-run.alpha, at_y, run.y))
        at_middle = G(middle)
        y = project(tree.axpy(-run.alpha, at_middle, run.y))
        dy = tree.sub(middle, run.y)
        alpha, moved = run.alpha, _norm(dy)
        if first is not None:
            alpha, far = _shorter(alpha, dy, at_y, at_middle)
            y = jax.tree.map(lambda new, old: jnp.where(far, old, new), y, run.y)
        return _Run(y, run.k + 1, moved * (alpha / run.alpha), alpha)

    return _solve(step, G, y, _lipschitz, values_per_step=2, **options)


def _shorter(alpha: jax.Array, dy: PyTree, at_y: PyTree, at_middle: PyTree) -> tuple[jax.Array, jax.Array]:
    """The next α of extragradient, and whether this one was so long that its step must be repeated.

    Such a step would end where G may be steeper still, and the next one be too long again.
    """
    dG = tree.sub(at_middle, at_y)
    # Differences of the size of rounding errors carry no information; G may overflow.
    telling = ~(_norm(dG) <= jnp.sqrt(_epsilon(dy)) * _norm(at_y))
    most = jnp.where(telling, jnp.nan_to_num(_lipschitz(dy, dG), nan=0.0, posinf=jnp.inf), alpha)
    most = jnp.maximum(most, SHORTEST * alpha).astype(alpha.dtype)
    return jnp.minimum(alpha, most), most < SAFETY * alpha


class _Momentum(NamedTuple):
    z: PyTree
    t: jax.Array
    last: jax.Array  # the residual at the last restart
    best: jax.Array  # the smallest residual since the last failure,
    when: jax.Array  # and its step
    failures: jax.Array


def accelerated(G: Map, project: Map, y: PyTree, **options: Unpack[Options]) -> Solution:
    """The accelerated projection method with restarts."""

    def step(run: _Run, first: Real | None) -> _Run:
        z, t, last, best, when, failures = run.more
        y = project(tree.axpy(-run.alpha, G(z), z))
        back, forth = tree.sub(z, y), tree.sub(y, run.y)
        moved, restart = _norm(back), tree.dot(back, forth) > 0
        alpha = run.alpha
        if first is not None:
            now = moved / alpha
            momentum = failures < FAILURES
            stalled = (restart & (now >= last)) | (now > 4 * best) | (run.k - when > 50 + run.k // 4)
            failed = jnp.where(momentum, stalled, moved >= run.moved)
            failures = failures + failed
            alpha = jnp.where(failed, alpha / 2, alpha)
            alpha = jnp.where(failed & momentum & (failures == FAILURES), first, alpha).astype(alpha.dtype)
            last = jnp.where(restart, now, last)
            when = jnp.where(failed | (now < best), run.k, when)
            best = jnp.where(failed, now, jnp.minimum(best, now))
            restart = restart | failed | ~momentum
        t = jnp.where(restart, 1, t)
        t_new = (1 + jnp.sqrt(1 + 4 * t**2)) / 2
        z = tree.axpy((t - 1) / t_new, forth, y)
        more = _Momentum(z, t_new, last, best, when, failures)
        return _Run(y, run.k + 1, moved * (alpha / run.alpha), alpha, more)

    one, zero = jnp.ones((), _dtype(y)), jnp.int32(0)
    more = _Momentum(y, one, one * jnp.inf, one * jnp.inf, zero, zero)
    return _solve(step, G, y, _cocoercivity, more, **options)


def newton(G: Map, project: Map, y: PyTree, **options: Unpack[Options]) -> Solution:
    """Newton's method on the natural residual, with extragradient steps where it does not help.

    With the α of extragradient steps, R does not see far which bounds are active. So Newton's direction is
    tried for longer α too, and for a part of its length; the least residual, at α, counts.
    """
    begin, unravel = ravel_pytree(y)
    ones = jnp.eye(begin.size, dtype=begin.dtype)

    def onto(z: jax.Array) -> jax.Array:
        return ravel_pytree(project(unravel(z)))[0]

    def step(run: _Run, first: Real | None) -> _Run:
        z, alpha = ravel_pytree(run.y)[0], run.alpha

        def g(z: jax.Array) -> jax.Array:
            return ravel_pytree(G(unravel(z)))[0]

        def moved_at(z: jax.Array) -> jax.Array:
            return _norm(z - onto(z - alpha * g(z)))

        at_z, slope = g(z), jax.jacfwd(g)(z)

        def trials(longer: jax.Array) -> jax.Array:
            ahead = z - longer * alpha * at_z
            jacobian = ones - jax.jacfwd(onto)(ahead) @ (ones - longer * alpha * slope)
            direction = jnp.linalg.solve(jacobian, z - onto(ahead))
            return jax.vmap(lambda part: onto(z - part * direction))(jnp.array(PARTS, z.dtype))

        points = jax.vmap(trials)(jnp.array(LONGER, z.dtype)).reshape(-1, z.size)
        each = jax.vmap(moved_at)(points)
        each = jnp.where(jnp.isfinite(each), each, jnp.inf)
        reached, trial = each.min(), points[each.argmin()]
        middle = onto(z - alpha * at_z)
        moved = _norm(middle - z)
        least = jnp.minimum(run.more, moved)
        better = reached <= jnp.maximum(ENOUGH * least, 4 * _epsilon(y) * _norm(z))
        at_middle = g(middle)
        ahead = onto(z - run.alpha * at_middle)
        if first is not None:
            at_most, far = _shorter(alpha, middle - z, at_z, at_middle)
            alpha, ahead = jnp.where(better, alpha, at_most), jnp.where(far, z, ahead)
        z = jnp.where(better, trial, ahead)
        # R before the step: one more follows when it is small, which its rounding hides
        unit = alpha / run.alpha
        return _Run(unravel(z), run.k + 1, moved * unit, alpha, least * unit)

    infinite = jnp.full((), jnp.inf, _dtype(y))
    values = begin.size + len(LONGER) * len(PARTS) + 2
    return _solve(step, G, y, _lipschitz, infinite, values_per_step=values, **options)


SOLVERS: dict[str, Callable[..., Solution]] = {
    "projection": projection,
    "extragradient": extragradient,
    "accelerated": accelerated,
    "newton": newton,
}


class _Run(NamedTuple):
    y: PyTree
    k: jax.Array
    moved: jax.Array  # ‖y − P_Y(y − αG(y))‖
    alpha: jax.Array
    more: PyTree = None


def _solve(
    one_step: Callable[[_Run, Real | None], _Run],
    G: Map,
    y: PyTree,
    rule: Callable[[PyTree, PyTree], jax.Array],
    more: PyTree = None,
    values_per_step: int = 1,
    *,
    alpha: Real | None = None,
    steps: Integer | None = None,
    tol: Real = 1e-6,
    max_steps: int = MAX_STEPS,
    scale: Real | None = None,
    probe: PyTree = None,
) -> Solution:
    """The loop of all solvers: a given number of steps, or until the residual is small.

    A step gets the step size of ``rule``, which it adapts, or None if the user gave one.
    """
    dtype, eps = _dtype(y), _epsilon(y)
    first, before = None, 0
    if alpha is None:
        first, before = step_size(G, y, rule, probe), POWER_STEPS + 1
        alpha = first

    def step(run: _Run) -> _Run:
        return one_step(run, first)

    start = _Run(y, jnp.int32(0), jnp.full((), jnp.inf, dtype), jnp.asarray(alpha, dtype), more)
    if steps is None:
        if scale is None:
            scale, before = _norm(G(y)), before + 1

        def unfinished(run: _Run) -> jax.Array:
            enough = jnp.maximum(tol * scale * run.alpha, 4 * eps * _norm(run.y))
            return (run.k < max_steps) & (run.moved > enough)

        end = jax.lax.while_loop(unfinished, step, start)
    elif first is not None:
        end = jax.lax.fori_loop(0, steps, lambda _, run: step(run), start)
    else:  # nothing depends on the residual, so the loop does not compute it
        end = jax.lax.fori_loop(0, steps, lambda _, run: step(run)._replace(moved=run.moved), start)
        end = end._replace(moved=step(end).moved)
    return Solution(end.y, end.k, before + values_per_step * end.k, end.moved / end.alpha, end.alpha)


def step_size(
    G: Map, y: PyTree, rule: Callable[[PyTree, PyTree], jax.Array], probe: PyTree = None
) -> jax.Array:
    """The smallest value of ``rule`` on `POWER_STEPS` power iterations with differences of G around ``y``."""
    at_y = G(y)
    # Large enough that rounding errors are negligible in the differences.
    radius = _epsilon(y) ** 0.25 * (1 + _norm(y))

    def step(carry: tuple[PyTree, jax.Array], _: None) -> tuple[tuple[PyTree, jax.Array], None]:
        direction, alpha = carry
        size = _norm(direction)
        direction = tree.scale(radius / jnp.where(size > 0, size, 1), direction)
        dG = tree.sub(G(tree.add(y, direction)), at_y)
        at_most = rule(direction, dG)
        return (dG, jnp.where(at_most > 0, jnp.minimum(alpha, at_most), alpha)), None

    start = jax.tree.map(uneven, y) if probe is None else probe
    (_, alpha), _ = jax.lax.scan(step, (start, jnp.full((), jnp.inf, _dtype(y))), length=POWER_STEPS)
    return jnp.where(jnp.isfinite(alpha), alpha, 1)


def secant_step(dy: PyTree, dG: PyTree) -> jax.Array:
    """``‖Δy‖/‖ΔG‖``, between 1/L and 1/μ; 1 if either is zero."""
    dy_size, dG_size = _norm(dy), _norm(dG)
    known = (dy_size > 0) & (dG_size > 0)
    return jnp.where(known, dy_size / jnp.where(known, dG_size, 1), 1)


def uneven(leaf: jax.Array) -> jax.Array:
    """A direction without symmetry, so that it is not orthogonal to the dominant eigenvector."""
    return 1 + jnp.cos(jnp.arange(leaf.size, dtype=leaf.dtype)).reshape(leaf.shape) / 2


def _cocoercivity(dy: PyTree, dG: PyTree) -> jax.Array:
    """``⟨ΔG, Δy⟩/‖ΔG‖²``; infinite where ΔG = 0."""
    square = tree.dot(dG, dG)
    return jnp.where(square > 0, tree.dot(dG, dy) / jnp.where(square > 0, square, 1), jnp.inf)


def _lipschitz(dy: PyTree, dG: PyTree) -> jax.Array:
    """``0.7 ‖Δy‖/‖ΔG‖``; infinite where ΔG = 0."""
    size = _norm(dG)
    return jnp.where(size > 0, SAFETY * _norm(dy) / jnp.where(size > 0, size, 1), jnp.inf)


def _norm(x: PyTree) -> jax.Array:
    return jnp.sqrt(tree.dot(x, x))  # by matrix products, which CPUs compute several times faster than sums


def _dtype(y: PyTree) -> Any:
    return jnp.result_type(*jax.tree.leaves(y))


def _epsilon(y: PyTree) -> float:
    return float(jnp.finfo(_dtype(y)).eps)
