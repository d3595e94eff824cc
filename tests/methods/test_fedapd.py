"""FedAPD: the worst client's solution by another solver, its reduction to AFL's steps, and local steps."""

import numpy as np
import pytest
from scipy import optimize

import fedstrata as fs
from fedstrata.problems.sets import Simplex

M, N = 4, 3
rng = np.random.default_rng(1)
PARTS = [{"a": rng.normal(size=(6, N)), "b": rng.normal(size=6) + i} for i in range(M)]
DATA = fs.FederatedData.from_clients(PARTS)
H = np.array([p["a"].T @ p["a"] / 6 for p in PARTS]) + 0.1 * np.eye(N)
SLOPE = np.array([p["a"].T @ p["b"] / 6 for p in PARTS])
CONSTANT = np.array([(p["b"] ** 2).mean() / 2 for p in PARTS])
PROBLEM = fs.Minimization(lambda x, s: 0.5 * (s["a"] @ x - s["b"]) ** 2 + 0.05 * x @ x)


def losses(x):
    return 0.5 * np.einsum("i,mij,j->m", x, H, x) - SLOPE @ x + CONSTANT


def solve(method, rounds):
    return fs.solve(PROBLEM, method, DATA, np.zeros(N), rounds=rounds, progress=False, certify=False)


def worst():
    bound = {"type": "ineq", "fun": lambda z: z[-1] - losses(z[:-1])}
    start, options = np.r_[np.zeros(N), 9.0], {"ftol": 1e-14}
    return optimize.minimize(lambda z: z[-1], start, constraints=[bound], options=options).x[:-1]


def test_plain_ascent_and_one_step_are_those_of_afl():
    eta, sigma, rounds = 0.1, 0.05, 5
    x, weights, onto = np.zeros(N), np.full(M, 1 / M), Simplex()
    for _ in range(rounds):
        weights = np.asarray(onto(weights + sigma * losses(x)))
        x = x - eta * np.tensordot(weights, H @ x - SLOPE, 1)
    found = solve(fs.FedAPD(eta, sigma, theta=0.0), rounds)
    np.testing.assert_allclose(found.x, x, atol=1e-5)
    np.testing.assert_allclose(found.y, weights, atol=1e-5)


@pytest.mark.parametrize("J", [1, 5])
def test_the_worst_clients_solution(J):
    """Sequential quadratic programming has it; local steps leave it where it is."""
    best = worst()
    L = np.linalg.eigvalsh(H).max()
    spread = M * SLOPE.var(axis=0).sum()
    found = solve(fs.FedAPD(0.5 / (J * L), L / spread, J=J), 2000)
    np.testing.assert_allclose(found.x, best, atol=1e-3)
    assert (np.asarray(found.y) >= 0).all()


def test_the_steps_of_the_theorem_meet_its_conditions():
    L, mu, spread, J = 3.0, 0.2, 5.0, 4
    method = fs.FedAPD.from_theory(L=L, mu=mu, spread=spread, J=J)
    r = np.arange(1000.0)
    tau, sigma = J * np.asarray(method.gamma(r)), np.asarray(method.eta_lam(r))
    t = sigma / sigma[0]
    assert (1 / tau >= (L + sigma * spread) * (1 - 1e-6)).all()
    assert (t[:-1] * (1 / tau[:-1] + mu) >= t[1:] / tau[1:] * (1 - 1e-6)).all()
    np.testing.assert_allclose(method.theta(r)[1:], sigma[:-1] / sigma[1:], rtol=1e-6)


@pytest.mark.slow
def test_the_theorem_keeps_its_bound():
    """‖x − x*‖² falls like 1/r², and stays below the bound with ‖λ_0 − λ*‖² ≤ 2."""
    L, mu = np.linalg.eigvalsh(H).max(), np.linalg.eigvalsh(H).min()
    slopes = np.array([H @ x - SLOPE for x in rng.normal(size=(20, N))])
    spread = max(np.linalg.norm(J - J.mean(0), 2) ** 2 for J in slopes)
    best = worst()
    method = fs.FedAPD.from_theory(L=L, mu=mu, spread=spread)
    theory = fs.plan(PROBLEM, DATA, np.zeros(N), method="FedAPD").theory
    assert theory.conditions[0].holds
    assert 1 < theory.rounds < np.inf
    for rounds in (50, 200, 800):
        a, r0 = rounds + 6 * L / mu, 6 * L / mu
        bound = 3 * r0 / (mu * a**2) * (2 * L * best @ best + 2 * spread / L)
        assert ((solve(method, rounds).x - best) ** 2).sum() <= bound


@pytest.mark.slow
def test_a_penalised_mixture():
    """The weights fill up to a level: λ_i = ((F_i − η)/(ρ m))₊, and their mixture of the slopes vanishes."""
    rho, L = 0.3, np.linalg.eigvalsh(H).max()
    found = solve(fs.FedAPD(0.3 / L, 0.1, rho=rho), 500)
    F, weights = losses(np.asarray(found.x)), np.asarray(found.y)
    level = optimize.brentq(lambda eta: np.maximum(F - eta, 0).sum() / (rho * M) - 1, F.min() - 9, F.max())
    np.testing.assert_allclose(weights, np.maximum(F - level, 0) / (rho * M), atol=1e-4)
    np.testing.assert_allclose(weights @ (H @ found.x - SLOPE), 0, atol=1e-4)
    value = float(weights @ F) - rho / 2 * ((M * weights - 1) ** 2).mean()
    assert fs.diagnose(found).objective == pytest.approx(value, rel=1e-4)
    assert fs.certify(found).solved
    mean = np.linalg.solve(H.mean(0), SLOPE.mean(0))
    np.testing.assert_allclose(solve(fs.FedAPD(0.3 / L, 0.1, rho=1e5), 500).x, mean, atol=1e-3)


@pytest.mark.slow
def test_its_rule_is_certified():
    method = fs.plan(PROBLEM, DATA, np.zeros(N), method="FedAPD").method
    assert fs.certify(solve(method, 500)).solved
