"""FedDRO on CIFAR10-ST, images of ten classes of which five are rare: ResNet20 on eight clients.

Figures 1, 2 and 4 of the paper; the page `feddro-cifar10st` says what it leaves open. Every method makes the
same number of local steps, and the step falls to a tenth after three quarters of them.
"""

import functools
from typing import Any

import numpy as np

import fedstrata as fs
from fedstrata.lab import Column, Experiment, PlotSpec, Setting, TableSpec, Task
from reproductions import _cifar10st as st
from reproductions._pages import claims
from reproductions._schedules import dropped


@functools.lru_cache(maxsize=4)
def data_of(name: str, clients: int, seed: int, limit: int | None) -> fs.FederatedData:
    """CIFAR10-ST or CIFAR100-ST, or digits made rare in the same way; ``limit`` images of a class at most."""
    classes = st.CLASSES.get(name, 10)
    if name != "digits":
        arrays = fs.data.load(name)
        keep = 100
    else:
        digits = fs.data.load("digits")
        x = np.repeat((digits["x"] * 15).astype(np.uint8)[..., None], 3, axis=-1)
        arrays = {
            "x_train": x[:1400],
            "y_train": digits["y"][:1400],
            "x_test": x[1400:],
            "y_test": digits["y"][1400:],
        }
        keep = 10
    chosen = st.keep_last(arrays["y_train"], classes // 2, keep)
    arrays = {**arrays, "x_train": arrays["x_train"][chosen], "y_train": arrays["y_train"][chosen]}
    if limit is not None:
        for part in ("train", "test"):
            few = st.keep_last(arrays[f"y_{part}"], classes, limit)
            arrays |= {f"{name}_{part}": arrays[f"{name}_{part}"][few] for name in ("x", "y")}
    return st.federated(arrays, clients, seed)


def build(s: Setting) -> Task:
    classes = st.CLASSES.get(s.data, 10)
    data, model = data_of(s.data, s.clients, s.seed, s.limit), st.network(s.network, classes)
    rounds = s.steps // s.I
    return Task(
        st.problems(model, s.lam, s.bound, classes)[s.method],
        st.method(s.method, dropped(s.eta, rounds * 3 // 4), s.I, s.beta, s.batch_size), data,
        model.init(s.seed), rounds=rounds, eval_every=max(1, rounds // s.evaluations),
        metrics=st.metrics(model, classes=classes), options={"default_metrics": False},
    )  # fmt: skip


ETAS = [0.001, 0.01, 0.05, 0.1]
LOOK: dict[str, Any] = {"lines": ("label", "I"), "panels": "eta"}

EXPERIMENT = Experiment(
    name="feddro-cifar10st",
    title="FedDRO on CIFAR10-ST: rare classes, ResNet20",
    paper="Federated compositional optimization (FedDRO), section 6, Figures 1, 2 and 4",
    description=(
        "ResNet20 on CIFAR-10 with 100 training images of each of the classes 0 to 4: FedDRO and DS-FedDRO "
        "against FastDRO, PDSGD, MBSGD and the average loss, and with more local steps I."
    ),
    problem="min λ log mean exp(ℓ/λ), and the other methods' own robust objectives",
    parameters={
        "data": "cifar10", "network": "resnet20", "clients": 8, "batch_size": 16, "lam": 1.0, "beta": 0.2,
        "bound": 0.5, "steps": 4000, "evaluations": 8, "limit": None,
    },
    grid=[
        {"method": ["average loss", "FastDRO", "PDSGD", "MBSGD"], "I": [1], "eta": ETAS},
        {"method": ["FedDRO", "DS-FedDRO"], "I": [1, 4, 16], "eta": ETAS},
    ],
    build=build,
    seeds=3,
    table=TableSpec(
        (
            Column("train_accuracy", better="high", format=".1%"),
            Column("accuracy", title="test accuracy", better="high", format=".1%"),
            Column("rare_accuracy", title="of rare classes", better="high", format=".1%"),
            Column("worst_accuracy", title="of the worst class", better="high", format=".1%"),
            Column("bytes_up", reduce="ledger", format="bytes"),
        ),
        rows=("eta", "label", "I"),
    ),
    plots=(
        PlotSpec("accuracy", title="Test accuracy by rounds", **LOOK),
        PlotSpec("train_accuracy", title="Training accuracy by rounds", **LOOK),
        PlotSpec("accuracy", x="exchanges", title="Test accuracy by exchanges", **LOOK),
        PlotSpec("accuracy", x="bytes_up", title="Test accuracy by bytes", name="by-bytes", **LOOK),
    ),
    claims=claims("feddro-cifar10st", "Figures 1, 2 and 4; 4000 steps, four η and three seeds"),
    needs=("cifar10",),
    fallback={"data": "digits"},
    quick={
        "network": "cnn", "limit": 20, "steps": 16, "evaluations": 2, "batch_size": 4, "clients": 2,
        "method": ["FedDRO", "MBSGD"], "I": [1], "eta": [0.05], "seeds": 1,
    },
    quick_seconds=10,
    full_time="about half an hour on an H200 that ten processes share (--one-by-one)",
)  # fmt: skip
