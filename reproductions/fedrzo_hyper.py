"""FedRZO for bilevel problems: how strongly each client should regularise.

Section 6.2 of the paper, Figure 4 (left); the page `fedrzo-hyper` says what it leaves open. The printed sums
over a client's samples are kept: x_i is a weight against the sum of the N losses of its training data.

The trained model depends on the mean of the x_i alone, so the exact objective is known (`_regularised`), by
which the methods are judged.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedstrata as fs
from fedstrata.core.types import Function, PyTree
from fedstrata.lab import Column, Experiment, PlotSpec, Setting, TableSpec, Task
from fedstrata.lab.experiments.data import federated
from fedstrata.lab.experiments.metrics import of_second
from fedstrata.models.model import test_mean
from fedstrata.models.networks import sign
from reproductions._pages import claims
from reproductions._regularised import Exact

L = 3.0  # of a client's lower level on centred pixels: a quarter of the largest eigenvalue, which is 2.7 here


@functools.cache
def clients_data(name: str, clients: int, train: int, valid: int, seed: int) -> fs.FederatedData:
    """Each client's first samples for training, the next for validation; inputs are centred."""
    data = federated(name, clients, seed=seed).with_client_index()
    centre = data.train["x"].mean(0)

    def centred(samples: PyTree) -> Any:
        return {**samples, "x": samples["x"] - centre}

    def part(first: int, last: int) -> list[Any]:
        own = map(data.client, range(clients))
        return [centred(jax.tree.map(lambda leaf: leaf[first:last], samples)) for samples in own]

    if data.sizes.min() < train + valid:
        raise ValueError(f"{name} has fewer than {train + valid} samples for each of {clients} clients.")
    return fs.FederatedData.from_clients(
        part(0, train), valid=part(train, train + valid), test=centred(data.test)
    )


def logistic_loss(y: PyTree, sample: PyTree) -> Any:
    return jax.nn.softplus(-sign(sample["y"]) * (sample["x"] @ y))


def correct(y: PyTree, sample: PyTree) -> Any:
    return (sign(sample["y"]) * (sample["x"] @ y) > 0).astype(float)


@functools.cache
def problem(train: int, valid: int, mu: float) -> fs.Bilevel:
    """The printed problem; the lower level is divided by N, which does not move its minimiser.

    Iterates leave X by O(η), and a weight below zero would leave no minimiser: outside X it is at least μ/2.
    """

    def upper(x: PyTree, y: PyTree, sample: PyTree) -> Any:
        return valid * logistic_loss(y, sample)

    def lower(x: PyTree, y: PyTree, sample: PyTree) -> Any:
        weight = jnp.maximum(x[sample["client"]], mu / 2)
        return logistic_loss(y, sample) + weight / train / 2 * jnp.vdot(y, y)

    return fs.Bilevel(upper, lower, project_x=fs.sets.Box(mu, np.inf))


METRICS: dict[str, Function] = {
    "weight": lambda x, y: x.mean(),
    "test_loss": of_second(test_mean(logistic_loss)),
    "accuracy": of_second(test_mean(correct)),
}


def build(s: Setting) -> Task:
    data = clients_data(s.data, s.clients, s.train, s.valid, s.seed)
    mu_h = s.mu / s.train / 2
    solver: dict[str, Any] = {"lower": s.lower, "mu_h": mu_h, "kappa_h": L / mu_h}
    if s.lower == "parallel":
        solver = {"lower": fs.FedAC(1 / L, mu_h), "lower_rounds": s.lower_rounds}
    rounds = s.rounds if s.lower == "parallel" else min(s.rounds, s.rule_rounds)
    method = fs.FedRZOBilevel(
        s.gamma, s.eta, s.H, batch_size=s.batch_size, lower_batch_size=s.lower_batch_size, **solver
    )

    def judge(result: fs.Result) -> dict[str, Any]:
        F = Exact(data, s.mu / s.train, 1e3 / s.train)
        weights = np.maximum(result.history["weight"], s.mu)
        gaps = [F(weight / s.train) - F.best for weight in weights]
        return {"gap": gaps, "best_weight": s.train * F.weight}

    return Task(
        problem(s.train, s.valid, s.mu), method, data, jnp.full(s.clients, s.start),
        y0=jnp.zeros(data.train["x"].shape[-1]), rounds=rounds, eval_every=max(1, rounds // s.evaluations),
        metrics=METRICS, derive=judge,
    )  # fmt: skip


GAP = (
    "The gap is the mean validation loss of the model trained to its optimum with the weights found so far, "
    "less the smallest that weights x ≥ μ can give."
)

EXPERIMENT = Experiment(
    name="fedrzo-hyper",
    title="FedRZO learns how strongly each client should regularise",
    paper="Qiu, Shanbhag, Yousefian 2024, section 6.2, Figure 4 (left)",
    description=(
        "Logistic regression on even against odd digits below, its ℓ2 weights above: how the loss falls with "
        "the number H of local steps, and what the lower level's solver has to do with it."
    ),
    problem=(
        "min over x ≥ μ of 1/m Σ_i Σ over client i's validation data of log(1 + exp(−v uᵀy(x))), "
        "y(x) = argmin over y of 1/m Σ_i (Σ over its training data of the same loss + x_i/2 ‖y‖²)"
    ),
    parameters={
        "data": "mnist", "clients": 5, "train": 20, "valid": 200, "mu": 0.4, "gamma": 0.01, "eta": 0.1,
        "batch_size": 20, "lower_batch_size": None, "lower_rounds": 60, "start": 5.0, "rounds": 100,
        "rule_rounds": 50, "evaluations": 50,
    },
    grid=[{"lower": ["parallel"], "H": [1, 5, 10, 20]}, {"lower": ["local_sgd", "lfd", "fedac"], "H": [20]}],
    build=build,
    seeds=5,
    table=TableSpec(
        (
            Column("gap", better="low", format=".4f"),
            Column("weight", title="weight x̄", format=".2f"),
            Column("test_loss", title="test loss", better="low", format=".4f"),
            Column("accuracy", better="high", format=".1%"),
            Column("exchanges", "ledger"),
            Column("bytes_up", "ledger", "uploaded", format="bytes"),
        ),
        rows=("lower", "H"),
    ),
    plots=(
        PlotSpec("test_loss", lines=("H",), panels="lower", title="Loss on test data (Figure 4, left)"),
        PlotSpec("gap", lines=("H",), panels="lower", log_y=True, caption=GAP),
        PlotSpec("gap", x="exchanges", lines=("H", "lower"), log_x=True, log_y=True, caption=GAP),
        PlotSpec("weight", lines=("H",), panels="lower", log_y=True, y_label="mean weight x̄"),
    ),
    claims=claims("fedrzo-hyper", "Figure 4 (left); no numbers are printed"),
    notes=(
        f"{GAP} `parallel` is FedAC with an average after every step; `local_sgd`, `fedac` and `lfd` are the "
        "paper's rules: T = 2a ln a local steps a round, a > 4κ: some 17,000 here, and few averages. "
        "They get 50 rounds. The upper level does not look at x itself, so H local steps are one step of H "
        "times the size, up to the samples drawn: more of them is more speed, as in the figure."
    ),
    needs=("mnist",),
    full_time="5 minutes on one core",
    fallback={"data": "digits", "valid": 100},
    quick={"rounds": 20, "evaluations": 10, "H": [1, 10], "lower": ["parallel"], "seeds": 1},
)  # fmt: skip
