"""Runs of a sweep that diverge cost the others nothing, and end where they would by themselves."""

import numpy as np
import pytest

import fedstrata as fs
from fedstrata.engines.batched import Batched

ROUNDS = 30
data = fs.FederatedData.from_clients([{"a": np.full((2, 1), a)} for a in (1.0, 2.0)])
problem = fs.Minimization(lambda x, sample: 0.5 * ((x - sample["a"]) ** 2).sum())
x0 = np.zeros(1)
# x − mean grows by 1 − γ in a round: the loss, its square, passes float32's 3·10³⁸ after 20 / log₁₀(γ) rounds
GROWING = [fs.FedAvg(gamma=g) for g in (10.0, 50.0, 300.0, 1e4, 1e12, 1e30)]
STEADY = [fs.FedAvg(gamma=g) for g in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)]


def swept(methods, monkeypatch):
    """A sweep's results, and how many evaluations and rounds were computed for it."""
    asked, advance = [], Batched.advance

    def watched(self, job, carry, first, rounds, active=None):
        asked.append(rounds.copy())
        return advance(self, job, carry, first, rounds, active)

    monkeypatch.setattr(Batched, "advance", watched)
    results = fs.sweep(problem, methods, data, x0, rounds=ROUNDS, progress=False)
    monkeypatch.undo()
    return results, (sum(map(len, asked)), int(np.concatenate(asked).sum()))


@pytest.mark.filterwarnings("ignore:6 of the 12 runs diverged")
def test_nothing_is_computed_again_where_runs_diverge(monkeypatch):
    """However many diverge, and whenever: every round and every evaluation is computed once."""
    mixed, cost = swept(GROWING + STEADY, monkeypatch)
    _, without = swept(STEADY + STEADY, monkeypatch)
    assert cost == without == (ROUNDS + 1, ROUNDS)
    assert [r.status for r in mixed] == ["diverged"] * 6 + ["done"] * 6
    lengths = [len(r.history["round"]) for r in mixed]
    assert len(set(lengths[:6])) >= 4, lengths  # at several evaluations
    steady = fs.sweep(problem, STEADY, data, x0, rounds=ROUNDS, progress=False)
    for ours, theirs in zip(mixed[6:], steady, strict=True):
        np.testing.assert_allclose(ours.x, theirs.x, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:FedAvg", "ignore:6 of the 6 runs diverged")
def test_a_run_of_a_sweep_ends_where_it_would_by_itself():
    """At the last finite evaluation: the point, the history, the ledger."""
    for ours in fs.sweep(problem, GROWING, data, x0, rounds=ROUNDS, progress=False):
        with pytest.raises(fs.Diverged) as caught:
            fs.solve(problem, ours.method, data, x0, rounds=ROUNDS, progress=False)
        alone = caught.value.result
        np.testing.assert_allclose(ours.x, alone.x, rtol=1e-5)
        np.testing.assert_array_equal(ours.history["round"], alone.history["round"])
        np.testing.assert_allclose(ours.history["loss"], alone.history["loss"], rtol=1e-5)
        assert ours.ledger == alone.ledger
        assert np.isfinite(ours.x).all()


def test_a_metric_of_the_users_may_be_nan_in_a_sweep():
    """It is no iterate: nothing stays behind for it."""
    metrics = {"odd": lambda x, y: np.nan * x.sum()}
    for ours in fs.sweep(problem, STEADY[:2], data, x0, rounds=5, metrics=metrics, progress=False):
        alone = fs.solve(problem, ours.method, data, x0, rounds=5, metrics=metrics, progress=False)
        assert (ours.status, len(ours.history["odd"])) == ("done", 6)
        np.testing.assert_allclose(ours.x, alone.x, rtol=1e-6)
