"""TOML files: what they can say, what they are told when they say it wrong."""

import dataclasses
import re
import textwrap
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.engines.metrics import PerClient
from fedstrata.lab import ExperimentError
from fedstrata.lab.experiments.data import LOADERS, PARTITIONS
from fedstrata.lab.experiments.runner import prepare, run_experiment
from fedstrata.lab.experiments.toml import BY_CLIENT, METRICS, TESTED, File, define, keys_of, read
from fedstrata.lab.report import load_report
from fedstrata.models import MODELS, options
from fedstrata.problems.named import PROBLEMS

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


def test_a_name_alone_is_enough():
    content = {"title": "t", "data": "digits", "problem": "softmax", "methods": ["BiGSAM"]}
    with pytest.raises(ExperimentError, match="BiGSAM does not solve a Minimization"):
        define(content, "plain")
    e = define({**content, "problem": "selection"}, "plain")
    assert e.build(e.settings[0]).method == fs.BiGSAM()


def test_what_data_or_a_model_refuses_says_which_part(tmp_path):
    e = read(written(tmp_path, change("limit = 200", "limit = 0")))
    with pytest.raises(ExperimentError, match="data: limit must be a whole number"):
        e.build(e.settings[0])
    e = read(written(tmp_path, change("lam = 1e-3", "lam = -1.0")))
    with pytest.raises(ExperimentError, match=r"problem\.model: softmax: lam must be"):
        e.build(e.settings[0])


def test_a_fixed_seed_of_the_data_is_the_same_split(tmp_path):
    e = read(written(tmp_path, change("clients = 4", "clients = 4\nseed = 7")))
    assert len({id(e.build(s).data) for s in e.settings}) == 1


def test_a_file_runs(tmp_path):
    run_experiment(prepare(read(written(tmp_path)), quick=True), tmp_path / "out", progress=False)
    report = load_report(tmp_path / "out")
    assert report.table.keys == ("label", "mu")
    assert [row.values for row in report.table.rows] == [("FedAvg", None), ("pulled", 0.5), ("pulled", 1.0)]
    assert {"loss", "accuracy"} <= report.runs[0].history.keys()


@pytest.mark.parametrize("model", ["softmax", "logistic", "relu_network", "mlp"])
def test_a_model_alone_is_its_minimisation(model):
    task = posed({"name": model}, [{"name": "FedAvg", "gamma": 0.1}])
    assert isinstance(task.problem, fs.Minimization)
    result = fs.solve(
        task.problem, task.method, task.data, task.x0, rounds=1, metrics=task.metrics, progress=False
    )
    assert set(METRICS) < result.history.keys()
    assert result.history["loss"][1] < result.history["loss"][0]


def posed(problem, methods, **more):
    content = {"title": "t", "data": {"name": "breast_cancer", "clients": 2}, "problem": problem, **more}
    experiment = define({**content, "methods": methods}, "posed")
    return experiment.build(experiment.settings[0])


def logistic_losses(w, data):
    """A plain computation of every sample's loss."""
    signs = 2.0 * data["y"] - 1.0
    return np.logaddexp(0, -signs * (data["x"] @ np.asarray(w, float)))


def sample(part, j):
    return {name: values[j] for name, values in part.items()}


W = np.linspace(-0.5, 0.5, 30)
VALID = {"data": {"name": "breast_cancer", "clients": 2, "valid_fraction": 0.2}}
SERVER = {"data": {"name": "breast_cancer", "clients": 2, "server_fraction": 0.2}}


def test_regularisation_is_its_formula():
    problem = {"name": "regularisation", "model": "logistic", "start": 0.5}
    task = posed(problem, [{"name": "FedMSA", "alpha": 1.0, "beta": 0.1}], **VALID)
    np.testing.assert_allclose(np.exp(task.x0), [0.5, 0.5], rtol=1e-6)
    x, data = np.log([0.2, 0.6]), task.data
    losses = logistic_losses(W, data.train)
    for j in (0, len(losses) - 1):  # of the first and the last client
        expected = losses[j] + [0.2, 0.6][data.train["client"][j]] / 2 * W @ W
        assert float(task.problem.lower(x, W, sample(data.train, j))) == pytest.approx(expected, rel=1e-5)
    valid = sample(data.valid, 3)
    assert float(task.problem.upper(x, W, valid)) == pytest.approx(logistic_losses(W, valid), rel=1e-5)
    common = posed({**problem, "per": "all"}, [{"name": "FedMSA", "alpha": 1.0, "beta": 0.1}], **VALID)
    assert np.shape(common.x0) == ()


