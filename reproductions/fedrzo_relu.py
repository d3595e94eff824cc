"""FedRZO on a network of one layer of ReLUs: the study of H and η on MNIST, Figure 1 of the paper."""

from fedstrata.lab import Column, Experiment, PlotSpec, TableSpec
from reproductions._pages import claims
from reproductions._relu import PROBLEM, build

EXPERIMENT = Experiment(
    name="fedrzo-relu",
    title="FedRZO on a ReLU network: local steps and smoothing",
    paper="Qiu, Shanbhag, Yousefian 2024, section 6.1, Figure 1",
    description=(
        "A network of one layer of ReLUs, trained by function values alone on even against odd digits: "
        "how the loss falls with the number H of local steps and the smoothing radius η."
    ),
    problem=PROBLEM,
    parameters={
        "data": "mnist", "clients": 5, "neurons": 4, "lam": 0.01, "gamma": 1e-5, "batch_size": 1,
        "rounds": 10_000, "evaluations": 50,
    },
    grid={"eta": [0.1, 0.01, 0.001], "H": [1, 5, 10, 20]},
    build=build,
    seeds=5,
    table=TableSpec(
        (Column("loss", better="low"), Column("accuracy", better="high", format=".1%")), rows=("H",),
        across="eta",
    ),
    plots=(
        PlotSpec("loss", lines=("H",), panels="eta", title="Training loss by rounds"),
        PlotSpec(
            "loss", x="local_steps", lines=("H",), panels="eta", title="Training loss by local steps",
            x_label="local steps of each client", log_x=False,
        ),
        PlotSpec("accuracy", lines=("H",), panels="eta", title="Test accuracy by rounds"),
    ),
    claims=claims("fedrzo-relu", "Figure 1 and the text on it; no numbers are printed"),
    needs=("mnist",),
    fallback={"data": "digits"},
    quick_seconds=13,
    full_time="53 s on one NVIDIA H200",
    quick={"rounds": 50, "evaluations": 5, "H": [1, 5], "eta": [0.1, 0.01], "seeds": 1},
)  # fmt: skip
