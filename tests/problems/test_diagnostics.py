"""The diagnostics against closed forms, and the confidence interval against its own promise."""

import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.advice.diagnostics import (
    gradient_norm,
    set_distances,
    stationarity,
)


@pytest.mark.slow
def test_interval_covers_as_often_as_it_says():
    """The smoothed gradient of ‖x‖₁ + ½xᵀAx inside an orthant is sign(x) + Ax."""
    A = jnp.diag(jnp.arange(1.0, 6.0))
    x = jnp.array([1.0, -1.0, 0.5, -0.5, 2.0])
    truth = float(jnp.linalg.norm(jnp.sign(x) + A @ x))

    def f(x):
        return jnp.abs(x).sum() + x @ A @ x / 2

    estimates = [gradient_norm(f, x, 0.1, samples=320, confidence=0.9, seed=seed) for seed in range(60)]
    covered = sum(e.low <= truth <= e.high for e in estimates)
    # 54 expected; a binomial with p = 0.9 is below 46 or above 60 with a probability under 0.1 %
    assert 46 <= covered <= 60
    assert np.mean([e.squared for e in estimates]) == pytest.approx(truth**2, rel=0.02)


@pytest.mark.slow
def test_interval_shrinks_and_contains_zero_at_a_minimum():
    def f(x):
        return (jnp.abs(x["a"]) ** 3).sum() + x["b"] ** 2

    x = {"a": jnp.zeros(3), "b": jnp.zeros(())}
    rough, fine = (gradient_norm(f, x, 0.5, samples=n) for n in (64, 6400))
    assert rough.low == fine.low == 0
    assert fine.high <= rough.high
    assert fine.high < 1e-6  # f is even, so two-sided estimates vanish at its minimum


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_stationarity_of_bilevel_and_minimax():
    for quadratic in (fs.quadratic_bilevel(clients=4, n=3, p=4), fs.quadratic_minimax(clients=4, n=3, p=4)):
        problem, data, x_star, _ = quadratic
        x = x_star + np.array([1.0, -2.0, 0.5])
        estimate = stationarity(problem, data, x, 0.3, solution=quadratic.solution)
        assert estimate.low <= np.linalg.norm(quadratic.gradient(x)) <= estimate.high
        assert stationarity(problem, data, x_star, 0.3, solution=quadratic.solution, samples=32).high < 1e-12
    with pytest.raises(ValueError, match="solution"):
        stationarity(problem, data, x, 0.3)


@pytest.mark.slow
def test_stationarity_counts_the_sets():
    """min ½‖x − a‖² over two balls: x lies where the pull of the sets and the gradient cancel."""
    data = fs.FederatedData.from_clients([{"a": np.array([[3.0, 0.0]])}] * 2)
    eta = 0.1
    problem = fs.Minimization(lambda x, s: ((x - s["a"]) ** 2).sum() / 2, project=fs.sets.Ball(1.0))
    # x − 3 + (x − 1)/η = 0
    x = np.array([(3 + 1 / eta) / (1 + 1 / eta), 0.0])
    assert stationarity(problem, data, x, eta).low < 1e-3
    assert stationarity(problem, data, np.array([1.0, 0.0]), eta).low > 1.9
    assert set_distances(problem, data, x) == pytest.approx(2 * [x[0] - 1], rel=1e-5)


def test_sets_of_clients():
    data = fs.FederatedData.from_clients([{"a": np.zeros(1)}] * 3)
    problem = fs.Bilevel(
        lambda x, y, s: 0.0,
        lambda x, y, s: 0.0,
        project_x=lambda x, c: jnp.clip(x, -1, c.index),
        same_samples=True,
    )
    np.testing.assert_allclose(set_distances(problem, data, np.array([2.0])), [2, 1, 0])


def test_a_result_is_judged_with_its_own_weights():
    """½‖x − a‖² on clients of one and three samples, weighted by size, from the mean of all samples."""
    data = fs.FederatedData.from_clients([{"a": np.zeros((1, 2))}, {"a": np.ones((3, 2))}])
    problem = fs.Minimization(lambda x, s: ((x - s["a"]) ** 2).sum() / 2)
    options = {"rounds": 1, "progress": False, "weights": "size"}
    result = fs.solve(problem, fs.FedAvg(1.0), data, np.zeros(2), **options)
    np.testing.assert_allclose(result.x, 0.75)
    found = stationarity(problem, data, result, 1e-2)
    assert found.norm < 1e-2
    assert found == stationarity(problem, data, result.x, 1e-2, weights="size")
