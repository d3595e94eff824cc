"""Sparse interpolation with a nonconvex penalty: IPIR-FedAvg on problem (16), with three inner rules.

Section 5.2 of the paper, Figure 2; the page `ipirfedavg-lsp` says what it leaves open.

In Algorithm 2 the inner step is γ_ℓ = t^{−7/12}/(γ_g K), the same γ̃ for all K, and h has to be divided by its
curvature. In section 5.1 γ_ℓ is the same for all K, and h is as it is; so the second inner rule has
γ_ℓ = t^{−7/12}/(5 max_i L_i), γ_g = √N, and η_t against h itself.
"""

import functools
import time
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedstrata as fs
from fedstrata.core.types import PyTree
from fedstrata.data.storage import Placed
from fedstrata.lab import Column, Experiment, PlotSpec, RunRecord, Setting, TableSpec, Task
from fedstrata.lab.experiments.base import record
from reproductions._pages import claims
from reproductions._regression import Regression, change, envelope, held_out, nonzeros, regression, residual


@functools.cache
def penalty(epsilon: float) -> fs.prox.LogSum:
    return fs.prox.LogSum(1.0, epsilon)


@functools.cache
def problem(epsilon: float) -> fs.Selection:
    return fs.Selection(residual, penalty(epsilon))


@functools.lru_cache(maxsize=8)
def posed(name: str, clients: int, seed: int) -> tuple[Regression, fs.FederatedData]:
    """The regression, and its data; the server knows what the exact projection needs: A, A⁺ and b."""
    toy = regression(name, clients, seed)
    known = {"A": toy.A, "inverse": np.linalg.pinv(toy.A, rcond=1e-6).T, "b": toy.b}
    return toy, replace(toy.data, server=known)


def step_size(lam: float, mu: float) -> float:
    return 3 * lam / (4 * (lam / mu + 2))


@functools.lru_cache(maxsize=64)
def papers_eta(L_h: float) -> Any:
    """η_t = 2 ln t/t^{5/12} against h itself, as a schedule against h/L_h."""
    return lambda t: 2 * jnp.log(jnp.maximum(t, 2)) * jnp.maximum(t, 2) ** (-5 / 12) / L_h


def off(x: PyTree, data: Placed) -> Any:
    """``x − P(x)``, with P the exact projection onto argmin h."""
    known = data.server
    return (known["A"] @ x - known["b"]) @ known["inverse"]


@functools.cache
def stationarity(epsilon: float, mu: float, lam: float) -> Any:
    """The metric ‖∇F_λ(y)‖²."""

    def metric(x: PyTree, y: PyTree, data: Placed) -> Any:
        g = penalty(epsilon).envelope_grad(x, mu) + off(x, data) / lam
        return g @ g

    return metric


def projection_error(x: PyTree, y: PyTree, data: Placed) -> Any:
    """How far the last inner rounds ended from the projection of where the outer step has moved to."""
    return jnp.linalg.norm(y - x + off(x, data))


def metrics(s: Setting) -> dict[str, Any]:
    return {
        "f": envelope(penalty(s.epsilon), s.mu),
        "stationarity": stationarity(s.epsilon, s.mu, s.lam),
        "nonzeros": nonzeros,
        "test_error": held_out,
    }


def build(s: Setting) -> Task | RunRecord:
    """IPIR-FedAvg, or gradient descent on F_λ with exact projections."""
    toy, data = posed(s.data, s.clients, s.seed)
    if s.method == "exact projections":
        return exact(s, toy, data.placed())
    gamma = step_size(s.lam, s.mu)
    if s.method == "γ_ℓ as in section 5.1":
        gamma_g = s.clients**0.5
        L_h = s.safety * float(toy.curvatures.max()) / (gamma_g * s.K)
        method = fs.IPIRFedAvg(gamma, s.lam, K=s.K, gamma_g=gamma_g, eta=papers_eta(L_h), mu=s.mu, L_h=L_h)
    else:
        method = fs.IPIRFedAvg(
            gamma, s.lam, inner="paper" if s.method == "γ_ℓ as in Algorithm 2" else "warm",
            inner_rounds=s.inner_rounds, K=s.K, mu=s.mu, L_h=np.linalg.norm(toy.A, 2) ** 2 / s.clients,
        )  # fmt: skip
    return Task(
        problem(s.epsilon), method, data, toy.x0, rounds=s.rounds,
        metrics={**metrics(s), "projection_error": projection_error}, derive=change,
    )  # fmt: skip


