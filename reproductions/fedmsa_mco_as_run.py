"""FedMSA on the composition of `fedmsa_mco`, with the settings of the authors' own program, and minibatches.

The settings are those of the authors' notebook (repository ucr-optml/FedMSA), see the page `fedmsa-mco`.
The centralised method there is SGD on the composition of a batch's means with a step of 0.01 on a gradient
that is divided by the batch's size once more: 1e-4 in effect. Features are what NumPy makes of normal
numbers whose matrix is not a covariance, C = USVᵀ: normal with the covariance VSVᵀ. (x and −x fit alike, so
the distance is to the nearer of ±x*. The notebook keeps one batch for all K local steps of a round; here
every step draws its own.)

The second part has noise of deviation 1 in b, so that samples disagree at the solution too, a constant α =
1e-4, β = 0.9, and a full start: what ``rho`` and ``batch`` do to the limit are Theorem 3.1's terms with σ.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

import fedstrata as fs
from fedstrata.core.types import PyTree, Schedule
from fedstrata.data.storage import Placed
from fedstrata.lab import Column, Experiment, PlotSpec, Setting, TableSpec, Task
from reproductions._pages import claims
from reproductions.fedmsa_mco import U, by_updates, slope

LAM = DELTA = 0.1
PROBLEM = fs.risk_averse(U, LAM, DELTA)


def distance(x: PyTree, y: PyTree, data: Placed) -> Any:
    truth = data.server["truth"][0]
    return jnp.minimum(jnp.linalg.norm(x - truth), jnp.linalg.norm(x + truth))


METRICS = {"distance": distance, "slope": slope(LAM, DELTA)}


@functools.cache
def problem_data(clients: int, samples: int, d: int, noise: float, seed: int) -> fs.FederatedData:
    """The clients' samples; the server holds x* for the metric."""
    rng = np.random.default_rng(seed)
    _, s, v = np.linalg.svd(rng.normal(size=(d, d)))
    a = rng.normal(size=(samples, d)) @ (np.sqrt(s)[:, None] * v)
    truth = rng.normal(size=d)
    b = (a @ truth) ** 2 + noise * rng.normal(size=samples)
    parts = np.array_split(rng.permutation(samples), clients)
    clients_data = [{"a": a[p].astype(np.float32), "b": b[p].astype(np.float32)} for p in parts]
    return fs.FederatedData.from_clients(clients_data, server={"truth": truth[None].astype(np.float32)})


@functools.cache
def falling(first: float, factor: float, every: int = 1) -> Schedule:
    """A step of ``first`` · factor^⌊r/every⌋."""
    return lambda r: first * factor ** (r // every)


def build(s: Setting) -> Task:
    noisy = s.method == "minibatches"
    data = problem_data(s.clients, s.samples, s.d, s.noise_minibatches if noisy else s.noise, s.seed)
    central = s.method.startswith("centralised")
    if central:
        eta = s.central if s.method == "centralised as run" else falling(s.alpha, 0.999, s.K)
        method: fs.Method = fs.MBSGD(eta, batch_size=s.batch_size // s.clients)
    elif noisy:
        options = {"batch_size": s.batch, "full_start": s.batch is not None}
        method = fs.FedMSA(s.alpha / 3, 0.9, s.rho, s.K, s.clients, **options)
    else:
        beta = falling(s.alpha, 0.9) if s.method == "FedMSA as run" else 0.9
        alpha = falling(s.alpha, 0.999)
        method = fs.FedMSA(alpha, beta, 0.5, s.K, adjoint=False, batch_size=s.batch_size)
    steps = 1 if central else s.K
    rounds = s.rounds * (s.K if central else 2 if noisy else 1)
    derive = functools.partial(by_updates, metric="distance", steps=steps)
    every = s.every * (s.K if central else 1)
    x0 = np.full(s.d, 0.1, np.float32)
    return Task(PROBLEM, method, data, x0, rounds=rounds, eval_every=every, metrics=METRICS, derive=derive)


RUNS = ("FedMSA as run", "FedMSA with β = 0.9", "centralised as run", "centralised with FedMSA's α")

EXPERIMENT = Experiment(
    name="fedmsa-mco-as-run",
    title="FedMSA on a composition of three levels, as its authors ran it, and with minibatches",
    paper="Tarzanagh, Li, Sharma, Oymak 2023, section 4, Figure 2, and the authors' notebook",
    description=(
        "The settings of the authors' own program, with FedMSA's and the centralised method's steps as they "
        "are there (3e-4 and, in effect, 1e-4), and with equal ones; then minibatches and ρ."
    ),
    problem="min over x of E U + λ √(E max(0, U − E U)² + δ) with U = (b − (aᵀx)²)²",
    parameters={
        "clients": 2, "samples": 1000, "d": 10, "noise": 0.001, "noise_minibatches": 1.0, "alpha": 3e-4,
        "central": 1e-4, "K": 5, "batch_size": 100, "rounds": 200, "every": 2,
    },
    grid=[
        {"method": list(RUNS)},
        {"method": ["minibatches"], "rho": [1.0, 0.5, 0.1, 0.02], "batch": [25, 100, 400, None]},
    ],
    build=build,
    seeds=10,
    table=TableSpec(
        (
            Column("distance", title="‖x − x*‖", better="low"),
            Column("relative", title="relative to the start", better="low"),
            Column("slope", "mean_last", "‖∇F‖, the last 20 rounds", better="low"),
            Column("relative", "reach", "updates to 10 %", better="low", target=0.1, at="updates"),
            Column("relative", "reach", "exchanges to 10 %", better="low", target=0.1, at="exchanges"),
        ),
        rows=("label", "rho", "batch"),
    ),
    plots=(
        PlotSpec("distance", log_y=True, title="By rounds, as in the paper's figure"),
        PlotSpec("distance", x="updates", log_y=True, title="By updates"),
        PlotSpec("distance", x="exchanges", log_y=True, log_x=True, title="By exchanges"),
    ),
    claims=claims("fedmsa-mco", "Figure 2 and the text on it", 1),
    quick={"rounds": 20, "alpha": 1e-4, "method": ["FedMSA as run", "centralised as run"], "seeds": 1},
    quick_seconds=10,
)  # fmt: skip
