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

The problems are those of `fedstrata.experiments.catalogue`, the models those of `fedstrata.models`, and the
methods all of `fedstrata.methods`; an option of a method that is a method itself, an optax schedule or an
optax optimiser is a table with its ``name``.

A key of ``[grid]``, ``[quick]`` or ``--set`` is looked for among rounds, eval_every and participation, then
in the data, its partition, the problem, its model and the methods; ``model.key`` and its like say which, and
``LABEL.key`` is one method's own.
``[table]``, ``[[plots]]`` and ``[claims]`` take what
`TableSpec`, `PlotSpec` and `PaperClaims` take. Every seed splits the data anew, unless ``[data]`` has one.
"""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedstrata.core.types import Weights
from fedstrata.core.words import listed, suggest
from fedstrata.experiments._named import Named, check_name, check_parameters, fields, make_method
from fedstrata.experiments.base import Experiment, Setting, Task
from fedstrata.experiments.catalogue import CATALOGUE, FORMS, Entry, Given
from fedstrata.experiments.data import LOADERS, NATURAL, PARTITIONS, federated
from fedstrata.experiments.errors import ExperimentError
from fedstrata.methods import METHODS
from fedstrata.models import MODELS, Loss, for_data
from fedstrata.models import options as model_options
from fedstrata.report import Column, PaperClaims, PlotSpec, TableSpec
from fedstrata.report.records import Scalar

METRICS = ("accuracy", "test_loss")
BY_CLIENT = ("client_loss", "client_accuracy")
TESTED = ("client_test_loss", "client_test_accuracy")


class Data(Named):
    """A loader, the clients and the partition."""

    clients: int = Field(default=10, ge=1)
    partition: Named = Named(name="IID")


class Posing(Named):
    """A problem of the catalogue and its model; a model's name alone is its minimisation."""

    model: Named = Named(name="softmax")

    @model_validator(mode="before")
    @classmethod
    def _short(cls, given: Any) -> Any:
        given = {"name": given} if isinstance(given, str) else given
        if not isinstance(given, Mapping):
            return given
        if given.get("name") in MODELS:
            if "model" in given:
                raise ValueError(
                    f"{given['name']!r} is a model already: leave 'model' out, or name the problem, such as "
                    f'name = "minimisation"'
                )
            return {"name": "minimisation", "model": dict(given)}
        return given

    @property
    def entry(self) -> Entry:
        """In the catalogue."""
        return CATALOGUE[self.name]


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
    weights: Weights = "uniform"
    seeds: int = Field(default=3, ge=1)
    metrics: list[str] | None = None
    data: Data
    problem: Posing
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
        build.check_methods()
        series = list(form.problem.entry.measures_of(form.problem.parameters))
        series += [name for metric in _measured(form) for name in _series(metric)]
        columns = [
            *(Column(name, better=_better(name)) for name in series),
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
        first = error.errors()[0]
        at = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        known = (
            f"; known keys are {', '.join(File.model_fields)}" if first["type"] == "extra_forbidden" else ""
        )
        raise ExperimentError(f"{at}: {message}{known}".removeprefix(": ")) from error


def _measured(form: File) -> list[str]:
    """The metrics that are asked for, or those that go with the problem."""
    if form.metrics is not None:
        return form.metrics
    wanted = (*METRICS, *form.problem.entry.metrics)
    return [metric for metric in _offered(form) if metric in wanted]


def _offered(form: File) -> list[str]:
    """The metrics that there are."""
    loss = form.problem.model.parameters.get("loss")
    default = inspect.signature(MODELS[form.problem.model.name]).parameters.get("loss")
    if loss is None and default is not None:
        loss = default.default
    with _about("problem.model"):
        numbers = loss is not None and Loss.of(loss).labels == "numbers"
    tested = TESTED if form.data.name in NATURAL else ()  # elsewhere nobody knows whose a test sample is
    every = (*METRICS, *form.problem.entry.metrics, *BY_CLIENT, *tested)
    return list(dict.fromkeys(m for m in every if "accuracy" not in m or not numbers))


def _series(metric: str) -> list[str]:
    """What the history has of a metric that is worth a column: of one by client its mean, and the worst."""
    return [metric, f"{metric}/worst"] if metric.startswith("client_") else [metric]


def _better(measure: str) -> Literal["low", "high", ""]:
    if "accuracy" in measure or measure == "found":
        return "high"
    return "" if measure in ("lower", "weight", "payoff", "secondary", "coupling") else "low"


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
            "data": _options(form.data.name),
            "partition": _partition_options(form),
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
            with _about("data.partition"):
                source["partition"] = PARTITIONS[form.data.partition.name](**split)
        with _about("data"):
            data = federated(
                form.data.name, **{k: tuple(v) if isinstance(v, list) else v for k, v in source.items()}
            )
        posing = form.problem
        with _about("problem.model"):
            model = for_data(posing.model.name, data, **values("model", posing.model.parameters))
        with _about("problem"):
            options = values("problem", posing.parameters)
            posed = posing.entry.pose(Given(model, data, s.seed, form.weights), **options)
        return Task(
            posed.problem,
            make_method(compared.name, values("methods", compared.parameters)),
            posed.data,
            posed.x0,
            posed.y0,
            metrics={name: posed.metrics[name] for name in _measured(form)},
            options={} if form.weights == "uniform" else {"weights": form.weights},
            **values("solve", {}),
        )


@contextmanager
def _about(where: str) -> Iterator[None]:
    """Errors about arguments say which part of the file they are about."""
    try:
        yield
    except ExperimentError:
        raise
    except (TypeError, ValueError) as error:
        raise ExperimentError(f"{where}: {error}") from error


def _check(form: File) -> None:
    """Every name is known, every parameter too, and the methods can be made."""
    check_name("data", form.data, LOADERS)
    check_parameters("data", form.data, ["clients", "partition", "seed", *_options(form.data.name)])
    for key, value in form.data.parameters.items():
        if key.endswith("_fraction") and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ExperimentError(f"data: {key} must be a number in [0, 1), but is {value!r}.")
    if form.data.name in NATURAL:
        for key in ("clients", "partition"):
            if key in form.data.model_fields_set:
                raise ExperimentError(f"data: {form.data.name} is divided by nature. Leave {key!r} out.")
    else:
        check_name("data.partition", form.data.partition, PARTITIONS)
        check_parameters("data.partition", form.data.partition, _partition_options(form))
    _check_problem(form.problem)
    check_name("problem.model", form.problem.model, form.problem.entry.models or MODELS)
    check_parameters("problem.model", form.problem.model, model_options(form.problem.model.name))
    check_parameters("problem", form.problem, ["model", *form.problem.entry.options])
    _check_needs(form)
    for method in form.methods:
        _check_method(method, form)
    offered = _offered(form)
    for metric in form.metrics or []:
        if metric not in offered:
            always = ", ".join(form.problem.entry.measures_of(form.problem.parameters))
            raise ExperimentError(
                f"metrics: there is no {metric!r}{suggest(metric, offered)} There are {', '.join(offered)}, "
                f"and {always} always."
            )


def _check_problem(posing: Posing) -> None:
    classes = {solved.__name__.lower(): solved for cls in METHODS.values() for solved in cls.solves}
    if posing.name not in CATALOGUE and posing.name.lower() in classes:
        names = [name for name, e in CATALOGUE.items() if _may_be(e, (classes[posing.name.lower()],))]
        there = f"Problems of it are {', '.join(names)}." if names else "No problem here is of it."
        raise ExperimentError(f"problem: {posing.name} is a class of problems. {there}")
    check_name("problem", posing, [*CATALOGUE, *MODELS])


def _check_needs(form: File) -> None:
    """The data has the part that the problem is about."""
    posing = form.problem
    needed = posing.entry.needs(posing.parameters)
    if needed is None or form.data.parameters.get(needed) or needed in form.grid:
        return
    if needed not in _options(form.data.name):
        raise ExperimentError(
            f"data: {posing.name} needs {needed}, which {form.data.name} has not. Take other data, such as "
            "digits."
        )
    whose = "validation samples" if needed == "valid_fraction" else "samples of the server's own"
    raise ExperimentError(f"data: {posing.name} needs {whose}: give {needed}, such as {needed} = 0.2.")


def _check_method(method: Compared, form: File) -> None:
    posing = form.problem
    kind = posing.entry.kind_of(posing.parameters)
    fitting = [name for name, cls in METHODS.items() if issubclass(kind, cls.solves)]
    if method.name in METHODS and method.name not in fitting:
        solves = METHODS[method.name].solves
        others = [name for name, entry in CATALOGUE.items() if _may_be(entry, solves)]
        for_those = f" Problems for it are {', '.join(others)}." if others else ""
        raise ExperimentError(
            f"methods: {method.name} does not solve a {kind.__name__}, which {posing.name} is, but "
            f"{listed([cls.__name__ for cls in solves])}.{for_those} Methods for this problem are "
            f"{', '.join(fitting)}."
        )
    if method.name not in METHODS:
        raise ExperimentError(
            f"methods: there is no {method.name!r}{suggest(method.name, list(METHODS))} "
            f"For this problem there are {', '.join(fitting)}."
        )
    known = fields(METHODS[method.name])
    check_parameters(method.name, method, ["label", *known])


def _may_be(entry: Entry, solves: tuple[type, ...]) -> bool:
    kinds = FORMS.values() if entry.kind is None else [entry.kind]
    return any(issubclass(kind, solves) for kind in kinds)


def _partition_options(form: File) -> list[str]:
    return [] if form.data.name in NATURAL else fields(PARTITIONS[form.data.partition.name])


def _options(loader: str) -> list[str]:
    """The names of a loader's keyword arguments, the clients among them where they can be chosen."""
    if loader in NATURAL:
        return [name for name in inspect.signature(LOADERS[loader]).parameters if name != "seed"]
    (options,) = inspect.signature(LOADERS[loader]).parameters["options"].annotation.__args__
    return ["clients", *(name for name in options.__annotations__ if name not in ("data_dir", "dtype"))]
