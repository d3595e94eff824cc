"""Helpers for error messages."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def listed(words: Sequence[str]) -> str:
    """``a, b or c``."""
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def suggest(word: object, known: Sequence[str]) -> str:
    """``". Did you mean 'x'?"`` where something is close, else a full stop."""
    folded: dict[str, list[str]] = {}  # capitals are what is most often mistaken
    for name in known:
        folded.setdefault(name.casefold(), []).append(name)
    plain = word.casefold() if isinstance(word, str) else ""
    matches = difflib.get_close_matches(plain, folded, n=3, cutoff=0.5)
    close = [name for match in matches for name in folded[match]][:3]
    return f". Did you mean {' or '.join(map(repr, close))}?" if close else "."


def misspelt(module: str) -> Callable[[str], NoReturn]:
    """A module's ``__getattr__`` that suggests a close name for an unknown one.

    Args:
        module: its name, ``__name__``. Known names are its ``__all__``, else what it defines itself.
    """

    def get(name: str) -> NoReturn:
        names = vars(sys.modules[module])
        defined = [n for n, value in names.items() if getattr(value, "__module__", None) == module]
        known = [n for n in names.get("__all__", defined) if not n.startswith("_")]
        close = "." if name.startswith("_") else suggest(name, known)
        raise AttributeError(f"module {module!r} has no attribute {name!r}{close}", name=name)

    return get


# What other libraries call an argument → the words with which a docstring here describes it.
ELSEWHERE = {
    **dict.fromkeys(("lr", "learning_rate", "step_size", "stepsize", "local_lr", "client_lr"), "step size"),
    **dict.fromkeys(("epochs", "local_epochs", "local_steps", "steps", "num_steps"), "local steps"),
}


def called_here(argument: str, known: Sequence[str], documentation: str) -> str:
    """``": for the step size, give 'gamma'."`` for a name that other libraries use, else ``""``."""
    meaning = ELSEWHERE.get(argument.casefold())
    names = meaning and described(meaning, known, documentation)
    return f": for the {meaning}, give {listed(list(map(repr, names)))}." if names else ""


def documentation(cls: type) -> str:
    """The docstrings of a class and its bases."""
    return "\n".join(base.__doc__ or "" for base in cls.__mro__[:-1])


def described(meaning: str, known: Iterable[str], documentation: str) -> list[str]:
    """The arguments that a docstring in Google style calls this, such as "gamma: the local step size γ"."""
    found = re.findall(rf"^ +(\w[\w, ]*):(?: [\w']+){{0,2}} {meaning}", documentation, re.MULTILINE)
    names = ", ".join(found).split(", ")
    return [name for name in known if name in names]


def check_spelling(name: str, given: Iterable[str], known: Sequence[str], documentation: str = "") -> None:
    """Raise if ``name`` is given an unknown argument, and suggest what was meant."""
    for argument in given:
        if argument not in known:
            meant = called_here(argument, known, documentation) or suggest(argument, known)
            raise TypeError(
                f"{name} has no argument {argument!r}{meant} It has {', '.join(known) or 'none'}."
            )


def spelling(
    name: str, documentation: str = "", missing: str | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate the function ``name`` so that unknown arguments raise an error that suggests a known one.

    With ``missing``, the advice to give, missing arguments raise one too.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        known = [argument for argument in signature.parameters if argument != "self"]
        needed = [p.name for p in signature.parameters.values() if p.default is p.empty]

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            check_spelling(name, kwargs, known, documentation)
            lacking = [argument for argument in needed[len(args) :] if argument not in kwargs]
            if lacking and missing is not None:
                raise TypeError(f"{name} needs {', '.join(lacking)}. {missing}")
            return function(*args, **kwargs)

        return checked

    return decorate
