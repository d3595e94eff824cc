"""The best hyper-parameters of a method: compiled sweeps around the plan, by successive halving.

    space ← every planned step size times 3^−k … 3^k, or the user's values
    lanes ← the grid, or a scrambled Sobol sequence if the grid is larger than `LANES`
    rounds ← R/9, R/3, R, but at least `FEWEST`:   run and judge all lanes, keep the best third
    price ← the best lane with each number three times as large, and a third as large, at R; if one of these
            is better, it becomes the best, at most `MOVES` times

All lanes have the same seeds. Lanes that differ in real numbers only share a compiled program. Lanes that
diverged, or are not better than the start, are dropped first. Points are judged by the certificate's F with
lower levels solved: the history, at the current y, would choose unsolved lower levels.
"""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np
from scipy.stats import qmc

from fedstrata.advice.costs import budget_of, round_takes
from fedstrata.advice.plan import plan
from fedstrata.advice.score import By, Score, score_of
from fedstrata.core.method import Method
from fedstrata.core.problem import Problem
from fedstrata.core.types import PyTree, Weights
from fedstrata.data.federated import FederatedData
from fedstrata.problems.measured import NoRule
from fedstrata.solving.result import Result
from fedstrata.solving.sweep import sweep
from fedstrata.support import html
from fedstrata.support.lazy import extra
from fedstrata.support.words import suggest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Values: TypeAlias = dict[str, Any]
Space: TypeAlias = Mapping[str, Sequence[Any]]

FACTOR = 3.0
WIDE, NARROW = 3, 2  # powers of it on either side: for one number, and for two
LANES = 27  # at first
RUNGS = (9, 3, 1)  # divisors of the rounds
BATCH = 9  # lanes that Optuna proposes at a time
FEWEST = 20  # rounds of the first lanes
MOVES = 4
ROUNDS = 1_000  # without a plan


@dataclass(frozen=True)
class Trial:
    """One lane.

    Attributes:
        values: its values of the searched hyper-parameters.
        method: the method with them.
        rounds: the rounds of its run.
        scores: the score of each seed; infinite if it diverged.
    """

    values: Values
    method: Method
    rounds: int
    scores: tuple[float, ...]
    results: list[Result] = field(repr=False, compare=False)

    @property
    def score(self) -> float:
        """The seeds' mean."""
        return float(np.mean(self.scores))


@dataclass(frozen=True)
class Tuned:
    """The result of `tune`; prints as a table.

    Attributes:
        method: the best method.
        rounds: the rounds of the last runs.
        score: its score, the mean over the seeds; smaller is better.
        start: the start's score.
        trials: all lanes, ordered by decreasing rounds, then by score.
        price: hyper-parameter → the factors by which the excess over the best score grows with a third of the
            value, and with three times the value; infinite if the run diverges, NaN if it was not tried.
        edges: the hyper-parameters whose best value is at the end of the space.
        results: the results of the best method, one for each seed.
    """

    method: Method
    rounds: int
    score: float
    start: float
    trials: tuple[Trial, ...] = field(repr=False)
    price: dict[str, tuple[float, float]]
    edges: tuple[str, ...]
    results: list[Result] = field(repr=False)

    @property
    def certificate(self) -> Any:
        """The certificate of the best method's first run."""
        return self.results[0].certificate

    def _rows(self) -> list[tuple[str, ...]]:
        names = list(self.trials[0].values)
        rows = [("rounds", *names, "score")]
        for trial in self.trials:
            values = (html.number(v) if isinstance(v, float) else str(v) for v in trial.values.values())
            rows.append((str(trial.rounds), *values, html.number(trial.score)))
        return rows

    def __repr__(self) -> str:
        lines = [
            f"{self.method!r}",
            f"{self.rounds:,} rounds, score {self.score:.4g} (start {self.start:.4g})",
        ]
        for name, (less, more) in self.price.items():
            lines.append(f"{name}: {_of(less)} at a third of it, {_of(more)} at three times it")
        if self.edges:
            lines.append(f"at the end of the space: {', '.join(self.edges)}; widen it")
        if not self.score < self.start:
            lines.append("no lane is better than the start")
        return "Tuned(\n  " + ",\n  ".join(lines) + ",\n)"

    def _repr_html_(self) -> str:
        return html.table(self._rows(), left=0)

    def plot(self, *names: str, path: Any = None) -> Figure:
        """A heat map of the scores over two hyper-parameters, or a line over one.

        With more than two, each place shows the best score over the others.
        """
        with extra("lab", "tuned.plot"):
            from fedstrata.lab.report import plot_trials

        known = list(self.trials[0].values)
        shown = list(names) or known[:2]
        if unknown := [name for name in shown if name not in known]:
            raise ValueError(f"{unknown[0]!r} was not searched{suggest(unknown[0], known)}")
        figure = plot_trials([(trial.values, trial.score) for trial in self.trials], shown[:2])
        if path is not None:
            figure.savefig(path)
        return figure


