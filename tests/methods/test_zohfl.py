"""ZO-HFL against closed forms: a quadratic problem, sets that bind, and the paper's nonsmooth example."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize_scalar

import fedstrata as fs
from fedstrata.methods.zohfl import RootDecay, RootGrowth

# few steps of the clients on purpose; one test asks for this warning
pytestmark = pytest.mark.filterwarnings("ignore:ZOHFL. the clients. models have not converged:UserWarning")
LAM, MU, N = 0.8, 0.5, 3


def square(x):
    return 0.5 * (x**2).sum()


# y_i(x) = (a_i + μx)/(1 + μ), so f(x) = ½‖x − s‖² + c/2 · mean‖x − a_i‖² + const with c = λ/(1 + μ)².
quadratic = fs.Personalized(
    server=lambda x, s: square(x - s["a"]),
    coupling=lambda x, y: LAM * square(x - y),
    client=lambda x, y, s: square(y - s["a"]) + MU * square(x - y),
)
rng = np.random.default_rng(0)
CLIENTS = [{"a": rng.normal(size=(n, N)) + i} for i, n in enumerate((4, 2, 5, 3))]
SERVER = {"a": rng.normal(size=(6, N)) - 2}
data = fs.FederatedData.from_clients(CLIENTS, server=SERVER)
means = np.stack([client["a"].mean(0) for client in CLIENTS])
C = LAM / (1 + MU) ** 2
# One step of size 1/(1 + μ) solves the quadratic lower level; orthogonal directions give the whole gradient.
EXACT = {"gamma_client": 1 / (1 + MU), "directions": N, "orthogonal": True}


def solve(method, problem=quadratic, data=data, rounds=40, x0=None, y0=None, **options):
    x0 = np.zeros(N) if x0 is None else x0
    y0 = np.zeros_like(x0) if y0 is None else y0
    arguments = {"eval_every": rounds, "progress": False, **options}
    return fs.solve(problem, method, data, x0, y0=y0, rounds=rounds, **arguments)


def optimum(means):
    return (SERVER["a"].mean(0) + C * means.mean(0)) / (1 + C)


def test_quadratic_problem(x64):
    result = solve(fs.ZOHFL(0.5, 0.1, **EXACT))
    x = optimum(means)
    np.testing.assert_allclose(result.x, x, rtol=1e-8)
    personal = (means + MU * x) / (1 + MU)
    np.testing.assert_allclose(result.y, personal, rtol=1e-8)
    last = {name: values[-1] for name, values in result.metrics.items()}
    server = np.mean([square(x - a) for a in SERVER["a"]])
    coupling = np.mean([LAM * square(x - y) for y in personal])
    client = np.mean(
        [
            np.mean([square(y - a) for a in c["a"]]) + MU * square(x - y)
            for y, c in zip(personal, CLIENTS, strict=True)
        ]
    )
    expected = {"server": server, "coupling": coupling, "client": client, "objective": server + coupling}
    assert last.pop("lower_residual") < 1e-8  # and no warning: every step solves its problem
    assert last == pytest.approx(expected, rel=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [None, 2])
def test_scalars_are_vectors(x64, batch_size):
    """The same iterates; two numbers per client instead of n, and what is missing in the fits with both."""

    def run(messages):
        method = fs.ZOHFL(0.1, 0.1, H=3, gamma_client=0.3, batch_size=batch_size, messages=messages)
        return solve(method, rounds=5, participation=3)

    vectors, scalars = run("vectors"), run("scalars")
    np.testing.assert_allclose(scalars.x, vectors.x, rtol=1e-10)
    np.testing.assert_allclose(scalars.y, vectors.y, rtol=1e-10)
    assert vectors.ledger.floats_up == 5 * 3 * (N + 1)
    assert scalars.ledger.floats_up == 5 * 3 * 3
    assert scalars.ledger.floats_down == vectors.ledger.floats_down == 5 * 3 * N


@pytest.mark.slow
def test_steps_differ_by_client_and_round():
    """H_{i,r} = ⌈τ_i √(r+1)⌉ steps at two points, as the ledger shows; the server has its own gradients."""
    tau, rounds, batch = (1.0, 2.5, 0.0, 4.0), 5, 2
    method = fs.ZOHFL(0.05, 0.1, H=RootGrowth(tau), batch_size=batch, server_batch_size=3)
    result = solve(method, rounds=rounds)
    steps = sum(np.ceil(t * np.sqrt(r + 1)) for t in np.float32(tau) for r in range(rounds))
    assert result.ledger.gradients == steps * 2 * batch + rounds * 3
    assert result.ledger.function_values == rounds * 4 * 2


@pytest.mark.slow
def test_who_sits_out_does_not_count(x64):
    """With H_i = 0 the mean is over the others, whatever the client's data; it keeps its model."""
    H = np.array([1, 0, 1, 0])
    result = solve(fs.ZOHFL(0.5, 0.1, H=H, **EXACT), y0=np.full(N, 7.0))
    np.testing.assert_allclose(result.x, optimum(means[H > 0]), rtol=1e-8)
    np.testing.assert_array_equal(result.y[H == 0], 7.0)
    absurd = fs.FederatedData.from_clients(
        [c if h else {"a": 1e6 * c["a"]} for c, h in zip(CLIENTS, H, strict=True)], server=SERVER
    )
    again = solve(fs.ZOHFL(0.5, 0.1, H=H, **EXACT), data=absurd, y0=np.full(N, 7.0))
    np.testing.assert_array_equal(again.x, result.x)


