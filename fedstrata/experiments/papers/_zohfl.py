"""ZO-HFL on images: data, problems and methods of `zohfl-table1` and `zohfl-convergence`.

Settings of the paper: softmax regression without bias, 90 % of the images for training, of which 30 % stay
with the server and the rest go to m = 10 clients by Dirichlet(α); γ_r = 0.01/√(r+1), γ̃ = 0.1/(t+1), η = 0.1,
H = ⌈τ√(r+1)⌉ steps a round, R = 500. Its λ, μ and batch size are not printed: see `PARAMETERS`.

A run is 149,000 small local steps (τ = 20), which leave a GPU idle. So runs that share a program (both data
sets of 28×28 pixels, all seeds, FedAvg and FedProx, with and without the server's data) are solved side by
side there; on a CPU one is as much work as a core can do.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

import fedstrata as fs
from fedstrata.core.types import PyTree
from fedstrata.experiments.base import Setting
from fedstrata.methods.zohfl import RootDecay, RootGrowth
from fedstrata.report import Run

Sample = dict[str, Any]

PAPER = "Qiu, Kim, Yousefian 2025"
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
}


# ---------------------------------------------------------------------------------------------------- data


@functools.lru_cache(maxsize=3)
def pooled(name: str) -> dict[str, np.ndarray]:
    """All images of a data set: bytes, labels, and beside each image the mean and deviation of all pixels."""
    arrays = fs.data.load(name)
    if name != "digits":
        arrays = {k: np.concatenate([arrays[f"{k}_train"], arrays[f"{k}_test"]]) for k in "xy"}
    x = arrays["x"].reshape(len(arrays["y"]), -1).astype(np.uint8)
    scale = np.array([x.mean(dtype=float), x.std(dtype=float)], np.float32)
    return {"x": x, "y": arrays["y"].astype(np.int32), "scale": np.tile(scale, (len(x), 1))}


def split(name: str, alpha: float, seed: int, clients: int, shared: bool) -> fs.FederatedData:
    """A tenth for the test, 30 % of the rest for the server, all else over the clients by Dirichlet(α).

    Where ``shared``, every client gets an even part of the server's data as well.
    """
    arrays = pooled(name)
    order = np.random.default_rng(seed).permutation(len(arrays["y"]))
    held_out = len(order) // 10
    test = {key: array[order[:held_out]] for key, array in arrays.items()}
    rest = {key: array[order[held_out:]] for key, array in arrays.items()}
    partition = fs.Dirichlet(alpha, min_size=10)
    data = fs.FederatedData.from_arrays(rest, clients, partition, server_fraction=0.3, seed=seed, test=test)
    if not shared:
        return data
    own = [
        {key: np.concatenate([array, data.server[key][i::clients]]) for key, array in data.client(i).items()}
        for i in range(clients)
    ]
    return fs.FederatedData.from_clients(own, server=data.server, test=test)


def padded(data: fs.FederatedData, longest: int) -> fs.FederatedData:
    """The same with room for ``longest`` samples per client, so that splits have one shape."""

    def pad(leaf: np.ndarray) -> np.ndarray:
        return np.concatenate([leaf, np.repeat(leaf[:, :1], longest - leaf.shape[1], axis=1)], axis=1)

    return replace(data, train=jax.tree.map(pad, data.train), equal=None)


# ---------------------------------------------------------------------------------------- problems, methods


def scores(x: jax.Array, sample: Sample) -> jax.Array:
    """Of every class, for a sample or for many; x has a row for each class.

    Images stay bytes until they are used: a quarter of the memory, and of what a step has to fetch.
    """
    mean, deviation = sample["scale"][..., :1], sample["scale"][..., 1:]
    return (sample["x"] - mean) / deviation @ x.T


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


def accuracy(x: jax.Array, y: PyTree, data: fs.FederatedData) -> jax.Array:
    """Of the global model, on the test data."""
    return (scores(x, data.test).argmax(1) == data.test["y"]).mean()


def loss_on_test(x: jax.Array, y: PyTree, data: fs.FederatedData) -> jax.Array:
    """Of the global model."""
    return cross_entropy(x, data.test).mean()


def loss_on_server(x: jax.Array, y: PyTree, data: fs.FederatedData) -> jax.Array:
    """f₁: of the global model, on the server's data."""
    return cross_entropy(x, data.server).mean()


METRICS = {"accuracy": accuracy, "test_loss": loss_on_test, "global_loss": loss_on_server}


