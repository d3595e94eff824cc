"""A lower-level solver that stops by its residual; every step is averaged, so that clients do not drift.

    y_j ≈ argmin over Y(x_j) of h(x_j, ·),  h the mean of the clients' h_i, at the points x_j of a round

Without a set it is Newton's method, with steps from conjugate residuals, along which ‖r‖ never grows:

    1  g ← ∇h(y)                                                                         one exchange
    2  until y is accurate enough, or the budget is spent:
    3      s ← 0, r ← −g;  until ‖r‖ ≤ θ‖g‖:
    4          p ← r + β p, where β makes ∇²h(y) p orthogonal to the one before             one, for ∇²h(y) r
    5          s ← s + α p, r ← r − α ∇²h(y) p, where α makes ‖r‖ least
    6      g⁺ ← ∇h(y + s);  while ‖g⁺‖ is not smaller: s ← s/4, and again                  one each
    7      θ ← | ‖g⁺‖ − ‖r‖ | / ‖g‖;  y ← y + s;  g ← g⁺

If h has no curvature along g in line 4, s is a multiple of −g instead, four times as long as the last such
step, and line 6 accepts it if ⟨g⁺, s⟩ ≤ 0, i.e. if h decreases to its end. If h decreases without end, y is
left unchanged.

On a set it is the accelerated projected gradient method:

    1′ z ← y
    2′ until y is accurate enough, or the budget is spent:
    3′     g ← ∇h(z);  L ← the largest ‖Δg‖²/⟨Δg, Δz⟩ so far, at first a guess             one exchange
    4′     y⁺ ← P(z − g/L);  z ← y⁺ + momentum · (y⁺ − y), 0 if ⟨z − y⁺, y⁺ − y⟩ > 0 or L grew

The solver needs no constants. θ, by Eisenstat & Walker (1996), measures how far ∇h was from linear: on a
quadratic it is zero, and lines 3 to 5 solve the problem. Curvatures are measured on the way, as
⟨p, ∇²h p⟩/⟨p, p⟩ in line 4 and ⟨Δg, Δz⟩/⟨Δz, Δz⟩ in line 3′; the smallest and the largest carry over to the
next round, each moved a tenth towards the other because x moves.

A zeroth-order estimate divides the difference of y(x + v) and y(x) by η. So y is accurate enough when the
residual, divided by the smallest curvature so far, is at most ``tol`` times the distance of the points' y
from their mean, or when it is only rounding. The residual is ‖∇h(y)‖; on a set L‖z − P(z − g/L)‖ at the last
z.

Messages hold all points, and clients return only averages. The server stores y as the rows of one matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fedstrata.core.client import Client, Oracle
from fedstrata.core.fed import Fed
from fedstrata.core.types import Array, Integer, Key, PyTree, Real
from fedstrata.estimators.curvature import hessian_product, norm
from fedstrata.estimators.gradients import gradient
from fedstrata.problems.classes import Minimization

BUDGET = 1000  # exchanges in a round
FIRST_THETA = 0.1
MOVED = 1.1  # the factor by which a curvature may have changed since the last round
SMALLEST_STEP = 4.0**-6  # the fraction of a Newton step below which the solver gives up
ROUNDINGS = 2  # rounding errors in a mean gradient, in units of the last place


class LowerReport(NamedTuple):
    """The results of one solution that the next one uses and the user gets.

    Attributes:
        residual: the largest residual of all points.
        scale: the scale of ∇h: its largest norm at a start so far.
        mu, L: the smallest and the largest curvature so far.
        theta: how far ∇h was from linear in the first step.
        solved: whether y was accurate enough at the end of the last round.
    """

    residual: Array
    scale: Array
    mu: Array
    L: Array
    theta: Array
    solved: Array

    @classmethod
    def blank(cls, y: PyTree) -> LowerReport:
        """The report before the first round."""
        zero = jnp.zeros((), jnp.result_type(*jax.tree.leaves(y)))
        return cls(zero, zero, zero, zero, zero + FIRST_THETA, jnp.asarray(True))


class Newton(NamedTuple):
    """Lines 2 to 7."""

    y: Array
    g: Array
    s: Array
    flat: Array  # the points at which s is along −g, for lack of curvature
    reach: Array  # the length of such an s, in units of the first
    part: Array  # the fraction of s to try next
    left: Array  # ‖r‖
    theta: Array
    first_theta: Array  # −1 before the first step
    mu: Array
    L: Array
    used: Array


class Conjugate(NamedTuple):
    """Lines 3 to 5 for −g/‖g‖ instead of −g, so that squares neither overflow nor underflow."""

    s: Array
    r: Array
    p: Array
    Hp: Array
    along: Array  # ⟨r, ∇²h r⟩ of the previous iteration
    mu: Array
    L: Array
    used: Array
    curved: Array


class Accelerated(NamedTuple):
    """Lines 2′ to 4′."""

    y: Array
    z: Array
    z_before: Array
    g_before: Array
    t: Array
    residual: Array
    mu: Array
    L: Array
    used: Array


@dataclass(frozen=True)
class Levels:
    """The lower levels for the server: maps of matrices that have the points' y as rows."""

    gradient: Callable[[Array], Array]
    product: Callable[[Array, Array], Array]
    project: Callable[[Array], Array]
    repeat: Callable[..., PyTree]


