"""The linear system of a hypergradient, ∇²_yy g · v = ∇_y f, solved with products from the clients.

    series    v = (1/ℓ) Σ_{n<N} (I − ∇²_yy g/ℓ)ⁿ ∇_y f                                   N − 1 exchanges
    neumann   v = (N/ℓ) (I − ∇²_yy g/ℓ)^{N'} ∇_y f, N' uniform in 0 … N − 1:             N' exchanges
              the same on average
    cg        N steps of conjugate gradients, from the last v: an inexact implicit step  N + 1 exchanges
    none      v = 0: the hypergradient without its indirect part, ∇_x f                  no exchange

Every exchange sends one vector of y's size each way, booked as a lower-level one. With minibatches every
factor of a series has samples of its own, so that the mean of v is that of the full batch: E ∏(I − H_B/ℓ) =
(I − H/ℓ)ⁿ, where one batch B for all would give E[H_B⁻¹] b, too long. Conjugate gradients need one matrix in
all their steps, so they keep their samples, and that bias. Clients that sit out do so for all factors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from fedstrata.core import tree
from fedstrata.core.client import Client
from fedstrata.core.fed import Fed
from fedstrata.core.method import Method, ProblemT, StateT
from fedstrata.core.problem import Problem
from fedstrata.core.types import Integer, Key, PyTree, Real
from fedstrata.estimators.gradients import gradients
from fedstrata.estimators.hypergradient import Products, mixed_product, product
from fedstrata.methods._shared.sequences import needs_of, refused_sets
from fedstrata.problems.classes import Bilevel

Inverse = Literal["neumann", "series", "cg", "none"]


class Implicit(Method[ProblemT, StateT]):
    """Base of methods that solve the linear system with ``N`` products, ``inverse`` saying how.

    A method that uses it has the fields ``N``, ``ell``, ``inverse``, ``products`` and ``batch_size``.
    """

    N: int
    ell: Real
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

    def inverse_product(self, fed: Fed, key: Key, x: PyTree, y: PyTree, b: PyTree, v: PyTree) -> PyTree:
        """``v ≈ [∇²_yy g]⁻¹ b``, starting from ``v`` where that helps."""
        key_products, key_length = jax.random.split(key)

        def times(u: PyTree, key: Key = key_products) -> PyTree:
            return fed.average(self.lower_product, key, x, y, u)

        def shrink(t: Integer, u: PyTree) -> PyTree:
            return tree.axpy(-1 / self.ell, times(u, jax.random.fold_in(key_products, t)), u)

        if self.inverse == "none":
            return tree.zeros_like(v)
        with fed.level("lower"):
            if self.inverse == "cg":
                return conjugate_gradients(fed, times, b, v, self.N)
            if self.inverse == "neumann":
                length = jax.random.randint(key_length, (), 0, self.N)
                return fed.repeat(length, shrink, tree.scale(self.N / self.ell, b))

            def add(t: Integer, both: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
                term = shrink(t, both[0])
                return term, tree.add(both[1], term)

            first = tree.scale(1 / self.ell, b)
            return fed.repeat(self.N - 1, add, (first, first))[1]


def conjugate_gradients(
    fed: Fed, product: Callable[[PyTree], PyTree], b: PyTree, v: PyTree, steps: int
) -> PyTree:
    """``steps`` of conjugate gradients for ``A v = b``, where ``product(v) = A v`` is an exchange."""
    residual = tree.sub(b, product(v))

    def step(t: Integer, carry: tuple[PyTree, PyTree, PyTree]) -> tuple[PyTree, PyTree, PyTree]:
        v, residual, direction = carry
        along = product(direction)
        square, curve = tree.dot(residual, residual), tree.dot(direction, along)
        # a residual of zero, or negative curvature, ends the search where it is
        length = jnp.where(curve > 0, square / jnp.where(curve > 0, curve, 1), 0)
        v, residual = tree.axpy(length, direction, v), tree.axpy(-length, along, residual)
        ratio = jnp.where(square > 0, tree.dot(residual, residual) / jnp.where(square > 0, square, 1), 0)
        return v, residual, tree.axpy(ratio, direction, residual)

    return fed.repeat(steps, step, (v, residual, residual))[0]
