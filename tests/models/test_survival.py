"""Survival models against counts, closed forms and brute force."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.models.survival import concordance, counts, cox, kaplan_meier, survival

pytestmark = [pytest.mark.usefixtures("x64"), pytest.mark.slow]  # rows of methods fail as well

RNG = np.random.default_rng(0)
TIME = RNG.integers(1, 7, 60)
EVENT = RNG.integers(0, 2, 60)
CUTS = range(1, 7)


def test_without_features_the_best_hazards_are_events_over_those_at_risk():
    """The likelihood has a maximum in closed form, whose curve is Kaplan's and Meier's."""
    model = fs.models.hazard(1, CUTS)
    clients = [
        {"x": np.zeros((len(part), 1)), "time": TIME[part], "y": EVENT[part]}
        for part in np.split(np.arange(60), [10, 25])
    ]
    data = fs.FederatedData.from_clients(clients)
    result = fs.solve(
        fs.Minimization(model.loss), fs.FedAvg(2.0), data, model.init(0), rounds=1500, eval_every=1500,
        weights="size", progress=False, certify=False,
    )  # fmt: skip
    each = [counts(CUTS, c["time"], c["y"]) for c in clients]
    total = jax.tree.map(lambda *parts: sum(parts), *each)
    np.testing.assert_allclose(jax.nn.sigmoid(result.x["theta"]), total.events / total.at_risk, atol=1e-6)
    np.testing.assert_allclose(survival(result.x["theta"]), kaplan_meier(total), atol=1e-6)


def test_the_curve_by_hand():
    """Deaths at 1 and 3, censored at 2 and 4: 3/4, 3/4, 3/8, 3/8."""
    total = counts((1, 2, 3, 4), [1, 2, 3, 4], [1, 0, 1, 0])
    np.testing.assert_array_equal(total.at_risk, [4, 3, 2, 1])
    np.testing.assert_allclose(kaplan_meier(total), [0.75, 0.75, 0.375, 0.375])


@pytest.mark.parametrize(
    ("time", "event", "expected"),
    [
        (0.5, 1, ["-0"]),
        (1.0, 0, ["+0"]),
        (1.5, 1, ["+0", "-1"]),
        (3.0, 1, ["+0", "+1", "-2"]),
        (9.0, 1, ["+0", "+1", "+2"]),  # beyond the last end: censored there
    ],
)
def test_the_likelihood_of_one_patient(time, event, expected):
    """+k: survived interval k; −k: died in it."""
    model = fs.models.hazard(2, (1, 2, 3))
    x = {"theta": jnp.array([-1.0, 0.3, 0.6]), "w": jnp.array([0.5, -1.0])}
    u = np.array([0.2, 0.7])
    h = 1 / (1 + np.exp(-(np.asarray(x["theta"]) + u @ np.asarray(x["w"]))))
    value = -sum(np.log(1 - h[int(e[1])] if e[0] == "+" else h[int(e[1])]) for e in expected)
    assert float(model.loss(x, {"x": u, "time": time, "y": event})) == pytest.approx(value, rel=1e-12)


def test_concordance_by_brute_force():
    risk = RNG.normal(size=60).round(1)
    right = pairs = 0
    for i, j in itertools.permutations(range(60), 2):
        if EVENT[i] and (TIME[i] < TIME[j] or (TIME[i] == TIME[j] and not EVENT[j])):
            pairs += 1
            right += 1.0 if risk[i] > risk[j] else 0.5 if risk[i] == risk[j] else 0.0
    assert concordance(TIME, EVENT, risk) == pytest.approx(right / pairs, rel=1e-12)
    assert concordance(TIME, EVENT, -(TIME + 0.5 * (1 - EVENT))) == 1  # a death comes before a censoring
    assert np.isnan(concordance([1, 2], [0, 0], [1.0, 2.0]))


def test_cox_by_its_definition():
    u, x = RNG.normal(size=(60, 2)), np.array([0.4, -0.3])
    s = u @ x
    value = -sum(s[i] - np.log(np.exp(s[TIME[i] <= TIME]).sum()) for i in range(60) if EVENT[i]) / 60
    batch = {"x": u, "time": TIME, "y": EVENT}
    assert float(cox(x, batch)) == pytest.approx(value, rel=1e-12)
    halves = [{name: leaf[i::2] for name, leaf in batch.items()} for i in (0, 1)]
    data = fs.FederatedData.from_clients(halves)
    problem = fs.Minimization(fs.per_batch(cox))
    result = fs.solve(problem, fs.FedAvg(0.5), data, np.zeros(2), rounds=200, eval_every=200, progress=False)
    slopes = [jax.grad(cox)(result.x, half) for half in halves]
    np.testing.assert_allclose(np.mean(slopes, axis=0), 0, atol=1e-8)  # stratified by client


def test_intervals_are_checked():
    for cuts in ((), (2, 1), (0, 1), (1, np.inf)):
        with pytest.raises(ValueError, match=r"cuts must be|finite end"):
            fs.models.hazard(1, cuts)


def test_natural_clients(data_dir):
    """The sites, samples and events that the tables have."""
    if not (data_dir / "dialysis.csv.gz").is_file():
        pytest.skip("no dialysis.csv.gz in FEDSTRATA_DATA")
    data = fs.data.dialysis(data_dir=data_dir, test_fraction=0.0)
    assert (data.clients, int(data.sizes.sum()), int(data.train["y"].sum())) == (67, 6805, 1603)
    assert data.train["x"].shape == (6805, 7)
    assert {int(data.train["time"].min()), int(data.train["time"].max())} == {1, 44}
    schools = fs.data.schools(data_dir=data_dir, test_fraction=0.0)
    assert (schools.clients, int(schools.sizes.sum()), int(schools.sizes.max())) == (2410, 31022, 188)
    trial = fs.data.indo_rct(data_dir=data_dir)
    assert trial.names == ("1_UM", "2_IU", "3_UK", "4_Case")
    assert len(trial.train["y"]) + len(trial.test["y"]) == 602


def test_another_file_of_that_name_is_refused(tmp_path):
    (tmp_path / "dialysis.csv.gz").write_bytes(b"time,event\n")
    with pytest.raises(fs.data.CorruptData, match="SHA-256"):
        fs.data.dialysis(data_dir=tmp_path)
    with pytest.raises(FileNotFoundError, match=r"docs/data\.md says where"):
        fs.data.indo_rct(data_dir=tmp_path)
