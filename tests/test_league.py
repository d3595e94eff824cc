"""The league's table: costs, profiles, pairs and failures of made-up runs, and what advice reads of them."""

import json

import numpy as np
import pytest

from fedstrata import Minimization
from fedstrata.advice import league, recommend
from fedstrata.lab.report import RunRecord
from reproductions import _league_table as table


def run(method, problem, seed, reached, end=1e-6, verdict="solved"):
    """A run of 40 exchanges that reaches the target at the given one."""
    exchanges = np.arange(0, 41, 10)
    excess = np.where(exchanges >= reached, end, 0.5)
    history = dict.fromkeys(("round", "exchanges", "bytes", "oracle_calls", "time"), exchanges)
    setting = {"problem": problem, "steps": "planned", "objective": "Minimization"}
    return RunRecord(
        method, setting, seed, {**history, "excess": excess}, {}, 1.0, method, {"verdict": verdict}
    )


RUNS = [
    run("quick", "one", 0, 10),
    run("quick", "two", 0, 20),
    run("slow", "one", 0, 40),
    run("slow", "two", 0, 99, verdict="on its way"),
]


def test_profiles_and_winners():
    ratios = table.ratios(RUNS, "exchanges")
    assert ratios["quick"] == {("one", 0): 1.0, ("two", 0): 1.0}
    assert ratios["slow"] == {("one", 0): 4.0, ("two", 0): np.inf}
    assert [table.share(ratios["slow"], tau) for tau in (2.0, 4.0)] == [0.0, 0.5]
    assert table.order(RUNS) == ["quick", "slow"]
    assert [row[2] for row in table.winners(RUNS)[1:]] == ["quick (10)", "quick (20)"]
    assert table.failures(RUNS)[1:] == [("slow", "two", "planned", "0 of 1", "on its way")]


def test_the_page_and_the_evidence():
    text = table.findings(RUNS)
    assert "2 methods on 2 problems, 4 runs" in text
    assert table.number([1.0, 0.26827, "a"]) == "[1, 0.268, a]"
    assert "| quick | 2 | 100% |" in text
    found = table.evidence(RUNS, "command")["objectives"]["Minimization"]
    assert found["problems"] == ["one", "two"]
    assert found["methods"]["slow"] == {"runs": 2, "reached": 1, "within_twice": 0.0}


def test_advice_reads_the_record(monkeypatch):
    its = {"runs": 6, "reached": 5, "within_twice": 0.5}
    content = {"objectives": {"Minimization": {"problems": ["one"], "methods": {"FedAvg": its}}}}
    monkeypatch.setattr(league, "measured", lambda: content)
    problem = Minimization(lambda x, s: (x - s["a"]) ** 2)
    assert league.record(problem, "FedAvg") == league.Record(6, 5, 0.5, 1)
    assert league.record(problem, "FedZO") is None
    assert "5 of 6 runs" in str(league.record(problem, "FedAvg"))


@pytest.mark.slow
def test_a_record_decides_where_no_rate_is_known(monkeypatch):
    """FedZO and FedKSeed have steps that fade; the league's better one comes first."""
    import fedstrata as fs

    data = fs.FederatedData.from_clients([{"a": np.ones((2, 2))}, {"a": np.zeros((3, 2))}])
    problem = fs.Minimization(fs.black_box(lambda x, s: ((x - s["a"]) ** 2).sum()))
    names = []
    for best in ("FedZO", "FedKSeed"):
        shares = {
            name: {"runs": 3, "reached": 3, "within_twice": float(name == best)}
            for name in ("FedZO", "FedKSeed")
        }
        content = {"objectives": {"Minimization": {"problems": ["one"], "methods": shares}}}
        monkeypatch.setattr(league, "measured", lambda content=content: content)
        found = recommend.recommend(problem, data, np.zeros(2))
        order = [its.name for its in found if its.name in shares]
        names.append(order[0])
    assert names == ["FedZO", "FedKSeed"]


def test_the_file_is_the_leagues():
    """Every record in the package is of a method that exists, and of runs that add up."""
    from fedstrata.core.method import METHODS

    content = league.measured()
    if not content["objectives"]:
        pytest.skip("the league has not been run")
    assert "fedstrata run league" in content["command"]
    assert json.dumps(content)
    for found in content["objectives"].values():
        assert found["problems"]
        for name, its in found["methods"].items():
            assert name in METHODS
            assert 0 <= its["reached"] <= its["runs"]
