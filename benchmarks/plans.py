"""How well plans predict, how often their steps solve, and whether the first recommendation is a good one.

    python -m benchmarks.plans [--seeds 2] [--first 300] [--x64] [--list] [--methods A,B] [NAME …]
    python -m benchmarks.plans --cases | --reproductions [--list] [--methods A,B] [NAME …]

Every method that fits a problem gets its steps from `fedstrata.plan`'s rule, and runs for up to four times
the rounds that the plan expects (2,000, where it expects none). *Solved* is an x within 1 % of the solution,
or an excess within 10⁻⁴ of the start's; of a method for another objective the certificate says it. *Measured*
is the first round at which x is within 1 %, *predicted* what the plan says for that. The first of
`fedstrata.recommend` is *right* where no more than one other method comes within 1 % in fewer exchanges.
Numbers are medians over the problems, in brackets the 10 % and 90 % quantiles; *theory* is what the method's
theorem promises for the same accuracy.

The problems are those of `benchmarks.verdicts` and `benchmarks.auto`, and three whose clients have inner
variables of their own, with all clients in a round.
``--cases`` takes those of `fedstrata.testing.cases`, whose solutions "auto" finds and a certificate confirms,
``--reproductions`` every problem of the papers' experiments (in the size of `--quick`) that is not too large
to run all methods on. Many of these are not convex and have several solutions: there the measure is F, not x:
its excess over the least that "auto" finds, relative to the start's, is to fall below 1 %.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedstrata as fs
from benchmarks.auto import CLASSES, Clients
from benchmarks.verdicts import FAMILIES, Rng, Trial, flat, unit
from fedstrata.advice.constants import operations
from fedstrata.advice.recommend import ANOTHER, Advice, conditions, expected, ranked, start
from fedstrata.advice.score import score_of
from fedstrata.advice.theorems import Theory, theory
from fedstrata.lab.experiments import registry
from fedstrata.lab.experiments.errors import ExperimentError
from fedstrata.lab.experiments.networked import task_of
from fedstrata.lab.experiments.runner import prepare
from fedstrata.testing import all_cases

CLOSE = 1e-2
LONGER = 4  # times the expected rounds
MOST, UNKNOWN, FEWEST = 20_000, 2_000, 50  # rounds
SEARCH = 60.0  # seconds that "auto" looks for the least F of a reproduction
LONGEST = 60.0  # seconds of a run there
LARGEST = 2e10  # operations to measure constants
LOOKS, LOOKS_ON_HOST = 1000, 100  # evaluations of a run
EVERY = {name: build for name, build in FAMILIES.items() if name != "worst_client"}  # AFL's own objective
EVERY |= {build.__name__: build for both in CLASSES.values() for build in both}


def local(build: Callable[[Rng], Trial]) -> Callable[[Rng], Trial]:
    """Register a family whose clients have inner variables of their own."""
    EVERY[build.__name__] = build
    return build


@local
def own_fits(rng: Rng) -> Trial:
    """Client i's y_i is its ridge regression, drawn to x; the upper level compares it with a target."""
    n, c, k = int(rng.integers(2, 5)), unit(rng), Clients.draw(rng, 6)
    own = k.split(a=k.each(rng, n), b=k.each(rng), t=k.each(rng, n, own=1.0))
    inverse = [np.linalg.inv(each["a"].T @ each["a"] / len(each["b"]) + np.eye(n)) for each in own]
    plain = [i @ (each["a"].T @ each["b"]) / len(each["b"]) for i, each in zip(inverse, own, strict=True)]
    away = [each["t"].mean(0) - p for each, p in zip(own, plain, strict=True)]
    hessian = sum(q * i @ i for q, i in zip(k.share, inverse, strict=True)) + 0.1 * np.eye(n)
    slope = sum(q * i @ each for q, i, each in zip(k.share, inverse, away, strict=True))
    best = np.linalg.solve(hessian, slope)
    problem = fs.Bilevel(
        lambda x, y, S: c * (((y - S["t"]) ** 2).sum() + 0.1 * x @ x) / 2,
        lambda x, y, S: ((S["a"] @ y - S["b"]) ** 2 + ((x - y) ** 2).sum()) / 2,
        same_samples=True, local=True,
    )  # fmt: skip
    data = fs.FederatedData.from_clients(own)
    return Trial(problem, data, np.full(n, 2.0), best, {}, np.zeros(n), options=k.options)


