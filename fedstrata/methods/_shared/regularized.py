"""Shared by the methods for `Selection`: steps on ``h/L_h + ηf/S_f``, and the scales L_h and S_f.

h is divided by its curvature L_h, and f by the curvature S_f of its smooth parts, so that step sizes and η do
not depend on the units of the losses. Both are estimated before the first round, by power iteration over the
federation (`fedstrata.estimators.curvature`), at the start and at the origin. Scaling changes neither argmin
h nor the best point in it. S_f = 1 if f is only a regulariser, if h has no curvature, or if L_h is given.

A nonsmooth part of h enters by its proximal map, which the server applies after averaging, and a set as in
FedAvg. A nonsmooth part of f enters likewise or, given μ, by the gradient of its Moreau envelope, in the
clients' steps.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from fedstrata.core import counting, tree
from fedstrata.core.client import Client, Oracle, Samples
from fedstrata.core.counting import loop
from fedstrata.core.fed import Fed
from fedstrata.core.method import Method, Moment, StateT
from fedstrata.core.term import Term
from fedstrata.core.types import Key, PyTree, Real
from fedstrata.estimators.curvature import hessian_product, local_curvature, power_iteration
from fedstrata.estimators.gradients import gradient
from fedstrata.problems.classes import Objective, Selection

POWER = 8  # of the power mean that bounds a maximum over clients, up to a factor of m^(1/8)


class Scale(NamedTuple):
    """The curvatures of h (its divisor) and f, and the largest curvature of one client's h_i.

    If h was measured and has no curvature, like piecewise linear losses, ``L_max`` is 0 and its divisor 1.
    ``S_f`` is the divisor of f: the curvature of its smooth parts, or 1 if that is zero or h has none.
    """

    L_h: jax.Array
    L_f: jax.Array
    L_max: jax.Array
    S_f: jax.Array

    @classmethod
    def unknown(cls, x: PyTree) -> Scale:
        """The scale before the estimates."""
        one = jnp.ones((), jnp.result_type(*jax.tree.leaves(x)))
        return cls(one, 0 * one, one, one)


class StepSizes(NamedTuple):
    """A client's step on h and on f: γ_ℓ/L_h and γ_ℓ η/S_f."""

    h: Real
    f: Real


def direction(
    level: Objective,
    samples: Samples | None,
    key: Key,
    batch_size: int | None,
    x: PyTree,
    mu: Real | None = None,
) -> PyTree:
    """The gradient of a level's smooth parts and, given μ, of its regulariser's Moreau envelope."""
    g = tree.zeros_like(x)
    if level.loss is not None and samples is not None:
        g = gradient(samples.mean(level.loss, key, batch_size), x)
    if level.known is not None:
        g = tree.add(g, jax.grad(level.known)(x))
    if level.regularizer is not None and mu is not None:
        g = tree.add(g, level.regularizer.envelope_grad(x, mu))
    return g


