"""Theorem 4.1 of the FedDRO paper: where FedAvg for compositions goes wrong, and what mends it.

Two clients, g₁ = 4x − 4 and g₂ = −2x + 4, so g = x, and f = √(y² + 4): Φ = √(x² + 4) is smallest at x = 0.
Every method starts at ½, on the full batch, so nothing is random.
"""

import functools

import jax.numpy as jnp
import numpy as np

import fedstrata as fs
from fedstrata.lab import Column, Experiment, PlotSpec, Reference, Setting, TableSpec, Task
from reproductions._pages import claims

PROBLEM = fs.Composition([lambda x, s: s["a"] * x + s["b"], lambda y: jnp.sqrt(y**2 + 4)])
METRICS = {"x": lambda x, y: x, "distance": lambda x, y: jnp.abs(x)}


@functools.cache
def data() -> fs.FederatedData:
    return fs.FederatedData.from_clients(
        [{"a": np.array([a]), "b": np.array([b])} for a, b in ((4.0, -4.0), (-2.0, 4.0))]
    )


def build(s: Setting) -> Task:
    method = {
        "FedAvg, Case I": lambda: fs.CompositionalFedAvg(s.eta, I=s.I, case=1),
        "FedAvg, Case II": lambda: fs.CompositionalFedAvg(s.eta, I=s.I, case=2),
        "FedDRO": lambda: fs.FedDRO(s.eta, s.beta, I=s.I),
        "DS-FedDRO, server's y": lambda: fs.DSFedDRO(s.eta, s.beta, s.I, 1.3, 1.4),
        "DS-FedDRO, own y": lambda: fs.DSFedDRO(s.eta, s.beta, s.I, 1.3, 1.4, embedding="local"),
    }[s.method]()
    return Task(PROBLEM, method, data(), 0.5, rounds=s.rounds, metrics=METRICS)


# The second block of the grid is Figure 7.
EXPERIMENT = Experiment(
    name="feddro-counterexample",
    title="FedDRO's counterexample: local steps and compositions",
    paper="Federated compositional optimization (FedDRO), Theorems 4.1 and 4.2, Figure 7",
    description=(
        "A composition of one variable on two clients that differ: vanilla FedAvg tends to a wrong point, "
        "also with embeddings shared in every round; FedDRO and DS-FedDRO do not."
    ),
    problem="min √(g(x)² + 4), g the mean of 4x − 4 and −2x + 4",
    parameters={"beta": 0.3, "rounds": 600},
    grid=[
        {
            "method": [
                "FedAvg, Case I", "FedAvg, Case II", "FedDRO", "DS-FedDRO, server's y", "DS-FedDRO, own y",
            ],
            "I": [2, 8],
            "eta": [0.04],
        },
        {"method": ["FedAvg, Case I", "FedAvg, Case II"], "I": [2], "eta": [0.005, 0.01, 0.02, 0.03, 0.04]},
    ],
    build=build,
    seeds=1,
    table=TableSpec(
        (
            Column("x", format=".6f"),
            Column("distance", title="|x − x*|", format=".1e", better="low"),
            Column("exchanges", reduce="ledger", format=".0f"),
        ),
        rows=("label", "I", "eta"),
    ),
    plots=(
        PlotSpec(
            "x",
            lines=("label", "eta"),
            panels="I",
            references=(Reference(0.0, "the solution"), Reference(0.5, "the bound of Theorem 4.1")),
        ),
        PlotSpec("distance", lines=("label", "eta"), panels="I", log_y=True, y_label="|x − x*|"),
    ),
    claims=claims("feddro-counterexample", "Theorems 4.1 and 4.2, for I = 2 and η < 1/22"),
    quick={"rounds": 100, "I": [2], "eta": [0.04]},
    quick_seconds=4,
    full_time="10 s on two cores",
)  # fmt: skip
