"""A contest of methods: equal budgets, the same starts, splits and seeds; judged by the certificate's F.

rounds of a method ← the budget / the cost of one of its rounds
excess(t) = (F(x_t) − F*)/(F(x_0) − F*),   F* the least that any run or its certificate found
cost to the target: of the first evaluation with excess ≤ target, in rounds, bytes, oracle calls, seconds

pairs: log₁₀ excess_A − log₁₀ excess_B at the end, of the same problem and seed; Wilcoxon's test with Holm's
       correction, t intervals at 1 − 5 %/pairs. Seeds without effect count once.
profile (Dolan & Moré 2002): ρ_A(τ) = the share of runs in which A's cost is at most τ times the least one
"""

from __future__ import annotations

import itertools
import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
from scipy import stats

from fedstrata.advice.certify import certify
from fedstrata.advice.costs import KINDS, budget_of, round_takes
from fedstrata.advice.export import write_benchopt
from fedstrata.advice.plan import plan
from fedstrata.advice.score import By, Score, score_of
from fedstrata.advice.tune import seeds_of, tune
from fedstrata.core.method import Method
from fedstrata.core.problem import Problem
from fedstrata.core.types import PyTree, Weights
from fedstrata.data.federated import FederatedData
from fedstrata.solving.result import Result
from fedstrata.solving.stopping import Progressed
from fedstrata.solving.sweep import sweep
from fedstrata.support import html
from fedstrata.support.lazy import extra
from fedstrata.support.shown import aligned

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Steps: TypeAlias = Literal["given", "planned", "tuned"]
Entrant: TypeAlias = Method | type[Method] | str

POINTS = 40  # evaluations of a run
SEARCH = 50  # a tuning spends this multiple of one run's budget
LEVEL = 0.05


class Case(NamedTuple):
    """A problem with its data and start."""

    problem: Problem
    data: FederatedData | Sequence[FederatedData]
    x0: PyTree
    y0: PyTree = None

    @property
    def datasets(self) -> list[FederatedData]:
        """The data sets: one for all seeds, or one for each."""
        return [self.data] if isinstance(self.data, FederatedData) else list(self.data)


@dataclass(frozen=True, eq=False)
class Entry:
    """One run.

    Attributes:
        case, method, seed: the run's problem, method and seed.
        rounds: the rounds at which the excess was measured.
        excess: the excess at these rounds, relative to the start's; infinite if the run diverged.
        round_takes: the cost of one round, by kind.
        result: the run.
    """

    case: str
    method: str
    seed: int
    rounds: np.ndarray
    excess: np.ndarray
    round_takes: Mapping[str, float]
    result: Result = field(repr=False)

    def cost(self, kind: str, target: float) -> float:
        """The cost of reaching the target; infinite if it was not reached."""
        reached = np.flatnonzero(self.excess <= target)
        return float(self.rounds[reached[0]] * self.round_takes[kind]) if reached.size else math.inf


class Played(NamedTuple):
    """The end of a run: its method, problem and seed, and its last excess."""

    method: str
    case: str
    seed: int
    excess: float


class Pair(NamedTuple):
    """Two methods at the end of their budgets.

    Attributes:
        first, second: the methods.
        decades: the mean of log₁₀ excess of the first minus log₁₀ excess of the second: negative if the first
            is better.
        interval: the interval of this mean, at 95 % for all pairs together.
        p: Wilcoxon's p-value with Holm's correction; NaN for too few different runs.
        runs: the number of pairs of runs that count.
    """

    first: str
    second: str
    decades: float
    interval: tuple[float, float]
    p: float
    runs: int


