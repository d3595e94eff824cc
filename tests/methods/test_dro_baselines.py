"""FastDRO, PDSGD, GCIVR against worst cases, multipliers, solvers; and who accepts which robust problem."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

import fedstrata as fs
from fedstrata.engines.rounds import one_round
from fedstrata.engines.simulated import Simulated, SimulatedFed
from fedstrata.solving.pose import pose

solve = functools.partial(fs.solve, progress=False)
X0 = np.array([0.3, -0.4])


def loss(x, s):
    return 0.5 * (s["a"] @ x - s["b"]) ** 2


def regression(sizes, seed=0):
    rng = np.random.default_rng(seed)
    return [
        {"a": rng.normal(size=(n, 2)) / 2 + 0.5 * rng.normal(size=2), "b": rng.normal(size=n) + 0.5 * k}
        for k, n in enumerate(sizes)
    ]


def pooled(data, x):
    """All losses, their gradients, and their shares in the clients' mean of means."""
    parts = [data.client(i) for i in range(data.clients)]
    losses = np.concatenate([jax.vmap(loss, (None, 0))(x, p) for p in parts])
    slopes = np.concatenate([jax.vmap(jax.grad(loss), (None, 0))(x, p) for p in parts])
    shares = np.concatenate([np.full(len(p["b"]), 1 / (data.clients * len(p["b"]))) for p in parts])
    return losses, slopes, shares


SETS = {
    "chi2 ball": fs.dro.chi2_ball(loss, 0.5),
    "chi2 penalty": fs.dro.chi2(loss, 0.7, nonnegative=True),
    "cvar": fs.dro.cvar(loss, 0.4),
    "kl-cvar": fs.dro.kl_cvar(loss, 0.4, 0.3),
    "semideviation": fs.dro.mean_semideviation(loss, 0.5),
}


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("problem", SETS.values(), ids=SETS)
def test_a_step_of_fastdro_is_along_the_worst_case(problem):
    data = fs.FederatedData.from_clients(regression((4, 6, 3)))
    losses, slopes, shares = pooled(data, X0)
    p = np.asarray(problem.risk.weights(losses, shares))
    np.testing.assert_allclose(p.sum(), 1, rtol=1e-9)
    result = solve(problem, fs.FastDRO(0.1), data, X0, rounds=1)
    x = result.x.x if problem.lifted else result.x
    np.testing.assert_allclose(x, X0 - 0.1 * p @ slopes, rtol=1e-6)
    if problem.lifted:  # η is beside it, so the objective at the start is the risk itself
        start = solve(problem, fs.FastDRO(1e-12), data, X0, rounds=1).history["objective"][1]
        np.testing.assert_allclose(start, problem.risk.value(losses, shares), rtol=1e-9)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("engine", ["simulated", pytest.param("streamed", marks=pytest.mark.slow)])
def test_all_samples_of_clients_of_very_unequal_size(engine):
    """With KL, q ∝ exp(ℓ/λ): each client's number of losses is its own, and no padding is among them."""
    data = fs.FederatedData.from_clients(regression((4, 30, 12)))
    problem = fs.dro.kl(loss, lam=0.5)
    losses, slopes, shares = pooled(data, X0)
    q = shares * np.exp(losses / 0.5)
    result = solve(problem, fs.FastDRO(0.1), data, X0, rounds=1, engine=engine)
    np.testing.assert_allclose(result.x, X0 - 0.1 * (q / q.sum()) @ slopes, rtol=1e-9)
    if engine == "simulated":  # the same without a cohort is enough of the quick tests
        return
    # A cohort of two: one of the three pairs.
    some = solve(problem, fs.FastDRO(0.1), data, X0, rounds=1, participation=2, engine=engine)
    owners = np.repeat(np.arange(3), data.sizes)
    pairs = [q * (owners != left_out) for left_out in range(3)]
    ends = [X0 - 0.1 * (p / p.sum()) @ slopes for p in pairs]
    assert min(np.abs(some.x - end).max() for end in ends) < 1e-9


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["chi2 ball", "chi2 penalty", "kl-cvar"])
def test_fastdro_reaches_the_optimum_of_smooth_risks(name):
    problem, data = SETS[name], fs.FederatedData.from_clients(regression((4, 6, 3)))
    shares = np.concatenate([np.full(n, 1 / (3 * n)) for n in (4, 6, 3)])

    @jax.jit
    def risk(x):
        losses = [jax.vmap(lambda s: loss(x, s))(data.client(i)) for i in range(3)]
        return problem.risk.value(jnp.concatenate(losses), shares)

    found = optimize.minimize(
        lambda x: float(risk(x)), X0, method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-13}
    )
    result = solve(problem, fs.FastDRO(0.2), data, X0, rounds=1500, eval_every=1500)
    np.testing.assert_allclose(result.x.x, found.x, atol=1e-5)
    # η belongs to the point before the last step, so the value agrees to first order in that step
    np.testing.assert_allclose(result.history["objective"][-1], found.fun, rtol=1e-5)


