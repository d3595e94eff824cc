"""q-FedAvg and DRFA: the clients' losses weighed by their size, in closed form."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

import fedstrata as fs

pytestmark = [pytest.mark.usefixtures("x64"), pytest.mark.slow]  # rows of methods fail as well


def loss(x, s):
    return 0.5 * (x - s["b"]) ** 2


B = np.array([0.0, 1.0, 3.0])
problem = fs.Minimization(loss)
data = fs.FederatedData.from_clients([{"b": np.full(n, b)} for n, b in zip((2, 3, 2), B, strict=True)])


def solve(method, rounds, **more):
    more = {"eval_every": rounds, "progress": False, **more}
    return fs.solve(problem, method, data, np.zeros(()), rounds=rounds, **more)


def test_qfedavg_with_q_zero_is_fedavg():
    found, same = (solve(m, 5).x for m in (fs.QFedAvg(0.1, 0.0, H=3), fs.FedAvg(0.1, H=3)))
    np.testing.assert_allclose(found, same, rtol=1e-8)


@pytest.mark.parametrize("q", [1.0, 5.0])
def test_qfedavg_minimises_the_mean_of_powers(q):
    result = solve(fs.QFedAvg(0.2, q), 400)
    exact = minimize_scalar(
        lambda x: ((0.5 * (x - B) ** 2) ** (q + 1)).mean(), bracket=(0, 3), options={"xtol": 1e-12}
    )
    assert float(result.x) == pytest.approx(exact.x, abs=1e-6)
    assert result.history["objective"][-1] == pytest.approx(exact.fun / (q + 1), rel=1e-9)
    assert result.history["loss"][-1] == pytest.approx(loss(exact.x, {"b": B}).mean(), rel=1e-5)
    assert fs.certify(result).solved
    assert fs.diagnose(result).stationarity < 1e-6
    assert not fs.certify(solve(fs.QFedAvg(0.2, q), 1)).solved


def test_a_round_of_qfedavg_by_hand():
    """With weights of the clients' sizes, from x = ½ where client 0 has the loss ⅛."""
    result = fs.solve(
        problem, fs.QFedAvg(0.1, 2.0, H=2), data, np.array(0.5), rounds=1, weights="size", progress=False
    )
    z = 0.5
    ends = B + 0.9**2 * (z - B)
    F, delta = 0.5 * (z - B) ** 2, (z - ends) / 0.1
    h = 2 * F * delta**2 + F**2 / 0.1
    n = np.array([2, 3, 2])
    assert float(result.x) == pytest.approx(z - (n @ (F**2 * delta)) / (n @ h), rel=1e-8)


def test_qfedavg_refuses_sets_of_the_clients_own():
    own = fs.Minimization(loss, project=lambda x, client: x)
    with pytest.raises(ValueError, match="cannot use a client-dependent"):
        fs.solve(own, fs.QFedAvg(0.1), data, 0.0, rounds=1)


def test_drfa_with_one_step_takes_the_losses_after_it():
    """t' = 1 is the end of the only step: λ ← P_Δ(λ + η_λ f(x¹)), where AFL takes f(x⁰)."""
    result = solve(fs.DRFA(0.1, 0.05), 1)
    x = 0.1 * 4 / 3
    assert float(result.x) == pytest.approx(x, rel=1e-12)
    raised = np.full(3, 1 / 3) + 0.05 * 0.5 * (x - B) ** 2
    np.testing.assert_allclose(result.y, raised - (raised.sum() - 1) / 3, rtol=1e-12)


def test_drfa_keeps_a_point_of_its_way():
    """τ = 4 steps from 0: x' is one of the means after 1 … 4 steps, and each is drawn in some seed."""
    seen = set()
    ways = [(B * (1 - 0.9**t)).mean() for t in range(1, 5)]
    expected = []
    for x in ways:
        raised = np.full(3, 1 / 3) + 0.01 * 4 * 0.5 * (x - B) ** 2
        expected.append(raised - (raised.sum() - 1) / 3)
    for seed in range(12):
        y = np.asarray(solve(fs.DRFA(0.1, 0.01, tau=4), 1, seed=seed).y)
        near = [k for k, e in enumerate(expected) if np.allclose(y, e, rtol=1e-10)]
        assert len(near) == 1
        seen.update(near)
    assert len(seen) >= 3


@pytest.mark.parametrize("participation", [1.0, 2])
def test_drfa_finds_the_worst_mixture(participation):
    """max of (x − b_i)²/2 over b ∈ {0, 1, 3} is least at 1.5, where the two ends share the weight."""

    def falling(r):
        return 0.5 / (r + 10) ** 0.5

    result = solve(fs.DRFA(falling, falling, tau=2), 6000, participation=participation)
    tolerance = 0.01 if participation == 1.0 else 0.2
    assert float(result.x) == pytest.approx(1.5, abs=tolerance)
    assert fs.diagnose(result).saddle
