"""Projections against scipy's solvers, by their defining inequalities, and through JAX's transformations."""

import functools
import itertools

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from hypothesis import given, settings
from hypothesis import strategies as st

import fedstrata as fs
from fedstrata.core.problem import Projection
from fedstrata.problems import sets
from fedstrata.solving.pose import check_sets

N = 4
LOW, HIGH = np.array([-1.0, -0.5, 0.0, -2.0]), np.array([1.0, 2.0, 0.5, np.inf])
NORMAL = np.array([1.0, -2.0, 0.5, 3.0])
CENTER = np.array([0.5, -1.0, 0.0, 2.0])
ROWS = np.array(
    [[1.0, 2.0, -1.0, 0.5], [0.0, 1.0, 1.0, -1.0], [2.0, 5.0, -1.0, 0.0]]
)  # third = 2·first + second
EYE = np.eye(N)
SIGNS = np.array(list(itertools.product([-1.0, 1.0], repeat=N)))

# Polyhedra: the set, and G, h with {x : G x ≤ h}.
POLYHEDRA = {
    "box": (
        sets.Box(LOW, HIGH),
        np.vstack([EYE[:3], -EYE]),
        np.concatenate([HIGH[:3], -LOW]),
    ),
    "nonnegative": (sets.NonNegative(), -EYE, np.zeros(N)),
    "simplex": (
        sets.Simplex(2.0),
        np.vstack([-EYE, np.ones(N), -np.ones(N)]),
        np.concatenate([np.zeros(N), [2.0, -2.0]]),
    ),
    "l1_ball": (sets.L1Ball(1.5), SIGNS, np.full(len(SIGNS), 1.5)),
    "halfspace": (sets.HalfSpace(NORMAL, -1.0), NORMAL[None], np.array([-1.0])),
    "affine": (
        sets.Affine(ROWS, ROWS @ CENTER),
        np.vstack([ROWS, -ROWS]),
        np.concatenate([ROWS @ CENTER, -ROWS @ CENTER]),
    ),
    "whole": (sets.Whole(), np.zeros((1, N)), np.ones(1)),
    "box_and_halfspace": (
        sets.Intersection(sets.Box(-1.0, 1.0), sets.HalfSpace(NORMAL, -1.0)),
        np.vstack([EYE, -EYE, NORMAL]),
        np.concatenate([np.ones(2 * N), [-1.0]]),
    ),
    "three_sets": (
        sets.Intersection(sets.NonNegative(), sets.Affine(np.ones(N), 2.0), sets.HalfSpace(NORMAL, 1.0)),
        np.vstack([-EYE, np.ones(N), -np.ones(N), NORMAL]),
        np.concatenate([np.zeros(N), [2.0, -2.0, 1.0]]),
    ),
}
ROUND = {
    "ball": (sets.Ball(1.5, CENTER), [(CENTER, 1.5)], np.zeros((1, N)), np.ones(1)),
    "two_balls_and_halfspace": (
        sets.Intersection(sets.Ball(2.0), sets.Ball(2.5, CENTER), sets.HalfSpace(NORMAL, 1.0)),
        [(np.zeros(N), 2.0), (CENTER, 2.5)],
        NORMAL[None],
        np.array([1.0]),
    ),
}
ALL = {name: case[0] for name, case in (POLYHEDRA | ROUND).items()}


def nearest_in_polyhedron(x, G, h):
    """min ‖y − x‖ subject to G y ≤ h, as least-distance programming (Lawson & Hanson 1974, chapter 23)."""
    E, f = -G, G @ x - h
    target = np.append(np.zeros(len(x)), 1.0)
    M = np.vstack([E.T, f])
    r = M @ scipy.optimize.nnls(M, target)[0] - target
    return x - r[:-1] / r[-1]


