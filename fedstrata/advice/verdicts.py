"""The reason why a run is not solved, and the one change to make, from its history and hyper-parameters.

    v = F's metric in the history, in quarters; vₖ is the mean of quarter k
    change = v₃ − v₄, with an error estimated from the means of blocks
    left = change ρ/(1 − ρ), the gain of all further such quarters, ρ = (v₃ − v₄)/(v₂ − v₃)

| verdict | condition |
|---|---|
| diverging | F is above its start, or each quarter reaches farther than the one before |
| on its way | the metric changes by more than its error, and by a part of the excess; or y is not solved |
| at the noise floor | it has stopped, and steps are random: minibatches, directions, some of the clients |
| oscillating | it has stopped, and goes up and down by a part of the excess, or x from side to side |
| biased by drift | it has stopped elsewhere: by several local steps of the clients, or other bias |
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from fedstrata.core.method import Method
from fedstrata.solving.certificate import Verdict
from fedstrata.solving.endings import step_sizes
from fedstrata.solving.result import Result
from fedstrata.support.words import described, documentation

if TYPE_CHECKING:
    from fedstrata.advice.certify import Judgement

FEW = 8  # evaluations of the shortest history that is interpreted
LOST = 0.5  # a relative distance of y from its solution that drift does not explain
BEHIND = 0.1  # the largest relative distance of clients' own models from their optima
PART = 0.1  # the least change that counts, as a fraction of the excess or of the gain so far
SURE = 2.5  # standard errors
BLOCKS = 4  # blocks of a quarter, whose means give its error
SPREAD = 0.03  # the least spread of noise or of an oscillation, relative to the excess
MANY = 1e3  # the limit of the proposed increase of samples
GROWN = 4.0  # times the start's excess
FAR = 100  # times the rounds of a run: more rounds are no advice
ROUNDED = 4e-7  # relative to the metric: smaller changes are float32 rounding


def why_unsolved(found: Judgement, relative: float, run: Result | None, target: float) -> tuple[Verdict, str]:
    """The verdict on a point that is not a solution, and a sentence."""
    close = relative <= target**2 or found.distance <= target
    if found.remarks:
        return (
            "not certifiable",
            f"Not certifiable: {found.remarks[0]}; take a method or a start that avoids it.",
        )
    if found.outside > target and relative <= target:
        return "on its way", (
            f"x is {found.outside:.2g} of its length outside of its set: project it, or take a smaller eta."
        )
    method = None if run is None else run.known_method
    drawn = () if run is None else drawn_by(run, method)
    if found.behind > BEHIND and (close or not drawn):
        return "on its way", (
            f"The clients' models are {found.behind:.0%} from their optima: give clients more local steps."
        )
    if found.slope == 0:
        return "on its way", (
            "x is a saddle point or a maximum of F: no gradient leads away from it, so start elsewhere."
        )
    if run is None:
        return "on its way", "Take further steps from here."
    worse = np.isfinite(found.start) and found.value > found.start + 1e-3 * abs(found.start - found.best)
    above: tuple[Verdict, str] = "diverging", f"F is above its start: divide {_step(method)} by 4."
    if not np.isfinite(found.value) or run.status == "diverged":
        return above
    if method is not None and (hidden := _rounded(found, run, method)):
        return "at the noise floor", hidden
    stays, excess = _stays(found, metric_of(run), method), found.value - found.best + found.left
    if stays and _local(method) is None and (method is None or method.bias() is None):
        return "oscillating", f"Divide {_step(method)} by 2."
    words = _of_trace(metric_of(run), excess, relative, run, target, drawn, stays, found.lag)
    # growing oscillations diverge, and so do points above both the start and zero, except for methods that
    # are known to converge elsewhere
    grown = found.value - found.best > GROWN * abs(found.start - found.best)
    biased = words[0] == "biased by drift" and method is not None and method.bias() is not None
    high = found.value - found.best > GROWN * found.most and not biased
    lost = grown and (words[0] == "oscillating" or high)
    return above if lost or (worse and words[0] == "on its way") else words


def _of_trace(
    values: np.ndarray, excess: float, relative: float, run: Result, target: float, drawn: tuple[str, ...],
    stays: bool, lag: float,
) -> tuple[Verdict, str]:  # fmt: skip
    """The verdict by the metric over the rounds."""
    few = len(values) < (2 * FEW if drawn else FEW)
    if few or (_constant(values) and not stays):
        return "on its way", _further(_more(_over(relative, target), run), run)
    method = run.known_method
    quarters = np.array_split(values, 4)
    reach = [float(np.abs(q - values[0]).max()) for q in quarters]
    if reach[0] > 0 and all(b > 1.5 * a for a, b in itertools.pairwise(reach)) and values[-1] > values[0]:
        return "diverging", f"Its metric grows from quarter to quarter: divide {_step(method)} by 4."
    name, over = _local(method), _over(relative, target)
    last = np.diff(quarters[-1])
    steady = not drawn and name is None and bool((last < 0).all() or (last > 0).all())
    if steady or _moves(values, quarters, excess, drawn):
        return "on its way", _further(_rounds(values, excess, target, relative, run), run)
    spread = float(np.std(quarters[-1]))
    if drawn and spread > SPREAD * excess:
        more = f", or take {_nice(over**2)} times as many {drawn[0]}" if over**2 < MANY else ""
        return "at the noise floor", f"Let {_step(method)} decay, or divide it by {_nice(over)}{more}."
    half = values[len(values) // 2 :]
    to_and_fro = np.abs(np.diff(half)).sum() > 3 * abs(half[-1] - half[0])
    if to_and_fro and spread > SPREAD * excess:
        return "oscillating", f"Divide {_step(method)} by 2."
    own = None if method is None else method.bias()
    if lag > (target if name is None and own is None else LOST) and (slow := _slow(method)):
        return "on its way", f"y is {lag:.0%} of its length from the lower level's solution: {slow}."
    if own is not None:
        return "biased by drift", own
    if name is not None:
        return "biased by drift", (
            f"Clients differ and take several steps between averages: set {name}=1, or divide "
            f"{_step(method, 'local')} by {_nice(over)}."
        )
    if method is not None and method.scheduled(0):
        return "on its way", "Its steps become short too early: let them fall more slowly."
    return "biased by drift", (
        "It has stopped elsewhere, so that further rounds do not help: its steps, or its channel, are "
        "biased. Take a smaller smoothing radius, solve inner problems more accurately, clip less, or take "
        "another method."
    )


def _constant(values: np.ndarray) -> bool:
    return bool(np.ptp(values) <= ROUNDED * np.abs(values).max())


def _stays(found: Judgement, values: np.ndarray, method: Method | None) -> bool:
    """Whether the metric is constant although a step along the gradient would change it visibly."""
    step = next((size for size in _steps(method).values() if isinstance(size, float)), 0.0)
    many = len(values) >= FEW and _constant(values)
    return many and step * found.slope**2 > ROUNDED * float(np.abs(values).max())


def _moves(values: np.ndarray, quarters: list[np.ndarray], excess: float, drawn: tuple[str, ...]) -> bool:
    """Whether the metric still changes by more than its error; with random steps, whether it decreases."""
    third, fourth = ([b.mean() for b in np.array_split(q, min(BLOCKS, len(q)))] for q in quarters[2:])
    change = float(np.mean(third) - np.mean(fourth))
    change = change if drawn else abs(change)
    error = math.sqrt(np.var(third, ddof=1) / len(third) + np.var(fourth, ddof=1) / len(fourth))
    if change <= SURE * error:
        return False
    before = abs(float(quarters[1].mean() - quarters[2].mean()))
    left = change * change / (before - change) if before > change else np.inf
    gained = abs(float(values[0] - quarters[3].mean()))
    return change > PART * min(excess, gained) or left > 3 * PART * excess


def _over(relative: float, target: float) -> float:
    """The distance in units of the target."""
    return math.sqrt(max(relative, target**2)) / target if np.isfinite(relative) else 10.0


def metric_of(run: Result) -> np.ndarray:
    """The history of F's metric, at the current y; empty without one."""
    names = [run.problem.objective, *run.problem.settling] if run.problem is not None else []
    for name in (*names, "objective", "loss", "upper"):
        if name is not None and name in run.history:
            values = np.asarray(run.history[name], float)
            return values[np.isfinite(values)]
    return np.zeros(0)


