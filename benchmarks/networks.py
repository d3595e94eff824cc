"""Networks on one GPU: whole calls beside programs by hand, the forms of convolutions, the card's limits.

    python -m benchmarks.networks [limits forms cnn resnet gpt] [--out FILE.json]
    python -m benchmarks.networks cnn resnet gpt --only "8 of 8.*FedStrata$"    # rows by their names
    python -m benchmarks.networks large                                             # 163 M parameters
    CUDA_VISIBLE_DEVICES=0,1 python -m benchmarks.networks cnn resnet gpt    # with rows of both GPUs
    python -m benchmarks.networks small                                      # two cores of a CPU, in turn

Random data. CNN: the CIFAR10 benchmark of pfl-research (1000 clients × 50 images, 50 a round, 5 steps of 10).
ResNet20: 8 clients with 4 steps of 16, and 20 of 100 with 5 steps of 20. GPT: 10.6 M parameters, 16 of 64
clients, 4 steps of 8 × 256 tokens. A program by hand maps one client's steps over the round's clients, with
convolutions as patches and a product, in one jitted loop over rounds. Least ms of a round of three calls.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import fedstrata as fs
from benchmarks.timing import interleave
from fedstrata.engines.convolutions import rewritten

REPEATS = 3
ONLY = re.compile("")  # what the names of cases and programs contain
Rows = list[dict[str, Any]]


def least(run: Callable[[], Any], repeats: int = REPEATS) -> tuple[float, float]:
    """Seconds of the first call, and the least of those after it."""
    began = time.perf_counter()
    jax.block_until_ready(run())
    first = time.perf_counter() - began
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(run())
        found.append(time.perf_counter() - began)
    return first, min(found)


def timed(rows: Rows, case: str, program: str, run: Callable[[], Any], rounds: int) -> None:
    """Time a call of so many rounds, or say why it failed; keep and print it."""
    if not ONLY.search(f"{case}: {program}"):
        return
    row: dict[str, Any] = {"case": case, "program": program}
    try:
        first, seconds = least(run)
        row |= {"ms": 1e3 * seconds / rounds, "first": first}
        print(f"{case:28s} {program:34s} {row['ms']:9.2f} ms a round   first call {first:6.1f} s", flush=True)
    except Exception as error:  # the others are still of interest
        row["error"] = f"{type(error).__name__}: {error}"[:300]
        print(case, program, row["error"], flush=True)
    rows.append(row)


def limits(rows: Rows) -> None:
    """The card's bandwidth of a copy, and its rates of products."""
    a = jnp.ones(2**28)
    copy = jax.jit(lambda a: lax.fori_loop(0, 20, lambda _, a: a + 1, a))
    _, seconds = least(lambda: copy(a))
    rows.append({"case": "limits", "program": "bytes a second", "value": 20 * 2 * a.nbytes / seconds})
    for dtype in ("float32", "bfloat16"):
        m = jax.random.normal(jax.random.key(0), (8192, 8192), dtype)
        multiply = jax.jit(lambda m: lax.fori_loop(0, 10, lambda _, b: m @ b * 0.01, m))
        _, seconds = least(lambda m=m, f=multiply: f(m))
        rows.append({"case": "limits", "program": f"flop/s {dtype}", "value": 10 * 2 * 8192**3 / seconds})
    for row in rows[-3:]:
        print(row, flush=True)


SHAPES = (  # groups, images, height, channels, outputs, stride
    (50, 10, 32, 3, 32, 1), (50, 10, 30, 32, 64, 1), (8, 16, 32, 16, 16, 1), (8, 16, 16, 32, 32, 1),
    (8, 16, 8, 64, 64, 1), (20, 20, 32, 16, 16, 1), (20, 20, 8, 64, 64, 1), (16, 32, 14, 256, 256, 1),
)  # fmt: skip


