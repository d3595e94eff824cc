"""How η should fall: the paper's rules against decreasing and geometric schedules, with and without scaling.

The shortest of all solutions of an under-determined regression, from whose closed form errors are measured.
The primary loss has a curvature far from 1, as that of data has which nobody scaled.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

import fedstrata as fs
from fedstrata.core.types import PyTree
from fedstrata.data.storage import Placed
from fedstrata.lab import Column, Experiment, PlotSpec, Setting, TableSpec, Task
from reproductions._regression import regression, residual


def half_square(x: PyTree) -> Any:
    return x @ x / 2


SHORTEST = fs.Selection(residual, half_square)


def error(x: PyTree, y: PyTree, data: Placed) -> Any:
    """The distance to the shortest solution, relative to its length."""
    solution = data.test["solution"]
    return jnp.linalg.norm(x - solution) / jnp.linalg.norm(solution)


METRICS = {"error": error}
REFERENCES: dict[str, fs.Method] = {
    "BiG-SAM": fs.BiGSAM(),
    "R-APM": fs.RAPM(),
    "sequential": fs.SequentialRegularization((1.0, 0.1, 0.01, 0.001), warm_start=True),
}


@functools.lru_cache(maxsize=16)
def problem_data(name: str, clients: int, curvature: float, seed: int) -> tuple[fs.FederatedData, np.ndarray]:
    """The data with its shortest solution, and a start off the row space."""
    if name == "synthetic":
        toy = fs.underdetermined(clients=clients, n=20 * clients, samples=10, curvature=curvature, seed=seed)
        pairs = zip(np.split(toy.A, clients), np.split(toy.b, clients), strict=True)
        parts, A, b, x0 = [{"x": a, "y": t} for a, t in pairs], toy.A, toy.b, toy.x0
    else:
        real = regression(name, clients, seed)
        parts = [real.data.client(i) for i in range(clients)]
        A, b, x0 = real.A, real.b, real.x0
    solution = np.linalg.lstsq(A, b, rcond=None)[0]
    return fs.FederatedData.from_clients(parts, test={"solution": solution}), x0


def build(s: Setting) -> Task:
    """A rule or a reference; that data which nobody scaled is scaled is what is shown here."""
    data, x0 = problem_data(s.data, s.clients, s.curvature, s.seed)
    method = REFERENCES.get(s.method)
    if method is None:
        method = fs.StRFedAvg(s.method, s.K, L_h=None if s.scaling == "estimated" else 1.0, returns=s.returns)
    every = max(1, s.R // 100)
    return Task(SHORTEST, method, data, x0, rounds=s.R, eval_every=every, metrics=METRICS, silent=True)


EXPERIMENT = Experiment(
    name="strfedavg-schedules",
    title="StR-FedAvg: how η should fall, and what scaling does",
    paper="Ebrahimi, Qiu, Cui, Yousefian 2026, Algorithm 1 and Theorems 1 and 2",
    description=(
        "Under-determined regression whose shortest solution is known: the error of the paper's rules, of "
        "decreasing and geometric schedules, and of centralised methods, after R rounds; with the primary "
        "loss as it is, and divided by an estimate of its curvature."
    ),
    problem="min ½‖x‖² over x ∈ argmin 1/N Σ_i mean over client i's samples of ½(uᵀx − v)²",
    parameters={"data": "synthetic", "clients": 10, "curvature": 50.0, "K": 5, "returns": None},
    grid=[
        {
            "method": ["convex", "strongly_convex", "decreasing", "geometric"],
            "scaling": ["estimated", "none"], "R": [100, 1000, 10_000],
        },
        {"method": list(REFERENCES), "scaling": ["estimated"], "R": [100, 1000, 10_000]},
    ],
    build=build,
    seeds=5,
    table=TableSpec(
        (Column("error", title="error", better="low"),), rows=("scaling", "label"), across="R", paper=False,
    ),
    plots=(
        PlotSpec("error", lines=("label", "scaling"), panels="R", log_y=True, log_x=True, title="Error"),
        PlotSpec("primary", lines=("label", "scaling"), panels="R", log_y=True, log_x=True, title="h"),
    ),
    needs=("montevideo_bus", "wikimaths"),
    fallback={"data": "synthetic"},
    quick={
        "method": ["convex", "decreasing", "geometric"], "scaling": ["estimated"], "R": [100, 1000],
        "seeds": 1,
    },
)  # fmt: skip