def nearest_by_slsqp(x, balls, G, h):
    """SLSQP finds the active constraints; Newton's method on their optimality conditions finds the digits."""

    def slacks(y):
        return np.append([(r**2 - np.sum((y - c) ** 2)) / 2 for c, r in balls], h - G @ y)

    def gradients(y):
        return np.vstack([*(c - y for c, _ in balls), -G])

    guess = scipy.optimize.minimize(
        lambda y: 0.5 * np.sum((y - x) ** 2),
        balls[0][0],
        jac=lambda y: y - x,
        constraints={"type": "ineq", "fun": slacks, "jac": gradients},
        method="SLSQP",
        options={"ftol": 1e-16, "maxiter": 500},
    ).x
    active = slacks(guess) < 1e-5
    multipliers = np.linalg.lstsq(gradients(guess)[active].T, guess - x, rcond=None)[0]

    def conditions(v):
        y, w = v[: len(x)], v[len(x) :]
        return np.append(y - x - gradients(y)[active].T @ w, slacks(y)[active])

    solved = scipy.optimize.root(conditions, np.append(guess, multipliers), tol=1e-14).x
    assert (solved[len(x) :] >= 0).all()
    assert (slacks(solved[: len(x)]) > -1e-12).all()
    return solved[: len(x)]


def points(count, dtype, seed=0):
    return 3 * np.random.default_rng(seed).standard_normal((count, N)).astype(dtype)


@functools.cache
def compiled(name, x64):
    del x64  # part of the key only: a program of either precision
    return jax.jit(jax.vmap(ALL[name]))


def tolerance(name, dtype):
    """Closed forms: a few roundings of entries up to 10, and the oracle's. Dykstra: its rule, at rate 0.9."""
    if isinstance(ALL[name], sets.Intersection):
        return {np.float32: 10 * 10 * 16 * 1.2e-7, np.float64: 10 * 10 * 1e-12}[dtype]
    return {np.float32: 4 * 10 * 1.2e-7, np.float64: 5e-12}[dtype]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", ALL)
def test_projection_is_the_solution_of_the_quadratic_program(name, dtype):
    x = points(12, dtype)
    with jax.enable_x64(dtype == np.float64):
        p = np.asarray(compiled(name, dtype == np.float64)(x))
        eager = np.asarray(ALL[name](x[0]))
    _, *constraints = (POLYHEDRA | ROUND)[name]
    oracle = nearest_in_polyhedron if name in POLYHEDRA else nearest_by_slsqp
    exact = np.stack([oracle(row.astype(np.float64), *constraints) for row in x])
    assert p.dtype == dtype
    np.testing.assert_allclose(p, exact, rtol=0, atol=tolerance(name, dtype))
    np.testing.assert_allclose(eager, exact[0], rtol=0, atol=tolerance(name, dtype))


def test_the_two_oracles_agree():
    x = points(1, np.float64)[0]
    _, G, h = POLYHEDRA["box"]
    bounded = scipy.optimize.lsq_linear(EYE, x, (LOW, HIGH), method="bvls").x
    np.testing.assert_allclose(nearest_in_polyhedron(x, G, h), bounded, atol=1e-13)


vectors = hnp.arrays(np.float64, (3, N), elements=st.floats(-50, 50, allow_subnormal=False))


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=30)
@given(xyz=vectors)
def test_projection_is_idempotent_nonexpansive_and_obtuse(name, xyz):
    with jax.enable_x64(True):
        project = compiled(name, True)
        p = np.asarray(project(xyz))
        again = np.asarray(project(p))
    size = 1 + np.abs(xyz).max()
    error = 10 * tolerance(name, np.float64) * size
    np.testing.assert_allclose(again, p, rtol=0, atol=error)
    for i, j in itertools.permutations(range(3), 2):
        assert np.linalg.norm(p[i] - p[j]) <= np.linalg.norm(xyz[i] - xyz[j]) + error
        assert (xyz[i] - p[i]) @ (p[j] - p[i]) <= error * size


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_points_of_the_set_stay_and_are_contained(name):
    x = jnp.asarray(points(6, np.float32))
    p = compiled(name, False)(x)
    assert bool(jax.vmap(lambda y: sets.contains(ALL[name], y, 1e-4))(p).all())
    away = jax.vmap(functools.partial(sets.distance, ALL[name]))(x)
    np.testing.assert_allclose(away, np.linalg.norm(x - p, axis=1), rtol=1e-5, atol=1e-6)
    outside = np.linalg.norm(x - p, axis=1) > 1e-3
    found = jax.vmap(lambda y: sets.contains(ALL[name], y, 1e-4))(x)
    np.testing.assert_array_equal(found, ~outside)


