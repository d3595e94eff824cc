"""The containers of a pytree as JSON, and back: dicts, lists, tuples; a leaf is the number of an array."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


def to_json(node: Any, other: Callable[[Any], Any]) -> Any:
    """The containers of a pytree of whole numbers.

    Args:
        node: the pytree.
        other: what becomes of another container than a dict, a list, a tuple or None.

    >>> to_json({"w": (0, 1), "b": None}, repr)
    {'dict': {'w': {'tuple': [0, 1]}, 'b': None}}
    """
    match node:
        case None | int():
            return node
        case dict():
            return {"dict": {str(key): to_json(value, other) for key, value in node.items()}}
        case tuple():
            return {"tuple": [to_json(value, other) for value in node]}
        case list():
            return {"list": [to_json(value, other) for value in node]}
    return other(node)


def from_json(
    shape: Any, leaves: Sequence[Any], others: Mapping[str, Callable[[Any], Any]] | None = None
) -> Any:
    """The inverse of `to_json`, with ``leaves`` in place of their numbers.

    Args:
        shape: what `to_json` returned.
        leaves: by number.
        others: of further kinds, what makes the container of its description.
    """
    match shape:
        case None:
            return None
        case int():
            return leaves[shape]
        case {"dict": inner}:
            return {key: from_json(part, leaves, others) for key, part in inner.items()}
        case {"tuple": inner}:
            return tuple(from_json(part, leaves, others) for part in inner)
        case {"list": inner}:
            return [from_json(part, leaves, others) for part in inner]
    ((kind, inner),) = shape.items()
    return (others or {})[kind](inner)
