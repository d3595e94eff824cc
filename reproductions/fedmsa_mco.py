"""FedMSA on a composition of three levels: risk-averse phase retrieval, against the centralised method.

Section 4 of the paper, Figure 2; the page `fedmsa-mco` says what it leaves open. Every method runs at every
step size, and is judged by rounds, updates, exchanges and bytes. Batches are full and all clients are heard,
so that ρ cancels.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedstrata as fs
from fedstrata.core.types import PyTree
from fedstrata.data.storage import Placed
from fedstrata.lab import Column, Experiment, PlotSpec, Setting, TableSpec, Task
from fedstrata.models import Metric
from reproductions._pages import claims

LAM, DELTA = 1.0, 1e-3


def U(x: PyTree, sample: PyTree) -> Any:
    return (sample["b"] - (sample["a"] @ x) ** 2) ** 2


PROBLEM = fs.risk_averse(U, LAM, DELTA)


@functools.cache
def slope(lam: float, delta: float) -> Metric:
    """‖∇F‖ of the centralised objective."""

    def objective(x: PyTree, data: Placed) -> Any:
        u = jax.vmap(lambda sample: U(x, sample))(data.train)
        return u.mean() + lam * jnp.sqrt((jnp.maximum(0, u - u.mean()) ** 2).mean() + delta)

    return lambda x, y, data: jnp.linalg.norm(jax.grad(objective)(x, data))


def by_updates(result: fs.Result, metric: str, steps: int) -> dict[str, Any]:
    """The updates so far (round 0 has one local step), and a metric relative to the start."""
    values = result.history[metric]
    updates = np.maximum(0, steps * (result.history["round"] - 1) + 1)
    return {"updates": updates, "relative": values / values[0]}


METRICS = {"slope": slope(LAM, DELTA)}


@functools.cache
def problem_data(split: str, clients: int, samples: int, d: int, noise: float, seed: int) -> Any:
    """The clients' samples and the start; ``own``: each client has its own covariance and truth."""
    rng = np.random.default_rng(seed)
    number = clients if split == "own" else 1
    truths = rng.normal(size=d) + (0.3 if split == "own" else 0.0) * rng.normal(size=(number, d))
    roots = rng.normal(size=(number, d, d)) / np.sqrt(d)
    parts = []
    for i in range(clients):
        a = rng.normal(size=(samples // clients, d)) @ roots[i % number].T
        b = (a @ truths[i % number]) ** 2 + np.sqrt(noise) * rng.normal(size=len(a))
        parts.append({"a": a, "b": b})
    return fs.FederatedData.from_clients(parts), rng.normal(size=d)


def build(s: Setting) -> Task:
    data, x0 = problem_data(s.split, s.clients, s.samples, s.d, s.noise, s.seed)
    if s.method == "centralised":
        method: fs.Method = fs.SOBA(s.alpha, s.beta)
        rounds, every = s.K * s.rounds, s.K * s.every
    else:
        local = 1 if s.method == "FedMSA, 1 client" else s.clients
        adjoint = s.method != "FedMSA, the paper's form"
        method = fs.FedMSA(s.alpha, s.beta, K=s.K, clients=local, adjoint=adjoint)
        rounds, every = s.rounds, s.every
    steps = 1 if s.method == "centralised" else s.K
    derive = functools.partial(by_updates, metric="slope", steps=steps)
    return Task(PROBLEM, method, data, x0, rounds=rounds, eval_every=every, metrics=METRICS, derive=derive)


LOOK: dict[str, Any] = {"lines": ("label", "alpha"), "panels": "split", "log_y": True}


EXPERIMENT = Experiment(
    name="fedmsa-mco",
    title="FedMSA on a risk-averse composition of three levels",
    paper="Tarzanagh, Li, Sharma, Oymak 2023, section 4, Figure 2",
    description=(
        "Risk-averse phase retrieval: 200 rounds of 5 local steps against 1000 centralised steps, at equal "
        "rounds, equal updates and equal step sizes; with clients alike, as in the paper, and with clients "
        "that differ."
    ),
    problem="min over x of E U + λ √(E max(0, U − E U)² + δ) with U = (b − (aᵀx)²)²",
    parameters={
        "clients": 10, "samples": 1000, "d": 10, "noise": 0.001, "beta": 0.9, "K": 5, "rounds": 200,
        "every": 2,
    },
    grid={
        "split": ["alike", "own"],
        "method": ["FedMSA, 1 client", "FedMSA, 10 clients", "FedMSA, the paper's form", "centralised"],
        "alpha": [2.5e-5, 5e-5, 1e-4, 2e-4, 4e-4],
    },
    build=build,
    seeds=5,
    table=TableSpec(
        (
            Column("objective", better="low"),
            Column("relative", title="‖∇F‖/‖∇F(x₀)‖", better="low"),
            Column("relative", "reach", "rounds to 5%", better="low", target=0.05),
            Column("relative", "reach", "updates to 5%", better="low", target=0.05, at="updates"),
            Column("relative", "reach", "exchanges to 5%", better="low", target=0.05, at="exchanges"),
            Column("relative", "reach", "bytes to 5%", "bytes", better="low", target=0.05, at="bytes_up"),
        ),
        rows=("split", "alpha", "label"),
    ),
    plots=(
        PlotSpec("objective", title="By rounds", **LOOK),
        PlotSpec("objective", x="updates", title="By updates", **LOOK),
        PlotSpec("relative", x="exchanges", title="‖∇F‖, relative to the start, by exchanges", **LOOK),
        PlotSpec("objective", x="bytes_up", log_x=True, title="By bytes uploaded", **LOOK),
        PlotSpec("relative", x="updates", title="‖∇F‖, relative to the start, by updates", **LOOK),
    ),
    claims=claims("fedmsa-mco", "Figure 2 and the text on it"),
    quick={"rounds": 20, "alpha": [1e-4], "split": ["alike"], "seeds": 1},
)  # fmt: skip
