"""The certificate: how far a point is from a solution, measured independently of the method.

    F(x)  the objective of the problem's class, with lower levels solved (`fedstrata.advice.objectives`)
    x̂     the end of a search from a point close to x, with exact gradients (`fedstrata.advice.search`)

    excess     between F(x) − F(x̂) and that plus the search's own estimate of F(x̂) − min F
    relative   excess / (F(x0) − F(x̂)), or / (F(0) − F(x̂)) if that is smaller
    distance   ‖x − x̂‖/‖x̂‖

A point is **solved** if its distance is at most `TARGET`, or its relative excess at most TARGET², which is
the same for an isotropic quadratic. Neither depends on the units of the loss or of x. The search starts close
to x, not at x, so that it leaves saddle points, maximisers and kinks that are not minima; a decrease proves
that x is not a solution. The reason why a run is not solved comes from its history
(`fedstrata.advice.verdicts`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import singledispatch
from typing import Any, NamedTuple

import numpy as np

from fedstrata.advice.fault import at_fault
from fedstrata.advice.lower import NotCertifiable, newton_zero
from fedstrata.advice.objectives import (
    Case,
    Maps,
    Objective,
    OutOfTime,
    equations_of,
    objective_of,
)
from fedstrata.advice.precision import double, double_precision
from fedstrata.advice.search import Found, minimise
from fedstrata.advice.selection import judge_selection
from fedstrata.advice.verdicts import BEHIND, why_unsolved
from fedstrata.core.problem import Problem
from fedstrata.core.types import PyTree, Weights
from fedstrata.data.federated import FederatedData
from fedstrata.problems.classes import Selection
from fedstrata.solving.certificate import Certificate
from fedstrata.solving.result import Result
from fedstrata.support.points import ravel

TARGET = 1e-2
NEAR = 0.1  # relative to the excess of the start or of zero: a larger excess is not solved at any distance
AGAIN = 4  # searches after the first one, as long as they decrease F
DISTURBED = 1e-3  # the distance from x at which the search starts, relative to ‖x‖
NOTHING = 1e-9  # relative to the distance from the start: a shorter solution counts as zero
ROUNDED = 1e-12  # relative to a value: a smaller difference is rounding
UNBOUNDED = 1e6  # times the known values: a larger decrease means that F is not bounded below
PULLED = 3e-4  # relative to a step of f alone: the least unit of errors of a selection
DRAWN = "a loss that draws is judged without randomness, where its solution may be another one"
MOST, FEWEST = 1500, 50  # evaluations of F in one search
SECONDS = 30.0  # for all searches, as long as each may have the fewest evaluations


class Judgement(NamedTuple):
    """The measurements at a point.

    Attributes:
        value: F(x), with lower levels solved.
        best: F(x̂) at the best point found.
        left: an estimate of how much lower F can be than that.
        converged: whether the search converged, so that x̂ is a minimiser.
        start: F(x0).
        unit: the unit of relative excesses: F(x0) − F(x̂), or F(0) − F(x̂) if that is smaller.
        most: the larger of the two.
        distance: ‖x − x̂‖/‖x̂‖.
        outside: the distance of x from its set, relative to ‖x‖.
        remarks: reasons, in words, why the point is not a solution whatever F says.
        behind: the relative distance of clients' own models, which are part of the answer, from their optima.
        lag: the relative distance of y from the solution of the lower level; 0 without one.
        notes: further findings.
        calls: evaluations of F with its gradient.
        slope: ‖∇F(x)‖; NaN without an F.
    """

    value: float
    best: float
    left: float
    start: float
    unit: float
    distance: float
    most: float = np.inf
    outside: float = 0.0
    remarks: tuple[str, ...] = ()
    converged: bool = True
    behind: float = 0.0
    notes: tuple[str, ...] = ()
    calls: int = 0
    slope: float = np.nan
    lag: float = 0.0


def certify(
    result: Result | Problem,
    data: FederatedData | None = None,
    x: PyTree = None,
    y: PyTree = None,
    *,
    problem: Problem | None = None,
    weights: Weights | None = None,
    x0: PyTree = None,
    y0: PyTree = None,
    target: float = TARGET,
    until: float = math.inf,
) -> Certificate:
    """Judge a result, ``certify(result)``, or a point, ``certify(problem, data, x, y)``.

    Everything is computed in float64 from all samples; nothing that the method measured is used.

    Args:
        result: a result of any method; or a problem, with data and a point.
        data: the samples; by default the result's.
        x: the point, if a problem is given.
        y: its second variable, if the problem has one: the lower level is solved from there.
        problem: the problem of a loaded result, which does not store it.
        weights: the clients' weights; by default the run's, for a point ``"uniform"``.
        x0: the start to compare with; by default the run's, for a point zero.
        y0: the second variable there.
        target: the accuracy that counts as solved: the relative error of x; its square for values.
        until: the `time.perf_counter` at which to give up.

    Raises:
        OutOfTime: if it takes longer than that.

    >>> import fedstrata as fs, numpy as np
    >>> problem, data, x_star, y_star = fs.quadratic_bilevel(clients=3, n=2, p=3)
    >>> fs.certify(problem, data, x_star, y_star).verdict
    'solved'
    >>> fs.certify(problem, data, x_star + 1.0, y_star).solved
    False
    """
    if not 0 < target < 1:
        raise ValueError(f"target must be in (0, 1), but is {target!r}.")
    run = result if isinstance(result, Result) else None
    try:
        with double_precision():
            case = case_of(result, data, x, y, problem, weights, x0, y0, until)
            found = judge(case.problem, case)
    except NotCertifiable as reason:
        nan = np.nan
        return Certificate(False, "not certifiable", nan, (nan, nan), f"Not certifiable: {reason}.")
    return _certificate(found, run, target, measures=until == math.inf)


def case_of(
    result: Result | Problem,
    data: FederatedData | None = None,
    x: PyTree = None,
    y: PyTree = None,
    problem: Problem | None = None,
    weights: Weights | None = None,
    x0: PyTree = None,
    y0: PyTree = None,
    until: float = math.inf,
) -> Case:
    """The point to judge with its problem; the arguments are those of `certify`."""
    method = None
    if isinstance(result, Result):
        problem, data = problem or result.problem, result.data if data is None else data
        x, y = result.x, result.y
        begun = result.start if result.start is not None else (None, None)
        x0, y0 = begun[0] if x0 is None else x0, begun[1] if y0 is None else y0
        weights = result.weights if weights is None else weights
        method = result.known_method
    elif isinstance(result, Problem):
        problem = result
    if problem is None or data is None or x is None:
        raise ValueError(
            "Give a result, or a problem with data and a point: (problem, data, x, y). A result that was "
            "loaded knows neither problem nor data, and one of sites elsewhere has no data: give problem= "
            "and data=."
        )
    weights = "uniform" if weights is None else weights
    problem.check_weights(weights)
    if data.source is not None:
        raise NotCertifiable("its data comes from a source: if it fits into memory, give data=data.load()")
    judged = problem if method is None else method.judged_as(problem)
    if problem is result:
        train, begun = data.sample_of(), problem.start_x(x)
        problem.check_server(begun, data.sample_of("server"))
        if not problem.has_y:  # a problem with a y is checked when the level is solved
            problem.check(begun, None, train, train if data.valid is None else data.sample_of("valid"))
    start = None if x0 is None else problem.start_x(x0)
    x, y, x0, y0 = map(double, (problem.start_x(x), y, start, y0))
    return Case(judged, data.placed(), weights, x, y, x0, y0, until)


def _certificate(found: Judgement, run: Result | None, target: float, measures: bool) -> Certificate:
    low = max(found.value - found.best, 0.0)
    high = low + found.left
    reach = found.unit + found.left
    relative = high / reach if reach > 0 else np.inf
    near = found.distance <= target and found.converged and high <= NEAR * found.most
    solved = bool(
        (near or relative <= target**2)
        and found.outside <= target
        and found.behind <= BEHIND
        and not found.remarks
    )
    if not np.isfinite(found.value):
        solved = False
    verdict, advice = why_unsolved(found, relative, run, target)
    if solved:
        verdict, advice = "solved", ""
    elif verdict == "diverging" and run is not None and measures:
        advice = at_fault(run) or advice
    return Certificate(
        solved,
        verdict,
        value=(low + high) / 2,
        interval=(low, high),
        advice=advice,
        objective=found.value,
        start=found.start,
        relative=relative,
        distance=found.distance,
        outside=found.outside,
        remarks=found.remarks + found.notes,
        calls={"evaluations": found.calls},
    )


@singledispatch
def judge(problem: Problem, case: Case) -> Judgement:
    """Measure a point, by the problem's class: by a search over F, or by equations if it has no F."""
    maps = equations_of(problem, case)
    return search(objective_of(problem, case), case) if maps is None else equations(maps, case)


