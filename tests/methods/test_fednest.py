"""FedNest, SimFBO, hypergradient descent and SOBA on problems solved in closed form."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.methods._shared.implicit import conjugate_gradients

pytestmark = pytest.mark.usefixtures("x64")


@pytest.fixture(scope="module")
def quadratic():
    return fs.quadratic_bilevel(clients=4, n=3, p=4)


def run(q, method, rounds, **options):
    start = {"x0": np.zeros(q.x_star.size), "y0": np.zeros(q.y_star.size)}
    options = {**start, "progress": False, "eval_every": rounds, "default_metrics": False, **options}
    return fs.solve(q.problem, method, q.data, rounds=rounds, **options)


def matrices(q):
    return (np.asarray(q.data.train[k]).mean(0) for k in "ABcMb")


def inner_solution(q, x, steps, beta):
    """``steps`` of gradient descent on the mean lower level, from zero."""
    A, B, c, _, _ = matrices(q)
    y = np.zeros(q.y_star.size)
    for _ in range(steps):
        y = y - beta * (A @ y - B @ x - c)
    return y


# FedNest


@pytest.mark.slow
def test_a_cohort_drawn_anew_for_every_inner_averaging():
    """One of two clients with minimisers ±1, where y would end at that of the round's own client.

    Drawn anew y follows y ← (1−β)y + βc with c = ±1 at random, of variance β/(2−β).
    """
    data = fs.FederatedData.from_clients([{"c": np.array([c])} for c in (-1.0, 1.0)])
    problem = fs.Bilevel(
        upper=lambda x, y, s: x**2 + y**2, lower=lambda x, y, s: (y - s["c"]) ** 2 / 2, same_samples=True
    )
    start = {
        "x0": np.zeros(()),
        "y0": np.zeros(()),
        "rounds": 1,
        "participation": 1,
        "default_metrics": False,
    }
    method = fs.FedNest(0.1, 0.1, T=60, N=1, inverse="none", redraw=True)
    runs = fs.sweep(problem, method, data, **start, seeds=range(200), progress=False)
    y = np.array([run.y for run in runs])
    assert abs(y.mean()) < 4 * np.sqrt(0.1 / 1.9 / 200)
    np.testing.assert_allclose(y.var(), 0.1 / 1.9, rtol=0.4)


@pytest.mark.slow
@pytest.mark.parametrize("inverse", ["series", "neumann", "cg"])
def test_minibatches_leave_the_mean_of_the_series(inverse):
    """E p = H⁻¹ b: the factors' samples are independent. CG has one batch, hence E[H_B⁻¹] b."""
    curves = [np.array([[0.5, 2.0], [1.5, 1.0]]), np.array([[0.2, 1.2], [0.8, 0.6], [0.5, 0.9]])]
    data = fs.FederatedData.from_clients([{"c": c} for c in curves])
    problem = fs.Bilevel(
        upper=lambda x, y, s: x + y["a"] + 2 * y["b"],
        lower=lambda x, y, s: (s["c"][0] * y["a"] ** 2 + s["c"][1] * y["b"] ** 2) / 2,
        same_samples=True,
    )
    method = fs.FedNest(0.1, 0.1, N=2 if inverse == "cg" else 8, ell=2.0, inverse=inverse, batch_size=1)
    number = 3000 if inverse == "neumann" else 500
    start = {"x0": np.zeros(()), "y0": {"a": np.zeros(()), "b": np.zeros(())}}
    runs = fs.sweep(
        problem, method, data, **start, rounds=1, seeds=range(number), weights="size", progress=False,
        default_metrics=False,
    )  # fmt: skip
    p = np.array([[run.state.p["a"], run.state.p["b"]] for run in runs])
    H, b = np.concatenate(curves).mean(0), np.array([1.0, 2.0])
    if inverse == "cg":
        pairs = [0.4 * one + 0.6 * other for one in curves[0] for other in curves[1]]
        expected = np.mean([b / h for h in pairs], axis=0)
    else:
        expected = (1 - (1 - H / 2) ** 8) * b / H
    error = p.std(0) / np.sqrt(number)
    assert (error < 0.04 * expected).all()
    assert (np.abs(p.mean(0) - expected) < 4 * error).all()