class Regularized(Method[Selection, StateT]):
    """Base of these methods. A subclass has the fields below, and a `Scale` in its state."""

    K: int = 1
    gamma_g: Real = 1.0
    R: Real | None = 0.0  # None takes the run's number of rounds
    mu: Real | None
    L_h: Real | None
    power_steps: int
    batch_size: int | None

    solves = (Selection,)
    needs = "gradients, products"
    exact = "adds the gradient of f, times a small η, to the one of h"

    def check(self, problem: Selection, clients: int) -> None:
        super().check(problem, clients)
        name, proximal = type(self).__name__, [problem.h.regularizer is not None]
        proximal += [problem.f.regularizer is not None and self.mu is None, not problem.project.trivial]
        if sum(proximal) > 1:
            raise ValueError(
                f"{name}: the problem has more than one of a primary regulariser, a secondary regulariser "
                "and a set, and the proximal map of their sum is unknown. Give mu, which smooths the "
                "secondary regulariser, or give their sum as one regulariser."
            )

    def plan(self, rounds: int) -> Self:
        return self if self.R is not None else dataclasses.replace(self, R=float(max(rounds, 1)))  # type: ignore[type-var]

    def start(self, problem: Selection, fed: Fed, key: Key, state: Any) -> Any:
        return state._replace(scale=self.scale(problem, fed, key, state.x))

    def gradients(self, problem: Selection, client: Client, key: Key, x: PyTree) -> tuple[PyTree, PyTree]:
        """A phase: the gradients of h_i and f_i at x, with independent samples."""
        key_h, key_f = jax.random.split(key)
        g_h = direction(problem.h, client.train, key_h, self.batch_size, x)
        return g_h, direction(problem.f, client.valid, key_f, self.batch_size, x, self.mu)

    def local_steps(
        self, problem: Selection, client: Client, key: Key, x: PyTree, steps: StepSizes
    ) -> PyTree:
        """A phase: K steps on ``h_i/L_h + ηf_i/S_f`` from x; returns their sum.

        The steps are summed separately, because x rounds off short ones.
        """
        project = problem.project

        def step(way: PyTree, key: Key) -> PyTree:
            g_h, g_f = self.gradients(problem, client, key, project.common(tree.add(x, way)))
            way = tree.axpy(-steps.h, g_h, tree.axpy(-steps.f, g_f, way))
            return way if project.shared else tree.sub(project.own(tree.add(x, way), client), x)

        return loop(self.K, step, key, tree.zeros_like(x))

    def server_step(self, problem: Selection, x: PyTree, moved: PyTree, steps: StepSizes) -> PyTree:
        """``x + γ_g · moved``, then the proximal maps of the nonsmooth parts, and the set."""
        x, times = tree.axpy(self.gamma_g, moved, x), self.gamma_g * self.K
        if problem.h.regularizer is not None:
            x = problem.h.regularizer.prox(x, times * steps.h)
        if problem.f.regularizer is not None and self.mu is None:
            x = problem.f.regularizer.prox(x, times * steps.f)
        return problem.project.common(x)

    def scale(self, problem: Selection, fed: Fed, key: Key, x: PyTree) -> Scale:
        """Estimate the curvatures; the ledger counts this as the level ``"scaling"``."""
        dtype = jnp.result_type(*jax.tree.leaves(x))
        smooth = _is_smooth(problem.f)
        if self.L_h is not None or not (smooth or _is_smooth(problem.h)):
            given = jnp.asarray(1 if self.L_h is None else self.L_h, dtype)
            return Scale.unknown(x)._replace(L_h=given, L_max=given)
        key_power, key_own = jax.random.split(key)
        like = jax.tree.map(lambda leaf: jnp.zeros((4 if smooth else 2, *leaf.shape), leaf.dtype), x)

        def product(v: PyTree) -> PyTree:
            return fed.average(self.products, key_power, x, v)

        with fed.level("scaling"):
            sizes = power_iteration(product, fed.repeat, self.power_steps, key_power, like)
            flat = (sizes[:2].max() <= 0) & _is_smooth(problem.h)
            L_h = jnp.where(sizes[:2].max() > 0, sizes[:2].max(), 1)
            L_max = L_h
            if self.K > 1 and problem.h.loss is not None:
                unit = fed.clients * L_h
                mean = fed.average(self.own_curvature, key_own, x, unit, weights=jnp.ones(fed.clients))
                L_max = jnp.maximum(L_h, unit * (fed.clients * mean) ** (1 / POWER))
        L_f = sizes[2:].max() if smooth else jnp.zeros((), dtype)
        S_f = jnp.where((L_f > 0) & ~flat, L_f, 1)
        if problem.f.regularizer is not None and self.mu is not None:
            L_f = L_f + 1 / self.mu
        return Scale(L_h, L_f, jnp.where(flat, 0, L_max), S_f)

    def products(self, problem: Selection, client: Client, key: Key, x: PyTree, v: PyTree) -> PyTree:
        """The phase of power iteration: ``∇²h_i v`` at x and at the origin, and ``∇²f_i v`` likewise."""
        points = _points(x)
        parts = [(problem.h, client.train), (problem.f, client.valid)]
        products = []
        for j in range(jax.tree.leaves(v)[0].shape[0] // 2):
            level, samples = parts[j]
            mine = jax.tree.map(lambda leaf, j=j: leaf[2 * j : 2 * j + 2], v)
            products.append(
                counting.each(lambda x, v, l=level, s=samples: _product(l, s, x, v), points, mine)
            )
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *products)

    def own_curvature(self, problem: Selection, client: Client, key: Key, x: PyTree, unit: Real) -> jax.Array:
        """The phase for max L_i: (L_i/unit)^8, as the 8th root of a sum of these is near the maximum."""
        assert problem.h.loss is not None
        h = _full_mean(problem.h.loss, client.train)
        return (local_curvature(h, _points(x), self.power_steps, key) / unit) ** POWER

    def draws(self, fed: Fed) -> bool:
        """Whether clients or samples are drawn at random."""
        return self.batch_size is not None or fed.participants < fed.clients

    def step_sizes(self, gamma: Real, eta: Real, scale: Scale, safe: bool) -> StepSizes:
        """A client's step sizes from γ̃ = γ_g γ_ℓ K and η; if ``safe``, bounded by estimated curvatures."""
        safe, eta = safe and self.L_h is None, eta / scale.S_f
        if safe:
            gamma = jnp.minimum(gamma, 1 / (1 + eta * scale.L_f))
        local = gamma / (self.gamma_g * self.K)
        if safe:
            local = jnp.minimum(local, 1 / (scale.L_max / scale.L_h + eta * scale.L_f))
        return StepSizes(local / scale.L_h, local * eta)

    def flat(self, moment: Moment) -> list[str]:
        """A warning, after `start`, if the primary loss has no curvature to scale it by."""
        if moment.state is None or moment.ended or float(moment.state.scale.L_max) > 0:
            return []
        return [
            f"{type(self).__name__}: the primary loss has no curvature at x0 or at the origin (piecewise "
            "linear losses have none), so it cannot be scaled. L_h is taken as 1, and steps of constant "
            "size oscillate around its kinks. Use StRFedAvg(rule='weak_sharp', eta=…, returns='last'), or "
            "smooth the loss, for instance by squaring the part that exceeds a tolerance."
        ]


def _points(x: PyTree) -> PyTree:
    """The points at which curvature is measured: x and the origin, where a logistic loss has the most."""
    return jax.tree.map(lambda leaf: jnp.stack([leaf, jnp.zeros_like(leaf)]), x)


def _is_smooth(level: Objective) -> bool:
    return level.loss is not None or level.known is not None


def _full_mean(loss: Term, samples: Samples) -> Oracle:
    if loss.reads == "batch" and not isinstance(samples.size, int):
        raise ValueError(
            "The curvature estimate uses all samples, so a loss marked per_batch would see the padding of "
            "clients of unequal size. Give L_h, or clients of equal size."
        )
    return samples.full_mean(loss)


def _product(level: Objective, samples: Samples, x: PyTree, v: PyTree) -> PyTree:
    w = tree.zeros_like(x)
    if level.loss is not None:
        w = hessian_product(_full_mean(level.loss, samples), x, v)
    if level.known is not None:
        w = tree.add(w, jax.jvp(jax.grad(level.known), (x,), (v,))[1])
    return w
