"""Experiments as TOML files: methods compared on a problem of any class, without a line of Python.

    title = "FedAvg on skewed digits"

    [data]
    name = "digits"
    partition = { name = "Dirichlet", alpha = 0.3 }

    [problem]
    name = "softmax"        # short for name = "minimisation", model = "softmax"

    [[methods]]
    name = "FedAvg"
    gamma = 0.1

    [grid]
    H = [1, 5, 20]          # of every method that has an H

What may stand where is read from signatures: of the loaders and partitions of `fedstrata.data`, the problems
of `fedstrata.problems.named`, the models of `fedstrata.models`, and the methods. An option of a method that
is itself a method, a schedule or an optimiser of optax is a table with its ``name``.

A key of ``[grid]``, ``[quick]`` or ``--set`` is looked for among rounds, eval_every and participation, then
in the data, its partition, the problem, its model and the methods; ``model.key`` and its like say which, and
``LABEL.key`` is one method's own. ``[table]``, ``[[plots]]`` and ``[claims]`` take the fields of `TableSpec`,
`PlotSpec` and `PaperClaims`. Each seed draws a new split, unless ``[data]`` has one.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

import optax
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from fedstrata.core.types import Weights
from fedstrata.engines.metrics import per_client
from fedstrata.lab.experiments.base import Experiment, Setting, Task
from fedstrata.lab.experiments.data import LOADERS, NATURAL, PARTITIONS, federated
from fedstrata.lab.experiments.errors import ExperimentError
from fedstrata.lab.report import Column, PaperClaims, PlotSpec, TableSpec
from fedstrata.lab.report.records import Scalar
from fedstrata.methods import METHODS, Method
from fedstrata.models import MODELS, Loss, Model, for_data
from fedstrata.models.model import test_mean
from fedstrata.models.registry import SIZES
from fedstrata.problems.named import PROBLEMS, SERIES, Inputs, Place
from fedstrata.support.words import listed, suggest

METRICS = ("accuracy", "test_loss")
BY_CLIENT = ("client_loss", "client_accuracy")
TESTED = ("client_test_loss", "client_test_accuracy")
SOLVE = ("rounds", "eval_every", "participation")


class Named(BaseModel):
    """A name that a registry knows, and its parameters; a string is a name without any."""

    model_config = ConfigDict(extra="allow")

    name: str

    @model_validator(mode="before")
    @classmethod
    def _alone(cls, given: Any) -> Any:
        given = {"name": given} if isinstance(given, str) else given
        if not isinstance(given, Mapping | Named):
            raise ValueError(f'must be a table with a name, such as {{ name = "…" }}, but is {given!r}')
        return given

    @property
    def parameters(self) -> dict[str, Any]:
        """Everything but the name."""
        return dict(self.model_extra or {})


class Data(Named):
    """A loader, the clients and the partition."""

    clients: int = Field(default=10, ge=1)
    partition: Named = Named(name="IID")


class Posing(Named):
    """A problem and its model; a model's name alone is its minimisation."""

    model: Named = Named(name="softmax")

    @model_validator(mode="before")
    @classmethod
    def _short(cls, given: Any) -> Any:
        given = {"name": given} if isinstance(given, str) else given
        if not isinstance(given, Mapping) or given.get("name") not in MODELS:
            return given
        if "model" in given:
            raise ValueError(
                f"{given['name']!r} is a model already: leave 'model' out, or name the problem, such as "
                f'name = "minimisation"'
            )
        return {"name": "minimisation", "model": dict(given)}

    @property
    def kind(self) -> Any:
        """The class of problems."""
        return PROBLEMS[self.name].kind(self.parameters.get("form", "composition"))


class Compared(Named):
    """A method and what tables call it."""

    label: str = ""


