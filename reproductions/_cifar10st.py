"""CIFAR10-ST, CIFAR100-ST and the methods compared on them, without what a bare GPU machine may lack.

They keep only the last 100 training images of each class in the first half of the classes, and all of the
others.
"""

import functools
from typing import Any

import jax
import numpy as np

import fedstrata as fs
from fedstrata.core.types import PyTree, Schedule
from fedstrata.data.storage import Placed
from fedstrata.lab.experiments.metrics import mean_by_class
from fedstrata.models import Metric, Model, cnn, resnet20

CLASSES = {"cifar100": 100}  # of a data set; of the others, ten


def keep_last(y: np.ndarray, rare: int = 5, keep: int = 100) -> np.ndarray:
    """The positions of the last images of the classes below ``rare``, and of all images of the others."""
    chosen = [np.flatnonzero(y == c)[-keep:] for c in range(rare)]
    return np.sort(np.concatenate([*chosen, np.flatnonzero(y >= rare)]))


def federated(arrays: dict[str, np.ndarray], clients: int, seed: int) -> fs.FederatedData:
    """Images spread evenly over clients; the images stay bytes."""
    order = np.random.default_rng(seed).permutation(len(arrays["y_train"]))
    size = len(order) // clients
    parts = [order[k * size : (k + 1) * size] for k in range(clients)]
    pick = [{"x": arrays["x_train"][p], "y": arrays["y_train"][p].astype(np.int32)} for p in parts]
    test = {"x": arrays["x_test"], "y": arrays["y_test"].astype(np.int32)}
    return fs.FederatedData.from_clients(pick, test=test)


@functools.cache
def network(name: str, classes: int = 10) -> Model:
    """``resnet20``, or ``cnn`` for trials."""
    return (resnet20 if name == "resnet20" else cnn)(outputs=classes)


@functools.cache
def problems(model: Model, lam: float, bound: float, classes: int = 10) -> dict[str, Any]:
    kl = fs.dro.kl(model.loss, lam)
    return {
        "average loss": fs.Minimization(model.loss),
        "FedDRO": kl,
        "DS-FedDRO": kl,
        "MBSGD": kl,
        "FastDRO": fs.dro.chi2_ball(model.loss, 1.0),
        "PDSGD": fs.fairness.bounded_group_loss(
            model.loss, classes, bound, group_of=lambda sample: sample["y"]
        ),
    }


def method(name: str, eta: float | Schedule, I: int, beta: float, batch_size: int) -> Any:
    """A method with its step; two-sided steps and the rest as the paper has them, where it says."""
    return {
        "average loss": lambda: fs.FedAvg(eta, H=I, batch_size=batch_size),
        "FedDRO": lambda: fs.FedDRO(eta, beta, I=I, batch_size=batch_size),
        "DS-FedDRO": lambda: fs.DSFedDRO(eta, beta, I, 1.3, 1.4, batch_size=batch_size),
        "MBSGD": lambda: fs.MBSGD(eta, batch_size=batch_size),
        "FastDRO": lambda: fs.FastDRO(eta, batch_size=batch_size),
        "PDSGD": lambda: fs.PDSGD(eta, 0.1, 1.0, constraints="all", batch_size=batch_size),
    }[name]()


@functools.cache
def metrics(model: Model, chunk: int = 500, classes: int = 10) -> dict[str, Metric]:
    """Accuracies on training and test images: overall, of the rare classes, of the worst class."""

    def hits(x: PyTree, samples: PyTree) -> jax.Array:
        x = x.x if isinstance(x, fs.dro.Lifted) else x
        return jax.lax.map(lambda sample: model.correct(x, sample), samples, batch_size=chunk)

    def train(x: PyTree, y: PyTree, data: Placed) -> jax.Array:
        return hits(x, data.train).mean()

    def rare(x: PyTree, y: PyTree, data: Placed) -> jax.Array:
        return hits(x, data.test).mean(where=data.test["y"] < classes // 2)

    def worst(x: PyTree, y: PyTree, data: Placed) -> jax.Array:
        return mean_by_class(hits(x, data.test), data.test["y"], classes).min()

    return {
        "train_accuracy": train,
        "accuracy": lambda x, y, data: hits(x, data.test).mean(),
        "rare_accuracy": rare,
        "worst_accuracy": worst,
    }
