"""Digests of arrays by what they hold: the same wherever they lie, in every process."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import numpy as np


def array_digest(array: np.ndarray) -> bytes:
    """Of an array's dtype, shape and content, whatever its layout."""
    digest = hashlib.sha256(f"{array.dtype.str} {array.shape} ".encode())
    if array.size:
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.digest()


def tree_digest(tree: Any) -> str:
    """Of the arrays of a pytree and where in it they stand."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        digest.update(jax.tree_util.keystr(path).encode() + b"\0" + array_digest(np.asarray(leaf)))
    return digest.hexdigest()[:24]
