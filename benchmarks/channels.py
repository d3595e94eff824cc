"""What channels cost, and what they do to the answer.

    python -m benchmarks.channels overhead       the ratio of a round to one without a channel: softmax
    python -m benchmarks.channels overhead_mlp   the same of a network
    python -m benchmarks.channels dropouts       the error where clients drop out
    python -m benchmarks.channels secure         milliseconds of a secure sum, at a site and at the server
    python -m benchmarks.channels kl             how far apart and how far off clients' exponents are under KL
    python -m benchmarks.channels plans          rounds to 1 %, planned and measured, under compression

All are of seed 0. Reproductions have the rest: `compression`, `hostile-clients`, `dp-tradeoff`.
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

import fedstrata as fs

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


def dropouts() -> None:
    """‖x − x*‖/‖x*‖ of unlike quadratics, with x* where the run with everyone ends."""
    rng, d = np.random.default_rng(0), 20
    own = [{"A": np.diag(rng.uniform(0.5, 2, d))[None], "b": rng.normal(size=(1, d))} for _ in range(10)]
    problem = fs.Minimization(lambda x, s: 0.5 * x @ s["A"] @ x - s["b"] @ x)
    data = fs.FederatedData.from_clients(own)
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


def overhead_mlp() -> None:
    """See `overhead`."""
    overhead(True)


def secure() -> None:
    """The least of 25, of three sites; a site's part has the digest of the message."""
    from fedstrata.engines.network.masks import Fixed, SumRequest, met, total

    rng, sites, shares = np.random.default_rng(0), met("run", 3), np.full(3, 1 / 3)
    for size in (2_500, 250_000, 2_500_000):
        upload, message = (rng.uniform(-0.1, 0.1, size).astype(np.float32) for _ in range(2))
        for fixed in (Fixed(1.0, 0.0, shares), Fixed(None, 0.0, shares)):
            site, server = [], []
            for number in range(25):
                began = time.perf_counter()
                asked = SumRequest.of("round 0", number + 1, [shares, message])
                vector, _ = sites[0].mask(fixed.encode([upload], 1 / 3), np.zeros(3), asked)
                site.append(time.perf_counter() - began)
                began = time.perf_counter()
                fixed.decode(total([vector] * 3))
                server.append(time.perf_counter() - began)
            least = f"{1e3 * min(site):7.2f} at a site, {1e3 * min(server):6.2f} at the server"
            print(f"{size / 250_000:5.2f} MB, modulo 2^{fixed.bits}: {least}")


def kl() -> None:
    """The largest u_k − ū of FedDRO on digits, u_k = log mean exp(ℓ/λ) of a client and ū that of all.

    With ū of the same round, and with that of the round before, which is all that clients can know.
    """
    data = fs.data.digits(clients=20, partition=fs.Dirichlet(0.3), seed=0)
    x0, every = {"w": np.zeros((64, 10)), "b": np.zeros(10)}, [data.client(k) for k in range(20)]

    def flat(x: Any, s: Any) -> Any:
        return softmax(x, {**s, "x": jnp.ravel(s["x"])})

    for lam in (1.0, 0.1, 0.02):

        def exponent(x: Any, y: Any, k: int, lam: float = lam) -> Any:
            losses = jax.vmap(flat, (None, 0))(x, every[k]) / lam
            return jax.nn.logsumexp(losses) - jnp.log(losses.size)

        metrics = {f"u{k}": partial(exponent, k=k) for k in range(20)}
        for eta in (0.03, 0.3):
            found = fs.solve(
                fs.dro.kl(flat, lam), fs.FedDRO(eta, 0.5, I=4), data, x0, rounds=50, metrics=metrics,
                default_metrics=False, **QUIET,
            )  # fmt: skip
            u = np.array([found.history[name] for name in metrics], float)
            mean = np.log(np.mean(np.exp(u - u.max(0)), axis=0)) + u.max(0)
            now, before = (u - mean).max(), (u[:, 1:] - mean[:-1]).max()
            least = (u[:, 1:].max(0) - mean[:-1]).min()
            last = f"{before:.1f} above that of the round before (all of them at least {least:.1f})"
            print(f"λ = {lam}, η = {eta}: up to {now:.1f} above the mean of the round, {last}")


PLANNED: dict[str, Any] = {
    "top 10 %": fs.TopK(0.1),
    "top 3 %": fs.TopK(0.03),
    "random 10 %": fs.RandK(0.1),
    "sign": fs.Sign(),
    "QSGD, 2 bits": fs.QSGD(2),
    "QSGD, 4 bits": fs.QSGD(4),
}


def plans() -> None:
    """The planned and the measured rounds until x stays within 1 % of the solution; "–" if it does not."""
    rng, d, m = np.random.default_rng(0), 60, 8
    turn = np.linalg.qr(rng.normal(size=(d, d)))[0]
    scales = np.geomspace(1, 0.1, d) * rng.uniform(0.5, 1.5, (m, d))
    own = [{"A": ((turn * scale) @ turn.T)[None], "b": rng.normal(size=(1, d))} for scale in scales]
    best = np.linalg.solve(sum(each["A"][0] for each in own), sum(each["b"][0] for each in own))
    plain = fs.Minimization(lambda x, s: 0.5 * x @ s["A"] @ x - s["b"] @ x)
    bilevel, pairs, x_bilevel, _ = fs.quadratic_bilevel(m, d, d)
    minimax, games, x_minimax, _ = fs.quadratic_minimax(m, d, d)
    tasks: dict[str, tuple[Any, fs.FederatedData, Any, Any]] = {
        **dict.fromkeys(
            ("FedAvg", "SCAFFOLD", "FedOpt", "FedAC"), (plain, fs.FederatedData.from_clients(own), best, None)
        ),
        **dict.fromkeys(("SOBA", "FedMSA", "FedNest"), (bilevel, pairs, x_bilevel, np.zeros(d))),
        "LocalSGDA": (minimax, games, x_minimax, np.zeros(d)),
    }
    for name, (problem, data, x_star, y0) in tasks.items():
        row = []
        for label, compress in PLANNED.items():
            channel = fs.Channel(compress=compress)
            try:
                plan = fs.plan(problem, data, np.zeros(d), y0, method=name, target=0.1, channel=channel)
                away = {"away": lambda x, y, at=x_star: jnp.linalg.norm(x - at) / jnp.linalg.norm(at)}
                rounds = min(2 * plan.rounds, 20_000)
                run = fs.solve(
                    problem, plan.method, data, np.zeros(d), y0=y0, rounds=rounds, metrics=away,
                    default_metrics=False, channel=channel, **QUIET,
                )  # fmt: skip
                outside = np.flatnonzero(~(run.history["away"] <= 1e-2))[-1]
                row.append(f"{label}: {plan.rounds} {outside + 1 if outside < rounds else '–'}")
            except (ValueError, fs.Diverged) as reason:
                row.append(f"{label}: {type(reason).__name__} {str(reason)[:60]}")
        print(f"{name:10}", "; ".join(row), flush=True)


PARTS = {f.__name__: f for f in (overhead, overhead_mlp, dropouts, secure, kl, plans)}

if __name__ == "__main__":
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
