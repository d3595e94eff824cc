"""Shared by the methods for the worst client: a step in the model, and a step in the clients' weights λ."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from fedstrata.core.client import Client
from fedstrata.core.method import BatchSize, Method, Positive, Reveals, StateT, by_options
from fedstrata.core.types import Array, Key, PyTree
from fedstrata.methods._shared.rules import own_sets, worst_client
from fedstrata.problems.classes import Minimization
from fedstrata.problems.measured import Conditions, Practical
from fedstrata.problems.of_clients import WorstClient


class State(NamedTuple):
    """The server's iterate and the clients' weights."""

    x: PyTree
    y: Array  # λ


class Agnostic(Method[Minimization, StateT]):
    """Base of the methods for the worst client, whose first two fields are the step sizes of x and of λ."""

    gamma: Positive
    eta_lam: Positive
    batch_size: BatchSize

    solves = (Minimization,)

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """By `fedstrata.methods._shared.rules.worst_client`, with one local step."""
        gamma, eta_lam, steps = worst_client(at)
        return steps.of(cls(gamma, eta_lam), doubts=own_sets(at))

    @by_options
    def reveals_on(self, problem: Minimization) -> Reveals:
        return "replies"

    def judged_as(self, problem: Minimization) -> WorstClient:
        return WorstClient(problem.loss, problem.project)

    def start_y(self, problem: Minimization, y0: PyTree, clients: int) -> Array:
        """The start of λ: the user's, or equal weights."""
        if y0 is None:
            return jnp.full((clients,), 1 / clients)
        good = jnp.shape(y0) == (clients,) and bool((y0 >= 0).all()) and abs(float(y0.sum()) - 1) < 1e-5
        if not good:
            raise ValueError(
                f"{type(self).__name__}: y0 must be {clients} weights ≥ 0 that sum to 1 (or left out), but "
                f"is {y0!r}."
            )
        return jnp.asarray(y0)

    def loss(self, problem: Minimization, client: Client, key: Key, x: PyTree) -> Array:
        """A phase: f_i(x, ξ)."""
        return client.mean(problem.loss, key, self.batch_size)(x)
