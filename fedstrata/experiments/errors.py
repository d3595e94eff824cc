"""What is said when an experiment cannot be had."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


class ExperimentError(ValueError):
    """An experiment cannot be found, changed or run as asked; the message says why and what to do."""


def suggest(word: str, known: Sequence[str]) -> str:
    """``". Did you mean 'x'?"`` where something is close, else a full stop."""
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    return f". Did you mean {' or '.join(map(repr, close))}?" if close else "."
