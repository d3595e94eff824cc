"""The two trackers of levels are one rule, on two scales; and the logarithmic one has no overflow."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.problems.levels import ARITHMETIC, LOGARITHMIC, tracker_of

WEIGHTS = np.array([0.1, 0.2, 0.3, 0.4, 0.0])


def values(seed, *shape):
    return np.exp(np.random.default_rng(seed).normal(size=shape))


def as_logs(tree):
    return jax.tree.map(jnp.log, tree)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_the_rules_agree_where_both_can_be_evaluated():
    g, a, b = values(0, 3), 0.5 * values(1, 3), 2 * values(2, 3)
    beta, gamma = 0.3, 1.2
    logs = [jnp.log(v) for v in (g, a, b)]
    same = np.testing.assert_allclose

    stack = values(3, 5, 3)
    mean = LOGARITHMIC.mean(jnp.log(stack).at[4].set(jnp.nan), jnp.asarray(WEIGHTS))
    same(jnp.exp(mean), ARITHMETIC.mean(jnp.asarray(stack), jnp.asarray(WEIGHTS)), rtol=1e-12)

    followed = LOGARITHMIC.follow(beta, logs[0], LOGARITHMIC.change(beta, logs[1], logs[2]))
    same(jnp.exp(followed), (1 - beta) * (g - a) + b, rtol=1e-12)
    same(ARITHMETIC.follow(beta, g, ARITHMETIC.change(beta, a, b)), (1 - beta) * (g - a) + b, rtol=1e-12)

    same(jnp.exp(LOGARITHMIC.blend(beta, logs[0], logs[2])), ARITHMETIC.blend(beta, g, b), rtol=1e-12)
    same(LOGARITHMIC.blend(1.0, logs[0], logs[2]), logs[2], rtol=1e-12)

    stepped = LOGARITHMIC.step(gamma, logs[0], LOGARITHMIC.report(logs[2], logs[1]), 0.01)
    same(jnp.exp(stepped), ARITHMETIC.step(gamma, g, ARITHMETIC.report(b, a), 0.01), rtol=1e-12)
    same(LOGARITHMIC.ratio(logs[0], logs[2]), g / b, rtol=1e-12)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("tracker", [ARITHMETIC, LOGARITHMIC])
@pytest.mark.slow
def test_the_gap_is_zero_in_the_mean_at_the_value_with_slope_minus_one(tracker):
    outs = jnp.log(values(4, 4, 3))
    weights = jnp.asarray(WEIGHTS[:4])
    value = tracker.mean(outs, weights)

    def mean_gap(value):
        return ARITHMETIC.mean(jax.vmap(lambda out: tracker.gap(out, value))(outs), weights)

    np.testing.assert_allclose(mean_gap(value), 0, atol=1e-14)
    np.testing.assert_allclose(jax.jacobian(mean_gap)(value), -np.eye(3), atol=1e-14)
    # so that the derivative of the value by a common shift of the outputs is that of the gap
    shifted = jax.jvp(lambda t: tracker.mean(outs + t, weights), (0.0,), (1.0,))[1]
    gaps = jax.jvp(lambda t: ARITHMETIC.mean(tracker.gap(outs + t, value), weights), (0.0,), (1.0,))[1]
    np.testing.assert_allclose(gaps, shifted, rtol=1e-12)


def test_the_logarithmic_rule_never_overflows():
    far = jnp.float32([1e5, -1e5, 0.0])
    near = jnp.float32([0.0, 0.0, 1e5])
    finite = [
        LOGARITHMIC.mean(jnp.stack([far, near]), jnp.float32([0.5, 0.5])),
        LOGARITHMIC.gap(far, near),
        jax.grad(lambda o: LOGARITHMIC.gap(o, near).sum())(far),
        LOGARITHMIC.follow(0.1, far, (far, near)),
        LOGARITHMIC.follow(0.1, near, (far, near)),
        LOGARITHMIC.follow(0.1, far, (near, near)),
        LOGARITHMIC.blend(0.5, far, near),
        LOGARITHMIC.step(1.4, far, (near, near), 0.1),
        LOGARITHMIC.step(1.4, near, (near, far), 0.1),
        LOGARITHMIC.ratio(far, near),
    ]
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in finite)
    np.testing.assert_allclose(finite[0], np.array([1e5, 0, 1e5]) - np.log(2), rtol=1e-6)


def test_a_followed_value_stays_above_its_floor():
    # (1−β)(g − a) + b is negative here, and β b takes its place
    followed = LOGARITHMIC.follow(0.25, jnp.log(1.0), (jnp.log(100.0), jnp.log(2.0)))
    np.testing.assert_allclose(jnp.exp(followed), 0.5, rtol=1e-6)


@pytest.mark.usefixtures("x64")
def test_measures_log_mean_exp_over_unequal_clients():
    rng = np.random.default_rng(5)
    clients = [{"a": 1e3 * rng.normal(size=n)} for n in (3, 5)]
    problem = fs.Composition([fs.LogMeanExp(lambda x, s: x * s["a"]), lambda u: 0.1 * u])
    assert tracker_of(problem.levels[0]) is LOGARITHMIC
    data = fs.FederatedData.from_clients(clients)
    result = fs.solve(problem, fs.MBSGD(1e-9), data, 2.0, rounds=0, progress=False)
    exponents = [2 * c["a"] for c in clients]
    top = max(e.max() for e in exponents)
    exact = 0.1 * (top + np.log(np.mean([np.exp(e - top).mean() for e in exponents])))
    np.testing.assert_allclose(result.history["objective"][0], exact, rtol=1e-12)


def test_refuses_what_has_no_samples():
    with pytest.raises(TypeError, match="function of"):
        fs.LogMeanExp(3.0)
    with pytest.raises(TypeError, match="per_batch"):
        fs.LogMeanExp(fs.per_batch(lambda x, batch: x))


def test_log_mean_exp_may_be_the_outermost_level():
    """A full-batch step from 0 along ∇ log E exp(aᵀx) = E a, of clients of unequal means."""
    a = np.arange(12.0, dtype=np.float32).reshape(3, 2, 2)
    data = fs.FederatedData.from_clients([{"a": client} for client in a])
    problem = fs.Composition([fs.LogMeanExp(lambda x, s: s["a"] @ x)])
    assert len(problem.levels) == len(replace(problem).levels) == 2
    run = {"rounds": 1, "progress": False, "default_metrics": False}
    found = fs.solve(problem, fs.FedDRO(0.1, 1.0), data, np.zeros(2, np.float32), **run)
    np.testing.assert_allclose(found.x, -0.1 * a.mean((0, 1)), rtol=1e-6)
