"""Reuse traces, and time tracing and compiling apart from the run.

A loop needs the shapes that its body returns before it is traced (`traced`). Tracing, loading and compiling
happen once and are excluded from a run's time (`compiling`, `compiled_for`).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import local
from typing import Any, TypeAlias

import jax

from fedstrata.support.digest import Reader
from fedstrata.support.private_jax import dce_jaxpr

PyTree: TypeAlias = Any
Jaxpr: TypeAlias = Any  # of jax.extend.core, which takes 20 ms to load


def is_traced(value: Any) -> bool:
    """Whether a value is known only when the program runs."""
    return isinstance(value, jax.core.Tracer)


def transformation() -> Any:
    """The loop, map or derivative of JAX in which this is traced; equal where it is the same one."""
    from jax.extend.core import get_opaque_trace_state  # takes 15 ms to load

    return get_opaque_trace_state()


class _Clock(local):  # threads may solve at the same time
    seconds = 0.0
    remarks: tuple[str, ...] = ()


_clock = _Clock()


@contextmanager
def compiling() -> Iterator[None]:
    """Count the time of this block as compiling."""
    began = time.perf_counter()
    try:
        yield
    finally:
        _clock.seconds += time.perf_counter() - began


def compiled_for() -> float:
    """The seconds that this thread has spent compiling so far."""
    return _clock.seconds


def remark(*words: str) -> None:
    """Add a note about a program that this thread runs, for the run's result."""
    _clock.remarks = tuple(dict.fromkeys((*_clock.remarks, *words)))


def remarks() -> tuple[str, ...]:
    """Return and clear the notes added since the last call."""
    said, _clock.remarks = _clock.remarks, ()
    return said


@contextmanager
def uncollected() -> Iterator[None]:
    """Switch the garbage collector off in this block: a trace is many objects that stay."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def traced(function: Callable[..., Any], *args: PyTree) -> tuple[Any, Callable[..., Any]]:
    """Trace ``function(*args)``: its output shapes, and a copy that does not run its Python again.

    The copy takes arguments of the same structure and shapes and is far cheaper to trace, because derivatives
    and maps of user functions are already expanded.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    structure: Any = jax.tree.structure(shapes)
    jaxpr = without_repetition(closed.jaxpr)
    # what nobody uses (keys of full batches) need not be lowered, in loops too
    jaxpr, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)

    def again(*args: PyTree) -> Any:
        leaves = jax.core.eval_jaxpr(jaxpr, closed.consts, *jax.tree.leaves(args))
        return jax.tree.unflatten(structure, leaves)

    return shapes, again


def without_repetition(jaxpr: Jaxpr) -> Jaxpr:
    """Remove repeated equations.

    XLA on a CPU hoists identical look-ups of two exchanges (their clients' samples) out of the loop over
    rounds before it eliminates common subexpressions, then finds none in the rest and compiles both.
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
