"""The CIFAR10 benchmark of pfl-research (Granqvist et al., NeurIPS 2024, Datasets and Benchmarks).

    python -m benchmarks.cifar10                      # FEDSTRATA_DATA has CIFAR-10; on a GPU: all rows
    python -m benchmarks.cifar10 --rounds 20 --rows "FedAvg iid" --participants 4 --test 500    # two cores
    python -m benchmarks.cifar10 --rows loop          # the same rounds in PyTorch, one client after the other

The settings are those of their repository (``benchmarks/image_classification/configs/baseline.yaml`` and its
README): 1000 clients with 50 images each, drawn alike (iid) or with classes from Dir(0.1) for each client; 50
clients a round, 5 local steps of 10 images, step size 0.1, server step 1, the mean over clients; 1500 rounds,
3000 where classes differ or there is noise; a CNN of 1.6 M parameters with dropout 0.25 and 0.5; accuracy on
the 10,000 test images every 10 rounds. FedProx has μ = 0.01. Central privacy: updates clipped at 0.4, (2,
10⁻⁶)-DP for cohorts of 1000 out of 10⁶ clients, simulated with 50, whose noise is as large as it would be
with 1000: the ε holds for that federation, and not for the one that is simulated.

Two things differ. They go through a client's images once, in batches without replacement; here a step draws
10 of the 50. And PyTorch draws biases, which are zero here, as in their TensorFlow model.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import fedstrata as fs

CLIENTS, IMAGES = 1000, 50
STEPS, BATCH, GAMMA = 5, 10, 0.1
CLIP, EPSILON, DELTA, COHORT, POPULATION = 0.4, 2.0, 1e-6, 1000, 1_000_000


class Row(NamedTuple):
    """A row of the benchmark: its method, its split, whether there is noise, and its rounds."""

    method: str
    split: str
    private: bool
    rounds: int


ROWS = {
    "FedAvg iid": Row("FedAvg", "iid", False, 1500),
    "FedProx iid": Row("FedProx", "iid", False, 1500),
    "SCAFFOLD iid": Row("SCAFFOLD", "iid", False, 1500),
    "FedAvg dirichlet": Row("FedAvg", "dirichlet", False, 3000),
    "FedProx dirichlet": Row("FedProx", "dirichlet", False, 3000),
    "SCAFFOLD dirichlet": Row("SCAFFOLD", "dirichlet", False, 3000),
    "FedAvg iid, private": Row("FedAvg", "iid", True, 3000),
    "FedAvg dirichlet, private": Row("FedAvg", "dirichlet", True, 3000),
}


def split(labels: np.ndarray, kind: str, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """The images of each client, as many for each: drawn alike, or by classes from Dir(0.1)."""
    if kind == "iid":
        return list(rng.permutation(len(labels))[: clients * IMAGES].reshape(clients, IMAGES))
    left = [list(rng.permutation(np.flatnonzero(labels == c))) for c in range(10)]
    parts = []
    for share in rng.dirichlet(np.full(10, 0.1), clients):
        part: list[int] = []
        while len(part) < IMAGES:
            # of classes that are used up, the others get the share
            share = np.where([len(rows) > 0 for rows in left], np.maximum(share, 1e-12), 0)
            number = rng.multinomial(IMAGES - len(part), share / share.sum())
            for rows, n in zip(left, number, strict=True):
                part += [rows.pop() for _ in range(min(n, len(rows)))]
        parts.append(np.array(part))
    return parts


def federated(arrays: dict[str, np.ndarray], kind: str, clients: int, seed: int) -> fs.FederatedData:
    """The clients' images, as bytes."""
    labels = arrays["y_train"].astype(np.int32)
    parts = split(labels, kind, clients, np.random.default_rng(seed))
    test = {"x": arrays["x_test"], "y": arrays["y_test"].astype(np.int32)}
    own = [{"x": arrays["x_train"][part], "y": labels[part]} for part in parts]
    return fs.FederatedData.from_clients(own, test=test)


def start(seed: int) -> dict[str, Any]:
    """Glorot's uniform weights, and biases of zero."""
    keys = jax.random.split(jax.random.key(seed), 4)
    glorot, zeros = jax.nn.initializers.glorot_uniform(), jnp.zeros
    return {
        "c1": glorot(keys[0], (3, 3, 3, 32)), "b1": zeros(32),
        "c2": glorot(keys[1], (3, 3, 32, 64)), "b2": zeros(64),
        "w1": glorot(keys[2], (14 * 14 * 64, 128)), "d1": zeros(128),
        "w2": glorot(keys[3], (128, 10)), "d2": zeros(10),
    }  # fmt: skip


