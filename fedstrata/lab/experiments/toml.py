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
import operator
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias, get_args, get_type_hints

import optax
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from fedstrata.advice.auto import UNITS, checked_budget
from fedstrata.core.method import Reveals
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
POSES = {name: named.pose for name, named in PROBLEMS.items()}
# What a name in a file stands for.
MADE: dict[str, Callable[..., Any]] = {**LOADERS, **PARTITIONS, **POSES, **MODELS}
OTHERS = ("name", "label", "partition", "model")  # keys that are not parameters


def _table(given: Any) -> Any:
    """A table with a name; a string is a name without parameters."""
    given = {"name": given} if type(given) is str else given
    if type(given) is not dict:
        raise ValueError(f'must be a table with a name, such as {{ name = "…" }}, but is {given!r}')
    return given


def _problem(given: Any) -> Any:
    """A model's name alone is its minimisation."""
    given = _table(given)
    if given.get("name") not in MODELS:
        return given
    if "model" in given:
        raise ValueError(
            f"{given['name']!r} is a model already: leave 'model' out, or name the problem, such as "
            f'name = "minimisation"'
        )
    return {"name": "minimisation", "model": given}


def _method(given: Any) -> Any:
    """Check that the method exists; it checks its arguments itself."""
    if (name := _table(given).get("name")) not in KNOWN:
        raise PydanticCustomError("said", "{words}", {"words": unknown("methods", str(name or ""), KNOWN)})
    return _table(given)


