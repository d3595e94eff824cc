"""Robust objectives against the inner maximisation itself, solved by scipy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize
from scipy.special import softmax, xlogy

import fedstrata as fs
from fedstrata.problems import risks
from fedstrata.problems.dro import Densities, HalfBall, Lifted
from fedstrata.problems.risks import threshold_of

N = 8


def squared(x, sample):
    return 0.5 * (sample["a"] @ x - sample["b"]) ** 2


def by_scipy(losses, penalty=None, lower=0.0, upper=None, radius=None):
    """The density that maximises ``mean(q ℓ) − mean(penalty(q))``, and the maximum."""
    constraints = [{"type": "eq", "fun": lambda q: q.mean() - 1}]
    if radius is not None:
        constraints.append({"type": "ineq", "fun": lambda q: radius - 0.5 * ((q - 1) ** 2).mean()})
    found = optimize.minimize(
        lambda q: (0 if penalty is None else penalty(q).mean()) - (q * losses).mean(),
        np.ones(len(losses)),
        bounds=[(lower, upper)] * len(losses),
        constraints=constraints,
        method="SLSQP",
        options={"maxiter": 2000, "ftol": 1e-15},
    )
    return found.x, -found.fun


# name → problem, and the inner maximisation in the words of scipy
RISKS = {
    "kl": (fs.dro.kl(squared, 0.7), {"penalty": lambda q: 0.7 * xlogy(q, q), "lower": 1e-12}),
    "chi2": (fs.dro.chi2(squared, 0.7), {"penalty": lambda q: 0.35 * (q - 1) ** 2, "lower": None}),
    "chi2, nonnegative": (
        fs.dro.chi2(squared, 0.7, nonnegative=True),
        {"penalty": lambda q: 0.35 * (q - 1) ** 2},
    ),
    "chi2 ball": (fs.dro.chi2_ball(squared, 0.5), {"radius": 0.5}),
    "chi2 ball that holds one sample alone": (fs.dro.chi2_ball(squared, N / 2), {"radius": N / 2}),
    "cvar": (fs.dro.cvar(squared, 0.3), {"upper": 1 / 0.3}),
    "cvar of all": (fs.dro.cvar(squared, 1.0), {"upper": 1.0}),
    "kl-cvar": (
        fs.dro.kl_cvar(squared, 0.3, 0.5),
        {"penalty": lambda q: 0.5 * xlogy(q, q), "lower": 1e-12, "upper": 1 / 0.3},
    ),
}
every_risk = pytest.mark.parametrize(
    ("problem", "inner"),
    [
        pytest.param(*its, id=name, marks=() if name in ("kl", "chi2 ball", "cvar") else pytest.mark.slow)
        for name, its in RISKS.items()
    ],
)


def sample(seed):
    rng = np.random.default_rng(seed)
    return {"a": rng.normal(size=(N, 2)), "b": rng.normal(size=N)}, rng.normal(size=2)


def objective(problem, x, samples):
    """h(x) + f(g(x)) with means over the samples, as a method sees it."""
    z = x
    for level in problem.levels:
        if level.reads == "nothing":
            z = level(z)
            continue
        each = jax.vmap(lambda s, z=z, level=level: level(z, s))(samples)
        own = level.mean
        z = jax.tree.map(lambda v: v.mean(0), each) if own is None else own(each, jnp.full(N, 1 / N))
    plain = problem.plain
    return z if plain is None else z + jax.vmap(lambda s: plain(x, s))(samples).mean()


@pytest.mark.usefixtures("x64")
@every_risk
@pytest.mark.parametrize("seed", [0, 1])
def test_objective_gradient_and_weights_are_those_of_the_inner_maximum(problem, inner, seed):
    samples, x = sample(seed)
    losses = np.asarray(jax.vmap(squared, (None, 0))(x, samples))
    q, maximum = by_scipy(losses, **inner)
    # SLSQP's optimum is exact to second order, its point to first: the square root of its precision
    np.testing.assert_allclose(problem.weights(losses), q / N, atol=1e-6)
    np.testing.assert_allclose(problem.risk.value(losses), maximum, rtol=1e-9)

    start = jax.tree.map(jnp.asarray, problem.start_x(x))
    if problem.lifted:  # η at its minimum, which the dual holds
        dual = problem.risk.dual(jnp.asarray(losses), jnp.full(N, 1 / N))
        start = start._replace(eta=threshold_of(dual))
    value, slope = jax.value_and_grad(lambda x: objective(problem, x, samples))(start)
    each = jax.vmap(jax.grad(squared), (None, 0))(x, samples)
    np.testing.assert_allclose(value, maximum, rtol=1e-7)
    mine = slope.x if problem.lifted else slope
    alone = inner.get("radius") == N / 2  # all weight on one sample: η is its loss, where √ has no slope
    if not isinstance(problem.risk, risks.CVaR) and not alone:  # where η is a kink, see below
        np.testing.assert_allclose(mine, (q / N) @ each, atol=1e-6)
        if problem.lifted:
            np.testing.assert_allclose(slope.eta, 0, atol=1e-6)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["chi2, nonnegative", "chi2 ball", "cvar", "kl-cvar"])
def test_thresholds_minimise(name):
    problem, _ = RISKS[name]
    samples, x = sample(3)
    losses = np.asarray(jax.vmap(squared, (None, 0))(x, samples))
    lifted = jax.jit(lambda eta: objective(problem, Lifted(jnp.asarray(x), eta), samples))
    found = optimize.minimize_scalar(
        lambda eta: float(lifted(eta)), bracket=(losses.min(), losses.max()), tol=1e-12
    )
    np.testing.assert_allclose(problem.risk.value(losses), found.fun, rtol=1e-9)


@pytest.mark.usefixtures("x64")
def test_cvar_slopes_on_both_sides_enclose_the_worst_case():
    problem, inner = RISKS["cvar"]
    samples, x = sample(4)
    losses = np.asarray(jax.vmap(squared, (None, 0))(x, samples))
    q, _ = by_scipy(losses, **inner)
    eta = float(problem.risk.dual(jnp.asarray(losses), jnp.full(N, 1 / N)).eta)
    slope = jax.grad(lambda v: objective(problem, v, samples))
    below, above = slope(Lifted(jnp.asarray(x), eta - 1e-9)), slope(Lifted(jnp.asarray(x), eta + 1e-9))
    assert below.eta < 0 < above.eta
    share = above.eta / (above.eta - below.eta)  # the mixture whose slope in η is zero
    each = jax.vmap(jax.grad(squared), (None, 0))(x, samples)
    np.testing.assert_allclose(share * below.x + (1 - share) * above.x, (q / N) @ each, atol=1e-6)


@pytest.mark.usefixtures("x64")
def test_mean_semideviation():
    lam, delta = 0.6, 1e-4
    problem = fs.dro.mean_semideviation(squared, lam, delta)
    samples, x = sample(5)
    losses = np.asarray(jax.vmap(squared, (None, 0))(x, samples))
    exact = losses.mean() + lam * np.sqrt((np.maximum(losses - losses.mean(), 0) ** 2).mean() + delta)
    np.testing.assert_allclose(objective(problem, x, samples), exact, rtol=1e-12)
    np.testing.assert_allclose(problem.risk.value(losses), exact, rtol=1e-12)
    each = jax.vmap(jax.grad(squared), (None, 0))(x, samples)
    slope = jax.grad(lambda x: objective(problem, x, samples))(jnp.asarray(x))
    np.testing.assert_allclose(problem.weights(losses) @ each, slope, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("lam", [1e-2, 1.0, 100.0])
def test_float32_is_enough_for_large_losses(lam):
    """Losses up to 1e3: what is lost is the loss's own rounding, ε·ℓ, in units of λ."""
    losses = np.float32(np.random.default_rng(6).uniform(0, 1e3, 50))
    losses[:3] = losses.max()  # ties, and a spread of a few λ at the top
    losses[1] -= lam
    exact = losses.astype(np.float64)
    rounding = 4 * np.finfo(np.float32).eps * 1e3 / lam
    p = softmax(exact / lam)
    problem = fs.dro.kl(lambda x, s: x, lam)
    np.testing.assert_allclose(problem.weights(losses), p, rtol=rounding + 1e-6, atol=1e-12)
    top = exact.max()
    value = top + lam * np.log(np.exp((exact - top) / lam).mean())
    np.testing.assert_allclose(problem.risk.value(losses), value, rtol=1e-6)
    for other in (
        fs.dro.chi2(lambda x, s: x, lam, nonnegative=True),
        fs.dro.chi2_ball(lambda x, s: x, 1.0),
        fs.dro.cvar(lambda x, s: x, 0.1),
        fs.dro.kl_cvar(lambda x, s: x, 0.1, lam),
    ):
        single = np.asarray(other.weights(losses), np.float64)
        with jax.enable_x64(True):
            double = np.asarray(other.weights(exact))
            best = float(other.risk.value(exact))
        np.testing.assert_allclose(single, double, atol=rounding * double.max() + 1e-6)
        np.testing.assert_allclose(other.risk.value(losses), best, rtol=1e-5)


