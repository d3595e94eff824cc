"""Fairness constraints against counts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

import fedstrata as fs


def score(x, s):
    return s["a"] @ x


def loss(x, s):
    return jax.nn.softplus(jnp.where(s["y"] == 1, -1.0, 1.0) * score(x, s))


def clients(sizes=(40, 60), seed=0):
    rng = np.random.default_rng(seed)
    made = []
    for n in sizes:
        group = rng.integers(0, 3, n).astype(np.int32)
        a = rng.normal(size=(n, 2)) + 0.5 * group[:, None]
        made.append({"a": a, "y": (a.sum(1) + rng.normal(size=n) > 0.5).astype(np.int32), "group": group})
    return made


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_rates_are_those_counted():
    parts = clients((50, 50))
    data = fs.FederatedData.from_clients(parts)
    a, y, group = (np.concatenate([c[k] for c in parts]) for k in ("a", "y", "group"))
    x = np.array([0.7, -0.2])
    problem = fs.fairness.equal_opportunity(score, loss, 3, 0.02, rho=2.0, lam=0.05)
    hit = 1 / (1 + np.exp(-a @ x))
    rates = np.array([hit[(y == 1) & (group == j)].mean() for j in range(3)])
    c = hit[y == 1].mean() - 0.02 - rates
    result = fs.solve(problem, fs.MBSGD(0.1), data, x, rounds=0, progress=False)
    np.testing.assert_allclose(result.history["violation"][0], max(c.max(), 0), rtol=1e-12)
    mean = np.log1p(np.exp(-(2 * y - 1) * (a @ x))).mean()
    np.testing.assert_allclose(result.history["loss"][0], mean, rtol=1e-12)
    penalty = 2.0 * 0.05 * np.log1p(np.exp(c / 0.05).sum())
    np.testing.assert_allclose(result.history["objective"][0], mean + penalty, rtol=1e-12)

    # the minimax form: its maximum over weights of the constraints is the penalty
    minimax, same, q0 = problem.minimax(data)
    linear = problem.linear(data, "uniform")
    means = np.mean([jax.vmap(lambda s: linear(x, s))(same.client(i)).mean(0) for i in range(2)], axis=0)
    np.testing.assert_allclose(means, c, rtol=1e-9)
    q = jax.nn.softmax(jnp.concatenate([jnp.zeros(1), c / 0.05]))
    payoff = np.mean([jax.vmap(lambda s: minimax.payoff(x, q, s))(same.client(i)).mean() for i in range(2)])
    np.testing.assert_allclose(payoff, mean + penalty, rtol=1e-9)
    assert q0.shape == (4,)
    np.testing.assert_allclose(minimax.project_y(q), q, atol=1e-7)


def test_noisy_groups_and_their_proxies():
    data = fs.FederatedData.from_clients(clients((4000, 6000)))
    noisy = fs.fairness.noisy_groups(data, 3, noise=0.3, proxies=20, seed=1)
    true, seen, proxy = data.train["group"], noisy.train["group"], noisy.train["proxy"]
    assert proxy.shape == (10_000, 20)
    # three standard errors of a frequency among 10,000
    assert abs((true != seen).mean() - 0.3) < 3 * np.sqrt(0.21 / 10_000)
    for k in range(3):
        posterior = np.bincount(true[seen == k], minlength=3) / (seen == k).sum()
        drawn = np.bincount(proxy[seen == k].ravel(), minlength=3) / proxy[seen == k].size
        np.testing.assert_allclose(drawn, posterior, atol=4 * np.sqrt(0.25 / (seen == k).sum()))
    again = fs.fairness.noisy_groups(data, 3, noise=0.3, proxies=20, seed=1)
    np.testing.assert_array_equal(again.train["proxy"], noisy.train["proxy"])
    exact = fs.fairness.noisy_groups(data, 3, noise=0.0, proxies=2)
    np.testing.assert_array_equal(exact.train["proxy"], np.stack([true, true], 1))


def test_one_constraint_for_every_proxy_group():
    data = fs.fairness.noisy_groups(fs.FederatedData.from_clients(clients()), 3, proxies=4)
    problem = fs.fairness.equal_opportunity(score, loss, 3, proxies=4)
    sample = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), data.train)
    assert problem.constraints(problem.inner(jnp.zeros(2), sample)).shape == (problem.count,) == (12,)


def test_worst_violation_counts_decisions():
    (part,) = clients((200,))
    data = fs.FederatedData.from_clients([part], test=part)
    x = np.array([0.3, 1.0])
    hit, positive = part["a"] @ x > 0, part["y"] == 1
    rates = [hit[positive & (part["group"] == j)].mean() for j in range(3)]
    exact = max(hit[positive].mean() - 0.01 - min(rates), 0)
    metric = fs.fairness.worst_violation(score, 3, 0.01)
    np.testing.assert_allclose(metric(jnp.float32(x), None, data), exact, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_the_penalty_is_exact_in_the_limit():
    """``min (x−2)² s.t. x ≤ 1`` has the multiplier 2: with ρ = 3 the penalised minimum tends to x = 1."""
    data = fs.FederatedData.from_clients([{"b": np.array([1.0])}])
    for lam in (0.1, 0.01):
        problem = fs.fairness.penalised(
            lambda x, s: (x - 2) ** 2, lambda x, s: x * s["b"], lambda g: g[None] - 1, 1, rho=3.0, lam=lam
        )
        smooth = optimize.minimize_scalar(
            lambda x, f=problem.levels[-1]: (x - 2) ** 2 + float(f(jnp.asarray(x))),
            bounds=(0, 2),
            method="bounded",
        )
        # 3σ(c/λ) = 2 at the optimum but for O(λ), so c = λ log 2
        np.testing.assert_allclose(smooth.x, 1 + lam * np.log(2), atol=2 * lam**2 + 1e-4)
    assert fs.solve(problem, fs.MBSGD(0.01), data, 0.0, rounds=1, progress=False).x.shape == ()


@pytest.mark.slow
def test_bounded_group_loss():
    data = fs.FederatedData.from_clients(clients())
    problem = fs.fairness.bounded_group_loss(loss, 3, bound=0.5)
    result = fs.solve(problem, fs.MBSGD(0.1), data, np.zeros(2), rounds=0, progress=False)
    np.testing.assert_allclose(result.history["violation"][0], np.log(2) - 0.5, rtol=1e-5)
    assert problem.minimax(data).y0.shape == (4,)


def test_refuses_bad_arguments():
    with pytest.raises(ValueError, match="epsilon"):
        fs.fairness.equal_opportunity(score, loss, 3, -0.1)
    with pytest.raises(ValueError, match="positive"):
        fs.fairness.equal_opportunity(score, loss, 3, lam=0.0)
    data = fs.FederatedData.from_clients([{"a": np.ones((2, 2))}])
    with pytest.raises(fs.DataError, match="group"):
        fs.fairness.noisy_groups(data, 3)
