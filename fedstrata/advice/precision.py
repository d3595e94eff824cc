"""Temporary float64 in a process that uses float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core.types import PyTree
from fedstrata.support.private_jax import constants_of_each_precision


@contextmanager
def double_precision() -> Iterator[None]:
    """Trace everything in this block in float64, including constants in functions' closures."""
    if not jax.config.read("jax_enable_x64"):
        constants_of_each_precision()
    with jax.enable_x64(True):
        yield


def double(point: PyTree) -> PyTree:
    """A point in float64, within `double_precision`."""
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), float), point)
