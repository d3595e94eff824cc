"""What a whole call of `fs.solve` costs beside a program by hand, and what unequal clients cost.

FedAvg, 20 local steps on batches of 32, clients × samples × 784. The program by hand has its data on the
device and one jitted `lax.scan` over rounds; on a CPU it runs its clients by `lax.map`, if that is quicker
than `vmap`. A call of `fs.solve` begins with the arguments and ends with a result on the host; the data was
placed by an earlier call.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedstrata as fs

from .timing import Timing, interleave, table, track

FEATURES, CLASSES, STEPS, BATCH, GAMMA = 784, 10, 20, 32, 0.05


def softmax(params: Any, x: Any) -> Any:
    return x @ params["w"] + params["b"]


def network(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["u"] + params["c"]) @ params["w"] + params["b"]


def start(model: Callable[..., Any]) -> dict[str, np.ndarray]:
    rng, hidden = np.random.default_rng(0), 200 if model is network else FEATURES
    params = {"w": np.zeros((hidden, CLASSES), np.float32), "b": np.zeros(CLASSES, np.float32)}
    if model is network:
        scale = np.float32(FEATURES**-0.5)
        params |= {"u": scale * rng.standard_normal((FEATURES, hidden), dtype=np.float32)}
        params |= {"c": np.zeros(hidden, np.float32)}
    return params


def data_of(clients: int, samples: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((clients, samples, FEATURES), dtype=np.float32) * np.float32(0.35)
    return x, rng.integers(0, CLASSES, (clients, samples)).astype(np.int32)


def by_hand(
    model: Callable[..., Any], x: np.ndarray, y: np.ndarray, participants: int, rounds: int, over: str
) -> Callable[[], Any]:
    clients, samples = y.shape

    def batch_loss(params: Any, xs: Any, ys: Any) -> Any:
        scores = model(params, xs)
        return (jax.nn.logsumexp(scores, 1) - jnp.take_along_axis(scores, ys[:, None], 1)[:, 0]).mean()

    @jax.jit
    def program(params: Any, x: Any, y: Any) -> Any:
        def local(params: Any, key: Any, i: Any) -> Any:
            def step(params: Any, key: Any) -> Any:
                rows = jax.random.randint(key, (BATCH,), 0, samples)
                grad = jax.grad(batch_loss)(params, x[i, rows], y[i, rows])
                return jax.tree.map(lambda p, g: p - GAMMA * g, params, grad), None

            return jax.lax.scan(step, params, jax.random.split(key, STEPS))[0]

        def one_round(params: Any, key: Any) -> Any:
            key_cohort, key_local = jax.random.split(key)
            chosen, keys = jnp.arange(clients), jax.random.split(key_local, participants)
            if participants < clients:
                chosen = jax.random.choice(key_cohort, clients, (participants,), replace=False)
            if over == "vmap":
                ends = jax.vmap(lambda key, i: local(params, key, i))(keys, chosen)
            else:
                ends = jax.lax.map(lambda pair: local(params, *pair), (keys, chosen))
            return jax.tree.map(lambda end: end.mean(0), ends), None

        return jax.lax.scan(one_round, params, jax.random.split(jax.random.key(0), rounds))[0]

    params, x, y = jax.tree.map(jnp.asarray, (start(model), x, y))
    return lambda: jax.block_until_ready(program(params, x, y))


def ours(
    model: Callable[..., Any], x: np.ndarray, y: np.ndarray, participants: int, rounds: int
) -> Callable[[], Any]:
    def loss(params: Any, sample: Any) -> Any:
        scores = model(params, sample["x"])
        return jax.nn.logsumexp(scores) - scores[sample["y"]]

    data = fs.FederatedData.from_clients([{"x": a, "y": b} for a, b in zip(x, y, strict=True)])
    problem, method = fs.Minimization(loss), fs.FedAvg(gamma=GAMMA, H=STEPS, batch_size=BATCH)
    x0 = start(model)

    def run() -> Any:
        return fs.solve(
            problem, method, data, x0, rounds=rounds, participation=participants, eval_every=rounds,
            default_metrics=False, progress=False,
        ).x  # fmt: skip

    return run


def row(name: str, model: Callable[..., Any], clients: int, samples: int, part: int, rounds: int) -> None:
    """One case, whole calls against the programs by hand."""
    x, y = data_of(clients, samples)

    def opened(run: Callable[[], Any]) -> Any:
        return lambda: nullcontext(run)

    programs = {
        "fs.solve, the whole call": opened(ours(model, x, y, part, rounds)),
        "by hand, vmap": opened(by_hand(model, x, y, part, rounds, "vmap")),
    }
    if jax.default_backend() == "cpu":
        programs["by hand, lax.map"] = opened(by_hand(model, x, y, part, rounds, "map"))
    timings: list[Timing] = interleave(programs, repetitions=7)
    best = min(t.least for t in timings if t.name.startswith("by hand"))
    mine = next(t.seconds for t in timings if t.name.startswith("fs"))
    size = ("Σ b²", lambda params: float((np.asarray(params["b"]) ** 2).sum()))
    ratio = track(f"fs.solve, {name}, {part} of {clients} clients", mine, best, "the best by hand")
    note = f"fs.solve / best by hand: {ratio:.2f}"
    print(
        table(f"{name}: {part} of {clients} clients", timings, "by hand, vmap", rounds, size, note),
        "\n",
        flush=True,
    )


def fixed_cost(repetitions: int = 50) -> None:
    """The least time of a call that computes next to nothing."""
    data = fs.FederatedData.from_clients([{"a": np.ones((3, 2), np.float32)} for _ in range(10)])
    problem = fs.Minimization(lambda x, s: ((x - s["a"]) ** 2).sum())
    times = []
    for _ in range(repetitions):
        began = time.perf_counter()
        fs.solve(problem, fs.FedAvg(gamma=0.1), data, np.zeros(2, np.float32), rounds=1, progress=False)
        times.append(time.perf_counter() - began)
    print(
        f"Fixed cost of a call: {1e3 * min(times[1:]):.1f} ms (least), {1e3 * np.median(times[1:]):.1f} ms\n"
    )


def unequal(clients: int = 400, rounds: int = 3) -> None:
    """Full-batch rounds with Zipf sizes beside equal sizes of the same total, and what the data takes."""
    rng = np.random.default_rng(0)
    sizes = np.minimum(rng.zipf(1.5, clients), 2000)
    each = max(1, round(sizes.sum() / clients))
    problem = fs.Minimization(lambda x, s: 0.5 * (s["a"] @ x - s["b"]) ** 2)

    def opened(numbers: np.ndarray) -> Any:
        own = [
            {"a": rng.standard_normal((n, 64), dtype=np.float32), "b": np.zeros(n, np.float32)}
            for n in numbers
        ]
        data = fs.FederatedData.from_clients(own)
        real = int(numbers.sum()) * 65 * 4
        data.placed()
        taken[int(numbers.max())] = data.placed_bytes / real

        def run() -> Any:
            return fs.solve(
                problem, fs.FedAvg(gamma=0.01, H=STEPS), data, np.zeros(64, np.float32), rounds=rounds,
                eval_every=rounds, default_metrics=False, progress=False,
            ).x  # fmt: skip

        return lambda: nullcontext(run)

    taken: dict[int, float] = {}
    programs = {"Zipf sizes": opened(sizes), "equal sizes": opened(np.full(clients, each))}
    timings = interleave(programs, repetitions=7)
    zipf, equal = timings
    track(f"full batches, {clients} clients with Zipf sizes", zipf.seconds, equal.least, "equal sizes")
    title = f"Full batches, {clients} clients with sizes 1 … {sizes.max()}, {sizes.sum()} samples in all"
    judge = ("‖x‖", lambda x: float(np.linalg.norm(x)))
    bytes_taken = ", ".join(f"{ratio:.2f}" for ratio in taken.values())
    note = f"bytes on the device for each of the samples' own (Zipf, equal): {bytes_taken}"
    print(table(title, timings, "equal sizes", rounds, judge, note), "\n", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true", help="the network over 1000 clients too (GPU)")
    options = parser.parse_args()
    print("## Whole calls\n")
    fixed_cost()
    scale = 1 if options.large else 10
    row("softmax 784 × 10", softmax, 100, 600, 100, 100 // scale)
    row("softmax 784 × 10", softmax, 100, 600, 10, 200 // scale)
    if options.large:
        row("network of 159 k parameters", network, 1000, 200, 1000, 10)
        row("network of 159 k parameters", network, 1000, 200, 50, 50)
    unequal()
    if options.large:
        unequal(20_000)


if __name__ == "__main__":
    main()
