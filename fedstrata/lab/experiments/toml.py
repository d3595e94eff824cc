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

The keys that each part may have are read from signatures: of the loaders and partitions of `fedstrata.data`,
the problems of `fedstrata.problems.named`, the models of `fedstrata.models`, and the methods. An argument
that is itself a method, a schedule or an optimiser of optax is a table with its ``name``. ``[table]``,
``[[plots]]`` and ``[claims]`` take the fields of `TableSpec`, `PlotSpec` and `PaperClaims`.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
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
)  # fmt: skip
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


class Choice(BaseModel):
    """A name that a registry knows, and its parameters; a string is a name without any."""

    model_config = ConfigDict(extra="allow")

    name: str

    @model_validator(mode="before")
    @classmethod
    def _alone(cls, given: Any) -> Any:
        given = {"name": given} if isinstance(given, str) else given
        if not isinstance(given, Mapping | Choice):
            raise ValueError(f'must be a table with a name, such as {{ name = "…" }}, but is {given!r}')
        return given

    @property
    def parameters(self) -> dict[str, Any]:
        """Everything but the name."""
        return dict(self.model_extra or {})


class DataChoice(Choice):
    """A loader, the clients and the partition."""

    clients: int = Field(default=10, ge=1)
    partition: Choice = Choice(name="IID")


class ProblemChoice(Choice):
    """A problem and its model; a model's name alone is its minimisation."""

    model: Choice = Choice(name="softmax")

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


class MethodChoice(Choice):
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
    data: DataChoice
    problem: ProblemChoice
    metrics: list[str] | None = None
    grid: dict[str, list[Scalar]] = {}
    methods: list[MethodChoice] = Field(min_length=1)
    quick: dict[str, Scalar | list[Scalar]] = {}
    table: TableSpec | None = None
    plots: tuple[PlotSpec, ...] | None = None
    claims: PaperClaims | None = None
    notes: str = ""

    @field_validator("data", "problem", "metrics", "grid", "methods")
    @classmethod
    def _fits(cls, value: Any, info: ValidationInfo) -> Any:
        if faults := list(FAULTS[info.field_name or ""](value, info.data)):
            raise PydanticCustomError("said", "{words}", {"words": "\n".join(faults)})
        return value


@functools.cache
def form_of(what: Callable[..., Any]) -> type[BaseModel]:
    """The pydantic model of the arguments that a file may give a callable, made from its signature.

    >>> form_of(PARTITIONS["Dirichlet"])(alpha=0.3)
    Dirichlet(alpha=0.3, min_size=1)
    """
    fields: dict[str, Any] = {}
    hints = get_type_hints(what)
    for p in inspect.signature(what).parameters.values():
        if p.kind is p.VAR_KEYWORD:  # of a loader: Unpack[Options]
            fields |= {key: (hint, None) for key, hint in get_type_hints(*get_args(hints[p.name])).items()}
        elif p.name not in SIZES and p.name != "of":  # what the data tells
            fields[p.name] = (hints.get(p.name, Any), ... if p.default is p.empty else p.default)
    kept = {name: field for name, field in fields.items() if name not in ("data_dir", "dtype")}
    config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, strict=True, protected_namespaces=())
    made: type[BaseModel] = create_model(what.__name__, __config__=config, **kept)
    return made


def keys_of(what: Callable[..., Any]) -> list[str]:
    """What a file may give a callable."""
    return list(form_of(what).model_fields)


def unknown(where: str, name: str, known: Sequence[str], hint: str = "") -> str:
    """The message for a name that does not exist."""
    return f"{where}: there is no {name!r}{suggest(name, known)}{hint} There are {', '.join(known)}."


def misfits(where: str, chosen: Choice, registry: Mapping[str, Callable[..., Any]]) -> Iterator[str]:
    """What is wrong with a name and its parameters."""
    if chosen.name not in registry:
        yield unknown(where, chosen.name, list(registry))
        return
    form, name, given = form_of(registry[chosen.name]), chosen.name, chosen.parameters
    try:
        form.model_validate_json(json.dumps(given, default=str))
    except ValidationError as error:
        known = list(form.model_fields)
        for key, found in {str(each["loc"][0]): each for each in error.errors()}.items():
            if found["type"] == "extra_forbidden":
                yield f"{where}: {name} has no {key!r}{suggest(key, known)} It has {', '.join(known)}."
            elif found["type"] == "missing":
                yield f"{where}: {name} needs {key}."
            else:
                yield f"{where}: {key} {found['msg'].replace('Input should', 'must')}, but is {given[key]!r}."


