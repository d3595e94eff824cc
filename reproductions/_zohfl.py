"""ZO-HFL on images: data, problems and methods of `zohfl-table1` and `zohfl-convergence`.

The pages of the two have the paper's settings, and say what it leaves open. A run is 149,000 small local
steps (τ = 20), which leave a GPU idle: side by side (`--together`, the default there) one program solves
both data sets of 28×28 pixels, all seeds, FedAvg and FedProx, with and without the server's data.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedstrata as fs
from fedstrata.core.types import PyTree
from fedstrata.data.storage import Placed
from fedstrata.lab import Column, Setting, Task
from fedstrata.methods.zohfl import RootDecay, RootGrowth

Sample = dict[str, Any]

PROBLEM = "min_x f₁(x) + λ/2 Σ_i ρ_i ‖x − y_i(x)‖²,  y_i(x) = argmin_y CE_i(y) + μ/2 ‖x − y‖²"
ACCURACIES = (
    Column("accuracy", title="accuracy", format=".2%", better="high"),
    Column("personal_accuracy", title="of personal models", format=".2%", better="high", optional=True),
)

LEVELS = {"mild": (1000.0, 0.9), "moderate": (1.0, 0.5), "extreme": (0.1, 0.1)}  # α; β, who take part
DATA = ("mnist", "fashion_mnist", "cifar10")
BASELINES = ("FedAvg", "FedProx", "SCAFFOLD")
SHARED = " + server data"
PARAMETERS: dict[str, Any] = {
    "clients": 10,
    "rounds": 500,
    "evaluations": 20,
    "gamma": 0.01,
    "gamma_client": 0.1,
    "eta": 0.1,
    "lam": 1.0,
    "mu": 1.0,
    "batch_size": 32,
    "mu_prox": 0.1,
    "pixels": "standardised",  # or "unit"
    "baseline_steps": "falling",  # γ_r like ZO-HFL's, or "constant"
}


@functools.lru_cache(maxsize=3)
def pooled(name: str, pixels: str = "standardised") -> tuple[dict[str, np.ndarray], tuple[float, float]]:
    """All images of a data set as bytes, their labels, and what to subtract from pixels and to divide by.

    That is the mean and the deviation of all pixels, or what makes them numbers in [0, 1].
    """
    arrays = fs.data.load(name)
    if name != "digits":
        arrays = {k: np.concatenate([arrays[f"{k}_train"], arrays[f"{k}_test"]]) for k in "xy"}
    x = arrays["x"].reshape(len(arrays["y"]), -1).astype(np.uint8)
    scale = (0.0, float(x.max())) if pixels == "unit" else (x.mean(dtype=float), x.std(dtype=float))
    return {"x": x, "y": arrays["y"].astype(np.int32)}, scale


@functools.lru_cache(maxsize=9)  # of a seed and a level: three data sets, three ways
def split(
    name: str, alpha: float, seed: int, clients: int, server: str = "apart", pixels: str = "standardised"
) -> fs.FederatedData:
    """A tenth for the test, 30 % of the rest for the server, all else over the clients by Dirichlet(α).

    Args:
        name: the data set.
        alpha: α.
        seed: of the split.
        clients: how many.
        server: where the server's data is: ``"apart"``; ``"shared"``, when every client has an even part of
            it as well; ``"alone"``, when there is nothing else, and one client holds it.
        pixels: the scale of the images, as in `PARAMETERS`.
    """
    arrays, scale = pooled(name, pixels)
    order = np.random.default_rng(seed).permutation(len(arrays["y"]))
    held_out = len(order) // 10
    test = {key: array[order[:held_out]] for key, array in arrays.items()}
    rest = {key: array[order[held_out:]] for key, array in arrays.items()}
    partition = fs.Dirichlet(alpha, min_size=10)
    data = fs.FederatedData.from_arrays(rest, clients, partition, server_fraction=0.3, seed=seed, test=test)
    if server == "apart":
        return data.scaled(x=scale)
    own = [data.server]
    if server == "shared":
        own = [
            {key: np.concatenate([array, data.server[key][i::clients]]) for key, array in mine.items()}
            for i, mine in enumerate(map(data.client, range(clients)))
        ]
    return fs.FederatedData.from_clients(own, server=data.server, test=test).scaled(x=scale)


def scores(x: jax.Array, sample: Sample) -> jax.Array:
    """Of every class, for a sample or for many; x has a row for each class."""
    return sample["x"] @ x.T


def cross_entropy(x: jax.Array, sample: Sample) -> jax.Array:
    """Of softmax regression; for a sample, or for each of many."""
    s = scores(x, sample)
    # A product with 0s and 1s, since the derivative of indexing is a scatter.
    own = (s * jax.nn.one_hot(sample["y"], s.shape[-1])).sum(-1)
    return jax.nn.logsumexp(s, axis=-1) - own


@functools.cache
def personalized(clients: int, lam: float, mu: float) -> fs.Personalized:
    """f₂ = λ/2 Σ ρ_i ‖x − y_i‖², written as the mean over the clients of what each adds."""

    def coupling(x: jax.Array, y: jax.Array, client: Any) -> jax.Array:
        return lam / 2 * clients * client.fraction * ((x - y) ** 2).sum()

    def client(x: jax.Array, y: jax.Array, sample: Sample) -> jax.Array:
        return cross_entropy(y, sample) + mu / 2 * ((x - y) ** 2).sum()

    return fs.Personalized(cross_entropy, coupling, client)


MINIMIZATION = fs.Minimization(cross_entropy)


def accuracy(x: jax.Array, y: PyTree, data: Placed) -> jax.Array:
    return (scores(x, data.test).argmax(1) == data.test["y"]).mean()


def loss_on_test(x: jax.Array, y: PyTree, data: Placed) -> jax.Array:
    """Of the global model."""
    return cross_entropy(x, data.test).mean()


def loss_on_server(x: jax.Array, y: PyTree, data: Placed) -> jax.Array:
    """f₁: of the global model, on the server's data."""
    return cross_entropy(x, data.server).mean()


