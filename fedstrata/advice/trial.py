"""Trials of planned steps, for problems whose constants at the start do not suffice.

If F is not convex at the start, or curves up along −∇F, it may be more curved on the way. So may a lower
level whose curvature is another one elsewhere:

    1  run the method for 200 rounds, or as many as are expected
    2  x is not finite, F(x) is above its start, or F goes up and down: count F's curvature as four times as
       large; the second time the lower level's, too; go to 1
    3  measure at x, and take the larger curvatures; go to 1 if they make a step much shorter
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fedstrata.advice.constants import constants
from fedstrata.advice.costs import cost_of, quiet
from fedstrata.advice.fault import TOO_LONG, first_steps
from fedstrata.advice.recommend import Advice, advice, expected
from fedstrata.advice.spectrum import start_of
from fedstrata.advice.verdicts import drawn_by, metric_of
from fedstrata.core.counting import ORACLES, Ledger
from fedstrata.core.types import PyTree, Weights
from fedstrata.data.federated import FederatedData
from fedstrata.problems.measured import GROWN, Conditions
from fedstrata.solving.result import Result

ROUNDS = 200
TRIALS = 6
EVALUATIONS = 40
RISES = 0.1  # of all its changes
SHORTER = 4.0  # the factor by which a step size at fault is divided


class Tried(NamedTuple):
    """What trials found.

    Attributes:
        at: the problem with corrected constants.
        its: the method with its new steps.
        rounds: the rounds of the last trial.
        rate: the expected rate from there on.
        reasons: in words.
    """

    at: Conditions
    its: Advice
    rounds: int
    rate: float
    reasons: tuple[str, ...]


def varies(
    at: Conditions, data: FederatedData, x: PyTree, y: PyTree, weights: Weights
) -> tuple[Conditions, bool]:
    """Whether F, or the lower level, may be more curved on the way than at the start; with what that cost."""
    levels = at.constants.levels
    F = levels.get("objective") or levels.get("loss")
    if F is None or F.kinked or F.varies or "lower" not in levels:
        return at, F is not None and F.varies
    flat, unravel = ravel_pytree(x)
    away = start_of(flat)
    beside = unravel(flat + F.reach / jnp.linalg.norm(away) * away)
    found = constants(at.problem, data, beside, y, weights=weights, objective=False)
    here, there = levels["lower"], found.levels["lower"]
    differs = not np.allclose([there.L, there.mu], [here.L, here.mu], rtol=GROWN)
    return _costing(at, cost_of(at.constants) + cost_of(found)), differs


def tried(
    at: Conditions, its: Advice, data: FederatedData, x: PyTree, y: PyTree, options: dict[str, Any]
) -> Tried:
    """Correct the constants until the steps that follow from them pass a trial."""
    begun, rate, failed, rounds, number, spent = at.F, 0.0, False, 0, 0, cost_of(at.constants)
    while number < TRIALS:
        number += 1
        rounds = math.ceil(min(expected(_rate(its)), ROUNDS))
        there, steady, cost = _after(its, at, data, x, y, rounds, options)
        spent = spent + cost
        passed = there is not None and steady and there.F.value <= begun.value
        if there is not None and passed:
            found = at.constants.or_worse(there.constants)
        else:
            found, failed = at.constants.curved(SHORTER, SHORTER if failed else 1.0), True
        at = _costing(replace(at, constants=found), spent)
        before, new = its, advice(its.fit, at)
        if new.practical is None:
            break
        its, rate = new, _rate(new)
        if there is not None and passed and not _shortened(before, its):
            if begun.nearly_least(there.F):
                rate = _rate(advice(its.fit, _ending(at, there.F.mu)))
            break
    words = f"F may be more curved on the way: tried {number} times, for up to {rounds} rounds"
    return Tried(at, its, rounds, rate, (words,))


def _costing(at: Conditions, spent: Ledger) -> Conditions:
    """The same constants at another cost."""
    calls = {kind: vars(spent)[kind] for kind in ORACLES.values()}
    return replace(at, constants=replace(at.constants, exchanges=spent.exchanges, oracle_calls=calls))


def _rate(its: Advice) -> float:
    return 0.0 if its.practical is None else its.practical.rate


def _ending(at: Conditions, mu: float) -> Conditions:
    """The same constants with the least curvature of F at a solution."""
    levels = {name: replace(its, mu=mu) if its is at.F else its for name, its in at.constants.levels.items()}
    return replace(at, constants=replace(at.constants, levels=levels))


def _after(
    its: Advice,
    at: Conditions,
    data: FederatedData,
    x: PyTree,
    y: PyTree,
    rounds: int,
    options: dict[str, Any],
) -> tuple[Conditions | None, bool, Ledger]:
    """The constants at the end of a trial, None if it diverged; whether it was steady; and its cost."""
    assert its.method is not None
    run = quiet(
        at.problem, its.method, data, x, y, rounds, eval_every=max(1, rounds // EVALUATIONS),
        default_metrics=True, **options,
    )  # fmt: skip
    if run.status == "diverged":
        return None, False, run.ledger
    y = run.y if at.problem.has_y else None
    found = constants(at.problem, data, run.x, y, weights=options["weights"])
    return replace(at, constants=found), _steady(run), run.ledger + cost_of(found)


def _steady(run: Result) -> bool:
    """Whether the metric of F hardly rises in the second half; random steps may."""
    values = metric_of(run)
    rises = np.diff(values[len(values) // 2 :]).clip(0).sum()
    return bool(drawn_by(run, run.known_method) or rises <= RISES * np.ptp(values))


def _shortened(before: Advice, now: Advice) -> bool:
    """Whether the new steps are much shorter."""
    assert before.method is not None
    assert now.method is not None
    old, new = first_steps(before.method), first_steps(now.method)
    return any(step > TOO_LONG * new[name] for name, step in old.items() if name in new)
