"""FedRZOTwoStage against exact equilibria and the leader's exact optimum, and against what it reduces to."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.data.storage import SizeGroup
from fedstrata.testing.cases import two_stage

# γ > 2η is too long for the set x ≥ 0, but x is never at its edge here
inside = pytest.mark.filterwarnings("ignore:FedRZOTwoStage. gamma=.* is more than 2")
# t_k is small in the first rounds
few_steps = pytest.mark.filterwarnings("ignore:FedRZOTwoStage.* lower=.* did not find")

# what a wrong solution is told of at the start, besides what is told at the end
rough = pytest.mark.filterwarnings("ignore:MPEC.solution is .* off at x0")


def solve(game, method, rounds=10, **options):
    y0 = np.zeros(len(game.c))
    return fs.solve(
        game.problem,
        method,
        game.data,
        0.0,
        y0=y0,
        rounds=rounds,
        eval_every=rounds,
        progress=False,
        **options,
    )


def assert_optimal(game, result):
    """Within 1e-3 of the true optimum, in x and in the objective."""
    x_star, value = game.optimum
    x = float(result.x)
    assert abs(x - x_star) <= 1e-3 * x_star, (x, x_star)
    assert float(game.objective(x)) - value <= 1e-3 * abs(value)


def curvature(game, slope=1e-3):
    """The leader's second derivative at the optimum, by differences of the price."""
    x, _ = game.optimum
    prices = [game.price(x + d, game.demands).mean() for d in (-slope, slope)]
    return game.c0 - (prices[1] - prices[0]) / slope


@inside
@pytest.mark.parametrize("b", [0.5, 1.0])
@pytest.mark.parametrize(
    "followers",
    [
        10,
        *(pytest.param(n, marks=pytest.mark.long) for n in (20, 100)),
        1000,
    ],
)
@pytest.mark.slow
def test_leader_optimum(followers, b):
    game = fs.cournot_game(followers, b, samples=3)
    assert game.inactive
    method = fs.FedRZOTwoStage(
        0.5 / curvature(game),
        0.2,
        H=10,
        lower="accelerated",
        two_sided=True,
        batch_size=None,
        warm_start=True,
    )
    assert_optimal(game, solve(game, method))


@pytest.mark.slow
@inside
@pytest.mark.parametrize("b", [0.5, 1.0])
@pytest.mark.parametrize(
    "followers", [10, *(pytest.param(n, marks=pytest.mark.long) for n in (20, 100, 1000))]
)
def test_leader_optimum_where_caps_bind(followers, b):
    """Kinks and clients that differ: one local step, so that they do not drift apart.

    Kinks can make several local minima, of which a descent finds one: here there is one.
    """
    low, high = {0.5: (6, 24), 1.0: (4, 9)}[b]
    game = fs.cournot_game(followers, b, samples=3, seed=6, caps=(low / followers, high / followers))
    bound = game.equilibrium(game.optimum[0], game.demands) >= game.caps
    assert 0.1 < bound.mean() < 1
    falls = np.diff(game.objective(np.linspace(0, game.x_cap, 20_001))) < 0
    assert (np.diff(falls.astype(int)) != 0).sum() == 1
    method = fs.FedRZOTwoStage(
        0.1, 0.02, lower="accelerated", two_sided=True, batch_size=None, warm_start=True
    )
    assert_optimal(game, solve(game, method, rounds=300))


@pytest.fixture(scope="module")
def game():
    return fs.cournot_game(10, 1.0, samples=4)


@inside
@pytest.mark.parametrize(
    "lower",
    [
        "projection",
        *(
            pytest.param(s, marks=pytest.mark.slow)
            for s in ("solution", "extragradient", "accelerated", "newton")
        ),
    ],
)
def test_every_solver(game, lower):
    method = fs.FedRZOTwoStage(0.5, 0.1, lower=lower, batch_size=None, two_sided=True)
    result = solve(game, method, rounds=60)
    assert_optimal(game, result)
    # The result's y are the clients' mean responses where they were last.
    expected = game.equilibrium(game.optimum[0], np.asarray(game.data.stacked()["a"])).mean(1)
    np.testing.assert_allclose(result.y, expected, rtol=1e-3)
    np.testing.assert_allclose(result.history["leader"][-1], game.optimum[1], rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["simulated", pytest.param("debug", marks=pytest.mark.long)])
