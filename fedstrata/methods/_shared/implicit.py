"""The linear system of a hypergradient, ∇²_yy g · v = ∇_y f, solved with products from the clients.

    series    v = (1/ℓ) Σ_{n<N} (I − ∇²_yy g/ℓ)ⁿ ∇_y f                                   N − 1 exchanges
    neumann   v = (N/ℓ) (I − ∇²_yy g/ℓ)^{N'} ∇_y f, N' uniform in 0 … N − 1:             N' exchanges
              the same on average
    cg        N steps of conjugate gradients, from the last v: an inexact implicit step  N + 1 exchanges;
              fewer steps where a direction does not curve upwards, and a warning at the end
    none      v = 0: the hypergradient without its indirect part, ∇_x f                  no exchange

Every exchange sends one vector of y's size each way, booked as a lower-level one. With minibatches every
factor of a series has samples of its own, so that the mean of v is that of the full batch: E ∏(I − H_B/ℓ) =
(I − H/ℓ)ⁿ, where one batch B for all would give E[H_B⁻¹] b, too long. Conjugate gradients need one matrix in
all their steps, so they keep their samples, and that bias. Clients that sit out do so for all factors.

A series needs ℓ to be at least the lower level's largest curvature L: from L = 2ℓ on it diverges, and N
terms of it leave (1 − μ/ℓ)^N of the solution away. Without a given ℓ, power iterations before the first round
find L and μ at the start, ℓ = 1.25 L, and there is a warning where N terms are too few. Whether ℓ was large
enough shows in every round at no cost: where ‖(I − H/ℓ)u‖ > ‖u‖ and ⟨u, Hu⟩ > 0, some curvature is above 2ℓ.
There is a warning at the end where that was so in more than one round of ten, and where ℓ was found at the
start, N seemed enough, and the last of the N terms is still long beside the first: the curvature fell since.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core import tree
from fedstrata.core.client import Client
from fedstrata.core.fed import Fed
from fedstrata.core.method import Method, ProblemT, StateT
from fedstrata.core.problem import Problem
from fedstrata.core.term import Term
from fedstrata.core.types import Integer, Key, PyTree, Real
from fedstrata.estimators.curvature import norm
from fedstrata.estimators.gradients import gradients
from fedstrata.estimators.hypergradient import Products, mixed_product, product
from fedstrata.methods._shared.lower import estimate_constants, one_point
from fedstrata.methods._shared.sequences import needs_of, refused_sets
from fedstrata.problems.classes import Bilevel

Inverse = Literal["neumann", "series", "cg", "none"]

Summand = tuple[PyTree, jax.Array]  # of the series, and the most that one grew over that before it

ABOVE = 1.25  # ℓ over the largest curvature that was found: it changes along the way
LEFT = 0.1  # the part of the solution that a series may leave away without a word
GROWTH = 1.01  # of a term over the one before it: more than rounding
VANISHING = 2 / 3  # power of the rounding, in parts of the largest curvature: less is none
UNSOLVED = 1e-3  # of a linear system's right-hand side


class Curvature(NamedTuple):
    """The lower level's smallest and largest curvature, as found at the start."""

    mu: jax.Array
    L: jax.Array

    @property
    def ell(self) -> jax.Array:
        return ABOVE * self.L


