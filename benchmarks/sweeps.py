"""A grid of 32 step sizes × 4 seeds in one program, beside one run of it, and with half of it diverging."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedstrata as fs

from .timing import track

CLIENTS, SAMPLES, FEATURES, ROUNDS = 20, 50, 32, 200
STEPS, SEEDS = np.geomspace(0.01, 1.0, 32), range(4)
TOO_LONG = np.geomspace(300.0, 1e6, 16)  # the regulariser's 0.02 x makes these diverge, at several rounds


def loss(x: Any, sample: Any) -> Any:
    return jax.nn.softplus(-sample["y"] * (sample["a"] @ x)) + 0.01 * jnp.vdot(x, x)


def timed(run: Callable[[], Any], repetitions: int = 5) -> list[float]:
    run()
    times = []
    for _ in range(repetitions):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return times


def main() -> None:
    """Print the ratio."""
    rng = np.random.default_rng(0)
    clients = [
        {"a": rng.standard_normal((SAMPLES, FEATURES)), "y": rng.choice([-1.0, 1.0], SAMPLES)}
        for _ in range(CLIENTS)
    ]
    data, problem = fs.FederatedData.from_clients(clients), fs.Minimization(loss)
    arguments: dict[str, Any] = {"rounds": ROUNDS, "eval_every": 10, "progress": False}
    grid = [fs.FedAvg(gamma=float(g), H=5, batch_size=8) for g in STEPS]
    diverging = [*grid[::2], *(fs.FedAvg(gamma=float(g), H=5, batch_size=8) for g in TOO_LONG)]
    x0 = np.zeros(FEATURES)

    def sweep(methods: list[fs.FedAvg]) -> list[fs.Result]:
        return fs.sweep(problem, methods, data, x0, seeds=list(SEEDS), **arguments)

    one = min(timed(lambda: fs.solve(problem, grid[0], data, x0, **arguments)))
    times = [timed(lambda: sweep(grid)), timed(lambda: sweep(diverging))]
    all_of_them, some_diverge = map(min, times)
    gone = sum(result.status == "diverged" for result in sweep(diverging))
    number = len(STEPS) * len(SEEDS)
    track(f"a sweep of {number} runs", times[0], one, "one run")
    track(f"the same, {gone} of them diverging", times[1], all_of_them, "none diverging")
    print(f"## Sweeps\n\n{CLIENTS} clients × {SAMPLES} × {FEATURES}, FedAvg, {ROUNDS} rounds of 5 steps\n")
    print("| | s | ratio to one run |\n|---|---:|---:|")
    print(f"| one run | {one:.3f} | 1 |")
    print(f"| {number} runs in one program | {all_of_them:.3f} | {all_of_them / one:.1f} |")
    print(f"| {number} runs, {gone} of which diverge | {some_diverge:.3f} | {some_diverge / one:.1f} |\n")
    print(f"With half of them diverging: {some_diverge / all_of_them:.2f} of the time with none.\n")


if __name__ == "__main__":
    main()
