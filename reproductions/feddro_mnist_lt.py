"""Robust objectives on long-tail MNIST: what they do for the rarest digits.

Not in the paper, whose image sets are CIFAR's. The page `feddro-mnist-lt` says how each step was chosen.
"""

import functools
from typing import Any

import jax
import numpy as np

import fedstrata as fs
from fedstrata.core.types import PyTree
from fedstrata.lab import Column, Experiment, PlotSpec, Setting, TableSpec, Task
from fedstrata.lab.experiments.images import falling, images, long_tail
from fedstrata.lab.experiments.metrics import mean_by_class
from fedstrata.models import Metric, mlp

CLASSES = 10


@functools.lru_cache(maxsize=8)
def clients_data(name: str, clients: int, seed: int, imbalance: float) -> fs.FederatedData:
    """Images of class c kept n·imbalance^{c/9} times, spread over clients."""
    train, test = images(name)
    sizes = np.maximum(falling(np.sum(train["y"] == 0), imbalance), 4)
    rare = long_tail(train, sizes, np.random.default_rng(seed))
    return fs.FederatedData.from_arrays(rare, clients, fs.Dirichlet(0.5), seed=seed, test=test)


@functools.cache
def problems(features: int, hidden: int, lam: float, chi2: float, level: float) -> dict[str, Any]:
    model = mlp(features, CLASSES, hidden)
    return {
        "average": fs.Minimization(model.loss),
        "KL": fs.dro.kl(model.loss, lam),
        "χ²": fs.dro.chi2(model.loss, chi2, nonnegative=True),
        "CVaR": fs.dro.cvar(model.loss, level),
    }


@functools.cache
def metrics(features: int, hidden: int) -> dict[str, Metric]:
    model = mlp(features, CLASSES, hidden)

    def by_class(x: PyTree, data: fs.FederatedData) -> Any:
        x = x.x if isinstance(x, fs.dro.Lifted) else x
        hits = jax.vmap(model.correct, in_axes=(None, 0))(x, data.test)
        return mean_by_class(hits, data.test["y"], CLASSES)

    return {
        "accuracy": lambda x, y, data: by_class(x, data).mean(),
        "worst_accuracy": lambda x, y, data: by_class(x, data).min(),
        "rare_accuracy": lambda x, y, data: by_class(x, data)[7:].mean(),
    }


STEPS = {"average": 0.1, "KL": 0.01, "χ²": 0.03, "CVaR": 0.01}


def build(s: Setting) -> Task:
    """One objective; the average by FedAvg, the others by FedDRO, with the same local steps."""
    data = clients_data(s.data, s.clients, s.seed, s.imbalance)
    features = data.train["x"].shape[-1]
    eta = STEPS[s.method]
    method = (
        fs.FedAvg(eta, H=s.I, batch_size=s.batch_size)
        if s.method == "average"
        else fs.FedDRO(eta, s.beta, I=s.I, batch_size=s.batch_size)
    )
    problem = problems(features, s.hidden, s.lam, s.chi2, s.level)[s.method]
    x0 = mlp(features, CLASSES, s.hidden).init(s.seed)
    return Task(
        problem, method, data,
        fs.dro.Lifted(x0, np.log(CLASSES)) if getattr(problem, "lifted", False) else x0, rounds=s.rounds,
        eval_every=max(1, s.rounds // 20), metrics=metrics(features, s.hidden),
        options={"weights": "size", "default_metrics": False},
    )  # fmt: skip


EXPERIMENT = Experiment(
    name="feddro-mnist-lt",
    title="Robust objectives on long-tail MNIST",
    paper="the robust objectives of Federated compositional optimization (FedDRO), section 2.1",
    description=(
        "A network with one hidden layer on MNIST whose digits' counts fall from 5923 to 59: the accuracy of "
        "the worst and the rarest digits when the average loss, KL, χ² or CVaR is minimised."
    ),
    problem="min of the mean loss, of λ log mean exp(ℓ/λ), the χ²-worst case, or the mean of the worst tenth",
    parameters={
        "data": "mnist", "clients": 10, "imbalance": 0.01, "hidden": 64, "beta": 0.5, "I": 4,
        "batch_size": 32, "lam": 1.0, "chi2": 1.0, "level": 0.1, "rounds": 1000,
    },
    grid={"method": ["average", "KL", "χ²", "CVaR"]},
    build=build,
    seeds=3,
    table=TableSpec(
        (
            Column("accuracy", title="mean over digits", better="high", format=".1%"),
            Column("worst_accuracy", title="worst digit", better="high", format=".1%"),
            Column("rare_accuracy", title="digits 7 to 9", better="high", format=".1%"),
        ),
    ),
    plots=(PlotSpec("worst_accuracy", y_label="accuracy of the worst digit"), PlotSpec("accuracy")),
    needs=("mnist",),
    fallback={"data": "digits"},
    quick={
        "data": "digits", "rounds": 20, "clients": 4, "hidden": 16, "batch_size": 8, "imbalance": 0.1,
        "method": ["average", "KL"], "seeds": 1,
    },
    quick_seconds=8,
    full_time="4 min on a core",
)  # fmt: skip