class Growth(NamedTuple):
    """Whether the terms of the series grew, or conjugate gradients met a direction that does not curve up.

    Attributes:
        most: the most that a term was longer than the one before it.
        grown: the rounds with a term that was longer, or with such a direction.
        rounds: how many there were.
        left: the length of the last of the N terms beside the first, when there last were N; of conjugate
            gradients the part of the right-hand side that was left in the last round.
    """

    most: jax.Array
    grown: jax.Array
    rounds: jax.Array
    left: jax.Array

    def after(self, most: jax.Array, first: PyTree, last: PyTree, full: Any = True) -> Growth:
        """One round later; ``full`` says whether ``last`` is the last of N terms."""
        size = norm(first)
        left = jnp.where(size > 0, norm(last) / jnp.where(size > 0, size, 1), 0)
        return Growth(
            jnp.maximum(self.most, most).astype(self.most.dtype),
            self.grown + (most > GROWTH),
            self.rounds + 1,
            jnp.where(full, left, self.left).astype(self.left.dtype),
        )

    def stopped(self, left: jax.Array) -> Growth:
        """One round later, in which conjugate gradients ended with so much of the system left."""
        grown = self.grown + (left > UNSOLVED)
        return Growth(self.most, grown, self.rounds + 1, left.astype(self.left.dtype))


