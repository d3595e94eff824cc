"""Tracing once what is needed twice: a loop must know the shapes that its body gives before it is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax

from fedstrata.support.digest import Reader
from fedstrata.support.private_jax import dce_jaxpr

PyTree: TypeAlias = Any
Jaxpr: TypeAlias = Any  # of jax.extend.core, which takes 20 ms to load


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
    equations, reader = [], Reader()

    def now(variable: Any) -> Any:
        return variable if hasattr(variable, "val") else instead.get(variable, variable)

    for equation in jaxpr.eqns:
        equation = equation.replace(invars=[now(v) for v in equation.invars])
        reader.primitives = set()
        key = equation.ctx, reader.equation(equation, lambda variable: f"%{id(variable)}")
        # Functions of the host, and rules for derivatives, are not known by the text.
        stays = equation.effects or any("callback" in n or "custom" in n for n in reader.primitives)
        if key in known and not stays:
            instead.update(zip(equation.outvars, known[key], strict=True))
            continue
        known[key] = equation.outvars
        equations.append(equation)
    return jaxpr.replace(eqns=equations, outvars=[now(v) for v in jaxpr.outvars])