def test_without_a_solution_the_metric_solves_every_sample(game, engine):
    """And the steps of a solver, which differ from turn to turn, are counted in every engine."""
    known = game.problem
    unknown = fs.MPEC(known.leader, known.follower, known.project_x, known.project_y)
    runs = [
        fs.solve(
            problem, fs.FedRZOTwoStage(0.1, 0.1, H=2), game.data, np.array(0.1), y0=np.zeros(10), rounds=2,
            engine=its, progress=False, certify=False,
        )
        for problem, its in ((known, "simulated"), (unknown, engine))
    ]  # fmt: skip
    np.testing.assert_allclose(runs[1].history["leader"], runs[0].history["leader"], rtol=1e-5)
    assert runs[1].ledger == runs[0].ledger


@pytest.mark.parametrize("slope", [0, -1])  # without an equilibrium; not monotone, so that y overflows
def test_the_metric_says_where_equilibria_are_not_found(slope):
    problem = fs.MPEC(lambda x, y, s: y @ y, lambda x, y, s: slope * y + 1)

    def mean(function, x, each):
        return function(x, each, {"a": 1.0})

    assert problem.measure(mean, jnp.ones(2), jnp.full(2, 0.5)) == {"leader": 0.5, "unsolved": 1.0}


@inside
@pytest.mark.slow
def test_own_solver_and_samples(game):
    """A user's function for line 4; one sample per step, with steps that decrease."""

    def steps(G, project, y):
        for _ in range(60):
            y = project(y - G(y) / (game.c + game.b + game.b * len(game.c)))
        return y

    method = fs.FedRZOTwoStage(lambda r: 2.0 / (r + 4), 0.1, H=20, lower=steps)
    x = float(solve(game, method, rounds=150).x)
    assert float(game.objective(x)) - game.optimum[1] <= 1e-3 * abs(game.optimum[1])


@few_steps
def test_paper_schedule_is_booked(game):
    """t_k = ⌈τ ln(k+1)⌉ values of G and one of the leader, at two points, for each sample and local step."""
    tau, H, rounds, clients, batch = 3.0, 4, 3, 5, 2
    method = fs.FedRZOTwoStage(0.01, 0.1, H=H, lower="projection", alpha=0.02, tau=tau, batch_size=batch)
    ledger = solve(game, method, rounds=rounds).ledger
    expected = sum(1 + math.ceil(tau * math.log(k + 1)) for k in range(H * rounds)) * 2 * batch * clients
    assert ledger.function_values == expected
    assert ledger.lower_rounds == 0
    assert ledger.floats_down == rounds * clients * 2  # x and k
    # k of all clients' steps
    ledger = solve(game, method.replaced({"pace": 10.0}), rounds=rounds).ledger
    longer = sum(1 + math.ceil(tau * math.log(10 * k + 1)) for k in range(H * rounds))
    assert ledger.function_values == longer * 2 * batch * clients


@few_steps
def test_one_step_of_the_paper(x64):
    """Lines 3 to 6 by hand: one client, one sample, k = 1, in one dimension, where v = ±η."""
    game = fs.cournot_game(4, 1.0, clients=1, samples=1)
    gamma, eta, alpha, tau = 0.01, 0.3, 0.05, 2.0
    method = fs.FedRZOTwoStage(gamma, eta, H=2, lower="projection", alpha=alpha, tau=tau)
    a = game.demands[0]

    def loss(x, k):
        y = np.zeros(4)
        for _ in range(math.ceil(tau * math.log(k + 1))):
            y = np.clip(y - alpha * ((game.c + 1) * y - a + x + y.sum()), 0, game.caps)
        return game.c0 * x**2 / 2 - x * (a - x - y.sum())

    reachable = {0.0}
    for k in range(2):
        reachable = {x - gamma * (loss(x + v, k) - loss(x, k)) / v for x in reachable for v in (eta, -eta)}
    assert min(abs(float(solve(game, method, rounds=1).x) - x) for x in reachable) < 1e-12


