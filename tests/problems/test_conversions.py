"""Problems in another form: the same solutions, equal objects for equal problems, clear refusals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs

pytestmark = pytest.mark.usefixtures("x64")


def test_a_minimax_problem_as_bilevel():
    q = fs.quadratic_minimax(clients=3, n=2, p=3)
    bilevel = fs.as_bilevel(q.problem)
    method = fs.HypergradientDescent(0.2, 0.3, T=30, N=3)
    options = {"y0": np.zeros(3), "rounds": 100, "eval_every": 100, "progress": False}
    result = fs.solve(bilevel, method, q.data, np.zeros(2), **options)
    np.testing.assert_allclose(result.x, q.x_star, atol=1e-8)
    np.testing.assert_allclose(result.y, q.y_star, atol=1e-8)


def test_a_composition_as_bilevel():
    problem = fs.Composition([lambda x, s: s["a"] * x, lambda z: (z**2).sum()], plain=lambda x, s: x.sum())
    bilevel = fs.as_bilevel(problem)
    x, y, s = jnp.array([1.0, 2.0]), jnp.array([0.5, 0.0]), {"a": 3.0}
    assert float(bilevel.upper(x, y, s)) == 0.25 + 3.0
    np.testing.assert_allclose(jax.grad(bilevel.lower, argnums=1)(x, y, s), y - 3 * x)


def test_equal_problems_convert_to_equal_ones():
    """So that programs compiled for one serve the other."""

    def payoff(x, y, s):
        return x @ y

    assert fs.as_multisequence(fs.Minimax(payoff)) == fs.as_multisequence(fs.Minimax(payoff))
    assert fs.as_bilevel(fs.Minimax(payoff)) == fs.as_bilevel(fs.Minimax(payoff))
    composition = fs.Composition([lambda x, s: x, lambda z: z.sum()])
    assert hash(fs.as_multisequence(composition)) == hash(fs.as_multisequence(composition))


def test_what_is_already_of_the_class_stays():
    q = fs.quadratic_bilevel(clients=2, n=1, p=1)
    assert fs.as_bilevel(q.problem) is q.problem
    sequences = fs.as_multisequence(q.problem)
    assert fs.as_multisequence(sequences) is sequences


def test_refusals():
    loss = fs.Minimization(lambda x, s: x.sum())
    with pytest.raises(TypeError, match="Minimization cannot be converted to MultiSequence"):
        fs.as_multisequence(loss)
    with pytest.raises(TypeError, match="Minimization cannot be converted to Bilevel"):
        fs.as_bilevel(loss)
    with pytest.raises(ValueError, match="project_y"):
        fs.as_multisequence(fs.Minimax(lambda x, y, s: x @ y, project_y=fs.sets.Box(-1, 1)))
    with pytest.raises(ValueError, match="3 levels"):
        fs.as_bilevel(fs.Composition([lambda x, s: x, lambda z, s: z, lambda z: z.sum()]))
    with pytest.raises(ValueError, match="one level"):
        fs.as_multisequence(fs.Composition([lambda x, s: x.sum()]))
    with pytest.raises(ValueError, match="LogMeanExp"):
        fs.as_bilevel(fs.Composition([fs.LogMeanExp(lambda x, s: x.sum()), lambda z: z]))


def test_a_multisequence_checks_its_start():
    problem = fs.MultiSequence(lambda x, Z, s: x + Z[0], lambda before, z, s: z - before)
    data = fs.FederatedData.from_clients([{"a": np.ones(1)}])
    method = fs.FedMSA(0.1, 0.1)
    with pytest.raises(ValueError, match="must be a tuple"):
        fs.solve(problem, method, data, np.zeros(2), y0=np.zeros(2), rounds=0)
    with pytest.raises(TypeError, match=r"S\[0\]"):
        fs.solve(problem, method, data, np.zeros(2), y0=(np.zeros(()),), rounds=0)
    with pytest.raises(TypeError, match="one function per sequence"):
        fs.MultiSequence(lambda x, Z, s: x, ())
