"""What a phase sees: one client, its samples, and the mean of a user's function over them.

A user's function takes one sample. `Samples.mean` draws a minibatch (or takes all real samples), and gives
back an `Oracle`: the mean of that function over those samples, as a function of the other arguments. Padding
is never drawn and never counted. Each use of an oracle is booked in the open tally, in units of samples.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core.counting import count
from fedstrata.core.term import Seeded, Term, equal_weights, keys_of
from fedstrata.core.types import Function, Integer, Key, PyTree, Real

DRAWS, AUGMENTS = 1, 2  # what a key is folded with, for the keys of functions that draw and of augmentation


class Converted(abc.ABC):
    """A stand-in for an array of samples, converted when samples are taken; see `data.scaled`."""

    @abc.abstractmethod
    def opened(self) -> Any:
        """The array as a function sees it."""


def is_converted(leaf: Any) -> bool:
    """Whether a leaf is `Converted`."""
    return isinstance(leaf, Converted)


def opened(samples: PyTree) -> PyTree:
    """Convert samples to the form that a user's function sees."""
    return jax.tree.map(
        lambda leaf: leaf.opened() if is_converted(leaf) else leaf, samples, is_leaf=is_converted
    )


@dataclass(frozen=True)
class Oracle:
    """``f(·) = Σ_s w_s term(·, sample_s)``: a user's function averaged over drawn samples.

    Calling it evaluates the mean and books function values. Derivatives are taken with the functions of
    `fedstrata.estimators`, which book gradients and products; JAX's own, which would be booked as values, are
    refused. ``silent`` is the same mean, differentiable and without booking.
    """

    term: Term
    samples: PyTree
    weights: jax.Array | None
    size: Integer

    def silent(self, *args: PyTree) -> Any:
        """The mean, not booked."""
        return self.term.over(self.samples, self.weights, *args)

    def apply(self, op: Function, of: str = "derivatives") -> Any:
        """``op(f)``, not booked; of an ``op`` linear in f, so that channels can bound it sample by sample."""
        return op(self.silent)

    def each(self, *args: PyTree) -> Any:
        """Every sample's value, stacked; weigh them with `weigh`."""
        self.book("values")
        return _undifferentiated(self.term.each(self.samples, *_undifferentiated(args)))

    def weigh(self) -> jax.Array:
        """The weights of the samples: they sum to one, and padding has zero."""
        return equal_weights(self.samples) if self.weights is None else self.weights

    def book(self, kind: str, amount: int = 1) -> None:
        """Book ``amount`` oracle calls of ``kind`` for each sample."""
        count(kind, amount, self.size)

    def __call__(self, *args: PyTree) -> Any:
        """The mean, booked as function values."""
        self.book("values")
        return _undifferentiated(self.apply(lambda f: f(*_undifferentiated(args)), "values"))


@jax.custom_jvp
def _undifferentiated(value: PyTree) -> PyTree:
    """Return the value, and raise if JAX differentiates through it. Adds nothing to compiled programs."""
    return value


@_undifferentiated.defjvp
def _refuse(primals: tuple[PyTree], tangents: tuple[PyTree]) -> tuple[PyTree, PyTree]:
    raise TypeError(
        "An oracle was differentiated by JAX, so that a gradient would be counted as a function value. Use "
        'fedstrata.estimators.gradients.gradient(f, x), or f.silent(x), not counted, and f.book("gradients").'
    )