@inside
@pytest.mark.slow
def test_warm_start_saves_values_of_the_map(game):
    cold, warm = (
        solve(
            game,
            fs.FedRZOTwoStage(
                0.5, 0.1, H=10, lower="projection", batch_size=None, two_sided=True, warm_start=w
            ),
        )
        for w in (False, True)
    )
    np.testing.assert_allclose(cold.x, warm.x, rtol=1e-4)
    assert warm.ledger.function_values < 0.7 * cold.ledger.function_values


def quadratic(x, y, sample):
    return 0.5 * ((x - sample["a"]) ** 2).sum() + (y**2).sum()


shifted = fs.MPEC(quadratic, lambda x, y, sample: y - 0.1 * x)
many = fs.FederatedData.from_clients([{"a": np.full((2, 30), float(i))} for i in range(3)])


@pytest.mark.slow
@few_steps
def test_scalars_replay_the_vectors(x64):
    def run(messages):
        method = fs.FedRZOTwoStage(
            1e-3, 0.1, H=4, lower="extragradient", tau=1.0, directions=2, batch_size=1, messages=messages
        )
        return fs.solve(shifted, method, many, np.zeros(30), y0=np.ones(30), rounds=5, progress=False)

    vectors, scalars = run("vectors"), run("scalars")
    np.testing.assert_allclose(scalars.x, vectors.x, rtol=1e-9)
    np.testing.assert_allclose(scalars.y, vectors.y, rtol=1e-9)
    assert vectors.ledger.floats_up == 5 * 3 * (30 + 2)  # and how well the equilibria were solved
    assert scalars.ledger.floats_up == 5 * 3 * (4 * 2 + 2)
    assert vectors.ledger.function_values == scalars.ledger.function_values


@pytest.mark.filterwarnings("ignore:.* ended outside of the set")  # four rounds are too few to end inside
@pytest.mark.slow
def test_without_followers_it_is_fedrzo(x64):
    """The same keys, the same samples, the same iterates."""
    alone = fs.MPEC(lambda x, y, s: ((x - s["a"]) ** 2).sum(), lambda x, y, s: y, project_x=fs.sets.Ball(1.0))
    plain = fs.Minimization(lambda x, s: ((x - s["a"]) ** 2).sum(), project=fs.sets.Ball(1.0))
    options = {"H": 3, "batch_size": 2, "directions": 2, "orthogonal": True}
    one = fs.solve(
        alone,
        fs.FedRZOTwoStage(0.01, 0.1, tau=0.0, **options),
        many,
        np.zeros(30),
        y0=0.0,
        rounds=4,
        progress=False,
    )
    other = fs.solve(plain, fs.FedRZO(0.01, 0.1, **options), many, np.zeros(30), rounds=4, progress=False)
    np.testing.assert_allclose(one.x, other.x, rtol=1e-9)
    assert one.ledger.floats_up == other.ledger.floats_up + 4 * 3 * 2  # the residual


@pytest.mark.slow
def test_sets_of_followers_may_move_with_x_and_sample():
    """y = the projection of 2 onto [x, ξ]; the leader wants y = 1.5 where ξ allows it."""
    problem = fs.MPEC(
        leader=lambda x, y, s: (y - 1.5) ** 2 + 0.1 * x**2,
        follower=lambda x, y, s: y - 2.0 * x,
        project_y=lambda y, x, s: jnp.clip(y, x, s["a"]),
    )
    data = fs.FederatedData.from_clients([{"a": np.array([5.0, 6.0])}, {"a": np.array([4.0])}])
    method = fs.FedRZOTwoStage(0.05, 1e-2, H=10, lower="extragradient", two_sided=True, batch_size=None)
    result = fs.solve(problem, method, data, 0.1, y0=0.0, rounds=20, eval_every=20, progress=False)
    # y = 2x inside: minimise (2x − 1.5)² + 0.1 x²
    np.testing.assert_allclose(result.x, 3.0 / 4.1, rtol=1e-3)
    np.testing.assert_allclose(result.y, np.full(2, 6.0 / 4.1), rtol=1e-2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lower": "secant"}, "'projection', 'extragradient', 'accelerated', 'newton', 'solution' or a"),
        ({"messages": "letters"}, "'vectors' or 'scalars'"),
        ({"messages": "scalars"}, "a set of x"),
        ({"directions": 2, "orthogonal": True}, "as many dimensions"),
    ],
)
def test_refuses(game, change, words):
    with pytest.raises(ValueError, match=words):
        solve(game, fs.FedRZOTwoStage(0.1, 0.1, **change))


