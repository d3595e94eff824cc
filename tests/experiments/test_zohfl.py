"""The pieces of ZO-HFL's experiments: who holds which images, and runs that are solved side by side."""

from dataclasses import replace

import numpy as np
import pytest

from fedstrata.core.client import opened
from fedstrata.data.scaled import scaled
from fedstrata.lab.experiments.runner import run_experiment
from fedstrata.lab.report import load_report
from reproductions import _zohfl as zohfl
from reproductions.zohfl_table1 import EXPERIMENT


def images(part, clients=None):
    """The multiset of a part's images, as counts by their bytes."""
    rows = opened(part)["x"] if clients is None else [x for i in clients for x in part.client(i)["x"]]
    names, counts = np.unique([row.tobytes() for row in rows], return_counts=True)
    return dict(zip(names.tolist(), counts.tolist(), strict=True))


def total(*parts):
    found = {}
    for part in parts:
        for name, number in part.items():
            found[name] = found.get(name, 0) + number
    return found


def test_split():
    data = zohfl.split("digits", alpha=0.1, seed=3, clients=10)
    assert len(data.test["y"]) == 179
    assert len(data.server["y"]) == round(0.3 * 1618)
    assert data.sizes.sum() == 1618 - 485
    assert data.sizes.min() >= 10
    arrays, scale = zohfl.pooled("digits")
    everything = images(scaled(arrays, (("x", *scale),)))
    mine = images(data, range(10))
    assert total(images(data.test), images(data.server), mine) == everything
    shared = zohfl.split("digits", alpha=0.1, seed=3, clients=10, server="shared")
    assert images(shared, range(10)) == total(mine, images(data.server))
    assert images(shared.test) == images(data.test)
    alone = zohfl.split("digits", alpha=0.1, seed=3, clients=10, server="alone")
    assert images(alone, range(1)) == images(data.server)


def test_scores_are_of_standardised_images():
    arrays, _ = zohfl.pooled("digits")
    data = zohfl.split("digits", alpha=0.1, seed=3, clients=10)
    assert arrays["x"].dtype == data.train["x"].dtype == np.uint8
    x = arrays["x"].astype(float)
    standard = (data.train["x"].values - x.mean()) / x.std()
    weights = np.random.default_rng(0).normal(size=(10, 64))
    found = zohfl.scores(weights, data.placed().train)
    np.testing.assert_allclose(found, standard @ weights.T, rtol=1e-4, atol=1e-4)


def test_cross_entropy():
    rng = np.random.default_rng(1)
    sample = {k: v[:5] for k, v in zohfl.split("digits", 0.1, 3, 10).client(0).items()}
    x = rng.normal(size=(10, 64))
    s = np.asarray(zohfl.scores(x, sample), float)
    expected = np.log(np.exp(s).sum(1)) - s[np.arange(5), sample["y"]]
    np.testing.assert_allclose(zohfl.cross_entropy(x, sample), expected, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rows",
    [
        ["ZO-HFL"],
        ["FedAvg", "FedProx + server data"],
        ["SCAFFOLD", "SCAFFOLD + server data"],
        ["server data only"],
    ],
)
def test_side_by_side_is_one_by_one(rows, tmp_path):
    changes = {"data": ["digits"], "level": ["moderate"], "method": rows, "rounds": 6, "tau": 3.0, "seeds": 2}
    experiment = EXPERIMENT.change(changes)
    for together in (True, False):
        run_experiment(experiment, tmp_path / str(together), together=together, progress=False)
    every, one = (load_report(tmp_path / str(together)).runs for together in (True, False))
    for a, b in zip(one, every, strict=True):
        assert (a.label, a.seed, a.ledger) == (b.label, b.seed, b.ledger)
        for name in ("accuracy", "global_loss"):
            np.testing.assert_allclose(b.history[name], a.history[name], rtol=1e-4)


def test_the_papers_table():
    claims = EXPERIMENT.claims.claims
    assert len(claims) == 36
    best = {}
    for claim in claims:
        where = claim.where["level"], claim.where["data"]
        best.setdefault(where, []).append((claim.value, claim.where["label"]))
    winners = [max(rows)[1] for (level, _), rows in best.items() if level != "mild"]
    assert winners.count("ZO-HFL") == 5  # "the best test accuracy in 5 out of 6 heterogeneous environments"


def test_personal_accuracy_is_each_models_own_in_its_clients_mix_of_classes():
    data = zohfl.split("digits", alpha=0.1, seed=1, clients=4)
    models = np.random.default_rng(0).normal(size=(4, 10, 64)).astype(np.float32)
    placed, x = data.placed(), opened(data.test)["x"]
    found = float(zohfl.personal_accuracy(models[0], models, replace(placed, test=opened(placed.test))))
    expected = 0.0
    for i, model in enumerate(models):
        right = (x @ model.T).argmax(1) == data.test["y"]
        parts = np.bincount(data.client(i)["y"], minlength=10) / data.sizes.sum()
        expected += sum(parts[c] * right[data.test["y"] == c].mean() for c in range(10))
    assert found == pytest.approx(expected, abs=1e-5)
