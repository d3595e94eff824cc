"""ZO-HFL's Figure 2: the global loss by rounds, for three numbers of local steps."""

from __future__ import annotations

from fedstrata.experiments._zohfl import DATA, LEVELS, PAPER, PARAMETERS, run
from fedstrata.experiments.base import Experiment
from fedstrata.report import Column, PlotSpec, TableSpec

EXPERIMENT = Experiment(
    name="zohfl-convergence",
    title="ZO-HFL: do more local steps help?",
    paper=f"{PAPER}, section IV, Figure 2",
    description=(
        "Softmax regression on images at three levels of heterogeneity, by ZO-HFL with H_r = ⌈τ√(r+1)⌉ local "
        "steps in round r. The global loss is f₁ + f₂ of the server's model and the clients' own."
    ),
    problem="min_x f₁(x) + λ/2 Σ_i ρ_i ‖x − y_i(x)‖²,  y_i(x) = argmin_y CE_i(y) + μ/2 ‖x − y‖²",
    parameters={**PARAMETERS, "rounds": 200},
    grid={"method": ["ZO-HFL"], "tau": [5.0, 20.0, 50.0], "level": list(LEVELS), "data": list(DATA[1:])},
    run=run,
    seeds=3,
    table=TableSpec(
        (
            Column("objective", title="f₁ + f₂", better="low"),
            Column("global_loss", title="f₁", better="low"),
            Column("coupling", title="f₂"),
            Column("accuracy", title="accuracy", format=".2%", better="high"),
        ),
        rows=("data", "level", "tau"),
    ),
    plots=(
        PlotSpec("objective", lines=("tau", "data"), panels="level", title="f₁ + f₂, the global loss"),
        PlotSpec("global_loss", lines=("tau", "data"), panels="level", title="f₁, on the server's data"),
    ),
    needs=DATA[1:],
    fallback={"data": "digits"},
    quick={
        "rounds": 20,
        "evaluations": 5,
        "tau": [5.0, 20.0],
        "level": ["moderate"],
        "data": ["digits"],
        "seeds": 1,
    },
)
