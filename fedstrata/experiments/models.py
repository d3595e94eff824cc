"""Small models for experiments: a start, scores of one input, a loss of one sample, metrics on test data.

Every constructor returns the same object for the same arguments, so that compiled programs are used again.
Labels are whole numbers from 0; models with two classes read them as signs: v = +1 for even labels (0 among
them), −1 for odd ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedstrata.core.storage import Placed
from fedstrata.core.types import Array, Function, Integer, PyTree

Metric = Callable[[PyTree, PyTree, Placed], Any]


@dataclass(frozen=True, eq=False)
class Model:
    """A model.

    Attributes:
        init: seed → parameters.
        predict: ``predict(x, u)``: the scores of one input u.
        loss: ``loss(x, sample)`` of one sample ``{"x": u, "y": label}``, with the regulariser.
        correct: ``correct(x, sample)``: whether the label is predicted, 0 or 1.
        metrics: name → function of ``(x, y, data)`` on the test data.
    """

    init: Callable[[int], PyTree]
    predict: Callable[[PyTree, Any], Any]
    loss: Callable[[PyTree, Any], Any]
    correct: Callable[[PyTree, Any], Any]
    metrics: dict[str, Metric]


def test_mean(function: Callable[[PyTree, Any], Any]) -> Metric:
    """The metric that averages ``function(x, sample)`` over the test data."""

    def metric(x: PyTree, y: PyTree, data: Placed) -> Any:
        return jax.vmap(function, in_axes=(None, 0))(x, data.test).mean()

    return metric


test_mean.__test__ = False  # type: ignore[attr-defined]  # no test of pytest's


TILE = 4_096  # samples of the training data that a metric takes at once


def train_mean(function: Callable[[PyTree, Any], Any]) -> Metric:
    """The metric that averages ``function(x, sample)`` over each client's training data, then over all."""

    def metric(x: PyTree, y: PyTree, data: Placed) -> Any:
        return data.mean(function, x, shares=data.shares("uniform"), tile=TILE)

    return metric


def of_second(metric: Metric) -> Metric:
    """The metric of a model that is the second variable."""
    return lambda x, y, data: metric(y, None, data)


def mean_by_class(values: Array, labels: Array, classes: int) -> Array:
    """The mean of each class's values; zero where there is none."""
    sums, numbers = (jax.ops.segment_sum(v, labels, classes) for v in (values, jnp.ones_like(values)))
    return sums / jnp.maximum(numbers, 1)


def sign(label: Integer) -> Any:
    """The sign v of a label: +1 for even ones, −1 for odd ones."""
    return 1.0 - 2.0 * (label % 2)


def squares(x: PyTree) -> Any:
    """‖x‖² over all leaves."""
    return sum(jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(x))


@functools.cache
def softmax(features: int, classes: int, lam: float = 0.0) -> Model:
    """Linear scores: ``−log p_label + λ/2 ‖W‖²`` where p is the softmax of Wᵀu + b.

    >>> model = softmax(64, 10)
    >>> x = model.init(0)
    >>> float(model.loss(x, {"x": np.ones(64), "y": 3}))
    2.3025851249694824
    """
    _check("softmax", features=features, classes=classes, lam=lam)

    def init(seed: int) -> PyTree:
        return {"W": jnp.zeros((features, classes)), "b": jnp.zeros(classes)}

    def predict(x: PyTree, u: PyTree) -> Any:
        return u @ x["W"] + x["b"]

    def loss(x: PyTree, sample: PyTree) -> Any:
        return cross_entropy(predict(x, sample["x"]), sample["y"]) + lam / 2 * squares(x["W"])

    return classifier(init, predict, loss)


def logistic_loss(x: PyTree, sample: PyTree) -> Any:
    """``log(1 + exp(−v uᵀx))``, v = ±1."""
    return jax.nn.softplus(-sign(sample["y"]) * (sample["x"] @ x))


@functools.cache
def logistic(features: int, lam: float = 0.0) -> Model:
    """Logistic regression for two classes: ``log(1 + exp(−v uᵀw)) + λ/2 ‖w‖²``, v = ±1."""
    _check("logistic", features=features, lam=lam)

    def init(seed: int) -> PyTree:
        return jnp.zeros(features)

    def predict(x: PyTree, u: PyTree) -> Any:
        return u @ x

    def loss(x: PyTree, sample: PyTree) -> Any:
        return logistic_loss(x, sample) + lam / 2 * squares(x)

    return _signs(init, predict, loss)


