"""Methods whose clients have models of their own, against closed forms: f_i(x) = ½ q_i ‖x − a_i‖²."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs

pytestmark = [pytest.mark.usefixtures("x64"), pytest.mark.slow]  # rows of methods fail as well

RNG = np.random.default_rng(0)
Q = np.array([0.5, 1.0, 2.0])
A = RNG.normal(size=(3, 2))
X0 = np.array([0.3, -0.2])


def loss(x, s):
    return 0.5 * s["q"] * ((x - s["a"]) ** 2).sum()


problem = fs.Minimization(loss)
data = fs.FederatedData.from_clients(
    [{"q": np.full(n, q), "a": np.repeat(a[None], n, 0)} for n, q, a in zip((2, 1, 3), Q, A, strict=True)]
)


def solve(method, rounds=600, problem=problem, **more):
    more = {"eval_every": rounds, "progress": False, **more}
    return fs.solve(problem, method, data, X0, rounds=rounds, **more)


def mean(weights):
    """The minimiser of Σ w_i/2 ‖x − a_i‖²."""
    return weights @ A / weights.sum()


def test_ditto_draws_the_clients_models_to_the_common_one():
    result = solve(fs.Ditto(0.2, 0.2, lam=0.7))
    np.testing.assert_allclose(result.x, mean(Q), rtol=1e-9)
    own = (Q[:, None] * A + 0.7 * mean(Q)) / (Q[:, None] + 0.7)
    np.testing.assert_allclose(result.y, own, rtol=1e-9)
    expected = (0.5 * Q * ((own - A) ** 2).sum(1)).mean()
    assert result.history["personal"][-1] == pytest.approx(expected, rel=1e-8)
    assert fs.certify(result).solved
    assert fs.diagnose(result).stationarity < 1e-8


def test_ditto_at_both_ends():
    alone = solve(fs.Ditto(0.2, 0.2, lam=0.0, s=3)).y
    np.testing.assert_allclose(alone, A, atol=1e-9)
    together = solve(fs.Ditto(0.2, 1e-4, lam=1e4), rounds=2000)
    np.testing.assert_allclose(together.y, np.broadcast_to(together.x, (3, 2)), atol=1e-3)
    fedavg = solve(fs.FedAvg(0.2, H=3), rounds=4)
    np.testing.assert_allclose(solve(fs.Ditto(0.2, 0.2, H=3), rounds=4).x, fedavg.x, rtol=1e-12)


def test_dittos_models_stay_in_the_set():
    ball = fs.Minimization(loss, project=fs.sets.Ball(0.2))
    result = solve(fs.Ditto(0.1, 0.1, lam=0.5), problem=ball)
    unit = mean(Q) / np.linalg.norm(mean(Q))
    np.testing.assert_allclose(result.x, 0.2 * unit, atol=1e-8)
    free = (Q[:, None] * A + 0.5 * result.x) / (Q[:, None] + 0.5)
    nearest = free * np.minimum(1, 0.2 / np.linalg.norm(free, axis=1))[:, None]
    np.testing.assert_allclose(result.y, nearest, atol=1e-8)


def test_pfedme_minimises_the_envelopes():
    """Their curvatures are λ q_i/(q_i + λ), and y_i = (q_i a_i + λ x)/(q_i + λ)."""
    lam = 0.8
    result = solve(fs.PFedMe(0.5, 0.3, lam=lam, K=30))
    x = mean(lam * Q / (Q + lam))
    np.testing.assert_allclose(result.x, x, rtol=1e-8)
    own = (Q[:, None] * A + lam * x) / (Q[:, None] + lam)
    np.testing.assert_allclose(result.y, own, rtol=1e-8)
    expected = (0.5 * lam * Q / (Q + lam) * ((x - A) ** 2).sum(1)).mean()
    assert result.history["objective"][-1] == pytest.approx(expected, rel=1e-9)
    assert fs.certify(result).solved
    found = fs.diagnose(result)
    assert found.objective == pytest.approx(expected, rel=1e-9)
    assert found.lower_residual < 1e-8
    assert not fs.certify(solve(fs.PFedMe(0.5, 0.3, lam=lam, K=30), rounds=1)).solved


def test_pfedme_with_a_large_lambda_is_fedavgs_problem():
    result = solve(fs.PFedMe(2e-3, 9e-4, lam=1e3, K=60), rounds=2000)
    np.testing.assert_allclose(result.x, mean(Q), atol=5e-3)


@pytest.mark.parametrize("order", ["first", "second"])
def test_per_fedavg_in_closed_form(order):
    """∇f_i(x − α∇f_i(x)) = q_i (1 − α q_i)(x − a_i), and once more 1 − α q_i with the Hessian."""
    alpha = 0.3
    result = solve(fs.PerFedAvg(0.3, alpha, order=order))
    left = 1 - alpha * Q
    x = mean(Q * left ** (2 if order == "second" else 1))
    np.testing.assert_allclose(result.x, x, rtol=1e-9)
    np.testing.assert_allclose(result.y, x - alpha * Q[:, None] * (x - A), rtol=1e-9)
    expected = (0.5 * Q * left**2 * ((x - A) ** 2).sum(1)).mean()
    assert result.history["objective"][-1] == pytest.approx(expected, rel=1e-9)
    assert fs.certify(result).solved == (order == "second")


def test_per_fedavg_of_second_order_is_gradient_descent_on_its_objective():
    """One round on a loss that is not quadratic, by JAX's own gradient of the adapted losses."""
    steep = fs.Minimization(lambda x, s: jnp.log(jnp.cosh(x - s["a"])).sum() * s["q"])

    def adapted(x, i):
        def f(x):
            return jnp.log(jnp.cosh(x - A[i])).sum() * Q[i]

        return f(x - 0.2 * jax.grad(f)(x))

    slope = np.mean([jax.grad(adapted)(X0, i) for i in range(3)], axis=0)
    result = solve(fs.PerFedAvg(0.1, 0.2, order="second"), rounds=1, problem=steep)
    np.testing.assert_allclose(result.x, X0 - 0.1 * slope, rtol=1e-12)
    no_step = solve(fs.PerFedAvg(0.1, 0.0, H=2), rounds=3).x
    np.testing.assert_allclose(no_step, solve(fs.FedAvg(0.1, H=2), rounds=3).x, rtol=1e-12)


