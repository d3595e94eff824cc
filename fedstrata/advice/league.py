"""The league's records of methods: `league.json`, which ``python -m reproductions.league`` writes.

The league (`reproductions/league.md`) runs every method on every problem of a fixed set, with steps by its
rule, at equal budgets of exchanges. Records are by class of objective. They count how often a method reached
the target there, and do not predict its speed on another problem, so they only decide if rules know no rate.
"""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any, NamedTuple

from fedstrata.core.problem import Problem


class Record(NamedTuple):
    """A method's runs on the league's problems of one class.

    Attributes:
        runs: the number of runs.
        reached: the number of runs that reached the target.
        within_twice: the fraction that reached it with at most twice the least exchanges of any method.
        problems: the number of problems.
    """

    runs: int
    reached: int
    within_twice: float
    problems: int

    def __str__(self) -> str:
        return f"in the league it reached the target in {self.reached} of {self.runs} runs"


def kind(problem: Problem) -> str:
    """The class of objective, within which the league's runs are compared."""
    return f"{'local ' * problem.local}{type(problem).__name__}"


@functools.cache
def measured() -> dict[str, Any]:
    """The contents of the file; empty if it does not exist."""
    file = resources.files("fedstrata.advice").joinpath("league.json")
    return json.loads(file.read_text("utf-8")) if file.is_file() else {"objectives": {}}


def record(problem: Problem, method: str) -> Record | None:
    """The record of a method on problems of this one's class; None if it was not measured."""
    found = measured()["objectives"].get(kind(problem), {"methods": {}})
    its = found["methods"].get(method)
    return None if its is None else Record(**its, problems=len(found["problems"]))