METRICS = {"accuracy": accuracy, "test_loss": loss_on_test, "global_loss": loss_on_server}


def personal_accuracy(x: jax.Array, y: jax.Array, data: Placed) -> jax.Array:
    """Of the clients' own models, each on test images in its own mix of classes, weighted by their sizes.

    A split by labels leaves the images of a class alike on all clients, so client i's accuracy is that on the
    test images of each class, averaged with its classes' parts. With one model for all it is `accuracy`, up
    to the difference between the classes' parts in training and test.
    """
    owner = jnp.repeat(jnp.arange(len(y)), data.sizes, total_repeat_length=len(data.train["y"]))
    parts = jnp.zeros((len(y), 10)).at[owner, data.train["y"]].add(1) / len(owner)  # ρ_i π_ic
    of_class = jax.nn.one_hot(data.test["y"], 10)

    def by_class(model: jax.Array) -> jax.Array:
        hits = scores(model, data.test).argmax(1) == data.test["y"]
        return hits @ of_class / jnp.maximum(of_class.sum(0), 1)

    return (parts * jax.lax.map(by_class, y)).sum()


@functools.cache
def metrics(lam: float) -> dict[str, Any]:
    """Those of ZO-HFL: also f₂ at the models that the clients have, f₁ + f₂, and these models' accuracy."""

    def coupling(x: jax.Array, y: jax.Array, data: Placed) -> jax.Array:
        rho = data.sizes / data.sizes.sum()
        return lam / 2 * (rho * ((x - y) ** 2).sum((1, 2))).sum()

    def objective(x: jax.Array, y: jax.Array, data: Placed) -> jax.Array:
        return loss_on_server(x, y, data) + coupling(x, y, data)

    return {**METRICS, "coupling": coupling, "objective": objective, "personal_accuracy": personal_accuracy}


def method_of(s: Setting, row: str) -> fs.Method:
    """The method of a row. All take the same number of local steps, and the paper's γ_r or, baselines, γ."""
    gamma: Any
    gamma, H, batch = RootDecay(s.gamma), RootGrowth(s.tau), s.batch_size
    if row == "ZO-HFL":
        options = {"batch_size": batch, "server_batch_size": batch, "messages": "scalars"}
        return fs.ZOHFL(gamma, s.eta, H, s.gamma_client, **options)
    if s.baseline_steps == "constant" and row != "server data only":
        gamma = s.gamma
    if row == "SCAFFOLD":
        return fs.SCAFFOLD(gamma, K=H, batch_size=batch)
    if row == "server data only":
        return fs.FedAvg(gamma, batch_size=batch)
    return fs.FedProx(gamma, 0.0 if row == "FedAvg" else s.mu_prox, H, batch)  # μ = 0 is FedAvg


def build(s: Setting) -> Task:
    """A row of the table on a data set, at a level of heterogeneity."""
    row, (alpha, participation) = str(s.method).removesuffix(SHARED), LEVELS[s.level]
    alone, personal = row == "server data only", row == "ZO-HFL"
    server = "alone" if alone else "shared" if row != s.method else "apart"
    data = split(s.data, alpha, s.seed, s.clients, server, s.pixels)
    x0 = np.zeros((10, data.test["x"].shape[1]), np.float32)
    return Task(
        personalized(s.clients, s.lam, s.mu) if personal else MINIMIZATION,
        method_of(s, row),
        data,
        x0,
        y0=x0 if personal else None,
        rounds=s.rounds,
        eval_every=max(1, s.rounds // s.evaluations),
        metrics=metrics(s.lam) if personal else METRICS,
        participation=1.0 if alone else participation,
        options={"weights": "uniform" if personal else "size", "default_metrics": False},
    )
