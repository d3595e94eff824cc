"""The exact hypergradient against closed forms, finite differences and other ways to it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs

pytestmark = pytest.mark.usefixtures("x64")


def at(problem, data, x, y):
    """A result at a point."""
    return fs.Result(x, y, {}, fs.Ledger(), None, 0.0, problem=problem, data=data)


@pytest.fixture(scope="module")
def quadratic():
    return fs.quadratic_bilevel(clients=4, n=3, p=5)


def test_the_hypergradient_of_a_quadratic_is_exact(quadratic):
    x, y = np.array([0.3, -1.0, 2.0]), np.ones(5)
    found = fs.diagnose(at(quadratic.problem, quadratic.data, x, y))
    assert not found.solved
    np.testing.assert_allclose(found.hypergradient, quadratic.gradient(x), rtol=1e-7, atol=1e-8)
    np.testing.assert_allclose(found.y, quadratic.solution(x), atol=1e-7)
    assert found.lower_distance == pytest.approx(np.linalg.norm(y - quadratic.solution(x)), rel=1e-6)
    A, B, c = (np.asarray(quadratic.data.train[k]).mean(0) for k in "ABc")
    assert found.lower_residual == pytest.approx(np.linalg.norm(A @ y - B @ x - c), rel=1e-12)
    assert found.stationarity == found.hypergradient_norm


def test_float32_runs_are_diagnosed_in_float64(quadratic):
    problem, data = quadratic.problem, quadratic.data
    with jax.enable_x64(False):
        found = fs.diagnose(at(problem, data, np.ones(3, np.float32), np.zeros(5, np.float32)))
    # the data themselves are rounded to 6e-8
    np.testing.assert_allclose(found.hypergradient, quadratic.gradient(np.ones(3)), atol=1e-6)


@pytest.mark.slow
def test_a_zeroth_order_result(quadratic):
    """The same number for a method that knows no derivatives, and for one that reached the solution."""
    problem, data, x_star, y_star = quadratic
    method = fs.FedRZOBilevel(gamma=0.01, eta=0.1, lower=fs.LFD(0.2), lower_rounds=3, two_sided=True)
    result = fs.solve(problem, method, data, np.zeros(3), y0=np.zeros(5), rounds=20, progress=False)
    found = fs.diagnose(result)
    np.testing.assert_allclose(found.hypergradient, quadratic.gradient(result.x), rtol=1e-7, atol=1e-8)
    exact = fs.diagnose(at(problem, data, x_star, y_star))
    assert exact.solved
    assert exact.hypergradient_norm < 1e-7
    assert exact.lower_residual < 1e-12


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ZOHFL. the clients. models have not converged:UserWarning")  # rightly
def test_results_of_other_zeroth_order_methods():
    """Of a minimax problem and of personal models, at points where these methods have not converged."""
    q = fs.quadratic_minimax(clients=3, n=2, p=3)
    method = fs.FedRZOMinimax(0.02, 0.1, lower="local_sgd", lower_rounds=3)
    result = fs.solve(q.problem, method, q.data, np.ones(2), y0=np.zeros(3), rounds=5, progress=False)
    found = fs.diagnose(result)
    assert not found.solved
    np.testing.assert_allclose(found.hypergradient, q.gradient(result.x), rtol=1e-7, atol=1e-8)
    assert found.hypergradient_norm > 1e-2

    problem = fs.Personalized(
        server=lambda x, s: 0.5 * ((x - s["a"]) ** 2).sum(),
        coupling=lambda x, y: 0.5 * ((y - 2.0) ** 2).sum(),
        client=lambda x, y, s: 0.5 * ((y - s["c"] * x) ** 2).sum(),
    )
    c = np.array([0.5, 2.0])
    clients = [{"c": np.full(2, ci)} for ci in c]
    data = fs.FederatedData.from_clients(clients, server={"a": np.array([[1.0, 2.0], [3.0, 4.0]])})
    method = fs.ZOHFL(0.02, 0.1, gamma_client=0.3)
    result = fs.solve(problem, method, data, np.zeros(2), y0=np.zeros(2), rounds=5, progress=False)
    expected = result.x - np.array([2.0, 3.0]) + np.mean([ci * (ci * result.x - 2.0) for ci in c], axis=0)
    np.testing.assert_allclose(fs.diagnose(result).hypergradient, expected, atol=1e-7)
    assert np.linalg.norm(expected) > 1e-2


def ridge_upper(x, y, s):
    return jnp.logaddexp(0.0, -s["b"] * (s["a"] @ y["w"] + y["c"]))


def ridge_lower(x, y, s):
    penalty = jnp.exp(x["rate"]) * (y["w"] @ y["w"]) + y["c"] ** 2
    return jnp.logaddexp(0.0, -s["b"] * (s["a"] @ y["w"] + y["c"] + x["shift"])) + 0.1 * penalty


@pytest.fixture(scope="module")
def ridge():
    """Logistic regression with a learned penalty and shift; unequal clients, validation data, pytrees."""
    rng = np.random.default_rng(0)

    def clients(sizes):
        return [{"a": rng.normal(size=(n, 4)), "b": np.sign(rng.normal(size=n))} for n in sizes]

    data = fs.FederatedData.from_clients(clients([5, 9, 2]), valid=clients([4, 3, 6]))
    x = {"rate": jnp.asarray(0.3), "shift": jnp.asarray(-0.2)}
    return (
        fs.Bilevel(ridge_upper, ridge_lower, same_samples=True),
        data,
        x,
        {"w": np.zeros(4), "c": np.zeros(())},
    )


@pytest.mark.slow
def test_a_nonlinear_problem_against_finite_differences(ridge):
    problem, data, x, y = ridge

    def objective(**change):
        return fs.diagnose(at(problem, data, {**x, **change}, y)).objective

    found = fs.diagnose(at(problem, data, x, y))
    step = 1e-4
    for name in x:
        ahead, behind = (objective(**{name: x[name] + sign * step}) for sign in (1, -1))
        assert float(found.hypergradient[name]) == pytest.approx((ahead - behind) / (2 * step), abs=1e-6)


@pytest.mark.slow
def test_weights(ridge):
    """Clients weighted by size are one client with all the data."""
    problem, data, x, y = ridge
    data = dataclasses.replace(data, valid=None, valid_sizes=None)
    whole = jax.tree.map(lambda *parts: np.concatenate(parts), *[data.client(i) for i in range(3)])
    pooled = fs.diagnose(at(problem, fs.FederatedData.from_clients([whole]), x, y))
    by_size = fs.diagnose(at(problem, data, x, y), weights="size")
    uniform = fs.diagnose(at(problem, data, x, y))
    assert by_size.hypergradient_norm == pytest.approx(pooled.hypergradient_norm, rel=1e-6)
    assert abs(uniform.hypergradient_norm / pooled.hypergradient_norm - 1) > 1e-2


@pytest.mark.slow
def test_a_set_that_depends_on_x():
    """FedRZO's example, max of x² + y over y ≤ −x and y ∈ [−1, 1], whose ∇F(x) = 2x − 1; curved in y + x."""
    problem = fs.Minimax(
        lambda x, y, s: (x**2 + y - 0.5 * s["mu"] * (y + x) ** 2).sum(),
        project_y=lambda y, x: jnp.clip(y, -1, jnp.minimum(1, -x)),
    )
    data = fs.FederatedData.from_clients([{"mu": np.full(2, 0.1)}] * 2)
    found = fs.diagnose(at(problem, data, np.array([0.2]), np.array([0.0])))
    np.testing.assert_allclose(found.y, [-0.2], atol=1e-7)
    np.testing.assert_allclose(found.hypergradient, [2 * 0.2 - 1], atol=1e-6)


