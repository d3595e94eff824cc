"""FedRZOBilevel and FedMSA: a quadratic bilevel problem. FedRZOTwoStage: a Cournot game."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import fedstrata as fs
from benchmarks.rates.law import LONG, Law, exchanges, mean_of, runs


def bilevel(clients: int, noise: float = 0.0) -> Any:
    return fs.quadratic_bilevel(clients, 3, 4, heterogeneity=0.3, samples=20, noise=noise)


def fedrzo_bilevel(
    K: int, lower: str, m: int = 2, H: int | None = None, seeds: int = 1, alike: bool = False
) -> list[fs.Result]:
    """Theorem 1's steps, a tenth of them for this problem; ``alike`` has the same solution for any m."""
    q = bilevel(1 if alike else m, noise=2.0 if alike else 0.0)
    data = fs.FederatedData.from_clients([q.data.client(0)] * m) if alike else q.data
    mu, L = q.curvature
    options: dict[str, Any] = {"mu_h": mu, "kappa_h": L / mu, "lower": lower, "batch_size": 1}
    method = fs.FedRZOBilevel.from_theory(K=K, clients=m, **options)
    method = fs.FedRZOBilevel(0.1 * method.gamma, method.eta, method.H if H is None else H, **options)
    metrics = {"slope": lambda x, y: (q.gradient(x) ** 2).sum()}
    start = {"y0": np.zeros(4), "metrics": metrics, "seeds": range(seeds)}
    return runs(q.problem, method, data, q.x_star + 1, math.ceil(K / method.H), **start)


def bilevel_slope(K: int, m: int = 2, H: int | None = None, alike: bool = False) -> float:
    return mean_of(fedrzo_bilevel(K, "fedac", m, H, 8, alike), "slope")


def shared_direction(m: int) -> float:
    """The noise of 1024 steps γ = ¼√(m/1024), η = 1, at the solution of ½‖y(x)‖², y(x) = x, clients alike."""
    problem = fs.Bilevel(lambda x, y, s: (y**2).sum() / 2, lambda x, y, s: ((y - x) ** 2).sum() / 2)
    data = fs.FederatedData.from_clients([{"a": np.zeros(1)}] * m)
    method = fs.FedRZOBilevel(math.sqrt(m / 1024) / 4, 1.0, batch_size=None)
    start = {"y0": np.zeros(10), "metrics": {"slope": lambda x, y: (x**2).sum()}}
    found = runs(problem, method, data, np.zeros(10), 1024, **start)
    return float(np.mean([run.history["slope"][512:].mean() for run in found]))


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


GAME = fs.cournot_game(5, 1.0, clients=4, samples=50)


def fedrzo_two_stage(K: int, m: int = 4, H: int | None = None) -> list[fs.Result]:
    """With other m than 4 every client has all of the samples, so that the solution is the same."""
    data = GAME.data
    if m != 4:
        parts = [data.client(i) for i in range(data.clients)]
        data = fs.FederatedData.from_clients([jax.tree.map(lambda *a: np.concatenate(a), *parts)] * m)
    method = fs.FedRZOTwoStage.from_theory(K=K, clients=m, mu=1.0, L=6.0, eta=0.1)
    H = method.H if H is None else H
    method = fs.FedRZOTwoStage(0.5 * method.gamma, method.eta, H, batch_size=1, alpha=0.15, tau=6.0)
    start = {"y0": np.zeros(5), "default_metrics": True}
    return runs(GAME.problem, method, data, np.zeros(()), math.ceil(K / H), **start)


def gap(results: Sequence[fs.Result]) -> float:
    return mean_of(results, "leader") - GAME.optimum[1]


FEW = (64, 256, 1024)
TABLE_2 = (("local_sgd", 3 / 4, 7 / 4), ("fedac", 3 / 4, 13 / 12), ("lfd", 11 / 12, 11 / 12))
LAWS = (
    Law("FedRZOBilevel", "000, Thm 1", "‖∇f‖²", "K", -1 / 2, FEW, bilevel_slope),
    Law(
        "FedRZOBilevel",
        "000, Thm 1",
        "‖∇f‖²",
        "m",
        -1 / 2,
        (1, 4, 16),
        lambda m: bilevel_slope(64, m, alike=True),
    ),
    Law("FedRZOBilevel", "000, Thm 1", "‖∇f‖², noise", "m", -1 / 2, (1, 8, 64), shared_direction),
    Law("FedRZOBilevel", "000, Thm 1", "‖∇f‖²", "H", 0, (1, 3, 9), lambda H: bilevel_slope(256, 2, H)),
    *(
        Law(
            "FedRZOBilevel",
            "000, Table 2",
            f"exchanges, {lower}",
            "K",
            power,
            FEW,
            lambda K, lower=lower: exchanges(fedrzo_bilevel(K, lower)),  # type: ignore[misc]
        )
        for lower, power, _ in TABLE_2
    ),
    *(
        Law(
            "FedRZOBilevel",
            "000, Table 2",
            f"exchanges, {lower}",
            "m",
            power,
            (2, 4, 8),
            lambda m, lower=lower: exchanges(fedrzo_bilevel(256, lower, m)),  # type: ignore[misc]
        )
        for lower, _, power in TABLE_2
    ),
    Law("FedRZOTwoStage", "000, Thm 2", "f − f*", "K", -1 / 2, LONG, lambda K: gap(fedrzo_two_stage(K))),
    Law(
        "FedRZOTwoStage",
        "000, Thm 2",
        "f − f*",
        "m",
        -1 / 2,
        (1, 4, 16),
        lambda m: gap(fedrzo_two_stage(1024, m)),
    ),
    Law(
        "FedRZOTwoStage",
        "000, Thm 2",
        "f − f*",
        "H",
        0,
        (1, 3, 9),
        lambda H: gap(fedrzo_two_stage(1024, 4, H)),
    ),
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
    Law("FedMSA", "003, Thm 3.1", "‖∇F‖²", "R", -1 / 2, (100, 400, 1600), lambda R: fedmsa(R, off=1.0)),
    Law("FedMSA", "003, Thm 3.1", "‖∇F‖², noise", "R", -2 / 3, (100, 400, 1600), fedmsa),
    Law("FedMSA", "003, Thm 3.1", "‖∇F‖², noise", "M", -2 / 3, (2, 8, 32), lambda M: fedmsa(400, M)),
    Law("FedMSA", "003, Thm 3.1", "‖∇F‖², noise", "K", -2 / 3, (1, 4, 16), lambda K: fedmsa(400, 4, K)),
)