@judge.register
def _(problem: Selection, case: Case) -> Judgement:
    """Compare with the best of the optima of h, with both levels' values."""
    found = judge_selection(problem, case.weights, case.data, case.x, 1e-8)
    if found.moved > TARGET:
        raise NotCertifiable(
            "the optima of the primary level were not found: it is not convex, has none, or is so "
            "ill-conditioned that small curvatures cannot be told from none"
        )
    notes = (
        f"h is {found.h - found.h_best:.2g} above its least, f {found.f:.6g} and at best {found.f_best:.6g}",
    )
    judged = _by_distance(case, found.solution, notes=notes)
    # a run that starts at the solution gives no unit, but a step of f alone has a length
    least = PULLED * found.pull
    return judged._replace(
        unit=max(judged.unit, least**2 / 2), distance=min(judged.distance, _ratio(judged, least))
    )


def _ratio(judged: Judgement, length: float) -> float:
    """The distance of `_by_distance`, compared with this length."""
    return math.sqrt(2 * judged.value) / length if length > 0 else math.inf


def equations(maps: Maps, case: Case) -> Judgement:
    """The distance of (x, y) from a zero of maps found from there; F is half the squared distance of x."""
    return _by_distance(case, newton_zero(maps, (case.x, case.y), case.data)[0])