def _of(factor: float) -> str:
    if math.isnan(factor):
        return "not tried"
    return f"{factor:.3g} times the excess" if math.isfinite(factor) else "diverges"


def tune(
    problem: Problem,
    method: type[Method] | Method | str,
    data: FederatedData,
    x0: PyTree,
    space: Space | None = None,
    budget: int | Mapping[str, float] | None = None,
    *,
    y0: PyTree = None,
    seeds: int | Sequence[int] = 3,
    participation: float | int = 1.0,
    weights: Weights = "uniform",
    by: By = "certificate",
    storage: str | None = None,
    progress: bool = True,
) -> Tuned:
    """Search for a method's hyper-parameters.

    Args:
        problem: any problem.
        method: a class or its name, which starts from `fedstrata.plan`'s step sizes; or an object.
        data: the clients' samples.
        x0: the start.
        space: hyper-parameter → the values to try, ``{"gamma": [0.1, 0.3], "H": [1, 5]}``; by default the
            planned step sizes times 3^−3 … 3^3, for two or more 3^−2 … 3^2.
        budget: for all lanes together, as ``{"rounds": …}``, ``{"bytes": …}``,
            ``{"oracle_calls": …}`` or ``{"seconds": …}``; a number is rounds. By default the last lanes have
            the planned rounds. Rounds are fitted to seconds without compiling; no sweep begins later.
        y0: the start of the second variable.
        seeds: their number, or a list; the same for all lanes.
        participation: as in `fedstrata.solve`.
        weights: the clients' weights.
        by: ``"certificate"``: F with lower levels solved; ``"validation"``: the loss on the validation
            samples; or a function of ``(x, y)``, smaller is better.
        storage: such as ``"sqlite:///tuning.db"``: Optuna proposes the lanes, and remembers earlier calls
            (extra ``tune``); for large spaces.
        progress: whether to show bars.

    Raises:
        NoRule: if the method has neither a plan nor a space.

    >>> import fedstrata as fs, numpy as np
    >>> data = fs.FederatedData.from_clients([{"a": np.ones((2, 1))}, {"a": np.zeros((2, 1))}])
    >>> problem = fs.Minimization(lambda x, s: 0.5 * ((x - s["a"]) ** 2).sum())
    >>> space = {"gamma": [0.01, 0.1, 1.0, 3.0]}
    >>> found = fs.tune(problem, fs.FedAvg, data, np.zeros(1), space, budget=400, seeds=1, progress=False)
    >>> found.method.gamma
    1.0
    """
    drawn = seeds_of(seeds)
    if not drawn:
        raise ValueError("tune needs at least one seed.")
    options = {"participation": participation, "weights": weights}
    begin, rounds = _begin(problem, method, data, x0, y0, space, options)
    searched = dict(space) if space is not None else _around(begin)
    _check_space(begin, searched)
    lanes = LANES if storage is not None else min(LANES, math.prod(len(v) for v in searched.values()))
    if budget is not None:
        rounds = _affordable(problem, begin, data, x0, y0, budget, lanes, len(drawn), options)
    score = score_of(begin.judged_as(problem), data, weights, x0, y0, by)
    seconds = budget.get("seconds", math.inf) if isinstance(budget, Mapping) else math.inf
    until = time.perf_counter() + seconds
    trying = _Trying(problem, data, x0, y0, drawn, score, options, progress, until)
    start = score(x0, y0)
    if storage is None:
        found = _halving(trying, [_with(begin, v) for v in _lanes(searched)], rounds, start)
    else:
        found = _proposed(trying, begin, searched, rounds, storage)
    found.sort(key=lambda trial: (-trial.rounds, trial.score))
    best = found[0]
    return _told(trying, best, found, searched, rounds, start)


