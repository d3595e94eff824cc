"""What a Python function refers to: what it closes over, and the globals that it names."""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import dis
import functools
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import jax

# Packages whose functions are known by name: what they do is not the user's, and changes with versions.
KNOWN = sys.stdlib_module_names - {"__main__"} | {
    *("fedstrata", "jax", "jaxlib", "numpy", "scipy", "optax", "lineax", "equinox", "flax", "haiku", "chex"),
    *("torch", "sklearn", "pandas"),
}


def is_known(module: str | None) -> bool:
    """Whether a module is of one of these packages."""
    return (module or "").partition(".")[0] in KNOWN


def cells_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function closes over, but for what it writes itself: a counter is no part of what it is."""
    written = _written(function.__code__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name in written:
            continue
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            yield name, None


def numbers_written(function: FunctionType) -> Iterator[tuple[str, float]]:
    """The numbers that a function closes over and also assigns to, as floats.

    In a library's function they are arguments that it converts (the steps of optax's cosine decay).
    """
    written = _written(function.__code__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name in written:
            with contextlib.suppress(ValueError):  # not assigned yet
                if isinstance(cell.cell_contents, int | float):
                    yield name, float(cell.cell_contents)


def globals_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The globals that a function names, in modules of the user's also their attributes that it names."""
    codes = list(_codes(function.__code__))
    names = {name for code in codes for name in code.co_names}
    written = _written(function.__code__)
    for name in names - written:
        value = function.__globals__.get(name, _NOTHING)
        if value is _NOTHING or value is getattr(builtins, name, None):
            continue
        yield name, value
        if isinstance(value, ModuleType) and not is_known(value.__name__):
            for attribute in names:
                if attribute in vars(value):
                    yield f"{name}.{attribute}", vars(value)[attribute]


_NOTHING = object()


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _codes(const)


@functools.lru_cache(1024)
def _written(code: CodeType) -> set[str]:
    """Global and outer variables that a function assigns to."""
    return {
        str(step.argval)
        for each in _codes(code)
        for step in dis.get_instructions(each)
        if step.opname in ("STORE_GLOBAL", "STORE_DEREF")
    }


def writes(function: FunctionType) -> bool:
    """Whether a function assigns to variables outside it."""
    return bool(_written(function.__code__))


def values_only(function: Any) -> bool:
    """Whether a function, or one that it calls, is marked as a program that JAX cannot differentiate.

    What has derivatives of its own (`jax.custom_jvp`, `jax.custom_vjp`) can be, whatever it calls.
    """
    seen: dict[int, Any] = {}  # with the objects, so that no other gets their numbers
    waiting = [function]
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, jax.custom_jvp | jax.custom_vjp):
            continue
        seen[id(value)] = value
        if getattr(value, "values_only", False) is True:
            return True
        waiting += _inner(value)
    return False


def _inner(value: Any) -> list[Any]:
    """The functions inside a function or an object that is called like one."""
    match value:
        case FunctionType():
            found = [content for _, content in cells_of(value)]
            if not is_known(value.__globals__.get("__name__")):
                found += [content for _, content in globals_of(value) if callable(content)]
            return found
        case MethodType():
            return [value.__func__, value.__self__]
        case functools.partial():
            return [value.func, *value.args, *value.keywords.values()]
        case list() | tuple():
            return list(value)
        case dict():
            return list(value.values())
    if isinstance(value, type | ModuleType | jax.Array):
        return []
    if dataclasses.is_dataclass(value):
        return [getattr(value, f.name, None) for f in dataclasses.fields(value)]
    wrapped = getattr(value, "__wrapped__", None)
    if wrapped is not None:
        return [wrapped]
    own = type(value).__dict__.get("__call__")
    return [own, *vars(value).values()] if own is not None and hasattr(value, "__dict__") else []