@pytest.mark.slow
@pytest.mark.parametrize("messages", ["vectors", "scalars"])
def test_where_all_sit_out_the_server_learns_alone(x64, messages):
    result = solve(fs.ZOHFL(0.3, 0.1, H=np.zeros(4, int), messages=messages), rounds=7)
    np.testing.assert_allclose(result.x, SERVER["a"].mean(0) * (1 - 0.7**7), rtol=1e-12)


def test_sets_of_clients_move_with_x(x64):
    """|y − x| ≤ ρ_i in one dimension: y_i(x) = x + clip((a_i − x)/(1 + μ), ±ρ_i); some bind in the end."""
    rho = np.array([0.05, 2.0, 0.3, 0.1])
    a = np.array([1.0, 0.5, -1.0, 2.0])
    own = fs.FederatedData.from_clients([{"a": np.array([v])} for v in a], server={"a": np.array([0.4])})
    limits = jnp.asarray(rho)
    problem = fs.Personalized(
        quadratic.server,
        quadratic.coupling,
        quadratic.client,
        project_y=lambda y, x, client: x + jnp.clip(y - x, -limits[client.index], limits[client.index]),
    )

    def gap(x):
        return np.clip((a - x) / (1 + MU), -rho, rho)

    exact = minimize_scalar(
        lambda x: (x - 0.4) ** 2 / 2 + LAM / 2 * (gap(x) ** 2).mean(), options={"xtol": 1e-12}
    ).x
    method = fs.ZOHFL(0.5, 1e-3, gamma_client=1 / (1 + MU))
    result = solve(method, problem, own, rounds=60, x0=np.array(0.0))
    np.testing.assert_allclose(result.x, exact, rtol=1e-6)
    np.testing.assert_allclose(result.y, exact + gap(exact), rtol=1e-6)
    assert (np.abs(result.y - result.x) >= rho - 1e-9).sum() == 3


@pytest.mark.slow
def test_nonsmooth_implicit_function():
    """The paper's (3): y(x) = max(0, x), f = Σ g(x_i) with g = ½(x_i+1)² below 0 and ½ above, kinked at 0.

    From below, x_i → −1 with g = 0; from above, x_i stays on the plateau of stationary points, where g = ½.
    """
    problem = fs.Personalized(
        server=lambda x, s: 0.0 * x.sum() + 0.0 * s["a"],
        coupling=lambda x, y: square(x + 1 - y),
        client=lambda x, y, s: square(y - x) + 0.0 * s["a"],
        project_y=fs.sets.NonNegative(),
    )
    own = fs.FederatedData.from_clients([{"a": np.zeros(1)}] * 2, server={"a": np.zeros(1)})
    x0 = np.array([-0.2, -3.0, 2.0, -1.7])
    method = fs.ZOHFL(0.5, 0.05, gamma_client=1.0, directions=4, orthogonal=True)
    result = solve(method, problem, own, rounds=60, x0=x0, y0=np.ones(4))
    np.testing.assert_allclose(result.x, [-1.0, -1.0, 2.0, -1.0], atol=1e-3)
    np.testing.assert_allclose(result.y, np.broadcast_to([0.0, 0.0, 2.0, 0.0], (2, 4)), atol=1e-3)
    np.testing.assert_allclose(result.history["objective"][-1], 0.5, atol=1e-5)
    # One random direction per step and steps that decrease find the same point from below.
    below = fs.ZOHFL(RootDecay(0.3), 0.05, gamma_client=1.0)
    result = solve(below, problem, own, rounds=400, x0=np.array([-0.2, -3.0, -1.7]), y0=np.ones(3))
    np.testing.assert_allclose(result.x, -1.0, atol=1e-2)
    assert result.history["objective"][-1] < 1e-4


