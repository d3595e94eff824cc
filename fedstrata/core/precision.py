"""Float64 for a while, in a process whose numbers are float32."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import jax
import numpy as np


@contextmanager
def double_precision() -> Iterator[None]:
    """Everything traced here is in float64, constants that functions have in their closures too."""
    if not jax.config.read("jax_enable_x64"):
        _constants_of_each_precision()
    with jax.enable_x64(True):
        yield


@cache
def _constants_of_each_precision() -> None:
    """Have JAX keep NumPy arrays that functions close over apart by precision.

    It converts such an array once and keeps that while a program holds it: a loss compiled in float32
    then has float32 constants in float64 programs, which JAX refuses to compile, and the other way round.
    """
    try:
        from jax._src import dtypes, literals  # there is no public way to what is repaired here

        register = dtypes.register_canonicalize_value_handler
    except (ImportError, AttributeError):  # a JAX that has it elsewhere: such a loss is refused by JAX itself
        return
    kept: dict[tuple[int, bool], tuple[Any, Any]] = {}

    def converted(array: np.ndarray) -> Any:
        place = id(array), bool(jax.config.read("jax_enable_x64"))
        of, value = kept.get(place, (_nothing, _nothing))
        if of() is array and (found := value()) is not None:
            return found
        new = literals.TypedNdArray(np.asarray(array, dtypes.canonicalize_dtype(array.dtype)))
        kept[place] = weakref.ref(array, lambda _: kept.pop(place, None)), weakref.ref(new)
        return new

    register(np.ndarray, converted)


def _nothing() -> None:
    return None
