"""How an experiment is defined: a grid of settings, a function from a setting to a task, a table, plots.

    EXPERIMENT = Experiment(
        name="fedavg-steps",                       # the module is fedavg_steps.py
        title="FedAvg: how many local steps?",
        description="Softmax regression on digits, label skew.",
        parameters={"rounds": 200, "clients": 10, "gamma": 0.1},      # one value each; --set changes them
        grid={"H": [1, 5, 20], "alpha": [0.1, 1.0]},                  # every combination is run
        build=build,
        seeds=5,
        table=TableSpec((Column("accuracy", better="high"),), rows=("H",), across="alpha"),
        plots=(PlotSpec("loss", lines=("H",), panels="alpha", log_y=True),),
        quick={"rounds": 10, "H": [1, 5], "seeds": 1},
    )

    def build(s: Setting) -> Task:
        data = digits(s.clients, s.alpha)          # cache what is the same for many settings
        return Task(PROBLEM, fs.FedAvg(s.gamma, s.H), data, x0, rounds=s.rounds, metrics=METRICS)

A problem's functions and its metrics should be the same objects in every call (functions of the module,
`functools.cache`, the constructors in `models`): the compiled program is then used again.
"""

from __future__ import annotations

import itertools
import keyword
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, field_validator, model_validator

from fedstrata.lab.experiments.errors import ExperimentError
from fedstrata.lab.report import PaperClaims, PlotSpec, RunRecord, TableSpec
from fedstrata.lab.report.records import Scalar
from fedstrata.support.words import suggest

MOST_SETTINGS = 100_000

if TYPE_CHECKING:
    from fedstrata.channels.channel import Buffered, Poisson
    from fedstrata.core.method import Method
    from fedstrata.core.problem import Problem
    from fedstrata.core.types import PyTree
    from fedstrata.data.federated import FederatedData
    from fedstrata.engines.metrics import Metric
    from fedstrata.solving.result import Result


class Setting(Mapping[str, Scalar]):
    """One cell of the grid, the parameters, and a seed: ``s.H`` or ``s["H"]``; ``s.seed``.

    >>> s = Setting({"rounds": 200}, {"H": 5}, seed=0)
    >>> s.rounds, s.H, s.seed, s.cell
    (200, 5, 0, {'H': 5})
    """

    def __init__(self, parameters: Mapping[str, Scalar], cell: Mapping[str, Scalar], seed: int) -> None:
        self.cell = dict(cell)
        self.seed = seed
        self._all = {**parameters, **cell}

    def __getitem__(self, key: str) -> Scalar:
        return self._all[key]

    def __getattr__(self, key: str) -> Any:
        if not key.startswith("_") and key in self._all:
            return self._all[key]
        known = ", ".join(self._all) if "_all" in self.__dict__ else "nothing"
        raise AttributeError(f"The setting has no {key!r}; it has {known}.")

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __repr__(self) -> str:
        return f"Setting({', '.join(f'{k}={v!r}' for k, v in self._all.items())}, seed={self.seed})"

    @property
    def coordinates(self) -> dict[str, Scalar]:
        """The cell without the method, which is a run's label."""
        return {key: value for key, value in self.cell.items() if key != "method"}

    @property
    def words(self) -> str:
        """The cell for people: ``FedRZO, H=5``."""
        parts = [str(v) if k == "method" else f"{k}={v}" for k, v in self.cell.items() if v is not None]
        return ", ".join(parts)

    @property
    def run(self) -> str:
        """The cell and the seed: ``FedRZO, H=5, seed 0``."""
        return ", ".join(filter(None, [self.words, f"seed {self.seed}"]))


