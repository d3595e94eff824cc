"""ZO-HFL's Table I: test accuracy of the global model under growing heterogeneity."""

from fedstrata.lab import Claim, Experiment, PlotSpec, TableSpec
from reproductions._pages import claims
from reproductions._zohfl import ACCURACIES, BASELINES, DATA, LEVELS, PARAMETERS, PROBLEM, SHARED, build

PRINTED = {
    "FedAvg": ((87.17, 77.52, 68.36), (77.33, 59.64, 37.20), (39.19, 45.50, 27.43)),
    "FedProx": ((86.90, 77.34, 67.52), (75.61, 60.28, 38.55), (45.15, 49.44, 29.03)),
    "SCAFFOLD": ((91.54, 82.25, 72.36), (91.25, 83.48, 50.41), (87.36, 74.91, 44.65)),
    "ZO-HFL": ((90.82, 78.51, 68.12), (88.44, 85.51, 58.06), (87.70, 76.86, 52.51)),
}


def printed() -> tuple[Claim, ...]:
    return tuple(
        Claim({"label": row, "level": level, "data": data}, "accuracy", value / 100)
        for row, levels in PRINTED.items()
        for level, values in zip(LEVELS, levels, strict=True)
        for data, value in zip(DATA, values, strict=True)
    )


EXPERIMENT = Experiment(
    name="zohfl-table1",
    title="ZO-HFL against FedAvg, FedProx and SCAFFOLD",
    paper="Qiu, Kim, Yousefian 2025, section IV, Table I",
    description=(
        "Softmax regression on images at three levels of heterogeneity: mild (α = 1000, 90 % of the clients "
        "take part), moderate (1, 50 %), extreme (0.1, 10 %). The server of ZO-HFL has 30 % of the training "
        "data; beside the paper's rows stand a server that learns from these alone, and the baselines with "
        "these spread over the clients."
    ),
    problem=PROBLEM,
    parameters={**PARAMETERS, "tau": 20.0},
    grid={
        "level": list(LEVELS),
        "method": [*PRINTED, "server data only", *(row + SHARED for row in BASELINES)],
        "data": list(DATA),
    },
    build=build,
    seeds=3,
    table=TableSpec(ACCURACIES, rows=("level", "label"), across="data"),
    plots=(
        PlotSpec(
            "accuracy", x="level", kind="heatmap", down="label", panels="data",
            title="Test accuracy of the global model", y_label="test accuracy",
        ),
    ),
    claims=claims("zohfl-table1", "Qiu, Kim, Yousefian 2025, Table I", printed=printed()),
    needs=("mnist", "fashion_mnist", "cifar10"),
    fallback={"data": "digits"},
    full_time="3 minutes on one NVIDIA H200, by three processes",
    quick={
        "rounds": 20,
        "evaluations": 4,
        "tau": 5.0,
        "method": ["FedAvg", "FedProx", "ZO-HFL", "server data only", "FedAvg" + SHARED, "FedProx" + SHARED],
        "level": ["moderate"],
        "data": ["digits"],
        "seeds": 1,
    },
)  # fmt: skip