@pytest.mark.slow
def test_a_set_of_x():
    problem, data, _, _ = fs.quadratic_bilevel(clients=2, n=2, p=3)
    boxed = fs.Bilevel(problem.upper, problem.lower, project_x=lambda x: jnp.zeros_like(x), same_samples=True)
    found = fs.diagnose(at(boxed, data, np.zeros(2), np.zeros(3)))
    assert found.hypergradient_norm > 0.1
    assert found.stationarity == 0.0


@pytest.mark.slow
def test_personal_models():
    """f₁ = ½‖x−a‖², f₂ = ½‖y−b‖², h_i = ½‖y−c_i x‖²: y_i = c_i x, ∇F = x − a + mean c_i(c_i x − b)."""
    problem = fs.Personalized(
        server=lambda x, s: 0.5 * ((x - s["a"]) ** 2).sum(),
        coupling=lambda x, y: 0.5 * ((y - 2.0) ** 2).sum(),
        client=lambda x, y, s: 0.5 * ((y - s["c"] * x) ** 2).sum(),
    )
    c = np.array([0.5, 2.0, -1.0])
    clients = [{"c": np.full(n, ci)} for n, ci in zip([2, 3, 1], c, strict=True)]
    data = fs.FederatedData.from_clients(clients, server={"a": np.array([[1.0, 2.0], [3.0, 4.0]])})
    x = np.array([0.7, -0.3])
    found = fs.diagnose(at(problem, data, x, np.zeros((3, 2))))
    expected = x - np.array([2.0, 3.0]) + np.mean([ci * (ci * x - 2.0) for ci in c], axis=0)
    np.testing.assert_allclose(found.hypergradient, expected, atol=1e-7)
    np.testing.assert_allclose(found.y, c[:, None] * x, atol=1e-7)


