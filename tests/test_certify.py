"""Verdicts on points and runs whose solutions are known in closed form."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs

pytestmark = pytest.mark.usefixtures("x64")
ONE = fs.FederatedData.from_clients([{"a": np.array([1.0])}, {"a": np.array([3.0, 5.0])}])  # means 1 and 4


@pytest.mark.parametrize("unit", [pytest.param(1.0, marks=pytest.mark.slow), 1e-9])
def test_the_excess_of_a_bilevel_answer(unit):
    """It is that of F at the solved y, whatever the loss' unit."""
    game = fs.quadratic_bilevel(clients=3, n=2, p=3)
    problem = fs.Bilevel(
        lambda x, y, s: unit * game.problem.upper(x, y, s), game.problem.lower, same_samples=True
    )
    start = np.zeros(2)
    best = fs.certify(problem, game.data, game.x_star, game.y_star, x0=start)
    assert best.solved
    x = game.x_star + 0.3
    found = fs.certify(problem, game.data, x, np.zeros(3), x0=start)
    assert found.verdict == "on its way"
    g = np.asarray(game.gradient(x))
    excess = unit * g @ (x - game.x_star) / 2  # F is quadratic
    assert found.value == pytest.approx(excess, rel=1e-3)
    assert found.interval[0] <= excess * 1.001


@pytest.mark.slow
def test_lower_levels_without_a_minimiser():
    def certified(lower, y):
        problem = fs.Bilevel(lambda x, y, s: (x - 1) ** 2 + y**2, lower, same_samples=True)
        return fs.certify(problem, ONE, np.array(1.0), np.array(y))

    concave = certified(lambda x, y, s: -(y**2), 0.0)
    assert concave.verdict == "not certifiable"
    hump = certified(lambda x, y, s: (y**2 - 1) ** 2, 0.0)
    assert not hump.solved
    assert "saddle" in repr(hump)
    assert certified(lambda x, y, s: (y**2 - 1) ** 2, 1.0).solved
    bent = fs.Bilevel(lambda x, y, s: (x - 1) ** 2 + y**2, lambda x, y, s: -(y**2), same_samples=True)
    result = fs.Result(np.array(1.0), np.array(0.0), {}, fs.Ledger(), None, 0.0, problem=bent, data=ONE)
    assert not fs.diagnose(result).solved


@pytest.mark.slow
def test_an_equilibrium_that_is_not_unique():
    data = fs.FederatedData.from_clients([{"a": np.ones(2)}])
    box = fs.sets.Box(-1.0, 1.0)
    problem = fs.MPEC(lambda x, y, s: (x - 1) ** 2 + (y**2).sum(), lambda x, y, s: 0 * y, project_y=box)
    found = fs.certify(problem, data, np.array(1.0), np.zeros(2))
    assert found.verdict == "not certifiable"
    assert "many solutions" in found.advice


@pytest.mark.slow
def test_a_payoff_that_is_convex_in_y():
    """min_x max_{|y| ≤ 1} (x − .1)²/2 + xy/20 + y²: the maximum is at a corner, and x* = .05."""
    problem = fs.Minimax(
        lambda x, y, s: (x - 0.1) ** 2 / 2 + 0.05 * x * y + y**2, project_y=fs.sets.Box(-1.0, 1.0)
    )
    assert not fs.certify(problem, ONE, np.array(1.0), np.array(0.0)).solved
    assert fs.certify(problem, ONE, np.array(0.05), np.array(1.0)).solved


def test_a_game_without_curvature():
    problem = fs.Minimax(lambda x, y, s: (x - 2) * (y - 1))
    assert fs.certify(problem, ONE, np.array(2.0), np.array(1.0)).solved
    assert not fs.certify(problem, ONE, np.array(2.2), np.array(1.0)).solved


def test_kinks():
    """A median has no small gradient beside it."""
    data = fs.FederatedData.from_clients([{"a": np.array([1.0, 2.0, 7.0])}])
    problem = fs.Minimization(lambda x, s: jnp.abs(x - s["a"]))
    assert fs.certify(problem, data, np.array(2.0)).solved
    assert not fs.certify(problem, data, np.array(2.2)).solved
    risk = fs.dro.cvar(lambda x, s: jnp.abs(x - s["a"]), 0.5)  # the mean of the worst 1.5 losses
    worst = np.array([1.0, 7.0])
    x = worst.mean()  # both weigh alike: 7 − x has weight 2/3, x − 1 the rest, so that x moves towards 7
    assert not fs.certify(risk, data, x - 1.0).solved


