"""Learning alone, together, fine-tuned and pooled, where each has a closed form."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import fedstrata as fs

rng = np.random.default_rng(0)
SIZES = (4, 12)
CLIENTS = [rng.normal(3 * i, 1, (n, 2)) for i, n in enumerate(SIZES)]
TEST = [rng.normal(3 * i, 1, (5, 2)) for i in range(2)]
GAMMA, ROUNDS, SHORT = 0.25, 200, 2


def loss(x, sample):
    return 0.5 * ((x - sample["a"]) ** 2).sum()


problem = fs.Minimization(loss)
data = fs.FederatedData.from_clients(
    [{"a": a} for a in CLIENTS], test={"a": np.concatenate(TEST), "client": np.repeat([0, 1], 5)}
)


def at(x, a):
    return 0.5 * ((x - a) ** 2).sum(1).mean()


@pytest.fixture(scope="module")
def found():
    with jax.enable_x64(True):
        return fs.baselines(
            problem, data, fs.FedAvg(GAMMA), np.zeros(2), rounds=ROUNDS, fine_tune=SHORT, progress=False
        )


def test_closed_forms(found):
    """Means of one's own samples, of the clients' means, of all; and (1 − γ)^r of the way from one's own."""
    own = [a.mean(0) for a in CLIENTS]
    common, pooled = np.mean(own, 0), np.concatenate(CLIENTS).mean(0)
    tuned = [o + (1 - GAMMA) ** SHORT * (common - o) for o in own]
    models = {"alone": own, "together": [common] * 2, "fine-tuned": tuned, "pooled": [pooled] * 2}
    assert list(found.values) == list(models)
    for way, theirs in models.items():
        wanted = [at(x, a) for x, a in zip(theirs, TEST, strict=True)]
        np.testing.assert_allclose(found.values[way], wanted, rtol=1e-10, err_msg=way)
    np.testing.assert_allclose(found.gains, found.values["alone"] - found.values["together"])
    assert found.summary["pooled"]["worst"] == found.values["pooled"].max()
    assert found.part == "test"


def test_it_shows_itself(found):
    lines = repr(found).splitlines()
    assert lines[0].startswith("loss on test samples (small is good)")
    assert lines[1].split() == ["client", "alone", "together", "fine-tuned", "pooled", "gain"]
    assert [line.split()[0] for line in lines[2:]] == ["0", "1", "mean", "worst"]
    assert found._repr_html_().count("<tr>") == 5


@pytest.mark.slow
def test_a_metric_where_large_is_good_and_a_run_that_is_there():
    def near(x, sample):
        return ((x - sample["a"]) ** 2).sum() < 4

    method = fs.FedAvg(GAMMA)
    result = fs.solve(problem, method, data, np.zeros(2), rounds=5, progress=False)
    found = fs.baselines(
        problem, data, method, np.zeros(2), rounds=5, metric=near, mode="max", part="train", result=result,
        weights="size", progress=False,
    )  # fmt: skip
    assert found.results["together"] is result
    np.testing.assert_allclose(
        found.values["together"], [(((np.asarray(result.x) - a) ** 2).sum(1) < 4).mean() for a in CLIENTS]
    )
    np.testing.assert_allclose(
        found.summary["alone"]["mean"], np.average(found.values["alone"], weights=SIZES)
    )
    np.testing.assert_allclose(found.gains, found.values["together"] - found.values["alone"])


def test_what_it_refuses():
    personal = fs.Personalized(lambda x, s: 0.0, lambda x, y: 0.0, lambda x, y, s: 0.0)
    with pytest.raises(TypeError, match="its own model"):
        fs.baselines(personal, data, fs.FedAvg(0.1), np.zeros(2), rounds=1)
    with pytest.raises(TypeError, match="give a metric"):
        fs.baselines(fs.Selection(loss, loss, same_samples=True), data, fs.FedAvg(0.1), np.zeros(2), rounds=1)
    own = fs.Minimization(loss, project=lambda x, client: x.clip(0, 1 + client.index))
    with pytest.raises(TypeError, match="project differs between clients"):
        fs.baselines(own, data, fs.FedAvg(0.1), np.zeros(2), rounds=1)
    for method in (
        {"method": fs.FedAvg(0.1, H=[1] * data.clients)},
        {"method": fs.FedAvg(0.1), "alone": fs.FedAvg(0.1, H=[1, 2])},
    ):
        with pytest.raises(ValueError, match=r"there is one client\. FedAvg: H has"):
            fs.baselines(fs.Minimization(loss), data, x0=np.zeros(2), rounds=1, **method)
