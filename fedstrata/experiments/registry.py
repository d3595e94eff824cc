"""The experiments that there are. Nothing is imported before it is asked for."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from fedstrata.experiments.base import Experiment, ExperimentError, suggest

FOLDER = Path(__file__).parent / "papers"
_MACHINERY = {"base", "registry", "runner", "toml", "models", "data"}


def modules() -> list[str]:
    """Names of the modules that may define experiments."""
    names = sorted(module.name for module in pkgutil.iter_modules([str(FOLDER)]) if not module.ispkg)
    return [name for name in names if name not in _MACHINERY and not name.startswith("_")]


def experiments() -> dict[str, Experiment]:
    """All experiments by name."""
    found: dict[str, Experiment] = {}
    for module in modules():
        for experiment in _defined(importlib.import_module(f"fedstrata.experiments.papers.{module}")):
            if experiment.name in found:
                raise ExperimentError(f"Two experiments are called {experiment.name!r}.")
            found[experiment.name] = experiment
    return dict(sorted(found.items()))


def find(name: str) -> Experiment:
    """An experiment by name; only modules whose text has that name are imported.

    Raises:
        ExperimentError: with suggestions, where there is none.
    """
    for module in modules():
        if f'"{name}"' in (FOLDER / f"{module}.py").read_text("utf-8"):
            for experiment in _defined(importlib.import_module(f"fedstrata.experiments.papers.{module}")):
                if experiment.name == name:
                    return experiment
    found = experiments()
    if name not in found:
        raise ExperimentError(
            f"There is no experiment {name!r}{suggest(name, list(found))} "
            f"`fedstrata list` shows them all; a file of your own ends in .toml or .py."
        )
    return found[name]


def from_module(module: ModuleType, where: str) -> list[Experiment]:
    """The experiments that a module defines.

    Raises:
        ExperimentError: where it defines none.
    """
    found = list(_defined(module))
    if not found:
        raise ExperimentError(f"{where} defines neither EXPERIMENT nor EXPERIMENTS.")
    return found


def _defined(module: ModuleType) -> Iterator[Experiment]:
    if (one := getattr(module, "EXPERIMENT", None)) is not None:
        yield one
    yield from getattr(module, "EXPERIMENTS", ())
