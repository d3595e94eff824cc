"""Bounds on uploads, and noise in proportion to them.

clip(u, C) = u · min(1, C/‖u‖),    ‖u‖ over all arrays of an upload together
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
    """A bound that follows a quantile of the uploads' norms (Andrew et al. 2021, Algorithm 1).

        C ← C · exp(−rate · (b − quantile)),    b: the part of the uploads with ‖u‖ ≤ C, with noise

    Args:
        start: the first bound.
        quantile: the part of the uploads that stays as it is.
        rate: of the geometric steps.
        noise: standard deviation of the noise on the number of clients below the bound. With noise on the
            uploads it must be positive: the number itself tells who took part.
    """

    start: float = 1.0
    quantile: float = 0.5
    rate: float = 0.2
    noise: float = 0.0

    def follow(self, key: Key, bound: Array, below: Array, weight: Real) -> Array:
        """The next bound, where ``below`` is the weighted mean of who is below and ``weight`` the largest."""
        seen = below + self.noise * weight * jax.random.normal(key)
        return bound * jnp.exp(-self.rate * (seen - self.quantile))


def clipped(u: PyTree, bound: Real) -> tuple[PyTree, Array]:
    """U in the ball of a radius, and the norm that it had."""
    size = tree.norm(u)
    return tree.scale(jnp.minimum(1.0, bound / jnp.where(size > 0, size, 1)), u), size


def bounded(u: PyTree, bound: Real) -> PyTree:
    """`clipped`; what is not finite has no bound, and becomes zero."""
    found, size = clipped(u, bound)
    return jax.tree.map(lambda a: jnp.where(jnp.isfinite(size), a, 0), found)


def deviation_of(noise: Any, bound: Real) -> Real:
    """Noise in units of a bound, which may be infinite where there is none."""
    return jnp.where(noise == 0, 0.0, noise * bound)


def noised(key: Key, u: PyTree, deviation: Real) -> PyTree:
    """U with Gaussian noise of a standard deviation on every number."""
    leaves, form = jax.tree.flatten(u)
    keys = jax.random.split(key, max(len(leaves), 1))
    noisy = [
        a + jnp.asarray(deviation, a.dtype) * jax.random.normal(k, a.shape, a.dtype)
        for a, k in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(form, noisy)