def exact(s: Setting, toy: Regression, data: Placed) -> RunRecord:
    """The reference: nothing is inexact but the number of steps."""
    began = time.perf_counter()
    gamma, f, measured = step_size(s.lam, s.mu), penalty(s.epsilon), metrics(s)

    def step(y: PyTree, _: None) -> Any:
        values = {
            name: metric(y, y, data) if name in ("stationarity", "test_error") else metric(y, y)
            for name, metric in measured.items()
        }
        values["primary"] = ((data.server["A"] @ y - data.server["b"]) ** 2).sum() / (2 * s.clients)
        values["secondary"] = f.value(y)
        return y - gamma * (f.envelope_grad(y, s.mu) + off(y, data) / s.lam), values

    start = jnp.asarray(toy.x0, data.server["A"].dtype)
    _, values = jax.jit(lambda y: jax.lax.scan(step, y, length=s.rounds + 1))(start)
    values["change"] = np.abs(np.diff(values["f"], prepend=0.0))
    seconds = time.perf_counter() - began
    return record(s, values, seconds, "gradient descent", lower_rounds=0)


LOOK: dict[str, Any] = {"lines": ("K",), "panels": "label", "log_y": True, "x_label": "outer step"}

EXPERIMENT = Experiment(
    name="ipirfedavg-lsp",
    title="IPIR-FedAvg: sparse interpolation with the log-sum penalty",
    paper="Ebrahimi, Qiu, Cui, Yousefian 2026, section 5.2, Figure 2",
    description=(
        "Regression with more features than samples: among all coefficients that fit the training half, a "
        "stationary point of the log-sum penalty. The paper's inner rule with two readings of its steps, a "
        "warm-started one, and exact projections."
    ),
    problem="min M_LSP(x) over x ∈ argmin 1/(2N) Σ_i Σ over client i's samples of (uᵀx − v)²",
    parameters={
        "data": "montevideo_bus", "clients": 10, "rounds": 150, "inner_rounds": 50, "epsilon": 0.1,
        "mu": 0.01, "lam": 0.01, "safety": 5.0,
    },
    grid=[
        {"method": ["γ_ℓ as in Algorithm 2", "γ_ℓ as in section 5.1", "warm-started"], "K": [1, 5, 10, 20]},
        {"method": ["exact projections"]},
    ],
    build=build,
    seeds=3,
    table=TableSpec(
        (
            Column("f", title="f"),
            Column("primary", title="h"),
            Column("stationarity", title="‖∇F_λ‖²", better="low"),
            Column("change", title="change of f"),
            Column("nonzeros", title="nonzeros", format=".0f"),
            Column("lower_rounds", "ledger", title="inner rounds", format=".0f"),
        ),
        rows=("label", "K"),
    ),
    plots=(
        PlotSpec("stationarity", title="The gradient of the envelope, squared", y_label="‖∇F_λ‖²", **LOOK),
        PlotSpec(
            "stationarity", x="exchanges", lines=("label", "K"), log_x=True, log_y=True,
            title="The same by exchanges", y_label="‖∇F_λ‖²",
        ),
        PlotSpec("f", title="The envelope of the penalty", y_label="f", **{**LOOK, "log_y": False}),
        PlotSpec("primary", title="The training loss", y_label="h", **LOOK),
        PlotSpec("change", title="How far the envelope still moves", y_label="|f(y^t) − f(y^{t−1})|", **LOOK),
    ),
    claims=claims("ipirfedavg-lsp", "the figures and the text on them"),
    needs=("montevideo_bus", "wikimaths"),
    fallback={"data": "synthetic"},
    quick={"rounds": 20, "inner_rounds": 10, "K": [5], "seeds": 1},
)  # fmt: skip
