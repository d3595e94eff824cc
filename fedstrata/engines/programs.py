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
from fedstrata.core.fingerprint import sure_fingerprint
from fedstrata.core.types import PyTree
from fedstrata.engines.engine import Engine
from fedstrata.support.compiling import compiling, uncollected

PROGRAMS = 128  # executables that are kept, each under its own functions and under their text

_programs: OrderedDict[Any, Callable[..., Any]] = OrderedDict()
_lock = Lock()  # threads may solve at the same time; a program compiled twice is only slow


def program(
    function: Callable[..., PyTree], engine: Engine, setup: Setup, args: tuple[Any, ...]
) -> Callable[..., PyTree]:
    """The executable of ``function(engine, setup, *args)``, from the cache or made now."""
    leaves, structure = jax.tree.flatten(args)
    shapes = tuple((jax.typeof(leaf), getattr(leaf, "sharding", None)) for leaf in leaves)
    # Matrix products of another precision, or float64, are another program of the same shapes.
    config = jnp.result_type(float), jax.default_matmul_precision.value
    key = (function, engine, _hashable(setup), _hashable(structure), shapes, config)
    with _lock:
        if key in _programs:
            _programs.move_to_end(key)
            return _programs[key]
    # A notebook's cell that is run again defines its functions anew: the same text is the same program.
    text = sure_fingerprint((setup.problem, setup.metrics))
    same = text and (function, engine, text, replace(setup, problem=None, metrics=()), *key[3:])  # type: ignore[arg-type]
    with _lock:
        found = _programs.get(same)
    if found is None:
        with compiling():
            with uncollected():
                lowered = jax.jit(lambda *args: function(engine, setup, *args)).lower(*args)
            found = lowered.compile()
    with _lock:
        _programs.update({key: found, same: found} if same else {key: found})
        while len(_programs) > 2 * PROGRAMS:
            _programs.popitem(last=False)
    return found


def kept() -> frozenset[Any]:
    """The keys of the programs that are kept, to see whether a call compiled anything."""
    with _lock:
        return frozenset(_programs)


@dataclass(frozen=True, eq=False)
class _Identity:
    """Stands for an object that cannot be hashed (a set with arrays), and keeps it alive."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _hashable(value: Any) -> Any:
    if isinstance(value, Setup):
        return _hashable(value.problem), replace(value, problem=None)  # type: ignore[arg-type]
    try:
        hash(value)
    except TypeError:
        return _Identity(value)
    return value
