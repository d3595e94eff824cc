"""Tracing once what is needed twice: a loop must know the shapes that its body gives before it is traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import numpy as np

from fedstrata.support.private_jax import dce_jaxpr

PyTree: TypeAlias = Any
Jaxpr: TypeAlias = Any  # of jax.extend.core, which takes 20 ms to load
Equation: TypeAlias = Any


def traced(function: Callable[..., Any], *args: PyTree) -> tuple[Any, Callable[..., Any]]:
    """The shapes that ``function(*args)`` has, and the same function, whose Python is not run again.

    It takes arguments of the same structure and shapes, and is far cheaper to trace: a user's functions are
    differentiated and mapped already.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    structure: Any = jax.tree.structure(shapes)
    jaxpr = without_repetition(closed.jaxpr)
    # what nobody uses (keys of full batches) need not be lowered, in loops too
    jaxpr, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)

    def again(*args: PyTree) -> Any:
        found = jax.core.eval_jaxpr(jaxpr, closed.consts, *jax.tree.leaves(args))
        return jax.tree.unflatten(structure, found)

    return shapes, again


def without_repetition(jaxpr: Jaxpr) -> Jaxpr:
    """The same with each of its equations once.

    XLA on a CPU moves what two exchanges look up alike (their clients' samples) out of the loop over rounds
    before it looks for repetitions, and sees none in what follows: it compiles and computes both.
    """
    instead: dict[Any, Any] = {}  # a variable → the one that has its value already
    known: dict[Any, list[Any]] = {}
    equations = []

    def now(variable: Any) -> Any:
        return variable if _is_literal(variable) else instead.get(variable, variable)

    for equation in jaxpr.eqns:
        equation = equation.replace(invars=[now(v) for v in equation.invars])
        key = _key(equation)
        if key is not None and key in known:
            instead.update(zip(equation.outvars, known[key], strict=True))
            continue
        if key is not None:
            known[key] = equation.outvars
        equations.append(equation)
    return jaxpr.replace(eqns=equations, outvars=[now(v) for v in jaxpr.outvars])


def _is_literal(variable: Any) -> bool:
    return hasattr(variable, "val")


def _key(equation: Equation, places: Mapping[Any, Any] = MappingProxyType({})) -> Any:
    """What tells an equation from others, or None where it must stay: it has effects, or cannot be told."""
    if equation.effects or any(isinstance(value, float) for value in equation.params.values()):
        return None  # −0 equals 0, and is another number
    inputs = tuple(_told(v, places) for v in equation.invars)
    try:
        params = frozenset((name, _form(value)) for name, value in equation.params.items())
        key = equation.primitive, equation.ctx, inputs, params
        hash(key)
    except TypeError:
        return None
    return key


def _told(variable: Any, places: Mapping[Any, Any]) -> Any:
    if _is_literal(variable):
        return str(variable.aval), np.asarray(variable.val).tobytes()
    return places.get(variable, variable)


def _form(value: Any) -> Any:
    """What tells a function inside an equation: its own, as JAX traces it again within a `vmap`."""
    # From JAX 0.11 on open and closed ones are of one class.
    if type(value).__name__ not in ("ClosedJaxpr", "Jaxpr") or getattr(value, "consts", True):
        return value
    places: dict[Any, Any] = {v: (str(v.aval), n) for n, v in enumerate(value.jaxpr.invars)}  # by place
    keys: list[Any] = [tuple(places.values())]
    for equation in value.jaxpr.eqns:
        key = _key(equation, places)
        if key is None:
            return value
        places.update((v, (len(keys), n)) for n, v in enumerate(equation.outvars))
        keys.append(key)
    return (*keys, tuple(_told(v, places) for v in value.jaxpr.outvars))