@pytest.mark.slow
def test_an_equilibrium_constraint():
    """y(x, ξ) = max(0, (x − ξ)/2) solves a VI for each sample; F(x) = mean (x + 1 − y)²."""
    problem = fs.MPEC(
        leader=lambda x, y, s: ((x + 1 - y) ** 2).sum(),
        follower=lambda x, y, s: 2 * y - (x - s["a"]),
        project_y=fs.sets.NonNegative(),
    )
    data = fs.FederatedData.from_clients([{"a": np.array([-1.0, 2.0])}, {"a": np.array([0.0])}])
    found = fs.diagnose(at(problem, data, np.ones(1), np.zeros((2, 1))))
    y, slope = np.array([[1.0, 0.0], [0.5, 0.0]]), np.array([[0.5, 0.0], [0.5, 0.0]])
    each = 2 * (1 + 1 - y) * (1 - slope)
    assert float(found.hypergradient[0]) == pytest.approx(each[0].mean() / 2 + each[1, 0] / 2, abs=1e-6)
    np.testing.assert_allclose(found.y, [[0.5], [0.5]], atol=1e-7)  # the clients' means of y(x, ξ)


@pytest.mark.slow
@pytest.mark.parametrize("own", [True, False], ids=["each client's", "shared"])
def test_coupled_followers(own):
    """Affine followers, G = M y − x − c_i with M not symmetric: y_i = M⁻¹(x + c_i), F = ½ mean ‖y_i − 1‖².

    So ∇F = M⁻ᵀ (mean y_i − 1), and x* = M 1 − mean c. Three clients of unequal size in two dimensions: a
    follower's map that saw all clients' y at once would not even fit.
    """
    M = np.array([[2.0, 1.0], [-1.0, 1.0]])
    c = np.array([[0.0, 0.0], [1.0, -1.0], [2.0, 4.0]]) if own else np.zeros((3, 2))
    problem = fs.MPEC(
        leader=lambda x, y, s: 0.5 * ((y - 1) ** 2).sum(),
        follower=lambda x, y, s: jnp.asarray(M) @ y - x - s["c"],
    )
    clients = [{"c": np.tile(ci, (n, 1))} for ci, n in zip(c, [2, 4, 1], strict=True)]
    data = fs.FederatedData.from_clients(clients)

    def responses(x):
        return np.linalg.solve(M, (x + c).T).T

    x = np.array([0.3, -1.0])
    y = responses(x)
    found = fs.diagnose(at(problem, data, x, np.zeros((3, 2))))
    np.testing.assert_allclose(found.y, y, atol=1e-7)
    np.testing.assert_allclose(found.hypergradient, np.linalg.solve(M.T, y.mean(0) - 1), atol=1e-7)
    assert found.objective == pytest.approx(0.5 * ((y - 1) ** 2).sum(1).mean(), abs=1e-7)
    assert found.lower_residual == pytest.approx(np.linalg.norm(x + c), rel=1e-7)
    assert found.lower_distance == pytest.approx(np.linalg.norm(y), rel=1e-7)

    x = M @ np.ones(2) - c.mean(0)
    best = fs.diagnose(at(problem, data, x, responses(x)))
    assert best.solved
    assert best.hypergradient_norm < 1e-7
    assert best.lower_residual < 1e-12
    np.testing.assert_allclose(fs.diagnose(at(problem, data, x, np.zeros(2))).y, best.y, atol=1e-7)
    misfit = fs.diagnose(at(problem, data, x, np.zeros((3, 5))))
    assert "y does not fit the problem" in misfit.trouble


