"""The maps P and Sⁿ of coupled sequences, on a client's samples.

    find x, z¹ … z^N with  Σ P(x, Z) = 0  and  Σ Sⁿ(z^{n−1}, zⁿ) = 0

| problem | sequences | S | P |
|---|---|---|---|
| Bilevel | z = (w, v) | ∇_w g,  ∇²_ww g·v − ∇_w f | ∇_x f − ∇²_xw g·v |
| Minimax | z = y | −∇_y f | ∇_x f |
| Composition, the paper's form | zⁿ | zⁿ − gⁿ(z^{n−1}) | ∇h + ∇g¹(x) ∇g²(z¹) … ∇g^N(z^{N−1}) ∇f(z^N) |
| Composition, adjoint form | zⁿ, aⁿ | … and aⁿ − ∇g^{n+1}(zⁿ) a^{n+1}, a^N − ∇f(z^N) | ∇h + ∇g¹(x) a¹ |
| MultiSequence | the user's | the user's | the user's |

A composition is ``h(x) + f(g^N(… g¹(x)))`` as in `fedstrata.estimators.compositional`; if f is a function
without data, a^N = ∇f(z^N) is known and not a sequence. When clients differ, the mean of products of their
Jacobians is not the product of the means, so the paper's P is biased for N ≥ 2. In the adjoint form every
factor is averaged before it is multiplied.

Z is a tuple with one entry per sequence. `draw` draws samples and returns the maps as a function of the
point; calling it at two points uses the same samples.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatch
from typing import Any, NamedTuple

import jax

from fedstrata.core import tree
from fedstrata.core.client import Client, Oracle
from fedstrata.core.problem import Problem
from fedstrata.core.term import Term
from fedstrata.core.types import Function, PyTree
from fedstrata.estimators.compositional import chain_of, followed
from fedstrata.estimators.gradients import gradient, gradients
from fedstrata.estimators.hypergradient import Coupled, Products, bilevel_maps
from fedstrata.problems.classes import Bilevel, Composition, Minimax, MultiSequence
from fedstrata.problems.levels import tracker_of
from fedstrata.problems.terms import calling

Maps = Callable[[PyTree, tuple[PyTree, ...]], tuple[PyTree, tuple[PyTree, ...]]]

SOLVES = (MultiSequence, Bilevel, Minimax, Composition)


class Follower(NamedTuple):
    """The sequence of a minimax problem."""

    y: PyTree


class Tracked(NamedTuple):
    """A composition's inner value and its adjoint, the derivative of the objective by that value."""

    z: PyTree
    adjoint: PyTree  # () if it is known


@singledispatch
def number(problem: Problem) -> int:
    """N, the number of sequences."""
    return 1


@number.register
def _(problem: MultiSequence) -> int:
    return len(problem.S)


@number.register
def _(problem: Composition) -> int:
    return len(chain_of(problem).inner)


@singledispatch
def start(problem: Problem, x: PyTree, y: PyTree, adjoint: bool = True) -> tuple[PyTree, ...]:
    """Z before the first round: v = 0 in a bilevel problem; a composition's values are computed later."""
    return tuple(y)


@start.register
def _(problem: Bilevel, x: PyTree, y: PyTree, adjoint: bool = True) -> tuple[PyTree, ...]:
    return (Coupled(y, tree.zeros_like(y)),)


@start.register
def _(problem: Minimax, x: PyTree, y: PyTree, adjoint: bool = True) -> tuple[PyTree, ...]:
    return (Follower(y),)


@start.register
def _(problem: Composition, x: PyTree, y: PyTree, adjoint: bool = True) -> tuple[PyTree, ...]:
    return compose(problem, followed(problem, y), None) if adjoint else followed(problem, y)


def compose(problem: Composition, values: tuple[PyTree, ...], pulled: tuple[PyTree, ...] | None) -> Any:
    """Z of the adjoint form, from the values z¹, … and the adjoints, outermost first (None: zeros)."""
    count = chain_of(problem).pulls
    if pulled is None:
        pulled = tree.zeros_like(values[:count][::-1])
    adjoints = (*pulled[::-1], *[()] * (len(values) - count))
    return tuple(Tracked(z, a) for z, a in zip(values, adjoints, strict=True))


def second(Z: tuple[PyTree, ...]) -> PyTree:
    """The problem's second variable: w, y, or the values of all sequences."""
    match Z:
        case (Coupled(w=y),) | (Follower(y=y),):
            return y
        case (Tracked(), *_):
            return tuple(z.z for z in Z)
    return Z


