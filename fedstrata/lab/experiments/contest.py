"""A contest of an experiment's methods on its problems, at equal budgets: `fedstrata compare`."""

from __future__ import annotations

from collections.abc import Sequence

from fedstrata.advice.compare import Comparison, Steps, compare
from fedstrata.core.method import Method
from fedstrata.data.federated import FederatedData
from fedstrata.lab.experiments.base import Experiment, Setting
from fedstrata.lab.experiments.errors import ExperimentError
from fedstrata.lab.experiments.networked import task_of


def contest(
    experiment: Experiment, budget: dict[str, float], seeds: int, steps: Steps, target: float
) -> Comparison:
    """Compare an experiment's methods; any other difference between its settings makes another problem."""
    cases: dict[str, tuple[object, ...]] = {}
    methods: dict[str, Method] = {}
    options: dict[str, object] = {}
    for setting in experiment.model_copy(update={"seeds": 1}).settings:
        first = task_of(experiment, setting)
        label = first.label or str(setting.cell.get("method") or type(first.method).__name__)
        case = ", ".join(f"{k}={v}" for k, v in setting.cell.items() if k != "method") or experiment.name
        method, _ = first.given
        if repr(methods.setdefault(label, method)) != repr(method):
            raise ExperimentError(
                f"{label} has other hyper-parameters in {case}: compare one at a time, --set KEY=VALUE."
            )
        options = {"participation": first.participation, "weights": first.options.get("weights", "uniform")}
        if case not in cases:
            cases[case] = (first.problem, _data(experiment, setting, seeds), first.x0, first.y0)
        elif type(cases[case][0]) is not type(first.problem):
            raise ExperimentError(
                f"{experiment.name} has another problem for {label} ({type(first.problem).__name__}): only "
                "methods that solve the same problem can be compared."
            )
    return compare(
        cases, methods, budget=budget, seeds=seeds, steps=steps, target=target, **options  # type: ignore[arg-type]
    )  # fmt: skip


def _data(experiment: Experiment, setting: Setting, seeds: int) -> FederatedData | Sequence[FederatedData]:
    """Every seed's split; one, where they are the same."""
    own = [
        task_of(experiment, Setting(experiment.parameters, setting.cell, seed)).data for seed in range(seeds)
    ]
    return own[0] if all(data is own[0] for data in own) else own


def budget_from(text: str) -> dict[str, float]:
    """The budget that ``--budget bytes=1e6`` stands for; a number is rounds.

    Raises:
        ExperimentError: if it is neither.
    """
    kind, equals, amount = text.partition("=")
    try:
        return {kind.strip(): float(amount)} if equals else {"rounds": float(kind)}
    except ValueError as error:
        raise ExperimentError(
            f"--budget needs a number of rounds or KIND=AMOUNT, but is {text!r}."
        ) from error
