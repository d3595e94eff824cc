"""The exchanges of a method on a problem, and the noise for a privacy budget, without any compute."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

from fedstrata.channels.channel import Channel, Poisson
from fedstrata.channels.compression import Pace, pace
from fedstrata.channels.examples import Examples
from fedstrata.channels.sent import Sent
from fedstrata.core.method import Method
from fedstrata.core.problem import Problem
from fedstrata.core.types import PyTree
from fedstrata.data.federated import FederatedData
from fedstrata.engines.outline import outline
from fedstrata.solving.pose import Posed, pose

MOST_NOISE = 1e4


def exchanges(
    problem: Problem,
    method: Method,
    data: FederatedData,
    x0: PyTree,
    *,
    y0: PyTree = None,
    participation: float | int | Poisson = 1.0,
) -> list[Sent]:
    """The exchanges of a method on a problem, before the first round and in a round, from an abstract pass.

    Args:
        problem: what is to be solved.
        method: how.
        data: the clients' samples, of which only shapes count.
        x0: where the main variable starts.
        y0: where the second variable starts.
        participation: as in `solve`.

    Returns:
        One `Sent` for each: its level and phase, by which ``channel=`` finds it; the arrays of an upload;
        whether the server gets a mean or every upload, who is asked, and how often in a round.

    >>> import fedstrata as fs, numpy as np
    >>> data = fs.FederatedData.from_clients([{"a": np.ones((2, 3))}, {"a": np.zeros((4, 3))}])
    >>> problem = fs.Minimization(lambda x, s: ((x - s["a"]) ** 2).sum())
    >>> (one,) = fs.exchanges(problem, fs.FedAvg(gamma=0.1), data, np.zeros(3))
    >>> one.level, one.phase, one.gathered, one.reference, one.asked, one.times
    ('main', 'local_steps', False, True, 'everyone', 1)
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posed = pose(problem, method, data, x0, y0=y0, rounds=1, participation=participation)
    return exchanges_of(posed)


def exchanges_of(posed: Posed) -> list[Sent]:
    """The exchanges of a run that is posed."""
    return outline(posed.setup, posed.methods[0], posed.data, posed.carry)


def paces(
    problem: Problem, method: Method, data: FederatedData, x0: PyTree, y0: PyTree, **options: Any
) -> tuple[float, float, float]:
    """By how much the compression of a channel shortens the steps of x and of y, and the rate that it allows.

    If y has no exchanges of its own, it travels with x.

    Args:
        problem: what is to be solved.
        method: how.
        data: the clients' samples.
        x0: where the main variable starts.
        y0: where the second variable starts.
        options: of `solve`, with ``channel``.

    Raises:
        ValueError: if the method does not bear the channel, with the reason.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with_it = pose(problem, method, data, x0, y0=y0, rounds=1, **options)
        plain = pose(problem, method, data, x0, y0=y0, rounds=1, **{**options, "channel": None})
    channels = getattr(with_it.method, "channels", {})
    found: dict[str, Pace] = {}
    for one in exchanges_of(plain):
        if one.program == "round":
            compress = channels.get(one.place, Channel()).compress
            sizes = () if compress is None else (math.prod(shape) for shape, _ in one.floats)
            each = [pace(compress, size, plain.setup.participants) for size in sizes]
            each.append(found.get(one.level, Pace(1.0, 1.0)))
            found[one.level] = Pace(max(p.slower for p in each), min(p.rate for p in each))
    upper = max((its.slower for level, its in found.items() if level != "lower"), default=1.0)
    lower = found["lower"].slower if "lower" in found else upper
    return upper, lower, min((its.rate for its in found.values()), default=1.0)


def plan_privacy(
    problem: Problem,
    method: Method,
    data: FederatedData,
    x0: PyTree,
    *,
    epsilon: float,
    delta: float,
    rounds: int,
    clip: float | None = None,
    examples: Examples | None = None,
    y0: PyTree = None,
    participation: float | int | Poisson = 1.0,
) -> Channel:
    """The channel with the least noise for which so many rounds cost at most ε at δ.

    Args:
        problem: what is to be solved.
        method: how: all exchanges of its text are counted.
        data: the clients' samples, of which only shapes count.
        x0: where the main variable starts.
        epsilon: the budget, for one client that is there or not; with ``examples`` for one sample.
        delta: δ, well below one by the number of clients, or of samples.
        rounds: how many.
        clip: the bound of an upload, as a difference to its reference: to hide clients.
        examples: the bounds of single samples, to hide these; its own noise does not count.
        y0: where the second variable starts.
        participation: as in `solve`; with `Poisson` rounds cost much less.

    Returns:
        ``Channel(clip, noise, delta=, epsilon=)``, or one with ``examples=``, which also ends a longer run
        when the budget is spent.
    """
    if not (epsilon > 0 and 0 < delta < 1 and rounds >= 1):
        raise ValueError("plan_privacy needs epsilon > 0, delta in (0, 1) and rounds ≥ 1.")
    if (clip is None) == (examples is None):
        raise ValueError(
            "plan_privacy hides clients (clip=) or single samples (examples=): give one of them."
        )

    def channel(noise: float, budget: float | None = None) -> Channel:
        if examples is None:
            return Channel(clip=clip, noise=noise, delta=delta, epsilon=budget)
        return Channel(examples=replace(examples, noise=noise), delta=delta, epsilon=budget)

    arguments: dict[str, Any] = {"y0": y0, "rounds": rounds, "participation": participation}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        once = pose(problem, method, data, x0, channel=channel(1.0), **arguments).spending
    if once is None:  # the same with a budget raises, and says why ε is unknown
        once = pose(problem, method, data, x0, channel=channel(1.0, epsilon), **arguments).spending
    assert once is not None
    costs = once

    def spent(noise: float) -> float:
        return costs.times_noise(noise).epsilon(rounds)

    low, high = 0.05, 1.0
    while spent(high) > epsilon:
        low, high = high, 2 * high
        if high > MOST_NOISE:
            raise ValueError(f"plan_privacy: no noise below {MOST_NOISE:g} keeps epsilon={epsilon:g}.")
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if spent(middle) > epsilon else (low, middle)
    return channel(math.ceil(high * 1e6) / 1e6, epsilon)
