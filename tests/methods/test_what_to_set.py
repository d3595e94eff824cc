"""What the methods' pages say of "what to set first", against closed forms."""

from __future__ import annotations

import numpy as np
import pytest

import fedstrata as fs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("x64")]


@pytest.mark.filterwarnings("ignore:ZOHFL. the clients. models have not converged:UserWarning")  # rightly
def test_zohfl_needs_clients_that_solve_their_problems_and_enough_directions():
    """y_i = (a_i + x)/2, so that f₁ + f₂ = ½‖x − s‖² + mean ⅛‖x − a_i‖², least at (s + ā/4)/1.25."""
    rng = np.random.default_rng(0)
    a, s = rng.normal(size=(4, 5)), rng.normal(size=5)
    problem = fs.Personalized(
        lambda x, s: 0.5 * ((x - s["a"]) ** 2).sum(),
        lambda x, y: 0.5 * ((x - y) ** 2).sum(),
        lambda x, y, s: 0.5 * ((y - s["a"]) ** 2).sum() + 0.5 * ((y - x) ** 2).sum(),
    )
    data = fs.FederatedData.from_clients([{"a": each[None]} for each in a], server={"a": s[None]})
    exact = (s + a.mean(0) / 4) / 1.25

    def error(**options):
        method = fs.ZOHFL(0.1, 0.1, **options)
        more = {"rounds": 400, "eval_every": 400, "progress": False, "default_metrics": False}
        x = fs.solve(problem, method, data, np.zeros(5), y0=np.zeros(5), **more).x
        return np.linalg.norm(x - exact) / np.linalg.norm(exact)

    basis = {"directions": 5, "orthogonal": True}
    assert error() > 0.1
    assert error(H=20, gamma_client=0.5) < 0.1
    assert error(H=20, gamma_client=0.5, **basis) < 1e-9


def test_two_sides_and_all_directions_of_fedrzo_bilevel():
    quadratic = fs.quadratic_bilevel()

    def error(gamma, **options):
        method = fs.FedRZOBilevel(gamma, 0.1, batch_size=None, **options)
        more = {"rounds": 400, "eval_every": 400, "progress": False, "default_metrics": False}
        x = fs.solve(quadratic.problem, method, quadratic.data, np.zeros(5), y0=np.zeros(8), **more).x
        return np.linalg.norm(x - quadratic.x_star) / np.linalg.norm(quadratic.x_star)

    assert error(0.02) > 1e-2
    assert error(0.02, two_sided=True) < 1e-4
    assert error(0.1, two_sided=True, directions=5, orthogonal=True) < 1e-4