def test_apfl_by_hand():
    """Two local steps; the weight adapts in the first, with the gradient at the mixture before it."""
    result = solve(fs.APFL(0.1, 0.4, adaptive=True, H=2), rounds=1)
    ends, mixtures = [], []
    for q, a in zip(Q, A, strict=True):
        z, v, alpha = X0, X0, 0.4
        for t in range(2):
            g = q * (alpha * v + (1 - alpha) * z - a)
            z, v, old = z - 0.1 * q * (z - a), v - 0.1 * alpha * g, (z, v)
            if t == 0:
                alpha = np.clip(alpha - 0.1 * (old[1] - old[0]) @ g, 0, 1)
        ends.append(z)
        mixtures.append(alpha * v + (1 - alpha) * z)
    np.testing.assert_allclose(result.x, np.mean(ends, axis=0), rtol=1e-12)
    np.testing.assert_allclose(result.y, mixtures, rtol=1e-12)


def test_apfl_ends_at_the_clients_own_minimisers_and_without_a_part_of_their_own_at_fedavgs():
    result = solve(fs.APFL(0.2, 0.5), rounds=1500)
    np.testing.assert_allclose(result.x, mean(Q), rtol=1e-9)
    # y_i is the mixture with the client's own z = x − γ q (x − a), after line 3
    np.testing.assert_allclose(result.y, A - 0.5 * 0.2 * Q[:, None] * (result.x - A), atol=1e-6)
    nothing = solve(fs.APFL(0.2, 0.0, H=2), rounds=5)
    np.testing.assert_allclose(nothing.x, solve(fs.FedAvg(0.2, H=2), rounds=5).x, rtol=1e-12)


def test_sets_are_refused_where_there_is_no_rule_for_them():
    ball = fs.Minimization(loss, project=fs.sets.Ball(0.2))
    for cls in (fs.PFedMe, fs.PerFedAvg, fs.APFL):
        assert "does not take a set" in cls.refuses(ball)
    assert fs.Ditto.refuses(ball) is None