@pytest.mark.parametrize("name", ALL)
def test_a_pytree_is_the_vector_of_its_entries(name):
    x = points(1, np.float32)[0]
    p = ALL[name]({"a": x[:1].reshape(1, 1), "b": (x[1], x[2:])})
    assert p["a"].shape == (1, 1)
    flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(p)])
    np.testing.assert_allclose(flat, ALL[name](x), rtol=1e-5, atol=1e-5)


def test_parameters_may_be_pytrees_like_the_point():
    x = {"w": jnp.array([[3.0, -3.0]]), "b": jnp.array(5.0)}
    box = sets.Box({"w": np.array([[-1.0, -2.0]]), "b": 0.0}, 2.0)(x)
    np.testing.assert_array_equal(box["w"], [[2.0, -2.0]])
    np.testing.assert_array_equal(box["b"], 2.0)
    np.testing.assert_allclose(sets.Ball(0.0, x)(jax.tree.map(jnp.zeros_like, x))["w"], x["w"])
    half = sets.HalfSpace({"w": np.ones((1, 2)), "b": 0.0}, -2.0)(x)
    np.testing.assert_allclose(half["w"], [[2.0, -4.0]])
    np.testing.assert_array_equal(half["b"], 5.0)


def test_product_projects_each_part_onto_its_own_set():
    product = sets.Product({"y": (sets.Simplex(), sets.Whole()), "x": sets.Box(0.0, 1.0)})
    point = {
        "x": {"w": jnp.array([2.0]), "v": jnp.array(-1.0)},
        "y": (jnp.array([3.0, 0.0]), jnp.array([7.0])),
    }
    p = jax.jit(product)(point)
    assert jax.tree.map(float, p["x"] | {"w": p["x"]["w"][0]}) == {"w": 1.0, "v": 0.0}
    np.testing.assert_array_equal(p["y"][0], [1.0, 0.0])
    np.testing.assert_array_equal(p["y"][1], [7.0])
    with pytest.raises(ValueError, match="no part for each set"):
        product({"x": jnp.zeros(2)})


@pytest.mark.parametrize("name", ALL)
def test_sets_pass_through_jit_as_arguments(name):
    x = points(1, np.float32)[0]
    np.testing.assert_allclose(jax.jit(lambda s, x: s(x))(ALL[name], x), ALL[name](x), rtol=1e-5, atol=1e-5)
    leaves, structure = jax.tree.flatten(ALL[name])
    assert type(jax.tree.unflatten(structure, [object()] * len(leaves))) is type(ALL[name])


def test_stacked_sets_give_each_client_its_own():
    radii = np.array([0.0, 1.0, 10.0], np.float32)
    balls = jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(l) for l in leaves]), *map(sets.Ball, radii))
    p = jax.vmap(lambda s, x: s(x))(balls, jnp.full((3, 2), 3.0))
    np.testing.assert_allclose(np.linalg.norm(p, axis=1), [0, 1, np.sqrt(18)], rtol=1e-6)


def test_a_set_may_depend_on_the_other_variable():
    """Y(x) = {y ∈ [−1, 1], x + y ≤ 0}, of the minimax test problem, as a box and as an intersection."""

    def as_box(y, x):
        return sets.Box(-1.0, jnp.minimum(1.0, -x))(y)

    def as_intersection(y, x):
        return sets.Intersection(sets.Box(-1.0, 1.0), sets.HalfSpace(1.0, -x))(y)

    xs, ys = jnp.linspace(-1, 1, 5), jnp.linspace(-3, 3, 5)
    for x, y in itertools.product(xs, ys):
        exact = np.clip(y, -1, min(1, -x))
        np.testing.assert_allclose(jax.jit(as_box)(y, x), exact, atol=1e-6)
        np.testing.assert_allclose(jax.jit(as_intersection)(y, x), exact, atol=1e-5)
    assert Projection.of(as_box, "project_y").arity == 2


def test_a_set_is_a_projection_of_one_argument():
    project = Projection.of(sets.Box(-1.0, 1.0), "project")
    np.testing.assert_array_equal(project(jnp.array([2.0]), "client"), [1.0])


