"""Checkpoints without pickle: a safetensors file with the arrays, all else as JSON in its header.

A write goes to a temporary file beside the target, is flushed to disk and then moved over it, so that a kill
at any moment leaves either the old checkpoint or the new one. A digest in the header finds bytes that
changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedstrata.core.types import PyTree

VERSION = 1


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; the message says why and what to do."""


@dataclass(frozen=True)
class Checkpoint:
    """Where and how often a run is saved.

    Args:
        path: a file, or a folder in which ``checkpoint.safetensors`` is kept.
        every_rounds: save at the first evaluation after so many rounds; None leaves it to the seconds.
        every_seconds: save at the first pause after so many seconds.
        overwrite: whether a run that does not resume may replace a checkpoint that is there.
    """

    path: str | os.PathLike[str]
    every_rounds: int | None = None
    every_seconds: float = 30.0
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.every_rounds is not None and self.every_rounds < 1:
            raise ValueError(f"Checkpoint: every_rounds must be at least 1, but is {self.every_rounds}.")
        if not self.every_seconds >= 0:
            raise ValueError(f"Checkpoint: every_seconds must be ≥ 0, but is {self.every_seconds}.")

    @classmethod
    def of(cls, given: str | os.PathLike[str] | Checkpoint | None) -> Checkpoint | None:
        """A user's argument: a path, a checkpoint, or none."""
        return given if given is None or isinstance(given, Checkpoint) else cls(given)

    def due(self, rounds: int, seconds: float) -> bool:
        """Whether to save so many rounds and seconds after the last time."""
        return seconds >= self.every_seconds or (
            self.every_rounds is not None and rounds >= self.every_rounds
        )

    @property
    def file(self) -> Path:
        """The file itself."""
        path = Path(self.path)
        return path if path.suffix == ".safetensors" else path / "checkpoint.safetensors"


def write_atomically(file: Path, content: bytes) -> None:
    """Replace ``file`` by ``content``, or leave it as it was."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, file)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _digest(arrays: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(arrays[name]).tobytes())
    return digest.hexdigest()


def save_arrays(file: Path, arrays: dict[str, np.ndarray], facts: dict[str, Any]) -> None:
    """Write named arrays and JSON-able facts, atomically."""
    arrays = {name: np.require(array, requirements="C") for name, array in arrays.items()}
    header = {"fedstrata": str(VERSION), "facts": json.dumps(facts), "sha256": _digest(arrays)}
    write_atomically(file, save(arrays, metadata=header))


def load_arrays(file: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The inverse of `save_arrays`.

    Raises:
        CheckpointError: where the file is missing, damaged or of another version.
    """
    if not file.exists():
        raise CheckpointError(f"There is no checkpoint at {file}.")
    try:
        with safe_open(file, framework="numpy") as stream:
            header = stream.metadata() or {}
            arrays = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} is damaged and cannot be read ({error}). Delete it to start afresh."
        ) from error
    if header.get("fedstrata") != str(VERSION):
        raise CheckpointError(
            f"{file} has the format {header.get('fedstrata', 'unknown')}, this version reads {VERSION}. "
            "Delete it to start afresh, or use the version that wrote it."
        )
    if header.get("sha256") != _digest(arrays):
        raise CheckpointError(f"{file} is damaged (its digest does not match). Delete it to start afresh.")
    return arrays, json.loads(header["facts"])


def flatten(prefix: str, tree: PyTree) -> dict[str, np.ndarray]:
    """The leaves by number, under a prefix."""
    return {f"{prefix}/{j}": np.asarray(leaf) for j, leaf in enumerate(jax.tree.leaves(tree))}


def unflatten(prefix: str, like: PyTree, arrays: dict[str, np.ndarray], file: Path) -> PyTree:
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
            "run's. "
            "Give another checkpoint path, or resume=False."
        )
    return jax.tree.unflatten(structure, new)
