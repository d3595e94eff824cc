"""What a method says that it reveals on a problem is what its round, traced, is booked for.

Every row of the cases is asked in ``test_every_method``; here are other problems and options.
"""

from __future__ import annotations

import pytest

import fedstrata as fs
from fedstrata.core import counting
from fedstrata.testing import Case
from fedstrata.testing.cases.averaging import data as regression_data
from fedstrata.testing.cases.averaging import problem as regression
from fedstrata.testing.cases.averaging import x0
from fedstrata.testing.cases.bilevel_zeroth import bilevel, minimax
from fedstrata.testing.cases.bilevel_zeroth import data as bilevel_data
from fedstrata.testing.cases.bilevel_zeroth import x0 as bilevel_x0
from fedstrata.testing.cases.bilevel_zeroth import y0 as bilevel_y0
from fedstrata.testing.cases.compositional import data, federated, loss
from fedstrata.testing.conformance import traced

chi2, kl = fs.dro.chi2(loss, 2.0), fs.dro.kl(loss, 0.5)


def found(problem, method, *start):
    """What a start and a round are booked for."""
    with counting.collect() as tally:
        traced(Case("", method, problem, *start))
    booked = sum((counts for counts, _ in tally.scaled), tally.fixed)
    return "replies" if any(booked[name] for name in booked if name.endswith("/gathers")) else "averages"


@pytest.mark.parametrize(
    ("method", "problem", "revealed"),
    [
        (fs.FedDRO(0.1, 0.5), chi2, "averages"),
        (fs.DSFedDRO(0.1, 0.5), chi2, "averages"),
        (fs.GCIVR(0.1), kl, "replies"),
        (fs.PDSGD(0.1, 0.2, 0.5), kl, "replies"),
        (fs.MBSGD(0.1), kl, "replies"),
        (fs.CompositionalFedAvg(0.1), kl, "averages"),
        (fs.CompositionalFedAvg(0.1, case=2), kl, "replies"),
        (fs.FastDRO(0.1), federated, "averages"),
        (fs.SOBA(0.1, 0.1), kl, "replies"),
        (fs.SOBA(0.1, 0.1), chi2, "averages"),
        (fs.FedMSA(0.1, 0.1, clients=2), kl, "replies"),
        (fs.FedMSA(0.1, 0.1, clients=2), chi2, "averages"),
        (fs.FedMSA(0.1, 0.1, clients=1), chi2, "replies"),
        (fs.FedNest(0.1, 0.1), kl, "averages"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, fs.Method) else None,
)
def test_compositions(method, problem, revealed):
    assert method.reveals_on(problem) == revealed
    assert found(problem, method, data, x0) == revealed


def test_one_device_is_revealed():
    method = fs.LFD(0.1, devices=1)
    assert method.reveals_on(regression) == "replies"
    assert found(regression, method, regression_data, x0) == "replies"


@pytest.mark.parametrize(
    ("lower", "rounds", "revealed"),
    [
        ("local_sgd", None, "averages"),
        (fs.LFD(0.1, devices=1), 1, "replies"),
        (fs.FedAvg(0.1), 1, "averages"),
    ],
    ids=["rule", "one-device", "method"],
)
def test_a_lower_level_reveals_what_its_solver_does(lower, rounds, revealed):
    method = fs.FedRZOBilevel(0.01, 0.2, lower=lower, lower_rounds=rounds, mu_h=1.0, kappa_h=1.0)
    assert method.reveals_on(bilevel) == revealed
    assert found(bilevel, method, bilevel_data, bilevel_x0, bilevel_y0) == revealed


def test_a_solver_of_the_user_s_may_gather():
    class Mean:
        def zero(self, problem, client, key, y):
            return y

        def solve(self, problem, fed, key, r, x, y):
            return fed.gather(self.zero, key, y).mean(0)

    assert fs.FedRZOMinimax(0.1, 0.1, lower=Mean()).reveals_on(minimax) == "replies"


def test_a_class_answers_for_its_defaults():
    assert fs.FedRZO.reveals_on(regression) == "averages"
    assert fs.FedRZO(0.1, 0.1, messages="scalars").reveals_on(regression) == "replies"
    assert fs.FedMSA.reveals_on(chi2) == "replies"
    fits = fs.applicable(kl)
    gathering = {
        "FedDRO",
        "DSFedDRO",
        "GCIVR",
        "PDSGD",
        "MBSGD",
        "FastDRO",
        "SOBA",
        "FedMSA",
        "FedSTORM",
        "AdaFedSTORM",
    }
    assert {fit.name for fit in fits if fit.reveals == "replies"} == gathering