@pytest.mark.parametrize("inverse", ["series", "cg", "none", "neumann"])
def test_the_first_round_of_fednest(quadratic, inverse):
    """τ = 1, from x = 0: gradient steps in y, the linear system as asked for, one hypergradient step."""
    _, B, _, M, b = matrices(quadratic)
    A = next(matrices(quadratic))
    method = fs.FedNest(0.1, 0.2, T=5, tau=1, N=3, ell=4.0, inverse=inverse)
    result = run(quadratic, method, 1)
    y = inner_solution(quadratic, np.zeros(3), 5, 0.2)
    slope = M @ np.concatenate([np.zeros(3), y]) - b
    shrink = np.eye(4) - A / 4.0
    powers = [np.linalg.matrix_power(shrink, n) @ slope[3:] / 4.0 for n in range(3)]
    if inverse == "cg":  # three steps of CG from zero are the best point of the Krylov space
        krylov = np.stack([slope[3:], A @ slope[3:], A @ A @ slope[3:]], axis=1)
        p = krylov @ np.linalg.solve(krylov.T @ A @ krylov, krylov.T @ slope[3:])
        candidates = [p]
    else:
        candidates = {"series": [sum(powers)], "none": [np.zeros(4)], "neumann": [3 * v for v in powers]}[
            inverse
        ]
    expected = [-0.1 * (slope[:3] + B.T @ p) for p in candidates]
    assert min(np.abs(result.x - x).max() for x in expected) < 1e-9
    np.testing.assert_allclose(result.y, y, rtol=1e-10)


@pytest.mark.slow
def test_the_random_series_is_the_whole_one_on_average(quadratic):
    """Over many seeds, N′ is uniform: the three possible first steps are taken a third of the time each."""
    method = fs.FedNest(0.1, 0.2, T=2, N=3, ell=4.0)
    options = {"y0": np.zeros(4), "rounds": 1, "seeds": range(300), "progress": False}
    runs = fs.sweep(quadratic.problem, method, quadratic.data, np.zeros(3), **options)
    steps, counts = np.unique(np.round([r.x for r in runs], 9), axis=0, return_counts=True)
    assert len(steps) == 3
    # 300 draws of a third: a deviation of 33 is four standard deviations
    assert np.abs(counts - 100).max() < 33
    whole = run(quadratic, fs.FedNest(0.1, 0.2, T=2, N=3, ell=4.0, inverse="series"), 1)
    np.testing.assert_allclose(steps.mean(0), whole.x, atol=1e-8)


def test_local_steps_of_fednest(quadratic):
    """SVRG steps by hand: τ = 3, clients that differ."""
    A, B, c, M, b = (np.asarray(quadratic.data.stacked()[k])[:, 0] for k in "ABcMb")
    result = run(quadratic, fs.FedNest(0.3, 0.6, T=1, tau=3, N=2, ell=4.0, inverse="series"), 1)
    x, y = np.zeros(3), np.zeros(4)
    q = (-c).mean(0)
    ys = []
    for i in range(4):
        y_i = y
        for _ in range(3):
            y_i = y_i - 0.2 * (A[i] @ y_i - c[i] + c[i] + q)
        ys.append(y_i)
    y = np.mean(ys, axis=0)
    np.testing.assert_allclose(result.y, y, rtol=1e-10)
    slopes = np.stack([M[i] @ np.concatenate([x, y]) - b[i] for i in range(4)])
    mean_A = A.mean(0)
    p = slopes.mean(0)[3:] / 4 + (np.eye(4) - mean_A / 4) @ slopes.mean(0)[3:] / 4
    h = slopes.mean(0)[:3] + B.mean(0).T @ p
    xs = []
    for i in range(4):
        x_i = x
        for _ in range(3):
            direct = (M[i] @ np.concatenate([x_i, y]) - b[i])[:3]
            x_i = x_i - 0.1 * (direct - slopes[i][:3] + h)
        xs.append(x_i)
    np.testing.assert_allclose(result.x, np.mean(xs, axis=0), rtol=1e-10)


def test_fednest_reaches_the_solution(quadratic):
    """SVRG corrections remove the drift of local steps: the exact solution, though clients differ."""
    method = fs.FedNest(0.2, 0.4, T=5, tau=2, N=6, inverse="cg")
    result = run(quadratic, method, 120)
    np.testing.assert_allclose(result.x, quadratic.x_star, atol=1e-9)
    assert result.ledger.lower_rounds == 120 * (2 * 5 + 1 + 7)


def test_fednest_on_a_minimax_quadratic():
    q = fs.quadratic_minimax(clients=4, n=2, p=3)
    result = run(q, fs.FedNest(0.2, 0.4, T=3, tau=3), 250)
    np.testing.assert_allclose(result.x, q.x_star, atol=1e-10)
    np.testing.assert_allclose(result.y, q.y_star, atol=1e-10)
    one = run(q, fs.FedNest(0.2, 0.4, T=1, tau=1), 1)
    P, Q, b = (np.asarray(q.data.train[k]).mean(0) for k in ("M", "B", "b"))
    y = 0.4 * -b[2:]
    np.testing.assert_allclose(one.y, y, rtol=1e-12)
    np.testing.assert_allclose(one.x, -0.2 * (Q.T @ y - b[:2]), rtol=1e-10)
    assert P.shape == (5, 5)


