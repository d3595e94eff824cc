"""The small models against their formulas, and metrics against sums by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs
from fedstrata import models
from fedstrata.data import DataError
from fedstrata.lab.experiments.metrics import train_mean
from fedstrata.models.losses import cross_entropy, softplus

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
    # The score of class 1 (v = +1) is uᵀw, that of class 0 is 0.
    x = {"W": jnp.stack([jnp.zeros(5), w], axis=1), "b": jnp.zeros(2)}
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
    hits = [float(model.correct(model.init(0), sample)) for sample in samples(LABELS % 2)]
    assert hits == (LABELS % 2 == 0).tolist()
    network = models.relu_network(5)
    nothing = jax.tree.map(jnp.zeros_like, network.init(0))
    assert [float(network.correct(nothing, s)) for s in samples()] == (LABELS % 2 == 1).tolist()


def test_softplus_and_its_derivatives_in_closed_form():
    t = np.array([-200.0, -30.0, -1.0, 0.0, 2.0, 30.0, 200.0])
    sigma = 1 / (1 + np.exp(-t))
    expected = [np.logaddexp(0, t), sigma, sigma * np.exp(-np.logaddexp(0, t))]
    with jax.enable_x64(True):
        found = [softplus, jax.grad(softplus), jax.grad(jax.grad(softplus))]
        for function, values in zip(found, expected, strict=True):
            atol = 0 if values is not expected[-1] else np.finfo(float).eps  # that is σ(1 − σ), with σ near 1
            np.testing.assert_allclose(jax.vmap(function)(jnp.asarray(t)), values, rtol=1e-14, atol=atol)


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


@pytest.mark.slow
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
    np.testing.assert_allclose(train_mean(model.loss)(x, None, data), by_client, rtol=1e-5)


NUMBERS = {
    "squared": lambda r: 0.5 * (r**2).sum(),
    "absolute": lambda r: np.abs(r).sum(),
    "huber": lambda r: np.where(np.abs(r) <= 1, 0.5 * r**2, np.abs(r) - 0.5).sum(),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_losses_of_numbers_are_their_formulas(name):
    scores, label = jnp.array([0.3, -2.0, 1.5]), np.array([1, 1, 1])
    expected = NUMBERS[name](np.array([0.3, -2.0, 1.5]) - label)
    np.testing.assert_allclose(models.LOSSES[name](scores, label), expected, rtol=1e-6)
    with pytest.raises(ValueError, match=r"scores have shape \(3,\), but the label has \(2,\).*one output"):
        models.LOSSES[name](scores, label[:2])


@pytest.mark.parametrize("label", [0, 1])
def test_losses_of_two_classes_are_their_formulas(label):
    v, score = 2 * label - 1, jnp.float32(0.7)
    np.testing.assert_allclose(models.LOSSES["logistic"](score, label), np.log1p(np.exp(-v * 0.7)), rtol=1e-6)
    np.testing.assert_allclose(models.LOSSES["hinge"](score, label), max(0, 1 - v * 0.7), rtol=1e-6)
    two = cross_entropy(jnp.array([0.0, 0.7]), label)
    np.testing.assert_allclose(models.LOSSES["logistic"](score, label), two, rtol=1e-6)


@pytest.mark.parametrize("name", ["logistic", "hinge", "cross_entropy"])
@pytest.mark.parametrize("label", [-1, 2])
def test_labels_outside_have_no_loss(name, label):
    score = jnp.zeros(2) if name == "cross_entropy" else jnp.float32(0.0)
    assert np.isnan(models.LOSSES[name](score, label))


def test_predictions_are_labels_or_numbers():
    model = models.mlp(5, 3, (4, 6), activation="tanh")
    x = random_like(model.init(0))
    scores = np.stack([model.apply(x, u) for u in U])
    np.testing.assert_array_equal(model.predict(x, U), scores.argmax(1))
    assert model.score(x, {"x": U, "y": LABELS}) == pytest.approx((scores.argmax(1) == LABELS).mean())

    ridge = models.linear(5)
    w = random_like(ridge.init(0))
    values, y = U @ np.asarray(w["W"])[:, 0] + float(w["b"][0]), RNG.normal(size=7)
    np.testing.assert_allclose(ridge.predict(w, U), values, rtol=1e-5)
    r2 = 1 - ((y - values) ** 2).sum() / ((y - y.mean()) ** 2).sum()
    assert ridge.score(w, {"x": U, "y": y}) == pytest.approx(r2, rel=1e-5)
    assert ridge.labels == "numbers"
    assert "accuracy" not in ridge.metrics


def test_a_key_is_a_seed_too():
    model = models.mlp(5, 3)
    typed, raw = jax.random.key(3), jax.random.PRNGKey(3)
    starts = [model.init(seed)["hidden"]["W"] for seed in (typed, raw, jax.random.key(4), 3)]
    np.testing.assert_array_equal(starts[0], starts[1])
    assert not (starts[0] == starts[2]).all()
    assert not (starts[0] == starts[3]).all()


def test_sizes_come_from_the_data():
    images = RNG.integers(0, 255, (6, 8, 8, 3)).astype(np.uint8)
    y = np.array([0, 1, 2, 0, 1, 2])
    data = fs.FederatedData.from_clients([{"x": images[:3], "y": y[:3]}, {"x": images[3:], "y": y[3:]}])
    assert models.for_data("cnn", data, width=4) is models.cnn(channels=3, outputs=3, width=4)
    assert models.for_data("softmax", data).init(0)["W"].shape == (192, 3)
    assert models.for_data("linear", data).init(0)["W"].shape == (192, 1)
    assert models.for_data("mlp", data, hidden=[4, 5]).init(0)["hidden_2"]["W"].shape == (4, 5)
    flat = fs.FederatedData.from_clients([{"x": images.reshape(6, -1) / 255, "y": y}])
    model = models.for_data("cnn", flat, shape=[8, 8, 3])
    assert model.apply(model.init(0), flat.train["x"][0]).shape == (3,)
    from_one = fs.FederatedData.from_clients([{"x": images.reshape(6, -1) / 255, "y": y + 1}])
    assert models.for_data("softmax", from_one, classes=4).init(0)["W"].shape == (192, 4)
    for call, error, message in [
        (
            lambda: models.for_data("softmax", from_one),
            DataError,
            "label 0, and the largest is 3. Number the",
        ),
        (lambda: models.for_data("cnn", flat), DataError, r"samples of shape \(192,\).*flat=False"),
        (lambda: models.for_data("logistic", data), DataError, "has the label 2"),
        (lambda: models.for_data("linear", data, loss="hinge"), DataError, "has the label 2"),
        (lambda: models.for_data("mpl", data), ValueError, "Unknown model 'mpl'. Did you mean 'mlp'"),
        (
            lambda: models.for_data("mlp", data, hiden=3),
            ValueError,
            "option 'hiden'. Did you mean 'hidden'",
        ),
        (lambda: models.for_data("mlp", data, loss="squares"), ValueError, "Did you mean 'squared'"),
        (lambda: models.linear(3, 2, "logistic"), ValueError, "needs one output, but has 2"),
        (lambda: models.mlp(3, 1), ValueError, "an output for each class"),
        (lambda: models.mlp(3, 2, activation="rel"), ValueError, "Did you mean 'relu'"),
        (lambda: models.resnet(width=12), ValueError, "groups must divide width=12"),
        (lambda: models.cnn(3, shape=(8, 8)), ValueError, r"shape must be \(height, width, 3\)"),
    ]:
        with pytest.raises(error, match=message):
            call()


def test_linear_regression_is_least_squares(x64):
    """FedAvg with one full step is gradient descent, whose limit on ridge regression is known."""
    X, y = RNG.normal(size=(12, 2)), RNG.normal(size=12)
    data = fs.FederatedData.from_clients([{"x": X[:6], "y": y[:6]}, {"x": X[6:], "y": y[6:]}])
    model = models.for_data("linear", data, lam=0.1)
    result = fs.solve(
        fs.Minimization(model.loss),
        fs.FedAvg(0.3, H=1, batch_size=None),
        data,
        model.init(0),
        rounds=300,
        eval_every=300,
        progress=False,
    )
    A = np.column_stack([X, np.ones(12)])
    exact = np.linalg.solve(A.T @ A / 12 + np.diag([0.1, 0.1, 0]), A.T @ y / 12)
    np.testing.assert_allclose(np.ravel(result.x["W"]), exact[:2], atol=1e-9)
    np.testing.assert_allclose(result.x["b"], exact[2:], atol=1e-9)
