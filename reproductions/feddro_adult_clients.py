"""FedDRO under fairness constraints on Adult: the number of clients, Figure 6 of the paper."""

from fedstrata.lab import Experiment, PlotSpec, TableSpec
from reproductions._adult import COLUMNS, PARAMETERS, QUICK, build
from reproductions._pages import claims

EXPERIMENT = Experiment(
    name="feddro-adult-clients",
    title="FedDRO under equal opportunity: the number of clients",
    paper="Federated compositional optimization (FedDRO), appendix B, Figure 6",
    description="FedDRO on Adult with 1 to 4 clients, each with minibatches of its own, and I = 1 or 4.",
    parameters={**PARAMETERS, "method": "FedDRO"},
    grid={"clients": [1, 2, 3, 4], "I": [1, 4]},
    build=build,
    seeds=5,
    table=TableSpec(COLUMNS[:3], rows=("clients",), across="I"),
    plots=(PlotSpec("accuracy", lines=("clients",), panels="I"),),
    claims=claims("feddro-adult", "Figure 6 and the text on it", 1),
    needs=("adult",),
    fallback={"data": "made up"},
    quick={**QUICK, "clients": [1, 2], "I": [1]},
    quick_seconds=8,
    full_time="1 min on a core",
)  # fmt: skip
