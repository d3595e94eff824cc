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

from fedstrata.core import tree
from fedstrata.core.client import Client
from fedstrata.core.fed import Fed
from fedstrata.core.method import (
    Method,
    Moment,
    ProblemT,
    StateT,
)
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

ABOVE = 1.25  # ℓ over the largest curvature that was found: it changes along the way
LEFT = 0.1  # the part of the solution that a series may leave away without a word
VANISHING = 2 / 3  # power of the rounding, in parts of the largest curvature: less is none


class Curvature(NamedTuple):
    """The lower level's smallest and largest curvature, as found at the start."""

    mu: jax.Array
    L: jax.Array

    @property
    def ell(self) -> jax.Array:
        return ABOVE * self.L


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

    def sums(self, problem: Problem) -> bool:
        """Whether there is a series."""
        return self.inverse in ("neumann", "series") and isinstance(problem, Bilevel)

    def estimates(self, problem: Problem) -> bool:
        """Whether it needs ℓ, and nobody gave it."""
        return self.ell is None and self.sums(problem)

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

    def cautions(self, moment: Moment) -> list[str]:
        """Where the terms of the series are too few for the curvature that was found."""
        state = moment.state
        if state is None or moment.ended or state.curvature is None:
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
    ) -> PyTree:
        """``v ≈ [∇²_yy g]⁻¹ b``, starting from ``v`` where that helps."""
        ell: Any = self.ell if state.curvature is None else state.curvature.ell
        key_products, key_length = jax.random.split(key)

        def times(u: PyTree, key: Key = key_products) -> PyTree:
            return fed.average(self.lower_product, key, x, y, u)

        def shrink(t: Integer, u: PyTree) -> PyTree:
            return tree.axpy(-1 / ell, times(u, jax.random.fold_in(key_products, t)), u)

        def add(t: Integer, both: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
            term = shrink(t, both[0])
            return term, tree.add(both[1], term)

        if self.inverse == "none":
            return tree.zeros_like(v)
        with fed.level("lower"):
            if self.inverse == "cg":
                return conjugate_gradients(fed, times, b, v, self.N)
            if self.inverse == "neumann":
                length = jax.random.randint(key_length, (), 0, self.N)
                return fed.repeat(length, shrink, tree.scale(self.N / ell, b))
            first = tree.scale(1 / ell, b)
            return fed.repeat(self.N - 1, add, (first, first))[1]


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
) -> PyTree:
    """``steps`` of conjugate gradients for ``A v = b``, where ``product(v) = A v`` is an exchange.

    A direction that curves downwards, or upwards by no more than a tiny part of the largest curvature met,
    ends the search at the shortest residual so far: a step along it would be of any length.
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
    return jax.tree.map(lambda last, best: jnp.where(end.up, last, best), end.v, end.best[0])
