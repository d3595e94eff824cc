"""What ZO-HFL's λ and μ do, which the paper does not print: Table I's cells over both, at full length.

λ weighs the pull of the clients' models on the server's, μ that of the server's on theirs. The other grids of
this experiment are in `zohfl_table1`, by its parameters: the scale of the images (``pixels``) and constant
steps of the baselines (``baseline_steps``).
"""

from fedstrata.lab import Column, Experiment, PlotSpec, TableSpec
from reproductions._zohfl import ACCURACIES, LEVELS, PARAMETERS, PROBLEM, build

EXPERIMENT = Experiment(
    name="zohfl-weights",
    title="ZO-HFL: the weights λ and μ",
    paper="Qiu, Kim, Yousefian 2025, section IV, Table I (λ and μ are not printed)",
    description=(
        "Softmax regression on MNIST and Fashion-MNIST at three levels of heterogeneity, over λ and μ, "
        "beside a server that learns alone: the accuracy of the global model and of the clients' own."
    ),
    problem=PROBLEM,
    parameters={key: value for key, value in PARAMETERS.items() if key not in ("lam", "mu")} | {"tau": 20.0},
    grid=[
        {
            "method": ["ZO-HFL"],
            "level": list(LEVELS),
            "data": ["mnist", "fashion_mnist"],
            "lam": [0.1, 1.0, 10.0],
            "mu": [0.1, 1.0, 10.0],
        },
        {"method": ["server data only"], "level": ["mild"], "data": ["mnist", "fashion_mnist"]},
    ],
    build=build,
    seeds=3,
    table=TableSpec(
        (*ACCURACIES, Column("global_loss", title="f₁", better="low")),
        rows=("data", "level", "label", "lam", "mu"),
    ),
    plots=(
        PlotSpec(
            "accuracy", lines=("label", "lam", "mu"), panels="level", title="Accuracy of the global model",
        ),
    ),
    needs=("mnist", "fashion_mnist"),
    fallback={"data": "digits"},
    quick={
        "rounds": 10, "evaluations": 2, "tau": 5.0, "lam": [1.0], "mu": [1.0, 10.0], "level": ["moderate"],
        "data": ["digits"], "seeds": 1,
    },
    quick_seconds=15,
)  # fmt: skip