@pytest.mark.slow
def test_what_the_two_stage_method_found():
    """Cournot's followers, y − x − c_i + Σ y: the result's y fits, and both levels are solved."""
    data = fs.FederatedData.from_clients([{"c": np.zeros((4, 2))}, {"c": np.ones((4, 2))}])
    problem = fs.MPEC(lambda x, y, s: 0.5 * ((y - 1) ** 2).sum(), lambda x, y, s: y - x - s["c"] + y.sum())
    method = fs.FedRZOTwoStage(
        0.5, 0.1, lower="extragradient", batch_size=None, two_sided=True, directions=2, orthogonal=True
    )
    result = fs.solve(problem, method, data, np.zeros(2), y0=np.zeros(2), rounds=300, progress=False)
    found = fs.diagnose(result)
    # y_i = (x + c_i)/3 by symmetry: x* = 2.5, y = (2.5/3, 3.5/3), F = ½ mean 2·(1/6)²
    np.testing.assert_allclose(result.x, 2.5, atol=1e-5)
    assert found.objective == pytest.approx(1 / 36, abs=1e-6)
    assert found.hypergradient_norm < 1e-5
    assert found.lower_residual < 1e-4


def test_a_lower_level_without_a_solution_is_reported():
    problem = fs.Bilevel(
        lambda x, y, s: (y**2).sum(), lambda x, y, s: s["a"] * (x * y).sum(), same_samples=True
    )
    data = fs.FederatedData.from_clients([{"a": np.ones(1)}])
    assert not fs.diagnose(at(problem, data, np.ones(1), np.ones(1))).solved


def test_the_verdict_is_on_the_result(quadratic):
    """‖∇F(x)‖ relative to that at x0, in words; a bad point is not called converged."""
    x, x0 = np.array([0.3, -1.0, 2.0]), np.zeros(3)
    found = fs.diagnose(at(quadratic.problem, quadratic.data, x, np.ones(5)), x0=x0)
    expected = np.linalg.norm(quadratic.gradient(x)) / np.linalg.norm(quadratic.gradient(x0))
    assert found.reduction == pytest.approx(expected, rel=1e-6)
    assert f"{found.reduction:.2g} of that at x0" in repr(found)
    assert "converged" not in repr(found)


def test_problems_without_a_lower_level():
    """½ E‖x − a‖² over a ball, whose gradient is x − mean a; and log E exp(a x) with softmax weights."""
    data = fs.FederatedData.from_clients([{"a": np.array([[1.0], [3.0]])}, {"a": np.array([[4.0]])}])
    problem = fs.Minimization(lambda x, s: 0.5 * ((x - s["a"]) ** 2).sum(), project=fs.sets.Ball(1.0))
    found = fs.diagnose(at(problem, data, np.ones(1), None), x0=np.zeros(1))
    np.testing.assert_allclose(found.hypergradient, [1.0 - 3.0], rtol=1e-12)
    assert (found.stationarity, found.reduction, found.y) == (0.0, 0.0, None)
    chained = fs.Composition([lambda x, s: jnp.exp(s["a"] @ x), jnp.log])
    a, shares = np.array([1.0, 3.0, 4.0]), np.array([0.25, 0.25, 0.5])
    q = shares * np.exp(0.5 * a)
    found = fs.diagnose(at(chained, data, np.full(1, 0.5), None))
    assert found.hypergradient_norm == pytest.approx(q @ a / q.sum(), rel=1e-9)
    assert found.objective == pytest.approx(np.log(q.sum()), rel=1e-9)


