"""Plans: a method with step sizes, and the expected cost of a run, from measured constants.

`fedstrata.plan` measures the problem at its start, takes the given method or the first of
`fedstrata.recommend`, and gets its step sizes from `Method.practical`. The result is an ordinary method. If
the constants of the start do not suffice, its steps are tried (`fedstrata.advice.trial`).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fedstrata.advice.applicable import applicable, fitting
from fedstrata.advice.costs import one_round
from fedstrata.advice.recommend import HORIZON, Advice, advice, conditions, expected, ranked, start
from fedstrata.advice.theorems import Theory, theory
from fedstrata.advice.trial import tried, varies
from fedstrata.core.counting import Ledger
from fedstrata.core.method import METHODS, Method, Reveals
from fedstrata.core.problem import Problem
from fedstrata.core.types import PyTree, Weights
from fedstrata.data.federated import FederatedData
from fedstrata.problems.measured import Conditions, Constants, NoRule, Practical
from fedstrata.solving.sent import paces
from fedstrata.support.words import suggest

TARGET = 1e-2  # the error of x that counts as solved
MARGIN = 0.1  # planned rounds end at a tenth of the target, so that a run meets it
FEWEST, MOST = 10, 100_000  # rounds
UNNOTICED = 1.1  # a smaller factor of shorter steps does not matter to momentum


@dataclass(frozen=True)
class Plan:
    """A plan to solve a problem.

    Attributes:
        method: a method with all its step sizes.
        rounds: the expected number of rounds.
        constants: the measured constants, and their cost.
        reasons: the origin of the step sizes, in words.
        known: whether ``rounds`` is a prediction; else it is a horizon, over which step sizes decrease.
        seconds: the time that measuring took.
        theory: the prescription of the method's theorem, condition by condition; None without a theorem.
    """

    method: Method
    rounds: int
    constants: Constants
    reasons: tuple[str, ...]
    known: bool
    seconds: float
    problem: Problem
    data: FederatedData
    x0: PyTree
    y0: PyTree
    options: dict[str, Any]
    theory: Theory | None = None

    @cached_property
    def one_round(self) -> Ledger:
        """The traffic and oracle calls of one round, from runs of one and two rounds."""
        return one_round(self.problem, self.method, self.data, self.x0, self.y0, **self.options)

    @property
    def exchanges(self) -> int:
        """Expected messages down and up of all rounds."""
        return self.rounds * self.one_round.exchanges

    @property
    def bytes(self) -> int:
        """Expected traffic of all rounds, up and down."""
        return self.rounds * (self.one_round.bytes_up + self.one_round.bytes_down)

    @property
    def oracle_calls(self) -> int:
        """Expected oracle calls of all rounds, each for one sample."""
        return self.rounds * self.one_round.oracle_calls

    def __repr__(self) -> str:
        about = "about" if self.known else "a horizon of"
        lines = [
            f"{self.method!r}",
            f"{about} {self.rounds:,} rounds",
            *self.reasons,
            f"measured with {self.constants.exchanges} exchanges in {self.seconds:.2g} s",
        ]
        if self.theory is not None:
            lines.append(f"in theory: {self.theory}")
        return "Plan(\n  " + ",\n  ".join(lines) + ",\n)"


def plan(
    problem: Problem,
    data: FederatedData,
    x0: PyTree,
    y0: PyTree = None,
    method: str | type[Method] | None = None,
    target: float | None = None,
    *,
    rounds: int | None = None,
    participation: float | int = 1.0,
    weights: Weights = "uniform",
    reveals: Reveals = "replies",
    channel: Any = None,
) -> Plan:
    """Find a method's step sizes, and the number of rounds that it needs.

    Args:
        problem: any problem.
        data: the clients' samples.
        x0: the start.
        y0: the start of the second variable.
        method: the method's class or its name; by default the first of `fedstrata.recommend`.
        target: the relative error of x to reach; by default 0.01.
        rounds: the number of rounds; by default the expected one.
        participation: as in `fedstrata.solve`.
        weights: the clients' weights.
        reveals: ``"averages"`` excludes methods that reveal single replies to the server.
        channel: as in `fedstrata.solve`: steps are as short as its compression needs. Noise is not planned.

    Raises:
        NoRule: if no method has a rule for this kind of problem, with the reasons.
        ValueError: if the method does not bear the channel.

    >>> import fedstrata as fs, numpy as np
    >>> problem, data, x_star, y_star = fs.quadratic_bilevel(clients=3, n=2, p=3)
    >>> found = fs.plan(problem, data, np.zeros(2), np.zeros(3))
    >>> result = fs.solve(problem, found.method, data, np.zeros(2), y0=np.zeros(3), rounds=found.rounds)
    >>> result.certificate.solved
    True
    """
    began = time.perf_counter()
    target = TARGET if target is None else target
    if not 0 < target < 1:
        raise ValueError(f"target must be in (0, 1), but is {target!r}.")
    at = conditions(
        problem, data, x0, y0, participation=participation, weights=weights, rounds=rounds or HORIZON
    )
    x, y = start(problem, data, x0, y0)
    options: dict[str, Any] = {"participation": participation, "weights": weights}
    candidates = chosen(at, method, reveals)
    its, ran = candidates[0], 0
    assert its.practical is not None
    found = its.practical
    at, uncertain = varies(at, data, x, y, weights)
    if channel is not None:
        options["channel"] = channel
        found = borne(candidates, at, data, x, y, options)
    elif uncertain:
        at, its, ran, rate, reasons = tried(at, its, data, x, y, options)
        assert its.practical is not None
        found = its.practical._replace(rate=rate, reasons=(*its.practical.reasons, *reasons))
    needed = expected(found.rate, MARGIN * target)
    if rounds is None and found.fades is False and math.isfinite(needed):
        number = int(min(max(ran + math.ceil(needed), FEWEST), MOST))
    else:
        number = rounds or HORIZON
    seconds = time.perf_counter() - began
    known = math.isfinite(needed) and not found.fades
    return Plan(
        found.method, number, at.constants, found.reasons, known, seconds, problem, data, x, y,
        options, theory(type(found.method), at, target) if channel is None else None,
    )  # fmt: skip


def borne(
    fits: list[Advice], at: Conditions, data: FederatedData, x: PyTree, y: PyTree, options: dict[str, Any]
) -> Practical:
    """The first of these methods that bears the channel, with the steps that it allows."""
    refused: list[str] = []
    for its in fits:
        assert its.practical is not None
        try:
            upper, lower, rate = paces(at.problem, its.practical.method, data, x, y, **options)
            practical = its.fit.method.practical(compressed(at, upper, lower))
        except ValueError as reason:
            refused.append(f"{its.name}: {reason}")
            continue
        why = f"steps {upper:.2g} times shorter for the channel's compression"
        reasons = (*practical.reasons, why) if upper > 1 else practical.reasons
        return practical._replace(rate=min(practical.rate, rate), reasons=reasons)
    raise NoRule(" ".join(refused))


def compressed(at: Conditions, upper: float, lower: float) -> Conditions:
    """The constants under a channel; y is slower already, which L_y through it need not repeat."""
    through = at.constants.through
    through = None if through is None else through * max(upper / lower, 1.0)
    curved = replace(at.constants.curved(upper, lower), through=through)
    return replace(at, constants=curved, slower=at.slower * upper, compressed=upper > UNNOTICED)


def chosen(at: Conditions, method: str | type[Method] | None, reveals: Reveals = "replies") -> list[Advice]:
    """The given method, or all that have no objections, best first, with their step sizes."""
    if method is None:
        found = [its for its in ranked(at, reveals) if its.practical is not None]
        if not found or found[0].avoid:
            reasons = "; ".join(f"{its.name}: {', '.join(its.reasons)}" for its in ranked(at, reveals))
            raise NoRule(f"No method has a rule for this {type(at.problem).__name__}. {reasons}")
        return [its for its in found if not its.avoid]
    name = method if isinstance(method, str) else method.__name__
    if name not in METHODS:
        raise ValueError(f"Unknown method {name!r}{suggest(name, sorted(METHODS))}")
    fits = fitting(at.problem)
    if name not in fits:
        these = ", ".join(fit.name for fit in applicable(at.problem) if not fit.via)
        raise ValueError(f"{name} does not fit this {type(at.problem).__name__}. These do: {these}.")
    its = advice(fits[name], at)
    if its.practical is None:
        raise NoRule(f"{name}: {' '.join(its.reasons)}")
    return [replace(its, avoid=False)]
