"""Solve without hyper-parameters: plan, run a stage, certify, adapt, until solved or the budget is spent.

    1  measure the problem's constants at x; rank the methods by their rules (`fedstrata.recommend`)
    2  a stage: run the first method for the rounds that its rule expects, from the best x so far
    3  certify: F(x), lower levels solved, and a verdict
    4  solved: stop
       F rose, or was not finite: return to the best x, and divide the step size at fault by four
       the excess of F halved: continue there with twice the rounds, and measure the constants again
       else: a longer horizon if step sizes decrease with it; else decreasing step sizes; else the next method
    5  go to 2 while there is budget

The adaptation changes the *constants* that the rules use: a curvature four times as large shortens the steps
of every method by its own rule. So each stage's method, and `Result.method`, is an ordinary one.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fedstrata.advice.applicable import Fit
from fedstrata.advice.certify import DISTURBED, certify
from fedstrata.advice.constants import constants
from fedstrata.advice.costs import KINDS, amounts, checked, cost_of, one_round
from fedstrata.advice.objectives import OutOfTime
from fedstrata.advice.plan import FEWEST, MARGIN, TARGET, compressed
from fedstrata.advice.recommend import Advice, advice, conditions, expected, ranked, start
from fedstrata.core import tree
from fedstrata.core.counting import Ledger
from fedstrata.core.method import Method, Reveals
from fedstrata.core.problem import Problem
from fedstrata.core.types import PyTree, Weights
from fedstrata.data.federated import FederatedData
from fedstrata.problems.measured import Conditions, NoRule
from fedstrata.solving.certificate import Certificate
from fedstrata.solving.loop import solve
from fedstrata.solving.result import BOOKKEEPING, Result
from fedstrata.solving.sent import paces
from fedstrata.solving.stopping import Diverged

UNITS = (*KINDS, "bytes_a_round")
MOST = 200_000  # rounds, if no budget is given
HORIZON = 1_000  # rounds of a first stage if no rate is known
LONGEST = 50_000  # rounds of a first stage
LONGER = 4  # times the longest stage so far: the limit of a later one
STAGES = 24
SHORTER = 4.0  # the factor by which a step size at fault is divided
MOST_SHORTER = 64.0  # in total, as long as F does not increase
STILL = 1e-6  # relative to the distance to the best point: a shorter move counts as none
STALLS = 3  # stages of one method in a row that hardly gain
FAILURES = 3  # of one method in a row
HALF = 0.5  # a stage that leaves a larger fraction of the excess has stalled
KINK = 1.0
EVALUATIONS = 200  # the most of a stage


@dataclass(frozen=True)
class Belief:
    """Corrections of the measured constants, learned from the stages.

    Attributes:
        upper, lower: factors of the curvatures of F and of the lower level.
        kinked: whether step sizes must decrease, regardless of the measurements.
        horizon: the rounds over which they decrease.
        failures: stages in a row that ended above their start.
        stalls: stages in a row that hardly gained.
        rounds: factor of the rounds of a stage.
    """

    upper: float = 1.0
    lower: float = 1.0
    kinked: bool = False
    horizon: int = HORIZON
    failures: int = 0
    stalls: int = 0
    rounds: float = 1.0

    def of(self, at: Conditions) -> Conditions:
        """The corrected constants."""
        changed = at.constants.curved(self.upper, self.lower)
        if self.kinked:
            levels = {name: replace(its, kink=KINK) for name, its in changed.levels.items()}
            changed = replace(changed, levels=levels)
        return replace(at, constants=changed, rounds=self.horizon, slower=at.slower * self.upper)

    def shorter(self) -> Belief:
        """After a stage that increased F: first x's step size, then the lower level's too."""
        more = SHORTER if self.failures else 1.0
        return replace(self, upper=self.upper * SHORTER, lower=self.lower * more, failures=self.failures + 1)


@dataclass
class Budget:
    """The limits, and the use so far."""

    limits: dict[str, float]
    began: float
    used: Ledger

    @property
    def until(self) -> float:
        """The `time.perf_counter` at which its seconds are spent."""
        return self.began + self.limits.get("seconds", math.inf)

    def left(self) -> float:
        """The remaining fraction of the scarcest resource."""
        spent = amounts(self.used, time.perf_counter() - self.began)
        return min(1 - spent[name] / limit for name, limit in self.limits.items() if name in spent)

    def rounds(self, wanted: int) -> int:
        """As many of the wanted rounds as the budget allows, at the cost of the rounds so far."""
        most = wanted
        if "rounds" in self.limits:
            most = min(most, int(self.limits["rounds"]) - self.used.rounds)
        used = amounts(self.used)
        for name in self.limits.keys() & {"bytes", "oracle_calls"}:
            if used["rounds"] and used[name]:
                one = used[name] / used["rounds"]
                most = min(most, int(self.limits[name] / one - used["rounds"]))
            else:  # costs are not known yet: a short stage
                most = min(most, FEWEST)
        return most


@dataclass
class Stage:
    """One run with its certificate; F at its end, the distance that x moved, and ‖x‖."""

    result: Result
    certificate: Certificate
    F: float
    moved: float
    size: float


def checked_budget(budget: Mapping[str, float] | None, rounds: int | None) -> dict[str, float]:
    """The limits; a default number of rounds if there is no other."""
    limits = checked(budget or {}, UNITS)
    if rounds is not None:
        limits["rounds"] = min(rounds, limits.get("rounds", math.inf))
    return limits if limits.keys() - {"bytes_a_round"} else limits | {"rounds": MOST}


def auto(
    problem: Problem,
    data: FederatedData,
    x0: PyTree,
    y0: PyTree = None,
    *,
    rounds: int | None = None,
    budget: Mapping[str, float] | None = None,
    seed: int = 0,
    participation: float | int = 1.0,
    weights: Weights = "uniform",
    reveals: Reveals = "replies",
    **options: Any,
) -> Result:
    """``fs.solve(problem, "auto", …)``; the arguments are `fedstrata.solve`'s."""
    began = time.perf_counter()
    limits = checked_budget(budget, rounds)
    if reveals not in get_args(Reveals):
        raise ValueError(f"reveals must be one of {get_args(Reveals)}, but is {reveals!r}.")
    if data.source is not None:
        raise ValueError("'auto' measures the problem on all samples: give data=data.load().")
    at = conditions(problem, data, x0, y0, participation=participation, weights=weights, rounds=HORIZON)
    every = ranked(at, reveals)
    first = [its for its in every if can_run(its)] or [its for its in every if can_run(its, doubted=True)]
    if not first:
        reasons = "; ".join(f"{its.name}: {', '.join(its.reasons)}" for its in every)
        raise NoRule(f"'auto' has no method for this {type(problem).__name__}. {reasons}")
    measured = cost_of(at.constants)
    run = Run(
        problem, data, start(problem, data, x0, y0), at, {its.name: its.fit for its in first},
        {"seed": seed, "participation": participation, "weights": weights, **options},
        Budget(limits, began, measured), reveals, all(its.avoid for its in first),
    )  # fmt: skip
    run.go()
    return run.result()