class File(BaseModel):
    """A TOML file. Each part is checked with those before it, and all mistakes are reported at once."""

    model_config = ConfigDict(extra="forbid")

    title: str
    description: str = ""
    paper: str = ""
    rounds: int = Field(default=100, ge=1)
    eval_every: int = Field(default=1, ge=1)
    participation: float | int = 1.0
    weights: Weights = "uniform"
    seeds: int = Field(default=3, ge=1)
    data: Data
    problem: Posing
    metrics: list[str] | None = None
    grid: dict[str, list[Scalar]] = {}
    methods: list[Compared] = Field(min_length=1)
    quick: dict[str, Scalar | list[Scalar]] = {}
    table: TableSpec | None = None
    plots: tuple[PlotSpec, ...] | None = None
    claims: PaperClaims | None = None
    notes: str = ""

    @field_validator("data", "problem", "metrics", "grid", "methods")
    @classmethod
    def _fits(cls, value: Any, info: ValidationInfo) -> Any:
        checks: dict[str, Callable[..., Iterator[str]]] = {
            "data": _data_faults,
            "problem": _problem_faults,
            "metrics": _metric_faults,
            "grid": _grid_faults,
            "methods": _method_faults,
        }
        assert info.field_name is not None
        if faults := list(checks[info.field_name](value, info.data)):
            raise PydanticCustomError("said", "{words}", {"words": "\n".join(faults)})
        return value


@functools.cache
def form_of(what: Callable[..., Any]) -> type[BaseModel]:
    """The pydantic model of what a file may give a callable, made from its signature.

    >>> form_of(PARTITIONS["Dirichlet"])(alpha=0.3)
    Dirichlet(alpha=0.3, min_size=1)
    """
    fields: dict[str, Any] = {}
    checks_itself = isinstance(what, type) and issubclass(what, Method)
    hints = {} if checks_itself else get_type_hints(what)
    for p in inspect.signature(what).parameters.values():
        if p.kind is p.VAR_KEYWORD:  # of a loader: Unpack[Options]
            fields |= {key: (hint, None) for key, hint in get_type_hints(*get_args(hints[p.name])).items()}
        elif p.name not in SIZES and p.name != "of":  # what the data tells
            default = ... if p.default is p.empty else p.default
            fields[p.name] = (hints.get(p.name, Any), default)
    for own in ("data_dir", "dtype", "label" if checks_itself else ""):
        fields.pop(own, None)
    if "partition" in fields:
        fields["partition"] = (Any, None)
    config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, strict=True, protected_namespaces=())
    made: type[BaseModel] = create_model(what.__name__, __config__=config, **fields)
    return made


def keys_of(what: Callable[..., Any]) -> list[str]:
    """What a file may give a callable."""
    return list(form_of(what).model_fields)


def faults(where: str, named: Named, registry: Mapping[str, Callable[..., Any]]) -> Iterator[str]:
    """What is wrong with a name and its parameters."""
    if named.name in registry:
        yield from misfits(where, named.name, registry[named.name], named.parameters)
    else:
        known = list(registry)
        yield f"{where}: there is no {named.name!r}{suggest(named.name, known)} There are {', '.join(known)}."