@dataclass(frozen=True)
class Samples:
    """A client's samples, ``leaves[offset : offset + size]`` of all clients', fetched when needed.

    Attributes:
        leaves: flat arrays with the samples of all clients on the first axis, or this client's alone.
        size: the number of its samples; a plain integer if it is known when a program is traced.
        offset: where they begin.
        capacity: the number of rows of `data`; None if the leaves hold this client's samples alone.
        augment: ``augment(sample, key)``, which replaces each sample that a method takes; or None.
    """

    leaves: PyTree
    size: Integer
    offset: Integer = 0
    capacity: int | None = None
    augment: Function | None = None

    @property
    def known(self) -> bool:
        """Whether the size is known while a program is traced."""
        return isinstance(self.size, int)

    @property
    def rows(self) -> int:
        """The number of rows of `data`."""
        return jax.tree.leaves(self.leaves)[0].shape[0] if self.capacity is None else self.capacity

    @property
    def data(self) -> PyTree:
        """This client's arrays; rows beyond its size repeat the last sample, so that losses stay finite."""
        if self.capacity is None:
            return opened(self.leaves)
        if self.known and self.size == self.capacity:
            slices = partial(jax.lax.dynamic_slice_in_dim, start_index=self.offset, slice_size=self.capacity)
            return opened(jax.tree.map(slices, self.leaves))
        return self.take(jnp.minimum(jnp.arange(self.capacity), self.size - 1))

    def take(self, positions: jax.Array) -> PyTree:
        """The samples at these positions."""
        return opened(jax.tree.map(lambda leaf: leaf[self.offset + positions], self.leaves))

    def fetched(self) -> Samples:
        """A copy in separate arrays, for a phase that passes over all samples many times."""
        if self.capacity is None:
            return self
        rows = self.offset + jnp.minimum(jnp.arange(self.capacity), self.size - 1)
        leaves = jax.tree.map(lambda leaf: leaf[rows], self.leaves)
        return Samples(leaves, self.size, augment=self.augment)

    def mean(self, function: Function, key: Key, batch_size: int | None) -> Oracle:
        """``function`` averaged over ``batch_size`` samples drawn with replacement, or over all (None)."""
        term = Term.of(function)
        if batch_size is None:
            oracle = self.full_mean(term)
        else:
            positions = jax.random.randint(key, (batch_size,), 0, self.size, dtype=jnp.int32)
            oracle = Oracle(term, self.take(positions), None, batch_size)
        samples = oracle.samples
        if self.augment is not None:
            samples = jax.vmap(self.augment)(samples, keys_of(samples, jax.random.fold_in(key, AUGMENTS)))
        if term.draws:
            samples = Seeded(samples, jax.random.fold_in(key, DRAWS))
        return replace(oracle, samples=samples)

    def full_mean(self, function: Function) -> Oracle:
        """``function`` averaged over all real samples, as they are and without randomness."""
        term = Term.of(function)
        if self.known:
            return Oracle(term, self.data, None, self.size)
        if term.reads == "batch":
            raise ValueError(
                "A loss marked per_batch would see the padding of unequal clients in a full batch: give "
                "clients of equal size; or a batch_size, and default_metrics=False, for metrics take all."
            )
        real = jnp.arange(self.rows) < self.size
        weights = jnp.where(real, 1.0 / self.size, 0.0)
        return Oracle(term, self.data, weights, self.size)


@dataclass(frozen=True)
class Client:
    """One client, as a phase sees it.

    Attributes:
        index: its number, 0 … m − 1.
        train: its samples.
        valid: its validation samples, if the data has any; else the same as ``train``. Upper levels draw
            here.
        memory: what it remembered the last time (control variates, a personal model), or None.
        fraction: its share n_i/N of all the clients' samples.
    """

    index: Integer
    train: Samples
    valid: Samples
    memory: PyTree = None
    fraction: Real | None = None

    @property
    def data(self) -> PyTree:
        """The arrays of its samples, padding included."""
        return self.train.data

    @property
    def size(self) -> Integer:
        """The number of samples without padding."""
        return self.train.size

    def mean(self, function: Function, key: Key, batch_size: int | None) -> Oracle:
        """See `Samples.mean`."""
        return self.train.mean(function, key, batch_size)


def steps_of(H: Any, client: Client) -> Integer:
    """A client's number of local steps, rounded up: ``H`` is one for all, or an array with one per client."""
    H = H[client.index] if np.ndim(H) == 1 else H
    return jnp.ceil(H).astype(jnp.int32) if jnp.issubdtype(jnp.result_type(H), jnp.floating) else H
