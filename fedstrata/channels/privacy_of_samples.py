"""The privacy accounting of single samples: ε at a given δ, for adding or removing one sample.

A client's uploads are functions of noised means over its samples, so anyone who sees all uploads, including
the server, learns no more than from these means. Means over the same draw of samples are one subsampled
Gaussian with 1/z² = Σ 1/z_k²; draws are independent, and compose:

    ε of  ⊕_draws  Poisson(b/n) ∘ Gaussian(z/√uses)  ⊕  Gaussian of all full batches

Training and validation samples are disjoint, so ε is the larger of the two. It is the ε of the client with
the fewest samples, whose samples are drawn most often. Drawing clients does not reduce ε, because the server
knows who was drawn. The number of a client's samples counts as public.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Self

import numpy as np

from fedstrata.channels.channel import Channel
from fedstrata.channels.privacy import INTERVAL, Budget, accountant, asked, epsilon_of, gaussian_epsilon
from fedstrata.channels.sent import Sent

# rate of the draw, μ² = Σ 1/z² of the means over it, and the number of such draws
Draws = tuple[tuple[float, float, int], ...]


@dataclass(frozen=True)
class OfSamples(Budget):
    """The privacy cost of the start and of each round of a run; see the module.

    Attributes:
        start, round: by part of the data, the draws before the first round and in each.
    """

    start: Mapping[str, Draws]
    round: Mapping[str, Draws]

    @classmethod
    def of(
        cls, given: Sequence[Channel], channels: Mapping[str, Channel], found: Sequence[Sent],
        sizes: Mapping[str, np.ndarray],
    ) -> OfSamples:  # fmt: skip
        """The cost for a run's channels, as given and by place, and the clients' numbers of samples."""
        spent: dict[str, dict[str, Counter[tuple[float, float]]]] = {"start": {}, "round": {}}
        bare = None
        for one in found:
            channel = channels.get(one.place)
            if channel is None or channel.examples is None:
                bare = f"{one.phase!r} sends numbers of samples without bounds and noise"
            elif one.releases is None or (one.releases and one.times is None):
                bare = f"how many means of samples {one.phase!r} takes is not known beforehand"
            elif one.releases and not channel.examples.noise:
                bare = f"{one.phase!r} takes means of samples without noise"
            else:
                for release in one.releases:
                    assert one.times is not None
                    least = float(sizes[release.part].min())
                    rate = 1.0 if release.batch_size is None else min(1.0, release.batch_size / least)
                    mu2 = release.uses / float(channel.examples.noise) ** 2
                    draws = spent[one.program].setdefault(release.part, Counter())
                    draws[rate, mu2] += release.draws * one.times
        most = max(int(part.max()) for part in sizes.values())
        delta, budget = asked(given, bare, 0.1 / most)
        start, each = (
            {part: tuple((q, mu2, n) for (q, mu2), n in sorted(draws.items())) for part, draws in its.items()}
            for its in spent.values()
        )
        return cls(delta, budget, bare, start, each)

    @property
    def drawn(self) -> bool:
        """Whether samples are drawn, so that ε needs the accountant."""
        every = [draws for its in (self.start, self.round) for draws in its.values()]
        return any(rate < 1 for draws in every for rate, _, _ in draws)

    def epsilon(self, rounds: int) -> float:
        """The ε after some rounds: the largest of the parts of the data."""
        if self.bare is not None:
            return math.inf
        return max((self.of_part(part, rounds) for part in {**self.start, **self.round}), default=0.0)

    def of_part(self, part: str, rounds: int) -> float:
        """The ε of the training or the validation samples."""
        spent: Counter[tuple[float, float]] = Counter()
        for draws, times in ((self.start, 1), (self.round, rounds)):
            for rate, mu2, number in draws.get(part, ()):
                spent[rate, mu2] += number * times
        return composed(tuple((q, mu2, n) for (q, mu2), n in sorted(spent.items()) if n), self.delta)

    def times_noise(self, factor: float) -> Self:
        start, each = (
            {part: tuple((q, mu2 / factor**2, n) for q, mu2, n in draws) for part, draws in its.items()}
            for its in (self.start, self.round)
        )
        return replace(self, start=start, round=each)


@lru_cache(maxsize=4096)
def composed(draws: Draws, delta: float, interval: float = INTERVAL) -> float:
    """ε of subsampled Gaussians.

    >>> round(composed(((1.0, 0.25, 4),), 1e-5), 4)
    4.3772
    """
    plain = sum(mu2 * n for rate, mu2, n in draws if rate >= 1)
    sampled = [one for one in draws if one[0] < 1]
    if not sampled:
        return gaussian_epsilon(math.sqrt(plain), delta)
    dp = accountant()
    events: list[Any] = [
        dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(mu2**-0.5)), n)
        for rate, mu2, n in sampled
    ]
    if plain > 0:
        events.append(dp.GaussianDpEvent(plain**-0.5))
    return epsilon_of(events, sum(mu2 * n for _, mu2, n in draws), delta, interval)
