"""Labels outside 0 … K−1 are found where the library owns the loader or the loss."""

import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs
from fedstrata import models
from fedstrata.data import DataError, check_labels, count_classes
from fedstrata.lab.datasets import loaders


def federated(*labels, **parts):
    return fs.FederatedData.from_clients([{"y": np.array(y)} for y in labels], **parts)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (federated([0, 1], [1, 2]), r"Client 1 has the label 2 in sample 1 of train\['y'\].*from 0 to 1"),
        (federated([0, -1], [1]), r"Client 0 has the label -1 in sample 1"),
        (federated([0.0, 0.5]), r"the label 0.5"),
        (federated([0], [1], valid=[{"y": np.array([0])}, {"y": np.array([9])}]), r"Client 1.*of valid"),
        (federated([0], test={"y": np.array([0, 3])}), r"The test data has the label 3 in sample 1"),
    ],
)
def test_a_label_outside_is_named(data, message):
    with pytest.raises(DataError, match=message):
        check_labels(data, 2)


def test_classes_are_counted_over_all_parts():
    data = federated([0, 1], [1], test={"y": np.array([4])})
    assert count_classes(data) == 5
    assert check_labels(data, 5) is data
    with pytest.raises(DataError, match="whole numbers from 0 on"):
        count_classes(federated([-1, 1]))


def test_loaders_check_labels(monkeypatch):
    table = {"x": np.ones((40, 3)), "y": np.repeat([1, 2], 20).astype(np.int32)}
    monkeypatch.setattr(loaders, "load", lambda name, data_dir=None: table)
    with pytest.raises(DataError, match="has the label 2"):
        fs.data.breast_cancer(clients=2)


@pytest.mark.parametrize("label", [-1, 2, 5])
@pytest.mark.parametrize("model", [models.softmax(2, 2), models.mlp(2, 2, hidden=3)])
def test_models_give_no_plausible_loss_for_a_label_outside(model, label):
    x = model.init(0)
    assert np.isnan(model.loss(x, {"x": jnp.ones(2), "y": label}))
    assert np.isfinite(model.loss(x, {"x": jnp.ones(2), "y": 1}))


@pytest.mark.parametrize("lam", [float("nan"), float("inf"), -1.0, "a", None, True])
@pytest.mark.parametrize("make", [models.logistic, models.relu_network])
def test_models_take_no_nonsense(make, lam):
    with pytest.raises(ValueError, match="lam must be a finite number ≥ 0"):
        make(3, lam=lam)
    with pytest.raises(ValueError, match="features must be a whole number ≥ 1"):
        make(0)