@dataclass(frozen=True)
class _Trying:
    """The common arguments of all lanes."""

    problem: Problem
    data: FederatedData
    x0: PyTree
    y0: PyTree
    seeds: list[int]
    score: Score
    options: dict[str, Any]
    progress: bool
    until: float

    @property
    def late(self) -> bool:
        """Whether the time is spent."""
        return time.perf_counter() > self.until

    def runs(self, methods: Sequence[Method], rounds: int) -> list[list[Result]]:
        """The results of every method, one for each seed."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results = sweep(
                self.problem, methods, self.data, self.x0, y0=self.y0, rounds=rounds, seeds=self.seeds,
                eval_every=rounds, progress=self.progress, **self.options,
            )  # fmt: skip
        count = len(self.seeds)
        return [results[i : i + count] for i in range(0, len(results), count)]

    def __call__(self, lanes: Sequence[tuple[Values, Method]], rounds: int) -> list[Trial]:
        """Run and score lanes; lanes of one structure share a program."""
        found: dict[int, Trial] = {}
        groups: dict[Any, list[int]] = {}
        for i, (_, method) in enumerate(lanes):
            groups.setdefault(jax.tree.structure(method), []).append(i)
        for group in groups.values():
            for i, runs in zip(group, self.runs([lanes[i][1] for i in group], rounds), strict=True):
                found[i] = Trial(*lanes[i], rounds, tuple(self.judged(run) for run in runs), runs)
        return [found[i] for i in range(len(lanes))]

    def judged(self, run: Result) -> float:
        """The run's score."""
        return math.inf if run.status == "diverged" else self.score(run.x, run.y)


def _begin(
    problem: Problem, method: Any, data: FederatedData, x0: PyTree, y0: PyTree, space: Any, options: Any
) -> tuple[Method, int]:
    """A method with all its step sizes, and its expected rounds."""
    if isinstance(method, Method):
        return method, ROUNDS
    try:
        planned = plan(problem, data, x0, y0, method, **options)
    except NoRule:
        if space is None or isinstance(method, str):
            raise
        return method(**{name: values[0] for name, values in space.items()}), ROUNDS
    return planned.method, planned.rounds


def _around(begin: Method) -> dict[str, list[float]]:
    """Powers of three around the real numbers without a default, the step sizes."""
    steps = {
        name: float(value)
        for name, value in _numbers(begin.describe()).items()
        if value > 0 and not hasattr(type(begin), name)
    }
    if not steps:
        raise ValueError(f"{begin!r} has no step that is one number: give space={{name: values}}.")
    reach = WIDE if len(steps) == 1 else NARROW
    powers = [FACTOR**k for k in range(-reach, reach + 1)]
    return {name: [value * power for power in powers] for name, value in steps.items()}


def _check_space(begin: Method, space: Space) -> None:
    known = list(begin.hyperparameters)
    for name, values in space.items():
        if name not in known:
            raise ValueError(f"{type(begin).__name__} has no hyper-parameter {name!r}{suggest(name, known)}")
        if isinstance(values, str) or not isinstance(values, Iterable) or not len(values):
            raise ValueError(f"space[{name!r}] must be a sequence of values to try, but is {values!r}.")
    if not space:
        raise ValueError("The space is empty: give the values to try, {'gamma': [0.01, 0.1]}.")


def _with(begin: Method, values: Values) -> tuple[Values, Method]:
    return values, replace(begin, **values)  # type: ignore[type-var]


