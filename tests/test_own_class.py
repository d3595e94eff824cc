"""A problem class from outside of the project, which says its levels: everything else follows from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

import fedstrata as fs
from fedstrata.core import tree
from fedstrata.core.fed import Remember
from fedstrata.core.method import METHODS, Method, Positive, method
from fedstrata.core.problem import Level, Problem, Projection
from fedstrata.estimators.gradients import gradients
from fedstrata.estimators.hypergradient import curvature

A, C = np.array([1.0, 3.0, 2.0]), np.array([0.5, 2.0, 1.0])
DATA = fs.FederatedData.from_clients(
    [{"a": np.full(n, a), "c": np.full(n, c)} for n, a, c in zip((2, 3, 4), A, C, strict=True)]
)


@dataclass(frozen=True)
class OwnFits(Problem):
    """min_x 1/m Σ f_i(x, y_i(x)),  y_i(x) = argmin_{Y} h_i(x, y): every client fits its own y to x."""

    f: Callable[..., Any]
    h: Callable[..., Any]
    project_y: Any = None
    personal = True

    @property
    def levels(self):
        f = Level.named("f", self.f, "x", "xy")
        return f, Level.named("h", self.h, "y", "xy", self.project_y, solved_by="client")


class State(NamedTuple):
    x: Any


@pytest.fixture
def fitting():
    @method
    class Fitting(Method[OwnFits, State]):
        """A step of y at each client, whose curvature is 1, then one of x along the hypergradient."""

        gamma: Positive
        solves = (OwnFits,)

        def init(self, problem, x0, y0):
            return State(x0)

        def memory(self, problem, x0, y0):
            return y0

        def fit(self, problem, client, key, x):
            f, h = (client.train.full_mean(level) for level in problem.levels)
            y = client.memory
            y = tree.sub(y, gradients(h, x, y)[1])
            by_x, v = gradients(f, x, y)
            return Remember(tree.sub(by_x, curvature(h, x, y, v).mixed), y)

        def round(self, problem, fed, key, r, state):
            return State(tree.axpy(-self.gamma, fed.average(self.fit, key, state.x), state.x))

        def output(self, state, memory):
            return state.x, memory

    yield Fitting
    del METHODS["Fitting"]


def f(x, y, s):
    return 0.5 * (y - s["a"]) ** 2


def h(x, y, s):
    return 0.5 * (y - s["c"] * x) ** 2


BEST = (A * C).mean() / (C * C).mean()  # y_i(x) = c_i x


def test_it_is_solved_measured_and_judged(fitting):
    problem = OwnFits(f, h)
    result = fs.solve(problem, fitting(0.3), DATA, 0.0, y0=0.0, rounds=60, progress=False)
    assert result.x == pytest.approx(BEST, rel=1e-5)
    np.testing.assert_allclose(result.y, C * BEST, rtol=1e-5)
    assert result.history["f"][-1] == pytest.approx(0.5 * ((C * BEST - A) ** 2).mean(), rel=1e-5)
    assert result.history["h"][-1] == pytest.approx(0, abs=1e-9)
    assert result.certificate.solved
    found = fs.diagnose(result)
    assert found.solved
    np.testing.assert_allclose(found.y, C * float(result.x), rtol=1e-6)
    there = fs.certify(problem, DATA, np.array(BEST + 0.5), C * BEST)
    assert not there.solved
    assert there.interval[0] <= 0.5 * (C**2).mean() * 0.25 <= there.interval[1] * (1 + 1e-6)


def test_methods_and_constants_are_found(fitting):
    problem = OwnFits(f, h)
    assert fs.applicable(problem).names == ["Fitting"]
    lower = fs.constants(problem, DATA, np.array(0.0), np.zeros(3)).levels["h"]
    assert (lower.L, lower.mu) == pytest.approx((1, 1))


def test_its_mistakes_are_named(fitting):
    run = {"rounds": 0, "progress": False}
    with pytest.raises(ValueError, match=r"OwnFits has two variables: give the start"):
        fs.solve(OwnFits(f, h), fitting(0.3), DATA, 0.0, **run)
    with pytest.raises(TypeError, match=r"h\(x, y, sample\) must return one real number"):
        fs.solve(OwnFits(f, lambda x, y, s: s), fitting(0.3), DATA, 0.0, y0=0.0, **run)
    with pytest.raises(TypeError, match=r"FedAvg solves Minimization, not OwnFits.*Fitting"):
        fs.solve(OwnFits(f, h), fs.FedAvg(0.1), DATA, 0.0, y0=0.0, **run)


def test_a_y_of_each_client_needs_a_class_that_says_so(fitting):
    """A method with a local lower level, for a problem whose clients share one y."""
    fitting.solves = (fs.Bilevel,)
    problem = fs.Bilevel(f, h, same_samples=True)
    with pytest.raises(TypeError, match=r"Fitting gives every client its own y, .*local=True"):
        fs.solve(problem, fitting(0.3), DATA, 0.0, y0=0.0, rounds=1, progress=False)

    local = fs.Bilevel(f, h, same_samples=True, local=True)
    fitting.local = True
    result = fs.solve(local, fitting(0.3), DATA, 0.0, y0=0.0, rounds=60, progress=False)
    assert result.certificate.solved
    assert result.history["upper"][-1] == pytest.approx(0.5 * ((C * BEST - A) ** 2).mean(), rel=1e-5)


def test_what_cannot_be_said_is_told():
    @dataclass(frozen=True)
    class Silent(Problem):
        target: float

    words = fs.certify(Silent(2.0), DATA, np.array(2.0)).advice
    assert "Silent, which does not say its levels" in words
    assert not fs.applicable(Silent(2.0)).names
    assert fs.constants(Silent(2.0), DATA, np.array(2.0)).levels == {}
    assert Projection().trivial
