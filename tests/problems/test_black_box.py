"""A program has values and no derivatives: what needs them is refused before anything is computed."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.support.digest import marked

A = np.arange(6.0).reshape(3, 2)
data = fs.FederatedData.from_clients([{"a": A}, {"a": A + 1}], server={"a": A})
calls = []


def program(x, s):
    calls.append(1)
    return float(((x - s["a"]) ** 2).sum())


box = fs.black_box(program)


def around(x, s):
    return 2 * box(x, s)


def further(factor):
    def f(x, s):
        return factor * around(x, s)

    return f


@dataclass(frozen=True)
class Scaled:
    factor: float
    inner: object

    def __call__(self, x, s):
        return self.factor * self.inner(x, s)


@jax.custom_vjp
def with_derivatives(x, a):
    return box(x, {"a": a})


with_derivatives.defvjp(
    lambda x, a: (with_derivatives(x, a), (x, a)),
    lambda kept, g: (2 * g * (kept[0] - kept[1]), jnp.zeros_like(kept[1])),
)


def smooth(x, s):
    return ((x - s["a"]) ** 2).sum()


@pytest.mark.parametrize(
    "function",
    [
        box,
        around,
        further(3.0),
        Scaled(2.0, box),
        Scaled(2.0, further(1.0)).__call__,
        functools.partial(further(1.0)),
        jax.jit(around),
        fs.per_batch(box),
        lambda x, s: box(x, s) + 1,
        fs.Minimization(box).loss.then(jnp.log),
    ],
)
def test_it_is_found_behind_whatever_is_written_around_it(function):
    assert marked(function, "values_only")
    assert fs.Minimization(function).without_derivatives == ["loss"]


@pytest.mark.parametrize(
    "function", [smooth, jax.jit(smooth), with_derivatives, Scaled(1.0, smooth), jnp.log]
)
def test_what_has_derivatives_is_left_alone(function):
    assert not marked(function, "values_only")


@pytest.mark.parametrize("loss", [box, further(1.0)])
def test_methods_that_differentiate_are_left_out_and_refused(loss):
    problem = fs.Minimization(loss)
    assert set(fs.applicable(problem).names) == {"FedRZO", "FedZO", "DeComFL", "HiSo", "FedKSeed"}
    before = len(calls)
    with pytest.raises(
        TypeError, match=r"FedAvg differentiates loss, which has values only.*: .*FedRZO.*FedZO"
    ):
        fs.solve(problem, fs.FedAvg(0.1), data, np.zeros(2), rounds=1, progress=False)
    assert len(calls) == before
    fs.solve(problem, fs.FedRZO(gamma=1e-3, eta=0.1), data, np.zeros(2), rounds=1, progress=False)


def test_own_derivatives_are_used():
    problem = fs.Minimization(lambda x, s: with_derivatives(x, s["a"]))
    assert "FedAvg" in fs.applicable(problem).names
    found = fs.solve(problem, fs.FedAvg(0.25), data, np.zeros(2), rounds=1, progress=False)
    np.testing.assert_allclose(found.x, 0.5 * np.mean([A.mean(0), A.mean(0) + 1], 0), rtol=1e-6)


def test_each_level_by_itself():
    def two(x, y, s):
        return smooth(x, s) + (y**2).sum()

    program = fs.black_box(lambda x, y, s: 0.0)
    above, below = fs.Bilevel(program, two, same_samples=True), fs.Bilevel(two, program, same_samples=True)
    assert fs.applicable(above).names == ["FedRZOBilevel"]
    assert fs.applicable(below).names == []
    with pytest.raises(TypeError, match=r"differentiates lower.*none for this class"):
        fs.solve(below, fs.FedRZOBilevel(0.1, 0.1), data, A[0], y0=A[0], rounds=1)
    assert fs.applicable(fs.Minimax(program)).names == []
    with pytest.raises(TypeError, match="payoff has only values"):
        fs.as_multisequence(fs.Minimax(program))
    coupled = fs.Personalized(smooth, fs.black_box(lambda x, y: 0.0), two)
    assert fs.applicable(coupled).names == ["ZOHFL"]
    assert fs.applicable(fs.Personalized(box, lambda x, y: 0.0, two)).names == []
    follower = fs.black_box(lambda x, y, s: y, like=lambda x, y, s: y)
    assert fs.applicable(fs.MPEC(program, follower)).names == ["FedRZOTwoStage"]
    maps = fs.black_box(lambda x, Z, s: x, like=lambda x, Z, s: x), [lambda x, z, s: z - x]
    assert "FedMSA" in fs.applicable(fs.MultiSequence(*maps)).names
    selected = fs.Selection(box, lambda x: x @ x)
    assert selected.without_derivatives == ["primary"]
    assert fs.applicable(selected).names == []
