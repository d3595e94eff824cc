"""Convolutions with groups as products: equal to `lax` on random shapes, and in whole runs."""

from collections import OrderedDict
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fedstrata as fs
from fedstrata.engines.convolutions import Shape, form_of, rewritten
from fedstrata.engines.simulated import fitting

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


FORMS = ("patches", "sums", "positions")


@pytest.mark.parametrize("form", [*FORMS, None])
def test_each_form_is_the_convolution(form, x64):
    """None is the same with its axes in order."""
    rng, tried = np.random.default_rng(0), 0
    for _ in range(12):
        convolve, u, w = random_convolution(rng)
        closed = jax.make_jaxpr(convolve)(u, w)
        new, number = rewritten(closed, "cpu", lambda shape, platform: form)
        assert (number > 0) == (form is not None and new is not closed)
        if new is not closed:
            (found,) = jax.core.eval_jaxpr(new.jaxpr, new.consts, u, w)
            np.testing.assert_allclose(found, convolve(u, w), rtol=1e-10, atol=1e-11)
            tried += 1
    assert tried >= 6


def with_rule(convolve):
    """With a derivative of its own, which calls it."""
    own = jax.custom_jvp(convolve)
    own.defjvp(lambda at, along: (convolve(*at), convolve(along[0], at[1]) + convolve(at[0], along[1])))
    return own


INSIDE = {
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "scan": lambda f: lambda u, w: lax.scan(lambda c, _: (0.9 * c, f(c * u, w)), 1.0, None, 2)[1].sum(0),
    "cond": lambda f: lambda u, w: lax.cond(w.sum() > 0, f, lambda u, w: f(u, 2 * w), u, w),
    "while": lambda f: lambda u, w: lax.fori_loop(0, 2, lambda i, c: c / 2 + f(u, w), 0 * f(u, w)),
    "custom_jvp": with_rule,
}


@pytest.mark.parametrize("inside", INSIDE)
def test_derivatives_of_clients_side_by_side(inside, x64):
    """Gradients, of one also Hessian products, mapped over clients; in every form."""
    rng, tried = np.random.default_rng(len(inside)), 0
    while not tried:
        convolve, u, w = random_convolution(rng)
        f = INSIDE[inside](convolve)
        gradient = jax.grad(lambda u, w, f=f: (jnp.tanh(f(u, w)) ** 2).sum(), (0, 1))

        def product(u, w, gradient=gradient):
            return jax.jvp(gradient, (u, w), (w.sum() * u, w))[1]

        if inside != "jit":  # a loop of unknown length has no derivative backwards
            product = (lambda u, w, f=f: jax.jvp(f, (u, w), (u, w))) if inside == "while" else gradient
        many, us, ws = jax.vmap(product), np.stack([u, -0.5 * u]), np.stack([w, 0.3 * w + 0.1])
        closed = jax.make_jaxpr(many)(us, ws)
        new = [rewritten(closed, "cpu", lambda shape, platform, form=form: form) for form in FORMS]
        if all(number for _, number in new):
            exact, *found = jax.jit(
                lambda *args, all_of=(closed, *(jaxpr for jaxpr, _ in new)): [
                    jax.core.eval_jaxpr(one.jaxpr, one.consts, *args) for one in all_of
                ]
            )(us, ws)
            for form in found:
                jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9), form, exact)
            tried += 1


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_is_rounded_as_often_as_there_are_products(form):
    """A rounding of each product and one of their sum, which is taken in float32."""
    rng = np.random.default_rng(0)
    for _ in range(4):
        convolve, u, w = random_convolution(rng)
        u, w = (jnp.asarray(a, jnp.bfloat16) for a in (u, w))
        new, number = rewritten(jax.make_jaxpr(convolve)(u, w), "cpu", lambda shape, platform: form)
        if number:
            (found,) = jax.core.eval_jaxpr(new.jaxpr, new.consts, u, w)
            u, w = (np.asarray(a, np.float32) for a in (u, w))
            assert found.dtype == jnp.bfloat16
            error = np.abs(np.asarray(found, np.float32) - convolve(u, w))
            assert (error <= 2.01 * 2.0**-8 * np.asarray(convolve(abs(u), abs(w))) + 1e-6).all()


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
    monkeypatch.setattr("fedstrata.engines.simulated._smaller", {})

    def run(engine):
        tried.append(engine.halvings)
        if engine.halvings < 2:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return "done"

    with pytest.warns(UserWarning, match="Fewer are computed at once") as told:
        assert fitting(engine, run) == "done"
    assert (tried, len(told)) == ([0, 1, 2], 1)
    assert fitting(engine, run) == "done"
    assert tried[3:] == [2]
    with pytest.raises(jax.errors.JaxRuntimeError):
        fitting(fs.engines.Simulated(chunk=4), run)


@pytest.mark.parametrize("grid", [(3, 2), (1, 4)])
def test_runs_that_do_not_fit_take_turns(monkeypatch, grid):
    """A device whose memory holds one run: the others come after it, with the same results."""
    methods, seeds = [fs.FedAvg(gamma=0.01 * (1 + k), H=2) for k in range(grid[0])], list(range(grid[1]))
    plain = [{"u": client["u"][:, :2, 0, 0], "b": client["b"]} for client in map(data.client, range(3))]
    small = fs.FederatedData.from_clients(plain)

    def swept():
        def quadratic(x, sample):  # a new one each time: nothing is compiled yet
            return (sample["u"] @ x - sample["b"]) ** 2

        problem = fs.Minimization(quadratic)
        return fs.sweep(problem, methods, small, np.ones(2), rounds=3, seeds=seeds, progress=False)

    expected = swept()
    smaller, runs = {}, grid[0] * grid[1]

    def free():
        return 2**40 if any(engine.turns >= runs for engine in smaller.values()) else 1

    monkeypatch.setattr("fedstrata.engines.simulated._smaller", smaller)
    monkeypatch.setattr("fedstrata.engines.programs.free_bytes", free)
    monkeypatch.setattr("fedstrata.engines.programs._programs", OrderedDict())
    with pytest.warns(UserWarning, match="Fewer are computed at once"):
        found = swept()
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a.x, b.x, rtol=1e-6)
        np.testing.assert_allclose(a.history["loss"], b.history["loss"], rtol=1e-6)


def test_deterministic_programs_are_others():
    """XLA refuses options that it does not know."""
    usual, same = run(fs.engines.Simulated()), run(fs.engines.Simulated(deterministic=True))
    for name in x0:
        np.testing.assert_array_equal(usual.x[name], same.x[name])
