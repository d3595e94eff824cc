"""The default lower level of FedRZOBilevel and FedRZOMinimax: exact answers without a constant given.

Unless a test says otherwise: four unlike clients of 1, 2, 3 and 5 samples, pytrees, float64, η = 1e-3.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize
from scipy.special import expit

import fedstrata as fs
from fedstrata.core.method import Moment

SIZES = (1, 2, 3, 5)


@pytest.fixture(autouse=True)
def _double(x64):
    pass


def definite(rng, p, low, high):
    """With eigenvalues from ``low`` to ``high``, evenly on a logarithmic scale."""
    Q = np.linalg.qr(rng.normal(size=(p, p)))[0]
    return Q @ np.diag(np.geomspace(low, high, p)) @ Q.T


def upper(x, y, s):
    y = jnp.append(y["w"], y["c"])
    return ((x["x"] - s["a"]) ** 2).sum() / 2 + s["rho"] * ((y - s["t"]) ** 2).sum() / 2


def lower(x, y, s):
    y = jnp.append(y["w"], y["c"])
    return y @ (s["A"] @ y) / 2 - y @ (s["B"] @ x["x"] + s["c"])


class Problem:
    """``h_i = ½ yᵀA_i y − yᵀ(B_i x + c_i)``, ``f_i = ½‖x − a_i‖² + ½ρ‖y − t_i‖²``, with its solution.

    The mean of the A_i has exactly the condition number asked for, while single clients' A_i are far from it
    and from each other. ρ makes both parts of the implicit objective count.
    """

    def __init__(self, kappa, weights="uniform", n=3, p=9, seed=0):
        rng = np.random.default_rng(seed)
        m = len(SIZES)
        self.w = np.full(m, 1 / m) if weights == "uniform" else np.array(SIZES) / sum(SIZES)
        root = np.linalg.cholesky(definite(rng, p, 1 / np.sqrt(kappa), np.sqrt(kappa)))
        parts = [definite(rng, p, 0.05, 2.0) for _ in range(m)]
        whiten = np.linalg.inv(np.linalg.cholesky(np.tensordot(self.w, parts, 1)))
        A = [root @ whiten @ W @ whiten.T @ root.T for W in parts]
        B, c, a = rng.normal(size=(m, p, n)), rng.normal(size=(m, p)), rng.normal(size=(m, n))
        self.A, self.B, self.c = (np.tensordot(self.w, part, 1) for part in (A, B, c))
        S, s = np.linalg.solve(self.A, self.B), np.linalg.solve(self.A, self.c)
        rho = 1 / np.linalg.norm(S, 2) ** 2
        t = s + np.linalg.norm(s) / 3 * rng.normal(size=(m, p))
        self.solution = lambda x: S @ np.asarray(x) + s
        right = self.w @ a + rho * S.T @ (self.w @ t - s)
        self.x_star = np.linalg.solve(np.eye(n) + rho * S.T @ S, right)

        parts = {"A": np.array(A), "B": B, "c": c, "a": a, "t": t, "rho": np.full(m, rho)}
        self.problem = fs.Bilevel(upper, lower, same_samples=True)
        self.data = fs.FederatedData.from_clients(
            [{k: np.repeat(v[i][None], N, 0) for k, v in parts.items()} for i, N in enumerate(SIZES)]
        )
        self.x0, self.y0 = {"x": np.zeros(n)}, {"w": np.zeros(p - 1), "c": np.zeros(())}

    def solve(self, method, rounds=300, **more):
        arguments = {"y0": self.y0, "eval_every": rounds, "progress": False, **more}
        return fs.solve(self.problem, method, self.data, self.x0, rounds=rounds, **arguments)

    def error(self, x):
        return np.linalg.norm(x["x"] - self.x_star) / np.linalg.norm(self.x_star)


def flat(y):
    return np.append(y["w"], y["c"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kappa", "weights"),
    [
        pytest.param(10, "uniform", marks=pytest.mark.slow),
        pytest.param(1000, "uniform", marks=pytest.mark.slow),
        (1000, "size"),
    ],
)
def test_defaults_are_right(kappa, weights):
    """Relative error of x at most 2e-3: the noise of a one-sided estimate alone is of the size of η."""
    case = Problem(kappa, weights)
    result = case.solve(fs.FedRZOBilevel(0.1, 1e-3), rounds=500, weights=weights)
    assert case.error(result.x) <= 2e-3
    # y ∈ R⁹: nine products solve a linear system, two gradients begin and end it; rounding may ask for more
    assert result.ledger.lower_rounds <= 500 * 14
    assert result.history["lower_residual"][-1] <= 1e-6 * result.history["lower_residual"][0]


@pytest.mark.slow
@pytest.mark.parametrize(("lower_tol", "error"), [(1e-3, 2e-5), (1e-8, 1e-8)])
def test_two_sided_is_exact(lower_tol, error):
    """Without the noise of size η only lower_tol is left, which is relative to each round's step.

    Of the default, what is left depends on where solutions happen to stop: a hundredth of what η leaves.
    """
    case = Problem(1000)
    result = case.solve(fs.FedRZOBilevel(0.1, 1e-3, two_sided=True, lower_tol=lower_tol), rounds=1000)
    assert case.error(result.x) <= error
    y = case.solution(result.x["x"])
    assert np.linalg.norm(flat(result.y) - y) <= lower_tol * 1e-3 * np.linalg.norm(y)


@pytest.mark.slow
def test_float32():
    """The differences of y are its rounding, 6e-8·κ, over η·‖dy/dx‖ at worst: here κ = 100 keeps 2e-3."""
    with jax.enable_x64(False):
        case = Problem(100)
        result = case.solve(fs.FedRZOBilevel(0.1, 1e-3), rounds=400)
        assert result.x["x"].dtype == np.float32
        assert case.error(result.x) <= 2e-3


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["uniform", "size"])
def test_everyone_solves_the_lower_level(weights):
    """Two of four clients a round: y is that of all clients, and x goes to the solution for all of them.

    On a quadratic with two-sided differences the mean of x over cohorts and directions contracts to x*; it is
    compared with the mean over seeds, whose standard error is known.
    """
    case = Problem(30, weights)
    method = fs.FedRZOBilevel(0.05, 1e-2, two_sided=True)
    options = {"weights": weights, "participation": 2, "seed": 3}
    before, after = (case.solve(method, rounds=rounds, **options) for rounds in (19, 20))
    y = case.solution(before.x["x"])
    assert np.linalg.norm(flat(after.y) - y) <= 1e-6 * np.linalg.norm(y)
    lower, main = after.ledger.levels["lower"], after.ledger.levels["main"]
    assert lower["floats_up"] % (4 * 9) == 0
    assert main["floats_up"] == 20 * 2 * 3  # x̂ of the two who take part
    seeds = [case.solve(method, rounds=300, **{**options, "seed": seed}) for seed in range(24)]
    found = np.array([result.x["x"] for result in seeds])
    standard_error = np.linalg.norm(found.std(0, ddof=1)) / np.sqrt(len(found))
    assert standard_error < 0.05 * np.linalg.norm(case.x_star)
    assert np.linalg.norm(found.mean(0) - case.x_star) <= 3 * standard_error


@pytest.mark.slow
def test_curvature_that_grows_with_x():
    """``y(x) = e^{−x}·1``: from x = 0 to 5 the curvature becomes 148 times as large."""
    p, data = 100, fs.FederatedData.from_clients([{"c": np.full(1, c)} for c in (0.5, 1.0, 1.5)])
    lower = lambda x, y, s: jnp.exp(x) * (y**2).sum() / 2 - s["c"] * y.sum()  # noqa: E731
    for weight in (0.1, 0.0):
        problem = fs.Bilevel(
            lambda x, y, s, w=weight: (x - 5) ** 2 / 2 + w * (y**2).sum(), lower, same_samples=True
        )
        result = fs.solve(
            problem, fs.FedRZOBilevel(0.1, 1e-3, two_sided=True), data, 0.0, y0=np.zeros(p), rounds=300,
            eval_every=300, progress=False,
        )  # fmt: skip
        exact = optimize.brentq(lambda x, w=weight: x - 5 - 2 * w * p * np.exp(-2 * x), 4, 6)
        assert exact == pytest.approx(5.001 if weight else 5.0, abs=1e-4)
        assert float(result.x) == pytest.approx(exact, abs=1e-6)  # η² smoothing is of that size
        np.testing.assert_allclose(result.y, np.exp(-exact), rtol=1e-6)


@pytest.mark.slow
def test_lower_level_that_is_not_quadratic():
    """Logistic regression with its weights of regularisation above, from a y0 where it is nearly flat."""
    rng = np.random.default_rng(1)
    U = [rng.normal(size=(N + 3, 2)) for N in SIZES]
    v = [np.where(u @ [1.0, -2.0] + rng.normal(size=len(u)) > 0, 1.0, -1.0) for u in U]
    data = fs.FederatedData.from_clients([{"u": a, "v": b} for a, b in zip(U, v, strict=True)])

    def lower(x, y, s):
        return jnp.logaddexp(0, -s["v"] * (s["u"] @ y)) + (jnp.exp(x) * y**2).sum() / 2

    target = np.array([0.3, -0.4])
    problem = fs.Bilevel(lambda x, y, s: ((y - target) ** 2).sum(), lower, same_samples=True)

    def gradient(y, x):
        ones = [-(b * expit(-b * (a @ y))) @ a / len(b) for a, b in zip(U, v, strict=True)]
        return np.mean(ones, axis=0) + np.exp(x) * y

    # y = target is within reach, and there ∇h = 0 tells x
    pull = gradient(target, np.zeros(2)) - target
    x_star = np.log(-pull / target)
    result = fs.solve(
        problem, fs.FedRZOBilevel(2.0, 1e-3, two_sided=True), data, np.zeros(2), y0=np.array([20.0, 20.0]),
        rounds=300, eval_every=300, progress=False,
    )  # fmt: skip
    np.testing.assert_allclose(result.x, x_star, rtol=2e-3)
    np.testing.assert_allclose(result.y, target, rtol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kappa", [10, 300])
def test_set_that_moves_with_x(kappa):
    """A box around y whose edge moves with x, some of it active: the exact y(x) by bounded least squares."""
    case = Problem(kappa)
    y_free = case.solution(np.zeros(3))
    width = np.median(np.abs(y_free))

    def box(y, x):
        edge = width + 0.1 * x["x"][0]
        return jax.tree.map(lambda leaf: jnp.clip(leaf, -edge, edge), y)

    root = np.linalg.cholesky(case.A).T

    def exact(x):
        edge = width + 0.1 * x[0]
        right = np.linalg.solve(root.T, case.B @ x + case.c)
        return optimize.lsq_linear(root, right, (-edge, edge), tol=1e-14, lsmr_tol=1e-14).x

    boxed = fs.Bilevel(case.problem.upper, case.problem.lower, project_y=box, same_samples=True)
    method = fs.FedRZOBilevel(0.05, 1e-3, two_sided=True)
    runs = [
        fs.solve(boxed, method, case.data, case.x0, y0=case.y0, rounds=rounds, progress=False, seed=1)
        for rounds in (4, 5)
    ]
    y = exact(runs[0].x["x"])
    active = np.isclose(np.abs(y), width + 0.1 * runs[0].x["x"][0], rtol=1e-9)
    assert 0 < active.sum() < len(y)
    # two-sided, the result is the middle of two solutions at a distance η, between which y(x) has a kink
    np.testing.assert_allclose(flat(runs[1].y), y, atol=2e-3 * np.abs(y).max())


@pytest.mark.slow
def test_minimax():
    saddle = fs.quadratic_minimax(clients=4, n=3, p=5)
    problem, data, x_star, y_star = saddle
    result = fs.solve(
        problem, fs.FedRZOMinimax(0.02, 1e-2, two_sided=True), data, np.zeros(3), y0=np.zeros(5),
        rounds=1000, eval_every=1000, progress=False,
    )  # fmt: skip
    np.testing.assert_allclose(result.x, x_star, rtol=1e-6)
    np.testing.assert_allclose(result.y, y_star, rtol=1e-6)


@pytest.mark.slow
def test_payoff_linear_in_y_on_a_set():
    """The paper's coupled example, x² + y with y ∈ [−1, 1] and x + y ≤ 0: no curvature, (0.5, −0.5)."""
    data = fs.FederatedData.from_clients([{"tilt": np.array([t])} for t in (-0.5, 0.0, 0.5)])
    problem = fs.Minimax(
        lambda x, y, s: x[0] ** 2 + y[0] + s["tilt"] * (x[0] - 2 * y[0]),
        project_x=fs.sets.Box(-1, 1),
        project_y=lambda y, x: jnp.clip(y, -1, jnp.minimum(1, -x)),
    )
    method = fs.FedRZOMinimax(1e-2, 1e-2, two_sided=True)
    result = fs.solve(
        problem, method, data, np.array([-0.7]), y0=np.array([0.2]), rounds=1500, eval_every=1500,
        progress=False,
    )  # fmt: skip
    np.testing.assert_allclose([result.x[0], result.y[0]], [0.5, -0.5], atol=1e-6)


