"""StR-FedAvg against closed forms, an LP solver, a support vector machine, and Algorithm 1 in NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import null_space
from scipy.optimize import linprog, minimize

import fedstrata as fs
from fedstrata.engines.programs import kept

TOY = fs.underdetermined()  # L_h = 1; the start has a component in the null space
SIZE = np.linalg.norm(TOY.x_star)


slow = pytest.mark.filterwarnings("ignore:StRFedAvg. x is still on its way:UserWarning")


def run(method, rounds, toy=TOY, problem=None, **options):
    options = {"eval_every": rounds, "progress": False, "default_metrics": False, **options}
    return fs.solve(problem or toy.problem, method, toy.data, toy.x0, rounds=rounds, **options)


def error(x, toy=TOY):
    """The distance to the selected solution, relative to its size."""
    return np.linalg.norm(np.asarray(x, float) - toy.x_star) / np.linalg.norm(toy.x_star)


def test_the_start_needs_selection():
    """From here, gradient descent on h alone ends at another optimum: these tests can fail."""
    assert error(TOY.project(TOY.x0)) > 1


@pytest.mark.slow
@pytest.mark.parametrize("K", [1, 5])
@pytest.mark.parametrize("rule", ["convex", "strongly_convex"])
def test_last_iterate_is_near_the_minimiser_of_the_regularised_loss(rule, K):
    for rounds in (1000, 3000):
        result = run(fs.StRFedAvg(rule=rule, K=K), rounds)
        _, eta = result.method.tuned(0)
        assert float(result.state.scale.L_h) == pytest.approx(TOY.L_h, rel=1e-3)
        gap = np.asarray(result.state.x, float) - TOY.minimiser(float(eta), float(result.state.scale.L_h))
        assert np.linalg.norm(gap) < 0.05 * SIZE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "eta"),
    [("convex", lambda R: R**-0.25), ("strongly_convex", lambda R: np.log(R) * R ** (-1 / 3))],
)
def test_errors_fall_at_least_as_fast_as_the_theorems_bounds(rule, eta):
    """Theorems 1 and 2: h − h* ≤ O(η), and ‖x̄ − x*‖² ≤ O(√η) since h grows quadratically (κ = 2)."""
    toy = fs.underdetermined(clients=2, n=40, samples=2, seed=1)
    horizons = np.array([1_000, 10_000, 100_000])
    runs = [run(fs.StRFedAvg(rule=rule), int(R), toy=toy, default_metrics=True) for R in horizons]
    bound = eta(horizons.astype(float))
    primary = np.array([r.history["primary"][-1] for r in runs])
    squared = np.array([error(r.x, toy) ** 2 for r in runs])
    assert (np.diff(primary) < 0).all()
    assert (np.diff(squared) < 0).all()
    assert (np.diff(np.log(primary)) <= np.diff(np.log(bound))).all()
    assert (np.diff(np.log(squared)) <= np.diff(np.log(bound)) / 2).all()


@pytest.mark.parametrize("K", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_geometric_schedule_finds_the_selected_solution(K):
    """The rounding of float32 does not add up, over ten times as many rounds or short local steps."""
    for rounds in (1000, 10_000):
        result = run(fs.StRFedAvg(rule="geometric", K=K), rounds)
        assert error(result.x) < 3e-5
        np.testing.assert_array_equal(result.x, result.state.x)


@pytest.mark.slow
def test_decreasing_schedule_beats_the_papers_rule():
    decreasing, paper = run(fs.StRFedAvg(rule="decreasing"), 1000), run(fs.StRFedAvg(), 1000)
    assert error(decreasing.x) < 0.05 < error(paper.x)


@pytest.mark.parametrize(
    ("rule", "options", "gamma", "eta"),
    [
        ("convex", {}, 81**-0.5, 81**-0.25),
        ("convex", {"a": 0.75, "b": 0.5}, 81**-0.75, 81**-0.5),
        ("strongly_convex", {}, 81 ** (-2 / 3), np.log(81) * 81 ** (-1 / 3)),
        ("strongly_convex", {"mu_f": 4.0, "p": 2.0}, 324 ** (-2 / 3), 2 * np.log(81) * 324 ** (-1 / 3)),
        ("weak_sharp", {"eta": 0.2}, 81**-0.5, 0.2),
        ("weak_sharp", {"eta": 0.2, "mu_f": 4.0, "p": 2.0}, 2 * np.log(81) / 324, 0.2),
        ("decreasing", {}, 1.0, 2 / 12),
        ("geometric", {"eta": 0.1, "eta_end": 0.1**5}, 1.0, 0.1 * 0.1 ** (4 * 4 / 80)),
    ],
)
def test_the_rules_are_those_of_the_table(rule, options, gamma, eta):
    """With R = 81, in round 4."""
    np.testing.assert_allclose(fs.StRFedAvg(rule, **options).plan(81).tuned(4), (gamma, eta), rtol=1e-6)


def test_it_is_algorithm_1_in_numpy():
    """Local steps, the server's step, and the θ-weighted average of the iterates, written out."""
    R, K, gamma_g, mu_f, p = 12, 3, 1.5, 0.5, 2.0
    method = fs.StRFedAvg("strongly_convex", K, gamma_g, mu_f=mu_f, p=p, L_h=1.0)
    gamma, eta = (mu_f * R) ** (-2 / 3), p * np.log(R) / (mu_f * R) ** (1 / 3)
    rows, targets = (np.asarray(TOY.data.stacked()[k], float) for k in "ab")
    x, iterates = TOY.x0, []
    for _ in range(R):
        iterates.append(x)
        moved = []
        for A, b in zip(rows, targets, strict=True):
            y = x
            for _ in range(K):
                y = y - gamma / (gamma_g * K) * (eta * (y - TOY.c) + A.T @ (A @ y - b) / len(b))
            moved.append(y - x)
        x = x + gamma_g * np.mean(moved, axis=0)
    theta = 1 / (1 - eta * gamma * mu_f / 2)
    average = np.average(iterates, axis=0, weights=theta ** np.arange(1, R + 1))
    result = run(method, R)
    np.testing.assert_allclose(result.state.x, x, atol=2e-5)
    np.testing.assert_allclose(result.x, average, atol=2e-5)


