"""The Cournot game's closed forms against a solver of bounded least squares, and against its definition."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import lsq_linear

import fedstrata as fs
from fedstrata.estimators import vi

GAMES = {
    "inactive": fs.cournot_game(10, 0.5, samples=7),
    "caps bind": fs.cournot_game(12, 1.0, samples=7, caps=(0.2, 0.6)),
    "some caps bind": fs.cournot_game(20, 0.5, samples=7, caps=(0.005, 1.0)),
    "one follower": fs.cournot_game(1, 1.0, samples=7),
}
every_game = pytest.mark.parametrize("game", GAMES.values(), ids=GAMES.keys())


@every_game
@pytest.mark.parametrize("x", [0.0, 1.7, 9.0, 30.0])
def test_equilibrium(game, x):
    """The game has a convex quadratic potential, which another program minimises; x = 30 leaves no demand."""
    root = np.linalg.cholesky(np.diag(game.c + game.b) + game.b)
    for a in (8.0, 12.5):
        right = np.linalg.solve(root, np.full(len(game.c), a - game.b * x))
        expected = lsq_linear(root.T, right, (0, game.caps), method="bvls", tol=1e-15).x
        np.testing.assert_allclose(game.equilibrium(x, a), expected, atol=1e-9)


@every_game
@pytest.mark.parametrize("solver", vi.SOLVERS)
def test_solvers_find_the_equilibrium(game, solver, x64):
    x, sample = jnp.float64(1.7), {"a": jnp.float64(9.0)}
    found = vi.SOLVERS[solver](
        lambda y: game.problem.follower(x, y, sample),
        lambda y: game.problem.project_y(y, x, sample),
        jnp.zeros(len(game.c)),
        tol=1e-12,
        max_steps=100_000,
    )
    np.testing.assert_allclose(found.y, game.equilibrium(1.7, 9.0), atol=1e-8)


@every_game
def test_nobody_gains_by_another_amount(game):
    x, a = game.optimum[0], 9.0
    y = game.equilibrium(x, a)

    def profit(j, amount):
        return amount * (a - game.b * (x + y.sum() - y[j] + amount)) - game.c[j] * amount**2 / 2

    for j in range(len(y)):
        others = profit(j, np.linspace(0, game.caps[j], 1001))
        assert profit(j, y[j]) >= others.max() - 1e-12


def test_bounds_are_what_the_names_say():
    at = {name: game.equilibrium(game.optimum[0], game.demands) >= game.caps for name, game in GAMES.items()}
    assert not at["inactive"].any()
    assert at["caps bind"].all(-1).any()
    assert 0 < at["some caps bind"].mean() < 1
    assert GAMES["inactive"].inactive
    assert not GAMES["some caps bind"].inactive


@every_game
def test_leader_optimum_is_global(game):
    x, value = game.optimum
    np.testing.assert_allclose(game.objective(x), value, rtol=1e-12)
    grid = np.linspace(0, game.x_cap, 20_001)
    assert value <= game.objective(grid).min() + 1e-13
    assert abs(grid[game.objective(grid).argmin()] - x) < 1e-3


def test_leader_optimum_in_closed_form():
    for followers in (1, 10, 100):
        game = fs.cournot_game(followers, 0.5, samples=20, caps=(50.0, 60.0))
        assert game.inactive
        np.testing.assert_allclose(game.optimum[0], game.closed_form, rtol=1e-12)
    # A leader with little capacity sells all of it.
    assert fs.cournot_game(5, 1.0, x_cap=0.5).optimum[0] == 0.5


@pytest.mark.slow
@every_game
def test_problem_agrees_with_the_closed_forms(game, x64):
    x, sample = jnp.float64(1.3), {"a": jnp.float64(9.5)}
    y = game.problem.solution(x, sample)
    np.testing.assert_allclose(y, game.equilibrium(1.3, 9.5), rtol=1e-12)
    step = y - game.problem.follower(x, y, sample)
    np.testing.assert_allclose(game.problem.project_y(step, x, sample), y, atol=1e-12)
    measured = game.problem.measure(
        lambda f, x: jax.vmap(lambda a: f(x, {"a": a}))(jnp.asarray(game.demands)).mean(), x, y
    )
    np.testing.assert_allclose(measured["leader"], game.objective(1.3), rtol=1e-12)
    mu, L = game.monotonicity
    jacobian = jax.jacobian(lambda y: game.problem.follower(x, y, sample))(y)
    np.testing.assert_allclose(np.linalg.eigvalsh(jacobian)[[0, -1]], [mu, L])


@pytest.mark.parametrize(
    "bad", [{"followers": 0}, {"b": 0.0}, {"caps": (2.0, 1.0)}, {"costs": (0.0, 1.0)}, {"x_cap": -1.0}]
)
def test_refuses(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        fs.cournot_game(**bad)
