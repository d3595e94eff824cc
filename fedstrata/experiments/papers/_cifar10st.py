"""CIFAR10-ST and the methods that are compared on it, without what a bare GPU machine may lack.

CIFAR10-ST keeps only the last 100 training images of each of the classes 0 to 4, and all 5000 of the others.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedstrata as fs
from fedstrata.core.types import PyTree
from fedstrata.experiments.resnet import Network, resnet, small_cnn

CLASSES = 10


def keep_last(y: np.ndarray, classes: tuple[int, ...] = (0, 1, 2, 3, 4), keep: int = 100) -> np.ndarray:
    """The positions of CIFAR10-ST in CIFAR-10's training images."""
    chosen = [
        np.flatnonzero(y == c)[-keep:] if c in classes else np.flatnonzero(y == c) for c in range(CLASSES)
    ]
    return np.sort(np.concatenate(chosen))


def federated(arrays: dict[str, np.ndarray], clients: int, seed: int) -> fs.FederatedData:
    """CIFAR10-ST's images spread evenly over clients; the images stay bytes."""
    order = np.random.default_rng(seed).permutation(len(arrays["y_train"]))
    size = len(order) // clients
    parts = [order[k * size : (k + 1) * size] for k in range(clients)]
    pick = [{"x": arrays["x_train"][p], "y": arrays["y_train"][p].astype(np.int32)} for p in parts]
    test = {"x": arrays["x_test"], "y": arrays["y_test"].astype(np.int32)}
    return fs.FederatedData.from_clients(pick, test=test)


@functools.cache
def network(name: str, conv: str = "lax") -> Network:
    """``resnet20``, or ``cnn`` for trials."""
    return resnet(conv=conv) if name == "resnet20" else small_cnn(conv=conv)


@functools.cache
def problems(model: Network, lam: float, bound: float) -> dict[str, Any]:
    """What each method solves."""
    kl = fs.dro.kl(model.loss, lam)
    return {
        "average loss": fs.Minimization(model.loss),
        "FedDRO": kl,
        "DS-FedDRO": kl,
        "MBSGD": kl,
        "FastDRO": fs.dro.chi2_ball(model.loss, 1.0),
        "PDSGD": fs.fairness.bounded_group_loss(
            model.loss, CLASSES, bound, group_of=lambda sample: sample["y"]
        ),
    }


def method(name: str, eta: float, I: int, beta: float, batch_size: int) -> Any:
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
def metrics(model: Network, chunk: int = 500) -> dict[str, Any]:
    """Accuracies on training and test images: overall, of the rare classes, of the worst class."""

    def model_of(x: PyTree) -> Any:
        return x.x if isinstance(x, fs.dro.Lifted) else x

    def by_class(x: PyTree, samples: PyTree) -> Any:
        number = samples["y"].shape[0]
        padded = -number % chunk
        places = jnp.arange(number + padded) % number
        rows = jax.tree.map(lambda leaf: leaf[places].reshape(-1, chunk, *leaf.shape[1:]), samples)
        real = (jnp.arange(number + padded) < number).reshape(-1, chunk)

        def block(pair: Any) -> Any:
            part, keep = pair
            hits = jax.vmap(model.correct, in_axes=(None, 0))(model_of(x), part)
            both = jnp.stack([jnp.where(keep, hits, 0.0), keep.astype(hits.dtype)], axis=1)
            return jax.ops.segment_sum(both, part["y"], CLASSES)

        hits, seen = jax.lax.map(block, (rows, real)).sum(0).T
        return hits, jnp.maximum(seen, 1)

    def test(x: PyTree, data: Any) -> Any:
        return by_class(x, data.test)

    def train(x: PyTree, y: PyTree, data: Any) -> Any:
        hits, seen = by_class(x, data.train)
        return hits.sum() / seen.sum()

    def ratio(hits: Any, seen: Any) -> Any:
        return hits.sum() / seen.sum()

    return {
        "train_accuracy": train,
        "accuracy": lambda x, y, data: ratio(*test(x, data)),
        "rare_accuracy": lambda x, y, data: ratio(*(part[:5] for part in test(x, data))),
        "worst_accuracy": lambda x, y, data: jnp.divide(*test(x, data)).min(),
    }
