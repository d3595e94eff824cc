"""Running: results, what is stored, what is run again, Ctrl-C, divergence, reports that fit what was run."""

import dataclasses
import functools
import io
import json
import os
import signal

import numpy as np
import pytest
from rich.console import Console

import fedstrata as fs
from fedstrata.lab import (
    Claim,
    Column,
    ExperimentError,
    PaperClaims,
    PlotSpec,
    RunRecord,
    TableSpec,
    Task,
)
from fedstrata.lab.experiments import _solving
from fedstrata.lab.experiments.runner import (
    ExperimentInterrupted,
    PreparedExperiment,
    prepare,
    run_experiment,
)
from fedstrata.lab.report import load_report

from .conftest import build, make


def quietly(experiment, folder, **options):
    return run_experiment(experiment, folder, progress=False, **options)


@pytest.fixture
def solved(monkeypatch):
    """The tasks that are solved, not only built."""
    done = []

    def solve(problem, method, *args, **options):
        done.append((method.H, options["seed"]))
        return fs.solve(problem, method, *args, **options)

    monkeypatch.setattr(_solving, "solve", solve)
    return done


def final(folder):
    return {(r.setting["H"], r.seed): r.history["x"][-1] for r in load_report(folder).runs}


def test_a_run_writes_the_folder_of_a_report(experiment, tmp_path):
    page = quietly(experiment, tmp_path / "out", command="fedstrata run descent")
    assert page == tmp_path / "out" / "report.html"
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        "config.json",
        "runs.csv",
        "history.csv",
        "table.csv",
        "table.md",
        "plots",
        "report.html",
        "finished",
    }
    # x = 1 − (1 − γ)^(rH) with γ = ½, r = 2
    assert final(tmp_path / "out") == {(1, 0): 0.75, (1, 1): 0.75, (2, 0): 0.9375, (2, 1): 0.9375}
    text = page.read_text()
    assert "fedstrata run descent" in text
    assert "A parabola." in text


@pytest.mark.parametrize("options", [{}, {"channel": fs.Channel(clip=0.5)}], ids=["plain", "channel"])
def test_runs_side_by_side_are_the_same(options, tmp_path):
    """Those with options that `fedstrata.sweep` does not take are solved by themselves."""
    made = make(build=lambda s: dataclasses.replace(build(s), options=options))
    varied = made.change({"gamma": [0.25, 0.5]})
    quietly(varied, tmp_path / "one", together=False)
    quietly(varied, tmp_path / "all", together=True)
    one, every = (load_report(tmp_path / name).runs for name in ("one", "all"))
    assert [(r.setting, r.seed) for r in one] == [(r.setting, r.seed) for r in every]
    for a, b in zip(one, every, strict=True):
        np.testing.assert_allclose(a.history["x"], b.history["x"], rtol=1e-6)
        assert a.ledger == b.ledger


@pytest.mark.slow
def test_splits_side_by_side_are_the_same(tmp_path, monkeypatch):
    """Splits of equally many samples, however spread, and seeds are lanes of one program."""

    @functools.cache
    def split(seed):
        rng = np.random.default_rng(seed)
        return fs.FederatedData.from_clients([{"a": rng.normal(size=(n, 1))} for n in (2 + seed, 5 - seed)])

    def lanes(s):
        return dataclasses.replace(build(s), data=split(s.seed))

    def watched(problem, methods, data, x0, *, seeds, **options):
        swept.append((len(methods), seeds))
        return fs.sweep(problem, methods, data, x0, seeds=seeds, **options)

    swept = []
    monkeypatch.setattr(_solving, "sweep", watched)
    experiment = make(build=lanes).change({"gamma": [0.25, 0.5]})
    quietly(experiment, tmp_path / "all", together=True)
    assert swept == [(2, [0, 1]), (2, [0, 1])]  # of each H: both γ, both seeds
    quietly(experiment, tmp_path / "one", together=False)
    one, every = (load_report(tmp_path / name).runs for name in ("one", "all"))
    for a, b in zip(one, every, strict=True):
        assert (a.setting, a.seed, a.ledger) == (b.setting, b.seed, b.ledger)
        np.testing.assert_allclose(a.history["x"], b.history["x"], rtol=1e-6)
        np.testing.assert_allclose(a.history["loss"], b.history["loss"], rtol=1e-6)


