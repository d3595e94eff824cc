"""FedMSA's outer iteration on long-tail MNIST: 100 clients gathered, 10 of them doing K = 4 local steps.

The loss of an MLP 784-200-10 (159 010 parameters) is tuned by 20 numbers; 14 818 images, a fifth for
validation, full local batches. The program by hand is what a JAX user would write from the paper: every map
at both points (5), (6), and its gradient, Hessian-vector product and mixed product one after the other. The
same clients are chosen, so that both programs go through the same iterates.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedstrata as fs
from fedstrata.core.fed import Setup
from fedstrata.engines.engine import Carry, Job
from fedstrata.problems.hyper import balance

from .timing import interleave, table

CLIENTS, CHOSEN, STEPS, CLASSES = 100, 10, 4, 10
ALPHA, BETA, RHO = 0.05, 0.1, 0.5
COUNTS = [5923, 3597, 2157, 1293, 775, 465, 279, 167, 101, 61]  # min(N_c, ⌊6000 · 0.01^{c/9}⌋ + 1)
FEATURES, HIDDEN = 784, 200


def images(path: str | None) -> tuple[np.ndarray, np.ndarray]:
    """The long tail of MNIST, normalised; noise of the same shape where MNIST is not there."""
    labels = np.repeat(np.arange(CLASSES), COUNTS).astype(np.int32)
    if path is None or not Path(path).is_file():
        return np.random.default_rng(0).normal(size=(labels.size, FEATURES)).astype(np.float32), labels
    with np.load(path) as file:
        x, y = file["x_train"].reshape(-1, FEATURES), file["y_train"]
    rows = np.concatenate([np.flatnonzero(y == c)[:n] for c, n in enumerate(COUNTS)])
    return ((x[rows] / 255 - 0.1307) / 0.3081).astype(np.float32), labels


def clients(path: str | None, q: float = 0.3) -> fs.FederatedData:
    """A hundred clients of 148 or 149 images, a fifth of them held out."""
    x, y = images(path)
    arrays = {"x": x, "y": y, "weight": balance(y, CLASSES).astype(np.float32)}
    return fs.FederatedData.from_arrays(arrays, CLIENTS, fs.OneClass(q), valid_fraction=0.2)


def start() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)

    def layer(inputs: int, outputs: int) -> Any:
        W = rng.normal(size=(inputs, outputs)) * np.sqrt(2 / inputs)
        return {"W": W.astype(np.float32), "b": np.zeros(outputs, np.float32)}

    x = {name: np.zeros(CLASSES, np.float32) for name in ("delta", "shift")}
    return x, {"hidden": layer(FEATURES, HIDDEN), "output": layer(HIDDEN, CLASSES)}


def predict(y: Any, u: Any) -> Any:
    inner = jax.nn.relu(u @ y["hidden"]["W"] + y["hidden"]["b"])
    return inner @ y["output"]["W"] + y["output"]["b"]


PROBLEM = fs.loss_tuning(predict)


def ours(data: fs.FederatedData, rounds: int) -> Callable[[], Any]:
    method = fs.FedMSA(ALPHA, BETA, rho=RHO, K=STEPS, clients=CHOSEN)
    engine = fs.engines.Simulated()
    placed = engine.place(data)
    setup = Setup(PROBLEM, CLIENTS, CLIENTS, measure_problem=False)
    state = method.init(PROBLEM, *jax.tree.map(jnp.asarray, start()))
    carry = engine.place_carry(Carry(state, None))

    def run() -> Any:
        # round 0 has K = 1: begin with round 1, whose point before is the same
        return jax.block_until_ready(
            engine.advance(Job(setup, method, 0, placed), carry, 1, np.array([rounds])).carry.state[:2]
        )

    return run


def padded(data: fs.FederatedData, part: str) -> Any:
    """The clients' arrays, stacked and padded to the longest, as a program by hand would hold them."""
    clients = [data.client(i, part) for i in range(data.clients)]
    longest = max(len(own["y"]) for own in clients)

    def pad(*leaves: np.ndarray) -> np.ndarray:
        return np.stack([np.concatenate([a, np.repeat(a[:1], longest - len(a), 0)]) for a in leaves])

    return jax.tree.map(pad, *clients)


