"""Where a run may start, and what an error of a loss says."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.core import tree
from fedstrata.support.points import as_floats

DATA = fs.FederatedData.from_clients([{"x": np.ones((3, 2), np.float32), "y": np.zeros(3, np.int32)}])


class Doubled(eqx.Module):
    inner: eqx.nn.Linear
    activation: object
    factor: object = eqx.field(default=2.0)

    def __call__(self, u):
        return self.activation(self.inner(u)) * self.factor


def test_functions_inside_a_module_are_no_variables():
    module = eqx.nn.MLP(2, 1, 3, 1, activation=jnp.tanh, key=jax.random.key(0))
    x = as_floats(module, "x0")
    assert tree.dimension(x) == 2 * 3 + 3 + 3 + 1
    u = jnp.array([1.0, -2.0])
    np.testing.assert_allclose(x(u), module(u), rtol=1e-6)
    again = as_floats(module, "x0")
    assert jax.tree.structure(x) == jax.tree.structure(again)  # the compiled program is used again
    twice = jax.tree.map(lambda leaf: 2 * leaf, x)
    assert twice.activation == x.activation
    assert repr(twice.activation) == repr(jnp.tanh)


def test_constants_of_an_equinox_module_are_not_trained():
    module = Doubled(eqx.nn.Linear(2, 1, key=jax.random.key(0)), jnp.tanh)
    with pytest.raises(TypeError, match=r"x0\.factor is 2\.0, a constant.*eqx\.partition.*eqx\.combine"):
        as_floats(module, "x0")
    with pytest.raises(TypeError, match=r"x0\[1\]\.factor is 2\.0"):
        as_floats([0.5, module], "x0")
    params, static = eqx.partition(module, eqx.is_inexact_array)
    x = as_floats((params, 0.5), "x0")  # beside a module a number is one
    assert tree.dimension(x) == 4
    np.testing.assert_allclose(eqx.combine(x[0], static)(jnp.ones(2)), module(jnp.ones(2)), rtol=1e-6)


@pytest.mark.parametrize(
    ("x0", "message"),
    [
        ({"k": jax.random.key(0)}, r"x0\['k'\] is a random key.*nnx\.split"),
        (max, "x0 is not an array"),
        ({"a": "words"}, r"x0\['a'\] is not an array: 'words'"),
    ],
)
def test_what_is_no_point_says_so(x0, message):
    with pytest.raises(TypeError, match=message):
        as_floats(x0, "x0")


def branching(x, s):
    return x.sum() if s["y"] > 0 else 2 * x.sum()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (branching, r"A Python `if`.*jnp\.where.*fs\.black_box"),
        (lambda x, s: np.sin(x).sum(), r"NumPy cannot see values.*jax\.numpy.*fs\.black_box"),
        (lambda x, s: x[int(s["y"])], "cannot become a Python number"),
        (lambda x, s: [1.0, 2.0][s["y"]] * x.sum(), r"an index of a list.*jnp\.asarray"),
        (lambda x, s: x[x > 0].sum(), r"jnp\.where\(mask, a, 0\)"),
        (lambda x, s: (s["x"] @ jnp.ones((3, 3))).sum(), "A function sees ONE sample"),
    ],
)
def test_an_error_of_a_loss_says_what_to_do(loss, message):
    with pytest.raises(TypeError, match=f"(?s){message}"):
        fs.solve(fs.Minimization(loss), fs.FedAvg(0.1), DATA, jnp.zeros(2), rounds=1, progress=False)


@pytest.mark.parametrize("whole", [2**60, np.int64(2**60), np.array(2**60), np.uint64(2**63), True])
def test_whole_numbers_become_floats_without_wrapping_around(whole):
    assert as_floats(whole, "x0") == np.float32(whole)
