"""Constant arrays that compiled programs take as arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.support.digest import tree_digest
from fedstrata.support.points import wrapping
from fedstrata.support.shown import shapes

PyTree: TypeAlias = Any


class Frozen:
    """Constant arrays that functions read, such as the parameters of a pre-trained network.

    Compiled programs take them as arguments, so that all clients share one copy, and other arrays of the same
    shapes compile nothing.

    Attributes:
        arrays: the arrays, on the device.

    Raises:
        ValueError: for whole numbers that would wrap around.
    """

    def __init__(self, arrays: PyTree) -> None:
        self.arrays = jax.tree_util.tree_map_with_path(_on_device, arrays)
        _alive[id(self)] = self

    @staticmethod
    def of(arrays: Frozen | PyTree) -> Frozen:
        """Wrap a user's arrays; frozen ones are returned unchanged."""
        return arrays if isinstance(arrays, Frozen) else Frozen(arrays)

    def __repr__(self) -> str:
        return f"Frozen({shapes(self.arrays)})"

    @property
    def now(self) -> PyTree:
        """The arrays or, while a program is traced, its arguments in their place."""
        return _lent.get().get(id(self), self.arrays)

    @functools.cached_property
    def digest(self) -> str:
        """The arrays' digest, by which checkpoints and sites recognise them."""
        return tree_digest(self.arrays)


def _on_device(path: Any, leaf: Any) -> jax.Array:
    array = jnp.asarray(leaf)
    if isinstance(leaf, np.ndarray | np.generic) and (why := wrapping(np.asarray(leaf), array.dtype)):
        raise ValueError(f"frozen{jax.tree_util.keystr(path)} {why}")
    return array


_alive: WeakValueDictionary[int, Frozen] = WeakValueDictionary()
_lent: ContextVar[dict[int, PyTree]] = ContextVar("lent", default={})  # noqa: B039 - never written to


def lending(frozen: Sequence[Frozen], arrays: Sequence[PyTree]) -> AbstractContextManager[None]:
    """Let these arrays stand for the frozen ones, while a program is traced that takes them as arguments."""
    return _standing_for(tuple(map(id, frozen)), arrays)


@contextmanager
def _standing_for(numbers: Sequence[int], arrays: Sequence[PyTree]) -> Iterator[None]:
    token = _lent.set({**_lent.get(), **dict(zip(numbers, arrays, strict=True))})
    try:
        yield
    finally:
        _lent.reset(token)


def jit(function: Callable[..., Any], static_argnums: int | tuple[int, ...] = ()) -> Callable[..., Any]:
    """`jax.jit` for programs that may read frozen arrays, which become arguments.

    As constants they would be copied into every program. All frozen arrays are arguments, because JAX drops
    those that a program does not read.
    """
    static = (static_argnums,) if isinstance(static_argnums, int) else static_argnums

    @functools.partial(jax.jit, static_argnums=(0, *(number + 2 for number in static)))
    def lent(numbers: tuple[int, ...], arrays: list[PyTree], *args: Any) -> Any:
        with _standing_for(numbers, arrays):
            return function(*args)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        alive = dict(_alive)
        return lent(tuple(alive), [one.now for one in alive.values()], *args)

    return call