def forms(rows: Rows) -> None:
    """A convolution of 3×3 (5×5 for one shape) of every client, and its derivatives, in every form."""
    for groups, images, height, channels, outputs, stride in SHAPES:
        for k in (3, 5) if channels == 32 else (3,):
            u = jax.random.normal(jax.random.key(0), (groups, images, height, height, channels))
            w = jax.random.normal(jax.random.key(1), (groups, k, k, channels, outputs))

            def value(w: Any, u: Any, stride: int = stride) -> Any:
                y = lax.conv_general_dilated(
                    u, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
                )
                return (y**2).sum()

            step = jax.vmap(jax.grad(value, (0, 1)))
            closed = jax.make_jaxpr(step)(w, u)
            choices: dict[str, Any] = {
                "groups": None,
                "patches": lambda s, p: "patches" if s.window <= s.positions else "positions",
                "sums": lambda s, p: "sums" if s.window <= s.positions else "positions",
                "by weights as it is": lambda s, p: "patches" if s.window <= s.positions else None,
            }
            for name, choose in choices.items():
                own = closed if choose is None else rewritten(closed, "gpu", choose)[0]
                many = jax.jit(
                    lambda w, u, own=own: lax.fori_loop(
                        0, 10, lambda _, w: w - 1e-9 * jax.core.eval_jaxpr(own.jaxpr, own.consts, w, u)[0], w
                    )
                )
                case = f"{groups}x{images}x{height}² {channels}→{outputs} {k}x{k}"
                timed(rows, case, name, lambda f=many, w=w, u=u: f(w, u), 10)


def by_hand(
    loss: Callable[..., Any],
    x0: Any,
    arrays: Any,
    sizes: tuple[int, ...],
    gamma: float,
    rounds: int,
    over: str = "vmap",
) -> Callable[[], Any]:
    """FedAvg as a program: ``loss(x, batch)`` is the mean over a batch; clients side by side, or in turn."""
    clients, samples, chosen, H, batch = sizes

    @jax.jit
    def program(x: Any, arrays: Any) -> Any:
        def local(x: Any, key: Any, i: Any) -> Any:
            def step(x: Any, key: Any) -> Any:
                rows = jax.random.randint(key, (batch,), 0, samples)
                g = jax.grad(loss)(x, jax.tree.map(lambda a: a[i, rows], arrays))
                return jax.tree.map(lambda a, b: a - gamma * b, x, g), None

            return lax.scan(step, x, jax.random.split(key, H))[0]

        def one(x: Any, key: Any) -> Any:
            key, own = jax.random.split(key)
            who = jax.random.choice(key, clients, (chosen,), replace=False)
            keys = jax.random.split(own, chosen)
            if over == "map":
                ends = lax.map(lambda its: local(x, *its), (keys, who))
            else:
                ends = jax.vmap(local, (None, 0, 0))(x, keys, who)
            return jax.tree.map(lambda a: a.mean(0), ends), None

        return lax.scan(one, x, jax.random.split(jax.random.key(0), rounds))[0]

    args = jax.tree.map(jnp.asarray, (x0, arrays))
    return lambda: program(*args)


def ours(
    loss: Callable[..., Any],
    x0: Any,
    data: Any,
    chosen: int,
    method: Any,
    rounds: int,
    frozen: Any = None,
    **options: Any,
) -> Callable[[], Any]:
    """A whole call of `fedstrata.solve`."""
    problem = fs.Minimization(loss, frozen=frozen)
    return lambda: fs.solve(
        problem, method, data, x0, rounds=rounds, participation=chosen, eval_every=rounds,
        default_metrics=False, progress=False, certify=False, **options,
    ).x  # fmt: skip