@dataclass(frozen=True, eq=False)
class Comparison:
    """The result of `compare`; prints as a table.

    Attributes:
        entries: all runs.
        methods: the method of each case's runs, by name.
        kind: the unit of the budget: ``"rounds"``, ``"bytes"``, ``"oracle_calls"`` or ``"seconds"``.
        budget: the amount of it.
        target: the excess that counts as reached.
        pairs: all pairs of methods.
    """

    entries: list[Entry] = field(repr=False)
    methods: dict[str, dict[str, Method]] = field(repr=False)
    kind: str
    budget: float
    target: float
    pairs: list[Pair] = field(repr=False)

    def of(self, method: str) -> list[Entry]:
        """A method's runs."""
        return [entry for entry in self.entries if entry.method == method]

    def profile(self, kind: str = "") -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Performance profiles by cost: method → (τ, share of runs)."""
        costs = {
            name: {(e.case, e.seed): e.cost(kind or self.kind, self.target) for e in self.of(name)}
            for name in self.methods
        }
        runs = list(next(iter(costs.values())))
        least = {run: min(costs[name][run] for name in costs) for run in runs}
        ratios = {
            name: np.sort(
                [spent[run] / least[run] if math.isfinite(spent[run]) else math.inf for run in runs]
            )
            for name, spent in costs.items()
        }
        finite = [r for spent in ratios.values() for r in spent if math.isfinite(r)]
        tau = np.unique([1.0, *finite, 1.1 * max(finite, default=1.0)])
        return {
            name: (tau, np.searchsorted(spent, tau * (1 + 1e-9), side="right") / len(runs))
            for name, spent in ratios.items()
        }

    def _rows(self) -> list[tuple[str, ...]]:
        rows = [("method", "reached", *(f"{kind} to {self.target:g}" for kind in KINDS), "excess at the end")]
        for name in self.methods:
            entries = self.of(name)
            reached = sum(math.isfinite(e.cost("rounds", self.target)) for e in entries)
            costs = [float(np.median([e.cost(kind, self.target) for e in entries])) for kind in KINDS]
            shown = [html.number(cost) if math.isfinite(cost) else "–" for cost in costs]
            end = float(np.median([e.excess[-1] for e in entries]))
            rows.append((name, f"{reached} of {len(entries)}", *shown, html.number(end)))
        return rows

    def _pair_rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("pair", "decades", "95 % for all pairs", "p (Holm)", "runs")]
        for pair in self.pairs:
            low, high = pair.interval
            p = "–" if math.isnan(pair.p) else f"{pair.p:.2g}"
            between = "–" if math.isnan(low) else f"{low:+.2f} to {high:+.2f}"
            rows.append((f"{pair.first} − {pair.second}", f"{pair.decades:+.2f}", between, p, str(pair.runs)))
        return rows

    def __repr__(self) -> str:
        head = f"Comparison: {self.budget:g} {self.kind} for each run, medians"
        return "\n".join([head, *aligned(self._rows()), "", *aligned(self._pair_rows())])

    def _repr_html_(self) -> str:
        return html.table(self._rows()) + html.table(self._pair_rows())

    def plot(self, kind: str = "", path: Any = None) -> Figure:
        """The performance profiles."""
        with extra("lab", "comparison.plot"):
            from fedstrata.lab.report import plot_profiles

        figure = plot_profiles(self.profile(kind), kind or self.kind)
        if path is not None:
            figure.savefig(path)
        return figure

    def report(self, folder: str | os.PathLike[str], title: str = "Comparison", command: str = "") -> Path:
        """Write its page, with the runs, curves, pairs and profiles; returns the page's path."""
        with extra("lab", "comparison.report"):
            from fedstrata.lab.report.contest import write_contest

        return write_contest(self, folder, title, command)

    def to_benchopt(self, folder: str | os.PathLike[str]) -> Path:
        """Write it as a benchopt folder: ``benchopt run FOLDER`` (extra ``benchopt``); returns the path."""
        cases: dict[str, dict[str, Any]] = {}
        for entry in self.entries:
            run, (x0, y0) = entry.result, entry.result.start or (None, None)
            options = {"weights": run.weights, "participation": run.participation}
            given = {"problem": run.problem, "data": run.data, "x0": x0, "y0": y0, "options": options}
            cases.setdefault(entry.case, {"case": entry.case, **given})
        return write_benchopt(cases, self.methods, folder)


