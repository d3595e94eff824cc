"""The references of the selection methods: a grid of η, BiG-SAM, R-APM, power iteration."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.core import counting
from fedstrata.estimators.curvature import power_iteration

TOY = fs.underdetermined()


def run(method, rounds, problem=TOY.problem):
    options = {"eval_every": rounds, "progress": False, "default_metrics": False}
    return fs.solve(problem, method, TOY.data, TOY.x0, rounds=rounds, **options)


def error(x):
    return np.linalg.norm(np.asarray(x, float) - TOY.x_star) / np.linalg.norm(TOY.x_star)


@pytest.mark.slow
@pytest.mark.parametrize("warm_start", [False, True])
def test_the_grid_is_solved_one_after_the_other(warm_start):
    grid = (1.0, 0.1, 0.03)
    result = run(fs.SequentialRegularization(grid, warm_start=warm_start), 1500)
    for eta, x in zip(grid, result.state.solutions, strict=True):
        np.testing.assert_allclose(x, TOY.minimiser(eta, float(result.state.scale.L_h)), atol=1e-3)
    np.testing.assert_array_equal(result.x, result.state.solutions[-1])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:SequentialRegularization. its share")  # of 20 rounds
def test_a_cold_start_forgets():
    """The second η gets the other half of the rounds, from x⁰: as if it had been alone."""
    both = run(fs.SequentialRegularization((1.0, 0.1), L_h=1.0), 40)
    alone = run(fs.SequentialRegularization((0.1,), L_h=1.0), 20)
    np.testing.assert_allclose(both.x, alone.x, atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:BiGSAM. x is still on its way:UserWarning")  # after 300 rounds
def test_big_sam_converges_like_one_over_k():
    errors = [error(run(fs.BiGSAM(), R).x) for R in (300, 3000)]
    assert errors[1] < errors[0] / 5
    assert errors[1] < 0.02


def test_big_sam_refuses_what_is_not_smooth():
    with pytest.raises(ValueError, match="give mu"):
        run(fs.BiGSAM(), 1, fs.Selection(TOY.problem.primary, fs.prox.L1()))
    with pytest.raises(ValueError, match="give L_f with L_h"):
        run(fs.BiGSAM(L_h=1.0), 1)


def test_bad_grids_and_factors():
    for grid in ((), np.ones((2, 2))):
        with pytest.raises(ValueError, match=r"is empty|each stage"):
            fs.SequentialRegularization(grid)
    with pytest.raises(ValueError, match="2 rounds are too few for 3"):
        run(fs.SequentialRegularization((1.0, 0.1, 0.01)), 2)
    with pytest.raises(ValueError, match=r"c must be a number in \(0, 1\]"):
        fs.BiGSAM(c=2.0)


def test_r_apm_needs_everyone():
    with pytest.raises(ValueError, match="RAPM needs participation"):
        fs.solve(TOY.problem, fs.RAPM(), TOY.data, TOY.x0, rounds=1, participation=2, progress=False)


def test_r_apm_is_fista_on_the_regularised_loss():
    rows, targets = (np.asarray(TOY.data.stacked()[k], float) for k in "ab")
    rounds, eta = 25, 1 / 25
    x, z, theta = TOY.x0, TOY.x0, 1.0
    for _ in range(rounds):
        g = np.einsum("isj,is->j", rows, rows @ z - targets) / targets.size
        new = z - (g + eta * (z - TOY.c))
        following = (1 + np.sqrt(1 + 4 * theta**2)) / 2
        x, z, theta = new, new + (theta - 1) / following * (new - x), following
    np.testing.assert_allclose(run(fs.RAPM(L_h=1.0), rounds).x, x, atol=2e-5)


@pytest.mark.slow
def test_r_apm_beats_the_papers_rule():
    assert error(run(fs.RAPM(), 1000).x) < 0.05 < error(run(fs.StRFedAvg(), 1000).x)


def test_power_iteration_finds_the_largest_eigenvalues():
    rng = np.random.default_rng(0)
    maps = np.stack([np.diag([3.0, 1.0, 0.5]), np.diag([0.0, -5.0, 1.0]), np.zeros((3, 3))])
    turn = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    maps = jnp.asarray(turn @ maps @ turn.T, jnp.float32)

    def product(v):
        return jnp.einsum("kij,kj->ki", maps, v)

    found = power_iteration(product, counting.repeat, 30, jax.random.key(0), jnp.zeros((3, 3)))
    np.testing.assert_allclose(found, [3, 5, 0], rtol=1e-4)


@pytest.mark.slow
def test_an_eta_that_its_rounds_do_not_solve():
    """From x0 the null space of h shrinks by 1 − ηγ̃ a round: e^{−1/2} is left after 500 with η = .001."""
    cold = run(fs.SequentialRegularization(), 2000)
    warm = run(fs.SequentialRegularization((1.0, 0.1, 0.01), warm_start=True), 6000)
    assert error(warm.x) < 0.1 < error(cold.x)


@pytest.mark.parametrize(
    "method",
    [
        fs.StRFedAvg("geometric", K=2),
        *(
            pytest.param(method, marks=pytest.mark.slow)
            for method in (
                fs.SequentialRegularization((1.0, 0.1)),
                fs.BiGSAM(),
                fs.RAPM(),
                fs.IPIRFedAvg(0.05, 0.2, inner="warm", inner_rounds=2),
            )
        ),
    ],
    ids=lambda method: type(method).__name__,
)
def test_the_units_of_the_secondary_loss_do_not_matter(method):
    """f in thousandths, or in thousands, has the same minimiser over argmin h, and the same iterates."""

    def distance(x, sample):
        return sample["unit"] * ((x - TOY.c) ** 2).sum() / 2

    problem, found = fs.Selection(TOY.problem.primary, distance, same_samples=True), []
    for unit in (1.0, 1e-3, 1e3):
        parts = zip(np.split(TOY.A, 5), np.split(TOY.b, 5), strict=True)
        data = [{"a": a, "b": b, "unit": np.full(len(b), unit)} for a, b in parts]
        run = {"rounds": 8, "progress": False, "default_metrics": False}
        found.append(fs.solve(problem, method, fs.FederatedData.from_clients(data), TOY.x0, **run).x)
    np.testing.assert_allclose(found[1:], [found[0]] * 2, rtol=1e-3, atol=1e-4)
