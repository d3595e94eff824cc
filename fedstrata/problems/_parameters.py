"""Real parameters of sets and regularisers: checked when built, broadcast to a point when used."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from numbers import Real
from typing import Any, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core import tree
from fedstrata.core.types import Array, PyTree
from fedstrata.support.tracing import is_traced

T = TypeVar("T")


def static(**options: Any) -> Any:
    """A static field: a new value triggers a recompilation."""
    return field(metadata={"static": True}, **options)


def entries(*, default: Any = MISSING, **bounds: Any) -> Any:
    """A field for a real parameter: one number, or one per entry of a point; see `real`."""
    return field(default=default, metadata={"check": partial(real, **bounds)})


def number(*, default: Any = MISSING, **bounds: Any) -> Any:
    """A field for a real parameter that is one number; see `real`."""
    return field(default=default, metadata={"check": partial(scalar, **bounds)})


class Checked:
    """A dataclass that checks its `entries` and `number` fields when built, and broadcasts them to points."""

    def __post_init__(self) -> None:
        for f in fields(self):  # type: ignore[arg-type]
            if "check" in f.metadata:
                checked = f.metadata["check"](vars(self)[f.name], f"{type(self).__name__}: {f.name}")
                object.__setattr__(self, f.name, checked)

    def fitted(self, name: str, x: PyTree) -> PyTree:
        """The parameter of this name as a pytree like ``x``, see `spread`."""
        return spread(vars(self)[name], x, f"{type(self).__name__}: {name}")


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(field, static, entries, number))
def pytree(cls: type[T]) -> type[T]:
    """A frozen dataclass registered as a pytree; compared by identity, because arrays do not compare."""
    cls = dataclass(frozen=True, eq=False)(cls)
    leaves = [f.name for f in fields(cls) if not f.metadata.get("static")]  # type: ignore[arg-type]
    tree.register(cls, lambda _: leaves)
    return cls


def concrete(tree: PyTree) -> bool:
    """Whether no leaf is traced."""
    return not any(map(is_traced, jax.tree.leaves(tree)))


def real(
    value: PyTree,
    name: str,
    *,
    minimum: float | None = None,
    above: float | None = None,
    infinite: bool = False,
) -> PyTree:
    """Check a real parameter: a number, an array, a list of numbers (read as an array) or a pytree of these.

    Args:
        value: the parameter; traced values are not checked.
        name: its name in error messages.
        minimum: the smallest allowed value.
        above: a strict lower bound.
        infinite: whether ±∞ is allowed.

    Returns:
        The parameter with floats as leaves.

    Raises:
        TypeError: if a leaf is not real.
        ValueError: for a NaN, an infinity, or a value out of range.
    """
    if isinstance(value, list | tuple) and all(isinstance(entry, Real) for entry in value):
        value = np.asarray(value)

    def check(leaf: Array) -> Any:
        if is_traced(leaf):
            return leaf
        array = np.asarray(leaf)
        if not (jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer)):
            raise TypeError(f"{name} must be real, but is {leaf!r}.")
        if np.isnan(array).any():
            raise ValueError(f"{name} contains NaN.")
        if not infinite and np.isinf(array).any():
            raise ValueError(f"{name} must be finite, but is {leaf!r}.")
        if minimum is not None and (array < minimum).any():
            raise ValueError(f"{name} must be at least {minimum:g}, but is {leaf!r}.")
        if above is not None and (array <= above).any():
            raise ValueError(f"{name} must be greater than {above:g}, but is {leaf!r}.")
        if jnp.issubdtype(array.dtype, jnp.floating):
            return leaf
        return float(array) if array.ndim == 0 else array.astype(float)

    checked = jax.tree.map(check, value)
    if not jax.tree.leaves(checked):
        raise TypeError(f"{name} must be a number, an array or a pytree of arrays, but is {value!r}.")
    return checked


def scalar(value: Any, name: str, **bounds: Any) -> Any:
    """Check a real parameter that must be one number."""
    if not jax.tree_util.all_leaves([value]) or np.shape(value) != ():
        raise ValueError(f"{name} must be one number, but is {value!r}.")
    return real(value, name, **bounds)


def spread(value: PyTree, x: PyTree, name: str) -> PyTree:
    """Broadcast a parameter to a point: a pytree with the structure, shapes and dtypes of ``x``.

    Args:
        value: a number (for every entry), a pytree like ``x``, or one vector of all the entries.
        x: the point.
        name: the parameter's name in error messages.

    Raises:
        ValueError: if the parameter does not fit the point.
    """
    leaves, structure = jax.tree.flatten(x)
    parts = jax.tree.leaves(value)
    given: Any = jax.tree.structure(value)
    if jax.tree_util.all_leaves([value]):
        sizes = [leaf.size for leaf in leaves]
        if np.shape(value) == ():
            parts = [value] * len(leaves)
        elif np.shape(value) == (sum(sizes),):
            parts = jnp.split(jnp.asarray(value), np.cumsum(sizes)[:-1])
            parts = [part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]
    elif given != structure:
        raise ValueError(f"{name} has the structure {given}, but the point has {structure}.")

    shapes = [np.shape(part) for part in parts]
    wanted = [leaf.shape for leaf in leaves]
    if len(parts) != len(leaves) or any(s not in ((), w) for s, w in zip(shapes, wanted, strict=True)):
        raise ValueError(
            f"{name} has shape {', '.join(map(str, shapes))}, which does not fit a point of shape "
            f"{', '.join(map(str, wanted))}: give a number, the point's shape, or one vector of all entries."
        )
    fitted = [jnp.broadcast_to(jnp.asarray(p, l.dtype), l.shape) for p, l in zip(parts, leaves, strict=True)]
    return jax.tree.unflatten(structure, fitted)


def dimension(value: PyTree) -> int | None:
    """The number of entries that a parameter requires of a point; None if it has a scalar leaf."""
    leaves = jax.tree.leaves(value)
    return None if any(np.shape(leaf) == () for leaf in leaves) else sum(np.size(leaf) for leaf in leaves)


def vector(value: PyTree, n: int) -> np.ndarray:
    """A concrete parameter as a vector of ``n`` float64 entries."""
    flat = [np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(value)]
    return np.broadcast_to(np.concatenate(flat), (n,))
