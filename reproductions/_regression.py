"""Regression with more features than samples, on which the selection papers choose among all that fit."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedstrata as fs
from fedstrata.core.types import PyTree
from fedstrata.data.storage import Placed
from fedstrata.lab.experiments.data import federated


class Regression(NamedTuple):
    """Under-determined regression, spread over clients.

    Attributes:
        data: samples ``{"x": row, "y": number}``, times the root of the client's size: its mean over samples
            is then the paper's sum.
        A: all training rows, stacked.
        b: their targets.
        x0: a start with a component in the null space of A.
        curvatures: the clients' L_i.
    """

    data: fs.FederatedData
    A: np.ndarray
    b: np.ndarray
    x0: np.ndarray
    curvatures: np.ndarray


@functools.lru_cache(maxsize=8)
def regression(name: str, clients: int, seed: int, start: float = 0.1) -> Regression:
    """The training half of a data set.

    Args:
        name: ``"montevideo_bus"``, ``"wikimaths"`` or ``"synthetic"``.
        clients: how many.
        seed: of the split and the start.
        start: the standard deviation of the start's entries.
    """
    if name == "synthetic":
        train, test = _synthetic(seed, rows=20 * clients)
        data = fs.FederatedData.from_arrays(train, clients, seed=seed, test=test)
    else:
        data = federated(name, clients, seed=seed)
    rows = [jax.tree.map(lambda leaf: np.asarray(leaf, float), data.client(i)) for i in range(clients)]
    summed = [{key: value * len(part["y"]) ** 0.5 for key, value in part.items()} for part in rows]
    curvatures = np.array([np.linalg.norm(part["x"], 2) ** 2 for part in rows])
    test = {key: np.asarray(value, float) for key, value in data.test.items()}
    A, b = (np.concatenate([part[key] for part in rows]) for key in "xy")
    x0 = np.random.default_rng((seed, 2)).normal(scale=start, size=A.shape[1:])
    return Regression(fs.FederatedData.from_clients(summed, test=test), A, b, x0, curvatures)


def _synthetic(seed: int, rows: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Rows with a few heavy directions and a sparse truth, for machines without the real data."""
    rng = np.random.default_rng((seed, 3))
    n = 2 * rows
    x = rng.normal(size=(n, n)) @ (rng.normal(size=(n, n)) * np.linspace(1, 0.2, n)) / rows
    y = x @ np.where(rng.random(n) < 0.05, rng.normal(size=n), 0)
    return {"x": x[:rows], "y": y[:rows]}, {"x": x[rows:], "y": y[rows:]}


def residual(x: PyTree, sample: PyTree) -> Any:
    """½(uᵀx − v)²."""
    return (sample["x"] @ x - sample["y"]) ** 2 / 2


def held_out(x: PyTree, y: PyTree, data: Placed | fs.FederatedData) -> Any:
    """The mean squared error on held-out rows, relative to the targets' mean square."""
    test = data.test
    return ((test["x"] @ x - test["y"]) ** 2).mean() / (test["y"] ** 2).mean()


def nonzeros(x: PyTree, y: PyTree) -> Any:
    """Entries larger than a thousandth of the largest."""
    size = jnp.abs(x)
    return (size > 1e-3 * size.max()).sum().astype(float)


@functools.cache
def envelope(penalty: fs.prox.Regularizer, mu: float) -> Any:
    """The metric f: a penalty's envelope."""
    return lambda x, y: penalty.envelope(x, mu)


def change(result: fs.Result) -> dict[str, np.ndarray]:
    """|f(x̂_r) − f(x̂_{r−1})|, with f = 0 before the start."""
    return {"change": np.abs(np.diff(result.history["f"], prepend=0.0))}
