"""FedDRO under fairness constraints on Adult, and without: Figures 3 and 5 of the paper."""

from __future__ import annotations

from fedstrata.experiments.base import Experiment
from fedstrata.experiments.papers._adult import COLUMNS, PARAMETERS, QUICK, build
from fedstrata.report import PlotSpec, Reference, TableSpec

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
    # A panel for each method: ten lines in one cannot be told apart where most of them are at zero.
    plots=(
        PlotSpec("accuracy", lines=("I",), panels="label", title="Test accuracy by rounds"),
        PlotSpec("accuracy", x="exchanges", lines=("label", "I"), log_x=True, name="accuracy-by-exchanges"),
        PlotSpec("accuracy", x="bytes_up", lines=("label", "I"), log_x=True, name="accuracy-by-bytes"),
        PlotSpec(
            "test_violation",
            lines=("I",),
            panels="label",
            title="Worst violation by rounds",
            y_label="worst violation (test)",
            references=(Reference(0.0, "no violation"),),
        ),
        PlotSpec(
            "test_violation",
            x="bytes_up",
            lines=("I",),
            panels="label",
            log_x=True,
            title="Worst violation by bytes",
            y_label="worst violation (test)",
            name="violation-by-bytes",
        ),
    ),
    needs=("adult",),
    fallback={"data": "made up"},
    quick={**QUICK, "clients": 2, "I": [1], "method": ["FedDRO", "unconstrained"]},
    quick_seconds=8,
    full_time="10 min on a busy core",
)