@pytest.mark.slow
def test_common_random_numbers_reduce_the_variance():
    """The estimate multiplies the difference of two lower-level solutions by n/(2η)."""

    def spread(common):
        method = fs.ZOHFL(0.1, 0.05, H=5, gamma_client=0.3, batch_size=1, common_random_numbers=common)
        runs = fs.sweep(
            quadratic, method, data, np.zeros(N), y0=np.zeros(N), rounds=1, seeds=range(64), progress=False
        )
        return np.var([run.x for run in runs], axis=0).sum()

    assert 20 * spread(True) < spread(False)


@pytest.mark.slow
def test_rate_of_the_lower_level():
    """Proposition 1: E‖y_H − y*‖² ≤ max(2σ²γ̃²/(μγ̃ − 1), Γ‖y_0 − y*‖²)/(H + Γ), for a client's SGD."""
    mu = L = 1 + MU
    method = fs.ZOHFL.from_theory(L1=1.0, L0=1.0, n=N, mu=mu, L_h=L, eta=1e-4)
    for H in (5, 50):
        at = fs.ZOHFL(1e-6, 1e-4, np.full(4, H), method.gamma_client, method.Gamma, batch_size=1)
        runs = fs.sweep(
            quadratic, at, data, np.zeros(N), y0=np.zeros(N), rounds=1, seeds=range(100), progress=False
        )
        error = np.mean([((run.y - means / (1 + MU)) ** 2).sum(-1) for run in runs], axis=0)
        sigma = np.array([client["a"].var(0).sum() for client in CLIENTS])
        bound = 2 * sigma * method.gamma_client**2 / (mu * method.gamma_client - 1)
        bound = np.maximum(bound, method.Gamma * ((means / (1 + MU)) ** 2).sum(-1)) / (H + method.Gamma)
        assert (error <= bound).all(), (error, bound)


def test_refuses():
    with pytest.raises(ValueError, match="server="):
        solve(fs.ZOHFL(0.1, 0.1), data=fs.FederatedData.from_clients(CLIENTS))
    with pytest.raises(ValueError, match="4 clients"):
        solve(fs.ZOHFL(0.1, 0.1, H=np.array([1, 2])))
    with pytest.raises(ValueError, match="4 clients"):
        solve(fs.ZOHFL(0.1, 0.1, H=RootGrowth((1.0, 2.0))))
    with pytest.raises(ValueError, match="'vectors' or 'scalars'"):
        solve(fs.ZOHFL(0.1, 0.1, messages="letters"))
    with pytest.raises(ValueError, match="y0="):
        fs.solve(quadratic, fs.ZOHFL(0.1, 0.1), data, np.zeros(N), rounds=1)
    with pytest.raises(ValueError, match="needs ½ ≤ p ≤ 1"):
        fs.ZOHFL.from_theory(L1=1.0, L0=1.0, n=1, mu=1.0, L_h=1.0, p=0.4)
    with pytest.raises(ValueError, match="tau ≥ 1"):
        fs.ZOHFL.from_theory(L1=1.0, L0=1.0, n=1, mu=1.0, L_h=1.0, tau=0.5)
    with pytest.raises(TypeError, match="coupling"):
        solve(fs.ZOHFL(0.1, 0.1), problem=fs.Personalized(quadratic.server, lambda x, y: x, quadratic.client))


@pytest.mark.slow
@pytest.mark.parametrize("messages", ["vectors", "scalars"])
def test_fits_that_are_not_solved_are_told_of(x64, messages):
    """y(x) = (x + a)/2 for any D > 0; a step γ̃ leaves 1 − 2γ̃D of each coordinate's way to it."""

    def missing(D, rounds=3, **options):
        D = jnp.asarray(D)
        lower = fs.Personalized(
            quadratic.server,
            quadratic.coupling,
            lambda x, y, s: (D * ((y - s["a"]) ** 2 + (y - x) ** 2)).sum() / 2,
        )
        method = fs.ZOHFL(0.1, 0.1, directions=N, orthogonal=True, messages=messages, **options)
        return solve(method, lower, rounds=rounds).history["lower_residual"][-1]

    with pytest.warns(UserWarning, match="ZOHFL: the clients' models have not converged: .* about 80%"):
        assert missing(np.ones(N), gamma_client=0.1) == pytest.approx(0.8)
    with pytest.warns(UserWarning, match="models have not converged"):
        missing([1.0, 0.03, 1e-3], H=20, gamma_client=0.5)  # the second and third hardly move
    assert missing([1.0, 0.5, 0.25], H=20, gamma_client=50.0, Gamma=100.0) < 0.05  # and says nothing