@pytest.mark.slow
def test_a_budget_that_ends_first_is_told():
    case = Problem(1000)
    with pytest.warns(UserWarning, match=r"in the last round .* lower_rounds=4 exchanges"):
        result = case.solve(fs.FedRZOBilevel(0.1, 1e-3, lower_rounds=4), rounds=5)
    assert result.ledger.lower_rounds == 1 + 5 * 4


@pytest.mark.slow
def test_a_lower_level_without_a_solution_is_told():
    """Linear in y, which has no minimum: y stays finite, and there is a warning."""
    case = Problem(10)
    endless = fs.Bilevel(
        case.problem.upper, lambda x, y, s: flat_sum(y) + 0 * x["x"].sum(), same_samples=True
    )
    with pytest.warns(UserWarning, match="strongly convex"):
        result = fs.solve(
            endless, fs.FedRZOBilevel(0.1, 1e-3), case.data, case.x0, y0=case.y0, rounds=3, progress=False
        )
    np.testing.assert_array_equal(flat(result.y), 0)


def flat_sum(y):
    return y["w"].sum() + y["c"]


@pytest.mark.slow
def test_a_hessian_that_vanishes_at_the_start():
    """``h = ¼Σy⁴ − (x + 2)ᵀy``, flat at y = 0, has its solution at the cubic roots of x + 2."""
    problem = fs.Bilevel(
        lambda x, y, s: (y**2).sum(), lambda x, y, s: (y**4).sum() / 4 - (x + s["two"]) @ y, same_samples=True
    )
    data = fs.FederatedData.from_clients([{"two": np.full((1, 2), two)} for two in (1.0, 3.0)])
    x0, run = np.array([6.0, -29.0]), {"rounds": 1, "progress": False, "default_metrics": False}
    found = fs.solve(problem, fs.FedRZOBilevel(0.01, 1e-3), data, x0, y0=np.zeros(2), **run)
    np.testing.assert_allclose(found.y, [2.0, -3.0], rtol=1e-5)
    assert found.ledger.lower_rounds < 60


