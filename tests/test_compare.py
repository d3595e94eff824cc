"""Contests whose winner is known in closed form."""

from __future__ import annotations

import math
import runpy
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import fedstrata as fs
from fedstrata.advice.compare import holm

pytestmark = pytest.mark.slow  # of the quick tests, the rows of methods and of the kit would fail as well

DATA = fs.FederatedData.from_clients([{"a": np.array([[1.0], [2.0]])}, {"a": np.zeros((2, 1))}])
PROBLEM = fs.Minimization(lambda x, s: 0.5 * ((x - s["a"]) ** 2).sum())


def test_costs_and_pairs_of_gradient_descent(tmp_path):
    """The excess is (1 − γ)^2t: 0.25 after one round with γ = ½, after seven with γ = 0.1."""
    methods = {"long": fs.FedAvg(0.5), "short": fs.FedAvg(0.1)}
    found = fs.compare(PROBLEM, methods, DATA, np.zeros(1), budget=20, seeds=2, target=0.25, progress=False)
    assert [entry.cost("rounds", 0.25) for entry in found.entries] == [1, 1, 7, 7]
    up_and_down = 2 * 2 * 4  # two clients, one float32 each way
    assert found.of("short")[0].cost("bytes", 0.25) == 7 * up_and_down
    (pair,) = found.pairs
    assert pair.runs == 1  # full batches: the second seed changes nothing
    assert math.isnan(pair.p)
    assert pair.decades < -5
    tau, share = found.profile()["short"]
    assert share[0] == 0
    assert tau[np.flatnonzero(share)[0]] == pytest.approx(7)
    assert "Performance profiles" in found.report(tmp_path / "page").read_text()


def test_a_budget_in_bytes_and_what_is_refused():
    found = fs.compare(
        PROBLEM, [fs.FedAvg(0.5)], DATA, np.zeros(1), budget={"bytes": 160}, seeds=1, progress=False
    )
    assert found.entries[0].rounds[-1] == 10
    with pytest.raises(TypeError, match="before the data"):
        fs.compare(PROBLEM, DATA, np.zeros(1), [fs.FedAvg(0.5)], budget=5)
    with pytest.raises(ValueError, match="of one class"):
        fs.compare(PROBLEM, [fs.FedAvg(0.5), fs.FedAvg(0.1)], DATA, np.zeros(1), budget=5)
    with pytest.raises(ValueError, match="budget has no 'hours'"):
        fs.compare(PROBLEM, [fs.FedAvg(0.5)], DATA, np.zeros(1), budget={"hours": 5})
    assert holm([0.01, math.nan, 0.04]) == pytest.approx([0.02, math.nan, 0.04], nan_ok=True)


def test_noise_is_paired_and_methods_are_planned():
    methods = {"planned": fs.FedAvg, "noisy": fs.FedAvg(0.3, batch_size=1), "small": fs.FedAvg(0.01)}
    found = fs.compare(PROBLEM, methods, DATA, np.zeros(1), budget=40, seeds=6, progress=False)
    pairs = {(pair.first, pair.second): pair for pair in found.pairs}
    _, high = pairs["planned", "noisy"].interval
    assert high < 0
    assert pairs["planned", "noisy"].p < 0.1
    assert pairs["planned", "small"].runs == 1


def test_every_split_has_its_own_best_value():
    """The excess of gradient descent on one parabola or another, far from its end."""
    other = fs.FederatedData.from_clients([{"a": np.array([[9.0], [5.0]])}, {"a": np.full((2, 1), 4.0)}])
    methods = {"long": fs.FedAvg(0.3), "short": fs.FedAvg(0.1)}
    found = fs.compare(PROBLEM, methods, [DATA, other], np.zeros(1), budget=3, seeds=2, progress=False)
    ends = [entry.excess[-1] for entry in found.entries]
    np.testing.assert_allclose(ends, [0.7**6] * 2 + [0.9**6] * 2, rtol=1e-4)


def test_a_method_that_diverges_is_behind_the_others():
    methods = {"planned": fs.FedAvg, "wild": fs.FedAvg(1e6)}
    found = fs.compare(PROBLEM, methods, DATA, np.zeros(1), budget=25, seeds=2, progress=False)
    ends = {entry.method: entry.excess[-1] for entry in found.entries}
    assert ends["planned"] < 1e-6
    assert ends["wild"] == math.inf
    assert "wild" in str(found)


