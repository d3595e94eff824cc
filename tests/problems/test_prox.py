"""Proximal maps against minimisation, optimality conditions and another library; envelopes, derivatives."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.optimize

from fedstrata.problems import prox, sets

GROUPS = np.array(["b", "a", "b", "c", "a", "b"])
WEIGHTS = np.array([0.3, 1.0, 0.0, 2.0, 0.7, 1.5])

# Entry by entry: the regulariser, and r of one entry.
SEPARABLE = {
    "l1": (prox.L1(0.8), lambda t: 0.8 * np.abs(t)),
    "l2_squared": (prox.L2Squared(0.8), lambda t: 0.4 * t**2),
    "elastic_net": (prox.ElasticNet(0.8, 0.5), lambda t: 0.8 * np.abs(t) + 0.25 * t**2),
    "log_sum": (prox.LogSum(0.8, 1.2), lambda t: 0.8 * np.log1p(np.abs(t) / 1.2)),
    "log_sum_jumps": (prox.LogSum(2.0, 0.2), lambda t: 2.0 * np.log1p(np.abs(t) / 0.2)),
    "l_half": (prox.LHalf(0.8), lambda t: 0.8 * np.sqrt(np.abs(t))),
}
VECTOR = {name: case[0] for name, case in SEPARABLE.items()} | {
    "group_lasso": prox.GroupLasso([0.5, 1.0, 0.2], GROUPS),
    "weighted_l1": prox.L1(WEIGHTS),
    "weighted_l_half": prox.LHalf(WEIGHTS),
    "weighted_log_sum": prox.LogSum(WEIGHTS, 1.0 + WEIGHTS),
    "indicator_of_a_box": prox.Indicator(sets.Box(-0.5, 1.0)),
    "indicator_of_a_ball": prox.Indicator(sets.Ball(1.0)),
}
ALL = VECTOR | {"nuclear": prox.NuclearNorm(0.8)}


def point(name, seed=0, dtype=np.float64):
    x = 2 * np.random.default_rng(seed).standard_normal(6).astype(dtype)
    return x.reshape(2, 3) if name == "nuclear" else x


def minimise_one(r, x, step):
    """The best of local searches from every cell of a grid, and of the kink at 0; with its value."""

    def objective(t):
        return r(np.asarray(t)) + (t - x) ** 2 / (2 * step)

    grid = np.linspace(-abs(x) - 0.1, abs(x) + 0.1, 41)
    found = [0.0]
    for low, high in itertools.pairwise(grid):
        found.append(
            scipy.optimize.minimize_scalar(
                objective, bounds=(low, high), method="bounded", options={"xatol": 1e-11}
            ).x
        )
    best = min(found, key=objective)
    return best, float(objective(best))


@pytest.mark.parametrize("step", [*(pytest.param(s, marks=pytest.mark.slow) for s in (0.1, 2.5)), 0.7])
@pytest.mark.parametrize("name", SEPARABLE)
def test_prox_minimises_entry_by_entry(name, step, x64):
    regulariser, r = SEPARABLE[name]
    x = np.array([-3.1, -1.3, -0.6, -0.05, 0.0, 0.2, 0.9, 1.7, 4.0])
    y = np.asarray(regulariser.prox(x, step))
    for a, b in zip(x, y, strict=True):
        best, value = minimise_one(r, a, step)
        assert r(b) + (b - a) ** 2 / (2 * step) <= value + 1e-12
        np.testing.assert_allclose(b, best, atol=2e-6)
    total = sum(minimise_one(r, a, step)[1] for a in x)
    np.testing.assert_allclose(regulariser.envelope(x, step), total, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", SEPARABLE)
def test_no_point_of_a_fine_grid_is_better(name, x64):
    """Also between the first stationary point and the jump, where 0 is still the better one."""
    regulariser, r = SEPARABLE[name]
    x, grid = np.linspace(-5, 5, 201), np.linspace(-6, 6, 4801)
    for step in (0.05, 0.1, 1.0):
        y = np.asarray(regulariser.prox(x, step))
        ours = r(y) + (y - x) ** 2 / (2 * step)
        best = (r(grid) + (grid - x[:, None]) ** 2 / (2 * step)).min(axis=1)
        assert (ours <= best + 1e-12).all()


@pytest.mark.parametrize("name", ["group_lasso", "nuclear"])
def test_prox_minimises_over_vectors(name, x64):
    """No search from any start finds better; and strong convexity ties a near-best point to the prox."""
    step = 0.7
    regulariser = ALL[name]
    x = point(name, 1)
    ours = np.asarray(regulariser.prox(x, step))
    value = jax.jit(regulariser.value)

    def objective(y):
        return float(value(y.reshape(x.shape))) + np.sum((y - x.ravel()) ** 2) / (2 * step)

    best = objective(ours.ravel())
    starts = [x.ravel(), 0.5 * x.ravel(), np.full(6, 0.1)]
    options = {"xatol": 1e-9, "fatol": 1e-13, "maxiter": 4000, "adaptive": True}
    found = [scipy.optimize.minimize(objective, y, method="Nelder-Mead", options=options) for y in starts]
    assert best <= min(f.fun for f in found) + 1e-12
    nearest = min(found, key=lambda f: f.fun)
    excess = max(nearest.fun - best, 0)
    assert excess < 1e-6
    assert np.linalg.norm(nearest.x - ours.ravel()) <= np.sqrt(2 * step * excess) + 1e-7


@pytest.mark.slow
def test_group_lasso_is_certified_by_its_dual(x64):
    """x − p is step · weight times a unit vector along p_g, or within that ball where p_g = 0."""
    weights = dict(zip("abc", [0.5, 1.0, 0.2], strict=True))
    for seed in range(5):
        x = point("group_lasso", seed)
        p = np.asarray(ALL["group_lasso"].prox(x, 2.0))
        for label, weight in weights.items():
            xg, pg = x[label == GROUPS], p[label == GROUPS]
            if pg.any():
                np.testing.assert_allclose(xg - pg, 2.0 * weight * pg / np.linalg.norm(pg), atol=1e-13)
            else:
                assert np.linalg.norm(xg) <= 2.0 * weight


def test_nuclear_norm_is_certified_by_its_dual(x64):
    """‖x − p‖₂ ≤ step · weight and ⟨x − p, p⟩ = step · weight · ‖p‖_*: Fenchel's equality."""
    for seed in range(5):
        x = np.random.default_rng(seed).standard_normal((4, 3))
        p = np.asarray(prox.NuclearNorm(0.8).prox(x, 1.5))
        assert np.linalg.norm(x - p, 2) <= 1.2 + 1e-12
        np.testing.assert_allclose(np.sum((x - p) * p), 1.2 * np.linalg.norm(p, "nuc"), atol=1e-12)
        assert np.linalg.matrix_rank(p) < 3


