"""The experiments that there are: the files of `papers`. None is imported before it is asked for."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from fedstrata.core.compiling import loading
from fedstrata.core.words import suggest
from fedstrata.lab.experiments.errors import ExperimentError

if TYPE_CHECKING:
    from fedstrata.lab.experiments.base import Experiment

FOLDER = Path(__file__).parent / "papers"


def names() -> list[str]:
    """Of all experiments: those of their files, with ``-`` for ``_``."""
    return sorted(file.stem.replace("_", "-") for file in FOLDER.glob("[a-z]*.py"))


def find(name: str) -> Experiment:
    """An experiment by name.

    Raises:
        ExperimentError: with suggestions, where there is none.
    """
    known = names()
    if name not in known:
        raise ExperimentError(
            f"There is no experiment {name!r}{suggest(name, known)} "
            f"`fedstrata list` shows them all; a file of your own ends in .toml or .py."
        )
    module = name.replace("-", "_")
    with loading():
        return defined(import_module(f"fedstrata.lab.experiments.papers.{module}"), f"{module}.py")


def defined(module: ModuleType, where: str) -> Experiment:
    """The experiment that a module defines.

    Raises:
        ExperimentError: where it defines none.
    """
    from fedstrata.lab.experiments.base import Experiment

    found = getattr(module, "EXPERIMENT", None)
    if found is None:
        near = [n for n in vars(module) if isinstance(getattr(module, n), Experiment)]
        hint = f" Its {near[0]} is an Experiment: call it EXPERIMENT." if near else ""
        raise ExperimentError(f"{where} defines no EXPERIMENT.{hint}")
    if not isinstance(found, Experiment):
        raise ExperimentError(
            f"{where}: EXPERIMENT must be a fedstrata.lab.Experiment, but is a {type(found).__name__}."
        )
    return found


class Headline(NamedTuple):
    """What a list says of an experiment; the fields are the experiment's own."""

    name: str
    title: str
    paper: str = ""
    needs: tuple[str, ...] = ()
    fallback: Mapping[str, Any] | None = None
    quick_seconds: float | None = None


def headline(name: str) -> Headline:
    """An experiment's headline, read off its file: to run the file would take JAX and a second.

    Raises:
        ExperimentError: where a field of the headline is computed, not written out.
    """
    file = FOLDER / f"{name.replace('-', '_')}.py"
    for statement in ast.parse(file.read_bytes()).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="EXPERIMENT")], value=ast.Call(keywords=keywords)):
                given = {word.arg: word.value for word in keywords if word.arg in Headline._fields}
                try:
                    return Headline(**{field: ast.literal_eval(value) for field, value in given.items()})
                except ValueError as error:
                    fields = ", ".join(Headline._fields)
                    raise ExperimentError(f"{file.name}: {fields} must be literals ({error}).") from error
    raise ExperimentError(f"{file.name} defines no EXPERIMENT.")
