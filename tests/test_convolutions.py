"""Convolutions with groups as products: equal to `lax` on random shapes, and in whole runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fedstrata as fs
from fedstrata.engines.convolutions import Shape, form_of, rewritten

pytestmark = pytest.mark.slow  # of the quick tests, the rows of methods and of the kit would fail as well


def random_convolution(rng):
    """A convolution with groups of random rank, layout, padding, strides and dilations, and its arguments."""
    rank, groups, channels, outputs, images = rng.integers(1, [4, 4, 4, 4, 4], endpoint=True)
    rank, groups = min(int(rank), 3), 1 + int(groups)

    def of_axes(high):
        return tuple(int(v) for v in rng.integers(1, high, rank, endpoint=True))

    orders = [tuple(int(i) for i in rng.permutation(rank + 2)) for _ in range(3)]
    padding = [tuple(int(v) for v in rng.integers(-1, 3, 2)) for _ in range(rank)]

    def placed(order, first, second, space):
        shape = dict(zip(order, (first, second, *space), strict=True))
        return rng.normal(size=[int(shape[axis]) for axis in range(rank + 2)])

    u = placed(orders[0], images, groups * channels, rng.integers(5, 8, rank))
    w = placed(orders[1], groups * outputs, channels, of_axes(3))
    options = of_axes(2), padding, of_axes(2), of_axes(2), lax.ConvDimensionNumbers(*orders)
    return lambda u, w: lax.conv_general_dilated(u, w, *options, feature_group_count=groups), u, w


@pytest.mark.parametrize("form", ["patches", "sums", "positions"])
def test_each_form_is_the_convolution(form, x64):
    rng, tried = np.random.default_rng(0), 0
    for _ in range(12):
        convolve, u, w = random_convolution(rng)
        closed = jax.make_jaxpr(convolve)(u, w)
        new, number = rewritten(closed, "cpu", lambda shape, platform: form)
        if number:
            (found,) = jax.core.eval_jaxpr(new.jaxpr, new.consts, u, w)
            np.testing.assert_allclose(found, convolve(u, w), rtol=1e-10, atol=1e-11)
            tried += 1
    assert tried >= 6


def convolved(x, u, stride=1):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(u[None], x, (stride, stride), "SAME", dimension_numbers=numbers)[0]


@jax.custom_jvp
def squared(u):
    return u**2


squared.defjvps(lambda tangent, value, u: 2 * u * tangent)


def loss(x, sample):
    """Convolutions under `jit`, `scan`, `remat` and `custom_jvp`, of known and of each client's weights."""
    u = jax.jit(convolved)(x["first"], sample["u"])
    u = jax.checkpoint(lambda u: convolved(x["second"], u, 2))(u)
    u, _ = lax.scan(lambda u, _: (squared(jnp.tanh(convolved(x["second"], u))), None), u, None, 2)
    return (convolved(jnp.ones((3, 3, 2, 1)), u).mean() - sample["b"]) ** 2


rng = np.random.default_rng(0)
data = fs.FederatedData.from_clients(
    [{"u": rng.normal(size=(4, 6, 6, 1)), "b": rng.normal(size=4)} for _ in range(3)]
)
x0 = {"first": rng.normal(size=(3, 3, 1, 2)), "second": rng.normal(size=(3, 3, 2, 2))}


def run(engine):
    method = fs.FedAvg(gamma=0.1, H=2, batch_size=2)
    return fs.solve(fs.Minimization(loss), method, data, x0, rounds=2, engine=engine, progress=False)


def test_runs_do_not_depend_on_it(x64):
    with_products, plain = (
        run(fs.engines.Simulated(chunk=None)),
        run(fs.engines.Simulated(None, rewrite=False)),
    )
    for name in x0:
        np.testing.assert_allclose(with_products.x[name], plain.x[name], rtol=1e-9)
    assert "convolutions of clients side by side" in with_products.notes[0]
    assert plain.notes == ()
    assert run(fs.engines.Simulated(chunk=1)).notes == ()  # one client at a time: there are no groups


def test_the_form_is_the_one_that_writes_less():
    """Of a convolution that widens: forward, by its input, by its weights."""
    wide = {"groups": 8, "batch": 4, "window": 9}
    assert form_of(Shape(**wide, positions=900, channels=32, outputs=64, entries=1024), "gpu") == "patches"
    assert form_of(Shape(**wide, positions=1024, channels=64, outputs=32, entries=900), "gpu") == "sums"
    large = {
        "groups": 8,
        "batch": 32,
        "window": 900,
        "positions": 9,
        "channels": 4,
        "outputs": 64,
        "entries": 1024,
    }
    assert form_of(Shape(**large), "gpu") == "positions"
    assert form_of(Shape(**{**large, "groups": 1}), "gpu") is None
    assert form_of(Shape(**{**large, "positions": 900}), "gpu") is None


def test_blocks_are_halved_until_they_fit(monkeypatch):
    """Out of memory: told once, met by halving, remembered by the runs after it."""
    engine, tried = fs.engines.Simulated(), []
    monkeypatch.setattr("fedstrata.engines.simulated._halved", {})

    def run(engine):
        tried.append(engine.halvings)
        if engine.halvings < 2:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return "done"

    with pytest.warns(UserWarning, match="Blocks of clients are halved") as told:
        assert engine.fitting(run) == "done"
    assert (tried, len(told)) == ([0, 1, 2], 1)
    assert engine.fitting(run) == "done"
    assert tried[3:] == [2]
    with pytest.raises(jax.errors.JaxRuntimeError):
        fs.engines.Simulated(chunk=4).fitting(run)
