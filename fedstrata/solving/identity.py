"""What tells one run from another, and what differs between two, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedstrata.core.fingerprint import fields_of, fingerprint
from fedstrata.core.functions import is_known
from fedstrata.core.types import PyTree
from fedstrata.support.digest import tree_digest


def described(value: Any) -> Any:
    """A plain value as it is, for people to read; anything else as its kind and its fingerprint."""
    if isinstance(value, np.ndarray | np.generic | jax.Array) and value.ndim == 0:
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if callable(value):
        return f"function {fingerprint(value)}"
    leaves = jax.tree.leaves(value)
    arrays = bool(leaves) and all(isinstance(leaf, np.ndarray | np.generic | jax.Array) for leaf in leaves)
    return f"{'contents' if arrays else 'object'} {fingerprint(value)}"


_WORDS = {"function": "another function", "contents": "other contents", "object": "another object"}


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """What differs between two identities, in words."""
    found = []
    for key in dict.fromkeys([*here, *there]):
        if key not in there or key not in here:
            found.append(f"{key}: only {'here' if key in here else 'there'}")
        elif there[key] != here[key]:
            kinds = [str(value).partition(" ")[0] for value in (there[key], here[key])]
            alike = kinds[0] == kinds[1] and kinds[0] in _WORDS
            found.append(
                f"{key}: {_WORDS[kinds[0]]}" if alike else f"{key}: {there[key]!r} there, {here[key]!r} here"
            )
    return found


def readable(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an identity that holds plain values, no fingerprints."""
    return {key: value for key, value in identity.items() if str(value).partition(" ")[0] not in _WORDS}


def identity_of(
    problem: Any, methods: Sequence[Any], datasets: Sequence[Any], x0: PyTree, y0: PyTree, metrics: Any
) -> dict[str, Any]:
    """What is solved, by what, on what and from where, as plain values."""
    found: dict[str, Any] = {"problem": type(problem).__name__}
    if not is_known(type(problem).__module__):
        found["problem"] = f"object {fingerprint(type(problem))}"
    found |= {name: described(value) for name, value in fields_of(problem).items()}
    for b, method in enumerate(methods):
        name = "method" if len(methods) == 1 else f"methods[{b}]"
        found[name] = type(method).__name__
        found |= {f"{name}.{key}": described(value) for key, value in fields_of(method).items()}
    found["data"] = " ".join(["contents", *dict.fromkeys(data.fingerprint for data in datasets)])
    found |= {"x0": f"contents {tree_digest(x0)}", "y0": f"contents {tree_digest(y0)}"}
    return found | {f"metrics[{name!r}]": described(metric) for name, metric in dict(metrics).items()}