def test_the_command(tmp_path):
    typer = pytest.importorskip("typer.testing")
    from fedstrata.lab.cli import app

    (tmp_path / "two.py").write_text(EXPERIMENT)
    arguments = ["compare", str(tmp_path / "two.py"), "--budget", "rounds=10", "--seeds", "2"]
    done = typer.CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "long − short" in done.output
    assert (tmp_path / "out" / "report.html").is_file()
    assert (tmp_path / "out" / "profiles.svg").is_file()
    wrong = typer.CliRunner().invoke(app, [*arguments[:2], "--budget", "rounds=-1"])
    assert (wrong.exit_code, wrong.stderr) == (
        2,
        "Error: budget['rounds'] must be a positive number, but is -1.0.\n",
    )


EXPERIMENT = """
import numpy as np
import fedstrata as fs
from fedstrata.lab.experiments.base import Experiment, Task
from fedstrata.lab.report import Column, TableSpec

def build(s):
    data = fs.FederatedData.from_clients([{"a": np.ones((2, 1))}, {"a": np.zeros((2, 1))}])
    problem = fs.Minimization(lambda x, z: ((x - z["a"]) ** 2).sum() / 2)
    return Task(problem, fs.FedAvg({"long": 0.5, "short": 0.1}[s.method]), data, np.zeros(1), rounds=5)

EXPERIMENT = Experiment(
    name="two", title="Two steps", description="Long and short.", problem="a mean", build=build, seeds=1,
    grid={"method": ["long", "short"]}, table=TableSpec((Column("loss"),)),
)
"""


def test_a_benchopt_folder_runs(tmp_path, monkeypatch):
    """As benchopt calls its files; `benchopt run` itself needs the extra."""
    pytest.importorskip("cloudpickle")
    contest = {"mean": (PROBLEM, DATA, np.zeros(1))}
    named = {"long": fs.FedAvg(0.5), "short": fs.FedAvg(0.1)}
    found = fs.compare(contest, named, budget=5, seeds=1, weights="size", progress=False)
    folder = found.to_benchopt(tmp_path / "contest")
    bases = {f"Base{kind}": object for kind in ("Objective", "Dataset", "Solver")}
    monkeypatch.setitem(sys.modules, "benchopt", SimpleNamespace(**bases))
    files = [
        runpy.run_path(folder / name) for name in ("objective.py", "datasets/cases.py", "solvers/methods.py")
    ]
    objective, dataset, solver = (
        file[kind]() for file, kind in zip(files, ("Objective", "Dataset", "Solver"), strict=True)
    )
    assert (dataset.parameters, solver.parameters) == ({"case": ["mean"]}, {"method": ["long", "short"]})
    dataset.case, solver.method = "mean", "short"
    objective.set_data(**dataset.get_data())
    solver.set_objective(**objective.get_objective())
    values = []
    for rounds in (0, 5):
        solver.run(rounds)
        values.append(objective.evaluate_result(**solver.get_result())["value"])
    entry = found.of("short")[0]
    least = values[0] - (values[0] - values[1]) / (1 - entry.excess[-1])
    assert least == pytest.approx(0.34375, rel=1e-5)  # F* = ½ · the variance of 1, 2, 0, 0


@pytest.mark.long
def test_benchopt_runs_the_folder(tmp_path):
    """`benchopt run` itself: after n rounds of steps ½, the excess is 0.25 to the n, where F* is 0.34375."""
    benchopt = pytest.importorskip("benchopt")
    parquet = pytest.importorskip("pyarrow.parquet")
    methods = {"long": fs.FedAvg(0.5)}
    found = fs.compare(PROBLEM, methods, DATA, np.zeros(1), budget=5, seeds=1, progress=False)
    folder = found.to_benchopt(tmp_path / "contest")
    benchopt.run_benchmark(str(folder), max_runs=4, plot_result=False, html=False)
    (written,) = (folder / "outputs").glob("*.parquet")
    run = parquet.read_table(written).to_pydict()
    expected = [0.34375 + (0.625 - 0.34375) * 0.25**rounds for rounds in run["stop_val"]]
    assert len(expected) >= 4
    np.testing.assert_allclose(run["objective_value"], expected, rtol=1e-6)