@pytest.mark.parametrize("federated", [False, True])
def test_fednest_on_a_composition(federated):
    """E‖E[Wx] − c‖²/2 + ‖x‖²/20: a least-squares problem in the means."""
    rng = np.random.default_rng(0)
    clients = [{"W": rng.normal(size=(k, 3, 2)), "c": rng.normal(size=(k, 3))} for k in (2, 2, 2)]
    data = fs.FederatedData.from_clients(clients)
    W, c = (np.concatenate([s[k] for s in clients]).mean(0) for k in "Wc")

    def outer(z, s):
        return 0.5 * jnp.sum((z - s["c"]) ** 2)

    levels = [lambda x, s: s["W"] @ x, outer if federated else lambda z: 0.5 * jnp.sum((z - c) ** 2)]
    problem = fs.Composition(levels, plain=lambda x, s: 0.05 * x @ x)
    solution = np.linalg.solve(W.T @ W + 0.1 * np.eye(2), W.T @ c)
    method = fs.FedNest(0.4, 1.0, tau=2)
    result = fs.solve(problem, method, data, np.ones(2), rounds=300, eval_every=300, progress=False)
    np.testing.assert_allclose(result.x, solution, atol=1e-9)


def test_fednest_refuses_deeper_compositions():
    problem = fs.Composition([lambda x, s: x, lambda z, s: z, lambda z: z.sum()])
    data = fs.FederatedData.from_clients([{"a": np.ones(1)}])
    with pytest.raises(ValueError, match="one inner mean"):
        fs.solve(problem, fs.FedNest(0.1, 0.1), data, np.ones(2), rounds=1)


# SimFBO


def test_simfbo_in_closed_form(quadratic):
    """Two rounds of τ = 2 by hand, from the clients' matrices."""
    A, B, c, M, b = (np.asarray(quadratic.data.stacked()[k])[:, 0] for k in "ABcMb")
    method = fs.SimFBO(0.05, 0.1, 0.15, eta_x=0.02, eta_y=0.03, eta_v=0.04, tau=2, radius=0.5)
    result = run(quadratic, method, 2)
    x, y, v = np.zeros(3), np.zeros(4), np.zeros(4)
    for _ in range(2):
        total = np.zeros((4, 11))
        for i in range(4):
            at = np.concatenate([x, y, v])
            for _ in range(2):
                slope = M[i] @ at[:7] - b[i]
                d_x = slope[:3] + B[i].T @ at[7:]
                d_y = A[i] @ at[3:7] - B[i] @ at[:3] - c[i]
                d_v = A[i] @ at[7:] - slope[3:]
                total[i] += np.concatenate([d_x, d_y, d_v]) / 2
                at = at - np.concatenate([0.02 * d_x, 0.03 * d_y, 0.04 * d_v])
        d = total.mean(0)
        x, y, v = x - 0.05 * d[:3], y - 0.1 * d[3:7], v - 0.15 * d[7:]
        v = v * min(1, 0.5 / np.linalg.norm(v))
    np.testing.assert_allclose(result.x, x, rtol=1e-10)
    np.testing.assert_allclose(result.state.v, v, rtol=1e-10)


def test_one_local_step_of_simfbo_is_soba(quadratic):
    simfbo = run(quadratic, fs.SimFBO(0.1, 0.2, 0.2, 9.0, 9.0, 9.0), 5)
    soba = run(quadratic, fs.SOBA(0.1, 0.2), 5)
    np.testing.assert_allclose(simfbo.x, soba.x, rtol=1e-12)
    long = run(quadratic, fs.SimFBO(0.1, 0.2, 0.2, 0.1, 0.1, 0.1), 700)
    np.testing.assert_allclose(long.x, quadratic.x_star, atol=1e-10)


