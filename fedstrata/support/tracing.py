"""Tracing and compiling: done once where a trace is needed twice, and timed apart from the run.

A loop must know the shapes that its body gives before it is traced (`traced`). What is traced, loaded and
compiled is paid once, and would spoil a run's clock (`compiling`, `compiled_for`).
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


class _Clock(local):  # threads may solve at the same time
    seconds = 0.0
    remarks: tuple[str, ...] = ()


_clock = _Clock()


@contextmanager
def compiling() -> Iterator[None]:
    """Time what happens inside as compiling."""
    began = time.perf_counter()
    try:
        yield
    finally:
        _clock.seconds += time.perf_counter() - began


def compiled_for() -> float:
    """The seconds that this thread has spent compiling so far."""
    return _clock.seconds


def remark(*words: str) -> None:
    """Say something of a program that this thread runs; a run's result has it."""
    _clock.remarks = tuple(dict.fromkeys((*_clock.remarks, *words)))


def remarks() -> tuple[str, ...]:
    """What was said since this was last asked."""
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
        leaves = jax.core.eval_jaxpr(jaxpr, closed.consts, *jax.tree.leaves(args))
        return jax.tree.unflatten(structure, leaves)

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
