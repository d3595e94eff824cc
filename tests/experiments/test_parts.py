"""What several experiments share: metrics, images, exact solutions."""

import jax.numpy as jnp
import numpy as np
from scipy.optimize import minimize

import fedstrata as fs
from fedstrata.lab.experiments import metrics
from fedstrata.lab.experiments.images import long_tail
from reproductions._regularised import Exact


def test_means_by_class():
    values, labels = jnp.array([1.0, 2.0, 4.0]), jnp.array([0, 2, 2])
    np.testing.assert_array_equal(metrics.mean_by_class(values, labels, 4), [1, 0, 3, 0])


def test_a_long_tail_has_the_sizes_asked_for():
    part = {"x": np.arange(60), "y": np.arange(60) % 3}
    tail = long_tail(part, np.array([30, 5, 1]), np.random.default_rng(0))
    assert np.bincount(tail["y"]).tolist() == [20, 5, 1]
    assert len(set(tail["x"])) == 26
    assert (part["y"][tail["x"]] == tail["y"]).all()


def test_the_best_regulariser_is_that_of_the_trained_models():
    """Against the model itself, trained by L-BFGS; clients differ in size and still count alike."""
    rng = np.random.default_rng(0)

    def client(n):
        return {"x": rng.normal(size=(n, 3)), "y": rng.integers(0, 2, n)}

    train, valid = [client(n) for n in (4, 9)], [client(n) for n in (8, 5)]
    F = Exact(fs.FederatedData.from_clients(train, valid=valid), 1e-3, 1e3)

    def mean(parts, y):
        return np.mean([np.logaddexp(0, -(1 - 2 * part["y"]) * (part["x"] @ y)).mean() for part in parts])

    def trained(lam):
        found = minimize(lambda y: mean(train, y) + lam / 2 * y @ y, np.zeros(3), tol=1e-10)
        return mean(valid, found.x)

    for lam in (0.01, 0.3, F.weight):
        np.testing.assert_allclose(F(lam), trained(lam), rtol=1e-5)
    assert F.best <= min(trained(lam) for lam in np.geomspace(1e-3, 1e3, 20)) + 1e-6
