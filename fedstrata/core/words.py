"""Phrases of error messages."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def listed(words: Sequence[str]) -> str:
    """``a, b or c``."""
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def suggest(word: str, known: Sequence[str]) -> str:
    """``". Did you mean 'x'?"`` where something is close, else a full stop."""
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    return f". Did you mean {' or '.join(map(repr, close))}?" if close else "."


def spelling(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: an argument that the function ``name`` does not have is an error with what was meant."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = [argument for argument in inspect.signature(function).parameters if argument != "self"]

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for argument in kwargs:
                if argument not in known:
                    raise TypeError(
                        f"{name} has no argument {argument!r}{suggest(argument, known)} "
                        f"It has {', '.join(known)}."
                    )
            return function(*args, **kwargs)

        return checked

    return decorate