@pytest.mark.parametrize("name", ALL)
def test_a_float32_point_stays_float32_beside_float64_parameters(name):
    x = points(1, np.float32)[0]
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        p = ALL[name](jnp.asarray(x))
    assert p.dtype == jnp.float32
    np.testing.assert_allclose(p, ALL[name](x), rtol=1e-5, atol=1e-5)


def test_integers_become_floats():
    p = sets.Ball(1)(jnp.array([3, 4]))
    np.testing.assert_allclose(p, [0.6, 0.8], rtol=1e-6)


def test_affine_with_dependent_rows_keeps_their_rank():
    affine = sets.Affine(ROWS, ROWS @ CENTER)
    assert affine.Q.shape == (2, N)
    np.testing.assert_allclose(affine.Q @ affine.Q.T, np.eye(2), atol=1e-14)
    everything = sets.Affine(np.zeros((1, 2)), 0.0)
    np.testing.assert_array_equal(everything(jnp.array([1.0, 2.0])), [1.0, 2.0])


@pytest.mark.parametrize("traced", ["A", "b", "both"])
def test_affine_may_be_built_while_tracing(traced):
    x = points(1, np.float32)[0]
    A, b = ROWS.astype(np.float32), (ROWS @ CENTER).astype(np.float32)
    build = {
        "A": lambda A_, b_: sets.Affine(A_, b)(x),
        "b": lambda A_, b_: sets.Affine(A, b_)(x),
        "both": lambda A_, b_: sets.Affine(A_, b_)(x),
    }[traced]
    np.testing.assert_allclose(jax.jit(build)(A, b), sets.Affine(A, b)(x), atol=2e-5)


def test_affine_with_float32_rounding_is_consistent():
    rng = np.random.default_rng(1)
    A = rng.standard_normal((8, 5)).astype(np.float32)
    b = A @ rng.standard_normal(5).astype(np.float32)
    p = sets.Affine(A, b)(jnp.zeros(5))
    np.testing.assert_allclose(A @ p, b, atol=1e-4)


def test_affine_can_accept_least_squares():
    A, b = np.array([[1.0, 0.0], [1.0, 0.0]]), np.array([0.0, 2.0])
    with pytest.raises(ValueError, match=r"no x solves A x = b; the nearest A x is 1.41 away"):
        sets.Affine(A, b)
    np.testing.assert_allclose(sets.Affine(A, b, tolerance=1.0)(jnp.array([5.0, 3.0])), [1.0, 3.0], rtol=1e-6)


def test_simplex_is_exact_for_large_entries():
    """Partial sums of entries near 10⁶ would lose all digits of a float32."""
    x = 1e6 + np.arange(1000) / 16
    with jax.enable_x64(True):
        exact = sets.Simplex()(x)
    np.testing.assert_allclose(sets.Simplex()(x.astype(np.float32)), exact, atol=1e-6)
    signed = x * (-1) ** np.arange(1000)
    np.testing.assert_allclose(np.abs(sets.L1Ball(1.0)(signed.astype(np.float32))), exact, atol=1e-6)


@pytest.mark.parametrize("name", ["l1_ball", "ball"])
@pytest.mark.slow
def test_balls_of_radius_zero_are_points(name):
    project = {"l1_ball": sets.L1Ball(0.0), "ball": sets.Ball(0.0)}[name]
    for x in (jnp.zeros(3), jnp.arange(3.0)):
        np.testing.assert_array_equal(project(x), np.zeros(3))
        assert np.isfinite(jax.jacrev(project)(x)).all()


def test_dykstra_finds_the_projection_and_not_just_a_common_point():
    """Alternating projections would end at another point of the intersection."""
    wedge = sets.Intersection(sets.HalfSpace([-1.0, 1.0], 0.0), sets.HalfSpace([0.0, -1.0], 0.0))
    x = np.array([-1.0, 2.0])
    np.testing.assert_allclose(wedge(x), [0.5, 0.5], atol=1e-5)
    x = np.array([-2.0, 1.0])
    np.testing.assert_allclose(wedge(x), [0.0, 0.0], atol=1e-5)