def _data_faults(data: DataChoice, found: Mapping[str, Any]) -> Iterator[str]:
    yield from misfits("data", data, LOADERS)
    if data.name not in NATURAL:
        yield from misfits("data.partition", data.partition, PARTITIONS)
    elif drawn := {"clients", "partition"} & data.model_fields_set:
        yield f"data: {data.name} is already divided into clients: leave {' and '.join(sorted(drawn))} out."


def _problem_faults(chosen: ProblemChoice, found: Mapping[str, Any]) -> Iterator[str]:
    yield from misfits("problem.model", chosen.model, MODELS)
    if chosen.name not in PROBLEMS:
        of = [n for n, named in PROBLEMS.items() if chosen.name in [kind.__name__ for kind in named.kinds]]
        hint = f" {chosen.name} is a class of problems: {', '.join(of)}." if of else ""
        yield unknown("problem", chosen.name, [*PROBLEMS, *MODELS], hint)
        return
    yield from misfits("problem", chosen, POSES)
    models = PROBLEMS[chosen.name].models
    if models and chosen.model.name not in models:
        yield f"problem.model: {chosen.name} takes {listed(models)}, not {chosen.model.name}."


def _metric_faults(metrics: list[str] | None, found: Mapping[str, Any]) -> Iterator[str]:
    if not {"data", "problem"} <= found.keys():
        return
    try:
        known, always = offered(found["data"], found["problem"]), ", ".join(SERIES[found["problem"].kind])
    except ValueError as error:  # of the model's loss
        yield f"problem.model: {error}"
        return
    for metric in set(metrics or []).difference(known):
        yield f"{unknown('metrics', metric, known)[:-1]}, and {always} always."


