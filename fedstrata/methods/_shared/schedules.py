"""Decreasing step sizes as `jax.tree_util.Partial`, whose numbers are leaves: new ones do not recompile."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fedstrata.core.types import Integer, Real

SWEEP = 1e-4  # the last geometric step size, relative to the first


def _falling(first: Real, part: Real, rounds: Real, r: Integer) -> Any:
    return first * part ** jnp.minimum(r / rounds, 1.0)


def falling(first: float, rounds: int, part: float = SWEEP) -> jax.tree_util.Partial:
    """A step size that decreases geometrically to ``part`` times the first, for losses with kinks."""
    return jax.tree_util.Partial(_falling, first, part, float(max(rounds, 1)))


def _fading(first: Real, pace: Real, r: Integer) -> Any:
    return first / (1 + pace * r)


def fading(first: float, pace: float) -> jax.tree_util.Partial:
    """The step size ``first/(1 + pace·r)``, which averages noise out; the best pace is μ·first/2."""
    return jax.tree_util.Partial(_fading, first, pace)
