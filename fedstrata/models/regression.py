"""Models whose scores are linear in the parameters."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from fedstrata.core.types import Function, PyTree
from fedstrata.models.losses import Loss
from fedstrata.models.model import Model, check, constructor, model, scalar_if_one, squares


@constructor
def linear(
    features: int, outputs: int = 1, loss: str | Loss | Function = "squared", lam: float = 0.0
) -> Model:
    """``ℓ(Wᵀu + b, label) + λ/2 ‖W‖²``; parameters start at zero.

    Args:
        features: the length of an input, after flattening.
        outputs: the number of scores.
        loss: a name of `LOSSES`, or a function of ``(scores, label)``.
        lam: the factor λ of the weight decay.

    >>> ridge = linear(3, lam=0.1)
    >>> float(ridge.loss(ridge.init(0), {"x": np.ones(3), "y": 2.0}))
    2.0
    """
    check("linear", loss, features=features, outputs=outputs, lam=lam)
    return _linear(features, outputs, loss, lam)


@constructor
def softmax(features: int, classes: int, lam: float = 0.0) -> Model:
    """Softmax regression: ``−log p_label + λ/2 ‖W‖²``, with p the softmax of Wᵀu + b.

    >>> model = softmax(64, 10)
    >>> x = model.init(0)
    >>> float(model.loss(x, {"x": np.ones(64), "y": 3}))
    2.3025851249694824
    """
    check("softmax", features=features, classes=classes, lam=lam)
    return _linear(features, classes, "cross_entropy", lam)


def _linear(features: int, outputs: int, loss: str | Loss | Function, lam: float) -> Model:
    def init(rng: np.random.Generator) -> PyTree:
        return {"W": jnp.zeros((features, outputs)), "b": jnp.zeros(outputs)}

    def apply(x: PyTree, u: Any) -> Any:
        scores = jnp.ravel(u) @ x["W"] + x["b"]
        return scalar_if_one(scores)

    return model(init, apply, loss, (lambda x: lam / 2 * squares(x["W"])) if lam else None)


@constructor
def logistic(features: int, lam: float = 0.0) -> Model:
    """Logistic regression: ``log(1 + exp(−v uᵀw)) + λ/2 ‖w‖²``, v = −1 for label 0 and +1 for label 1.

    The only parameter is the vector w; `linear` with ``loss="logistic"`` also has an intercept.
    """
    check("logistic", features=features, lam=lam)

    def init(rng: np.random.Generator) -> PyTree:
        return jnp.zeros(features)

    def apply(x: PyTree, u: Any) -> Any:
        return jnp.ravel(u) @ x

    return model(init, apply, "logistic", (lambda x: lam / 2 * squares(x)) if lam else None)
