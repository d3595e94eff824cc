"""FedDRO under fairness constraints on Adult, and without: Figures 3 and 5 of the paper."""

from typing import Any

from fedstrata.lab import Experiment, PlotSpec, Reference, TableSpec
from reproductions._adult import COLUMNS, PARAMETERS, QUICK, build
from reproductions._pages import claims

# A panel for each method: ten lines in one cannot be told apart where most are at one level.
LOOK: dict[str, Any] = {"lines": ("I",), "panels": "label"}
ACCURACY = {**LOOK, "y_label": "test accuracy"}
VIOLATION = {**LOOK, "y_label": "worst violation (test)"}

EXPERIMENT = Experiment(
    name="feddro-adult",
    title="FedDRO under equal opportunity: Adult",
    paper="Federated compositional optimization (FedDRO), section 6, Figures 3 and 5",
    description=(
        "Logistic regression on Adult, with true positive rates of noisy groups constrained: FedDRO and "
        "DS-FedDRO with I local steps against GCIVR and training without constraints."
    ),
    problem="min mean log loss s.t. tpr(group) ≥ tpr(all) − ε for all proxy groups",
    parameters={**PARAMETERS, "clients": 8},
    grid=[
        {"method": ["unconstrained", "GCIVR"], "I": [1]},
        {"method": ["FedDRO", "DS-FedDRO"], "I": [1, 4, 16, 64]},
    ],
    build=build,
    seeds=5,
    table=TableSpec(COLUMNS, rows=("label", "I")),
    plots=(
        PlotSpec("accuracy", title="Test accuracy by rounds", **ACCURACY),
        PlotSpec("accuracy", x="exchanges", log_x=True, name="accuracy-by-exchanges", **ACCURACY),
        PlotSpec("accuracy", x="bytes_up", log_x=True, name="accuracy-by-bytes", **ACCURACY),
        PlotSpec(
            "test_violation", title="Worst violation by rounds", references=(Reference(0.0, "no violation"),),
            **VIOLATION,
        ),
        PlotSpec(
            "test_violation", x="bytes_up", log_x=True, title="Worst violation by bytes",
            name="violation-by-bytes", **VIOLATION,
        ),
    ),
    claims=claims("feddro-adult", "Figures 3 and 5 and the text on them"),
    needs=("adult",),
    fallback={"data": "made up"},
    quick={**QUICK, "clients": 2, "I": [1], "method": ["FedDRO", "unconstrained"]},
    quick_seconds=8,
    full_time="10 min on a busy core",
)  # fmt: skip