def test_one_method_may_stand_there_twice(tmp_path):
    def twice(s):
        return dataclasses.replace(build(s), label=f"{s.note}")

    both = make(build=twice).change({"note": ["a", "b"]})
    quietly(both, tmp_path, together=True)
    assert [(r.label, r.history["x"][-1]) for r in load_report(tmp_path).runs if r.seed == 0] == [
        ("a", 0.75),
        ("b", 0.75),
        ("a", 0.9375),
        ("b", 0.9375),
    ]


def test_what_is_stored_is_not_run_again(tmp_path, solved):
    experiment = make(build=build)
    quietly(experiment, tmp_path)
    quietly(experiment, tmp_path)
    assert solved == [(1, 0), (2, 0), (1, 1), (2, 1)]
    before = final(tmp_path)
    quietly(experiment.change({"seeds": 3}), tmp_path)
    assert solved[4:] == [(1, 2), (2, 2)]
    assert before.items() <= final(tmp_path).items()
    quietly(experiment.change({"gamma": 0.25}), tmp_path)
    assert len(solved) == 10
    quietly(experiment, tmp_path, fresh=True)
    assert len(solved) == 14


def test_a_stored_run_is_found_by_what_it_is_made_of(tmp_path, solved):
    """By its data and its program, not by how that is written."""
    shift, factor = [0.0], [1.0]

    def shifted(s):
        task = build(s)
        clients = [{"a": task.data.client(i)["a"] + shift[0]} for i in range(task.data.clients)]
        problem = fs.Minimization(lambda x, s: factor[0] * task.problem.loss(x, s))
        return dataclasses.replace(task, problem=problem, data=fs.FederatedData.from_clients(clients))

    experiment = make(build=shifted).change({"seeds": 1})
    quietly(experiment, tmp_path)
    before = final(tmp_path)
    for changed in (shift, factor):
        changed[0] += 1.0
        quietly(experiment, tmp_path)
        assert all(final(tmp_path)[key] != before[key] for key in before)
    assert len(solved) == 6
    shift[0], factor[0] = 0.0, 1.0
    quietly(experiment.model_copy(update={"build": lambda setting: shifted(setting)}), tmp_path)
    assert len(solved) == 6
    assert final(tmp_path) == before


def test_a_record_is_found_by_the_code_that_makes_it(tmp_path):
    def maker(number):
        def own(s):
            history = {"round": np.arange(2), "x": np.full(2, number), "loss": np.zeros(2)}
            return RunRecord("own", s.coordinates, s.seed, history, {}, 0.0, "own")

        return make(build=own)

    for number, files in ((1.0, 4), (1.0, 4), (2.0, 8)):
        quietly(maker(number), tmp_path)
        assert len(list((tmp_path / "finished").iterdir())) == files
        assert set(final(tmp_path).values()) == {number}


def test_a_damaged_file_is_named(tmp_path, solved):
    experiment = make(build=build)
    quietly(experiment, tmp_path)
    broken = sorted((tmp_path / "finished").iterdir())[0]
    content = broken.read_bytes()
    for damaged in (content[:40], content.replace(b"0.5", b"0.6", 1), content + b" ", b""):
        assert damaged != content
        broken.write_bytes(damaged)
        with pytest.raises(fs.CheckpointError, match=rf"{broken.name} is damaged.*Delete it"):
            quietly(experiment, tmp_path)
    assert len(solved) == 4
    broken.unlink()
    quietly(experiment, tmp_path)
    assert len(solved) == 5


