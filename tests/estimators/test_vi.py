"""The VI solvers against solutions known by construction, and their steps against the theory's growth."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedstrata.estimators import vi

N = 12


def affine(kappa: float, skew: bool, seed: int = 0):
    """``G(y) = M (y − y*) + s`` on [−1, 1]ᴺ, where s pushes outwards at the bounds that y* touches."""
    rng = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(rng.normal(size=(N, N)))
    M = basis @ np.diag(np.geomspace(1, kappa, N)) @ basis.T
    if skew:
        K = rng.normal(size=(N, N))
        K -= K.T
        M = np.eye(N) + K * np.sqrt(kappa**2 - 1) / np.linalg.norm(K, 2)
    solution = rng.uniform(-0.5, 0.5, N)
    push = np.zeros(N)
    solution[:3], push[:3] = 1.0, -rng.uniform(0.5, 1, 3)
    solution[3:5], push[3:5] = -1.0, rng.uniform(0.5, 1, 2)
    mu, L = np.linalg.eigvalsh((M + M.T) / 2)[0], np.linalg.norm(M, 2)
    return (lambda y: M @ (y - solution) + push), jnp.asarray(solution), float(mu), float(L)


def box(y):
    return jnp.clip(y, -1, 1)


def rule(name: str, mu: float, L: float) -> float:
    return {"projection": mu / L**2, "extragradient": 0.7 / L, "accelerated": 1 / L, "newton": 0.7 / L}[name]


@pytest.mark.parametrize("own_step", [True, False], ids=["alpha-found", "alpha-given"])
@pytest.mark.parametrize("name", vi.SOLVERS)
def test_symmetric(x64, name, own_step):
    G, solution, mu, L = affine(20.0, skew=False)
    alpha = None if own_step else rule(name, mu, L)
    found = vi.SOLVERS[name](G, box, jnp.zeros(N), alpha=alpha, tol=1e-12, max_steps=100_000)
    np.testing.assert_allclose(found.y, solution, atol=1e-8)
    assert float(vi.residual(G, box, found.y)) < 1e-8
    assert int(found.steps) < 100_000


@pytest.mark.parametrize("name", vi.SOLVERS)
def test_a_game_without_potential(x64, name):
    """Without symmetry; the accelerated method gives its momentum up and converges all the same."""
    G, solution, *_ = affine(5.0, skew=True)
    found = vi.SOLVERS[name](G, box, jnp.zeros(N), tol=1e-12, max_steps=100_000)
    np.testing.assert_allclose(found.y, solution, atol=1e-8)


@pytest.mark.parametrize("kappa", [10.0, 1e4])
def test_newton_s_steps_do_not_depend_on_the_condition(x64, kappa):
    """Neither with symmetry nor without it, at the bounds too."""
    for skew in (False, True):
        G, solution, *_ = affine(kappa, skew)
        found = vi.newton(G, box, jnp.zeros(N), tol=1e-12)
        np.testing.assert_allclose(found.y, solution, atol=1e-8)
        assert int(found.steps) < 12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "skew", "order"),
    [
        ("projection", False, 2.0),
        ("projection", True, 2.0),
        ("extragradient", True, 1.0),
        ("accelerated", False, 0.5),
    ],
)
def test_steps_grow_as_the_theory_says(x64, name, skew, order):
    """Steps to 1e-8 with the theory's step size against κ, on a logarithmic scale; nothing is constrained."""
    kappas = np.array([8.0, 16.0, 32.0, 64.0]) if order == 2 else np.array([16.0, 64.0, 256.0, 1024.0])
    steps = []
    for kappa in kappas:
        G, _, mu, L = affine(kappa, skew)
        start = jnp.full(N, 0.3)
        solution = jnp.linalg.solve(jax.jacobian(G)(start), -G(jnp.zeros(N)))
        solver = vi.SOLVERS[name]
        alpha = rule(name, mu, L)

        def error(steps, G=G, alpha=alpha, start=start, solution=solution, solver=solver):
            found = solver(G, lambda y: y, start, alpha=alpha, steps=steps)
            return jnp.abs(found.y - solution).max()

        error = jax.jit(error)
        low, high = 0, 1
        while float(error(high)) > 1e-8:
            low, high = high, 2 * high
        while high - low > max(1, low // 50):
            middle = (low + high) // 2
            low, high = (middle, high) if float(error(middle)) > 1e-8 else (low, middle)
        steps.append(high)
    slope = np.polyfit(np.log(kappas), np.log(steps), 1)[0]
    assert abs(slope - order) < 0.15, steps


def test_as_many_steps_as_asked_for(x64):
    """A traced number of steps, each the formula's."""
    G, *_ = affine(4.0, skew=False)
    y = jnp.zeros(N)
    for _ in range(7):
        y = box(y - 0.01 * G(y))
    found = jax.jit(lambda steps: vi.projection(G, box, jnp.zeros(N), alpha=0.01, steps=steps))(7)
    np.testing.assert_allclose(found.y, y, rtol=1e-12)
    assert (int(found.steps), int(found.values)) == (7, 7)
    np.testing.assert_allclose(found.residual, vi.residual(G, box, y, 0.01) / 0.01)


def test_pytrees_and_stacks_are_one_inequality():
    """Three inequalities of two variables each, solved together; float32."""
    target = jnp.array([[0.5, 2.0], [-3.0, 0.1], [0.0, -0.2]])
    y = {"a": jnp.zeros(3), "b": jnp.zeros(3)}
    found = vi.extragradient(
        lambda y: {"a": y["a"] - target[:, 0] + y["b"], "b": y["b"] - target[:, 1] - y["a"]},
        lambda y: {"a": jnp.clip(y["a"], -10, 10), "b": jnp.maximum(y["b"], 0)},
        y,
    )
    # Where b = 0 binds, a is its target; else the rotation is inverted.
    np.testing.assert_allclose(found.y["a"], [-0.75, -3.0, 0.0], atol=1e-5)
    np.testing.assert_allclose(found.y["b"], [1.25, 0.0, 0.0], atol=1e-5)


@pytest.mark.parametrize("name", vi.SOLVERS)
def test_stops_at_the_solution_and_at_rounding(name):
    """From the solution on; and with a tolerance that float32 cannot reach."""
    at = jnp.array([0.3, -0.2], jnp.float32)
    solver = vi.SOLVERS[name]
    assert int(solver(lambda y: y - at, lambda y: y, at).steps) == 1
    # 1/3 has no exact float32: the residual never becomes zero
    found = solver(lambda y: 3 * y - 1, lambda y: y, jnp.zeros(2), alpha=0.2, tol=1e-30)
    assert int(found.steps) < 200
    np.testing.assert_allclose(found.y, 1 / 3, rtol=1e-6)


def test_a_step_that_is_too_large_at_first_is_lowered(x64):
    """A map that is flat at the start and steep at the solution, so that the first estimate is far off."""

    def G(y):
        return jnp.where(y > 1, 100 * (y - 1), 0) + 0.1 * y - 5.0

    solution = 105 / 100.1
    for name in vi.SOLVERS:
        found = vi.SOLVERS[name](G, lambda y: y, jnp.zeros(1), tol=1e-10, max_steps=100_000)
        np.testing.assert_allclose(found.y, solution, rtol=1e-9, err_msg=name)
        assert float(found.alpha) < 0.05


@pytest.mark.parametrize("name", ["extragradient", "newton"])
def test_a_map_that_is_steeper_farther_away(name):
    """y³ + y = b: the slope is 1 at the start and up to 300 at the solutions, and cubes overflow soon."""
    b = jnp.array([1010.0, -1010.0, 2.0])
    found = vi.SOLVERS[name](lambda y: y**3 + y - b, lambda y: y, jnp.zeros(3), tol=1e-6)
    np.testing.assert_allclose(found.y, [10.0, -10.0, 1.0], atol=1e-6 * float(jnp.linalg.norm(b)))  # mu is 1
