"""Shared by the methods of descent in x and ascent in y: the pair, its sets, the operator, local steps.

As in FedAvg the server projects onto sets that all clients share, and clients evaluate gradients at
projections. If each client has its own set X_i, clients project after every step in x instead.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from fedstrata.core import tree
from fedstrata.core.client import Client
from fedstrata.core.counting import loop
from fedstrata.core.fed import Fed
from fedstrata.core.method import Method, StateT
from fedstrata.core.types import Array, Integer, Key, PyTree, Real
from fedstrata.estimators.gradients import gradient, gradients
from fedstrata.methods._shared.rules import two_levels
from fedstrata.methods._shared.sequences import moving_set
from fedstrata.problems.classes import Minimax, Minimization
from fedstrata.problems.measured import Conditions, Practical


class Pair(NamedTuple):
    """A point (x, y)."""

    x: PyTree
    y: PyTree


def refused_variates(name: str, problem: Minimization | Minimax) -> str | None:
    """The reason why control variates do not apply: on a set they do not sum to zero at the solution."""
    match problem:
        case Minimax() if words := moving_set(name, problem):
            return words
    if all(project.trivial for project in problem.sets.values()):
        return None
    free = "LocalSGDA or FedMSA" if problem.has_y else "FedAvg or FedRZO"
    return f"{name}'s control variates assume that the variables have no set; with a set, use {free}."


def operator_of(
    problem: Minimization | Minimax, client: Client, key: Key, batch_size: int | None, at: Pair
) -> Pair:
    """A client's operator (∇_x f_i, −∇_y f_i) on a new minibatch; for a `Minimization`, (∇f_i, None)."""
    match problem:
        case Minimax():
            by_x, by_y = gradients(client.mean(problem.payoff, key, batch_size), at.x, at.y)
            return Pair(by_x, tree.scale(-1, by_y))
    return Pair(gradient(client.mean(problem.loss, key, batch_size), at.x), None)


class DescentAscent(Method[Minimax, StateT]):
    """Base of the methods whose clients take `local_steps` in x and y together."""

    solves = (Minimax,)

    @classmethod
    def refuses(cls, problem: Minimax) -> str | None:
        return moving_set(cls.__name__, problem)

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """The steps of x and y by `two_levels`, for a payoff that is strongly concave in y.

        One local step has no drift, and such a payoff needs neither FESSGDA's term nor FedSGDA+'s snapshot.
        """
        pair = two_levels(at)
        return pair.of(cls(pair.alpha, pair.beta))


def inside(problem: Minimax, at: Pair) -> Pair:
    """The projection onto X and Y, if all clients share them."""
    x = problem.project_x.common(at.x)
    return Pair(x, problem.project_y(at.y, x))


def mean_steps(K: Any, fed: Fed, at_work: Array | None) -> Real:
    """K, or its mean over the clients that take part, with the weights of those at work."""
    if isinstance(K, int):
        return K
    own = jnp.broadcast_to(jnp.asarray(K), (fed.clients,))[fed.cohort]
    return fed.weights_of(fed.cohort, at_work) @ own.astype(float)


def local_steps(
    problem: Minimax,
    client: Client,
    key: Key,
    start: Pair,
    steps: Integer,
    eta_x: Real,
    eta_y: Real,
    batch_size: int | None,
    snapshot: PyTree = None,
) -> Pair:
    """Simultaneous steps from ``start``: ``x ← x − η_x ∇_x f_i(x, y, ξ)``, ``y ← y + η_y ∇_y f_i(x, y, ξ)``.

    Args:
        problem: the minimax problem.
        client: the client.
        key: the random key of the minibatches.
        start: the server's pair.
        steps: the number of steps.
        eta_x: the step size of x.
        eta_y: the step size of y.
        batch_size: the minibatch size; None uses all samples.
        snapshot: the point x̃ at which ∇_y f_i is evaluated instead of x, on the same samples; None is x.
    """

    def step(at: Pair, key: Key) -> Pair:
        f = client.mean(problem.payoff, key, batch_size)
        x, y = inside(problem, at)
        if snapshot is None:
            by_x, by_y = gradients(f, x, y)
        else:
            by_x, by_y = gradient(f, x, y), gradient(f, snapshot, y, wrt=1)
        moved = problem.project_x.own(tree.axpy(-eta_x, by_x, at.x), client)
        return Pair(moved, tree.axpy(eta_y, by_y, at.y))

    return loop(steps, step, key, start)