def test_strays_are_removed_and_the_folder_is_tried(tmp_path, solved):
    (tmp_path / "finished").mkdir()
    (tmp_path / "finished" / ".abc.json.x1y2").write_bytes(b"half")
    quietly(make(build=build), tmp_path)
    assert len(list((tmp_path / "finished").iterdir())) == 4
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(fs.CheckpointError, match="cannot be written"):
        quietly(make(build=build), tmp_path / "file" / "below")
    assert len(solved) == 4


def test_after_an_interruption_only_the_rest_is_run(tmp_path, solved):
    stop = [True]

    def interrupted(s):
        if stop[0] and len(solved) == 2:
            raise KeyboardInterrupt
        return build(s)

    # The same function object finds what it stored.
    experiment = make(build=interrupted)
    with pytest.raises(
        ExperimentInterrupted, match=r"2 of 4 runs are stored in .*the same command continues"
    ):
        quietly(experiment, tmp_path)
    part = load_report(tmp_path)
    assert [(r.setting["H"], r.seed) for r in part.runs] == [(1, 0), (2, 0)]
    assert "Interrupted: 2 of 4 runs." in part.definition.notes
    assert len(list((tmp_path / "finished").iterdir())) == 2
    stop[0] = False
    quietly(experiment, tmp_path)
    assert solved == [(1, 0), (2, 0), (1, 1), (2, 1)]
    assert len(load_report(tmp_path).runs) == 4
    assert "Interrupted" not in load_report(tmp_path).definition.notes


def lines_without_seconds(folder):
    head, *lines = [line.split(",") for line in (folder / "history.csv").read_text().splitlines()]
    return [head, *([c for n, c in zip(head, line, strict=True) if n != "seconds"] for line in lines)]


@pytest.mark.parametrize("together", [False, True])
def test_ctrl_c_within_a_run_goes_on_from_its_checkpoint(tmp_path, together):
    rounds = 2_000
    seen = []

    def patient(s):
        def press(progressed):
            seen.append(progressed.round)
            if len(seen) == 3:
                os.kill(os.getpid(), signal.SIGINT)

        task = dataclasses.replace(build(s), rounds=rounds, eval_every=10)
        return dataclasses.replace(task, options={"callbacks": (press,)})

    experiment = make(build=patient, seeds=1, grid={"H": [1]})
    with pytest.raises(ExperimentInterrupted, match="0 of 1 runs"):
        quietly(experiment, tmp_path, together=together)
    (checkpoint,) = (tmp_path / "unfinished").iterdir()
    assert checkpoint.suffix == ".safetensors"
    reached = seen[-1]
    assert 0 < reached < rounds
    quietly(experiment, tmp_path, together=together)
    assert seen[3] > reached
    (done,) = load_report(tmp_path).runs
    np.testing.assert_array_equal(done.history["round"], np.arange(0, rounds + 1, 10))
    assert not (tmp_path / "unfinished").exists()
    quietly(experiment, tmp_path / "undisturbed", together=together)
    assert lines_without_seconds(tmp_path) == lines_without_seconds(tmp_path / "undisturbed")


@pytest.mark.parametrize("together", [False, True])
def test_a_run_that_diverges_is_kept_as_not_finite(tmp_path, together):
    experiment = make(parameters={"rounds": 400}, grid={"H": [2], "gamma": [3.0, 0.5]}, seeds=1, quick={})
    page = quietly(experiment, tmp_path, together=together)
    diverged, other = load_report(tmp_path).runs
    assert np.isnan(diverged.history["loss"][-1])
    assert diverged.history["round"][-1] == 400
    assert np.isfinite(diverged.history["loss"][:-1]).all()
    assert np.isfinite(other.history["loss"]).all()
    assert "not finite" in page.read_text()


