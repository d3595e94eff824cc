"""Hostile clients, for experiments: an attack wraps the robust mean that it attacks.

    fs.Channel(mean=SignFlip(fs.TrimmedMean(0.2), clients=2))

It replaces the uploads of the first clients and sees all uploads, like an omniscient adversary. `Mean` is the
plain mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import jax.numpy as jnp

from fedstrata.channels.means import Robust
from fedstrata.core.types import Array, Key


@dataclass(frozen=True)
class Attack:
    """Base of the attacks.

    Args:
        mean: the mean under attack.
        clients: the number of hostile clients, which are the first ones.
    """

    mean: Robust
    clients: int

    def __call__(self, key: Key, rows: Array, here: Array, index: Array) -> Array:
        """The mean of uploads, some of which are hostile."""
        bad = index < self.clients
        honest = here & ~bad
        share = honest / jnp.maximum(honest.sum(), 1)
        mean = share @ jnp.where(honest[:, None], rows, 0)
        spread = jnp.sqrt(share @ jnp.where(honest[:, None], (rows - mean) ** 2, 0))
        rows = jnp.where(bad[:, None], self.upload(rows, mean, spread, here), rows)
        return self.mean(key, rows, here, index)

    def upload(self, rows: Array, mean: Array, spread: Array, here: Array) -> Array:
        """The uploads of hostile clients, from the honest clients' mean and standard deviation."""
        raise NotImplementedError


@dataclass(frozen=True)
class SignFlip(Attack):
    """Hostile clients send minus their own upload, times a factor."""

    factor: float = 1.0

    def upload(self, rows: Array, mean: Array, spread: Array, here: Array) -> Array:
        return -self.factor * rows


@dataclass(frozen=True)
class ALIE(Attack):
    """A little is enough (Baruch et al. 2019): mean − z · standard deviation; None takes the paper's z."""

    z: float | None = None

    def upload(self, rows: Array, mean: Array, spread: Array, here: Array) -> Array:
        n, z = rows.shape[0], self.z
        if z is None:
            supporters = n // 2 + 1 - self.clients
            z = NormalDist().inv_cdf(
                min(max((n - self.clients - supporters) / (n - self.clients), 0.01), 0.99)
            )
        return mean - z * spread


@dataclass(frozen=True)
class InnerProduct(Attack):
    """Hostile clients send minus the honest mean, times a factor (Xie et al. 2020)."""

    factor: float = 0.5

    def upload(self, rows: Array, mean: Array, spread: Array, here: Array) -> Array:
        return -self.factor * mean


@dataclass(frozen=True)
class Mimic(Attack):
    """All hostile clients send the upload of the last client (Karimireddy et al. 2022)."""

    def upload(self, rows: Array, mean: Array, spread: Array, here: Array) -> Array:
        return jnp.broadcast_to(rows[-1], rows.shape)
