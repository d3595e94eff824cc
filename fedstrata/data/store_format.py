"""The format of a store's index: descriptions of arrays, and of the pytrees they are in."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import DictKey

from fedstrata.core.client import is_converted
from fedstrata.core.types import PyTree
from fedstrata.data.federated import DataError
from fedstrata.data.scaled import Scaled
from fedstrata.support.containers import from_json, to_json

FORMAT, VERSION = "fedstrata-store", 1
HEADER = 256  # bytes before an array's own; its shape is known only when all of it is written


def described(dtype: np.dtype, shape: tuple[int, ...]) -> str:
    """The description of an array in the header of an `.npy` file."""
    return f"{{'descr': {dtype.str!r}, 'fortran_order': False, 'shape': {shape!r}, }}"


def shape_of(node: Any) -> Any:
    """The containers of a pytree of numbers as JSON."""

    def other(node: Any) -> Any:
        if not is_converted(node):
            raise DataError(f"A store holds dicts, lists and tuples of arrays, not {type(node).__name__}.")
        how = {"mean": node.mean, "deviation": node.deviation}
        return {"scaled": {"values": to_json(node.values, other), **how}}

    keys = [key for path, _ in jax.tree_util.tree_leaves_with_path(node) for key in path]
    if other_keys := [key.key for key in keys if type(key) is DictKey and type(key.key) is not str]:
        raise DataError(f"The names of a store's arrays must be strings, not {other_keys}.")
    return to_json(node, other)


def rebuilt(shape: Any, leaves: Sequence[Any]) -> PyTree:
    """The inverse of `shape_of`, with arrays in place of their numbers."""

    def scaled(inner: Any) -> Scaled:
        values = from_json(inner["values"], leaves)
        return Scaled(values, _tuples(inner["mean"]), _tuples(inner["deviation"]))

    return from_json(shape, leaves, {"scaled": scaled})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if type(value) is list else value


def digest_of(index: dict[str, Any]) -> str:
    """A checksum of all that an index says."""
    plain = json.loads(json.dumps({key: value for key, value in index.items() if key != "sha256"}))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
