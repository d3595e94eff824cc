"""What channels cost, and what they do to the answer.

    python -m benchmarks.channels overhead       the ratio of a round to one without a channel: softmax
    python -m benchmarks.channels overhead_mlp   the same of a network
    python -m benchmarks.channels compression    the error at the plain run's last round, and the bytes sent
    python -m benchmarks.channels hostile        robust means against two hostile clients of ten
    python -m benchmarks.channels dropouts       the error where clients drop out
    python -m benchmarks.channels privacy        accuracy on digits by ε, of clients
    python -m benchmarks.channels secure         milliseconds of a secure sum, at a site and at the server

All are of seed 0 unless a page says otherwise. Errors are ‖x − x*‖/‖x0 − x*‖, with x* the solution in closed
form, or where a plain run comes to rest.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedstrata as fs
from fedstrata.channels import ALIE, InnerProduct, Mean, Mimic, SignFlip

QUIET = {"progress": False, "certify": False}


# ---- overhead


def softmax(x: Any, s: Any) -> Any:
    """The loss of a softmax regression."""
    return -jax.nn.log_softmax(s["x"] @ x["w"] + x["b"])[s["y"]]


def network(x: Any, s: Any) -> Any:
    """The loss of a network with one hidden layer."""
    return -jax.nn.log_softmax(jnp.tanh(s["x"] @ x["v"]) @ x["w"])[s["y"]]


CHANNELS: dict[str, Any] = {
    "clip and noise": fs.Channel(clip=1.0, noise=1.0),
    "noise at each client": fs.Channel(clip=1.0, noise=1.0, noise_at="each"),
    "adaptive clip": fs.Channel(clip=fs.Adaptive()),
    "top 1 %, ef": fs.Channel(compress=fs.TopK(0.01), feedback="ef"),
    "top 10 %, ef21": fs.Channel(compress=fs.TopK(0.1), feedback="ef21"),
    "random 10 %": fs.Channel(compress=fs.RandK(0.1), feedback="ef"),
    "QSGD, 8 bits": fs.Channel(compress=fs.QSGD(8)),
    "QSGD, 4 bits": fs.Channel(compress=fs.QSGD(4)),
    "sign, ef": fs.Channel(compress=fs.Sign(), feedback="ef"),
    "bfloat16": fs.Channel(compress=fs.channels.Cast(), feedback=None),
    "median": fs.Channel(mean=fs.Median()),
    "geometric median": fs.Channel(mean=fs.GeometricMedian()),
    "Krum": fs.Channel(mean=fs.Krum(0.2)),
}


def processor(programs: Mapping[str, Callable[[], None]]) -> dict[str, float]:
    """The least seconds of the processor that each takes, in turn: other work on a machine hardly counts."""
    for program in programs.values():
        program()  # compile
    least = dict.fromkeys(programs, np.inf)
    for _ in range(7):
        for name, program in programs.items():
            began = time.process_time()
            program()
            least[name] = min(least[name], time.process_time() - began)
    return least


def overhead(large_model: bool = False) -> None:
    """One of two models; processor time, differences of long and short runs."""
    rng = np.random.default_rng(0)

    def data(clients: int, samples: int, features: int) -> fs.FederatedData:
        return fs.FederatedData.from_clients(
            [
                {"x": rng.normal(size=(samples, features)), "y": rng.integers(0, 10, samples)}
                for _ in range(clients)
            ]
        )

    small = {"w": np.zeros((64, 10)), "b": np.zeros(10)}
    large = {"v": rng.normal(size=(64, 688)) / 8, "w": rng.normal(size=(688, 10)) / 26}
    tasks = {
        "softmax, d = 650, 100 clients × 20 steps": (softmax, data(100, 50, 64), small, 20),
        "MLP, d = 50,912, 20 clients × 5 steps": (network, data(20, 50, 64), large, 5),
    }
    for name, (loss, clients, x0, H) in list(tasks.items())[large_model : large_model + 1]:
        problem, method = fs.Minimization(loss), fs.FedAvg(gamma=0.05, H=H, batch_size=10)

        def run(channel: Any, rounds: int, problem=problem, method=method, clients=clients, x0=x0) -> None:  # type: ignore[no-untyped-def]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                fs.solve(
                    problem, method, clients, x0, rounds=rounds, eval_every=rounds, default_metrics=False,
                    channel=channel, **QUIET,
                )  # fmt: skip

        every = {"none": None, **CHANNELS}
        programs = {f"{n}|{r}": partial(run, c, r) for n, c in every.items() for r in (5, 25)}
        least = processor(programs)
        rounds = {n: (least[f"{n}|25"] - least[f"{n}|5"]) / 20 for n in every}
        fixed = {n: least[f"{n}|5"] - 5 * rounds[n] for n in every}
        print(f"{name}: {1e3 * rounds['none']:.2f} ms a round, {1e3 * fixed['none']:.0f} ms a call")
        for n in CHANNELS:
            more = 1e3 * (fixed[n] - fixed["none"])
            print(f"  {n:22} {rounds[n] / rounds['none']:5.2f}   {more:+5.0f} ms a call")


# ---- quadratics with unlike clients


def quadratics(clients: int = 8, d: int = 20, spread: float | None = None) -> tuple[Any, Any, np.ndarray]:
    """A problem, its clients, and the solution; ``spread`` of their linear parts around a common one."""
    rng = np.random.default_rng(0)
    common, far = (np.zeros(d), 1.0) if spread is None else (rng.normal(size=d), spread)
    own = [
        {"A": np.diag(rng.uniform(0.5, 2, d))[None], "b": common + far * rng.normal(size=(1, d))}
        for _ in range(clients)
    ]
    mean = np.mean([c["A"][0] for c in own], 0), np.mean([c["b"][0] for c in own], 0)
    problem = fs.Minimization(lambda x, s: 0.5 * x @ s["A"] @ x - s["b"] @ x)
    return problem, fs.FederatedData.from_clients(own), np.linalg.solve(*mean)


METHODS: dict[str, Any] = {
    "FedAvg, H = 1": fs.FedAvg(gamma=0.1),
    "FedAvg, H = 5": fs.FedAvg(gamma=0.05, H=5),
    "FedProx": fs.FedProx(gamma=0.05, mu=0.5, H=5),
    "SCAFFOLD": fs.SCAFFOLD(eta_l=0.05, eta_g=0.5, K=5),
    "Scaffnew": fs.Scaffnew(gamma=0.1, p=0.5),
    "FedMSPP": fs.FedMSPP(eta=0.5, gamma=0.1, H=3),
    "FedRZO, shared scalars": fs.FedRZO(
        gamma=0.01, eta=0.01, batch_size=None, two_sided=True, messages="scalars", shared_directions=True,
        directions=5,
    ),
    "FedAC": fs.FedAC(0.05, 0.05, K=2),
    "LFD": fs.LFD(0.1, tau=2),
    "FedOpt, momentum": fs.FedOpt(optax.sgd(0.02), optax.sgd(1.0, momentum=0.5), H=2),
}  # fmt: skip
BILEVEL: dict[str, Any] = {
    "FedMSA": fs.FedMSA(0.01, 0.02, K=2, clients=8),
    "SOBA": fs.SOBA(0.02, 0.05),
    "HypergradientDescent": fs.HypergradientDescent(0.02, 0.1, T=3, N=5),
    "FedNest": fs.FedNest(0.02, 0.1, T=3, tau=2, N=5, ell=12.0),
    "SimFBO": fs.SimFBO(0.02, 0.05, 0.05, 0.02, 0.05, 0.05, tau=2),
    "FedSTORM": fs.FedSTORM(0.02, 0.05, c=0.5, I=2),
    "FedF2SA": fs.FedF2SA(0.002, 0.005, H=2),
}
MINIMAX: dict[str, Any] = {
    "LocalSGDA": fs.LocalSGDA(0.02, 0.05, tau=2),
    "FedSGDAPlus": fs.FedSGDAPlus(0.02, 0.05, K=2, S=2, eta=0.9),
    "FESSGDA": fs.FESSGDA(0.02, 0.05, 2, p=2.0, beta=0.5, eta_xg=0.9),
    "Scaffnew, minimax": fs.Scaffnew(0.03, 0.5),
    "CODASCA": fs.CODASCA(0.03, 0.0, I=2, rounds=10**6),
    "FedMSA, minimax": fs.FedMSA(0.01, 0.02, K=2, clients=8),
}
COMPRESSORS: dict[str, Any] = {
    "top 10 %": fs.Channel(compress=fs.TopK(0.1)),
    "top 25 %": fs.Channel(compress=fs.TopK(0.25)),
    "sign": fs.Channel(compress=fs.Sign()),
    "QSGD 8": fs.Channel(compress=fs.QSGD(8)),
    "QSGD 4": fs.Channel(compress=fs.QSGD(4)),
    "bfloat16": fs.Channel(compress=fs.channels.Cast()),
}


def compression() -> None:
    """Against where the plain run ends: local steps drift, with or without a channel."""
    print(f"{'':24}" + "".join(f"{n:>20}" for n in COMPRESSORS))
    x0 = np.zeros(20)
    families = [
        (quadratics()[:2], None, METHODS),
        (fs.quadratic_bilevel(8, 20, 20)[:2], x0, BILEVEL),
        (fs.quadratic_minimax(8, 20, 20)[:2], x0, MINIMAX),
    ]
    rows = [(pair, y0, name, method) for pair, y0, some in families for name, method in some.items()]
    for pair, y0, name, method in rows:

        def run(channel: Any = None, method: Any = method, pair: Any = pair, y0: Any = y0) -> Any:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    return fs.solve(
                        pair[0], method, pair[1], x0, y0=y0, rounds=1500, eval_every=1500, channel=channel,
                        **QUIET,
                    )  # fmt: skip
                except fs.Diverged as error:
                    return error.result

        plain = run()
        if plain.status == "diverged":
            print(name, "diverges without a channel", flush=True)
            continue
        row = []
        for channel in COMPRESSORS.values():
            found = run(channel)
            off = np.linalg.norm(found.x - plain.x) / np.linalg.norm(plain.x - x0)
            off = off if found.status != "diverged" else np.inf
            row.append(f"{off:.0e} ({found.ledger.bytes_up / plain.ledger.bytes_up:.2f})")
        print(f"{name:24}" + "".join(f"{cell:>20}" for cell in row), flush=True)


MEANS: dict[str, Any] = {
    "mean": Mean(),
    "trimmed": fs.TrimmedMean(0.2),
    "median": fs.Median(),
    "geometric median": fs.GeometricMedian(),
    "Krum": fs.Krum(0.2),
    "multi-Krum": fs.MultiKrum(0.2),
    "centred clipping": fs.CenteredClipping(radius=0.05),
    "trimmed, mixed": fs.TrimmedMean(0.2, mixing=True),
    "multi-Krum, mixed": fs.MultiKrum(0.2, mixing=True),
}
ATTACKS: dict[str, Any] = {
    "none": lambda mean: mean,
    "sign flip × 10": lambda mean: SignFlip(mean, 2, factor=10.0),
    "ALIE, z = 1.5": lambda mean: ALIE(mean, 2, z=1.5),
    "inner product": lambda mean: InnerProduct(mean, 2),
    "mimic": lambda mean: Mimic(mean, 2),
}


def hostile() -> None:
    """FedAvg with one step; the error is to the solution of the eight honest clients alone."""
    for spread in (0.1, 1.0):
        problem, data, _ = quadratics(10, spread=spread)
        honest = [data.client(i) for i in range(2, 10)]
        A = np.mean([c["A"][0] for c in honest], 0)
        solution = np.linalg.solve(A, np.mean([c["b"][0] for c in honest], 0))
        print(f"{f'spread {spread}':20}" + "".join(f"{n:>18}" for n in ATTACKS))
        for name, mean in MEANS.items():
            row = []
            for attack in ATTACKS.values():
                try:
                    x = fs.solve(
                        problem, fs.FedAvg(gamma=0.1), data, np.zeros(20), rounds=500, eval_every=500,
                        channel=fs.Channel(mean=attack(mean)), **QUIET,
                    ).x  # fmt: skip
                    row.append(f"{np.linalg.norm(x - solution) / np.linalg.norm(solution):.2f}")
                except fs.Diverged:
                    row.append("diverges")
            print(f"{name:20}" + "".join(f"{cell:>18}" for cell in row))


def dropouts() -> None:
    """Against where the run with everyone ends."""
    problem, data, _ = quadratics(clients=10)
    methods = {
        "FedAvg, H = 5": fs.FedAvg(gamma=0.05, H=5),
        "SCAFFOLD": fs.SCAFFOLD(eta_l=0.05, eta_g=0.5, K=5),
        "FedAvg, H = 1": fs.FedAvg(gamma=0.1),
    }
    for name, method in methods.items():
        run = partial(fs.solve, problem, method, data, np.zeros(20), rounds=1500, eval_every=1500, **QUIET)
        plain, row = run(), []
        for when in ("before", "after"):
            found = run(dropouts=fs.Dropouts(0.2, when=when))
            off = np.linalg.norm(found.x - plain.x) / np.linalg.norm(plain.x)
            row.append(
                f"{when} computing: {off:.1e}, bytes up {found.ledger.bytes_up / plain.ledger.bytes_up:.2f}"
            )
        print(f"{name:16}", "; ".join(row))


# ---- privacy of clients


def privacy() -> None:
    """Softmax on digits, 100 clients, Poisson q = .3, 60 rounds, δ = 1e-3; seeds 1 to 3, bounds as given."""
    methods = {
        "FedAvg, H = 5, clip .5": (fs.FedAvg(gamma=0.5, H=5, batch_size=None), 0.5),
        "FedRZO, 20 shared scalars, clip 3": (
            fs.FedRZO(gamma=0.5, eta=0.1, batch_size=None, two_sided=True, directions=20, orthogonal=True,
                      messages="scalars", shared_directions=True), 3.0,
        ),
    }  # fmt: skip
    print(f"{'':36}" + "".join(f"ε = {e:<8}" for e in (1, 2, 4, 8, "∞")))
    for name, (method, clip) in methods.items():
        row = []
        for epsilon in (1, 2, 4, 8, None):
            found = [accuracy(method, clip, epsilon, seed) for seed in (1, 2, 3)]
            row.append(f"{np.mean(found):.3f}")
        print(f"{name:36}" + "".join(f"{cell:<12}" for cell in row))


def accuracy(method: Any, clip: float, epsilon: float | None, seed: int) -> float:
    """On pooled test samples."""
    data = fs.data.digits(clients=100, partition=fs.Dirichlet(1.0), seed=seed)
    example = data.sample_of()
    names = list(example)
    x_name = next(n for n in names if example[n].ndim > 0)
    y_name = next(n for n in names if n != x_name)
    size = int(np.prod(example[x_name].shape))

    def loss(x: Any, s: Any) -> Any:
        return -jax.nn.log_softmax(s[x_name].reshape(-1) @ x["w"] + x["b"])[s[y_name]]

    problem, x0 = fs.Minimization(loss), {"w": np.zeros((size, 10)), "b": np.zeros(10)}
    q, channel = fs.Poisson(0.3), fs.Channel(clip=clip, noise=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if epsilon is not None:
            channel = fs.plan_privacy(
                problem, method, data, x0, epsilon=epsilon, delta=1e-3, rounds=60, clip=clip, participation=q
            )
        found = fs.solve(
            problem, method, data, x0, rounds=60, eval_every=60, seed=seed, participation=q, channel=channel,
            default_metrics=False, **QUIET,
        )  # fmt: skip
    rows = np.asarray(data.test[x_name]).reshape(-1, size)
    guess = np.argmax(rows @ found.x["w"] + found.x["b"], axis=1)
    return float((guess == np.asarray(data.test[y_name])).mean())


def overhead_mlp() -> None:
    """See `overhead`."""
    overhead(True)


def secure() -> None:
    """The least of 25, of three sites; a site's part has the digest of the message."""
    from fedstrata.engines.network.masks import Asked, Fixed, met, total

    rng, sites, shares = np.random.default_rng(0), met("run", 3), np.full(3, 1 / 3)
    for size in (2_500, 250_000, 2_500_000):
        upload, message = (rng.uniform(-0.1, 0.1, size).astype(np.float32) for _ in range(2))
        for fixed in (Fixed(1.0, 0.0, shares), Fixed(None, 0.0, shares)):
            site, server = [], []
            for number in range(25):
                began = time.perf_counter()
                asked = Asked.of("round 0", number + 1, [shares, message])
                vector, _ = sites[0].mask(fixed.encode([upload], 1 / 3), np.zeros(3), asked)
                site.append(time.perf_counter() - began)
                began = time.perf_counter()
                fixed.decode(total([vector] * 3))
                server.append(time.perf_counter() - began)
            least = f"{1e3 * min(site):7.2f} at a site, {1e3 * min(server):6.2f} at the server"
            print(f"{size / 250_000:5.2f} MB, modulo 2^{fixed.bits}: {least}")


PARTS = {f.__name__: f for f in (overhead, overhead_mlp, compression, hostile, dropouts, privacy, secure)}

if __name__ == "__main__":
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
