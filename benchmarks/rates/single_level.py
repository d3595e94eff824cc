"""FedRZO and ZO-HFL: problems whose gradient is known."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedstrata as fs
from benchmarks.rates.law import LONG, Law, exchanges, mean_of, runs

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


# ZO-HFL: quadratics, the clients' responses in closed form

LAM, MU, N = 1.0, 1.0, 4
PERSONAL = fs.Personalized(
    server=lambda x, s: ((x - s["a"]) ** 2).sum() / 2,
    coupling=lambda x, y: LAM / 2 * ((x - y) ** 2).sum(),
    client=lambda x, y, s: ((y - s["a"]) ** 2).sum() / 2 + MU / 2 * ((x - y) ** 2).sum(),
)


def zohfl(R: int, tau: float = 1.0) -> float:
    rng = np.random.default_rng(1)
    parts = [{"a": rng.normal(size=(20, N)) + rng.normal(size=N)} for _ in range(4)]
    server = {"a": rng.normal(size=(20, N))}
    data = fs.FederatedData.from_clients(parts, server=server)
    means = jnp.asarray(np.mean([p["a"].mean(0) for p in parts], 0), float)

    def slope(x: Any, y: Any) -> Any:  # y_i(x) = (ā_i + μx)/(1 + μ)
        g = x - jnp.asarray(server["a"].mean(0), float) + LAM / (1 + MU) ** 2 * (x - means)
        return (g**2).sum()

    method = fs.ZOHFL.from_theory(L1=1.0, L0=1.0, n=N, mu=1 + MU, L_h=1 + MU, eta=0.5, tau=tau, batch_size=1)
    options = {"y0": np.zeros(N), "metrics": {"slope": slope}}
    return mean_of(runs(PERSONAL, method, data, np.full(N, 3.0), R, **options), "slope")


LAWS = (
    Law("FedRZO", "000, Prop. 1", "‖∇f‖²", "K", -1 / 2, LONG, fedrzo_slope),
    Law("FedRZO", "000, Table 1", "exchanges", "K", 3 / 4, LONG, lambda K: exchanges(fedrzo(K))),
    Law("FedRZO", "000, Prop. 1", "‖∇f‖²", "m", -1 / 2, (1, 4, 16), lambda m: fedrzo_slope(4096, m)),
    Law("FedRZO", "000, Table 1", "exchanges", "m", 3 / 4, (1, 4, 16), lambda m: exchanges(fedrzo(4096, m))),
    Law("FedRZO", "000, Prop. 1", "‖∇f‖²", "H ≤ 3", 0, (1, 3), lambda H: fedrzo_slope(4096, 4, H)),
    Law("FedRZO", "000, Prop. 1", "‖∇f‖²", "H ≥ 3", 0, (3, 12, 48), lambda H: fedrzo_slope(4096, 4, H)),
    Law("ZOHFL", "001, Thm 1", "‖∇f‖²", "R", -1 / 2, (256, 1024, 4096), zohfl),
    Law("ZOHFL", "001, Thm 1", "‖∇f‖²", "τ", 0, (1, 4, 16), lambda tau: zohfl(256, float(tau))),
)
