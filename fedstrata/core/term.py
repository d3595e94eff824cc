"""A user's function together with what it reads, so that no wrapper around it can lose that.

Usually a function is the paper's ``f(x, …, ξ)`` and sees one sample. One that needs a whole batch, or none
because everyone knows it, or another mean than the arithmetic one, differs in a mark of its `Term`. A problem
makes terms of its functions when it is built; whatever is made of a term after that keeps its marks.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TypeAlias

import jax
import jax.numpy as jnp

from fedstrata.core.types import Function, PyTree
from fedstrata.support.shown import short

Reads: TypeAlias = Literal["sample", "batch", "nothing"]
MeanOf: TypeAlias = Callable[[PyTree, jax.Array], PyTree]


class Applied(functools.partial[Any]):
    """A function whose first arguments are given; two are equal where these are, and share their programs."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Applied):
            return NotImplemented
        return (self.func, self.args, self.keywords) == (other.func, other.args, other.keywords)

    def __hash__(self) -> int:
        return hash((self.func, self.args))


def positional(function: Function) -> int:
    """How many positional arguments a function takes; a large number for ``*args``."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 1_000
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return 1_000
    return sum(
        p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty for p in parameters
    )


@dataclass(frozen=True)
class Term:
    """A function of a problem and its marks; calling it calls the function.

    Terms are equal where functions and marks are, so that equal problems share their compiled programs.

    Attributes:
        function: ``function(x, …, sample)``.
        reads: what its last argument is: one ``"sample"``, or a whole ``"batch"`` of them, stacked; or
            ``"nothing"``, where it takes its variables alone and everyone knows it.
        mean: ``mean(values, weights)`` of the samples' or the clients' values, stacked, where that is not the
            arithmetic mean.
    """

    function: Function
    reads: Reads = "sample"
    mean: MeanOf | None = None

    def __repr__(self) -> str:
        return short(self.function) if self.reads == "sample" else f"{short(self.function)}[{self.reads}]"

    @staticmethod
    def of(function: Function | None, name: str = "A term", *, known: bool = False) -> Term:
        """The term of a user's function; a term is returned as it is.

        Args:
            function: the function.
            name: how an error calls it.
            known: whether a function of one argument is one that everyone knows.
        """
        if isinstance(function, Term):
            return function
        if not callable(function):
            raise TypeError(f"{name} must be a function of (x, …, sample), but is {function!r}.")
        return Term(function, "nothing" if known and positional(function) == 1 else "sample")

    def __call__(self, *args: PyTree) -> Any:
        """The function's value."""
        return self.function(*args)

    def at(self, sample: PyTree) -> Function:
        """The function at a sample (or batch), of its other arguments."""
        return self.function if self.reads == "nothing" else lambda *args: self.function(*args, sample)

    def each(self, samples: PyTree, *args: PyTree) -> Any:
        """The values at stacked samples."""
        if self.reads == "batch":
            raise TypeError(f"{self!r} returns one value for a whole batch, where every sample's is needed.")
        if (own := getattr(self.function, "each_sample", None)) is not None:  # it has a way of its own
            return own(samples, *args)
        over = jax.lax.map if one_by_one.get() else _vmapped
        return over(lambda sample: self.function(*args, sample), samples)

    def over(self, samples: PyTree, weights: jax.Array | None, *args: PyTree) -> Any:
        """The mean over stacked samples, whose weights sum to one; None is equal weights."""
        if self.reads == "batch":
            return self.function(*args, samples)
        values = self.each(samples, *args)
        if self.mean is not None:
            return self.mean(values, equal_weights(samples) if weights is None else weights)
        if weights is None:
            return jax.tree.map(lambda v: v.mean(0), values)
        return jax.tree.map(lambda v: jnp.tensordot(weights.astype(v.dtype), v, axes=1), values)

    def then(self, g: Callable[[Any], Any]) -> Self:
        """``g(function(…))``, with the same marks."""
        return replace(self, function=Applied(_then, self.function, g))

    def on_batches(self) -> Self:
        """The term as one that reads batches: the mean over a batch's samples."""
        if self.reads != "sample":
            return self
        return replace(self, function=Applied(_on_batch, self), reads="batch")

    @property
    def name(self) -> str:
        """The function's name, for errors."""
        return getattr(self.function, "__qualname__", None) or repr(self.function)


# Whether samples are taken one after the other: JAX cannot check the indices of several at once.
one_by_one: ContextVar[bool] = ContextVar("one_by_one", default=False)


def _vmapped(function: Function, samples: PyTree) -> Any:
    return jax.vmap(function)(samples)


def known(function: Function) -> bool:
    """Whether a problem's function is one that everyone knows."""
    return Term.of(function).reads == "nothing"


def per_batch(function: Function) -> Term:
    """Mark a function that sees a whole minibatch (batch statistics) in place of one sample.

    With unequal clients and ``batch_size=None`` such a function is refused: it would see padding.

    >>> import fedstrata as fs
    >>> @fs.per_batch
    ... def loss(x, batch):
    ...     return ((batch["a"] - batch["a"].mean(0)) @ x).var()
    """
    return replace(Term.of(function, "per_batch's argument"), reads="batch")


def per_sample(function: Function, name: str, why: str) -> Term:
    """The term of a function whose value at every sample is needed; one that reads a batch is refused."""
    term = Term.of(function, name)
    if term.reads == "batch":
        raise TypeError(f"{name} cannot be marked per_batch: {why}.")
    return term


def together(*terms: Term) -> Reads:
    """What a function reads that calls these terms with its last argument."""
    return "batch" if any(term.reads == "batch" for term in terms) else "sample"


def read_alike(*terms: Term) -> tuple[Term, ...]:
    """The terms for use on the same samples: where one reads batches, so do all."""
    return tuple(term.on_batches() for term in terms) if together(*terms) == "batch" else terms


def _then(first: Function, second: Callable[[Any], Any], *args: PyTree) -> Any:
    return second(first(*args))


def _on_batch(term: Term, *args: PyTree) -> Any:
    *rest, batch = args
    return term.over(batch, None, *rest)


def equal_weights(samples: PyTree) -> jax.Array:
    """Equal weights of stacked samples, which sum to one."""
    length = jax.tree.leaves(samples)[0].shape[0]
    return jnp.full((length,), 1.0 / length)
