"""What writing and reading a store agree on: how its index describes arrays and the pytrees they are in."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedstrata.core.types import PyTree
from fedstrata.data.federated import DataError
from fedstrata.data.scaled import Scaled

FORMAT, VERSION = "fedstrata-store", 1
HEADER = 256  # bytes before an array's own; its shape is known only when all of it is written


def described(dtype: np.dtype, shape: tuple[int, ...]) -> str:
    """What an `.npy` file says of its array."""
    return f"{{'descr': {dtype.str!r}, 'fortran_order': False, 'shape': {shape!r}, }}"


def shape_of(node: Any) -> Any:
    """The containers of a pytree of numbers as JSON."""
    match node:
        case dict():
            if not all(isinstance(key, str) for key in node):
                raise DataError(f"A store's samples have words as their names, not {list(node)}.")
            return {"dict": {key: shape_of(value) for key, value in node.items()}}
        case tuple() | list():
            return {"list" if isinstance(node, list) else "tuple": [shape_of(value) for value in node]}
        case Scaled():
            how = {"mean": node.mean, "deviation": node.deviation}
            return {"scaled": {"values": shape_of(node.values), **how}}
        case int():
            return node
    raise DataError(f"A store holds dicts, lists and tuples of arrays, not {type(node).__name__}.")


def rebuilt(shape: Any, leaves: Sequence[Any]) -> PyTree:
    """The inverse of `shape_of`, with arrays in place of their numbers."""
    if isinstance(shape, int):
        return leaves[shape]
    ((kind, inner),) = shape.items()
    if kind == "dict":
        return {name: rebuilt(part, leaves) for name, part in inner.items()}
    if kind == "scaled":
        return Scaled(rebuilt(inner["values"], leaves), _tuples(inner["mean"]), _tuples(inner["deviation"]))
    parts = [rebuilt(part, leaves) for part in inner]
    return tuple(parts) if kind == "tuple" else parts


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def digest_of(index: dict[str, Any]) -> str:
    """A checksum of all that an index says."""
    plain = json.loads(json.dumps({key: value for key, value in index.items() if key != "sha256"}))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
