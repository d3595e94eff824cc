"""FedAvg on softmax regression 784 × 10: 100 clients, 20 local steps, batches of 32; all or 10 of the clients a round.

Every alternative does the same arithmetic: draw a batch with replacement, a gradient step, the mean over the clients.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedstrata as fs

from .timing import interleave, table

CLIENTS, SAMPLES, FEATURES, CLASSES = 100, 600, 784, 10
STEPS, BATCH, GAMMA = 20, 32, 0.1
ROUNDS = {CLIENTS: 2, 10: 20}


def make_data(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.random((CLIENTS, SAMPLES, FEATURES), dtype=np.float32)
    return x, rng.integers(0, CLASSES, (CLIENTS, SAMPLES)).astype(np.int32)


def start() -> dict[str, np.ndarray]:
    return {"w": np.zeros((FEATURES, CLASSES), np.float32), "b": np.zeros(CLASSES, np.float32)}


def loss(params: Any, sample: Any) -> jax.Array:
    logits = sample["x"] @ params["w"] + params["b"]
    return jax.nn.logsumexp(logits) - logits[sample["y"]]


def ours(x: np.ndarray, y: np.ndarray, participants: int) -> Callable[[], Any]:
    data = fs.FederatedData.from_clients([{"x": a, "y": b} for a, b in zip(x, y, strict=True)])
    problem, method = fs.Minimization(loss), fs.FedAvg(gamma=GAMMA, H=STEPS, batch_size=BATCH)
    engine = fs.engines.Simulated()
    placed = engine.place(data)
    setup = fs.engines.base.Setup(problem, CLIENTS, participants, measure_problem=False)
    carry = engine.place_carry(fs.engines.base.Carry(method.init(problem, start(), None), None), CLIENTS)
    rounds = np.array([ROUNDS[participants]])

    def run() -> Any:
        return jax.block_until_ready(engine.advance(setup, method, carry, 0, placed, 0, rounds).carry)

    return run


def by_hand(x: np.ndarray, y: np.ndarray, participants: int, over: str) -> Callable[[], Any]:
    """The program that a JAX user would write: rounds in a scan, clients by `vmap` or `lax.map`."""
    x, y = jnp.asarray(x), jnp.asarray(y)

    def batch_loss(params: Any, xs: Any, ys: Any) -> jax.Array:
        logits = xs @ params["w"] + params["b"]
        return (jax.nn.logsumexp(logits, axis=1) - jnp.take_along_axis(logits, ys[:, None], 1)[:, 0]).mean()

    def client(params: Any, key: Any, xs: Any, ys: Any) -> Any:
        def step(params: Any, key: Any) -> tuple[Any, None]:
            rows = jax.random.randint(key, (BATCH,), 0, SAMPLES)
            grad = jax.grad(batch_loss)(params, xs[rows], ys[rows])
            return jax.tree.map(lambda p, g: p - GAMMA * g, params, grad), None

        return jax.lax.scan(step, params, jax.random.split(key, STEPS))[0]

    @jax.jit
    def program(params: Any, x: Any, y: Any) -> Any:
        def one_round(params: Any, key: Any) -> tuple[Any, None]:
            chosen = jnp.arange(CLIENTS)
            if participants < CLIENTS:
                chosen = jax.random.choice(key, CLIENTS, (participants,), replace=False)
            keys = jax.random.split(key, participants)
            if over == "vmap":
                ends = jax.vmap(partial(client, params))(keys, x[chosen], y[chosen])
                return jax.tree.map(lambda e: e.mean(0), ends), None
            ends = jax.lax.map(lambda kc: client(params, kc[0], x[kc[1]], y[kc[1]]), (keys, chosen))
            return jax.tree.map(lambda e: e.mean(0), ends), None

        return jax.lax.scan(one_round, params, jax.random.split(jax.random.key(0), ROUNDS[participants]))[0]

    params = jax.tree.map(jnp.asarray, start())
    return lambda: jax.block_until_ready(program(params, x, y))


def numpy_loop(x: np.ndarray, y: np.ndarray, participants: int) -> Callable[[], Any]:
    def run() -> Any:
        rng = np.random.default_rng(0)
        params = start()
        for _ in range(ROUNDS[participants]):
            total = {name: np.zeros_like(p) for name, p in params.items()}
            for i in rng.choice(CLIENTS, participants, replace=False):
                w, b = params["w"].copy(), params["b"].copy()
                for _ in range(STEPS):
                    rows = rng.integers(0, SAMPLES, BATCH)
                    xs, ys = x[i, rows], y[i, rows]
                    logits = xs @ w + b
                    p = np.exp(logits - logits.max(1, keepdims=True))
                    p /= p.sum(1, keepdims=True)
                    p[np.arange(BATCH), ys] -= 1
                    w -= GAMMA / BATCH * xs.T @ p
                    b -= GAMMA / BATCH * p.sum(0)
                total["w"] += w / participants
                total["b"] += b / participants
            params = total
        return params

    return run


def torch_sequential(x: np.ndarray, y: np.ndarray, participants: int) -> Callable[[], Any]:
    import torch

    xt, yt = torch.tensor(x), torch.tensor(y, dtype=torch.long)

    def run() -> Any:
        generator = torch.Generator().manual_seed(0)
        w, b = torch.zeros(FEATURES, CLASSES), torch.zeros(CLASSES)
        for _ in range(ROUNDS[participants]):
            ends = []
            for i in torch.randperm(CLIENTS, generator=generator)[:participants]:
                wi, bi = w.clone().requires_grad_(), b.clone().requires_grad_()
                optimizer = torch.optim.SGD([wi, bi], lr=GAMMA)
                for _ in range(STEPS):
                    rows = torch.randint(0, SAMPLES, (BATCH,), generator=generator)
                    optimizer.zero_grad()
                    torch.nn.functional.cross_entropy(xt[i, rows] @ wi + bi, yt[i, rows]).backward()
                    optimizer.step()
                ends.append((wi.detach(), bi.detach()))
            w, b = (torch.stack(parts).mean(0) for parts in zip(*ends, strict=True))
        return w

    return run


def torch_vmap(x: np.ndarray, y: np.ndarray, participants: int) -> Callable[[], Any]:
    import torch
    from torch.func import grad, vmap

    xt, yt = torch.tensor(x), torch.tensor(y, dtype=torch.long)

    def batch_loss(params: Any, xs: Any, ys: Any) -> Any:
        return torch.nn.functional.cross_entropy(xs @ params["w"] + params["b"], ys)

    gradients = vmap(grad(batch_loss))

    def run() -> Any:
        generator = torch.Generator().manual_seed(0)
        params = {"w": torch.zeros(FEATURES, CLASSES), "b": torch.zeros(CLASSES)}
        for _ in range(ROUNDS[participants]):
            chosen = torch.randperm(CLIENTS, generator=generator)[:participants, None]
            ends = {name: p.expand(participants, *p.shape) for name, p in params.items()}
            for _ in range(STEPS):
                rows = torch.randint(0, SAMPLES, (participants, BATCH), generator=generator)
                g = gradients(ends, xt[chosen, rows], yt[chosen, rows])
                ends = {name: p - GAMMA * g[name] for name, p in ends.items()}
            params = {name: p.mean(0) for name, p in ends.items()}
        return params

    return run


def alternatives(x: np.ndarray, y: np.ndarray, participants: int) -> dict[str, Callable[[], Any]]:
    """Everything that is installed."""
    found = {
        "fedstrata": ours(x, y, participants),
        "JAX by hand, vmap": by_hand(x, y, participants, "vmap"),
        "JAX by hand, lax.map": by_hand(x, y, participants, "map"),
        "NumPy loop": numpy_loop(x, y, participants),
    }
    if importlib.util.find_spec("torch"):
        found["PyTorch, one client after the other"] = torch_sequential(x, y, participants)
        found["torch.func.vmap"] = torch_vmap(x, y, participants)
    return found


def main() -> None:
    """Print the two tables."""
    x, y = make_data()
    for participants in (CLIENTS, 10):
        timings = interleave(alternatives(x, y, participants))
        title = f"FedAvg, softmax 784×10, {participants} of {CLIENTS} clients × {STEPS} steps × batch {BATCH}"
        by_least = {t.name: t.least for t in timings}
        best = min(v for name, v in by_least.items() if name.startswith("JAX by hand"))
        note = f"fedstrata / best program by hand: {by_least['fedstrata'] / best:.2f}"
        print(table(title, timings, "JAX by hand, vmap", note), end="\n\n")


if __name__ == "__main__":
    main()
