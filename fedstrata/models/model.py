"""A model: initial parameters, scores, a loss of one sample, predictions."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, cast

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core.client import opened
from fedstrata.core.hyperparameters import Number, Whole
from fedstrata.core.term import positional
from fedstrata.core.types import Array, Function, Key, PyTree
from fedstrata.data.storage import Placed
from fedstrata.models.losses import Labels, Loss

SIZE, WEIGHT = Whole(), Number("a finite number ≥ 0", 0.0)
Metric = Callable[[PyTree, PyTree, Placed], Any]
Seed = int | Key
P = ParamSpec("P")


@dataclass(frozen=True, eq=False)
class Model:
    """A model; ``x`` are its parameters, a pytree of arrays.

    Attributes:
        init: ``init(seed)`` draws the parameters; the seed may be a JAX key.
        apply: ``apply(x, u)``, the scores of one input u.
        loss: ``loss(x, sample)`` of one sample ``{"x": u, "y": label}``, with the regulariser.
        decide: maps scores to the prediction: a label, or the numbers themselves.
        correct: ``correct(x, sample)``, 1 if the label is predicted, else 0.
        labels: the kind of labels: ``"classes"``, ``"two"`` classes or ``"numbers"``.
        metrics: name → function of ``(x, y, data)`` on the test data, for `fedstrata.solve`: ``test_loss``,
            and ``accuracy`` for classes.
        probabilities: maps scores to the probabilities of the classes; None if the loss is not a likelihood.
        recipe: the constructor's name and its arguments, from which a saved result rebuilds the model.
    """

    init: Callable[[Seed], PyTree]
    apply: Callable[[PyTree, Any], Any]
    loss: Callable[[PyTree, Any], Any]
    decide: Callable[[Any], Any]
    correct: Callable[[PyTree, Any], Any]
    labels: Labels
    metrics: dict[str, Metric]
    probabilities: Callable[[Any], Any] | None = None
    recipe: tuple[str, dict[str, Any]] | None = None

    def __repr__(self) -> str:
        return f"Model(labels={self.labels!r}, metrics={list(self.metrics)})"

    def predict(self, x: PyTree, inputs: Any) -> np.ndarray:
        """The predictions for stacked inputs: labels of classes, or numbers."""
        return np.asarray(jax.vmap(self.decide)(self._scores(x, inputs)))

    def predict_proba(self, x: PyTree, inputs: Any) -> np.ndarray:
        """The probability of each class for stacked inputs; a row adds up to 1.

        Raises:
            TypeError: if the model's loss is not a likelihood of classes (cross-entropy or logistic).
        """
        if self.probabilities is None:
            raise TypeError(
                "This model has no probabilities: its loss is not the cross-entropy or the logistic loss."
            )
        return np.asarray(jax.vmap(self.probabilities)(self._scores(x, inputs)))

    def _scores(self, x: PyTree, inputs: Any) -> Array:
        return jax.jit(jax.vmap(self.apply, in_axes=(None, 0)))(x, jnp.asarray(inputs))

    def score(self, x: PyTree, samples: PyTree) -> float:
        """The accuracy on ``{"x": inputs, "y": labels}``; for numbers R², as in scikit-learn."""
        if samples is None:
            raise ValueError(
                "score needs samples, but got None: the data has no such part. Load it with test_fraction=…."
            )
        if self.labels != "numbers":
            samples = jax.tree.map(jnp.asarray, samples)
            return float(jax.jit(jax.vmap(self.correct, in_axes=(None, 0)))(x, samples).mean())
        predicted, labels = self.predict(x, samples["x"]), np.asarray(samples["y"])
        residual, spread = (((labels - other) ** 2).sum(0) for other in (predicted, labels.mean(0)))
        return float(np.mean(1 - residual / spread))


def model(
    init: Callable[[np.random.Generator], PyTree],
    apply: Callable[[PyTree, Any], Any],
    loss: str | Loss | Function = "cross_entropy",
    regularizer: Callable[[PyTree], Any] | None = None,
) -> Model:
    """Make a model from its initial parameters and its scores.

    Args:
        init: draws the parameters.
        apply: ``apply(x, u)``, the scores of one input.
        loss: a name of `LOSSES`, or a function of ``(scores, label)``.
        regularizer: a function of the parameters that is added to the loss.
    """
    of, apply = Loss.of(loss), recorded(apply)

    def total(x: PyTree, sample: PyTree) -> Any:
        value = of(apply(x, sample["x"]), sample["y"])
        return value if regularizer is None else value + regularizer(x)

    def correct(x: PyTree, sample: PyTree) -> Any:
        return (of.decide(apply(x, sample["x"])) == sample["y"]).astype(float)

    return of_functions(init, apply, total, of.decide, correct, of.labels, of.probabilities)


def of_functions(
    init: Callable[[np.random.Generator], PyTree],
    apply: Function,
    loss: Function,
    decide: Function,
    correct: Function,
    labels: Labels,
    probabilities: Callable[[Any], Any] | None = None,
) -> Model:
    """Make a model from its functions; adds the metrics."""
    metrics = {} if labels == "numbers" else {"accuracy": test_mean(correct)}
    metrics["test_loss"] = test_mean(loss)

    def start(seed: Seed) -> PyTree:
        return init(generator(seed))

    return Model(start, apply, loss, decide, correct, labels, metrics, probabilities)


SEEN: ContextVar[list[Any] | None] = ContextVar("SEEN", default=None)  # the inputs of models, while recorded


def recorded(apply: Callable[[PyTree, Any], Any]) -> Callable[[PyTree, Any], Any]:
    """The scores, whose input is recorded in `SEEN`: the sample's own, or one computed from it."""

    @functools.wraps(apply)
    def scores(x: PyTree, u: Any) -> Any:
        if (inputs := SEEN.get()) is not None:
            inputs.append(u)
        return apply(x, u)

    return scores