def measured(task, x, y=None):
    """The problem's own metrics, as `solve` has them in its history."""
    placed = task.data.placed()

    def mean(function, *args, part="train", **more):
        return placed.mean(function, *args, shares=placed.shares("uniform"), part=part)

    return {name: float(value) for name, value in task.problem.measure(mean, x, y).items()}


def by_client(data, values):
    return np.array([values[data.offsets[i] :][: data.sizes[i]].mean() for i in range(data.clients)])


@pytest.mark.slow
def test_robust_problems_are_their_formulas():
    model = {"name": "logistic"}
    fedmsa = [{"name": "FedMSA", "alpha": 0.1, "beta": 0.1}]
    task = posed({"name": "robust", "model": model, "risk": "kl", "lam": 0.7}, fedmsa)
    losses = logistic_losses(W, task.data.train)
    expected = 0.7 * np.log(by_client(task.data, np.exp(losses / 0.7)).mean())
    assert measured(task, W)["objective"] == pytest.approx(expected, rel=1e-5)
    task = posed({"name": "client_robust", "model": model, "lam": 0.1}, fedmsa)
    own = by_client(task.data, losses)
    expected = 0.1 * np.log(np.exp(own / 0.1).mean())
    assert measured(task, W)["objective"] == pytest.approx(expected, rel=1e-5)
    assert isinstance(task.metrics["client_loss"], PerClient)
    dual = posed({"name": "client_robust", "model": model, "lam": 0.1, "form": "minimax"}, fedmsa)
    q = np.exp(own / 0.1) / np.exp(own / 0.1).sum()  # where the payoff is largest, it is the objective
    assert measured(dual, W, jnp.asarray(q))["payoff"] == pytest.approx(expected, rel=1e-5)
    lifted = posed({"name": "robust", "model": model, "risk": "cvar", "level": 0.1}, fedmsa)
    assert isinstance(lifted.problem, fs.Composition)
    accuracy = lifted.metrics["accuracy"](lifted.problem.start_x(W), None, lifted.data.placed())
    right = (lifted.data.test["x"] @ W > 0) == lifted.data.test["y"]
    assert float(accuracy) == pytest.approx(right.mean())


def test_selection_and_personal_models_are_their_formulas():
    task = posed({"name": "selection", "model": "logistic"}, [{"name": "BiGSAM"}])
    found = measured(task, W)
    assert found["primary"] == pytest.approx(by_client(task.data, logistic_losses(W, task.data.train)).mean())
    assert found["secondary"] == pytest.approx(W @ W / 2)
    problem = {"name": "personalised", "model": "logistic", "mu": 0.4, "lam": 3.0}
    task = posed(problem, [{"name": "ZOHFL", "gamma": 0.1, "eta": 0.1}], **SERVER)
    first = sample(task.data.train, 0)
    expected = logistic_losses(2 * W, first) + 3 / 2 * W @ W
    assert float(task.problem.client(W, 2 * W, first)) == pytest.approx(expected, rel=1e-5)
    assert float(task.problem.coupling(W, 2 * W)) == pytest.approx(0.4 / 2 * W @ W)


@pytest.mark.slow
def test_metrics_of_each_client():
    """Of a hospital's own test patients at the start, where all scores are 0 and nobody is called ill."""
    content = {
        "title": "t",
        "data": {"name": "heart"},
        "problem": {"name": "minimisation", "model": {"name": "linear", "loss": "logistic"}},
        "methods": [{"name": "FedAvg", "gamma": 0.1}],
        "metrics": ["client_loss", "client_test_accuracy"],
    }
    e = define(content, "each")
    assert [c.metric for c in e.table.columns][:5] == [
        "loss",
        "client_loss",
        "client_loss/worst",
        "client_test_accuracy",
        "client_test_accuracy/worst",
    ]
    task = first_task(e)
    history = fs.solve(
        task.problem, task.method, task.data, task.x0, rounds=1, metrics=task.metrics, progress=False
    ).history
    well = [1 - task.data.test["y"][task.data.test["client"] == i].mean() for i in range(4)]
    assert history["client_test_accuracy/worst"][0] == pytest.approx(min(well), rel=1e-5)
    assert history["client_loss/worst"][0] == pytest.approx(np.log(2), rel=1e-5)


