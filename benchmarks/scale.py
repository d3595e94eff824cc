"""From a hundred clients to a million: time a round, memory of host and device, and the start.

Clients with Zipf sizes 1 … 100 and 64 features in a store that this program writes (5 GB for a million); 100
of them take part in a round. FedAvg, SCAFFOLD, FedMSA with ten of them in its local steps, and ZO-HFL, each
in a process of its own. "In memory" is the same run, the same cohorts, with all samples on the device, in
turn with the streamed one, after memory was looked at. A round's time is the difference between long and
short calls, so that it holds none of the start. Below the table is what reading and copying take alone, which
a streamed run does while it computes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

FEATURES, LARGEST, PART, METHODS = 64, 100, 100, ("FedAvg", "SCAFFOLD", "FedMSA", "ZOHFL")
REPETITIONS = 5


def sizes_of(clients: int) -> np.ndarray:
    """P(n) ∝ 1/n on 1 … 100."""
    shares = 1 / np.arange(1, LARGEST + 1)
    return np.random.default_rng(0).choice(np.arange(1, LARGEST + 1), clients, p=shares / shares.sum())


def each_client(clients: int, seed: int) -> Iterator[dict[str, np.ndarray]]:
    """Labels of a common half-space, with noise."""
    rng, sizes = np.random.default_rng(seed), sizes_of(clients)
    normal = np.random.default_rng(1).standard_normal(FEATURES, dtype=np.float32) / 8
    for start in range(0, clients, 4096):
        these = sizes[start : start + 4096]
        a = rng.standard_normal((int(these.sum()), FEATURES), dtype=np.float32)
        b = np.sign(a @ normal + rng.standard_normal(len(a), dtype=np.float32)).astype(np.int8)
        ends = np.cumsum(these)
        for stop, size in zip(ends.tolist(), these.tolist(), strict=True):
            yield {"a": a[stop - size : stop], "b": b[stop - size : stop]}


def store_of(clients: int, folder: Path) -> Path:
    """The store, made where it is not there."""
    import fedstrata as fs

    place = folder / f"zipf-{clients}"
    if not place.exists():
        server = {"a": np.eye(FEATURES, dtype=np.float32), "b": np.ones(FEATURES, np.int8)}
        fs.data.write_store(place, each_client(clients, 2), server=server)
    return place


def posed(name: str) -> tuple[Any, Any, dict[str, Any]]:
    """A problem of its class, the method, and where it starts."""
    import jax
    import jax.numpy as jnp

    import fedstrata as fs

    def logistic(w: Any, sample: Any) -> Any:
        return jax.nn.softplus(-sample["b"] * (sample["a"] @ w))

    zero = np.zeros(FEATURES, np.float32)
    if name == "FedAvg":
        return fs.Minimization(logistic), fs.FedAvg(gamma=0.1, H=10, batch_size=16), {"x0": zero}
    if name == "SCAFFOLD":
        return fs.Minimization(logistic), fs.SCAFFOLD(eta_l=0.1, K=10, batch_size=16), {"x0": zero}
    if name == "FedMSA":

        def lower(x: Any, y: Any, sample: Any) -> Any:
            return logistic(y, sample) + 0.5 * jnp.exp(x[0]) * (y @ y)

        problem = fs.Bilevel(lambda x, y, sample: logistic(y, sample), lower, same_samples=True)
        method = fs.FedMSA(alpha=0.01, beta=0.1, K=5, clients=10, batch_size=16)
        return problem, method, {"x0": np.zeros(1, np.float32), "y0": zero}
    problem = fs.Personalized(
        server=logistic,
        coupling=lambda x, y: 0.5 * ((x - y) ** 2).sum(),
        client=lambda x, y, sample: logistic(y, sample) + 0.5 * ((x - y) ** 2).sum(),
    )
    return problem, fs.ZOHFL(gamma=0.01, eta=0.1, H=10, batch_size=16), {"x0": zero, "y0": zero}


def own_bytes() -> int:
    """What this process has of its own, without pages of files that the system may take back."""
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    found = {words[0]: 1024 * int(words[1]) for words in lines if words[-1] == "kB"}
    return found.get("RssAnon:", found["VmRSS:"])


class Peak(threading.Thread):
    """The most that host and device had."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.host, self.device, self.over = 0, 0, False

    def run(self) -> None:
        import jax

        while not self.over:
            self.host = max(self.host, own_bytes())
            stats = jax.devices()[0].memory_stats() or {}
            live = stats.get("bytes_in_use") or sum(array.nbytes for array in jax.live_arrays())
            self.device = max(self.device, live)
            time.sleep(0.02)


