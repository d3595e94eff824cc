"""Shared by the methods whose clients have personal models beside the server's."""

from __future__ import annotations

from typing import Any, ClassVar

from fedstrata.core.problem import Problem
from fedstrata.core.types import PyTree
from fedstrata.methods.fedavg import Averaging, State
from fedstrata.problems.classes import Minimization
from fedstrata.problems.of_clients import OwnModels


class Personal(Averaging):
    """Base of these methods: the server has one model, x, as in FedAvg, and every client its own, y."""

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

    def memory(self, problem: Minimization, x0: PyTree, y0: PyTree) -> Any:
        return x0 if y0 is None else y0

    def output(self, state: State, memory: Any) -> tuple[PyTree, PyTree]:
        return state.x, memory