def test_a_metric_of_every_client_sees_its_own_model():
    own = fs.per_client(lambda x, y, s: loss(y, s), each=True)
    result = solve(fs.Ditto(0.2, 0.2, lam=0.0, s=3), metrics={"own": own})
    assert result.history["own/worst"][-1] < 1e-12
    assert result.history["loss"][-1] > 0.1


def test_idle_clients_keep_their_models():
    result = solve(fs.Ditto(0.2, 0.2, lam=0.0, H=np.array([0, 1, 1])))
    np.testing.assert_array_equal(result.y[0], X0)
    np.testing.assert_allclose(result.y[1:], A[1:], atol=1e-9)


# Heads on a common representation


def joint(x, y, s):
    """min over y of ½ q ‖x + y − a‖² + ½ ‖y‖²: y_i = q (a − x)/(q + 1), with curvature q/(q + 1) in x."""
    return 0.5 * s["q"] * ((x + y - s["a"]) ** 2).sum() + 0.5 * (y**2).sum()


heads = fs.Bilevel(joint, joint, same_samples=True, local=True)


def test_fedrep_minimises_over_both():
    result = solve(fs.FedRep(0.4, 0.3, tau=5), problem=heads, y0=np.zeros(2))
    x = mean(Q / (Q + 1))
    np.testing.assert_allclose(result.x, x, rtol=1e-8)
    np.testing.assert_allclose(result.y, Q[:, None] * (A - x) / (Q[:, None] + 1), rtol=1e-8)
    assert fs.certify(result).solved
    found = fs.diagnose(result, x0=X0)
    assert found.hypergradient_norm < 1e-8
    assert found.lower_distance < 1e-8


def test_fedrep_refuses_what_is_another_problem():
    other = dataclasses.replace(heads, upper=loss)
    assert "the same function in x and y" in fs.FedRep.refuses(other)
    assert "the clients' own heads" in fs.FedRep.refuses(dataclasses.replace(heads, local=False))


def test_methods_that_share_y_are_not_given_a_local_problem():
    names = fs.applicable(heads).names
    assert "FedRep" in names
    shared = {n for n, m in fs.METHODS.items() if fs.Bilevel in m.solves and not m.local}
    assert {"FedMSA", "FedNest", "SimFBO", "FedRZOBilevel"} <= shared
    assert not shared & set(names)
    with pytest.raises(ValueError, match="averages what belongs to each client"):
        solve(fs.FedMSA(0.1, 0.1), rounds=1, problem=heads, y0=np.zeros(2))
    with pytest.raises(ValueError, match="local=True"):
        fs.as_multisequence(heads)


def test_zohfl_solves_a_local_bilevel_problem():
    """f_i(x, y_i(x)) with y_i = (q a_i + x)/(q + 1): quadratic, so that differences are exact slopes."""
    local = fs.Bilevel(
        lambda x, y, s: 0.5 * ((y - s["a"]) ** 2).sum() + 0.1 * (x**2).sum(),
        lambda x, y, s: loss(y, s) + 0.5 * ((y - x) ** 2).sum(),
        same_samples=True,
        local=True,
    )
    basis = {"directions": 2, "orthogonal": True}
    method = fs.ZOHFL(1.0, 0.1, H=60, gamma_client=0.3 * 1e6, Gamma=1e6, **basis)
    result = solve(method, 300, local, y0=np.zeros(2))
    # y_i − a_i = (x − a_i)/(q + 1), whose square bends by 1/(q + 1)² in x
    bend = 1 / (Q + 1) ** 2
    x = bend @ A / (bend.sum() + 3 * 0.2)
    np.testing.assert_allclose(result.x, x, rtol=1e-6)
    np.testing.assert_allclose(result.y, (Q[:, None] * A + x) / (Q[:, None] + 1), rtol=1e-6)
    assert fs.diagnose(result).hypergradient_norm < 1e-6
    assert "local=True" in fs.ZOHFL.refuses(dataclasses.replace(local, local=False))
