"""Terms that are built from other terms, with their reads."""

from __future__ import annotations

from typing import Any

from fedstrata.core.term import Applied, Reads, Term
from fedstrata.core.types import Function, PyTree


def known(function: Function) -> bool:
    """Whether a problem's function does not depend on data, so that all parties know it."""
    return Term.of(function).reads == "nothing"


def per_sample(function: Function, name: str, why: str) -> Term:
    """The term of a function that is evaluated sample by sample; one marked per_batch is refused."""
    term = Term.of(function, name)
    if term.reads == "batch":
        raise TypeError(f"{name} cannot be marked per_batch: {why}.")
    return term


def together(*terms: Term) -> Reads:
    """Whether a function that calls these terms reads a sample or, like one of them, a batch."""
    return "batch" if any(term.reads == "batch" for term in terms) else "sample"


def calling(function: Function, *terms: Term) -> Term:
    """The term of a function that calls these terms with its own sample."""
    return Term(Applied(_calls, terms, function), together(*terms))


def on_same_samples(*terms: Term) -> tuple[Term, ...]:
    """The terms for use on the same samples: if one reads batches, all do."""
    return tuple(term.on_batches() for term in terms) if together(*terms) == "batch" else terms


def _calls(terms: tuple[Term, ...], function: Function, *args: PyTree) -> Any:
    return function(*args)