@pytest.mark.slow
def test_the_ball_of_simfbo_must_hold_the_solution(quadratic):
    """A ball that has the solution's v, ‖A⁻¹ ∇_y f‖, changes nothing; a smaller one, or long steps, do."""
    A, _, _, M, b = matrices(quadratic)
    slope = M @ np.concatenate([quadratic.x_star, quadratic.y_star]) - b
    needed = np.linalg.norm(np.linalg.solve(A, slope[3:]))
    result = run(quadratic, fs.SimFBO(0.1, 0.2, 0.2, 0.1, 0.1, 0.1, radius=1.01 * needed), 2000)
    np.testing.assert_allclose(result.x, quadratic.x_star, atol=1e-10)
    result = run(quadratic, fs.SimFBO(0.1, 0.2, 0.2, 0.1, 0.1, 0.1, radius=0.5 * needed), 2000)
    assert np.linalg.norm(result.x - quadratic.x_star) > 0.01
    assert not result.certificate.solved


@pytest.mark.slow
def test_a_ball_that_keeps_a_simfbo_that_ran_away_finite_is_told():
    """y and v follow x with steps β, and x steps along v: stable where γ_x < 2β (Routh); x* = 1/1.01."""
    problem = fs.Bilevel(
        lambda x, y, s: 0.5 * (y - s["a"]) ** 2 + 0.005 * x**2,
        lambda x, y, s: 0.5 * (y - x) ** 2,
        same_samples=True,
    )
    data = fs.FederatedData.from_clients([{"a": np.ones(2)}])
    start = {"x0": np.zeros(()), "y0": np.zeros(()), "rounds": 4000, "eval_every": 100, "progress": False}
    stable = fs.solve(problem, fs.SimFBO(0.1, 0.1, 0.1, 1.0, 1.0, 1.0), data, **start)
    np.testing.assert_allclose(stable.x, 1 / 1.01, rtol=1e-10)
    away = fs.solve(problem, fs.SimFBO(0.4, 0.1, 0.1, 1.0, 1.0, 1.0), data, **start)
    assert abs(away.x - 1 / 1.01) > 100
    assert away.certificate.verdict == "diverging"


# Hypergradient descent


def test_hypergradient_descent_is_gradient_descent(quadratic):
    """With the lower level and the system solved, steps follow the closed-form ∇F."""
    method = fs.HypergradientDescent(0.1, 0.3, T=150, N=4)
    result = run(quadratic, method, 3)
    x = np.zeros(3)
    for _ in range(3):
        x = x - 0.1 * np.asarray(quadratic.gradient(x))
    np.testing.assert_allclose(result.x, x, rtol=1e-9)


def test_the_first_order_approximation_drops_the_indirect_part(quadratic):
    method = fs.HypergradientDescent(0.1, 0.3, T=2, inverse="none")
    result = run(quadratic, method, 1)
    _, _, _, M, b = matrices(quadratic)
    y = inner_solution(quadratic, np.zeros(3), 2, 0.3)
    np.testing.assert_allclose(result.x, -0.1 * (M @ np.concatenate([np.zeros(3), y]) - b)[:3], rtol=1e-10)
    assert result.ledger.hessian_products == 0


@pytest.mark.slow
def test_a_set_of_x(quadratic):
    """All of them stay in a ball, and end at its boundary's best point."""
    problem = fs.Bilevel(
        quadratic.problem.upper, quadratic.problem.lower, project_x=fs.sets.Ball(0.3), same_samples=True
    )
    inside = quadratic._replace(problem=problem)
    points = [
        run(inside, method, rounds).x
        for method, rounds in (
            (fs.HypergradientDescent(0.1, 0.3, T=20, N=4), 120),
            (fs.SOBA(0.05, 0.2), 500),
            (fs.FedMSA(0.05, 0.2, K=2, clients=4), 250),
            (fs.SimFBO(0.05, 0.2, 0.2, 0.1, 0.1, 0.1), 500),
        )
    ]
    for x in points:
        assert np.linalg.norm(x) == pytest.approx(0.3, abs=1e-7)
        np.testing.assert_allclose(x, points[0], atol=1e-6)
    slope = np.asarray(quadratic.gradient(points[0]))
    np.testing.assert_allclose(slope / np.linalg.norm(slope), -points[0] / 0.3, atol=1e-6)


def test_mistakes(quadratic):
    with pytest.raises(ValueError, match="inverse must be 'neumann', 'series', 'cg' or 'none'"):
        fs.FedNest(0.1, 0.1, inverse="exact")
    with pytest.raises(ValueError, match="products must be 'exact' or 'differences'"):
        fs.HypergradientDescent(0.1, 0.1, products="none")
    own = fs.Bilevel(
        quadratic.problem.upper, quadratic.problem.lower, project_x=lambda x, client: x, same_samples=True
    )
    with pytest.raises(ValueError, match="client-dependent"):
        run(quadratic._replace(problem=own), fs.SOBA(0.1, 0.1), 1)
    boxed = fs.Bilevel(
        quadratic.problem.upper, quadratic.problem.lower, project_y=fs.sets.Box(-1, 1), same_samples=True
    )
    with pytest.raises(ValueError, match="zeroth-order"):
        run(quadratic._replace(problem=boxed), fs.FedNest(0.1, 0.1), 1)


