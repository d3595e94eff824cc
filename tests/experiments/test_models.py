"""The small models against their formulas, and metrics against sums by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize

import fedstrata as fs
from fedstrata.experiments import models
from fedstrata.experiments.images import long_tail
from fedstrata.experiments.papers._regularised import Exact

RNG = np.random.default_rng(0)
U = RNG.normal(size=(7, 5)).astype(np.float32)
LABELS = np.array([0, 1, 2, 2, 1, 0, 2])


def samples(labels=LABELS):
    return [{"x": u, "y": label} for u, label in zip(U, labels, strict=True)]


def random_like(x, seed=1):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), float), x)


def test_softmax_is_the_negative_log_likelihood():
    model = models.softmax(5, 3, 0.1)
    x = random_like(model.init(0))
    for sample in samples():
        scores = sample["x"] @ x["W"] + x["b"]
        expected = np.log(np.exp(scores).sum()) - scores[sample["y"]] + 0.05 * (x["W"] ** 2).sum()
        np.testing.assert_allclose(model.loss(x, sample), expected, rtol=1e-5)


def test_logistic_is_softmax_of_two_classes():
    model, two = models.logistic(5), models.softmax(5, 2)
    w = random_like(model.init(0))
    # The score of class 0 (v = +1) is uᵀw, that of class 1 is 0.
    x = {"W": jnp.stack([w, jnp.zeros(5)], axis=1), "b": jnp.zeros(2)}
    for sample in samples(LABELS % 2):
        np.testing.assert_allclose(model.loss(w, sample), two.loss(x, sample), rtol=1e-5)
        assert model.correct(w, sample) == two.correct(x, sample)


@pytest.mark.parametrize("beta", [None, 2.0])
def test_relu_network_is_the_papers(beta):
    model = models.relu_network(5, 4, 0.01, beta)
    x = random_like(model.init(0))
    for sample in samples():
        t = x["Z"] @ sample["x"]
        sigma = np.maximum(0, t) if beta is None else np.log1p(np.exp(beta * t)) / beta
        v = 1 if sample["y"] % 2 == 0 else -1
        regular = 0.005 * ((x["Z"] ** 2).sum() + (x["w"] ** 2).sum())
        expected = 0.5 * (v - x["w"] @ sigma) ** 2 + regular
        np.testing.assert_allclose(model.loss(x, sample), expected, rtol=1e-5)
        assert model.correct(x, sample) == (v * (x["w"] @ sigma) > 0)


def test_a_score_of_zero_is_a_guess_too():
    model = models.logistic(5)
    hits = [float(model.correct(model.init(0), sample)) for sample in samples()]
    assert hits == (LABELS % 2 == 1).tolist()


def test_softplus_tends_to_relu():
    x = random_like(models.relu_network(5).init(0))
    smooth = models.relu_network(5, beta=1e4)
    for sample in samples():
        np.testing.assert_allclose(smooth.loss(x, sample), models.relu_network(5).loss(x, sample), rtol=1e-3)


def test_mlp_is_two_layers():
    model = models.mlp(5, 3, 8, 0.1)
    x = random_like(model.init(0))
    for sample in samples():
        inner = np.maximum(0, sample["x"] @ x["hidden"]["W"] + x["hidden"]["b"])
        scores = inner @ x["output"]["W"] + x["output"]["b"]
        norm = sum((leaf**2).sum() for leaf in jax.tree.leaves(x))
        expected = np.log(np.exp(scores).sum()) - scores[sample["y"]] + 0.05 * norm
        np.testing.assert_allclose(model.loss(x, sample), expected, rtol=1e-5)


def test_constructors_give_the_same_object_again():
    assert models.mlp(5, 3) is models.mlp(5, 3)
    assert models.mlp(5, 3) is not models.mlp(5, 4)


@pytest.mark.parametrize("model", [models.relu_network(5), models.mlp(5, 3)])
def test_starts_depend_on_the_seed_alone(model):
    same = jax.tree.map(lambda a, b: bool((a == b).all()), model.init(1), model.init(1))
    other = jax.tree.map(lambda a, b: bool((a == b).all()), model.init(1), model.init(2))
    assert all(jax.tree.leaves(same))
    assert not all(jax.tree.leaves(other))


def test_metrics_are_means_over_real_samples():
    arrays = {"x": U, "y": LABELS}
    test = {"x": U[:4], "y": LABELS[:4]}
    clients = [{k: a[:2] for k, a in arrays.items()}, {k: a[2:] for k, a in arrays.items()}]
    data = fs.FederatedData.from_clients(clients, test=test).placed()
    model = models.softmax(5, 3, 0.1)
    x = random_like(model.init(0))
    losses = [float(model.loss(x, s)) for s in samples()]
    hits = [float(model.correct(x, s)) for s in samples()]
    np.testing.assert_allclose(model.metrics["test_loss"](x, None, data), np.mean(losses[:4]), rtol=1e-5)
    np.testing.assert_allclose(model.metrics["accuracy"](x, None, data), np.mean(hits[:4]), rtol=1e-6)
    by_client = np.mean([np.mean(losses[:2]), np.mean(losses[2:])])
    np.testing.assert_allclose(models.train_mean(model.loss)(x, None, data), by_client, rtol=1e-5)


def test_means_by_class():
    values, labels = jnp.array([1.0, 2.0, 4.0]), jnp.array([0, 2, 2])
    np.testing.assert_array_equal(models.mean_by_class(values, labels, 4), [1, 0, 3, 0])


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