def test_dykstra_does_not_stop_where_the_iterate_stalls():
    """Far outside a box corner cut by a plane, y rests for many sweeps while the increments move."""
    corner = sets.Intersection(sets.Box([0.0, 0.0], [1.0, 1.0]), sets.HalfSpace([-1.0, -20.0], -1.0))
    x = np.array([-40.0, -3.0])
    G = np.vstack([np.eye(2), -np.eye(2), [-1.0, -20.0]])
    exact = nearest_in_polyhedron(x, G, np.array([1.0, 1.0, 0.0, 0.0, -1.0]))
    with jax.enable_x64(True):
        np.testing.assert_allclose(corner(x), exact, atol=1e-8)


def test_dykstra_stops_after_its_iterations():
    lens = (sets.Ball(1.0, [0.0, 0.0]), sets.Ball(1.0, [1.99, 0.0]))
    x = np.array([1.0, 5.0])
    one = sets.Ball(1.0, [1.99, 0.0])(sets.Ball(1.0, [0.0, 0.0])(x))
    np.testing.assert_allclose(sets.Intersection(*lens, iterations=1)(x), one, rtol=1e-6)
    many = sets.Intersection(*lens, iterations=5000)
    assert float(sets.distance(many, x)) > float(np.linalg.norm(one - x))


@pytest.mark.slow
def test_moreau_indicator_and_its_gradient(x64):
    rng = np.random.default_rng(2)
    for name, project in ALL.items():
        smooth = sets.moreau_indicator(project, 0.3)
        x = 3 * rng.standard_normal(N)
        exact = scipy.optimize.approx_fprime(x, lambda y, s=smooth: float(s(y)), 1e-6)
        gradient = jax.jit(smooth.gradient)(x)
        np.testing.assert_allclose(gradient, exact, atol=2e-5, err_msg=name)
        np.testing.assert_allclose(jax.jit(jax.grad(smooth))(x), gradient, atol=1e-12, err_msg=name)
        np.testing.assert_allclose(gradient, (x - project(x)) / 0.3, atol=1e-12, err_msg=name)
        np.testing.assert_allclose(float(smooth(x)), np.sum((x - project(x)) ** 2) / 0.6, err_msg=name)


@pytest.mark.slow
def test_moreau_indicator_has_second_derivatives(x64):
    x = np.array([3.0, 4.0])
    hessian = jax.hessian(sets.moreau_indicator(sets.Ball(1.0), 2.0))(x)
    unit = x / 5
    np.testing.assert_allclose(hessian, (np.eye(2) - (np.eye(2) - np.outer(unit, unit)) / 5) / 2, atol=1e-14)


@pytest.mark.slow
def test_distance_is_differentiable_in_the_set_and_its_parameters(x64):
    x = np.array([3.0, 4.0])
    np.testing.assert_allclose(jax.grad(lambda x: sets.distance(sets.Ball(1.0), x))(x), x / 5, rtol=1e-14)
    np.testing.assert_array_equal(jax.grad(lambda x: sets.distance(sets.Ball(9.0), x))(x), [0.0, 0.0])
    np.testing.assert_allclose(jax.grad(lambda r: sets.distance(sets.Ball(r), x))(1.0), -1.0, rtol=1e-14)
    by_bounds = jax.grad(lambda low: sets.distance(sets.Box(low, np.inf), x))(np.array([4.0, 0.0]))
    np.testing.assert_allclose(by_bounds, [1.0, 0.0], rtol=1e-14)
    value, slope = jax.jvp(
        lambda b: sets.distance(sets.Intersection(sets.HalfSpace([1.0, 0.0], b), sets.NonNegative()), x),
        (1.0,),
        (1.0,),
    )
    np.testing.assert_allclose([value, slope], [2.0, -1.0], rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, s in ALL.items() if not isinstance(s, sets.Intersection)])
