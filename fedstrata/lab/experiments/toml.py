"""Experiments as TOML files: methods compared on a problem of any class, without a line of Python.

    title = "FedAvg and FedProx on skewed digits"
    rounds = 100
    seeds = 3

    [data]
    name = "digits"
    clients = 10
    partition = { name = "Dirichlet", alpha = 0.3 }

    [problem]
    name = "softmax"        # short for name = "minimisation", model = "softmax"
    lam = 1e-3

    [[methods]]
    name = "FedAvg"
    gamma = 0.1
    H = 5

    [[methods]]
    name = "FedProx"
    label = "FedProx, strong"
    gamma = 0.1
    mu = 1.0
    H = 5

    [grid]
    H = [1, 5, 20]          # of every method that has an H
    alpha = [0.1, 10.0]     # of the partition

The problems are those of `fedstrata.lab.experiments.catalogue`, the models those of `fedstrata.models`, and
the methods all of `fedstrata.methods`; an option of a method that is a method itself, an optax schedule or an
optax optimiser is a table with its ``name``.

A key of ``[grid]``, ``[quick]`` or ``--set`` is looked for among rounds, eval_every and participation, then
in the data, its partition, the problem, its model and the methods; ``model.key`` and its like say which, and
``LABEL.key`` is one method's own.
``[table]``, ``[[plots]]`` and ``[claims]`` take what
`TableSpec`, `PlotSpec` and `PaperClaims` take. Each seed draws a new split, unless ``[data]`` has one.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from fedstrata.lab.experiments._checks import check
from fedstrata.lab.experiments._form import (
    Compared,
    File,
    about,
    better,
    measured,
    options_of,
    partition_options,
    series_of,
)
from fedstrata.lab.experiments._named import fields, make_method
from fedstrata.lab.experiments.base import Experiment, Setting, Task
from fedstrata.lab.experiments.catalogue import Inputs
from fedstrata.lab.experiments.data import NATURAL, PARTITIONS, federated
from fedstrata.lab.experiments.errors import ExperimentError
from fedstrata.lab.report import Column, PlotSpec, TableSpec
from fedstrata.lab.report.records import Scalar
from fedstrata.methods import METHODS
from fedstrata.models import for_data
from fedstrata.models import options as model_options
from fedstrata.support.words import suggest


def read(file: str | Path) -> Experiment:
    """The experiment that a file defines.

    Raises:
        ExperimentError: what is wrong, where, and what could stand there.
    """
    path = Path(file)
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        tables = (
            " Each method is a table of its own, [[methods]]." if "('methods',) twice" in str(error) else ""
        )
        raise ExperimentError(f"{path} is not valid TOML: {error}.{tables}") from error
    except RecursionError as error:
        raise ExperimentError(f"{path} is nested too deeply to be read.") from error
    name = re.sub(r"[^a-z0-9]+", "-", path.stem.lower()).strip("-") or "experiment"
    try:
        return define(_beside(content, path.parent), name)
    except ExperimentError as error:
        raise ExperimentError(f"{path}: {error}") from error
    except RecursionError as error:
        raise ExperimentError(f"{path} is nested too deeply to be read.") from error


def _beside(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The content, with files of data found from the folder that it is read from."""
    data = content.get("data")
    files = data.get("files") if isinstance(data, dict) else None
    named = [files] if isinstance(files, str) else files
    if not isinstance(named, list) or not all(isinstance(file, str) for file in named):
        return content
    found = [str(folder / file) for file in named]
    return {**content, "data": {**content["data"], "files": found if named is files else found[0]}}


def define(content: Mapping[str, Any], name: str) -> Experiment:
    """The experiment that a file's content defines; see `read`."""
    try:
        form = File.model_validate(content)
        check(form)
        build = FileBuild(form)
        build.check_methods()
        series = list(form.problem.entry.measures_of(form.problem.parameters))
        series += [name for metric in measured(form) for name in series_of(metric)]
        columns = [
            *(Column(name, better=better(name)) for name in series),
            Column("bytes_up", "ledger", "uploaded", format="bytes"),
        ]
        return Experiment(
            name=name,
            title=form.title,
            paper=form.paper,
            description=form.description
            or f"{form.problem.name} with the model {form.problem.model.name} on {form.data.name}.",
            grid=build.blocks(),
            parameters=build.parameters(),
            build=build,
            seeds=form.seeds,
            table=form.table or TableSpec(tuple(columns), rows=("label", *form.grid)),
            plots=tuple(map(PlotSpec, series)) if form.plots is None else form.plots,
            claims=form.claims,
            notes=form.notes,
            quick=form.quick or {"rounds": min(form.rounds, 5), "seeds": 1},
        )
    except ValidationError as error:
        raise ExperimentError("\n".join(map(_fault, error.errors()))) from error


def _fault(found: Any) -> str:
    """What is wrong in one place of the file."""
    at = ".".join(str(part) for part in found["loc"])
    if found["type"] == "extra_forbidden" and len(found["loc"]) == 1:
        known = list(File.model_fields)
        return f"there is no {at!r}{suggest(at, known)} There are {', '.join(known)}."
    return f"{at}: {found['msg'].removeprefix('Value error, ')}".removeprefix(": ")


class Place(NamedTuple):
    """Where a key belongs: a part of the file, and there the methods that take it."""

    part: str
    labels: tuple[str, ...] = ()


