"""Why a run is not solved, and the one thing to change: from its history and its method's own numbers.

    v = F's metric in the history, in quarters
    change = v₃ − v₄, of their means, whose noise is estimated from the means of blocks
    left = change ρ/(1 − ρ), what further such quarters would gain, ρ = (v₃ − v₄)/(v₂ − v₃)

| verdict | where |
|---|---|
| diverging | F is above its start, or each quarter reaches farther than the one before |
| on its way | it changes, by more than its noise, and not by nothing beside the excess |
| at the noise floor | it has stopped, and steps are drawn: minibatches, directions, few clients |
| oscillating | it has stopped, and goes to and fro by something beside the excess |
| biased by drift | it has stopped elsewhere: by clients' several steps between averages, or other bias |
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import jax
import numpy as np

from fedstrata.core.method import Method
from fedstrata.solving.certificate import Verdict
from fedstrata.solving.result import Result

if TYPE_CHECKING:
    from fedstrata.advice.certify import Judgement

FEW = 8  # evaluations from which a history tells something
BEHIND = 0.1  # how far clients' own models may be from their optima, relatively
PART = 0.1  # of the excess, or of what was gained: what counts as a change
SURE = 2.5  # standard errors
BLOCKS = 4  # of a quarter, whose means tell its noise
SPREAD = 0.03  # of the excess: how much noise or an oscillation vary at least
MANY = 1e3  # times as many samples: nobody takes them
GROWN = 4.0  # times the start's excess
ROUNDED = 4e-7  # of the metric: below it a float32 does not change


def why_unsolved(found: Judgement, relative: float, run: Result | None, target: float) -> tuple[Verdict, str]:
    """The verdict on a point that is not a solution, and a sentence."""
    close = relative <= target**2 or found.distance <= target
    if found.remarks:
        return "not certifiable", f"{found.remarks[0].capitalize()}: take a method or a start that avoids it."
    if found.outside > target and relative <= target:
        return "on its way", (
            f"x is {found.outside:.2g} of its length outside of its set: project it, or take a smaller eta."
        )
    method = None if run is None else run.known_method
    drawn = () if run is None else _draws(run, method)
    if found.behind > BEHIND and (close or not drawn):
        return "on its way", (
            f"The clients' models are {found.behind:.0%} from their optima: give clients more local steps."
        )
    if run is None:
        return "on its way", "Take further steps from here."
    worse = np.isfinite(found.start) and found.value > found.start + 1e-3 * abs(found.start - found.best)
    above: tuple[Verdict, str] = "diverging", f"F is above its start: divide {_step(method)} by 4."
    if not np.isfinite(found.value) or run.status == "diverged":
        return above
    if method is not None and (lost := _rounded(found, run, method)):
        return "at the noise floor", lost
    words = _of_trace(_metric(run), found.value - found.best + found.left, relative, run, target, drawn)
    # what goes to and fro in wider and wider turns does not oscillate, and what is above all did not drift
    grown = found.value - found.best > GROWN * abs(found.start - found.best)
    lost = grown and (words[0] == "oscillating" or found.value - found.best > GROWN * found.most)
    return above if lost or (worse and words[0] == "on its way") else words


def _of_trace(
    values: np.ndarray, excess: float, relative: float, run: Result, target: float, drawn: tuple[str, ...]
) -> tuple[Verdict, str]:
    """The verdict by the metric over the rounds."""
    few = len(values) < (2 * FEW if drawn else FEW)
    if few or np.ptp(values) <= ROUNDED * np.abs(values).max():
        return "on its way", f"Give about {_more(_over(relative, target), run)} more rounds."
    method = run.known_method
    quarters = np.array_split(values, 4)
    reach = [float(np.abs(q - values[0]).max()) for q in quarters]
    if reach[0] > 0 and all(b > 1.5 * a for a, b in itertools.pairwise(reach)) and values[-1] > values[0]:
        return "diverging", f"Its metric grows from quarter to quarter: divide {_step(method)} by 4."
    name, over = _local(method), _over(relative, target)
    last = np.diff(quarters[-1])
    steady = not drawn and name is None and bool((last < 0).all() or (last > 0).all())
    if steady or _moves(values, quarters, excess, drawn):
        return "on its way", f"Give about {_rounds(values, excess, target, relative, run)} more rounds."
    spread = float(np.std(quarters[-1]))
    if drawn and spread > SPREAD * excess:
        more = f", or take {_nice(over**2)} times as many {drawn[0]}" if over**2 < MANY else ""
        return "at the noise floor", f"Let {_step(method)} decay, or divide it by {_nice(over)}{more}."
    half = values[len(values) // 2 :]
    to_and_fro = np.abs(np.diff(half)).sum() > 3 * abs(half[-1] - half[0])
    if to_and_fro and spread > SPREAD * excess:
        return "oscillating", f"Divide {_step(method)} by 2."
    own = None if method is None else method.bias()
    if own is not None:
        return "biased by drift", own
    if name is not None:
        return "biased by drift", (
            f"Clients differ and take several steps between averages: set {name}=1, or divide "
            f"{_step(method)} by {_nice(over)}."
        )
    if method is not None and method.scheduled(0):
        return "on its way", "Its steps become short too early: let them fall more slowly."
    return "biased by drift", (
        "It has stopped elsewhere, so that further rounds do not help: its steps are biased. Take a smaller "
        "smoothing radius, solve inner problems more accurately, or take another method."
    )


def _moves(values: np.ndarray, quarters: list[np.ndarray], excess: float, drawn: tuple[str, ...]) -> bool:
    """Whether the metric still changes, by more than its noise; that of steps that are drawn has to fall."""
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
    """How many times farther away it is than it should be."""
    return math.sqrt(max(relative, target**2)) / target if np.isfinite(relative) else 10.0


def _metric(run: Result) -> np.ndarray:
    """The history's own trace of F, at the current y; empty where it has none."""
    names = [run.problem.objective, *run.problem.settling] if run.problem is not None else []
    for name in (*names, "objective", "loss", "upper"):
        if name is not None and name in run.history:
            values = np.asarray(run.history[name], float)
            return values[np.isfinite(values)]
    return np.zeros(0)


