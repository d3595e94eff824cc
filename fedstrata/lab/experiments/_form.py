"""The form of a TOML file: what it may have, and what its parts may be given."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedstrata.core.types import Weights
from fedstrata.lab.experiments._named import Named, fields
from fedstrata.lab.experiments.catalogue import CATALOGUE, Entry
from fedstrata.lab.experiments.data import LOADERS, NATURAL, PARTITIONS
from fedstrata.lab.experiments.errors import ExperimentError
from fedstrata.lab.report import PaperClaims, PlotSpec, TableSpec
from fedstrata.lab.report.records import Scalar
from fedstrata.models import MODELS, Loss

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


def measured(form: File) -> list[str]:
    """The metrics that are asked for, or those that go with the problem."""
    if form.metrics is not None:
        return form.metrics
    wanted = (*METRICS, *form.problem.entry.metrics)
    return [metric for metric in offered(form) if metric in wanted]


def offered(form: File) -> list[str]:
    """The metrics that there are."""
    loss = form.problem.model.parameters.get("loss")
    default = inspect.signature(MODELS[form.problem.model.name]).parameters.get("loss")
    if loss is None and default is not None:
        loss = default.default
    with about("problem.model"):
        numbers = loss is not None and Loss.of(loss).labels == "numbers"
    tested = TESTED if form.data.name in NATURAL else ()  # elsewhere nobody knows whose a test sample is
    every = (*METRICS, *form.problem.entry.metrics, *BY_CLIENT, *tested)
    return list(dict.fromkeys(m for m in every if "accuracy" not in m or not numbers))


def series_of(metric: str) -> list[str]:
    """What the history has of a metric that is worth a column: of one by client its mean, and the worst."""
    return [metric, f"{metric}/worst"] if metric.startswith("client_") else [metric]


def better(measure: str) -> Literal["low", "high", ""]:
    if "accuracy" in measure or measure == "found":
        return "high"
    return "" if measure in ("lower", "weight", "payoff", "secondary", "coupling") else "low"


def partition_options(form: File) -> list[str]:
    return [] if form.data.name in NATURAL else fields(PARTITIONS[form.data.partition.name])


def options_of(loader: str) -> list[str]:
    """The names of a loader's keyword arguments, the clients among them where they can be chosen."""
    if loader in NATURAL:
        return [name for name in inspect.signature(LOADERS[loader]).parameters if name != "seed"]
    (options,) = inspect.signature(LOADERS[loader]).parameters["options"].annotation.__args__
    return ["clients", *(name for name in options.__annotations__ if name not in ("data_dir", "dtype"))]


@contextmanager
def about(where: str) -> Iterator[None]:
    """Errors about arguments say which part of the file they are about."""
    try:
        yield
    except ExperimentError:
        raise
    except (TypeError, ValueError) as error:
        raise ExperimentError(f"{where}: {error}") from error
