"""Why a run is not solved, and the one thing to change: from its history and its method's own numbers.

    last = F's metric in the last quarter of the history, gained = its fall from the start

| verdict | where |
|---|---|
| diverging | it ended above its start, or each quarter reaches farther than the one before |
| oscillating | it has stopped falling, and goes up and down by much of its height above the best |
| at the noise floor | it has stopped falling, and steps are drawn: minibatches, directions, few clients |
| biased by drift | it has stopped falling, and clients take several steps between two averages |
| on its way | it still falls, or there is nothing to tell by |
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstrata.core.method import Method
from fedstrata.solving.certificate import Verdict
from fedstrata.solving.result import Result

if TYPE_CHECKING:
    from fedstrata.advice.certify import Judgement

FEW = 8  # evaluations from which a history tells something
BEHIND = 0.1  # how far clients' own models may be from their optima, relatively
SETTLED = 0.1  # of the excess: what a quarter of the run may still gain where it has stopped
LOCAL = ("H", "K", "I", "tau")  # steps of a client between two averages


def why_unsolved(found: Judgement, relative: float, run: Result | None, target: float) -> tuple[Verdict, str]:
    """The verdict on a point that is not a solution, and a sentence."""
    if found.remarks:
        return "not certifiable", f"{found.remarks[0].capitalize()}: take a method or a start that avoids it."
    if found.behind > BEHIND:
        return "on its way", (
            f"The clients' models are {found.behind:.0%} from their optima: give clients more local steps."
        )
    if found.outside > target and relative <= target:
        return "on its way", (
            f"x is {found.outside:.2g} of its length outside of its set: project it, or take a smaller eta."
        )
    if run is None:
        return "on its way", "Take further steps from here."
    method = run.method if isinstance(run.method, Method) else None
    excess = found.value - found.best + found.left
    worse = np.isfinite(found.start) and found.value > found.start + 1e-3 * abs(found.start - found.best)
    if worse or not np.isfinite(found.value):
        return "diverging", f"F is above its start: divide {_step(method)} by 4."
    values = _metric(run)
    over = math.sqrt(max(relative, target**2)) / target if np.isfinite(relative) else 10.0
    if values is None or len(values) < FEW:
        return "on its way", f"Give about {_more(over, run)} more rounds."
    quarters = np.array_split(values, 4)
    reach = [float(np.abs(q - values[0]).max()) for q in quarters]
    if reach[0] > 0 and all(b > 1.5 * a for a, b in itertools.pairwise(reach)) and values[-1] > values[0]:
        return "diverging", f"Its metric grows from quarter to quarter: divide {_step(method)} by 4."
    falling = float(quarters[-2].mean() - quarters[-1].mean())
    swing = float(np.abs(np.diff(quarters[-1])).mean())
    rises = float((np.diff(quarters[-1]) > 0).mean())
    random = _is_random(run, method)
    if falling > SETTLED * excess and falling > 0:
        return "on its way", f"Give about {_rounds(values, excess, target, relative, run)} more rounds."
    if random:
        return "at the noise floor", (
            f"Divide {_step(method)} by {_nice(over)}, let it decay, or take {_nice(over**2)} times larger "
            "batches."
        )
    if 0.2 < rises < 0.95 and swing > 0.05 * excess:
        return "oscillating", f"Divide {_step(method)} by 2."
    if (name := _local(method)) is not None:
        return "biased by drift", (
            f"Clients differ and take several steps between averages: set {name}=1, or divide "
            f"{_step(method)} by {_nice(over)}."
        )
    return "on its way", f"Give about {_more(over, run)} more rounds, or multiply {_step(method)} by 2."


def _metric(run: Result) -> np.ndarray | None:
    """The history's own trace of F, at the current y."""
    names = [run.problem.objective, *run.problem.settling] if run.problem is not None else []
    for name in (*names, "objective", "loss", "upper"):
        if name is not None and name in run.history:
            values = np.asarray(run.history[name], float)
            return values[np.isfinite(values)]
    return None


def _is_random(run: Result, method: Method | None) -> bool:
    """Whether steps are drawn: minibatches, directions, or some of the clients."""
    if method is None:
        return False
    given = method.describe()
    some = run.participation is not None and run.participation < 1
    return bool(given.get("batch_size") or method.needs.startswith("function values") or some)


def _local(method: Method | None) -> str | None:
    """The hyper-parameter that counts local steps, where there are several."""
    given = {} if method is None else method.describe()
    for name in LOCAL:
        if np.max(np.asarray(_number(given.get(name)))) > 1:
            return name
    return None


def _number(value: Any) -> Any:
    return value if isinstance(value, int | float | list) else 1


def _step(method: Method | None) -> str:
    """The hyper-parameter that is the main variable's step, with its value."""
    given = {} if method is None else method.describe()
    for name in ("gamma", "alpha", "eta", "eta_l", "gamma_g"):
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
