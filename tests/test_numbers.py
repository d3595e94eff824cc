"""Precision: what is computed in float64 is float64 throughout, and single precision warns of nothing."""

import warnings

import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs

pytestmark = pytest.mark.usefixtures("x64")


def data():
    rng = np.random.default_rng(0)
    return fs.FederatedData.from_clients(
        [{"a": rng.normal(size=(n, 3)), "b": rng.normal(size=n)} for n in (3, 5, 4)]
    )


def loss(x, s):
    return (s["a"] @ x - s["b"]) ** 2 / 2


def test_schedules_of_the_round_are_float64():
    """1/(r + 3) of a 32-bit round would be a float32; the iterates follow the exact recursion."""
    clients = data()
    parts = [clients.client(i) for i in range(3)]
    A = sum(p["a"].T @ p["a"] / len(p["b"]) for p in parts) / 3
    b = sum(p["a"].T @ p["b"] / len(p["b"]) for p in parts) / 3
    x = np.ones(3)
    for r in range(20):
        x = x - 1 / (r + 3) * (A @ x - b)
    method = fs.FedAvg(gamma=lambda r: 1 / (r + 3))
    found = fs.solve(fs.Minimization(loss), method, clients, np.ones(3), rounds=20, progress=False)
    np.testing.assert_allclose(found.x, x, rtol=1e-13)

    x = np.ones(3)  # StR-FedAvg, "decreasing": h + ηf with η = 2/(r + 8), γ̃ = 1, h as it is
    problem = fs.Selection(lambda x, s: 0.1 * loss(x, s), lambda x: x @ x / 2)
    for r in range(20):
        x = x - (0.1 * (A @ x - b) + 2 / (r + 8) * x)
    method = fs.StRFedAvg(rule="decreasing", L_h=1.0)
    found = fs.solve(problem, method, clients, np.ones(3), rounds=20, progress=False)
    np.testing.assert_allclose(found.x, x, rtol=1e-12)


def test_ipir_takes_its_eta_in_float64():
    """Inner rounds of the warm rule are x ← x − (∇h(x) + η(x − y)), η = 1/(t + 10)."""
    clients = data()
    parts = [clients.client(i) for i in range(3)]
    A = 0.1 * sum(p["a"].T @ p["a"] / len(p["b"]) for p in parts) / 3
    b = 0.1 * sum(p["a"].T @ p["b"] / len(p["b"]) for p in parts) / 3
    y, warm = np.ones(3), np.ones(3)
    for t in range(6):
        x = warm
        for _ in range(4):
            x = x - (A @ x - b + (x - y) / (t + 10))
        new = y - 0.1 * (y + (y - x) / 0.5)
        warm, y = x + new - y, new
    problem = fs.Selection(lambda x, s: 0.1 * loss(x, s), lambda x: x @ x / 2)
    method = fs.IPIRFedAvg(0.1, 0.5, inner="warm", inner_rounds=4, L_h=1.0)
    found = fs.solve(problem, method, clients, np.ones(3), rounds=6, progress=False)
    np.testing.assert_allclose(found.x, y, rtol=1e-13)


SCALARS = {
    "FedRZO": (fs.Minimization(loss), fs.FedRZO(0.01, 0.1, H=2, messages="scalars")),
    "FedRZOTwoStage": (
        fs.MPEC(lambda x, y, s: loss(x, s) + x @ y, lambda x, y, s: y - x * s["b"]),
        fs.FedRZOTwoStage(0.01, 0.1, H=2, alpha=0.5, messages="scalars"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCALARS)
def test_single_precision_among_double_warns_of_nothing(name):
    problem, method = SCALARS[name]
    x0 = np.ones(3, np.float32)
    y0 = None if name == "FedRZO" else x0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = fs.solve(problem, method, data(), x0, y0=y0, rounds=2, progress=False)
    assert result.x.dtype == jnp.float32


@pytest.mark.slow
@pytest.mark.parametrize("two_sided", [False, True])
def test_the_two_stage_response_is_that_at_x(two_sided):
    """y(x, ξ) = x·b + ‖x‖² 1: one round of one step from x̂; two-sided, ‖x ± v‖² = ‖x‖² + η² on average."""
    clients, x, eta = data(), np.array([1.0, -0.5, 2.0]), 0.5
    problem = fs.MPEC(lambda x, y, s: loss(x, s) + x @ y, lambda x, y, s: y - x * s["b"] - x @ x)
    method = fs.FedRZOTwoStage(
        0.01, eta, lower="projection", batch_size=None, alpha=1.0, two_sided=two_sided, tol=1e-12
    )
    found = fs.solve(problem, method, clients, x, y0=np.zeros(3), rounds=1, progress=False)
    means = np.array([clients.client(i)["b"].mean() for i in range(3)])
    expected = x * means[:, None] + x @ x + (eta**2 if two_sided else 0)
    np.testing.assert_allclose(found.y, expected, rtol=1e-10)
