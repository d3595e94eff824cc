"""The league: every method on every problem that it fits, with steps from its rule and from tuning.

A cell is a problem, a method and where its steps come from; its runs are instances of the problem, whose data
is drawn (or what is held out of it) by their number. Each run may spend the same number of exchanges. Points
on the way are judged by F of the certificate, in float64 and with lower levels solved:

    excess(t) = (F(x_t) − F*)/(F(x_0) − F*),   F* from a search of the certificate's that begins at x_0

The steps of a rule are those of `fs.plan`, measured at the start of every instance. Tuned are steps of the
first instance, by `fs.tune`, which may spend fifty times a run's rounds; the other instances take them as
they are. Methods with an objective of their own (the worst client, a power of the losses, personal models)
are judged by it, and compared with those of the same objective.
"""

from __future__ import annotations

import functools
import math
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import fedstrata as fs
from fedstrata.advice.certify import judge
from fedstrata.advice.compare import SEARCH, output_of
from fedstrata.advice.league import kind
from fedstrata.advice.lower import NotCertifiable
from fedstrata.advice.objectives import Case as Judged
from fedstrata.advice.precision import double_precision
from fedstrata.advice.recommend import advice, conditions
from fedstrata.advice.score import score_of
from fedstrata.advice.tune import tune
from fedstrata.core.method import Method
from fedstrata.core.problem import Problem
from fedstrata.lab.experiments.base import Experiment, Setting
from fedstrata.lab.report import Column, PlotSpec, RunRecord, TableSpec
from fedstrata.lab.report.records import read_runs
from fedstrata.problems.measured import Conditions
from fedstrata.solving.stopping import Diverged, Progressed
from reproductions._league_problems import LIKE, PROBLEMS, Case
from reproductions._league_table import TARGET, findings, write

POINTS = 100  # at which a run is judged
FEW = 20  # rounds that tell what one sends
LONGEST = 20_000  # rounds


class Steps(NamedTuple):
    """A method with its steps, or why there are none."""

    method: Method | None
    why: str = ""


class Ground(NamedTuple):
    """What the runs on an instance are judged by: F, its value at the start, its least one."""

    score: Any
    start: float
    least: float


@functools.cache
def measured(problem: str, instance: int) -> Conditions:
    """An instance's constants at its start."""
    case = PROBLEMS[problem](instance)
    return conditions(case.problem, case.data, case.x0, case.y0)


@functools.cache
def ground(problem: str, judged: Problem, instance: int) -> Ground:
    """F of an instance; its least value is found by the certificate's search from the start."""
    _, data, x0, y0 = PROBLEMS[problem](instance)
    if judged.has_y and y0 is None:  # a personal model, which begins at the server's
        y0 = x0
    score = score_of(judged, data, "uniform", x0, y0)
    with double_precision():
        x, y = (jax.tree.map(lambda leaf: np.asarray(leaf, float), start) for start in (x0, y0))
        x = judged.start_x(x)
        found = judge(judged, Judged(judged, data.placed(), "uniform", x, y, x, y))
    return Ground(score, score(x0, y0), found.best)


def planned(problem: str, method: str, instance: int, rounds: int) -> Steps:
    """The steps of the method's rule for a horizon."""
    at = replace(measured(problem, instance), rounds=rounds)
    its = advice(fs.applicable(at.problem)[method], at)
    return Steps(its.method, "" if its.method is not None else "; ".join(its.reasons))


def quietly(case: Case, method: Method, rounds: int, **options: Any) -> fs.Result:
    """A run without warnings and certificate; of one that diverges what there was."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return fs.solve(
                case.problem, method, case.data, case.x0, y0=case.y0, rounds=rounds, progress=False,
                certify=False, default_metrics=False, **options,
            )  # fmt: skip
        except Diverged as error:
            return error.result


def rounds_for(case: Case, method: Method, exchanges: int) -> int:
    """How many rounds the budget of exchanges pays for."""
    sent = quietly(case, method, FEW).history["exchanges"]
    each = float(sent[-1] - sent[-2]) if len(sent) > 1 else float(sent[-1])
    return int(np.clip(exchanges / max(each, 1.0), 1, LONGEST))


@functools.cache
def tuned(problem: str, method: str, rounds: int) -> Steps:
    """The first instance's best steps, around those of the rule."""
    begin, case = planned(problem, method, 0, rounds), PROBLEMS[problem](0)
    if begin.method is None:
        return begin
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = tune(
                case.problem, begin.method, case.data, case.x0, y0=case.y0, seeds=1, progress=False,
                budget={"rounds": SEARCH * rounds},
            )  # fmt: skip
    except ValueError as reason:  # steps that fall are functions, not numbers
        return Steps(begin.method, str(reason))
    return Steps(found.method)


