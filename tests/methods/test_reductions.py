"""Reductions of the averaging methods: at the edge of its parameters, each has a known formula."""

from __future__ import annotations

import numpy as np
import pytest

import fedstrata as fs

rng = np.random.default_rng(0)
CLIENTS = [{"a": rng.normal(size=(n, 3)), "b": rng.normal(size=n)} for n in (6, 4, 5)]
data = fs.FederatedData.from_clients(CLIENTS)
one = fs.FederatedData.from_clients(CLIENTS[:1])
x0 = np.array([0.5, -0.3, 0.2])
GAMMA, ROUNDS = 0.1, 12


def loss(x, sample):
    return 0.5 * (sample["a"] @ x - sample["b"]) ** 2 + 0.05 * x @ x


problem = fs.Minimization(loss)
H = [c["a"].T @ c["a"] / len(c["b"]) + 0.1 * np.eye(3) for c in CLIENTS]
h = [c["a"].T @ c["b"] / len(c["b"]) for c in CLIENTS]
x_star = np.linalg.solve(sum(H), sum(h))


def gradient(i, x):
    return H[i] @ x - h[i]


def solve(method, data=data, rounds=ROUNDS, x0=x0, **more):
    return fs.solve(problem, method, data, x0, rounds=rounds, progress=False, eval_every=rounds, **more)


def descent(clients, steps, x=x0, gamma=GAMMA):
    for _ in range(steps):
        x = x - gamma * np.mean([gradient(i, x) for i in clients], axis=0)
    return x


@pytest.fixture(autouse=True)
def _double(x64):
    pass


PARALLEL = {
    "fedavg": fs.FedAvg(gamma=GAMMA),
    "fedprox": fs.FedProx(gamma=GAMMA, mu=0.7),
    "scaffold": fs.SCAFFOLD(eta_l=GAMMA),
    "scaffnew": fs.Scaffnew(gamma=GAMMA, p=1.0),
    "fedmspp": fs.FedMSPP(eta=0.7, gamma=GAMMA, H=1),
}


@pytest.mark.parametrize("method", PARALLEL.values(), ids=PARALLEL)
def test_one_local_step_is_parallel_gradient_descent(method):
    np.testing.assert_allclose(solve(method).x, descent(range(3), ROUNDS), rtol=1e-12)


CENTRAL = {
    "fedavg": fs.FedAvg(gamma=GAMMA, H=4),
    "scaffold": fs.SCAFFOLD(eta_l=GAMMA, K=4),
    "fedprox": fs.FedProx(gamma=GAMMA, mu=0.0, H=4),
}


@pytest.mark.parametrize("method", CENTRAL.values(), ids=CENTRAL)
def test_one_client_is_gradient_descent(method):
    np.testing.assert_allclose(solve(method, data=one).x, descent([0], 4 * ROUNDS), rtol=1e-12)


def test_local_steps_of_fedavg_have_the_fixed_point_of_their_formula():
    # One round is affine: x ← mean_i (P_i x + (I − P_i) x_i), P_i = (I − γH_i)^4, x_i the client's own
    # minimiser.
    powers = [np.linalg.matrix_power(np.eye(3) - GAMMA * Hi, 4) for Hi in H]
    right = sum((np.eye(3) - P) @ np.linalg.solve(Hi, hi) for P, Hi, hi in zip(powers, H, h, strict=True))
    fixed = np.linalg.solve(3 * np.eye(3) - sum(powers), right)
    np.testing.assert_allclose(solve(fs.FedAvg(gamma=GAMMA, H=4), rounds=1500).x, fixed, rtol=1e-9)
    assert np.linalg.norm(fixed - x_star) > 1e-3  # client drift is there to be seen


DRIFTLESS = {
    "scaffold": fs.SCAFFOLD(eta_l=GAMMA, K=4),
    "scaffnew": fs.Scaffnew(gamma=GAMMA, p=0.3),
}


@pytest.mark.parametrize("method", DRIFTLESS.values(), ids=DRIFTLESS)
def test_control_variates_remove_the_drift(method):
    np.testing.assert_allclose(solve(method, rounds=1500).x, x_star, rtol=1e-9)


@pytest.mark.slow
def test_scaffold_with_sampled_clients_still_finds_the_minimiser():
    found = solve(fs.SCAFFOLD(eta_l=GAMMA, K=2), rounds=3000, participation=2)
    np.testing.assert_allclose(found.x, x_star, rtol=1e-8)
    sizes = [len(c["b"]) for c in CLIENTS]
    assert len(set(sizes)) > 1
    weighted = np.linalg.solve(np.tensordot(sizes, H, 1), np.tensordot(sizes, h, 1))
    found = solve(fs.SCAFFOLD(eta_l=GAMMA, K=2), rounds=3000, participation=2, weights="size")
    np.testing.assert_allclose(found.x, weighted, rtol=1e-8)


def test_first_round_of_scaffold_is_fedavg():
    a = solve(fs.SCAFFOLD(eta_l=GAMMA, K=3, batch_size=2), rounds=1)
    b = solve(fs.FedAvg(gamma=GAMMA, H=3, batch_size=2), rounds=1)
    np.testing.assert_allclose(a.x, b.x, rtol=1e-12)