def test_the_units_of_y_on_a_set_do_not_matter():
    """``h = ½Σw(y/u − x − a)²`` over y ≥ 0 has the solution u·max(x + ā, 0), after as many exchanges."""

    def lower(x, y, s):
        return (jnp.array([1.0, 10.0, 50.0]) * (y / s["unit"] - x - s["a"]) ** 2).sum() / 2

    problem = fs.Bilevel(
        lambda x, y, s: ((y / s["unit"]) ** 2).sum(),
        lower,
        project_y=lambda y: jnp.maximum(y, 0),
        same_samples=True,
    )
    a, run = np.array([[1.0, -3.0, 2.0], [3.0, 1.0, -1.0]]), {"progress": False, "default_metrics": False}
    used = []
    for unit in (1.0, 1e6):
        data = fs.FederatedData.from_clients([{"a": one[None], "unit": np.array([unit])} for one in a])
        start = {"x0": np.zeros(3), "y0": np.zeros(3), "rounds": 1}
        found = fs.solve(problem, fs.FedRZOBilevel(0.01, 1e-3), data, **start, **run)
        np.testing.assert_allclose(found.y / unit, [2.0, 0.0, 0.5], atol=1e-5)
        used.append(found.ledger.lower_rounds)
    assert abs(used[1] - used[0]) <= 5