def play(problem: str, name: str, steps: str, instance: int, exchanges: int) -> RunRecord:
    """One run, judged on the way and certified at its end."""
    case = PROBLEMS[problem](instance)
    first = planned(problem, name, instance, 1000)
    coordinates = {"problem": problem, "steps": steps}
    if first.method is None:
        return out(name, coordinates, instance, kind(case.problem), first.why)
    rounds = rounds_for(case, first.method, exchanges)
    its = planned(problem, name, instance, rounds) if steps == "planned" else tuned(problem, name, rounds)
    method = its.method
    assert method is not None
    judged = method.judged_as(case.problem)
    coordinates["objective"] = kind(judged)
    try:
        at = ground(problem, judged, instance)
    except (ValueError, NotCertifiable) as reason:
        return out(name, coordinates, instance, coordinates["objective"], f"not judged: {reason}")
    points: dict[int, float] = {0: at.start}

    def look(now: Progressed) -> None:
        points[now.round] = at.score(*output_of(method, now.state))

    every = max(1, rounds // POINTS)
    result = quietly(case, method, rounds, seed=instance, eval_every=every, callbacks=[look])
    points.setdefault(int(result.history["round"][-1]), at.score(result.x, result.y))
    history = {key: result.history[key] for key in ("round", "exchanges", "oracle_calls")}
    history["bytes"] = result.history["bytes_up"] + result.history["bytes_down"]
    spent = max(result.seconds - result.compiling, 0.0)
    history["time"] = spent * history["round"] / max(history["round"][-1], 1)
    way = at.start - at.least
    values = np.array([points.get(int(r), math.nan) for r in history["round"]])
    history["excess"] = np.maximum((values - at.least) / (way if way > 0 else 1.0), 0.0)
    kept = np.isfinite(history["excess"])
    result = replace(result, history={key: series[kept] for key, series in history.items()})
    if result.status != "diverged":
        _ = result.certificate
    return RunRecord.of(result, name, seed=instance, setting=coordinates)


def out(name: str, setting: dict[str, str], instance: int, objective: str, why: str) -> RunRecord:
    """The record of a method that did not take part."""
    history = {key: np.arange(2) for key in ("round", "exchanges", "oracle_calls", "bytes", "time")}
    history["excess"] = np.array([1.0, math.inf])
    return RunRecord(
        name, {**setting, "objective": objective}, instance, history, {}, 0.0, name,
        {"verdict": "no rule", "advice": why},
    )  # fmt: skip


def build(s: Setting) -> list[RunRecord]:
    """The runs of a cell, an instance each."""
    return [play(s.problem, s.method, s.steps, instance, s.exchanges) for instance in range(s.instances)]


def fitting() -> list[dict[str, list[Any]]]:
    """The grid: of every problem the methods that fit it."""
    blocks = []
    for problem, like in LIKE.items():
        names = [fit.name for fit in fs.applicable(like) if not fit.via]
        blocks.append({"problem": [problem], "method": sorted(names), "steps": ["planned", "tuned"]})
    return blocks


def reach(at: str, title: str, form: str = "") -> Column:
    """A column: what it takes to the target."""
    return Column("excess", "reach", title, form, better="low", target=TARGET, at=at)


EXPERIMENT = Experiment(
    name="league",
    title="The league: every method on every problem that it fits",
    description=(
        "What every method spends, in rounds, exchanges, bytes, oracle calls and seconds, until the excess "
        f"of its F is {TARGET:g} of the start's, with steps by its rule and tuned, at equal budgets of "
        "exchanges."
    ),
    parameters={"instances": 10, "exchanges": 1000},
    grid=fitting(),
    build=build,
    records=True,
    seeds=1,
    table=TableSpec(
        (
            reach("round", "rounds"),
            reach("exchanges", "exchanges"),
            reach("bytes", "bytes", "bytes"),
            reach("oracle_calls", "oracle calls"),
            reach("time", "seconds"),
            Column("excess", title="excess at the end", better="low"),
        ),
        rows=("problem", "objective", "steps", "label"),
    ),
    plots=(PlotSpec("excess", x="exchanges", log_y=True, panels="problem"),),
    findings=findings,
    needs=("indo_rct", "dialysis", "schools", "mnist", "adult"),
    fallback={
        "problem": [
            "least squares",
            "heart",
            "digits",
            "quadratic bilevel",
            "heart, penalties",
            "own ridge regressions",
            "own deviations",
            "quadratic minimax",
            "heart, AUC",
            "least norm",
            "KL risk",
            "semideviation",
            "linear sequences",
            "personal regressions",
            "Cournot game",
        ]
    },
    quick={
        "problem": ["least squares"],
        "method": ["FedAvg", "SCAFFOLD"],
        "steps": ["planned"],
        "instances": 1,
    },
    full_time="hours on two cores, by --shard on many",
)

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    stored = [(folder / name).read_text("utf-8") for name in ("runs.csv", "history.csv")]
    print(*write(read_runs(stored[0], stored[1]), " ".join(sys.argv[2:])), sep="\n")
