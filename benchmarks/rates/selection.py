"""StR-FedAvg and IPIR-FedAvg: under-determined least squares, weak sharp of the order κ = 2."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedstrata as fs
from benchmarks.rates.law import Law, mean_of, runs

TOY = fs.underdetermined(clients=4, n=24, samples=3)


def selected(R: int, rule: Any, K: int = 2) -> tuple[float, float]:
    """``f* − f``, since a regularised point is infeasible and below f*, and ``h − h*`` of the average."""
    method = fs.StRFedAvg(rule, K=K, L_h=1.0)
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


TIMES = (16, 64, 256)
LAWS = (
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
    *(
        Law(
            "StRFedAvg",
            f"002, Thm {number}",
            f"h − h*, {rule}",
            "K",
            0,
            (1, 5, 20),
            lambda K, rule=rule: selected(1000, rule, K)[1],  # type: ignore[misc]
        )
        for rule, number in (("convex", 2), ("strongly_convex", 1))
    ),
    Law("IPIRFedAvg", "002, Thm 3", "‖∇F_λ‖²", "T", -5 / 24, TIMES, lambda T: ipir(T)[0]),
    Law("IPIRFedAvg", "002, Thm 3", "exchanges", "T", 2, TIMES, lambda T: ipir(T)[1]),
)
