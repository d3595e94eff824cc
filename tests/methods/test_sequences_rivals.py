"""FedSTORM and FedF2SA: reductions, limits in closed form, and the bias of the penalty."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs

pytestmark = [pytest.mark.usefixtures("x64"), pytest.mark.slow]  # rows of methods fail as well
N, P = 2, 3


@pytest.fixture(scope="module")
def bilevel():
    return fs.quadratic_bilevel(clients=3, n=N, p=P)


def solve(problem, data, method, rounds, **more):
    more = {"eval_every": rounds, "progress": False, "certify": False, **more}
    return fs.solve(problem, method, data, np.ones(N), y0=np.ones(P), rounds=rounds, **more)


# FedSTORM


def test_one_step_with_full_batches_is_one_of_soba(bilevel):
    """The estimates are then the maps' means, whatever c is: simultaneous steps on (P, S)."""
    same = solve(bilevel.problem, bilevel.data, fs.SOBA(0.05, 0.1), 4)
    for c in (0.0, 0.3, 1.0):
        found = solve(bilevel.problem, bilevel.data, fs.FedSTORM(0.05, 0.1, c=c), 4)
        np.testing.assert_allclose(found.x, same.x, rtol=1e-12)
        np.testing.assert_allclose(found.y, same.y, rtol=1e-12)


def test_what_forgets_nothing_does_not_drift(bilevel):
    """Nor do two steps: the first one at the solution does not move, so the second is evaluated there."""

    def distance(c, I):
        result = solve(bilevel.problem, bilevel.data, fs.FedSTORM(0.03, 0.1, c=c, I=I), 800)
        return np.linalg.norm(result.x - bilevel.x_star)

    assert distance(0.0, 4) < 1e-8
    assert distance(1.0, 2) < 1e-8
    assert distance(1.0, 4) > 1e-4


def test_a_round_of_two_steps_by_hand():
    """Minimax with scalars, ½ a x² + x y − ½ d y² − b x: two steps, c = ½, by the pseudo-code."""
    a, b, d = np.array([1.0, 3.0]), np.array([1.0, -2.0]), np.array([2.0, 1.0])
    data = fs.FederatedData.from_clients(
        [{"a": a[i : i + 1], "b": b[i : i + 1], "d": d[i : i + 1]} for i in (0, 1)]
    )
    game = fs.Minimax(lambda x, y, s: s["a"] * x**2 / 2 + x * y - s["d"] * y**2 / 2 - s["b"] * x)

    def maps(i, x, y):
        return np.array([a[i] * x + y - b[i], d[i] * y - x])

    z = np.array([1.0, 0.5])
    direction = np.mean([maps(i, *z) for i in (0, 1)], axis=0)
    for _ in range(2):
        ends, lefts = [], []
        for i in (0, 1):
            first = z - [0.1, 0.2] * direction
            own = maps(i, *first) + 0.5 * (direction - maps(i, *z))
            ends.append(first - [0.1, 0.2] * own)
            lefts.append(0.5 * (own - maps(i, *first)))
        z = np.mean(ends, axis=0)
        direction = np.mean([left + maps(i, *z) for i, left in enumerate(lefts)], axis=0)
    method = fs.FedSTORM(0.1, 0.2, c=0.5, I=2)
    result = fs.solve(game, method, data, 1.0, y0=0.5, rounds=2, progress=False, certify=False)
    np.testing.assert_allclose([result.x, result.y], z, rtol=1e-12)


def test_estimates_of_minibatches_lose_their_noise():
    """At a point that stays, h ← (1 − c) h + c P(ξ), whose variance is c/(2 − c) times that of P(ξ)."""
    noisy = fs.quadratic_bilevel(clients=2, n=N, p=P, samples=20, noise=2.0)

    def spread(c):
        method, first = (
            fs.FedSTORM(1e-12, 1e-12, c=c, batch_size=1),
            {"h": lambda state: state.direction.x[0]},
        )
        result = solve(
            noisy.problem, noisy.data, method, 3000, metrics=first, eval_every=1, default_metrics=False
        )
        return np.std(result.history["h"][100:])

    assert spread(0.2) / spread(1.0) == pytest.approx(np.sqrt(0.2 / 1.8), rel=0.15)


Q, A = np.array([0.5, 1.0, 2.0]), np.random.default_rng(0).normal(size=(3, 2))
local = fs.Bilevel(
    lambda x, y, s: 0.5 * ((y - s["a"]) ** 2).sum() + 0.1 * (x**2).sum(),
    lambda x, y, s: 0.5 * s["q"] * ((y - s["a"]) ** 2).sum() + 0.5 * ((y - x) ** 2).sum(),
    same_samples=True,
    local=True,
)
own_data = fs.FederatedData.from_clients(
    [{"q": np.array([q]), "a": a[None]} for q, a in zip(Q, A, strict=True)]
)
# y_i = (q a_i + x)/(q + 1), so that y_i − a_i = (x − a_i)/(q + 1)
X_LOCAL = (1 / (Q + 1) ** 2) @ A / ((1 / (Q + 1) ** 2).sum() + 3 * 0.2)


def solve_local(method, rounds, **more):
    more = {"y0": np.zeros(2), "rounds": rounds, "eval_every": rounds, "progress": False, **more}
    return fs.solve(local, method, own_data, np.zeros(2), **more)


