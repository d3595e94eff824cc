"""Phrases of error messages."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def listed(words: Sequence[str]) -> str:
    """``a, b or c``."""
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def suggest(word: str, known: Sequence[str]) -> str:
    """``". Did you mean 'x'?"`` where something is close, else a full stop."""
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    return f". Did you mean {' or '.join(map(repr, close))}?" if close else "."
