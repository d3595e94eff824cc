"""Measured against predicted rates: log–log slopes of the theorems' quantities, on closed-form problems.

``python -m benchmarks.rates [METHOD …]``. A theorem bounds from above, so a steeper slope than predicted is
no contradiction; a flatter one is, or the run is too short for its asymptotics. Steps are those of the
theorems (``from_theory``), with constants that suit the problem. Means are over rounds and seeds, as the
theorems draw an iterate at random.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedstrata as fs

SEEDS = range(16)


class Law(NamedTuple):
    """One theorem's statement about one quantity.

    Attributes:
        method: whose.
        theorem: which, and of what paper.
        quantity: what falls or grows.
        against: the variable.
        predicted: its exponent.
        sizes: values of the variable.
        measure: value → quantity.
    """

    method: str
    theorem: str
    quantity: str
    against: str
    predicted: float
    sizes: Sequence[int]
    measure: Callable[[int], float]


def slope(law: Law) -> tuple[float, float, list[float]]:
    """The least-squares slope in log–log, its standard error, and the values."""
    values = [law.measure(size) for size in law.sizes]
    x, y = np.log(law.sizes), np.log(np.maximum(values, 1e-300))
    (rise, start), residual = np.polyfit(x, y, 1), 0.0
    if len(x) > 2:
        residual = float(((y - rise * x - start) ** 2).sum() / (len(x) - 2) / ((x - x.mean()) ** 2).sum())
    return float(rise), math.sqrt(residual), values


def runs(problem: Any, method: Any, data: Any, x0: Any, rounds: int, **options: Any) -> list[fs.Result]:
    """Of all seeds, side by side."""
    options = {"seeds": SEEDS, "progress": False, "default_metrics": False, **options}
    return fs.sweep(problem, method, data, x0, rounds=rounds, **options)


def mean_of(results: Sequence[fs.Result], name: str) -> float:
    """Over rounds and seeds."""
    return float(np.mean([run.history[name].mean() for run in results]))


# FedRZO: a smooth, Lipschitz loss on clients that differ


def lipschitz_loss(x: Any, sample: Any) -> Any:
    """√(1 + ‖x − a‖²)."""
    return jnp.sqrt(1 + ((x - sample["a"]) ** 2).sum())


LIPSCHITZ = fs.Minimization(lipschitz_loss)


def lipschitz_slope(x: Any, y: Any, data: Any) -> Any:
    """‖∇f‖²."""
    gradient = jax.grad(lambda x: jax.vmap(lambda a: lipschitz_loss(x, {"a": a}))(data.train["a"]).mean())
    return (gradient(x) ** 2).sum()


def spread(clients: int, n: int = 5, samples: int = 20) -> fs.FederatedData:
    """Points around a centre for each client, of which there may be many; the first clients are the same."""
    rng = np.random.default_rng(0)
    centres, own = rng.normal(size=(64, 1, n)), rng.normal(size=(64, samples, n))
    return fs.FederatedData.from_clients([{"a": a} for a in (centres + own)[:clients]])


def fedrzo(K: int, clients: int = 4, H: int | None = None) -> list[fs.Result]:
    method = fs.FedRZO.from_theory(K=K, clients=clients)
    if H is not None:
        method = fs.FedRZO(method.gamma, method.eta, H)
    metrics = {"slope": lipschitz_slope}
    rounds = math.ceil(K / method.H)
    return runs(LIPSCHITZ, method, spread(clients), np.full(5, 2.0), rounds, metrics=metrics)


def fedrzo_slope(K: int, clients: int = 4, H: int | None = None) -> float:
    return mean_of(fedrzo(K, clients, H), "slope")


# FedRZOBilevel and FedMSA: a quadratic bilevel problem


def bilevel(clients: int, noise: float = 0.0) -> Any:
    return fs.quadratic_bilevel(clients, 3, 4, heterogeneity=0.3, samples=20, noise=noise)


def fedrzo_bilevel(K: int, lower: str, seeds: int = 1) -> list[fs.Result]:
    q = bilevel(2)
    mu, L = q.curvature
    options: dict[str, Any] = {"mu_h": mu, "kappa_h": L / mu, "lower": lower, "batch_size": 1}
    method = fs.FedRZOBilevel.from_theory(K=K, clients=2, **options)
    method = method.replaced({"gamma": 0.1 * method.gamma})
    metrics = {"slope": lambda x, y: (q.gradient(x) ** 2).sum()}
    start = {"y0": np.zeros(4), "metrics": metrics, "seeds": range(seeds)}
    return runs(q.problem, method, q.data, q.x_star + 1, math.ceil(K / method.H), **start)


def fedmsa(R: int, clients: int = 4, K: int = 2, off: float = 0.0) -> float:
    """From x* + off; with off = 0 of the second half of the rounds, where only noise is left.

    Clients alike have the same solution for any M.
    """
    q = bilevel(1, noise=2.0)
    q = q._replace(data=fs.FederatedData.from_clients([q.data.client(0)] * clients))
    method = fs.FedMSA.from_theory(R=R, K=K, c_alpha=0.1, c_beta=0.2, clients=clients, batch_size=2)
    metrics = {"slope": lambda x, y: (q.gradient(x) ** 2).sum()}
    found = runs(q.problem, method, q.data, q.x_star + off, R, y0=q.y_star, metrics=metrics)
    first = 0 if off else R // 2
    return float(np.mean([run.history["slope"][first:].mean() for run in found]))


# FedRZOTwoStage: a Cournot game


GAME = fs.cournot_game(5, 1.0, clients=4, samples=50)


def fedrzo_two_stage(K: int) -> list[fs.Result]:
    method = fs.FedRZOTwoStage.from_theory(K=K, clients=4, mu=1.0, L=6.0, eta=0.1)
    method = method.replaced({"gamma": 0.5 * method.gamma, "alpha": 0.15, "tau": 6.0})
    start = {"y0": np.zeros(5), "default_metrics": True}
    return runs(GAME.problem, method, GAME.data, np.zeros(()), math.ceil(K / method.H), **start)


def gap(results: Sequence[fs.Result]) -> float:
    return mean_of(results, "leader") - GAME.optimum[1]


# ZO-HFL: quadratics, the clients' responses in closed form

LAM, MU, N = 1.0, 1.0, 4
PERSONAL = fs.Personalized(
    server=lambda x, s: ((x - s["a"]) ** 2).sum() / 2,
    coupling=lambda x, y: LAM / 2 * ((x - y) ** 2).sum(),
    client=lambda x, y, s: ((y - s["a"]) ** 2).sum() / 2 + MU / 2 * ((x - y) ** 2).sum(),
)


def zohfl(R: int) -> float:
    rng = np.random.default_rng(1)
    parts = [{"a": rng.normal(size=(20, N)) + rng.normal(size=N)} for _ in range(4)]
    server = {"a": rng.normal(size=(20, N))}
    data = fs.FederatedData.from_clients(parts, server=server)
    means = jnp.asarray(np.mean([p["a"].mean(0) for p in parts], 0), float)

    def slope(x: Any, y: Any) -> Any:  # y_i(x) = (ā_i + μx)/(1 + μ)
        g = x - jnp.asarray(server["a"].mean(0), float) + LAM / (1 + MU) ** 2 * (x - means)
        return (g**2).sum()

    method = fs.ZOHFL.from_theory(L1=1.0, L0=1.0, n=N, mu=1 + MU, L_h=1 + MU, eta=0.5, batch_size=1)
    options = {"y0": np.zeros(N), "metrics": {"slope": slope}}
    return mean_of(runs(PERSONAL, method, data, np.full(N, 3.0), R, **options), "slope")


# Selection: under-determined least squares, weak sharp of the order κ = 2


TOY = fs.underdetermined(clients=4, n=24, samples=3)


def selected(R: int, rule: Any) -> tuple[float, float]:
    """``f* − f``, since a regularised point is infeasible and below f*, and ``h − h*`` of the average."""
    method = fs.StRFedAvg(rule, K=2, L_h=1.0)
    (result,) = runs(TOY.problem, method, TOY.data, TOY.x0, R, seeds=[0], eval_every=R)
    x = np.asarray(result.x, float)
    f = ((x - TOY.c) ** 2).sum() / 2 - ((TOY.x_star - TOY.c) ** 2).sum() / 2
    return -f, float(((TOY.A @ x - TOY.b) ** 2).mean() / 2)


def welsch(x: Any) -> Any:
    """A nonconvex secondary, Σ 1 − exp(−x²/2)."""
    return (1 - jnp.exp(-(x**2) / 2)).sum()


def ipir(T: int) -> tuple[float, float]:
    """The mean of ``‖∇f(y) + (y − Π(y))/λ‖²`` and the exchanges."""
    lam = 0.5

    def stationarity(x: Any, y: Any) -> Any:
        return ((jax.grad(welsch)(x) + (x - TOY.project(x)) / lam) ** 2).sum()

    problem = fs.Selection(TOY.problem.primary, welsch)
    method = fs.IPIRFedAvg(0.15, lam, L_h=1.0)
    options: dict[str, Any] = {"metrics": {"stationarity": stationarity}, "seeds": [0]}
    found = runs(problem, method, TOY.data, TOY.x0, T, **options)
    return mean_of(found, "stationarity"), float(found[0].ledger.exchanges)


# FedDRO and DS-FedDRO: h + f(g), all quadratic, with noise in h and g

CO = fs.Composition(
    [lambda x, s: s["A"] @ x + s["b"], lambda y: (y**2).sum() / 4],
    plain=lambda x, s: ((x - s["c"]) ** 2).sum() / 4,
)


def composition(clients: int) -> fs.FederatedData:
    rng = np.random.default_rng(2)
    common = rng.normal(size=(2, 3)) / 3
    parts = []
    for _ in range(16):
        own = common + 0.1 * rng.normal(size=(2, 3))
        mean_b, mean_c = 0.3 * rng.normal(size=2), 0.3 * rng.normal(size=3)
        b, c = mean_b + rng.normal(size=(20, 2)), mean_c + rng.normal(size=(20, 3))
        parts.append({"A": np.tile(own, (20, 1, 1)), "b": b, "c": c})
    return fs.FederatedData.from_clients(parts[:clients])


def composition_slope(x: Any, y: Any, data: Any) -> Any:
    s = data.train
    A, b, c = s["A"].mean(0), s["b"].mean(0), s["c"].mean(0)
    return (((x - c) / 2 + A.T @ (A @ x + b) / 2) ** 2).sum()


def feddro(T: int, clients: int = 4) -> list[fs.Result]:
    method = fs.FedDRO.from_theory(T=T, clients=clients, B_g=0.8, L_f=0.5)
    metrics = {"slope": composition_slope}
    return runs(CO, method, composition(clients), np.full(3, 2.0), math.ceil(T / method.I), metrics=metrics)


def ds_feddro(T: int, I: int = 1, c_x: float = 1.0) -> float:
    method = fs.DSFedDRO.from_theory(T=T, clients=4, I=I, c_x=c_x, batch_size=1)
    metrics = {"slope": composition_slope}
    found = runs(CO, method, composition(4), np.full(3, 2.0), math.ceil(T / I), metrics=metrics)
    return mean_of(found, "slope")


def ds_feddro_constant(T: int) -> float:
    """With γ_x = γ_y = 1 in place of the theorem's √(K/T)."""
    eta = 4 * math.sqrt(1 / T)
    method = fs.DSFedDRO(eta, min(1.0, eta), 1, 1.0, 1.0, batch_size=1)
    metrics = {"slope": composition_slope}
    return mean_of(runs(CO, method, composition(4), np.full(3, 2.0), T, metrics=metrics), "slope")