def test_refuses_what_the_problem_lacks():
    with pytest.raises(ValueError, match="solution="):
        fs.solve(
            shifted,
            fs.FedRZOTwoStage(0.1, 0.1, lower="solution"),
            many,
            np.zeros(30),
            y0=np.zeros(30),
            rounds=1,
        )
    with pytest.raises(ValueError, match="y0="):
        fs.solve(shifted, fs.FedRZOTwoStage(0.1, 0.1), many, np.zeros(30), rounds=1)
    with pytest.raises(TypeError, match="follower"):
        fs.solve(shifted, fs.FedRZOTwoStage(0.1, 0.1), many, np.zeros(30), y0=np.zeros(3), rounds=1)
    with pytest.raises(ValueError, match="0 < mu ≤ L"):
        fs.FedRZOTwoStage.from_theory(K=100, clients=5, mu=2.0, L=1.0)


def test_from_theory_reaches_the_accuracy_it_promises(x64):
    """ε_k = B (1 − 1/κ²)^{t_k} ≤ B/(k+1) for the equilibria of Algorithm 5."""
    from fedstrata.estimators import vi

    game = fs.cournot_game(5, 0.5, clients=2, samples=1)
    mu, L = game.monotonicity
    method = fs.FedRZOTwoStage.from_theory(K=1000, clients=2, mu=mu, L=L)
    assert (method.gamma, method.H) == (pytest.approx(math.sqrt(2 / 1000)), 4)
    bounded = fs.FedRZOTwoStage.from_theory(K=1000, clients=2, mu=mu, L=L, eta=0.1, L0=2.0, n=3)
    assert bounded.gamma == pytest.approx(1 / (12 * math.sqrt(6) * 4 * math.sqrt(5 * 7**2 / (8 * 0.1**2))))
    free = fs.FedRZOTwoStage.from_theory(K=1000, clients=2, mu=mu, L=L, eta=0.1, L0=2.0, n=3, B2=0)
    assert free.gamma == pytest.approx(0.1 / (16 * 7))
    sample, x = {"a": jnp.asarray(9.0)}, jnp.asarray(2.0)
    solution = game.equilibrium(2.0, 9.0)
    for k in (1, 10, 100):
        found = vi.projection(
            lambda y: game.problem.follower(x, y, sample),
            lambda y: game.problem.project_y(y, x, sample),
            jnp.zeros(5),
            alpha=method.alpha,
            steps=math.ceil(method.tau * math.log(k + 1)),
        )
        assert ((found.y - solution) ** 2).sum() <= (solution**2).sum() / (k + 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "lower",
    ["accelerated", "projection", "extragradient", "newton"],
)
def test_what_fills_up_a_clients_arrays_changes_nothing(lower, x64):
    """Equilibria are solved side by side with one step size and one stop: of the real samples alone."""
    problem, data = two_stage.with_sets, two_stage.data
    method = fs.FedRZOTwoStage(0.01, 0.2, H=2, lower=lower, batch_size=None)
    placed, x0, y0 = data.placed(), *jax.tree.map(jnp.asarray, (two_stage.x0, two_stage.y0))
    memory = method.memory(problem, x0, y0)

    def replied(capacity):
        client = placed.client(0, memory, SizeGroup(5, capacity, 0))  # of four samples
        return method.local_steps(problem, client, jax.random.key(0), x0)

    for a, b in zip(jax.tree.leaves(replied(4)), jax.tree.leaves(replied(40)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def spiral(k, lower, **options):
    """Followers G = k J y − x − c_i with J a turn by 90°: monotone, not strongly; y_i = −J(x + c_i)/k."""
    problem = fs.MPEC(
        lambda x, y, s: 0.5 * ((y - 1) ** 2).sum(),
        lambda x, y, s: k * jnp.array([[0.0, 1.0], [-1.0, 0.0]]) @ y - x - s["c"],
    )
    data = fs.FederatedData.from_clients([{"c": np.zeros((2, 2))}, {"c": np.ones((2, 2))}])
    method = fs.FedRZOTwoStage(
        0.5, 0.1, batch_size=None, two_sided=True, directions=2, orthogonal=True, **lower
    )
    return fs.solve(problem, method, data, np.zeros(2), y0=np.zeros(2), progress=False, **options)


@pytest.mark.slow
def test_newton_solves_followers_of_any_condition(x64):
    """Of κ = 10⁴, where extragradient steps need as many; F = ½ mean ‖y − 1‖², y_i = A⁻¹(x + c_i)."""
    turn = np.array([[0.8, -0.6], [0.6, 0.8]])
    A = turn @ np.diag([1.0, 1e4]) @ turn.T + np.array([[0.0, 0.5], [-0.5, 0.0]])
    problem = fs.MPEC(lambda x, y, s: 0.5 * ((A @ y - 1) ** 2).sum(), lambda x, y, s: A @ y - x - s["c"])
    data = fs.FederatedData.from_clients([{"c": np.zeros((2, 2))}, {"c": np.ones((1, 2))}])
    method = fs.FedRZOTwoStage(
        0.5, 0.1, batch_size=None, two_sided=True, directions=2, orthogonal=True, lower="newton", tol=1e-10
    )
    result = fs.solve(problem, method, data, np.zeros(2), y0=np.zeros(2), rounds=40, progress=False)
    np.testing.assert_allclose(result.x, 0.5, rtol=1e-6)  # 1 − mean c
    assert result.history["lower_residual"][-1] < 1e-9


@pytest.mark.slow
def test_the_default_solver_needs_no_more_than_monotone():
    """F(x) is smallest where the mean of y_i is (1, 1): x + ½ = k J (1, 1) = (1, −1) for k = 1."""
    result = spiral(1.0, {}, rounds=40, eval_every=40)
    np.testing.assert_allclose(result.x, [0.5, -1.5], atol=1e-4)
    assert result.history["lower_residual"][-1] <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("messages", ["vectors", "scalars"])
def test_equilibria_that_are_not_found_are_told(messages):
    lower = {"lower": "projection", "messages": messages}
    with pytest.warns(UserWarning, match="in the last round lower='projection' did not find"):
        result = spiral(1.0, lower, rounds=3)
    assert result.history["lower_residual"][-1] > 0.1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FedRZOTwoStage ran away. leader ended far above")  # with the responses
def test_followers_that_are_not_monotone_are_told():
    problem = fs.MPEC(lambda x, y, s: 0.5 * ((y - 1) ** 2).sum(), lambda x, y, s: -y - x - s["c"])
    data = fs.FederatedData.from_clients([{"c": np.zeros((2, 2))}, {"c": np.ones((2, 2))}])
    method = fs.FedRZOTwoStage(1e-3, 0.1, max_steps=20)  # more of them overflow, which is told as well
    with pytest.warns(UserWarning, match="that the followers' map is monotone"):
        fs.solve(problem, method, data, np.zeros(2), y0=np.zeros(2), rounds=2, progress=False)


LENGTH = np.array([1.0, 2.0])  # of y(x), for G = y − x · LENGTH


def one_step(lower, rounds=1, y0=(4.0, 4.0), **options):
    """A round at x = 1 with a radius so small that the points share their equilibrium."""
    problem = fs.MPEC(
        lambda x, y, s: x**2,
        lambda x, y, s: y - x * LENGTH + s["c"],
        solution=lambda x, s: x * LENGTH * 1.25,  # wrong by a quarter
    )
    data = fs.FederatedData.from_clients([{"c": np.zeros((1, 2))}, {"c": np.zeros((3, 2))}])
    method = fs.FedRZOTwoStage(1e-9, 1e-9, lower=lower, batch_size=None, **options)
    return fs.solve(problem, method, data, 1.0, y0=np.array(y0), rounds=rounds, progress=False)


@pytest.mark.slow
@rough
def test_the_residual_of_a_given_solution_is_measured(x64):
    """It is a quarter of LENGTH away from where G = 0, and y0 is (4, 4): a relative residual by hand."""
    expected = np.linalg.norm(LENGTH / 4) / np.linalg.norm(4 - LENGTH)
    with pytest.warns(UserWarning, match="in the last round lower='solution' did not find"):
        result = one_step("solution")
    assert result.history["lower_residual"][-1] == pytest.approx(expected, rel=1e-7)
    method = fs.FedRZOTwoStage(1e-9, 1e-9, lower="solution", tol=0.1)
    assert not method.judged(jnp.float64(expected), jnp.ones(()))[1]  # good enough, as the user says


@rough
@pytest.mark.slow
def test_the_residual_of_a_users_solver_is_measured(x64):
    """One step of size ½ halves G; from the solution itself it is all rounding, which is no fault."""

    def half(G, project, y):
        return project(y - 0.5 * G(y))

    with pytest.warns(UserWarning, match="your solver did not find the followers' equilibria to ten times"):
        result = one_step(half)
    assert result.history["lower_residual"][-1] == pytest.approx(0.5, rel=1e-7)
    one_step(half, y0=LENGTH)


@rough
@pytest.mark.slow
def test_the_residual_after_few_steps_is_measured(x64):
    """t_k = ⌈τ ln(k+1)⌉ steps of size ½: 2^{−t_k}, of which the last round's is judged."""
    with pytest.warns(UserWarning, match=r"did not find .* tau=0\.5 gives: .* residual was 0\.5 times"):
        result = one_step("projection", 3, alpha=0.5, tau=0.5)
    np.testing.assert_allclose(result.history["lower_residual"][1:], [1.0, 0.5, 0.5], rtol=1e-6)
    exact = one_step("projection", 3, alpha=0.5, tau=3.0)
    np.testing.assert_allclose(exact.history["lower_residual"][1:], [1.0, 0.5**3, 0.5**4], rtol=1e-6)
    found = one_step("extragradient", 2, tau=1.0, y0=LENGTH)  # a start that solves it already
    assert found.history["lower_residual"][-1] <= 1.0


@pytest.mark.parametrize("factor", [-1.0, *(pytest.param(f, marks=pytest.mark.slow) for f in (1.25, 1.0))])
def test_a_solution_that_does_not_solve_is_told_before_the_first_round(factor, x64):
    """G = y − x · LENGTH: y is factor − 1 of its length off, which −1 makes an error and ¼ a warning."""
    problem = fs.MPEC(
        lambda x, y, s: x**2,
        lambda x, y, s: 1e6 * (y - x * LENGTH) + s["c"],
        project_y=lambda y, x: jnp.clip(y, -10 * x, 10 * x),
        solution=lambda x, s: factor * x * LENGTH,
    )
    data = fs.FederatedData.from_clients([{"c": np.zeros((1, 2))}, {"c": np.zeros((3, 2))}])
    method = fs.FedRZOTwoStage(1e-9, 1e-3)

    def run():
        return fs.solve(problem, method, data, 1.0, y0=np.zeros(2), rounds=0, progress=False)

    if factor == -1:
        with pytest.raises(ValueError, match=r"solution is 4\.47 off at x0, where ‖y‖ = 2\.24.*sign"):
            run()
    elif factor == 1:
        run()
    else:
        with pytest.warns(UserWarning, match=r"solution is 0\.559 off") as told:
            run()
        assert told[0].filename == __file__
