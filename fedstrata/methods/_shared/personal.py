"""Shared by the methods whose clients have personal models beside the server's."""

from __future__ import annotations

from typing import Any, ClassVar

from fedstrata.core import tree
from fedstrata.core.client import Client
from fedstrata.core.counting import loop
from fedstrata.core.method import Method, StateT
from fedstrata.core.problem import Problem
from fedstrata.core.types import Integer, Key, PyTree, Real
from fedstrata.estimators.gradients import gradient
from fedstrata.problems.classes import Minimization
from fedstrata.problems.of_clients import OwnModels


class Personal(Method[Minimization, StateT]):
    """Base of these methods: the server has one model, x, and every client its own, the result's y."""

    solves = (Minimization,)
    takes_sets: ClassVar[bool] = False

    @classmethod
    def refuses(cls, problem: Minimization) -> str | None:
        if cls.takes_sets or problem.project.trivial:
            return None
        return f"{cls.__name__} does not take a set; with a set, use FedAvg or Ditto."

    def judged_as(self, problem: Minimization) -> Problem:
        return OwnModels(problem.loss, problem.project)

    def start_y(self, problem: Minimization, y0: PyTree, clients: int) -> PyTree:
        return y0  # of every client; None: x0

    def output(self, state: Any, memory: PyTree) -> tuple[PyTree, PyTree]:
        return state.x, memory


def local_sgd(
    problem: Minimization, client: Client, key: Key, x: PyTree, steps: Integer, gamma: Real, batch: int | None
) -> PyTree:
    """FedAvg's local steps from x: ``z ← z − γ ∇f_i(P_X(z), ξ)``, projected if the client has its own set."""

    def step(z: PyTree, key: Key) -> PyTree:
        g = gradient(client.mean(problem.loss, key, batch), problem.project.common(z))
        return problem.project.own(tree.axpy(-gamma, g, z), client)

    return loop(steps, step, key, x)
