"""A trace without repetition is the same function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.core.fed import Setup
from fedstrata.engines.simulated import SimulatedFed
from fedstrata.support.tracing import traced, without_repetition


def primitives(function, *args):
    """The names of a trace's equations, its repetitions left out."""
    return [e.primitive.name for e in without_repetition(jax.make_jaxpr(function)(*args).jaxpr).eqns]


def test_what_is_computed_twice_is_computed_once():
    def twice(x):
        return jnp.sin(2 * x) + jnp.cos(jnp.sin(2 * x)) + jnp.sin(3 * x)

    x = jnp.arange(3.0)
    assert primitives(twice, x).count("sin") == 2
    shapes, again = traced(twice, x)
    assert shapes.shape == (3,)
    np.testing.assert_array_equal(again(x), twice(x))


def test_what_only_looks_alike_stays():
    called = []

    def function(x):
        jax.debug.callback(called.append, x[0])
        jax.debug.callback(called.append, x[0])
        return (
            jnp.copysign(1.0, x * 0.0),
            jnp.copysign(1.0, x * -0.0),
            x.astype(int) + x.astype("int8"),
        )

    x = jnp.arange(1.0, 3.0)
    zero, minus, _ = traced(function, x)[1](x)
    jax.effects_barrier()
    assert (zero.tolist(), minus.tolist(), len(called)) == ([1, 1], [-1, -1], 2)
    assert primitives(function, x).count("debug_callback") == 2


def test_results_of_one_equation_are_told_apart():
    def both(x):
        return jax.lax.top_k(x, 2)[1], jax.lax.top_k(x, 2)[0]

    x = jnp.asarray([1.0, 3.0, 2.0])
    places, values = traced(both, x)[1](x)
    assert (places.tolist(), values.tolist()) == ([1, 2], [3, 2])
    assert primitives(both, x).count("top_k") == 1


def test_what_a_vmap_draws_alike_is_drawn_once():
    """JAX traces `normal` anew inside of the map, where its key is not mapped over."""

    def drawn(key, x):
        here = jax.random.normal(key, (2,))
        return here, jax.vmap(lambda x: x + jax.random.normal(key, (2,)))(x), jax.random.uniform(key, (2,))

    args = jax.random.key(0), jnp.ones((3, 2))
    for found, expected in zip(traced(drawn, *args)[1](*args), drawn(*args), strict=True):
        np.testing.assert_array_equal(found, expected)
    jaxpr = without_repetition(jax.make_jaxpr(drawn)(*args).jaxpr)
    assert [e.params["name"] for e in jaxpr.eqns if "jaxpr" in e.params] == ["_normal", "_uniform"]


def test_what_nobody_uses_is_left_out():
    def function(key, x):
        keys = jax.vmap(lambda k: jax.random.fold_in(key, k))(jnp.arange(3))
        return jax.lax.scan(lambda x, key: (x + 1, jax.random.split(key)), x, keys)[0]

    args = jax.random.key(0), jnp.zeros(2)
    _, again = traced(function, *args)
    np.testing.assert_array_equal(again(*args), [3, 3])
    assert "random" not in str(jax.make_jaxpr(again)(*args))


@pytest.mark.parametrize("clients", [3, 100])
def test_a_sample_counts_as_its_client_says(clients):
    """A sample's weight is its client's share over its size, however the client is found."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 6, clients)
    data = fs.FederatedData.from_clients([{"a": np.ones((n, 1))} for n in sizes])
    shares = rng.random(clients)
    placed = fs.engines.Simulated().place(data)
    found = placed.sample_shares(jnp.asarray(shares))
    np.testing.assert_allclose(found, np.repeat(shares / sizes, sizes), rtol=1e-6)


def test_drawing_all_clients_is_no_draw():
    """Everyone is drawn: the same clients in the same order, at the cost of an exchange with everyone."""
    rng = np.random.default_rng(0)
    data = fs.FederatedData.from_clients([{"a": rng.normal(size=(n, 2))} for n in (3, 5, 2)])
    problem = fs.Minimization(lambda x, sample: ((x - sample["a"]) ** 2).sum())
    setup, engine = Setup(problem, 3, 3, "uniform"), fs.engines.Simulated()

    def phase(problem, client, key, x):
        return x + jax.random.normal(key) * client.index

    def both(placed, key, x):
        fed = SimulatedFed(engine, setup, placed, None, None)
        chosen = fed.sample(key, 3)
        return chosen, fed.average(phase, key, x, of=chosen), fed.average(phase, key, x)

    args = engine.place(data), jax.random.key(0), jnp.ones(2)
    chosen, drawn, everyone = jax.jit(both)(*args)
    assert chosen.tolist() == [0, 1, 2]
    np.testing.assert_array_equal(drawn, everyone)
    assert " sort[" not in str(jax.make_jaxpr(both)(*args))
