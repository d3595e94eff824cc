"""A user's function with its marks, which survive any wrapping.

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
from functools import partial
from typing import Any, ClassVar, Literal, Self, TypeAlias

import jax
import jax.numpy as jnp

from fedstrata.core.types import Function, Key, PyTree
from fedstrata.support.digest import marked
from fedstrata.support.frozen import Frozen
from fedstrata.support.precision import in_precision
from fedstrata.support.shown import shapes, short

Reads: TypeAlias = Literal["sample", "batch", "nothing"]
MeanOf: TypeAlias = Callable[[PyTree, jax.Array], PyTree]


class Applied(functools.partial[Any]):
    """A partial function, equal to another if function and arguments are: they share programs."""

    def __eq__(self, other: object) -> bool:
        its = (other.func, other.args, other.keywords) if isinstance(other, Applied) else None
        return (self.func, self.args, self.keywords) == its

    def __hash__(self) -> int:
        return hash((self.func, self.args))

    @property
    def draws(self) -> bool:
        """Whether a term among the arguments draws."""
        return any(leaf.draws for leaf in jax.tree.leaves(self.args) if isinstance(leaf, Term | Applied))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Seeded:
    """ξ of a function that draws: a sample and the key that belongs to it.

    Of stacked samples there are as many keys, or one from which they are split. Evaluated twice at the same
    ξ, a function draws the same.
    """

    sample: PyTree
    key: Key


@dataclass(frozen=True)
class Stochastic:
    """A user's ``function(x, …, sample, key)`` as a function of ξ; see `stochastic`."""

    function: Function
    evaluate: Function | None = None
    draws: ClassVar[bool] = True

    def __call__(self, *args: PyTree) -> Any:
        """The value at a `Seeded` sample, or at a plain one the value without randomness."""
        *variables, xi = args
        match xi:
            case Seeded(sample, key):
                return self.function(*variables, sample, key)
            case _ if self.evaluate is not None:
                return self.evaluate(*variables, xi)
        return self.function(*variables, xi, None)

    def __repr__(self) -> str:
        return short(self.function)


@dataclass(frozen=True)
class Reading:
    """A user's ``function(x, …, sample, frozen)`` as a function without its last argument."""

    function: Function
    frozen: Frozen

    def __call__(self, *args: PyTree) -> Any:
        """The value at the frozen arrays."""
        return self.function(*args, self.frozen.now)

    def __repr__(self) -> str:
        return short(self.function)


def positional(function: Function) -> int:
    """The number of positional arguments of a function; a large number for ``*args``."""
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
        reads: its last argument: one ``"sample"`` (`Seeded`, if it draws), a ``"batch"`` of them, stacked, or
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
        term = Term(function, "nothing" if known and positional(function) == 1 else "sample")
        if not term.draws and marked(function, "draws"):
            raise TypeError(
                f"{name} calls a function marked fs.stochastic, which would get no key from it. Mark the "
                "outer function, and pass the key on: fs.stochastic(lambda x, sample, key: …)."
            )
        return term

    @property
    def draws(self) -> bool:
        """Whether its value depends on a key too, see `stochastic`."""
        return getattr(self.function, "draws", False) is True

    def __call__(self, *args: PyTree) -> Any:
        """The function's value; one that does not draw gets no key."""
        *variables, last = args
        return self.function(*variables, last if self.draws else unseeded(last))

    def at(self, sample: PyTree) -> Function:
        """The function at a sample (or batch), of its other arguments."""
        return self.function if self.reads == "nothing" else lambda *args: self(*args, sample)

    def each(self, samples: PyTree, *args: PyTree, at_once: int | None = None) -> Any:
        """The values at stacked samples, of which so many are evaluated at once, also by derivatives."""
        if self.reads == "batch":
            raise TypeError(f"{self!r} returns one value for a whole batch, where every sample's is needed.")
        samples = _one_key_each(samples) if self.draws else unseeded(samples)
        if (own := getattr(self.function, "each_sample", None)) is not None:  # it has a way of its own
            return own(samples, *args)
        at_one = in_precision(lambda sample: self.function(*args, sample))
        if one_by_one.get():
            return jax.lax.map(at_one, samples)
        if at_once is None or at_once >= jax.tree.leaves(samples)[0].shape[0]:
            return jax.vmap(at_one)(samples)
        return jax.lax.map(jax.checkpoint(at_one), samples, batch_size=at_once)

    def over(
        self, samples: PyTree, weights: jax.Array | None, *args: PyTree, at_once: int | None = None
    ) -> Any:
        """The mean over stacked samples, whose weights sum to one; None is equal weights. See `each`."""
        if self.reads == "batch":
            return in_precision(self)(*args, samples)
        values = self.each(samples, *args, at_once=at_once)
        if self.mean is not None:
            return self.mean(values, equal_weights(samples) if weights is None else weights)
        if weights is None:
            return jax.tree.map(lambda v: v.mean(0), values)
        return jax.tree.map(lambda v: jnp.tensordot(weights.astype(v.dtype), v, axes=1), values)

    def shape(self, *args: PyTree) -> PyTree:
        """The shape of the value at a point and a sample; a function that reads batches sees one of two."""
        *variables, sample = args
        if self.reads == "batch":
            sample = jax.tree.map(lambda s: jax.ShapeDtypeStruct((2, *s.shape), s.dtype), sample)
        value = jax.eval_shape(lambda *args: self(*args), *variables, sample)
        if self.draws:
            drawn = jax.eval_shape(lambda *args: self(*args), *variables, Seeded(sample, jax.random.key(0)))
            if jax.tree.map(jnp.shape, drawn) != jax.tree.map(jnp.shape, value):
                raise TypeError(f"with a key it returns {shapes(drawn)}, without one {shapes(value)}")
        return value

    def then(self, g: Callable[[Any], Any]) -> Self:
        """``g(function(…))``, with the same marks."""
        return replace(self, function=Applied(_then, self.function, g))

    def reading(self, frozen: Frozen) -> Self:
        """The term of a function whose last argument, behind the sample and the key, are frozen arrays."""
        match self.function:
            case Reading(_, already) | Stochastic(Reading(_, already)) if already is frozen:
                return self  # of a problem that is made from another one
            case Stochastic(inner, evaluate):
                still = None if evaluate is None else Reading(evaluate, frozen)
                return replace(self, function=Stochastic(Reading(inner, frozen), still))
            case inner:
                return replace(self, function=Reading(inner, frozen))

    def on_batches(self) -> Self:
        """The term as one that reads batches: the mean over a batch's samples."""
        if self.reads != "sample":
            return self
        return replace(self, function=Applied(_on_batch, self), reads="batch")


