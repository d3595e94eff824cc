"""AdaFedSTORM: its rounds by hand with optax, FedSTORM as a reduction, and the limit."""

import jax
import numpy as np
import optax
import pytest

import fedstrata as fs

pytestmark = pytest.mark.usefixtures("x64")
TOY = fs.quadratic_minimax(clients=3, n=2, p=3)


def solve(method, rounds, toy=TOY, **more):
    n, p = toy.x_star.size, toy.y_star.size
    options = {"y0": np.ones(p), "rounds": rounds, "eval_every": rounds, "progress": False, "certify": False}
    return fs.solve(toy.problem, method, toy.data, np.ones(n), **options, **more)


def test_an_optimiser_that_changes_nothing_is_fedstorm():
    own = {"c": 0.3, "I": 3, "batch_size": 1}
    toy = fs.quadratic_minimax(clients=3, n=2, p=3, samples=4, noise=0.5)
    one = solve(fs.AdaFedSTORM(0.05, 0.1, optimiser=optax.identity(), **own), 4, toy)
    other = solve(fs.FedSTORM(0.05, 0.1, **own), 4, toy)
    np.testing.assert_allclose(one.x, other.x, rtol=1e-12)


def test_its_rounds_by_hand():
    """With I = 1 and full batches every round is one step of optax along the mean operator."""
    M, b = (np.asarray(TOY.data.stacked()[k])[:, 0].mean(0) for k in "Mb")
    sign, step = np.array([1.0] * 2 + [-1.0] * 3), np.array([0.05] * 2 + [0.1] * 3)
    optimiser = optax.scale_by_adam(b1=0.9, b2=0.99)
    z = np.ones(5)
    state = optimiser.init(z)
    for _ in range(4):
        scaled, state = optimiser.update(sign * (M @ z - b), state)
        z = z - step * np.asarray(scaled)
    found = solve(fs.AdaFedSTORM(0.05, 0.1, c=1.0, optimiser=optimiser), 4)
    np.testing.assert_allclose(np.concatenate([found.x, found.y]), z, rtol=1e-10)


def test_amsgrad_comes_to_rest_at_the_solution():
    """Unlike clients, local steps with c = 0: the scaling becomes constant, and nothing drifts."""
    found = solve(fs.AdaFedSTORM(0.05, 0.1, c=0.0, I=3), 3000)
    np.testing.assert_allclose(found.x, TOY.x_star, atol=1e-6)
    before = solve(fs.AdaFedSTORM(0.05, 0.1, c=0.0, I=3), 2000)
    for late, early in zip(*(jax.tree.leaves(r.state.scaling.nu_max) for r in (found, before)), strict=True):
        np.testing.assert_allclose(late, early, rtol=1e-9)


def test_a_set_is_refused():
    """Rescaled steps and Euclidean projections agree on boxes alone."""
    bounded = fs.Minimax(TOY.problem.payoff, project_y=fs.sets.Ball(1.0))
    with pytest.raises(ValueError, match="use FedSTORM"):
        fs.solve(bounded, fs.AdaFedSTORM(0.1, 0.1), TOY.data, np.ones(2), y0=np.ones(3), rounds=1)