class Implicit(Method[ProblemT, StateT]):
    """Base of methods that solve the linear system with ``N`` products, ``inverse`` saying how.

    A method that uses it has the fields ``N``, ``ell``, ``inverse``, ``products`` and ``batch_size``.
    """

    N: int
    ell: Real | None
    inverse: Inverse
    products: Products
    batch_size: int | None

    server_steps = False

    @classmethod
    def needs_for(cls, problem: Problem) -> str:
        return needs_of(problem)

    @classmethod
    def refuses(cls, problem: Problem) -> str | None:
        return refused_sets(cls.__name__, problem, cls.server_steps)

    def watches(self, problem: Problem) -> bool:
        """Whether there is a linear system."""
        return self.inverse != "none" and isinstance(problem, Bilevel)

    def sums(self, problem: Problem) -> bool:
        """Whether there is a series."""
        return self.inverse in ("neumann", "series") and isinstance(problem, Bilevel)

    def estimates(self, problem: Problem) -> bool:
        """Whether it needs ℓ, and nobody gave it."""
        return self.ell is None and self.sums(problem)

    def no_growth(self, problem: Problem) -> Growth | None:
        """Of no round."""
        none = Growth(jnp.zeros(()), jnp.int32(0), jnp.int32(0), jnp.zeros(()))
        return none if self.watches(problem) else None

    def no_curvature(self, problem: Problem) -> Curvature | None:
        """What stands in the state before the estimate."""
        return Curvature(jnp.ones(()), jnp.ones(())) if self.estimates(problem) else None

    def start(self, problem: Any, fed: Fed, key: Key, state: Any) -> Any:
        """Estimate ℓ, where it is needed."""
        if not self.estimates(problem):
            return state

        def product(v: PyTree) -> PyTree:
            found = fed.average(self.curve, key, state.x, state.y, jax.tree.map(lambda leaf: leaf[0], v))
            return one_point(found)

        with fed.level("scaling"):
            mu, kappa = estimate_constants(product, fed.repeat, key, one_point(state.y))
        like = state.curvature.L.dtype
        return state._replace(curvature=Curvature(mu.astype(like), (mu * kappa / 2).astype(like)))

    def curve(self, problem: Bilevel, client: Client, key: Key, x: PyTree, y: PyTree, v: PyTree) -> PyTree:
        """A phase: ``∇²_yy g · v`` over all samples, where the loss takes them one by one."""
        whole_client = Term.of(problem.lower).reads == "sample"
        g = client.train.mean(problem.lower, key, None if whole_client else self.batch_size)
        return product(g, x, y, v, self.products)

    def remarks(self, state: Any) -> list[str]:
        """Where the terms of the series are too few for the curvature that was found."""
        if state.curvature is None:
            return []
        rate = 1 - float(state.curvature.mu / state.curvature.ell)
        if not rate**self.N > LEFT:
            return []
        enough = math.ceil(math.log(LEFT) / math.log(rate))
        return [
            f"{type(self).__name__}: {self.N} terms of the series for the inverse Hessian leave up to "
            f"{rate**self.N:.0%} of the indirect gradient away (the lower level's curvature is about "
            f"{float(state.curvature.mu):.2g} to {float(state.curvature.L):.2g} at the start), so that x "
            f"will be off. Give N={enough} or more, or inverse='cg'."
        ]

    def closing_remarks(self, state: Any) -> list[str]:
        """Where the terms of the series grew, in more than one round of ten, or became too few."""
        growth: Growth | None = state.growth
        if growth is None:
            return []
        if not 10 * growth.grown > growth.rounds:
            return self.too_few(state.curvature, growth) if not self.remarks(state) else []
        if self.inverse == "cg":
            return [
                f"{type(self).__name__}: in {int(growth.grown)} of {int(growth.rounds)} rounds conjugate "
                "gradients met a direction of y along which the lower level does not curve upwards, and "
                f"stopped there, at last with {float(growth.left):.2g} of the linear system unsolved: its "
                "Hessian is singular or indefinite, y(x) has no derivative, and x is not to be relied on. "
                "Add a λ/2‖y‖² to the lower level, or start y nearer to its minimiser."
            ]
        ell = float(np.asarray(state.curvature.ell if self.ell is None else self.at(0).ell))
        given = "which was found at the start, " if self.ell is None else ""
        return [
            f"{type(self).__name__}: in {int(growth.grown)} of {int(growth.rounds)} rounds the terms of the "
            f"series for the inverse Hessian grew, by up to {float(growth.most):.2g} a term: ell={ell:.3g}, "
            f"{given}is less than half the lower level's largest curvature, and x is wrong. Give an ell "
            f"above {ell * (1 + float(growth.most)):.2g}"
            f"{'' if self.ell is None else ' or none, which finds one,'} or inverse='cg'."
        ]

    def too_few(self, curvature: Curvature | None, growth: Growth) -> list[str]:
        """Where x went on to a lower level that curves less than where N seemed enough."""
        if curvature is None or not growth.left > LEFT:
            return []
        return [
            f"{type(self).__name__}: at the end the last of the N={self.N} terms of the series for the "
            f"inverse Hessian has {float(growth.left):.0%} of the length of the first: as much of the "
            "indirect gradient, or more, is left away, and x is off. The lower level curves less there than "
            f"at the start, where ell={float(curvature.ell):.3g} was found. Give more terms, an ell just "
            "above its largest curvature at the end, or inverse='cg'."
        ]

    def upper_gradients(self, problem: Bilevel, client: Client, key: Key, x: PyTree, y: PyTree) -> PyTree:
        """A phase: ``(∇_x f, ∇_y f)``."""
        return gradients(client.valid.mean(problem.upper, key, self.batch_size), x, y)

    def lower_product(
        self, problem: Bilevel, client: Client, key: Key, x: PyTree, y: PyTree, v: PyTree
    ) -> PyTree:
        """A phase: ``∇²_yy g · v``."""
        g = client.train.mean(problem.lower, key, self.batch_size)
        return product(g, x, y, v, self.products)

    def mixed_product(
        self, problem: Bilevel, client: Client, key: Key, x: PyTree, y: PyTree, v: PyTree
    ) -> PyTree:
        """A phase: ``∇²_xy g · v``."""
        g = client.train.mean(problem.lower, key, self.batch_size)
        return mixed_product(g, x, y, v, self.products)

    def inverse_product(
        self, fed: Fed, key: Key, x: PyTree, y: PyTree, b: PyTree, v: PyTree, state: Any
    ) -> tuple[PyTree, Growth | None]:
        """``v ≈ [∇²_yy g]⁻¹ b``, starting from ``v`` where that helps, and what is known of the series."""
        ell: Any = self.ell if state.curvature is None else state.curvature.ell
        key_products, key_length = jax.random.split(key)

        def times(u: PyTree, key: Key = key_products) -> PyTree:
            return fed.average(self.lower_product, key, x, y, u)

        def shrink(t: Integer, term: Summand) -> Summand:
            u, most = term
            along = times(u, jax.random.fold_in(key_products, t))
            new = tree.axpy(-1 / ell, along, u)
            size = norm(u)
            grew = jnp.where(
                (size > 0) & (tree.dot(u, along) > 0), norm(new) / jnp.where(size > 0, size, 1), 0
            )
            return new, jnp.maximum(most, grew.astype(most.dtype))

        if self.inverse == "none":
            return tree.zeros_like(v), state.growth
        with fed.level("lower"):
            if self.inverse == "cg":
                v, left = conjugate_gradients(fed, times, b, v, self.N)
                return v, state.growth.stopped(left)
            if self.inverse == "neumann":
                length = jax.random.randint(key_length, (), 0, self.N)
                first = tree.scale(self.N / ell, b)
                p, most = fed.repeat(length, shrink, (first, jnp.zeros(())))
                return p, state.growth.after(most, first, p, length == self.N - 1)

            def add(t: Integer, both: tuple[Summand, PyTree]) -> tuple[Summand, PyTree]:
                term = shrink(t, both[0])
                return term, tree.add(both[1], term[0])

            first = tree.scale(1 / ell, b)
            (last, most), total = fed.repeat(self.N - 1, add, ((first, jnp.zeros(())), first))
            return total, state.growth.after(most, first, last)