def steep():
    """g_i = 2‖y − x − a_i‖², whose curvature is 4, and f = ½‖y − 1‖² + ½‖x‖²/10: x* = (1 − ā)/1.1."""
    problem = fs.Bilevel(
        lambda x, y, s: 0.5 * ((y - 1) ** 2).sum() + 0.05 * (x**2).sum(),
        lambda x, y, s: 2 * ((y - x - s["a"]) ** 2).sum(),
        same_samples=True,
    )
    data = fs.FederatedData.from_clients([{"a": np.array([[0.0, 1.0]])}, {"a": np.array([[2.0, -2.0]])}])
    return problem, data, (1 - np.array([1.0, -0.5])) / 1.1


def test_the_curvature_is_found_where_it_is_not_given():
    problem, data, x_star = steep()
    method = fs.FedNest(0.3, 0.2, T=2, inverse="series")
    result = fs.solve(
        problem, method, data, np.zeros(2), y0=np.zeros(2), rounds=150, eval_every=150, progress=False
    )
    assert result.state.curvature.ell == pytest.approx(1.25 * 4, rel=1e-6)
    # five terms leave 0.2⁵ of the indirect part, y − 1 = ȳ − 1, away
    np.testing.assert_allclose(result.x, x_star, atol=2e-4)
    assert result.ledger.levels["scaling"]["exchanges"] > 0


@pytest.mark.slow
def test_too_few_terms_are_told():
    """Curvatures 1 and 20: five terms with ℓ = 25 leave (24/25)⁵ = 82 % of the first away."""
    problem, data, _ = steep()
    scale = np.array([0.5, 10.0])
    uneven = fs.Bilevel(problem.upper, lambda x, y, s: (scale * (y - x) ** 2).sum(), same_samples=True)
    start = {"y0": np.zeros(2), "rounds": 1, "progress": False}
    with pytest.warns(UserWarning, match="miss up to 82% .* Give N=57 or more, or inverse='cg'"):
        fs.solve(uneven, fs.FedNest(0.01, 0.01), data, np.zeros(2), **start)
    fs.solve(uneven, fs.FedNest(0.01, 0.01, N=57), data, np.zeros(2), **start)


@pytest.mark.slow
@pytest.mark.parametrize("low", [0.5, 0.0, -0.5])
def test_conjugate_gradients_stop_where_nothing_curves_upwards(low):
    """Of curvature 0.5 they solve the system; of 0 what of it can be solved; of less they stay bounded."""
    Q = np.linalg.qr(np.random.default_rng(0).normal(size=(5, 5)))[0]
    H, b = jnp.asarray(Q @ np.diag([low, low, 1.0, 2.0, 3.0]) @ Q.T), jnp.asarray(Q @ np.ones(5))
    fed = SimpleNamespace(repeat=lambda times, body, carry: jax.lax.fori_loop(0, times, body, carry))
    v = jnp.zeros(5)
    for _ in range(2):  # the second round starts where the first ended
        v = conjugate_gradients(fed, lambda u: H @ u, b, v, 20)
    least = 0.0 if low else np.sqrt(2 / 5)  # two of five entries of b are out of a singular H's reach
    residual = np.linalg.norm(H @ v - b) / np.linalg.norm(b)
    assert least - 1e-9 <= residual <= (1e-9 if low > 0 else 1.0)
    assert np.linalg.norm(v) < 5


@pytest.mark.slow
def test_an_ell_too_small_is_not_certified():
    """The curvature is 4. N terms with ℓ have the factor c = 1 − (1 − 4/ℓ)^N: x = c(1 − ā)/(c + 0.1)."""
    problem, data, x_star = steep()

    def found(ell):
        method = fs.FedNest(0.3, 0.2, T=5, ell=ell, inverse="series")
        run = {"y0": np.zeros(2), "rounds": 60, "eval_every": 60, "progress": False}
        return fs.solve(problem, method, data, np.zeros(2), **run)

    wrong, right, c = found(2.2), found(5.0), 1 - (1 - 4 / 2.2) ** 5
    np.testing.assert_allclose(wrong.x, 1.1 * x_star * c / (c + 0.1), atol=1e-3)
    assert not wrong.certificate.solved
    np.testing.assert_allclose(right.x, x_star, atol=1e-3)
    assert right.certificate.solved