@pytest.mark.slow
def test_a_kink_on_a_set():
    """max_y of (x − a)²/2 + xy + y² on a box is smooth but for x = 0, its minimum, where the start is too."""
    data = fs.FederatedData.from_clients([{"a": np.array([0.1, -0.1])}, {"a": np.array([0.05, -0.02])}])
    problem = fs.Minimax(
        lambda x, y, s: (x - s["a"]) ** 2 / 2 + x * y + y**2,
        project_x=fs.sets.Box(-2.0, 2.0),
        project_y=fs.sets.Box(-1.0, 1.0),
    )
    assert fs.certify(problem, data, np.array(0.0), np.array(0.3)).solved


def test_a_part_of_x_in_another_unit():
    """v, a millionth of x, counts by what it does to F."""
    problem = fs.Minimization(lambda x, s: (x["u"] - s["a"]) ** 2 + (1e6 * x["v"] - s["a"]) ** 2)
    best = fs.certify(problem, ONE, {"u": np.array(2.5), "v": np.array(2.5e-6)})
    off = fs.certify(problem, ONE, {"u": np.array(2.5), "v": np.array(0.0)})
    assert best.solved
    assert not off.solved
    assert off.distance < 1e-2


def test_starts_at_the_solution_zero_and_far_away():
    problem = fs.Minimization(lambda x, s: 3 * jnp.abs(x) + (x - s["a"]) ** 2 / 2)  # shrunk to zero
    assert fs.certify(problem, ONE, np.array(0.0), x0=np.array(0.0)).solved
    problem = fs.Minimization(lambda x, s: (x - s["a"]) ** 2)
    assert not fs.certify(problem, ONE, np.array(100.0), x0=np.array(1e7)).solved
    problem = fs.Minimization(lambda x, s: x**2 - 2 * x * s["a"])  # whose value is zero at the start
    assert fs.certify(problem, ONE, np.array(0.0), x0=np.array(0.0)).verdict == "on its way"


@pytest.mark.slow
def test_a_badly_conditioned_equilibrium():
    """y = A⁻¹(x b) with a condition number of 10⁴, which projections alone do not reach."""
    A, b = np.diag([1.0, 1e-4]), np.array([0.1, 0.1])
    problem = fs.MPEC(lambda x, y, s: ((y - 1) ** 2).sum() + 0 * s["a"], lambda x, y, s: A @ y - x * b)
    S = np.linalg.solve(A, b)
    x = S.sum() / (S @ S)
    assert fs.certify(problem, ONE, np.array(x), np.zeros(2)).solved
    assert not fs.certify(problem, ONE, np.array(2 * x), np.zeros(2)).solved


def test_a_set_and_a_point_outside_of_it():
    problem = fs.Minimization(lambda x, s: (x - s["a"]) ** 2, project=fs.sets.Box(0.0, 1.0))
    assert fs.certify(problem, ONE, np.array(1.0)).solved
    outside = fs.certify(problem, ONE, np.array(1.1))
    assert not outside.solved
    assert outside.outside == pytest.approx(0.1 / 1.1)


@pytest.mark.slow
@pytest.mark.parametrize("unit", [1.0, 1e-3])
def test_selection_in_any_unit(unit):
    game = fs.underdetermined()
    problem = fs.Selection(game.problem.primary, lambda x: unit * game.problem.secondary(x))
    assert fs.certify(problem, game.data, game.x_star).solved
    optimum = game.x_star + 0.5 * np.linalg.norm(game.x_star) * _null(game)
    assert not fs.certify(problem, game.data, optimum).solved


def _null(game):
    """A direction in which the primary level does not change."""
    rows = np.asarray(game.data.train["a"]).reshape(-1, len(game.x_star))
    return np.linalg.svd(rows)[2][-1]


def test_the_weights_of_the_run():
    problem = fs.Minimization(lambda x, s: (x - s["a"]) ** 2)
    assert fs.certify(problem, ONE, np.array(2.5)).solved
    assert not fs.certify(problem, ONE, np.array(2.5), weights="size").solved
    assert fs.certify(problem, ONE, np.array(3.0), weights="size").solved


def run(method, rounds, **more):
    problem = fs.Minimization(lambda x, s: (1 + s["a"]) * (x - s["a"]) ** 2)
    return fs.solve(problem, method, ONE, np.array(0.0), rounds=rounds, progress=False, **more)


