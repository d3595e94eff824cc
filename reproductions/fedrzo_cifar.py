"""FedRZO on networks of one layer of ReLUs: the study of neurons on CIFAR-10, Figure 3 of the paper."""

from __future__ import annotations

from fedstrata.lab.experiments.base import Experiment
from fedstrata.lab.report import Column, PaperClaims, PlotSpec, Statement, TableSpec
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
        "data": "cifar10",
        "clients": 5,
        "lam": 0.01,
        "gamma": 1e-6,
        "batch_size": 1,
        "rounds": 2_000,
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
    claims=PaperClaims(
        "Figure 3 and its caption; no numbers are printed",
        statements=(
            Statement(
                "The method performs better with a smaller number of neurons.",
                "The loss falls from 0.74 to 0.541 with 4 neurons, from 0.81 to 0.698 with 20 and from "
                "1.67 to 1.506 with 100 (H = 20), but most of the difference is the regulariser, about λN₁ "
                "at the start: without it they end at 0.496, 0.493 and 0.497.",
                "partly",
            ),
            Statement(
                "It performs better with less communication frequency, given the rounds.",
                "With 20 neurons 0.738, 0.710 and 0.698 for H = 1, 5 and 20; likewise with 4 and 100.",
                "reproduced",
            ),
            Statement(
                "The smaller η, the longer it takes to converge.",
                "For a seed the losses with η = 0.1, 0.01 and 0.001 never differ by more than 0.0007.",
                "not reproduced",
            ),
        ),
    ),
    needs=("cifar10",),
    fallback={"data": "digits"},
    quick_seconds=10,
    full_time="70 s on one NVIDIA H200",
    quick={
        "data": "digits",
        "rounds": 20,
        "evaluations": 5,
        "neurons": [4, 20],
        "H": [5],
        "eta": [0.1, 0.01],
        "seeds": 1,
    },
)
