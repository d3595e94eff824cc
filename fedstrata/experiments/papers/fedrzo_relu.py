"""FedRZO on networks of one layer of ReLUs: the study of H and η on MNIST, that of neurons on CIFAR-10.

Section 6.1 of the paper, Figures 1 and 3. The printed objective sums over a client's samples where Algorithm
1 draws one at a time; here it is their mean, as in the definition of f_i. The paper leaves open what the
labels ±1 are, how the data is split, the start, the number of rounds and the batch: here the parity of the
digit (or the class), an even random split by seed, He's initialisation by seed, one sample a step, and as
many rounds as show the descent.
"""

from __future__ import annotations

import fedstrata as fs
from fedstrata.experiments.base import Experiment, Setting, Task
from fedstrata.experiments.data import federated
from fedstrata.experiments.models import Model, relu_network
from fedstrata.report import Column, PaperClaims, PlotSpec, Statement, TableSpec

PROBLEM = (
    "min over (Z, w) of 1/m Σ_i mean over client i's samples of ½(v − Σ_q w_q σ(Z_q·u))² + λ/2 (‖Z‖² + ‖w‖²) "
    "with σ = max(0, ·)"
)
PAPER = "Qiu, Shanbhag, Yousefian 2024, section 6.1"


def network(s: Setting, beta: float | None = None) -> tuple[fs.FederatedData, Model]:
    """The clients' data, split by the seed, and the network for it."""
    data = federated(s.data, s.clients, seed=s.seed)
    return data, relu_network(data.train["x"].shape[-1], s.neurons, s.lam, beta)


def build(s: Setting) -> Task:
    """FedRZO on the ReLU network."""
    data, model = network(s)
    return Task(
        fs.Minimization(model.loss),
        fs.FedRZO(gamma=s.gamma, eta=s.eta, H=s.H, batch_size=s.batch_size),
        data,
        model.init(s.seed),
        rounds=s.rounds,
        eval_every=max(1, s.rounds // s.evaluations),
        metrics=model.metrics,
        derive=lambda result: {"local_steps": s.H * result.history["round"]},
    )


EXPERIMENTS = [
    Experiment(
        name="fedrzo-relu",
        title="FedRZO on a ReLU network: local steps and smoothing",
        paper=f"{PAPER}, Figure 1",
        description=(
            "A network of one layer of ReLUs, trained by function values alone on even against odd digits: "
            "how the loss falls with the number H of local steps and the smoothing radius η."
        ),
        problem=PROBLEM,
        parameters={
            "data": "mnist",
            "clients": 5,
            "neurons": 4,
            "lam": 0.01,
            "gamma": 1e-5,
            "batch_size": 1,
            "rounds": 10_000,
            "evaluations": 50,
        },
        grid={"eta": [0.1, 0.01, 0.001], "H": [1, 5, 10, 20]},
        build=build,
        seeds=5,
        table=TableSpec(
            (Column("loss", better="low"), Column("accuracy", better="high", format=".1%")),
            rows=("H",),
            across="eta",
        ),
        plots=(
            PlotSpec("loss", lines=("H",), panels="eta", title="Training loss by rounds"),
            PlotSpec(
                "loss",
                x="local_steps",
                lines=("H",),
                panels="eta",
                title="Training loss by local steps",
                x_label="local steps of each client",
                log_x=False,
            ),
            PlotSpec("accuracy", lines=("H",), panels="eta", title="Test accuracy by rounds"),
        ),
        claims=PaperClaims(
            "Figure 1 and the text on it; no numbers are printed",
            statements=(
                Statement(
                    "The performance improves by using a larger number of local steps.",
                    "By rounds, yes: 0.529, 0.462, 0.393 and 0.349 after 10 000 rounds with H = 1, 5, 10 and "
                    "20. By local steps H makes no difference: 0.529, 0.529, 0.529 and 0.530 after 10 000.",
                    "reproduced",
                ),
                Statement(
                    "The scheme is robust in η, in terms of the original loss.",
                    "For a seed and an H the losses with η = 0.1, 0.01 and 0.001 differ by 0.0024 at most.",
                    "reproduced",
                ),
                Statement(
                    "A slight improvement in the early steps as η increases.",
                    "None: after 1000 rounds with H = 20 the loss with η = 0.1 is higher than with 0.001 by "
                    "0.00005 ± 0.00004.",
                    "not reproduced",
                ),
            ),
        ),
        needs=("mnist",),
        fallback={"data": "digits"},
        quick_seconds=13,
        full_time="53 s on one NVIDIA H200",
        quick={"rounds": 50, "evaluations": 5, "H": [1, 5], "eta": [0.1, 0.01], "seeds": 1},
    ),
    Experiment(
        name="fedrzo-cifar",
        title="FedRZO on ReLU networks of 4, 20 and 100 neurons",
        paper=f"{PAPER}, Figure 3",
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
        seeds=3,
        table=TableSpec(
            (Column("loss", better="low"), Column("accuracy", better="high", format=".1%")),
            rows=("neurons", "eta"),
            across="H",
        ),
        plots=(PlotSpec("loss", lines=("eta", "H"), panels="neurons"),),
        claims=PaperClaims(
            "Figure 3 and its caption; no numbers are printed",
            statements=(
                Statement(
                    "The method performs better with a smaller number of neurons.",
                    "The loss falls from 0.81 to 0.546 with 4 neurons, from 0.81 to 0.697 with 20 and from "
                    "1.54 to 1.509 with 100 (H = 20). Much of it at the start is the regulariser, about λN₁.",
                    "reproduced",
                ),
                Statement(
                    "It performs better with less communication frequency, given the rounds.",
                    "With 20 neurons 0.728, 0.704 and 0.697 for H = 1, 5 and 20; likewise with 4 and 100.",
                    "reproduced",
                ),
                Statement(
                    "The smaller η, the longer it takes to converge.",
                    "For a seed the losses with η = 0.1, 0.01 and 0.001 never differ by more than 0.0008.",
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
    ),
]