def test_chi2_is_measured_without_cancellation():
    """A mean of 1e3 and a deviation of 1: float32 has no digit of mean ℓ² − (mean ℓ)² left."""
    b = np.float32(1e3 + np.random.default_rng(7).normal(size=(2, 20)))
    data = fs.FederatedData.from_clients([{"b": row} for row in b])
    problem = fs.dro.chi2(lambda x, s: x * s["b"], 1e-2)
    result = fs.solve(problem, fs.MBSGD(1e-12), data, 1.0, rounds=0, progress=False)
    exact = b.astype(np.float64)
    np.testing.assert_allclose(result.history["objective"][0], exact.mean() + exact.var() / 2e-2, rtol=1e-3)


@pytest.mark.usefixtures("x64")
def test_groups():
    rng = np.random.default_rng(8)
    clients = [{"b": rng.normal(size=n), "group": rng.integers(0, 3, n).astype(np.int32)} for n in (7, 7, 7)]
    data = fs.FederatedData.from_clients(clients)
    b, group = (np.concatenate([c[k] for c in clients]) for k in ("b", "group"))
    worst = np.array([((0.4 - b[group == j]) ** 2).mean() for j in range(3)])
    for lam in (1.0, 1e-3):
        problem = fs.dro.group(lambda x, s: (x - s["b"]) ** 2, 3, lam)
        start = fs.solve(problem, fs.MBSGD(0.1), data, 0.4, rounds=0, progress=False).history["objective"][0]
        top = worst.max()
        exact = top + lam * np.log(np.exp((worst - top) / lam).mean())
        np.testing.assert_allclose(start, exact, rtol=1e-12)
    np.testing.assert_allclose(start, top - 1e-3 * np.log(3), atol=1e-6)  # λ → 0: the worst group