def drawn_by(run: Result, method: Method | None) -> tuple[str, ...]:
    """The random choices of a step, in words: samples, directions, clients."""
    if method is None:
        return ()
    given = method.describe()
    drawn = {
        "samples in a batch": given.get("batch_size") or given.get("server_batch_size"),
        "directions": "values" in method.needs.split(),
        "terms": given.get("inverse") == "neumann",
        "clients in a round": run.participation is not None and run.participation < 1,
    }
    return tuple(word for word, is_drawn in drawn.items() if is_drawn)


def _rounded(found: Judgement, run: Result, method: Method) -> str:
    """The advice if a step compares values that differ by less than their rounding."""
    if "values" not in method.needs.split() or not found.slope > 0:
        return ""
    given = method.at(run.ledger.rounds).describe()
    name = "mu" if "mu" in given else "eta"
    digits = max(np.finfo(np.asarray(leaf).dtype).eps for leaf in jax.tree.leaves(run.x))
    smaller = np.fmin(abs(found.value), abs(found.start))  # a diverging run makes values large
    rounding, width = float(digits * smaller), given.get(name)
    if not isinstance(width, float) or found.slope * width >= rounding:
        return ""
    return (
        f"Values are rounded to {rounding:.1g} and differ by {found.slope * width:.1g} within {name}="
        f"{width:g}: take {name} of at least {float(f'{10 * rounding / found.slope:.1g}'):g}, or float64."
    )


