"""FedMSA against closed forms, autodiff of the centralised objective, and the methods it reduces to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.core import tree
from fedstrata.core.fed import Setup
from fedstrata.engines.rounds import cohort_of

pytestmark = pytest.mark.usefixtures("x64")


@pytest.fixture(scope="module")
def quadratic():
    return fs.quadratic_bilevel(clients=10, n=5, p=8, heterogeneity=1.0, seed=0)


def run(q, method, rounds, **options):
    """The distance to the solution, relative, and the exact hypergradient, after every round."""
    x_star = q.x_star

    def error(x, y):
        return jnp.linalg.norm(x - x_star) / np.linalg.norm(x_star)

    def slope(x, y):
        return jnp.linalg.norm(q.gradient(x))

    start = {"x0": np.zeros(x_star.size), "y0": np.zeros(q.y_star.size)}
    metrics = {"error": error, "slope": slope}
    options = {**start, "metrics": metrics, "progress": False, "default_metrics": False, **options}
    return fs.solve(q.problem, method, q.data, rounds=rounds, **options)


def mean_maps(q, x, w, v):
    """P and S of the mean problem, from its matrices."""
    A, B, c, M, b = (np.asarray(q.data.train[k]).mean(0) for k in "ABcMb")
    slope = M @ np.concatenate([x, w]) - b
    n = x.size
    return slope[:n] + B.T @ v, A @ w - B @ x - c, A @ v - slope[n:]


@pytest.mark.parametrize(
    ("K", "rounds"),
    [pytest.param(1, 300, marks=pytest.mark.slow), (5, 70), pytest.param(10, 40, marks=pytest.mark.slow)],
)
def test_heterogeneous_quadratic(quadratic, K, rounds):
    result = run(quadratic, fs.FedMSA(alpha=0.1, beta=0.2, K=K), 3 * rounds)
    assert result.history["error"][: rounds + 1].min() < 1e-6
    assert result.history["error"][-1] < 1e-14
    np.testing.assert_allclose(result.y, quadratic.y_star, atol=1e-13)


def test_the_map_is_the_hypergradient(quadratic):
    """P at the lower solution and the linear system's, against differences of F(x) = f(x, y(x))."""
    A, B, c, M, b = (np.asarray(quadratic.data.train[k]).mean(0) for k in "ABcMb")
    x = np.linspace(-1, 1, 5)

    def F(x):
        z = np.concatenate([x, np.linalg.solve(A, B @ x + c)])
        return z @ M @ z / 2 - b @ z

    w = np.linalg.solve(A, B @ x + c)
    v = np.linalg.solve(A, (M @ np.concatenate([x, w]) - b)[5:])
    differences = [(F(x + e) - F(x - e)) / 2e-4 for e in 1e-4 * np.eye(5)]
    P, *S = mean_maps(quadratic, x, w, v)
    np.testing.assert_allclose(S, 0, atol=1e-12)
    np.testing.assert_allclose(P, differences, atol=1e-6)
    # and the method's own map is this one
    result = run(quadratic, fs.FedMSA(0.1, 0.2), 4)
    before, z = result.state.before, result.state.before.Z[0]
    P, S_w, S_v = mean_maps(quadratic, np.asarray(before.x), np.asarray(z.w), np.asarray(z.v))
    np.testing.assert_allclose(result.state.direction.x, P, rtol=1e-12)
    np.testing.assert_allclose(result.state.direction.Z[0].w, S_w, rtol=1e-12)
    np.testing.assert_allclose(result.state.direction.Z[0].v, S_v, rtol=1e-12)


@pytest.mark.slow
def test_full_batches_need_no_previous_point(quadratic):
    """Clients of one sample: a batch of one is the full batch, but takes the way of the general rule."""
    full = fs.FedMSA(0.1, 0.2, rho=0.3, K=4, clients=3)
    batch = fs.FedMSA(0.1, 0.2, rho=0.3, K=4, clients=3, batch_size=1)
    a, b = run(quadratic, full, 6), run(quadratic, batch, 6)
    np.testing.assert_allclose(a.x, b.x, rtol=1e-11)
    np.testing.assert_allclose(a.y, b.y, rtol=1e-11)
    assert a.ledger.gradients < b.ledger.gradients / 1.7
    assert a.ledger.bytes_down < b.ledger.bytes_down


