"""A client's own composition f_i(g_i(x)) on samples drawn now: its inner values and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from fedstrata.core import tree
from fedstrata.core.client import Client
from fedstrata.core.method import Method, StateT
from fedstrata.core.types import Key, PyTree
from fedstrata.estimators.gradients import gradient
from fedstrata.problems.classes import Composition
from fedstrata.problems.terms import known

Tracked = tuple[PyTree, ...]  # the inner values u¹, u², …


class LocalCompositions(Method[Composition, StateT]):
    """Base of the methods for local compositions."""

    solves = (Composition,)
    local = True

    @classmethod
    def refuses(cls, problem: Composition) -> str | None:
        if not problem.local:
            return f"{cls.__name__} needs each client's own inner values: use fs.Composition(…, local=True)."
        if any(level.mean is not None for level in problem.levels):
            return f"{cls.__name__} takes arithmetic means, but a level has another kind of mean."
        return None


def _drawn(n: int, u: PyTree) -> PyTree:
    return u


def draw(
    problem: Composition, client: Client, key: Key, batch_size: int | None, inner_batch_size: int | None
) -> Callable[..., tuple[Tracked, PyTree]]:
    """The map from x and a rule for the inner values to these values and the gradient.

    Args:
        problem: the problem; its outermost level and ``plain`` draw ``batch_size`` samples.
        client: the client.
        key: the random key of the samples, which are the same for every point.
        batch_size: samples of the outermost level; None is all.
        inner_batch_size: samples of each other level.
    """
    *inner, outer = problem.levels
    keys = jax.random.split(key, len(inner) + 2)
    means = [
        level if known(level) else client.train.mean(level, k, inner_batch_size)
        for level, k in zip(inner, keys[2:], strict=True)
    ]
    top = outer if known(outer) else client.train.mean(outer, keys[0], batch_size)
    plain = None if problem.plain is None else client.train.mean(problem.plain, keys[1], batch_size)

    def at(x: PyTree, values: Callable[[int, PyTree], PyTree] = _drawn) -> tuple[Tracked, PyTree]:
        u, tracked, pulls = x, [], []
        for n, (level, mean) in enumerate(zip(inner, means, strict=True)):
            drawn, pull = _linearised(mean, known(level), u)
            u = values(n, drawn)
            tracked.append(u)
            pulls.append(pull)
        a = jax.grad(top)(u) if known(outer) else gradient(top, u)
        for pull in reversed(pulls):
            (a,) = pull(a)
        return tuple(tracked), a if plain is None else tree.add(a, gradient(plain, x))

    return at


def _linearised(mean: Any, is_known: bool, u: PyTree) -> tuple[PyTree, Callable[[PyTree], Any]]:
    if is_known:
        value, pull = jax.vjp(mean, u)
        return value, pull
    mean.book("gradients")
    value, pull = jax.vjp(mean.silent, u)
    return value, pull