@dataclass(frozen=True)
class Accurate:
    """The solver, with ``tol`` as above.

    With a ``batch_size`` each client draws one batch for all steps of a round: y then solves the problem of
    these batches, and is a biased solution for all samples if ∇²h varies between batches.
    """

    tol: Real
    batch_size: int | None = None

    def oracle(self, problem: Minimization, client: Client, key: Key) -> Oracle:
        """h_i at one point."""
        return client.train.mean(problem.loss, key, self.batch_size)

    def gradients(self, problem: Minimization, client: Client, key: Key, y: PyTree) -> PyTree:
        """``∇h_i(y)``."""
        return gradient(self.oracle(problem, client, key), y)

    def products(self, problem: Minimization, client: Client, key: Key, y: PyTree, d: PyTree) -> PyTree:
        """``∇²h_i(y) d``."""
        return hessian_product(self.oracle(problem, client, key), y, d)

    def first_look(self, sets: Minimization, g: PyTree, y: PyTree) -> LowerReport:
        """The residual at y, with gradient g, before the first step; both are stacked."""
        size = scale = norms(_rows(g)).max()
        if not sets.project.trivial:
            L = _first_L(_rows(y), _rows(g))
            moved = sets.project(jax.tree.map(lambda y, g: y - (g / L).astype(y.dtype), y, g))
            size = L * norms(_rows(y) - _rows(moved)).max()
        return LowerReport.blank(y)._replace(residual=size, scale=scale)

    def solve(
        self, sets: Minimization, fed: Fed, key: Key, y: PyTree, before: LowerReport, budget: Integer
    ) -> tuple[PyTree, LowerReport]:
        """The solutions at all points, starting from ``y`` (stacked), in at most ``budget`` exchanges."""
        tree = jax.vmap(ravel_pytree(jax.tree.map(lambda leaf: leaf[0], y))[1])
        levels = Levels(
            lambda y: _rows(fed.average(self.gradients, key, tree(y))),
            lambda y, d: _rows(fed.average(self.products, key, tree(y), tree(d))),
            lambda y: _rows(sets.project(tree(y))),
            fed.repeat,
        )
        method = self.newton if sets.project.trivial else self.accelerated
        y_new, report = method(levels, _rows(y), before, budget)
        return tree(y_new), report._replace(solved=self.known(y_new, report))

    def wanted(self, y: Array, mu: Array, L: Array, scale: Array) -> Array:
        """The residual at which y is accurate enough, for each point."""
        return jnp.maximum(self.tol * mu * apart(y), self.rounding(y, L, scale))

    def rounding(self, y: Array, L: Array, scale: Array) -> Array:
        """The approximate size of rounding errors in the residual, for each point."""
        return ROUNDINGS * jnp.finfo(y.dtype).eps * (L * norms(y) + scale)

    def known(self, y: Array, now: LowerReport) -> Array:
        """Whether y is accurate enough: by ``tol``, or because the residual is only rounding."""
        rounded = now.residual <= 10 * self.rounding(y, now.L, now.scale).max()
        at_all = (now.residual <= now.mu * apart(y)) | (apart(y) == 0)
        return (now.residual <= self.tol * now.mu * apart(y)) | (rounded & at_all)

    def newton(
        self, levels: Levels, y: Array, before: LowerReport, budget: Integer
    ) -> tuple[Array, LowerReport]:
        """Lines 1 to 7."""
        g = levels.gradient(y)  # line 1
        scale = jnp.maximum(before.scale, norms(g).max())

        def lost(now: Newton) -> Array:
            return now.reach * jnp.finfo(y.dtype).eps > 1  # h decreases without end

        def done(now: Newton) -> Array:
            solved = (norms(now.g) <= self.wanted(now.y, now.mu, now.L, scale)).all()
            smallest = jnp.where(now.flat.any(), SMALLEST_STEP**4, SMALLEST_STEP)
            return solved | lost(now) | (now.used >= budget) | (now.part < smallest)

        def step(_: Integer, now: Newton) -> Newton:
            now = self.direction(levels, now, scale, budget)  # lines 3 to 5
            y = now.y + now.part * now.s
            g = levels.gradient(y)  # line 6
            old, new, downhill = norms(now.g), norms(g), now.flat & (dots(g, now.s) <= 0)
            small = (new <= (1 - 0.1 * now.part) * old) | (new <= self.rounding(y, now.L, scale))
            taken = (small | downhill).all()
            theta = jnp.clip(_ratio(jnp.abs(new - now.left), old).max(), 0, 0.5)  # line 7
            theta = jnp.where(taken, jnp.where(now.part < 1, 0.5, theta), now.theta)
            return now._replace(
                y=jnp.where(taken, y, now.y), g=jnp.where(taken, g, now.g),
                reach=jnp.where(taken & now.flat.any(), 4 * now.part * now.reach, now.reach),
                part=jnp.where(taken, 1, now.part / 4), theta=theta,
                first_theta=jnp.where(taken & (now.first_theta < 0), theta, now.first_theta),
                used=now.used + 1,
            )  # fmt: skip

        one, mu, L = jnp.ones((), y.dtype), MOVED * before.mu, before.L / MOVED
        flat = jnp.zeros(len(y), bool)
        start = Newton(y, g, 0 * y, flat, one, one, norms(g), before.theta, -one, mu, L, jnp.int32(1))
        end = levels.repeat(budget, step, start, until=done)  # line 2
        theta = jnp.where(end.first_theta < 0, before.theta, end.first_theta)
        residual = norms(end.g).max()
        return jnp.where(lost(end), y, end.y), before._replace(
            residual=residual, scale=scale, mu=end.mu, L=end.L, theta=theta
        )

    def direction(self, levels: Levels, now: Newton, scale: Array, budget: Integer) -> Newton:
        """Lines 3 to 5; after a step that was too long, the direction is kept."""
        size = norms(now.g)

        def done(cr: Conjugate) -> Array:
            wanted = self.wanted(now.y + size[:, None] * cr.s, cr.mu, cr.L, scale) / 2
            small = (size * norms(cr.r) <= jnp.maximum(now.theta * size, wanted)).all()
            return small | ~cr.curved | (cr.used + 1 >= budget) | (now.part < 1)

        def step(_: Integer, cr: Conjugate) -> Conjugate:
            Hr = levels.product(now.y, cr.r)
            along = dots(cr.r, Hr)
            beta = _ratio(along, cr.along)[:, None]
            p, Hp = cr.r + beta * cr.p, Hr + beta * cr.Hp
            square, length = dots(p, p), norms(Hp)
            curvature = _ratio(dots(p, Hp), square)
            L = jnp.maximum(cr.L, curvature.max())
            curved = (along > 0) & (curvature > jnp.finfo(p.dtype).eps * L)
            alpha = jnp.where(curved, _ratio(_ratio(along, length), length), 0)[:, None]
            mu = _smaller(cr.mu, jnp.where(curved, curvature, jnp.inf).min())
            fine = (curved | (square == 0)).all()
            return Conjugate(cr.s + alpha * p, cr.r - alpha * Hp, p, Hp, along, mu, L, cr.used + 1, fine)

        r, none = -_ratio(now.g, size[:, None]), 0 * now.g
        cr = Conjugate(none, r, none, none, 0 * size, now.mu, now.L, now.used, jnp.asarray(True))
        cr = levels.repeat(budget, step, cr, until=done)
        fresh = now.part == 1
        flat = jnp.where(fresh, (norms(cr.s) == 0) & (size > 0), now.flat)
        far = now.reach * jnp.where(cr.L > 0, _ratio(size, cr.L), 1 + norms(now.y))
        s = jnp.where(flat[:, None], -far[:, None] * _ratio(now.g, size[:, None]), size[:, None] * cr.s)
        return now._replace(
            s=jnp.where(fresh, s, now.s),
            flat=flat,
            left=jnp.where(fresh, size * norms(cr.r), now.left),
            mu=cr.mu,
            L=cr.L,
            used=cr.used,
        )

    def accelerated(
        self, levels: Levels, y: Array, before: LowerReport, budget: Integer
    ) -> tuple[Array, LowerReport]:
        """Lines 1′ to 4′."""

        def done(now: Accelerated) -> Array:
            solved = (now.residual <= self.wanted(now.y, now.mu, now.L, before.scale)).all()
            return solved | (now.used >= budget)

        def step(_: Integer, now: Accelerated) -> Accelerated:
            g = levels.gradient(now.z)  # line 3′
            finite, first = jnp.isfinite(g).all(), now.used == 0
            steep, flat = _curvatures(now.z - now.z_before, g - now.g_before, g)
            guess = jnp.where(first, _first_L(now.z, g), now.L / 4)  # until a curvature is measured
            known = (now.mu > 0) & (now.L > 0)
            L = jnp.where(known, jnp.maximum(now.L, steep), jnp.where(steep > 0, steep, guess))
            L = jnp.where(finite, L, 4 * now.L)  # h is not finite that far out
            y = jnp.where(finite, levels.project(now.z - g / L), now.y)  # line 4′
            back, forth = now.z - y, y - now.y
            restart = ((back * forth).sum() > 0) | (L > now.L) | ~finite
            t = jnp.where(restart, 1, now.t)
            t_next = (1 + jnp.sqrt(1 + 4 * t**2)) / 2
            residual = jnp.where(finite, L * norms(back), jnp.inf)
            mu = jnp.where(first | ~finite, now.mu, _smaller(now.mu, flat))
            g = jnp.where(finite, g, now.g_before)
            return Accelerated(
                y, y + (t - 1) / t_next * forth, now.z, g, t_next, residual, mu, L, now.used + 1
            )

        one, unknown = jnp.ones((), y.dtype), jnp.full_like(y[:, 0], jnp.inf)
        mu, L = MOVED * before.mu, before.L / MOVED
        start = Accelerated(y, y, y, 0 * y, one, unknown, mu, L, jnp.int32(0))  # line 1′
        end = levels.repeat(budget, step, start, until=done)  # line 2′
        return end.y, before._replace(residual=end.residual.max(), mu=end.mu, L=end.L)


