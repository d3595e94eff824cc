"""Arithmetic on pytrees, where optax has no function of the exact meaning.

Scalars are cast to each leaf's dtype, so that a float64 step size never promotes float32 parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedstrata.core.types import PyTree, Real
from fedstrata.support.tracing import is_traced

add = optax.tree.add
sub = optax.tree.sub
dot = optax.tree.vdot
norm = optax.tree.norm
where = optax.tree.where


def zeros_like(tree: PyTree) -> PyTree:
    """Zeros of the same shapes and dtypes; outside a trace, on the host, which compiles nothing."""

    def zeros(leaf: Any) -> Any:
        return (jnp if is_traced(leaf) else np).zeros_like(leaf)

    return jax.tree.map(zeros, tree)


def scale(factor: Real, tree: PyTree) -> PyTree:
    """``factor · tree`` in the tree's own dtypes."""
    return jax.tree.map(lambda leaf: jnp.asarray(factor, leaf.dtype) * leaf, tree)


def axpy(factor: Real, x: PyTree, y: PyTree) -> PyTree:
    """``factor · x + y`` in the dtypes of ``y``."""
    return jax.tree.map(lambda a, b: (jnp.asarray(factor, b.dtype) * a + b).astype(b.dtype), x, y)


def lerp(weight: Real, x: PyTree, y: PyTree) -> PyTree:
    """``(1 − weight) · x + weight · y``."""
    return axpy(weight, sub(y, x), x)


def dimension(tree: PyTree) -> int:
    """The number ``n`` of scalars in the tree."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def row(tree: PyTree, index: Any) -> PyTree:
    """One entry of every leaf's leading axis: of clients, runs or evaluations."""
    return jax.tree.map(lambda leaf: leaf[index], tree)


def same_structure(one: PyTree, other: PyTree) -> bool:
    """Whether two pytrees have the same structure; shapes may differ."""
    first: Any = jax.tree.structure(one)
    return bool(first == jax.tree.structure(other))


def register(cls: type, leaves_of: Callable[[Any], Iterable[str]]) -> None:
    """Make a pytree of a dataclass: the fields that ``leaves_of`` names are its children, the rest is static.

    An object made of children skips the checks of ``__init__``, as they may be tracers, and keeps its leaves.
    """
    names = tuple(f.name for f in fields(cls))

    def flatten(obj: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        leaves = leaf_names(obj, leaves_of)
        keyed = [(jax.tree_util.GetAttrKey(name), vars(obj)[name]) for name in names if name in leaves]
        return keyed, (leaves, *(vars(obj)[name] for name in names if name not in leaves))

    def unflatten(static: tuple[Any, ...], children: Iterable[Any]) -> Any:
        obj: Any = object.__new__(cls)
        leaves, values, rest = static[0], iter(children), iter(static[1:])
        for name in names:
            object.__setattr__(obj, name, next(values if name in leaves else rest))
        fix_leaves(obj, leaves)
        return obj

    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)


def leaf_names(obj: Any, leaves_of: Callable[[Any], Iterable[str]]) -> frozenset[str]:
    """The names of a registered object's leaves: fixed ones, else by ``leaves_of``."""
    fixed = vars(obj).get("_leaves")
    return frozenset(leaves_of(obj)) if fixed is None else fixed


def fix_leaves(obj: Any, leaves: Iterable[str]) -> None:
    """Fix which fields of a registered object are leaves, whatever their values."""
    object.__setattr__(obj, "_leaves", frozenset(leaves))
