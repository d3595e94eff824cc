"""Among the equally accurate logistic models on Adult, the fairest.

A model is in use. Any model whose loss is higher by at most ε at every client is as good; among those, one is
chosen that treats the sexes alike and stays near the model in use:

    h_i(x) = max(0, ℓ_i(x) − ℓ_i(x_use) − ε)              zero where client i loses nothing that matters
    f(x)   = ½ (gᵀx)² + ρ/2 ‖x − x_use‖²                   gᵀx: the covariance of sex and score

ℓ_i is client i's logistic loss; g = E (sex − mean)(features), 109 numbers that are averaged once and then
known to all. Without ρ a large weight on a rare feature would cancel the covariance and change no decision.

h_i is not squared, so that argmin h is weakly sharp: the gradient stays as large as that of ℓ_i up to the
tolerance, and a small η needs not be zero. A square would be smooth, and so flat near the tolerance that
thousands of rounds leave the loss a third above it.
"""

import functools
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import minimize

import fedstrata as fs
from fedstrata.core.types import PyTree
from fedstrata.data.storage import Placed
from fedstrata.lab import Column, Experiment, PlotSpec, RunRecord, Setting, TableSpec, Task
from fedstrata.lab.experiments.base import record
from fedstrata.lab.experiments.data import federated


class FairProblem(NamedTuple):
    """The data with the clients' tolerated losses, and what the exact solver needs."""

    data: fs.FederatedData
    problem: fs.Selection
    use: np.ndarray  # x_use
    u: np.ndarray  # clients × samples × features
    v: np.ndarray  # ±1
    allowed: np.ndarray  # ℓ_i(x_use) + ε
    g: np.ndarray


@fs.per_batch
def excess(x: PyTree, samples: PyTree) -> Any:
    """h_i: what the loss is above the client's tolerance."""
    loss = jax.nn.softplus(-samples["v"] * (samples["u"] @ x)).mean()
    return jax.nn.relu(loss - samples["allowed"][0])


@functools.lru_cache(maxsize=8)
def fair(name: str, clients: int, people: int, epsilon: float, rho: float, seed: int) -> FairProblem:
    """The problem for one split of the data; the model in use is the best logistic model on it."""
    if name == "synthetic":
        train, test = _synthetic(seed, people), _synthetic(seed + 1000, 2000)
        data = fs.FederatedData.from_arrays(train, clients, seed=seed, test=test)
    else:
        data = federated(name, clients, seed=seed, limit=people)
    train = data.stacked()
    u, v = _with_one(train["x"]), 2.0 * np.asarray(train["y"], float) - 1
    sex = np.asarray(train["sex"], float)
    use = minimize(_loss, np.zeros(u.shape[-1]), args=(u, v), jac=True, method="L-BFGS-B", tol=1e-9).x
    allowed = np.array([_loss(use, *pair)[0] for pair in zip(u, v, strict=True)]) + epsilon
    g = ((sex - sex.mean())[..., None] * u).mean((0, 1))
    parts = [
        {"u": a, "v": b, "allowed": np.full(len(b), level)} for a, b, level in zip(u, v, allowed, strict=True)
    ]
    test = {"u": _with_one(data.test["x"]), "y": data.test["y"], "sex": data.test["sex"]}
    return FairProblem(
        fs.FederatedData.from_clients(parts, test=test, server={"use": use, "g": g}),
        fs.Selection(excess, _unfairness(g, use, rho)), use, u, v, allowed, g,
    )  # fmt: skip


def _with_one(x: PyTree) -> np.ndarray:
    x = np.asarray(x, float)
    return np.concatenate([x, np.ones((*x.shape[:-1], 1))], axis=-1)


def _synthetic(seed: int, people: int) -> dict[str, np.ndarray]:
    """People with a feature that tells the sex and, more weakly, the label."""
    rng = np.random.default_rng((seed, 4))
    sex = rng.integers(0, 2, people)
    x = rng.normal(size=(people, 10))
    x[:, 0] += 1.5 * sex
    y = (x @ np.linspace(1, 0.2, 10) + rng.normal(size=people) > 0.8).astype(int)
    return {"x": x, "y": y, "sex": sex}


def _loss(x: np.ndarray, u: np.ndarray, v: np.ndarray) -> tuple[float, np.ndarray]:
    """The mean logistic loss over everything given, and its gradient."""
    margin = v * (u @ x)
    weight = -v * np.exp(-np.logaddexp(0, margin)) / v.size
    return float(np.logaddexp(0, -margin).mean()), np.tensordot(weight, u, axes=v.ndim)


def _unfairness(g: np.ndarray, use: np.ndarray, rho: float) -> Any:
    def f(x: PyTree) -> Any:
        near = x - jnp.asarray(use, x.dtype)
        return (jnp.asarray(g, x.dtype) @ x) ** 2 / 2 + rho / 2 * (near @ near)

    return f


def _rates(x: PyTree, data: Placed, of: jax.Array) -> Any:
    """How much oftener men get a yes than women, among those whom ``of`` marks."""
    test = data.test
    yes = (test["u"] @ x > 0).astype(x.dtype)
    men, women = test["sex"] * of, (1 - test["sex"]) * of
    return (yes * men).sum() / men.sum() - (yes * women).sum() / women.sum()


def parity_gap(x: PyTree, y: PyTree, data: Placed) -> Any:
    return _rates(x, data, jnp.ones_like(data.test["y"]))


def opportunity_gap(x: PyTree, y: PyTree, data: Placed) -> Any:
    """Of equal opportunity, on test data: among those who earn more."""
    return _rates(x, data, data.test["y"])