def test_who_adapts_moves_along_the_score():
    problem = {"name": "strategic", "model": "logistic", "cost": 4.0}
    task = posed(problem, [{"name": "FedRZOTwoStage", "gamma": 0.1, "eta": 0.1}])
    first = sample(task.data.train, 0)
    moved = {**first, "x": first["x"] + W / 4}
    np.testing.assert_allclose(task.problem.solution(W, first), W / 4, rtol=1e-6)
    np.testing.assert_allclose(task.problem.follower(W, W / 4, first), 0, atol=1e-6)
    leader = float(task.problem.leader(W, W / 4, first))
    assert leader == pytest.approx(logistic_losses(W, moved), rel=1e-5)


def test_means_variances_and_the_model_wait_for_each_other():
    problem = {"name": "standardised", "model": "logistic"}
    task = posed(problem, [{"name": "FedMSA", "alpha": 0.1, "beta": 0.1}])
    train = task.data.train
    mean, variance = train["x"].mean(0), train["x"].var(0)
    for S, before, z in zip(task.problem.S, (W, mean), (mean, variance), strict=True):
        found = jax.vmap(S, (None, None, 0))(before, z, train).mean(0)
        np.testing.assert_allclose(found, 0, atol=1e-5)
    scaled = {**train, "x": (train["x"] - mean) / np.sqrt(np.maximum(variance, 0.01))}
    P = jax.vmap(task.problem.P, (None, None, 0))(W, (mean, variance), train).mean(0)
    signs = 2.0 * np.asarray(train["y"]) - 1
    slopes = -signs / (1 + np.exp(signs * (np.asarray(scaled["x"]) @ np.asarray(W))))
    np.testing.assert_allclose(P, (slopes[:, None] * scaled["x"]).mean(0), atol=1e-5)


def test_wrong_labels_are_as_many_as_asked_for():
    problem = {"name": "hypercleaning", "model": "softmax", "noise": 0.4}
    task = posed(problem, [{"name": "FedMSA", "alpha": 1.0, "beta": 0.1}], **VALID)
    plain = posed({"name": "softmax"}, [{"name": "FedAvg", "gamma": 0.1}], **VALID).data.train["y"]
    wrong = task.data.train["y"] != plain
    np.testing.assert_array_equal(task.data.train["clean"], ~wrong)
    assert abs(wrong.mean() - 0.4) < 0.1
    assert task.x0.shape == plain.shape
    tuned = posed({"name": "loss_tuning"}, [{"name": "FedMSA", "alpha": 1.0, "beta": 0.1}], **VALID)
    labels, weight = tuned.data.valid["y"], tuned.data.valid["weight"]
    np.testing.assert_allclose([weight[labels == c].sum() for c in (0, 1)], labels.size / 2, rtol=1e-5)


def test_options_that_are_methods_schedules_and_optimisers():
    import optax

    problem = {"name": "regularisation", "model": "logistic"}
    lower = {
        "name": "FedAvg",
        "gamma": {"name": "exponential_decay", "init_value": 0.3, "transition_steps": 1, "decay_rate": 0.5},
    }
    method = {"name": "FedRZOBilevel", "gamma": 1.0, "eta": 0.1, "lower": lower, "lower_rounds": 3}
    found = posed(problem, [method], **VALID).method.lower
    assert isinstance(found, fs.FedAvg)
    assert float(found.gamma(1)) == pytest.approx(0.15)
    adam = {
        "name": "FedOpt",
        "client": {"name": "sgd", "learning_rate": 0.1},
        "server": {"name": "adam", "learning_rate": 0.1},
    }
    first, second = (posed({"name": "softmax"}, [adam]).method for _ in range(2))
    assert isinstance(first.server, optax.GradientTransformation)
    assert first == second  # the same program
    stages = posed({"name": "selection"}, [{"name": "SequentialRegularization", "eta": [1.0, 0.1]}])
    np.testing.assert_allclose(stages.method.eta, [1.0, 0.1])


