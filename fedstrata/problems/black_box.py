"""Losses that are ordinary programs: Python, NumPy, PyTorch, a simulator, a solver.

A zeroth-order method needs only values, so a loss may be any function that takes arrays and returns a number.
The compiled program calls back to the host for each value.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core.term import Term
from fedstrata.core.types import Function, PyTree


class BlackBoxError(RuntimeError):
    """A black-box function failed or returned something that is not a number."""


def black_box(function: Function, *, like: Function | None = None, vectorized: bool = False) -> Function:
    """Make a plain Python function usable as a loss of zeroth-order methods, in every engine.

    The result has values but no derivatives: `fedstrata.solve` refuses methods that need derivatives, and
    `fedstrata.applicable` leaves them out, also if other functions wrap it.

    Args:
        function: ``function(x, …, sample)`` of NumPy arrays (or pytrees of them) that returns a number.
        like: for a function that returns arrays, a function of the same (traced) arguments that returns
            arrays of the same shape and dtype, e.g. ``lambda x, y, sample: y``. By default, one number.
        vectorized: whether ``function`` takes a batch of calls at once: every argument then has leading batch
            axes (of length one if an argument is the same for all calls), and so has the value.

    >>> import numpy as np, fedstrata as fs
    >>> loss = fs.black_box(lambda x, sample: np.abs(sample["a"] @ x - sample["b"]).item())
    """

    def wrapped(*args: PyTree) -> Any:
        if like is None:
            shape = jax.ShapeDtypeStruct((), jnp.result_type(float))
        else:
            shape = jax.tree.map(
                lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), jax.eval_shape(like, *args)
            )

        def call(*host: PyTree) -> Any:
            host = jax.tree.map(np.asarray, host)
            value = function(*host)
            try:
                if not vectorized:
                    return jax.tree.map(lambda v, s: np.asarray(v, s.dtype).reshape(s.shape), value, shape)
                return jax.tree.map(lambda v, s: np.asarray(v, s.dtype), value, shape)
            except (TypeError, ValueError) as error:
                wanted = "one number" if like is None else f"arrays like {shape}"
                raise BlackBoxError(
                    f"The black-box function must return {wanted}, but returned {value!r}."
                ) from error

        method = "expand_dims" if vectorized else "sequential"
        return jax.pure_callback(call, shape, *args, vmap_method=method)

    wrapped.__qualname__ = f"black_box({Term.of(function)!r})"
    wrapped.values_only = True  # type: ignore[attr-defined]
    return replace(function, function=wrapped) if isinstance(function, Term) else wrapped
