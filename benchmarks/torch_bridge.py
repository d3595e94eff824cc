"""The price of `fs.from_torch`: the same runs with a loss in JAX, in turn, in one process."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import jax.numpy as jnp
import numpy as np

import fedstrata as fs
from benchmarks.timing import interleave, table
from fedstrata.models.losses import cross_entropy

CASES = {  # clients, features, neurons, rounds
    "MLP 64–32–10 (2,410 parameters), 5 clients": (5, 64, 32, 20),
    "MLP 784–200–10 (159,010 parameters), 10 clients": (10, 784, 200, 4),
}
STEPS, BATCH = 5, 32


def native(x: Any, sample: Any) -> Any:
    """The network in JAX."""
    inner = jnp.tanh(x["0.weight"] @ sample["x"] + x["0.bias"])
    return cross_entropy(x["2.weight"] @ inner + x["2.bias"], sample["y"])


def programs(clients: int, features: int, neurons: int, rounds: int) -> dict[str, Any]:
    """The programs by name: the same run with the losses of both."""
    import torch

    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    module = torch.nn.Sequential(
        torch.nn.Linear(features, neurons), torch.nn.Tanh(), torch.nn.Linear(neurons, 10)
    )
    loss = fs.from_torch(module, torch.nn.functional.cross_entropy)
    samples = [
        {"x": rng.normal(size=(200, features)).astype(np.float32), "y": rng.integers(0, 10, 200)}
        for _ in range(clients)
    ]
    data = fs.FederatedData.from_clients(samples)

    def opened(function: Any) -> Any:
        problem, method = fs.Minimization(function), fs.FedAvg(0.1, H=STEPS, batch_size=BATCH)

        def run() -> Any:
            return fs.solve(problem, method, data, loss.x0, rounds=rounds, eval_every=rounds, progress=False)

        @contextmanager
        def open() -> Any:
            yield run

        return open

    def around(x: Any, sample: Any) -> Any:
        return 1.0 * loss(x, sample)

    found = {
        "JAX": native,
        "from_torch": loss,
        "from_torch, then": loss.then(lambda value, x: 1.0 * value),
        "from_torch inside a function": around,  # a gradient for each sample
    }
    return {name: opened(function) for name, function in found.items()}


def main() -> None:
    """Print the ratios."""
    print(f"## fs.from_torch, FedAvg with {STEPS} steps on batches of {BATCH}\n")
    for title, case in CASES.items():
        timings = interleave(programs(*case), repetitions=4)
        judge = ("last loss", lambda result: float(result.history["loss"][-1]))
        print(table(title, timings, "JAX", case[-1], judge) + "\n", flush=True)


if __name__ == "__main__":
    main()
