"""The finished runs of an experiment, one file for each setting."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import fedstrata
from fedstrata.experiments.base import Build, Experiment, Setting
from fedstrata.report import RunRecord
from fedstrata.report.records import read_runs, write_history, write_runs
from fedstrata.solving.checkpoint import write_atomically


class Store:
    """The finished runs of an experiment, one file for each setting."""

    def __init__(self, folder: Path, experiment: Experiment) -> None:
        self.folder = folder
        text = "".join(map(_source, _modules(experiment.build)))
        text += getattr(experiment.build, "content", "")  # a TOML file's
        self._origin = [experiment.name, fedstrata.__version__, hashlib.sha256(text.encode()).hexdigest()]

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

    def save(self, setting: Setting, runs: Sequence[RunRecord]) -> None:
        """Keep a setting's runs: all of them or, if this is interrupted, none."""
        content = {
            "setting": dict(setting),
            "seed": setting.seed,
            "runs": write_runs(runs),
            "history": write_history(runs),
        }
        write_atomically(self.file(setting), json.dumps(content, ensure_ascii=False).encode())

    def load(self, setting: Setting) -> list[RunRecord] | None:
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


def _modules(build: Build) -> list[ModuleType]:
    """The module of a definition's ``build``, and those of `papers` that it uses: what definitions share."""
    own = inspect.getmodule(build)
    if own is None:
        return []
    values = vars(own).values()
    names = {v.__name__ if isinstance(v, ModuleType) else getattr(v, "__module__", None) for v in values}
    shared = {name for name in names if name and name.startswith("fedstrata.experiments.papers.")}
    return [own, *(sys.modules[name] for name in sorted(shared - {own.__name__}))]


def _source(module: ModuleType) -> str:
    try:
        return inspect.getsource(module)
    except OSError:  # typed at a prompt
        return ""