def test_a_key_reaches_only_what_it_is_of():
    """Methods, the model and the problem may have options of the same name."""
    methods = [{"name": "BiGSAM"}, {"name": "IPIRFedAvg", "gamma": 0.5, "lam": 0.1}, {"name": "StRFedAvg"}]
    content = {"title": "t", "data": {"name": "breast_cancer", "clients": 2}, "methods": methods}
    e = define(
        {**content, "problem": {"name": "selection", "model": {"name": "logistic", "lam": 0.25}}}, "keys"
    )
    assert e.parameters["lam"] == 0.25
    assert e.parameters["IPIRFedAvg.lam"] == 0.1
    tasks = [e.build(s) for s in e.change({"seeds": 1}).settings]
    assert tasks[2].method == fs.StRFedAvg()
    assert tasks[1].method == fs.IPIRFedAvg(gamma=0.5, lam=0.1)
    first = sample(tasks[0].data.train, 0)
    expected = logistic_losses(W, first) + 0.25 / 2 * W @ W
    assert float(tasks[0].problem.h.loss(W, first)) == pytest.approx(expected, rel=1e-5)
    robust = {"name": "client_robust", "model": {"name": "logistic", "lam": 0.25}}
    e = define(
        {**content, "problem": robust, "methods": [{"name": "FedDRO", "eta": 0.1, "beta": 0.5}]}, "keys"
    )
    assert "lam" not in e.parameters
    assert e.parameters["model.lam"] == 0.25
    changed = e.change({"model.lam": 0.5, "seeds": 1})
    problem = changed.build(changed.settings[0]).problem
    assert problem.lam == 0.1
    assert float(problem.loss(W, first)) == pytest.approx(logistic_losses(W, first) + 0.25 * W @ W, rel=1e-5)


def test_a_grid_may_be_one_methods_own(tmp_path):
    grid = change("mu = [0.5, 1.0]", 'mu = [1.0]\n    "FedAvg.gamma" = [0.1, 0.7]')
    e = read(written(tmp_path, grid)).change({"seeds": 1})
    assert [e.build(s).method.gamma for s in e.settings] == [0.1, 0.7, 0.2]
    e = read(written(tmp_path, change("mu = [0.5, 1.0]", "gamma = [0.4, 0.7]"))).change({"seeds": 1})
    assert [e.build(s).method.gamma for s in e.settings] == [0.4, 0.7] * 2


def test_a_grid_of_another_part_says_nothing_of_a_method():
    methods = [{"name": "IPIRFedAvg", "gamma": 0.1, "lam": 0.1}]
    content = {"title": "t", "data": "digits", "problem": "selection", "methods": methods}
    e = define({**content, "grid": {"lam": [0.0, 0.1]}}, "grid")  # the model's, which may be 0
    assert [s.lam for s in e.change({"seeds": 1}).settings] == [0.0, 0.1]
    assert e.build(e.settings[0]).method == fs.IPIRFedAvg(gamma=0.1, lam=0.1)


EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "toml").glob("*.toml"))


def test_every_class_has_an_example():
    kinds = {type(task.problem).__mro__[0] for file in EXAMPLES for task in [first_task(read(file))]}
    found = {base for kind in kinds for base in kind.__mro__}
    assert {
        fs.Minimization,
        fs.Bilevel,
        fs.Minimax,
        fs.Composition,
        fs.Selection,
        fs.Personalized,
        fs.MPEC,
        fs.MultiSequence,
    } <= found


def first_task(experiment):
    return experiment.build(experiment.settings[0])


@pytest.mark.slow
@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_examples_run_and_get_better(file, tmp_path):
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore",
            "StRFedAvg: (the primary loss curves|the rule 'strongly_convex')|BiGSAM|FedRZOBilevel: ",
            UserWarning,
        )
        e = prepare(read(file), quick=True)
        run_experiment(e, tmp_path, progress=False)
    measure = e.experiment.plots[0].y
    for run in load_report(tmp_path).runs:
        assert run.history[measure][-1] < run.history[measure][0], run.label


