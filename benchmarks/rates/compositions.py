"""FedDRO and DS-FedDRO: h + f(g), all quadratic, with noise in h and g."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import fedstrata as fs
from benchmarks.rates.law import LONG, Law, mean_of, runs

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


def feddro(T: int, clients: int = 4, I: int | None = None) -> list[fs.Result]:
    method = fs.FedDRO.from_theory(T=T, clients=clients, B_g=0.8, L_f=0.5)
    if I is not None:
        method = fs.FedDRO(method.eta, method.beta, I, method.batch_size)
    metrics = {"slope": composition_slope}
    return runs(CO, method, composition(clients), np.full(3, 2.0), math.ceil(T / method.I), metrics=metrics)


def ds_feddro(T: int, I: int = 1, c_x: float = 1.0) -> float:
    method = fs.DSFedDRO.from_theory(T=T, clients=4, I=I, c_x=c_x, batch_size=1)
    metrics = {"slope": composition_slope}
    found = runs(CO, method, composition(4), np.full(3, 2.0), math.ceil(T / I), metrics=metrics)
    return mean_of(found, "slope")


def ds_feddro_constant(T: int, clients: int = 4, I: int = 1) -> float:
    """With γ_x = γ_y = 1 in place of the theorem's √(K/T), and η = 2√(K/T)."""
    eta = 2 * math.sqrt(clients / T)
    method = fs.DSFedDRO(eta, min(1.0, eta), I, 1.0, 1.0, batch_size=1)
    metrics = {"slope": composition_slope}
    found = runs(CO, method, composition(clients), np.full(3, 2.0), math.ceil(T / I), metrics=metrics)
    return mean_of(found, "slope")


CLIENTS = (1, 4, 16)
LAWS = (
    Law("FedDRO", "004, Thm 4.3", "‖∇Φ‖²", "T", -1 / 2, LONG, lambda T: mean_of(feddro(T), "slope")),
    Law(
        "FedDRO",
        "004, Thm 4.3",
        "‖∇Φ‖²",
        "clients",
        -1 / 2,
        CLIENTS,
        lambda K: mean_of(feddro(4096, K), "slope"),
    ),
    Law("FedDRO", "004, Thm 4.3", "‖∇Φ‖²", "I", 0, (1, 2, 8), lambda I: mean_of(feddro(4096, 4, I), "slope")),
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
    Law(
        "DSFedDRO",
        "004, Thm 5.2",
        "‖∇Φ‖², γ_x = γ_y = 1",
        "clients",
        -1 / 2,
        CLIENTS,
        lambda K: ds_feddro_constant(4096, K),
    ),
    Law(
        "DSFedDRO",
        "004, Thm 5.2",
        "‖∇Φ‖², γ_x = γ_y = 1",
        "I",
        0,
        (1, 2, 8),
        lambda I: ds_feddro_constant(4096, 4, I),
    ),
)