@functools.cache
def metrics(lam: float) -> dict[str, Any]:
    """Those of ZO-HFL: also f₂ at the models that the clients have, and f₁ + f₂."""

    def coupling(x: jax.Array, y: jax.Array, data: fs.FederatedData) -> jax.Array:
        rho = data.sizes / data.sizes.sum()
        return lam / 2 * (rho * ((x - y) ** 2).sum((1, 2))).sum()

    def objective(x: jax.Array, y: jax.Array, data: fs.FederatedData) -> jax.Array:
        return loss_on_server(x, y, data) + coupling(x, y, data)

    return {**METRICS, "coupling": coupling, "objective": objective}


def method_of(s: Setting) -> Any:
    """The method of a row. All take the same number of local steps, and the paper's γ_r."""
    row = str(s.method).removesuffix(SHARED)
    gamma, H, batch = RootDecay(s.gamma), RootGrowth(s.tau), s.batch_size
    if row == "ZO-HFL":
        options = {"batch_size": batch, "server_batch_size": batch, "messages": "scalars"}
        return fs.ZOHFL(gamma, s.eta, H, s.gamma_client, **options)
    if row == "SCAFFOLD":
        return fs.SCAFFOLD(gamma, K=H, batch_size=batch)
    if row == "server data only":
        return fs.FedAvg(gamma, batch_size=batch)
    return fs.FedProx(gamma, 0.0 if row == "FedAvg" else s.mu_prox, H, batch)  # μ = 0 is FedAvg


# ------------------------------------------------------------------------------------------------- all runs


def run(settings: Sequence[Setting]) -> Iterator[tuple[Setting, Run]]:
    """All runs, in groups that share a program; on a CPU long ones one by one, each stored as it ends."""
    groups: dict[Any, list[Setting]] = {}
    for s in settings:
        apart = jax.default_backend() == "cpu" and s.rounds > 50
        groups.setdefault(_alike(s, apart), []).append(s)
    for group in groups.values():
        yield from solve(group)


def _alike(s: Setting, apart: bool) -> Any:
    """Equal for settings whose runs share a program, and for no others where ``apart``."""
    row = str(s.method).removesuffix(SHARED)
    kind = "FedProx" if row == "FedAvg" else row
    size = "28×28" if s.data in DATA[:2] else s.data
    others = {key: value for key, value in s.items() if key not in ("data", "method")}
    return kind, size, repr(sorted(others.items())), repr(s) if apart else ""


def solve(group: Sequence[Setting]) -> Iterator[tuple[Setting, Run]]:
    """The runs of settings that share a program: every method on every lane, a split and its seed."""
    s = group[0]
    alone, personal = s.method == "server data only", s.method == "ZO-HFL"

    def lane_of(s: Setting) -> tuple[Any, ...]:
        return s.data, str(s.method).endswith(SHARED), s.seed

    alpha, participation = LEVELS[s.level]
    splits = {}
    for name, shared, seed in dict.fromkeys(map(lane_of, group)):
        data = split(name, alpha, seed, s.clients, shared)
        if alone:
            data = fs.FederatedData.from_clients([data.server], server=data.server, test=data.test)
        splits[name, shared, seed] = data
    longest = max(data.sizes.max() for data in splits.values())
    methods = {str(other.method).removesuffix(SHARED): method_of(other) for other in group}
    x0 = np.zeros((10, next(iter(splits.values())).test["x"].shape[1]), np.float32)
    results = fs.sweep(
        personalized(s.clients, s.lam, s.mu) if personal else MINIMIZATION,
        list(methods.values()),
        [padded(data, longest) for data in splits.values()],
        x0,
        y0=x0 if personal else None,
        rounds=s.rounds,
        seeds=[seed for *_, seed in splits],
        participation=1.0 if alone else participation,
        metrics=metrics(s.lam) if personal else METRICS,
        eval_every=max(1, s.rounds // s.evaluations),
        weights="uniform" if personal else "size",
        default_metrics=False,
        progress=False,
    )
    found = dict(zip([(row, lane) for row in methods for lane in splits], results, strict=True))
    for other in group:
        result = found[str(other.method).removesuffix(SHARED), lane_of(other)]
        cell = {key: value for key, value in other.cell.items() if key != "method"}
        shared_time = replace(result, seconds=result.seconds / len(group))
        yield other, Run.of(shared_time, str(other.method), seed=other.seed, setting=cell)