def test_fastdro_takes_the_minibatches_of_all_clients_together():
    """The worst half of two clients' single samples is the worse of the two, which alone is moved along."""
    data = fs.FederatedData.from_clients(
        [{"a": np.eye(2)[:1], "b": np.zeros(1)}, {"a": np.eye(2)[1:], "b": np.zeros(1)}]
    )
    x = np.array([1.0, 2.0])
    result = solve(fs.dro.cvar(loss, 0.5), fs.FastDRO(0.1, batch_size=1), data, x, rounds=1)
    np.testing.assert_allclose(result.x.x, [1.0, 2.0 - 0.1 * 2.0], rtol=1e-6)
    np.testing.assert_allclose(result.x.eta, 2.0, rtol=1e-6)
    assert result.ledger.floats_up == 2 * (1 + 2)  # a loss, then a gradient
    assert result.ledger.floats_down == 2 * (2 + 2)  # x, then η and the weight at η


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("constraints", ["sampled", "all"])
def test_pdsgd_finds_the_constrained_optimum(constraints):
    """min E‖x − b‖²/2 s.t. x₁ ≤ E c, x₁ + x₂ ≤ 2 E c, x₂ ≥ −10, of which the first two bind."""
    clients = [
        {"b": np.array([[2.0, 1.5]]), "c": np.array([0.25])},
        {"b": np.array([[3.0, 2.5]]), "c": np.array([0.75])},
    ]
    data = fs.FederatedData.from_clients(clients)
    problem = fs.fairness.penalised(
        lambda x, s: 0.5 * (x - s["b"]) @ (x - s["b"]),
        lambda x, s: {"x": x, "c": s["c"]},
        lambda g: jnp.stack([g["x"][0] - g["c"], g["x"].sum() - 2 * g["c"], -10 - g["x"][1]]),
        count=3,
    )
    found = optimize.minimize(
        lambda x: 0.5 * ((x - [2.5, 2.0]) ** 2).sum(),
        np.zeros(2),
        constraints=[{"type": "ineq", "fun": lambda x: np.array([0.5 - x[0], 1 - x.sum(), x[1] + 10])}],
        method="SLSQP",
        options={"ftol": 1e-14},
    )
    rounds = 4000
    decreasing = (lambda r: 0.5 / (1 + r / 20)) if constraints == "sampled" else 0.05
    method = fs.PDSGD(decreasing, 0.5, 1.0, constraints=constraints)
    result = solve(problem, method, data, np.zeros(2), rounds=rounds, eval_every=rounds)
    tolerance = 2e-2 if constraints == "sampled" else 1e-6  # the noise of sampling falls like √step
    np.testing.assert_allclose(result.x, found.x, atol=tolerance)
    if constraints == "all":  # the multipliers are M times those of the mean over constraints
        np.testing.assert_allclose(
            result.state.z / 3, [2.5 - found.x[0] - (2 - found.x[1]), 2 - found.x[1], 0], atol=1e-5
        )


