"""Logs of a server or a site: lines for people, or JSON with one object a line for what collects logs.

No sample is ever in a log, unless somebody asks for the level debug: an exception is told by its type and
place, as its words may hold samples.
"""

from __future__ import annotations

import datetime
import json
import logging
from pathlib import Path
from typing import Any, Literal

Level = Literal["debug", "info", "warning", "error"]
FACTS = ("round", "site")  # that a record may carry besides its words


class JsonLines(logging.Formatter):
    """A record as a line of JSON: time, level, logger, message, and round and site where they are known."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        when = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": when.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name in FACTS if (value := getattr(record, name, None)) is not None}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def begin(file: Path | None = None, as_json: bool = False, level: Level = "info") -> None:
    """Log to a file, or to the standard error."""
    handler: logging.Handler = logging.StreamHandler()
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(file)
    plain = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JsonLines() if as_json else plain)
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("fedstrata").setLevel(level.upper())
    logging.getLogger("jax").setLevel(logging.WARNING)
