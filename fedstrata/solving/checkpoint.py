"""Where and how often a run is saved."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from fedstrata.support.sealed import CheckpointError
from fedstrata.support.writing import write_atomically


@dataclass(frozen=True)
class Checkpoint:
    """Where and how often a run is saved.

    Args:
        path: a file, or a folder for ``checkpoint.safetensors``.
        every_rounds: save at the first evaluation after this many rounds; None: by time alone.
        every_seconds: save at the first pause after this many seconds.
        overwrite: whether a run that does not resume may replace an existing checkpoint.
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
    def of(cls, given: str | os.PathLike[str] | Checkpoint) -> Checkpoint:
        """A user's argument: a path, or a checkpoint."""
        return given if isinstance(given, Checkpoint) else cls(given)

    def due(self, rounds: int, seconds: float) -> bool:
        """Whether to save, this many rounds and seconds after the last save."""
        return seconds >= self.every_seconds or (
            self.every_rounds is not None and rounds >= self.every_rounds
        )

    @property
    def file(self) -> Path:
        """The path of the file."""
        path = Path(self.path)
        return path if path.suffix == ".safetensors" else path / "checkpoint.safetensors"


def try_to_write(file: Path) -> None:
    """Raise if ``file`` cannot be written, before anything is computed.

    Raises:
        CheckpointError: with the reason.
    """
    try:
        if file.is_dir():
            raise IsADirectoryError("it is a folder")
        trial = file.with_name(f"{file.name}.trial")
        write_atomically(trial, b"")
        trial.unlink()
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be written ({error.strerror or error}). Give another path, or make room there."
        ) from error
