"""What compression does: the bytes that each method sends until it is as near to its limit as without it.

The limit is where the same method ends without a channel, as local steps drift with or without one.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import optax

import fedstrata as fs
from fedstrata.lab.experiments.base import Experiment, Setting, Task
from fedstrata.lab.report import Column, TableSpec

CLIENTS, D, NEAR = 8, 100, 1e-3
OPEN = 10**6  # rounds of a method whose steps depend on their number: so many that these stay equal


@functools.cache
def instance(kind: str) -> tuple[Any, fs.FederatedData, Any]:
    """Problem, data and y0 of unlike clients; x0 is zero."""
    if kind == "bilevel":
        return *fs.quadratic_bilevel(CLIENTS, D, D)[:2], np.zeros(D)
    if kind == "minimax":
        return *fs.quadratic_minimax(CLIENTS, D, D)[:2], np.zeros(D)
    rng = np.random.default_rng(0)
    own = [
        {"A": rng.uniform(0.5, 2, (1, D)), "b": rng.normal(size=(1, D))} for _ in range(CLIENTS)
    ]  # diagonals
    problem = fs.Minimization(lambda x, s: 0.5 * x @ (s["A"] * x) - s["b"] @ x)
    return problem, fs.FederatedData.from_clients(own), None


METHODS: dict[str, tuple[str, Any]] = {
    "FedAvg, H = 1": ("plain", fs.FedAvg(gamma=0.1)),
    "FedAvg, H = 5": ("plain", fs.FedAvg(gamma=0.05, H=5)),
    "FedProx": ("plain", fs.FedProx(gamma=0.05, mu=0.5, H=5)),
    "SCAFFOLD": ("plain", fs.SCAFFOLD(eta_l=0.05, eta_g=0.5, K=5)),
    "Scaffnew": ("plain", fs.Scaffnew(gamma=0.1, p=0.5)),
    "FedMSPP": ("plain", fs.FedMSPP(eta=0.5, gamma=0.1, H=3)),
    "FedAC": ("plain", fs.FedAC(0.05, 0.05, K=2)),
    "LFD": ("plain", fs.LFD(0.1, tau=2)),
    "FedOpt, momentum": ("plain", fs.FedOpt(optax.sgd(0.02), optax.sgd(1.0, momentum=0.5), H=2)),
    "FedMSA": ("bilevel", fs.FedMSA(0.01, 0.02, K=2, clients=CLIENTS)),
    "SOBA": ("bilevel", fs.SOBA(0.02, 0.05)),
    "HypergradientDescent": ("bilevel", fs.HypergradientDescent(0.02, 0.1, T=3, N=5)),
    "HypergradientDescent, all": ("bilevel", fs.HypergradientDescent(0.02, 0.1, T=3, N=5)),
    "FedNest": ("bilevel", fs.FedNest(0.05, 0.1, T=3, tau=2, N=5, ell=12.0, inverse="series")),
    "SimFBO": ("bilevel", fs.SimFBO(0.02, 0.05, 0.05, 0.02, 0.05, 0.05, tau=2)),
    "FedNest, all": ("bilevel", fs.FedNest(0.05, 0.1, T=3, tau=2, N=5, ell=12.0, inverse="series")),
    "FedSTORM": ("bilevel", fs.FedSTORM(0.02, 0.05, c=0.5, I=2)),
    "FedF2SA": ("bilevel", fs.FedF2SA(0.002, 0.005, H=2)),
    "LocalSGDA": ("minimax", fs.LocalSGDA(0.02, 0.05, tau=2)),
    "FedSGDAPlus": ("minimax", fs.FedSGDAPlus(0.02, 0.05, K=2, S=2, eta=0.9)),
    "FESSGDA": ("minimax", fs.FESSGDA(0.02, 0.05, 2, p=2.0, beta=0.5, eta_xg=0.9)),
    "Scaffnew, minimax": ("minimax", fs.Scaffnew(0.03, 0.5)),
    "CODASCA": ("minimax", fs.CODASCA(0.03, 0.0, I=2, rounds=OPEN)),
    "FedMSA, minimax": ("minimax", fs.FedMSA(0.01, 0.02, K=2, clients=CLIENTS)),
}
COMPRESSORS: dict[str, Any] = {
    "sign": fs.Sign(),
    "top 10 %": fs.TopK(0.1),
    "QSGD, 2 bits": fs.QSGD(2),
    "QSGD, 2 bits, scaled": fs.QSGD(2, unbiased=False),
    "QSGD, 4 bits": fs.QSGD(4),
    "QSGD, 8 bits": fs.QSGD(8),
}

UNBIASED = ["QSGD, 4 bits"]


def solved(name: str, rounds: int, **options: Any) -> fs.Result:
    """A run of a method; of one that diverges, as far as it came."""
    kind, method = METHODS[name]
    problem, data, y0 = instance(kind)
    try:
        return fs.solve(
            problem, method, data, np.zeros(D), y0=y0, rounds=rounds, default_metrics=False, progress=False,
            certify=False, **options,
        )  # fmt: skip
    except fs.Diverged as error:
        return error.result


@functools.cache
def limit(name: str, rounds: int) -> np.ndarray:
    """Where the method ends without a channel."""
    return np.asarray(solved(name, 2 * rounds, eval_every=2 * rounds).x)


@functools.cache
def distance(name: str, rounds: int) -> Any:
    """The metric ‖x − limit‖/‖x0 − limit‖, with x0 = 0."""
    end = limit(name, rounds)
    return lambda x, y: optax.tree.norm(x - end) / np.linalg.norm(end)


def speed(history: Any, ledger: Any) -> float:
    """One over the bytes up to the first round from which on it is near; zero if it does not get there."""
    far = np.flatnonzero(~(np.asarray(history["distance"]) <= NEAR))
    first = 0 if far.size == 0 else far[-1] + 1
    if not 0 < first < len(history["distance"]):
        return 0.0
    return ledger.rounds / (ledger.bytes_up * float(history["round"][first]))


@functools.cache
def plain_speed(name: str, rounds: int) -> float:
    """That without a channel."""
    found = solved(name, rounds, metrics={"distance": distance(name, rounds)})
    return speed(found.history, found.ledger)


def build(s: Setting) -> Task:
    """One method under one compressor, with the feedback that it declares; of the level "main", or of all."""
    kind, method = METHODS[s.method]
    problem, data, y0 = instance(kind)
    channel: Any = fs.Channel(compress=COMPRESSORS[s.compressor])
    channel = {"*": channel} if s.method.endswith("all") else channel

    def derive(result: fs.Result) -> dict[str, Any]:
        plain = plain_speed(s.method, s.rounds)
        return {"fewer": speed(result.history, result.ledger) / plain if plain else 0.0}

    return Task(
        problem, method, data, np.zeros(D), y0, s.rounds, metrics={"distance": distance(s.method, s.rounds)},
        derive=derive, silent=True,
        options={"default_metrics": False, "channel": channel},
    )  # fmt: skip


EXPERIMENT = Experiment(
    name="compression",
    title="What compression does: bytes until a method is near its limit",
    paper="not in a paper; Richtárik et al. 2021 (EF21), Mishchenko et al. 2019 (DIANA)",
    description=(
        "Eight unlike clients, d = 100, full batches: how many times fewer bytes clients send until x stays "
        "within 1e-3 of where the same method ends without compression; 0 where it does not get there."
    ),
    problem="quadratics: min f(x), a bilevel problem, a minimax problem",
    parameters={"rounds": 1500},
    grid=[
        {"method": [n for n in METHODS if METHODS[n][0] == "plain"], "compressor": list(COMPRESSORS)},
        {"method": [n for n in METHODS if METHODS[n][0] != "plain"], "compressor": UNBIASED},
    ],
    build=build,
    seeds=1,
    table=TableSpec(
        (Column("fewer", format=".1f", better="high"), Column("distance", format=".0e")),
        rows=("label",),
        across="compressor",
        paper=False,
    ),
    quick={"method": ["FedAvg, H = 5"], "compressor": ["sign", "QSGD, 4 bits"], "rounds": 400},
    quick_seconds=8,
    full_time="15 minutes on one core",
)
