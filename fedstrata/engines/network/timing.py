"""The sites' response times: the deadlines of exchanges, and the sites that others wait for."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MANY = 200  # exchanges after which a site that is nearly always the last is reported
RECENT = 64  # a site's last answers, which give its usual time


class Slot(NamedTuple):
    """The identity of a phase that a site compiles once.

    Attributes:
        site: the site's number.
        program, k: an exchange of the text.
        participants: the number of clients in the round.
        rows: the room for the site's own clients, as the power of two.
    """

    site: int
    program: str
    k: int
    participants: int
    rows: int = 0


class Timing:
    """The times of a run's exchanges.

    Args:
        first: seconds for a site's first exchange of a kind, for which it compiles.
        least: the fewest seconds for any other.

    Attributes:
        stretch: the factor of the deadlines; it grows while a site is late in a round.
        exchanges, seconds: their number, and the total seconds until the last site had answered.
        timed: the number of exchanges in which no site compiled.
        last: the number of these in which each site was the last to answer.
        waited: the seconds waited for each site after all others had answered.
    """

    def __init__(self, first: float, least: float) -> None:
        self.first, self.least, self.stretch = first, least, 1
        self.exchanges, self.seconds = 0, 0.0
        self.timed, self.last = 0, Counter[int]()
        self.waited: dict[int, float] = defaultdict(float)
        self._took: dict[Slot, deque[float]] = {}

    def deadline(self, slots: Sequence[Slot]) -> float:
        """Seconds for an exchange: ten times the usual time of its slowest site."""
        known = [self._took.get(slot) for slot in slots]
        if any(took is None for took in known):
            return self.first
        # A quantile, not the maximum, so that one pause of a site does not extend every later deadline.
        usual = max(float(np.quantile(took, 0.9)) for took in known if took is not None)
        return self.stretch * max(self.least, 10 * usual)

    def note(self, slots: Sequence[Slot], took: Sequence[float]) -> int | None:
        """Record the time of an exchange at each of its sites.

        Returns:
            A site that was nearly always the last, once, after `MANY` exchanges.
        """
        self.exchanges, self.seconds = self.exchanges + 1, self.seconds + max(took)
        known = [self._took.setdefault(slot, deque(maxlen=RECENT)) for slot in slots]
        compiled = any(not before for before in known)
        for before, seconds in zip(known, took, strict=True):
            before.append(seconds if before else 0.0)  # a first time does not predict the next
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
