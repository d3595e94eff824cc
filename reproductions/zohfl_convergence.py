"""ZO-HFL's Figure 2: the global loss by rounds, for three numbers of local steps."""

from typing import Any

from fedstrata.lab import Column, Experiment, PlotSpec, TableSpec
from reproductions._pages import claims
from reproductions._zohfl import DATA, LEVELS, PARAMETERS, PROBLEM, build

LOOK: dict[str, Any] = {"lines": ("tau", "mu", "data"), "panels": "level"}

EXPERIMENT = Experiment(
    name="zohfl-convergence",
    title="ZO-HFL: do more local steps help?",
    paper="Qiu, Kim, Yousefian 2025, section IV, Figure 2",
    description=(
        "Softmax regression on images at three levels of heterogeneity, by ZO-HFL with H_r = ⌈τ√(r+1)⌉ local "
        "steps in round r. The global loss is f₁ + f₂ of the server's model and the clients' own."
    ),
    problem=PROBLEM,
    parameters={**{key: value for key, value in PARAMETERS.items() if key != "mu"}, "rounds": 200},
    grid={
        "method": ["ZO-HFL"],
        "data": list(DATA[1:]),
        "level": list(LEVELS),
        "mu": [1.0, 10.0],
        "tau": [5.0, 20.0, 50.0],
    },
    build=build,
    seeds=3,
    table=TableSpec(
        (
            Column("objective", title="f₁ + f₂"),
            Column("global_loss", title="f₁"),
            Column("coupling", title="f₂"),
            Column("accuracy", format=".2%"),
        ),
        rows=("data", "level", "mu", "tau"),
    ),
    plots=(
        PlotSpec("objective", log_y=True, title="The global loss", y_label="f₁ + f₂", **LOOK),
        PlotSpec("global_loss", title="Its part on the server's data", y_label="f₁", **LOOK),
        PlotSpec(
            "coupling", log_x=True, log_y=True, title="Its part of the clients' models", y_label="f₂", **LOOK,
        ),
    ),
    claims=claims("zohfl-convergence", "Figure 2 and the text on it; no numbers are printed"),
    needs=("fashion_mnist", "cifar10"),
    fallback={"data": "digits"},
    full_time="90 s on one NVIDIA H200, by three processes",
    quick={
        "rounds": 20, "evaluations": 5, "tau": [5.0, 20.0], "mu": [1.0], "level": ["moderate"],
        "data": ["digits"], "seeds": 1,
    },
)  # fmt: skip