def _first_L(y: Array, g: Array) -> Array:
    """A guess, by which the first step has length 1 + ‖y‖; measured curvature replaces it."""
    return (jnp.where(norms(g) > 0, norms(g), 1) / (1 + norms(y))).max()


def _curvatures(dz: Array, dg: Array, g: Array) -> tuple[Array, Array]:
    """The largest ``‖Δg‖²/⟨Δg, Δz⟩`` and the smallest ``⟨Δg, Δz⟩/‖Δz‖²``, where Δg exceeds rounding."""
    moved, changed, along = norms(dz), norms(dg), dots(dg, dz)
    telling = (moved > 0) & (changed > jnp.sqrt(jnp.finfo(g.dtype).eps) * norms(g))
    along = jnp.where(along > 0, along, changed * moved)
    steep = jnp.where(telling, _ratio(changed**2, along), 0).max()
    return steep, jnp.where(telling, _ratio(along, moved**2), jnp.inf).min()


def apart(y: Array) -> Array:
    """The largest distance of a point's y from their mean."""
    return norms(y - y.mean(0)).max()


def norms(rows: Array) -> Array:
    """The norm of each row."""
    return jax.vmap(norm)(rows)


def dots(a: Array, b: Array) -> Array:
    """The dot product of each row with the same row of the other."""
    return jnp.einsum("jp,jp->j", a, b, precision=jax.lax.Precision.HIGHEST)


def _rows(stacked: PyTree) -> Array:
    """A stack of trees as the rows of a matrix."""
    return jax.vmap(lambda tree: ravel_pytree(tree)[0])(stacked)


def _ratio(a: Array, b: Array) -> Array:
    """``a/b``, or 0 where b is 0."""
    return jnp.where(b == 0, 0, a / jnp.where(b == 0, 1, b))


def _smaller(mu: Array, met: Array) -> Array:
    """The smaller of two curvatures, where mu = 0 means that none was measured yet."""
    least = jnp.minimum(jnp.where(mu > 0, mu, jnp.inf), met)
    return jnp.where(jnp.isfinite(least), least, 0)
