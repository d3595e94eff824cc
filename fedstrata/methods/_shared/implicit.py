"""The linear system of a hypergradient, ∇²_yy g · v = ∇_y f, solved with products from the clients.

    series    v = (1/ℓ) Σ_{n<N} (I − ∇²_yy g/ℓ)ⁿ ∇_y f                                   N − 1 exchanges
    neumann   v = (N/ℓ) (I − ∇²_yy g/ℓ)^{N'} ∇_y f, N' uniform in 0 … N − 1;             N' exchanges
              has the same mean
    cg        N steps of conjugate gradients, starting from the last v;                  N + 1 exchanges
              stops at a direction of non-positive curvature
    none      v = 0: the hypergradient without its indirect part, ∇_x f                  no exchange

Every exchange sends one vector of y's size each way and is counted as lower-level. With minibatches every
factor of a series draws its own samples, so that v has the mean of the full batch: E ∏(I − H_B/ℓ) =
(I − H/ℓ)ⁿ, whereas one batch B for all factors would give E[H_B⁻¹] b, which is too long. Conjugate gradients
need the same matrix in all steps, so they keep one batch and that bias. A client that does not take part is
left out of all factors.

A series needs an ℓ of at least the lower level's largest curvature L: it diverges if L > 2ℓ, and N terms miss
the part (1 − μ/ℓ)^N of the solution. If ℓ is not given, power iterations before the first round estimate L
and μ at the start, ℓ = 1.25 L, and a warning is given if N terms are too few.
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
from fedstrata.core.method import Method, Moment, ProblemT, StateT
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

ABOVE = 1.25  # ℓ relative to the largest curvature at the start, because it changes as x moves
LEFT = 0.1  # the part of the solution that a series may miss without a warning
VANISHING = 2 / 3  # curvature below this power of eps, relative to the largest, counts as zero


class Curvature(NamedTuple):
    """The lower level's smallest and largest curvature at the start."""

    mu: jax.Array
    L: jax.Array

    @property
    def ell(self) -> jax.Array:
        return ABOVE * self.L


class Implicit(Method[ProblemT, StateT]):
    """Base of the methods that solve the linear system with ``N`` products, by ``inverse``.

    A subclass has the fields ``N``, ``ell``, ``inverse``, ``products`` and ``batch_size``.
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
        """Whether the system is solved by a series."""
        return self.inverse in ("neumann", "series") and isinstance(problem, Bilevel)

    def estimates(self, problem: Problem) -> bool:
        """Whether ℓ must be estimated."""
        return self.ell is None and self.sums(problem)

    def no_curvature(self, problem: Problem) -> Curvature | None:
        """The state's curvature before the estimate."""
        return Curvature(jnp.ones(()), jnp.ones(())) if self.estimates(problem) else None

    def start(self, problem: Any, fed: Fed, key: Key, state: Any) -> Any:
        """Estimate ℓ if needed."""
        if not self.estimates(problem):
            return state

        def product(v: PyTree) -> PyTree:
            curved = fed.average(self.curve, key, state.x, state.y, jax.tree.map(lambda leaf: leaf[0], v))
            return one_point(curved)

        with fed.level("scaling"):
            mu, kappa = estimate_constants(product, fed.repeat, key, one_point(state.y))
        like = state.curvature.L.dtype
        return state._replace(curvature=Curvature(mu.astype(like), (mu * kappa / 2).astype(like)))

    def curve(self, problem: Bilevel, client: Client, key: Key, x: PyTree, y: PyTree, v: PyTree) -> PyTree:
        """A phase: ``∇²_yy g · v``, over all samples if the loss takes one sample at a time."""
        whole_client = Term.of(problem.lower).reads == "sample"
        g = client.train.mean(problem.lower, key, None if whole_client else self.batch_size)
        return product(g, x, y, v, self.products)

    def cautions(self, moment: Moment) -> list[str]:
        """A warning if the series has too few terms for the estimated curvature."""
        state = moment.state
        if state is None or moment.ended or state.curvature is None:
            return []
        rate = 1 - float(state.curvature.mu / state.curvature.ell)
        if not rate**self.N > LEFT:
            return []
        enough = math.ceil(math.log(LEFT) / math.log(rate))
        return [
            f"{type(self).__name__}: {self.N} terms of the series for the inverse Hessian miss up to "
            f"{rate**self.N:.0%} of the indirect gradient (the lower level's curvature is about "
            f"{float(state.curvature.mu):.2g} to {float(state.curvature.L):.2g} at the start), so x will "
            f"be biased. Give N={enough} or more, or inverse='cg'."
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
        """``v ≈ [∇²_yy g]⁻¹ b``; conjugate gradients start from ``v``."""
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
        with fed.level("lower", self.N - 1 if self.inverse == "neumann" else None):
            if self.inverse == "cg":
                return conjugate_gradients(fed, times, b, v, self.N)
            if self.inverse == "neumann":
                length = jax.random.randint(key_length, (), 0, self.N)
                return fed.repeat(length, shrink, tree.scale(self.N / ell, b))
            first = tree.scale(1 / ell, b)
            return fed.repeat(self.N - 1, add, (first, first))[1]


class Search(NamedTuple):
    """The state of conjugate gradients."""

    v: PyTree
    residual: PyTree
    direction: PyTree
    best: tuple[PyTree, jax.Array]  # the v with the smallest residual, and its norm
    steepest: jax.Array  # the largest curvature so far
    up: jax.Array  # whether the last direction has positive curvature


def conjugate_gradients(
    fed: Fed, product: Callable[[PyTree], PyTree], b: PyTree, v: PyTree, steps: int
) -> PyTree:
    """``steps`` of conjugate gradients for ``A v = b``, where ``product(v) = A v`` is an exchange.

    A direction of negative curvature, or of a tiny fraction of the largest curvature so far, ends the search
    at the smallest residual so far: a step along it could have any length.
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
        best = tree.where(now[1] < best[1], now, best)
        ratio = jnp.where(up, tree.dot(residual, residual) / jnp.where(square > 0, square, 1), 0)
        # after the stop the direction stays the same, and so the test fails again
        further = jax.tree.map(lambda r, d: jnp.where(up, r + ratio * d, d), residual, at.direction)
        return Search(v, residual, further, best, steepest, up)

    steepest = (norm(along) / jnp.maximum(norm(v), tiny)).astype(dtype)  # of a v from the last round
    begin = Search(v, residual, residual, (v, norm(residual)), steepest, jnp.asarray(True))
    end = fed.repeat(steps, step, begin)
    return jax.tree.map(lambda last, best: jnp.where(end.up, last, best), end.v, end.best[0])
