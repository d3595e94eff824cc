"""The diagnostics against closed forms, and the confidence interval against its own promise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.advice.diagnostics import (
    consensus_error,
    gradient_norm,
    lower_residual,
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


@pytest.mark.usefixtures("x64")
def test_lower_residual():
    quadratic = fs.quadratic_minimax(clients=3, n=2, p=3)
    problem, data, *_ = quadratic
    x = jnp.array([0.4, -0.3])
    y = quadratic.solution(x)
    assert lower_residual(problem, data, x, y) < 1e-12
    # unconstrained, it is the norm of the gradient, here of the quadratic −f(x, ·) with Hessian R
    R = data.train["A"].mean(0)
    assert lower_residual(problem, data, x, y + 1.0) == pytest.approx(np.linalg.norm(R @ np.ones(3)))
    # with a set that cuts the solution off, the residual vanishes at the constrained one (KKT), not before
    below = lambda y: jnp.minimum(y, x.sum() - 5.0)  # noqa: E731
    inside = fs.Minimax(problem.payoff, project_y=lambda y, x: below(y))
    cut = fs.solve(
        fs.Minimization(lambda y, s: -problem.payoff(x, y, s), project=below),
        fs.FedAvg(0.2), data, np.zeros(3), rounds=500, eval_every=500, progress=False,
    ).x  # fmt: skip
    assert lower_residual(inside, data, x, cut) < 1e-10
    assert lower_residual(inside, data, x, cut - 0.1) > 0.01
    with pytest.raises(TypeError, match="Bilevel, Minimax and MPEC"):
        lower_residual(fs.Minimization(lambda x, s: 0.0), data, x, y)


@pytest.mark.usefixtures("x64")
def test_lower_residual_of_followers():
    game = fs.cournot_game(6, 1.0, clients=2, samples=3, caps=(0.5, 1.2))
    x, problem = jnp.float64(1.0), game.problem
    y = game.equilibrium(1.0, game.demands)
    assert 0 < (y >= game.caps).mean() < 1
    assert lower_residual(problem, game.data, x, problem.solution) < 1e-12
    # From y = 0 the step is cut at the caps, where G = bx − a < 0 asks for more.
    moved = [np.linalg.norm(np.minimum(a - game.b * 1.0, game.caps)) for a in game.demands]
    nothing = lower_residual(problem, game.data, x, lambda x, sample: jnp.zeros(6))
    assert nothing == pytest.approx(np.mean(moved))
    with pytest.raises(TypeError, match="function"):
        lower_residual(problem, game.data, x, np.zeros(6))


def test_consensus_error():
    points = {"a": np.arange(6.0).reshape(3, 2), "b": np.array([1.0, 1.0, 4.0])}
    mean = jax.tree.map(lambda leaf: leaf.mean(0), points)
    by_hand = np.mean([sum(((points[k][i] - mean[k]) ** 2).sum() for k in points) for i in range(3)])
    assert consensus_error(points) == pytest.approx(by_hand)


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


@pytest.mark.slow
def test_the_lower_residual_of_a_result():
    q = fs.quadratic_bilevel(clients=2, n=2, p=3)
    start = {"y0": q.y_star, "rounds": 1, "progress": False}
    result = fs.solve(q.problem, fs.FedMSA(1e-6, 1e-6), q.data, q.x_star, **start)
    assert lower_residual(q.problem, q.data, result) == lower_residual(q.problem, q.data, result.x, result.y)
    with pytest.raises(TypeError, match="needs y"):
        lower_residual(q.problem, q.data, q.x_star)