def test_errors(quadratic, tmp_path):
    result = at(quadratic.problem, quadratic.data, np.zeros(3), np.zeros(5))
    dataclasses.replace(result, method={}).save(tmp_path)
    loaded = fs.Result.load(tmp_path)
    with pytest.raises(ValueError, match="give problem= and data="):
        fs.diagnose(loaded)
    again = fs.diagnose(loaded, problem=quadratic.problem, data=quadratic.data)
    assert again.hypergradient_norm == pytest.approx(fs.diagnose(result).hypergradient_norm)
    selection = fs.Selection(lambda x, s: x.sum(), lambda x: x @ x)
    assert not fs.diagnose(dataclasses.replace(result, problem=selection)).solved  # x.sum() has no minimum


def lines(problem, x, **options):
    """A result for two equations a·x = b, one with each client, in four unknowns."""
    A = np.array([[1.0, 2.0, 0.0, -1.0], [0.5, 0.0, 1.0, 3.0]])
    data = fs.FederatedData.from_clients([{"a": A[:1], "b": np.ones(1)}, {"a": A[1:], "b": -np.ones(1)}])
    return fs.diagnose(at(problem, data, x, None), **options), A, np.array([1.0, -1.0])


def equation(x, s):
    return 0.5 * (s["a"] @ x - s["b"]) ** 2


@pytest.mark.slow
def test_selection_among_solutions_of_equations():
    """With f = ½‖x − c‖² the projection of c is x*, and ‖x − x*‖ the measure, wherever x is."""
    c, x = np.array([1.0, 0.0, -2.0, 0.5]), np.array([3.0, -1.0, 0.0, 1.0])
    problem = fs.Selection(equation, lambda x: 0.5 * ((x - c) ** 2).sum(), same_samples=True)
    found, A, b = lines(problem, x)
    onto = np.linalg.pinv(A)
    x_star, p = c - onto @ (A @ c - b), x - onto @ (A @ x - b)
    assert not found.solved
    assert found.stationarity == pytest.approx(np.linalg.norm(x - x_star), rel=1e-7)
    assert found.lower_distance == pytest.approx(np.linalg.norm(x - p), rel=1e-7)
    assert found.lower_residual == pytest.approx(np.linalg.norm(A.T @ (A @ x - b)) / 2, rel=1e-12)
    assert found.objective == pytest.approx(((x - c) ** 2).sum() / 2)
    best, _, _ = lines(problem, x_star, x0=x)
    assert best.solved
    assert best.stationarity < 1e-7
    assert best.reduction < 1e-7
    assert best.lower_residual < 1e-12  # how x* was rounded
    assert "residual of h" in repr(best)
    assert "distance to its optima" in repr(best)


@pytest.mark.slow
def test_selection_of_the_sparsest():
    """On the line x₁ + 2x₂ = 2: ‖x‖₁ is smallest at (0, 1)."""
    data = fs.FederatedData.from_clients([{"a": np.array([[1.0, 2.0]]), "b": np.array([2.0])}])
    problem = fs.Selection(equation, fs.prox.L1())
    best = fs.diagnose(at(problem, data, np.array([0.0, 1.0]), None))
    assert best.solved
    assert best.stationarity < 1e-6
    x = np.array([2.0, 1.0])
    found = fs.diagnose(at(problem, data, x, None))
    assert found.stationarity == pytest.approx(2.0, abs=1e-4)
    assert found.objective == pytest.approx(3.0)


@pytest.mark.slow
def test_selection_within_a_set_and_where_optima_have_a_boundary():
    """P(0) onto x₁ + x₂ = 1, 0 ≤ x₁ ≤ 0.3 is (0.3, 0.7); the optima of max(0, x − 1)² end at 1."""
    data = fs.FederatedData.from_clients([{"a": np.array([[1.0, 1.0]]), "b": np.array([1.0])}])
    box = fs.sets.Box(np.array([0.0, -5.0]), np.array([0.3, 5.0]))
    problem = fs.Selection(equation, lambda x: 0.5 * (x @ x), project=box)
    found = fs.diagnose(at(problem, data, np.array([0.5, 0.5]), None))
    assert not found.solved
    assert found.stationarity == pytest.approx(np.hypot(0.2, 0.2), abs=1e-7)
    assert found.lower_residual == pytest.approx(0.2 * 2, rel=1e-6)  # 0.2 out of the box, L_h = 2
    ramp = fs.Selection(lambda x, s: 0.5 * jnp.maximum(0, x - 1) ** 2, lambda x: -x)
    found = fs.diagnose(at(ramp, data, np.array(1.0), None))
    assert found.stationarity < 1e-6
    assert found.solved
    assert fs.diagnose(at(ramp, data, np.array(-1.0), None)).stationarity == pytest.approx(2.0)


