"""IPIR-FedAvg against exact projections and against Algorithm 2 in NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs

TOY = fs.underdetermined()
MU, LAM = 0.1, 0.05
GAMMA = 3 * LAM / (4 * (LAM / MU + 2))  # the bound of the convergence proof, with L_f = 1/μ
PENALTY = fs.prox.LogSum(1.0, 0.5)  # √μ ≤ ε: its envelope is smooth
PROBLEM = fs.Selection(TOY.problem.primary, PENALTY, same_samples=True)

large_lam = pytest.mark.filterwarnings("ignore:IPIRFedAvg. result.x is .* from result.y:UserWarning")


def slope(y):
    """∇F_λ(y), with the exact projection."""
    return PENALTY.envelope_grad(y, MU) + (y - TOY.project(y)) / LAM


def stationarity(x, y):
    return (slope(x) ** 2).sum()


def run(rounds=400, **options):
    method = fs.IPIRFedAvg(GAMMA, LAM, mu=MU, **options)
    return fs.solve(
        PROBLEM,
        method,
        TOY.data,
        TOY.x0,
        rounds=rounds,
        progress=False,
        metrics={"stationarity": stationarity},
    )


def exact(rounds=400):
    """The history of gradient descent on F_λ."""

    def step(y, _):
        return y - GAMMA * slope(y), stationarity(y, None)

    return np.asarray(jax.lax.scan(step, jnp.asarray(TOY.x0, jnp.float32), length=rounds + 1)[1])


@pytest.mark.slow
def test_stationarity_falls_towards_that_of_exact_projections():
    """Theorem 3 is about the mean over all rounds, which falls like 1/T with exact projections."""
    reference = exact()
    paper, warm = run().history["stationarity"], run(inner="warm").history["stationarity"]
    assert reference[0] == pytest.approx(paper[0], rel=1e-4)
    means = [np.cumsum(history) / np.arange(1, 402) for history in (reference, warm, paper)]
    for mean in means:
        assert mean[400] < mean[200] < mean[100] < mean[50] < mean[0]
    assert means[0][400] < means[1][400] < means[2][400]
    assert reference[-1] < warm[-1] < paper[-1] / 100


@pytest.mark.slow
def test_warm_inner_rounds_follow_the_projection():
    far, near = (run(inner=inner) for inner in ("paper", "warm"))
    gaps = [np.linalg.norm(r.y - TOY.project(r.x)) for r in (far, near)]
    assert gaps[1] < 1e-2 * np.linalg.norm(TOY.x_star)
    assert gaps[1] < gaps[0] / 10


@pytest.mark.slow
def test_inner_rounds_are_counted_apart():
    ledger = run(rounds=6).ledger
    assert ledger.lower_rounds == 1 + 1 + 2 + 3 + 4 + 5
    assert (
        ledger.exchanges == ledger.lower_rounds + ledger.levels["scaling"]["exchanges"]
    )  # f is known to all
    assert run(rounds=6, inner="warm").ledger.lower_rounds == 6 * 30


def test_it_is_algorithm_2_in_numpy():
    rounds, K, gamma_g = 6, 2, 1.5
    rows, targets = (np.asarray(TOY.data.stacked()[k], float) for k in "ab")
    y = TOY.x0
    for t in range(rounds):
        R, later = max(t, 1), max(t, 2)
        gamma, eta = R ** (-7 / 12), 2 * np.log(later) / later ** (5 / 12)
        x, iterates = y, []
        for _ in range(R):
            iterates.append(x)
            moved = []
            for A, b in zip(rows, targets, strict=True):
                z = x
                for _ in range(K):
                    z = z - gamma / (gamma_g * K) * (eta * (z - y) + A.T @ (A @ z - b) / len(b))
                moved.append(z - x)
            x = x + gamma_g * np.mean(moved, axis=0)
        theta = 1 / (1 - eta * gamma / 2)
        projection = np.average(iterates, axis=0, weights=theta ** np.arange(1, R + 1))
        y = y - GAMMA * (np.asarray(PENALTY.envelope_grad(y, MU)) + (y - projection) / LAM)
    result = run(rounds, K=K, gamma_g=gamma_g, L_h=1.0)
    np.testing.assert_allclose(result.x, y, atol=2e-5)
    np.testing.assert_allclose(result.y, projection, atol=2e-5)


@pytest.mark.slow
@large_lam
def test_federated_and_proximal_secondaries():
    """With f = ½‖x − c‖², F_λ has one minimiser: (c + (y − P(y))/λ-pull balanced) in closed form."""
    method = fs.IPIRFedAvg(0.05, 0.1, inner="warm", eta=1e-3)
    results = []
    for secondary in (TOY.problem.secondary, lambda x, s: ((x - jnp.asarray(TOY.c, x.dtype)) ** 2).sum() / 2):
        problem = fs.Selection(TOY.problem.primary, secondary, same_samples=True)
        results.append(
            fs.solve(problem, method, TOY.data, TOY.x0, rounds=600, eval_every=600, progress=False)
        )
    off = np.linalg.pinv(TOY.A) @ (TOY.A @ TOY.c - TOY.b)  # c − P(c); y* − c = −off/(1 + λ), in the row space
    np.testing.assert_allclose(results[0].x, TOY.c - off / 1.1, atol=5e-3)
    rounding = np.finfo(np.float32).eps / 1e-3  # the inner problem is curved by η alone where h is flat
    np.testing.assert_allclose(results[1].x, results[0].x, atol=rounding)
    assert results[0].ledger.levels.keys() == {"scaling", "lower"}
    assert results[1].ledger.levels["main"]["exchanges"] == 600


def test_proximal_step_of_an_l1_secondary():
    """y = prox_{γ‖·‖₁}(y − γ(y − P(y))/λ) at the end."""
    problem = fs.Selection(TOY.problem.primary, fs.prox.L1(0.5))
    method = fs.IPIRFedAvg(0.05, 0.1, inner="warm", eta=1e-4)
    result = fs.solve(problem, method, TOY.data, TOY.x0, rounds=2000, eval_every=2000, progress=False)
    y = result.x
    again = fs.prox.L1(0.5).prox(y - 0.5 * (y - TOY.project(y)), 0.05)
    rounding = np.finfo(np.float32).eps / 1e-4  # of P(y): its problem is curved by η alone where h is flat
    np.testing.assert_allclose(again, y, atol=0.5 * rounding)


@pytest.mark.slow
def test_partial_participation_projects_onto_everyones_set():
    result = run(inner="warm", inner_rounds=60, rounds=400)
    sampled = fs.solve(
        PROBLEM,
        fs.IPIRFedAvg(GAMMA, LAM, mu=MU, inner="warm", inner_rounds=60),
        TOY.data,
        TOY.x0,
        rounds=400,
        eval_every=400,
        progress=False,
        participation=3,
    )
    assert np.linalg.norm(TOY.A @ sampled.y - TOY.b) < 0.05 * np.linalg.norm(TOY.b)
    assert np.linalg.norm(sampled.x - result.x) < 0.1 * np.linalg.norm(result.x)


def test_bad_hyper_parameters():
    with pytest.raises(ValueError, match="inner must be 'paper', 'weak_sharp' or 'warm'"):
        fs.IPIRFedAvg(0.1, 0.1, inner="cold")
    with pytest.raises(ValueError, match="lam must be"):
        fs.IPIRFedAvg(0.1, 0.0)
    with pytest.raises(TypeError, match="gamma"):
        fs.IPIRFedAvg(lam=0.1)


@pytest.mark.usefixtures("x64")
def test_the_weakly_sharp_case_by_hand():
    """Theorem 3, case ii: R_t = t, γ̃_t = 2 ln t/t, a constant η, and the θ-weighted average."""
    rng = np.random.default_rng(4)
    clients = [{"a": rng.normal(size=(n, 3)) * 0.3, "b": rng.normal(size=n)} for n in (2, 4)]
    A = sum(c["a"].T @ c["a"] / len(c["b"]) for c in clients) / 2
    b = sum(c["a"].T @ c["b"] / len(c["b"]) for c in clients) / 2
    eta, lam, gamma = 0.3, 0.5, 0.1
    y = np.ones(3)
    for t in range(6):
        step = 2 * np.log(max(t, 2)) / max(t, 2)
        x, average, weight = y, y, 0.0
        for _ in range(max(t, 1)):
            weight = 1 + weight * (1 - eta * step / 2)
            average = average + (x - average) / weight
            x = x - step * (A @ x - b + eta * (x - y))
        y = y - gamma * (y + (y - average) / lam)
    problem = fs.Selection(lambda x, s: (s["a"] @ x - s["b"]) ** 2 / 2, lambda x: x @ x / 2)
    method = fs.IPIRFedAvg(gamma, lam, inner="weak_sharp", eta=eta, L_h=1.0)
    data = fs.FederatedData.from_clients(clients)
    result = fs.solve(problem, method, data, np.ones(3), rounds=6, progress=False)
    np.testing.assert_allclose(result.x, y, rtol=1e-12)
    with pytest.raises(ValueError, match="needs eta"):
        fs.IPIRFedAvg(gamma, lam, inner="weak_sharp")


def test_what_a_large_lam_leaves():
    """f = ½‖x‖² and h = ½(a·x − 1)² with ‖a‖ = 1: F_λ is minimal at a/(1 + λ), whose projection is a."""
    a = np.array([0.6, 0.8])
    data = fs.FederatedData.from_clients([{"a": a[None], "b": np.ones(1)}])
    problem = fs.Selection(lambda x, s: (s["a"] @ x - s["b"]) ** 2 / 2, lambda x: x @ x / 2)
    method = fs.IPIRFedAvg(0.2, 1.0, inner="warm", eta=1e-4)
    result = fs.solve(problem, method, data, np.array([3.0, 0.0]), rounds=100, progress=False)
    np.testing.assert_allclose(result.x, a / 2, atol=1e-3)
    np.testing.assert_allclose(result.y, a, atol=1e-3)
