"""FedDRO, DS-FedDRO and vanilla FedAvg for compositions: the counterexample, by hand, reductions, rates."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

import fedstrata as fs

solve = functools.partial(fs.solve, progress=False)

# Theorem 4.1: g₁ = 4x − 4, g₂ = −2x + 4, f = √(y² + 4); the minimiser is 0
CLIENTS = ((4.0, -4.0), (-2.0, 4.0))
COUNTEREXAMPLE = fs.Composition([lambda x, s: s["a"] * x + s["b"], lambda y: jnp.sqrt(y**2 + 4)])
ETA = 0.04  # < 1/22
X = {"x": lambda x, y: x}


def data_of(*clients):
    return fs.FederatedData.from_clients([{k: np.atleast_1d(v) for k, v in c.items()} for c in clients])


@pytest.fixture
def two_clients(x64):
    return data_of(*({"a": a, "b": b} for a, b in CLIENTS))


def slope(y):
    return y / np.sqrt(y**2 + 4)


def vanilla_round(x, case):
    """Algorithm 1 with I = 2, written from the proof of Theorem 4.1."""
    ends = []
    for a, b in CLIENTS:
        first = x - ETA * a * slope(a * x + b if case == 1 else x)
        ends.append(first - ETA * a * slope(a * first + b))
    return np.mean(ends)


@pytest.mark.parametrize("case", [1, 2])
def test_vanilla_fedavg_stays_away_from_the_solution(two_clients, case):
    method = fs.CompositionalFedAvg(ETA, I=2, case=case)
    result = solve(COUNTEREXAMPLE, method, two_clients, 0.5, rounds=1000, metrics=X)
    assert result.history["x"].min() >= 0.5
    wrong = optimize.brentq(lambda x: vanilla_round(x, case) - x, 0.5, 3.0, xtol=1e-14)
    np.testing.assert_allclose(result.x, wrong, atol=1e-6)
    assert result.ledger.exchanges == 1000 * case


@pytest.mark.parametrize(
    "method",
    [
        fs.FedDRO(ETA, beta=0.1, I=2),
        fs.FedDRO(ETA, beta=0.9, I=7),
        fs.DSFedDRO(ETA, beta=0.3, I=2, gamma_x=1.3, gamma_y=1.4),
    ],
)
def test_feddro_and_ds_feddro_reach_the_solution(two_clients, method):
    result = solve(COUNTEREXAMPLE, method, two_clients, 0.5, rounds=1000, eval_every=1000)
    assert abs(float(result.x)) <= 1e-6
    assert abs(float(result.y[0])) <= 1e-6
    np.testing.assert_allclose(result.history["objective"][-1], 2.0, atol=1e-12)


@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_the_local_reading_of_ds_feddro_has_a_biased_limit(two_clients, beta):
    def drift(point):
        x, y = point
        ends = []
        for a, b in CLIENTS:
            x_k, y_k = x, y
            for _ in range(2):
                x_k = x_k - ETA * a * slope(y_k)
                y_k = (1 - beta) * y_k + beta * (a * x_k + b)
            ends.append((x_k - x, y_k - y))
        return np.mean(ends, axis=0)

    predicted = optimize.root(drift, (0.5, 0.5), tol=1e-13).x
    method = fs.DSFedDRO(ETA, beta, I=2, gamma_x=1.3, gamma_y=1.4, embedding="local")
    result = solve(COUNTEREXAMPLE, method, two_clients, 0.5, rounds=1000, eval_every=1000)
    np.testing.assert_allclose([result.x, result.y[0]], predicted, atol=1e-6)
    # for small η the limit is 6β/(1 + 4.5β), nowhere near 0
    np.testing.assert_allclose(predicted[0], 6 * beta / (1 + 4.5 * beta), rtol=0.2)


@pytest.mark.slow
def test_where_ds_feddro_ends(x64):
    """g_k = A_k x + b_k, f = ½‖y − d‖², h_k = ½ q_k‖x − c_k‖², I = 1: a linear system for every embedding.

    With the server's embedding the fixed point has y = Σ w_k g_k(x − ηG_k), G_k = ∇h_k + A_kᵀ(y − d): ‖∇Φ‖
    there is linear in η. Anchored, it is zero.
    """
    rng = np.random.default_rng(3)
    sizes, d = (1, 2, 5), np.array([0.5, -1.0])
    A = [rng.normal(size=(2, 2)) * 0.4 + 0.4 * k * np.eye(2) for k in range(3)]
    b, centre = rng.normal(size=(3, 2)), rng.normal(size=(3, 2)) * 2
    q = [0.5, 1.0, 1.5]
    own = [{"A": A[k], "b": b[k], "c": centre[k], "q": np.asarray(q[k])} for k in range(3)]
    clients = [{k: np.stack([v] * n) for k, v in c.items()} for c, n in zip(own, sizes, strict=True)]
    problem = fs.Composition(
        [lambda x, s: {"g": s["A"] @ x["w"] + s["b"]}, lambda y: ((y["g"] - d) ** 2).sum() / 2],
        lambda x, s: s["q"] * ((x["w"] - s["c"]) ** 2).sum() / 2,
    )
    data = fs.FederatedData.from_clients(clients)
    w = np.array(sizes) / sum(sizes)
    mean_A, mean_b = (sum(w[k] * v[k] for k in range(3)) for v in (A, b))

    def gradient(x):
        """∇Φ."""
        return sum(w[k] * q[k] * (x - centre[k]) for k in range(3)) + mean_A.T @ (mean_A @ x + mean_b - d)

    def limit(drift):
        """(x, y) with Σ w_k G_k = 0, y = Σ w_k (A_k (x − drift·G_k) + b_k)."""

        def residual(z):
            x, y = z[:2], z[2:]
            G = [q[k] * (x - centre[k]) + A[k].T @ (y - d) for k in range(3)]
            top = sum(w[k] * G[k] for k in range(3))
            return np.append(top, y - sum(w[k] * (A[k] @ (x - drift * G[k]) + b[k]) for k in range(3)))

        zero = residual(np.zeros(4))
        return np.linalg.solve(np.stack([residual(e) - zero for e in np.eye(4)], axis=1), -zero)[:2]

    left = {}
    for embedding in ("server", "anchored"):
        for eta in (0.2, 0.1):
            method = fs.DSFedDRO(eta, 0.5, gamma_x=0.9, gamma_y=1.1, embedding=embedding)
            x0 = {"w": np.zeros(2)}
            x = solve(problem, method, data, x0, rounds=500, eval_every=500, weights="size").x["w"]
            np.testing.assert_allclose(x, limit(eta if embedding == "server" else 0.0), atol=1e-12)
            left[embedding, eta] = np.linalg.norm(gradient(x))
    assert max(left["anchored", 0.2], left["anchored", 0.1]) < 1e-12
    # closed forms: the paper's limit halves with η
    small = [np.linalg.norm(gradient(limit(eta))) for eta in (0.2, 0.1, 0.05, 0.025)]
    np.testing.assert_allclose(np.array(small[:-1]) / small[1:], 2, rtol=0.1)
    assert left["server", 0.2] > 1e-2


def ds_round(eta, beta, I, gamma_x=1.3, gamma_y=1.4):
    """A round of Algorithm 3 with the server's y; f' is frozen, so x_k moves on a line."""

    def round(point):
        x, y = point
        x_k, y_k = np.full(2, x), np.full(2, y)
        a, b = np.transpose(CLIENTS)
        for _ in range(I):
            x_k = x_k - eta * a * slope(y)
            y_k = (1 - beta) * y_k + beta * (a * x_k + b)
        return np.array([x + gamma_x * (x_k.mean() - x), y + gamma_y * (y_k.mean() - y)])

    return round


@pytest.mark.slow
@pytest.mark.parametrize(
    ("eta", "beta", "stable"), [(0.04, 0.3, False), (0.01, 0.3, True), (0.04, 0.05, True)]
)
def test_eight_local_steps_of_ds_feddro_need_a_small_step_or_momentum(two_clients, eta, beta, stable):
    """The fixed point is 0 for all steps, but it attracts only where the round's slopes there are below 1.

    The clients' y_k see their own x_k, which have drifted by ηI a_k f'(y): with g's slopes 4 and −2 this
    adds −10 ηβ f'(y) times a sum over the steps to y, and a cycle of two points where that is large.
    """
    once = ds_round(eta, beta, 8)
    np.testing.assert_allclose(once(np.zeros(2)), 0, atol=1e-15)
    slopes = np.stack([(once(e) - once(-e)) / 2e-6 for e in 1e-6 * np.eye(2)], axis=1)
    assert (np.abs(np.linalg.eigvals(slopes)).max() < 1) == stable
    method = fs.DSFedDRO(eta, beta, 8, 1.3, 1.4)
    result = solve(COUNTEREXAMPLE, method, two_clients, 0.5, rounds=1000, eval_every=1000)
    end = np.array([result.x, result.y[0]])
    if stable:
        np.testing.assert_allclose(end, 0, atol=1e-6)
    else:
        np.testing.assert_allclose(once(end), -end, atol=1e-6)
        assert abs(end[0]) > 0.18


def loss(x, s):
    return 0.5 * (s["a"] @ x - s["b"]) ** 2


def regression(sizes, seed=0, shift=0.5):
    """Clients whose samples differ in distribution."""
    rng = np.random.default_rng(seed)
    return [
        {"a": rng.normal(size=(n, 2)) / 2 + shift * rng.normal(size=2), "b": rng.normal(size=n) + shift * k}
        for k, n in enumerate(sizes)
    ]


class ByHand:
    """Algorithms 2 and 3 in plain loops, on the samples that the engine draws."""

    # h = ‖x‖²/2 + aᵀx, g = (aᵀx − b, exp(aᵀx/2)), f = √(1 + y₁²) + y₂²
    problem = fs.Composition(
        [
            lambda x, s: jnp.stack([s["a"] @ x - s["b"], jnp.exp(s["a"] @ x / 2)]),
            lambda y: jnp.sqrt(1 + y[0] ** 2) + y[1] ** 2,
        ],
        plain=lambda x, s: 0.5 * x @ x + s["a"] @ x,
    )

    def __init__(self, clients, seed, batch):
        self.clients, self.key, self.batch = clients, jax.random.key(seed), batch

    def rows(self, key, k):
        size = len(self.clients[k]["b"])
        return np.asarray(jax.random.randint(key, (self.batch,), 0, size, dtype=jnp.int32))

    def draw(self, k, r, t, split=False):
        """The samples of client k in round r and step t; r = −1 is before the first round."""
        if r < 0:
            return self.rows(jax.random.fold_in(jax.random.fold_in(self.key, 2**31 - 1), k), k)
        key = jax.random.split(jax.random.fold_in(self.key, r))[1]
        key = jax.random.split(key)[0] if split else key
        return self.rows(jax.random.fold_in(jax.random.fold_in(key, k), t), k)

    def g(self, k, rows, x):
        a, b = (self.clients[k][name][rows] for name in ("a", "b"))
        return np.array([(a @ x - b).mean(), np.exp(a @ x / 2).mean()])

    def direction(self, k, rows, x, y):
        a = self.clients[k]["a"][rows]
        v = np.array([y[0] / np.sqrt(1 + y[0] ** 2), 2 * y[1]])
        jacobian = np.stack([a.mean(0), (np.exp(a @ x / 2)[:, None] * a / 2).mean(0)])
        return x + a.mean(0) + v @ jacobian

    def feddro(self, x, rounds, eta, beta, I):
        K = range(len(self.clients))
        y = np.mean([self.g(k, self.draw(k, -1, 0), x) for k in K], axis=0)
        before = [x for _ in K]
        for r in range(rounds):
            local = [x for _ in K]
            for t in range(I):
                rows = [self.draw(k, r, t) for k in K]
                y_k = [
                    (1 - beta) * (y - self.g(k, rows[k], before[k])) + self.g(k, rows[k], local[k]) for k in K
                ]
                y = np.mean(y_k, axis=0)
                before, local = local, [local[k] - eta * self.direction(k, rows[k], local[k], y) for k in K]
            x = np.mean(local, axis=0)
        return x, y

    def ds_feddro(self, x, rounds, eta, beta, I, gamma_x, gamma_y):
        K = range(len(self.clients))
        y = np.mean([self.g(k, self.draw(k, -1, 0), x) for k in K], axis=0)
        for r in range(rounds):
            ends = []
            for k in K:
                x_k, y_k = x, y
                for t in range(I):
                    x_k = x_k - eta * self.direction(k, self.draw(k, r, t, split=True), x_k, y)
                    y_k = (1 - beta) * y_k + beta * self.g(k, self.draw(k, r, t + 1, split=True), x_k)
                ends.append((x - x_k, y - y_k))
            x = x - gamma_x * np.mean([e[0] for e in ends], axis=0)
            y = y - gamma_y * np.mean([e[1] for e in ends], axis=0)
        return x, y


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_the_algorithms_step_by_step():
    clients = regression((5, 4))
    hand = ByHand(clients, seed=3, batch=2)
    data, x0 = fs.FederatedData.from_clients(clients), np.array([0.3, -0.4])
    result = solve(hand.problem, fs.FedDRO(0.05, 0.4, I=3, batch_size=2), data, x0, rounds=4, seed=3)
    x, y = hand.feddro(x0, 4, 0.05, 0.4, 3)
    np.testing.assert_allclose(result.x, x, rtol=1e-10)
    np.testing.assert_allclose(result.y[0], y, rtol=1e-10)

    # by hand as well: d_g = 2 numbers up in each of I steps and at the start, n = 2 with x
    steps, main, oracles = 1 + 4 * 3, 4, result.ledger
    assert oracles.levels["step"]["exchanges"] == steps
    assert oracles.levels["main"]["exchanges"] == main
    assert oracles.levels["step"]["floats_up"] == 2 * 2 * steps
    assert oracles.levels["main"]["floats_up"] == 2 * 2 * main
    assert oracles.floats_down == 2 * (2 * (1 + 4) + 2 * 4 * 3)  # x at the start and in rounds, ȳ in steps
    assert oracles.gradients == 2 * 2 * (2 * 4 * 3)  # ∇h and ∇g of two samples
    assert oracles.function_values == 2 * 2 * (1 + 2 * 4 * 3)  # g at two points

    method = fs.DSFedDRO(0.05, 0.4, 3, 1.3, 1.4, batch_size=2)
    result = solve(hand.problem, method, data, x0, rounds=4, seed=3)
    x, y = hand.ds_feddro(x0, 4, 0.05, 0.4, 3, 1.3, 1.4)
    np.testing.assert_allclose(result.x, x, rtol=1e-10)
    np.testing.assert_allclose(result.y[0], y, rtol=1e-10)
    assert result.ledger.exchanges == 1 + 4


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_reductions():
    """With full batches: I = 1 is gradient descent on Φ, and so is one client with any I."""
    clients = regression((4, 6, 3))
    data, x0 = fs.FederatedData.from_clients(clients), np.array([0.3, -0.4])
    problem = fs.dro.kl(loss, 0.5)
    descent = solve(problem, fs.MBSGD(0.1), data, x0, rounds=6).x
    for method in (
        fs.FedDRO(0.1, 0.3),
        fs.FedDRO(0.1, 1.0),
        fs.CompositionalFedAvg(0.1, case=2),
        fs.GCIVR(0.1, tau=4),
        fs.FastDRO(0.1),
    ):
        np.testing.assert_allclose(solve(problem, method, data, x0, rounds=6).x, descent, rtol=1e-9)

    alone = fs.FederatedData.from_clients(clients[:1])
    descent = solve(problem, fs.MBSGD(0.1), alone, x0, rounds=6).x
    for method in (fs.FedDRO(0.1, 0.3, I=3), fs.CompositionalFedAvg(0.1, I=3)):
        np.testing.assert_allclose(solve(problem, method, alone, x0, rounds=2).x, descent, rtol=1e-9)
    one_step = solve(problem, fs.DSFedDRO(0.1, 1.0), alone, x0, rounds=6).x
    np.testing.assert_allclose(one_step, descent, rtol=1e-9)

    # without composition (f linear or zero) it is FedAvg
    average = solve(fs.Minimization(loss), fs.FedAvg(0.1, H=3), data, x0, rounds=3).x
    for trivial in (
        fs.Composition([loss, lambda y: y]),
        fs.Composition([lambda x, s: s["a"] @ x, lambda y: 0.0 * y], plain=loss),
    ):
        for method in (
            fs.FedDRO(0.1, 0.5, I=3),
            fs.DSFedDRO(0.1, 0.5, I=3),
            fs.CompositionalFedAvg(0.1, I=3),
        ):
            np.testing.assert_allclose(solve(trivial, method, data, x0, rounds=3).x, average, rtol=1e-9)


# three federated levels and a plain part: the values, and the slopes above them, are exchanged
LEVELS = fs.Composition(
    [
        lambda x, s: {"r": s["a"] @ x - s["b"], "x": x},
        lambda z, s: jnp.stack([z["r"] * s["b"], (s["a"] @ z["x"]) * (1 + s["b"] ** 2)]),
        lambda z, s: jnp.sqrt(1 + (z[0] - s["b"]) ** 2) + 0.5 * (z[1] - 1) ** 2,
    ],
    plain=lambda x, s: 0.5 * x @ x + 0.1 * s["b"] * x[0],
)


def full_objective(problem, data):
    """Φ over all clients, for a solver that knows them all."""

    def value(x):
        def mean(level, z):
            own = level.mean
            each = [jax.vmap(lambda s: level(z, s))(data.client(i)) for i in range(data.clients)]
            if own is not None:
                means = jnp.stack([own(e, jnp.full(len(e), 1 / len(e))) for e in each])
                return own(means, jnp.full(len(means), 1 / len(means)))
            return jax.tree.map(lambda *e: sum(v.mean(0) for v in e) / len(e), *each)

        z = x
        for level in problem.levels:
            z = level(z) if level.reads == "nothing" else mean(level, z)
        return z if problem.plain is None else z + mean(problem.plain, x)

    return value


def optimum(problem, data, x0):
    """x* and Φ* by a quasi-Newton solver of scipy."""
    value = full_objective(problem, data)
    both = jax.jit(jax.value_and_grad(lambda x: value(jnp.asarray(x))))
    found = optimize.minimize(
        lambda x: tuple(map(np.asarray, both(x))), x0, jac=True, method="BFGS", options={"gtol": 1e-10}
    )
    return found.x, found.fun


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("problem", "method"),
    [
        (fs.dro.kl(loss, 0.5), fs.FedDRO(0.2, 0.5)),
        (fs.dro.kl(loss, 0.5), fs.DSFedDRO(0.2, 0.5)),
        (LEVELS, fs.MBSGD(0.1)),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                (fs.dro.kl(loss, 0.5), fs.GCIVR(0.2, tau=5)),
                (fs.dro.chi2(loss, 4.0), fs.FedDRO(0.2, 0.5)),
                (fs.dro.mean_semideviation(loss, 0.5), fs.FedDRO(0.2, 0.5)),
                (LEVELS, fs.FedDRO(0.1, 0.5)),
                (LEVELS, fs.GCIVR(0.1, tau=5)),
            )
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_reaches_the_optimum(problem, method):
    data, x0 = fs.FederatedData.from_clients(regression((4, 6, 3))), np.array([0.3, -0.4])
    x_star, value = optimum(problem, data, x0)
    result = solve(problem, method, data, x0, rounds=800, eval_every=800)
    np.testing.assert_allclose(result.x, x_star, atol=1e-6)
    np.testing.assert_allclose(result.history["objective"][-1], value, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("problem", "make", "eta"),
    [
        (fs.dro.kl(loss, 0.5), fs.FedDRO, 0.001),
        (fs.dro.chi2(loss, 4.0), fs.DSFedDRO, 0.001),
        (LEVELS, fs.DSFedDRO, 0.01),
    ],
)
def test_drift_grows_with_the_local_steps(problem, make, eta):
    """Corollaries 4.4 and 5.3: where clients differ, ‖∇Φ‖² has a part of order η²I², and x one of ηI.

    So the error is proportional to η, its extrapolation to η = 0 is x*, and it grows with I: in FedDRO, as I
    − 1.
    """
    data, x0 = fs.FederatedData.from_clients(regression((4, 6, 3))), np.array([0.3, -0.4])
    x_star, _ = optimum(problem, data, x0)

    def limit(eta, I):
        return solve(problem, make(eta, 0.5, I), data, x_star, rounds=12_000 // I, eval_every=12_000).x

    small, double, longer = limit(eta, 3), limit(2 * eta, 3), limit(eta, 5)
    error = np.linalg.norm(small - x_star)
    assert error > 1e-5
    np.testing.assert_allclose(np.linalg.norm(double - x_star) / error, 2.0, rtol=0.05)
    assert np.linalg.norm(2 * small - double - x_star) < 0.05 * error
    growth = np.linalg.norm(longer - x_star) / error
    np.testing.assert_allclose(growth, 2.0 if make is fs.FedDRO else growth, rtol=0.05)
    assert growth > 1.5


@pytest.mark.long
@pytest.mark.parametrize("make", [fs.FedDRO, fs.DSFedDRO])
def test_fewer_rounds_with_more_local_steps(make):
    data, x0 = fs.FederatedData.from_clients(regression((4, 6, 3), shift=0.1)), np.array([3.0, -4.0])
    problem = fs.dro.kl(loss, 2.0)
    needed = []
    for I in (1, 4):
        history = solve(problem, make(0.02, 0.9, I), data, x0, rounds=400).history["objective"]
        needed.append(np.argmax(history < history[0] / 2))
    np.testing.assert_allclose(needed[0] / needed[1], 4, rtol=0.15)


@pytest.mark.long
@pytest.mark.parametrize("make", [fs.FedDRO, fs.DSFedDRO])
def test_linear_speed_up(make):
    """At a fixed step what remains is the variance of a mean over K clients: K times less with K of them."""
    rng = np.random.default_rng(0)
    pool = {"a": 1 + 0.5 * rng.normal(size=(4096, 1)), "b": rng.normal(size=4096)}
    problem = fs.Composition(
        [lambda x, s: s["a"] @ x - s["b"], lambda y: jnp.sqrt(1 + y**2)],
        plain=lambda x, s: 0.5 * (x - s["b"]) @ (x - s["b"]),
    )
    spread = []
    for K in (1, 8):
        # every client holds the same samples: it is the number of draws that differs
        data = fs.FederatedData.from_clients([pool] * K)
        runs = fs.sweep(
            problem,
            make(0.05, 0.2, I=2, batch_size=1),
            data,
            np.zeros(1),
            rounds=60,
            eval_every=60,
            seeds=range(400),
            default_metrics=False,
            progress=False,
        )
        spread.append(np.var([float(run.x[0]) for run in runs]))
    # the ratio of two sample variances of 400 has a standard deviation of 2/√400 = 10 %
    np.testing.assert_allclose(spread[0] / spread[1], 8, rtol=0.3)


def test_steps_stay_inside_the_compiled_loop():
    """Neither rounds nor steps are unrolled: the problem's functions are traced equally often for any I."""
    data = data_of({"a": 4.0, "b": -4.0}, {"a": -2.0, "b": 4.0})
    counts = []
    for I in (3, 30):
        calls = []

        def g(x, s, calls=calls):
            calls.append(1)
            return s["a"] * x + s["b"]

        problem = fs.Composition([g, lambda y: jnp.sqrt(y**2 + 4)])
        solve(problem, fs.FedDRO(ETA, 0.5, I=I), data, 0.5, rounds=50, eval_every=10)
        counts.append(len(calls))
    assert counts[0] == counts[1] < 30


