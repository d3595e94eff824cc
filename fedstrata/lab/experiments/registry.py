"""The experiments by name: the demo and, in a clone, the papers'. None is imported before it is asked for."""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from fedstrata.lab.experiments.errors import ExperimentError
from fedstrata.support.lazy import loading
from fedstrata.support.words import suggest

if TYPE_CHECKING:
    from fedstrata.lab.experiments.base import Experiment

PACKAGE = "reproductions"  # a folder of the repository, which no wheel has


def folder() -> Path | None:
    """The papers' definitions: in the repository of an editable installation, else where the command runs."""
    places = (root / PACKAGE for root in (Path(__file__).parents[3], Path.cwd()))
    return next((place for place in places if (place / "__init__.py").exists()), None)


def files() -> dict[str, Path]:
    """Experiments' names and files: the demo, and in a repository the papers'."""
    papers = folder()
    found = [Path(__file__).with_name("demo.py"), *(papers.glob("[a-z]*.py") if papers else ())]
    return {file.stem.replace("_", "-"): file for file in sorted(found, key=lambda file: file.stem)}


def plain(name: str) -> str:
    """A name as `names` has it: ``fedrzo-relu`` for ``reproductions/fedrzo_relu.py`` and the like.

    >>> plain("reproductions/fedrzo_relu.py"), plain("mine.py")
    ('fedrzo-relu', 'mine.py')
    """
    path = Path(name)
    return path.stem.replace("_", "-") if path.parent.name == PACKAGE else name


def names() -> list[str]:
    """The names of all experiments: those of their files, with ``-`` for ``_``."""
    return list(files())


def find(name: str) -> Experiment:
    """An experiment by name.

    Raises:
        ExperimentError: with suggestions, where there is none.
    """
    known = files()
    if plain(name) not in known:
        where = (
            "" if folder() else " The papers' experiments are in the repository: run this in a clone of it."
        )
        raise ExperimentError(
            f"Unknown experiment {name!r}{suggest(name, [*known])} "
            f"`fedstrata list` shows all; a file of your own must end in .toml or .py.{where}"
        )
    file = known[plain(name)]
    package = PACKAGE if file.parent.name == PACKAGE else __package__
    if package == PACKAGE and str(file.parents[1]) not in sys.path:
        sys.path.append(str(file.parents[1]))  # definitions import what they share from their package
    with loading():
        return defined(import_module(f"{package}.{file.stem}"), file.name)


def defined(module: ModuleType, where: str) -> Experiment:
    """The experiment that a module defines.

    Raises:
        ExperimentError: if it defines none.
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
    """The line of an experiment in a list; the fields are the experiment's own."""

    name: str
    title: str
    paper: str = ""
    needs: tuple[str, ...] = ()
    fallback: Mapping[str, Any] | None = None
    quick_seconds: float | None = None


def headline(name: str) -> Headline:
    """An experiment's headline, read off its file: to run the file would take JAX and a second.

    Raises:
        ExperimentError: if a field of the headline is computed, not written out.
    """
    file = files()[name]
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
