"""CIFAR10-ST's counts, its split, and the two ways to write a convolution."""

import jax
import numpy as np
import pytest

from reproductions import _cifar10st as st


def test_keeps_the_last_images_of_the_first_half_of_the_classes():
    y = np.random.default_rng(0).integers(0, 10, 3000)
    chosen = st.keep_last(y)
    counts = np.bincount(y[chosen], minlength=10)
    np.testing.assert_array_equal(counts[:5], 100)
    np.testing.assert_array_equal(counts[5:], np.bincount(y)[5:])
    for c in range(5):
        np.testing.assert_array_equal(chosen[y[chosen] == c], np.flatnonzero(y == c)[-100:])


def test_of_a_hundred_classes_the_first_fifty_are_rare():
    y = np.random.default_rng(0).permutation(np.repeat(np.arange(100), 12))
    chosen = st.keep_last(y, 50, keep=3)
    np.testing.assert_array_equal(np.bincount(y[chosen]), np.repeat([3, 12], 50))
    model = st.network("cnn", classes=100)
    assert jax.eval_shape(model.apply, model.init(0), np.zeros((32, 32, 3), np.uint8)).shape == (100,)


def test_clients_have_equal_parts_and_share_no_image():
    arrays = {
        "x_train": np.arange(82, dtype=np.uint8).reshape(82, 1, 1, 1),
        "y_train": np.zeros(82),
        "x_test": np.zeros((1, 1, 1, 1), np.uint8),
        "y_test": np.zeros(1),
    }
    data = st.federated(arrays, 8, seed=0)
    np.testing.assert_array_equal(data.sizes, 10)
    assert len(np.unique(data.train["x"])) == 80


@pytest.mark.slow
def test_accuracies_are_those_counted():
    model = st.network("cnn")
    x = model.init(0)
    images = np.random.default_rng(2).integers(0, 256, (7, 8, 8, 3)).astype(np.uint8)
    predicted = np.asarray(jax.vmap(model.apply, in_axes=(None, 0))(x, images)).argmax(1)
    y = np.where(np.arange(7) < 3, predicted, (predicted + 1) % 10)  # three of seven are right
    data = st.federated({"x_train": images, "y_train": y, "x_test": images, "y_test": y}, 1, seed=0)
    found = {name: float(metric(x, None, data)) for name, metric in st.metrics(model, chunk=4).items()}
    hits = (predicted == y).astype(float)
    assert found["accuracy"] == found["train_accuracy"] == pytest.approx(3 / 7)
    np.testing.assert_allclose(found["rare_accuracy"], hits[y < 5].mean(), rtol=1e-6)
    # classes without test images count as wrong throughout, as do those never recognised
    assert found["worst_accuracy"] == 0