def test_lower_levels_of_the_clients_own():
    result = solve_local(fs.FedSTORM(0.2, 0.25, c=0.0, I=3), 600)
    np.testing.assert_allclose(result.x, X_LOCAL, atol=1e-8)
    np.testing.assert_allclose(result.y, (Q[:, None] * A + result.x) / (Q[:, None] + 1), atol=1e-7)
    assert fs.certify(result).solved


def test_clients_that_were_away_correct_their_estimates():
    """Two of three clients a round: what is left is the noise of their choice, of the order of the step."""
    method = fs.FedSTORM(lambda r: 2 / (r + 20), 0.25, c=1.0)
    result = solve_local(method, 4000, participation=2, certify=False)
    np.testing.assert_allclose(result.x, X_LOCAL, atol=0.03)


@pytest.mark.parametrize("cls", [fs.FedSTORM, fs.FedF2SA])
def test_heads_of_the_clients_own_are_rows_of_one_array(cls):
    """A row has the share 1/m in the mean over m clients, so that its step has to be m times as long."""
    rng = np.random.default_rng(0)

    def parts(n):
        return [{"x": rng.normal(size=(n, 2)), "y": rng.integers(0, 2, n)} for _ in range(3)]

    data = fs.FederatedData.from_clients(parts(6), valid=parts(4)).with_client_index()
    one = {"W": np.zeros((2, 2)), "b": np.zeros(2)}
    rows = jax.tree.map(lambda leaf: np.stack([leaf] * 3), one)
    found = [
        fs.solve(
            fs.hyperrepresentation(lambda x, u: jnp.tanh(x * u), 0.1, local), cls(0.1, beta), data,
            np.ones(2), y0=y0, rounds=4, progress=False, certify=False,
        )
        for local, beta, y0 in ((True, 0.2, one), (False, 0.6, rows))
    ]  # fmt: skip
    np.testing.assert_allclose(found[0].x, found[1].x, rtol=1e-10)
    assert np.abs(found[0].x - 1).max() > 1e-3
    jax.tree.map(lambda *pair: np.testing.assert_allclose(*pair, atol=1e-12), found[0].y, found[1].y)


# FedF2SA


def penalised(bilevel, lam, order):
    """The zero of line 4, with y and z solved: everything is affine in x."""
    A, B, c, M, b = (bilevel._mean(k) for k in "ABcMb")
    XX, XY, YX, YY = M[:N, :N], M[:N, N:], M[N:, :N], M[N:, N:]

    def at(x, nu):
        y = np.linalg.solve(A + nu * YY, B @ x + c - nu * (YX @ x - b[N:]))
        return nu * (XX @ x + XY @ y - b[:N]) - B.T @ y

    def slope(x):
        nu = 1 / lam
        return lam * (at(x, nu) - at(x, 0)) if order == 1 else lam / 2 * (at(x, nu) - at(x, -nu))

    zero = slope(np.zeros(N))
    return -np.linalg.solve(np.stack([slope(e) - zero for e in np.eye(N)], 1), zero)


@pytest.mark.parametrize("order", [1, 2])
def test_the_limit_of_the_penalty(bilevel, order):
    method = fs.FedF2SA(0.01, 0.2, lam=20.0, order=order)
    result = solve(bilevel.problem, bilevel.data, method, 4000)
    np.testing.assert_allclose(result.x, penalised(bilevel, 20.0, order), rtol=1e-6)


@pytest.mark.parametrize("order", [1, 2])
def test_the_bias_of_the_penalty_falls_with_its_weight(bilevel, order):
    near, nearer = (np.linalg.norm(penalised(bilevel, lam, order) - bilevel.x_star) for lam in (1e3, 2e3))
    assert near / nearer == pytest.approx(2**order, rel=0.02)


def test_a_set_of_y_is_allowed():
    """y(x) = min(x, ½), f = ½(y − 1)² + ⅛(x − 1)²: the set is active, so that x* = 1 and y* = ½."""
    problem = fs.Bilevel(
        lambda x, y, s: 0.5 * (y - s["t"]) ** 2 + 0.125 * (x - s["t"]) ** 2,
        lambda x, y, s: 0.5 * (y - x) ** 2,
        project_y=fs.sets.Box(0.0, 0.5),
        same_samples=True,
    )
    data = fs.FederatedData.from_clients([{"t": np.array([0.5])}, {"t": np.array([1.5])}])
    more = {"y0": 0.0, "rounds": 3000, "eval_every": 3000, "progress": False, "certify": False}
    result = fs.solve(problem, fs.FedF2SA(0.02, 0.3, lam=10.0), data, 0.8, **more)
    assert float(result.x) == pytest.approx(1.0, abs=1e-6)
    assert float(result.y) == pytest.approx(0.5, abs=1e-9)
    moving = fs.Bilevel(problem.upper, problem.lower, project_y=lambda y, x: y - x, same_samples=True)
    assert "depends on x" in fs.FedF2SA.refuses(moving)


def test_lower_levels_of_the_clients_own_by_penalty():
    result = solve_local(fs.FedF2SA(0.01, 0.3, lam=30.0, order=2), 3000, certify=False)
    # at order 2 the clients' parts differ from F by O(1/λ²)
    np.testing.assert_allclose(result.x, X_LOCAL, atol=2e-3)
    assert result.y.shape == (3, 2)
