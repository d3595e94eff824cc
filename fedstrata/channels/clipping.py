"""Clipping of uploads, and Gaussian noise.

clip(u, C) = u · min(1, C/‖u‖),    with ‖u‖ over all arrays of an upload
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32

from fedstrata.core import tree
from fedstrata.core.types import Array, Key, PyTree, Real

GILES = (  # M. Giles, Approximating the erfinv function: single precision, for w < 5 and w ≥ 5
    (2.81022636e-8, 3.43273939e-7, -3.5233877e-6, -4.39150654e-6, 2.1858087e-4, -1.25372503e-3,
     -4.17768164e-3, 0.246640727, 1.50140941),
    (-2.00214257e-4, 1.00950558e-4, 1.34934322e-3, -3.67342844e-3, 5.73950773e-3, -7.6224613e-3,
     9.43887047e-3, 1.00167406, 2.83297682),
)  # fmt: skip


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
    """The upload projected onto a ball, and its norm before the projection."""
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
    if any(jnp.result_type(a).itemsize < 4 for a in leaves):
        raise TypeError(
            "Noise of 16 bits has few values and no tails, and hides less than it should: let x0 and y0 be "
            "of 32 bits. precision='bfloat16' keeps them so."
        )
    keys = jax.random.split(key, max(len(leaves), 1))
    noisy = [
        a + jnp.asarray(deviation, a.dtype) * normal(k, a.size, a.dtype).reshape(a.shape)
        for a, k in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(form, noisy)


def normal(key: Key, number: int, dtype: Any) -> Array:
    """Standard normal numbers, in float32 up to 6.3 deviations.

    `jax.random.normal` stops at 5.4, too early for private noise, and discards half of the generator's words.
    """
    if dtype != jnp.float32:
        return jax.random.normal(key, (number,), dtype)
    one, other = jax.random.key_data(key)[:2]
    words = threefry_2x32((one, other), jnp.arange(number, dtype=jnp.uint32))
    # |N| ≥ t has probability p in (0, 1). Giles's inverse (2010), as a function of p: 1 − p loses the tails
    p = ((words & 0x7FFFFFFF).astype(dtype) + 0.5) * 2.0**-31
    w = -jnp.log(p * (2 - p))
    near = w < 5
    v, found = jnp.where(near, w - 2.5, jnp.sqrt(w) - 3), jnp.zeros_like(w)
    for inside, outside in zip(*GILES, strict=True):
        found = found * v + jnp.where(near, inside, outside).astype(dtype)
    sign = jnp.where((words >> 31) > 0, -1.0, 1.0).astype(dtype)
    return sign * 2**0.5 * found * (1 - p)
