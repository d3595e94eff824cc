"""Second derivatives along a vector: against matrices, against differences, and what they cost."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.core import counting, tree
from fedstrata.core.client import Client, Samples
from fedstrata.estimators import sequences
from fedstrata.estimators.hypergradient import Coupled, bilevel_maps, curvature
from fedstrata.testing.cases import multisequence as m


def g(x, w, s):
    return (
        jnp.tanh(s["a"] @ w["m"]) @ x["u"] + jnp.exp(x["t"]) * (w["m"] ** 2).sum() + s["b"] * w["k"] * x["t"]
    )


def f(x, w, s):
    return (s["a"] @ w["m"] @ x["u"] - s["b"]) ** 2 + w["k"] ** 3


@pytest.fixture
def point(x64):
    rng = np.random.default_rng(0)
    samples = Samples({"a": jnp.asarray(rng.normal(size=(6, 3))), "b": jnp.asarray(rng.normal(size=6))}, 6)
    x = {"u": jnp.asarray(rng.normal(size=2)), "t": jnp.asarray(0.3)}
    w = {"m": jnp.asarray(rng.normal(size=(3, 2))), "k": jnp.asarray(-0.4)}
    return samples, x, w, jax.tree.map(lambda leaf: leaf + 1, w)


@pytest.mark.slow
def test_products_are_those_of_the_hessian(point):
    samples, x, w, v = point
    mean = samples.full_mean(g)
    found = curvature(mean, x, w, v)
    hessian = jax.hessian(mean.silent, argnums=(0, 1))(x, w)

    def row(first, name):
        block = hessian[first][name][1]
        return sum(jnp.tensordot(block[k], v[k], axes=v[k].ndim) for k in v)

    for name in w:
        np.testing.assert_allclose(found.product[name], row(1, name), rtol=1e-12, atol=1e-12)
    for name in x:
        np.testing.assert_allclose(found.mixed[name], row(0, name), rtol=1e-12, atol=1e-12)
    for name, slope in jax.grad(mean.silent, argnums=1)(x, w).items():
        np.testing.assert_allclose(found.gradient[name], slope, rtol=1e-12)


@pytest.mark.slow
def test_differences_of_gradients_approximate_them(point):
    samples, x, w, v = point
    exact, approximate = (curvature(samples.full_mean(g), x, w, v, p) for p in ("exact", "differences"))
    for a, b in zip(jax.tree.leaves(exact), jax.tree.leaves(approximate), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-8)
    still = curvature(samples.full_mean(g), x, w, tree.zeros_like(w), "differences")
    assert float(tree.norm((still.product, still.mixed))) == 0.0


@pytest.mark.slow
def test_what_is_booked(point):
    samples, x, w, v = point
    counts = {}
    for products in ("exact", "differences"):
        with counting.collect() as booked:
            bilevel_maps(samples.full_mean(f), samples.full_mean(g), x, Coupled(w, v), products)
        counts[products] = dict(booked.fixed)
    assert counts == {"exact": {"gradients": 12, "products": 6}, "differences": {"gradients": 24}}


PROBLEMS = {
    "bilevel": m.bilevel,
    "minimax": fs.Minimax(m.payoff),
    "composition": m.composition,
    "logarithmic": fs.Composition(
        [fs.LogMeanExp(lambda x, s: s["a"][:2] @ x["s"] * x["t"]), m.middle_of_u, m.outer]
    ),
}


def at_a_client(problem, adjoint):
    """One client of all samples, and a point away from the solution."""
    leaves = {k: jnp.asarray(v) for k, v in m.samples(3)[1].items()}
    samples = Samples(leaves, 7)
    x, y = jax.tree.map(jnp.asarray, (m.x0, None if isinstance(problem, fs.Composition) else m.y0))
    sample = jax.tree.map(lambda leaf: leaf[0], leaves)
    Z = sequences.start(problem, x, problem.start_y(x, y, sample), adjoint)
    Z = jax.tree.map(lambda leaf: leaf + 0.1 * np.arange(1, 1 + leaf.size).reshape(leaf.shape), Z)
    return Client(0, samples, samples), x, Z


@pytest.mark.slow
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_maps_are_those_of_the_converted_problem(name, x64):
    """The quick maps of whole batches against sample-wise derivatives."""
    problem = PROBLEMS[name]
    client, x, Z = at_a_client(problem, adjoint=True)
    P, S = sequences.draw(problem, client, jax.random.key(0), None)(x, Z)
    if name == "bilevel":
        theirs = (tuple(Z[0]),)
    elif name == "minimax":
        theirs = (Z[0].y,)
    else:
        last = jax.grad(problem.levels[-1])(Z[-1].z)  # everyone knows it, so it is no sequence
        theirs = ((tuple(z.z for z in Z), (*[z.adjoint for z in Z[:-1]], last)),)
    P_of, S_of = sequences.draw(fs.as_multisequence(problem), client, jax.random.key(0), None)(x, theirs)
    if isinstance(problem, fs.Composition):
        ((values, adjoints),) = S_of
        assert float(tree.norm(adjoints[-1])) < 1e-14
        S_of = (values, adjoints[:-1])
        S = (tuple(s.z for s in S), tuple(s.adjoint for s in S[:-1]))
    for a, b in zip(jax.tree.leaves((P, S)), jax.tree.leaves((P_of, S_of)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.slow
def test_the_papers_map_of_a_composition_is_a_product_of_jacobians(x64):
    client, x, Z = at_a_client(m.composition, adjoint=False)
    P, S = sequences.draw(m.composition, client, jax.random.key(0), None)(x, Z)
    inner, middle, plain = (client.train.full_mean(f).silent for f in (m.inner, m.middle, m.plain))
    first, second = jax.jacobian(inner)(x), jax.jacobian(middle)(Z[0])
    a = {k: jax.grad(m.outer)(Z[1]) @ second[k] for k in second}
    direct = jax.grad(plain)(x)
    for name in x:
        expected = sum(jnp.tensordot(a[k], first[k][name], axes=a[k].ndim) for k in a) + direct[name]
        np.testing.assert_allclose(P[name], expected, rtol=1e-12)
    np.testing.assert_allclose(S[1], Z[1] - middle(Z[0]), rtol=1e-12)


def test_a_product_costs_at_most_three_gradients():
    """On a network, as compiled: memory (what is live at a time beside arguments) and arithmetic."""

    def loss(x, w, s):
        hidden = jax.nn.relu(s["a"] @ w["in"])
        return jax.nn.logsumexp((hidden @ w["out"]) * x)

    shapes = {"in": (100, 80), "out": (80, 10)}
    w = {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in shapes.items()}
    x = jax.ShapeDtypeStruct((10,), jnp.float32)
    a = jax.ShapeDtypeStruct((2000, 100), jnp.float32)

    def cost(function, *args):
        compiled = jax.jit(function).lower(*args).compile()
        return compiled.memory_analysis().temp_size_in_bytes, compiled.cost_analysis()["flops"]

    def mean(a):
        return Samples({"a": a}, 2000).full_mean(loss)

    memory, flops = cost(lambda a, x, w: jax.grad(mean(a).silent, argnums=(0, 1))(x, w), a, x, w)
    memory_of_product, flops_of_product = cost(lambda a, x, w, v: curvature(mean(a), x, w, v), a, x, w, w)
    assert 0 < memory_of_product <= 3 * memory
    assert 0 < flops_of_product <= 3 * flops
