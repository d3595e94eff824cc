"""Learning problems with hyper-parameters as the upper variable, for any model ``predict(y, features)``.

A sample is ``{"x": features, "y": label}``, plus entries that a problem adds. All problems use the
cross-entropy ℓ(scores, label) = log Σ exp(scores) − scores[label] at both levels.

    loss_tuning          upper Σ_c mean of ℓ in class c,   lower ℓ(σ(Δ)·scores + b)
    hypercleaning        upper ℓ on clean samples,         lower σ(x_i) ℓ of sample i + λ‖y‖²
    hyperrepresentation  upper ℓ(y_m · φ(x)) on validation samples, lower the same on training ones + λ‖y_m‖²
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedstrata.core.term import Applied
from fedstrata.core.types import Function, PyTree
from fedstrata.models.losses import cross_entropy
from fedstrata.problems.classes import Bilevel
from fedstrata.problems.terms import per_sample


def loss_tuning(predict: Function) -> Bilevel:
    """Tune a loss for unbalanced classes (Li et al. 2021; used in FedNest's and FedMSA's experiments).

    ``x = {"delta": Δ, "shift": b}`` has one number per class in each, and starts at zero. Validation samples
    have a ``"weight"`` that gives all classes equal weight; see `balance`.

    Args:
        predict: ``predict(y, features)`` returns the scores.
    """
    per_sample(predict, "loss_tuning: predict", "it sees one sample's features")
    return Bilevel(Applied(_weighted, predict), Applied(_tuned, predict))


def balance(labels: np.ndarray, classes: int) -> np.ndarray:
    """Weights N/(C N_c) of samples, so that the weighted mean of losses is the mean of the class means.

    >>> balance(np.array([0, 0, 0, 1]), 2)
    array([0.66666667, 0.66666667, 0.66666667, 2.        ])
    """
    counts = np.bincount(labels, minlength=classes)
    return labels.size / (np.count_nonzero(counts) * counts[labels])


def hypercleaning(predict: Function, lam: float) -> Bilevel:
    """Data hyper-cleaning: learn a weight σ(x_i) of each training sample (Franceschi et al. 2017).

    ``x`` has one number per training sample of all clients; samples have an ``"index"`` into it.

    Args:
        predict: ``predict(y, features)`` returns the scores.
        lam: the ℓ2 weight λ > 0; the lower level is strongly convex if the scores are linear in y.
    """
    if lam <= 0:
        raise ValueError(f"hypercleaning needs lam > 0, but it is {lam!r}.")
    per_sample(predict, "hypercleaning: predict", "it sees one sample's features")
    return Bilevel(Applied(_plain, predict), Applied(_cleaned, predict, lam))


def hyperrepresentation(features: Function, lam: float, local: bool = False) -> Bilevel:
    """A representation shared by all clients, and a linear head for each client.

    ``x`` has the parameters of the representation, and ``y`` the heads on a leading client axis,
    ``{"W": (clients, features, classes), "b": (clients, classes)}``; samples have an entry ``"client"``
    (`FederatedData.with_client_index`). With ``local=True`` a head never leaves its client, and ``y0`` is one
    head, without that axis.

    Args:
        features: ``features(x, inputs)``, the representation φ.
        lam: the ℓ2 weight λ > 0, which makes the lower level strongly convex.
        local: whether this is a ``fs.Bilevel(…, local=True)``; the solutions are the same.
    """
    if lam <= 0:
        raise ValueError(f"hyperrepresentation needs lam > 0, but it is {lam!r}.")
    per_sample(features, "hyperrepresentation: features", "it sees one sample's features")
    head = _head if local else _head_of_client
    return Bilevel(Applied(head, features, 0.0), Applied(head, features, lam), local=local)


def _weighted(predict: Function, x: PyTree, y: PyTree, sample: PyTree) -> Any:
    return sample["weight"] * cross_entropy(predict(y, sample["x"]), sample["y"])


def _tuned(predict: Function, x: PyTree, y: PyTree, sample: PyTree) -> Any:
    scores = jax.nn.sigmoid(x["delta"]) * predict(y, sample["x"]) + x["shift"]
    return cross_entropy(scores, sample["y"])


def _plain(predict: Function, x: PyTree, y: PyTree, sample: PyTree) -> Any:
    return cross_entropy(predict(y, sample["x"]), sample["y"])


def _cleaned(predict: Function, lam: float, x: PyTree, y: PyTree, sample: PyTree) -> Any:
    loss = cross_entropy(predict(y, sample["x"]), sample["y"])
    return jax.nn.sigmoid(x[sample["index"]]) * loss + lam * optax.tree.norm(y, squared=True)


def _head(features: Function, lam: float, x: PyTree, y: PyTree, sample: PyTree) -> Any:
    W, b = y["W"], y["b"]
    loss = cross_entropy(features(x, sample["x"]) @ W + b, sample["y"])
    return loss + lam * (jnp.vdot(W, W) + jnp.vdot(b, b)) if lam else loss


def _head_of_client(features: Function, lam: float, x: PyTree, y: PyTree, sample: PyTree) -> Any:
    own = jax.tree.map(lambda leaf: leaf[sample["client"]], y)
    return _head(features, lam, x, own, sample)
