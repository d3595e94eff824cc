"""The demo: its methods reach the exact answers, and its first sentence says what the numbers allow."""

import numpy as np
import pytest

import fedstrata as fs
from fedstrata.lab.experiments import demo
from fedstrata.lab.experiments.base import Setting
from fedstrata.lab.report import RunRecord


def solved(method):
    task = demo.build(Setting(demo.EXPERIMENT.parameters, {"method": method}, seed=0))
    options = {"y0": task.y0, "rounds": task.rounds, "eval_every": task.rounds, "metrics": task.metrics}
    return fs.solve(task.problem, task.method, task.data, task.x0, progress=False, **options), task


def parts(name):
    return [demo.part(demo.hospitals(0), i, name) for i in range(demo.M)]


def validation(lam):
    y = demo.trained(parts("train"), lam)
    return np.mean([np.logaddexp(0, -v * (U @ y)).mean() for U, v in parts("valid")])


def test_the_exact_model_is_a_stationary_point():
    for lam in (0.01, 1.0):
        y = demo.trained(parts("train"), lam)
        g = np.append(lam * y[:-1], 0.0)
        for U, v in parts("train"):
            g -= U.T @ (v / (1 + np.exp(v * (U @ y)))) / len(v) / demo.M
        np.testing.assert_allclose(g, 0, atol=1e-9)


@pytest.mark.parametrize(
    ("method", "gap"), [("FedMSA", 1e-4), pytest.param("FedRZOBilevel", 4e-3, marks=pytest.mark.slow)]
)
def test_one_model_for_all_is_regularised_as_validation_finds_best(method, gap):
    _, best = demo.validated(parts("train"), parts("valid"))
    assert validation(1.0) - best > 0.02  # where they start
    result, _ = solved(method)
    assert validation(float(np.exp(result.x).mean())) - best < gap


@pytest.mark.slow
def test_alone_is_what_each_hospital_finds_by_itself():
    result, task = solved("alone")
    for i in range(demo.M):
        train, valid = demo.part(task.data, i, "train"), demo.part(task.data, i, "valid")
        lam, _ = demo.validated([train], [valid])
        np.testing.assert_allclose(np.exp(result.x[i]), lam, rtol=0.05)
        np.testing.assert_allclose(result.y[i], demo.trained([train], lam), atol=0.02)
    more = task.derive(result)
    assert sum(more[f"won, {name}"] + more[f"lost, {name}"] for name in demo.NAMES) <= 1
    assert more["uploaded"].max() == 0
    assert sum(more[f"patients, {name}"] for name in demo.NAMES) == len(task.data.test["y"])


def test_the_fair_model_lowers_the_largest_loss():
    def largest(y):
        return max(np.logaddexp(0, -v * (U @ y)).mean() for U, v in parts("train"))

    result, _ = solved("AFL")
    assert largest(np.asarray(result.x, float)) < largest(demo.trained(parts("train"), 0.03)) - 0.02
    np.testing.assert_allclose(result.y.sum(), 1, rtol=1e-5)


def run(label, seed, won, lost, patients, accuracy=0.8):
    history = {"round": [0]}
    for i, name in enumerate(demo.NAMES):
        numbers = {"won": won[i], "lost": lost[i], "patients": patients[i]}
        history |= {f"{what}, {name}": [n] for what, n in numbers.items()} | {name: [accuracy]}
    return RunRecord(label, {}, seed, history, {}, 0.0, "FedMSA")


def test_gains_are_counted_patient_by_patient():
    label = demo.LABELS["FedMSA"]
    runs = [run(label, s, (9, 1, 0, 2), (1, 1, 0, 10), (50, 50, 20, 50)) for s in (0, 1)]
    runs.append(run(label, 5, (50,) * 4, (0,) * 4, (50,) * 4))  # the same patients again
    first, second, third, fourth = demo.gains(runs, label)
    # 18 won and 2 lost of 100: (18.5 − 2.5)/102 ± 1.96 √(21 − 16²/102)/102.
    np.testing.assert_allclose(first[1:], [0.16, 0.15686 - 0.08261, 0.15686 + 0.08261], atol=1e-4)
    assert second.mean == third.mean == 0
    assert fourth.high < 0
    text = demo.findings(runs)
    first = "Against what each hospital learns alone, **one for all (FedMSA)** "
    assert text.partition("\n\n")[0] == f"{first}gains in Cleveland and loses in Zurich."
    assert "the patients of 2 of 5 folds tested" in text
    assert "gains in Cleveland +16.0 points (95 % interval +7.4 to +23.9)" in text
    assert "loses in Zurich −16.0 points" in text
    assert "elsewhere no difference is beyond chance (Hungary +0.0, Long Beach +0.0)" in text


@pytest.mark.parametrize(
    ("won", "words"), [(9, "gains in Cleveland"), (1, "makes no difference beyond chance")]
)
def test_what_is_not_there_is_not_said(won, words):
    """No hospital loses, and none gains: in each case there is a sentence without them."""
    label = demo.LABELS["FedMSA"]
    text = demo.findings([run(label, s, (won, 1, 1, 1), (1, 1, 1, 1), (50,) * 4) for s in (0, 1)])
    assert text.partition("\n\n")[0].endswith(f"**one for all (FedMSA)** {words}.")
    assert "loses" not in text


def test_of_a_run_that_diverged_nothing_is_said():
    runs = [run(demo.LABELS["AFL"], 0, (9,) * 4, (0,) * 4, (20,) * 4, accuracy=np.nan)]
    assert demo.findings(runs).endswith("a run diverged, so there is no result.")
