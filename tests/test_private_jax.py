"""What is private in JAX is used in one file, and does there what that file says."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.advice.precision import double_precision
from fedstrata.support.private_jax import coordination, dce_jaxpr, trace_of

PACKAGE = Path(__file__).parents[1] / "fedstrata"
PRIVATE = re.compile(r"jax\._src|jax\.interpreters|\b_trace\b|DropVar|jaxlib\.")


def test_one_file_uses_what_is_private():
    users = {path.name for path in PACKAGE.rglob("*.py") if PRIVATE.search(path.read_text("utf-8"))}
    assert users == {"private_jax.py"}


def test_unused_equations_are_removed_and_unused_inputs_told():
    def function(x, y):
        jnp.cos(y)
        return jax.lax.fori_loop(0, 3, lambda _, carry: (carry[0] + 1, jnp.sin(carry[1])), (x, y))[0]

    jaxpr = jax.make_jaxpr(function)(1.0, 2.0).jaxpr
    smaller, used = dce_jaxpr(jaxpr, [True])
    assert used == [True, False]
    assert "cos" in str(jaxpr)
    assert not re.search("cos|sin", str(smaller))


def test_outside_of_a_run_over_several_processes_there_is_no_client():
    assert coordination().client is None
    assert coordination().coordinator_address is None


def test_a_constant_has_the_precision_of_the_program_that_closes_over_it():
    constant = np.asarray([1.0, 1e-9])

    def function(x):
        return (x + constant).sum() - 1

    both = jax.jit(function)
    assert both(0.0).dtype == jnp.float32
    with double_precision():
        assert both(0.0).dtype == jnp.float64
        assert abs(float(both(0.0)) - 1e-9) < 1e-15
    assert jax.jit(lambda x: function(x) + 1)(0.0).dtype == jnp.float32


def test_values_from_outside_of_a_body_are_told_from_its_own():
    found = []

    def outer(x):
        def body(carry, _):
            found.append((trace_of(x), trace_of(carry)))
            return carry + x, None

        return jax.lax.scan(body, x, length=2)

    jax.make_jaxpr(outer)(1.0)
    assert all(ours is not None and ours is not theirs for theirs, ours in found)
    assert trace_of(np.ones(2)) is None