def test_build_may_give_finished_runs(tmp_path):
    def exact(s):
        def line(label, value):
            return RunRecord(
                label, {"H": s.H}, s.seed, {"round": [0, 1], "x": [0.0, value]}, {}, 0.1, "closed form"
            )

        return [line("low", 1.0), line("high", 2.0)] if s.H == 1 else line("low", 3.0)

    quietly(make(build=exact, plots=(), table=TableSpec((Column("x"),))), tmp_path)
    table = load_report(tmp_path).table
    assert table.keys == ("label", "H")
    assert [(row.values, row.cells[0].mean) for row in table.rows] == [
        (("low", 1), 1.0),
        (("high", 1), 2.0),
        (("low", 2), 3.0),
    ]


def test_derived_series_join_the_history(tmp_path):
    def derived(s):
        return dataclasses.replace(build(s), derive=lambda r: {"steps": s.H * r.history["round"], "one": 1.0})

    quietly(make(build=derived), tmp_path)
    for found in load_report(tmp_path).runs:
        np.testing.assert_array_equal(found.history["steps"], found.setting["H"] * found.history["round"])
        assert (found.history["one"] == 1.0).all()


def test_arguments_that_do_not_fit_name_the_setting(tmp_path):
    with pytest.raises(ExperimentError, match=r"H=1: FedAvg: gamma must be a positive number.*, but is -1.0"):
        quietly(make().change({"gamma": -1}), tmp_path)


def test_new_axes_join_table_and_plots(experiment, tmp_path):
    quietly(experiment.change({"gamma": [0.25, 0.5]}), tmp_path)
    report = load_report(tmp_path)
    assert report.table.keys == ("H", "gamma")
    assert report.definition.plots[0].lines == ("H", "gamma")


def test_keys_that_no_run_has_leave_table_and_plots(tmp_path):
    wide = make(
        table=TableSpec((Column("x"),), rows=("label", "H", "beta"), across="rho"),
        plots=(PlotSpec("loss", lines=("H", "beta"), panels="rho"),),
    )
    quietly(wide, tmp_path)
    report = load_report(tmp_path)
    assert report.table.keys == ("label", "H")
    assert report.definition.plots[0].panels is None


def test_heat_maps_get_a_panel_for_a_new_axis(experiment, tmp_path):
    plot = PlotSpec("x", x="H", kind="heatmap", down="gamma")
    both = make(grid={"H": [1, 2], "gamma": [0.25, 0.5]}, parameters={"rounds": 2, "rho": 1.0}, plots=(plot,))
    quietly(both.change({"rho": [1.0, 2.0]}), tmp_path)
    assert load_report(tmp_path).definition.plots[0].panels == "rho"


CLAIMS = PaperClaims("The paper", claims=(Claim({"H": 1}, "x", 0.75),))


def test_claims_are_shown_only_for_the_papers_parameters(tmp_path):
    experiment = make(claims=CLAIMS)
    run_experiment(prepare(experiment), tmp_path / "same", progress=False)
    run_experiment(prepare(experiment, seeds=1), tmp_path / "seeds", progress=False)
    run_experiment(prepare(experiment, changes={"gamma": 0.25}), tmp_path / "other", progress=False)
    assert load_report(tmp_path / "same").definition.paper == CLAIMS
    assert load_report(tmp_path / "seeds").definition.paper == CLAIMS
    other = load_report(tmp_path / "other").definition
    assert other.paper is None
    assert "differ from the paper" in other.notes


def test_missing_data_falls_back(monkeypatch, tmp_path):
    monkeypatch.setattr("fedstrata.lab.experiments.runner.present", lambda name: name == "digits")
    parameters = {"data": "mnist", "rounds": 2, "gamma": 0.5}
    e = make(parameters=parameters, needs=("mnist",), fallback={"data": "digits", "rounds": 1})
    plan = prepare(e)
    assert plan.experiment.parameters == {"data": "digits", "rounds": 1, "gamma": 0.5}
    assert plan.changed
    assert "mnist is not on this machine" in plan.remarks[0]
    assert prepare(e, changes={"rounds": 5}).experiment.parameters["rounds"] == 5
    assert prepare(e, changes={"data": "digits"}).remarks == ()
    named = prepare(e, changes={"data": "mnist"})
    assert (named.experiment.parameters, named.remarks) == (parameters, ())
    assert prepare(make(parameters=parameters, needs=("mnist",))).experiment.parameters == parameters
    monkeypatch.setattr("fedstrata.lab.experiments.runner.present", lambda name: True)
    assert prepare(e) == PreparedExperiment(e)


