"""Methods for a problem, best first, and methods to avoid: by their rules on measured constants.

    exchanges ≈ cost · ln(1/accuracy) / rate        cost, rate: of a round, by `Method.practical`

Methods whose rule knows a rate come first, ordered by expected exchanges, then by the number of their
hyper-parameters. Then come methods whose step sizes decrease over a horizon, and methods with their own
schedules, ordered by their record in the league (`fedstrata.advice.league`), methods with objections
(baselines, other objectives, biased limits, too much revealed), and methods without a rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedstrata.advice.applicable import Fit, fitting
from fedstrata.advice.constants import constants
from fedstrata.advice.league import Record, record
from fedstrata.core import tree
from fedstrata.core.method import Method, Reveals
from fedstrata.core.problem import Problem
from fedstrata.core.types import PyTree, Weights
from fedstrata.data.federated import FederatedData
from fedstrata.problems.classes import MultiSequence
from fedstrata.problems.fairness import Hard
from fedstrata.problems.measured import Conditions, Constants, Measured, NoRule, Practical
from fedstrata.solving.pose import check_kinds, check_point, expected_participants
from fedstrata.support import html
from fedstrata.support.points import as_floats
from fedstrata.support.shown import aligned

HORIZON = 2_000  # rounds over which step sizes decrease, by default
ANOTHER = "it solves another problem"
ACCURACY = 1e-3  # the accuracy of x in predictions


@dataclass(frozen=True)
class Advice:
    """One method for a problem.

    Attributes:
        name: the name of the method's class.
        method: a method with step sizes; None without a rule.
        rounds: the expected number of rounds; infinite if it is not known.
        exchanges: the expected number of exchanges; infinite if it is not known.
        reasons: the reasons for its place, in words.
        avoid: whether there are objections.
        fit: its requirements, and the uploads that it reveals, as listed by `fedstrata.applicable`.
        practical: the answer of its rule.
        record: the league's record on problems of the same class; None without one.
    """

    name: str
    method: Method | None
    rounds: float
    exchanges: float
    reasons: tuple[str, ...]
    avoid: bool
    fit: Fit
    practical: Practical | None = None
    record: Record | None = None


class Recommendations(tuple[Advice, ...]):
    """Methods, best first; printed as a table."""

    constants: Constants

    @property
    def names(self) -> list[str]:
        """The names of methods with step sizes and without objections."""
        return [its.name for its in self if not its.avoid and its.method is not None]

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("", "method", "rounds", "reveals", "why")]
        for number, its in enumerate(self):
            rounds = f"{its.rounds:,.0f}" if math.isfinite(its.rounds) else "?"
            shown = repr(its.method) if its.method is not None and not its.avoid else its.name
            first = "avoid" if its.avoid else "no rule" if its.method is None else f"{number + 1}."
            rows.append((first, shown, rounds, its.fit.reveals, "; ".join(its.reasons)))
        return rows

    def _repr_html_(self) -> str:
        return html.table(self._rows(), left=None)

    def __repr__(self) -> str:
        return "\n".join(aligned(self._rows()))


def recommend(
    problem: Problem,
    data: FederatedData,
    x0: PyTree,
    y0: PyTree = None,
    *,
    participation: float | int = 1.0,
    weights: Weights = "uniform",
    reveals: Reveals = "replies",
    rounds: int = HORIZON,
) -> Recommendations:
    """The methods for a problem, best first, and the ones to avoid.

    Args:
        problem: any problem.
        data: the clients' samples.
        x0: the start.
        y0: the start of the second variable.
        participation: as in `fedstrata.solve`.
        weights: the clients' weights.
        reveals: ``"averages"`` marks methods that reveal single replies to the server as ones to avoid.
        rounds: the horizon over which step sizes decrease.

    >>> import fedstrata as fs, numpy as np
    >>> problem, data, x_star, y_star = fs.quadratic_bilevel(clients=3, n=2, p=3)
    >>> fs.recommend(problem, data, np.zeros(2), np.zeros(3)).names[0]
    'SOBA'
    """
    at = conditions(problem, data, x0, y0, participation=participation, weights=weights, rounds=rounds)
    found = Recommendations(ranked(at, reveals))
    found.constants = at.constants
    return found


def conditions(
    problem: Problem,
    data: FederatedData,
    x0: PyTree,
    y0: PyTree = None,
    *,
    participation: float | int = 1.0,
    weights: Weights = "uniform",
    rounds: int = HORIZON,
) -> Conditions:
    """Measure a problem at a start."""
    x, y = start(problem, data, x0, y0)
    participants = expected_participants(participation, data.clients)
    measured = constants(problem, data, x, y, weights=weights)
    return Conditions(
        problem,
        measured,
        data.clients,
        participants,
        tree.dimension(x),
        rounds,
        dimension_y=tree.dimension(y),
    )


def start(problem: Problem, data: FederatedData, x0: PyTree, y0: PyTree) -> tuple[PyTree, PyTree]:
    """The points in the form of `fedstrata.solve`, checked."""
    check_kinds(problem, data)
    x = as_floats(problem.start_x(x0), "x0")
    y = None if y0 is None else as_floats(y0, "y0")
    y = check_point(problem, data, x, y)
    return x, y if problem.has_y else None


def ranked(at: Conditions, reveals: Reveals = "replies") -> list[Advice]:
    """All methods for a measured problem, best first."""
    return sorted((advice(fit, at, reveals) for fit in fitting(at.problem).values()), key=_order)


def typical_order(problem: Problem, fits: Sequence[Fit]) -> list[Fit]:
    """Methods, ordered for a problem with condition number ten and heterogeneous clients."""
    one = np.ones(5)
    typical = Measured(1.0, 0.1, one, 0.1 * one, 1.0, 0.5, 0.2, 0.5, 0.0, 1.0, 1e-7, 1.0)
    names = {level.name for level in problem.levels} | {"objective", "loss", "plain", "constraints"}
    exact = np.diag([1.0, 2.0]) if isinstance(problem, MultiSequence) else None
    found = Constants(dict.fromkeys(names, typical), 0.5, 0.5, 1.0, 1.0, 0, jacobian=exact)
    at = Conditions(problem, found, 5, 5, 1 if exact is not None else 10, HORIZON)
    own = [fit for fit in fits if not fit.via]
    return sorted(own, key=lambda fit: _order(advice(fit, at))) + [fit for fit in fits if fit.via]


def _order(its: Advice) -> tuple[bool, bool, bool, float, float, bool, int]:
    # without a rule nothing has chosen the options for which a method's limit is exact
    biased = its.method is None and its.fit.method.bias is not Method.bias
    paced = its.practical is None or not its.practical.fades
    proven = 0.0 if its.record is None or math.isfinite(its.exchanges) else its.record.within_twice
    number = len(its.fit.method.hyperparameters)
    return its.method is None, its.avoid, biased, its.exchanges, -proven, paced, number


def advice(fit: Fit, at: Conditions, reveals: Reveals = "replies") -> Advice:
    """The advice about one method."""
    cls = fit.method
    against: list[str] = []
    if at.partial and cls.full_participation is not None:
        against.append(f"it needs all clients in every round: {cls.full_participation}")
    try:
        its = cls.practical(at)
    except NoRule as reason:
        return Advice(fit.name, None, math.inf, math.inf, (*against, str(reason)), bool(against), fit)
    judged = its.method.judged_as(at.problem)
    if judged is not at.problem and not isinstance(judged, Hard):  # constraints instead of their penalty
        against.append(ANOTHER)
    if reveals == "averages" and its.method.reveals_on(at.problem) == "replies":
        against.append("it shows the server single replies")
    against += its.doubts
    rounds = expected(its.rate)
    known = record(judged, fit.name)
    reasons = (*(against or its.reasons), *([str(known)] if known is not None else []))
    return Advice(fit.name, its.method, rounds, rounds * its.cost, reasons, bool(against), fit, its, known)


def expected(rate: float, accuracy: float = ACCURACY) -> float:
    """Rounds until the error reaches an accuracy, at a rate."""
    if not rate > 0:
        return math.inf
    return math.log(1 / accuracy) / -math.log1p(-min(rate, 0.9))
