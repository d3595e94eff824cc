"""Losses ``ℓ(scores, label)`` of one sample. A label without a score gives NaN, which ends a run.

cross_entropy   log Σ exp(scores) − scores[label]       labels 0 … K−1, one score for each
logistic        log(1 + exp(−v score)), v = 2 label − 1   labels 0 and 1; sigmoid(score) is P(label = 1)
hinge           max(0, 1 − v score)                       labels 0 and 1
squared         ½ ‖scores − label‖²                       numbers
absolute        ‖scores − label‖₁                         numbers
huber           ½ r² for |r| ≤ 1, else |r| − ½            numbers, summed over r = scores − label
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import optax

from fedstrata.core.types import Array, Integer
from fedstrata.support.words import misspelt, suggest

Labels: TypeAlias = Literal["classes", "two", "numbers"]


@dataclass(frozen=True)
class Loss:
    """A loss with its kind of labels and its predictions; calling it gives ``ℓ(scores, label)``.

    Attributes:
        value: ``value(scores, label)``, one number.
        labels: the kind of labels: ``"classes"`` 0 … K−1 with a score for each, ``"two"`` classes 0 and 1
            with one score, or ``"numbers"``.
        decide: maps scores to the prediction.
        probabilities: maps scores to the probabilities of the classes, if the loss is a log-likelihood.
    """

    value: Callable[[Any, Any], Any]
    labels: Labels = "numbers"
    decide: Callable[[Any], Any] = lambda scores: scores
    probabilities: Callable[[Any], Any] | None = None

    def __call__(self, scores: Any, label: Any) -> Any:
        """``ℓ(scores, label)``."""
        return self.value(scores, label)

    @staticmethod
    def of(loss: str | Loss | Callable[[Any, Any], Any]) -> Loss:
        """The loss of this name, or a function ``ℓ(scores, label)`` of numbers as a loss."""
        if isinstance(loss, Loss):
            return loss
        if isinstance(loss, str):
            if loss not in LOSSES:
                raise ValueError(
                    f"Unknown loss {loss!r}{suggest(loss, list(LOSSES))} Give one of {', '.join(LOSSES)}."
                )
            return LOSSES[loss]
        if not callable(loss):
            raise TypeError(
                f"loss must be one of {', '.join(LOSSES)}, or a function of (scores, label), but is {loss!r}."
            )
        return Loss(loss)


def cross_entropy(scores: Array, label: Integer) -> Array:
    """``−log softmax(scores)_label``; NaN for a label without a score, for which JAX may use another one."""
    value = optax.softmax_cross_entropy_with_integer_labels(scores, label)
    return jnp.where((label >= 0) & (label < scores.shape[-1]), value, jnp.nan)


@jax.custom_jvp
def softplus(t: Any) -> Any:
    """``log(1 + exp(t))`` with the derivative 1/(1 + exp(−t)).

    The derivative of JAX's own softplus has a logarithm and two exponentials: it is slower, also to compile.
    """
    return jnp.maximum(t, 0) + jnp.log1p(jnp.exp(-jnp.abs(t)))


softplus.defjvps(lambda tangent, value, t: tangent * jax.nn.sigmoid(t))


def logistic(score: Array, label: Integer) -> Array:
    """``log(1 + exp(−v score))`` with v = −1 for label 0 and +1 for label 1; NaN for others."""
    return _two(softplus(-_sign(label) * score), label)


def hinge(score: Array, label: Integer) -> Array:
    """``max(0, 1 − v score)`` with v = −1 for label 0 and +1 for label 1; NaN for others."""
    return _two(jax.nn.relu(1 - _sign(label) * score), label)


def squared(scores: Array, label: Array) -> Array:
    """``½ ‖scores − label‖²``."""
    return 0.5 * (_residual(scores, label) ** 2).sum()


def absolute(scores: Array, label: Array) -> Array:
    """``‖scores − label‖₁``."""
    return jnp.abs(_residual(scores, label)).sum()


def huber(scores: Array, label: Array) -> Array:
    """``Σ ½ r²`` where |r| ≤ 1, else ``|r| − ½``; r = scores − label."""
    return optax.huber_loss(_residual(scores, label)).sum()


def _sign(label: Integer) -> Any:
    return 2.0 * label - 1.0


def _two(value: Array, label: Integer) -> Array:
    return jnp.where((label == 0) | (label == 1), value, jnp.nan)


def _residual(scores: Array, label: Array) -> Array:
    if jnp.size(scores) != jnp.size(label):
        raise ValueError(
            f"The scores have shape {jnp.shape(scores)}, but the label has {jnp.shape(label)}: give the "
            "model one output per number of the label."
        )
    return scores - jnp.asarray(label, scores.dtype).reshape(scores.shape)


def _largest(scores: Array) -> Array:
    return scores.argmax(-1)


def _positive(score: Array) -> Array:
    return (score > 0).astype(int)


def _both(score: Array) -> Array:
    return jnp.stack([jax.nn.sigmoid(-score), jax.nn.sigmoid(score)], axis=-1)


LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(cross_entropy, "classes", _largest, jax.nn.softmax),
    "logistic": Loss(logistic, "two", _positive, _both),
    "hinge": Loss(hinge, "two", _positive),
    "squared": Loss(squared),
    "absolute": Loss(absolute),
    "huber": Loss(huber),
}

if not TYPE_CHECKING:  # for type checkers, a module with __getattr__ has every name
    __getattr__ = misspelt(__name__)