@local
def own_heads(rng: Rng) -> Trial:
    """One function of a common x and of the clients' y_i, which ridge regressions draw to x."""
    n, c, k = int(rng.integers(2, 5)), unit(rng), Clients.draw(rng, 6)
    own = k.split(a=k.each(rng, n), b=k.each(rng))
    inverse = [np.linalg.inv(each["a"].T @ each["a"] / len(each["b"]) + np.eye(n)) for each in own]
    slopes = [i @ (each["a"].T @ each["b"]) / len(each["b"]) for i, each in zip(inverse, own, strict=True)]
    hessian = np.eye(n) - sum(q * i for q, i in zip(k.share, inverse, strict=True))
    best = np.linalg.solve(hessian, sum(q * each for q, each in zip(k.share, slopes, strict=True)))

    def f(x: Any, y: Any, S: Any) -> Any:
        return c * ((S["a"] @ y - S["b"]) ** 2 + ((x - y) ** 2).sum()) / 2

    problem = fs.Bilevel(f, f, same_samples=True, local=True)
    data = fs.FederatedData.from_clients(own)
    return Trial(problem, data, np.full(n, 2.0), best, {}, np.zeros(n), options=k.options)


@local
def own_means(rng: Rng) -> Trial:
    """The clients' own squared residuals of mean equations, 1/m Σ ½ ‖E_i[A] x − E_i[b]‖²."""
    n, c, k = int(rng.integers(2, 5)), unit(rng), Clients.draw(rng)
    own = k.split(A=np.eye(n) + 0.2 * k.each(rng, n, n), b=k.each(rng, n))
    means = [(each["A"].mean(0), each["b"].mean(0)) for each in own]
    hessian = sum(q * A.T @ A for q, (A, _) in zip(k.share, means, strict=True))
    best = np.linalg.solve(hessian, sum(q * A.T @ b for q, (A, b) in zip(k.share, means, strict=True)))
    problem = fs.Composition([lambda x, S: S["A"] @ x - S["b"], lambda u, S: c * u @ u / 2], local=True)
    return Trial(problem, fs.FederatedData.from_clients(own), rng.normal(size=n), best, {}, options=k.options)


@dataclass
class Ran:
    """One method on one problem.

    Attributes:
        name: the method's.
        predicted, measured: rounds to within 1 %; infinite where not known, or not reached.
        theory: rounds that its theorem promises for 1 %; infinite where it promises none.
        exchanges: until then.
        solved: whether it is, at the end.
        own: whether the method solves the problem, not another.
    """

    name: str
    predicted: float
    measured: float
    exchanges: float
    solved: bool
    own: bool
    theory: float


def distance(trial: Trial) -> Any:
    """A metric: how far x is from the solution, relative to that; of a trial with an F, its excess."""
    if trial.x_star is None:
        return fs.on_host(lambda x, y: trial.F((x, y)))
    solution = flat(getattr(trial.x_star, "x", trial.x_star))
    best, length = jnp.asarray(solution), float(np.linalg.norm(solution))

    def away(x: Any, y: Any) -> Any:
        at = jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(getattr(x, "x", x))])
        return jnp.linalg.norm(at - best) / length

    return away