def _lanes(space: Space) -> list[Values]:
    """The grid, or places of it from a Sobol sequence if it is large."""
    lists = list(space.values())
    total = math.prod(map(len, lists))
    if total <= LANES:
        return [dict(zip(space, values, strict=True)) for values in itertools.product(*lists)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a number that is not a power of two
        places = qmc.Sobol(len(lists), rng=0).random(LANES)
    chosen = {
        tuple(int(u * len(values)) for u, values in zip(place, lists, strict=True)): None for place in places
    }
    middle = tuple(len(values) // 2 for values in lists)  # the plan itself
    return [
        {name: values[i] for (name, values), i in zip(space.items(), at, strict=True)}
        for at in dict.fromkeys([middle, *chosen])
    ]


def _halving(trying: _Trying, lanes: list[tuple[Values, Method]], rounds: int, start: float) -> list[Trial]:
    ended: list[Trial] = []
    for part in RUNGS:
        now = min(max(rounds // part, FEWEST), rounds)
        trials = sorted(trying(lanes, now), key=lambda trial: trial.score)
        keep = max(1, math.ceil(len(trials) / 3))
        if part == 1 or trying.late:
            return [*ended, *trials]
        going = [trial for trial in trials[:keep] if trial.score < start] or trials[:1]
        ended += [trial for trial in trials if trial not in going]
        lanes = [(trial.values, trial.method) for trial in going]
    return ended


def _proposed(trying: _Trying, begin: Method, space: Space, rounds: int, storage: str) -> list[Trial]:
    """Lanes that Optuna proposes, in batches; its storage has earlier calls."""
    with extra("tune", "fs.tune(storage=…)"):
        import optuna
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        study_name=f"{type(begin).__name__}, {rounds} rounds", storage=storage, load_if_exists=True
    )
    found: list[Trial] = []
    for _ in range(LANES // BATCH):
        asked = [study.ask() for _ in range(BATCH)]
        lanes = [
            _with(begin, {n: a.suggest_categorical(n, list(v)) if not _real(v) else a.suggest_float(
                n, min(v), max(v), log=min(v) > 0) for n, v in space.items()})
            for a in asked
        ]  # fmt: skip
        for ask, trial in zip(asked, trying(lanes, rounds), strict=True):
            failed = not math.isfinite(trial.score)
            state = optuna.trial.TrialState.FAIL if failed else None
            study.tell(ask, None if failed else trial.score, state=state)
            found.append(trial)
    if study.best_trial.number not in {trial.number for trial in asked}:
        found.append(trying([_with(begin, dict(study.best_params))], rounds)[0])
    return found


def _real(values: Sequence[Any]) -> bool:
    return all(isinstance(value, float) for value in values) and len(values) > 1


def _told(trying: _Trying, best: Trial, found: list[Trial], space: Space, rounds: int, start: float) -> Tuned:
    """The best lane, and the price of a wrong value."""
    names = list(_numbers(best.values))
    beside: list[Trial] = []
    for _ in range(0 if trying.late else MOVES):
        known = {_key(trial.values): trial for trial in found if trial.rounds == rounds}
        asked = list(_neighbours(best, names))
        new = trying([lane for lane in asked if _key(lane[0]) not in known], rounds)
        found += new
        known |= {_key(trial.values): trial for trial in new}
        beside = [known[_key(values)] for values, _ in asked]
        lower = min(beside, key=lambda trial: trial.score, default=best)
        if not lower.score < best.score:
            break
        best = lower
    at_last = [trial.score for trial in found if trial.rounds == best.rounds]
    least = min(at_last)
    least -= (
        1e-3 * (start - least) if math.isfinite(start) and start > least else 0.0
    )  # smaller differences do not count
    price: dict[str, tuple[float, float]] = {}
    for name in names:
        ratio = {
            trial.values[name] > best.values[name]: (trial.score - least) / ((best.score - least) or math.inf)
            for trial in beside
            if trial.values[name] != best.values[name]
        }
        price[name] = ratio.get(False, math.nan), ratio.get(True, math.nan)
    edges = tuple(
        name
        for name in names
        if len(space[name]) > 2 and not min(space[name]) < best.values[name] < max(space[name])
    )
    found.sort(key=lambda trial: (-trial.rounds, trial.score))
    return Tuned(best.method, best.rounds, best.score, start, tuple(found), price, edges, best.results)


def _key(values: Values) -> str:
    """The values, up to rounding."""
    return repr([*{**values, **{name: f"{v:.6g}" for name, v in _numbers(values).items()}}.values()])


def _neighbours(best: Trial, names: list[str]) -> Iterator[tuple[Values, Method]]:
    """Each number a third and three times as large."""
    for name in names:
        for factor in (1 / FACTOR, FACTOR):
            value = best.values[name] * factor
            if _allowed(best.method, name, value):
                yield {**best.values, name: value}, replace(best.method, **{name: value})  # type: ignore[type-var]


def _allowed(method: Method, name: str, value: float) -> bool:
    try:
        method.hyperparameters[name].check("", name, value)
    except (TypeError, ValueError):
        return False
    return True


def _affordable(
    problem: Problem, begin: Method, data: FederatedData, x0: PyTree, y0: PyTree,
    budget: int | Mapping[str, float], lanes: int, seeds: int, options: dict[str, Any],
) -> int:  # fmt: skip
    """The rounds of the last lanes for which all lanes together stay within the budget."""
    kind, amount = budget_of(budget)
    total = amount / round_takes(problem, begin, data, x0, y0, **options)[kind]
    # three rungs of lanes/9 full runs each; at the end two for each number, and one more
    shares = sum(math.ceil(lanes / 3**k) / part for k, part in enumerate(RUNGS)) + 1
    shares += 2 * len(_numbers(begin.describe()))
    rounds = int(total / (shares * seeds))
    if rounds < 1:
        raise ValueError(
            f"The budget is too small: {lanes} lanes with {seeds} seeds need {shares * seeds:.0f} rounds at "
            f"least, and it allows {total:.0f}. Give a smaller space, fewer seeds or more."
        )
    return rounds


def seeds_of(seeds: int | Sequence[int]) -> list[int]:
    """The seeds of runs; a number n stands for 0 … n − 1."""
    return list(range(seeds)) if isinstance(seeds, int) else [int(seed) for seed in seeds]


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The names of those that are real numbers."""
    return {name: value for name, value in values.items() if isinstance(value, float)}