@slow
def test_l1_selection_is_the_linear_program():
    rng = np.random.default_rng(1)
    b = TOY.A @ np.where(np.arange(40) < 6, rng.normal(size=40), 0) + 0.3 * rng.normal(size=20)
    parts = zip(np.split(TOY.A, 5), np.split(b, 5), strict=True)
    toy = TOY._replace(data=fs.FederatedData.from_clients([{"a": a, "b": t} for a, t in parts]))
    lp = linprog(np.ones(80), A_eq=np.hstack([TOY.A, -TOY.A]), b_eq=b, method="highs")
    solution = lp.x[:40] - lp.x[40:]
    problem = fs.Selection(TOY.problem.primary, fs.prox.L1())
    runs = [run(fs.StRFedAvg("decreasing"), R, toy, problem) for R in (1_000, 10_000, 100_000)]
    gaps = [np.linalg.norm(r.x - solution) / np.linalg.norm(solution) for r in runs]
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < 5e-3
    x = np.asarray(runs[2].x, float)
    assert np.abs(x).sum() == pytest.approx(lp.fun, rel=1e-3)
    assert set(np.flatnonzero(x)) == set(np.flatnonzero(np.abs(solution) > 1e-9))


def test_selection_by_the_envelope_of_l1():
    """Problem (15) as the paper smooths it: Huber's function in place of ℓ1."""
    mu, free = 0.1, null_space(TOY.A)

    def huber(z):
        x = TOY.x_star + free @ z
        inside = np.abs(x) <= mu
        value = np.where(inside, x**2 / (2 * mu), np.abs(x) - mu / 2).sum()
        return value, free.T @ np.where(inside, x / mu, np.sign(x))

    solution = TOY.x_star + free @ minimize(huber, np.zeros(20), jac=True, tol=1e-12).x
    problem = fs.Selection(TOY.problem.primary, fs.prox.L1())
    runs = [
        run(fs.StRFedAvg("geometric", mu=mu, eta_end=1e-5), R, problem=problem) for R in (10_000, 100_000)
    ]
    gaps = [np.linalg.norm(r.x - solution) / np.linalg.norm(solution) for r in runs]
    assert gaps[1] < gaps[0]
    assert gaps[1] < 2e-3


