"""Directions of compositions ``h(x) + f(g^N(… g¹(x)))``: values on a client's samples, and the chain rule.

A `Chain` is a composition in the form that methods use: the federated levels g¹ … g^N, whose values are
tracked, then f, which is a function without data or a mean over clients. Functions without data in between
are merged into the level above.

    zⁿ = gⁿ(z^{n−1}),  z⁰ = x                      `value`
    v^N = ∇f(z^N),  v^{n−1} = ∇gⁿ(z^{n−1})ᵀ vⁿ     `pull`, one exchange each if the clients' mean is needed
    ∇Φ = ∇h(x) + ∇g¹(x)ᵀ v¹                        `direction`

With N = 1 and an f without data, v¹ = ∇f(z¹) needs no exchange, and only z¹ travels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
from jax.flatten_util import ravel_pytree

from fedstrata.core import tree
from fedstrata.core.client import Client, Oracle
from fedstrata.core.term import Term
from fedstrata.core.types import Function, Key, PyTree, Real
from fedstrata.estimators.gradients import gradient
from fedstrata.problems.classes import Composition
from fedstrata.problems.levels import tracker_of
from fedstrata.problems.terms import calling, known

Values = tuple[PyTree, ...]


class Chain(NamedTuple):
    """A composition as methods see it.

    Attributes:
        inner: the levels g¹ … g^N, means over clients, whose values are tracked.
        outer: the function f.
        federated: whether f is a mean over clients, ``f(z, sample)``, or a function without data, ``f(z)``.
        plain: the loss h, or None.
        positions: the indices of the inner levels among the problem's levels.
    """

    inner: tuple[Term, ...]
    outer: Function
    federated: bool
    plain: Function | None
    positions: tuple[int, ...]

    @property
    def pulls(self) -> int:
        """The number of cotangents that need the clients' mean."""
        return max(len(self.inner) - 1, 0) + (self.federated and len(self.inner) > 0)

    def drawn(self, client: Client, key: Key, batch_size: int | None) -> Drawn:
        """The chain on a minibatch of a client; a batch size of None uses all samples."""
        return Drawn(self, client, key, batch_size)


def chain_of(problem: Composition) -> Chain:
    """The chain of a composition."""
    inner: list[Term] = []
    positions: list[int] = []
    waiting: Term | None = None
    for n, level in enumerate(map(Term.of, problem.levels)):
        if known(level):
            waiting = level if waiting is None else waiting.then(level)
        else:
            inner.append(level if waiting is None else _after(waiting, level))
            positions.append(n)
            waiting = None
    if waiting is not None:
        return Chain(tuple(inner), waiting, False, problem.plain, tuple(positions))
    return Chain(tuple(inner[:-1]), inner[-1], True, problem.plain, tuple(positions[:-1]))


def _after(first: Term, level: Term) -> Term:
    """A level after a function without data."""
    return replace(level, function=calling(lambda z, sample: level(first(z), sample), level).function)


def followed(problem: Composition, y: Values) -> Values:
    """The tracked values among the inner values of all levels."""
    return tuple(y[n] for n in chain_of(problem).positions)


def cotangent(chain: Chain, values: Values, pulled: Values) -> PyTree:
    """The last cotangent: the last one pulled, or ∇f(z^N) if f is a function without data."""
    return pulled[-1] if pulled else jax.grad(chain.outer)(values[-1])


class Drawn(NamedTuple):
    """A chain on a client's samples, the same in all evaluations; see `Chain.drawn`."""

    chain: Chain
    client: Client
    key: Key
    batch_size: int | None

    def mean(self, function: Function) -> Oracle:
        """A function's mean over the samples."""
        return self.client.train.mean(function, self.key, self.batch_size)

    def value(self, n: int, z: PyTree) -> PyTree:
        """gⁿ⁺¹(z)."""
        return self.mean(self.chain.inner[n])(z)

    def change(self, n: int, beta: Real, before: PyTree, now: PyTree) -> PyTree:
        """The upload to a tracker of gⁿ⁺¹, from its values at two points."""
        g, tracker = self.mean(self.chain.inner[n]), tracker_of(self.chain.inner[n])
        g.book("values", 2)
        return g.apply(lambda mean: tracker.change(beta, mean(before), mean(now)), "values")

    def pull(self, values: Values, pulled: Values) -> PyTree:
        """The next cotangent after those in ``pulled``."""
        chain = self.chain
        if chain.federated and not pulled:
            return gradient(self.mean(chain.outer), values[-1])
        n = len(chain.inner) - 1 - (len(pulled) - chain.federated)
        return self._vjp(n, values[n - 1], values[n], cotangent(chain, values, pulled))

    def pull_locally(self, values: Values) -> Values:
        """All cotangents of this client's own functions."""
        pulled: Values = ()
        for _ in range(self.chain.pulls):
            pulled = (*pulled, self.pull(values, pulled))
        return pulled

    def direction(self, x: PyTree, values: Values, pulled: Values) -> PyTree:
        """``∇h(x) + ∇g¹(x)ᵀ v¹``."""
        chain = self.chain
        if chain.inner:
            total = self._vjp(0, x, values[0], cotangent(chain, values, pulled))
        elif chain.federated:
            total = gradient(self.mean(chain.outer), x)
        else:
            total = jax.grad(chain.outer)(x)
        return total if chain.plain is None else tree.add(total, gradient(self.mean(chain.plain), x))

    def _vjp(self, n: int, z: PyTree, followed: PyTree, v: PyTree) -> PyTree:
        """``∇gⁿ⁺¹(z)ᵀ v`` in units of the tracked value; counted as a gradient."""
        level = self.chain.inner[n]
        tracker = tracker_of(level)

        def scalar(z: PyTree, sample: PyTree) -> jax.Array:
            return tree.dot(v, tracker.gap(level(z, sample), followed))

        return gradient(self.mean(calling(scalar, level)), z)

    def jacobian(self, n: int, z: PyTree, followed: PyTree) -> jax.Array:
        """``∇gⁿ⁺¹(z)`` as a matrix of the flattened value and argument, in units of the tracked value."""
        level = self.chain.inner[n]
        tracker = tracker_of(level)
        flat, unravel = ravel_pytree(z)

        def gap(flat: jax.Array, sample: PyTree) -> jax.Array:
            return ravel_pytree(tracker.gap(level(unravel(flat), sample), followed))[0]

        mean = self.mean(calling(gap, level))
        mean.book("gradients", tree.dimension(followed))
        return jax.jacrev(mean.silent)(flat)
