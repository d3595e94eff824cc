"""Every class of problems with two hostile clients of ten, under robust means.

The error is to where the same method ends on the eight honest clients alone, as a part of the way there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from jax import numpy as jnp

import fedstrata as fs
from fedstrata.channels import ALIE, InnerProduct, Mean, Mimic, SignFlip
from fedstrata.lab.experiments.base import Experiment, Setting, Task
from fedstrata.lab.report import Column, TableSpec

CLIENTS, HOSTILE, D = 10, 2, 10


def quadratic(x: Any, s: Any) -> Any:
    """½ xᵀAx − bᵀx with a diagonal A."""
    return 0.5 * x @ (s["A"] * x) - s["b"] @ x


def flat(x: Any, s: Any) -> Any:
    """The same in the first half of x: every value of the rest is optimal."""
    half = jnp.arange(D) < D // 2
    return 0.5 * x @ (half * s["A"] * x) - (half * s["b"]) @ x


def near(y: Any, s: Any) -> Any:
    """Half the squared distance to b."""
    return 0.5 * ((y - s["b"]) ** 2).sum()


BASIS: dict[str, Any] = {"directions": D, "orthogonal": True}  # differences along a whole basis
SOLVED: dict[str, tuple[Any, Any, bool]] = {  # problem, method, whether there is a y0
    "Minimization, FedAvg": (fs.Minimization(quadratic), fs.FedAvg(gamma=0.2), False),
    "Bilevel, SOBA": (
        fs.Bilevel(
            lambda x, y, s: near(y, s) + 0.1 * x @ x,
            lambda x, y, s: 0.5 * y @ (s["A"] * y) - x @ y,
            same_samples=True,
        ),
        fs.SOBA(0.05, 0.2),
        True,
    ),
    "Minimax, LocalSGDA": (
        fs.Minimax(lambda x, y, s: quadratic(x, s) + x @ y - 0.5 * y @ y),
        fs.LocalSGDA(0.2, 0.2, tau=1),
        True,
    ),
    "MPEC, FedRZOTwoStage": (
        fs.MPEC(
            lambda x, y, s: near(y, s) + 0.1 * x @ x,
            lambda x, y, s: s["A"] * y - x,
            project_y=fs.sets.NonNegative(),
        ),
        fs.FedRZOTwoStage(0.2, 0.1, H=1, batch_size=None, tol=1e-4, two_sided=True, **BASIS),
        True,
    ),
    "Selection, BiGSAM": (
        fs.Selection(flat, lambda x: 0.5 * ((x - 1) ** 2).sum()),
        fs.BiGSAM(mu_f=1.0, L_h=2.5, L_f=1.0),
        False,
    ),
    "Personalized, ZOHFL": (
        fs.Personalized(
            server=near,
            coupling=lambda x, y: 0.5 * (y**2).sum(),
            client=lambda x, y, s: quadratic(y, s) + 0.5 * ((x - y) ** 2).sum(),
        ),
        fs.ZOHFL(0.2, 0.1, H=2, gamma_client=0.3, **BASIS),
        True,
    ),
    "Composition, CompositionalFedAvg": (
        fs.Composition([lambda x, s: s["A"] * x - s["b"], lambda z: 0.5 * z @ z]),
        fs.CompositionalFedAvg(0.2, I=1),
        False,
    ),
    "MultiSequence, FedMSA": (
        fs.MultiSequence(P=lambda x, Z, s: x - Z[0], S=(lambda x, z, s: s["A"] * z - s["b"] - 0.2 * x,)),
        fs.FedMSA(0.1, 0.2, K=1, clients=CLIENTS),
        True,
    ),
}
MEANS: dict[str, Any] = {
    "mean": Mean(),
    "trimmed": fs.TrimmedMean(0.2),
    "median": fs.Median(),
    "geometric": fs.GeometricMedian(),
    "multi-Krum": fs.MultiKrum(0.2),
    "trimmed, mixed": fs.TrimmedMean(0.2, mixing=True),
}
ATTACKS: dict[str, Callable[[Any], Any]] = {
    "none": lambda mean: mean,
    "sign flip × 10": lambda mean: SignFlip(mean, HOSTILE, factor=10.0),
    "ALIE": lambda mean: ALIE(mean, HOSTILE, z=1.5),
    "inner product": lambda mean: InnerProduct(mean, HOSTILE),
    "mimic": lambda mean: Mimic(mean, HOSTILE),
}


@functools.cache
def clients(spread: float, honest: bool) -> fs.FederatedData:
    """Ten nearly alike clients, or the eight honest ones."""
    rng = np.random.default_rng(0)
    A, b = rng.uniform(0.5, 2, D), rng.uniform(0.5, 2, D)
    every = [
        {"A": (A * np.exp(spread * rng.normal(size=D)))[None], "b": (b + spread * rng.normal(size=D))[None]}
        for _ in range(CLIENTS)
    ]
    return fs.FederatedData.from_clients(
        every[HOSTILE:] if honest else every, server={"A": A[None], "b": b[None]}
    )


def start(s: Setting) -> tuple[Any, Any, Any, Any]:
    """Problem, method, x0 and y0."""
    problem, method, second = SOLVED[s.method]
    y0 = np.zeros(D) if second else None
    return problem, method, np.zeros(D), (y0,) if s.method.startswith("MultiSequence") else y0


@functools.cache
def honest_end(name: str, spread: float, rounds: int) -> np.ndarray:
    """Where the honest clients alone come to in as many rounds."""
    problem, method, x0, y0 = start(Setting({}, {"method": name}, 0))
    if name.startswith("MultiSequence"):
        method = fs.FedMSA(0.1, 0.2, K=1, clients=CLIENTS - HOSTILE)
    found = fs.solve(problem, method, clients(spread, True), x0, y0=y0, rounds=rounds, eval_every=rounds,
                     default_metrics=False, progress=False, certify=False)  # fmt: skip
    return np.asarray(found.x)


def build(s: Setting) -> Task:
    """A class of problems, an attack, and a mean."""
    problem, method, x0, y0 = start(s)

    def derive(result: fs.Result) -> dict[str, Any]:
        end = honest_end(s.method, s.spread, s.rounds)
        return {"error": float(np.linalg.norm(np.asarray(result.x) - end) / np.linalg.norm(end))}

    return Task(
        problem, method, clients(s.spread, False), x0, y0, s.rounds, eval_every=s.rounds, derive=derive,
        options={"default_metrics": False, "channel": fs.Channel(mean=ATTACKS[s.attack](MEANS[s.mean]))},
        silent=True,
    )  # fmt: skip


EXPERIMENT = Experiment(
    name="hostile-clients",
    title="Two hostile clients of ten, in every class of problems",
    paper="not in a paper; Allouah et al. 2023 for the means, the SOBA row is BR-FedBi (ICLR 2026)",
    description=(
        "Robust means against hostile uploads, in every exchange of a method of each class. "
        "The error is to where the same method ends on the eight honest clients alone, as a part of the way."
    ),
    problem="quadratics of each class, d = 10",
    parameters={"rounds": 300, "spread": 0.1},
    grid=[{"method": list(SOLVED), "attack": list(ATTACKS), "mean": list(MEANS)}],
    build=build,
    seeds=1,
    table=TableSpec((Column("error", format=".2g"),), rows=("label", "attack"), across="mean", paper=False),
    quick={
        "method": ["Bilevel, SOBA"],
        "attack": ["sign flip × 10"],
        "mean": ["mean", "trimmed"],
        "rounds": 100,
    },
    quick_seconds=10,
    full_time="25 minutes on one core",
)
