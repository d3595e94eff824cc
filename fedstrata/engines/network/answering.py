"""What all who answer a server have in common: every message has a reply, and is accounted for."""

from __future__ import annotations

import logging
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

from fedstrata.engines.network import wire
from fedstrata.engines.network.audit import Audit, described, numbers
from fedstrata.engines.network.states import SiteRefused
from fedstrata.engines.network.wire import Arrays, Header

log = logging.getLogger("fedstrata.network")
Around = Callable[[Header], AbstractContextManager[Any]]


class Ended(Exception):
    """The server has said that nothing more will be asked."""


class Party(ABC):
    """Who answers a server.

    Args:
        audit: its account of what it was asked.
        around: a context in which a request with this header is answered.

    Attributes:
        answered: how many requests were answered.
        heard: when the last one came.
        showed: what the server got in the last answer to an exchange, for the account.
    """

    def __init__(self, audit: Audit | None, around: Around = nullcontext) -> None:
        self.audit, self.around = audit, around
        self.answered, self.heard = 0, time.monotonic()

    @property
    @abstractmethod
    def showed(self) -> str:
        """See above."""

    @abstractmethod
    def call(self, header: Header, arrays: Arrays) -> tuple[Header, Arrays]:
        """Answer one request."""

    def answer(self, message: bytes, limit: int = wire.LIMIT) -> bytes:
        """A reply to whatever comes.

        Raises:
            Ended: when the server says so.
        """
        self.heard = time.monotonic()
        number: int | None = None
        header: Header = {}
        arrays: Arrays = []
        try:
            header, arrays = wire.unpack(message, limit)
            number = wire.value(header, "seq", int)
            with self.around(header):
                reply, leaves = self.call(header, arrays)
            self.answered += 1
            showed = {"shows": self.showed} if self.showed and header["op"] == "exchange" else {}
            # Before the reply is sent: what a site has shown is in its account, even if the line then breaks.
            self._account("answered", header, arrays, up=numbers(leaves), **showed)
            return wire.pack({**reply, "seq": number}, leaves, limit)
        except Ended:
            raise
        # These two have words that were written for the server to read.
        except (SiteRefused, wire.WireError) as error:
            log.warning("refused: %s", error)
            event, words, why = "refused", str(error), str(error)[:200]
        except Exception as error:
            # The words of another exception may hold samples: neither the server nor a log gets them.
            log.error("failed: %s", placed(error))
            log.debug("the exception's words", exc_info=error)
            event, why = "failed", type(error).__name__
            words = f"{why}; the site's log says more"
        with suppress(SiteRefused):  # who is refused learns nothing
            self._account(event, header, arrays, why=why)
        return wire.pack({"seq": number, "error": words[:500]}, [], limit)

    def _account(self, event: str, header: Header, arrays: Arrays, **facts: Any) -> None:
        try:
            if self.audit is not None:
                self.audit.note(event, **described(header, arrays), **facts)
        except OSError as error:
            log.error("the account cannot be written: %s", error)
            why = error.strerror or type(error).__name__
            raise SiteRefused(f"This site answers only what it can record in its account ({why}).") from error


def placed(error: BaseException) -> str:
    """The type of an exception, and through which lines it came."""
    frames = traceback.extract_tb(error.__traceback__)[-5:]
    places = ", ".join(f"{Path(f.filename).name}:{f.lineno} in {f.name}" for f in frames)
    return f"{type(error).__name__} ({places})"
