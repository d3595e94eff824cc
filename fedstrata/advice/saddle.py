"""How good a pair is for a game, min_x max_y f(x, y): by its own two gradients.

    r(x, y) = (x − P_X(x − ∇_x f),  y − P_Y(y + ∇_y f))

Where f is convex in x and concave in y it is zero at saddle points alone. It needs no y(x), so it also
judges games in which that is not unique. `fedstrata.AFL` plays such a game, f(x, λ) = Σ_i λ_i f_i(x) over the
simplex, where the problem by itself is the mean of the clients' losses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedstrata.advice.diagnostics import federated_mean
from fedstrata.core import tree
from fedstrata.core.types import PyTree, Weights
from fedstrata.data.storage import Placed
from fedstrata.problems.classes import Minimax, Minimization


class Saddle(NamedTuple):
    """What was found at x and y.

    Attributes:
        slope: ∇_x f.
        ascent: y − P_Y(y + ∇_y f).
        value: f(x, y); of `agnostic` losses the largest f_i(x).
    """

    slope: PyTree
    ascent: PyTree
    value: float


def game(problem: Minimax, weights: Weights, data: Placed, x: PyTree, y: PyTree) -> Saddle:
    """Of the payoff's mean."""

    def payoff(x: PyTree, y: PyTree) -> Any:
        return federated_mean(problem.payoff, data, weights=weights)(x, y)

    value, slope, ascent = _residual(payoff, lambda y: problem.project_y(y, x), x, y)
    return Saddle(slope, ascent, float(value))


def agnostic(problem: Minimization, data: Placed, x: PyTree, weights: PyTree) -> Saddle:
    """Of the clients' losses, weighed by the worst weights."""

    def losses(x: PyTree) -> Any:
        return data.each_client(lambda client: client.train.full_mean(problem.loss).silent(x))

    def payoff(x: PyTree, weights: PyTree) -> Any:
        return weights @ losses(x)

    _, slope, ascent = _residual(payoff, optax.projections.projection_simplex, x, weights)
    return Saddle(slope, ascent, float(jnp.max(jax.jit(losses)(x))))


def _residual(
    payoff: Callable[..., Any], onto: Callable[[PyTree], PyTree], x: PyTree, y: PyTree
) -> tuple[Any, PyTree, PyTree]:
    value, (slope, rise) = jax.jit(jax.value_and_grad(payoff, argnums=(0, 1)))(x, y)
    return value, slope, tree.sub(y, onto(tree.add(y, rise)))