@pytest.mark.slow
def test_the_smallest_model_is_the_pseudo_inverse():
    """Of the example on collinear columns: least squares with the clients' weights, by NumPy."""
    (file,) = [file for file in EXAMPLES if file.stem == "selection"]
    e = read(file)
    (setting,) = [s for s in e.settings if s.method == "StRFedAvg" and s.seed == 0]
    task = e.build(setting)
    data = task.data
    root = np.sqrt(np.repeat(1 / (data.clients * data.sizes), data.sizes))
    U = np.column_stack([data.train["x"], np.ones(len(root))])
    w = np.linalg.lstsq(root[:, None] * U, root * data.train["y"], rcond=1e-6)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        result = fs.solve(
            task.problem, task.method, data, task.x0, rounds=2000, eval_every=2000, progress=False
        )
    found = np.append(result.x["W"][:, 0], result.x["b"])
    np.testing.assert_allclose(found, w, atol=0.02 * np.abs(w).max())


def test_the_page_names_every_key():
    page = (Path(__file__).parents[2] / "docs" / "toml.md").read_text("utf-8")
    words = set(re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", page, flags=re.DOTALL)))
    for name, named in PROBLEMS.items():
        assert {name, *keys_of(name), *named.metrics, *BY_CLIENT, *TESTED} <= words, name
    for name in MODELS:
        assert {name, *options(name)} <= words, name
    for name in PARTITIONS:
        assert {name, *(f.name for f in dataclasses.fields(PARTITIONS[name]))} <= words, name
    assert {*File.model_fields, *LOADERS} <= words


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
        ("title = ", "is not valid TOML"),
        (change('title = "Two methods"', ""), "title: Field required"),
        (
            change("rounds = 3", "round = 3"),
            r"unknown name 'round'\. Did you mean 'rounds'.*\? There are title, .* rounds",
        ),
        (change("rounds = 3", "rounds = 0"), "rounds: Input should be greater than or equal to 1"),
        (
            change('"digits"', '"digit"'),
            r"data: unknown name 'digit'\. Did you mean 'digits'\? There are digits, ",
        ),
        (change("limit", "limits"), r"data: digits has no 'limits'\. Did you mean 'limit'"),
        (change('"Dirichlet"', '"Dirichle"'), "data.partition: unknown name 'Dirichle'"),
        (change("min_size", "size"), "data.partition: Dirichlet has no 'size'"),
        (change('"softmax"', '"softmin"'), "problem: unknown name 'softmin'"),
        (change('name = "FedAvg"', ""), "methods: the entry name is missing. There are "),
        (
            change('"softmax"', '"Bilevel"'),
            "problem: unknown name 'Bilevel'.* Bilevel is a class of problems: regularisation, hyper",
        ),
        (
            change('"softmax"', '"linear"\n    loss = "logistics"'),
            "problem.model: Unknown loss 'logistics'. Did you mean 'logistic'",
        ),
        (
            change("limit = 200", 'limit = 200\n    valid_fraction = "some"'),
            "data: valid_fraction must be a valid number",
        ),
        (
            change('{ name = "Dirichlet", alpha = 0.5, min_size = 5 }', "3"),
            "data.partition: must be a table with a name, .* but is 3",
        ),
        (change("lam =", "lambda ="), r"problem.model: softmax has no 'lambda'\. Did you mean 'lam'"),
        (change('"FedAvg"', '"FedAverage"'), "methods: unknown name 'FedAverage'. Did you mean 'FedAvg'"),
        (
            change('"FedAvg"', '"FedMSA"'),
            "FedMSA does not solve a Minimization, which minimisation is, but MultiSequence, Bilevel, "
            "Minimax or Composition. Problems for it are regularisation, .* Methods for this problem are AFL",
        ),
        (change('"softmax"', '"softmax"\n    model = "mlp"'), "problem: 'softmax' is a model already"),
        (
            change('"softmax"\n    lam', '"regularisation"\n    start'),
            "needs validation samples: give valid_fraction",
        ),
        (
            change('"softmax"\n    lam', '"personalised"\n    lam'),
            "needs samples of the server's own: give server_f",
        ),
        (
            change('"softmax"\n    lam', '"robust"\n    form = "minmax"\n    lam'),
            "problem: form must be 'composition' or 'minimax', but is 'minmax'",
        ),
        (
            change('"softmax"\n    lam', '"robust"\n    model = "mpl"\n    lam'),
            "problem.model: unknown name 'mpl'. Did",
        ),
        (
            change('"softmax"\n    lam', '"strategic"\n    model = "mlp"\n    cost'),
            "problem.model: strategic takes logistic or linear, not mlp",
        ),
        (
            change("clients = 4", "").replace('"digits"', '"heart"').replace("limit = 200", ""),
            "data: heart is already divided into clients: leave partition out",
        ),
        (change("gamma = 0.1", "gama = 0.1"), r"FedAvg has no argument 'gama'\. Did you mean 'gamma'"),
        (change("gamma = 0.1", "gamma = -0.1"), "FedAvg: gamma must be a positive number"),
        (change("gamma = 0.1", ""), "FedAvg needs gamma"),
        (change('label = "pulled"', 'label = "FedAvg"'), "two are called 'FedAvg'"),
        (
            change('["accuracy"]', '["accurate"]'),
            "metrics: unknown name 'accurate'. Did you mean 'accuracy'.* There are accuracy, test_loss, ",
        ),
        (change("mu = [0.5", "nu = [0.5"), r"grid: unknown key 'nu'\. Did you mean 'mu'"),
        (change("mu = [0.5, 1.0]", "mu = []"), "no value of 'mu'"),
        (change("mu = [0.5, 1.0]", "mu = [0.5, -1.0]"), "FedProx: mu must be a number ≥ 0"),
        (FILE + "\n    [quick]\n    round = 1\n", "quick: .*no 'round'"),
    ],
)
def test_mistakes_are_named(tmp_path, text, message):
    with pytest.raises(ExperimentError, match=message):
        read(written(tmp_path, text))


