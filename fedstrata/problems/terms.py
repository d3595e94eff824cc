"""Terms made of other terms: they read what those read."""

from __future__ import annotations

from typing import Any

from fedstrata.core.term import Applied, Reads, Term
from fedstrata.core.types import Function, PyTree


def known(function: Function) -> bool:
    """Whether a problem's function is one that everyone knows."""
    return Term.of(function).reads == "nothing"


def per_sample(function: Function, name: str, why: str) -> Term:
    """The term of a function whose value at every sample is needed; one that reads a batch is refused."""
    term = Term.of(function, name)
    if term.reads == "batch":
        raise TypeError(f"{name} cannot be marked per_batch: {why}.")
    return term


def together(*terms: Term) -> Reads:
    """What a function reads that calls these terms with its last argument."""
    return "batch" if any(term.reads == "batch" for term in terms) else "sample"


def calling(function: Function, *terms: Term) -> Term:
    """The term of a function that calls these terms, and hands its sample on to them."""
    return Term(Applied(_calls, terms, function), together(*terms))


def read_alike(*terms: Term) -> tuple[Term, ...]:
    """The terms for use on the same samples: where one reads batches, so do all."""
    return tuple(term.on_batches() for term in terms) if together(*terms) == "batch" else terms


def _calls(terms: tuple[Term, ...], function: Function, *args: PyTree) -> Any:
    return function(*args)