@dataclass(frozen=True)
class Task:
    """One call of `fedstrata.solve`, but for its seed, which is the setting's.

    Args:
        problem, method, data, x0, y0, rounds, metrics, eval_every, participation: as in `fedstrata.solve`;
            of the method ``"auto"``, which has neither evaluations of its own nor checkpoints, too.
        label: what tables and legends call it; if empty, the setting's ``method`` or else the method's class.
        derive: further series (or numbers, the same in every row) for the history, from the `Result`.
        options: further arguments of `fedstrata.solve` (engine, weights, callbacks, default_metrics,
            channel, dropouts; of ``"auto"`` budget, reveals).
        silent: keep warnings back, where what they warn of is what is shown.
    """

    problem: Problem
    method: Method | Literal["auto"]
    data: FederatedData
    x0: PyTree
    y0: PyTree = None
    rounds: int | None = 100
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    eval_every: int = 1
    participation: float | int | Poisson | Buffered = 1.0
    label: str = ""
    derive: Callable[[Result], Mapping[str, Any]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    silent: bool = False

    @property
    def given(self) -> tuple[Method, int]:
        """The method and its rounds.

        Raises:
            ExperimentError: for ``"auto"``, which has neither before it has measured all samples.
        """
        if self.method == "auto" or self.rounds is None:
            raise ExperimentError(
                "'auto' needs all samples in one place: it cannot run on a network or be compared. Run it "
                "once, and use the method that it chose."
            )
        return self.method, self.rounds


def record(
    s: Setting, values: Mapping[str, ArrayLike], seconds: float, method: str = "", **ledger: int
) -> RunRecord:
    """The record of an answer that does not come from `solve`.

    Args:
        s: the setting.
        values: of the metrics: one each, or one for each of the rounds 0, 1, ….
        seconds: how long it took.
        method: what found it; the setting's ``method`` where it is empty.
        ledger: what was counted.
    """
    length = max(2, *(np.size(series) for series in values.values()))
    history = {name: np.broadcast_to(series, length) for name, series in values.items()}
    history["round"] = np.linspace(0, s.rounds, length).astype(int)
    label = str(s.method)
    return RunRecord(label, s.coordinates, s.seed, history, ledger, seconds, method or label)


Build = Callable[[Setting], Task | RunRecord | Sequence[RunRecord]]
Grid = dict[str, list[Scalar]]

_GRID = TypeAdapter(list[Grid])
_TAKEN = {"seeds", "label", "seed", "cell", *dir(Setting)}


class Experiment(BaseModel):
    """A definition that the command line runs.

    Args:
        name: small letters, digits and hyphens.
        title: of the page.
        paper: the paper, and its section, table or figure.
        description: what is solved and compared, in a sentence or two.
        problem: the problem's formula, for the page.
        grid: key → values; every combination is a setting. A list of such dicts is the union of their
            combinations; a key that some of them lack is None there. The key ``method`` gives the runs their
            label.
        parameters: key → one value, the same for all settings; `--set` changes it, or makes a grid of it.
        build: setting → the `Task` to solve, or the `RunRecord` (or several) of what does not go through
            `solve`.
        records: whether ``build`` returns records for all settings: what is stored is then compared by the
            definition's code, without building it again.
        seeds: how many; 0, 1, … are taken.
        table: the headline table. Grid keys that neither its rows nor its columns name become rows.
        plots: the plots; likewise.
        claims: what the paper printed.
        findings: runs → Markdown that says what came out, in a sentence or two: the first thing on the page.
        notes: Markdown, at the end of the page.
        needs: data sets that must be there, by the name of their loader.
        fallback: what to change (as in ``quick``) where one of ``needs`` is not there; None is an error.
        quick: parameters, grid values and seeds that make it take less than 20 s.
        quick_seconds: how long that takes on two cores.
        full_time: how long the whole takes and on what, in words.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    title: str
    paper: str = ""
    description: str
    problem: str = ""
    grid: Any = Field(default_factory=dict, validate_default=True)
    parameters: dict[str, Scalar] = Field(default_factory=dict)
    build: Build
    records: bool = False
    seeds: int = Field(default=5, ge=1)
    table: TableSpec
    plots: tuple[PlotSpec, ...] = ()
    claims: PaperClaims | None = None
    findings: Callable[[Sequence[RunRecord]], str] | None = None
    notes: str = ""
    needs: tuple[str, ...] = ()
    fallback: dict[str, Scalar | list[Scalar]] | None = None
    quick: dict[str, Scalar | list[Scalar]] = Field(default_factory=dict)
    quick_seconds: float | None = None
    full_time: str = ""

    @field_validator("grid")
    @classmethod
    def _blocks(cls, value: object) -> list[Grid]:
        return _GRID.validate_python([value] if isinstance(value, Mapping) else value)

    @model_validator(mode="after")
    def _check(self) -> Experiment:
        if not self.grid:
            raise ValueError("grid is an empty list; {} is one setting, the parameters alone")
        for key in [*self.parameters, *self.grid_keys]:
            if key in _TAKEN or keyword.iskeyword(key) or key.startswith("_"):
                raise ValueError(f"{key!r} cannot be the name of a parameter")
        if both := sorted(set(self.parameters) & set(self.grid_keys)):
            raise ValueError(f"{both} are both parameters and in the grid")
        for block in self.grid:
            for key, values in block.items():
                if not values:
                    raise ValueError(f"the grid has no value of {key!r}")
        for where, changes in (("quick", self.quick), ("fallback", self.fallback or {})):
            for key, value in changes.items():
                try:
                    check_value(self, key, value)
                except ExperimentError as error:
                    raise ValueError(f"{where}: {error}") from error
        return self

    @property
    def grid_keys(self) -> list[str]:
        """The keys of the grid, in order."""
        return list(dict.fromkeys(key for block in self.grid for key in block))

    def values_of(self, key: str) -> list[Scalar]:
        """The values that the grid has of a key, each once."""
        return list(dict.fromkeys(v for block in self.grid for v in block.get(key, [])))

    @property
    def settings(self) -> list[Setting]:
        """All settings: the grid's cells in order, and within a cell the seeds."""
        number = self.seeds * sum(math.prod(map(len, block.values())) for block in self.grid)
        if number > MOST_SETTINGS:
            raise ExperimentError(
                f"{self.name} has {number:,} settings, more than {MOST_SETTINGS:,}: give fewer values in the "
                "grid, or fewer seeds."
            )
        cells: dict[str, dict[str, Scalar]] = {}
        for block in self.grid:
            for values in itertools.product(*block.values()):
                cell = {**dict.fromkeys(self.grid_keys), **dict(zip(block, values, strict=True))}
                cells.setdefault(repr(sorted(cell.items())), cell)
        return [Setting(self.parameters, cell, seed) for cell in cells.values() for seed in range(self.seeds)]

    def change(self, changes: Mapping[str, Scalar | Sequence[Scalar]]) -> Experiment:
        """The experiment with other parameters, grid values or seeds.

        Several values of a parameter make it part of the grid; those of ``method``, and of a key by which the
        grid's blocks differ, choose among the settings.

        Raises:
            ExperimentError: for an unknown key, or a value of another type.
        """
        grid = [dict(block) for block in self.grid]
        parameters, seeds = dict(self.parameters), self.seeds
        for key, value in changes.items():
            checked = check_value(self, key, value)
            if key == "seeds":
                seeds = int(checked[0])  # type: ignore[arg-type]
            elif key == "method" or self._chooses(grid, key, checked):
                kept = [{**b, key: [v for v in b[key] if v in checked]} for b in grid if key in b]
                grid = [block for block in kept if block[key]]
            elif key in self.grid_keys:
                grid = [{**block, key: checked} if key in block else block for block in grid]
            elif len(checked) == 1:
                parameters[key] = checked[0]
            else:
                del parameters[key]
                grid = [{**block, key: checked} for block in grid]
        return self.model_copy(update={"grid": grid, "parameters": parameters, "seeds": seeds})

    @staticmethod
    def _chooses(grid: list[Grid], key: str, values: list[Scalar]) -> bool:
        """Whether the values choose among a grid's blocks, which have unlike ones of this key."""
        blocks = [block[key] for block in grid if key in block]
        known = [value for block in blocks for value in block]
        return any(block != blocks[0] for block in blocks) and all(value in known for value in values)


def check_value(experiment: Experiment, key: str, value: Scalar | Sequence[Scalar]) -> list[Scalar]:
    """A value, or several, given for a key, as a list of the right type.

    Raises:
        ExperimentError: for an unknown key, or a value of another type than those the key has.
    """
    values = [value] if isinstance(value, Scalar) else list(value)
    if key == "seeds":
        if [type(v) for v in values] != [int] or values[0] < 1:  # type: ignore[operator]
            raise ExperimentError(f"seeds must be a whole number ≥ 1, but is {value!r}.")
        return values
    known: list[Scalar] = [v for block in experiment.grid for v in block.get(key, [])]
    if key in experiment.parameters:
        known = [experiment.parameters[key]]
    if not known:
        names = [*experiment.parameters, *experiment.grid_keys, "seeds"]
        raise ExperimentError(
            f"{experiment.name} has no {key!r}{suggest(key, names)} It has {', '.join(names)}."
        )
    if not values:
        raise ExperimentError(f"{key} needs at least one value.")
    if key == "method" and (missing := [v for v in values if v not in known]):
        names = [f'"{v}"' if "," in str(v) else str(v) for v in dict.fromkeys(known)]
        quoted = " Give --set a name with a comma in double quotes." if any('"' in n for n in names) else ""
        raise ExperimentError(
            f"{experiment.name} has no method {missing[0]!r}; it has {', '.join(names)}.{quoted}"
        )
    return [_typed(key, v, known) for v in values]


def _typed(key: str, value: Scalar, known: Sequence[Scalar]) -> Scalar:
    """The value in the type of the values that a key has had so far."""
    types = {type(v) for v in known}
    if key == "participation" and {type(value), *types} <= {int, float}:
        return value  # as in `fedstrata.solve`: a number of clients, or a fraction of them
    if type(value) is int and int not in types and float in types:
        return float(value)
    if type(value) in types or types == {type(None)}:
        return value
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "none"}
    words = " or ".join(words for kind, words in names.items() if kind in types)
    raise ExperimentError(f"{key} must be {words} (such as {known[0]!r}), but is {value!r}.")
