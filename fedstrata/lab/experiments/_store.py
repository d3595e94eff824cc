"""The finished runs of an experiment, one file for each setting."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import fedstrata
from fedstrata.lab.experiments.base import Build, Experiment, Setting
from fedstrata.lab.experiments.registry import PACKAGE
from fedstrata.lab.report import RunRecord
from fedstrata.lab.report.records import read_runs, write_history, write_runs
from fedstrata.solving.checkpoint import try_to_write
from fedstrata.support.sealed import UNSEALED, VERSION, CheckpointError, is_whole, sealed
from fedstrata.support.writing import clear_strays, write_atomically


class Finished(NamedTuple):
    """A setting's runs and what they were made of; None where that is not known without making them anew."""

    runs: list[RunRecord]
    identity: dict[str, Any] | None
    remarks: tuple[str, ...]


class Store:
    """The finished runs of an experiment, one file for each setting."""

    def __init__(self, folder: Path, experiment: Experiment) -> None:
        self.folder = folder
        text = "".join(map(_source, _modules(experiment.build)))
        text += getattr(experiment.build, "content", "")  # a TOML file's
        source = hashlib.sha256(text.encode()).hexdigest()
        self._origin = [experiment.name, fedstrata.__version__, VERSION, source]

    def prepare(self) -> None:
        """Find out before anything is computed whether runs can be kept, and tidy up after a kill.

        Raises:
            CheckpointError: where the folder cannot be written.
        """
        for name in ("finished", "unfinished"):
            clear_strays(self.folder / name)
        try_to_write(self.folder / "finished" / "a.json")

    def digest(self, *settings: Setting) -> str:
        """Changes with the settings, the parameters, the experiment's modules and the version."""
        facts = [fact for s in settings for fact in (sorted(s.items()), sorted(s.cell), s.seed)]
        return hashlib.sha256(json.dumps([*self._origin, *facts]).encode()).hexdigest()[:20]

    def file(self, setting: Setting) -> Path:
        """Where a setting's runs are kept."""
        return self.folder / "finished" / f"{self.digest(setting)}.json"

    def checkpoint(self, *settings: Setting) -> Path:
        """Where a run that is not finished is kept, or several that are solved together."""
        return self.folder / "unfinished" / f"{self.digest(*settings)}.safetensors"

    def model(self, setting: Setting) -> Path:
        """The folder of what a setting's run has found, where that is kept."""
        words = re.sub(r"[^\w.=-]+", "-", f"{setting.words} seed{setting.seed}".strip())
        return self.folder / "models" / f"{words[:100]}-{self.digest(setting)[:8]}"

    def save(
        self,
        setting: Setting,
        runs: Sequence[RunRecord],
        identity: dict[str, Any] | None,
        remarks: Sequence[str] = (),
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
        write_atomically(self.file(setting), sealed(json.dumps(content, ensure_ascii=False).encode()))

    def load(self, setting: Setting) -> Finished | None:
        """A setting's runs, or None where there are none.

        Raises:
            CheckpointError: where the file is damaged.
        """
        file = self.file(setting)
        if not file.exists():
            return None
        content = file.read_bytes()
        if not is_whole(content):
            raise CheckpointError(
                f"{file} is damaged: it is not what was written. Delete it, and its run is done again."
            )
        found = json.loads(content)
        remarks = tuple(found.get("remarks", ()))  # an older file has none
        return Finished(read_runs(found["runs"], found["history"]), found["identity"], remarks)

    def tidy(self) -> None:
        """Remove the folder of checkpoints, where none is left."""
        with contextlib.suppress(OSError):
            (self.folder / "unfinished").rmdir()

    def clear(self) -> None:
        """Forget everything that is stored."""
        for name in ("finished", "unfinished", "models"):
            shutil.rmtree(self.folder / name, ignore_errors=True)


def _modules(build: Build) -> list[ModuleType]:
    """The module of a definition's ``build``, and the reproductions that it uses: what definitions share."""
    own = inspect.getmodule(build)
    if own is None:
        return []
    values = vars(own).values()
    names = {v.__name__ if isinstance(v, ModuleType) else getattr(v, "__module__", None) for v in values}
    shared = {name for name in names if name and name.startswith(f"{PACKAGE}.")}
    return [own, *(sys.modules[name] for name in sorted(shared - {own.__name__}))]


def _source(module: ModuleType) -> str:
    try:
        return inspect.getsource(module)
    except OSError:  # typed at a prompt
        return ""
