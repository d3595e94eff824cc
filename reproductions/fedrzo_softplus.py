"""FedRZO on a ReLU network against gradient methods on its smoothed form, by the loss of the ReLU network.

Section 6.1 of the paper, Figure 2. FedAvg, FedProx, FedMSPP and Scaffnew train with the softplus
ln(1 + exp(βt))/β in place of max(0, t). The page `fedrzo-softplus` says what the paper leaves open.
"""

import functools
from collections.abc import Callable
from typing import Any

import fedstrata as fs
from fedstrata.lab import Column, Experiment, PlotSpec, Setting, TableSpec, Task
from fedstrata.lab.experiments.metrics import train_mean
from fedstrata.models import relu_network
from reproductions._pages import claims
from reproductions._relu import PROBLEM, network

METHODS: dict[str, Callable[[Setting], fs.Method]] = {
    "FedRZO": lambda s: fs.FedRZO(gamma=s.gamma, eta=s.eta, H=s.H, batch_size=1),
    "FedAvg": lambda s: fs.FedAvg(gamma=s.gamma, H=s.H, batch_size=1),
    "FedProx": lambda s: fs.FedProx(gamma=s.gamma, mu=s.mu, H=s.H, batch_size=1),
    "FedMSPP": lambda s: fs.FedMSPP(gamma=s.gamma, eta=1 / s.mu, H=s.H, batch_size=s.H),
    "Scaffnew": lambda s: fs.Scaffnew(gamma=s.gamma, p=1 / s.H, batch_size=1),
}


@functools.cache
def judged(features: int, neurons: int, lam: float) -> dict[str, Any]:
    """The training loss and the test accuracy as a ReLU network."""
    model = relu_network(features, neurons, lam)
    return {"relu_loss": train_mean(model.loss), "accuracy": model.metrics["accuracy"]}


def build(s: Setting) -> Task:
    """A method; FedRZO on the ReLU network, the others with softplus."""
    data, model = network(s, s.beta)
    return Task(
        fs.Minimization(model.loss), METHODS[s.method](s), data, model.init(s.seed), rounds=s.rounds,
        eval_every=max(1, s.rounds // s.evaluations),
        metrics=judged(data.train["x"].shape[-1], s.neurons, s.lam), options={"default_metrics": False},
    )  # fmt: skip


EXPERIMENT = Experiment(
    name="fedrzo-softplus",
    title="FedRZO on a ReLU network, and gradient methods on a smoothed one",
    paper="Qiu, Shanbhag, Yousefian 2024, section 6.1, Figure 2",
    description=(
        "Gradient methods need a smooth rectifier; how much does it matter which? All are judged by the loss "
        "of the ReLU network."
    ),
    problem=PROBLEM + "; for the gradient methods σ(t) = ln(1 + exp(βt))/β",
    parameters={
        "data": "mnist", "clients": 5, "neurons": 4, "lam": 0.01, "gamma": 1e-4, "eta": 0.01, "mu": 0.1,
        "H": 20, "rounds": 1_000, "evaluations": 50,
    },
    grid=[
        {"method": ["FedRZO"]},
        {"method": ["FedAvg", "FedProx", "FedMSPP", "Scaffnew"], "beta": [1.0, 10.0, 100.0]},
    ],
    build=build,
    seeds=5,
    table=TableSpec(
        (
            Column("relu_loss", title="ReLU loss", better="low"),
            Column("accuracy", better="high", format=".1%"),
            Column("bytes_up", "ledger", "uploaded", format="bytes"),
        ),
        rows=("label", "beta"),
    ),
    plots=(
        PlotSpec("relu_loss", lines=("beta",), panels="label", y_label="training loss as a ReLU network"),
        PlotSpec("accuracy", lines=("beta",), panels="label", y_label="test accuracy as a ReLU network"),
    ),
    claims=claims("fedrzo-softplus", "Figure 2 and the text on it; no numbers are printed"),
    needs=("mnist",),
    fallback={"data": "digits"},
    quick_seconds=15,
    full_time="62 s on one NVIDIA H200",
    quick={"data": "digits", "rounds": 20, "evaluations": 5, "H": 5, "beta": [10.0], "seeds": 1},
)  # fmt: skip
