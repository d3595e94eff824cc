"""The finished runs of an experiment, one file for each setting."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import fedstrata
from fedstrata.lab.experiments.base import Experiment, Setting
from fedstrata.lab.report import RunRecord
from fedstrata.lab.report.records import read_runs, write_history, write_runs
from fedstrata.solving.checkpoint import try_to_write
from fedstrata.support.sealed import UNSEALED, VERSION, CheckpointError, is_whole, sealed
from fedstrata.support.writing import clear_strays, write_atomically

Facts = Mapping[str, Any]  # what a run was made of, as plain values


class Finished(NamedTuple):
    """A setting's runs, and remarks on them."""

    runs: list[RunRecord]
    remarks: tuple[str, ...]


class RunStore:
    """The finished runs of an experiment, one file for each setting."""

    def __init__(self, folder: Path, experiment: Experiment) -> None:
        self.folder = folder
        self._origin = [experiment.name, fedstrata.__version__, VERSION]

    def prepare(self, alone: bool = True) -> None:
        """Check before any compute that runs can be stored, and remove temporary files of killed runs.

        Args:
            alone: whether no process of another machine may be writing, whose files must stay.

        Raises:
            CheckpointError: if the folder cannot be written.
        """
        for name in ("finished", "unfinished") if alone else ():
            clear_strays(self.folder / name)
        try_to_write(self.folder / "finished" / "a.json")

    def digest(self, *settings: Setting) -> str:
        """The digest of settings, with the experiment and the version."""
        facts = [fact for s in settings for fact in (sorted(s.items()), sorted(s.cell), s.seed)]
        return _digest([*self._origin, *facts])

    def holds(self, setting: Setting) -> bool:
        """Whether there are runs of a setting, of any identity."""
        return any((self.folder / "finished").glob(f"{self.digest(setting)}-*.json"))

    def file(self, setting: Setting, identity: Facts) -> Path:
        """Where a setting's runs are kept."""
        return self.folder / "finished" / f"{self.digest(setting)}-{_digest(identity)}.json"

    def checkpoint(self, settings: Sequence[Setting], identities: Sequence[Facts]) -> Path:
        """The checkpoint of an unfinished run, or of several that are solved together."""
        return self.folder / "unfinished" / f"{self.digest(*settings)}-{_digest(identities)}.safetensors"

    def model(self, setting: Setting, identity: Facts) -> Path:
        """The folder for the model of a setting's run."""
        words = re.sub(r"[^\w.=-]+", "-", f"{setting.words} seed{setting.seed}".strip())
        return self.folder / "models" / f"{words[:100]}-{_digest([self.digest(setting), identity])[:8]}"

    def save(
        self, setting: Setting, runs: Sequence[RunRecord], identity: Facts, remarks: Sequence[str] = ()
    ) -> None:
        """Keep a setting's runs: all of them or, if this is interrupted, none."""
        content = {
            "sha256": UNSEALED,
            "setting": dict(setting),
            "seed": setting.seed,
            "identity": identity,
            "remarks": list(remarks),
            "runs": write_runs(runs),
            "history": write_history(runs),
        }
        write_atomically(
            self.file(setting, identity), sealed(json.dumps(content, ensure_ascii=False).encode())
        )

    def load(self, setting: Setting, identity: Facts) -> Finished | None:
        """A setting's runs of this identity, or None where there are none.

        Raises:
            CheckpointError: if the file is damaged.
        """
        file = self.file(setting, identity)
        if not file.exists():
            return None
        content = file.read_bytes()
        if not is_whole(content):
            raise CheckpointError(
                f"{file} is damaged: it has changed since it was written. Delete it to repeat the run."
            )
        found = json.loads(content)
        remarks = tuple(found.get("remarks", ()))  # an older file has none
        return Finished(read_runs(found["runs"], found["history"]), remarks)

    def tidy(self) -> None:
        """Remove the folder of checkpoints, where none is left."""
        with contextlib.suppress(OSError):
            (self.folder / "unfinished").rmdir()

    def clear(self) -> None:
        """Delete everything that is stored."""
        for name in ("finished", "unfinished", "models"):
            shutil.rmtree(self.folder / name, ignore_errors=True)


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
