"""Local SGDA and AFL."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs

pytestmark = pytest.mark.usefixtures("x64")


@pytest.fixture(scope="module")
def saddle():
    return fs.quadratic_minimax(clients=3, n=2, p=3)


def test_local_sgda_by_hand(saddle):
    """τ = 2 from the clients' matrices."""
    M, b = (np.asarray(saddle.data.stacked()[k])[:, 0] for k in "Mb")
    method = fs.LocalSGDA(eta_x=0.05, eta_y=0.1, tau=2)
    result = fs.solve(
        saddle.problem, method, saddle.data, np.ones(2), y0=np.ones(3), rounds=1, progress=False
    )
    steps = np.array([-0.05] * 2 + [0.1] * 3)
    ends = []
    for i in range(3):
        z = np.ones(5)
        for _ in range(2):
            z = z + steps * (M[i] @ z - b[i])
        ends.append(z)
    np.testing.assert_allclose(np.concatenate([result.x, result.y]), np.mean(ends, axis=0), rtol=1e-12)


def test_one_step_converges_and_more_are_biased(saddle):
    """τ = 1 is descent ascent, which finds the saddle; with τ = 8 clients that differ pull it away."""

    def distance(tau):
        method = fs.LocalSGDA(0.1, 0.1, tau=tau)
        result = fs.solve(
            saddle.problem,
            method,
            saddle.data,
            np.zeros(2),
            y0=np.zeros(3),
            rounds=600,
            eval_every=600,
            progress=False,
        )
        return np.linalg.norm(np.concatenate([result.x - saddle.x_star, result.y - saddle.y_star]))

    assert distance(1) < 1e-10
    assert distance(8) > 1e-3


def test_local_sgda_stays_in_its_sets(saddle):
    problem = fs.Minimax(saddle.problem.payoff, project_x=fs.sets.Ball(0.1), project_y=fs.sets.NonNegative())
    result = fs.solve(
        problem,
        fs.LocalSGDA(0.1, 0.1, tau=3),
        saddle.data,
        np.ones(2),
        y0=-np.ones(3),
        rounds=5,
        progress=False,
    )
    assert np.linalg.norm(result.x) <= 0.1 + 1e-12
    assert (np.asarray(result.y) >= 0).all()


# AFL


def loss(x, s):
    return 0.5 * (x - s["b"]) ** 2


def data(*targets):
    return fs.FederatedData.from_clients([{"b": np.full(2, t)} for t in targets])


def test_afl_by_hand():
    """x ← Σ λ_i (x − γ(x − b_i)), λ ← projection of λ + η_λ losses; from x = 0 with targets 0, 1, 3."""
    method = fs.AFL(gamma=0.1, eta_lam=0.05)
    result = fs.solve(
        fs.Minimization(loss), method, data(0.0, 1.0, 3.0), np.zeros(()), rounds=1, progress=False
    )
    assert float(result.x) == pytest.approx(0.1 * 4 / 3, rel=1e-12)
    raised = np.full(3, 1 / 3) + 0.05 * np.array([0.0, 0.5, 4.5])
    np.testing.assert_allclose(result.y, raised - (raised.sum() - 1) / 3, rtol=1e-12)


def test_afl_finds_the_worst_mixture():
    """max of (x − b_i)²/2 over b ∈ {0, 1, 3} is least at 1.5, where the two ends share the weight."""
    method = fs.AFL(gamma=lambda r: 1 / (r + 10) ** 0.5, eta_lam=lambda r: 1 / (r + 10) ** 0.5)
    result = fs.solve(
        fs.Minimization(loss),
        method,
        data(0.0, 1.0, 3.0),
        np.zeros(()),
        rounds=4000,
        eval_every=4000,
        progress=False,
    )
    assert float(result.x) == pytest.approx(1.5, abs=1e-2)
    np.testing.assert_allclose(result.y, [0.5, 0.0, 0.5], atol=1e-2)


def test_afl_takes_weights_to_start_from():
    start = {"rounds": 0, "progress": False}
    problem, method, given = fs.Minimization(loss), fs.AFL(0.1, 0.1), data(0.0, 1.0)
    np.testing.assert_allclose(fs.solve(problem, method, given, np.zeros(()), **start).y, [0.5, 0.5])
    chosen = fs.solve(problem, method, given, np.zeros(()), y0=np.array([0.1, 0.9]), **start)
    np.testing.assert_allclose(chosen.y, [0.1, 0.9])
    for bad in (np.array([0.5, 0.6]), np.ones(3) / 3, np.array([-0.5, 1.5])):
        with pytest.raises(ValueError, match="2 weights"):
            fs.solve(problem, method, given, np.zeros(()), y0=bad, **start)


MOVING = fs.Minimax(
    lambda x, y, s: 0.5 * (x - s["a"]) ** 2 + x * y - 0.5 * y**2,
    project_y=lambda y, x: jnp.clip(y, -1.0, 0.5 - 0.2 * x),
)


def test_a_set_of_y_that_depends_on_x_is_refused():
    """Every method that steps along ∇_x f would end elsewhere: those of values alone are left."""
    for name, cls in fs.METHODS.items():
        if fs.Minimax in cls.solves and name != "FedRZOMinimax":
            assert "depends on x" in cls.refuses(MOVING), name
    assert fs.applicable(MOVING).names == ["FedRZOMinimax", "FedRZOBilevel"]
    data = fs.FederatedData.from_clients([{"a": np.array([1.0, 2.0])}, {"a": np.array([3.0])}])
    with pytest.raises(ValueError, match=r"depends on x\. Use FedRZOMinimax"):
        fs.solve(MOVING, fs.LocalSGDA(0.1, 0.1), data, 0.0, y0=0.0, rounds=1, progress=False)
    with pytest.raises(ValueError, match="does not take sets"):
        fs.as_multisequence(MOVING)


@pytest.mark.slow
def test_a_set_of_y_that_depends_on_x_is_solved_by_values():
    """Where the bound of y is active F(x) = ½ E(x − a)² + xb − ½b², b = ½ − x/5: F'(x) = 0.56x − 1.65."""
    data = fs.FederatedData.from_clients([{"a": np.array([1.0, 2.0])}, {"a": np.array([3.0])}])
    method = fs.FedRZOMinimax(0.2, 0.01, two_sided=True, batch_size=None)
    result = fs.solve(MOVING, method, data, 0.0, y0=0.0, rounds=100, eval_every=100, progress=False)
    np.testing.assert_allclose(result.x, 1.65 / 0.56, atol=1e-4)
    np.testing.assert_allclose(result.y, 0.5 - 0.2 * 1.65 / 0.56, atol=1e-3)