class Search(NamedTuple):
    """Conjugate gradients on their way."""

    v: PyTree
    residual: PyTree
    direction: PyTree
    best: tuple[PyTree, jax.Array]  # the v of the shortest residual, and how long that is
    steepest: jax.Array  # the largest curvature met
    up: jax.Array  # whether the last direction curves upwards


def conjugate_gradients(
    fed: Fed, product: Callable[[PyTree], PyTree], b: PyTree, v: PyTree, steps: int
) -> tuple[PyTree, jax.Array]:
    """``steps`` of conjugate gradients for ``A v = b``, where ``product(v) = A v`` is an exchange.

    A direction that curves downwards, or upwards by no more than a tiny part of the largest curvature met,
    ends the search at the shortest residual so far: a step along it would be of any length.

    Returns:
        v, and the part of b that is left where the search ended so; else 0.
    """
    along, dtype = product(v), jnp.result_type(*jax.tree.leaves(v))
    residual, tiny = tree.sub(b, along), jnp.finfo(dtype).tiny

    def step(t: Integer, at: Search) -> Search:
        along, square = product(at.direction), tree.dot(at.residual, at.residual)
        curve, size = tree.dot(at.direction, along), tree.dot(at.direction, at.direction)
        steepest = jnp.maximum(at.steepest, norm(along) / jnp.where(size > 0, jnp.sqrt(size), 1))
        up = curve > float(jnp.finfo(dtype).eps) ** VANISHING * steepest * size
        length = jnp.where(up, square / jnp.where(up, curve, 1), 0)
        v, residual = tree.axpy(length, at.direction, at.v), tree.axpy(-length, along, at.residual)
        now, best = (v, norm(residual)), at.best
        best = jax.tree.map(lambda new, old: jnp.where(now[1] < best[1], new, old), now, best)
        ratio = jnp.where(up, tree.dot(residual, residual) / jnp.where(square > 0, square, 1), 0)
        # stopped, the direction stays, and is met again
        further = jax.tree.map(lambda r, d: jnp.where(up, r + ratio * d, d), residual, at.direction)
        return Search(v, residual, further, best, steepest, up)

    steepest = (norm(along) / jnp.maximum(norm(v), tiny)).astype(dtype)  # of a v from the last round
    begin = Search(v, residual, residual, (v, norm(residual)), steepest, jnp.asarray(True))
    end = fed.repeat(steps, step, begin)
    best, left = end.best
    v = jax.tree.map(lambda last, best: jnp.where(end.up, last, best), end.v, best)
    return v, jnp.where(end.up, 0, left / jnp.maximum(norm(b), tiny))
