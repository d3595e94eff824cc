"""The expected cost of a certificate: compilation, and passes over all samples.

    seconds ≈ compilation, unless this process has judged such a problem before
            + evaluations of F × samples × the time of one sample's oracle in the run

The run measures the machine's speed. `solve` certifies automatically if that is affordable;
`fedstrata.solving.certificate` keeps the account.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Hashable

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.advice.certify import certify
from fedstrata.advice.objectives import OutOfTime
from fedstrata.core import tree
from fedstrata.problems.classes import Selection
from fedstrata.solving.certificate import Certificate
from fedstrata.solving.result import Result

MOST_JUDGED = 64  # remembered problems and shapes
# The most seconds of compiling on two cores: F and its gradient; that through a lower level; limits.
ONE_LEVEL, TWO_LEVELS, LIMITS = 0.6, 4.5, 5.5
EVALUATIONS = 60  # of F, plus one for each entry of x, up to
MOST_EVALUATIONS = 500
PASSES = 30  # over all samples, in an evaluation that solves a lower level
OVERHEAD = 3e-4  # the least seconds of one evaluation

_judged: OrderedDict[Hashable, float] = OrderedDict()  # seconds without compiling


def price(result: Result) -> float:
    """The expected seconds of a result's certificate; infinite if it cannot be computed."""
    problem, data = result.problem, result.data
    if problem is None or data is None or data.source is not None:
        return math.inf
    if (known := _known(result)) is not None:
        return known
    two = problem.has_y
    cold = LIMITS if isinstance(problem, Selection) else TWO_LEVELS if two else ONE_LEVEL
    calls, samples = max(result.ledger.oracle_calls, 1), int(data.sizes.sum())
    one = max(result.seconds - result.compiling, 0.0) / calls
    evaluations = min(EVALUATIONS + tree.dimension(result.x), MOST_EVALUATIONS)
    work = evaluations * (OVERHEAD + samples * one * (PASSES if two else 1))
    return max(cold, result.compiling * (2 if two else 0.5)) + work


def certified_within(result: Result, seconds: float) -> Certificate | None:
    """The certificate, if it is expected to take at most these seconds; None if not, or if it fails."""
    if price(result) > seconds:
        return None
    began = time.perf_counter()
    try:
        return remembered(result, until=began + seconds)
    except OutOfTime:
        _remember(result, time.perf_counter() - began)
    except Exception:  # a result must not be lost because it could not be judged
        _remember(result, math.inf)
    return None


def remembered(result: Result, until: float = math.inf) -> Certificate:
    """The certificate; its time without compilation is remembered for the next one."""
    began, before = time.perf_counter(), _compiled[0]
    found = certify(result, until=until)
    _remember(result, time.perf_counter() - began - (_compiled[0] - before))
    return found


def _key(result: Result) -> Hashable:
    shapes = [(np.shape(leaf), str(jnp.result_type(leaf))) for leaf in jax.tree.leaves((result.x, result.y))]
    method = result.known_method
    judged = result.problem if method is None else method.judged_as(result.problem)
    return judged, result.weights, tuple(shapes), result.data.form()


def _known(result: Result) -> float | None:
    """The seconds of the last certificate of such a problem; None if its programs are not compiled."""
    try:
        return _judged.get(_key(result))
    except TypeError:  # a set with arrays has no hash, so its programs are not kept
        return None


def _remember(result: Result, seconds: float) -> None:
    try:
        _judged[_key(result)] = seconds
    except TypeError:
        return
    while len(_judged) > MOST_JUDGED:
        _judged.popitem(last=False)


_compiled = [0.0]


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
    if event.startswith("/jax/core/compile"):
        _compiled[0] += duration_secs


jax.monitoring.register_event_duration_secs_listener(_listen)
