"""The privacy accounting of a run: ε at a given δ, for adding or removing one client.

All exchanges of a round use the same cohort, so a round is *one* subsampled mechanism: the Gaussian
mechanisms of its exchanges compose to one,

    1/z² = Σ_k 1/z_k²,

and that one is subsampled. Exchanges with all clients, and exchanges of single replies, are not subsampled.
Only `Poisson` counts as subsampling: cohorts of a fixed size have almost no amplification, and are
accounted for as if all clients took part in each round.

Without subsampling, all Gaussian mechanisms of a run compose to one with μ² = Σ 1/z², whose ε is exact
(Balle & Wang 2018),

    δ = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ).

With subsampling, ``dp-accounting`` computes ε (privacy loss distributions, add or remove one client).
"""

from __future__ import annotations

import math
from collections import defaultdict
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

CURVE = 16  # values of ε along a run's history, if each takes long
COARSE = 100.0  # the ε above which the grid of losses grows with it
INTERVAL = 1e-3  # the grid of privacy losses; ε is overestimated by about this times √rounds


@dataclass(frozen=True)
class Budget:
    """The privacy cost of a run, and its budget.

    Attributes:
        delta: the δ of the guarantee.
        budget: the largest allowed ε, or None.
        bare: why ε is infinite, in words, or None.
    """

    delta: float
    budget: float | None
    bare: str | None

    @property
    def drawn(self) -> bool:
        """Whether clients or samples are subsampled, so that ε needs dp-accounting."""
        raise NotImplementedError

    def epsilon(self, rounds: int) -> float:
        """The ε after some rounds; infinite if an upload has no noise."""
        raise NotImplementedError

    def times_noise(self, factor: float) -> Self:
        """The same run with the noise multiplied by a factor, and constant bounds."""
        raise NotImplementedError

    def curve(self, rounds: np.ndarray) -> np.ndarray:
        """An upper bound on ε after each of these rounds, exact at the last.

        With subsampling, one ε takes up to seconds. So it is computed at about twenty rounds, and a round in
        between has the ε of the next of them, because ε never decreases.
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
        """The number of rounds, at most ``most``, within the budget."""
        if self.epsilon(most) <= budget:
            return most
        low, high = 0, most  # ε(low) ≤ budget < ε(high)
        if self.epsilon(0) > budget:
            raise ValueError(
                f"channel: the exchanges before the first round already exceed epsilon={budget:g}."
            )
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.epsilon(middle) <= budget else (low, middle)
        return low


@dataclass(frozen=True)
class OfClients(Budget):
    """The privacy cost of the start and of each round of a run; see the module.

    Attributes:
        start: Σ 1/z² of the exchanges before the first round.
        sampled, everyone: Σ 1/z² of a round's exchanges with a `Poisson` cohort, and of its other exchanges.
        rate, room, clients: the sampling rate, the largest cohort, and the number of clients.
    """

    start: float
    sampled: float
    everyone: float
    rate: float
    room: int
    clients: int

    @classmethod
    def of(
        cls, given: Sequence[Channel], channels: Mapping[str, Channel], found: Sequence[Sent], setup: Setup,
        drops: Dropouts | None,
    ) -> OfClients:  # fmt: skip
        """The cost for the channels of a run: those that were given, and by place.

        Raises:
            ValueError: if the noise does not protect the uploads, with the reason.
        """
        start = sampled = everyone = 0.0
        shared: dict[tuple[str, str, bool], float] = defaultdict(float)
        bare = None
        for one in (s for s in found if s.shapes):
            channel = channels.get(one.place)
            if channel is None or not channel.noise or len(one.floats) < len(one.shapes):
                bare = f"{one.phase!r} sends numbers without noise"
                continue
            absent = setup.rate is not None or drops is not None
            if absent and channel.noise_at == "clients":
                raise ValueError(
                    "channel: with noise_at='clients', absent clients add no noise, and the noise of the "
                    "others is too small. Use noise_at='server' with fs.Poisson or fs.Dropouts."
                )
            if setup.rate is not None and one.gathered:
                raise ValueError(
                    f"channel: {one.phase!r} sends single replies, which reveal who was drawn, so "
                    "fs.Poisson does not amplify privacy. Use a variant that averages, or "
                    "participation=1.0."
                )
            times = one.times if one.most is None else one.most
            if times is None:
                bare = f"how often {one.phase!r} is called is not known beforehand"
                continue
            cost = times * inverse(channel)
            drawn = setup.rate is not None and one.asked == "cohort" and channel.noise_at == "server"
            if one.most is not None:  # the level's exchanges share this number: at worst of the dearest kind
                place = one.program, one.level, drawn
                cost, shared[place] = max(cost - shared[place], 0.0), max(cost, shared[place])
            if one.program == "start":
                start += cost
            elif drawn:
                sampled += cost
            else:
                everyone += cost
        delta, budget = asked(given, bare, 0.1 / setup.clients)
        rate = 1.0 if setup.rate is None else setup.rate
        room = setup.participants
        return cls(delta, budget, bare, start, sampled, everyone, rate, room, setup.clients)

    @property
    def drawn(self) -> bool:
        """Whether clients are subsampled, so that ε needs dp-accounting."""
        return self.sampled > 0 and self.rate < 1

    def epsilon(self, rounds: int) -> float:
        """The ε after some rounds; infinite if an upload has no noise."""
        if self.bare is not None:
            return math.inf
        return _epsilon(
            self.start, self.sampled, self.everyone, self.rate, self.room, self.clients, self.delta, rounds
        )

    def times_noise(self, factor: float) -> Self:
        costs = {name: getattr(self, name) / factor**2 for name in ("start", "sampled", "everyone")}
        return replace(self, **costs)


def asked(given: Sequence[Channel], bare: str | None, delta: float) -> tuple[float, float | None]:
    """The δ (by default this one) and the budget, or None, of the given channels."""
    budget = min((c.epsilon for c in given if c.epsilon is not None), default=None)
    if budget is not None and bare is not None:
        raise ValueError(f"channel: epsilon={budget:g} cannot be kept: {bare}.")
    delta = min((c.delta for c in given if c.delta is not None), default=delta)
    if not 0 < delta < 1:
        raise ValueError(f"channel: delta must be in (0, 1), but is {delta!r}.")
    return delta, budget


def inverse(channel: Channel) -> float:
    """Σ 1/z² of one exchange: of its noise and, for an adaptive clip, of its count."""
    assert channel.noise is not None
    found = 1 / float(channel.noise) ** 2
    if isinstance(channel.clip, Adaptive):
        found += 1 / channel.clip.noise**2
    return found


def accountant() -> Any:
    """The module ``dp_accounting``, or an error that says how to install it."""
    try:
        import dp_accounting
    except ImportError as error:
        raise ImportError(
            "Privacy accounting needs the package dp-accounting: pip install 'fedstrata[privacy]'."
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
    """The ε of composed mechanisms; without subsampling they would be one Gaussian with μ²."""
    dp = accountant()
    from dp_accounting import pld

    # The ε without subsampling bounds the losses; a large one allows a coarser grid.
    grid = interval * max(1.0, gaussian_epsilon(math.sqrt(mu2), delta) / COARSE)
    keeper = pld.PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=grid)
    keeper.compose(dp.ComposedDpEvent(events))
    return float(keeper.get_epsilon(delta))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The ε of a Gaussian mechanism with μ = sensitivity/standard deviation; see the module.

    >>> round(gaussian_epsilon(1.0, 1e-5), 4)
    4.3772
    """
    if mu == 0:
        return 0.0

    def excess(eps: float) -> float:
        # e^ε Φ(−…) as a logarithm: for large ε the factors overflow and underflow
        low, high = log_ndtr(mu / 2 - eps / mu), eps + log_ndtr(-mu / 2 - eps / mu)
        return float(np.exp(low) * -np.expm1(min(high - low, 0.0))) - delta

    if excess(0.0) <= 0:
        return 0.0
    return float(brentq(excess, 0.0, mu * (mu / 2 + 40), xtol=1e-12, rtol=1e-12))