@pytest.mark.slow
def test_optima_that_are_not_there_are_told():
    """exp(−x) has no smallest value: the projections run away, and the measure says that it is not exact."""
    data = fs.FederatedData.from_clients([{"a": np.ones((1, 1)), "b": np.ones(1)}])
    nowhere = fs.Selection(lambda x, s: jnp.exp(-x), lambda x: 0.5 * x**2)
    assert not fs.diagnose(at(nowhere, data, np.array(0.5), None)).solved
    two = fs.Selection((equation, fs.prox.L1()), fs.prox.L1())
    assert "more than one" in fs.diagnose(at(two, data, np.ones(1), None)).trouble


def test_the_maps_of_several_sequences():
    problem = fs.MultiSequence(
        P=lambda x, Z, s: x + Z[1] - s["a"], S=[lambda x, z, s: 2 * z - x, lambda z1, z, s: z - z1 * s["a"]]
    )
    data = fs.FederatedData.from_clients([{"a": np.array([1.0, 3.0])}, {"a": np.array([4.0])}])
    found = fs.diagnose(at(problem, data, np.array([1.0]), (np.array([2.0]), np.array([5.0]))))
    # the clients' means of a are 2 and 4
    np.testing.assert_allclose(found.hypergradient, [1 + 5 - 3])
    np.testing.assert_allclose(found.sequence_residuals, [3.0, 1.0])
    assert found.lower_residual == pytest.approx(np.sqrt(10))
    assert found.objective is None
    assert "residuals of the sequences 3, 1" in repr(found)


D = np.array([0.1, 0.7, 3.1])  # none of these is a float32
B = np.array([[1.0, 2.0, 3.0], [3.0, 0.0, -1.0]])  # of two clients, in the mean (2, 1, 1)


def _half(z):
    return 0.5 * z @ (D * z)


@pytest.mark.parametrize(
    ("problem", "gradient"),
    [
        (fs.Minimization(lambda x, s: _half(x - s["b"])), lambda x, b: D * (x - b)),
        (fs.Composition([lambda x, s: D * (x - s["b"]), _half]), lambda x, b: D**3 * (x - b)),
        pytest.param(
            fs.Bilevel(
                upper=lambda x, y, s: _half(y), lower=lambda x, y, s: _half(y - x - s["b"]), same_samples=True
            ),
            lambda x, b: D * (x + b),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            fs.Minimax(lambda x, y, s: (x + s["b"]) @ y - _half(y)),
            lambda x, b: (x + b) / D,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            fs.MPEC(leader=lambda x, y, s: _half(y), follower=lambda x, y, s: D * (y - x - s["b"])),
            lambda x, b: D * (x + b),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            fs.Personalized(
                server=lambda x, s: _half(x),
                coupling=lambda x, y: _half(y),
                client=lambda x, y, s: _half(y - x - s["b"]),
            ),
            lambda x, b: D * (2 * x + b),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            fs.Selection(
                primary=lambda x, s: 0.5 * (D @ (x - s["b"])) ** 2, secondary=_half, same_samples=True
            ),
            lambda x, b: D * x,
            marks=pytest.mark.slow,
        ),
        (
            fs.MultiSequence(P=lambda x, Z, s: D * x - Z[0], S=[lambda x, z, s: z - D * s["b"]]),
            lambda x, b: D * x - 1,
        ),
    ],
    ids=lambda case: type(case).__name__ if isinstance(case, fs.Problem) else "",
)
def test_constants_that_float32_programs_hold(problem, gradient):
    """A loss that closes over a NumPy array, which a run in float32 has rounded, is diagnosed in float64."""
    with jax.enable_x64(False):
        held = jax.make_jaxpr(lambda: D * jnp.ones(3))()
        assert held.consts[0].dtype == np.float32
        data = fs.FederatedData.from_clients([{"b": b[None]} for b in B], server={"a": np.ones(1)})
        y = np.ones((2, 3)) if isinstance(problem, fs.MPEC | fs.Personalized) else np.ones(3)
        y = (y,) if isinstance(problem, fs.MultiSequence) else y
        x = np.array([1.0, -2.0, 0.5], np.float32)
        found = fs.diagnose(at(problem, data, x, y))
        np.testing.assert_allclose(found.hypergradient, gradient(x.astype(float), B.mean(0)), rtol=1e-9)
        # and the other way round: what was diagnosed in float64 is in float32 again
        after = jax.make_jaxpr(lambda: D * jnp.ones(3))()
        assert after.consts[0].dtype == np.float32


