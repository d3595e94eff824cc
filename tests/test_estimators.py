"""The sphere estimates against closed forms: unbiased for the smoothed gradient, with a confidence bound."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedstrata.core import tree
from fedstrata.core.client import Samples
from fedstrata.estimators.gradients import gradient
from fedstrata.estimators.sphere import sphere, two_point

X = {"w": jnp.array([0.3, -0.7]), "c": jnp.array([[0.5]])}


def flat(point):
    return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(point)])


def test_sphere_has_the_radius_and_no_direction():
    keys = jax.random.split(jax.random.key(0), 20_000)
    v = jax.vmap(lambda key: flat(sphere(key, X, 0.2)))(keys)
    np.testing.assert_allclose(jnp.linalg.norm(v, axis=1), 0.2, rtol=1e-5)
    # Each coordinate has mean 0 and second moment r²/n.
    assert_mean(np.asarray(v), np.zeros(3))
    assert_mean(np.asarray(v) ** 2, np.full(3, 0.2**2 / 3))
    # In three dimensions a coordinate of a uniform point of the sphere is uniform (Archimedes).
    assert stats.kstest(np.asarray(v[:, 0]) / 0.2, stats.uniform(-1, 2).cdf).pvalue > 1e-3


def assert_mean(draws, expected, level=1e-4):
    """The mean lies in the confidence interval of ``level`` (Bonferroni over the coordinates)."""
    error = draws.std(0, ddof=1) / np.sqrt(len(draws))
    bound = stats.norm.ppf(1 - level / (2 * draws.shape[1])) * error
    assert (np.abs(draws.mean(0) - expected) <= bound).all(), (draws.mean(0), expected, bound)
    assert (bound < 0.2 * np.abs(expected).max() + 1e-2).all(), "too few draws to say anything"


@pytest.mark.parametrize("two_sided", [False, True])
@pytest.mark.slow
def test_unbiased_for_the_smoothed_gradient_of_a_quadratic(two_sided):
    # f quadratic: f^η differs from f by a constant, so ∇f^η = ∇f exactly.
    matrix = jnp.array([[2.0, 0.3, 0.0], [0.3, 1.0, -0.2], [0.0, -0.2, 0.5]])

    def f(point):
        z = flat(point)
        return 0.5 * z @ matrix @ z + z[0]

    keys = jax.random.split(jax.random.key(1), 40_000)
    g = jax.vmap(lambda key: flat(two_point(f, X, sphere(key, X, 0.5), 0.5, two_sided)))(keys)
    assert_mean(np.asarray(g), np.asarray(flat(jax.grad(f)(X))))


@pytest.mark.parametrize("two_sided", [False, True])
def test_unbiased_for_the_smoothed_gradient_of_an_absolute_value(two_sided):
    # f(x) = |x_0| in R³: the smoothed gradient is E[sign(x_0 + u_0)], u uniform in the ball of radius η.
    # With the density
    # 3/4 (1 − s²) of u_0/η, it is (3t − t³)/2 at t = x_0/η.
    eta = 0.5
    keys = jax.random.split(jax.random.key(2), 40_000)
    x = jnp.array([0.2, 1.0, -1.0])
    g = jax.vmap(lambda key: two_point(lambda z: jnp.abs(z[0]), x, sphere(key, x, eta), eta, two_sided))(keys)
    t = 0.2 / eta
    assert_mean(np.asarray(g), np.array([(3 * t - t**3) / 2, 0.0, 0.0]))


def test_the_estimate_tends_to_the_directional_derivative(x64):
    x = {"w": jnp.array([0.3, -0.7]), "c": jnp.array([[0.5]])}

    def f(point):
        return jnp.sin(point["w"]).sum() * jnp.exp(point["c"]).sum()

    v = sphere(jax.random.key(3), x)
    exact = 3 * tree.dot(jax.grad(f)(x), v)
    one, two = [], []
    for eta in (1e-2, 1e-3):
        small = tree.scale(eta, v)
        one.append(float(jnp.abs(tree.dot(two_point(f, x, small, eta), v) - exact)))
        two.append(float(jnp.abs(tree.dot(two_point(f, x, small, eta, two_sided=True), v) - exact)))
    # The one-sided bias is of order η, the two-sided of order η².
    np.testing.assert_allclose(one[0] / one[1], 10, rtol=0.1)
    np.testing.assert_allclose(two[0] / two[1], 100, rtol=0.1)


def test_gradient_of_a_mean_is_the_mean_gradient():
    rng = np.random.default_rng(0)
    a = rng.normal(size=(6, 3)).astype(np.float32)
    f = Samples({"a": a}, jnp.int32(4)).full_mean(lambda x, s: 0.5 * (s["a"] @ x) ** 2)
    x = jnp.array([1.0, -2.0, 0.5])
    expected = (a[:4] @ np.asarray(x)) @ a[:4] / 4
    np.testing.assert_allclose(gradient(f, x), expected, rtol=1e-5)