# Whether samples are taken one after the other: JAX cannot check the indices of several at once.
one_by_one: ContextVar[bool] = ContextVar("one_by_one", default=False)


def per_batch(function: Function) -> Term:
    """Mark a function that sees a whole minibatch (batch statistics) in place of one sample.

    With unequal clients and ``batch_size=None`` such a function is refused: it would see padding.

    >>> import fedstrata as fs
    >>> @fs.per_batch
    ... def loss(x, batch):
    ...     return ((batch["a"] - batch["a"].mean(0)) @ x).var()
    """
    return replace(Term.of(function, "per_batch's argument"), reads="batch")


def stochastic(function: Function | None = None, *, evaluate: Function | None = None) -> Any:
    """Mark a random loss, for dropout or augmentation: ``loss(x, sample, key)`` with a key for each sample.

    A method that evaluates two points at the same ξ uses the same key at both; where it takes full batches it
    draws once a step. Evaluations take the loss without randomness.

    Args:
        function: ``function(x, …, sample, key)``; marked `per_batch` too, it sees a batch and one key.
        evaluate: the loss without randomness, ``evaluate(x, …, sample)``; by default
            ``function(x, …, sample, None)``.

    Returns:
        the marked function; without ``function``, a decorator.

    >>> import fedstrata as fs, jax
    >>> @fs.stochastic
    ... def loss(x, sample, key):
    ...     keep = 1.0 if key is None else 2.0 * jax.random.bernoulli(key, 0.5, x.shape)
    ...     return ((keep * x) @ sample["a"] - sample["b"]) ** 2
    >>> problem = fs.Minimization(loss)
    """
    if function is None:
        return partial(stochastic, evaluate=evaluate)
    if isinstance(function, Term):
        return replace(function, function=Stochastic(function.function, evaluate))
    if not callable(function):
        raise TypeError(f"stochastic takes a function of (x, …, sample, key), but it is {function!r}.")
    return Term(Stochastic(function, evaluate))


def with_frozen(function: Function, arrays: PyTree) -> Term:
    """Give a function arrays as its last argument that no method changes, and of which there is one copy.

    ``frozen=`` of the problem classes does it for all of their functions.

    Args:
        function: ``function(x, …, sample, arrays)``, or one marked `stochastic`, which gets its key before.
        arrays: a pytree of arrays.

    >>> import fedstrata as fs, jax.numpy as jnp
    >>> loss = fs.with_frozen(lambda x, s, base: (s["a"] @ (base + x) - s["b"]) ** 2, jnp.ones(3))
    >>> robust = fs.dro.cvar(loss, level=0.1)
    """
    return Term.of(function, "with_frozen's argument").reading(Frozen.of(arrays))


def unseeded(samples: PyTree) -> PyTree:
    """Samples without keys."""
    return samples.sample if isinstance(samples, Seeded) else samples


def _one_key_each(samples: PyTree) -> PyTree:
    if not isinstance(samples, Seeded) or samples.key.ndim:
        return samples
    return Seeded(samples.sample, keys_of(samples.sample, samples.key))


def keys_of(samples: PyTree, key: Key) -> Key:
    """A key for each of stacked samples; however many more there are, those of the first are the same."""
    rows = jnp.arange(jax.tree.leaves(samples)[0].shape[0])
    return jax.vmap(partial(jax.random.fold_in, key))(rows)


def _then(first: Function, second: Callable[[Any], Any], *args: PyTree) -> Any:
    return second(first(*args))


def _on_batch(term: Term, *args: PyTree) -> Any:
    *rest, batch = args
    return term.over(batch, None, *rest)


def equal_weights(samples: PyTree) -> jax.Array:
    """Equal weights of stacked samples, which sum to one."""
    return jnp.full((length := jax.tree.leaves(samples)[0].shape[0],), 1.0 / length)