def dropped(u: Any, key: Any, rate: float) -> Any:
    """Dropout; without a key, of an evaluation, nothing."""
    return u if key is None else jnp.where(jax.random.bernoulli(key, 1 - rate, u.shape), u / (1 - rate), 0)


class Network(NamedTuple):
    """The network and its loss; images are normalised by the training set's channels."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def scores(self, x: Any, image: Any, key: Any) -> Any:
        """Of one image."""
        keys = (None, None) if key is None else jax.random.split(key)
        u = (image.astype(jnp.float32) - jnp.array(self.mean)) / jnp.array(self.deviation)
        for weights, bias in (("c1", "b1"), ("c2", "b2")):
            numbers = ("NHWC", "HWIO", "NHWC")
            u = lax.conv_general_dilated(u[None], x[weights], (1, 1), "VALID", dimension_numbers=numbers)[0]
            u = jax.nn.relu(u + x[bias])
        u = dropped(u.reshape(14, 2, 14, 2, 64).max((1, 3)).ravel(), keys[0], 0.25)
        u = dropped(jax.nn.relu(u @ x["w1"] + x["d1"]), keys[1], 0.5)
        return u @ x["w2"] + x["d2"]

    def loss(self, x: Any, sample: Any, key: Any) -> Any:
        """The cross-entropy."""
        z = self.scores(x, sample["x"], key)
        return jax.nn.logsumexp(z) - z[sample["y"]]

    def accuracy(self, x: Any, y: Any, data: Any) -> Any:
        """On the test images."""

        def right(sample: Any) -> Any:
            return jnp.argmax(self.scores(x, sample["x"], None)) == sample["y"]

        return lax.map(right, data.test, batch_size=500).mean()


def moments(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of each channel."""
    number = [np.bincount(images[..., c].ravel(), minlength=256) for c in range(3)]
    mean = [float(np.average(np.arange(256), weights=n)) for n in number]
    spread = [np.average((np.arange(256) - m) ** 2, weights=n) for m, n in zip(mean, number, strict=True)]
    return tuple(mean), tuple(float(v**0.5) for v in spread)


@functools.cache
def multiplier(rounds: int) -> float:
    """The noise multiplier of (2, 10⁻⁶)-DP in their federation: cohorts of 1000 out of 10⁶."""
    import dp_accounting as dp
    from dp_accounting import pld

    def events(z: float) -> Any:
        one = dp.PoissonSampledDpEvent(COHORT / POPULATION, dp.GaussianDpEvent(z))
        return dp.SelfComposedDpEvent(one, rounds)

    bracket = dp.ExplicitBracketInterval(0.3, 10.0)
    return float(dp.calibrate_dp_mechanism(pld.PLDAccountant, events, EPSILON, DELTA, bracket, tol=1e-3))


def channel(row: Row, participants: int) -> fs.Channel | None:
    """Clipping and noise: on the mean of the few, z C/1000, as on the mean of a thousand."""
    if not row.private:
        return None
    return fs.Channel(clip=CLIP, noise=multiplier(row.rounds) * participants / COHORT)


def method(name: str) -> Any:
    """A method with the settings of all rows."""
    if name == "SCAFFOLD":
        return fs.SCAFFOLD(eta_l=GAMMA, eta_g=1.0, K=STEPS, batch_size=BATCH)
    if name == "FedProx":
        return fs.FedProx(gamma=GAMMA, mu=0.01, H=STEPS, batch_size=BATCH)
    return fs.FedAvg(gamma=GAMMA, H=STEPS, batch_size=BATCH)


