"""A site's own privacy budget for its samples, over all runs, on its own disk.

A site with an allowance books the cost of each answer before sending it, from its own text and its own
numbers of samples, and refuses any request that would exceed the allowance. An answer without the site's own
noise has no ε and is refused, also a metric, which is computed without noise.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedstrata.channels.channel import Channel
from fedstrata.channels.examples import Release
from fedstrata.channels.privacy import inverse
from fedstrata.channels.privacy_of_samples import composed
from fedstrata.engines.network.states import SiteRefused
from fedstrata.support.sealed import UNSEALED, is_whole, sealed
from fedstrata.support.writing import write_atomically

WHOLE = "clients"  # the part under which noise for whole clients is booked
Costs = Mapping[str, Counter[tuple[float, float]]]  # by part of the data: (rate, μ²) → the number of draws


class Allowance:
    """A privacy budget.

    Args:
        file: stores the spent budget; it outlives runs, and is created if it does not exist.
        epsilon, delta: the budget of one sample; and of one client, if the noise hides clients.
    """

    def __init__(self, file: Path, epsilon: float, delta: float) -> None:
        if not (epsilon > 0 and 0 < delta < 1):
            raise ValueError(f"An allowance needs epsilon > 0 and delta in (0, 1), not {epsilon}, {delta}.")
        self.file, self.most, self.delta = file, epsilon, delta
        self.spent: dict[str, Counter[tuple[float, float]]] = {}
        if file.exists():
            if not is_whole(content := file.read_bytes()):
                raise ValueError(f"{file} is damaged: it holds the spent privacy budget. Restore a backup.")
            for part, draws in json.loads(content)["spent"].items():
                self.spent[part] = Counter({(q, mu2): n for q, mu2, n in draws})

    def spend(self, costs: Costs) -> None:
        """Book an answer.

        Raises:
            SiteRefused: if it would exceed the budget; then nothing is booked.
        """
        after = {part: self.spent.get(part, Counter()) + Counter() for part in {*self.spent, *costs}}
        for part, draws in costs.items():
            after[part].update(draws)
        if not self._within(after):
            raise SiteRefused(
                f"This answer would exceed the site's budget, epsilon={self.most:g} at delta={self.delta:g} "
                f"({self.epsilon():.3g} are spent)."
            )
        plain = {part: [[q, mu2, n] for (q, mu2), n in draws.items()] for part, draws in after.items()}
        # On disk before the answer is sent: even if the process is killed, everything sent has been booked.
        write_atomically(self.file, sealed(json.dumps({"spent": plain, "sha256": UNSEALED}).encode()))
        self.spent = after

    def epsilon(self) -> float:
        """The ε spent so far."""
        return _epsilon(self.spent, self.delta)

    def _within(self, after: Costs) -> bool:
        # An ε with draws takes long: the ε of more draws, which is valid for many answers, is tried first.
        ahead = {part: Counter({k: _ahead(n) for k, n in draws.items()}) for part, draws in after.items()}
        return _epsilon(ahead, self.delta) <= self.most or _epsilon(after, self.delta) <= self.most


def _ahead(n: int) -> int:
    """The number rounded up to two significant digits."""
    unit = 10 ** max(len(str(n)) - 2, 0)
    return -(-n // unit) * unit


def _epsilon(spent: Costs, delta: float) -> float:
    """The largest ε of the parts: a sample is in one of them, and in a client that noise hides as a whole."""
    whole = spent.get(WHOLE, Counter())
    parts = [draws + whole for part, draws in spent.items() if part != WHOLE] or [whole]
    return max(
        composed(tuple((q, m, n) for (q, m), n in sorted(draws.items()) if n), delta) for draws in parts
    )


def costs_of(
    channel: Channel | None, found: tuple[Release, ...] | None, sizes: Mapping[str, np.ndarray], whole: bool
) -> Costs:
    """The privacy cost of an answer.

    Args:
        channel: the channel of the answer.
        found: the means over samples that it contains.
        sizes: the sizes of the site's clients, by part of the data.
        whole: whether noise is added to all of its numbers.

    Raises:
        SiteRefused: if it lacks the site's own noise.
    """
    if channel is not None and channel.examples is not None and channel.examples.noise and found is not None:
        examples: Any = channel.examples
        costs: dict[str, Counter[tuple[float, float]]] = {}
        for one in found:
            least = float(sizes[one.part].min())  # the client whose samples are drawn most often
            rate = 1.0 if one.batch_size is None else min(1.0, one.batch_size / least)
            mu2 = one.uses / float(examples.noise) ** 2
            costs.setdefault(one.part, Counter())[rate, mu2] += one.draws
        return costs
    if channel is not None and channel.noise and channel.noise_at == "each" and whole:
        return {WHOLE: Counter({(1.0, inverse(channel)): 1})}
    raise SiteRefused(
        "This site has a privacy budget, and was asked for numbers without noise of its own. Let the "
        "channel have examples= or noise_at='each', and the run default_metrics=False."
    )