class Choice(BaseModel):
    """A name in a file, and the parameters of what it stands for."""

    model_config = ConfigDict(
        extra="forbid", arbitrary_types_allowed=True, strict=True, protected_namespaces=()
    )

    name: str

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters in the file, without the name and other parts."""
        given = {**vars(self), **(self.model_extra or {})}
        return {key: given[key] for key in given if key in self.model_fields_set and key not in OTHERS}


class MethodChoice(Choice):
    """A method and what tables call it."""

    model_config = ConfigDict(extra="allow")

    label: str = ""


@functools.cache
def choice_of(name: str) -> type[Choice]:
    """The pydantic model of a name and its parameters, made from the signature of what it stands for.

    >>> choice_of("Dirichlet").model_validate_json('{"name": "Dirichlet", "alpha": 0.3}').parameters
    {'alpha': 0.3}
    """
    fields: dict[str, Any] = {"name": (Literal[name], ...)}
    hints = get_type_hints(MADE[name])
    for p in inspect.signature(MADE[name]).parameters.values():
        if p.kind is p.VAR_KEYWORD:  # of a loader: Unpack[Options]
            fields |= {key: (hint, None) for key, hint in get_type_hints(*get_args(hints[p.name])).items()}
        elif p.name not in SIZES and p.name != "of":  # what the data tells
            fields[p.name] = (hints.get(p.name, Any), ... if p.default is p.empty else p.default)
    if "partition" in fields:
        fields["partition"] = (one_of(PARTITIONS), Field("IID", validate_default=True))
    if name in POSES:
        fields["model"] = (one_of(MODELS), Field("softmax", validate_default=True))
    kept = {key: field for key, field in fields.items() if key not in ("data_dir", "dtype")}
    made: type[Choice] = create_model(name, __base__=Choice, **kept)
    return made


def one_of(names: Iterable[str], before: Callable[[Any], Any] = _table) -> Any:
    """The type of a part that has one of these names."""
    union: Any = functools.reduce(operator.or_, map(choice_of, names))
    return Annotated[union, Field(discriminator="name"), BeforeValidator(before)]


def keys_of(name: str) -> list[str]:
    """The parameters that a file may give."""
    return [key for key in choice_of(name).model_fields if key not in OTHERS]


if TYPE_CHECKING:
    Data: TypeAlias = Any
    Problem: TypeAlias = Any
    AnyMethod: TypeAlias = MethodChoice
else:
    Data, Problem = one_of(LOADERS), one_of(POSES, _problem)
    AnyMethod = Annotated[MethodChoice, BeforeValidator(_method)]


class File(BaseModel):
    """A TOML file."""

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
    problem: Problem
    metrics: list[str] | None = None
    grid: dict[str, list[Scalar]] = {}
    methods: list[AnyMethod] = Field(min_length=1)
    quick: dict[str, Scalar | list[Scalar]] = {}
    table: TableSpec | None = None
    plots: tuple[PlotSpec, ...] | None = None
    claims: PaperClaims | None = None
    notes: str = ""

    @model_validator(mode="before")
    @classmethod
    def _one(cls, given: Any) -> Any:
        if "method" not in given:
            return given
        if "methods" in given:
            raise ValueError("give one method as 'method' or several as [[methods]], not both")
        return {**{k: v for k, v in given.items() if k != "method"}, "methods": [given["method"]]}

    @model_validator(mode="after")
    def _fits(self) -> File:
        if faults := list(_misfits(self)):
            raise PydanticCustomError("said", "{words}", {"words": "\n".join(faults)})
        return self

    @property
    def kind(self) -> Any:
        """The class of problems."""
        return PROBLEMS[self.problem.name].kind(self.problem.parameters.get("form", "composition"))


def unknown(where: str, name: str, known: Iterable[str], hint: str = "") -> str:
    """The message for a name that does not exist."""
    known = list(known)
    if not name:
        return f"{where}: the entry name is missing. There are {', '.join(known)}."
    return f"{where}: unknown name {name!r}{suggest(name, known)}{hint} There are {', '.join(known)}."


def _misfits(form: File) -> Iterator[str]:
    """The faults of parts that are valid by themselves, but do not fit together."""
    problem, data = form.problem, form.data.parameters
    named = PROBLEMS[problem.name]
    if named.models and problem.model.name not in named.models:
        yield f"problem.model: {problem.name} takes {listed(named.models)}, not {problem.model.name}."
    needed = "valid_fraction" if "validation" in problem.parameters.values() else named.needs
    has = data.get(needed) or (needed == "server_fraction" and data.get("server"))
    if needed and not has and needed not in form.grid:
        whose = "validation samples" if needed == "valid_fraction" else "samples of the server's own"
        yield f"data: {problem.name} needs {whose}: give {needed}, such as {needed} = 0.2."
    try:
        known, always = offered(form), ", ".join(SERIES[form.kind])
        for metric in set(form.metrics or []).difference(known):
            yield f"{unknown('metrics', metric, known)[:-1]}, and {always} always."
    except ValueError as error:  # of the model's loss
        yield f"problem.model: {error}"
    labels = [method.label or method.name for method in form.methods]
    yield from (f"methods: two are called {x!r}; give one a label." for x in {*labels} if labels.count(x) > 1)
    wrong = list(filter(None, (_unfit(method.name, form) for method in form.methods)))
    yield from wrong or FileBuild(form).faults()


def _unfit(name: str, form: File) -> str:
    """Why a method cannot solve the problem; empty where it can."""
    fitting = sorted(n for n, cls in METHODS.items() if issubclass(form.kind, cls.solves))
    if name in (*fitting, "auto"):
        return ""
    solves, others = METHODS[name].solves, []
    for problem, named in PROBLEMS.items():
        if kinds := [kind for kind in named.kinds if issubclass(kind, solves)]:
            default = kinds[0] is named.kinds[0]
            others.append(problem if default else f'{problem} with form = "{kinds[0].__name__.lower()}"')
    hint = f" Problems for it are {', '.join(others)}." if others else ""
    return (
        f"methods: {name} does not solve a {form.kind.__name__}, which {form.problem.name} is, but "
        f"{listed([cls.__name__ for cls in solves])}.{hint} Methods for this problem are "
        f"{', '.join(fitting)}."
    )


def offered(form: File) -> list[str]:
    """The available metrics; there is no accuracy where labels are numbers."""
    loss = vars(form.problem.model).get("loss")
    numbers = loss is not None and Loss.of(loss).labels == "numbers"
    tested = TESTED if form.data.name in NATURAL else ()  # elsewhere nobody knows whose a test sample is
    every = (*METRICS, *PROBLEMS[form.problem.name].metrics, *BY_CLIENT, *tested)
    return list(dict.fromkeys(m for m in every if not (numbers and "accuracy" in m)))


def metrics_of(form: File) -> list[str]:
    """The metrics that are asked for, or those that go with the problem."""
    if form.metrics is not None:
        return form.metrics
    wanted = (*METRICS, *PROBLEMS[form.problem.name].metrics)
    return [metric for metric in offered(form) if metric in wanted]


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
        data = content["data"] if type(content.get("data")) is dict else {}
        for key in {"files", "server"} & data.keys():  # tables are found from the file's own folder
            files = data[key] if type(data[key]) is list else [data[key]]
            placed = [str(path.parent / f"{file}") for file in files]
            data[key] = placed if type(data[key]) is list else placed[0]
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
        form = File.model_validate_json(json.dumps(content, default=str))
        build, chosen = FileBuild(form), form.problem
        series = list(SERIES[form.kind])
        for metric in metrics_of(form):  # of one by client the mean, and the worst
            series += [metric, f"{metric}/worst"] if metric.startswith("client_") else [metric]
        columns = [Column(name, better=_better(name)) for name in series]
        columns.append(Column("bytes_up", "ledger", "uploaded", format="bytes"))
        about = f"{chosen.name} with the model {chosen.model.name} on {form.data.name}."
        return Experiment(
            name=name, title=form.title, paper=form.paper, description=form.description or about,
            grid=build.blocks(), parameters=build.parameters(), build=build, seeds=form.seeds,
            table=form.table or TableSpec(tuple(columns), rows=("label", *form.grid)),
            plots=tuple(map(PlotSpec, series)) if form.plots is None else form.plots, claims=form.claims,
            notes=form.notes, quick=form.quick or {"rounds": min(form.rounds, 5), "seeds": 1},
        )  # fmt: skip
    except ValidationError as error:
        raise ExperimentError("\n".join(dict.fromkeys(map(_fault, error.errors())))) from error


def _better(measure: str) -> Any:
    if "accuracy" in measure or measure == "found":
        return "high"
    return "" if measure in ("lower", "weight", "payoff", "secondary", "coupling") else "low"


def _fault(found: Any) -> str:
    """The mistake in one place of the file."""
    at = [part for part in found["loc"] if type(part) is str]
    last = max((i for i, part in enumerate(at) if part in MADE), default=-1)  # the name that it is about
    name, key = (at[last], at[last + 1 :][:1]) if last >= 0 else ("", at)
    where = ".".join(part for part in at[: max(last, 0)] if part not in MADE)
    match found["type"]:
        case "said":
            return str(found["msg"])
        case "union_tag_invalid" | "union_tag_not_found":
            given, where = found["ctx"].get("tag") or "", ".".join(filter(None, [where, *key]))
            known = [*re.findall("'(.+?)'", found["ctx"].get("expected_tags", ""))]
            of = [n for n, named in PROBLEMS.items() if given in [kind.__name__ for kind in named.kinds]]
            hint = f" {given} is a class of problems: {', '.join(of)}." if of and where == "problem" else ""
            return unknown(where, given, [*known, *(MODELS if where == "problem" else ())], hint)
        case "extra_forbidden" if name in NATURAL and key[0] in ("clients", "partition"):
            return f"{where}: {name} is already divided into clients: leave {key[0]} out."
        case "extra_forbidden" if name:
            known = keys_of(name)
            has = ", ".join(known) or "none"
            return f"{where}: {name} has no {key[0]!r}{suggest(key[0], known)} It has {has}."
        case "extra_forbidden" if len(at) == 1:
            return unknown("", at[0], File.model_fields).removeprefix(": ")
        case "missing" if name:
            return f"{where}: {name} needs {key[0]}."
        case "value_error" | "custom":
            where = ".".join(filter(None, [where, *key]))
            return f"{where}: {found['msg'].removeprefix('Value error, ')}".removeprefix(": ")
        case _ if name:
            must = found["msg"].replace("Input should", "must")
            return f"{where}: {key[0]} {must}, but is {found['input']!r}."
    return f"{'.'.join(map(str, found['loc']))}: {found['msg']}"


def _called(where: str, what: Callable[..., Any], *args: Any, **given: Any) -> Any:
    """Call it; an error about its arguments names the part of the file that they come from."""
    try:
        return what(*args, **given)
    except ExperimentError:
        raise
    except (TypeError, ValueError) as error:
        text = str(error)
        raise ExperimentError(text if text.startswith(where) else f"{where}: {text}") from error


class Automatic(NamedTuple):
    """``"auto"``, with what `fedstrata.solve` takes for it."""

    options: dict[str, Any]


def automatic(*, reveals: Reveals = "replies", **budget: float) -> Automatic:
    """The options of ``"auto"`` in a file; its rounds are the file's."""
    checked_budget(budget, None)
    if reveals not in get_args(Reveals):
        raise ValueError(f"reveals must be one of {', '.join(get_args(Reveals))}, but is {reveals!r}.")
    return Automatic({"reveals": reveals, **({"budget": budget} if budget else {})})


