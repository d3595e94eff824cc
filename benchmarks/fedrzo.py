"""FedRZO on the network of the experiment fedrzo-relu, against the same algorithm in NumPy and in PyTorch.

    f(Z, w; u, v) = ½ (v − wᵀ max(0, Zu))² + λ/2 (‖Z‖² + ‖w‖²)

5 clients with 12 000 samples of 784 numbers as with MNIST, 4 neurons, one sample a step. The loops hold the
parameters as one vector x = (Z, w), and do line by line what `fedstrata.methods.fedrzo` prints.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

import fedstrata as fs
from fedstrata.core.fed import Setup
from fedstrata.engines.engine import Carry, Job
from fedstrata.models import relu_network

from .timing import Run, interleave, table, track

CLIENTS, SAMPLES, FEATURES = 5, 12_000, 784
REFERENCE = "NumPy loop"


@dataclass(frozen=True)
class Case:
    """Data (clients × samples × features; labels mean ±1 by their parity) and hyper-parameters of a run."""

    u: np.ndarray
    labels: np.ndarray
    H: int
    rounds: int
    neurons: int = 4
    lam: float = 0.01
    gamma: float = 1e-5
    eta: float = 0.01

    @property
    def clients(self) -> int:
        return self.u.shape[0]

    @property
    def samples(self) -> int:
        return self.u.shape[1]

    @property
    def signs(self) -> np.ndarray:
        """The v."""
        return (1 - 2 * (self.labels % 2)).astype(np.float32)

    def model(self) -> Any:
        return relu_network(self.u.shape[2], self.neurons, self.lam)

    def start(self) -> np.ndarray:
        """x = (Z, w) as one vector."""
        x = self.model().init(0)
        return np.concatenate([np.ravel(x["Z"]), x["w"]])

    def loss(self, x: Any) -> float:
        """The mean over all samples."""
        x = np.asarray(x, float)
        Z, w = x[: -self.neurons].reshape(self.neurons, -1), x[-self.neurons :]
        residual = self.signs - np.maximum(self.u @ Z.T, 0) @ w
        return float(0.5 * np.mean(residual**2) + self.lam / 2 * x @ x)


def make_case(H: int, rounds: int) -> Case:
    rng = np.random.default_rng(0)
    u = rng.random((CLIENTS, SAMPLES, FEATURES), dtype=np.float32)
    return Case(u, rng.integers(0, 10, (CLIENTS, SAMPLES)).astype(np.int32), H, rounds)


def ours(case: Case) -> Run:
    data = fs.FederatedData.from_clients([{"x": u, "y": y} for u, y in zip(case.u, case.labels, strict=True)])
    problem = fs.Minimization(case.model().loss)
    method = fs.FedRZO(gamma=case.gamma, eta=case.eta, H=case.H, batch_size=1)
    engine = fs.engines.Simulated()
    placed = engine.place(data)
    setup = Setup(problem, case.clients, case.clients, measure_problem=False)
    start = jax.tree.map(np.asarray, case.model().init(0))
    carry = engine.place_carry(Carry(method.init(problem, start, None), None))
    rounds = np.array([case.rounds])

    def run() -> Any:
        x = engine.advance(Job(setup, method, 0, placed), carry, 0, rounds).carry.state.x
        return np.concatenate([np.ravel(x["Z"]), x["w"]])

    return run


def numpy_loop(case: Case) -> Run:
    def run() -> Any:
        rng = np.random.default_rng(0)
        mean, n, signs = case.start(), case.start().size, case.signs

        def f(x: Any, u: Any, v: Any) -> Any:
            Z, w = x[: -case.neurons].reshape(case.neurons, -1), x[-case.neurons :]
            return 0.5 * (v - w @ np.maximum(Z @ u, 0)) ** 2 + case.lam / 2 * (x @ x)

        for _ in range(case.rounds):
            total = np.zeros_like(mean)
            for i in range(case.clients):
                x = mean.copy()
                for _ in range(case.H):
                    row = rng.integers(case.samples)
                    u, v = case.u[i, row], signs[i, row]
                    d = rng.standard_normal(n, dtype=np.float32)
                    d *= case.eta / np.linalg.norm(d)
                    x -= case.gamma * n / case.eta**2 * (f(x + d, u, v) - f(x, u, v)) * d
                total += x
            mean = total / case.clients
        return mean

    return run


def torch_loop(case: Case) -> Run:
    import torch

    from .alternatives.pytorch import one_thread

    data, signs, start = torch.tensor(case.u), torch.tensor(case.signs), torch.tensor(case.start())

    @one_thread()
    @torch.no_grad()
    def run() -> Any:
        generator = torch.Generator().manual_seed(0)
        mean, n = start, start.numel()

        def f(x: Any, u: Any, v: Any) -> Any:
            Z, w = x[: -case.neurons].view(case.neurons, -1), x[-case.neurons :]
            return 0.5 * (v - w @ torch.relu(Z @ u)) ** 2 + case.lam / 2 * (x @ x)

        for _ in range(case.rounds):
            total = torch.zeros_like(mean)
            for i in range(case.clients):
                x = mean.clone()
                for _ in range(case.H):
                    row = torch.randint(0, case.samples, (), generator=generator)
                    u, v = data[i, row], signs[i, row]
                    d = torch.randn(n, generator=generator)
                    d *= case.eta / torch.linalg.vector_norm(d)
                    x -= case.gamma * n / case.eta**2 * (f(x + d, u, v) - f(x, u, v)) * d
                total += x
            mean = total / case.clients
        return mean

    return run


PROGRAMS: dict[str, tuple[str, Callable[[Case], Run]]] = {
    "fedstrata": ("fedstrata", ours),
    "NumPy loop": ("numpy", numpy_loop),
    "PyTorch loop": ("torch", torch_loop),
}


def compare(case: Case) -> str:
    """The table of one case, with the programs whose package is installed."""

    def opened(program: Callable[[Case], Run]) -> AbstractContextManager[Run]:
        return nullcontext(program(case))

    found = {name: program for name, (needs, program) in PROGRAMS.items() if importlib.util.find_spec(needs)}
    timings = interleave({name: partial(opened, program) for name, program in found.items()})
    judge = f"loss after {case.rounds} rounds", case.loss
    by_name = {t.name: t for t in timings}
    track(f"FedRZO, H = {case.H}", by_name["fedstrata"].seconds, by_name[REFERENCE].least, "a NumPy loop")
    return table(f"H = {case.H}", timings, REFERENCE, case.rounds, judge)


def main() -> None:
    """Print a table for each number of local steps."""
    print("## FedRZO, a network of 4 ReLUs on 784 inputs, 5 clients, one sample a step\n")
    for H, rounds in ((1, 500), (10, 50)):
        print(compare(make_case(H, rounds)), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