def measure(name: str, clients: int, folder: Path, in_memory: bool, rounds: int) -> dict[str, float]:
    """One method in this process; its start is imports, compiling and a short call."""
    began = time.perf_counter()
    import jax
    import jax.numpy as jnp

    import fedstrata as fs

    jax.block_until_ready(jax.jit(lambda x: x @ x)(jnp.ones((8, 8))))
    before, peak = own_bytes(), Peak()
    problem, method, start = posed(name)

    def call(data: Any, number: int) -> float:
        at = time.perf_counter()
        fs.solve(
            problem, method, data, **start, rounds=number, eval_every=number,
            participation=min(PART, clients // 5), default_metrics=data.source is not None, progress=False,
        )  # fmt: skip
        return time.perf_counter() - at

    def calls(data: Any) -> np.ndarray:
        return np.array([call(data, number) for number in (rounds // 5, rounds)])

    peak.start()
    places = [fs.FederatedData.from_source(fs.data.open_store(store_of(clients, folder), verify=False))]
    call(places[0], rounds // 5)
    start_up = time.perf_counter() - began
    calls(places[0])
    peak.over = True
    if in_memory:
        places.append(places[0].load())
        calls(places[1])  # compiles
    # in turn, so that other work on the machine disturbs both
    least = np.min([[calls(data) for data in places] for _ in range(REPETITIONS)], axis=0)
    each = (least[:, 1] - least[:, 0]) / (rounds - rounds // 5)
    found = {"round": each[0], "call": least[0, 0], "start": start_up}
    found |= {"host": peak.host - before, "device": peak.device}
    return found | ({"in memory": each[1]} if in_memory else {})


def carried(clients: int, folder: Path) -> str:
    """What a round's samples take to be read and to be copied to the device, in windows of 64 rounds."""
    import jax

    import fedstrata as fs

    data = fs.FederatedData.from_source(fs.data.open_store(store_of(clients, folder), verify=False))
    rng, rounds, least = np.random.default_rng(0), 64, np.full(2, np.inf)
    for _ in range(4 * REPETITIONS):
        cohorts = [rng.choice(clients, min(PART, clients // 5), replace=False) for _ in range(rounds)]
        at = time.perf_counter()
        samples = data.read(np.unique(np.concatenate(cohorts)))
        read = time.perf_counter()
        jax.block_until_ready(jax.device_put(samples))
        least = np.minimum(least, [read - at, time.perf_counter() - read])
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(samples)) / rounds / 1e6
    reading, copying = (f"{ms:.2f} ms" for ms in 1e3 * least / rounds)
    return f"Of {clients:,} clients, a round's {size:.2f} MB: read in {reading}, copied in {copying}."


def row(name: str, clients: int, folder: Path, in_memory: bool, rounds: int) -> dict[str, float]:
    """The same in a process of its own."""
    words = [sys.executable, "-m", "benchmarks.scale", "--one", name, str(clients), str(int(in_memory))]
    words += ["--folder", str(folder), "--rounds", str(rounds)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 1_000, 10_000, 100_000])
    parser.add_argument("--in-memory", type=int, default=10_000, help="clients up to which memory is tried")
    parser.add_argument("--folder", type=Path, help="where stores are kept (default: removed afterwards)")
    parser.add_argument("--rounds", type=int, default=640, help="of a long call")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        name, clients, in_memory = options.one
        found = measure(name, int(clients), options.folder, bool(int(in_memory)), options.rounds)
        print(json.dumps(found))
        return
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with tempfile.TemporaryDirectory(prefix="fedstrata-scale-") as temporary:
        folder = options.folder or Path(temporary)
        print("## Scale\n")
        head = ["method", "clients", "ms a round", "a call, s", "start, s", "host, MB", "device, MB"]
        head += ["ms a round in memory", "ratio"]
        print(f"| {' | '.join(head)} |\n|---{'|---:' * (len(head) - 1)}|", flush=True)
        for clients in options.clients:
            store_of(clients, folder)
        for name in options.methods:
            for clients in options.clients:
                ours = row(name, clients, folder, clients <= options.in_memory, options.rounds)
                cells = [name, f"{clients:,}", f"{1e3 * ours['round']:.2f}", f"{ours['call']:.2f}"]
                cells += [f"{ours['start']:.1f}", f"{ours['host'] / 1e6:.0f}", f"{ours['device'] / 1e6:.0f}"]
                if "in memory" in ours:
                    cells += [f"{1e3 * ours['in memory']:.2f}", f"{ours['round'] / ours['in memory']:.2f}"]
                print(f"| {' | '.join(cells + ['–'] * (len(head) - len(cells)))} |", flush=True)
        print("\n" + carried(options.clients[-1], folder))


if __name__ == "__main__":
    main()
