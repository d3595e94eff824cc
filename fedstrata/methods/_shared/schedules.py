"""Steps that fall, as `jax.tree_util.Partial`: their numbers are leaves, so that others do not recompile."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fedstrata.core.types import Integer, Real

SWEEP = 1e-4  # how far geometric steps fall, relative to the first


def _falling(first: Real, part: Real, rounds: Real, r: Integer) -> Any:
    return first * part ** jnp.minimum(r / rounds, 1.0)


def falling(first: float, rounds: int, part: float = SWEEP) -> jax.tree_util.Partial:
    """A step that falls geometrically to a ``part`` of the first, for kinks."""
    return jax.tree_util.Partial(_falling, first, part, float(max(rounds, 1)))


def _fading(first: Real, pace: Real, r: Integer) -> Any:
    return first / (1 + pace * r)


def fading(first: float, pace: float) -> jax.tree_util.Partial:
    """``first/(1 + pace·r)``: steps under which noise averages out; best with pace μ·first/2."""
    return jax.tree_util.Partial(_fading, first, pace)