@slow
def test_logistic_regression_tends_to_the_maximum_margin():
    rng = np.random.default_rng(0)
    X, w = rng.normal(size=(200, 3)), np.array([1.0, -2.0, 0.5])
    distance = X @ w / np.linalg.norm(w)
    D = (X * np.sign(distance)[:, None])[np.abs(distance) > 0.8][:40]
    constraints = {"type": "ineq", "fun": lambda x: D @ x - 1, "jac": lambda x: D}
    svm = minimize(lambda x: x @ x / 2, 5 * w, jac=lambda x: x, constraints=constraints, tol=1e-12).x
    best = 1 / np.linalg.norm(svm)
    data = fs.FederatedData.from_clients([{"d": d} for d in np.split(D, 5)])
    problem = fs.Selection(lambda x, s: jax.nn.softplus(-s["d"] @ x), lambda x: x @ x / 2)
    cosines, margins = [], []
    for end in (1e-1, 1e-2, 1e-3, 1e-4):
        method = fs.StRFedAvg("geometric", eta_end=end)
        result = fs.solve(problem, method, data, -w, rounds=20_000, eval_every=20_000, progress=False)
        x = np.asarray(result.x, float) / np.linalg.norm(result.x)
        cosines.append(x @ svm * best)
        margins.append((D @ x).min() / best)
    assert (np.diff(margins) > 0).all()
    assert (np.diff(cosines) > 0).all()
    assert margins[-1] > 0.95
    assert cosines[-1] > np.cos(np.radians(5))


def test_unscaled_data_is_converted():
    wild = fs.underdetermined(curvature=1e6)
    result = run(fs.StRFedAvg(rule="geometric"), 1000, toy=wild)
    assert error(result.x, wild) < 1e-3
    assert float(result.state.scale.L_h) == pytest.approx(1e6, rel=1e-3)
    with pytest.raises(fs.Diverged):
        run(fs.StRFedAvg(rule="geometric", L_h=1.0), 1000, toy=wild)


@pytest.mark.parametrize("factor", [1e-30, 1e25])
def test_any_units_are_scaled(factor):
    """Too small they would crawl; and the squares of a product's entries leave float32's range."""
    problem = fs.Selection(
        lambda x, s: factor * TOY.problem.primary(x, s), TOY.problem.secondary, same_samples=True
    )
    method = fs.StRFedAvg(rule="geometric")
    assert error(run(method, 1000, problem=problem).x) < 1e-3


@slow
def test_one_client_with_large_data_does_not_diverge():
    """The mean's curvature is a fifth of that client's: K local steps of its size would diverge there."""
    triples = zip([30, 1, 1, 1, 1], TOY.data.stacked()["a"], TOY.data.stacked()["b"], strict=True)
    parts = [{"a": factor * a, "b": factor * b} for factor, a, b in triples]
    toy = TOY._replace(data=fs.FederatedData.from_clients(parts))
    result = run(fs.StRFedAvg(rule="geometric", K=2), 300, toy=toy)
    largest = np.linalg.eigvalsh(parts[0]["a"] @ parts[0]["a"].T / 4)[-1]
    assert largest * 0.999 <= float(result.state.scale.L_max) <= largest * 5 ** (1 / 8)
    before, after = (np.linalg.norm(TOY.A @ x - TOY.b) for x in (TOY.x0, np.asarray(result.x)))
    assert after < before


def test_the_scale_is_counted():
    ledgers = [run(fs.StRFedAvg(K=K), 1000).ledger for K in (1, 5)]
    assert [ledger.levels["scaling"]["exchanges"] for ledger in ledgers] == [20, 21]
    points, samples = 2, 20
    assert [ledger.hessian_products for ledger in ledgers] == [20 * points * samples, 40 * points * samples]
    assert ledgers[0].levels["main"]["exchanges"] == 1000
    assert "scaling" not in run(fs.StRFedAvg("strongly_convex", 3, 1.5, L_h=1.0), 12).ledger.levels


