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


def _rising(first: Real, pace: Real, r: Integer) -> Any:
    return first * (1 + pace * r)


def rising(first: float, pace: float) -> jax.tree_util.Partial:
    """The step size ``first·(1 + pace·r)``, which grows while its partner fades at the same pace."""
    return jax.tree_util.Partial(_rising, first, pace)


def _back(pace: Real, r: Integer) -> Any:
    return 1 - pace / (1 + pace * r)


def back(pace: float) -> jax.tree_util.Partial:
    """The ratio of a `rising` step size of the round before to this round's."""
    return jax.tree_util.Partial(_back, pace)
