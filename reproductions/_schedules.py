"""Hyper-parameters that change with the round: the same object for the same arguments, as programs want."""

import functools

import jax.numpy as jnp
from jax.tree_util import Partial

from fedstrata.core.types import Array, Integer, Schedule


def dropped(eta: float, at: int) -> Schedule:
    """η, and a tenth of it from round ``at`` on; runs with several η share a program."""
    return Partial(_dropped, eta, at)


def _dropped(eta: Array, at: Integer, r: Integer) -> Array:
    return jnp.where(r < at, eta, eta / 10)


@functools.cache
def mean_first(beta: float) -> Schedule:
    """The momentum β, but a mean over all minibatches so far as long as these are few."""
    return lambda r: jnp.maximum(beta, 1 / (1.0 + r))
