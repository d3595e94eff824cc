"""Replace equations of a program, inner functions included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax

Jaxpr: TypeAlias = Any  # of jax.extend.core, which takes 20 ms to load
Equation: TypeAlias = Any


def replaced(jaxpr: Jaxpr, instead: Callable[[Equation], Callable[..., Any] | None]) -> Jaxpr:
    """Replace some equations of a jaxpr by functions with the same shapes.

    This includes functions called by `jax.jit`, loops, branches and checkpoints; custom derivative rules
    (`jax.custom_jvp`) stay unchanged.

    Args:
        jaxpr: open or closed.
        instead: returns the function that replaces an equation, or None to keep it.
    """

    def inner(value: Any) -> Any:
        if hasattr(value, "jaxpr"):  # closed: it has its constants with it
            new = one(value.jaxpr)
            return value if new is value.jaxpr else value.replace(jaxpr=new)
        if hasattr(value, "eqns"):
            return one(value)
        if isinstance(value, tuple):
            parts = tuple(map(inner, value))
            return value if all(a is b for a, b in zip(parts, value, strict=True)) else parts
        return value

    def equation(eqn: Equation) -> Equation:
        if (function := instead(eqn)) is not None:
            avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
            # one equation that calls it, in the debug engine too: what goes in and out stays as it was
            with jax.disable_jit(False):
                (call,) = jax.make_jaxpr(jax.jit(function))(*avals).eqns
            return call.replace(invars=eqn.invars, outvars=eqn.outvars)
        params = {name: inner(value) for name, value in eqn.params.items()}
        changed = any(params[name] is not value for name, value in eqn.params.items())
        return eqn.replace(params=params) if changed else eqn

    def one(jaxpr: Jaxpr) -> Jaxpr:
        equations = [equation(eqn) for eqn in jaxpr.eqns]
        same = all(a is b for a, b in zip(equations, jaxpr.eqns, strict=True))
        return jaxpr if same else jaxpr.replace(eqns=equations)

    return inner(jaxpr)
