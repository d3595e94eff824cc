"""Arrays in sealed files, without pickle: a safetensors file with the arrays, all else as JSON in its header.

A write goes to a temporary file beside the target, is flushed to disk and then moved over it, so that a kill
at any moment leaves either the old file or the new one. The file contains a digest of itself (with zeros in
the digest's place), so that any changed byte is detected.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load, save

from fedstrata.support.writing import write_atomically

VERSION = 4  # raised too where the same text would continue otherwise: 4 has StR-FedAvg's fading steps
UNSEALED = "0" * 64  # what stands for the digest while it is computed
_SEAL = re.compile(rb'"sha256": ?"([0-9a-f]{64})"')


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; the message says why and what to do."""


def sealed(content: bytes) -> bytes:
    """Write the digest into content that has ``"sha256": UNSEALED``."""
    found = _SEAL.search(content)
    assert found is not None
    digest = hashlib.sha256(content).hexdigest().encode()
    return content[: found.start(1)] + digest + content[found.end(1) :]


def is_whole(content: bytes) -> bool:
    """Whether sealed content is unchanged."""
    found = _SEAL.search(content)
    if found is None:
        return False
    digest = hashlib.sha256(content[: found.start(1)])
    digest.update(UNSEALED.encode())
    digest.update(memoryview(content)[found.end(1) :])
    return digest.hexdigest().encode() == found[1]


def save_arrays(file: Path, arrays: dict[str, np.ndarray], facts: dict[str, Any]) -> None:
    """Write named arrays and JSON-able facts, atomically."""
    arrays = {name: np.require(array, requirements="C") for name, array in arrays.items()}
    halves = [name for name, array in arrays.items() if array.dtype == jnp.bfloat16]
    arrays |= {name: arrays[name].view(np.uint16) for name in halves}  # NumPy cannot read such a file
    header = {"fedstrata": str(VERSION), "facts": json.dumps(facts), "sha256": UNSEALED}
    header |= {"bfloat16": json.dumps(halves)} if halves else {}
    write_atomically(file, sealed(save(arrays, metadata=header)))


def load_arrays(file: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The inverse of `save_arrays`.

    Raises:
        CheckpointError: if the file is missing, damaged or of another version.
    """
    if not file.exists():
        raise CheckpointError(f"Checkpoint not found: {file}.")
    try:
        content = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror or error}).") from error
    try:
        header = _header(content)
        version = header["fedstrata"]
        whole = is_whole(content)
    except (ValueError, KeyError, TypeError, RecursionError):
        whole = False
    if not whole:
        raise CheckpointError(
            f"{file} is damaged: it has changed since it was written. Delete it to start again."
        )
    if version != str(VERSION):
        raise CheckpointError(
            f"{file} has the format {version}, this version reads {VERSION}. "
            "Delete it to start again, or use the version that wrote it."
        )
    arrays = load(content)
    arrays |= {name: arrays[name].view(jnp.bfloat16) for name in json.loads(header.get("bfloat16", "[]"))}
    return arrays, json.loads(header["facts"])


def _header(content: bytes) -> dict[str, str]:
    """The header of a safetensors file: eight bytes with a length, then JSON of that length."""
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length])["__metadata__"]


def flatten(prefix: str, tree: Any) -> dict[str, np.ndarray]:
    """The leaves by number, under a prefix."""
    return {f"{prefix}/{j}": np.asarray(leaf) for j, leaf in enumerate(jax.tree.leaves(tree))}


def unflatten(prefix: str, like: Any, arrays: dict[str, np.ndarray], file: Path) -> Any:
    """The leaves put back into the structure of ``like``; shapes and dtypes must agree."""
    leaves, structure = jax.tree.flatten(like)
    found = [name for name in arrays if name.startswith(prefix + "/")]
    new = [arrays.get(f"{prefix}/{j}") for j in range(len(leaves))]
    fits = len(found) == len(leaves) and all(
        a is not None and a.shape == np.shape(b) and a.dtype == np.asarray(b).dtype
        for a, b in zip(new, leaves, strict=True)
    )
    if not fits:
        raise CheckpointError(
            f"{file} belongs to another problem or method: its {prefix} has other shapes or dtypes than this "
            "run's. Give another checkpoint path, or resume=False."
        )
    return jax.tree.unflatten(structure, new)
