"""FedGDRO: limits by another solver, and λ → ∞."""

import numpy as np
import pytest
from scipy import optimize
from scipy.special import logsumexp

import fedstrata as fs

M, N = 5, 3
rng = np.random.default_rng(2)
PARTS = [{"a": rng.normal(size=(7, N)), "b": rng.normal(size=7) + i / 2} for i in range(M)]
DATA = fs.FederatedData.from_clients(PARTS)
PROBLEM = fs.Minimization(lambda x, s: 0.5 * (s["a"] @ x - s["b"]) ** 2)


def losses(x):
    return np.array([((p["a"] @ x - p["b"]) ** 2).mean() / 2 for p in PARTS])


def solve(method, rounds, **more):
    return fs.solve(PROBLEM, method, DATA, np.zeros(N), rounds=rounds, progress=False, certify=False, **more)


def test_the_kl_risk():
    lam = 0.5
    best = optimize.minimize(lambda x: lam * logsumexp(losses(x) / lam), np.zeros(N), tol=1e-10).x
    found = solve(fs.FedGDRO(0.1, lam), 1500)
    np.testing.assert_allclose(found.x, best, atol=1e-4)
    value = lam * logsumexp(losses(best) / lam, b=1 / M)
    np.testing.assert_allclose(lam * found.y, value, rtol=1e-4)  # w = log mean exp(F/λ)
    np.testing.assert_allclose(found.history["objective"][-1], value, rtol=1e-4)
    assert found.certificate.solved


def test_the_cvar():
    alpha = 0.4  # the two worst of five: linear constraints on their sums, in epigraph form

    def above(z):
        x, s, t = z[:N], z[N], z[N + 1 :]
        return np.r_[t - (losses(x) - s), t]

    best = optimize.minimize(
        lambda z: z[N] + z[N + 1 :].mean() / alpha, np.zeros(N + 1 + M) + 1.0,
        constraints=[{"type": "ineq", "fun": above}], options={"maxiter": 500, "ftol": 1e-12},
    )  # fmt: skip
    fading = {"gamma": lambda r: 0.1 / (1 + r / 50), "eta": lambda r: 0.1 / (1 + r / 50)}
    found = solve(fs.FedGDRO(level=alpha, risk="cvar", **fading), 5000)
    value = np.sort(losses(np.asarray(found.x, float)))[-2:].mean()
    start = np.sort(losses(np.zeros(N)))[-2:].mean()
    assert value - best.fun < 1e-2 * (start - best.fun)


def test_a_large_lambda_is_fedavg():
    tilted, plain = (solve(m, 20, seed=3) for m in (fs.FedGDRO(0.1, 1e5, I=2), fs.FedAvg(0.1, H=2)))
    np.testing.assert_allclose(tilted.x, plain.x, atol=1e-4)


@pytest.mark.slow
def test_tracked_losses_forget_their_start():
    """β and η below 1 change how fast the weights follow, not where they lead."""
    exact, tracked = (solve(fs.FedGDRO(0.1, 0.5, eta=b, beta=b), 2000) for b in (1.0, 0.3))
    np.testing.assert_allclose(tracked.x, exact.x, atol=1e-4)


@pytest.mark.slow
def test_the_kl_risk_over_a_ball():
    """Projected by the server: the constrained minimiser, by another solver."""
    lam, radius = 0.5, 0.3
    inside = [{"type": "ineq", "fun": lambda x: radius**2 - x @ x}]
    best = optimize.minimize(
        lambda x: lam * logsumexp(losses(x) / lam), np.full(N, 0.1), constraints=inside, tol=1e-12
    ).x
    problem = fs.Minimization(PROBLEM.loss, project=fs.sets.Ball(radius))
    found = fs.solve(
        problem, fs.FedGDRO(0.1, lam), DATA, np.zeros(N), rounds=1000, progress=False, certify=False
    )
    np.testing.assert_allclose(np.linalg.norm(found.x), radius, rtol=1e-5)
    np.testing.assert_allclose(found.x, best, atol=1e-3)