@functools.cache
def relu_network(features: int, neurons: int = 4, lam: float = 0.01, beta: float | None = None) -> Model:
    """FedRZO's network of one layer (section 6.1): ``½ (v − wᵀσ(Zu))² + λ/2 (‖Z‖² + ‖w‖²)``, v = ±1.

    Args:
        features: N₀.
        neurons: N₁.
        lam: λ.
        beta: σ is ``max(0, ·)``, or with a number β the softplus ``ln(1 + exp(β ·))/β``.
    """
    _check("relu_network", features=features, neurons=neurons, lam=lam)
    if beta is not None and not 0 < beta < math.inf:
        raise ValueError(f"relu_network: beta must be a positive number or None, but is {beta!r}.")

    def rectify(t: Integer) -> Any:
        return jax.nn.relu(t) if beta is None else jax.nn.softplus(beta * t) / beta

    def init(seed: int) -> PyTree:
        # The scale of He's initialisation; the paper names none.
        rng = np.random.default_rng(seed)
        Z = rng.normal(size=(neurons, features)) * math.sqrt(2 / features)
        return {
            "Z": jnp.asarray(Z, float),
            "w": jnp.asarray(rng.normal(size=neurons) / math.sqrt(neurons), float),
        }

    def predict(x: PyTree, u: PyTree) -> Any:
        return x["w"] @ rectify(x["Z"] @ u)

    def loss(x: PyTree, sample: PyTree) -> Any:
        return 0.5 * (sign(sample["y"]) - predict(x, sample["x"])) ** 2 + lam / 2 * squares(x)

    return _signs(init, predict, loss)


@functools.cache
def mlp(features: int, classes: int, hidden: int = 200, lam: float = 0.0) -> Model:
    """A network with one hidden layer of ReLUs and softmax: ``−log softmax(f(u))_label + λ/2 ‖x‖²``."""
    _check("mlp", features=features, classes=classes, hidden=hidden, lam=lam)

    def init(seed: int) -> PyTree:
        rng = np.random.default_rng(seed)

        def layer(inputs: int, outputs: int) -> PyTree:
            W = rng.normal(size=(inputs, outputs)) * math.sqrt(2 / inputs)
            return {"W": jnp.asarray(W, float), "b": jnp.zeros(outputs)}

        return {"hidden": layer(features, hidden), "output": layer(hidden, classes)}

    def predict(x: PyTree, u: PyTree) -> Any:
        inner = jax.nn.relu(u @ x["hidden"]["W"] + x["hidden"]["b"])
        return inner @ x["output"]["W"] + x["output"]["b"]

    def loss(x: PyTree, sample: PyTree) -> Any:
        return cross_entropy(predict(x, sample["x"]), sample["y"]) + lam / 2 * squares(x)

    return classifier(init, predict, loss if lam else None)


def cross_entropy(scores: Array, label: Integer) -> Array:
    """``−log softmax(scores)_label``; NaN for a label without a score, where JAX may take another."""
    value = optax.softmax_cross_entropy_with_integer_labels(scores, label)
    return jnp.where((label >= 0) & (label < scores.shape[-1]), value, jnp.nan)


def _check(model: str, **given: object) -> None:
    """Raise for parameters that no model has: sizes are whole numbers ≥ 1, the others finite and ≥ 0."""
    for name, value in given.items():
        size = name in ("features", "classes", "neurons", "hidden")
        kinds = (int, np.integer) if size else (int, float, np.number)
        good = (
            isinstance(value, kinds)
            and not isinstance(value, bool)
            and (1 if size else 0) <= value < math.inf
        )
        if not good:
            words = "a whole number ≥ 1" if size else "a finite number ≥ 0"
            raise ValueError(f"{model}: {name} must be {words}, but is {value!r}.")


def classifier(init: Callable[[int], PyTree], predict: Function, loss: Function | None = None) -> Model:
    """A model by its scores; without a loss of its own it has the cross-entropy."""

    def plain(x: PyTree, sample: PyTree) -> Any:
        return cross_entropy(predict(x, sample["x"]), sample["y"])

    def correct(x: PyTree, sample: PyTree) -> Any:
        return (predict(x, sample["x"]).argmax() == sample["y"]).astype(float)

    return _model(init, predict, loss or plain, correct)


def _signs(init: Callable[[int], PyTree], predict: Function, loss: Function) -> Model:
    def correct(x: PyTree, sample: PyTree) -> Any:
        return ((predict(x, sample["x"]) > 0) == (sign(sample["y"]) > 0)).astype(float)  # a score of 0 is −1

    return _model(init, predict, loss, correct)


def _model(init: Callable[[int], PyTree], predict: Function, loss: Function, correct: Function) -> Model:
    metrics = {"accuracy": test_mean(correct), "test_loss": test_mean(loss)}
    return Model(init, predict, loss, correct, metrics)
