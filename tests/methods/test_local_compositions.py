"""1/m Σ f_i(g_i(x)) with means of each client's own: FCSG-M, Acc-FCSG-M and Local-SCGDM."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs

pytestmark = pytest.mark.usefixtures("x64")

RNG = np.random.default_rng(0)
C = RNG.normal(size=(3, 4)) + 2 * np.arange(3)[:, None]  # four samples of three clients
B = np.array([0.5, -1.0, 2.0])
data = fs.FederatedData.from_clients([{"c": c, "b": np.full(4, b)} for c, b in zip(C, B, strict=True)])
# g_i(x) = x − c̄_i, f_i(u) = ½ w_i u² − b_i u, w_i = 1 + i² of a client's own
problem = fs.Composition(
    [lambda x, s: x - s["c"], lambda u, s: 0.5 * (1 + s["b"] ** 2) * u**2 - s["b"] * u], local=True
)
W, MEAN = 1 + B**2, C.mean(1)
X = (W @ MEAN + B.sum()) / W.sum()


def solve(method, rounds=300, problem=problem, **more):
    more = {"eval_every": rounds, "progress": False, **more}
    return fs.solve(problem, method, data, 0.3, rounds=rounds, **more)


@pytest.mark.parametrize("accelerated", [False, True])
def test_the_limit_is_that_of_the_clients_compositions(accelerated):
    result = solve(fs.FCSGM(0.2, 0.5, accelerated=accelerated))
    assert float(result.x) == pytest.approx(X, rel=1e-9)
    expected = (0.5 * W * (X - MEAN) ** 2 - B * (X - MEAN)).mean()
    assert result.history["objective"][-1] == pytest.approx(expected, rel=1e-9)
    assert fs.certify(result).solved
    assert fs.diagnose(result).stationarity < 1e-8


def test_a_shared_inner_value_would_be_another_problem():
    """f(mean g_i) has its minimum elsewhere, and its methods refuse this problem."""
    shared = fs.Composition(problem.levels, local=False)
    other = fs.solve(shared, fs.FedMSA(0.1, 0.5), data, 0.3, rounds=300, eval_every=300, progress=False)
    assert float(other.x) == pytest.approx(MEAN.mean() + B.sum() / W.sum(), rel=1e-6)
    assert abs(float(other.x) - X) > 0.1
    assert {"FCSGM", "LocalSCGDM"} <= set(fs.applicable(problem).names)
    assert "FedDRO" not in fs.applicable(problem).names
    assert "local=True" in fs.FCSGM.refuses(shared)


def test_three_levels_and_a_plain_term_by_jaxs_own_gradient():
    deep = fs.Composition(
        [lambda x, s: jnp.sin(x) * s["c"], lambda z: jnp.stack([z, z**2]), lambda z, s: z[0] * s["b"] + z[1]],
        plain=lambda x, s: 0.1 * (x - s["c"]) ** 2,
        local=True,
    )

    def own(x, i):
        z = jnp.sin(x) * MEAN[i]
        return z * B[i] + z**2 + 0.1 * ((x - C[i]) ** 2).mean()

    slope = np.mean([jax.grad(own)(0.3, i) for i in range(3)])
    result = solve(fs.FCSGM(0.01), 1, deep)
    assert float(result.x) == pytest.approx(0.3 - 0.01 * slope, rel=1e-12)
    assert result.history["objective"][0] == pytest.approx(
        np.mean([own(0.3, i) for i in range(3)]), rel=1e-12
    )


def test_a_whole_inner_value_is_fcsg():
    same = solve(fs.FCSGM(0.1, 0.6, I=3), 4)
    assert float(solve(fs.LocalSCGDM(0.1, 1.0, 0.6, I=3), 4).x) == pytest.approx(float(same.x), rel=1e-12)


@pytest.mark.parametrize("beta", [0.5, 0.9])
def test_averaging_the_inner_values_moves_the_limit(beta):
    """At the limit u_i = (1 − β) ū + β g_i with ū = ḡ, the clients' mean."""
    # Σ w_i ((1 − β)(x − c̄) + β (x − c_i)) = Σ b_i
    x = (W.sum() * (1 - beta) * MEAN.mean() + beta * W @ MEAN + B.sum()) / W.sum()
    assert float(solve(fs.LocalSCGDM(0.2, beta)).x) == pytest.approx(x, rel=1e-9)


def test_acceleration_by_hand():
    """Two local steps in the second round: the second estimate is corrected at the point before."""
    result = solve(fs.FCSGM(0.05, 0.4, I=2, accelerated=True), 2)
    x, d = 0.3, np.zeros(3)
    for r in range(2):
        ends, directions = [], []
        for i in range(3):
            own, way, before = x, d[i] if r == 0 else d, x
            for t in range(2):
                p, old = (W[i] * (at - MEAN[i]) - B[i] for at in (own, before))
                way = p if r + t == 0 else p + 0.6 * (way - old)
                own, before = own - 0.05 * way, own
            ends.append(own)
            directions.append(way)
        x, d = np.mean(ends), np.mean(directions)
    assert float(result.x) == pytest.approx(x, rel=1e-12)


def test_few_inner_samples_are_biased_only_where_f_bends():
    """Linear f_i: minibatches of one leave the mean right; the spread is that of the steps alone."""
    linear = fs.Composition([lambda x, s: x - s["c"], lambda u, s: s["b"] * u], local=True)
    more = {"batch_size": 1, "inner_batch_size": 1}
    exact = solve(fs.FCSGM(0.1), 1, linear).x
    assert float(solve(fs.FCSGM(0.1, **more), 1, linear).x) == pytest.approx(float(exact), rel=1e-12)