@pytest.mark.slow
def test_weak_sharp_minima_are_found_exactly():
    """h = cᵀx over a box: below the threshold α/(2‖∇f(x*)‖), h + ηf and the problem have one solution."""
    rng = np.random.default_rng(0)
    slopes = rng.normal(size=(5, 1, 8)) + np.array([1.0, -1.0, 2.0, -2.0, 1.5, -0.8, 0, 0])
    slopes[:, :, 6:] -= slopes[:, :, 6:].mean(0)  # no slope, on the mean: two coordinates are left to f
    c, a = slopes.mean((0, 1)), rng.uniform(0.2, 0.8, size=8)
    solution = np.where(c > 1e-9, 0, np.where(c < -1e-9, 1, a))
    threshold = np.abs(c[:6]).min() / (2 * np.linalg.norm(solution - a))
    problem = fs.Selection(
        lambda x, s: s["c"] @ x, lambda x: ((x - jnp.asarray(a, x.dtype)) ** 2).sum() / 2, fs.sets.Box(0, 1)
    )
    toy = TOY._replace(data=fs.FederatedData.from_clients([{"c": s} for s in slopes]), x0=np.full(8, 0.5))
    for mu_f in (None, 1.0):
        result = run(fs.StRFedAvg("weak_sharp", 2, mu_f=mu_f, eta=threshold, p=8.0), 3000, toy, problem)
        np.testing.assert_array_equal(result.state.x[:6], solution[:6])
        np.testing.assert_allclose(result.state.x[6:], solution[6:], rtol=1e-4)
        assert np.linalg.norm(result.x - solution) < 0.1
    above = run(fs.StRFedAvg("weak_sharp", 2, eta=20 * threshold), 3000, toy, problem)
    assert np.linalg.norm(above.state.x - solution) > 0.1


def test_sampled_clients_and_minibatches():
    """At the solution every client's gradient of h vanishes, so noise does not keep the method away."""
    method = fs.StRFedAvg("geometric", K=2, gamma=0.5, batch_size=2)
    result = run(method, 10_000, participation=3, seed=2)
    assert error(result.x) < 1e-2


def test_nonsmooth_primary():
    """A lasso with every column twice: of all ways to share a coefficient, the shortest halves it."""
    rng = np.random.default_rng(0)
    A = rng.normal(size=(20, 4)) / 3
    b = A @ np.array([1.0, -2.0, 0.0, 0.5])
    twice = np.hstack([A, A])
    data = fs.FederatedData.from_clients(
        [{"a": a, "b": t} for a, t in zip(np.split(twice, 5), np.split(b, 5), strict=True)]
    )
    lam = 0.05

    def lasso(z):
        signed = z[:4] - z[4:]
        return ((A @ signed - b) ** 2).mean() / 2 + lam * z.sum()

    z = minimize(lasso, np.ones(8), bounds=[(0, None)] * 8, tol=1e-14, options={"maxiter": 5000}).x
    half = (z[:4] - z[4:]) / 2
    problem = fs.Selection((TOY.problem.primary, fs.prox.L1(lam)), lambda x: x @ x / 2)
    toy = TOY._replace(data=data, x0=rng.normal(size=8))
    result = run(fs.StRFedAvg("geometric", eta_end=1e-5), 2000, toy, problem)
    np.testing.assert_allclose(result.x, np.tile(half, 2), atol=2e-3)


def test_a_set_as_primary_projects():
    """And a steep secondary does not diverge: its curvature is estimated too."""
    steep = fs.Selection(fs.prox.Indicator(fs.sets.Ball(1.0)), lambda x: 100 * TOY.problem.secondary(x))
    result = run(fs.StRFedAvg("decreasing", K=2), 200, problem=steep)
    assert float(result.state.scale.L_f) == pytest.approx(100, rel=1e-4)
    np.testing.assert_allclose(result.x, TOY.c / np.linalg.norm(TOY.c), atol=1e-4)


def test_a_known_primary_is_converted():
    H = np.diag([100.0, 0.0]).astype(np.float32)
    problem = fs.Selection(lambda x: x @ H @ x / 2 - 100 * x[0], lambda x: ((x - 3) ** 2).sum() / 2)
    toy = TOY._replace(x0=np.array([5.0, -5.0]))
    result = run(fs.StRFedAvg("geometric", K=2), 1000, toy, problem)
    np.testing.assert_allclose(result.x, [1, 3], atol=1e-3)


def test_the_secondary_is_measured_on_validation_samples():
    valid = [{"a": np.ones((2, 40)), "b": np.full(2, float(i))} for i in range(5)]
    data = fs.FederatedData.from_clients(
        [{"a": a, "b": b} for a, b in zip(TOY.data.stacked()["a"], TOY.data.stacked()["b"], strict=True)],
        valid=valid,
    )
    problem = fs.Selection(
        lambda x, s: s["b"] * 0 + x @ x, lambda x, s: s["b"] + 0 * x.sum(), same_samples=True
    )
    method = fs.StRFedAvg(L_h=1.0)
    result = fs.solve(problem, method, data, TOY.x0, rounds=0, progress=False)
    assert result.history["secondary"][0] == 2.0