def test_fedprox_pulls_to_the_proximal_point():
    # Many local steps reach argmin f_i + μ/2‖x − x̂‖² = (H_i + μ)⁻¹(h_i + μ x̂).
    mu = 0.8
    result = solve(fs.FedProx(gamma=0.2, mu=mu, H=800), rounds=1)
    proximal = [np.linalg.solve(Hi + mu * np.eye(3), hi + mu * x0) for Hi, hi in zip(H, h, strict=True)]
    np.testing.assert_allclose(result.x, np.mean(proximal, axis=0), rtol=1e-10)
    # FedMSPP with the full batch solves the same problem with η = 1/μ.
    np.testing.assert_allclose(
        solve(fs.FedMSPP(eta=1 / mu, gamma=0.2, H=800), rounds=1).x, result.x, rtol=1e-10
    )


@pytest.mark.slow
def test_fedrzo_and_fedzo_tend_to_gradient_descent():
    # The mean over directions of the estimate at η → 0 is the gradient: many directions in one step, by
    # FedZO's b.
    step = solve(fs.FedZO(eta=GAMMA, mu=1e-6, b=20_000), rounds=1)
    expected = descent(range(3), 1)
    error = np.linalg.norm(np.asarray(step.x) - expected) / np.linalg.norm(expected - x0)
    # E‖g − ∇f‖² = (n − 1)‖∇f‖²/b per client, and three clients average: 6 standard deviations.
    spread = np.sqrt(2 / 20_000 * np.mean([np.linalg.norm(gradient(i, x0)) ** 2 for i in range(3)]) / 3)
    assert error <= 6 * spread / np.linalg.norm((expected - x0) / GAMMA)


@pytest.mark.slow
def test_scalar_messages_are_the_same_iterates():
    vectors = fs.FedRZO(gamma=0.02, eta=0.1, H=2, batch_size=2)
    scalars = fs.FedRZO(gamma=0.02, eta=0.1, H=2, batch_size=2, messages="scalars")
    a, b = solve(vectors, participation=2), solve(scalars, participation=2)
    np.testing.assert_allclose(a.x, b.x, rtol=1e-12)
    assert a.ledger.floats_up == 3 * 2 * ROUNDS  # n numbers of two clients
    assert b.ledger.floats_up == 2 * 2 * ROUNDS  # H numbers
    assert b.ledger.function_values == a.ledger.function_values
    weighted = solve(scalars, weights="size")
    np.testing.assert_allclose(weighted.x, solve(vectors, weights="size").x, rtol=1e-12)


def test_scalars_are_refused_with_a_local_set():
    bounded = fs.Minimization(loss, project=fs.sets.Ball(1.0))
    with pytest.raises(ValueError, match="cannot replay"):
        fs.solve(bounded, fs.FedRZO(gamma=0.1, eta=0.1, messages="scalars"), data, x0, rounds=1)


@pytest.mark.slow
def test_fedrzo_ends_in_the_intersection_of_local_sets():
    # min ½‖x − (2,2)‖² over x_0 ≤ 1 (client 0) and x_1 ≤ 0.5 (client 1): the solution is (1, 0.5); the
    # penalty
    # dist²/(2η) averaged over two clients moves the smoothed minimiser by η/(1/2 + η) times the excess.
    target = fs.FederatedData.from_clients([{"t": np.full((1, 2), 2.0)}] * 2).with_client_index()
    eta = 1e-2

    def project(x, client):
        import jax.numpy as jnp

        return jnp.minimum(
            x, jnp.where(client.index == 0, jnp.array([1.0, jnp.inf]), jnp.array([jnp.inf, 0.5]))
        )

    pulled = fs.Minimization(lambda x, s: 0.5 * ((x - s["t"]) ** 2).sum(), project=project)
    method = fs.FedRZO(gamma=lambda r: 0.01 / (1 + r / 300), eta=eta, two_sided=True, batch_size=None)
    with pytest.warns(UserWarning, match="outside of clients' own sets: .* with a smaller eta"):
        result = fs.solve(
            pulled, method, target, np.zeros(2), rounds=20_000, progress=False, eval_every=20_000
        )
    # minimiser of ½(x−2)² + (x−c)²/(4η): (2 + c/(2η))/(1 + 1/(2η))
    exact = np.array([(2 + c / (2 * eta)) / (1 + 1 / (2 * eta)) for c in (1.0, 0.5)])
    # The last steps, of size 1.5e-4 against a curvature of 51, leave a spread of about 2e-3: five of these.
    np.testing.assert_allclose(result.x, exact, atol=0.01)


def test_clients_with_zero_steps_sit_out():
    result = solve(fs.FedAvg(gamma=GAMMA, H=np.array([0, 2, 1])), rounds=1)
    ends = [descent([1], 2), descent([2], 1)]
    np.testing.assert_allclose(result.x, np.mean(ends, axis=0), rtol=1e-12)


def test_steps_may_be_a_function_of_the_round():
    result = solve(fs.FedAvg(gamma=GAMMA, H=lambda r: r + 1), data=one, rounds=3)
    np.testing.assert_allclose(result.x, descent([0], 6), rtol=1e-12)
