"""ZO-HFL on images: data, problems, methods and jobs of `zohfl-table1` and `zohfl-convergence`.

A *job* is a set of runs that share a program: all seeds and data sets of one shape, at one level of
heterogeneity, of one class of methods; `fedstrata.sweep` solves them side by side. This file needs JAX, NumPy
and the package's core alone, so that a table can be computed where nothing else is installed, and read
elsewhere (``fedstrata run zohfl-table1 --set stored=FOLDER``):

    PYTHONPATH=. python fedstrata/experiments/_zohfl.py table1 --out FOLDER --workers 4

Settings of the paper: softmax regression without bias, 90 % of the images for training, of which 30 % stay
with the server and the rest go to m = 10 clients by Dirichlet(α); γ_r = 0.01/√(r+1), γ̃ = 0.1/(t+1), η = 0.1,
H = ⌈20√(r+1)⌉ steps a round, R = 500. Its λ, μ and batch size are not printed: see `DEFAULTS`.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedstrata as fs
from fedstrata.methods.zohfl import RootDecay, RootGrowth

PyTree = Any

LEVELS = {
    "mild": (1000.0, 0.9),
    "moderate": (1.0, 0.5),
    "extreme": (0.1, 0.1),
}  # α of the split, β who take part
DATA = ("mnist", "fashion_mnist", "cifar10")
ROWS = (
    "FedAvg",
    "FedProx",
    "SCAFFOLD",
    "ZO-HFL",
    "server data only",
    "FedAvg + server data",
    "FedProx + server data",
    "SCAFFOLD + server data",
)
DEFAULTS: dict[str, Any] = {
    "clients": 10,
    "rounds": 500,
    "evaluations": 20,
    "tau": 20.0,
    "gamma": 0.01,
    "gamma_client": 0.1,
    "eta": 0.1,
    "lam": 0.1,
    "mu": 1.0,
    "batch_size": 32,
    "mu_prox": 0.1,
    "limit": 0,
}


@dataclass(frozen=True)
class Cell:
    """One cell of a table: a data set, a level of heterogeneity, a row, the factor τ of the local steps."""

    data: str
    level: str
    row: str
    tau: float


@dataclass(frozen=True)
class Record:
    """One run, as it is stored."""

    cell: Cell
    seed: int
    history: dict[str, list[float]]
    ledger: dict[str, Any]
    seconds: float
    method: str


# ---------------------------------------------------------------------------------------------------- data


@functools.lru_cache(maxsize=2)
def pooled(name: str, limit: int) -> dict[str, np.ndarray]:
    """All images of a data set as vectors of mean 0 and deviation 1 (over all pixels), in a random order."""
    if name == "digits":
        arrays = fs.data.load(name)
        x, y = arrays["x"], arrays["y"]
    else:
        arrays = fs.data.load(name)
        x = np.concatenate([arrays["x_train"], arrays["x_test"]])
        y = np.concatenate([arrays["y_train"], arrays["y_test"]])
    order = np.random.default_rng(0).permutation(len(x))[: limit or None]
    x = x[order].reshape(len(order), -1).astype(np.float32)
    return {"x": (x - x.mean()) / x.std(), "y": y[order].astype(np.int32)}


def split(name: str, alpha: float, seed: int, clients: int, limit: int, shared: bool) -> fs.FederatedData:
    """10 % test; of the rest 30 % the server's; the others' by Dirichlet(α), with an even share of the
    server's data added where ``shared``."""  # noqa: D205, D209
    arrays = pooled(name, limit)
    order = np.random.default_rng(seed).permutation(len(arrays["y"]))
    held_out = len(order) // 10
    test = {key: array[order[:held_out]] for key, array in arrays.items()}
    rest = {key: array[order[held_out:]] for key, array in arrays.items()}
    partition = fs.Dirichlet(alpha, min_size=10)
    data = fs.FederatedData.from_arrays(rest, clients, partition, server_fraction=0.3, seed=seed, test=test)
    if not shared:
        return data
    parts = [{key: array[i::clients] for key, array in data.server.items()} for i in range(clients)]
    own = [
        {key: np.concatenate([array, part[key]]) for key, array in data.client(i).items()}
        for i, part in enumerate(parts)
    ]
    return fs.FederatedData.from_clients(own, server=data.server, test=test)