@pytest.mark.slow
def test_one_batch_for_a_round():
    """With lower_batch_size the round's batches have a solution of their own, which is found."""
    noisy = fs.quadratic_bilevel(clients=3, n=2, p=3, samples=6, noise=1.0)
    method = fs.FedRZOBilevel(0.02, 1e-2, batch_size=None, lower_batch_size=2, two_sided=True)
    result = fs.solve(
        noisy.problem, method, noisy.data, np.zeros(2), y0=np.zeros(3), rounds=5, progress=False
    )
    assert result.history["lower_residual"][-1] <= 1e-6
    assert result.state.report.solved
    exact = noisy.solution(result.x)
    assert np.linalg.norm(result.y - exact) > 1e-2  # another solution than that of all samples


def test_what_it_does_not_take():
    case = Problem(10)
    own = fs.Bilevel(
        case.problem.upper, case.problem.lower, project_y=lambda y, x, client: y, same_samples=True
    )
    for method, problem, match in [
        (fs.FedRZOBilevel(0.1, 0.1, mu_h=1.0, kappa_h=2.0), case.problem, "takes no constants"),
        (fs.FedRZOBilevel(0.1, 0.1), own, "one set of y for all"),
    ]:
        with pytest.raises(ValueError, match=match):
            fs.solve(problem, method, case.data, case.x0, y0=case.y0, rounds=1, progress=False)


