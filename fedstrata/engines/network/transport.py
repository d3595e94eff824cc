"""The interface by which requests reach sites and replies return, and the transport in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from fedstrata.core import counting
from fedstrata.engines.network import wire
from fedstrata.engines.network.site import Site
from fedstrata.engines.network.wire import Arrays, Header


class Request(NamedTuple):
    """A request to a site, or its reply."""

    header: Header
    arrays: Arrays


class Failure(NamedTuple):
    """Why a site did not answer.

    Attributes:
        kind: ``"away"`` (no connection, or it broke), ``"late"`` (no answer in time), ``"error"`` (the site
            says so) or ``"wrong"`` (an answer that cannot be used).
        why: in words.
    """

    kind: str
    why: str


def answer_of(message: Any, limit: int) -> tuple[Request | Failure, int | None]:
    """A site's answer, and the number of the message that it answers; None if it lacks the number."""
    try:
        reply = Request(*wire.unpack(message, limit))
    except (wire.WireError, TypeError) as error:
        return Failure("wrong", f"its answer cannot be decoded: {error}"), None
    number = reply.header.get("seq")
    number = number if type(number) is int else None
    if "error" in reply.header:
        return Failure("error", wire.said(reply.header["error"])), number
    return reply if number is not None else Failure("wrong", "it does not say what it answers"), number


def strange(reply: Request, seq: int, state: int) -> str | None:
    """Why a reply to a message to a site in some state cannot be used, apart from its numbers."""
    if reply.header.get("seq") != seq:
        return "it answered another message"
    if reply.header.get("state") not in (state, seq):
        return "it reports an impossible state"
    counts = reply.header.get("counts")
    if not isinstance(counts, dict) or not all(
        name in counting.ORACLES and type(amount) is int and 0 <= amount < 2**62
        for name, amount in counts.items()
    ):
        return "its counts are not valid"
    return None


Outcome = tuple[dict[int, Request], dict[int, Failure]]


class Transport(Protocol):
    """Carries requests to sites, which are numbered in the order of ``names``.

    Attributes:
        names: the names of the sites.
        sent, received: bytes on the wire, by site.
        took: the seconds of each site's last answer.
        rejoins: whether a site that is gone can come back.
    """

    names: Sequence[str]
    rejoins: bool
    sent: list[int]
    received: list[int]
    took: list[float]

    def exchange(self, requests: Mapping[int, Request], timeout: float) -> Outcome:
        """Ask all of them at once: replies by site, failures by site."""

    def wait(self, sites: Sequence[int], seconds: float) -> list[int]:
        """Wait until these sites are connected, up to a time-out; return those that are."""

    def session(self, site: int) -> int | None:
        """The number of a site's connection, or None if it is not connected."""

    def heed(self, stopping: Callable[[], bool]) -> None:
        """Stop waiting for answers while ``stopping()`` holds."""


class Connected(Transport, Protocol):
    """A transport whose sites connect and disconnect."""

    def expires(self, site: int) -> float | None:
        """The expiry of the certificate of a site's connection, in seconds since 1970, if it is known."""

    def waiting(self) -> tuple[list[str], float]:
        """The sites with pending answers, and the seconds waited for each."""


class Through:
    """Base of transports that wrap another one, to do more at its exchanges."""

    def __init__(self, inner: Connected) -> None:
        self.inner = inner
        self.names, self.rejoins = inner.names, inner.rejoins
        # The same lists, in which the inner transport counts.
        self.sent, self.received, self.took = inner.sent, inner.received, inner.took

    def exchange(self, requests: Mapping[int, Request], timeout: float) -> Outcome:
        """See `Transport.exchange`."""
        return self.inner.exchange(requests, timeout)

    def session(self, site: int) -> int | None:
        """See `Transport.session`."""
        return self.inner.session(site)

    def expires(self, site: int) -> float | None:
        """See `Connected.expires`."""
        return self.inner.expires(site)

    def waiting(self) -> tuple[list[str], float]:
        """See `Connected.waiting`."""
        return self.inner.waiting()

    def wait(self, sites: Sequence[int], seconds: float) -> list[int]:
        """See `Transport.wait`."""
        return self.inner.wait(sites, seconds)

    def heed(self, stopping: Callable[[], bool]) -> None:
        """See `Transport.heed`."""
        self.inner.heed(stopping)


@dataclass
class Local:
    """Sites in this process. Messages use the wire format all the same."""

    sites: Sequence[Site]
    names: Sequence[str] = ()
    rejoins: bool = True
    sent: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    took: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        number = len(self.sites)
        self.names = self.names or [f"site-{i}" for i in range(number)]
        self.sent, self.received, self.took = [0] * number, [0] * number, [0.0] * number

    def exchange(self, requests: Mapping[int, Request], timeout: float) -> Outcome:
        """See `Transport.exchange`; one site after the other, without a limit of time."""
        replies, failures = {}, {}
        for i, request in requests.items():
            began = time.perf_counter()
            asked = wire.pack(*request)  # so that unsuitable values fail here too, and bytes are counted
            self.sent[i] += len(asked)
            try:
                answer = wire.pack(*self.sites[i].call(*wire.unpack(asked)))
            except Exception as error:  # a remote site's exception also arrives as a message
                failures[i] = Failure("error", f"{type(error).__name__}: {error}")
                continue
            self.received[i] += len(answer)
            self.took[i] = time.perf_counter() - began
            replies[i] = Request(*wire.unpack(answer))
        return replies, failures

    def wait(self, sites: Sequence[int], seconds: float) -> list[int]:
        """See `Transport.wait`: they are always connected."""
        return list(sites)

    def session(self, site: int) -> int | None:
        """See `Transport.session`."""
        return 0

    def heed(self, stopping: Callable[[], bool]) -> None:
        """See `Transport.heed`: nothing is waited for."""
