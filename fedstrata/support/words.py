"""Phrases of error messages."""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def listed(words: Sequence[str]) -> str:
    """``a, b or c``."""
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def suggest(word: str, known: Sequence[str]) -> str:
    """``". Did you mean 'x'?"`` where something is close, else a full stop."""
    folded: dict[str, list[str]] = {}  # capitals are what is most often mistaken
    for name in known:
        folded.setdefault(name.casefold(), []).append(name)
    matches = difflib.get_close_matches(word.casefold(), folded, n=3, cutoff=0.5)
    close = [name for match in matches for name in folded[match]][:3]
    return f". Did you mean {' or '.join(map(repr, close))}?" if close else "."


def misspelt(module: str) -> Callable[[str], NoReturn]:
    """A module's ``__getattr__``: a name that it does not have is an error with what was meant.

    Args:
        module: its name, ``__name__``. What it knows is its ``__all__``, else what it defines itself.
    """

    def get(name: str) -> NoReturn:
        own = vars(sys.modules[module])
        defined = [n for n, value in own.items() if getattr(value, "__module__", None) == module]
        known = [n for n in own.get("__all__", defined) if not n.startswith("_")]
        close = "." if name.startswith("_") else suggest(name, known)
        raise AttributeError(f"module {module!r} has no attribute {name!r}{close}", name=name)

    return get


def check_spelling(name: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Raise where an argument of ``name`` is none that it has, with what was meant."""
    for argument in given:
        if argument not in known:
            raise TypeError(
                f"{name} has no argument {argument!r}{suggest(argument, known)} It has {', '.join(known)}."
            )


def spelling(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: an argument that the function ``name`` does not have is an error with what was meant."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = [argument for argument in inspect.signature(function).parameters if argument != "self"]

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            check_spelling(name, kwargs, known)
            return function(*args, **kwargs)

        return checked

    return decorate
