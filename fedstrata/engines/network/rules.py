"""A site's own rules for the runs that it takes part in, on its own disk.

A run is judged by the site's own text: `Asks` lists the text's requests, and `Rules.admit` refuses a run
before any sample is read. Limits that do not follow from a text (the number of requests, the memory of a
phase, the time of day) are checked at each request. The server gets the reason for every refusal.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fedstrata.engines.network.states import SiteRefused
from fedstrata.engines.network.wire import Header

MIB = 2**20
START = "start of a run"  # what a person signs who starts it


class Asks(NamedTuple):
    """The requests of a run to a site, from the site's own text.

    Attributes:
        digest: the digest of its programs, hyper-parameters, start, and number of rounds.
        replies: the phases whose single replies the server gets.
        secure: whether the server gets only sums over sites.
        rounds: the number of rounds.
    """

    digest: str
    replies: tuple[str, ...]
    secure: bool
    rounds: int


@dataclass(frozen=True)
class Rules:
    """A site's rules. The default allows every run of its own text.

    Args:
        approved: the digests of approved runs; None approves all.
        reveals: ``"averages"`` refuses runs in which the server gets clients' single replies.
        secure: whether the server may only get masked sums.
        rounds: the most rounds of a run.
        answers: the most answered exchanges in all runs together, as counted in the site's account.
        memory: the most MiB that a phase may take.
        hours: the times between which it answers, on this machine's clock; may span midnight.
        starters: the names of those who may start runs, each by a signature; None asks for none.
    """

    approved: Collection[str] | None = None
    reveals: Literal["averages", "replies"] = "replies"
    secure: bool = False
    rounds: int | None = None
    answers: int | None = None
    memory: int | None = None
    hours: tuple[datetime.time, datetime.time] | None = None
    starters: Collection[str] | None = None

    def admit(self, asks: Asks) -> None:
        """Judge a run before it is opened.

        Raises:
            SiteRefused: with the rule that it breaks.
        """
        if self.approved is not None and asks.digest not in self.approved:
            raise SiteRefused(
                f"This site has not approved this run ({asks.digest}). There, `fedstrata net approve` "
                "shows what it would ask."
            )
        if self.reveals == "averages" and asks.replies:
            raise SiteRefused(
                f"This site's policy allows averages alone, and the run asks for single replies: "
                f"{', '.join(asks.replies)}."
            )
        if self.secure and not asks.secure:
            raise SiteRefused("This site's policy needs secure sums: give the run Channel(secure=True).")
        if self.rounds is not None and asks.rounds > self.rounds:
            raise SiteRefused(
                f"The run has {asks.rounds} rounds, and this site's policy allows {self.rounds}."
            )

    def check_answers(self, answered: int) -> None:
        """Refuse an exchange beyond the policy's limit."""
        if self.answers is not None and answered >= self.answers:
            raise SiteRefused(f"This site has answered {answered} exchanges, and its policy allows no more.")

    def check_memory(self, phase: str, size: int) -> None:
        """Refuse a phase that would take more bytes than the policy allows."""
        if self.memory is not None and size > self.memory * MIB:
            raise SiteRefused(
                f"The phase {phase!r} would take {size / MIB:,.0f} MiB, and this site's policy allows "
                f"{self.memory:,}."
            )

    def open_at(self, now: datetime.time) -> bool:
        """Whether the site answers at this time of day."""
        if self.hours is None:
            return True
        begin, end = self.hours  # over midnight, the end is before the beginning
        return begin <= now < end if begin < end else now >= begin or now < end


def start_of(header: Header) -> bytes:
    """The digest of a request to open a run, which whoever starts the run signs."""
    about = [header["number"], header["terms"]]
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).digest()
