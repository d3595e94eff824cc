"""JAX's own derivatives of an oracle would be booked as values: they are refused, at no cost."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.core.client import Samples
from fedstrata.core.method import METHODS, Method, method
from fedstrata.estimators.gradients import gradient

A = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)
SAMPLES = Samples({"a": A}, 4)
X = jnp.ones(3)


def square(x, sample):
    return 0.5 * (sample["a"] @ x) ** 2


ORACLE = SAMPLES.full_mean(square)
DERIVATIVES = {
    "grad": lambda: jax.grad(ORACLE)(X),
    "jvp": lambda: jax.jvp(ORACLE, (X,), (X,)),
    "vjp": lambda: jax.vjp(ORACLE, X),
    "jacobian": lambda: jax.jacrev(ORACLE.each)(X),
    "hessian": lambda: jax.hessian(ORACLE)(X),
    "in a loop": lambda: jax.grad(lambda x: jax.lax.fori_loop(0, 3, lambda _, t: t + ORACLE(x), 0.0))(X),
    "jitted": lambda: jax.jit(jax.grad(ORACLE))(X),
    "through what the function knows": lambda: jax.grad(
        lambda x: SAMPLES.full_mean(lambda scale, s: scale * square(x, s))(2.0)
    )(X),
}


@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
def test_a_derivative_of_an_oracle_is_refused(derivative):
    with pytest.raises(TypeError, match=r"gradients\.gradient\(f, x\)"):
        derivative()


def test_values_and_silent_derivatives_stay():
    expected = A.T @ (A @ X) / 4
    np.testing.assert_allclose(gradient(ORACLE, X), expected, rtol=1e-5)
    np.testing.assert_allclose(jax.grad(ORACLE.silent)(X), expected, rtol=1e-5)
    np.testing.assert_allclose(jax.vmap(ORACLE)(jnp.eye(3)), (A**2).mean(0) / 2, rtol=1e-5)
    # a factor that does not depend on what is differentiated is a value
    np.testing.assert_allclose(jax.grad(lambda t: t * ORACLE(X))(2.0), ORACLE(X))
    count = SAMPLES.full_mean(lambda n, sample: n + 0 * sample["a"].sum())
    np.testing.assert_allclose(count(3), 3.0)


def test_the_refusal_costs_nothing():
    booked, silent = (
        jax.jit(f).lower(X).as_text() for f in (lambda x: ORACLE(x), lambda x: ORACLE.silent(x))
    )
    assert booked == silent


def test_a_method_that_differentiates_an_oracle_is_told():
    @method
    class Naive(Method):
        solves = (fs.Minimization,)

        def init(self, problem, x0, y0):
            return x0

        def step(self, problem, client, key, x):
            return jax.grad(client.mean(problem.loss, key, None))(x)

        def round(self, problem, fed, key, r, state):
            return state - fed.average(self.step, key, state)

        def output(self, state, memory):
            return state, None

    try:
        with pytest.raises(TypeError, match="counted as a function value"):
            fs.solve(
                fs.Minimization(square),
                Naive(),
                fs.FederatedData.from_clients([{"a": np.ones((2, 3))}]),
                np.ones(3),
                rounds=1,
                progress=False,
            )
    finally:
        METHODS.pop("Naive")