@pytest.mark.slow
def test_the_rules_say_where_they_guess():
    """Where κ_h is too large to be estimated, a paper's rule goes on with less, and says so."""
    case = Problem(1000)
    with pytest.warns(UserWarning, match="at least 50, the largest that is estimated"):
        case.solve(fs.FedRZOBilevel(0.001, 0.1, lower="lfd"), rounds=1)


def box_of_a_client(x, client):
    return jnp.clip(x, -1.0, 1.0 + client.index)


@pytest.mark.parametrize(
    "kind",
    ["FedRZO", *(pytest.param(k, marks=pytest.mark.slow) for k in ("FedRZOBilevel", "FedRZOTwoStage"))],
)
def test_a_step_too_long_for_the_sets_is_told(kind):
    """From γ = 2η on a step moves x at least as far out on the other side of its set."""
    data = fs.FederatedData.from_clients([{"a": np.ones((2, 2))}, {"a": np.zeros((1, 2))}])
    problems = {
        "FedRZO": lambda p: fs.Minimization(lambda x, s: ((x - s["a"]) ** 2).sum(), project=p),
        "FedRZOBilevel": lambda p: fs.Bilevel(
            lambda x, y, s: (x**2).sum(), lambda x, y, s: ((y - x) ** 2).sum(), project_x=p, same_samples=True
        ),
        "FedRZOTwoStage": lambda p: fs.MPEC(
            lambda x, y, s: (x**2).sum(), lambda x, y, s: y - x, project_x=p, solution=lambda x, s: x
        ),
    }
    more = {
        "FedRZOBilevel": {"lower": fs.FedAvg(0.1), "lower_rounds": 1},
        "FedRZOTwoStage": {"lower": "solution"},
    }
    start = {} if kind == "FedRZO" else {"y0": np.zeros(2)}

    def told(gamma, eta, project, rounds=2):
        return getattr(fs, kind)(gamma, eta, **more.get(kind, {})).cautions(
            Moment(problems[kind](project), rounds, np.zeros(2))
        )

    assert not told(0.2, 0.1, fs.sets.Box(-1, 1))
    assert not told(0.3, 0.1, None)
    (alone,) = told(0.3, 0.1, box_of_a_client)
    assert "gamma=0.3 is more than 2·eta=0.2" in alone
    assert "multiplies the distance from it by 2" in alone
    (later,) = told(0.01, lambda r: 0.1 / (1.0 + r), fs.sets.Box(-1, 1), rounds=31)
    assert "round 30" in later
    assert not told(0.01, lambda r: 0.1 / (1.0 + r), fs.sets.Box(-1, 1), rounds=20)
    method = getattr(fs, kind)(0.3, 0.1, **more.get(kind, {}))
    with pytest.warns(UserWarning, match="gamma=0.3 is more"):
        fs.solve(
            problems[kind](box_of_a_client), method, data, np.zeros(2), rounds=0, progress=False, **start
        )
