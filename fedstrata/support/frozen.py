"""Constant arrays that compiled programs take as arguments."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from fedstrata.support.digest import tree_digest
from fedstrata.support.shown import shapes

PyTree: TypeAlias = Any


class Frozen:
    """Constant arrays that functions read, such as the parameters of a pre-trained network.

    Compiled programs take them as arguments, so that all clients share one copy, and other arrays of the same
    shapes compile nothing.

    Attributes:
        arrays: the arrays, on the device.
    """

    def __init__(self, arrays: PyTree) -> None:
        self.arrays = jax.tree.map(jnp.asarray, arrays)

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


_lent: ContextVar[dict[int, PyTree]] = ContextVar("lent", default={})  # noqa: B039 - never written to


@contextmanager
def lending(frozen: Sequence[Frozen], arrays: Sequence[PyTree]) -> Iterator[None]:
    """Let these arrays stand for the frozen ones, while a program is traced that takes them as arguments."""
    token = _lent.set({id(one): stand for one, stand in zip(frozen, arrays, strict=True)})
    try:
        yield
    finally:
        _lent.reset(token)