def test_why_a_run_is_not_solved():
    assert fs.certify(run(fs.FedAvg(0.05), 100)).verdict == "solved"
    early = fs.certify(run(fs.FedAvg(0.001), 10))
    assert early.verdict == "on its way"
    assert "more rounds" in early.advice
    drifted = run(fs.FedAvg(0.05, H=10), 100)
    stays = fs.solve(drifted.problem, drifted.method, ONE, drifted.x, rounds=50, progress=False)
    for each in (drifted, stays):
        drift = fs.certify(each)
        assert drift.verdict == "biased by drift"
        assert "H=1" in drift.advice
    noise = fs.certify(run(fs.FedAvg(0.05, batch_size=1), 200))
    assert noise.verdict == "at the noise floor"
    assert fs.certify(run(fs.FedAvg(0.3), 10)).verdict == "diverging"
    with pytest.warns(UserWarning, match="ran away"):  # to values whose rounding exceeds their differences
        grown = run(fs.FedRZO(1.0, 0.1, batch_size=None, two_sided=True), 20)
    assert fs.certify(grown).verdict == "diverging"


def test_from_side_to_side_at_one_value():
    """½x² with γ = 2/L goes from 1 to −1 and back: its loss is constant, its gradient is not zero."""
    method = fs.FedAvg(2.0)
    problem = fs.Minimization(lambda x, s: 0.5 * x**2 + 0 * s["a"])
    result = fs.solve(problem, method, ONE, np.array(1.0), rounds=20, progress=False)
    assert result.certificate.verdict == "oscillating"
    assert "gamma=2 by 2" in result.certificate.advice


def test_a_class_of_ones_own():
    @dataclasses.dataclass(frozen=True)
    class Own(fs.problems.Problem):
        target: float
        has_y = False

    assert fs.certify(Own(2.0), ONE, np.array(2.0)).verdict == "not certifiable"

    @fs.certify.register(Own)
    def _(problem, case):
        return fs.certify.Objective(lambda x: ((x - problem.target) ** 2, 2 * (x - problem.target)), case.x)

    assert fs.certify(Own(2.0), ONE, np.array(2.0)).solved
    assert not fs.certify(Own(2.0), ONE, np.array(2.5)).solved


@pytest.mark.slow
def test_a_selection_that_begins_at_its_solution():
    """No way leads there, so that nothing but f's own pull tells what rounding is."""
    rng = np.random.default_rng(0)
    data = fs.FederatedData.from_clients([{"a": rng.normal(size=(n, 3))} for n in (8, 5)])
    problem = fs.Selection(
        lambda x, s: 0.5 * (s["a"] @ x) ** 2, lambda x, s: 0.5 * ((x - 1) ** 2).sum(), same_samples=True
    )
    assert fs.certify(problem, data, np.full(3, 1e-7), x0=np.zeros(3)).solved
    assert not fs.certify(problem, data, np.full(3, 1e-3), x0=np.zeros(3)).solved


@pytest.mark.slow
@pytest.mark.parametrize(("last", "flat"), [(1e-8, True), (1e-4, False)])
def test_columns_that_are_collinear_but_for_rounding(last, flat):
    """The shortest least-squares solution, if the last singular value counts as zero."""
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.normal(size=(n, 4)))[0] for n in (20, 4))
    a = np.float32(left * [1, 0.8, 0.6, last] @ right.T)
    b = np.float32(a @ right[:, 0] + 0.1 * rng.normal(size=20))
    data = fs.FederatedData.from_clients([{"a": a[:12], "b": b[:12]}, {"a": a[12:], "b": b[12:]}])
    problem = fs.Selection(lambda x, s: 0.5 * (s["a"] @ x - s["b"]) ** 2, lambda x: 0.5 * (x @ x))
    shortest = np.linalg.lstsq(np.float64(a), b, rcond=1e-3)[0]
    found = fs.certify(problem, data, shortest, x0=np.ones(4), weights="size")
    assert found.solved == flat
    assert not fs.certify(problem, data, shortest + 0.1 * right[:, 0], x0=np.ones(4), weights="size").solved


