"""The closed forms of the quadratic test problems, against autodiff."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs


def _mean(function, data):
    """The federated mean of ``function(x, y, sample)``, computed here."""
    flat = jax.tree.map(jnp.asarray, data.train)
    return lambda x, y: jax.vmap(lambda sample: function(x, y, sample))(flat).mean()


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("build", [fs.quadratic_bilevel, fs.quadratic_minimax])
def test_solution_is_stationary(build):
    quadratic = build(clients=4, n=3, p=5, samples=6, noise=0.3, seed=2)
    problem, data, x_star, y_star = quadratic
    if isinstance(problem, fs.Minimax):
        upper = _mean(problem.payoff, data)
        lower = lambda x, y: -upper(x, y)  # noqa: E731
    else:
        upper, lower = _mean(problem.upper, data), _mean(problem.lower, data)

    def implicit(x):
        """y(x) by one Newton step, exact for a quadratic; autodiff then differentiates through it."""
        y = jnp.zeros_like(y_star)
        step = jnp.linalg.solve(jax.hessian(lower, 1)(x, y), jax.grad(lower, 1)(x, y))
        return upper(x, y - step), y - step

    x = jnp.array([0.3, -1.0, 2.0])
    np.testing.assert_allclose(quadratic.solution(x), implicit(x)[1], rtol=1e-12)
    np.testing.assert_allclose(quadratic.gradient(x), jax.grad(lambda x: implicit(x)[0])(x), rtol=1e-12)
    np.testing.assert_allclose(quadratic.gradient(x_star), 0, atol=1e-13)
    np.testing.assert_allclose(quadratic.solution(x_star), y_star, rtol=1e-13)
    mu, L = quadratic.curvature
    hessians = jax.vmap(lambda s: jax.hessian(lambda y: y @ s["A"] @ y / 2)(y_star))(
        jax.tree.map(lambda leaf: jnp.asarray(leaf[:, 0]), data.stacked())
    )
    assert jnp.allclose(jnp.linalg.eigvalsh(hessians).min(), mu)
    assert jnp.allclose(jnp.linalg.eigvalsh(hessians).max(), L)


def test_heterogeneity_zero_makes_clients_equal():
    data = fs.quadratic_bilevel(clients=3, heterogeneity=0.0).data
    for leaf in jax.tree.leaves(data.train):
        assert (leaf == leaf[:1]).all()
    other = fs.quadratic_bilevel(clients=3, heterogeneity=1.0).data
    assert not (other.train["A"] == other.train["A"][:1]).all()


def test_bad_arguments():
    with pytest.raises(ValueError, match="clients must be at least 1"):
        fs.quadratic_bilevel(clients=0)
    with pytest.raises(ValueError, match="must be ≥ 0"):
        fs.quadratic_minimax(noise=-1.0)
