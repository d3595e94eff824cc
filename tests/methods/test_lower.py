"""FedAC and LFD by themselves, and as solvers of a lower level at several points."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.core import counting
from fedstrata.methods._shared.lower import TUNED, RuleInput, estimate_constants

rng = np.random.default_rng(0)
H = np.diag(np.geomspace(0.01, 1.0, 6))  # κ = 100
B = rng.normal(size=(4, 6))
data = fs.FederatedData.from_clients([{"b": b[None]} for b in B])
problem = fs.Minimization(lambda x, s: x @ jnp.asarray(H) @ x / 2 - s["b"] @ x)
x_star = np.linalg.solve(H, B.mean(0))


@pytest.fixture(autouse=True)
def _double(x64):
    pass


def error(method, rounds, problem=problem, data=data):
    result = fs.solve(problem, method, data, np.zeros(6), rounds=rounds, eval_every=rounds, progress=False)
    return np.linalg.norm(result.x - x_star) / np.linalg.norm(x_star)


@pytest.mark.parametrize("variant", ["I", "II"])
def test_fedac_accelerates(variant):
    """200 steps at κ = 100: 0.99²⁰⁰ = 0.13 for gradient descent, about 0.9²⁰⁰ = 7e−10 with acceleration."""
    assert error(fs.FedAvg(1.0), 200) > 0.05
    assert error(fs.FedAC(1.0, 0.01, variant=variant), 200) < 1e-4


@pytest.mark.parametrize(("variant", "K"), [("I", 1), ("II", 1), ("I", 3)])
def test_fedac_by_hand(variant, K):
    """One client, so the averages are no averages: the paper's recursion."""
    eta, mu = 0.5, 0.01
    one = fs.FederatedData.from_clients([{"b": B[:1]}])
    result = fs.solve(
        problem, fs.FedAC(eta, mu, K=K, variant=variant), one, np.ones(6), rounds=4, progress=False
    )
    gamma = max(eta, np.sqrt(eta / (mu * K)))
    alpha = 1 / (gamma * mu) if variant == "I" else 3 / (2 * gamma * mu) - 0.5
    beta = alpha + 1 if variant == "I" else (2 * alpha**2 - 1) / (alpha - 1)
    w = w_ag = np.ones(6)
    for _ in range(4 * K):
        w_md = w / beta + (1 - 1 / beta) * w_ag
        g = H @ w_md - B[0]
        w_ag = w_md - eta * g
        w = (1 - 1 / alpha) * w + w_md / alpha - gamma * g
    np.testing.assert_allclose(result.x, w_ag, rtol=1e-12)


@pytest.mark.parametrize("method", [fs.FedAC(1.0, 0.01), fs.LFD(1.0)])
def test_in_a_set(method):
    """For a diagonal Hessian the solution over a box is the clipped minimiser, however the clients differ."""
    boxed = fs.Minimization(problem.loss, project=fs.sets.Box(-0.2, 0.3))
    result = fs.solve(boxed, method, data, np.zeros(6), rounds=400, eval_every=400, progress=False)
    np.testing.assert_allclose(result.x, np.clip(x_star, -0.2, 0.3), atol=1e-10)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* ended outside of clients. own sets:UserWarning")  # as it should
def test_sets_of_clients():
    """With a set of its own each client uploads a point of it."""
    own = fs.Minimization(problem.loss, project=lambda x, client: jnp.clip(x, -0.1 * client.index, 0.1))
    for method in (fs.FedAC(1.0, 0.01, K=2), fs.LFD(1.0, tau=2)):
        x = fs.solve(own, method, data, np.zeros(6), rounds=30, progress=False).x
        assert (x <= 0.1).all()
        assert (x >= -0.15 - 1e-12).all()  # the mean of −0, −0.1, −0.2, −0.3
        assert x.min() < -0.1


def test_lfd_with_all_devices_is_fedavg():
    kwargs = {"rounds": 5, "progress": False}
    lfd = fs.solve(problem, fs.LFD(0.3, tau=4), data, np.ones(6), **kwargs)
    fedavg = fs.solve(problem, fs.FedAvg(0.3, H=4), data, np.ones(6), **kwargs)
    np.testing.assert_allclose(lfd.x, fedavg.x, rtol=1e-12)


def test_lfd_samples_devices():
    """Two of four devices; the paper's decreasing steps make the error of sampling vanish."""
    curved = fs.Minimization(lambda x, s: x @ x / 2 - s["b"] @ x)
    method = fs.LFD(lambda r: 4 / (20 + 2 * r), tau=2, devices=2)
    result = fs.solve(curved, method, data, np.zeros(6), rounds=4000, eval_every=4000, progress=False)
    # the noise of one draw is about the spread of B; after t steps with 4/t it has been divided by about √t
    assert np.linalg.norm(result.x - B.mean(0)) < 5 * np.linalg.norm(B.std(0)) / np.sqrt(4000)
    assert result.ledger.floats_up == 4000 * 2 * 6
    with pytest.raises(ValueError, match="devices=5"):
        fs.solve(curved, fs.LFD(0.1, devices=5), data, np.zeros(6), rounds=1, progress=False)