@pytest.mark.slow
def test_an_upper_level_with_values_only():
    """|y − 1|₁ + ¼‖x‖² with y = x + a: by differences of F, each with the lower level solved."""
    a = np.array([[0.2, -0.4], [0.6, 0.4]])
    data = fs.FederatedData.from_clients([{"a": own[None]} for own in a])

    def upper(x, y, sample):
        return float(np.abs(np.asarray(y) - 1).sum() + np.sum(np.asarray(x) ** 2) / 4)

    problem = fs.Bilevel(
        fs.black_box(upper), lambda x, y, s: 0.5 * ((y - x - s["a"]) ** 2).sum(), same_samples=True
    )
    best = 1 - a.mean(0)  # the kink, as |x|/2 < 1 there
    assert fs.certify(problem, data, best, np.zeros(2), x0=np.full(2, 3.0)).solved
    assert not fs.certify(problem, data, best + 0.1, np.zeros(2), x0=np.full(2, 3.0)).solved
    found = fs.plan(problem, data, np.full(2, 3.0), np.zeros(2))
    assert isinstance(found.method, fs.FedRZOBilevel)


def test_a_start_at_a_saddle_point_is_not_unbounded():
    """F = x²/2 − y²/2 + y⁴/4 is 0 at the saddle point and its start, and −¼ at its minima."""
    data = fs.FederatedData.from_clients([{"c": np.zeros((1, 1))}] * 2)
    problem = fs.Minimization(lambda x, s: x[0] ** 2 / 2 - x[1] ** 2 / 2 + x[1] ** 4 / 4 + 0 * s["c"][0])
    found = fs.certify(problem, data, np.zeros(2), x0=np.zeros(2))
    assert found.verdict == "on its way"
    assert found.value == pytest.approx(0.25, rel=1e-3)
    assert "start elsewhere" in found.advice


def test_a_function_that_is_constant_is_not_judged():
    data = fs.FederatedData.from_clients([{"a": np.ones(2)}])
    flat = fs.Minimization(lambda x, s: jnp.maximum(x[0] - 1, 0) ** 2 + 0 * s["a"])
    found = fs.certify(flat, data, np.zeros(1))
    assert found.verdict == "not certifiable"
    assert "same value" in found.advice
    assert fs.certify(flat, data, np.zeros(1), x0=np.full(1, 5.0)).solved


def test_a_point_of_another_shape_is_refused_in_words():
    data = fs.FederatedData.from_clients([{"a": np.ones((2, 3))}])
    with pytest.raises(TypeError, match=r"loss\(x, sample\)"):
        fs.certify(fs.Minimization(lambda x, s: (s["a"] @ x) ** 2), data, np.ones(4))


def test_a_plateau_far_from_a_minimiser_is_not_a_solution():
    """F(x) = 1 − e^{−x²} + 10 max(x, 0)² is 1 at x = −50, where it has no slope, and above at the start."""
    data = fs.FederatedData.from_clients([{"a": np.ones(2)}])
    problem = fs.Minimization(
        lambda x, s: s["a"] * (1 - jnp.exp(-(x[0] ** 2)) + 10 * jnp.maximum(x[0], 0) ** 2)
    )
    far = fs.certify(problem, data, np.full(1, -50.0), x0=np.ones(1))
    assert not far.solved
    assert "constant around x" in far.advice
    assert fs.certify(problem, data, np.zeros(1), x0=np.ones(1)).solved


def test_a_lower_level_that_is_linear_has_no_solution():
    data = fs.FederatedData.from_clients([{"a": np.ones(2)}])
    problem = fs.Bilevel(lambda x, y, s: (y**2).sum(), lambda x, y, s: x @ y, same_samples=True)
    assert "no solution" in fs.certify(problem, data, np.ones(1), np.zeros(1)).advice


def test_a_problem_that_needs_the_server_s_data_says_so():
    data = fs.FederatedData.from_clients([{"a": np.ones(2)}])
    problem = fs.Personalized(lambda x, s: x @ x, lambda x, y: ((x - y) ** 2).sum(), lambda x, y, s: y @ y)
    with pytest.raises(ValueError, match="data at the server"):
        fs.certify(problem, data, np.ones(1), np.ones((1, 1)))


def test_a_loss_that_draws_is_said_to_be_judged_without_randomness():
    data = fs.FederatedData.from_clients([{"a": np.ones(2)}])
    loss = fs.stochastic(lambda x, s, key: ((x - s["a"]) ** 2).sum())
    assert any("randomness" in word for word in fs.certify(fs.Minimization(loss), data, np.ones(1)).remarks)