def _draws(run: Result, method: Method | None) -> tuple[str, ...]:
    """What steps are drawn from, in words: samples, directions, clients."""
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
    """What to do where the values that a step compares differ by less than they are rounded to."""
    if "values" not in method.needs.split() or not found.slope > 0:
        return ""
    given = method.at(run.ledger.rounds).describe()
    name = "mu" if "mu" in given else "eta"
    digits = max(np.finfo(np.asarray(leaf).dtype).eps for leaf in jax.tree.leaves(run.x))
    rounding, width = float(digits) * abs(found.value), given.get(name)
    if not isinstance(width, float) or found.slope * width >= rounding:
        return ""
    return (
        f"Values are rounded to {rounding:.1g} and differ by {found.slope * width:.1g} within {name}="
        f"{width:g}: take {name} of at least {float(f'{10 * rounding / found.slope:.1g}'):g}, or float64."
    )


def _local(method: Method | None) -> str | None:
    """The hyper-parameter that counts local steps whose ends are averaged, where there are several."""
    if method is None:
        return None
    name = method.drifts
    if name is None:
        return None
    return name if np.max(np.asarray(vars(method.at(0))[name])) > 1 else None


def _step(method: Method | None) -> str:
    """The hyper-parameter that is the main variable's step, with its value."""
    given = {} if method is None else method.describe()
    for name in ("gamma", "alpha", "eta_x", "gamma_x", "eta", "eta_l", "gamma_g"):
        if name in given:
            value = given[name]
            return f"{name}={value:g}" if isinstance(value, float) else name
    return "the step size"


def _more(over: float, run: Result) -> str:
    return f"{_nice(max(run.ledger.rounds, 1) * max(math.log2(max(over, 2.0)), 1.0))}"


def _rounds(values: np.ndarray, excess: float, target: float, relative: float, run: Result) -> str:
    """How many rounds are missing, by the rate of the second half."""
    half = values[len(values) // 2 :]
    best = values[-1] - excess
    fall = math.log(max(half[0] - best, 1e-300) / max(half[-1] - best, 1e-300))
    over = relative / target**2 if np.isfinite(relative) else 100.0
    if fall <= 0:
        return _more(10.0, run)
    return _nice(run.ledger.rounds / 2 * math.log(max(over, 2.0)) / fall)


def _nice(number: float) -> str:
    """A round number."""
    if not np.isfinite(number) or number <= 1:
        return "2"
    digits = 10 ** math.floor(math.log10(number))
    return f"{max(2, math.ceil(number / digits) * digits):,.0f}"