def test_refuses_bad_arguments():
    for build in (fs.dro.kl, fs.dro.chi2, fs.dro.cvar, fs.dro.chi2_ball):
        with pytest.raises(ValueError, match="positive"):
            build(squared, 0.0)
    with pytest.raises(ValueError, match="fraction of the samples"):
        fs.dro.cvar(squared, 1.5)
    with pytest.raises(ValueError, match="groups"):
        fs.dro.group(squared, 0, 1.0)


SHARES = np.array([0.1, 0.1, 0.1, 0.1, 0.1, 0.25, 0.25])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("project", "bounds", "constraints"),
    [
        (Densities(SHARES), (0, None), [("eq", lambda q: SHARES @ q - 1)]),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                (Densities(SHARES, -np.inf), (None, None), [("eq", lambda q: SHARES @ q - 1)]),
                (Densities(SHARES, 0.0, 1.5), (0, 1.5), [("eq", lambda q: SHARES @ q - 1)]),
                (
                    Densities(SHARES, 0.0, np.inf, 0.4),
                    (0, None),
                    [("eq", lambda q: SHARES @ q - 1), ("ineq", lambda q: 0.4 - SHARES @ (q - 1) ** 2)],
                ),
            )
        ),
        (HalfBall(SHARES), (0, None), [("ineq", lambda z: 1 - SHARES @ z**2)]),
    ],
)
def test_projections_on_the_sets_of_densities(project, bounds, constraints):
    v = np.random.default_rng(9).normal(size=7) * 2
    found = optimize.minimize(
        lambda q: ((q - v) ** 2).sum(),
        np.full(7, 0.5),
        bounds=[bounds] * 7,
        constraints=[{"type": kind, "fun": fun} for kind, fun in constraints],
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 1000},
    )
    np.testing.assert_allclose(project(jnp.asarray(v)), found.x, atol=1e-6)
    np.testing.assert_allclose(project(project(jnp.asarray(v))), project(jnp.asarray(v)), atol=1e-9)


def test_the_minimax_form_needs_samples_in_memory():
    source = fs.data.FromFunction([1, 2], lambda i: {"a": np.ones(i + 1)})
    with pytest.raises(fs.DataError, match=r"minimax\(data.load\(\)\)"):
        fs.dro.cvar(lambda x, s: x * s["a"], 0.5).minimax(fs.FederatedData.from_source(source))


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "problem", [p for p, _ in RISKS.values()] + [fs.dro.mean_semideviation(squared, 0.6, 1e-12)]
)
def test_the_minimax_form_has_the_same_maximum(problem):
    rng = np.random.default_rng(10)
    clients = [{"a": rng.normal(size=(n, 2)), "b": rng.normal(size=n)} for n in (3, 5)]
    x = jnp.asarray(rng.normal(size=2))
    minimax, data, y0 = problem.minimax(fs.FederatedData.from_clients(clients))
    shares = np.repeat([1 / 6, 1 / 10], [3, 5])
    losses = np.concatenate([np.asarray(jax.vmap(squared, (None, 0))(x, c)) for c in clients])

    def payoff(y):
        means = []
        for i in range(2):
            means.append(jax.vmap(lambda s: minimax.payoff(x, y, s))(data.client(i)).mean())
        return sum(means) / 2

    risk = problem.risk
    dual = risk.dual(jnp.asarray(losses), jnp.asarray(shares))
    if isinstance(risk, risks.Semideviation):
        best = jax.nn.relu(losses - dual.mean) / dual.deviation
    else:
        best = risk.density(jnp.asarray(losses), dual)
    np.testing.assert_allclose(payoff(best), risk.value(losses, shares), rtol=1e-6)
    np.testing.assert_allclose(minimax.project_y(best), best, atol=1e-6)  # it is in the set
    for t in (1e-3, 0.1):  # and no step up leads away from it
        step = minimax.project_y(best + t * jax.grad(payoff)(best))
        np.testing.assert_allclose(step, best, atol=2e-6)
    assert float(payoff(jnp.asarray(y0))) <= float(payoff(best)) + 1e-12