def can_run(its: Advice, doubted: bool = False) -> bool:
    """Whether a method has step sizes and no objections; if doubted, no others than those of its own rule."""
    if its.practical is None:
        return False
    return not its.avoid or (doubted and set(its.reasons) <= set(its.practical.doubts))


class Run:
    """The stages of one call."""

    def __init__(
        self,
        problem: Problem,
        data: FederatedData,
        begun: tuple[PyTree, PyTree],
        at: Conditions,
        fits: dict[str, Fit],
        options: dict[str, Any],
        budget: Budget,
        reveals: Reveals,
        doubted: bool,
    ) -> None:
        self.problem, self.data, self.begun, self.at = problem, data, begun, at
        self.fits, self.options, self.budget, self.reveals = fits, options, budget, reveals
        self.doubted, self.slow = doubted, (1.0, 1.0)
        self.stages: list[Stage] = []
        self.best: Stage | None = None
        self.ended = ""

    @property
    def point(self) -> tuple[PyTree, PyTree]:
        """The start of the next stage; a y of each client or sample starts again."""
        if self.best is None:
            return self.begun
        shared = all(level.solved_by == "all" for level in self.problem.levels)
        x, y = self.best.result.x, self.best.result.y if shared and self.problem.has_y else self.begun[1]
        return beside(x) if self.stuck else x, y

    @property
    def stuck(self) -> bool:
        """Whether x stays at a point that is not a solution: a saddle point, a maximiser, a plateau."""
        best = self.best
        return best is not None and best.moved <= STILL * best.certificate.distance * best.size

    @property
    def most(self) -> int:
        """Rounds of a stage."""
        return max([LONGEST // LONGER, *(stage.result.ledger.rounds for stage in self.stages)]) * LONGER

    def go(self) -> None:
        """All stages."""
        for name in self.fits:
            if self.with_method(name):
                return
        self.ended = self.ended or "no further method has a rule for it"

    def with_method(self, name: str) -> bool:
        """Stages of one method; returns whether the call ends there."""
        belief, tried = Belief(), False
        try:
            self.slow = self.compressed(name)
        except ValueError as reason:  # it does not bear the channel
            self.ended = f"{name}: {reason}"
            return False
        while True:
            its = self.planned(name, belief)
            if its is None or (not tried and self.too_large(its.method)):
                return False
            tried = True
            wanted = its.rounds * belief.rounds if its.practical and not its.practical.fades else math.inf
            count = self.budget.rounds(int(min(wanted if wanted < math.inf else belief.horizon, self.most)))
            if count < 1 or self.budget.left() <= 0:
                self.ended = "the budget is used"
                return True
            if len(self.stages) >= STAGES:
                self.ended = f"{STAGES} stages were run"
                return True
            before = self.best
            now = self.stage(its, max(count, 1))
            if now.certificate.solved:
                self.best, self.ended = now, "solved"
                return True
            unjudged = now.certificate.verdict == "not certifiable" and not math.isfinite(now.F)
            if unjudged and self.best is None and belief.failures >= FAILURES:
                self.best = now
                self.ended = "the point reached cannot be certified"
                return True
            changed = self.adapted(belief, its, before, now)
            if now.result.status == "stopped" and self.budget.left() > 0:
                self.ended = "a callback stopped it"
                return True
            if changed is None:
                return False
            belief = changed

    def compressed(self, name: str) -> tuple[float, float]:
        """By how much a channel shortens a method's steps of x and of y."""
        self.slow = 1.0, 1.0
        its = None if self.options.get("channel") is None else self.planned(name, Belief())
        if its is None or its.method is None:
            return self.slow
        options = {key: self.options[key] for key in ("participation", "weights", "channel")}
        return paces(self.problem, its.method, self.data, *self.begun, **options)[:2]

    def planned(self, name: str, belief: Belief) -> Advice | None:
        """The method with its step sizes; None if its rule refuses these constants."""
        while True:
            its = advice(self.fits[name], belief.of(compressed(self.at, *self.slow)), self.reveals)
            if its.practical is None or not can_run(its, self.doubted):
                return None
            needed = expected(its.practical.rate, 0.1 * MARGIN * TARGET)
            count = max(math.ceil(needed), FEWEST) if math.isfinite(needed) else belief.horizon
            if min(count, self.most) <= belief.horizon:
                return replace(its, rounds=float(count))
            belief = replace(belief, horizon=min(count, self.most))  # the horizon of decreasing step sizes

    def too_large(self, method: Method | None) -> bool:
        """Whether one of its rounds sends more, up and down, than the budget allows."""
        if method is None or "bytes_a_round" not in self.budget.limits:
            return False
        x, y = self.begun
        options = {key: self.options[key] for key in ("participation", "weights")}
        sent = amounts(one_round(self.problem, method, self.data, x, y, **options))["bytes"]
        return sent > self.budget.limits["bytes_a_round"]

    def stage(self, its: Advice, count: int) -> Stage:
        """Run and certify."""
        x, y = self.point
        options = {"eval_every": max(1, count // EVALUATIONS), **self.options, "certify": False}
        options["seed"] = (self.options["seed"] + len(self.stages)) % 2**32
        if "seconds" in self.budget.limits:
            options["callbacks"] = (*options.get("callbacks", ()), lambda _: self.budget.left() <= 0)
        assert its.method is not None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                result = solve(self.problem, its.method, self.data, x, y0=y, rounds=count, **options)
                finite = True
            except Diverged as diverged:
                result, finite = diverged.result, False
            result = replace(result, start=self.begun)
            found = self.certified(result)
        F = found.objective if finite and found.verdict != "diverging" else math.inf
        if found.verdict == "not certifiable" and found.objective != found.objective:
            F = math.nan
        moved, size = (float(tree.norm(each)) for each in (tree.sub(result.x, x), result.x))
        stage = Stage(result, found, F, moved, size or 1.0)
        self.budget.used = self.budget.used + result.ledger
        self.stages.append(stage)
        return stage

    def certified(self, result: Result) -> Certificate:
        """The certificate; once the budget's seconds are spent, only that of the first stage."""
        try:
            return certify(result, until=self.budget.until if self.stages else math.inf)
        except OutOfTime:
            nan, words = math.nan, "The budget's seconds were used: fs.certify(result) takes its own time."
            return Certificate(False, "not certifiable", nan, (nan, nan), words)

    def adapted(self, belief: Belief, its: Advice, before: Stage | None, now: Stage) -> Belief | None:
        """The corrections after a stage; None means the next method."""
        risen = not (now.certificate.start if before is None else before.F) >= now.F
        if risen or not math.isfinite(now.F):
            return belief.shorter() if belief.failures < FAILURES else None
        self.best = now
        fades = its.practical is not None and its.practical.fades
        excess = now.certificate.value
        halved = before is None or excess <= HALF * before.certificate.value
        if halved:
            self.measure()
            longer = replace(belief, failures=0, stalls=0, rounds=min(2 * belief.rounds, 16.0))
            return replace(longer, horizon=4 * belief.horizon) if fades else longer
        belief = replace(belief, stalls=belief.stalls + 1)
        if fades:
            return replace(belief, horizon=4 * belief.horizon) if belief.horizon < MOST else None
        if belief.stalls > STALLS:
            return None
        # shorter steps reduce the noise of sampled clients
        shorter = replace(belief, upper=SHORTER * belief.upper, lower=SHORTER * belief.lower)
        if self.at.partial and belief.upper < MOST_SHORTER and self.changes(its, shorter):
            return shorter
        if not belief.kinked and self.falls(its, belief):
            return replace(belief, kinked=True)
        return replace(belief, rounds=4 * belief.rounds) if belief.rounds < 64 else None

    def changes(self, its: Advice, belief: Belief) -> bool:
        """Whether a belief changes the method's steps."""
        other = self.planned(its.name, belief)
        return other is not None and repr(other.method) != repr(its.method)

    def falls(self, its: Advice, belief: Belief) -> bool:
        """Whether the method has a rule for kinks."""
        other = self.planned(its.name, replace(belief, kinked=True))
        return other is not None and other.practical is not None and other.practical.fades

    def measure(self) -> None:
        """Measure the constants again at the current point."""
        x, y = self.point
        found = constants(self.problem, self.data, x, y, weights=self.options["weights"])
        self.budget.used = self.budget.used + cost_of(found)
        self.at = replace(self.at, constants=found)

    def result(self) -> Result:
        """The best point, with the history and the ledger of all stages."""
        if not self.stages:
            raise NoRule(f"'auto' ran nothing: {self.ended}, within the budget {self.budget.limits}.")
        best, last = self.best, self.stages[-1]
        ledger = Ledger()
        for stage in self.stages:
            ledger = ledger + stage.result.ledger
        its = (best or last).result
        if best is None:  # no stage was better than the start
            its = replace(its, x=self.begun[0], y=self.begun[1])
        found = replace(
            its,
            history=_joined([stage.result for stage in self.stages]),
            ledger=ledger,
            seconds=time.perf_counter() - self.budget.began,
            compiling=sum(stage.result.compiling for stage in self.stages),
            seed=self.options["seed"],
            notes=self.words(best or last),
        )
        vars(found)["certificate"] = (best or last).certificate
        return found

    def words(self, final: Stage) -> tuple[str, ...]:
        """A summary of the call, in three lines."""
        constants_ = self.at.constants
        tried = ", ".join(
            f"{type(s.result.method).__name__} {s.result.ledger.rounds} ({s.certificate.verdict})"
            for s in self.stages
        )
        ended = self.ended
        if self.best is None:
            ended += "; no stage ended below the start, and x is the start"
        return (
            f"measured: {constants_.exchanges} exchanges; chosen: {final.result.method!r}",
            f"stages, in rounds: {tried}",
            f"ended: {ended}",
        )


def beside(x: PyTree) -> PyTree:
    """A point close to x, always the same."""
    flat, unravel = ravel_pytree(x)
    away = np.random.default_rng(0).normal(size=flat.size)
    size = float(np.abs(flat).max(initial=0.0)) or 1.0
    return unravel(flat + jnp.asarray(DISTURBED * size * away, flat.dtype))


def _joined(results: list[Result]) -> dict[str, np.ndarray]:
    """The histories, concatenated; counts continue."""
    names = list(dict.fromkeys(name for result in results for name in result.history))
    parts: dict[str, list[np.ndarray]] = {name: [] for name in names}
    passed = dict.fromkeys(BOOKKEEPING, 0.0)
    for k, result in enumerate(results):
        length = len(result.history["round"])
        skip = 1 if k else 0  # the end of a stage is the start of the next one
        for name in names:
            values = np.asarray(result.history.get(name, np.full(length, np.nan)))
            counted = name in passed
            parts[name].append((values + values.dtype.type(passed[name]) if counted else values)[skip:])
        for name in passed:
            passed[name] += float(result.history[name][-1])
    return {name: np.concatenate(values) for name, values in parts.items()}
