"""Measurements in blocks: the same numbers, in a memory that does not grow with samples or clients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.advice import blocks, constants, fault
from fedstrata.advice.objectives import mean_over
from fedstrata.solving.stopping import Diverged

pytestmark = pytest.mark.usefixtures("x64")


def federation(clients, rows=6, n=4, unequal=False):
    rng = np.random.default_rng(0)
    sizes = [rows + (i % 3 if unequal else 0) for i in range(clients)]
    return fs.FederatedData.from_clients(
        [{"a": rng.normal(size=(size, n)), "b": rng.normal(size=size)} for size in sizes]
    )


def loss(x, s):
    return jnp.log1p(jnp.exp(-s["b"] * (s["a"] @ x))) + 0.01 * x @ x


def wide(x, s):
    """Thousands of numbers for a sample."""
    V = jnp.linspace(-1, 1, 10_000).reshape(10, 1_000)
    return (jnp.tanh(jnp.tanh((s["a"] * x) @ V) @ V.T) ** 2).mean()


def little(monkeypatch, room):
    monkeypatch.setattr(blocks, "ROOM", room)
    monkeypatch.setattr(blocks, "SURELY", 0)


@pytest.mark.slow
def test_blocks_measure_the_same(monkeypatch):
    data, x = federation(19, unequal=True), np.linspace(-1, 1, 4)

    def measured():
        problem = fs.Minimization(lambda x, s: loss(x, s))  # another one, so that it is compiled again
        found = fs.constants(problem, data, x, weights="size").levels["loss"]
        return found, fs.certify(problem, data, x, weights="size").interval

    (whole, *judged), _ = measured(), little(monkeypatch, 10_000)  # a few samples at once
    again, *others = measured()
    for name, value in vars(whole).items():
        np.testing.assert_allclose(vars(again)[name], value, rtol=1e-6, atol=1e-9, err_msg=name)
    for one, other in zip(judged, others, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def largest(jaxpr):
    """The most numbers of an array in a program."""
    own = [np.prod(v.aval.shape) for eqn in jaxpr.eqns for v in eqn.outvars]
    inner = [largest(part) for eqn in jaxpr.eqns for value in eqn.params.values() for part in jaxprs(value)]
    return max([*own, *inner], default=0)


def jaxprs(value):
    found = getattr(value, "jaxpr", value)
    return [found] if hasattr(found, "eqns") else []


def test_the_arrays_of_a_product_do_not_grow_with_samples(monkeypatch):
    little(monkeypatch, 2**20)

    def arrays(clients):
        data, x = federation(clients, n=10).placed(), jnp.ones(10)

        def product(x, data):
            def slope(x):
                return jax.grad(lambda x: mean_over(data, "uniform", wide, x))(x)

            return jax.jvp(slope, (x,), (x,))[1]

        return largest(jax.make_jaxpr(product)(x, data).jaxpr)

    assert arrays(200) == arrays(20) < 2**20 / 8
    monkeypatch.setattr(blocks, "ROOM", 2**40)
    assert arrays(200) == 200 * 6 * 1_000


def test_no_array_holds_all_clients_bases(monkeypatch):
    """Of Lanczos' method: a vector of 300 numbers for each of 20 steps, of as many clients as fit."""
    monkeypatch.setattr(blocks, "ROOM", 2**20)
    data, n = federation(60, rows=2, n=300).placed(), 300

    def arrays():
        program = constants._Program(constants.Measurand(lambda x, y, s: loss(x, s)), "uniform", 20)
        measured = jax.make_jaxpr(lambda x, data: constants._measured(program, data, x, None))
        return largest(measured(jnp.ones(n), data).jaxpr)

    assert arrays() < 2**20 / 8
    monkeypatch.setattr(blocks, "ROOM", 2**40)
    assert arrays() >= 60 * 20 * n


def test_nothing_is_measured_for_a_message_that_costs_more_than_it_is_worth(monkeypatch):
    data, problem = federation(4), fs.Minimization(lambda x, s: (s["a"] @ x - s["b"]) ** 2)
    small = constants.operations(problem, data, np.ones(4))
    assert constants.operations(problem, federation(8), np.ones(4)) == pytest.approx(2 * small)
    with pytest.raises(Diverged) as found:
        fs.solve(problem, fs.FedAvg(gamma=1e6, H=5), data, np.ones(4), rounds=50, progress=False)
    monkeypatch.setattr(fault, "MOST", small / 2)
    monkeypatch.setattr(fault, "conditions", None)
    assert "fs.plan" in str(found.value)


def test_operations_are_counted_in_products_and_loops():
    def f(W, sample):
        return jax.lax.fori_loop(0, 5, lambda t, u: W @ u, sample).sum()

    one = blocks.cost_of(f, jnp.ones(7), jnp.ones((7, 7)))
    assert 5 * 2 * 49 <= one.operations < 1.2 * 5 * 2 * 49
    assert 5 * 7 * 8 <= one.bytes < 1_000
