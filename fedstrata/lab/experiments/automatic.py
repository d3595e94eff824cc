"""An experiment's problems solved by "auto" in place of its methods: `fedstrata solve`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fedstrata.advice.auto import checked_budget
from fedstrata.core.method import Reveals
from fedstrata.lab.experiments.base import Experiment, Setting, Task
from fedstrata.lab.experiments.contest import budget_from
from fedstrata.lab.experiments.networked import task_of
from fedstrata.lab.experiments.toml import FileBuild
from fedstrata.lab.report import TableSpec


@dataclass(frozen=True)
class SolvedByAuto:
    """Builds a setting's task, with "auto" for its method."""

    experiment: Experiment
    label: str | None
    rounds: int | None
    options: Mapping[str, Any]

    def __call__(self, s: Setting) -> Task:
        """The task of a setting, which has no method."""
        cell = dict(s.cell) if self.label is None else {"method": self.label, **s.cell}
        task = task_of(self.experiment, Setting(self.experiment.parameters, cell, s.seed))
        kept = {key: value for key, value in task.options.items() if key == "weights"}
        options = {**kept, **self.options}
        return replace(task, method="auto", rounds=self.rounds, label="auto", derive=None, options=options)


def by_auto(experiment: Experiment, budgets: list[str], reveals: Reveals) -> Experiment:
    """The experiment with a setting for each of its problems; methods, their keys and claims are left out.

    Args:
        experiment: any that goes through `fedstrata.solve`.
        budgets: as ``--budget`` gives them, ``KIND=AMOUNT``.
        reveals: as in `fedstrata.solve`.
    """
    budget = {name: amount for text in budgets for name, amount in budget_from(text).items()}
    checked_budget(budget, None)
    rounds = budget.pop("rounds", None)
    options = {"reveals": reveals, **({"budget": budget} if budget else {})}
    first = experiment.grid[0]
    label = str(first["method"][0]) if "method" in first else None
    of_methods = _of_methods(experiment)
    grid = {key: values for key, values in first.items() if key != "method" and not of_methods(key)}
    build = SolvedByAuto(experiment, label, None if rounds is None else int(rounds), options)
    return experiment.model_copy(
        update={
            "build": build,
            "grid": [grid],
            "claims": None,
            "findings": None,
            "table": TableSpec(experiment.table.columns, rows=("label", *grid)),
            "plots": (),
        }
    )


def _of_methods(experiment: Experiment) -> Callable[[str], bool]:
    build = experiment.build
    if not isinstance(build, FileBuild):
        return lambda key: False
    return lambda key: not {*build.owners(key)[1]} & {*build.common}