def misfits(where: str, name: str, what: Callable[..., Any], given: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with parameters."""
    try:
        form_of(what).model_validate_json(json.dumps(given, default=str))
    except ValidationError as error:
        known = keys_of(what)
        for key, found in {str(each["loc"][0]): each for each in error.errors()}.items():
            if found["type"] == "extra_forbidden":
                yield f"{where}: {name} has no {key!r}{suggest(key, known)} It has {', '.join(known)}."
            elif found["type"] == "missing":
                yield f"{where}: {name} needs {key}."
            else:
                yield f"{where}: {key} {found['msg'].replace('Input should', 'must')}, but is {given[key]!r}."


def _data_faults(data: Data, found: Mapping[str, Any]) -> Iterator[str]:
    yield from faults("data", data, LOADERS)
    if data.name not in NATURAL:
        yield from faults("data.partition", data.partition, PARTITIONS)
    elif drawn := {"clients", "partition"} & data.model_fields_set:
        yield f"data: {data.name} is already divided into clients: leave {' and '.join(sorted(drawn))} out."


def _problem_faults(posing: Posing, found: Mapping[str, Any]) -> Iterator[str]:
    yield from faults("problem.model", posing.model, MODELS)
    if posing.name not in PROBLEMS:
        of = [n for n, named in PROBLEMS.items() if posing.name in [kind.__name__ for kind in named.kinds]]
        hint = f" {posing.name} is a class of problems: {', '.join(of)}." if of else ""
        known = [*PROBLEMS, *MODELS]
        close = suggest(posing.name, known)
        yield f"problem: there is no {posing.name!r}{close}{hint} There are {', '.join(known)}."
        return
    named = PROBLEMS[posing.name]
    yield from misfits("problem", posing.name, named.pose, posing.parameters)
    if named.models and posing.model.name not in named.models:
        yield f"problem.model: {posing.name} takes {listed(named.models)}, not {posing.model.name}."


def _metric_faults(metrics: list[str] | None, found: Mapping[str, Any]) -> Iterator[str]:
    if "data" not in found or "problem" not in found:
        return
    try:
        known, always = offered(found["data"], found["problem"]), ", ".join(SERIES[found["problem"].kind])
    except ValueError as error:  # of the model's loss
        yield f"problem.model: {error}"
        return
    for metric in metrics or []:
        if metric not in known:
            there = f"There are {', '.join(known)}, and {always} always."
            yield f"metrics: there is no {metric!r}{suggest(metric, known)} {there}"


def _grid_faults(grid: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    """The data has the part that the problem is about, or gets it from the grid."""
    if "data" in found and "problem" in found:
        posing, data = found["problem"], found["data"]
        needed = PROBLEMS[posing.name].needs
        needed = "valid_fraction" if "validation" in posing.parameters.values() else needed
        if needed and not data.parameters.get(needed) and needed not in grid:
            whose = "validation samples" if needed == "valid_fraction" else "samples of the server's own"
            yield f"data: {posing.name} needs {whose}: give {needed}, such as {needed} = 0.2."


def _method_faults(methods: list[Compared], found: Mapping[str, Any]) -> Iterator[str]:
    """Names, what they solve, what they are given, and the keys of the grid, which may be of any part."""
    labels = [method.label or method.name for method in methods]
    yield from (f"methods: two are called {x!r}; give one a label." for x in {*labels} if labels.count(x) > 1)
    wrong = {
        label: _unfit(method, found.get("problem")) for label, method in zip(labels, methods, strict=True)
    }
    yield from filter(None, wrong.values())
    if {"data", "problem", "grid"} <= found.keys():
        good = [m for m in methods if not wrong[m.label or m.name]]
        yield from FileBuild(File.model_construct(**found, methods=good)).faults(
            complete=len(good) == len(methods)
        )


def _unfit(method: Compared, posing: Posing | None) -> str:
    fitting = [n for n, cls in METHODS.items() if posing is None or issubclass(posing.kind, cls.solves)]
    if method.name in fitting:
        return ""
    known = f" Methods for this problem are {', '.join(fitting)}."
    if method.name not in METHODS or posing is None:
        return f"methods: there is no {method.name!r}{suggest(method.name, list(METHODS))}{known}"
    solves = METHODS[method.name].solves
    others = {n: kind for n, each in PROBLEMS.items() for kind in each.kinds if issubclass(kind, solves)}
    hint = f" Problems for it are {', '.join(others)}." if others else ""
    if posing.name in others:
        hint = f' Give the problem form = "{others[posing.name].__name__.lower()}" for it.'
    return (
        f"methods: {method.name} does not solve a {posing.kind.__name__}, which {posing.name} is, but "
        f"{listed([cls.__name__ for cls in solves])}.{hint}{known}"
    )


def _labels(posing: Posing) -> str:
    """What the labels are that the model's loss takes; empty where that is fixed."""
    default = inspect.signature(MODELS[posing.model.name]).parameters.get("loss")
    loss = posing.model.parameters.get("loss", default.default if default else None)
    return "" if loss is None else Loss.of(loss).labels


def offered(data: Data, posing: Posing) -> list[str]:
    """The metrics that there are."""
    tested = TESTED if data.name in NATURAL else ()  # elsewhere nobody knows whose a test sample is
    every = (*METRICS, *PROBLEMS[posing.name].metrics, *BY_CLIENT, *tested)
    return list(dict.fromkeys(m for m in every if "accuracy" not in m or _labels(posing) != "numbers"))


def measured(form: File) -> list[str]:
    """The metrics that are asked for, or those that go with the problem."""
    wanted = (*METRICS, *PROBLEMS[form.problem.name].metrics)
    own = [metric for metric in offered(form.data, form.problem) if metric in wanted]
    return own if form.metrics is None else form.metrics


@functools.cache
def model_metrics(model: Model, place: Place, own: Place | None) -> dict[str, Any]:
    """The model's metrics, where its parameters are in the answer, and where a client's own are."""
    mine = own or place
    return {
        "accuracy": test_mean(place(model.correct)),
        "test_loss": test_mean(place(model.loss)),
        "client_loss": per_client(mine(model.loss)),
        "client_accuracy": per_client(mine(model.correct), mode="max"),
        "client_test_loss": per_client(mine(model.loss), part="test"),
        "client_test_accuracy": per_client(mine(model.correct), part="test", mode="max"),
    }


def read(file: str | Path) -> Experiment:
    """The experiment that a file defines.

    Raises:
        ExperimentError: what is wrong, where, and what could stand there.
    """
    path = Path(file)
    name = re.sub(r"[^a-z0-9]+", "-", path.stem.lower()).strip("-") or "experiment"
    try:
        content = tomllib.loads(path.read_text("utf-8"))
        return define(_beside(content, path.parent), name)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        hint = (
            " Each method is a table of its own, [[methods]]." if "('methods',) twice" in str(error) else ""
        )
        raise ExperimentError(f"{path} is not valid TOML: {error}.{hint}") from error
    except ExperimentError as error:
        raise ExperimentError(f"{path}: {error}") from error
    except RecursionError as error:
        raise ExperimentError(f"{path} is nested too deeply to be read.") from error


def _beside(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The content, with files of data found from the folder that it is read from."""
    match content:
        case {"data": {"files": str(file)}}:
            found: Any = str(folder / file)
        case {"data": {"files": [*files]}} if all(isinstance(file, str) for file in files):
            found = [str(folder / file) for file in files]
        case _:
            return content
    return {**content, "data": {**content["data"], "files": found}}


def define(content: Mapping[str, Any], name: str) -> Experiment:
    """The experiment that a file's content defines; see `read`."""
    try:
        form = File.model_validate(content)
        build, posing = FileBuild(form), form.problem
        series = list(SERIES[posing.kind])
        for metric in measured(form):  # of one by client the mean, and the worst
            series += [metric, f"{metric}/worst"] if metric.startswith("client_") else [metric]
        columns = [Column(name, better=_better(name)) for name in series]
        columns.append(Column("bytes_up", "ledger", "uploaded", format="bytes"))
        about = f"{posing.name} with the model {posing.model.name} on {form.data.name}."
        return Experiment(
            name=name,
            title=form.title,
            paper=form.paper,
            description=form.description or about,
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


def _better(measure: str) -> Any:
    if "accuracy" in measure or measure == "found":
        return "high"
    return "" if measure in ("lower", "weight", "payoff", "secondary", "coupling") else "low"


def _fault(found: Any) -> str:
    """What is wrong in one place of the file."""
    at = ".".join(str(part) for part in found["loc"])
    if found["type"] == "said":
        return str(found["msg"])
    if found["type"] == "extra_forbidden" and len(found["loc"]) == 1:
        known = list(File.model_fields)
        return f"there is no {at!r}{suggest(at, known)} There are {', '.join(known)}."
    return f"{at}: {found['msg'].removeprefix('Value error, ')}".removeprefix(": ")


@contextmanager
def _about(where: str) -> Iterator[None]:
    """Errors about arguments say which part of the file they are about."""
    try:
        yield
    except ExperimentError:
        raise
    except (TypeError, ValueError) as error:
        raise ExperimentError(f"{where}: {error}") from error


def make_method(name: str, parameters: Mapping[str, Any]) -> Method:
    """A method by its name.

    Raises:
        ExperimentError: for parameters that do not fit.
    """
    try:
        return METHODS[name](**{key: _part(f"{name}.{key}", value) for key, value in parameters.items()})
    except ExperimentError:
        raise
    except (TypeError, ValueError) as error:
        text = str(error)
        raise ExperimentError(text if text.startswith(name) else f"{name}: {text}") from error


def _part(where: str, value: Any) -> Any:
    """An option as Python has it: a list is a tuple, a table with a name is a method or optax's thing."""
    match value:
        case list():
            return tuple(_part(where, item) for item in value)
        case {"name": str(name)}:
            given = {key: item for key, item in value.items() if key != "name"}
            if name in METHODS:
                return make_method(name, given)
            return _optax(where, name, json.dumps(given, sort_keys=True))
        case dict():
            raise ExperimentError(f"{where}: a table needs the name of a method, or of optax's.")
    return value


@functools.cache  # the same object again: a compiled program is then used again
def _optax(where: str, name: str, given: str) -> Any:
    known = [n for n in dir(optax) if not n.startswith("_") and callable(vars(optax)[n])]
    if name not in known:
        raise ExperimentError(f"{where}: there is no {name!r}{suggest(name, [*METHODS, *known])}")
    with _about(f"{where}: optax's {name}"):
        return vars(optax)[name](**{k: _part(f"{where}.{k}", item) for k, item in json.loads(given).items()})


class Owner(NamedTuple):
    """Where a key belongs: a part of the file, and there the methods that take it."""

    part: str
    labels: Iterable[str]


class FileBuild:
    """A setting's task, by the file: a key of the setting takes the place of what the file says there."""

    def __init__(self, form: File) -> None:
        self.form, posing = form, form.problem
        self.content = form.model_dump_json()  # by which a run is known again
        self.methods = {method.label or method.name: method for method in form.methods}
        self.keys = {label: keys_of(METHODS[method.name]) for label, method in self.methods.items()}
        natural = form.data.name in NATURAL
        self.names = {
            "solve": list(SOLVE),
            "data": [key for key in keys_of(LOADERS[form.data.name]) if key not in ("partition", "seed")],
            "partition": [] if natural else keys_of(PARTITIONS[form.data.partition.name]),
            "problem": keys_of(PROBLEMS[posing.name].pose),
            "model": keys_of(MODELS[posing.model.name]),
            "methods": [key for keys in self.keys.values() for key in keys],
        }
        self.given = {
            "solve": {key: getattr(form, key) for key in SOLVE},
            "data": {**({} if natural else {"clients": form.data.clients}), **form.data.parameters},
            "partition": form.data.partition.parameters,
            "problem": posing.parameters,
            "model": posing.model.parameters,
        }

    def place(self, key: str) -> Owner:
        """Where a key of the grid belongs.

        Raises:
            ExperimentError: where it belongs nowhere.
        """
        for part, names in self.names.items():
            if key in names:
                own = [label for label in self.methods if part != "methods" or key in self.keys[label]]
                return Owner(part, own)
        whose, _, own_key = key.rpartition(".")
        if own_key in self.names.get(whose, []):
            return Owner(whose, self.methods)
        if own_key in self.keys.get(whose, []):
            return Owner("methods", (whose,))
        every = list(dict.fromkeys(name for names in self.names.values() for name in names))
        raise ExperimentError(f"grid: unknown key {key!r}{suggest(key, every)} There are {', '.join(every)}.")

    def faults(self, complete: bool) -> Iterator[str]:
        """Keys of the grid that belong nowhere, and methods that cannot be made with the file's values."""
        grid: dict[str, Owner] = {}
        for key in self.form.grid:
            try:
                grid[key] = self.place(key)
            except ExperimentError as error:
                if complete:  # else it may belong to a method that has another mistake
                    yield str(error)
        for label, method in self.methods.items():
            own = [key for key, place in grid.items() if place.part == "methods" and label in place.labels]
            varied = {key.rpartition(".")[2]: self.form.grid[key] for key in own if self.form.grid[key]}
            given = {**method.parameters, **{key: values[0] for key, values in varied.items()}}
            tried = [
                given,
                *({**given, key: value} for key, values in varied.items() for value in values[1:]),
            ]
            for parameters in tried:
                try:
                    make_method(method.name, parameters)
                except ExperimentError as error:
                    yield f"methods: {error}"
                    break

    def blocks(self) -> list[dict[str, list[Scalar]]]:
        """The grid: a block for each method, with the keys that concern it."""
        grid = {key: (self.place(key).labels, values) for key, values in self.form.grid.items()}
        return [
            {"method": [label], **{key: values for key, (labels, values) in grid.items() if label in labels}}
            for label in self.methods
        ]

    def parameters(self) -> dict[str, Scalar]:
        """What the file says beside the grid.

        A key that another part has too is ``model.key``, ``partition.key``, …. A method's goes by its own
        name where all methods that have it agree; else it is ``LABEL.key``, which reaches that method alone.
        """
        found: dict[str, Any] = {}
        for part, values in self.given.items():
            for key, value in values.items():
                if key != "seed":
                    found[key if self.place(key).part == part else f"{part}.{key}"] = value
        for label, method in self.methods.items():
            for key, value in method.parameters.items():
                place = self.place(key)
                if place.part == "methods" and key in self.form.grid:
                    continue
                agree = all(self.methods[its].parameters.get(key, ...) == value for its in place.labels)
                found[key if place.part == "methods" and agree else f"{label}.{key}"] = value
        return {k: v for k, v in found.items() if k not in self.form.grid and not isinstance(v, list | dict)}

    def __call__(self, s: Setting) -> Task:
        """The task of a setting."""
        form, label = self.form, str(s.method)
        compared, posing = self.methods[label], form.problem
        places = {key: self.place(key) for key in sorted(s, key=lambda key: "." in key) if key != "method"}
        # A list of the file is a tuple: arguments of what is kept must be hashable.
        parts: dict[str, dict[str, Any]] = {part: dict(given) for part, given in self.given.items()}
        parts["methods"] = compared.parameters
        for key, place in places.items():
            if label in place.labels:
                parts[place.part][key.rpartition(".")[2]] = s[key]
        source = {
            "seed": s.seed,
            **{k: tuple(v) if isinstance(v, list) else v for k, v in parts["data"].items()},
        }
        if form.data.name not in NATURAL:
            with _about("data.partition"):
                source["partition"] = PARTITIONS[form.data.partition.name](**parts["partition"])
        with _about("data"):
            data = federated(form.data.name, **source)
        with _about("problem.model"):
            model = for_data(posing.model.name, data, **parts["model"])
        pose = PROBLEMS[posing.name].pose
        if wrong := list(misfits("problem", posing.name, pose, parts["problem"])):
            raise ExperimentError("\n".join(wrong))
        with _about("problem"):
            posed = pose(Inputs(model, data, s.seed, form.weights), **parts["problem"])
        metrics = {**model_metrics(model, posed.place, posed.own), **posed.metrics}
        return Task(
            posed.problem,
            make_method(compared.name, parts["methods"]),
            posed.data,
            posed.x0,
            posed.y0,
            metrics={name: metrics[name] for name in measured(form)},
            options={} if form.weights == "uniform" else {"weights": form.weights},
            **{key: value for key, value in parts["solve"].items() if key in SOLVE},
        )
