"""Shared by the methods of coupled sequences; the maps P and S are in `fedstrata.estimators.sequences`."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import jax.numpy as jnp

from fedstrata.core import tree
from fedstrata.core.client import Client
from fedstrata.core.fed import Fed
from fedstrata.core.method import Method, Reveals, StateT, by_options
from fedstrata.core.problem import Problem
from fedstrata.core.types import Key, PyTree, Real
from fedstrata.estimators import sequences
from fedstrata.estimators.compositional import Drawn, chain_of
from fedstrata.methods._shared.compositional import Chained, revealed_by_levels
from fedstrata.problems.classes import Bilevel, Composition, Minimax, MultiSequence


class Point(NamedTuple):
    """The main variable and the sequences, or a direction of both."""

    x: PyTree
    Z: tuple[PyTree, ...]


class Sequences(Chained, Method[Problem, StateT]):
    """Base of the methods of coupled sequences."""

    solves = sequences.SOLVES
    needs = "gradients, in bilevel problems Hessian-vector products"
    server_steps = False

    @classmethod
    def needs_for(cls, problem: Problem) -> str:
        return needs_of(problem)

    @classmethod
    def differentiates(cls, problem: Problem) -> Collection[str]:
        return () if isinstance(problem, MultiSequence) else super().differentiates(problem)

    @classmethod
    def refuses(cls, problem: Problem) -> str | None:
        return refused_sets(cls.__name__, problem, cls.server_steps)

    @by_options
    def reveals_on(self, problem: Problem) -> Reveals:
        return revealed_by_levels(problem) if isinstance(problem, Composition) else "averages"

    def lengths(self, problem: Problem, clients: int) -> dict[str, int]:
        return {**super().lengths(problem, clients), "sequence": sequences.number(problem)}

    def output(self, state: PyTree, memory: PyTree) -> tuple[PyTree, PyTree]:
        return state.x, sequences.second(state.Z)

    def drawn(self, problem: Composition, client: Client, key: Key) -> Drawn:
        """The composition on all of a client's samples."""
        return chain_of(problem).drawn(client, key, None)

    def exact_start(self, problem: Problem, fed: Fed, key: Key, x: PyTree, Z: PyTree) -> PyTree:
        """A composition's values and adjoints at x, one exchange each; other problems keep their Z."""
        if not isinstance(problem, Composition) or not Z:
            return Z
        values = self.values_at(problem, fed, key, self.value_of_level, (x,))
        if not isinstance(Z[0], sequences.Tracked):
            return values
        return sequences.compose(problem, values, self.cotangents(problem, fed, key, values))


def refused_sets(name: str, problem: Problem, server: bool) -> str | None:
    """The reason to refuse a set: implicit differentiation fails on it, or the server does not know it."""
    if server and not problem.set_of_x.shared:
        return f"{name}: the server updates x, so it cannot use a client-dependent project_x(x, client)."
    match problem:
        case Bilevel() if not problem.project_y.trivial:
            return (
                f"{name} assumes ∇_y = 0 at the solution of the lower level, which is false if y has a set. "
                "Leave project_y out, or use a zeroth-order method (FedRZOBilevel)."
            )
        case Minimax():
            return moving_set(name, problem)
    return None


def moving_set(name: str, problem: Minimax) -> str | None:
    """The reason to refuse a set of y that depends on x, for methods that step along ∇_x f."""
    if problem.project_y.arity > 1:
        return f"{name}: ∇_x f is not a descent direction if the set of y depends on x. Use FedRZOMinimax."
    return None


def needs_of(problem: Problem) -> str:
    """The derivatives that the maps of a problem need."""
    match problem:
        case Bilevel():
            return "gradients, Hessian-vector products"
        case MultiSequence():
            return "values of P and S"
    return "gradients"


def step(problem: Problem, alpha: Real, beta: Real, at: Point, direction: Point, *client: Client) -> Point:
    """``x ← P_X(x − αh)``, ``zⁿ ← zⁿ − β_n qⁿ``, and ``y ← P_Y(…)`` in a minimax problem."""
    x = problem.set_of_x(tree.axpy(-alpha, direction.x, at.x), *client)
    betas = jnp.broadcast_to(jnp.asarray(beta), (len(at.Z),))
    Z = tuple(tree.axpy(-betas[n], q, z) for n, (q, z) in enumerate(zip(direction.Z, at.Z, strict=True)))
    if isinstance(problem, Minimax):
        Z = (sequences.Follower(problem.project_y(Z[0].y)),)
    return Point(x, Z)