def test_jacobians_of_closed_forms(name, x64):
    x = points(1, np.float64, seed=3)[0]
    exact = np.stack([(ALL[name](x + 1e-6 * e) - ALL[name](x - 1e-6 * e)) / 2e-6 for e in EYE], axis=1)
    np.testing.assert_allclose(jax.jacrev(ALL[name])(x), exact, atol=1e-8)
    np.testing.assert_allclose(jax.jacfwd(ALL[name])(x), exact, atol=1e-8)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: sets.Box(1.0, 0.0), "lower = 1.0 exceeds upper = 0.0"),
        (lambda: sets.Box([0.0, 3.0], [1.0, 2.0]), "exceeds upper"),
        (lambda: sets.Box({"a": 0.0, "b": 1.0}, {"a": 1.0, "b": 0.5}), "exceeds upper"),
        (lambda: sets.Box({"a": 0.0, "b": 1.0}, 0.5), "exceeds upper"),
        (lambda: sets.Box(0.5, {"a": 0.0, "b": 1.0}), "exceeds upper"),
        (lambda: sets.Box(np.zeros(2), np.ones(3)), r"shape \(2,\), but upper has \(3,\)"),
        (lambda: sets.Box(np.nan, 1.0), "Box: lower contains NaN"),
        (lambda: sets.Box(np.inf, np.inf), "makes the set empty"),
        (lambda: sets.Ball(-1.0), "radius must be at least 0, but is -1.0"),
        (lambda: sets.Ball(np.nan), "radius contains NaN"),
        (lambda: sets.Ball([1.0, 2.0]), "radius must be one number"),
        (lambda: sets.Ball(1.0, [np.inf, 0.0]), "center must be finite"),
        (lambda: sets.L1Ball(-0.1), "at least 0"),
        (lambda: sets.Simplex(0.0), "greater than 0"),
        (lambda: sets.HalfSpace([0.0, 0.0], 1.0), "a is zero"),
        (lambda: sets.HalfSpace([1.0, 0.0], -np.inf), "b must be greater than -inf"),
        (lambda: sets.HalfSpace([1.0, np.nan], 1.0), "a contains NaN"),
        (lambda: sets.Affine(np.ones((2, 3)), np.ones(3)), r"their shapes are \(2, 3\) and \(3,\)"),
        (lambda: sets.Affine(np.zeros((0, 3)), np.zeros(0)), "must be a matrix"),
        (lambda: sets.Affine([[1.0, 1.0]], np.nan), "b contains NaN"),
        (lambda: sets.Affine(np.zeros((1, 2)), 1.0), "no x solves"),
        (lambda: sets.Intersection(sets.Whole(), iterations=0), "whole number ≥ 1"),
        (lambda: sets.Intersection(sets.Whole(), tolerance=-1.0), "finite and at least 0"),
        (
            lambda: sets.Intersection(sets.Box(np.zeros(2), 1.0), sets.Ball(1.0, np.zeros(3))),
            r"sizes: \[2, 3\]",
        ),
        (lambda: sets.moreau_indicator(sets.Whole(), 0.0), "eta must be greater than 0"),
        (lambda: sets.Box(np.zeros(2), 1.0)(jnp.zeros(3)), "does not fit a point of shape"),
        (lambda: sets.Box({"a": 0.0}, 1.0)({"b": jnp.zeros(3)}), "has the structure"),
        (lambda: sets.Affine([[1.0, 1.0]], 1.0)(jnp.zeros(3)), "2 columns, but the point has 3"),
    ],
)
def test_bad_values_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: sets.Box("low", 1.0), "Box: lower must be real"),
        (lambda: sets.Ball(1.0, None), "center must be a number"),
        (lambda: sets.Ball(1.0, 1j), "center must be real"),
        (lambda: sets.Intersection(), "takes sets"),
        (lambda: sets.Intersection(sets.Whole(), jnp.abs), "takes sets"),
        (lambda: sets.Product({"a": sets.Whole(), "b": 1.0}), "pytree of sets"),
    ],
)
def test_bad_types_are_refused(build, message):
    with pytest.raises(TypeError, match=message):
        build()