@singledispatch
def draw(
    problem: Problem, client: Client, key: jax.Array, batch_size: int | None, products: Products = "exact"
) -> Maps:
    """The maps ``(x, Z) ↦ (P, (S¹, …, S^N))`` on a new minibatch.

    Args:
        problem: one of `SOLVES`.
        client: the client; a bilevel problem's upper level draws from its validation samples.
        key: the random key of the draw.
        batch_size: the minibatch size; None uses all samples.
        products: the kind of second derivatives; see `fedstrata.estimators.hypergradient.curvature`.
    """
    raise TypeError(f"{type(problem).__name__} does not define maps P and S.")


@draw.register
def _(
    problem: Bilevel, client: Client, key: jax.Array, batch_size: int | None, products: Products = "exact"
) -> Maps:
    key_f, key_g = jax.random.split(key)
    f = client.valid.mean(problem.upper, key_f, batch_size)
    g = client.train.mean(problem.lower, key_g, batch_size)

    def maps(x: PyTree, Z: tuple[PyTree, ...]) -> tuple[PyTree, tuple[PyTree, ...]]:
        P, S = bilevel_maps(f, g, x, Z[0], products)
        return P, (S,)

    return maps


@draw.register
def _(
    problem: Minimax, client: Client, key: jax.Array, batch_size: int | None, products: Products = "exact"
) -> Maps:
    payoff = client.train.mean(problem.payoff, key, batch_size)

    def maps(x: PyTree, Z: tuple[PyTree, ...]) -> tuple[PyTree, tuple[PyTree, ...]]:
        by_x, by_y = gradients(payoff, x, Z[0].y)
        return by_x, (Follower(tree.scale(-1, by_y)),)

    return maps


@draw.register
def _(
    problem: MultiSequence,
    client: Client,
    key: jax.Array,
    batch_size: int | None,
    products: Products = "exact",
) -> Maps:
    key_P, *keys = jax.random.split(key, 1 + len(problem.S))
    P = client.train.mean(problem.P, key_P, batch_size)
    S = [client.train.mean(s, k, batch_size) for s, k in zip(problem.S, keys, strict=True)]

    def maps(x: PyTree, Z: tuple[PyTree, ...]) -> tuple[PyTree, tuple[PyTree, ...]]:
        return P(x, Z), tuple(s(*pair) for s, *pair in zip(S, (x, *Z[:-1]), Z, strict=True))

    return maps


def gap(level: Term, client: Client, key: jax.Array, batch_size: int | None) -> Oracle:
    """A composition's level as ``(z, u) ↦ E[g(z, ξ)] − u``, or its tracker's residual, zero at the value."""
    tracker = tracker_of(level)

    def residual(z: PyTree, u: PyTree, sample: PyTree) -> PyTree:
        return tracker.gap(level(z, sample), u)

    return client.train.mean(calling(residual, level), key, batch_size)


def linearised(g: Oracle, z: PyTree, u: PyTree) -> tuple[PyTree, Function]:
    """The gap of a level at (z, u) and ``a ↦ ∇g(z) a``, in one pass; counted as one gradient per sample."""
    g.book("gradients")
    value, pull = jax.vjp(lambda z: g.silent(z, u), z)
    return value, lambda a: pull(a)[0]


@draw.register
def _(
    problem: Composition, client: Client, key: jax.Array, batch_size: int | None, products: Products = "exact"
) -> Maps:
    chain = chain_of(problem)
    key_plain, key_outer, *keys = jax.random.split(key, 2 + len(chain.inner))
    gaps = [gap(level, client, k, batch_size) for level, k in zip(chain.inner, keys, strict=True)]
    plain = None if chain.plain is None else client.train.mean(chain.plain, key_plain, batch_size)
    outer = client.train.mean(chain.outer, key_outer, batch_size) if chain.federated else None

    def maps(x: PyTree, Z: tuple[PyTree, ...]) -> tuple[PyTree, tuple[PyTree, ...]]:
        z, adjoint = [x, *second(Z)], bool(Z) and isinstance(Z[0], Tracked)
        pairs = [linearised(g, *at) for g, *at in zip(gaps, z[:-1], z[1:], strict=True)]
        S = [tree.scale(-1, value) for value, _ in pairs]
        a = jax.grad(chain.outer)(z[-1]) if outer is None else gradient(outer, z[-1])
        for n in reversed(range(len(Z))):
            if adjoint:
                kept = Z[n].adjoint if n < chain.pulls else None
                S[n] = Tracked(S[n], () if kept is None else tree.sub(kept, a))
                a = a if kept is None else kept
            a = pairs[n][1](a)
        return a if plain is None else tree.add(a, gradient(plain, x)), tuple(S)

    return maps
