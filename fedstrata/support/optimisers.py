"""Describe optax optimisers, which are closures whose repr is only an address."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import suppress
from types import FunctionType
from typing import Any

import numpy as np
import optax

_first: dict[Hashable, optax.GradientTransformation] = {}


def first_like(optimiser: optax.GradientTransformation) -> optax.GradientTransformation:
    """The first optimiser built like this one, because the methods of a sweep must share the object.

    >>> first_like(optax.adam(0.1)) is first_like(optax.adam(0.1))
    True
    >>> first_like(optax.adam(0.1)) is first_like(optax.adam(0.2))
    False
    """
    try:
        return _first.setdefault(_key(optimiser), optimiser)
    except LookupError:
        return optimiser


def _key(value: Any) -> Hashable:
    """A key that is equal for optimisers built alike: code and closures of optax's functions."""
    match value:
        case FunctionType() if value.__module__.startswith("optax."):
            return value.__code__, _key(value.__defaults__), *((n, _key(v)) for n, v in _cells(value).items())
        case tuple() | list():
            return type(value), *map(_key, value)
        case dict():
            return dict, *((key, _key(inner)) for key, inner in value.items())
        case None | bool() | int() | float() | str() | np.generic():
            return repr(value)
    raise LookupError  # a function or an array of the user's own


def optimiser_words(optimiser: optax.GradientTransformation) -> str:
    """The transformations that an optimiser chains, with their numbers.

    >>> optimiser_words(optax.sgd(0.1))
    'scale(step_size=-0.1)'
    >>> optimiser_words(optax.chain(optax.clip(1.0), optax.sgd(optax.constant_schedule(0.1))))
    'clip(max_delta=1.0), scale_by_schedule(step_size_fn=...)'
    """
    return ", ".join(_parts(optimiser.init, optimiser.update)) or "identity"


def misplaced(value: Any) -> str:
    """The error text for an optimiser given in place of a number; empty for other values."""
    if not isinstance(value, optax.GradientTransformation):
        return ""
    return (
        f"an optimiser, {optimiser_words(value)}. "
        "Optimisers are for fs.FedOpt(client=optax.sgd(0.1), server=optax.adam(1e-2), H=5)."
    )


def _parts(init: Any, update: Any) -> list[str]:
    name = getattr(update, "__qualname__", type(update).__name__).partition(".<locals>")[0]
    cells = _cells(update)
    if name == "chain" and "update_fns" in cells:
        pairs = zip(_cells(init)["init_fns"], cells["update_fns"], strict=True)
        return [part for pair in pairs for part in _parts(*pair)]
    if name == "with_extra_args_support" and "tx" in cells:  # a wrapper without a meaning of its own
        return _parts(*cells["tx"])
    if name == "identity":
        return []
    return [f"{name}({', '.join(f'{key}={_value(value)}' for key, value in (_cells(init) | cells).items())})"]


def _cells(function: Any) -> dict[str, Any]:
    if not isinstance(function, FunctionType):
        return {}
    cells = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # an empty cell: optax assigns some variables on one branch only
            cells[name] = cell.cell_contents
    return cells


def _value(value: Any) -> str:
    match value:
        case optax.GradientTransformation():
            return f"({optimiser_words(value)})"
        case dict():
            return f"{{{', '.join(f'{key}: {_value(inner)}' for key, inner in value.items())}}}"
        case None | bool() | int() | float() | str() | np.generic():
            return repr(value)
    return "..."