def accuracy(x: PyTree, y: PyTree, data: Placed) -> Any:
    return ((data.test["u"] @ x > 0) == (data.test["y"] == 1)).mean(dtype=x.dtype)


def worst_loss(x: PyTree, y: PyTree, data: Placed) -> Any:
    """How much the loss of the worst-off client is above that of the model in use, on its training data."""

    def rise(part: PyTree) -> Any:
        losses = (jax.nn.softplus(-part["v"] * (part["u"] @ z)).mean() for z in (x, data.server["use"]))
        return next(losses) - next(losses)

    return jax.vmap(rise)(data.training.stacked()).max()


def covariance(x: PyTree, y: PyTree, data: Placed) -> Any:
    return jnp.abs(data.server["g"] @ x)


METRICS = {
    "covariance": covariance,
    "accuracy": accuracy,
    "parity_gap": parity_gap,
    "opportunity_gap": opportunity_gap,
    "worst_loss": worst_loss,
}


def build(s: Setting) -> Task | RunRecord:
    """A method on the problem, the model in use, or the exact answer."""
    p = fair(s.data, s.clients, s.people, s.epsilon, s.rho, s.seed)
    if s.method == "the model in use":
        return recorded(s, p, p.use, 0.0)
    if s.method == "exact (SLSQP)":
        return exact(s, p)
    methods = {
        "paper's convex rule": fs.StRFedAvg("convex", s.K),
        "geometric": fs.StRFedAvg("geometric", s.K, eta=s.eta, eta_end=s.eta_end),
        "sequential": fs.SequentialRegularization((0.015, 0.0015, 0.00015), K=s.K, warm_start=True),
    }
    return Task(
        p.problem, methods[s.method], p.data, p.use, rounds=s.rounds, metrics=METRICS,
        eval_every=max(1, s.rounds // 100),
    )  # fmt: skip


def exact(s: Setting, p: FairProblem) -> RunRecord:
    """The minimum of f under every client's tolerance, by quadratic programming on the pooled data."""
    began = time.perf_counter()

    def f(x: np.ndarray) -> tuple[float, np.ndarray]:
        near, gap = x - p.use, p.g @ x
        return gap**2 / 2 + s.rho / 2 * near @ near, gap * p.g + s.rho * near

    constraints = [
        {
            "type": "ineq",
            "fun": lambda x, a=a, b=b, level=level: level - _loss(x, a, b)[0],
            "jac": lambda x, a=a, b=b: -_loss(x, a, b)[1],
        }
        for a, b, level in zip(p.u, p.v, p.allowed, strict=True)
    ]
    found = minimize(
        f, p.use, jac=True, constraints=constraints, method="SLSQP", options={"maxiter": 500, "ftol": 1e-10}
    )
    return recorded(s, p, found.x, time.perf_counter() - began)


def recorded(s: Setting, p: FairProblem, x: np.ndarray, seconds: float) -> RunRecord:
    """A model that no method of ours found, as a run."""
    data, point = p.data.placed(), jnp.asarray(x, jnp.result_type(float))
    assert p.problem.f.known is not None
    values = {name: float(metric(point, None, data)) for name, metric in METRICS.items()}
    values["secondary"] = float(p.problem.f.known(point))
    values["primary"] = float(jax.vmap(lambda part: excess(point, part))(data.training.stacked()).mean())
    return record(s, values, seconds)


EXPERIMENT = Experiment(
    name="selection-fair",
    title="Among the equally accurate models, the fairest",
    description=(
        "Logistic regression on Adult. A model is in use; of all models whose loss is at most ε higher at "
        "every client, the one that covaries least with sex."
    ),
    problem="min ½(gᵀx)² + ρ/2‖x − x_use‖² over x ∈ argmin 1/N Σ_i max(0, ℓ_i(x) − ℓ_i(x_use) − ε)",
    parameters={
        "data": "adult", "clients": 10, "people": 20_000, "epsilon": 0.01, "rho": 0.01, "rounds": 3000,
        "K": 5, "eta": 0.15, "eta_end": 1.5e-4,
    },
    grid={"method": ["the model in use", "paper's convex rule", "geometric", "sequential", "exact (SLSQP)"]},
    build=build,
    seeds=3,
    table=TableSpec(
        (
            Column("accuracy", format=".2%"),
            Column("parity_gap", title="parity gap", format=".3f"),
            Column("opportunity_gap", title="opportunity gap", format=".3f"),
            Column("worst_loss", title="worst client's loss", format=".5f"),
            Column("primary", title="h", format=".1e"),
            Column("covariance", format=".3f"),
            Column("secondary", title="f", format=".4f"),
        ),
        paper=False,
    ),
    plots=(
        PlotSpec(
            "parity_gap", title="Demographic parity gap (test)", y_label="how much oftener men get a yes",
        ),
        PlotSpec(
            "opportunity_gap", title="Equal opportunity gap (test)",
            y_label="the same among those who earn more",
        ),
        PlotSpec(
            "worst_loss", title="The worst client's loss above that of the model in use",
            y_label="loss above that of the model in use",
        ),
        PlotSpec("accuracy", title="Accuracy (test)"),
        PlotSpec("covariance", title="|gᵀx|, the covariance of sex and score", y_label="|gᵀx|"),
    ),
    needs=("adult",),
    fallback={"data": "synthetic", "people": 2000},
    quick={
        "method": ["the model in use", "geometric", "exact (SLSQP)"], "people": 2000, "rounds": 100, "K": 1,
        "seeds": 1,
    },
)  # fmt: skip
