"""Metrics of each client and of the host, against NumPy on the clients' own samples."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

import fedstrata as fs
from fedstrata.solving.loop import Loop
from fedstrata.testing.cases import all_cases

rng = np.random.default_rng(0)
SIZES = (4, 9, 2, 30, 5)  # far enough apart for several groups of like size


def samples(n, i):
    return {"a": rng.normal(i, 1, (n, 2)).astype(np.float32), "b": np.arange(n) % 2}


def loss(x, sample):
    return 0.5 * ((x - sample["a"]) ** 2).sum()


TEST = {k: np.concatenate([samples(n, 0)[k] for n in SIZES]) for k in "ab"}
data = fs.FederatedData.from_clients(
    [samples(n, i) for i, n in enumerate(SIZES)],
    valid=[samples(n + 1, i) for i, n in enumerate(SIZES)],
    test={**TEST, "client": rng.permutation(np.repeat(np.arange(5), SIZES))},
)
problem = fs.Minimization(loss)
method = fs.FedAvg(gamma=0.1, H=2)


def solve(metrics, rounds=3, **more):
    arguments = {"progress": False, "default_metrics": False, **more}
    return fs.solve(
        problem, method, arguments.pop("data", data), np.ones(2), rounds=rounds, metrics=metrics, **arguments
    )


def by_hand(x, part):
    own = [data.client(i, part)["a"].astype(float) for i in range(5)]
    return np.array([0.5 * ((np.asarray(x) - a) ** 2).sum(1).mean() for a in own])


METRICS = {part: fs.per_client(loss, part=part, each=True) for part in ("train", "valid", "test")}


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(engine, marks=() if name == "simulated" else pytest.mark.slow, id=name)
        for name, engine in {
            "simulated": "simulated",
            "blocks": fs.engines.Simulated(chunk=2),
            "sharded": "sharded",
            "debug": "debug",
        }.items()
    ],
)
def test_values_of_each_client(engine):
    rounds = 1 if engine == "debug" else 3  # every sample by itself
    result = solve(METRICS, engine=engine, weights="size", rounds=rounds)
    for part in METRICS:
        values, history = by_hand(result.x, part), {n: v[-1] for n, v in result.history.items()}
        wanted = {
            part: np.average(values, weights=SIZES),
            f"{part}/worst": values.max(),
            f"{part}/best": values.min(),
            f"{part}/q25": np.quantile(values, 0.25),
            f"{part}/median": np.median(values),
            f"{part}/q75": np.quantile(values, 0.75),
            f"{part}/spread": values.std(),
            **{f"{part}/{i}": values[i] for i in range(5)},
        }
        assert {name for name in history if name.partition("/")[0] == part} == wanted.keys()
        for name, value in wanted.items():
            np.testing.assert_allclose(history[name], value, rtol=1e-5, err_msg=name)
    assert result.ledger.exchanges == rounds  # metrics are counted nowhere


@pytest.mark.slow
def test_streamed_clients():
    metrics = {part: METRICS[part] for part in ("train", "valid")}
    result = solve(metrics, engine="streamed")
    for part in metrics:
        values = by_hand(result.x, part)
        np.testing.assert_allclose([result.history[f"{part}/{i}"][-1] for i in range(5)], values, rtol=1e-5)
        np.testing.assert_allclose(result.history[part][-1], values.mean(), rtol=1e-5)
    some = fs.engines.Streamed(metrics=3)
    for refused in ({"test": METRICS["test"]}, metrics):
        with pytest.raises(ValueError, match="streamed metrics cannot be"):
            solve(refused, engine=some)


@pytest.mark.slow
def test_where_large_is_good_the_worst_is_the_smallest():
    metric = fs.per_client(lambda x, sample: sample["b"] == 1, mode="max", quantiles=(0.1,))
    history = solve({"right": metric}, rounds=0).history
    shares = [np.mean(data.client(i)["b"]) for i in range(5)]
    np.testing.assert_allclose(history["right/worst"], min(shares), rtol=1e-6)
    np.testing.assert_allclose(history["right/best"], max(shares), rtol=1e-6)
    np.testing.assert_allclose(history["right/q10"], np.quantile(shares, 0.1), rtol=1e-6)


@pytest.mark.slow
def test_personal_models_are_each_clients_own():
    case = {case.name: case for case in all_cases()}["zohfl"]
    result = case.run(metrics={"own": fs.per_client(case.problem.client)})
    np.testing.assert_allclose(result.history["own"], result.history["client"], rtol=1e-5)
    one_by_one = [
        np.mean([float(case.problem.client(result.x, y, s)) for s in rows(case.data.client(i))])
        for i, y in enumerate(rows(result.y))
    ]
    np.testing.assert_allclose(result.history["own/worst"][-1], max(one_by_one), rtol=1e-4)


def rows(tree):
    return [jax.tree.map(lambda leaf, j=j: leaf[j], tree) for j in range(len(jax.tree.leaves(tree)[0]))]


@pytest.mark.slow
def test_names_of_clients_are_the_names_of_series():
    named = dataclasses.replace(data, names=tuple("abcde"))
    history = solve({"loss": fs.per_client(loss, each=True)}, rounds=0, data=named).history
    assert {f"loss/{name}" for name in "abcde"} <= history.keys()


def test_a_client_called_like_another_series_does_not_stand_in_its_place():
    named = dataclasses.replace(data, names=("worst", "q25", "c", "d", "d"))
    metric = fs.per_client(loss, each=True).of("loss", named)
    found = metric.series("loss", np.arange(5.0), np.full(5, 0.2), np)
    assert (found["loss"], found["loss/worst"], found["loss/best"], found["loss/q25"]) == (2, 4, 0, 1)
    others = {"worst (client 0)": 0, "q25 (client 1)": 1, "c": 2, "d": 3, "d (client 4)": 4}
    assert others.items() <= {name.removeprefix("loss/"): float(v) for name, v in found.items()}.items()


def test_what_per_client_refuses():
    with pytest.raises(TypeError, match=r"\(x, sample\) or \(x, y, sample\), but takes 1"):
        fs.per_client(lambda x: x)
    with pytest.raises(ValueError, match="'min' or 'max'"):
        fs.per_client(loss, mode="high")
    with pytest.raises(ValueError, match="quantiles"):
        fs.per_client(loss, quantiles=(0.5, 1.0))
    with pytest.raises(TypeError, match="takes \\(x, y, sample\\), but the problem has one"):
        solve({"loss": fs.per_client(lambda x, y, sample: 0.0)})
    with pytest.raises(TypeError, match="'loss' must return one number for one sample"):
        solve({"loss": fs.per_client(lambda x, sample: x)})
    bare = dataclasses.replace(data, test=TEST, valid=None, valid_sizes=None)
    with pytest.raises(fs.DataError, match="do not say which client"):
        solve({"loss": fs.per_client(loss, part="test")}, data=bare)
    with pytest.raises(ValueError, match="validation samples, but the data has none"):
        solve({"loss": fs.per_client(loss, part="valid")}, data=bare)
    partly = dataclasses.replace(data, test={**TEST, "client": np.zeros(50, int)})
    with pytest.raises(ValueError, match="4 of 5 clients have none"):
        solve({"loss": fs.per_client(loss, part="test")}, data=partly)


def test_a_network_shows_single_values_only_where_replies_are_shown_anyway():
    with pytest.raises(ValueError, match="FedAvg asks for averages alone"):
        solve({"loss": fs.per_client(loss)}, engine="network")


@pytest.mark.slow
def test_over_a_network_with_replies():
    case = {case.name: case for case in all_cases()}["fedrzo-scalars"]
    assert case.method.reveals_on(case.problem) == "replies"
    metrics = {"each": fs.per_client(case.problem.loss)}
    here, there = case.run(metrics=metrics), case.run(metrics=metrics, engine="network")
    for name in ("each", "each/worst", "each/spread"):
        np.testing.assert_allclose(there.history[name], here.history[name], rtol=1e-5)


def auc(x, y, data):
    return roc_auc_score(data.test["b"], data.test["a"] @ x)


def test_the_host_evaluates_what_it_is_given():
    """At the start and at every evaluation, on NumPy arrays, whatever the compiled run does."""
    seen = []

    def keep(x, y):
        assert isinstance(x, np.ndarray)
        seen.append(x)
        return x[0]

    result = solve({"x": fs.on_host(keep), "auc": fs.on_host(auc), "same": lambda x, y: x[0]}, rounds=4)
    np.testing.assert_array_equal(result.history["x"], result.history["same"])
    np.testing.assert_array_equal(seen[-1], result.x)
    assert result.history["auc"][-1] == roc_auc_score(TEST["b"], TEST["a"] @ np.asarray(result.x))


def test_the_compiled_run_is_cut_where_the_host_evaluates(monkeypatch):
    chunks, chunk = [], Loop._chunk
    monkeypatch.setattr(
        Loop, "_chunk", lambda self, these: (chunks.append(len(these)), chunk(self, these))[1]
    )
    result = solve({"x": fs.on_host(lambda x, y: x[0], every=8)}, rounds=20)
    assert np.flatnonzero(np.isfinite(result.history["x"])).tolist() == [0, 8, 16, 20]
    assert len(chunks) <= 9  # they double from one look to the next: 1; 2, 4, 2; 4, 4; 4


@pytest.mark.slow
def test_a_host_metric_of_each_client():
    def first(x, own):
        return own["a"][0, 0] - x[0]

    metrics = {"gap": fs.per_client(fs.on_host(first), mode="max", part="valid")}
    result = solve(metrics, rounds=1, weights="size")
    values = np.array([data.client(i, "valid")["a"][0, 0] for i in range(5)]) - np.asarray(result.x)[0]
    np.testing.assert_allclose(result.history["gap/worst"][-1], values.min(), rtol=1e-6)
    np.testing.assert_allclose(result.history["gap"][-1], np.average(values, weights=SIZES), rtol=1e-6)


def test_resume_keeps_what_the_host_found(tmp_path):
    metrics = {"x": fs.on_host(lambda x, y: x[0], every=2)}
    whole = solve(metrics, rounds=4)
    solve(metrics, rounds=2, checkpoint=tmp_path)
    resumed = solve(metrics, rounds=4, checkpoint=tmp_path, resume=True)
    np.testing.assert_array_equal(resumed.history["x"], whole.history["x"])
    with pytest.raises(fs.CheckpointError, match=r"metrics\['x'\]"):
        solve({"x": fs.on_host(lambda x, y: x[1])}, rounds=4, checkpoint=tmp_path, resume=True)


@pytest.mark.slow
def test_the_host_sees_every_run_of_a_sweep():
    methods = [fs.FedAvg(0.1, H=2), fs.FedAvg(0.2, H=2)]
    metrics = {"x": fs.on_host(lambda x, y: x[0]), "same": lambda x, y: x[0]}
    for result in fs.sweep(problem, methods, data, np.ones(2), rounds=2, metrics=metrics, progress=False):
        np.testing.assert_array_equal(result.history["x"], result.history["same"])


def by_cases(x, y):
    return 1.0 if x[0] > 0 else 0.0


@pytest.mark.parametrize(
    "metric",
    [lambda x, y, data: auc(x, y, data), by_cases, lambda x, y: float(x[0]), lambda x, y: np.sin(x)[0]],
)
def test_a_metric_that_cannot_be_compiled_is_answered_with_the_name(metric):
    with pytest.raises(TypeError, match=r"'m' cannot be compiled: .*metrics=\{'m': fs\.on_host\(…\)\}"):
        solve({"m": metric})
    assert np.isfinite(solve({"m": fs.on_host(metric)}, rounds=0).history["m"]).all()


def test_what_on_host_refuses():
    with pytest.raises(ValueError, match="every must be"):
        fs.on_host(auc, every=0)
    with pytest.raises(TypeError, match=r"must return one number, but returned \[1, 1\]"):
        solve({"x": fs.on_host(lambda x, y: x)})
    with pytest.raises(TypeError, match="'x' cannot be evaluated on the host: ZeroDivisionError"):
        solve({"x": fs.on_host(lambda x, y: 1 / 0)})
    with pytest.raises(ValueError, match="samples stay at the sites"):
        solve({"auc": fs.on_host(auc)}, engine="network")
