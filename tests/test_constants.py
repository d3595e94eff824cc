"""Measured constants against those of closed forms."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs

pytestmark = pytest.mark.usefixtures("x64")


def matrices(game, name):
    return np.asarray(game.data.train[name], float)


@pytest.mark.slow
def test_a_quadratic_bilevel_problem():
    game = fs.quadratic_bilevel(clients=4, n=3, p=5)
    x, y = np.array([0.3, -1.0, 2.0]), np.ones(5)
    found = fs.constants(game.problem, game.data, x, y)
    A, B, M = (matrices(game, name) for name in "ABM")
    lower, upper = found.levels["lower"], found.levels["upper"]
    each = np.linalg.eigvalsh(A)
    np.testing.assert_allclose([lower.mu, lower.L], np.linalg.eigvalsh(A.mean(0))[[0, -1]], rtol=1e-8)
    np.testing.assert_allclose(lower.client_mu, each[:, 0], rtol=1e-8)
    np.testing.assert_allclose(lower.client_L, each[:, -1], rtol=1e-8)
    np.testing.assert_allclose(upper.L, np.linalg.eigvalsh(M[:, :3, :3].mean(0))[-1], rtol=1e-8)
    assert found.coupling == pytest.approx(np.linalg.norm(B.mean(0), 2))
    unlike = max(np.linalg.norm(own - A.mean(0), 2) for own in A)
    assert lower.curvature_heterogeneity == pytest.approx(unlike, rel=1e-6)
    y = np.linalg.solve(A.mean(0), B.mean(0) @ x + matrices(game, "c").mean(0))
    slopes = np.einsum("ijk,k->ij", A, y) - np.einsum("ijk,k->ij", B, x) - matrices(game, "c")
    assert lower.gradient == pytest.approx(0, abs=1e-6)
    assert lower.heterogeneity == pytest.approx(np.sqrt(((slopes - slopes.mean(0)) ** 2).sum(1).mean()))
    assert lower.noise == pytest.approx(0, abs=1e-12)
    assert lower.kink < 0.05
    S = np.linalg.solve(A.mean(0), B.mean(0))
    T = np.concatenate([np.eye(3), S])
    curved = np.linalg.eigvalsh(T.T @ M.mean(0) @ T)
    F, direct = found.levels["objective"], np.linalg.eigvalsh(T.T @ M.mean(0) @ T - M.mean(0)[:3, :3])
    assert found.through == pytest.approx(np.abs(direct).max(), rel=1e-5)
    np.testing.assert_allclose([F.mu, F.L], curved[[0, -1]], rtol=1e-5)
    assert found.exchanges > 0
    assert found.oracle_calls["hessian_products"] > 0


@pytest.mark.parametrize("clients", [5, 10])  # ten is the number of followers, too
def test_the_followers_of_a_cournot_game(clients):
    game = fs.cournot_game(clients=clients)
    y = np.ones(len(game.c))
    found = fs.constants(game.problem, game.data, np.array(1.0), y, objective=False)
    follower = found.levels["follower"]
    np.testing.assert_allclose([follower.mu, follower.L], game.monotonicity, rtol=1e-9)


@pytest.mark.slow
def test_noise_kinks_rounding_and_values_only():
    rng = np.random.default_rng(0)
    clients = [{"a": rng.normal(size=(size, 2)), "b": rng.normal(size=size)} for size in (3, 6)]
    data = fs.FederatedData.from_clients(clients)
    x = np.array([0.5, -0.2])

    def square(x, sample):
        return 0.5 * (sample["a"] @ x - sample["b"]) ** 2

    found = fs.constants(fs.Minimization(square), data, x, weights="size").levels["loss"]
    slopes = [c["a"] * (c["a"] @ x - c["b"])[:, None] for c in clients]
    spread = [((g - g.mean(0)) ** 2).sum(1).mean() for g in slopes]
    assert found.noise == pytest.approx(np.sqrt(spread[0] / 3 + spread[1] * 2 / 3))
    both = np.concatenate([c["a"] for c in clients])
    np.testing.assert_allclose([found.mu, found.L], np.linalg.eigvalsh(both.T @ both / 9), rtol=1e-8)
    assert found.rounding == pytest.approx(np.finfo(float).eps * found.value)
    assert found.kink < 0.05
    values = fs.Minimization(fs.black_box(lambda x, s: 0.5 * float((s["a"] @ x - s["b"]) ** 2)))
    again = fs.constants(values, data, x, weights="size").levels["loss"]
    np.testing.assert_allclose([again.mu, again.L], [found.mu, found.L], rtol=1e-4)
    kinked = fs.Minimization(lambda x, s: jnp.abs(s["a"] @ x))
    assert fs.constants(kinked, data, np.zeros(2)).levels["loss"].kink > 0.5


@pytest.mark.slow
def test_a_lower_level_of_each_client_s_own():
    """∇²_xy h_i = −c_i, of which the coupling is the root of the mean square; F″ = 1 + mean c_i²."""
    c = np.array([1.0, 2.0, 3.0])
    data = fs.FederatedData.from_clients([{"c": np.full(2, each)} for each in c])
    problem = fs.Bilevel(
        lambda x, y, s: 0.5 * (x @ x + y @ y),
        lambda x, y, s: 0.5 * ((y - s["c"] * x) ** 2).sum(),
        local=True,
        same_samples=True,
    )
    found = fs.constants(problem, data, np.ones(2), np.zeros(2))
    np.testing.assert_allclose(found.coupling, np.sqrt((c**2).mean()), rtol=1e-5)
    np.testing.assert_allclose(found.levels["objective"].L, 1 + (c**2).mean(), rtol=1e-4)
