"""Differences that are too narrow for the numbers near x0 are told of before the run."""

from __future__ import annotations

import numpy as np
import pytest

import fedstrata as fs
from fedstrata.core.method import Moment

ZEROTH = [
    fs.FedRZO(0.1, eta=1e-5),
    fs.FedZO(0.1, mu=1e-5),
    fs.FedRZOBilevel(0.1, eta=1e-5),
    fs.FedRZOTwoStage(0.1, eta=1e-5),
    fs.ZOHFL(0.1, eta=1e-5, gamma_client=0.1),
]


@pytest.mark.parametrize("method", ZEROTH, ids=lambda method: type(method).__name__)
def test_neighbours_of_990_are_too_far_apart(method):
    """In float32 they are 2⁻¹⁴ ≈ 6·10⁻⁵ apart, in float64 2⁻⁴³."""

    def told(x0):
        return method.cautions(Moment(fs.Minimization(lambda x, s: x), 1, x0))

    (caution,) = told(np.full(1, 990, np.float32))
    assert "1e-05 is lost in rounding" in caution
    assert "6e-05" in caution
    assert not told(np.full(1, 990, np.float64))
    assert not told({"w": np.zeros(3, np.float32), "b": np.ones(1, np.float32)})


def test_it_is_said_where_a_run_would_stay_where_it_is():
    data = fs.FederatedData.from_clients([{"a": np.array([[1000.0]])}] * 2)
    problem = fs.Minimization(lambda x, s: 0.5 * ((x - s["a"]) ** 2).sum())
    with pytest.warns(UserWarning, match="FedRZO: eta=1e-05 is lost in rounding"):
        fs.solve(problem, fs.FedRZO(0.1, eta=1e-5), data, np.full(1, 990.0), rounds=1, progress=False)


def test_every_method_of_a_sweep_is_looked_at():
    data = fs.FederatedData.from_clients([{"a": np.array([[1000.0]])}] * 2)
    problem = fs.Minimization(lambda x, s: 0.5 * ((x - s["a"]) ** 2).sum())
    grid = [fs.FedRZO(0.1, eta=eta) for eta in (1e-2, 1e-5, 1e-6)]
    with pytest.warns(UserWarning, match="is lost in rounding") as found:
        fs.sweep(problem, grid, data, np.full(1, 990.0), rounds=0, progress=False)
    assert [str(w.message)[:17] for w in found] == ["FedRZO: eta=1e-05", "FedRZO: eta=1e-06"]
    assert {w.filename for w in found} == {__file__}
