"""Tracing once what is needed twice: a loop must know the shapes that its body gives before it is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from fedstrata.core.types import PyTree


def traced(function: Callable[..., Any], *args: PyTree) -> tuple[Any, Callable[..., Any]]:
    """The shapes that ``function(*args)`` has, and the same function, whose Python is not run again.

    It takes arguments of the same structure and shapes, and is far cheaper to trace: a user's functions are
    differentiated and mapped already.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    structure: Any = jax.tree.structure(shapes)

    def again(*args: PyTree) -> Any:
        found = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *jax.tree.leaves(args))
        return jax.tree.unflatten(structure, found)

    return shapes, again