LARGE = [{"a": 30 * r["a"], "b": 30 * r["b"]} for r in regression((6, 6, 6, 6), seed=1)]


@pytest.mark.parametrize(
    ("method", "reaches"),
    [
        (fs.FedDRO(2e-5, 0.5), True),
        (fs.PDSGD(2e-5, 0.1, 1.0), False),
        *(
            pytest.param(method, True, marks=pytest.mark.slow)
            for method in (
                fs.FedDRO(2e-5, 0.2, I=4, batch_size=2),
                fs.DSFedDRO(2e-5, 0.9, 2, 1.3, 1.4),
                fs.MBSGD(2e-5, batch_size=3),
                fs.GCIVR(2e-5, tau=5, batch_size=3),
                fs.CompositionalFedAvg(2e-5, I=2),
                fs.FastDRO(2e-5, batch_size=3),
            )
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_kl_is_stable_in_float32(method, reaches):
    """Losses from 1e3 down and λ = 1e-2: exponents of 1e5, and nothing overflows or stalls."""
    data, x0 = fs.FederatedData.from_clients(LARGE), np.array([1.0, -1.0])
    problem = fs.dro.kl(loss, 1e-2)
    result = solve(problem, method, data, x0, rounds=300, eval_every=50)
    objective = result.history["objective"]
    assert objective[0] > 1e3
    assert np.isfinite(objective).all()
    assert np.isfinite(jax.tree.leaves(result.state)[0]).all()
    if reaches:
        assert objective[-1] < 0.9 * objective[0]


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("make", [fs.FedDRO, fs.DSFedDRO])
def test_a_plain_part_of_zero_is_none(make):
    data, x0 = fs.FederatedData.from_clients(regression((4, 6, 3))), np.array([0.3, -0.4])
    problem = fs.dro.kl(loss, 0.5)
    zero = dataclasses.replace(problem, plain=lambda x, s: 0.0 * s["b"])
    with_zero, without = (
        solve(p, make(0.1, 0.3, I=3, batch_size=2), data, x0, rounds=3).x for p in (zero, problem)
    )
    np.testing.assert_allclose(with_zero, without, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_beta_one_and_one_step_is_mbsgd_on_minibatches():
    """x ← x − η ∇(h_B + f(g_B))(x), with the minibatches of all clients together."""
    clients, x0 = regression((5, 4)), np.array([0.3, -0.4])
    hand, data = ByHand(clients, seed=3, batch=2), fs.FederatedData.from_clients(clients)
    x = x0
    for r in range(3):
        rows = [hand.draw(k, r, 0) for k in range(2)]
        y = np.mean([hand.g(k, rows[k], x) for k in range(2)], axis=0)
        x = x - 0.05 * np.mean([hand.direction(k, rows[k], x, y) for k in range(2)], axis=0)
    result = solve(hand.problem, fs.FedDRO(0.05, 1.0, batch_size=2), data, x0, rounds=3, seed=3)
    np.testing.assert_allclose(result.x, x, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("make", [fs.FedDRO, fs.DSFedDRO, fs.MBSGD, fs.GCIVR, fs.FastDRO])
def test_cvar_reaches_the_optimum_of_the_epigraph(make):
    """min η + mean s/α s.t. s ≥ ℓ(x) − η, s ≥ 0: convex, so SLSQP finds it."""
    level, sizes = 0.4, (4, 6, 3)
    clients = regression(sizes)
    a, b = (np.concatenate([c[k] for c in clients]) for k in ("a", "b"))
    shares = np.concatenate([np.full(n, 1 / (3 * n)) for n in sizes])
    found = optimize.minimize(
        lambda v: v[2] + shares @ v[3:] / level,
        np.concatenate([[0.3, -0.4, 0.0], np.ones(13)]),
        bounds=[(None, None)] * 3 + [(0, None)] * 13,
        constraints={"type": "ineq", "fun": lambda v: v[3:] + v[2] - 0.5 * (a @ v[:2] - b) ** 2},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 1000},
    )
    assert found.success
    step = lambda r: 0.5 / (1 + r / 20)  # noqa: E731
    method = make(step, 0.5) if make in (fs.FedDRO, fs.DSFedDRO) else make(step)
    data = fs.FederatedData.from_clients(clients)
    result = solve(
        fs.dro.cvar(loss, level), method, data, np.array([0.3, -0.4]), rounds=8000, eval_every=8000
    )
    # a step at a kink leads away from it by a step: the last one is 0.00125, and slopes are of order 1
    np.testing.assert_allclose(result.history["objective"][-1], found.fun, atol=3e-3)
    np.testing.assert_allclose(result.x.x, found.x[:2], atol=2e-2)


LAMBDA = 1e-2
AT_LAMBDA = {
    "kl": fs.dro.kl(loss, LAMBDA),
    "chi2": fs.dro.chi2(loss, LAMBDA),
    "chi2, nonnegative": fs.dro.chi2(loss, LAMBDA, nonnegative=True),
    "cvar": fs.dro.cvar(loss, LAMBDA),
    "kl-cvar": fs.dro.kl_cvar(loss, 0.1, LAMBDA),
    "semideviation": fs.dro.mean_semideviation(loss, 1.0),
    "group": fs.dro.group(loss, 2, LAMBDA),
    "fair": fs.fairness.equal_opportunity(lambda x, s: s["a"] @ x, loss, 2, lam=LAMBDA),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", AT_LAMBDA)
def test_every_objective_is_stable_in_float32(name):
    """Losses from 1e3 down and λ = 1e-2: value and slope in float32 are those in float64."""
    problem = AT_LAMBDA[name]
    clients = [{**c, "group": np.arange(6, dtype=np.int32) % 2, "y": np.ones(6, np.int32)} for c in LARGE]

    def both():
        data = fs.FederatedData.from_clients(clients)
        x = problem.start_x(jnp.array([1.0, -1.0]))
        x = x._replace(eta=jnp.asarray(500.0)) if getattr(problem, "lifted", False) else x
        value, slopes = jax.value_and_grad(full_objective(problem, data))(x)
        return float(value), np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(slopes)])

    single = both()
    with jax.enable_x64(True):
        double = both()
    assert max(0.5 * ((c["a"] @ [1.0, -1.0] - c["b"]) ** 2).max() for c in clients) > 1e3
    np.testing.assert_allclose(single[0], double[0], rtol=1e-5)
    # KL's weights have the loss's own rounding, ε ℓ, in units of λ
    rounding = 4 * np.finfo(np.float32).eps * 1e3 / LAMBDA
    np.testing.assert_allclose(single[1], double[1], rtol=rounding, atol=rounding * np.abs(double[1]).max())


def test_refuses_bad_arguments(two_clients):
    with pytest.raises(ValueError, match="beta"):
        fs.FedDRO(0.1, beta=0.0)
    with pytest.raises(ValueError, match="embedding"):
        fs.DSFedDRO(0.1, 0.5, embedding="mean")
    with pytest.raises(ValueError, match="case"):
        fs.CompositionalFedAvg(0.1, case=3)
    with pytest.raises(ValueError, match="inner mean"):
        solve(fs.Composition([lambda x, s: x * s["a"]]), fs.FedDRO(0.1, 0.5), two_clients, 1.0, rounds=1)
    with pytest.raises(ValueError, match="participation"):
        solve(COUNTEREXAMPLE, fs.FedDRO(0.1, 0.5), two_clients, 1.0, rounds=1, participation=1)


LEVEL, SECOND = (lambda x, s: x * s["a"] + s["b"]), (lambda z, s: s["a"] * z**2)


def test_the_certificate_gives_a_biased_forms_own_advice(two_clients):
    result = solve(COUNTEREXAMPLE, fs.CompositionalFedAvg(ETA, I=2), two_clients, 0.5, rounds=400)
    assert result.certificate.verdict == "biased by drift"
    assert "Use FedMSA, FedDRO with I = 1" in result.certificate.advice
    assert fs.CompositionalFedAvg(ETA, case=2).bias() is None  # compositional gradient descent


def test_the_papers_form_with_one_mean_is_exact(two_clients):
    """g = E(a x + b), f = y² + 2y: the mean of the clients' Jacobians times f'(z) is the gradient."""
    problem = fs.Composition([LEVEL, lambda y: y**2 + 2 * y])
    method = fs.FedMSA(0.05, 0.5, K=2, adjoint=False)
    result = solve(problem, method, two_clients, 0.5, rounds=400, eval_every=400)
    a, b = np.mean(CLIENTS, 0)
    np.testing.assert_allclose(result.x, (-1 - b) / a, atol=1e-6)


def test_the_theorems_shortest_run():
    """Theorem F.1 with all constants 1 and one client: T_th = 432·I², I = ⌊T^¼⌋."""
    ones = {"clients": 1, "B_f": 1.0, "L_g": 1.0, "L_h": 1.0}
    with pytest.raises(ValueError, match=r"T=10000 is below the theorem's T_th = 4\.32e\+04"):
        fs.FedDRO.from_theory(T=10_000, **ones)
    assert fs.FedDRO.from_theory(T=1_000_000, **ones).I == 31
