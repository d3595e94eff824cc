"""The base of parties that answer a server: every message gets a reply and an entry in the account."""

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
    """The server has announced that it will send no more requests."""


class Party(ABC):
    """A party that answers a server.

    Args:
        audit: its account of the requests.
        around: a context in which a request with this header is answered.

    Attributes:
        answered: the number of answered requests.
        heard: the time of the last request.
        showed: for the account, the content of the last answer to an exchange.
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
        """The reply to any message.

        Raises:
            Ended: if the server ends the experiment.
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
            # Before the reply is sent, so that the account contains it even if the connection then breaks.
            self._account("answered", header, arrays, up=numbers(leaves), **showed)
            return wire.pack({**reply, "seq": number}, leaves, limit)
        except Ended:
            raise
        # These two have messages that are meant for the server.
        except (SiteRefused, wire.WireError) as error:
            log.warning("refused: %s", error)
            event, words, why = "refused", str(error), str(error)[:200]
        except Exception as error:
            # Messages of other exceptions may contain samples: neither the server nor a log gets them.
            log.error("failed: %s", placed(error))
            log.debug("the exception's message", exc_info=error)
            event, why = "failed", type(error).__name__
            words = f"{why}; the site's log says more"
        with suppress(SiteRefused):  # a refused peer learns nothing
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
    """The type of an exception, and the lines of its traceback."""
    frames = traceback.extract_tb(error.__traceback__)[-5:]
    places = ", ".join(f"{Path(f.filename).name}:{f.lineno} in {f.name}" for f in frames)
    return f"{type(error).__name__} ({places})"