def compare(
    problems: Problem | Mapping[str, Sequence[Any]],
    methods: Sequence[Entrant] | Mapping[str, Entrant],
    data: FederatedData | Sequence[FederatedData] | None = None,
    x0: PyTree = None,
    *,
    budget: int | Mapping[str, float],
    y0: PyTree = None,
    seeds: int | Sequence[int] = 10,
    steps: Steps = "given",
    target: float = 1e-2,
    participation: float | int = 1.0,
    weights: Weights = "uniform",
    by: By = "certificate",
    progress: bool = True,
) -> Comparison:
    """Compare methods at equal budgets, with the same starts, splits and seeds.

    Args:
        problems: one problem; or by name ``(problem, data, x0)`` or ``(problem, data, x0, y0)``.
        methods: objects, classes or names; a dictionary with names, if two are of one class.
        data: the data of one problem; or a list of data, one for each seed, with its own split.
        x0: the start of one problem.
        budget: the budget of each run: ``{"rounds": …}``, ``{"bytes": …}``, ``{"oracle_calls": …}`` or
            ``{"seconds": …}``; a number is rounds.
        y0: the start of the second variable.
        seeds: their number, or a list.
        steps: ``"given"``: objects unchanged, classes and names planned; ``"planned"``: all by `fs.plan`;
            ``"tuned"``: all by `fs.tune`, with equal budgets.
        target: the fraction of the start's excess to reach.
        participation: as in `fedstrata.solve`.
        weights: the clients' weights.
        by: the score of points, as in `fs.tune`.
        progress: whether to show bars.

    >>> import fedstrata as fs, numpy as np
    >>> data = fs.FederatedData.from_clients([{"a": np.ones((2, 1))}, {"a": np.zeros((2, 1))}])
    >>> problem = fs.Minimization(lambda x, s: 0.5 * ((x - s["a"]) ** 2).sum())
    >>> methods = {"long": fs.FedAvg(0.5), "short": fs.FedAvg(0.1)}
    >>> found = fs.compare(problem, methods, data, np.zeros(1), budget=20, seeds=2, progress=False)
    >>> [entry.cost("rounds", 0.25) for entry in found.entries]
    [1.0, 1.0, 7.0, 7.0]
    """
    named, cases = _named(methods), _cases(problems, data, x0, y0)
    if steps not in ("given", "planned", "tuned"):
        raise ValueError(f"steps must be 'given', 'planned' or 'tuned', but is {steps!r}.")
    if not 0 < target < 1:
        raise ValueError(f"target must be in (0, 1), but is {target!r}.")
    kind, amount = budget_of(budget)
    drawn = seeds_of(seeds)
    options = {"participation": participation, "weights": weights}
    entries: list[Entry] = []
    chosen: dict[str, dict[str, Method]] = {name: {} for name in named}
    for label, case in cases.items():
        raw = []
        for name, entrant in named.items():
            method = _with_steps(entrant, case, steps, kind, amount, options, by)
            takes = round_takes(case.problem, method, case.datasets[0], case.x0, case.y0, **options)
            rounds = max(1, int(amount / takes[kind]))
            chosen[name][label] = method
            raw.append((name, takes, _traced(case, method, rounds, drawn, options, by, progress)))
        entries += _relative(label, raw, by, shared=len(case.datasets) == 1)
    entries.sort(key=lambda entry: list(named).index(entry.method))
    ends = [Played(entry.method, entry.case, entry.seed, float(entry.excess[-1])) for entry in entries]
    return Comparison(entries, chosen, kind, amount, target, pairs_of(ends, list(named)))


def _cases(problems: Any, data: Any, x0: PyTree, y0: PyTree) -> dict[str, Case]:
    if isinstance(problems, Problem):
        if data is None or x0 is None:
            raise ValueError("compare needs data and x0: fs.compare(problem, methods, data, x0, budget=…).")
        return {type(problems).__name__: Case(problems, data, x0, y0)}
    if not isinstance(problems, Mapping) or not problems:
        raise TypeError(
            "problems must be a problem, or by name (problem, data, x0) or (problem, data, x0, y0)."
        )
    return {str(name): Case(*parts) for name, parts in problems.items()}


def _named(methods: Any) -> dict[str, Entrant]:
    if isinstance(methods, Mapping):
        return {str(name): method for name, method in methods.items()}
    if isinstance(methods, str) or not isinstance(methods, Sequence):
        raise TypeError(
            "compare takes a list of methods, or a dictionary with their names, before the data: "
            f"fs.compare(problem, methods, data, x0, budget=…), but got a {type(methods).__name__}."
        )
    names = [_name(method) for method in methods]
    if len(set(names)) < len(names):
        raise ValueError("Two methods are of one class: give them names, {'short': fs.FedAvg(0.1), …}.")
    if not names:
        raise ValueError("compare needs at least one method.")
    return dict(zip(names, methods, strict=True))


def _name(entrant: Entrant) -> str:
    match entrant:
        case str():
            return entrant
        case type():
            return entrant.__name__
    return type(entrant).__name__


def _with_steps(
    entrant: Entrant, case: Case, steps: Steps, kind: str, amount: float, options: dict[str, Any], by: By
) -> Method:
    """The method with its steps."""
    its: Any = entrant
    if isinstance(entrant, Method):
        if steps == "given":
            return entrant
        its = type(entrant)
    problem, _, x0, y0 = case
    data = case.datasets[0]
    if steps != "tuned":
        return plan(problem, data, x0, y0, its, **options).method
    searching: dict[str, Any] = {"budget": {kind: SEARCH * amount}, "seeds": 2, "by": by, "progress": False}
    return tune(problem, entrant, data, x0, y0=y0, **searching, **options).method


class _Traced(NamedTuple):
    rounds: np.ndarray
    values: list[np.ndarray]  # F, of every seed
    starts: list[float]
    results: list[Result]