@pytest.mark.slow
def test_l1_envelope_is_hubers_function(x64):
    x, mu, weight = np.linspace(-2, 2, 41), 0.5, 1.5
    huber = np.where(np.abs(x) <= mu * weight, x**2 / (2 * mu), weight * np.abs(x) - mu * weight**2 / 2)
    envelope = jax.vmap(lambda t: prox.L1(weight).envelope(t, mu))(x)
    np.testing.assert_allclose(envelope, huber, atol=1e-14)


@pytest.mark.slow
def test_log_sum_prox_is_the_papers_formula(x64):
    """For √μ ≤ ε; also at √μ = ε."""
    x = np.linspace(-3, 3, 101)
    for mu, epsilon in [(0.5, 1.0), (1.0, 1.0), (0.01, 0.3)]:
        size = np.abs(x)
        root = np.sqrt(np.maximum((size + epsilon) ** 2 - 4 * mu, 0))
        paper = np.where(size <= mu / epsilon, 0, np.sign(x) * (size - epsilon + root) / 2)
        np.testing.assert_allclose(prox.LogSum(1.0, epsilon).prox(x, mu), paper, atol=1e-14)


def test_log_sum_prox_is_continuous_in_float32():
    """Just beyond λ/ε the root is tiny; the formula as printed loses it to cancellation."""
    x = np.float32(0.5) + np.float32(2.0) ** -np.arange(8, 21).astype(np.float32)
    with jax.enable_x64(True):
        exact = np.asarray(prox.LogSum(1.0, 1.0).prox(x.astype(np.float64), 0.5))
    np.testing.assert_allclose(prox.LogSum(1.0, 1.0).prox(x, 0.5), exact, rtol=3e-6)


@pytest.mark.slow
@pytest.mark.parametrize("penalty", [prox.LogSum(), prox.LHalf()], ids=repr)
def test_no_prox_is_beyond_its_point_by_rounding(penalty):
    x = (np.random.default_rng(0).normal(size=4000) * np.logspace(-3, 4, 4000)).astype(np.float32)
    for step in (1e-9, 1e-6, 1e-3):
        assert (np.abs(penalty.prox(x, step)) <= np.abs(x)).all()