def test_variant_is_checked():
    with pytest.raises(ValueError, match="'I' or 'II'"):
        fs.solve(problem, fs.FedAC(1.0, 0.1, variant="III"), data, np.zeros(6), rounds=1, progress=False)


@pytest.mark.parametrize("name", TUNED)
def test_rules_do_the_steps_they_say(name):
    """Rounds times local steps is T = 2 a ln a, rounded up, with the papers' number of exchanges."""
    for m, r in ((10, 0), (10, 500), (100, 3)):
        a = max(m, 40, r) + 1
        T = 2 * a * np.log(a)
        if name == "lfd":
            a = max(m, 40) + 1
            T = 2 * a * np.log(a) * (1 + (r + 1) ** (2 / 3) / m)
        rounds, values = TUNED[name].tune(RuleInput(m, r, 0.1, 10.0))
        local = "K" if name == "fedac" else "tau"
        steps = int(values(0)[local])
        assert T <= int(rounds) * steps < T + steps
        exchanges = {"local_sgd": m, "fedac": m ** (1 / 3), "lfd": (m * T) ** (1 / 3)}[name]
        assert int(rounds) <= np.ceil(exchanges)
        assert steps <= np.ceil(T / exchanges)
        size = values(0)["eta" if name == "fedac" else "gamma"]
        assert size <= 1.0 + 1e-12  # 1/L_h = 1/(κ_h μ_h)
    assert TUNED["lfd"].tune(RuleInput(10, 0, 0.1, 10.0)).values(5)["gamma"] < 4 / (0.1 * 41)


def test_exchanges_of_lfd_grow_as_in_table_2():
    """r^{2/9} in round r, so that all together grow with the exponent 11/9 in the rounds, 11/12 in mK."""
    r = np.logspace(4, 8, 9)
    rounds = [float(TUNED["lfd"].tune(RuleInput(10, jnp.asarray(int(i)), 0.1, 10.0)).rounds) for i in r]
    assert np.polyfit(np.log(r), np.log(rounds), 1)[0] == pytest.approx(2 / 9, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", TUNED)
def test_rules_divide_their_steps_among_the_exchanges_asked_for(name):
    T = 2 * 41 * np.log(41) * (1.1 if name == "lfd" else 1)
    local = "K" if name == "fedac" else "tau"
    for exchanges in (1, 7, 50, 1000):
        rounds, values = TUNED[name].tune(RuleInput(10, 0, 0.1, 10.0, exchanges))
        assert rounds == exchanges
        assert int(values(0)[local]) == np.ceil(T / exchanges)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_constants_are_estimated(scale):
    """From a Hessian with known eigenvalues; at most 50 is found for L/μ, of which κ_h is twice."""
    for spectrum in ([1.0, 2.0, 4.0], [3.0, 3.0, 3.0], [1e-4, 0.5, 1.0]):
        hessian = jnp.diag(scale * jnp.asarray(spectrum))
        mu, kappa = estimate_constants(
            lambda v, h=hessian: v @ h, counting.repeat, jax.random.key(0), jnp.zeros((1, 3))
        )
        low, high = scale * max(min(spectrum), max(spectrum) / 50), scale * max(spectrum)
        np.testing.assert_allclose(mu, low, rtol=1e-2)
        np.testing.assert_allclose(kappa, 2 * high / low, rtol=1e-2)
    flat = estimate_constants(lambda v: 0 * v, counting.repeat, jax.random.key(0), jnp.zeros((1, 3)))
    assert tuple(map(float, flat)) == (0.1, 10.0)


@pytest.mark.slow
def test_points_do_not_see_each_other():
    """The solution at the centre is the same whether it is found with one other point or with three."""
    quadratic = fs.quadratic_bilevel(clients=3, n=2, p=3, samples=4, noise=0.5)
    lower = fs.FedAvg(0.2, H=2, batch_size=2)
    one, three = (
        fs.solve(
            quadratic.problem, fs.FedRZOBilevel(0.1, 0.1, directions=b, lower=lower, lower_rounds=5),
            quadratic.data, np.ones(2), y0=np.zeros(3), rounds=1, progress=False,
        )
        for b in (1, 3)
    )  # fmt: skip
    np.testing.assert_allclose(one.y, three.y, rtol=1e-12)
    assert three.ledger.lower_rounds == one.ledger.lower_rounds == 5
    assert three.ledger.levels["lower"]["floats_up"] == 2 * one.ledger.levels["lower"]["floats_up"]
    assert three.ledger.gradients == 2 * one.ledger.gradients == 2 * 5 * 3 * 2 * 2 * 2
