"""A run that ends far above its start says so, and one that works, or only passes through, does not."""

from __future__ import annotations

import warnings

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedstrata as fs
from fedstrata.solving.endings import Runaway, in_words, runaway, steps_in_words

DATA = fs.FederatedData.from_clients([{"a": np.array([[0.0]])}, {"a": np.array([[2.0]])}])
HALF = fs.Minimization(lambda x, s: 0.5 * ((x - s["a"]) ** 2).sum())
TWO = fs.Bilevel(lambda x, y, s: (y**2).sum(), lambda x, y, s: ((y - x) ** 2).sum(), same_samples=True)
GAME = fs.Minimax(lambda x, y, s: (x * (y - s["a"])).sum())
METHOD = fs.FedAvg(0.1)
X0 = np.zeros(1, np.float32)


def solve(gamma, problem=HALF, x0=X0, **more):
    return fs.solve(problem, fs.FedAvg(gamma), DATA, x0, rounds=8, progress=False, **more)


def test_steps_that_grow_without_end_are_told_of():
    """x − 1 is multiplied by 1 − γ = −99 in every round: ½(99¹⁶ + 1) after eight, which float32 holds."""
    with pytest.warns(UserWarning, match=r"FedAvg ran away: loss.*1 → 4\.257e\+31.*step size \(gamma=100\)"):
        result = solve(100.0)
    assert result.status == "done"
    assert result.history["loss"][-1] == pytest.approx(0.5 * (99.0**16 + 1), rel=1e-3)


def test_runs_side_by_side_are_told_of_once():
    methods = [fs.FedAvg(gamma) for gamma in (0.5, 50.0, 100.0)]
    with pytest.warns(UserWarning, match="In all, 2 of the 3 runs did") as found:
        fs.sweep(HALF, methods, DATA, X0, rounds=8, progress=False)
    assert len(found) == 1


def quiet(problem, history, x0=X0, method=None):
    return runaway(problem, method or METHOD, x0, history)


def test_when_it_is_silent():
    assert quiet(HALF, {"loss": [1.0, 1e9, 0.9]}) is None  # passed through
    assert quiet(HALF, {"loss": [1.0, 8.0]}) is None  # noise, or a bad start of a long run
    assert quiet(HALF, {"loss": [0.0, 1e-5]}) is None  # rounding: a start at the solution
    assert quiet(HALF, {"loss": [-3.0, -1.0]}) is None
    assert quiet(HALF, {"loss": [0.1, 5.0]}, method=fs.AFL(0.1, 0.1)) is None  # minimises the worst loss
    assert quiet(HALF, {}) is None  # not measured
    bounded = fs.Minimization(HALF.loss, project=fs.sets.Ball(0.1))
    assert quiet(bounded, {"loss": [0.1, 9.0]}, x0=np.ones(1, np.float32)) is None  # the start is outside
    assert quiet(bounded, {"loss": [0.1, 9.0]}) == Runaway("loss", 0.1, 9.0)
    own = fs.Minimization(HALF.loss, project=lambda x, client: x)
    assert quiet(own, {"loss": [0.1, 9.0]}) is None
    assert quiet(GAME, {"payoff": [0.1, 50.0]}) is None  # depends on y: left to the certificate
    assert quiet(TWO, {"upper": [0.7, 1.0, 1e3, 1e6, 1e9]}) is None


def test_growth_is_told_of_in_any_unit():
    """Noise around a loss of zero, where the run started, must not count as growth."""
    for unit in (1.0, 1e6):
        noisy = unit * np.array([0.0, 0.3, 0.2, 0.5, 0.4, 0.6])
        assert quiet(HALF, {"loss": noisy}) is None
        assert quiet(HALF, {"loss": noisy + 1e-7 * unit}) is None
        grown = unit * np.array([0.0, 1.0, 1e3, 1e6, 1e9])
        assert quiet(HALF, {"loss": grown}) == Runaway("loss", 0.0, unit * 1e9)
    assert quiet(HALF, {"loss": [0.69, 80.0, 8440.0]}) == Runaway("loss", 0.69, 8440.0)
    assert quiet(HALF, {"loss": [0.69, 110.0, 90.0, 105.0]}) == Runaway("loss", 0.69, 105.0)  # at once
    assert quiet(HALF, {"loss": 12.0 * 1e3 ** np.arange(17)}) is not None


@pytest.mark.slow
def test_a_bilinear_game_spirals_out():
    """min_x max_y x(y − 1): simultaneous steps multiply the distance to (0, 1) by √(1 + γ²) a round."""
    gamma = 0.1
    result = fs.solve(GAME, fs.LocalSGDA(gamma, gamma), DATA, X0 + 1, y0=X0, rounds=200, progress=False)
    far = np.hypot(result.x, np.asarray(result.y) - 1)
    assert far == pytest.approx(np.sqrt(2) * (1 + gamma**2) ** 100, rel=1e-3)
    assert result.certificate.verdict == "diverging"


def test_a_step_of_the_rules_own_is_named():
    (words,) = in_words([(fs.StRFedAvg(rule="geometric"), Runaway("primary", 1.0, 1e9))], 1)
    assert "(gamma, which is the rule's own, gamma_g=1)" in words


def test_a_loss_that_is_not_finite_at_the_start():
    """No step was made, so that no step can be too large."""
    log = fs.Minimization(lambda x, s: (s["a"] * np.nan * x).sum())
    with pytest.raises(
        fs.Diverged, match="metric 'loss' is not finite at x0, before any step: look at the data"
    ):
        solve(0.1, log)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solve(0.5)


def test_a_run_in_bfloat16_ends_with_its_result():
    """x ← x − 0.5(x − 1) eight times, from 0: 1 − 2⁻⁸; NumPy does not know its rounding."""
    result = solve(0.5, x0=np.zeros(1, jnp.bfloat16))
    assert result.x.dtype == jnp.bfloat16
    assert float(result.x[0]) == pytest.approx(1 - 0.5**8, rel=0.01)


@pytest.mark.parametrize(
    ("constant", "start", "right"), [(0.0, 0.0, True), (0.0, 1.0, True), (1e6, 0.0, False), (1e6, 9.0, False)]
)
def test_differences_of_values_that_rounding_takes_away_are_not_certified(constant, start, right):
    """Neighbours of 10⁶ are 1/16 apart in float32: f(x + v) − f(x − v) = 2ηf′ with η = 10⁻³ is zero there.

    From 9 it is sometimes a sixteenth, and a step of 0.2/(2η) times that throws x about.
    """
    problem = fs.Minimization(lambda x, s: constant + HALF.loss(x, s))
    method = fs.FedRZO(0.2, 1e-3, batch_size=None, two_sided=True)
    result = fs.solve(problem, method, DATA, X0 + np.float32(start), rounds=60, progress=False)
    assert (abs(float(result.x[0]) - 1) < 0.05) == right
    if not right:
        assert not result.certificate.solved


def test_only_steps_are_called_steps():
    assert steps_in_words(fs.FedProx(gamma=0.5, mu=0.1)) == " (gamma=0.5)"
    assert steps_in_words(fs.FedRZOBilevel(gamma=0.5, eta=0.1)) == " (gamma=0.5)"  # eta is a radius
    assert steps_in_words(fs.FedAvg(optax.constant_schedule(0.1))) == ""