def test_l_half_jumps_at_its_threshold(x64):
    lam = 0.7
    jump = lam ** (2 / 3)
    below, above = prox.LHalf(lam).prox(np.array([1.5 * jump - 1e-9, 1.5 * jump + 1e-9]), 1.0)
    assert below == 0
    np.testing.assert_allclose(above, jump, rtol=1e-8)


@pytest.mark.slow
def test_a_zero_weight_changes_nothing():
    x = jnp.array([-2.0, 0.0, 1e-30, 3.0])
    for regulariser in (
        prox.L1(0.0),
        prox.LogSum(0.0),
        prox.LHalf(0.0),
        prox.ElasticNet(0, 0),
        prox.L2Squared(0),
    ):
        np.testing.assert_allclose(regulariser.prox(x, 1.0), x, rtol=1e-6)
        assert float(regulariser.envelope(x, 1.0)) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    "name", [n if n in ("l1", "nuclear") else pytest.param(n, marks=pytest.mark.slow) for n in ALL]
)
def test_envelope_gradients_are_those_of_finite_differences(name, x64):
    regulariser, mu = ALL[name], 0.6
    x = point(name, 2)
    envelope = jax.jit(lambda y, m: regulariser.envelope(y, m))

    def flat(y):
        return float(envelope(y.reshape(x.shape), mu))

    exact = scipy.optimize.approx_fprime(x.ravel(), flat, 1e-7).reshape(x.shape)
    gradient = regulariser.envelope_grad(x, mu)
    np.testing.assert_allclose(gradient, exact, atol=3e-6)
    np.testing.assert_allclose(jax.grad(envelope)(x, mu), gradient, atol=1e-12)
    by_mu = (envelope(x, mu + 1e-6) - envelope(x, mu - 1e-6)) / 2e-6
    np.testing.assert_allclose(jax.grad(envelope, argnums=1)(x, mu), by_mu, rtol=1e-7, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in ALL if "indicator" not in n])