def run(trial: Trial, its: Advice, away: Any, seed: int, promised: Theory | None) -> Ran:
    """For as long as the plan says, and longer."""
    assert its.practical is not None
    needed = expected(its.practical.rate, CLOSE)
    known = math.isfinite(needed) and not its.practical.fades
    rounds = int(np.clip(LONGER * needed, FEWEST, MOST)) if known else UNKNOWN
    every = max(1, rounds // (LOOKS_ON_HOST if trial.x_star is None else LOOKS))
    own = ANOTHER not in its.reasons
    options = {"y0": trial.y0, "seed": seed, "progress": False, "certify": False, "default_metrics": False}
    options |= {"metrics": {"away": away}, "eval_every": every, "rounds": rounds, **trial.options}
    if trial.x_star is None:
        end = time.perf_counter() + LONGEST
        options |= {"callbacks": [lambda progressed: time.perf_counter() > end]}
    try:
        result = fs.solve(trial.problem, its.method, trial.data, trial.x0, **options)
    except fs.Diverged as diverged:
        result = diverged.result
    far = np.asarray(result.history["away"])
    within = np.flatnonzero(far <= CLOSE)
    at = float(result.history["round"][within[0]]) if len(within) else math.inf
    each = result.ledger.exchanges / max(result.ledger.rounds, 1)
    if trial.x_star is None:
        solved = bool(far[-1] <= CLOSE) if own else fs.certify(result).solved
    else:
        solved = trial.truth(result.x) == "right" if own else fs.certify(result).solved
    return Ran(its.name, needed if known else math.inf, at, at * each, solved, own,
               math.inf if promised is None else promised.rounds)  # fmt: skip


def trials(names: list[str], seeds: range) -> Iterator[tuple[str, int, Trial]]:
    """The random problems."""
    for name in names:
        for seed in seeds:
            yield name, seed, EVERY[name](np.random.default_rng([seed, *name.encode()]))


def of_cases() -> Iterator[tuple[str, int, Trial]]:
    """The problems of `fedstrata.testing.cases`, each once, whose solutions are looked for."""
    seen: list[Any] = []
    for case in all_cases():
        if any(case.problem is other for other in seen):
            continue
        seen.append(case.problem)
        found = searched(case.problem, case.data, case.x0, case.y0)
        if found is not None:
            yield case.name, 0, Trial(case.problem, case.data, case.x0, found, {}, case.y0)


def of_reproductions(names: list[str]) -> Iterator[tuple[str, int, Trial]]:
    """The problems of the papers' experiments: of each, one for every class and shape of x."""
    for name in names or registry.names():
        try:
            settings = prepare(registry.find(name), quick=True).experiment.settings
            tasks = [task_of(registry.find(name), setting) for setting in settings if setting.seed == 0]
        except (ExperimentError, ValueError, OSError, ImportError) as reason:
            print(f"{name}: left out, {str(reason)[:100]}", flush=True)
            continue
        seen: set[Any] = set()
        for task in tasks:
            x0, y0 = start(task.problem, task.data, task.x0, task.y0)
            key = type(task.problem), jax.tree.structure(x0), tuple(map(np.shape, jax.tree.leaves(x0)))
            if key in seen:
                continue
            seen.add(key)
            try:
                work = operations(task.problem, task.data, x0, y0)
            except TypeError as reason:  # an outer level that takes inner values
                print(f"{name}: left out, {reason}", flush=True)
                continue
            if work > LARGEST:
                print(f"{name}: left out, {work:.0e} operations to measure its constants", flush=True)
                continue
            weights = task.options.get("weights", "uniform")
            trial = by_value(Trial(task.problem, task.data, x0, None, {}, y0, options={"weights": weights}))
            if trial is not None:
                yield f"{name}, {type(task.problem).__name__}", 0, trial
            else:
                print(f"{name}: left out, it is not solved", flush=True)


def by_value(trial: Trial) -> Trial | None:
    """The trial with F's excess over the least found, relative to the start's; None if it is not solved."""
    problem, data, x0, y0 = trial.problem, trial.data, trial.x0, trial.y0
    weights = trial.options["weights"]
    try:
        score = score_of(problem, data, weights, x0, y0)
        options = {"y0": y0, "weights": weights, "progress": False, "budget": {"seconds": SEARCH}}
        found = fs.solve(problem, "auto", data, x0, **options)
    except ValueError as reason:
        print(reason)
        return None
    begun, reached = score(x0, y0), score(found.x, found.y)
    least = reached - min(max(found.certificate.value, 0.0), 0.1 * abs(begun - reached))
    if not found.certificate.solved:
        return None
    return replace(trial, F=lambda point: (score(*point) - least) / (begun - least))


def searched(problem: Any, data: Any, x0: Any, y0: Any) -> Any:
    """A solution, by runs of "auto" until it is certified; None where none is."""
    try:
        result = fs.solve(problem, "auto", data, x0, y0=y0, progress=False, budget={"rounds": 50_000})
    except ValueError:
        return None
    return result.x if result.certificate.solved else None


def compared(trial: Trial, seed: int, methods: list[str]) -> tuple[list[Ran], list[Advice]]:
    """All methods (or those named) on one problem, in the order of `fedstrata.recommend`."""
    weights = trial.options.get("weights", "uniform")
    at = conditions(trial.problem, trial.data, trial.x0, trial.y0, weights=weights, rounds=UNKNOWN)
    order = ranked(at)
    away = distance(trial)
    ran = [
        run(trial, its, away, seed, theory(its.fit.method, at, CLOSE))
        for its in order
        if its.practical is not None and (not methods or its.name in methods)
    ]
    return ran, order


def is_right(order: list[Advice], runs: list[Ran]) -> bool | None:
    """Whether the first is among the two that need fewest exchanges; None where none reaches the solution."""
    reached = {its.name: its.exchanges for its in runs if its.own and math.isfinite(its.exchanges)}
    if not reached or not order or order[0].avoid or order[0].practical is None:
        return None if not reached else False
    mine = reached.get(order[0].name, math.inf)
    return sum(other < mine for other in reached.values()) <= 1


def table(rows: dict[str, list[Ran]]) -> str:
    """One line for each method."""
    lines = [
        "| method | problems | solved | rounds predicted | measured | measured/predicted | theory/measured |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in sorted(rows, key=str.lower):
        runs = rows[name]
        both = [r for r in runs if math.isfinite(r.predicted) and 0 < r.measured < math.inf]
        reached = [r.measured for r in runs if math.isfinite(r.measured)]
        predicted, measured = (
            np.median([r.predicted for r in both] or [np.nan]),
            np.median(reached or [np.nan]),
        )
        ratios = np.array([r.measured / r.predicted for r in both]) if both else np.array([np.nan])
        low, middle, high = np.quantile(ratios, [0.1, 0.5, 0.9])
        spread = f"{middle:.2g} ({low:.2g} to {high:.2g})" if both else "–"
        shown = [f"{value:.3g}" if value == value else "–" for value in (predicted, measured)]
        solved = sum(r.solved for r in runs)
        promised = [
            r.theory / r.measured for r in runs if math.isfinite(r.theory) and 0 < r.measured < math.inf
        ]
        factor = f"{np.median(promised):.2g}" if promised else "–"
        lines.append(f"| {name} | {len(runs)} | {solved} | {' | '.join(shown)} | {spread} | {factor} |")
    return "\n".join(lines)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first", type=int, default=300, help="the first seed")
    parser.add_argument("--x64", action="store_true")
    parser.add_argument("--cases", action="store_true", help="the problems of fedstrata.testing.cases")
    parser.add_argument("--reproductions", action="store_true", help="the problems of the experiments")
    parser.add_argument("--list", action="store_true", help="print every run")
    parser.add_argument("--methods", default="", help="only these, with commas between")
    parser.add_argument("names", nargs="*", default=[])
    asked = parser.parse_args()
    jax.config.update("jax_enable_x64", asked.x64)
    warnings.simplefilter("ignore")
    rows: dict[str, list[Ran]] = defaultdict(list)
    first: list[tuple[str, bool | None]] = []
    drawn = trials(asked.names or list(EVERY), range(asked.first, asked.first + asked.seeds))
    if asked.cases or asked.reproductions:
        drawn = of_cases() if asked.cases else of_reproductions(asked.names)
    for name, seed, trial in drawn:
        began = time.perf_counter()
        runs, order = compared(trial, seed, list(filter(None, asked.methods.split(","))))
        for its in runs:
            rows[its.name].append(its)
        right = is_right(order, runs)
        first.append((name, right))
        if asked.list:
            for its in runs:
                print(
                    f"    {its.name}: predicted {its.predicted:.0f}, measured {its.measured:.0f} rounds, "
                    f"{its.exchanges:.0f} exchanges, {'solved' if its.solved else 'not solved'}"
                )
            for each in order:
                if each.practical is None:
                    print(f"    {each.name}: {'; '.join(each.reasons)}")
        print(
            f"{name} {seed}: first {order[0].name}, {right}, {time.perf_counter() - began:.0f} s", flush=True
        )
    print(f"\n{table(rows)}\n")
    counted = [right for _, right in first if right is not None]
    print(f"first choice among the two best: {sum(counted)} of {len(counted)}")


if __name__ == "__main__":
    main()
