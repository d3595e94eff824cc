"""What a Python function refers to: what it closes over, and the globals that it names."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterator
from contextlib import suppress
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import jax

LIBRARIES = sys.stdlib_module_names - {"__main__"} | {"fedstrata", "jax", "jaxlib", "numpy"}


def is_library(function: FunctionType) -> bool:
    """Whether a function is not the user's: what it does follows from its name and what it closes over."""
    root = (function.__globals__.get("__name__") or "").partition(".")[0]
    return root in LIBRARIES or "site-packages" in function.__code__.co_filename


def codes_of(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions that it defines."""
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from codes_of(const)


def referred_to(function: FunctionType) -> list[Any]:
    """What a function closes over and, in a user's own, the globals that it names."""
    found = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # not assigned yet
            found.append(cell.cell_contents)
    if not is_library(function):
        names = sorted({name for code in codes_of(function.__code__) for name in code.co_names})
        found += [function.__globals__[name] for name in names if name in function.__globals__]
    return found


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
            return referred_to(value)
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