def test_the_horizon_is_the_number_of_rounds():
    told = run(fs.StRFedAvg(R=40.0), 40)
    before = kept()
    planned = run(fs.StRFedAvg(), 40)
    assert planned.method.R == 40
    np.testing.assert_array_equal(planned.x, told.x)
    shorter = run(fs.StRFedAvg(), 7)
    assert shorter.method.R == 7
    assert kept() == before
    swept = fs.sweep(
        TOY.problem,
        [fs.StRFedAvg(gamma_g=g) for g in (1.0, 2.0)],
        TOY.data,
        TOY.x0,
        rounds=40,
        progress=False,
    )
    np.testing.assert_allclose(swept[0].x, planned.x, rtol=1e-5, atol=1e-6)


def test_resume_keeps_the_horizon(tmp_path):
    whole = run(fs.StRFedAvg(), 8, eval_every=2)
    run(
        fs.StRFedAvg(), 8, eval_every=2, checkpoint=tmp_path, callbacks=[lambda p: p.round >= 4]
    )  # stopped half-way
    with pytest.raises(fs.CheckpointError, match="R: 8"):
        run(fs.StRFedAvg(), 9, eval_every=2, checkpoint=tmp_path, resume=True)
    resumed = run(fs.StRFedAvg(), 8, eval_every=2, checkpoint=tmp_path, resume=True)
    np.testing.assert_array_equal(resumed.x, whole.x)
    assert resumed.ledger == whole.ledger


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rule": "fast"}, "rule must be 'convex', 'strongly_convex'"),
        ({"rule": "weak_sharp"}, "needs eta"),
        ({"rule": "geometric", "eta": lambda r: 0.1}, "as a number"),
        ({"rule": "geometric", "eta": 0.0}, "must be positive"),
        ({"eta": np.ones(3)}, r"eta must be a number ≥ 0, .*the shape \(3,\)"),
        ({"returns": "best"}, "'average', 'last' or None"),
        ({"K": 0}, "K must be"),
        ({"mu_f": -1.0}, "mu_f must be"),
    ],
)
def test_bad_hyper_parameters(arguments, words):
    with pytest.raises(ValueError, match=words):
        fs.StRFedAvg(**arguments)


def test_bad_problems():
    with pytest.raises(TypeError, match=r"primary must be a function.*L1"):
        fs.Selection(3.0, TOY.problem.secondary, same_samples=True)
    with pytest.raises(TypeError, match="secondary must be"):
        fs.Selection(TOY.problem.primary, (fs.prox.L1(), fs.prox.LogSum()))
    twice = fs.Selection((TOY.problem.primary, fs.prox.L1()), fs.prox.L1())
    with pytest.raises(ValueError, match="Give mu"):
        run(fs.StRFedAvg(), 1, problem=twice)
    with pytest.raises(TypeError, match=r"secondary\(x, sample\)"):
        run(fs.StRFedAvg(), 1, problem=fs.Selection(TOY.problem.primary, lambda x, s: x, same_samples=True))
    with pytest.raises(TypeError, match=r"Selection.project must return a point like x.*\[40\].*\[2\]"):
        run(
            fs.StRFedAvg(),
            1,
            problem=fs.Selection(
                TOY.problem.primary, TOY.problem.secondary, lambda x: x[:2], same_samples=True
            ),
        )
    batch = fs.Selection(
        fs.per_batch(lambda x, s: (s["a"] @ x).var()), TOY.problem.secondary, same_samples=True
    )
    unequal = [{"a": np.ones((n, 40)), "b": np.ones(n)} for n in (2, 3)]
    with pytest.raises(ValueError, match="Give L_h"):
        run(fs.StRFedAvg(), 1, TOY._replace(data=fs.FederatedData.from_clients(unequal)), batch)


