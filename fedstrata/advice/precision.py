"""Float64 for a while, in a process whose numbers are float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from fedstrata.support.private_jax import constants_of_each_precision


@contextmanager
def double_precision() -> Iterator[None]:
    """Everything traced here is in float64, constants that functions have in their closures too."""
    if not jax.config.read("jax_enable_x64"):
        constants_of_each_precision()
    with jax.enable_x64(True):
        yield
