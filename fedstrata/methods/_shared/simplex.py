"""The clients' weights as a variable."""

from __future__ import annotations

import jax.numpy as jnp

from fedstrata.core.types import Array, PyTree


def start_weights(name: str, y0: PyTree, clients: int) -> Array:
    """The start of λ: the user's, or equal weights.

    Raises:
        ValueError: if the user's are not non-negative or do not sum to 1.
    """
    if y0 is None:
        return jnp.full((clients,), 1 / clients)
    good = jnp.shape(y0) == (clients,) and bool((y0 >= 0).all()) and abs(float(y0.sum()) - 1) < 1e-5
    if not good:
        raise ValueError(
            f"{name}: y0 must be {clients} weights ≥ 0 that sum to 1 (or left out), but is {y0!r}."
        )
    return jnp.asarray(y0)
