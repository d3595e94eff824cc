"""The demo: hospitals learn how strongly to regularise, without showing their patients' data to anyone.

Hyper-parameter learning as in section 6.2 of the FedRZO paper: client i has its own ℓ2 weight λ_i = exp(x_i),
chosen so that the model trained with all weights does well on all clients' validation data. Only the sum of
the λ_i matters to the trained model, so that the exact objective and its minimum are known (`_regularised`).
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

import fedstrata as fs
from fedstrata.core.storage import Placed
from fedstrata.core.types import PyTree
from fedstrata.experiments.base import Experiment, Setting, Task
from fedstrata.experiments.models import logistic_loss, sign
from fedstrata.experiments.papers._regularised import Exact
from fedstrata.report import Column, PlotSpec, TableSpec


def upper(x: PyTree, y: PyTree, sample: PyTree) -> Any:
    """The logistic loss."""
    return logistic_loss(y, sample)


def lower(x: PyTree, y: PyTree, sample: PyTree) -> Any:
    """The same, with the client's regulariser."""
    return upper(x, y, sample) + jnp.exp(x[sample["client"]]) / 2 * jnp.vdot(y, y)


def accuracy(x: PyTree, y: PyTree, data: Placed) -> Any:
    """On the test data."""
    return (sign(data.test["y"]) * (data.test["x"] @ y) > 0).mean()


def weight(x: PyTree, y: PyTree) -> Any:
    """The mean of the λ_i."""
    return jnp.exp(x).mean()


PROBLEM = fs.Bilevel(upper, lower)


@functools.cache
def hospitals(clients: int, seed: int) -> fs.FederatedData:
    """The breast cancer data, half of each client's samples for validation."""
    return fs.data.breast_cancer(clients, valid_fraction=0.5, seed=seed).with_client_index()


@functools.cache
def exact(clients: int, seed: int) -> Exact:
    """The implicit objective for the data of a seed."""
    return Exact(hospitals(clients, seed), np.exp(-9), np.exp(1))


def build(s: Setting) -> Task:
    """One of the two methods, from λ_i = 1."""
    methods = {
        "FedRZOBilevel": fs.FedRZOBilevel(
            gamma=s.gamma,
            eta=0.1,
            H=5,
            batch_size=None,
            lower=fs.FedAvg(0.3, H=3),
            lower_rounds=5,
            warm_start=True,
            two_sided=True,
            messages="scalars",
        ),
        "FedMSA": fs.FedMSA(alpha=s.alpha, beta=0.3, K=5, clients=s.clients),
    }
    data = hospitals(s.clients, s.seed)

    def judge(result: fs.Result) -> dict[str, list[float]]:
        F = exact(s.clients, s.seed)
        return {"gap": [F(lam) - F.best for lam in result.history["weight"]]}

    return Task(
        PROBLEM,
        methods[s.method],
        data,
        jnp.zeros(s.clients),
        y0=jnp.zeros(data.train["x"].shape[-1]),
        rounds=s.rounds,
        eval_every=max(1, s.rounds // 40),
        metrics={"weight": weight, "accuracy": accuracy},
        derive=judge,
    )


GAP = (
    "The gap is the validation loss of the model trained to its optimum with the weights found so far, less "
    "the smallest that any weights give."
)

EXPERIMENT = Experiment(
    name="demo",
    title="Five hospitals learn how strongly to regularise",
    paper="Qiu, Shanbhag, Yousefian 2024, section 6.2 (the problem; not their data)",
    description=(
        "A bilevel problem on the Wisconsin breast cancer data. Lower level: logistic regression on the "
        "hospitals' training data, with an ℓ2 weight for each hospital. Upper level: the weights that do "
        "best on their validation data. FedRZOBilevel needs only values of the upper level, FedMSA "
        "derivatives of both."
    ),
    problem=(
        "min over x of 1/m Σ_i mean over client i's validation data of log(1 + exp(−v uᵀy(x))), "
        "y(x) = argmin over y of 1/m Σ_i (mean over its training data of the same loss + exp(x_i)/2 ‖y‖²)"
    ),
    grid={"method": ["FedRZOBilevel", "FedMSA"]},
    parameters={"clients": 5, "rounds": 200, "gamma": 4.0, "alpha": 1.0},
    build=build,
    seeds=5,
    table=TableSpec(
        (
            Column("gap", better="low", format=".0e"),
            Column("accuracy", format=".1%"),
            Column("exchanges", "ledger"),
            Column("bytes_up", "ledger", "uploaded", format="bytes", better="low"),
        )
    ),
    plots=(
        PlotSpec("gap", log_y=True, title="How far from the best weights?", y_label="gap", caption=GAP),
        PlotSpec("gap", x="bytes_up", log_y=True, title="And for how many bytes?"),
        PlotSpec("weight", log_y=True, title="The weights on their way", y_label="mean weight λ"),
    ),
    notes=(
        f"{GAP} λ is the mean of the weights.\n\n"
        "Each seed splits the data anew: a fifth for the test, the rest evenly over the hospitals, half of "
        "it for validation. Both methods start from λ = 1, far too strong. The step sizes were chosen on "
        "seed 0, from two or three for each method; FedRZOBilevel's lower level was chosen too, from "
        "four. An even split was taken after a skewed one, where local steps bias the lower level."
    ),
    quick={"rounds": 40, "seeds": 1},
    quick_seconds=10,
    full_time="11 s on two cores",
)