@pytest.mark.usefixtures("x64")
def test_the_threshold_s_step_size_has_the_unit_of_the_loss_squared():
    """A loss times c, with η/c and c² times the factor, is the same run with c times the threshold."""
    data, c = fs.FederatedData.from_clients(regression((4, 6, 3))), 1e3
    one, other = (
        solve(fs.dro.cvar(scaled, 0.4), method, data, fs.dro.Lifted(X0, start), rounds=8, participation=2)
        for scaled, method, start in (
            (loss, fs.MBSGD(0.1, threshold=0.3), 0.2),
            (lambda x, s: c * loss(x, s), fs.MBSGD(0.1 / c, threshold=0.3 * c**2), 0.2 * c),
        )
    )
    np.testing.assert_allclose(other.x.x, one.x.x, rtol=1e-9)
    np.testing.assert_allclose(other.x.eta, c * one.x.eta, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_pdsgd_solves_compositions_as_epigraphs():
    data = fs.FederatedData.from_clients(regression((4, 6, 3)))
    problem = fs.dro.kl(loss, 0.5)
    exact = solve(problem, fs.MBSGD(0.2), data, X0, rounds=1500, eval_every=1500)
    result = solve(problem, fs.PDSGD(0.1, 0.5, 1.0), data, X0, rounds=1500, eval_every=1500)
    np.testing.assert_allclose(result.x, exact.x, atol=1e-6)
    np.testing.assert_allclose(result.state.z, 1, atol=1e-5)
    np.testing.assert_allclose(result.state.t, exact.history["objective"][-1], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_gcivr_restarts_and_counts():
    data = fs.FederatedData.from_clients(regression((5, 5)))
    problem = fs.dro.chi2(loss, 4.0)
    result = solve(problem, fs.GCIVR(0.1, tau=3, batch_size=2), data, X0, rounds=6)
    # two clients, of 5 samples in rounds 0 and 3, of 2 samples at two points in the other four
    assert result.ledger.function_values == 2 * (2 * 5 + 4 * 2 * 2)
    assert result.ledger.gradients == 2 * 2 * (2 * 5 + 4 * 2 * 2)  # of g and h
    assert result.ledger.floats_up == 2 * 6 * (1 + 2 * 2)  # y; z and w
    # right after a restart the step is that of the full batch
    one = solve(problem, fs.GCIVR(0.1, tau=3, batch_size=2), data, X0, rounds=1).x
    np.testing.assert_allclose(one, solve(problem, fs.MBSGD(0.1), data, X0, rounds=1).x, rtol=1e-9)


@pytest.mark.slow
def test_gcivr_reduces_the_variance():
    """Near the optimum x hardly moves, so the differences of line 2 vanish, where MBSGD's noise does not."""
    data = fs.FederatedData.from_clients(regression((8, 8, 8)))
    problem = fs.dro.chi2(loss, 4.0)
    exact = solve(problem, fs.MBSGD(0.2), data, X0, rounds=1000, eval_every=1000).x
    errors = []
    for method in (fs.MBSGD(0.1, batch_size=2), fs.GCIVR(0.1, tau=10, batch_size=2)):
        runs = fs.sweep(problem, method, data, X0, rounds=200, eval_every=200, seeds=range(4), progress=False)
        errors.append(np.mean([np.sum((run.x - exact) ** 2) for run in runs]))
    assert errors[1] < 1e-3 * errors[0]


PROBLEMS = {
    "kl": fs.dro.kl(loss, 0.5),
    "chi2": fs.dro.chi2(loss, 4.0),
    "cvar": fs.dro.cvar(loss, 0.5),
    "semideviation": fs.dro.mean_semideviation(loss, 0.5),
    "groups": fs.dro.group(loss, 2, 0.5),
    "fair": fs.fairness.equal_opportunity(lambda x, s: s["a"] @ x, loss, 2),
}
METHODS = [
    fs.FedDRO(0.05, 0.5, I=2),
    fs.DSFedDRO(0.05, 0.5, I=2),
    fs.CompositionalFedAvg(0.05, I=2),
    fs.GCIVR(0.05),
    fs.FastDRO(0.05),
    fs.PDSGD(0.05, 0.1, 1.0),
    fs.MBSGD(0.05),
    fs.FedMSA(0.05, 0.5, K=2),
]


@pytest.fixture(scope="module")
def grouped():
    clients = [
        {**c, "group": np.arange(len(c["b"]), dtype=np.int32) % 2, "y": np.ones(len(c["b"]), np.int32)}
        for c in regression((4, 4))
    ]
    return fs.FederatedData.from_clients(clients)


every_pair = pytest.mark.parametrize(
    ("problem", "method"),
    [(p, m) for p in PROBLEMS.values() for m in METHODS],
    ids=[f"{p}-{type(m).__name__}" for p in PROBLEMS for m in METHODS],
)


@every_pair
def test_every_method_accepts_every_robust_problem(problem, method, grouped):
    """A round is traced, which needs no compiling: all shapes and structures fit."""
    posed = pose(problem, method, grouped, X0, rounds=1)
    fed = functools.partial(SimulatedFed, Simulated())
    after = jax.eval_shape(
        lambda *args: one_round(fed, posed.setup, method, args[0], jax.random.key(0), *args[1:]),
        posed.carry,
        posed.data.placed(),
        jnp.int32(0),
    )
    assert jax.tree.map(jnp.shape, after.state) == jax.tree.map(jnp.shape, posed.carry.state)


@pytest.mark.slow
@pytest.mark.parametrize("k", range(max(len(METHODS), len(PROBLEMS))))
def test_every_method_and_every_robust_problem_goes_down(k, grouped):
    """In one pair; that all pairs fit together is traced above."""
    problem, method = [*PROBLEMS.values()][k % len(PROBLEMS)], METHODS[k % len(METHODS)]
    result = solve(problem, method, grouped, X0, rounds=2, eval_every=2)
    before, after = result.history["objective"]
    assert after < before  # a small step from a far point leads down


def risk_at(problem, data, x):
    """The robust objective; where it has a second variable, at the best one."""
    return solve(problem, fs.FastDRO(1e-12), data, x, rounds=1).history["objective"][-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", PROBLEMS)
def test_minimax_methods_reach_the_optimum_through_the_minimax_forms(name, grouped):
    problem = PROBLEMS[name]
    minimax, data, y0 = problem.minimax(grouped)
    result = solve(minimax, fs.LocalSGDA(0.2, 0.2), data, X0, y0=y0, rounds=400, eval_every=400)
    robust = solve(problem, fs.MBSGD(0.02), grouped, X0, rounds=2000, eval_every=2000)
    best = robust.x.x if isinstance(robust.x, tuple) else robust.x
    optimum = risk_at(problem, grouped, best)
    np.testing.assert_allclose(risk_at(problem, grouped, result.x), optimum, rtol=0.02)

    # FedRZO minimises F_η, the mean of F over a ball of radius η. For convex F it is F or above, so at its
    # minimiser F is at most F_η(x*), which the worst point on the sphere about x* bounds.
    eta = 0.02
    zeroth = fs.FedRZOMinimax(
        0.05, eta, batch_size=None, lower=fs.FedAvg(0.2), lower_rounds=20, warm_start=True, two_sided=True
    )
    reached = solve(minimax, zeroth, data, X0, y0=y0, rounds=1000, eval_every=1000).x
    angles = np.linspace(0, 2 * np.pi, 8, endpoint=False)
    sphere = [best + eta * np.array([np.cos(t), np.sin(t)]) for t in angles]
    assert risk_at(problem, grouped, reached) <= max(risk_at(problem, grouped, x) for x in sphere)
