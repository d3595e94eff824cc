"""Clients weighed by their sizes: what is solved, and what judges a result, against exact answers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

import fedstrata as fs

SIZES = (3, 9, 18)
pytestmark = pytest.mark.usefixtures("x64")


def loss(x, s):
    return (s["a"] @ x["w"] + x["b"] - s["t"]) ** 2


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    clients = []
    for i, n in enumerate(SIZES):  # unlike clients: the weights matter
        a = rng.normal(size=(n, 2)) * 0.4
        t = a @ [1.0, -1.0] + 0.6 * (i - 1) + 0.2 * rng.normal(size=n)
        clients.append({"a": a, "t": t, "group": np.arange(n) % 3})
    return fs.FederatedData.from_clients(clients)


X0 = {"w": np.zeros(2), "b": np.zeros(())}


def losses_at(data, x):
    point = {"w": jnp.asarray(x[:2]), "b": jnp.asarray(x[2])}
    return np.asarray(jax.vmap(loss, (None, 0))(point, data.train))


def solve(problem, method, data, **options):
    return fs.solve(problem, method, data, X0, progress=False, weights="size", **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kl", "group"])
def test_minimax_forms_weigh_samples_by_size(name, data):
    if name == "kl":
        problem = fs.dro.kl(loss, lam=0.5)

        def exact(x):
            return 0.5 * np.log(np.exp(losses_at(data, x) / 0.5).mean())
    else:
        problem = fs.dro.group(loss, 3, lam=0.5)

        def exact(x):
            found = losses_at(data, x)
            groups = [found[data.train["group"] == j].mean() for j in range(3)]
            return 0.5 * np.log(np.exp(np.array(groups) / 0.5).mean())

    best = optimize.minimize(exact, np.zeros(3), tol=1e-12).fun
    minimax, indexed, y0 = problem.minimax(data, weights="size")
    method = fs.LocalSGDA(eta_x=0.2, eta_y=10.0 if name == "kl" else 0.5)
    result = solve(minimax, method, indexed, y0=y0, rounds=600, eval_every=600)
    reached = exact(np.append(result.x["w"], result.x["b"]))
    assert reached - best < 1e-5
    assert result.history["payoff"][-1] == pytest.approx(best, abs=1e-5)  # the maximum is the robust value


@pytest.mark.parametrize("name", [pytest.param("bounded", marks=pytest.mark.slow), "opportunity"])
def test_constraints_of_the_minimax_form_are_those_of_the_composition(name, data):
    if name == "bounded":
        problem = fs.fairness.bounded_group_loss(loss, 3, 0.3)
    else:
        problem = fs.fairness.equal_opportunity(
            lambda x, s: s["a"] @ x["w"] + x["b"], loss, 3, label_of=lambda s: s["t"] > 0
        )
    x = {"w": jnp.array([0.3, -0.2]), "b": jnp.array(0.1)}
    mean = jax.tree.map(lambda v: v.mean(0), jax.vmap(problem.inner, (None, 0))(x, data.train))
    violation = problem.linear(data, "size")
    by_sample = jax.vmap(lambda s: violation(x, s))(data.train).mean(0)
    np.testing.assert_allclose(by_sample, problem.constraints(mean), rtol=1e-6)


def test_a_form_made_for_other_weights_is_refused(data):
    minimax, indexed, y0 = fs.dro.kl(loss, 0.5).minimax(data)
    for problem, method in (
        (minimax, fs.LocalSGDA(0.1, 0.1)),
        (fs.as_bilevel(minimax), fs.FedNest(0.1, 0.1)),
    ):
        with pytest.raises(ValueError, match=r"problem\.minimax\(data, weights='size'\)"):
            solve(problem, method, indexed, y0=y0, rounds=1)
    with pytest.raises(ValueError, match="made for weights='uniform'"):
        fs.diagnose(minimax, indexed, X0, y0, weights="size")
    with pytest.raises(ValueError, match="'uniform' or 'size'"):
        fs.dro.kl(loss, 0.5).minimax(data, weights="sizes")


# f = ½(x − c)² + ½(y − d)², h = ½‖y − A x − e‖² on samples: y(x) = Ā x + ē, and x* solves a linear system
@pytest.fixture(scope="module")
def bilevel():
    rng = np.random.default_rng(1)
    clients = [
        {"A": rng.normal(size=(n, 2)) * 0.5 + 0.3 * i, "e": rng.normal(size=n) + i}
        for i, n in enumerate(SIZES)
    ]
    valid = [{"c": rng.normal(size=(4, 2)) + i, "d": rng.normal(size=4) - i} for i in range(3)]
    problem = fs.Bilevel(
        upper=lambda x, y, s: ((x["u"] - s["c"]) ** 2).sum() / 2 + (y["v"] - s["d"]) ** 2 / 2,
        lower=lambda x, y, s: (y["v"] - s["A"] @ x["u"] - s["e"]) ** 2 / 2,
        same_samples=True,
    )
    share = np.array(SIZES) / sum(SIZES)  # of training samples, for the upper level too
    A, e = (sum(w * c[k].mean(0) for w, c in zip(share, clients, strict=True)) for k in "Ae")
    c, d = (sum(w * v[k].mean(0) for w, v in zip(share, valid, strict=True)) for k in "cd")
    x = np.linalg.solve(np.eye(2) + np.outer(A, A), c + A * (d - e))
    return problem, fs.FederatedData.from_clients(clients, valid), x, A @ x + e


@pytest.mark.slow
def test_a_result_is_judged_with_its_own_weights(bilevel, tmp_path):
    problem, data, x_star, y_star = bilevel
    method = fs.FedMSA(alpha=0.1, beta=0.3, batch_size=None)
    result = fs.solve(
        problem, method, data, {"u": np.zeros(2)}, y0={"v": np.zeros(())}, rounds=600, eval_every=600,
        weights="size", progress=False,
    )  # fmt: skip
    np.testing.assert_allclose(result.x["u"], x_star, atol=1e-8)  # the upper level by training sizes
    np.testing.assert_allclose(result.y["v"], y_star, atol=1e-8)
    assert result.weights == "size"
    assert fs.diagnose(result).hypergradient_norm < 1e-8
    assert fs.diagnose(result, weights="uniform").hypergradient_norm > 0.1
    result.save(tmp_path)
    loaded = fs.Result.load(tmp_path)
    assert loaded.weights == "size"
    assert fs.diagnose(loaded, problem=problem, data=data).hypergradient_norm < 1e-8

    def solution(x):
        return {"v": y_star + (y_of(data, x) - y_of(data, {"u": x_star}))}

    judged = {"weights": result.weights}
    at = fs.diagnostics.stationarity(problem, data, result.x, 1e-3, solution=solution, samples=32, **judged)
    assert at.high < 1e-6
    assert fs.diagnose(result).lower_residual < 1e-8


def y_of(data, x):
    return jnp.asarray(data.train["A"]).mean(0) @ x["u"]
