"""One-line representations of methods, problems, data and results."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from fedstrata.support.optimisers import optimiser_words

WIDTH = 110  # of a line
FEW = 6  # numbers of an array that are shown


def aligned(rows: Sequence[Sequence[str]], left: int | None = None) -> list[str]:
    """The lines of a table of texts; columns from ``left`` on are right-aligned.

    >>> aligned([("a", "10"), ("bcd", "7")], left=1)
    ['a    10', 'bcd   7']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = "<" * (len(widths) if left is None else left) + ">" * len(widths)
    return [
        "  ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=False)
        ).rstrip()
        for row in rows
    ]


def short(value: Any) -> str:
    """A short representation of a value.

    >>> short(0.1), short(np.arange(3)), short(np.zeros((9, 2))), short(short)
    ('0.1', '[0, 1, 2]', 'array(9, 2)', 'short')
    """
    match value:
        case jax.core.Tracer():
            return "traced"
        case bool() | None | str():
            return repr(value)
        case float() | np.floating():
            return f"{value:g}"
        case int() | np.integer():
            return str(value)
        case np.ndarray() | jax.Array():
            array = np.asarray(value)
            if array.ndim == 0:
                return short(array.item())
            few = array.ndim == 1 and array.size <= FEW
            return f"[{', '.join(map(short, array.tolist()))}]" if few else f"array{array.shape}"
        case optax.GradientTransformation():
            return optimiser_words(value)
        case functools.partial():
            named = [f"{key}={short(held)}" for key, held in value.keywords.items()]
            return f"{short(value.func)}({', '.join([*map(short, value.args), *named])})"
        case list() | tuple():
            return f"[{', '.join(map(short, value))}]"
    if (name := getattr(value, "__qualname__", None)) is not None:
        return str(name).rpartition("<locals>.")[2]
    if dataclasses.is_dataclass(value) and hasattr(type(value).__repr__, "__wrapped__"):  # not one of its own
        held = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.repr}
        return line(type(value).__name__.lstrip("_"), held)
    return repr(value)


def plain(value: Any) -> Any:
    """A JSON-compatible form of a value: numbers, strings and lists, or else its representation."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case np.ndarray() | jax.Array():
            return np.asarray(value).tolist()
    return repr(value) if dataclasses.is_dataclass(value) else short(value)


def shapes(tree: Any) -> str:
    """The dtypes and shapes of a pytree's arrays.

    >>> shapes({"w": np.zeros((2, 3)), "b": np.float32(1)})
    "{'b': 'float32[]', 'w': 'float64[2, 3]'}"
    """
    return str(
        jax.tree.map(
            lambda leaf: f"{getattr(leaf, 'dtype', type(leaf).__name__)}{list(np.shape(leaf))}", tree
        )
    )


def line(name: str, parts: Mapping[str, Any] | Iterable[str], width: int = WIDTH) -> str:
    """``name(part, …)``, shortened to fit one line.

    >>> line("FedAvg", {"gamma": 0.1, "H": 5})
    'FedAvg(gamma=0.1, H=5)'
    >>> line("FedAvg", {"gamma": 0.1, "H": 5}, width=12)
    'FedAvg(gam…)'
    """
    if isinstance(parts, Mapping):
        parts = [f"{key}={short(value)}" for key, value in parts.items()]
    inner, room = " ".join(", ".join(parts).split()), width - len(name) - 2
    return f"{name}({inner if len(inner) <= room else inner[: room - 1] + '…'})"
