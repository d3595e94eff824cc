"""Convert a user's point to arrays, or raise an error that says what to give instead."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

PyTree: TypeAlias = Any


@dataclass(frozen=True)
class Fixed:
    """A function inside a module, such as an activation. It has no leaves and is called unchanged."""

    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's value."""
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return repr(self.function)


jax.tree_util.register_pytree_node(Fixed, lambda fixed: ((), fixed), lambda fixed, _: fixed)


def wrapping(leaf: np.ndarray, dtype: np.dtype) -> str:
    """The fault of whole numbers that do not fit into a dtype; empty if they do."""
    if leaf.dtype.kind not in "iu" or dtype.itemsize >= leaf.dtype.itemsize or not leaf.size:
        return ""
    limits = np.iinfo(dtype)
    if leaf.min() >= limits.min and leaf.max() <= limits.max:
        return ""
    return (
        f"has whole numbers from {leaf.min()} to {leaf.max()}, which would wrap around in {dtype}. Renumber "
        "them, give them as floats, or enable 64 bits (jax_enable_x64)."
    )


def as_floats(tree: PyTree, name: str) -> PyTree:
    """Convert leaves to JAX arrays, integers to the default float; leaves without numbers are an error.

    Functions inside a module (Equinox's activations) are kept as constants, see `Fixed`.
    """
    if is_torch_module(tree):
        raise TypeError(
            f"{name} is a PyTorch module. Make a loss of it, loss = fs.from_torch(module, "
            "torch.nn.functional.cross_entropy), and start from its parameters, loss.x0."
        )

    def convert(path: tuple[jax.tree_util.KeyEntry, ...], leaf: Any, in_equinox: bool = False) -> Any:
        if _is_equinox(leaf):
            inside = jax.tree_util.tree_map_with_path
            return inside(lambda inner, each: convert((*path, *inner), each, True), leaf)
        where = f"{name}{jax.tree_util.keystr(path)}"
        if _is_statistic(leaf) or "['batch_stats']" in where:  # of Flax NNX, or of linen
            raise TypeError(
                f"{where} is a batch statistic, which would be trained like a parameter. Use group or "
                "layer normalisation, whose outputs depend on one sample alone."
            )
        if path and callable(leaf) and not hasattr(leaf, "dtype"):
            return Fixed(leaf)
        if in_equinox and not jnp.issubdtype(getattr(leaf, "dtype", bool), jnp.inexact):
            raise TypeError(
                f"{where} is {leaf!r}, a constant of an Equinox module that would be trained. Take the "
                f"parameters alone, {name}, static = eqx.partition(module, eqx.is_inexact_array), and call "
                "eqx.combine(x, static) in the loss."
            )
        try:
            if type(leaf) in (np.ndarray, bool, int) or isinstance(leaf, np.generic):
                # a copy: `jnp.asarray` takes longer, compiles something for each shape, and wraps integers
                copied = np.array(leaf)
                array = jax.device_put(
                    copied.astype(jnp.result_type(float)) if copied.dtype.kind in "biu" else copied
                )
            else:
                array = jnp.asarray(leaf)
        except (TypeError, ValueError, RuntimeError) as error:
            if getattr(leaf, "requires_grad", False):
                raise TypeError(
                    f"{where} is a PyTorch parameter. Make a loss of its module, loss = fs.from_torch("
                    "module, torch.nn.functional.cross_entropy), and start from loss.x0; or give tensors, "
                    "parameter.detach()."
                ) from error
            raise TypeError(f"{where} is not an array: {leaf!r}.") from error
        if jnp.issubdtype(array.dtype, jax.dtypes.extended):
            raise TypeError(
                f"{where} is a random key, which cannot be optimised. With Flax NNX, take the parameters: "
                f"graph, {name}, rest = nnx.split(model, nnx.Param, ...), and call nnx.merge(graph, x, rest) "
                "in the loss."
            )
        if not jnp.issubdtype(array.dtype, jnp.inexact):
            array = array.astype(jnp.result_type(float))
        if jnp.issubdtype(array.dtype, jnp.complexfloating):
            raise TypeError(
                f"{name}{jax.tree_util.keystr(path)} is complex; give real and imaginary parts as two arrays."
            )
        return array

    return jax.tree_util.tree_map_with_path(
        convert, tree, is_leaf=lambda t: _is_equinox(t) or _is_statistic(t)
    )


def is_torch_module(value: object) -> bool:
    """Whether a value is a `torch.nn.Module`; does not import PyTorch."""
    return any(cls.__module__ == "torch.nn.modules.module" for cls in type(value).__mro__)


def _is_statistic(tree: PyTree) -> bool:
    """Whether a leaf is a batch normalisation statistic of Flax NNX."""
    return any(
        cls.__name__ == "BatchStat" and cls.__module__.startswith("flax.") for cls in type(tree).__mro__
    )


def _is_equinox(tree: PyTree) -> bool:
    """Whether a subtree is an `equinox.Module`, whose leaves other than float arrays are constants."""
    equinox = sys.modules.get("equinox")
    return equinox is not None and isinstance(tree, equinox.Module)


def nonfinite_leaves(tree: PyTree) -> list[str]:
    """The paths of leaves that hold a NaN or an infinity."""
    paths = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        # on the host: on a device each leaf would be two small programs
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and not bool(np.isfinite(np.asarray(leaf)).all()):
            paths.append(jax.tree_util.keystr(path) or "(value)")
    return paths


def ravel(tree: PyTree) -> tuple[np.ndarray, Callable[[np.ndarray], PyTree]]:
    """`jax.flatten_util.ravel_pytree` on the host: loops over points compute nothing on the device."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = [np.asarray(leaf) for leaf in leaves]
    ends = np.cumsum([leaf.size for leaf in arrays])[:-1]

    def unravel(flat: np.ndarray) -> PyTree:
        parts = zip(np.split(flat, ends), arrays, strict=True)
        return jax.tree.unflatten(structure, [jnp.asarray(part.reshape(leaf.shape)) for part, leaf in parts])

    return np.concatenate([np.ravel(leaf) for leaf in arrays]), unravel
