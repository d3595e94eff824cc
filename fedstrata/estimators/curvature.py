"""The curvature of a federated loss: its Hessian's largest eigenvalue, by power iteration over the clients.

    v ← a random unit vector
    repeat:  w ← the mean of the clients' ∇²h_i(x) v  (one exchange);  L ← ‖w‖;  v ← w/L

L converges to the largest absolute curvature of h at x. Only averages travel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedstrata.core import counting, tree
from fedstrata.core.client import Oracle
from fedstrata.core.types import Integer, PyTree
from fedstrata.estimators.sphere import sphere


def hessian_product(f: Oracle, x: PyTree, v: PyTree) -> PyTree:
    """``∇²f(x) v``, one product for each sample."""
    f.book("products")
    return f.apply(lambda mean: jax.jvp(jax.grad(mean), (x,), (v,))[1])


def power_iteration(
    product: Callable[[PyTree], PyTree], repeat: Callable[..., Any], steps: int, key: jax.Array, like: PyTree
) -> jax.Array:
    """The largest eigenvalues, in absolute value, of symmetric maps.

    Args:
        product: applies the maps to stacked directions; entries that are not finite count as zero.
        repeat: a loop, ``repeat(times, body(t, carry), carry)``; ``fed.repeat`` if products need exchanges.
        steps: the number of iterations.
        key: the random key of the start.
        like: stacked directions; only their shapes matter.
    """

    def body(_: Integer, carry: tuple[PyTree, jax.Array]) -> tuple[PyTree, jax.Array]:
        w = jax.tree.map(lambda leaf: jnp.where(jnp.isfinite(leaf), leaf, 0), product(carry[0]))
        size = jax.vmap(norm)(w)
        unit = jnp.where(size > 0, size, 1)
        return jax.vmap(lambda w, s: tree.scale(1 / s, w))(w, unit), size

    count = jax.tree.leaves(like)[0].shape[0]
    one = jax.tree.map(lambda leaf: leaf[0], like)
    v = jax.vmap(lambda key: sphere(key, one))(jax.random.split(key, count))
    dtype = jnp.result_type(*jax.tree.leaves(like))
    return repeat(steps, body, (v, jnp.zeros((count,), dtype)))[1]


def norm(w: PyTree) -> jax.Array:
    """The norm, computed without overflow or underflow of squares, for data in any units."""
    largest = jax.tree.reduce(jnp.maximum, jax.tree.map(lambda leaf: jnp.abs(leaf).max(), w))
    unit = jnp.where(largest > 0, largest, 1)
    return unit * tree.norm(jax.tree.map(lambda leaf: leaf / unit.astype(leaf.dtype), w))


def local_curvature(f: Oracle, points: PyTree, steps: int, key: jax.Array) -> jax.Array:
    """The largest curvature of a client's mean over stacked points, by a local power iteration."""

    def product(v: PyTree) -> PyTree:
        return counting.each(lambda x, v: hessian_product(f, x, v), points, v)

    return power_iteration(product, counting.repeat, steps, key, points).max()
