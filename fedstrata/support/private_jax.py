"""The four private parts of JAX in use, each with the reason why no public part suffices.

No other module imports from ``jax._src`` or ``jax.interpreters``, or reads a private attribute of a tracer.
``pyproject.toml`` excludes the versions of JAX with which these were not tried. To raise its upper bound, run
``tests/test_private_jax.py`` first, then the quick tests.

1. `dce_jaxpr` (``jax.interpreters.partial_eval``): removes unused equations from a traced program, inside
   loops too, and says which inputs are used. XLA does so after lowering, which is what costs time.
2. `coordination` (``jax._src.distributed.global_state``): the key-value store and the barrier of a run over
   several processes, which need no device. ``jax.experimental.multihost_utils`` needs one.
3. `constants_of_each_precision` (``jax._src.dtypes``, ``jax._src.literals``): JAX converts a NumPy array that
   a function closes over once and keeps the result. A loss compiled in float32 then has float32 constants in
   float64 programs, which JAX refuses to compile, and the other way round.
4. `trace_of` (``Tracer._trace``): tells a value computed inside a loop's body from one that it closes over.
"""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any

import jax
import numpy as np
from jax._src import distributed, dtypes, literals
from jax.interpreters.partial_eval import dce_jaxpr

__all__ = ["constants_of_each_precision", "coordination", "dce_jaxpr", "trace_of"]


def coordination() -> Any:
    """The state of a run over several processes: ``client`` (None without one) and address."""
    return distributed.global_state


@cache
def constants_of_each_precision() -> None:
    """Have JAX keep the NumPy arrays that functions close over once for each precision."""
    kept: dict[tuple[int, bool], tuple[Any, Any]] = {}

    def converted(array: np.ndarray) -> Any:
        place = id(array), bool(jax.config.read("jax_enable_x64"))
        of, value = kept.get(place, (_nothing, _nothing))
        if of() is array and (found := value()) is not None:
            return found
        new = literals.TypedNdArray(np.asarray(array, dtypes.canonicalize_dtype(array.dtype)))
        kept[place] = weakref.ref(array, lambda _: kept.pop(place, None)), weakref.ref(new)
        return new

    dtypes.register_canonicalize_value_handler(np.ndarray, converted)


def _nothing() -> None:
    return None


def trace_of(value: Any) -> Any:
    """The trace that a value belongs to, or None for a plain array."""
    return getattr(value, "_trace", None)
