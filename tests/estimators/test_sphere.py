"""Directions and two-point estimates: what they are on average, and exactly where that is known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedstrata.core import tree
from fedstrata.core.counting import collect, count
from fedstrata.estimators.sphere import (
    check_directions,
    combine,
    directions,
    estimate,
    points,
    sphere,
    theory_steps,
    two_point,
)

LIKE = {"a": np.zeros((2, 2)), "b": np.zeros(())}


def flat(stacked):
    return jnp.concatenate([leaf.reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(stacked)], axis=1)


@pytest.mark.parametrize("orthogonal", [False, True])
@pytest.mark.usefixtures("x64")
def test_directions_are_uniform(orthogonal):
    """Second moments of the uniform distribution on the sphere of radius 2 in R⁵: E v vᵀ = 4/5 I, E v = 0."""
    draw = jax.vmap(lambda key: flat(directions(key, LIKE, 2.0, 3, orthogonal)))
    v = np.asarray(draw(jax.random.split(jax.random.key(0), 4000)))
    np.testing.assert_allclose(np.linalg.norm(v, axis=2), 2, rtol=1e-12)
    for j in range(3):  # each direction by itself
        # v_i² has variance 0.73 and v_i has 0.8: six standard errors of these means are 0.08
        np.testing.assert_allclose(v[:, j].T @ v[:, j] / 4000, 0.8 * np.eye(5), atol=0.08)
        np.testing.assert_allclose(v[:, j].mean(0), 0, atol=0.08)
    gram = np.einsum("kin,kjn->kij", v, v)
    off = gram - 4 * np.eye(3)
    if orthogonal:
        np.testing.assert_allclose(off, 0, atol=1e-12)
    else:
        assert np.abs(off).max() > 1


def test_one_direction_is_the_sphere():
    key, like = jax.random.key(3), jax.tree.map(jnp.asarray, LIKE)
    one = directions(key, like, 0.5)
    again = sphere(key, like, 0.5)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[0], b), one, again)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_estimates_of_a_quadratic():
    A = jnp.array([[3.0, 1.0, 0.0], [1.0, 2.0, 0.5], [0.0, 0.5, 1.0]])
    x = {"u": jnp.array([1.0, -2.0]), "w": jnp.array(0.3)}

    def f(x):
        z = jnp.append(x["u"], x["w"])
        return z @ A @ z / 2

    truth = jax.grad(f)(x)
    # n orthogonal directions, two-sided: the gradient itself
    v = directions(jax.random.key(0), x, 0.1, 3, orthogonal=True)
    g = combine(estimate(f, x, v, 0.1, two_sided=True), v)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), g, truth)
    # one-sided: the second-order term stays, ½ n/(3η²) Σ (vᵀAv) v
    curvature = sum(
        tree.dimension(x) / (3 * 2 * 0.1**2) * (w @ A @ w) * w for w in np.asarray(flat(v)[:, [0, 1, 2]])
    )
    one_sided = combine(estimate(f, x, v, 0.1), v)
    found = jnp.append(one_sided["u"] - truth["u"], one_sided["w"] - truth["w"])
    np.testing.assert_allclose(found, curvature, rtol=1e-8)
    # several directions are the mean of the single ones, which are two_point
    v = directions(jax.random.key(1), x, 0.1, 4)
    singles = [two_point(f, x, jax.tree.map(lambda leaf, j=j: leaf[j], v), 0.1) for j in range(4)]
    mean = jax.tree.map(lambda *leaves: sum(leaves) / 4, *singles)
    together = combine(estimate(f, x, v, 0.1), v)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), together, mean)


def test_points_in_order():
    x, v = jnp.array([1.0]), jnp.array([[0.1], [0.2]])
    np.testing.assert_allclose(points(x, v)[:, 0], [1, 1.1, 1.2], rtol=1e-6)
    np.testing.assert_allclose(points(x, v, two_sided=True)[:, 0], [1.1, 1.2, 0.9, 0.8], rtol=1e-6)


@pytest.mark.parametrize(
    ("number", "two_sided", "values"), [(1, False, 2), (1, True, 2), (3, False, 4), (3, True, 6)]
)
def test_function_values_are_counted(number, two_sided, values):
    def f(x):
        count("values", 1)
        return x.sum()

    with collect() as tally:
        estimate(f, jnp.zeros(4), directions(jax.random.key(0), jnp.zeros(4), 1.0, number), 1.0, two_sided)
    assert tally.fixed == {"values": values}


def test_theory():
    assert theory_steps(10_000, 4) == (0.02, 4)
    assert theory_steps(10_001, 1)[1] == 11
    with pytest.raises(ValueError, match="at least 1"):
        theory_steps(0, 4)
    with pytest.raises(ValueError, match="7 orthogonal directions need as many dimensions, but x has 5"):
        check_directions("FedRZO", 7, True, LIKE)
    check_directions("FedRZO", 7, False, LIKE)
