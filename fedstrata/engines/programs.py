"""Compiled programs, kept for the next call of one structure and shapes, and on disk between processes."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp

from fedstrata.core.fed import Setup
from fedstrata.core.term import lending
from fedstrata.core.types import PyTree
from fedstrata.engines.convolutions import rewritten
from fedstrata.engines.engine import Engine
from fedstrata.support.digest import Reader
from fedstrata.support.tracing import compiling, remark, uncollected

VARIABLE = "FEDSTRATA_COMPILED"  # a folder, or "off"; it decides for the command line
LEAST = 0.1  # seconds of compiling from which a program is worth a file: a phase at a site takes 0.2 to 0.6
MOST_KEPT = 128  # executables that are kept, each under its own functions and under its digest

_programs: OrderedDict[Any, Program] = OrderedDict()
_lock = Lock()  # threads may solve at the same time; a program compiled twice is only slow


@dataclass(frozen=True)
class Program:
    """An executable. It takes leaves, as equal programs may have methods of unequal structure."""

    run: Callable[..., PyTree]
    calls_host: bool
    remarks: tuple[str, ...] = ()
    frozen: tuple[Any, ...] = ()  # arrays that it reads besides its arguments

    def __call__(self, *args: PyTree) -> PyTree:
        """What the program computes."""
        return self.run(*jax.tree.leaves(args), *self.frozen)


def program(function: Callable[..., PyTree], engine: Engine, setup: Setup, args: tuple[Any, ...]) -> Program:
    """The executable of ``function(engine, setup, *args)``, from the cache or made now.

    A notebook's cell that is run again defines its functions again. They are traced, and the program of the
    same equations is found; one that calls the host is not, as its functions may hold anything.
    """
    held = setup.problem.held
    frozen, given = tuple(jax.tree.leaves([one.arrays for one in held])), args
    leaves, structure = jax.tree.flatten((*args, *(one.arrays for one in held)))
    shapes = tuple((jax.typeof(leaf), getattr(leaf, "sharding", None)) for leaf in leaves)
    # Matrix products of another precision, or float64, are another program of the same shapes.
    config = jnp.result_type(float), jax.default_matmul_precision.value
    key = (function, engine, objects(setup), objects(structure), shapes, config)
    with _lock:
        if key in _programs:
            _programs.move_to_end(key)
            remark(*_programs[key].remarks)
            return replace(_programs[key], frozen=frozen)

    def flat(*leaves: Any) -> PyTree:
        args = jax.tree.unflatten(structure, leaves)
        with lending(held, args[len(given) :]):
            return function(engine, setup, *args[: len(given)])

    with compiling():
        with uncollected():  # while tracing alone: compiling is XLA's, and may take long
            traced, reader = jax.jit(flat).trace(*leaves), Reader()
            digest = reader.text(traced.jaxpr), objects(jax.tree.structure(traced.out_info)), shapes, config
            same: Any = key if reader.calls_host else (digest, engine.rewrite)
            with _lock:
                found = _programs.get(same)
            if found is None:
                lowered, remarks = lowered_by(traced, tuple(leaves), engine.rewrite)
        if found is None:
            found = Program(lowered.compile(), reader.calls_host, remarks)
    remark(*found.remarks)
    with _lock:  # twice: the same objects need not be traced again, equal equations not compiled
        _programs.update({key: found, same: found})
        while len(_programs) > 2 * MOST_KEPT:
            _programs.popitem(last=False)
    return replace(found, frozen=frozen)


def lowered_by(traced: Any, args: tuple[Any, ...], rewrite: bool) -> tuple[Any, tuple[str, ...]]:
    """A traced program, lowered, with its clients' convolutions as products; and what is said of it."""
    jaxpr, number = rewritten(traced.jaxpr, jax.default_backend()) if rewrite else (None, 0)
    if not number:
        return traced.lower(), ()
    from jax.extend.core import jaxpr_as_fun

    flat, structure = jaxpr_as_fun(jaxpr), jax.tree.structure(traced.out_info)
    lowered = jax.jit(lambda *args: jax.tree.unflatten(structure, flat(*jax.tree.leaves(args)))).lower(*args)
    return lowered, (
        f"{number} convolutions of clients side by side are compiled as products (not with rewrite=False)",
    )


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


def keep_compiled(folder: str | os.PathLike[str] | None = None) -> Path | None:
    """Keep compiled programs in a folder, for this process and those after it: JAX's compilation cache.

    The command line does so by itself. JAX tells programs apart by their text, the devices and its version,
    so that a stale one is never used; the folder may be removed at any time.

    Args:
        folder: where; by default ``FEDSTRATA_COMPILED``, else ``~/.cache/fedstrata/compiled``.

    Returns:
        The folder; None where ``FEDSTRATA_COMPILED=off`` and no other is given, and where it cannot be made.
        A folder that was set up before, by ``JAX_COMPILATION_CACHE_DIR`` or in the program, stays unless
        another is given.
    """
    if folder is None and (already := jax.config.jax_compilation_cache_dir):  # type: ignore[attr-defined]
        return Path(already)
    asked = os.environ.get(VARIABLE, "")
    if folder is None and asked.lower() in ("off", "0", "no", "false"):
        return None
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    path = Path(folder or asked or f"{cache}/fedstrata/compiled").expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        if folder is not None:
            raise
        return None
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST)
    return path
