"""What a result predicts, as it is and after it was saved."""

import csv

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import fedstrata as fs
from fedstrata.lab.cli import app


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(0)
    age, sex = rng.normal(50, 10, 90), rng.choice(["f", "m"], 90)
    ill = np.where(age + 5 * (sex == "m") > 52, "yes", "no")
    return pd.DataFrame({"site": rng.choice(["a", "b"], 90), "age": age, "sex": sex, "ill": ill})


@pytest.fixture(scope="module")
def data(table):
    return fs.data.standardize(
        fs.FederatedData.from_dataframe(table, by="site", label="ill", encode=True, valid_fraction=0.2)
    )


def solved(data, problem, method, x0, y0=None):
    return fs.solve(problem, method, data, x0, y0=y0, rounds=3, progress=False, certify=False)


@pytest.mark.parametrize("where", ["x", "lifted", "y"])
def test_a_saved_result_predicts_from_a_table(where, table, data, tmp_path):
    """The words of the label; the probabilities are the softmax of scores by hand."""
    model = fs.models.for_data("softmax", data)
    start = model.init(0)
    if where == "x":
        result = solved(data, fs.Minimization(model.loss), fs.FedAvg(0.5), start)
    elif where == "lifted":
        lifted = fs.dro.Lifted(start, np.log(2))
        result = solved(data, fs.dro.chi2(model.loss, 1.0, nonnegative=True), fs.FedDRO(0.1, 0.9), lifted)
    else:
        problem = fs.Bilevel(
            upper=lambda x, y, s: model.loss(y, s),
            lower=lambda x, y, s: model.loss(y, s) + x**2,
            same_samples=True,
        )
        result = solved(data, problem, fs.FedMSA(0.1, 0.1), np.zeros(()), start)
    result.save(tmp_path)
    loaded = fs.load(tmp_path)
    w = {"x": lambda: result.x, "lifted": lambda: result.x.x, "y": lambda: result.y}[where]()
    scores = data.preparation.apply(table)["x"] @ np.asarray(w["W"]) + np.asarray(w["b"])
    by_hand = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    for own in (result, loaded):
        np.testing.assert_allclose(own.predict_proba(table), by_hand, atol=1e-6)
        np.testing.assert_array_equal(own.predict(table), np.array(["no", "yes"])[scores.argmax(1)])


def test_saving_a_loaded_result_keeps_its_model(table, data, tmp_path):
    model = fs.models.for_data("linear", data, loss="logistic")
    result = solved(data, fs.Minimization(model.loss), fs.FedAvg(0.5), model.init(0))
    result.save(tmp_path / "a")
    fs.load(tmp_path / "a").save(tmp_path / "b")
    np.testing.assert_array_equal(fs.load(tmp_path / "b").predict(table), result.predict(table))
    with pytest.raises(fs.DataError, match=r"inputs of shape \[2, 9\]"):
        result.predict(np.zeros((2, 9)))
    # an array is taken as the model's inputs
    inputs = data.preparation.apply(table)["x"]
    np.testing.assert_array_equal(result.predict(inputs), result.predict(table))


def test_what_has_no_model_or_no_probabilities_says_so(data):
    result = solved(data, fs.Minimization(lambda x, s: (x - s["x"][0]) ** 2), fs.FedAvg(0.1), 0.0)
    with pytest.raises(ValueError, match="The result has no model"):
        result.predict(np.zeros((2, 3)))
    model = fs.models.for_data("softmax", data)  # on features that the loss changes, so not the table's own
    doubled = fs.Minimization(lambda x, s: model.loss(x, {**s, "x": 2 * s["x"]}))
    with pytest.raises(ValueError, match="The result has no model"):
        solved(data, doubled, fs.FedAvg(0.1), model.init(0)).predict(np.zeros((2, 3)))
    model = fs.models.linear(3)
    with pytest.raises(TypeError, match="no probabilities"):
        model.predict_proba(model.init(0), np.zeros((2, 3)))


def test_the_command_predicts_a_file(table, data, tmp_path):
    model = fs.models.for_data("softmax", data)
    result = solved(data, fs.Minimization(model.loss), fs.FedAvg(0.5), model.init(0))
    result.save(tmp_path / "models" / "one")
    file = tmp_path / "new.csv"
    with file.open("w", newline="") as opened:
        csv.writer(opened).writerows([["age", "sex"], *zip(table["age"], table["sex"], strict=True)])
    run = CliRunner().invoke(app, ["predict", str(tmp_path), str(file), "--proba"])
    assert run.exit_code == 0, run.output
    rows = list(csv.DictReader(run.output.splitlines()))
    assert [row["prediction"] for row in rows] == result.predict(table).tolist()
    np.testing.assert_allclose(
        [float(r["P(yes)"]) for r in rows], result.predict_proba(table)[:, 1], rtol=1e-5
    )
    result.save(tmp_path / "models" / "two")
    run = CliRunner().invoke(app, ["predict", str(tmp_path), str(file)])
    assert run.exit_code == 2
    assert "several models" in run.output
