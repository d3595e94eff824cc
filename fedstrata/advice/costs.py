"""The cost of a method's round, and budgets in the same units."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias, get_args

from fedstrata.core.counting import Ledger
from fedstrata.core.method import Method
from fedstrata.core.problem import Problem
from fedstrata.core.types import PyTree
from fedstrata.data.federated import FederatedData
from fedstrata.problems.measured import Constants
from fedstrata.solving.loop import solve
from fedstrata.solving.result import Result
from fedstrata.solving.stopping import Diverged

Kind: TypeAlias = Literal["rounds", "bytes", "oracle_calls", "seconds"]
KINDS: tuple[Kind, ...] = get_args(Kind)
TIMED = 20  # rounds that are run to time one


def amounts(ledger: Ledger, seconds: float = 0.0) -> dict[str, float]:
    """The use of a run, by kind."""
    return {
        "rounds": ledger.rounds,
        "bytes": ledger.bytes_up + ledger.bytes_down,
        "oracle_calls": ledger.oracle_calls,
        "seconds": seconds,
    }


def cost_of(found: Constants) -> Ledger:
    """The cost of measuring, as a ledger."""
    return Ledger.from_dict({"exchanges": found.exchanges, **found.oracle_calls})


def one_round(
    problem: Problem, method: Method, data: FederatedData, x0: PyTree, y0: PyTree, **options: Any
) -> Ledger:
    """The cost of one round, from runs of one and of two rounds; a longer run reuses their program."""
    one, two = (vars(quiet(problem, method, data, x0, y0, k, **options).ledger) for k in (1, 2))
    return Ledger(**{name: two[name] - count for name, count in one.items() if isinstance(count, int)})


def round_takes(
    problem: Problem, method: Method, data: FederatedData, x0: PyTree, y0: PyTree, **options: Any
) -> dict[str, float]:
    """The cost of one round, by kind; zero for no rounds."""
    run = quiet(problem, method, data, x0, y0, TIMED, **options)
    seconds = max(run.seconds - run.compiling, 1e-6) / TIMED
    each = amounts(one_round(problem, method, data, x0, y0, **options), seconds)
    return {kind: float(amount) or 1.0 for kind, amount in each.items()}


def quiet(
    problem: Problem, method: Method, data: FederatedData, x0: PyTree, y0: PyTree, rounds: int, **options: Any
) -> Result:
    """A run that is neither shown nor judged."""
    silent: dict[str, Any] = {"progress": False, "default_metrics": False, "certify": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return solve(problem, method, data, x0, y0=y0, rounds=rounds, **(silent | options))
        except Diverged as diverged:
            return diverged.result


def checked(budget: Mapping[str, float], kinds: Iterable[str]) -> dict[str, float]:
    """The limits by kind, checked: each kind is one of these, and each limit positive."""
    for name, limit in budget.items():
        if name not in kinds:
            raise ValueError(f"budget has no {name!r}: it may limit {', '.join(kinds)}.")
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < math.inf:
            raise ValueError(f"budget[{name!r}] must be a positive number, but is {limit!r}.")
    return dict(budget)


def budget_of(budget: float | Mapping[str, float]) -> tuple[str, float]:
    """The only limit; a number is one of rounds."""
    given = budget if isinstance(budget, Mapping) else {"rounds": budget}
    if len(given) != 1:
        raise ValueError(
            f"budget must be a number of rounds or one of {', '.join(KINDS)}, but is {budget!r}."
        )
    return next(iter(checked(given, KINDS).items()))