def _by_distance(case: Case, solution: PyTree, **more: Any) -> Judgement:
    """For problems without F: half the squared distance from a solution."""
    x, best = (ravel(each)[0] for each in (case.x, solution))
    x0 = best if case.x0 is None else ravel(case.x0)[0]
    away, size = float(np.linalg.norm(x - best)), _length(best, x0)
    way = float(np.linalg.norm(x0 - best))
    return Judgement(away**2 / 2, 0.0, 0.0, way**2 / 2, size**2 / 2, away / size, **more)


def _length(solution: np.ndarray, x0: np.ndarray) -> float:
    """The unit of distances: the solution's length, or the distance to it if it is zero."""
    length, way = float(np.linalg.norm(solution)), float(np.linalg.norm(solution - x0))
    return length if length > NOTHING * way else way or 1.0


class _Flat:
    """F of flat NumPy vectors with a count of its evaluations, and searches that share a time limit."""

    def __init__(self, objective: Objective, until: float) -> None:
        point, self.unravel = ravel(objective.x)
        self.objective, self.until, self.zero = objective, until, np.zeros(point.size)
        self.calls, self.began, self.took = 0, 0.0, 0.0

    def __call__(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        """The value and the gradient."""
        now = time.perf_counter()
        if now > self.until:
            raise OutOfTime
        value, slope = self.objective.evaluate(self.unravel(x))
        self.calls, self.took = self.calls + 1, time.perf_counter() - now
        return float(value), ravel(slope)[0]

    def onto(self, x: np.ndarray) -> np.ndarray:
        """The projection onto the set of x."""
        project = self.objective.onto
        return x if project is None else ravel(project(self.unravel(x)))[0]

    def minimise(self, x: np.ndarray, **options: Any) -> Found:
        """A search, until the time limit."""
        self.began = self.began or time.perf_counter()
        spare = SECONDS - (time.perf_counter() - self.began)
        most = int(np.clip(spare / max(self.took, 1e-9), FEWEST, MOST))
        onto = None if self.objective.onto is None else self.onto
        return minimise(self, x, onto=onto, most=most, **options)


@np.errstate(over="ignore", invalid="ignore")  # if F is not bounded below
def search(objective: Objective, case: Case) -> Judgement:
    """F at x, at x0, and at the best point beside x."""
    f, flat = _Flat(objective, case.until), ravel(objective.x)[0]
    begun = f.onto(f.zero if objective.x0 is None else ravel(objective.x0)[0])
    inside = f.onto(flat)
    (value, slope), start = f(inside), f(begun)[0]
    origin = f(f.onto(f.zero))[0] if begun.any() else start
    if not np.isfinite(value):
        return Judgement(value, np.nan, np.nan, start, np.nan, np.inf, remarks=("F is not finite at x",))
    away = _beside(inside, begun)
    beside = f(f.onto(inside + away))[0]
    worth = max(min(abs(start - value), abs(origin - value)), abs(beside - value))
    found, remarks = _best(f.minimise, inside, away, value, worth), list(objective.remarks)
    if abs(beside - value) <= ROUNDED * worth and not found.value < value - ROUNDED * worth:
        # F is constant around x: at a minimiser, or on a plateau far from all minimisers; a start shows which
        other = _best(f.minimise, begun, _beside(begun, inside), start, worth)
        if other.value < value - 1e-5 * worth:
            found = other
            remarks.append("F is constant around x, and lower elsewhere")
    known = abs(value) + abs(start) + worth
    if not found.converged and value - found.value > UNBOUNDED * known:
        raise NotCertifiable("F is not bounded below, as far as it was followed")
    best, length = min(found.value, value), _length(found.x, begun)
    if not found.converged:  # any known lower value then counts
        best = float(np.nanmin([best, start, origin]))
    unit = start - best
    if length == float(np.linalg.norm(found.x)) and best + ROUNDED * abs(best) < origin < start:
        unit = origin - best  # relative to a distant start, any excess looks small
    reach = max((each for each in (start, origin) if np.isfinite(each)), default=np.inf) - best
    if reach == beside - best == 0:
        raise NotCertifiable("F has the same value at x, beside it, at the start and at zero")
    if reach <= NOTHING * (beside - best):  # the start and zero are solutions, so a disturbance counts
        unit = reach = beside - best
    lag = _lag(objective, case)
    return Judgement(
        value,
        best,
        found.left,
        start,
        unit,
        float(np.linalg.norm(inside - found.x)) / length,
        most=reach,
        outside=objective.outside / (float(np.linalg.norm(flat)) or 1.0),
        remarks=tuple(remarks),
        converged=found.converged,
        behind=lag if case.problem.personal else 0.0,
        lag=lag,
        notes=(*objective.notes, *([DRAWN] if any(level.draws for level in case.problem.levels) else [])),
        calls=f.calls,
        slope=float(np.linalg.norm(slope)),
    )


def _beside(x: np.ndarray, begun: np.ndarray, number: int = 0) -> np.ndarray:
    """A short step in a fixed random direction."""
    size = max(float(np.linalg.norm(x)), float(np.linalg.norm(x - begun))) or 1.0
    away = np.random.default_rng(number).normal(size=x.size)
    return away * (DISTURBED * size / np.linalg.norm(away))


def _best(
    minimise: Callable[..., Found], x: np.ndarray, away: np.ndarray, value: float, worth: float
) -> Found:
    """The end of a search from close to x, and of further ones from its end as long as F decreases.

    At kinks, and if the units of x differ much, a search may end too early. It is accepted if a second one,
    with another first step and measured curvature, ends at the same value.
    """
    length, enough = float(np.linalg.norm(away)), 1e-7 * worth + 1e-14 * abs(value)
    first = minimise(x + away, length=length, enough=enough)
    for again in range(1, AGAIN + 1):
        turned = _beside(first.x, x, again) * (10.0 if again % 2 else 1.0)
        other = minimise(first.x + turned, length=float(np.linalg.norm(turned)), enough=enough, measured=True)
        apart = first.value - other.value
        if not apart > 1e-5 * worth + 1e-12 * abs(value):
            # two searches with the same final value have converged, even if neither gradient vanished
            same = abs(apart) <= 1e-5 * worth + 1e-12 * abs(value)
            left = min(first.left, abs(apart)) if same and not first.converged else first.left
            return first._replace(left=left, converged=first.converged or same)
        first = other
    return first._replace(converged=False)


def _lag(objective: Objective, case: Case) -> float:
    """The relative distance of y from the solution of the lower level."""
    if objective.solved is None:
        return 0.0
    y, solution = (ravel(each)[0] for each in (case.y, objective.solved.y))
    return (
        float(np.linalg.norm(y - solution)) / (float(np.linalg.norm(solution)) or 1.0)
        if y.size == solution.size
        else 0.0
    )


def register(cls: type[Problem]) -> Callable[[Any], Any]:
    """Decorate ``measure(problem, case) -> Objective`` for your own problem class."""
    return objective_of.register(cls)


certify.register = register  # type: ignore[attr-defined]
certify.Objective = Objective  # type: ignore[attr-defined]
