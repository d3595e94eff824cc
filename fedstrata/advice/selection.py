"""Certificates of a `Selection`, min f over X* = argmin h: distances to a solution found from the point.

    x̂ = argmin over X* of f(z)/s + σ/2 ‖z − c‖²,   c = p, then the last x̂, a few times (proximal points)
    p = the projection of x onto X*; ‖x − p‖ is the distance from the optima of h

With h convex both are limits of strongly convex problems without a constraint, as ε → 0:

    z_ε = argmin_z h(z)/ε + f(z)/s + σ/2 ‖z − c‖²

ε decreases from L_h/100 by factors of ten. Newton's method with CG finds z_ε if all parts are smooth; else
accelerated proximal steps, of one regulariser or a set. From ε and ε/10 the limit is extrapolated, z ≈
z_{ε/10} + (z_{ε/10} − z_ε)/9, until it converges. s is f's own curvature, so that f's unit does not matter.
Columns that add up to one do so but for rounding, and h has a curvature of its square along them: if that is
what moves the limit, it is the steadiest one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.advice.lower import NotCertifiable, Pooled, kept, solve_lower
from fedstrata.advice.objectives import mean_over
from fedstrata.advice.spectrum import extremes
from fedstrata.core import tree
from fedstrata.core.types import Array, PyTree, Real, Weights
from fedstrata.data.storage import Placed
from fedstrata.estimators import vi
from fedstrata.problems.classes import Objective, Selection
from fedstrata.support.frozen import jit

FIRST, LAST = 1e-2, 1e-8  # ε/L_h
MOST_STEPS = 50_000
CENTRES = 8  # proximal points
NEAR = 0.05  # σ
Part: TypeAlias = Literal["train", "valid"]
PARTS: tuple[Part, Part] = ("valid", "train")  # of f and h
ENOUGH = 1e-5  # relative change of a limit at which it has converged


class Judged(NamedTuple):
    """The measurements at x.

    Attributes:
        solution: x̂.
        nearest: p.
        slope: ∇f(x), of its smooth parts.
        f, h: the levels' values at x.
        f_best, h_best: these values at x̂.
        residual: ‖∇h(x)‖; with a regulariser or a set ‖x − prox(x − s∇h(x))‖/s, s = 1/L_h.
        moved: the last change of x̂ and p, relative to their distance from x.
        pull: the length ‖∇f(x)‖/L_f of a gradient step of f only.
    """

    solution: PyTree
    nearest: PyTree
    slope: PyTree
    f: float
    h: float
    f_best: float
    h_best: float
    residual: float
    moved: float
    pull: float


def judge_selection(
    problem: Selection, weights: Weights, data: Placed, x: PyTree, tolerance: float
) -> Judged:
    """Measure a point."""
    _check(problem)
    level = _levels(problem, weights)
    L = level.curvature("train", data, x)
    unit = level.curvature("valid", data, x)
    free = problem.h.regularizer is None and problem.project.trivial
    smooth = free and problem.f.regularizer is None
    p, moved_p = level.limit(data, x, L, jnp.inf, tolerance, free)
    centre, moved = p, np.inf
    solution = p
    for _ in range(CENTRES):
        solution, accurate = level.limit(data, centre, L, unit, tolerance, smooth)
        size = float(tree.norm(tree.sub(solution, x))) + float(tree.norm(solution)) * ENOUGH
        step, moved = float(tree.norm(tree.sub(solution, centre))), accurate
        centre = solution
        if step <= 1e-8 * size:
            break
    g = level.slope(x, data, "train")
    residual = float(tree.norm(g))
    if not free:
        onto = level.prox(tree.axpy(-1 / L, g, x), 1 / L, 0.0)
        residual = float(L) * float(tree.norm(tree.sub(x, onto)))
    f, h = ({k: level.value(at, data, part) for k, at in (("x", x), ("s", solution))} for part in PARTS)
    away = float(tree.norm(tree.sub(x, solution))) + float(tree.norm(solution)) or 1.0
    slope = level.slope(x, data, "valid")
    pull = float(tree.norm(slope)) / float(unit)
    moved = max(float(moved), float(moved_p)) / away
    return Judged(solution, p, slope, f["x"], h["x"], f["s"], h["s"], residual, moved, pull)


def _check(problem: Selection) -> None:
    if not problem.project.shared:
        raise NotCertifiable("a set that differs between clients is not a set of x")
    parts = [problem.h.regularizer is not None, problem.f.regularizer is not None]
    if sum(parts) + (not problem.project.trivial) > 1:
        raise NotCertifiable(
            "of a primary regulariser, a secondary one and a set, the problem has more than one, and the "
            "proximal map of their sum is not known. Write one regulariser that is their sum"
        )


@dataclass(frozen=True, eq=False)
class _Levels:
    """Both levels over pooled data; their programs are compiled once for all points of a problem."""

    problem: Selection
    weights: Weights
    programs: dict[Any, Any] = field(default_factory=dict)

    def once(self, key: Any, build: Callable[[], Any]) -> Any:
        """A program, compiled once."""
        if key not in self.programs:
            self.programs[key] = build()
        return self.programs[key]

    def of(self, part: Part) -> Objective:
        """The level on a part of the samples: f on "valid", h on "train"."""
        return self.problem.f if part == "valid" else self.problem.h

    def smooth(self, part: Part, data: Placed, x: PyTree) -> Any:
        """A level's value without its regulariser."""
        level, value = self.of(part), jnp.zeros(())
        if level.loss is not None:
            value = mean_over(data, self.weights, level.loss, x, part=part)
        return value if level.known is None else value + level.known(x)

    def value(self, x: PyTree, data: Placed, part: Part) -> float:
        """A level's value."""

        def measured(x: PyTree, data: Placed) -> Any:
            return self.of(part).measure(partial(mean_over, data, self.weights), x, part)

        return float(self.once(("value", part), lambda: jit(measured))(x, data))

    def slope(self, x: PyTree, data: Placed, part: Part) -> PyTree:
        """The gradient of the smooth parts."""
        return self.once(("slope", part), lambda: jit(jax.grad(lambda x, data: self.smooth(part, data, x))))(
            x, data
        )

    def curvature(self, part: Part, data: Placed, x: PyTree) -> Array:
        """The largest absolute curvature of smooth parts at x and 0; for only a regulariser, value/‖x‖²."""
        found, level = 0.0, self.of(part)

        def product(v: PyTree, at: tuple[PyTree, Placed]) -> PyTree:
            point, data = at
            return jax.jvp(jax.grad(lambda x: self.smooth(part, data, x)), (point,), (v,))[1]

        if level.loss is not None or level.known is not None:
            same = self.once(("product", part), lambda: product)
            for point in (x, jax.tree.map(jnp.zeros_like, x)):
                low, high, _ = extremes(same, x, (point, data))
                found = max(found, high, -low)
        if found <= 0 and level.regularizer is not None:
            found = self.value(x, data, part) / max(float(tree.norm(x)) ** 2, 1e-300)
        return jnp.asarray(found if 0 < found < np.inf else 1.0)

    def bend(self, v: PyTree, data: Placed, x: PyTree) -> Array:
        """The curvature of h's smooth parts at x along v."""

        def bent(v: PyTree, x: PyTree, data: Placed) -> Array:
            Hv = jax.jvp(jax.grad(lambda x: self.smooth("train", data, x)), (x,), (v,))[1]
            return tree.dot(v, Hv) / tree.norm(v, squared=True)

        return self.once("bend", lambda: jit(bent))(v, x, data)

    def prox(self, z: PyTree, of_h: Real, of_f: Real) -> PyTree:
        """The proximal map of the regulariser, or the projection onto the set."""
        if self.problem.h.regularizer is not None:
            return self.problem.h.regularizer.prox(z, of_h)
        if self.problem.f.regularizer is not None:
            return self.problem.f.regularizer.prox(z, of_f)
        return self.problem.project.common(z)

    def level(self, judged: bool) -> Pooled:
        """``h(z)/ε + f(z)/s + σ/2‖z − c‖²``; its "x" is (c, ε, s). Without f it is the projection of c."""
        sigma = NEAR if judged else 1.0

        def potential(at: tuple[PyTree, Array, Array], z: PyTree, data: Placed) -> Any:
            centre, eps, unit = at
            near = sigma * tree.norm(tree.sub(z, centre), squared=True) / 2
            total = self.smooth("train", data, z) / eps + near
            return total + self.smooth("valid", data, z) / unit if judged else total

        return self.once(
            judged,
            lambda: Pooled(lambda x, z, data: 0.0, jax.grad(potential, argnums=1), None, potential),
        )

    def proximal(self, judged: bool) -> Any:
        """Accelerated proximal steps towards z_ε."""
        level = self.level(judged)

        def steps(
            z: PyTree, at: tuple[PyTree, Array, Array], L: Array, data: Placed, tolerance: Real
        ) -> PyTree:
            _, eps, unit = at
            alpha = 1 / (1.2 * L / eps + 2)

            def onto(z: PyTree) -> PyTree:
                return self.prox(z, alpha / eps, alpha / unit if judged else 0.0)

            scale = 1 + tree.norm(level.lower(at, at[0], data))
            options: vi.Options = {"alpha": alpha, "tol": tolerance, "scale": scale, "max_steps": MOST_STEPS}
            return vi.accelerated(lambda z: level.lower(at, z, data), onto, z, **options).y

        return self.once(("steps", judged), lambda: jit(steps))

    def limit(
        self, data: Placed, centre: PyTree, L: Array, unit: Any, tolerance: float, smooth: bool
    ) -> tuple[PyTree, float]:
        """The limit of z_ε, and its last change; with s = ∞ it is the projection of c onto X*."""
        judged = bool(np.isfinite(float(unit)))
        z, eps, before, limit, moved = centre, FIRST * L, None, None, jnp.inf
        steadiest, least, drift = centre, jnp.inf, centre
        while eps >= 0.99 * LAST * L:
            at = centre, eps, jnp.asarray(unit)
            if smooth:
                new = solve_lower(self.level(judged), data, at, z, tolerance).y
            else:
                new = self.proximal(judged)(z, at, L, data, tolerance)
            if before is not None:
                further = tree.axpy(1 / 9, tree.sub(new, before), new)
                if limit is not None:
                    drift = tree.sub(further, limit)
                    moved = tree.norm(drift)
                limit = further
                if moved <= 1e-7 * (tree.norm(tree.sub(centre, limit)) + 1e-2 * tree.norm(limit)):
                    break
                if moved <= least:
                    steadiest, least = limit, moved
            z = before = new
            eps = eps / 10
        if moved > least and self.bend(drift, data, centre) <= L * _rounding(data) ** 2:
            limit, moved = steadiest, least  # collinear columns, but for the rounding of samples
        return limit, float(moved)


def _rounding(data: Placed) -> float:
    """The relative rounding of the samples: of float32 if they are all such numbers, which float64 holds."""
    leaves = [leaf for leaf in jax.tree.leaves(data.train) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    single = all(bool((leaf.astype(jnp.float32) == leaf).all()) for leaf in leaves)
    return float(jnp.finfo(jnp.float32 if single else jnp.float64).eps)


@kept
def _levels(problem: Selection, weights: Weights) -> _Levels:
    return _Levels(problem, weights)