def test_envelope_gradients_keep_their_digits_in_float32(name):
    """x − prox(x, μ) is below the roundoff of x = 1000 for μ = 1e-6; in float64 it is exact enough."""
    regulariser, mu = ALL[name], 1e-6
    x = 1e3 * np.array([1.0, -0.7, 1e-12, 0.3, -1e-10, 0.05])
    x = x.reshape(2, 3) if name == "nuclear" else x
    with jax.enable_x64(True):
        expected = (x - regulariser.prox(x, mu)) / mu
    single = jnp.asarray(x, jnp.float32)
    scale = 1e-6 * np.abs(expected).max()
    np.testing.assert_allclose(regulariser.envelope_grad(single, mu), expected, rtol=1e-5, atol=scale)
    by_jax = jax.grad(lambda y: regulariser.envelope(y, mu))(single)
    np.testing.assert_allclose(by_jax, expected, rtol=1e-5, atol=scale)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["l1", "elastic_net", "log_sum", "log_sum_jumps", "l_half", "group_lasso", "nuclear"]
)
def test_envelopes_are_differentiable_in_the_weights(name, x64):
    x, regulariser = point(name, 3), ALL[name]

    def envelope(factor):
        scaled = jax.tree.map(
            lambda leaf: leaf * factor if jnp.issubdtype(jnp.result_type(leaf), jnp.floating) else leaf,
            regulariser,
        )
        return scaled.envelope(x, 0.6)

    exact = (envelope(1 + 1e-6) - envelope(1 - 1e-6)) / 2e-6
    np.testing.assert_allclose(jax.grad(envelope)(1.0), exact, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", VECTOR)
def test_envelopes_have_second_derivatives(name, x64):
    x, regulariser, mu = point(name, 4), ALL[name], 0.6
    gradient = jax.jit(lambda y: regulariser.envelope_grad(y, mu))
    exact = np.stack([(gradient(x + 1e-6 * e) - gradient(x - 1e-6 * e)) / 2e-6 for e in np.eye(6)], axis=1)
    hessian = jax.hessian(lambda y: regulariser.envelope(y, mu))(x)
    np.testing.assert_allclose(hessian, exact, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_nothing_is_nan_at_zero(name):
    x = jnp.zeros_like(point(name, dtype=np.float32))
    regulariser = ALL[name]
    value, gradient = jax.value_and_grad(lambda y: regulariser.envelope(y, 0.5))(x)
    assert float(value) == 0
    np.testing.assert_array_equal(gradient, np.zeros_like(x))
    np.testing.assert_array_equal(regulariser.prox(x, 0.5), np.zeros_like(x))
    if name != "nuclear":  # its singular values coincide there
        assert np.isfinite(jax.jacrev(lambda y: regulariser.prox(y, 0.5))(x)).all()
        assert np.isfinite(jax.jacrev(jax.grad(lambda y: regulariser.envelope(y, 0.5)))(x)).all()


@pytest.mark.parametrize("name", [name for name in VECTOR if "indicator" not in name])
def test_the_gradient_of_a_value_is_zero_at_zero(name):
    np.testing.assert_array_equal(jax.grad(ALL[name].value)(jnp.zeros(6)), np.zeros(6))


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_float32_jit_and_vmap_give_the_float64_result(name):
    xs = np.stack([point(name, seed, np.float32) for seed in range(5)])
    regulariser = ALL[name]
    y = jax.jit(jax.vmap(lambda r, x: r.prox(x, np.float64(0.7)), in_axes=(None, 0)))(regulariser, xs)
    assert y.dtype == jnp.float32
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        exact = np.stack([np.asarray(regulariser.prox(x.astype(np.float64), 0.7)) for x in xs])
        values = [float(regulariser.envelope(x.astype(np.float64), 0.7)) for x in xs]
        kept = regulariser.prox(jnp.asarray(xs[0]), np.float64(0.7))
        kept_value = regulariser.envelope(jnp.asarray(xs[0]), np.float64(0.7))
    assert kept.dtype == kept_value.dtype == jnp.float32
    np.testing.assert_allclose(y, exact, rtol=1e-5, atol=3e-6)
    np.testing.assert_allclose(kept, exact[0], rtol=1e-5, atol=3e-6)
    envelopes = jax.vmap(lambda x: regulariser.envelope(x, 0.7))(xs)
    np.testing.assert_allclose(envelopes, values, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", VECTOR)
def test_a_pytree_is_the_vector_of_its_entries(name):
    x = point(name, 5, np.float32)
    nested = {"a": x[:2].reshape(2, 1), "b": (x[2], x[3:])}
    regulariser = ALL[name]

    def flat(tree):
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])

    np.testing.assert_allclose(flat(regulariser.prox(nested, 0.4)), regulariser.prox(x, 0.4), rtol=1e-6)
    np.testing.assert_allclose(regulariser.envelope(nested, 0.4), regulariser.envelope(x, 0.4), rtol=1e-6)
    np.testing.assert_allclose(
        flat(regulariser.envelope_grad(nested, 0.4)), regulariser.envelope_grad(x, 0.4), rtol=1e-5
    )


def test_nuclear_norm_sums_over_matrices():
    x = np.random.default_rng(0).standard_normal((3, 4, 2)).astype(np.float32)
    regulariser = prox.NuclearNorm(0.5)
    each = [regulariser.value(matrix) for matrix in x]
    np.testing.assert_allclose(regulariser.value({"a": x[:2], "b": x[2]}), sum(each), rtol=1e-6)
    np.testing.assert_allclose(regulariser.prox(x, 0.3)[1], regulariser.prox(x[1], 0.3), atol=1e-6)


def test_indicator_is_zero_inside_and_infinite_outside():
    ball = prox.Indicator(sets.Ball(1.0))
    assert float(ball.value(jnp.array([0.6, 0.8]))) == 0
    assert float(ball.value(jnp.array([0.6, 0.81]))) == np.inf


def test_group_weights_follow_the_sorted_labels():
    """Weights of √|g|, as the documentation forms them."""
    weight = np.sqrt(np.unique(GROUPS, return_counts=True)[1])
    x = np.ones(6)
    exact = sum(np.sqrt(n) * np.sqrt(n) for n in (2, 3, 1))
    np.testing.assert_allclose(prox.GroupLasso(weight, GROUPS).value(x), exact, rtol=1e-6)


def test_a_sweep_over_weights_is_a_vmap():
    weights = jnp.array([0.0, 0.5, 2.0])
    y = jax.vmap(lambda w: prox.L1(w).prox(jnp.array([1.0, -3.0]), 1.0))(weights)
    np.testing.assert_allclose(y, [[1, -3], [0.5, -2.5], [0, -1]])
    stacked = jax.vmap(lambda r: r.prox(jnp.array([1.0, -3.0]), 1.0))(prox.L1(weights))
    np.testing.assert_allclose(stacked, y)


def test_optax_agrees_on_indicators(x64):
    """Its only proximal maps are projections."""
    x = 2 * np.random.default_rng(6).standard_normal(6)
    pairs = [
        (sets.Box(-0.5, 1.0), optax.projections.projection_box(x, -0.5, 1.0)),
        (sets.Simplex(2.0), optax.projections.projection_simplex(x, 2.0)),
        (sets.L1Ball(1.5), optax.projections.projection_l1_ball(x, 1.5)),
        (sets.Ball(1.5), optax.projections.projection_l2_ball(x, 1.5)),
    ]
    for ours, theirs in pairs:
        np.testing.assert_allclose(
            prox.Indicator(ours).prox(x, 0.7), theirs, atol=1e-12, err_msg=type(ours).__name__
        )


@pytest.mark.slow
@pytest.mark.parametrize("step", [0.2, 1.3])
def test_another_library_agrees(step, x64):
    pyproximal = pytest.importorskip("pyproximal", reason="pip install pyproximal")
    x = 2 * np.random.default_rng(6).standard_normal(6)
    labels = np.tile(np.arange(3), 2)
    pairs = [
        (prox.L1(0.8), pyproximal.L1(sigma=0.8)),
        (prox.L2Squared(0.8), pyproximal.L2(sigma=0.8)),
        (prox.GroupLasso(0.8, labels), pyproximal.L21(ndim=2, sigma=0.8)),
        (prox.NuclearNorm(0.8), pyproximal.Nuclear((2, 3), sigma=0.8)),
        (prox.LogSum(0.8 / np.log(3.5), 1 / 2.5), pyproximal.Log(sigma=0.8, gamma=2.5)),
        (prox.Indicator(sets.Box(-0.5, 1.0)), pyproximal.Box(-0.5, 1.0)),
        (prox.Indicator(sets.Simplex(2.0)), pyproximal.Simplex(6, 2.0, maxiter=500, ftol=1e-14, xtol=1e-14)),
        (prox.Indicator(sets.L1Ball(1.5)), pyproximal.L1Ball(6, 1.5, maxiter=500, xtol=1e-14)),
    ]
    for ours, theirs in pairs:
        y = ours.prox(x.reshape(2, 3) if isinstance(ours, prox.NuclearNorm) else x, step)
        np.testing.assert_allclose(
            np.ravel(y), theirs.prox(x, step), atol=1e-9, err_msg=type(theirs).__name__
        )


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: prox.L1(-1.0), "L1: weight must be at least 0"),
        (lambda: prox.L1(np.nan), "contains NaN"),
        (lambda: prox.L1([1.0, np.inf]), "must be finite"),
        (lambda: prox.L2Squared(-1.0), "at least 0"),
        (lambda: prox.ElasticNet(1.0, -1.0), "ElasticNet: l2"),
        (lambda: prox.LogSum(1.0, 0.0), "epsilon must be greater than 0"),
        (lambda: prox.LHalf(-1.0), "at least 0"),
        (lambda: prox.NuclearNorm([1.0, 2.0]), "one number"),
        (lambda: prox.NuclearNorm().prox(jnp.zeros(3), 1.0), "needs a matrix"),
        (lambda: prox.NuclearNorm().value(jnp.zeros(3)), "needs a matrix"),
        (lambda: prox.GroupLasso(1.0, []), "is empty"),
        (lambda: prox.GroupLasso([1.0, 2.0, 3.0], [0, 0, 1]), "one per group, 2, but has shape"),
        (lambda: prox.GroupLasso(1.0, [0, 0, 1]).prox(jnp.zeros(4), 1.0), "3 labels, but the point has 4"),
        (lambda: prox.L1(np.ones(2)).prox(jnp.zeros(3), 1.0), "does not fit a point"),
        (lambda: prox.L1().prox(jnp.zeros(3), 0.0), "step must be greater than 0"),
        (lambda: prox.L1().envelope(jnp.zeros(3), -1.0), "mu must be greater than 0"),
        (lambda: prox.L1().envelope_grad(jnp.zeros(3), 0.0), "greater than 0"),
        (lambda: prox.Indicator(sets.Whole()).envelope(jnp.zeros(3), 0.0), "greater than 0"),
    ],
)
def test_bad_values_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_an_indicator_needs_a_set():
    with pytest.raises(TypeError, match="Indicator takes a set"):
        prox.Indicator(jnp.abs)
