"""FedRZO for minimax problems: the paper's coupled example in both orders, a saddle point in closed form."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs

# The clients' payoffs differ; their mean is x² + y.
TILTS = np.linspace(-0.5, 0.5, 5)
data = fs.FederatedData.from_clients([{"tilt": np.array([t])} for t in TILTS])


def payoff(x, y, sample):
    return x[0] ** 2 + y[0] + sample["tilt"] * (x[0] - 2 * y[0])


def below(y, x):
    """y ∈ [−1, 1] with x + y ≤ 0."""
    return jnp.clip(y, -1, jnp.minimum(1, -x))


def solve(problem, eta, start, lower):
    """In one dimension the two-sided estimate of a quadratic is exact; the smoothed indicator's is not."""
    method = fs.FedRZOMinimax(eta, eta, batch_size=None, lower=lower, lower_rounds=25, two_sided=True)
    return fs.solve(
        problem, method, data, start, y0=np.array([0.2]), rounds=8000, eval_every=8000, progress=False
    )


@pytest.mark.slow
def test_coupled_sets():
    """min over x ∈ [−1, 1] of max over y: (0.5, −0.5), where x² − x is least."""
    problem = fs.Minimax(payoff, project_x=fs.sets.Box(-1, 1), project_y=below)
    result = solve(problem, 1e-3, np.array([-0.7]), fs.FedAvg(0.3))
    np.testing.assert_allclose([result.x[0], result.y[0]], [0.5, -0.5], atol=1e-3)


@pytest.mark.slow
def test_reversed_order():
    """max over y ∈ [−1, 1] of min over x: (−1, 1), at the edge of both sets.

    As a minimax problem it is the negative payoff with the names exchanged. At the edge the smoothed
    indicator lets y out by η times the slope 2y + 1 of the implicit objective.
    """
    problem = fs.Minimax(
        lambda y, x, sample: -payoff(x, y, sample), project_x=fs.sets.Box(-1, 1), project_y=below
    )
    for eta in (1e-2, 1e-3):
        with pytest.warns(UserWarning, match="ended outside of the set"):
            result = solve(problem, eta, np.array([-0.7]), fs.LFD(0.3))
        edge = (1 + eta) / (1 - 2 * eta)  # where (y − 1)/η = 2y + 1
        np.testing.assert_allclose([result.x[0], result.y[0]], [edge, -edge], atol=0.1 * eta)


@pytest.mark.usefixtures("x64")
def test_saddle_point():
    saddle = fs.quadratic_minimax(clients=5, n=4, p=6)
    mu, L = saddle.curvature
    lower = fs.FedAC(1 / L, mu)
    method = fs.FedRZOMinimax(0.02, 0.1, batch_size=None, lower=lower, lower_rounds=40, two_sided=True)
    problem, data, x_star, y_star = saddle
    result = fs.solve(
        problem, method, data, np.zeros(4), y0=np.zeros(6), rounds=1500, eval_every=1500, progress=False
    )
    np.testing.assert_allclose(result.x, x_star, rtol=1e-6)
    np.testing.assert_allclose(result.y, y_star, rtol=1e-6)


@pytest.mark.slow
def test_draws_from_the_training_samples():
    """Both levels of a minimax problem have the same data, also where there is validation data."""
    train, valid = [{"c": np.ones(2)}], [{"c": np.full(2, np.float64(1e6))}]
    with_valid = fs.FederatedData.from_clients(train, valid=valid)
    problem = fs.Minimax(lambda x, y, s: s["c"] * (x - y) @ (x - y))
    method = fs.FedRZOMinimax(0.1, 0.1, lower=fs.FedAvg(0.1), lower_rounds=1)
    runs = [
        fs.solve(problem, method, d, np.ones(2), y0=np.zeros(2), rounds=2, progress=False)
        for d in (with_valid, fs.FederatedData.from_clients(train))
    ]
    np.testing.assert_array_equal(runs[0].x, runs[1].x)
