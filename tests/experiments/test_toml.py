"""TOML files: what they can say, what they are told when they say it wrong."""

import textwrap

import pytest

import fedstrata as fs
from fedstrata.experiments import ExperimentError
from fedstrata.experiments.runner import prepare, run_experiment
from fedstrata.experiments.toml import METRICS, define, read
from fedstrata.models import MODELS
from fedstrata.report import load_report

FILE = """
    title = "Two methods"
    rounds = 3
    seeds = 2
    metrics = ["accuracy"]

    [data]
    name = "digits"
    clients = 4
    partition = { name = "Dirichlet", alpha = 0.5, min_size = 5 }
    limit = 200

    [problem]
    name = "softmax"
    lam = 1e-3

    [[methods]]
    name = "FedAvg"
    gamma = 0.1
    H = 2

    [[methods]]
    name = "FedProx"
    label = "pulled"
    gamma = 0.2
    mu = 1.0
    H = 2

    [grid]
    mu = [0.5, 1.0]
"""


def written(tmp_path, text=FILE, name="Two methods.toml"):
    file = tmp_path / name
    file.write_text(textwrap.dedent(text))
    return file


def change(old, new):
    assert old in FILE
    return FILE.replace(old, new)


def test_a_file_is_an_experiment(tmp_path):
    e = read(written(tmp_path))
    assert e.name == "two-methods"
    cells = [(s.method, s.mu) for s in e.change({"seeds": 1}).settings]
    assert cells == [("FedAvg", None), ("pulled", 0.5), ("pulled", 1.0)]
    assert e.parameters == {
        "rounds": 3,
        "eval_every": 1,
        "participation": 1.0,
        "clients": 4,
        "alpha": 0.5,
        "min_size": 5,
        "limit": 200,
        "lam": 1e-3,
        "FedAvg.gamma": 0.1,
        "pulled.gamma": 0.2,
        "H": 2,
    }


def test_a_setting_becomes_the_task_that_the_file_says(tmp_path):
    e = read(written(tmp_path)).change({"clients": 3, "pulled.gamma": 0.3, "participation": 0.5, "H": 4})
    tasks = {(s.method, s.mu, s.seed): e.build(s) for s in e.settings}
    assert tasks["FedAvg", None, 0].method == fs.FedAvg(gamma=0.1, H=4)
    assert tasks["pulled", 0.5, 1].method == fs.FedProx(gamma=0.3, mu=0.5, H=4)
    assert {t.data.clients for t in tasks.values()} == {3}
    assert {t.participation for t in tasks.values()} == {0.5}
    assert tasks["pulled", 0.5, 0].data is tasks["pulled", 1.0, 0].data
    assert tasks["pulled", 0.5, 0].data is not tasks["pulled", 0.5, 1].data
    assert tasks["FedAvg", None, 0].problem == tasks["pulled", 0.5, 1].problem


def test_a_fixed_seed_of_the_data_is_the_same_split(tmp_path):
    e = read(written(tmp_path, change("clients = 4", "clients = 4\nseed = 7")))
    assert len({id(e.build(s).data) for s in e.settings}) == 1


def test_a_file_runs(tmp_path):
    run_experiment(prepare(read(written(tmp_path)), quick=True), tmp_path / "out", progress=False)
    report = load_report(tmp_path / "out")
    assert report.table.keys == ("label", "mu")
    assert [row.values for row in report.table.rows] == [("FedAvg", None), ("pulled", 0.5), ("pulled", 1.0)]
    assert {"loss", "accuracy"} <= report.runs[0].history.keys()


@pytest.mark.parametrize("problem", sorted(MODELS.keys() - {"cnn", "resnet", "resnet20", "linear"}))
def test_every_problem_can_be_posed(problem):
    content = {
        "title": "t",
        "data": {"name": "breast_cancer", "clients": 2},
        "problem": {"name": problem},
        "methods": [{"name": "FedAvg", "gamma": 0.1}],
    }
    task = define(content, "posed").build(define(content, "posed").settings[0])
    result = fs.solve(
        task.problem, task.method, task.data, task.x0, rounds=1, metrics=task.metrics, progress=False
    )
    assert set(METRICS) < result.history.keys()
    assert result.history["loss"][1] < result.history["loss"][0]


def test_labels_that_are_numbers_have_no_accuracy():
    content = {
        "title": "t",
        "data": {"name": "breast_cancer", "clients": 2},
        "problem": {"name": "linear"},
        "methods": [{"name": "FedAvg", "gamma": 0.1}],
    }
    experiment = define(content, "numbers")
    with pytest.raises(ExperimentError, match=r"this linear has no 'accuracy'.*metrics = \['test_loss'\]"):
        experiment.build(experiment.settings[0])
    experiment = define({**content, "metrics": ["test_loss"]}, "numbers")
    assert experiment.build(experiment.settings[0]).metrics.keys() == {"test_loss"}


def test_tables_and_plots_can_be_given(tmp_path):
    extra = """
    [table]
    columns = [{ metric = "accuracy", better = "high", format = ".1%" }]
    rows = ["label", "mu"]

    [[plots]]
    y = "accuracy"
    x = "bytes_up"

    [quick]
    rounds = 2
    """
    e = read(written(tmp_path, FILE + extra))
    assert e.table.columns[0].format == ".1%"
    assert [plot.x for plot in e.plots] == ["bytes_up"]
    assert e.quick == {"rounds": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("title = ", "is no TOML"),
        (change('title = "Two methods"', ""), "title: Field required"),
        (
            change("rounds = 3", "round = 3"),
            "round: Extra inputs are not permitted; known keys are title, .* rounds",
        ),
        (change("rounds = 3", "rounds = 0"), "rounds: Input should be greater than or equal to 1"),
        (
            change('"digits"', '"digit"'),
            r"data: there is no 'digit'\. Did you mean 'digits'\? There are digits, ",
        ),
        (change("limit", "limits"), r"data: digits has no 'limits'\. Did you mean 'limit'"),
        (change('"Dirichlet"', '"Dirichle"'), "data.partition: there is no 'Dirichle'"),
        (change("min_size", "size"), "data.partition: Dirichlet has no 'size'"),
        (change('"softmax"', '"softmin"'), "problem: there is no 'softmin'"),
        (change("lam =", "lambda ="), r"problem: softmax has no 'lambda'\. Did you mean 'lam'"),
        (change('"FedAvg"', '"FedAverage"'), "methods: there is no 'FedAverage'. Did you mean 'FedAvg'"),
        (change('"FedAvg"', '"FedMSA"'), "methods: there is no 'FedMSA'"),
        (change("gamma = 0.1", "gama = 0.1"), r"FedAvg: FedAvg has no 'gama'\. Did you mean 'gamma'"),
        (change("gamma = 0.1", "gamma = -0.1"), "FedAvg: gamma must be a positive number"),
        (change("gamma = 0.1", ""), "FedAvg missing 1 required positional argument: 'gamma'"),
        (change('label = "pulled"', 'label = "FedAvg"'), "two are called 'FedAvg'"),
        (
            change('["accuracy"]', '["accurate"]'),
            "metrics: there is no 'accurate'; there are accuracy, test_loss",
        ),
        (change("mu = [0.5", "nu = [0.5"), r"grid: nothing is called 'nu'\. Did you mean 'mu'"),
        (change("mu = [0.5, 1.0]", "mu = []"), "no value of 'mu'"),
        (FILE + "\n    [quick]\n    round = 1\n", "quick: .*no 'round'"),
    ],
)
def test_mistakes_are_named(tmp_path, text, message):
    with pytest.raises(ExperimentError, match=message):
        read(written(tmp_path, text))