def by_hand(data: fs.FederatedData, rounds: int, over: str) -> Callable[[], Any]:
    """The paper's lines as they stand, clients by `vmap` or `lax.map`."""
    arrays = (padded(data, "train"), data.sizes, padded(data, "valid"), data.valid_sizes)
    arrays = jax.tree.map(jnp.asarray, arrays)

    def mean(losses: Any, size: Any) -> Any:
        return jnp.where(jnp.arange(losses.shape[0]) < size, losses, 0).sum() / size

    def maps(client: Any, x: Any, w: Any, v: Any) -> Any:
        train, size, valid, valid_size = client

        def g(x: Any, w: Any) -> Any:
            return mean(jax.vmap(lambda s: PROBLEM.lower(x, w, s))(train), size)

        def f(x: Any, w: Any) -> Any:
            return mean(jax.vmap(lambda s: PROBLEM.upper(x, w, s))(valid), valid_size)

        f_x, f_w = jax.grad(f, argnums=(0, 1))(x, w)
        slope = jax.grad(g, argnums=1)(x, w)
        product = jax.jvp(lambda w: jax.grad(g, argnums=1)(x, w), (w,), (v,))[1]
        mixed = jax.vjp(lambda x: jax.grad(g, argnums=1)(x, w), x)[1](v)[0]
        return sub(f_x, mixed), slope, sub(product, f_w)

    def sub(a: Any, b: Any) -> Any:
        return jax.tree.map(jnp.subtract, a, b)

    def add(a: Any, b: Any, factor: float = 1.0) -> Any:
        return jax.tree.map(lambda a, b: a + factor * b, a, b)

    def move(point: Any, direction: Any) -> Any:
        steps = (ALPHA, BETA, BETA)
        return tuple(add(p, d, -s) for p, d, s in zip(point, direction, steps, strict=True))

    def each(function: Any, clients: Any) -> Any:
        replies = jax.vmap(function)(clients) if over == "vmap" else jax.lax.map(function, clients)
        return jax.tree.map(lambda leaf: leaf.mean(0), replies)

    def one_round(arrays: Any, r: Any, carry: Any) -> Any:
        point, before, direction = carry
        key = jax.random.split(jax.random.fold_in(jax.random.key(0), r))[1]
        chosen = jnp.sort(jax.random.choice(jax.random.split(key, 3)[1], CLIENTS, (CHOSEN,), replace=False))

        def momentum(client: Any) -> Any:
            rest = sub(direction, maps(client, *before))
            return add(maps(client, *point), rest, 1 - RHO)

        def local(client: Any) -> Any:
            def step(_: Any, carry: Any) -> Any:
                now, last, h = carry
                h = add(h, sub(maps(client, *now), maps(client, *last)))
                return move(now, h), now, h

            return jax.lax.fori_loop(0, STEPS, step, (point, point, gathered))[0]

        gathered = each(momentum, arrays)
        return each(local, jax.tree.map(lambda leaf: leaf[chosen], arrays)), point, gathered

    @jax.jit
    def program(arrays: Any, x: Any, w: Any) -> Any:
        point = x, w, jax.tree.map(jnp.zeros_like, w)
        direction = each(lambda client: maps(client, *point), arrays)  # that of round 0
        carry = point, point, direction
        return jax.lax.fori_loop(1, 1 + rounds, lambda r, carry: one_round(arrays, r, carry), carry)[0]

    x, w = jax.tree.map(jnp.asarray, start())
    return lambda: jax.block_until_ready(program(arrays, x, w))


def flops(data: fs.FederatedData) -> dict[str, float]:
    """Multiplications and additions of an outer iteration in matrix products.

    A gradient is a pass forwards and one backwards (no derivative by the images), 4 n P of n samples and P
    weights; a product along v doubles it. By hand: gradient 4, product 8, mixed product 12 and ∇f at both
    points, as it is written: the compiler merges some of it. Here 8 and ∇f, once.
    """
    weights = (
        FEATURES * HIDDEN + 1.5 * HIDDEN * CLASSES
    )  # the second layer has a derivative by its inputs, too
    train, valid = float(np.mean(data.sizes)), float(np.mean(data.valid_sizes))
    ours = weights * (8 * train + 4 * valid) * (CLIENTS + CHOSEN * STEPS)
    hand = weights * (24 * train + 4 * valid) * 2 * (CLIENTS + CHOSEN * STEPS)
    return {"FedStrata": ours, "by hand, vmap": hand, "by hand, lax.map": hand}


def peak() -> float:
    """The speed of a large matrix product of this precision, in operations a second."""
    a = jnp.ones((4096, 4096), jnp.float32) if jax.default_backend() != "cpu" else jnp.ones((2048, 2048))
    times = 50 if jax.default_backend() != "cpu" else 2

    @jax.jit
    def products(a: Any) -> Any:
        return jax.lax.fori_loop(0, times, lambda _, b: 1e-4 * (a @ b), a)

    timing = interleave({"product": lambda: nullcontext(lambda: jax.block_until_ready(products(a)))}, 5)[0]
    return 2 * a.shape[0] ** 3 * times / timing.least


def main(argv: list[str] | None = None) -> None:
    """Print a table of times, and the fraction of the speed of a large matrix product that is reached."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fedmsa_losstuning")
    folder = os.environ.get("FEDSTRATA_DATA")
    parser.add_argument("--mnist", default=None if folder is None else str(Path(folder) / "mnist.npz"))
    parser.add_argument("--rounds", type=int, default=None, help="outer iterations in a run")
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args([] if argv is None else argv)
    on_cpu = jax.default_backend() == "cpu"
    rounds = options.rounds or (1 if on_cpu else 20)
    data = clients(options.mnist)
    programs = {"FedStrata": ours(data, rounds), "by hand, lax.map": by_hand(data, rounds, "map")}
    if not on_cpu:  # on a CPU the replies of all clients would not fit the caches
        programs["by hand, vmap"] = by_hand(data, rounds, "vmap")
    timings = interleave(
        {name: lambda run=run: nullcontext(run) for name, run in programs.items()}, options.repetitions
    )
    first = timings[0].result

    def apart(result: Any) -> float:
        """The largest difference of x between a program and ours, relative."""
        mine, theirs = (np.concatenate(jax.tree.leaves(r[0])) for r in (first, result))
        return float(np.abs(mine - theirs).max() / np.abs(theirs).max())

    title = "FedMSA on long-tail MNIST: an outer iteration"
    print(table(title, timings, "FedStrata", rounds, ("difference of x", apart)))
    limit, counts = peak(), flops(data)
    print(f"\nA large matrix product runs at {limit / 1e9:.0f} GFLOP/s here.\n")
    for t in timings:
        speed = counts[t.name] * rounds / t.least
        # a program by hand does less than it says, so that its speed is not known
        reached = (
            f", {speed / 1e9:.0f} GFLOP/s, {speed / limit:.0%} of that" if t is timings[0] else " as written"
        )
        print(f"{t.name}: {counts[t.name] / 1e9:.1f} GFLOP{reached}")


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