@pytest.mark.parametrize(
    "parts",
    [
        (sets.Box(0.0, 1.0), sets.Box(2.0, 3.0)),
        (sets.Box(-3.0, -1.0), sets.NonNegative()),
        (sets.Ball(1.0, [0.0, 0.0]), sets.Ball(1.0, [3.0, 0.0])),
        (sets.Ball(1.0, [0.0, 0.0]), sets.Box([0.9, 0.9], 2.0)),
        (sets.Ball(1.0, [0.0, 0.0]), sets.HalfSpace([1.0, 1.0], -1.5)),
        (sets.Ball(1.0, [0.0, 0.0]), sets.Affine([[3.0, 4.0]], [6.0])),
        (sets.L1Ball(1.0), sets.Box([1.5, -1.0], np.inf)),
        (sets.Simplex(), sets.Box([0.6, 0.6], 1.0)),
        (sets.Simplex(), sets.HalfSpace([-1.0, -1.0], -1.5)),
        (sets.HalfSpace([1.0, 0.0], 0.0), sets.HalfSpace([-1.0, 0.0], -1.0)),
        (sets.Affine([[1.0, 1.0]], [1.0]), sets.Affine([[1.0, 1.0]], [2.0])),
        (
            sets.HalfSpace([1.0, 1.0], 1.0),
            sets.HalfSpace([-1.0, 1.0], -2.0),
            sets.HalfSpace([0.0, -1.0], 0.0),
        ),
        (sets.Intersection(sets.Box([0.0, 0.0], 1.0), sets.Whole()), sets.HalfSpace([-1.0, -1.0], -2.1)),
    ],
    ids=lambda parts: "-".join(type(part).__name__ for part in parts),
)
def test_an_empty_intersection_is_refused(parts):
    with pytest.raises(ValueError, match="no common point"):
        sets.Intersection(*parts)


@pytest.mark.parametrize(
    "parts",
    [
        (sets.Box(0.0, 1.0), sets.Box(1.0, 3.0)),
        (sets.Ball(1.0, [0.0, 0.0]), sets.Ball(2.0, [3.0, 0.0])),
        (sets.Ball(np.float32(0.1), [0.0, 0.0]), sets.HalfSpace([-1.0, 0.0], -0.1)),
        (sets.Simplex(), sets.Box([0.5, 0.5], 1.0)),
        (sets.HalfSpace(1.0, -5.0), sets.Box(-1.0, 1.0)),  # empty for a number, not for six
        (sets.HalfSpace([1.0, 0.0], np.inf), sets.Box([4.0, 4.0], 5.0)),
        (sets.Box({"a": 0.0, "b": 1.0}, 2.0), sets.Ball(1.0)),
    ],
    ids=lambda parts: "-".join(type(part).__name__ for part in parts),
)
def test_sets_that_touch_are_accepted(parts):
    sets.Intersection(*parts)


def shift(x, y, s):
    return ((x - y - s["a"]) ** 2).sum()


POINT = (np.zeros(3), np.zeros(3))
PERSONAL = fs.Personalized(lambda x, s: x.sum(), lambda x, y: y.sum(), shift, lambda y, x, client: y[:1])


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (
            fs.Minimization(lambda x, s: x.sum(), lambda x: x[:1]),
            r"project must return a point like x",
        ),
        (fs.Minimization(lambda x, s: x.sum(), lambda x, client: x[:1]), r"like x.*\[3\], but returns \[1\]"),
        (fs.Minimax(shift, None, lambda y: y.sum()), r"Minimax.project_y must return a point like y"),
        (fs.Minimax(shift, None, lambda y, x: x["w"]), r"project_y cannot project a point like y0, of shape"),
        (fs.MPEC(shift, shift, None, lambda y, x, sample: sample["a"][:2]), r"but returns \[2\]"),
        (PERSONAL, r"Personalized.project_y must return a point like y, of shape \[3\], but returns \[1\]"),
    ],
)
def test_a_projection_gives_a_point_like_the_one_it_was_given(problem, words):
    """Else x − P(x) would broadcast, without a word."""
    with pytest.raises(TypeError, match=words):
        check_sets(problem, *POINT, {"a": jax.ShapeDtypeStruct((3,), jnp.float32)})


def test_sets_that_need_what_only_a_run_has_are_left_to_it():
    sample = {"a": jax.ShapeDtypeStruct((3,), jnp.float32)}
    own = fs.Minimization(lambda x, s: x.sum(), lambda x, client: x * client.memory["scale"])
    check_sets(own, *POINT, sample)
    fits = fs.Minimization(lambda x, s: x.sum(), lambda x, client: jnp.clip(x, 0, client.data["a"].max(0)))
    check_sets(fits, *POINT, sample)
    no_y0 = fs.Minimax(shift, None, sets.Box(0.0, 1.0))
    check_sets(no_y0, POINT[0], None, sample)  # which is told of elsewhere
