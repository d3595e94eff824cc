"""Scores that compare points of different runs: F of the certificate, or a user's function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import numpy as np

from fedstrata.advice.certify import judge
from fedstrata.advice.lower import NotCertifiable
from fedstrata.advice.objectives import Case, equations_of, objective_of
from fedstrata.advice.precision import double, double_precision
from fedstrata.core.problem import Problem
from fedstrata.core.types import PyTree, Weights
from fedstrata.data.federated import DataError, FederatedData
from fedstrata.problems.classes import Minimization, Selection
from fedstrata.support.frozen import jit

Score: TypeAlias = Callable[[PyTree, PyTree], float]
By: TypeAlias = Literal["certificate", "validation"] | Callable[[PyTree, PyTree], Any]


def score_of(
    problem: Problem, data: FederatedData, weights: Weights, x0: PyTree, y0: PyTree, by: By = "certificate"
) -> Score:
    """A function of ``(x, y)``, smaller is better; infinite instead of NaN.

    Raises:
        ValueError: if this score does not apply to the problem.
    """
    if callable(by):
        return lambda x, y: _finite(by(x, y))
    if by == "certificate":
        return _certified(problem, data, weights, x0, y0)
    if by != "validation":
        raise ValueError(f"by must be 'certificate', 'validation' or a function of (x, y), but is {by!r}.")
    if not isinstance(problem, Minimization) or data.valid is None:
        raise ValueError(
            "by='validation' needs a Minimization and data with a part 'valid'. For a Bilevel, "
            "by='certificate' is the upper level's loss; else give a function of (x, y)."
        )
    mean = jit(lambda x, at: Case(problem, at, weights, x).mean(problem.loss, x, part="valid"))
    placed = data.placed()
    return lambda x, y: _finite(mean(x, placed))


def _certified(problem: Problem, data: FederatedData, weights: Weights, x0: PyTree, y0: PyTree) -> Score:
    """F with lower levels solved; without an F, half the squared distance from a solution."""
    if data.source is not None:
        raise DataError("data that comes from a source cannot be judged: give data.load(), or by=a function.")

    def case(x: PyTree, y: PyTree) -> Case:
        x, y, x_begun, y_begun = map(double, (x, y if y is not None else y0, x0, y0))
        return Case(problem, data.placed(), weights, problem.start_x(x), y, problem.start_x(x_begun), y_begun)

    try:
        with double_precision():
            begun = case(x0, y0)
            by_distance = isinstance(problem, Selection) or equations_of(problem, begun) is not None
            objective = None if by_distance else objective_of(problem, begun)
    except NotCertifiable as reason:
        raise ValueError(
            f"Points of this problem cannot be judged: {reason}. Give by=a function."
        ) from reason

    def score(x: PyTree, y: PyTree) -> float:
        with double_precision():
            if objective is None:
                try:
                    return _finite(judge(problem, case(x, y)).value)
                except NotCertifiable:
                    return np.inf
            point = problem.start_x(double(x))
            point = getattr(point, "x", point)
            inside = point if objective.onto is None else objective.onto(point)
            return _finite(objective.evaluate(inside)[0])

    return score


def _finite(value: Any) -> float:
    return float(value) if np.isfinite(float(value)) else np.inf