def patches(u: Any, w: Any, stride: int = 1, padding: int = 0) -> Any:
    """A convolution of images (batch, height, width, channels) by one product."""
    u = jnp.pad(u, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    height, width = u.shape[1] - w.shape[0] + 1, u.shape[2] - w.shape[1] + 1
    window = itertools.product(range(w.shape[0]), range(w.shape[1]))
    cut = [u[:, i : i + height : stride, j : j + width : stride] for i, j in window]
    return jnp.concatenate(cut, -1) @ w.reshape(-1, w.shape[-1])


def by_lax(u: Any, w: Any, stride: int = 1, padding: int = 0) -> Any:
    """The same as a user writes it."""
    both = (padding, padding)
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(u, w, (stride, stride), (both, both), dimension_numbers=numbers)


def federated(arrays: dict[str, np.ndarray]) -> Any:
    """Clients of arrays with a leading axis of clients."""
    length = len(next(iter(arrays.values())))
    return fs.FederatedData.from_clients([{n: a[i] for n, a in arrays.items()} for i in range(length)])


def cross_entropy(scores: Any, label: Any) -> Any:
    """Of one sample, in float32."""
    scores = scores.astype(jnp.float32)
    return jax.nn.logsumexp(scores) - scores[label]


def batch_loss(apply: Callable[..., Any], dtype: Any) -> Callable[..., Any]:
    """The mean over a batch of what ``apply`` scores, in a dtype."""

    def loss(x: Any, batch: Any) -> Any:
        x = jax.tree.map(lambda a: a.astype(dtype), x)
        return jax.vmap(cross_entropy)(apply(x, batch["x"].astype(dtype)), batch["y"]).mean()

    return loss


def cnn_scores(conv: Callable[..., Any], x: Any, u: Any) -> Any:
    """The network of pfl-research's benchmark: two convolutions, a pooling, two dense layers."""
    u = jax.nn.relu(conv(u, x["c1"]) + x["b1"])
    u = jax.nn.relu(conv(u, x["c2"]) + x["b2"])
    b, h, w, c = u.shape
    u = u.reshape(b, h // 2, 2, w // 2, 2, c).max((2, 4)).reshape(b, -1)
    return jax.nn.relu(u @ x["w1"] + x["d1"]) @ x["w2"] + x["d2"]


def cnn_case(clients: int) -> tuple[Any, dict[str, np.ndarray], Any]:
    """The CIFAR10 benchmark of pfl-research: where it starts, 50 images of each client, the loss."""
    rng = np.random.default_rng(0)
    arrays = {
        "x": rng.standard_normal((clients, 50, 32, 32, 3), dtype=np.float32),
        "y": rng.integers(0, 10, (clients, 50)).astype(np.int32),
    }

    def glorot(*shape: int) -> np.ndarray:
        a = (6 / (np.prod(shape[:-1]) + shape[-1])) ** 0.5
        return rng.uniform(-a, a, shape).astype(np.float32)

    x0 = {
        "c1": glorot(3, 3, 3, 32), "b1": np.zeros(32, np.float32), "c2": glorot(3, 3, 32, 64),
        "b2": np.zeros(64, np.float32), "w1": glorot(14 * 14 * 64, 128), "d1": np.zeros(128, np.float32),
        "w2": glorot(128, 10), "d2": np.zeros(10, np.float32),
    }  # fmt: skip

    def loss(x: Any, s: Any) -> Any:
        return cross_entropy(cnn_scores(by_lax, x, s["x"][None])[0], s["y"])

    return x0, arrays, loss


def cnn(rows: Rows) -> None:
    """The CIFAR10 benchmark of pfl-research."""
    x0, arrays, loss = cnn_case(1000)
    data, method, case = federated(arrays), fs.FedAvg(gamma=0.1, H=5, batch_size=10), "CNN 50 of 1000"
    for dtype in (jnp.float32, jnp.bfloat16):
        own = batch_loss(functools.partial(cnn_scores, patches), dtype)
        hand = by_hand(own, x0, arrays, (1000, 50, 50, 5, 10), 0.1, 50)
        timed(rows, case, f"by hand {dtype.__name__}", hand, 50)
    _ours(rows, case, loss, x0, data, 50, method, 50)


def small(rows: Rows) -> None:
    """The CNN and a small transformer on two cores, beside the best of several programs by hand, in turn."""
    x0, arrays, loss = cnn_case(20)
    forms = {"patches": patches, "lax": by_lax}
    losses = {n: batch_loss(functools.partial(cnn_scores, f), jnp.float32) for n, f in forms.items()}
    _in_turn(rows, "CNN 4 of 20", losses, loss, x0, arrays, (20, 50, 4, 5, 10), 2)
    sizes = GPT(65, 64, 128, 2, 4)
    arrays = {"t": np.random.default_rng(0).integers(0, 65, (16, 32, 65)).astype(np.int32)}
    one = functools.partial(gpt_loss, jnp.float32, sizes)

    def batch(x: Any, s: Any) -> Any:
        return jax.vmap(one, (None, 0))(x, s).mean()

    start = gpt_start(jax.random.key(0), sizes)
    _in_turn(rows, "GPT of 0.4 M, 4 of 16", {"": batch}, one, start, arrays, (16, 32, 4, 4, 4), 4)


def _in_turn(
    rows: Rows,
    case: str,
    losses: dict[str, Any],
    loss: Any,
    x0: Any,
    arrays: Any,
    sizes: tuple[int, ...],
    rounds: int,
) -> None:
    _, _, chosen, H, batch = sizes
    hands = {}
    for (name, own), over in itertools.product(losses.items(), ("vmap", "map")):
        program = by_hand(own, x0, arrays, sizes, 0.05, rounds, over)
        hands[f"by hand, {over} {name}".strip()] = lambda run=program: jax.block_until_ready(run())
    method = fs.FedAvg(gamma=0.05, H=H, batch_size=batch)
    runs = {**hands, "FedStrata": ours(loss, x0, federated(arrays), chosen, method, rounds)}
    found = interleave({name: lambda run=run: nullcontext(run) for name, run in runs.items()}, REPEATS)
    best = min(timing.least for timing in found if timing.name != "FedStrata")
    for timing in found:
        row = {"case": case, "program": timing.name, "ms": 1e3 * timing.least / rounds, "first": timing.start}
        rows.append(row | {"ratio": timing.least / best})
        print(f"{case:24s} {timing.name:24s} {row['ms']:9.1f} ms a round   ratio {rows[-1]['ratio']:.2f}")


def _ours(
    rows: Rows,
    case: str,
    loss: Any,
    x0: Any,
    data: Any,
    chosen: int,
    method: Any,
    rounds: int,
    as_is: Any = True,
) -> None:
    """As users call it, with and without what is done by itself."""
    run = functools.partial(ours, loss, x0, data, chosen, method, rounds)
    timed(rows, case, "FedStrata", run(), rounds)
    timed(rows, case, "FedStrata bfloat16", run(precision="bfloat16"), rounds)
    timed(rows, case, "FedStrata deterministic", run(engine=fs.engines.Simulated(deterministic=True)), rounds)
    if (devices := len(jax.devices())) > 1:
        timed(rows, case, f"FedStrata, {devices} devices", run(engine="sharded"), rounds)
    if as_is:
        timed(rows, case, "FedStrata rewrite=False", run(engine=fs.engines.Simulated(rewrite=False)), rounds)


def resnet_scores(x: Any, u: Any) -> Any:
    """`fs.models.resnet20` on a batch, with patches."""

    def norm(u: Any, p: Any) -> Any:
        b, h, w, c = u.shape
        parts = u.reshape(b, h, w, 8, c // 8)
        centred = parts - parts.mean((1, 2, 4), keepdims=True)
        scaled = centred * lax.rsqrt((centred**2).mean((1, 2, 4), keepdims=True) + 1e-5)
        return scaled.reshape(u.shape) * p["scale"] + p["shift"]

    u = jax.nn.relu(norm(patches(u, x["stem"], 1, 1), x["stem norm"]))
    for n, p in enumerate(x["blocks"]):
        stride = 2 if n in (3, 6) else 1
        v = jax.nn.relu(norm(patches(u, p["first"], stride, 1), p["first norm"]))
        v = norm(patches(v, p["second"], 1, 1), p["second norm"])
        if stride == 2:
            u = jnp.pad(u[:, ::2, ::2], ((0, 0), (0, 0), (0, 0), (0, v.shape[-1] - u.shape[-1])))
        u = jax.nn.relu(u + v)
    return u.mean((1, 2)) @ x["head"]["W"] + x["head"]["b"]


def resnet(rows: Rows) -> None:
    """ResNet20 in two federations."""
    rng, model = np.random.default_rng(0), fs.models.resnet20()
    x0 = model.init(0)
    for clients, chosen, samples, H, batch in ((8, 8, 512, 4, 16), (100, 20, 200, 5, 20)):
        arrays = {
            "x": rng.standard_normal((clients, samples, 32, 32, 3), dtype=np.float32),
            "y": rng.integers(0, 10, (clients, samples)).astype(np.int32),
        }
        case, method = f"ResNet20 {chosen} of {clients}", fs.FedAvg(gamma=0.05, H=H, batch_size=batch)
        for dtype in (jnp.float32, jnp.bfloat16):
            own = batch_loss(resnet_scores, dtype)
            hand = by_hand(own, x0, arrays, (clients, samples, chosen, H, batch), 0.05, 10)
            timed(rows, case, f"by hand {dtype.__name__}", hand, 10)
        _ours(rows, case, model.loss, x0, federated(arrays), chosen, method, 10, as_is=clients == 8)


class GPT(NamedTuple):
    """The sizes of a transformer."""

    characters: int = 65
    length: int = 256
    width: int = 384
    layers: int = 6
    heads: int = 6


LARGE = GPT(50257, 1024, 768, 12, 12)


def gpt_start(key: Any, sizes: GPT) -> Any:
    """The parameters; with the default sizes 10.6 M."""
    V, T, D, layers, _ = sizes
    keys = iter(jax.random.split(key, 4 * layers + 3))

    def g(*shape: int) -> Any:
        return 0.02 * jax.random.normal(next(keys), shape)

    def block() -> Any:
        return {
            "qkv": g(D, 3 * D), "o": g(D, D), "u": g(D, 4 * D), "d": g(4 * D, D),
            "n": jnp.ones(D), "m": jnp.ones(D),
        }  # fmt: skip

    return {"e": g(V, D), "p": g(T, D), "h": g(D, V), "b": [block() for _ in range(layers)]}


def gpt_loss(dtype: Any, sizes: GPT, x: Any, s: Any) -> Any:
    """The mean loss of a sample's tokens; blocks may have adapters of low rank."""
    _, T, D, _, heads = sizes

    def norm(u: Any, scale: Any) -> Any:
        centred = u - u.mean(-1, keepdims=True)
        return centred * lax.rsqrt(u.var(-1, keepdims=True) + 1e-5) * scale

    x = jax.tree.map(lambda a: a.astype(dtype), x)
    u = x["e"][s["t"][:-1]] + x["p"]
    for b in x["b"]:
        v = norm(u, b["n"])
        low = v @ b["down"] @ b["up"] if "down" in b else 0.0  # an adapter
        parts = jnp.split(v @ b["qkv"] + low, 3, -1)
        q, k, v = (a.reshape(T, heads, D // heads)[None] for a in parts)
        u = u + jax.nn.dot_product_attention(q, k, v, is_causal=True)[0].reshape(T, D) @ b["o"]
        u = u + jax.nn.gelu(norm(u, b["m"]) @ b["u"]) @ b["d"]
    return jax.vmap(cross_entropy)(u @ x["h"], s["t"][1:]).mean()


def gpt(rows: Rows) -> None:
    """A transformer of 10.6 M parameters."""
    sizes = GPT()
    rng, x0 = np.random.default_rng(0), gpt_start(jax.random.key(0), sizes)
    arrays = {"t": rng.integers(0, sizes.characters, (64, 64, sizes.length + 1)).astype(np.int32)}
    case = "GPT 16 of 64"
    for dtype in (jnp.float32, jnp.bfloat16):
        loss = functools.partial(gpt_loss, dtype, sizes)

        def batch(x: Any, s: Any, loss: Any = loss) -> Any:
            return jax.vmap(loss, (None, 0))(x, s).mean()

        hand = by_hand(batch, x0, arrays, (64, 64, 16, 4, 8), 0.05, 5)
        timed(rows, case, f"by hand {dtype.__name__}", hand, 5)
    data, plain = federated(arrays), functools.partial(gpt_loss, jnp.float32, sizes)
    _ours(rows, case, plain, x0, data, 16, fs.FedAvg(gamma=0.05, H=4, batch_size=8), 5, as_is=False)
    cast = functools.partial(gpt_loss, jnp.bfloat16, sizes)
    timed(rows, case, "FedStrata, cast by the loss", ours(
        cast, x0, data, 16, fs.FedAvg(gamma=0.05, H=4, batch_size=8), 5), 5)  # fmt: skip
    values = fs.FedRZO(gamma=1e-6, eta=1e-2, H=4, batch_size=8)
    timed(rows, case, "FedStrata FedRZO", ours(plain, x0, data, 16, values, 5), 5)


def large(rows: Rows, sizes: GPT = LARGE, clients: int = 100, chosen: int = 8) -> None:
    """A transformer of GPT-2's size: tokens a second of adapters beside frozen parameters, and of all."""
    rng, params = np.random.default_rng(0), gpt_start(jax.random.key(0), sizes)
    tokens = rng.integers(0, sizes.characters, (clients, 4, sizes.length + 1)).astype(np.int32)
    data, one = federated({"t": tokens}), functools.partial(gpt_loss, jnp.float32, sizes)
    H, batch, rounds, rank = 2, 2, 2, 8
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    case, method = f"GPT of {count / 1e6:.0f} M", fs.FedAvg(gamma=0.05, H=H, batch_size=batch)
    keys = jax.random.split(jax.random.key(1), sizes.layers)
    start = [
        {"down": 0.02 * jax.random.normal(key, (sizes.width, rank)), "up": jnp.zeros((rank, 3 * sizes.width))}
        for key in keys
    ]

    def adapters(x: Any, s: Any, frozen: Any) -> Any:
        return one(frozen | {"b": [b | own for b, own in zip(frozen["b"], x, strict=True)]}, s)

    for name, loss, x0, frozen in (
        ("adapters", adapters, start, params), ("all parameters", one, params, None),
    ):  # fmt: skip
        for precision in ("bfloat16", "float32"):
            run = ours(loss, x0, data, chosen, method, rounds, frozen, precision=precision)
            before = len(rows)
            timed(rows, case, f"{name} {precision}", run, rounds)
            if "ms" in (row := (rows[before:] or [{}])[0]):
                row["tokens a second"] = 1e3 * chosen * H * batch * sizes.length / row["ms"]
                stats = jax.local_devices()[0].memory_stats() or {}
                row["peak bytes so far"] = stats.get("peak_bytes_in_use", 0)
                peak = row["peak bytes so far"] / 2**30
                print(f"    {row['tokens a second']:,.0f} tokens a second, {peak:.1f} GiB so far", flush=True)


PARTS = {"limits": limits, "forms": forms, "cnn": cnn, "resnet": resnet, "gpt": gpt}
ASKED = {"small": small, "large": large}  # only when named


def main() -> None:
    """Run the parts that are asked for; what was measured is written after each."""
    global ONLY
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help=", ".join({**PARTS, **ASKED}))
    parser.add_argument(
        "--only", type=re.compile, default=ONLY, help="a pattern of rows: case, colon, program"
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    ONLY = given.only
    device = jax.devices()[0]
    rows: Rows = [{"case": "machine", "program": f"{device.device_kind}, JAX {jax.__version__}"}]
    print(rows[0]["program"], flush=True)
    for part in given.parts or list(PARTS):
        {**PARTS, **ASKED}[part](rows)
        if given.out is not None:
            given.out.parent.mkdir(parents=True, exist_ok=True)
            given.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