def _grid_faults(grid: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    """The data has the part that the problem is about, or gets it from the grid."""
    if {"data", "problem"} <= found.keys():
        chosen, given = found["problem"], found["data"].parameters
        needed = (
            "valid_fraction" if "validation" in chosen.parameters.values() else PROBLEMS[chosen.name].needs
        )
        has = given.get(needed) or (needed == "server_fraction" and given.get("server"))
        if needed and not has and needed not in grid:
            whose = "validation samples" if needed == "valid_fraction" else "samples of the server's own"
            yield f"data: {chosen.name} needs {whose}: give {needed}, such as {needed} = 0.2."


def _method_faults(methods: list[MethodChoice], found: Mapping[str, Any]) -> Iterator[str]:
    """Names, what they solve, what they are given, and the keys of the grid, which may be of any part."""
    labels = [method.label or method.name for method in methods]
    yield from (f"methods: two are called {x!r}; give one a label." for x in {*labels} if labels.count(x) > 1)
    wrong = {method.name: _unfit(method.name, found.get("problem")) for method in methods}
    yield from filter(None, wrong.values())
    if {"data", "problem", "grid"} <= found.keys():
        good = [method for method in methods if not wrong[method.name]]
        build = FileBuild(File.model_construct(**found, methods=good))
        yield from build.faults(complete=len(good) == len(methods))


def _unfit(name: str, chosen: ProblemChoice | None) -> str:
    """Why a method cannot solve the problem; empty where it can."""
    fitting = [n for n, cls in METHODS.items() if chosen is None or issubclass(chosen.kind, cls.solves)]
    if name in fitting:
        return ""
    if name not in METHODS or chosen is None:
        known = f" Methods for this problem are {', '.join(fitting)}."
        return f"methods: there is no {name!r}{suggest(name, list(METHODS))}{known}"
    solves, others = METHODS[name].solves, []
    for problem, named in PROBLEMS.items():
        if kinds := [kind for kind in named.kinds if issubclass(kind, solves)]:
            form = "" if kinds[0] is named.kinds[0] else f' with form = "{kinds[0].__name__.lower()}"'
            others.append(f"{problem}{form}")
    hint = f" Problems for it are {', '.join(others)}." if others else ""
    return (
        f"methods: {name} does not solve a {chosen.kind.__name__}, which {chosen.name} is, but "
        f"{listed([cls.__name__ for cls in solves])}.{hint}"
        f" Methods for this problem are {', '.join(fitting)}."
    )


FAULTS: dict[str, Callable[..., Iterator[str]]] = {
    "data": _data_faults,
    "problem": _problem_faults,
    "metrics": _metric_faults,
    "grid": _grid_faults,
    "methods": _method_faults,
}
POSES = {name: named.pose for name, named in PROBLEMS.items()}


def offered(data: DataChoice, chosen: ProblemChoice) -> list[str]:
    """The metrics that there are; labels that are numbers have no accuracy."""
    default = inspect.signature(MODELS[chosen.model.name]).parameters.get("loss")
    loss = chosen.model.parameters.get("loss", default.default if default else None)
    numbers = loss is not None and Loss.of(loss).labels == "numbers"
    tested = TESTED if data.name in NATURAL else ()  # elsewhere nobody knows whose a test sample is
    every = (*METRICS, *PROBLEMS[chosen.name].metrics, *BY_CLIENT, *tested)
    return list(dict.fromkeys(m for m in every if not (numbers and "accuracy" in m)))


def metrics_of(form: File) -> list[str]:
    """The metrics that are asked for, or those that go with the problem."""
    if form.metrics is not None:
        return form.metrics
    wanted = (*METRICS, *PROBLEMS[form.problem.name].metrics)
    return [metric for metric in offered(form.data, form.problem) if metric in wanted]


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
        for key in ("files", "server"):  # tables are found from the file's own folder
            match content.get("data"):
                case {**data} if type(data.get(key)) is str:
                    content["data"][key] = str(path.parent / data[key])
                case {**data} if type(data.get(key)) is list:
                    content["data"][key] = [str(path.parent / str(one)) for one in data[key]]
        return define(content, name)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        twice = "('methods',) twice" in str(error)
        hint = " Each method is a table of its own, [[methods]]." if twice else ""
        raise ExperimentError(f"{path} is not valid TOML: {error}.{hint}") from error
    except ExperimentError as error:
        raise ExperimentError(f"{path}: {error}") from error
    except RecursionError as error:
        raise ExperimentError(f"{path} is nested too deeply to be read.") from error


def define(content: Mapping[str, Any], name: str) -> Experiment:
    """The experiment that a file's content defines; see `read`."""
    try:
        form = File.model_validate(content)
        build, chosen = FileBuild(form), form.problem
        series = list(SERIES[chosen.kind])
        for metric in metrics_of(form):  # of one by client the mean, and the worst
            series += [metric, f"{metric}/worst"] if metric.startswith("client_") else [metric]
        columns = [Column(name, better=_better(name)) for name in series]
        columns.append(Column("bytes_up", "ledger", "uploaded", format="bytes"))
        about = f"{chosen.name} with the model {chosen.model.name} on {form.data.name}."
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


def _called(where: str, what: Callable[..., Any], *args: Any, **given: Any) -> Any:
    """What a callable returns; an error about its arguments says which part of the file they are from."""
    try:
        return what(*args, **given)
    except ExperimentError:
        raise
    except (TypeError, ValueError) as error:
        text = str(error)
        raise ExperimentError(text if text.startswith(where) else f"{where}: {text}") from error


def make_method(name: str, parameters: Mapping[str, Any]) -> Method:
    """A method by its name.

    Raises:
        ExperimentError: for parameters that do not fit.
    """
    given = {key: _argument(f"{name}.{key}", value) for key, value in parameters.items()}
    made: Method = _called(name, METHODS[name], **given)
    return made


def _argument(where: str, value: Any) -> Any:
    """An argument as Python has it: a list is a tuple, a table with a name is a method or optax's object."""
    match value:
        case list():
            return tuple(_argument(where, item) for item in value)
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
    known = [n for n, made in vars(optax).items() if not n.startswith("_") and callable(made)]
    if name not in known:
        raise ExperimentError(f"{where}: there is no {name!r}{suggest(name, [*METHODS, *known])}")
    arguments = {key: _argument(f"{where}.{key}", item) for key, item in json.loads(given).items()}
    return _called(f"{where}: optax's {name}", vars(optax)[name], **arguments)


class Keys(NamedTuple):
    """The keys that a part of the file may have, and those that it has."""

    known: Sequence[str]
    given: Mapping[str, Any]


class FileBuild:
    """A setting's task, by the file: a key of the setting takes the place of what the file says there.

    A key is looked for among rounds, eval_every and participation, then in the data, its partition, the
    problem, its model and the methods; ``model.key`` and the like say which, and ``LABEL.key`` is one
    method's own.
    """

    def __init__(self, form: File) -> None:
        self.form, data, chosen = form, form.data, form.problem
        self.content = form.model_dump_json()  # by which a run is known again
        self.natural = data.name in NATURAL
        loads = [key for key in keys_of(LOADERS[data.name]) if key not in ("partition", "seed")]
        drawn = [] if self.natural else keys_of(PARTITIONS[data.partition.name])
        self.common = {
            "solve": Keys(SOLVE, form.model_dump(include={*SOLVE})),
            "data": Keys(loads, {**({} if self.natural else {"clients": data.clients}), **data.parameters}),
            "partition": Keys(drawn, data.partition.parameters),
            "problem": Keys(keys_of(POSES[chosen.name]), chosen.parameters),
            "model": Keys(keys_of(MODELS[chosen.model.name]), chosen.model.parameters),
        }
        self.names = {method.label or method.name: method.name for method in form.methods}
        self.methods = {
            method.label or method.name: Keys(
                [*inspect.signature(METHODS[method.name]).parameters], method.parameters
            )
            for method in form.methods
        }
        self.parts = {**self.common, **self.methods}

    def owners(self, key: str) -> tuple[str, list[str]]:
        """A key's name in the parts to which it belongs, and these parts: one, or some methods.

        Raises:
            ExperimentError: if it belongs nowhere.
        """
        for part, keys in self.common.items():
            if key in keys.known:
                return key, [part]
        if every := [label for label, keys in self.methods.items() if key in keys.known]:
            return key, every
        whose, _, own = key.rpartition(".")
        if whose in self.parts and own in self.parts[whose].known:
            return own, [whose]
        names = list(dict.fromkeys(name for keys in self.parts.values() for name in keys.known))
        raise ExperimentError(f"grid: unknown key {key!r}{suggest(key, names)} There are {', '.join(names)}.")

    def faults(self, complete: bool) -> Iterator[str]:
        """Keys of the grid that belong nowhere, and methods that cannot be made with the file's values."""
        varied: dict[str, dict[str, list[Scalar]]] = {label: {} for label in self.parts}
        for key, values in self.form.grid.items():
            try:
                own, owners = self.owners(key)
            except ExperimentError as error:
                if complete:  # else it may belong to a method that has another mistake
                    yield str(error)
            else:
                for owner in owners if values else ():
                    varied[owner][own] = values
        for label, keys in self.methods.items():
            first = {**keys.given, **{key: values[0] for key, values in varied[label].items()}}
            others = ({**first, key: v} for key, values in varied[label].items() for v in values[1:])
            for parameters in (first, *others):
                try:
                    make_method(self.names[label], parameters)
                except ExperimentError as error:
                    yield f"methods: {error}"
                    break

    def blocks(self) -> list[dict[str, list[Scalar]]]:
        """The grid: a block for each method, with the keys that concern it."""
        concerns = {key: {*self.owners(key)[1]} for key in self.form.grid}
        return [
            {
                "method": [label],
                **{k: v for k, v in self.form.grid.items() if concerns[k] & {label, *self.common}},
            }
            for label in self.methods
        ]

    def parameters(self) -> dict[str, Scalar]:
        """What the file says beside the grid.

        A key that another part has too is ``model.key``, ``partition.key``, …. A method's goes by its own
        name where all methods that have it agree; else it is ``LABEL.key``, which reaches that method alone.
        """
        found: dict[str, Any] = {}
        for part, keys in self.parts.items():
            for key, value in keys.given.items():
                owners = self.owners(key)[1] if key != "seed" or part != "data" else []
                if part not in owners or key not in self.form.grid:
                    agree = all(self.parts[its].given.get(key, ...) == value for its in owners)
                    found[key if part in owners and agree else f"{part}.{key}"] = value
        found.pop("data.seed", None)
        return {k: v for k, v in found.items() if k not in self.form.grid and not isinstance(v, list | dict)}

    def __call__(self, s: Setting) -> Task:
        """The task of a setting."""
        form, label = self.form, str(s.method)
        parts = {part: dict(keys.given) for part, keys in self.parts.items()}
        for key in sorted(s, key=lambda key: "." in key):
            if key != "method":
                own, owners = self.owners(key)
                for owner in owners:
                    parts[owner][own] = s[key]
        # A list of the file is a tuple: arguments of what is kept must be hashable.
        source = {k: tuple(v) if isinstance(v, list) else v for k, v in parts["data"].items()}
        if not self.natural:
            drawn = PARTITIONS[form.data.partition.name]
            source["partition"] = _called("data.partition", drawn, **parts["partition"])
        data = _called("data", federated, form.data.name, **{"seed": s.seed, **source})
        model = _called("problem.model", for_data, form.problem.model.name, data, **parts["model"])
        chosen = Choice(name=form.problem.name, **parts["problem"])
        if wrong := list(misfits("problem", chosen, POSES)):
            raise ExperimentError("\n".join(wrong))
        inputs = Inputs(model, data, s.seed, form.weights)
        posed = _called("problem", POSES[chosen.name], inputs, **parts["problem"])
        metrics = {**model_metrics(model, posed.place, posed.own), **posed.metrics}
        return Task(
            posed.problem,
            make_method(self.names[label], parts[label]),
            posed.data,
            posed.x0,
            posed.y0,
            metrics={name: metrics[name] for name in metrics_of(form)},
            options={} if form.weights == "uniform" else {"weights": form.weights},
            **parts["solve"],
        )
