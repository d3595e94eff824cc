"""Survival analysis of censored times: hazards in intervals, Cox's model, Kaplan–Meier curves, concordance.

A sample is ``{"x": input, "time": t, "y": event}``: ``y`` is 1 if the event happened at t, and 0 if the
follow-up ended at t without it (censored). Intervals ``(0, c_1], (c_1, c_2], …`` are given by their ends c;
times beyond the last end count as censored there.

    hazard        a model of the hazard in every interval; its loss is a mean over samples, for any method
    cox           the partial likelihood, with risk sets within a batch
    counts        events and patients at risk per interval, which can be added over clients
    kaplan_meier  the survival curve of such counts
    concordance   how often the patient with the larger risk has the earlier event
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core.types import Array, PyTree
from fedstrata.models.model import Model, check, of_functions, squares


class Counts(NamedTuple):
    """Events and patients at risk in every interval."""

    events: np.ndarray
    at_risk: np.ndarray


def _ends(cuts: Sequence[float]) -> tuple[float, ...]:
    ends = tuple(map(float, cuts))
    if not ends or ends[0] <= 0 or any(b <= a for a, b in itertools.pairwise(ends)):
        raise ValueError(f"cuts must be the ends of intervals, positive and increasing, but are {cuts!r}.")
    if not math.isfinite(ends[-1]):
        raise ValueError("The last interval must have a finite end, at which later times count as censored.")
    return ends


def hazard(features: int, cuts: Sequence[float], lam: float = 0.0) -> Model:
    """Proportional odds of the event in every interval: ``logit h_k = θ_k + uᵀw``, plus ``λ/2 ‖w‖²``.

    A sample's loss is its negative log-likelihood: ``−log(1 − h_j)`` for every interval that it survived,
    including that of its censoring, and ``−log h_k`` for the interval of its event. The parameters are
    ``{"theta": (intervals,), "w": (features,)}``; ``apply`` returns the logits of all intervals, which
    `survival` turns into a curve.

    Args:
        features: the length of an input.
        cuts: the ends of the intervals.
        lam: the factor λ of the weight decay.

    >>> model = hazard(2, cuts=(12, 24))
    >>> x = model.init(0)  # all hazards are one half
    >>> round(float(model.loss(x, {"x": np.zeros(2), "time": 20.0, "y": 1}) / np.log(2)), 6)
    2.0
    """
    check("hazard", features=features, lam=lam)
    return _hazard(features, _ends(cuts), lam)


@functools.cache
def _hazard(features: int, ends: tuple[float, ...], lam: float) -> Model:
    def init(rng: np.random.Generator) -> PyTree:
        return {"theta": jnp.zeros(len(ends)), "w": jnp.zeros(features)}

    def apply(x: PyTree, u: Any) -> Any:
        return x["theta"] + jnp.ravel(u) @ x["w"]

    def loss(x: PyTree, sample: PyTree) -> Any:
        logits = apply(x, sample["x"])
        k, died = interval(ends, sample["time"], sample["y"])
        steps = jnp.arange(len(ends))
        # −log(1 − h) = softplus(logit), −log h = softplus(−logit)
        survived = jax.nn.softplus(logits)
        value = jnp.sum(jnp.where(steps < k, survived, 0))
        value += jnp.where(died, jax.nn.softplus(-logits[k]), survived[k])
        return value + lam / 2 * squares(x["w"]) if lam else value

    def correct(x: PyTree, sample: PyTree) -> Any:
        raise TypeError("A hazard model does not predict classes: use `fs.models.survival.concordance`.")

    return of_functions(init, apply, loss, lambda logits: logits, correct, "numbers")


def interval(ends: Sequence[float], time: Any, event: Any) -> tuple[Array, Array]:
    """The index of the interval of a time, and whether the event was in it."""
    bounds = jnp.asarray(ends)
    k = jnp.sum(bounds < time)
    return jnp.minimum(k, len(bounds) - 1), (jnp.asarray(event) > 0) & (k < len(bounds))


def survival(logits: Any) -> Array:
    """The probabilities to survive each interval, from the logits of the hazards (on the last axis)."""
    return jnp.exp(-jnp.cumsum(jax.nn.softplus(jnp.asarray(logits)), axis=-1))


def cox(x: PyTree, batch: PyTree, apply: Callable[[PyTree, Any], Any] | None = None) -> Any:
    """Cox's partial likelihood of a batch, ``−1/n Σ_events (s_i − log Σ_{j: t_j ≥ t_i} exp s_j)``, s = uᵀx.

    Risk sets are within the batch: mark the loss, ``fs.per_batch(cox)``. With all samples of a client
    (clients of equal size) this is Cox's model stratified by client, whose baselines may differ; with
    minibatches risk sets are subsampled. Ties are treated as by Breslow.

    Args:
        x: the parameters.
        batch: stacked samples.
        apply: ``apply(x, u)``, the score of one input; None uses ``uᵀx``.

    >>> batch = {"x": np.array([[1.0], [0.0]]), "time": np.array([1.0, 2.0]), "y": np.array([1, 0])}
    >>> float(cox(np.zeros(1), batch))  # log 2, for the first of two, halved
    0.3465735912322998
    """
    scores = batch["x"] @ x if apply is None else jax.vmap(lambda u: apply(x, u))(batch["x"])
    later = batch["time"][None, :] >= batch["time"][:, None]
    rest = jax.nn.logsumexp(jnp.where(later, scores[None, :], -jnp.inf), axis=1)
    return jnp.mean(jnp.where(batch["y"] > 0, rest - scores, 0.0))


def counts(cuts: Sequence[float], time: Any, event: Any) -> Counts:
    """Events and patients at risk in every interval; add them up for several clients.

    >>> counts((1, 2), np.array([1, 2, 2, 5]), np.array([1, 1, 0, 1]))._asdict()
    {'events': array([1, 1]), 'at_risk': array([4, 3])}
    """
    ends = np.asarray(_ends(cuts))
    time, event = np.asarray(time), np.asarray(event) > 0
    k = np.searchsorted(ends, time, side="left")
    last = np.minimum(k, len(ends) - 1)
    events = np.bincount(last[event & (k < len(ends))], minlength=len(ends))
    at_risk = np.bincount(last, minlength=len(ends))[::-1].cumsum()[::-1]
    return Counts(events, at_risk)


def kaplan_meier(total: Counts) -> np.ndarray:
    """The probabilities to survive each interval, ``Π (1 − events/at risk)``; NaN if no patient was at risk.

    If every observed time is the end of an interval, this is the Kaplan–Meier curve.
    """
    events, at_risk = np.asarray(total.events, float), np.asarray(total.at_risk, float)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.cumprod(1 - events / at_risk)


def concordance(time: Any, event: Any, risk: Any) -> float:
    """Harrell's C: the fraction of the ordered pairs in which the larger risk has the earlier event.

    A pair is ordered if the earlier of its two times is that of an event; equal risks count one half. NaN
    without such pairs. In a federation, compute it at each site: a pair across sites needs both times.

    >>> concordance([1, 2, 3], [1, 1, 0], [3.0, 1.0, 2.0])
    0.6666666666666666
    """
    time, event, risk = np.asarray(time), np.asarray(event) > 0, np.asarray(risk)
    known = event[:, None] & ((time[:, None] < time) | ((time[:, None] == time) & ~event))
    number = known.sum()
    if number == 0:
        return math.nan
    right = (risk[:, None] > risk) + 0.5 * (risk[:, None] == risk)
    return float((right * known).sum() / number)
