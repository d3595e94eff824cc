"""What the experiments on selection select, against exact solvers."""

import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.lab.experiments.registry import find
from reproductions import ipirfedavg_lsp, selection_fair


def setting(name, **options):
    """The last setting of an experiment, changed."""
    return find(name).change({"seeds": 1, **options}).settings[-1]


@pytest.mark.slow
def test_the_fairest_is_as_accurate_and_fairer():
    s = setting("selection-fair", data="synthetic", people=1000, method="exact (SLSQP)")
    exact = {name: values[-1] for name, values in selection_fair.build(s).history.items()}
    p = selection_fair.fair(s.data, s.clients, s.people, s.epsilon, s.rho, s.seed)
    method = fs.StRFedAvg("geometric", s.K, eta=s.eta, eta_end=s.eta_end)
    options = {"metrics": selection_fair.METRICS, "eval_every": s.rounds, "progress": False}
    history = fs.solve(p.problem, method, p.data, p.use, rounds=s.rounds, **options).history
    assert exact["worst_loss"] == pytest.approx(s.epsilon, rel=1e-3)
    assert history["worst_loss"][-1] < 1.01 * s.epsilon
    assert history["secondary"][-1] == pytest.approx(exact["secondary"], rel=0.02)
    assert history["covariance"][-1] < 0.9 * history["covariance"][0]


def test_projections_of_problem_16_are_exact():
    toy, data = ipirfedavg_lsp.posed("synthetic", 2, 0)
    off = np.asarray(ipirfedavg_lsp.off(jnp.asarray(toy.x0, jnp.float32), data.placed()), float)
    np.testing.assert_allclose(toy.A @ (toy.x0 - off), toy.b, atol=1e-3)
    in_rows = toy.A.T @ np.linalg.lstsq(toy.A.T, off, rcond=None)[0]
    np.testing.assert_allclose(in_rows, off, atol=1e-3)