def constructor(function: Callable[P, Model]) -> Callable[P, Model]:
    """Return the same model for the same arguments, and store them with it.

    A model's loss has it as its ``model``, so that the result of a problem made of the loss can predict.
    """
    signature = inspect.signature(function)

    def made(*args: P.args, **given: P.kwargs) -> Model:
        arguments = signature.bind(*args, **given).arguments
        built = replace(function(*args, **given), recipe=(function.__name__, arguments))
        built.loss.model = built.apply.model = built  # type: ignore[attr-defined]
        return built

    return functools.wraps(function)(cast("Callable[P, Model]", functools.cache(made)))


def test_mean(function: Callable[..., Any]) -> Metric:
    """The metric that averages ``function(x, sample)`` or ``function(x, y, sample)`` over the test data."""
    variables = positional(function) - 1

    def metric(x: PyTree, y: PyTree, data: Placed) -> Any:
        if data.test is None:
            raise ValueError("accuracy and test_loss need test data: give test=….")
        return jax.vmap(function, (*[None] * variables, 0))(*(x, y)[:variables], opened(data.test)).mean()

    return metric


test_mean.__test__ = False  # type: ignore[attr-defined]  # not a test of pytest's


def generator(seed: Seed) -> np.random.Generator:
    """NumPy's generator for a seed or a JAX key."""
    if isinstance(seed, jax.Array):
        data = jax.random.key_data(seed) if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key) else seed
        return np.random.default_rng(np.atleast_1d(np.asarray(data)).tolist())
    return np.random.default_rng(seed)


def he(rng: np.random.Generator, *shape: int) -> Array:
    """He's initial weights: normal with variance 2/inputs; the last axis has the outputs."""
    return jnp.asarray(rng.normal(size=shape) * math.sqrt(2 / math.prod(shape[:-1])), jnp.result_type(float))


def squares(x: PyTree) -> Any:
    """‖x‖² over all leaves."""
    return sum(jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(x))


def weight_decay(lam: float) -> Callable[[PyTree], Any] | None:
    """``λ/2 ‖x‖²``, or None for λ = 0."""
    return (lambda x: lam / 2 * squares(x)) if lam else None


def scalar_if_one(scores: Array) -> Array:
    """The scores; a single one as a number."""
    return scores[0] if scores.shape == (1,) else scores


def check(name: str, loss: str | Loss | Function = "squared", **given: object) -> None:
    """Raise for an invalid argument: sizes are integers ≥ 1, ``lam`` is finite and ≥ 0."""
    for key, value in given.items():
        kind = WEIGHT if key == "lam" else SIZE
        if np.ndim(value) > 0 or kind.fault(value) is not None:  # type: ignore[arg-type]
            raise ValueError(f"{name}: {key} must be {kind.words}, but is {value!r}.")
    labels, outputs = Loss.of(loss).labels, given.get("outputs")
    if labels == "classes" and outputs == 1:
        raise ValueError(
            f"{name}: {loss!r} needs an output for each class, at least 2; 'logistic' needs one."
        )
    if labels == "two" and outputs not in (None, 1):
        raise ValueError(
            f"{name}: {loss!r} is for the classes 0 and 1 and needs one output, but has {outputs}. For "
            "several classes, use 'cross_entropy'."
        )