def _traced(
    case: Case, method: Method, rounds: int, seeds: list[int], options: dict[str, Any], by: By, progress: bool
) -> _Traced:
    """Run all seeds, and score their points during the runs."""
    problem, data, x0, y0 = case
    shared = len(case.datasets) == 1
    per_seed = case.datasets * len(seeds) if shared else case.datasets
    judged, weights = method.judged_as(problem), options["weights"]
    scores: dict[int, Score] = {}
    for seed_data in per_seed:
        if id(seed_data) not in scores:
            scores[id(seed_data)] = score_of(judged, seed_data, weights, x0, y0, by)
    points: dict[int, list[tuple[int, float]]] = {lane: [] for lane in range(len(seeds))}

    def look(progressed: Progressed) -> None:
        x, y = output_of(method, progressed.state)
        score = scores[id(per_seed[progressed.lane])]
        points[progressed.lane].append((progressed.round, score(x, y)))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = sweep(
            problem, method, data, x0, y0=y0, rounds=rounds, seeds=seeds, callbacks=[look], progress=progress,
            eval_every=max(1, rounds // POINTS), **options,
        )  # fmt: skip
    at = np.array(sorted({r for visited in points.values() for r, _ in visited} | {0, rounds}))
    values = []
    for lane, result in enumerate(results):
        known = dict(points[lane])
        known[0] = scores[id(per_seed[lane])](x0, y0)
        diverged = result.status == "diverged"
        known.setdefault(rounds, math.inf if diverged else scores[id(per_seed[lane])](result.x, result.y))
        values.append(np.array([known.get(int(r), math.inf) for r in at]))
    return _Traced(at, values, [float(curve[0]) for curve in values], results)


def output_of(method: Method, state: Any) -> tuple[PyTree, PyTree]:
    """X and, if the server has it, y."""
    try:
        return method.output(state, None)
    except (AttributeError, TypeError):  # y is in the clients' memory
        return state.x, None


def _relative(
    case: str, raw: list[tuple[str, dict[str, float], _Traced]], by: By, shared: bool
) -> Iterable[Entry]:
    lanes = [
        [(traced.values[lane], traced.results[lane]) for _, _, traced in raw]
        for lane in range(len(raw[0][2].results))
    ]
    if shared:  # all seeds have one F
        least = [_least([run for runs in lanes for run in runs], by)] * len(lanes)
    else:
        least = [_least(runs, by) for runs in lanes]
    for name, takes, traced in raw:
        for best, curve, start, result in zip(
            least, traced.values, traced.starts, traced.results, strict=True
        ):
            way = start - best if start > best else 1.0
            excess = np.maximum((curve - best) / way, 0.0)
            yield Entry(case, name, int(result.seed or 0), traced.rounds, excess, takes, result)


def _least(runs: Sequence[tuple[np.ndarray, Result]], by: By) -> float:
    """The least known F: of some runs on the same samples, and beside the end of the best of them."""
    least = min(float(curve.min()) for curve, _ in runs)
    curve, result = min(runs, key=lambda run: run[0][-1])
    if by == "certificate" and curve[-1] <= curve[0]:  # far above its start, F − excess is rounding
        found = certify(result)
        if math.isfinite(found.value):
            least = min(least, found.objective - found.interval[0])
    return least


def pairs_of(played: Sequence[Played], names: Sequence[str]) -> list[Pair]:
    """All pairs of methods, on the problems and seeds that both have."""
    ends = {(e.method, e.case, e.seed): math.log10(min(max(e.excess, 1e-16), 1e16)) for e in played}
    couples = list(itertools.combinations(names, 2))
    found, ps = [], []
    for a, b in couples:
        differences: list[float] = []
        runs = [(e.case, e.seed) for e in played if e.method == a and (b, e.case, e.seed) in ends]
        for case in dict.fromkeys(case for case, _ in runs):
            decades = [ends[a, case, seed] - ends[b, case, seed] for c, seed in runs if c == case]
            differences += decades if np.ptp(decades) > 1e-6 else decades[:1]  # seeds without effect
        count, mean = len(differences), float(np.mean(differences)) if differences else math.nan
        interval, p = (math.nan, math.nan), math.nan
        if count > 1:
            half = stats.t.ppf(1 - LEVEL / len(couples) / 2, count - 1)
            half *= float(np.std(differences, ddof=1)) / math.sqrt(count)
            interval = mean - half, mean + half
            p = float(stats.wilcoxon(differences).pvalue) if np.any(differences) else 1.0
        ps.append(p)
        found.append(Pair(a, b, mean, interval, p, count))
    return [pair._replace(p=p) for pair, p in zip(found, holm(ps), strict=True)]


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's correction of p-values: p₍ᵢ₎ times the number of p-values that are not smaller, made increasing.

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    order = sorted((i for i, p in enumerate(ps) if not math.isnan(p)), key=lambda i: ps[i])
    corrected, largest = list(ps), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min((len(order) - rank) * ps[i], 1.0))
        corrected[i] = largest
    return corrected