def padded(data: fs.FederatedData, longest: int) -> fs.FederatedData:
    """The same with room for ``longest`` samples per client, so that splits have one shape."""

    def pad(leaf: np.ndarray) -> np.ndarray:
        room = longest - leaf.shape[1]
        return np.concatenate([leaf, np.repeat(leaf[:, :1], room, axis=1)], axis=1)

    return replace(data, train=jax.tree.map(pad, data.train), equal=None)


def server_alone(data: fs.FederatedData) -> fs.FederatedData:
    """The server's data as the only client's."""
    return fs.FederatedData.from_clients([data.server], test=data.test)


# ---------------------------------------------------------------------------------------- problems, methods


def loss(x: jax.Array, sample: dict[str, jax.Array]) -> jax.Array:
    """Cross-entropy of softmax regression; x has a column for each class."""
    return optax.softmax_cross_entropy_with_integer_labels(sample["x"] @ x, sample["y"])


@functools.cache
def personalized(clients: int, lam: float, mu: float) -> fs.Personalized:
    """f₂ = λ/2 Σ ρ_i ‖x − y_i‖², written as the mean over the clients of what each adds."""

    def coupling(x: jax.Array, y: jax.Array, client: Any) -> jax.Array:
        return lam / 2 * clients * client.fraction * jnp.vdot(x - y, x - y)

    def client(x: jax.Array, y: jax.Array, sample: dict[str, jax.Array]) -> jax.Array:
        return loss(y, sample) + mu / 2 * jnp.vdot(x - y, x - y)

    return fs.Personalized(loss, coupling, client)


MINIMIZATION = fs.Minimization(loss)


def accuracy(x: jax.Array, y: PyTree, data: fs.FederatedData) -> jax.Array:
    """Of the global model, on the test data."""
    return ((data.test["x"] @ x).argmax(1) == data.test["y"]).mean()


def test_loss(x: jax.Array, y: PyTree, data: fs.FederatedData) -> jax.Array:
    """Of the global model, on the test data."""
    return optax.softmax_cross_entropy_with_integer_labels(data.test["x"] @ x, data.test["y"]).mean()


def global_loss(x: jax.Array, y: PyTree, data: fs.FederatedData) -> jax.Array:
    """f₁, the global model's loss on the server's data."""
    return optax.softmax_cross_entropy_with_integer_labels(data.server["x"] @ x, data.server["y"]).mean()


test_loss.__test__ = False  # type: ignore[attr-defined]  # no test of pytest's
METRICS = {"accuracy": accuracy, "test_loss": test_loss}


def kind_of(row: str) -> str:
    """Rows of one kind share programs; FedAvg is FedProx with μ = 0."""
    base = row.removesuffix(" + server data")
    return {"FedAvg": "FedProx"}.get(base, base)


def method_of(row: str, tau: float, p: Mapping[str, Any]) -> Any:
    """The method of a row. All take the same steps: those of the paper's server, its clients' for y_i."""
    gamma, H, batch = RootDecay(p["gamma"]), RootGrowth(tau), p["batch_size"]
    base = row.removesuffix(" + server data")
    if base == "ZO-HFL":
        return fs.ZOHFL(
            gamma,
            p["eta"],
            H,
            p["gamma_client"],
            batch_size=batch,
            server_batch_size=batch,
            messages="scalars",
        )
    if base == "SCAFFOLD":
        return fs.SCAFFOLD(gamma, K=H, batch_size=batch)
    if base == "server data only":
        return fs.FedAvg(gamma, batch_size=batch)
    return fs.FedProx(gamma, 0.0 if base == "FedAvg" else p["mu_prox"], H, batch)


# --------------------------------------------------------------------------------------------------- jobs


def jobs_of(cells: Sequence[Cell], seeds: Sequence[int]) -> list[list[tuple[Cell, int]]]:
    """Cells and seeds in groups that share a program."""
    groups: dict[Any, list[tuple[Cell, int]]] = {}
    for cell in cells:
        shape = "28x28" if cell.data in ("mnist", "fashion_mnist") else cell.data
        kind = kind_of(cell.row)
        level = "" if kind == "server data only" else cell.level
        groups.setdefault((shape, level, kind, cell.tau), []).extend((cell, seed) for seed in seeds)
    # The longest first, so that workers end together.
    return sorted(groups.values(), key=lambda job: -job[0][0].tau * len(job))


