"""Optimisers of optax in words: pairs of closures, which say of themselves only where they are in memory."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import numpy as np
import optax

from fedstrata.core.fingerprint import sure_fingerprint
from fedstrata.core.functions import cells_of

_first: dict[str, optax.GradientTransformation] = {}


def first_like(optimiser: optax.GradientTransformation) -> optax.GradientTransformation:
    """The first optimiser that was made like this one: another object would be another program.

    >>> first_like(optax.adam(0.1)) is first_like(optax.adam(0.1))
    True
    >>> first_like(optax.adam(0.1)) is first_like(optax.adam(0.2))
    False
    """
    known = sure_fingerprint(optimiser)
    return optimiser if known is None else _first.setdefault(known, optimiser)


def optimiser_words(optimiser: optax.GradientTransformation) -> str:
    """What an optimiser is made of, with its numbers.

    >>> optimiser_words(optax.sgd(0.1))
    'scale(step_size=-0.1)'
    >>> optimiser_words(optax.chain(optax.clip(1.0), optax.sgd(optax.constant_schedule(0.1))))
    'clip(max_delta=1.0), scale_by_schedule(step_size_fn=...)'
    """
    return ", ".join(_parts(optimiser.init, optimiser.update)) or "identity"


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
    return dict(cells_of(function)) if isinstance(function, FunctionType) else {}


def _value(value: Any) -> str:
    if isinstance(value, optax.GradientTransformation):
        return f"({optimiser_words(value)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_value(inner)}' for key, inner in value.items())}}}"
    plain = isinstance(value, bool | int | float | str | type(None) | np.generic)
    return f"{value!r}" if plain else "..."