@pytest.mark.slow
def test_what_the_papers_rule_leaves():
    """By the closed form: with f = ½‖x‖² the minimiser of h + ηf is 1/(1 + η) of the solution."""
    A = np.array([[1.0, 0.0]])
    data = fs.FederatedData.from_clients([{"a": A, "b": np.ones(1)}])
    problem = fs.Selection(lambda x, s: 0.5 * (s["a"] @ x - s["b"]) ** 2, lambda x: 0.5 * (x @ x))
    more = {"rounds": 2000, "eval_every": 2000, "progress": False}
    paper = fs.solve(problem, fs.StRFedAvg(returns="last"), data, np.array([0.0, 5.0]), **more)
    eta = 2000**-0.25  # and 5 falls by 1 − ηγ̃ in a round, γ̃ = R^(−1/2)
    np.testing.assert_allclose(paper.x, [1 / (1 + eta), 5 * (1 - eta * 2000**-0.5) ** 2000], atol=1e-4)
    assert not fs.certify(paper).solved
    near = fs.solve(problem, fs.StRFedAvg("geometric"), data, np.array([0.0, 5.0]), **more)
    np.testing.assert_allclose(near.x, [1, 0], atol=1e-4)
    assert fs.certify(near).solved


def unlike(rng):
    """Three clients whose losses have no minimiser in common, and the shortest minimiser of their mean."""
    A, b = rng.normal(size=(20, 3)) @ rng.normal(size=(3, 8)), rng.normal(size=20)
    parts = [slice(0, 2), slice(2, 12), slice(12, 20)]
    data = fs.FederatedData.from_clients([{"a": A[p], "b": b[p]} for p in parts])
    W = np.concatenate([np.full(len(A[p]), len(A[p]) ** -0.5) for p in parts])
    answer = np.linalg.lstsq(A * W[:, None], b * W, rcond=1e-9)[0]
    return TOY._replace(data=data, x0=rng.normal(size=8), x_star=answer)


UNLIKE = unlike(np.random.default_rng(10))
SHORTEST = fs.Selection(TOY.problem.primary, lambda x: x @ x / 2)


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "limit"), [("geometric", 1e-3), ("decreasing", 1e-2)])
def test_local_steps_on_unlike_clients_drift_ever_less(rule, limit):
    """With K = 5 and steps that stay both end 5 % off."""
    assert error(run(fs.StRFedAvg(rule, K=5), 3000, UNLIKE, SHORTEST).x, UNLIKE) < limit


@pytest.mark.slow
def test_draws_of_unlike_clients_are_noise_that_fades():
    """γ̃ = 1 all the way ends 25 % off; what falls over the second half of more rounds ends ever nearer."""
    sampled = {"participation": 2, "problem": SHORTEST, "toy": UNLIKE}
    constant = error(run(fs.StRFedAvg("decreasing"), 3000, **sampled).x, UNLIKE)
    falling = error(run(fs.StRFedAvg("geometric"), 30_000, **sampled).x, UNLIKE)
    assert falling < 0.03 < 0.1 < constant


def test_a_primary_without_curvature_is_told_of():
    """max(0, |a·x − b| − ε) has none, and its kinks throw steps that stay back and forth."""
    tube = fs.Selection(lambda x, s: jnp.maximum(0, jnp.abs(s["a"] @ x - s["b"]) - 0.1), lambda x: x @ x / 2)
    with pytest.warns(UserWarning, match="has no curvature.*weak_sharp"):
        run(fs.StRFedAvg("geometric"), 1, problem=tube)
    average = run(fs.StRFedAvg("weak_sharp", eta=0.05), 400, problem=tube)
    last = run(fs.StRFedAvg("weak_sharp", eta=0.05, returns="last"), 400, problem=tube)
    np.testing.assert_array_equal(last.x, average.state.x)


@pytest.mark.slow
@pytest.mark.parametrize(("curvature", "solved"), [(1e-1, True), (1e-4, False)])
def test_flat_directions_that_are_not_solved_are_told_of(curvature, solved):
    """h = ½(x₀ − 1)² + ½c(x₁ − 1)²: after R steps of 1 about (1 − c)^R of x₁'s way is left; x₂ is free."""
    c = np.sqrt(2 * np.array([1.0, curvature]))
    parts = [{"a": np.array([[c[0], 0, 0]]), "b": c[:1]}, {"a": np.array([[0, c[1], 0]]), "b": c[1:]}]
    toy = TOY._replace(data=fs.FederatedData.from_clients(parts), x0=np.array([0.0, 0.0, 1.0]))
    result = run(fs.StRFedAvg("geometric"), 1000, toy, SHORTEST)
    assert (np.linalg.norm(result.x - np.array([1, 1, 0])) < 0.1) == solved
    assert result.certificate.solved == solved