def run(
    arrays: dict[str, np.ndarray], row: Row, clients: int, participants: int, seed: int, **options: Any
) -> dict[str, Any]:
    """A row: accuracies, the seconds of the whole call and what of them was compiling."""
    network = Network(*moments(arrays["x_train"]))
    problem = fs.Minimization(fs.stochastic(network.loss))
    data, began = federated(arrays, row.split, clients, seed), time.perf_counter()
    result = fs.solve(
        problem, method(row.method), data, start(seed), rounds=row.rounds, participation=participants,
        eval_every=min(10, row.rounds), metrics={"accuracy": network.accuracy}, default_metrics=False,
        channel=channel(row, participants), seed=seed, progress=False, certify=False, **options,
    )  # fmt: skip
    accuracy = result.history["accuracy"]
    return {
        **row._asdict(), "seed": seed, "clients": clients, "participants": participants,
        "accuracy": float(accuracy[-1]), "best": float(accuracy.max()),
        "finite": bool(math.isfinite(sum(float(leaf.sum()) for leaf in jax.tree.leaves(result.x)))),
        "seconds": time.perf_counter() - began, "compiling": result.compiling,
    }  # fmt: skip


def loop(arrays: dict[str, np.ndarray], clients: int, participants: int, seed: int) -> dict[str, Any]:
    """FedAvg in PyTorch, one client after the other: the milliseconds of a round, without evaluations."""
    import torch
    from torch import nn

    place = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True  # as JAX does
    torch.manual_seed(seed)
    mean, deviation = moments(arrays["x_train"])
    images = (arrays["x_train"][: clients * IMAGES].astype(np.float32) - mean) / deviation
    x = torch.tensor(images.astype(np.float32).transpose(0, 3, 1, 2), device=place)
    y = torch.tensor(arrays["y_train"][: clients * IMAGES].astype(np.int64), device=place)
    net = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Dropout(0.25), nn.Linear(14 * 14 * 64, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
    ).to(place)  # fmt: skip

    def one_round() -> None:
        start = {name: a.detach().clone() for name, a in net.state_dict().items()}
        total = {name: torch.zeros_like(a) for name, a in start.items()}
        for client in torch.randperm(clients)[:participants].tolist():
            net.load_state_dict(start)
            optimizer = torch.optim.SGD(net.parameters(), lr=GAMMA)
            for _ in range(STEPS):
                rows = client * IMAGES + torch.randint(IMAGES, (BATCH,), device=place)
                optimizer.zero_grad(set_to_none=True)
                nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
                optimizer.step()
            for name, a in net.state_dict().items():
                total[name] += a / participants
        net.load_state_dict(total)
        if place == "cuda":
            torch.cuda.synchronize()

    one_round()
    seconds = []
    for _ in range(10):
        began = time.perf_counter()
        one_round()
        seconds.append(time.perf_counter() - began)
    return {"ms": 1e3 * min(seconds), "torch": torch.__version__}


def main() -> None:
    """Run the rows that are asked for; what was measured is printed and written after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=[*ROWS, "loop"], default=list(ROWS), metavar="ROW")
    parser.add_argument("--rounds", type=int, help="fewer rounds, for a try")
    parser.add_argument("--clients", type=int, default=CLIENTS, help="fewer clients, for a try")
    parser.add_argument("--participants", type=int, default=50)
    parser.add_argument("--test", type=int, help="fewer test images, for a try")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--precision", default="float32", choices=("float32", "bfloat16", "highest"))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    arrays = dict(fs.data.load("cifar10"))
    arrays |= {name: arrays[name][: given.test] for name in ("x_test", "y_test")}
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}, {given.precision}", flush=True)
    found = []
    for name, seed in itertools.product(given.rows, range(given.seeds)):
        entry: dict[str, Any] = {"row": name, "precision": given.precision, "seed": seed}
        try:
            if name == "loop":
                entry |= loop(arrays, given.clients, given.participants, seed)
                words = f"{entry['ms']:.1f} ms a round, PyTorch {entry['torch']}"
            else:
                row = ROWS[name] if given.rounds is None else ROWS[name]._replace(rounds=given.rounds)
                options = {"precision": given.precision}
                entry |= run(arrays, row, given.clients, given.participants, seed, **options)
                words = "{rounds} rounds  accuracy {accuracy:.2%}  best {best:.2%}".format_map(entry)
                words += "  {seconds:.1f} s ({compiling:.1f} compiling)".format_map(entry)
        except Exception as error:  # the others are still of interest
            entry["error"] = words = f"{type(error).__name__}: {error}"[:300]
        found.append(entry)
        print(f"{name:28s} seed {seed}  {words}", flush=True)
        if given.out is not None:
            given.out.parent.mkdir(parents=True, exist_ok=True)
            given.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