def solve_job(job: Sequence[tuple[Cell, int]], p: Mapping[str, Any]) -> Iterator[Record]:
    """All runs of a job in one program."""
    first = job[0][0]
    kind = kind_of(first.row)
    data = []
    for cell, seed in job:
        own = split(cell.data, LEVELS[cell.level][0], seed, p["clients"], p["limit"], "+" in cell.row)
        data.append(server_alone(own) if kind == "server data only" else own)
    longest = max(d.sizes.max() for d in data)
    rows = list(dict.fromkeys(cell.row.removesuffix(" + server data") for cell, _ in job))
    methods = [method_of(row, first.tau, p) for row in rows]
    # A lane is a split and a seed; every method runs on every lane, and what no cell asks for is dropped.
    lanes = list(dict.fromkeys((c.data, c.level, "+" in c.row, seed) for c, seed in job))
    where = {(c.data, c.level, "+" in c.row, seed): d for (c, seed), d in zip(job, data, strict=True)}
    x0 = np.zeros((data[0].train["x"].shape[-1], 10), np.float32)
    personal = kind == "ZO-HFL"
    began = time.perf_counter()
    results = fs.sweep(
        personalized(p["clients"], p["lam"], p["mu"]) if personal else MINIMIZATION,
        methods,
        [padded(where[lane], longest) for lane in lanes],
        x0,
        y0=x0 if personal else None,
        rounds=p["rounds"],
        seeds=[lane[-1] for lane in lanes],
        participation=1.0 if kind == "server data only" else LEVELS[first.level][1],
        metrics={**METRICS, "global_loss": global_loss} if personal else METRICS,
        eval_every=max(1, p["rounds"] // p["evaluations"]),
        weights="uniform" if personal else "size",
        default_metrics=False,
        progress=False,
    )
    seconds = (time.perf_counter() - began) / len(job)
    found = {
        (row, lane): results[i * len(lanes) + j] for i, row in enumerate(rows) for j, lane in enumerate(lanes)
    }
    for cell, seed in job:
        base = cell.row.removesuffix(" + server data")
        result = found[base, (cell.data, cell.level, "+" in cell.row, seed)]
        history = {name: np.asarray(values).tolist() for name, values in result.history.items()}
        yield Record(cell, seed, history, result.ledger.to_dict(), seconds, type(result.method).__name__)


def table1_cells(data: Sequence[str] = DATA, tau: float = 20.0) -> list[Cell]:
    """Every row of Table I for every data set and level."""
    return [Cell(d, level, row, tau) for d in data for level in LEVELS for row in ROWS]


def convergence_cells(
    data: Sequence[str] = DATA[1:], taus: Sequence[float] = (5.0, 20.0, 50.0)
) -> list[Cell]:
    """Fig. 2: ZO-HFL with three numbers of local steps."""
    return [Cell(d, level, "ZO-HFL", tau) for d in data for level in LEVELS for tau in taus]


def load_records(folder: str | Path) -> dict[tuple[Cell, int], Record]:
    """What earlier runs of this file stored."""
    found = {}
    for file in sorted(Path(folder).glob("*.jsonl")):
        for line in file.read_text("utf-8").splitlines():
            fields = json.loads(line)
            record = Record(**{**fields, "cell": Cell(**fields["cell"])})
            found[record.cell, record.seed] = record
    return found


def main() -> None:
    """Compute a table on this machine; see the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("table1", "convergence"))
    parser.add_argument("--data", nargs="+", default=None, help="data sets, e.g. mnist fashion_mnist")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1, help="processes that share the device")
    parser.add_argument("--part", type=int, default=None, help="which of them this is")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="other parameters")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.workers > 1 and args.part is None:
        # Each takes memory as it needs it; by default the first would take all.
        env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        command = [sys.executable, *sys.argv, "--part"]
        workers = [subprocess.Popen([*command, str(i)], env=env) for i in range(args.workers)]
        sys.exit(max(worker.wait() for worker in workers))
    parameters = {**DEFAULTS}
    for item in args.set:
        name, value = item.split("=")
        parameters[name] = type(DEFAULTS[name])(value)
    cells = table1_cells if args.what == "table1" else convergence_cells
    chosen = cells(args.data) if args.data else cells()
    part = args.part or 0
    for job in jobs_of(chosen, range(args.seeds))[part :: args.workers]:
        began = time.perf_counter()
        with (args.out / f"{args.what}-{part}.jsonl").open("a", encoding="utf-8") as file:
            for record in solve_job(job, parameters):
                file.write(json.dumps(asdict(record)) + "\n")
        cell = job[0][0]
        words = f"{cell.data} {cell.level} {kind_of(cell.row)} tau={cell.tau:g}: {len(job)} runs"
        print(f"{words} in {time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