def _local(method: Method | None) -> str | None:
    """The name of the number of local steps, if it is above one and the clients' ends are averaged."""
    if method is None:
        return None
    name = method.drifts
    if name is None:
        return None
    return name if np.max(np.asarray(vars(method.at(0))[name])) > 1 else None


def _steps(method: Method | None, kind: str = "") -> dict[str, Any]:
    """The step sizes, x's first, without the factors of a server's step; or those of a kind, if any."""
    if method is None:
        return {}
    given, words = step_sizes(method), documentation(type(method))
    factors = described("server's step size", given, words)
    named = described(f"{kind} step size", given, words) if kind else []
    return {name: given[name] for name in named or given if name not in factors}


def _step(method: Method | None, kind: str = "") -> str:
    """The first of them, with its value."""
    for name, value in _steps(method, kind).items():
        return f"{name}={value:g}" if isinstance(value, float) else name
    return "the step size"


def _slow(method: Method | None) -> str:
    """The steps to change so that y follows x; empty if y has none."""
    named = [f"{name}={value:g}" for name, value in _steps(method).items() if isinstance(value, float)]
    return f"raise {named[1]}, or lower {named[0]}" if len(named) > 1 else ""


def _further(rounds: float, run: Result) -> str:
    """More rounds, or another method if they would be too many."""
    if rounds <= FAR * max(run.ledger.rounds, 1):
        return f"Give about {_nice(rounds)} more rounds."
    return (
        f"At its pace it takes {_nice(rounds)} more rounds: take longer steps or another method, from "
        'fs.recommend(problem, data, x0), or "auto".'
    )


def _more(over: float, run: Result) -> float:
    return max(run.ledger.rounds, 1) * max(math.log2(max(over, 2.0)), 1.0)


def _rounds(values: np.ndarray, excess: float, target: float, relative: float, run: Result) -> float:
    """The remaining rounds, by the rate of the second half."""
    half = values[len(values) // 2 :]
    best = values[-1] - excess
    fall = math.log(max(half[0] - best, 1e-300) / max(half[-1] - best, 1e-300))
    over = relative / target**2 if np.isfinite(relative) else 100.0
    if fall <= 0:
        return _more(10.0, run)
    return run.ledger.rounds / 2 * math.log(max(over, 2.0)) / fall


def _nice(number: float) -> str:
    """A round number."""
    if not np.isfinite(number) or number <= 1:
        return "2"
    digits = 10 ** math.floor(math.log10(number))
    return f"{max(2, math.ceil(number / digits) * digits):,.0f}"