def exchanges(results: Sequence[fs.Result]) -> float:
    return float(results[0].ledger.exchanges)


LONG = (1024, 4096, 16384)
LAWS = (
    Law("FedRZO", "000, Prop. 1", "‖∇f‖²", "K", -1 / 2, LONG, fedrzo_slope),
    Law("FedRZO", "000, Table 1", "exchanges", "K", 3 / 4, LONG, lambda K: exchanges(fedrzo(K))),
    Law(
        "FedRZO",
        "000, Prop. 1",
        "‖∇f‖²",
        "m",
        -1 / 2,
        (1, 4, 16),
        lambda m: fedrzo_slope(4096, m),
    ),
    Law("FedRZO", "000, Prop. 1", "‖∇f‖²", "H ≤ 3", 0, (1, 3), lambda H: fedrzo_slope(4096, 4, H)),
    Law(
        "FedRZO",
        "000, Prop. 1",
        "‖∇f‖²",
        "H ≥ 3",
        0,
        (3, 12, 48),
        lambda H: fedrzo_slope(4096, 4, H),
    ),
    *(
        Law(
            "FedRZOBilevel",
            "000, Table 2",
            f"exchanges, {lower}",
            "K",
            power,
            (64, 256, 1024),
            lambda K, lower=lower: exchanges(fedrzo_bilevel(K, lower)),  # type: ignore[misc]
        )
        for lower, power in (("local_sgd", 3 / 4), ("fedac", 3 / 4), ("lfd", 11 / 12))
    ),
    Law(
        "FedRZOBilevel",
        "000, Thm 1",
        "‖∇f‖²",
        "K",
        -1 / 2,
        (64, 256, 1024),
        lambda K: mean_of(fedrzo_bilevel(K, "fedac", 8), "slope"),
    ),
    Law("FedRZOTwoStage", "000, Thm 2", "f − f*", "K", -1 / 2, LONG, lambda K: gap(fedrzo_two_stage(K))),
    Law(
        "FedRZOTwoStage",
        "000, Table 3",
        "exchanges",
        "K",
        3 / 4,
        LONG,
        lambda K: exchanges(fedrzo_two_stage(K)),
    ),
    Law(
        "FedRZOTwoStage",
        "000, Table 3",
        "values of G and f",
        "K",
        1,
        LONG,
        lambda K: float(fedrzo_two_stage(K)[0].ledger.function_values),
    ),
    Law("ZOHFL", "001, Thm 1", "‖∇f‖²", "R", -1 / 2, (256, 1024, 4096), zohfl),
    *(
        Law(
            "StRFedAvg",
            f"002, Thm {number}",
            what,
            "R",
            power,
            (1000, 10_000, 100_000),
            lambda R, rule=rule, i=i: selected(R, rule)[i],  # type: ignore[misc]
        )
        for rule, number, both in (
            ("convex", 2, (-1 / 8, -1 / 4)),
            ("strongly_convex", 1, (-1 / 6, -1 / 3)),
        )
        for i, (what, power) in enumerate(zip((f"f* − f, {rule}", f"h − h*, {rule}"), both, strict=True))
    ),
    Law("IPIRFedAvg", "002, Thm 3", "‖∇F_λ‖²", "T", -5 / 24, (16, 64, 256), lambda T: ipir(T)[0]),
    Law("IPIRFedAvg", "002, Thm 3", "exchanges", "T", 2, (16, 64, 256), lambda T: ipir(T)[1]),
    Law("FedMSA", "003, Thm 3.1", "‖∇F‖²", "R", -1 / 2, (100, 400, 1600), lambda R: fedmsa(R, off=1.0)),
    Law("FedMSA", "003, Thm 3.1", "‖∇F‖², noise", "R", -2 / 3, (100, 400, 1600), fedmsa),
    Law("FedMSA", "003, Thm 3.1", "‖∇F‖², noise", "M", -2 / 3, (2, 8, 32), lambda M: fedmsa(400, M)),
    Law("FedMSA", "003, Thm 3.1", "‖∇F‖², noise", "K", -2 / 3, (1, 4, 16), lambda K: fedmsa(400, 4, K)),
    Law("FedDRO", "004, Thm 4.3", "‖∇Φ‖²", "T", -1 / 2, LONG, lambda T: mean_of(feddro(T), "slope")),
    Law(
        "FedDRO",
        "004, Thm 4.3",
        "‖∇Φ‖²",
        "clients",
        -1 / 2,
        (1, 4, 16),
        lambda K: mean_of(feddro(4096, K), "slope"),
    ),
    Law(
        "FedDRO",
        "004, Cor. 4.4",
        "exchanges of x",
        "T",
        3 / 4,
        LONG,
        lambda T: float(feddro(T)[0].ledger.rounds),
    ),
    Law("DSFedDRO", "004, Thm 5.2", "‖∇Φ‖²", "T", -1 / 2, LONG, ds_feddro),
    Law(
        "DSFedDRO",
        "004, Cor. 5.3",
        "‖∇Φ‖², I = √T",
        "T",
        -1 / 2,
        LONG,
        lambda T: ds_feddro(T, math.isqrt(T)),
    ),
    Law("DSFedDRO", "004, Thm 5.2", "‖∇Φ‖², γ_x = γ_y = 1", "T", -1 / 2, LONG, ds_feddro_constant),
)


def main(names: Sequence[str]) -> None:
    """Print a table of the laws, or of those of some methods."""
    unknown = sorted(set(names) - {law.method for law in LAWS})
    if unknown:
        known = ", ".join(dict.fromkeys(law.method for law in LAWS))
        raise SystemExit(f"There is no {', '.join(unknown)}; there are {known}.")
    print("| method | theorem | quantity | against | from … to | predicted | measured | values |")
    print("|---|---|---|---|---|---:|---:|---|")
    for law in LAWS:
        if names and law.method not in names:
            continue
        rise, error, values = slope(law)
        ends = f"{law.sizes[0]} … {law.sizes[-1]}"
        shown = ", ".join(f"{v:.3g}" for v in values)
        uncertain = f" ± {error:.2f}" if len(values) > 2 else ""
        row = [law.method, law.theorem, law.quantity, law.against, ends, f"{law.predicted:+.2f}"]
        print(f"| {' | '.join(row)} | {rise:+.2f}{uncertain} | {shown} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