def test_lines_without_a_terminal_bars_in_one(experiment, tmp_path):
    text = io.StringIO()
    run_experiment(experiment, tmp_path / "lines", console=Console(file=text, width=200))
    lines = text.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("[1/4] H=1, seed 0 (")
    assert "x 0.75  loss" in lines[0]
    text = io.StringIO()
    run_experiment(experiment, tmp_path / "lines", console=Console(file=text, width=200))
    assert text.getvalue() == "4 of 4 runs are already done.\n"
    text = io.StringIO()
    run_experiment(experiment, tmp_path / "bars", console=Console(file=text, width=200, force_terminal=True))
    assert "compiling" in text.getvalue()
    assert "4/4" in text.getvalue()


def test_stored_runs_are_readable_by_people(experiment, tmp_path):
    quietly(experiment, tmp_path)
    content = [json.loads(path.read_text()) for path in (tmp_path / "finished").iterdir()]
    assert sorted((c["setting"]["H"], c["seed"]) for c in content) == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_tasks_are_labelled_by_method(tmp_path):
    def two(s):
        method = {"fast": fs.FedAvg(1.0), "slow": fs.FedAvg(0.1)}[s.method]
        return dataclasses.replace(build_with(method), rounds=1)

    def build_with(method):
        data = fs.FederatedData.from_clients([{"a": np.ones((1, 1))}])
        return Task(
            fs.Minimization(lambda x, sample: (x - sample["a"]).sum() ** 2), method, data, np.zeros(1)
        )

    quietly(
        make(build=two, grid={"method": ["fast", "slow"]}, table=TableSpec((Column("loss"),)), seeds=1),
        tmp_path,
    )
    assert [(r.label, r.method, r.setting) for r in load_report(tmp_path).runs] == [
        ("fast", "FedAvg", {}),
        ("slow", "FedAvg", {}),
    ]


@pytest.mark.parametrize("together", [True, False])
def test_models_are_kept_where_that_is_asked_for(experiment, tmp_path, together):
    quietly(experiment, tmp_path, models=True, together=together)
    found = {}
    for folder in (tmp_path / "models").iterdir():
        kept = fs.Result.load(folder)
        H = int(folder.name.split("H=")[1].split("-")[0])
        assert f"seed{kept.seed}-" in folder.name
        found[H, kept.seed] = float(kept.x[0])
    assert found == pytest.approx(final(tmp_path))


def test_a_stored_run_without_its_model_is_told(experiment, tmp_path, solved):
    quietly(experiment, tmp_path)
    count = len(solved)
    with pytest.raises(ExperimentError, match="without --models, so its model was not kept"):
        quietly(experiment, tmp_path, models=True)
    assert len(solved) == count
    quietly(experiment, tmp_path, models=True, fresh=True)
    quietly(experiment, tmp_path, models=True)
    assert len(solved) == 2 * count
    quietly(experiment, tmp_path, fresh=True)  # a model beside another run's numbers would be wrong
    assert not (tmp_path / "models").exists()


def test_models_are_kept_with_the_preparation_of_their_data(tmp_path):
    data = fs.data.standardize([{"a": np.full((2, 1), a)} for a in (0.0, 2.0)], of=("a",))
    one = make(build=lambda s: dataclasses.replace(build(s), data=data), grid={"H": [1]}, seeds=1)
    quietly(one, tmp_path, models=True)
    (folder,) = (tmp_path / "models").iterdir()
    prepared = fs.data.Preparation.load(folder / "prepared.json")
    assert prepared.apply({"a": np.array([[1.0], [2.0]])})["a"].tolist() == [[0], [1]]