def test_the_worst_weights_are_judged_as_such():
    """Three clients, f_i = ½(x − b_i)² with b = 0, 1, 4: the worst is least at 2, between the outer two."""
    problem = fs.Minimization(lambda x, s: 0.5 * (x[0] - s["b"]) ** 2)
    data = fs.FederatedData.from_clients([{"b": np.array([b])} for b in (0.0, 1.0, 4.0)])
    run = at(problem, data, np.array([2.0]), np.array([0.5, 0, 0.5]))
    run = dataclasses.replace(run, method=fs.AFL(0.1, 0.1))
    found = fs.diagnose(run, x0=np.array([3.0]))
    assert found.saddle
    assert found.stationarity < 1e-15
    assert found.objective == pytest.approx(2.0)
    # at 3 with equal weights the slope is 3 − 5/3, and P(1/3 + (9, 4, 1)/2) is the first vertex
    assert fs.diagnose(dataclasses.replace(run, x=np.array([3.0]), y=np.full(3, 1 / 3))).stationarity == (
        pytest.approx(np.hypot(4 / 3, np.sqrt(2 / 3)))
    )


def _line(x, a):
    """Onto {x : aᵀx ≤ 0}."""
    return x - jnp.maximum(a @ x, 0) * a / (a @ a)


@pytest.mark.slow
def test_sets_of_the_clients_own():
    """{x₁ ≤ 0} and {x₁ + x₂ ≤ 0}: (2, 1) is projected onto the corner by both, (1, −3) by the first alone."""
    data = fs.FederatedData.from_clients(
        [{"a": np.array([[1.0, 0.0]]), "c": np.ones(1)}, {"a": np.array([[1.0, 1.0]]), "c": np.ones(1)}]
    )

    def slope(z):
        problem = fs.Minimization(
            lambda x, s: -s["c"] * (jnp.asarray(z) @ x),
            project=lambda x, client: _line(x, client.data["a"][0]),
        )
        return lambda x: fs.diagnose(at(problem, data, np.array(x), None))

    corner = slope([2.0, 1.0])
    assert corner([0.0, 0.0]).stationarity == pytest.approx(0, abs=1e-8)
    off = corner([-1.0, -1.0])  # P(1, 0) = 0
    assert off.stationarity == pytest.approx(np.sqrt(2), abs=1e-8)
    assert off.outside == 0
    above = corner([1.0, 1.0])
    assert above.outside == pytest.approx(np.sqrt(2))
    assert "1.41 outside of its set" in repr(above)


@pytest.mark.slow
def test_sets_without_a_common_point_are_not_judged_by():
    data = fs.FederatedData.from_clients([{"a": np.zeros(1)}, {"a": np.ones(1)}])
    own = lambda x, client: jnp.full_like(x, client.data["a"][0])  # noqa: E731
    problem = fs.Minimization(lambda x, s: x @ x, project=own)
    found = fs.diagnose(at(problem, data, np.ones(1), None))
    assert np.isnan(found.stationarity)
    assert "no common point" in repr(found)
    assert found.outside == 1


