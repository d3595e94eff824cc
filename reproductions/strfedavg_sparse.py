"""The sparsest of all interpolating regressions: StR-FedAvg on problem (15), and what its local steps do.

Section 5.1 of the paper, Figure 1; the page `strfedavg-sparse` says what it leaves open. With so large a Γ
the number of rounds does not enter the steps, and self-tuning is not seen. ``self-tuned`` is Algorithm 1 on
the loss divided by its curvature, which needs no Γ: γ̃ = R^{−1/2} and η = R^{−1/4} for the horizons R.
"""

import time
from typing import Any

import jax.numpy as jnp
import numpy as np

import fedstrata as fs
from fedstrata.lab import Column, Experiment, PlotSpec, RunRecord, Setting, TableSpec, Task
from fedstrata.lab.experiments.base import record
from reproductions._pages import claims
from reproductions._regression import Regression, change, envelope, held_out, nonzeros, regression, residual

L1 = fs.prox.L1()
SPARSEST = fs.Selection(residual, L1)


def build(s: Setting) -> Task | RunRecord:
    toy = regression(s.data, s.clients, s.seed)
    if s.method == "linear program":
        return linear_program(s, toy)
    gamma_g, R = s.clients**0.5, s.rounds + (s.safety * toy.curvatures.max()) ** 2  # R + Γ
    as_printed: dict[str, Any] = {"R": R, "gamma_g": gamma_g, "mu": s.mu, "L_h": 1.0, "returns": "last"}
    if s.method == "γ_ℓ as in the experiment":
        method = fs.StRFedAvg(K=s.K, gamma=gamma_g * s.K / R**0.5, **as_printed)
    elif s.method == "γ_ℓ as in Algorithm 1":
        method = fs.StRFedAvg(K=s.K, **as_printed)
    elif s.method == "self-tuned":
        method = fs.StRFedAvg(K=s.K, gamma_g=gamma_g, mu=s.mu)
    else:
        L_h = np.linalg.norm(toy.A, 2) ** 2 / s.clients
        gamma = min(1.0, s.K * L_h / toy.curvatures.max())  # within what the steepest client bears
        method = fs.StRFedAvg(
            "geometric", s.K, gamma=gamma if s.K > 1 else 1.0, eta=s.eta, eta_end=s.eta_end, L_h=L_h
        )
    metrics = {"f": envelope(L1, s.mu), "nonzeros": nonzeros, "test_error": held_out}
    rounds = s.rounds if s.horizon is None else s.horizon
    every = max(1, rounds // s.rounds)
    return Task(
        SPARSEST, method, toy.data, toy.x0, rounds=rounds, eval_every=every, metrics=metrics, derive=change
    )


def linear_program(s: Setting, toy: Regression) -> RunRecord:
    """The exact answer, ``min ‖x‖₁ over Ax = b``, by HiGHS."""
    from scipy.optimize import linprog

    began = time.perf_counter()
    n = toy.A.shape[1]
    found = linprog(np.ones(2 * n), A_eq=np.hstack([toy.A, -toy.A]), b_eq=toy.b, method="highs")
    x = found.x[:n] - found.x[n:]
    values = {
        "f": float(L1.envelope(jnp.asarray(x), s.mu)),
        "secondary": float(np.abs(x).sum()),
        "primary": float(((toy.A @ x - toy.b) ** 2).sum() / (2 * s.clients)),
        "nonzeros": float(nonzeros(x, None)),
        "test_error": float(held_out(x, None, toy.data)),
    }
    return record(s, values, time.perf_counter() - began, "linprog")


LOOK: dict[str, Any] = {"lines": ("K", "horizon"), "panels": "label", "log_y": True}

EXPERIMENT = Experiment(
    name="strfedavg-sparse",
    title="StR-FedAvg: the sparsest of all interpolating regressions",
    paper="Ebrahimi, Qiu, Cui, Yousefian 2026, section 5.1, Figure 1",
    description=(
        "Regression with more features than samples: among all coefficients that fit the training half, "
        "those with the smallest ℓ1 norm. How the number K of local steps matters, and how far the answers "
        "are from the linear program's."
    ),
    problem="min ‖x‖₁ over x ∈ argmin 1/(2N) Σ_i Σ over client i's samples of (uᵀx − v)²",
    parameters={
        "data": "montevideo_bus", "clients": 10, "rounds": 1000, "mu": 0.01, "safety": 5.0, "eta": 1e-3,
        "eta_end": 1e-6,
    },
    grid=[
        {"method": ["γ_ℓ as in the experiment", "γ_ℓ as in Algorithm 1"], "K": [1, 5, 10, 20]},
        {"method": ["geometric η, proximal"], "K": [1, 5, 10, 20]},
        {"method": ["self-tuned"], "K": [1, 5], "horizon": [100, 1000, 10_000]},
        {"method": ["linear program"]},
    ],
    build=build,
    seeds=5,
    table=TableSpec(
        (
            Column("secondary", title="‖x‖₁"),
            Column("primary", title="h"),
            Column("change", title="change of f"),
            Column("nonzeros", title="nonzeros", format=".0f"),
            Column("test_error", title="test error", better="low"),
        ),
        rows=("label", "K", "horizon"),
    ),
    plots=(
        PlotSpec("f", title="f, the envelope of ℓ1", **LOOK),
        PlotSpec("primary", title="h, the training loss", **LOOK),
        PlotSpec("change", title="|f(x̂_r) − f(x̂_{r−1})|", **LOOK),
    ),
    claims=claims("strfedavg-sparse", "the figures and the text on them"),
    needs=("montevideo_bus", "wikimaths"),
    fallback={"data": "synthetic"},
    quick={
        "rounds": 60, "method": ["γ_ℓ as in the experiment", "self-tuned", "linear program"], "K": [1, 5],
        "horizon": [60], "seeds": 1,
    },
)  # fmt: skip
