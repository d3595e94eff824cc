"""``fs.solve(problem, "auto", …)``: no hyper-parameter, held to closed forms."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs
from benchmarks.auto import Drawn

from .test_plan import ridge


def test_auto_solves_and_says_what_it_did():
    problem, data, best = ridge(2)
    options = {"weights": "size", "seed": 3, "progress": False}
    result = fs.solve(problem, "auto", data, np.zeros(4), **options)
    np.testing.assert_allclose(result.x, best, atol=1e-2 * np.linalg.norm(best))
    assert result.certificate.solved
    assert len(result.notes) == 3
    assert result.notes[0] in repr(result)
    assert repr(result.method) in result.notes[0]  # an ordinary method
    assert len(result.history["round"]) == len(result.history["loss"])
    assert result.history["round"][-1] == result.ledger.rounds
    again = fs.solve(problem, "auto", data, np.zeros(4), **options)
    np.testing.assert_array_equal(result.x, again.x)
    assert result.ledger == again.ledger


@pytest.mark.slow
def test_auto_stops_at_its_budget_and_says_so():
    problem, data, _ = ridge(2)
    result = fs.solve(problem, "auto", data, 100 * np.ones(4), rounds=3, progress=False)
    assert result.ledger.rounds == 3
    assert not result.certificate.solved
    assert "budget" in result.notes[2]
    callbacks = [lambda progressed: progressed.round == 2]
    result = fs.solve(problem, "auto", data, 100 * np.ones(4), callbacks=callbacks, progress=False)
    assert (result.status, result.ledger.rounds) == ("stopped", 2)
    assert "a callback stopped it" in result.notes[2]


@pytest.mark.slow
def test_auto_falls_where_the_loss_has_kinks():
    rng = np.random.default_rng(0)
    data = fs.FederatedData.from_clients([{"a": rng.normal(size=(3, 2)) + i} for i in range(3)])
    problem = fs.Minimization(lambda x, s: jnp.abs(x - s["a"]).sum())
    result = fs.solve(problem, "auto", data, np.full(2, 30.0), progress=False)
    assert result.certificate.solved
    np.testing.assert_allclose(result.x, np.median(data.train["a"], 0), atol=1e-2)


@pytest.mark.slow
def test_auto_solves_cvar_with_half_of_the_clients():
    """Against a linear program; the threshold has the unit of the loss, here .01 to 700."""
    trial, participation = Drawn("nonsmooth", 4027).build()
    assert participation < 1
    options = {"participation": participation, "progress": False, **trial.options}
    result = fs.solve(trial.problem, "auto", trial.data, trial.x0, **options)
    assert result.certificate.solved
    assert trial.truth(result.x) == "right"


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"budget": {"hours": 1}}, ValueError, "budget has no 'hours'"),
        ({"budget": {"rounds": -1}}, ValueError, "must be a positive number"),
        ({"checkpoint": "here"}, ValueError, "keeps no checkpoints"),
    ],
)
def test_mistakes(options, error, words):
    problem, data, _ = ridge()
    with pytest.raises(error, match=words):
        fs.solve(problem, "auto", data, np.zeros(4), **options)


def test_methods_need_rounds_and_names_are_not_methods():
    problem, data, _ = ridge()
    with pytest.raises(TypeError, match="needs rounds="):
        fs.solve(problem, fs.FedAvg(0.1), data, np.zeros(4))
    with pytest.raises(TypeError, match="or 'auto', but is 'FedAvg'"):
        fs.solve(problem, "FedAvg", data, np.zeros(4), rounds=1)


@pytest.mark.slow
def test_a_game_that_is_linear_in_both_variables():
    """(x − c)ᵀA(y − d): descent ascent turns outwards; with FESSGDA's quadratic term it turns inwards."""
    rng = np.random.default_rng(0)
    A, c, d = np.diag([3.0, 1.0]), np.array([1.0, -2.0]), np.array([0.5, 1.0])
    data = fs.FederatedData.from_clients(
        [{"e": e[None] - 0.0} for e in (rng.normal(size=2), rng.normal(size=2))]
    )
    mean = np.mean([data.client(i)["e"][0] for i in range(2)], axis=0)
    problem = fs.Minimax(lambda x, y, s: (x - c) @ A @ (y - d) + (s["e"] - mean) @ x)
    result = fs.solve(problem, "auto", data, np.zeros(2), y0=np.zeros(2), progress=False)
    assert isinstance(result.method, fs.FESSGDA)
    assert result.certificate.solved
    np.testing.assert_allclose(result.x, c, rtol=1e-2)
    np.testing.assert_allclose(result.y, d, rtol=5e-2)


@pytest.mark.slow
def test_a_matrix_game_on_simplices():
    """Paper, scissors, stone with stakes: of a hundredth: probabilities 3/6, 2/6, 1/6."""
    A = 1e-2 * np.array([[0.0, 1.0, -2.0], [-1.0, 0.0, 3.0], [2.0, -3.0, 0.0]])
    noise = np.random.default_rng(0).normal(size=(2, 3, 3))
    noise[1] = -noise[0]
    data = fs.FederatedData.from_clients([{"e": own[None]} for own in noise])
    simplex = fs.sets.Simplex()
    problem = fs.Minimax(lambda x, y, s: x @ (A + s["e"]) @ y, project_x=simplex, project_y=simplex)
    start = np.array([1.0, 0.0, 0.0])
    result = fs.solve(problem, "auto", data, start, y0=start, progress=False)
    assert result.certificate.solved
    np.testing.assert_allclose(result.x, np.array([3, 2, 1]) / 6, atol=1e-2)
