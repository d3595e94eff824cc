"""What a run costs of a client's privacy: ε at a δ, for a client that is there or not.

All exchanges of a round see the same draw of clients, so that a round is *one* subsampled mechanism: the
Gaussians of its exchanges compose to one,

    1/z² = Σ_k 1/z_k²,

and that one is subsampled. Exchanges that ask everyone, or send single replies, are not. Only the draw of
`Poisson` is counted as one: cohorts of a fixed size are hardly amplified, and are accounted as if everyone
took part in each round.

Without a draw, all Gaussians of a run compose to one with μ² = Σ 1/z², whose ε is exact (Balle & Wang 2018),

    δ = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ).

With one, the accountant is that of ``dp-accounting`` (privacy loss distributions, add or remove one).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Self

import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr

from fedstrata.channels.channel import Channel, Dropouts
from fedstrata.channels.clipping import Adaptive
from fedstrata.channels.sent import Sent
from fedstrata.core.fed import Setup

CURVE = 16  # values of ε along a run's history, where each takes long
COARSE = 100.0  # an ε from which the grid of losses grows with it
INTERVAL = 1e-3  # of the discretised privacy losses; the error of ε is of this order times √rounds, upwards


@dataclass(frozen=True)
class Budget:
    """What a run costs, and may cost.

    Attributes:
        delta: δ. budget: the ε that is not exceeded, or None.
        bare: why there is no ε, in words, or None.
    """

    delta: float
    budget: float | None
    bare: str | None

    @property
    def drawn(self) -> bool:
        """Whether there are draws that hide who took part, so that ε needs the accountant."""
        raise NotImplementedError

    def epsilon(self, rounds: int) -> float:
        """ε after so many rounds; infinite where something goes without noise."""
        raise NotImplementedError

    def times_noise(self, factor: float) -> Self:
        """The same run with so many times the noise, and bounds that do not move."""
        raise NotImplementedError

    def curve(self, rounds: np.ndarray) -> np.ndarray:
        """An upper bound of ε after each of these rounds, exact at the last.

        With a draw an ε takes up to seconds. So it is computed at about twenty rounds in all, and a round in
        between has that of the next of them, since ε never falls.
        """
        known = np.unique(np.asarray(rounds, int))
        if self.drawn and len(known) > 2 * CURVE:
            places = np.unique(np.geomspace(1, len(known), CURVE).astype(int)) - 1
            computed = known[np.unique([0, *places, len(known) - 1])]
        else:
            computed = known
        values = np.array([self.epsilon(int(r)) for r in computed])
        return values[np.searchsorted(computed, rounds)]

    def rounds_within(self, budget: float, most: int) -> int:
        """How many of so many rounds the budget is enough for."""
        if self.epsilon(most) <= budget:
            return most
        low, high = 0, most  # ε(low) ≤ budget < ε(high), if anything is
        if self.epsilon(0) > budget:
            raise ValueError(
                f"channel: the exchanges before the first round alone exceed epsilon={budget:g}."
            )
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.epsilon(middle) <= budget else (low, middle)
        return low


@dataclass(frozen=True)
class OfClients(Budget):
    """What the start and each round of a run cost; see the module.

    Attributes:
        start: Σ 1/z² of the exchanges before the first round.
        sampled, everyone: Σ 1/z² of a round's exchanges with a cohort drawn by `Poisson`, and of the others.
        rate, room, clients: of the draw; room is how many of the clients there is room for.
    """

    start: float
    sampled: float
    everyone: float
    rate: float
    room: int
    clients: int

    @classmethod
    def of(
        cls, channels: Mapping[str, Channel], found: Sequence[Sent], setup: Setup, drops: Dropouts | None
    ) -> OfClients:
        """Of the channels of a run.

        Raises:
            ValueError: for noise that does not do what it is for, with the reason.
        """
        start = sampled = everyone = 0.0
        bare = None
        for one in (s for s in found if s.shapes):
            channel = channels.get(one.place)
            if channel is None or not channel.noise or len(one.floats) < len(one.shapes):
                bare = f"{one.phase!r} sends numbers without noise"
                continue
            absent = setup.rate is not None or drops is not None
            if absent and channel.noise_at == "clients":
                raise ValueError(
                    "channel: with noise_at='clients' who is absent adds no noise, and the others' is too "
                    "small. "
                    "Use noise_at='server' with fs.Poisson or fs.Dropouts."
                )
            if setup.rate is not None and one.gathered:
                raise ValueError(
                    f"channel: {one.phase!r} sends single replies, which tell who was drawn, so that "
                    f"fs.Poisson "
                    "makes nothing private. Take a variant that averages, or participation=1.0."
                )
            if one.times is None:
                bare = f"how often {one.phase!r} is called is not known beforehand"
                continue
            times = one.times * inverse(channel)
            if one.program == "start":
                start += times
            elif setup.rate is not None and one.asked == "cohort" and channel.noise_at == "server":
                sampled += times
            else:
                everyone += times
        delta, budget = asked(channels, bare, 0.1 / setup.clients)
        rate = 1.0 if setup.rate is None else setup.rate
        room = setup.participants
        return cls(delta, budget, bare, start, sampled, everyone, rate, room, setup.clients)

    @property
    def drawn(self) -> bool:
        """Whether clients are drawn, so that ε needs the accountant."""
        return self.sampled > 0 and self.rate < 1

    def epsilon(self, rounds: int) -> float:
        """ε after so many rounds; infinite where something goes without noise."""
        if self.bare is not None:
            return math.inf
        return _epsilon(
            self.start, self.sampled, self.everyone, self.rate, self.room, self.clients, self.delta, rounds
        )

    def times_noise(self, factor: float) -> Self:
        """See `Budget.times_noise`."""
        costs = {name: getattr(self, name) / factor**2 for name in ("start", "sampled", "everyone")}
        return replace(self, **costs)


def asked(channels: Mapping[str, Channel], bare: str | None, delta: float) -> tuple[float, float | None]:
    """δ, by default this one, and the budget or None, as the channels of a run say."""
    budget = min((c.epsilon for c in channels.values() if c.epsilon is not None), default=None)
    if budget is not None and bare is not None:
        raise ValueError(f"channel: epsilon={budget:g} cannot be kept: {bare}.")
    delta = min((c.delta for c in channels.values() if c.delta is not None), default=delta)
    if not 0 < delta < 1:
        raise ValueError(f"channel: delta must be in (0, 1), but is {delta!r}.")
    return delta, budget


def inverse(channel: Channel) -> float:
    """Σ 1/z² of one exchange: of its noise, and of the count by which a bound moves."""
    assert channel.noise is not None
    found = 1 / float(channel.noise) ** 2
    if isinstance(channel.clip, Adaptive):
        found += 1 / channel.clip.noise**2
    return found


def accountant() -> Any:
    """``dp_accounting``, or an error that says how to get it."""
    try:
        import dp_accounting
    except ImportError as error:
        raise ImportError(
            "The accountant of privacy is in the package dp-accounting: pip install 'fedstrata[privacy]'."
        ) from error
    return dp_accounting


@lru_cache(maxsize=4096)
def _epsilon(
    start: float, sampled: float, everyone: float, rate: float, room: int, clients: int, delta: float,
    rounds: int,
    interval: float = INTERVAL,
) -> float:  # fmt: skip
    if rate >= 1:
        sampled, everyone = 0.0, everyone + sampled
    plain = start + rounds * everyone
    if sampled == 0 or rounds == 0:
        return gaussian_epsilon(math.sqrt(plain), delta)
    dp = accountant()
    one = (
        dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(sampled**-0.5))
        if room >= clients
        else dp.TruncatedSubsampledGaussianDpEvent(clients, rate, room, sampled**-0.5)
    )
    events: list[Any] = [dp.SelfComposedDpEvent(one, rounds)]
    if plain > 0:
        events.append(dp.GaussianDpEvent(plain**-0.5))
    return epsilon_of(events, plain + rounds * sampled, delta, interval)


def epsilon_of(events: list[Any], mu2: float, delta: float, interval: float) -> float:
    """ε of mechanisms together; without a draw they would be one Gaussian of μ²."""
    dp = accountant()
    from dp_accounting import pld

    # Losses as large as those without a draw need no finer grid than they have digits.
    grid = interval * max(1.0, gaussian_epsilon(math.sqrt(mu2), delta) / COARSE)
    keeper = pld.PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=grid)
    keeper.compose(dp.ComposedDpEvent(events))
    return float(keeper.get_epsilon(delta))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """ε of one Gaussian mechanism with sensitivity over deviation μ; see the module.

    >>> round(gaussian_epsilon(1.0, 1e-5), 4)
    4.3772
    """
    if mu == 0:
        return 0.0

    def excess(eps: float) -> float:
        # e^ε Φ(−…) as a logarithm: neither factor is a number of its own where ε is large
        low, high = log_ndtr(mu / 2 - eps / mu), eps + log_ndtr(-mu / 2 - eps / mu)
        return float(np.exp(low) * -np.expm1(min(high - low, 0.0))) - delta

    if excess(0.0) <= 0:
        return 0.0
    return float(brentq(excess, 0.0, mu * (mu / 2 + 40), xtol=1e-12, rtol=1e-12))
