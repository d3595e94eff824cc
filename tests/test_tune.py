"""Searches on problems whose best steps are known."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

import fedstrata as fs

pytestmark = pytest.mark.slow  # of the quick tests, the rows of methods and of the kit would fail as well

DATA = fs.FederatedData.from_clients([{"a": np.ones((2, 1))}, {"a": np.zeros((2, 1))}])
PROBLEM = fs.Minimization(lambda x, s: 0.5 * ((x - s["a"]) ** 2).sum())


def tuned(**more):
    return fs.tune(PROBLEM, fs.FedAvg, DATA, np.zeros(1), progress=False, **{"seeds": 2, **more})


def test_a_search_of_one_step():
    """x ← x − γ(x − ½) is at ½ after one round with γ = 1, and diverges from γ = 2 on."""
    found = tuned(space={"gamma": [0.01, 0.1, 1.0, 5.0]}, budget={"rounds": 2000})
    assert found.method.gamma == 1.0
    assert found.score == pytest.approx(0.125)  # the samples' variance, halved
    assert found.start == pytest.approx(0.25)
    assert found.certificate.solved
    assert found.price["gamma"][1] > 100  # three times as long diverges
    assert not found.edges
    spent = sum(trial.rounds * len(trial.scores) for trial in found.trials)
    assert spent <= 2000
    assert all(len(trial.scores) == 2 for trial in found.trials)
    assert found.plot("gamma").axes


def test_an_unsolved_lower_level_does_not_win():
    """At the current y a long alpha with a short beta looks best; F at the solved y says otherwise."""
    game = fs.quadratic_bilevel(clients=2, n=1, p=1)
    space = {"alpha": [0.1, 1.0], "beta": [1e-4, 0.3]}
    found = fs.tune(
        game.problem, fs.FedMSA(0.1, 0.3), game.data, np.zeros(1), space, 3000, y0=np.zeros(1), seeds=1,
        progress=False,
    )  # fmt: skip
    assert found.method.beta > 1e-3
    assert found.plot().axes


def test_no_sweep_begins_after_the_seconds_of_a_budget(monkeypatch):
    trying = importlib.import_module("fedstrata.advice.tune")._Trying
    monkeypatch.setattr(trying, "late", True)  # however fast this machine is
    found = tuned(space={"gamma": [0.01, 0.1, 0.5]}, budget={"seconds": 0.1}, seeds=1)
    assert {trial.rounds for trial in found.trials} == {found.rounds}
    assert found.method.gamma == 0.5
    assert "not tried" in repr(found)


def test_what_is_refused():
    with pytest.raises(ValueError, match="no hyper-parameter 'lr'"):
        tuned(space={"lr": [0.1]})
    with pytest.raises(ValueError, match="budget has no 'hours'"):
        tuned(space={"gamma": [0.1]}, budget={"hours": 1})
    with pytest.raises(ValueError, match="too small"):
        tuned(space={"gamma": [0.1]}, budget=1)
    with pytest.raises(ValueError, match="validation"):
        tuned(space={"gamma": [0.1]}, by="validation")


@pytest.mark.long
def test_lanes_that_optuna_proposes(tmp_path):
    pytest.importorskip("optuna")
    storage = f"sqlite:///{tmp_path / 'tuning.db'}"
    first = tuned(space={"gamma": [1e-3, 5.0]}, budget=20_000, storage=storage, seeds=1)
    assert first.score == pytest.approx(0.125, abs=1e-4)
    again = tuned(space={"gamma": [1e-3, 5.0]}, budget=20_000, storage=storage, seeds=1)
    assert again.score <= first.score + 1e-6