def arguments_of(name: str) -> list[str]:
    """The keys that a method may have in a file."""
    if name == "auto":
        return ["reveals", *(unit for unit in UNITS if unit != "rounds")]
    return [*inspect.signature(METHODS[name]).parameters]


KNOWN: dict[str, Callable[..., Any]] = {**METHODS, "auto": automatic}


def make_method(name: str, parameters: Mapping[str, Any]) -> Method | Automatic:
    """A method by its name.

    Raises:
        ExperimentError: for parameters that do not fit.
    """
    given = {key: _argument(f"{name}.{key}", value) for key, value in parameters.items()}
    made: Method | Automatic = _called(name, KNOWN[name], **given)
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
        raise ExperimentError(f"{where}: unknown name {name!r}{suggest(name, [*METHODS, *known])}")
    arguments = {key: _argument(f"{where}.{key}", item) for key, item in json.loads(given).items()}
    return _called(f"{where}: optax's {name}", vars(optax)[name], **arguments)


class FileBuild:
    """A setting's task, by the file: a key of the setting replaces the file's value.

    A key is looked for among rounds, eval_every and participation, then in the data, its partition, the
    problem, its model and the methods; ``model.key`` and the like say which, and ``LABEL.key`` is one
    method's own.
    """

    def __init__(self, form: File) -> None:
        self.form, data, chosen = form, form.data, form.problem
        self.names = {method.label or method.name: method.name for method in form.methods}
        self.partition = vars(data).get("partition")  # data that is divided by nature has none
        clients = {"clients": data.clients} if self.partition else {}
        self.given: dict[str, dict[str, Any]] = {  # what the file says, by its parts
            "solve": form.model_dump(include={*SOLVE}),
            "data": {**clients, **data.parameters},
            "partition": self.partition.parameters if self.partition else {},
            "problem": chosen.parameters,
            "model": chosen.model.parameters,
        }
        self.known: dict[str, Sequence[str]] = {  # the keys that each part may have
            "solve": SOLVE,
            "data": [key for key in keys_of(data.name) if key != "seed"],
            "partition": keys_of(self.partition.name) if self.partition else (),
            "problem": keys_of(chosen.name),
            "model": keys_of(chosen.model.name),
        }
        self.common = [*self.known]
        self.given |= {method.label or method.name: method.parameters for method in form.methods}
        self.known |= {label: arguments_of(name) for label, name in self.names.items()}

    def owners(self, key: str) -> tuple[str, list[str]]:
        """A key's name in the parts to which it belongs, and these parts: one, or some methods.

        Raises:
            ExperimentError: if it belongs nowhere.
        """
        for part in self.common:
            if key in self.known[part]:
                return key, [part]
        if every := [label for label in self.names if key in self.known[label]]:
            return key, every
        whose, _, plain = key.rpartition(".")
        if plain in self.known.get(whose, ()):
            return plain, [whose]
        names = list(dict.fromkeys(name for keys in self.known.values() for name in keys))
        raise ExperimentError(f"grid: unknown key {key!r}{suggest(key, names)} There are {', '.join(names)}.")

    def faults(self) -> Iterator[str]:
        """Keys of the grid that belong nowhere, and methods that cannot be made with the file's values."""
        varied: dict[str, dict[str, list[Scalar]]] = {part: {} for part in self.known}
        for key, values in self.form.grid.items():
            try:
                plain, owners = self.owners(key)
            except ExperimentError as error:
                yield str(error)
            else:
                for owner in owners if values else ():
                    varied[owner][plain] = values
        for label, name in self.names.items():
            first = {**self.given[label], **{key: values[0] for key, values in varied[label].items()}}
            others = ({**first, key: v} for key, values in varied[label].items() for v in values[1:])
            try:
                for parameters in (first, *others):
                    make_method(name, parameters)
            except ExperimentError as error:
                yield f"methods: {error}"

    def blocks(self) -> list[dict[str, list[Scalar]]]:
        """The grid: a block for each method, with the keys that concern it."""
        grid, concerns = self.form.grid, {key: {*self.owners(key)[1]} for key in self.form.grid}
        return [
            {"method": [label], **{key: grid[key] for key in grid if concerns[key] & {label, *self.common}}}
            for label in self.names
        ]

    def parameters(self) -> dict[str, Scalar]:
        """The parameters of the file outside the grid.

        A key that another part has too is ``model.key``, ``partition.key``, …. A method's goes by its own
        name where all methods that have it agree; else it is ``LABEL.key``, which reaches that method alone.
        """
        found: dict[str, Any] = {}
        for part, given in self.given.items():
            for key, value in given.items():
                if (part, key) == ("data", "seed"):
                    continue
                owners = self.owners(key)[1]
                if part not in owners or key not in self.form.grid:
                    agree = all(self.given[its].get(key, ...) == value for its in owners)
                    found[key if part in owners and agree else f"{part}.{key}"] = value
        return {k: v for k, v in found.items() if k not in self.form.grid and not isinstance(v, list | dict)}

    def __call__(self, s: Setting) -> Task:
        """The task of a setting."""
        form, label = self.form, str(s.method)
        parts = {part: dict(given) for part, given in self.given.items()}
        for key in sorted(s, key=lambda key: "." in key):
            if key != "method":
                plain, owners = self.owners(key)
                for owner in owners:
                    parts[owner][plain] = s[key]
        # A list of the file is a tuple: arguments of what is kept must be hashable.
        source = {k: tuple(v) if isinstance(v, list) else v for k, v in parts["data"].items()}
        if self.partition:
            rule = PARTITIONS[self.partition.name]
            source["partition"] = _called("data.partition", rule, **parts["partition"])
        data = _called("data", federated, form.data.name, **{"seed": s.seed, **source})
        model = _called("problem.model", for_data, form.problem.model.name, data, **parts["model"])
        chosen = form.problem.name
        try:
            choice_of(chosen).model_validate_json(json.dumps({"name": chosen, **parts["problem"]}))
        except ValidationError as error:
            wrong = [{**each, "loc": ("problem", chosen, *each["loc"])} for each in error.errors()]
            raise ExperimentError("\n".join(map(_fault, wrong))) from error
        inputs = Inputs(model, data, s.seed, form.weights)
        posed = _called("problem", POSES[chosen], inputs, **parts["problem"])
        metrics = {**model_metrics(model, posed.place, posed.own), **posed.metrics}
        options: dict[str, Any] = {} if form.weights == "uniform" else {"weights": form.weights}
        method = make_method(self.names[label], parts[label])
        if isinstance(method, Automatic):
            options |= method.options
            if "rounds" not in form.model_fields_set and parts["solve"]["rounds"] == form.rounds:
                parts["solve"]["rounds"] = None  # as many as it takes
        return Task(
            posed.problem, "auto" if isinstance(method, Automatic) else method, posed.data, posed.x0,
            posed.y0, metrics={name: metrics[name] for name in metrics_of(form)}, options=options,
            **parts["solve"],
        )  # fmt: skip
