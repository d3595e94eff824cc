"""Clipping of uploads, and Gaussian noise.

clip(u, C) = u · min(1, C/‖u‖),    with ‖u‖ over all arrays of an upload
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fedstrata.core import tree
from fedstrata.core.types import Array, Key, PyTree, Real


@partial(jax.tree_util.register_dataclass, data_fields=("start", "quantile", "rate", "noise"), meta_fields=())
@dataclass(frozen=True)
class Adaptive:
    """A bound that tracks a quantile of the uploads' norms (Andrew et al. 2021, Algorithm 1).

        C ← C · exp(−rate · (b − quantile)),    b: the fraction of uploads with ‖u‖ ≤ C, with noise

    Args:
        start: the initial bound.
        quantile: the fraction of uploads that are not clipped.
        rate: the step size of the geometric update.
        noise: the standard deviation of the noise on the number of clients below the bound. With noise on the
            uploads it must be positive, because the number reveals who took part.
    """

    start: float = 1.0
    quantile: float = 0.5
    rate: float = 0.2
    noise: float = 0.0

    def follow(self, bound: Array, below: Array) -> Array:
        """The next bound, from the weighted fraction ``below`` the bound, with its noise."""
        return bound * jnp.exp(-self.rate * (below - self.quantile))


def clipped(u: PyTree, bound: Real) -> tuple[PyTree, Array]:
    """The upload projected onto a ball, and its norm before."""
    size = tree.norm(u)
    return tree.scale(jnp.minimum(1.0, bound / jnp.where(size > 0, size, 1)), u), size


def bounded(u: PyTree, bound: Real) -> tuple[PyTree, Array]:
    """`clipped`; an upload that is not finite has no bound, and becomes zero."""
    found, size = clipped(u, bound)
    return jax.tree.map(lambda a: jnp.where(jnp.isfinite(size), a, 0), found), size


def deviation_of(noise: Any, bound: Real) -> Real:
    """The standard deviation of noise in units of a bound, which may be infinite without noise."""
    return jnp.where(noise == 0, 0.0, noise * bound)


def noised(key: Key, u: PyTree, deviation: Real) -> PyTree:
    """The upload with Gaussian noise on every number."""
    leaves, form = jax.tree.flatten(u)
    keys = jax.random.split(key, max(len(leaves), 1))
    noisy = [
        a + jnp.asarray(deviation, a.dtype) * jax.random.normal(k, a.shape, a.dtype)
        for a, k in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(form, noisy)
