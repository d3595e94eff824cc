"""Experiments as TOML files: methods compared on a standard problem, without a line of Python.

    title = "FedAvg and FedProx on skewed digits"
    rounds = 100
    seeds = 3

    [data]
    name = "digits"
    clients = 10
    partition = { name = "Dirichlet", alpha = 0.3 }

    [problem]
    name = "softmax"
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

A key of ``[grid]``, ``[quick]`` or ``--set`` is looked for among rounds, eval_every and participation, then
in the data, its partition, the problem and the methods. ``[table]``, ``[[plots]]`` and ``[claims]`` take what
`TableSpec`, `PlotSpec` and `PaperClaims` take. Every seed splits the data anew, unless ``[data]`` has one.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedstrata.core.words import suggest
from fedstrata.experiments.base import Experiment, Setting, Task
from fedstrata.experiments.data import LOADERS, PARTITIONS, federated
from fedstrata.experiments.errors import ExperimentError
from fedstrata.methods import METHODS, Method
from fedstrata.models import MODELS, for_data, options
from fedstrata.problems import Minimization
from fedstrata.report import Column, PaperClaims, PlotSpec, TableSpec
from fedstrata.report.records import Scalar

METRICS = ("accuracy", "test_loss")


class Named(BaseModel):
    """A name that a registry knows, and its parameters."""

    model_config = ConfigDict(extra="allow")

    name: str

    @property
    def parameters(self) -> dict[str, Any]:
        """Everything but the name."""
        return dict(self.model_extra or {})


class Data(Named):
    """A loader, the clients and the partition."""

    clients: int = Field(default=10, ge=1)
    partition: Named = Named(name="IID")


class Compared(Named):
    """A method and what tables call it."""

    label: str = ""


class File(BaseModel):
    """The form of a TOML file."""

    model_config = ConfigDict(extra="forbid")

    title: str
    description: str = ""
    paper: str = ""
    rounds: int = Field(default=100, ge=1)
    eval_every: int = Field(default=1, ge=1)
    participation: float | int = 1.0
    seeds: int = Field(default=3, ge=1)
    metrics: list[str] = list(METRICS)
    data: Data
    problem: Named
    methods: list[Compared] = Field(min_length=1)
    grid: dict[str, list[Scalar]] = {}
    quick: dict[str, Scalar | list[Scalar]] = {}
    table: TableSpec | None = None
    plots: tuple[PlotSpec, ...] | None = None
    claims: PaperClaims | None = None
    notes: str = ""


def read(file: str | Path) -> Experiment:
    """The experiment that a file defines.

    Raises:
        ExperimentError: what is wrong, where, and what could stand there.
    """
    path = Path(file)
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ExperimentError(f"{path} is no TOML: {error}") from error
    except RecursionError as error:
        raise ExperimentError(f"{path} is nested too deeply to be read.") from error
    name = re.sub(r"[^a-z0-9]+", "-", path.stem.lower()).strip("-") or "experiment"
    try:
        return define(content, name)
    except ExperimentError as error:
        raise ExperimentError(f"{path}: {error}") from error
    except RecursionError as error:
        raise ExperimentError(f"{path} is nested too deeply to be read.") from error


def define(content: Mapping[str, Any], name: str) -> Experiment:
    """The experiment that a file's content defines; see `read`."""
    try:
        form = File.model_validate(content)
        _check(form)
        build = FileBuild(form)
        columns = [
            Column("loss", better="low"),
            *(Column(m, better="high" if m == "accuracy" else "low") for m in form.metrics),
            Column("bytes_up", "ledger", "uploaded", format="bytes"),
        ]
        return Experiment(
            name=name,
            title=form.title,
            paper=form.paper,
            description=form.description or f"{form.problem.name} on {form.data.name}.",
            grid=build.blocks(),
            parameters=build.parameters(),
            build=build,
            seeds=form.seeds,
            table=form.table or TableSpec(tuple(columns), rows=("label", *form.grid)),
            plots=tuple(PlotSpec(m) for m in ("loss", *form.metrics)) if form.plots is None else form.plots,
            claims=form.claims,
            notes=form.notes,
            quick=form.quick or {"rounds": min(form.rounds, 5), "seeds": 1},
        )
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(str(part) for part in first["loc"])
        known = (
            f"; known keys are {', '.join(File.model_fields)}" if first["type"] == "extra_forbidden" else ""
        )
        raise ExperimentError(f"{at}: {first['msg']}{known}".removeprefix(": ")) from error


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
        every = list(dict.fromkeys(name for names in self._names().values() for name in names))
        raise ExperimentError(
            f"grid: nothing is called {key!r}{suggest(key, every)} There are {', '.join(every)}."
        )

    def _names(self) -> dict[str, list[str]]:
        form = self.form
        return {
            "solve": ["rounds", "eval_every", "participation"],
            "data": ["clients", *_options(form.data.name)],
            "partition": _fields(PARTITIONS[form.data.partition.name]),
            "problem": options(form.problem.name),
            "methods": [f for method in self.methods.values() for f in _fields(METHODS[method.name])],
        }

    def _takers(self, key: str) -> tuple[str, ...]:
        return tuple(label for label, method in self.methods.items() if key in _fields(METHODS[method.name]))

    def blocks(self) -> list[dict[str, list[Scalar]]]:
        """The grid: a block for each method, with the keys that concern it."""
        places = {key: self.place(key) for key in self.form.grid}
        return [
            {"method": [label], **{k: v for k, v in self.form.grid.items() if label in places[k].labels}}
            for label in self.methods
        ]

    def parameters(self) -> dict[str, Scalar]:
        """What the file says beside the grid; where methods differ in a key, it is ``LABEL.key``."""
        form = self.form
        found: dict[str, Any] = {
            "rounds": form.rounds,
            "eval_every": form.eval_every,
            "participation": form.participation,
            "clients": form.data.clients,
            **form.data.parameters,
            **form.data.partition.parameters,
            **form.problem.parameters,
        }
        for label, method in self.methods.items():
            for key, value in method.parameters.items():
                others = [m.parameters.get(key, value) for m in self.methods.values()]
                taken = key in found and self.place(key).part != "methods"
                found[f"{label}.{key}" if taken or any(v != value for v in others) else key] = value
        fixed = {"seed", *form.grid}
        return {k: v for k, v in found.items() if k not in fixed and not isinstance(v, list | dict)}

    def __call__(self, s: Setting) -> Task:
        """The task of a setting."""
        form, label = self.form, str(s.method)
        compared = self.methods[label]
        places = {key: self.place(key).part for key in s if key != "method" and "." not in key}

        def values(part: str, given: Mapping[str, Any]) -> dict[str, Any]:
            return {**given, **{key: s[key] for key, where in places.items() if where == part}}

        source = {"seed": s.seed, **values("data", form.data.parameters)}
        split = values("partition", form.data.partition.parameters)
        options = source | {"partition": PARTITIONS[form.data.partition.name](**split)}
        data = federated(
            form.data.name, **{k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
        )
        model = for_data(form.problem.name, data, **values("problem", form.problem.parameters))
        if unknown := [metric for metric in form.metrics if metric not in model.metrics]:
            raise ExperimentError(
                f"metrics: this {form.problem.name} has no {unknown[0]!r}, because its labels are numbers. "
                f"Give metrics = {list(model.metrics)}."
            )
        given = {**compared.parameters, **{k: s[k] for k, where in places.items() if where == "methods"}}
        given |= {key.removeprefix(f"{label}."): s[key] for key in s if key.startswith(f"{label}.")}
        taken = {key: value for key, value in given.items() if key in _fields(METHODS[compared.name])}
        return Task(
            Minimization(model.loss),
            _method(compared.name, taken),
            data,
            model.init(s.seed),
            metrics={name: model.metrics[name] for name in form.metrics},
            **values("solve", {}),
        )


def _check(form: File) -> None:
    """Every name is known, every parameter too, and the methods can be made."""
    _known("data", form.data, LOADERS)
    _known("data.partition", form.data.partition, PARTITIONS)
    _known("problem", form.problem, MODELS)
    _parameters("data", form.data, ["clients", "partition", "seed", *_options(form.data.name)])
    _parameters("data.partition", form.data.partition, _fields(PARTITIONS[form.data.partition.name]))
    _parameters("problem", form.problem, options(form.problem.name))
    fitting = {name: cls for name, cls in METHODS.items() if Minimization in cls.solves}
    for method in form.methods:
        _known("methods", method, fitting)
        _parameters(method.name, method, ["label", *_fields(METHODS[method.name])])
        own = {key: form.grid[key][0] for key in _fields(METHODS[method.name]) if form.grid.get(key)}
        _method(method.name, {**method.parameters, **own})
    for metric in form.metrics:
        if metric not in METRICS:
            raise ExperimentError(
                f"metrics: there is no {metric!r}; there are {', '.join(METRICS)}, and loss always."
            )


def _known(where: str, named: Named, registry: Iterable[str]) -> None:
    known = list(registry)
    if named.name not in known:
        raise ExperimentError(
            f"{where}: there is no {named.name!r}{suggest(named.name, known)} There are {', '.join(known)}."
        )


def _parameters(where: str, named: Named, known: list[str]) -> None:
    for key in named.parameters:
        if key not in known:
            raise ExperimentError(
                f"{where}: {named.name} has no {key!r}{suggest(key, known)} It has {', '.join(known)}."
            )


def _method(name: str, parameters: Mapping[str, Any]) -> Method:
    try:
        return METHODS[name](**parameters)
    except (TypeError, ValueError) as error:
        text = str(error).replace(f"{name}.__init__()", name)
        raise ExperimentError(text if text.startswith(name) else f"{name}: {text}") from error


def _fields(cls: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(cls)]


def _options(loader: str) -> list[str]:
    """The names of a loader's keyword arguments."""
    (options,) = inspect.signature(LOADERS[loader]).parameters["options"].annotation.__args__
    return [name for name in options.__annotations__ if name not in ("data_dir", "dtype")]