def test_one_step_is_soba(quadratic):
    """ρ = 1 and K = 1, full batches: the centralised single loop, and for one client the textbook's."""
    federated = run(quadratic, fs.FedMSA(0.1, 0.2, rho=1.0, K=1, clients=10), 5)
    centralised = run(quadratic, fs.SOBA(0.1, 0.2), 5)
    np.testing.assert_allclose(federated.x, centralised.x, rtol=1e-12)
    x, w, v = np.zeros(5), np.zeros(8), np.zeros(8)
    for _ in range(5):
        P, S_w, S_v = mean_maps(quadratic, x, w, v)
        x, w, v = x - 0.1 * P, w - 0.2 * S_w, v - 0.2 * S_v
    np.testing.assert_allclose(centralised.x, x, rtol=1e-12)
    np.testing.assert_allclose(centralised.y, w, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("K", [1, 4])
def test_one_client_is_the_centralised_method(K):
    """All that is local is global then: R rounds are 1 + K (R − 1) updates, whatever ρ."""
    q = fs.quadratic_bilevel(clients=1, n=3, p=4, samples=5, noise=1.0)
    federated = run(q, fs.FedMSA(0.1, 0.2, rho=1.0, K=K), 6)
    centralised = run(q, fs.SOBA(0.1, 0.2), 1 + K * 5)
    np.testing.assert_allclose(federated.x, centralised.x, rtol=1e-11)
    np.testing.assert_allclose(federated.y, centralised.y, rtol=1e-11)
    np.testing.assert_array_equal(run(q, fs.FedMSA(0.1, 0.2, rho=0.2, K=K), 6).x, federated.x)


@pytest.mark.slow
def test_algorithm_1_by_hand(quadratic):
    """Four of ten clients in the first exchange, local steps of two of these: the paper's lines in NumPy."""
    alpha, beta, rho, K, rounds = 0.1, 0.2, 0.3, 3, 4
    result = run(quadratic, fs.FedMSA(alpha, beta, rho=rho, K=K, clients=2), rounds, participation=4)
    A, B, c, M, b = (np.asarray(quadratic.data.stacked()[k])[:, 0] for k in "ABcMb")

    def maps(i, z):
        x, w, v = z[:5], z[5:13], z[13:]
        slope = M[i] @ z[:13] - b[i]
        return np.concatenate([slope[:5] + B[i].T @ v, A[i] @ w - B[i] @ x - c[i], A[i] @ v - slope[5:]])

    steps = np.repeat([alpha, beta], [5, 16])
    z = before = h = np.zeros(21)
    setup = Setup(quadratic.problem, 10, 4)
    for r in range(rounds):
        key = jax.random.split(jax.random.fold_in(jax.random.key(0), r))[1]
        cohort = np.asarray(cohort_of(setup, jax.random.key(0), quadratic.data.placed(), r))
        keep = 1 - rho if r else 0.0
        h = np.mean([maps(i, z) + keep * (h - maps(i, before)) for i in cohort], axis=0)
        ends = []
        for i in np.asarray(jax.random.choice(jax.random.split(key, 3)[1], cohort, (2,), replace=False)):
            at, last, direction = z, z, h
            for _ in range(K if r else 1):
                direction = direction + maps(i, at) - maps(i, last)
                at, last = at - steps * direction, at
            ends.append(at)
        before, z = z, np.mean(ends, axis=0)
    np.testing.assert_allclose(result.x, z[:5], rtol=1e-10)
    np.testing.assert_allclose(result.y, z[5:13], rtol=1e-10)
    np.testing.assert_allclose(result.state.Z[0].v, z[13:], rtol=1e-10)


@pytest.mark.slow
def test_equal_clients_make_every_local_step_a_global_one():
    """Without heterogeneity local maps are global: R rounds are 1 + K (R − 1) centralised updates."""
    q = fs.quadratic_bilevel(clients=3, heterogeneity=0.0, seed=1)
    local = run(q, fs.FedMSA(0.1, 0.2, K=4), 6)
    central = run(q, fs.SOBA(0.1, 0.2), 1 + 4 * 5)
    np.testing.assert_allclose(local.x, central.x, rtol=1e-10)


@pytest.mark.slow
def test_the_same_sample_at_both_points():
    """Noise in linear terms cancels between two points: with ρ = 0 the direction's error stays."""
    q = fs.quadratic_bilevel(clients=4, heterogeneity=0.0, samples=6, noise=1.0)

    def error(rounds):
        result = run(q, fs.FedMSA(0.05, 0.1, rho=0.0, K=3, batch_size=1), rounds)
        before, z = result.state.before, result.state.before.Z[0]
        exact = mean_maps(q, np.asarray(before.x), np.asarray(z.w), np.asarray(z.v))
        found = result.state.direction
        return np.concatenate([found.x - exact[0], found.Z[0].w - exact[1], found.Z[0].v - exact[2]])

    first = error(1)
    assert np.linalg.norm(first) > 0.1
    np.testing.assert_allclose(error(9), first, atol=1e-12)


@pytest.mark.slow
def test_sequences_of_any_number():
    """A chain zⁿ = z^{n−1}/5 + cⁿ/kⁿ, P = x + z^N − c¹, in means over clients that differ: solved by hand."""
    rng = np.random.default_rng(0)
    for N in (1, 2, 4):
        scales = [{"c": rng.normal(size=(2, N)), "k": 1 + rng.uniform(size=(2, N))} for _ in range(3)]
        data = fs.FederatedData.from_clients(scales)
        S = tuple(lambda before, z, s, n=n: s["k"][n] * (z - 0.2 * before) - s["c"][n] for n in range(N))
        problem = fs.MultiSequence(lambda x, Z, s: x + Z[-1] - s["c"][0], S)
        k, c = (np.stack([s[name] for s in scales]).mean((0, 1)) for name in ("k", "c"))
        # z^N = 0.2^N x + Σ 0.2^{N−n} cⁿ/kⁿ
        rest = sum(0.2 ** (N - 1 - n) * c[n] / k[n] for n in range(N))
        x_star = (c[0] - rest) / (1 + 0.2**N)
        method = fs.FedMSA(0.2, np.full(N, 0.3), K=3, clients=2)
        start = tuple(np.zeros(()) for _ in range(N))
        result = fs.solve(
            problem, method, data, np.zeros(()), y0=start, rounds=150, eval_every=150, progress=False
        )
        assert float(result.x) == pytest.approx(x_star, abs=1e-12)
        assert float(result.y[-1]) == pytest.approx(c[0] - x_star, abs=1e-12)


@pytest.mark.slow
def test_a_converted_problem_has_the_same_iterates(quadratic):
    problem, data, *_ = quadratic
    as_it_is = run(quadratic, fs.FedMSA(0.1, 0.2, K=3, clients=2), 4)
    converted = fs.solve(
        fs.as_multisequence(problem),
        fs.FedMSA(0.1, 0.2, K=3, clients=2),
        data,
        np.zeros(5),
        y0=((np.zeros(8), np.zeros(8)),),
        rounds=4,
        progress=False,
    )
    np.testing.assert_allclose(converted.x, as_it_is.x, rtol=1e-12)
    np.testing.assert_allclose(converted.y[0][0], as_it_is.y, rtol=1e-12)


def test_a_minimax_problem():
    q = fs.quadratic_minimax(clients=4, n=2, p=3)
    result = run(q, fs.FedMSA(0.1, 0.2, K=4, clients=2), 150, eval_every=150)
    np.testing.assert_allclose(result.x, q.x_star, atol=1e-11)
    np.testing.assert_allclose(result.y, q.y_star, atol=1e-11)


# Compositions


def U(x, s):
    return 0.5 * (s["a"] @ x["w"] + x["c"] - s["b"]) ** 2


@pytest.fixture(scope="module")
def risk():
    """Clients with their own features' scale and their own truth."""
    rng = np.random.default_rng(0)
    clients = []
    for i in range(4):
        a, w = rng.normal(size=(8, 2)) * (0.5 + 0.5 * i), 2 * rng.normal(size=2)
        clients.append({"a": a, "b": a @ w + rng.normal() + 0.3 * rng.normal(size=8)})
    return fs.risk_averse(U, lam=1.0, delta=0.1), fs.FederatedData.from_clients(clients)


def risk_of(x, data):
    """The centralised objective."""
    u = jax.vmap(lambda s: U(x, s))(jax.tree.map(jnp.asarray, data.train))
    return u.mean() + jnp.sqrt((jnp.maximum(0, u - u.mean()) ** 2).mean() + 0.1)


def risk_slope(x, y, data):
    return tree.norm(jax.grad(risk_of)(x, data))


ORIGIN = {"w": np.zeros(2), "c": np.zeros(())}


def test_the_adjoint_form_starts_with_the_gradient(risk):
    """The first step is exact: the direction is autodiff's of the centralised objective."""
    problem, data = risk
    point = {"w": np.array([0.5, -1.0]), "c": np.array(0.3)}
    result = fs.solve(problem, fs.FedMSA(0.02, 0.8), data, point, rounds=1, progress=False)
    expected = jax.grad(risk_of)(jax.tree.map(jnp.asarray, point), data)
    for name in point:
        np.testing.assert_allclose(result.state.direction.x[name], expected[name], rtol=1e-12)
    assert result.history["objective"][0] == pytest.approx(float(risk_of(point, data)), rel=1e-12)
    assert float(tree.norm(result.state.direction.Z)) < 1e-13


@pytest.mark.slow
@pytest.mark.parametrize(("adjoint", "low", "high"), [(True, 0.0, 1e-8), (False, 1e-2, np.inf)])
def test_clients_that_differ_bias_the_papers_form_alone(risk, adjoint, low, high):
    problem, data = risk
    method = fs.FedMSA(0.02, 0.8, K=3, adjoint=adjoint)
    options = {"metrics": {"slope": risk_slope}, "eval_every": 100, "progress": False}
    result = fs.solve(problem, method, data, ORIGIN, rounds=500, **options)
    assert low <= result.history["slope"][-1] <= high
    # it has settled: the paper's form is not merely slow
    assert result.history["slope"][-1] == pytest.approx(result.history["slope"][-2], rel=1e-3, abs=1e-8)


@pytest.mark.slow
def test_the_papers_form_is_right_where_clients_are_alike(risk):
    problem, data = risk
    alike = fs.FederatedData.from_clients([data.client(1)] * 3)
    method = fs.FedMSA(0.05, 0.8, K=3, adjoint=False)
    options = {"metrics": {"slope": risk_slope}, "eval_every": 400, "progress": False}
    assert fs.solve(problem, method, alike, ORIGIN, rounds=400, **options).history["slope"][-1] < 1e-8


@pytest.mark.slow
@pytest.mark.parametrize("N", [0, 1, 3])
def test_compositions_of_any_depth(N):
    """Levels z ↦ tanh(W z) + c of clients that differ, then a federated outer level and a plain term."""
    rng = np.random.default_rng(N)
    sizes = (2, 3, 2)
    clients = [{"W": rng.normal(size=(k, 4, 3, 3)), "c": rng.normal(size=(k, 3))} for k in sizes]
    data = fs.FederatedData.from_clients(clients)

    def level(n):
        return lambda z, s: jnp.tanh(s["W"][n] @ z) + s["c"]

    problem = fs.Composition(
        [*[level(n) for n in range(N)], lambda z, s: jnp.sum((s["W"][3] @ z - s["c"]) ** 2)],
        plain=lambda x, s: jnp.sum(x * s["c"]) ** 2,
    )

    def mean(f, z):
        return sum(jax.vmap(lambda s: f(z, s))(jax.tree.map(jnp.asarray, c)).mean(0) for c in clients) / 3

    def objective(x):
        z = x
        for f in problem.levels:
            z = mean(f, z)
        return z + mean(problem.plain, x)

    x = jnp.array([0.3, -0.2, 0.5])
    result = fs.solve(problem, fs.FedMSA(0.1, 0.5), data, x, rounds=1, progress=False)
    np.testing.assert_allclose(result.state.direction.x, jax.grad(objective)(x), rtol=1e-11)
    # a value and an adjoint for each of the inner levels, then the two exchanges of the round
    assert result.ledger.exchanges == 2 * N + 2


# Theorem 3.1


@pytest.mark.slow
def test_more_local_steps_save_rounds_where_clients_are_alike():
    """Rounds to reach 1e-6: divided by K at low heterogeneity; at a high one K = 10 needs more than K = 1."""

    def rounds(heterogeneity, K):
        q = fs.quadratic_bilevel(clients=10, heterogeneity=heterogeneity, seed=2)
        error = run(q, fs.FedMSA(0.05, 0.1, K=K), 300).history["error"]
        assert error.min() < 1e-6
        return int(np.argmax(error < 1e-6))

    alike, differing = ({K: rounds(h, K) for K in (1, 10)} for h in (0.1, 3.0))
    assert alike[10] <= 1.1 * alike[1] / 10
    assert differing[10] > differing[1]


@pytest.mark.long
def test_the_rate_in_rounds():
    """Minibatches, α, β ~ R^{−1/3}, ρ ~ R^{−2/3}: the mean of ‖∇F‖² falls at least like R^{−1/2}."""
    q = fs.quadratic_bilevel(clients=5, n=3, p=4, heterogeneity=0.3, samples=20, noise=2.0)
    metrics = {"slope": lambda x, y: jnp.sum(q.gradient(x) ** 2)}
    options = {
        "y0": q.y_star,
        "seeds": range(4),
        "metrics": metrics,
        "default_metrics": False,
        "progress": False,
    }
    horizons, means = [100, 400, 1600], []
    for R in horizons:
        step = (100 / R) ** (1 / 3)
        method = fs.FedMSA(0.1 * step, 0.2 * step, rho=0.5 * step**2, K=2, batch_size=2)
        runs = fs.sweep(q.problem, method, q.data, q.x_star, rounds=R, **options)
        means.append(np.mean([run.history["slope"].mean() for run in runs]))
    order = np.polyfit(np.log(horizons), np.log(means), 1)[0]
    assert order < -0.5


# Options, costs, mistakes


@pytest.mark.slow
def test_first_order_products(quadratic):
    exact, approximate = (
        run(quadratic, fs.FedMSA(0.1, 0.2, K=5, products=p), 60) for p in ("exact", "differences")
    )
    np.testing.assert_allclose(approximate.x, quadratic.x_star, atol=1e-7)
    assert approximate.ledger.hessian_products == 0
    assert exact.ledger.hessian_products > 0


def test_the_ledger_by_hand(quadratic):
    """Ten clients, 5 + 8 + 8 numbers in a point, two rounds; K = 1 in the first, 3 in the second."""
    ledger = run(quadratic, fs.FedMSA(0.1, 0.2, K=3, clients=4), 2).ledger
    point, rounds = 21, 2
    assert ledger.exchanges == 2 * rounds
    assert ledger.floats_down == rounds * (10 * point + 4 * (1 + 2 * point))
    assert ledger.floats_up == rounds * (10 * point + 4 * point)
    # a local client evaluates its own map at the start and after each step but the last, in round 0 too
    maps = rounds * (10 + 4 * 3)
    assert ledger.hessian_products == maps
    assert ledger.gradients == 2 * maps


def test_mistakes(quadratic):
    problem, data, *_ = quadratic
    boxed = fs.Bilevel(problem.upper, problem.lower, project_y=fs.sets.Box(-1, 1), same_samples=True)
    with pytest.raises(ValueError, match="zeroth-order"):
        fs.solve(boxed, fs.FedMSA(0.1, 0.2), data, np.zeros(5), y0=np.zeros(8), rounds=1)
    with pytest.raises(ValueError, match="1 sequences"):
        run(quadratic, fs.FedMSA(0.1, np.array([0.1, 0.2])), 1)
    with pytest.raises(ValueError, match="clients=11 is more than the 10"):
        run(quadratic, fs.FedMSA(0.1, 0.2, clients=11), 1)
    with pytest.raises(ValueError, match="products"):
        run(quadratic, fs.FedMSA(0.1, 0.2, products="some"), 1)
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        fs.FedMSA(0.1, 0.2, rho=1.5)
    with pytest.raises(ValueError, match="leave y0 out"):
        fs.solve(fs.risk_averse(U), fs.FedMSA(0.1, 0.2), data, ORIGIN, y0=np.zeros(2), rounds=1)
    with pytest.raises(ValueError, match="lam"):
        fs.risk_averse(U, lam=-1.0)


@pytest.mark.slow
@pytest.mark.parametrize("participation", [1.0, 1])
def test_a_full_start_leaves_no_noise(participation):
    """With ρ → 0 and K = 1 the first direction is that of all samples, whatever the minibatches are."""
    rng = np.random.default_rng(6)
    clients = [{"a": rng.normal(size=(n, 2))} for n in (3, 7)]
    data = fs.FederatedData.from_clients(clients)
    problem = fs.Minimax(lambda x, y, s: ((x["u"] - s["a"]) ** 2).sum() / 2 + (y * x["u"]).sum() - y @ y / 2)
    start = {"u": np.array([1.0, 2.0])}
    options = {"y0": np.ones(2), "rounds": 1, "progress": False, "weights": "size"}
    gradient = start["u"] - np.concatenate([c["a"] for c in clients]).mean(0) + 1
    steps = {}
    for full in (True, False):
        method = fs.FedMSA(0.1, 0.2, rho=1e-9, batch_size=1, full_start=full)
        result = fs.solve(problem, method, data, start, participation=participation, **options)
        steps[full] = (start["u"] - result.x["u"]) / 0.1
    np.testing.assert_allclose(steps[True], gradient, rtol=1e-7)
    assert np.abs(steps[False] - gradient).max() > 0.05


def test_steps_by_the_theorem_are_no_longer_than_one_client_bears():
    method = fs.FedMSA.from_theory(R=10, K=2, tau=0.01, L=4.0, c_beta=0.001)
    assert (method.alpha, method.beta) == (0.25, 0.05)