def test_all_mistakes_are_told_at_once(tmp_path):
    text = (
        change("limit = 200", "limits = 200").replace("lam =", "lambda =").replace('"FedAvg"', '"FedAverage"')
    )
    text = text.replace("seeds = 2", "seeds = 0").replace("mu = 1.0", "mu = -1.0")
    with pytest.raises(ExperimentError) as told:
        read(written(tmp_path, text))
    for words in ("seeds: ", "'limits'", "'lambda'", "'FedAverage'"):
        assert words in str(told.value)


def test_tables_of_ones_own(tmp_path):
    for name, rows in (("north", "50,m,no 40,f,yes 61,m,no 35,f,yes"), ("south", "70,m,no 20,f,yes")):
        (tmp_path / f"{name}.csv").write_text("age,sex,ill\n" + rows.replace(" ", "\n") + "\n")
    data = {
        "name": "csv",
        "files": f"{tmp_path}/*.csv",
        "target": "ill",
        "encode": True,
        "test_fraction": 0.5,
    }
    methods = [{"name": "FedAvg", "gamma": 0.1}]
    content = {"title": "Own", "data": data, "problem": "logistic", "methods": methods}
    e = define(content, "own")
    made = e.build(e.settings[0]).data
    assert made.names == ("north", "south")
    assert made.preparation.features == ("age", "sex=f", "sex=m")
    assert made.sizes.tolist() == [2, 1]
    np.testing.assert_allclose(made.train["x"].mean(axis=0), 0, atol=1e-6)
    text = 'title = "Own"\nproblem = "logistic"\n[data]\nname = "csv"\nfiles = "*.csv"\ntarget = "ill"\n'
    text += 'encode = true\n[[methods]]\nname = "FedAvg"\ngamma = 0.1\n'
    e = read(written(tmp_path, text))  # wherever it is read from
    assert e.build(e.settings[0]).data.names == ("north", "south")
    own = text.replace('"logistic"', '"personalised"').replace('"FedAvg"\n', '"ZOHFL"\neta = 0.1\n')
    own = own.replace("encode", 'server = "south.csv"\nencode')
    e = read(written(tmp_path, own.replace('"*.csv"', '["north.csv"]')))
    assert first_task(e).data.server["y"].tolist() == [0, 1]
    with pytest.raises(ExperimentError, match=r"rounds: .*\n.*unknown name 'titel'"):  # both, at once
        read(written(tmp_path, 'titel = "x"\nrounds = "many"\n' + text))
    del data["target"]
    e = define(content, "own")
    with pytest.raises(ExperimentError, match=r"data: csv needs files, .* and target"):
        e.build(e.settings[0])
