"""FedRZO on networks of one layer of ReLUs: the study of neurons on CIFAR-10, Figure 3 of the paper."""

from fedstrata.lab import Column, Experiment, PlotSpec, TableSpec
from reproductions._pages import claims
from reproductions._relu import PROBLEM, build

EXPERIMENT = Experiment(
    name="fedrzo-cifar",
    title="FedRZO on ReLU networks of 4, 20 and 100 neurons",
    paper="Qiu, Shanbhag, Yousefian 2024, section 6.1, Figure 3",
    description=(
        "The same networks on CIFAR-10, even against odd classes: how zeroth-order training fares when "
        "the network grows to 307 300 parameters."
    ),
    problem=PROBLEM,
    parameters={
        "data": "cifar10", "clients": 5, "lam": 0.01, "gamma": 1e-6, "batch_size": 1, "rounds": 2_000,
        "evaluations": 50,
    },
    grid={"neurons": [4, 20, 100], "eta": [0.1, 0.01, 0.001], "H": [1, 5, 20]},
    build=build,
    seeds=5,
    table=TableSpec(
        (
            Column("loss", better="low"),
            Column("fit", title="without λ/2‖x‖²", better="low"),
            Column("accuracy", better="high", format=".1%"),
        ),
        rows=("neurons", "eta"),
        across="H",
    ),
    plots=(
        PlotSpec("loss", lines=("eta", "H"), panels="neurons"),
        PlotSpec("fit", lines=("eta", "H"), panels="neurons", title="The loss without its regulariser"),
    ),
    claims=claims("fedrzo-relu", "Figure 3 and its caption; no numbers are printed", 1),
    needs=("cifar10",),
    fallback={"data": "digits"},
    quick_seconds=10,
    full_time="70 s on one NVIDIA H200",
    quick={
        "data": "digits", "rounds": 20, "evaluations": 5, "neurons": [4, 20], "H": [5], "eta": [0.1, 0.01],
        "seeds": 1,
    },
)  # fmt: skip
