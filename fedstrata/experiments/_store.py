"""The finished runs of an experiment, one file for each setting."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import fedstrata
from fedstrata.experiments.base import Experiment, Setting
from fedstrata.report import Run
from fedstrata.report.records import read_runs, write_history, write_runs
from fedstrata.solving.checkpoint import write_atomically


class Store:
    """The finished runs of an experiment, one file for each setting."""

    def __init__(self, folder: Path, experiment: Experiment) -> None:
        self.folder = folder
        function = experiment.build or experiment.run
        module = inspect.getmodule(function)
        try:
            source = inspect.getsource(module) if module else ""
        except OSError:
            source = ""
        source += getattr(function, "content", "")  # a TOML file's
        self._origin = [experiment.name, fedstrata.__version__, hashlib.sha256(source.encode()).hexdigest()]

    def digest(self, setting: Setting) -> str:
        """Changes with the setting, the parameters, the experiment's module and the version."""
        facts = json.dumps([*self._origin, sorted(setting.items()), sorted(setting.cell), setting.seed])
        return hashlib.sha256(facts.encode()).hexdigest()[:20]

    def file(self, setting: Setting) -> Path:
        """Where a setting's runs are kept."""
        return self.folder / "finished" / f"{self.digest(setting)}.json"

    def checkpoint(self, setting: Setting) -> Path:
        """Where a run that is not finished is kept."""
        return self.folder / "unfinished" / f"{self.digest(setting)}.safetensors"

    def save(self, setting: Setting, runs: Sequence[Run]) -> None:
        """Keep a setting's runs: all of them or, if this is interrupted, none."""
        content = {
            "setting": dict(setting),
            "seed": setting.seed,
            "runs": write_runs(runs),
            "history": write_history(runs),
        }
        write_atomically(self.file(setting), json.dumps(content, ensure_ascii=False).encode())

    def load(self, setting: Setting) -> list[Run] | None:
        """A setting's runs, or None where they are missing or damaged."""
        try:
            content = json.loads(self.file(setting).read_text("utf-8"))
            return read_runs(content["runs"], content["history"])
        except (OSError, ValueError, KeyError):
            return None

    def tidy(self) -> None:
        """Remove the folder of checkpoints, where none is left."""
        with contextlib.suppress(OSError):
            (self.folder / "unfinished").rmdir()

    def clear(self) -> None:
        """Forget everything that is stored."""
        for name in ("finished", "unfinished"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
