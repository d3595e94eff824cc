"""The precision of products inside a problem's functions; everything else is computed in full precision.

In bfloat16, products of matrices and convolutions take arguments that are rounded to 8 bits, and give such
values: units for matrices compute several times as many of them. All between products (normalisation,
softmax, a loss's logarithms), derivatives as they are summed, parameters and means stay as they are. A
product for which the user asked for a precision keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from fedstrata.support.equations import Equation, replaced

Precision: TypeAlias = Literal["bfloat16", "float32", "highest"]
PRODUCTS = ("dot_general", "conv_general_dilated")

# The phases of one program are traced in one thread; tracing in another has a context of its own.
_current: ContextVar[Precision] = ContextVar("precision", default="float32")


@contextmanager
def computing_in(precision: Precision) -> Iterator[None]:
    """Trace this block in a precision."""
    products: AbstractContextManager[Any] = nullcontext()
    if precision == "highest":
        products = jax.default_matmul_precision("highest")
    token = _current.set(precision)
    try:
        with products:
            yield
    finally:
        _current.reset(token)


def in_precision(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function to compute in the precision set by `computing_in`."""
    if _current.get() != "bfloat16":
        return function

    def rounded(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        new = replaced(closed, _in_bfloat16)
        leaves = jax.core.eval_jaxpr(new.jaxpr, new.consts, *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), leaves)

    return rounded


def _in_bfloat16(eqn: Equation) -> Callable[..., Any] | None:
    asked = eqn.params.get("precision")
    plain = asked is None or set(asked if isinstance(asked, tuple) else (asked,)) == {lax.Precision.DEFAULT}
    if eqn.primitive.name not in PRODUCTS or not plain:
        return None
    if not all(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in eqn.invars):
        return None
    dtype = eqn.outvars[0].aval.dtype

    def product(*args: Any) -> Any:
        params = {**eqn.params, "precision": None, "preferred_element_type": jnp.dtype("bfloat16")}
        result = eqn.primitive.bind(*(arg.astype("bfloat16") for arg in args), **params)
        return result.astype(dtype)

    return product
