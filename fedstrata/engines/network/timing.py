"""How long sites take to answer: the deadlines of exchanges, and who the others wait for."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MANY = 200  # exchanges after which a site that is nearly always the last is told
RECENT = 64  # answers of a site from which its usual time is known


class Slot(NamedTuple):
    """What a site compiles once.

    Attributes:
        site: its number.
        program, k: an exchange of the text.
        participants: how many clients there are in the round.
        rows: for how many of the site's own clients there is room, as the power of two.
    """

    site: int
    program: str
    k: int
    participants: int
    rows: int = 0


class Timing:
    """What a run's exchanges took.

    Args:
        first: seconds for an exchange that a site has not done before, as it compiles.
        least: the fewest seconds for any other.

    Attributes:
        stretch: by what deadlines are multiplied; it grows while a site is late in a round.
        exchanges, seconds: how many there were, and the seconds until the last site had answered.
        timed: the number of exchanges in which nobody compiled.
        last: how often each site was the last to answer in these.
        waited: seconds that each site was waited for when all others had answered.
    """

    def __init__(self, first: float, least: float) -> None:
        self.first, self.least, self.stretch = first, least, 1
        self.exchanges, self.seconds = 0, 0.0
        self.timed, self.last = 0, Counter[int]()
        self.waited: dict[int, float] = defaultdict(float)
        self._took: dict[Slot, deque[float]] = {}

    def deadline(self, slots: Sequence[Slot]) -> float:
        """Seconds for an exchange: ten times what the slowest of its sites usually takes."""
        known = [self._took.get(slot) for slot in slots]
        if any(took is None for took in known):
            return self.first
        # A quantile, not the maximum, so that one nap of a site does not slow every later deadline.
        usual = max(float(np.quantile(took, 0.9)) for took in known if took is not None)
        return self.stretch * max(self.least, 10 * usual)

    def note(self, slots: Sequence[Slot], took: Sequence[float]) -> int | None:
        """Keep what an exchange took at each of its sites.

        Returns:
            A site that was nearly always the last, once, after `MANY` exchanges.
        """
        self.exchanges, self.seconds = self.exchanges + 1, self.seconds + max(took)
        known = [self._took.setdefault(slot, deque(maxlen=RECENT)) for slot in slots]
        compiled = any(not before for before in known)
        for before, seconds in zip(known, took, strict=True):
            before.append(seconds if before else 0.0)  # a first time says nothing of the next
        if len(slots) < 2 or compiled:
            return None
        (second, _), (most, last) = sorted(zip(took, (slot.site for slot in slots), strict=True))[-2:]
        self.timed += 1
        self.last[last] += 1
        self.waited[last] += most - second
        return last if self.timed == MANY and self.last[last] >= 0.9 * MANY else None

    def forget(self, site: int) -> None:
        """A site that was away may have been restarted, and then compiles again."""
        self._took = {slot: took for slot, took in self._took.items() if slot.site != site}