@pytest.mark.slow
def test_games_in_which_y_is_not_unique():
    """xᵀy − bᵀy + bᵀx has its saddle point at x = b, y = −b, and no y(x)."""
    problem = fs.Minimax(lambda x, y, s: x @ y - s["b"] @ y + s["b"] @ x)
    data = fs.FederatedData.from_clients([{"b": b[None]} for b in B])
    b, x, y = B.mean(0), np.array([1.0, 0.0, 0.0]), np.array([2.0, 2.0, 0.0])
    found = fs.diagnose(at(problem, data, x, y), x0=np.zeros(3))
    assert found.saddle
    assert found.stationarity == pytest.approx(np.sqrt(((y + b) ** 2).sum() + ((x - b) ** 2).sum()))
    assert "residual of the saddle point" in repr(found)
    assert "nan" not in repr(found)
    assert fs.diagnose(at(problem, data, b, -b)).stationarity < 1e-12


def test_the_distance_that_a_gradient_does_not_show():
    """A gradient of 1e-3 in the flattest direction of a quadratic of condition 1e4 is ten away from none."""
    d = jnp.array([1e-4, 1.0])
    problem = fs.Minimization(lambda x, s: 0.5 * (x - s["b"]) @ (d * (x - s["b"])))
    data = fs.FederatedData.from_clients([{"b": np.array([[1.0, 2.0]])}])
    found = fs.diagnose(at(problem, data, np.array([11.0, 2.0]), None), x0=np.array([1.0, 2000.0]))
    assert found.stationarity == pytest.approx(1e-3)
    assert found.distance == pytest.approx(10 / np.sqrt(5), rel=1e-3)
    assert not found.solved
    start = fs.diagnose(at(problem, data, np.array([1.0, 2.0]), None), x0=np.array([1.0, 2.0]))
    assert "as at x0, which is stationary itself" in repr(start)


@pytest.mark.slow
def test_a_singular_lower_level_is_said_in_words():
    problem = fs.Bilevel(
        lambda x, y, s: 0.5 * (y @ y) + x @ x, lambda x, y, s: 0.5 * (y[0] - x[0]) ** 2, same_samples=True
    )
    data = fs.FederatedData.from_clients([{"a": np.ones(1)}])
    found = repr(fs.diagnose(at(problem, data, np.ones(2), -np.ones(2)), x0=np.zeros(2)))
    assert "nan" not in found
    assert "inf" not in found
    assert "the lower level has many solutions" in found


@pytest.mark.slow
def test_constraints_are_judged_by_their_penalty():
    """x² s.t. 1 − x ≤ 0 with ρ = 10 and λ: h + ρλ log(1 + exp(c/λ)), and PDSGD has no penalty."""
    problem = fs.fairness.penalised(
        lambda x, s: x[0] ** 2, lambda x, s: s["a"] - x[0], lambda g: g[None], count=1, rho=10.0, lam=0.5
    )
    data = fs.FederatedData.from_clients([{"a": np.ones(2)}])
    run = at(problem, data, np.array([0.5]), None)
    found = fs.diagnose(run)
    assert float(found.hypergradient[0]) == pytest.approx(1 - 10 / (1 + np.exp(-1)))
    hard = fs.diagnose(dataclasses.replace(run, method=fs.PDSGD(0.1, 0.1, 0.1)))
    assert not hard.solved  # 1/2 violates the constraint that PDSGD keeps to
    assert hard.objective > 10 * 0.5


@pytest.mark.slow
def test_entries_of_y_that_stay_zero():
    """g = ½ yᵀHy − xy₁ with y₃ decoupled: y(x) = x H⁻¹e₁, and ∇F = e₁ᵀH⁻¹y(x) for f = ½‖y‖²."""
    H = np.array([[2.0, 1.0, 0.0], [1.0, 30.0, 0.0], [0.0, 0.0, 1.0]])
    problem = fs.Bilevel(
        lambda x, y, s: 0.5 * y @ y,
        lambda x, y, s: 0.5 * y @ jnp.asarray(H) @ y - x[0] * y[0],
        same_samples=True,
    )
    data = fs.FederatedData.from_clients([{"a": np.ones(1)}])
    found = fs.diagnose(at(problem, data, np.array([3.0]), np.zeros(3)))
    inverse = np.linalg.inv(H)[0]
    np.testing.assert_allclose(found.y, 3 * inverse, atol=1e-8)
    np.testing.assert_allclose(found.hypergradient, [3 * inverse @ inverse], rtol=1e-7)
