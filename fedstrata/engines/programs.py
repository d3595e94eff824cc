"""Compiled programs, kept for the next call of the same structure and shapes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp

from fedstrata.core.fed import Setup
from fedstrata.core.types import PyTree
from fedstrata.engines.engine import Engine
from fedstrata.support.compiling import compiling, uncollected
from fedstrata.support.digest import Reader

MOST_KEPT = 128  # executables that are kept, each under its own functions and under its digest

_programs: OrderedDict[Any, Program] = OrderedDict()
_lock = Lock()  # threads may solve at the same time; a program compiled twice is only slow


@dataclass(frozen=True)
class Program:
    """An executable. It takes leaves, as equal programs may have methods of unequal structure."""

    run: Callable[..., PyTree]
    calls_host: bool

    def __call__(self, *args: PyTree) -> PyTree:
        """What the program computes."""
        return self.run(*jax.tree.leaves(args))


def program(function: Callable[..., PyTree], engine: Engine, setup: Setup, args: tuple[Any, ...]) -> Program:
    """The executable of ``function(engine, setup, *args)``, from the cache or made now.

    A notebook's cell that is run again defines its functions again. They are traced, and the program of the
    same equations is found; one that calls the host is not, as its functions may hold anything.
    """
    leaves, structure = jax.tree.flatten(args)
    shapes = tuple((jax.typeof(leaf), getattr(leaf, "sharding", None)) for leaf in leaves)
    # Matrix products of another precision, or float64, are another program of the same shapes.
    config = jnp.result_type(float), jax.default_matmul_precision.value
    key = (function, engine, objects(setup), objects(structure), shapes, config)
    with _lock:
        if key in _programs:
            _programs.move_to_end(key)
            return _programs[key]

    def flat(*leaves: Any) -> PyTree:
        return function(engine, setup, *jax.tree.unflatten(structure, leaves))

    with compiling():
        with uncollected():
            traced, reader = jax.jit(flat).trace(*leaves), Reader()
            digest = reader.text(traced.jaxpr), objects(jax.tree.structure(traced.out_info)), shapes, config
            same: Any = key if reader.calls_host else digest
            with _lock:
                found = _programs.get(same)
            lowered = traced.lower() if found is None else None
        if lowered is not None:
            found = Program(lowered.compile(), reader.calls_host)
    assert found is not None
    with _lock:
        _programs.update({key: found, same: found})
        while len(_programs) > 2 * MOST_KEPT:
            _programs.popitem(last=False)
    return found


def kept() -> frozenset[Any]:
    """The executables that are kept, to see whether a call compiled anything."""
    with _lock:
        return frozenset(found.run for found in _programs.values())


@dataclass(frozen=True, eq=False)
class _Identity:
    """Stands for an object that cannot be hashed (a set with arrays), and keeps it alive."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def objects(value: Any) -> Any:
    """A key of the same objects: what cannot be hashed counts by its identity."""
    if isinstance(value, Setup):
        return objects(value.problem), replace(value, problem=None)  # type: ignore[arg-type]
    try:
        hash(value)
    except TypeError:
        return _Identity(value)
    return value
