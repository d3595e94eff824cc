"""Gradients of an `Oracle`, counted as they are taken."""

from __future__ import annotations

import jax

from fedstrata.core.client import Oracle
from fedstrata.core.types import PyTree


def gradient(f: Oracle, *args: PyTree, wrt: int = 0) -> PyTree:
    """``∇_{args[wrt]} f(args)``; one gradient for each sample."""
    f.book("gradients")
    return f.apply(lambda mean: jax.grad(mean, argnums=wrt)(*args))


def gradients(f: Oracle, *args: PyTree) -> tuple[PyTree, ...]:
    """The gradients with respect to every argument, in one backward pass."""
    f.book("gradients")
    return f.apply(lambda mean: jax.grad(mean, argnums=tuple(range(len(args))))(*args))


def value_and_gradient(f: Oracle, *args: PyTree) -> tuple[jax.Array, PyTree]:
    """The value and the gradient in one pass; counted as a gradient."""
    f.book("gradients")
    return f.apply(lambda mean: jax.value_and_grad(mean)(*args))