class FileBuild:
    """A setting's task, by the file: a key of the setting takes the place of what the file says there."""

    def __init__(self, form: File) -> None:
        self.form = form
        self.content = form.model_dump_json()
        self.methods: dict[str, Compared] = {}
        for method in form.methods:
            label = method.label or method.name
            if label in self.methods:
                raise ExperimentError(f"methods: two are called {label!r}; give one a label.")
            self.methods[label] = method

    def place(self, key: str) -> Place:
        """Where a key of the grid belongs.

        Raises:
            ExperimentError: where it belongs nowhere.
        """
        for part, names in self._names().items():
            if key in names:
                return Place(part, tuple(self.methods) if part != "methods" else self._takers(key))
        whose, _, own = key.rpartition(".")
        if own in self._names().get(whose, []):
            return Place(whose, tuple(self.methods))
        if whose in self.methods and own in fields(METHODS[self.methods[whose].name]):
            return Place("methods", (whose,))
        every = list(dict.fromkeys(name for names in self._names().values() for name in names))
        raise ExperimentError(
            f"grid: nothing is called {key!r}{suggest(key, every)} There are {', '.join(every)}."
        )

    def check_methods(self) -> None:
        """Raise where a method cannot be made, as the file says or with a value of the grid."""
        for label, method in self.methods.items():
            grid = {}
            for key, values in self.form.grid.items():
                place = self.place(key)
                if place.part == "methods" and label in place.labels and values:
                    grid[key.rpartition(".")[2]] = values
            given = {**method.parameters, **{key: values[0] for key, values in grid.items()}}
            make_method(method.name, given)
            for key, values in grid.items():
                for value in values[1:]:
                    make_method(method.name, {**given, key: value})

    def _names(self) -> dict[str, list[str]]:
        form = self.form
        return {
            "solve": ["rounds", "eval_every", "participation"],
            "data": options_of(form.data.name),
            "partition": partition_options(form),
            "problem": list(form.problem.entry.options),
            "model": model_options(form.problem.model.name),
            "methods": [f for method in self.methods.values() for f in fields(METHODS[method.name])],
        }

    def _takers(self, key: str) -> tuple[str, ...]:
        return tuple(label for label, method in self.methods.items() if key in fields(METHODS[method.name]))

    def blocks(self) -> list[dict[str, list[Scalar]]]:
        """The grid: a block for each method, with the keys that concern it."""
        places = {key: self.place(key) for key in self.form.grid}
        return [
            {"method": [label], **{k: v for k, v in self.form.grid.items() if label in places[k].labels}}
            for label in self.methods
        ]

    def parameters(self) -> dict[str, Scalar]:
        """What the file says beside the grid.

        A key that another part has too is ``model.key``, ``partition.key``, …. A method's goes by its own
        name where all methods that have it agree; else it is ``LABEL.key``, which reaches that method alone.
        """
        form, posing = self.form, self.form.problem
        clients = {} if form.data.name in NATURAL else {"clients": form.data.clients}
        found: dict[str, Any] = {
            "rounds": form.rounds,
            "eval_every": form.eval_every,
            "participation": form.participation,
        }
        for part, values in {
            "data": {**clients, **form.data.parameters},
            "partition": form.data.partition.parameters,
            "problem": posing.parameters,
            "model": posing.model.parameters,
        }.items():
            for key, value in values.items():
                if key != "seed":
                    found[key if self.place(key).part == part else f"{part}.{key}"] = value
        for label, method in self.methods.items():
            for key, value in method.parameters.items():
                place = self.place(key)
                if place.part == "methods" and key in form.grid:
                    continue
                agree = all(self.methods[its].parameters.get(key, ...) == value for its in place.labels)
                found[key if place.part == "methods" and agree else f"{label}.{key}"] = value
        return {k: v for k, v in found.items() if k not in form.grid and not isinstance(v, list | dict)}

    def __call__(self, s: Setting) -> Task:
        """The task of a setting."""
        form, label = self.form, str(s.method)
        compared = self.methods[label]
        places = {key: self.place(key) for key in sorted(s, key=lambda key: "." in key) if key != "method"}

        def values(part: str, given: Mapping[str, Any]) -> dict[str, Any]:
            mine = [key for key, place in places.items() if place.part == part and label in place.labels]
            return {**given, **{key.rpartition(".")[2]: s[key] for key in mine}}

        source = {"seed": s.seed, **values("data", form.data.parameters)}
        if form.data.name not in NATURAL:
            split = values("partition", form.data.partition.parameters)
            source = {"clients": form.data.clients, **source}
            with about("data.partition"):
                source["partition"] = PARTITIONS[form.data.partition.name](**split)
        with about("data"):
            data = federated(
                form.data.name, **{k: tuple(v) if isinstance(v, list) else v for k, v in source.items()}
            )
        posing = form.problem
        with about("problem.model"):
            model = for_data(posing.model.name, data, **values("model", posing.model.parameters))
        with about("problem"):
            options = values("problem", posing.parameters)
            posed = posing.entry.pose(Inputs(model, data, s.seed, form.weights), **options)
        return Task(
            posed.problem,
            make_method(compared.name, values("methods", compared.parameters)),
            posed.data,
            posed.x0,
            posed.y0,
            metrics={name: posed.metrics[name] for name in measured(form)},
            options={} if form.weights == "uniform" else {"weights": form.weights},
            **values("solve", {}),
        )
