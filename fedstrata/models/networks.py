"""Networks of dense layers."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core.types import Array, Function, Integer, PyTree
from fedstrata.models.losses import Loss
from fedstrata.models.model import (
    Model,
    check,
    constructor,
    he,
    model,
    of_functions,
    recorded,
    scalar_if_one,
    squares,
    weight_decay,
)
from fedstrata.support.words import suggest

ACTIVATIONS = {"relu": jax.nn.relu, "gelu": jax.nn.gelu, "softplus": jax.nn.softplus, "tanh": jnp.tanh}


@constructor
def mlp(
    features: int,
    outputs: int,
    hidden: int | tuple[int, ...] = 200,
    lam: float = 0.0,
    loss: str | Loss | Function = "cross_entropy",
    activation: str = "relu",
) -> Model:
    """A network with hidden layers: ``ℓ(f(u), label) + λ/2 ‖x‖²``.

    Args:
        features: the length of an input, after flattening.
        outputs: the number of scores: one per class, or one per number of the label.
        hidden: the number of neurons of the hidden layer, or of each hidden layer, ``(200, 100)``.
        lam: the factor λ of the weight decay.
        loss: a name of `LOSSES`, or a function of ``(scores, label)``.
        activation: ``"relu"``; or ``"gelu"``, ``"softplus"``, ``"tanh"``, which have second derivatives.
    """
    widths = hidden if isinstance(hidden, tuple) else (hidden,)
    for width in widths or (0,):
        check("mlp", features=features, outputs=outputs, hidden=width, lam=lam)
    check("mlp", loss, outputs=outputs)
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"mlp: unknown activation {activation!r}{suggest(activation, list(ACTIVATIONS))} Give one of "
            f"{', '.join(ACTIVATIONS)}."
        )
    rectify = ACTIVATIONS[activation]
    inner = ["hidden", *(f"hidden_{i}" for i in range(2, len(widths) + 1))]

    def init(rng: np.random.Generator) -> PyTree:
        sizes = [features, *widths, outputs]
        return {
            name: {"W": he(rng, inputs, outs), "b": jnp.zeros(outs)}
            for name, inputs, outs in zip([*inner, "output"], sizes[:-1], sizes[1:], strict=True)
        }

    def apply(x: PyTree, u: Any) -> Any:
        u = jnp.ravel(u)
        for name in inner:
            u = rectify(u @ x[name]["W"] + x[name]["b"])
        return scalar_if_one(u @ x["output"]["W"] + x["output"]["b"])

    return model(init, apply, loss, weight_decay(lam))


def sign(label: Integer) -> Any:
    """The sign v of a label in `relu_network`: +1 for even labels, −1 for odd ones."""
    return 1.0 - 2.0 * (label % 2)


@constructor
def relu_network(features: int, neurons: int = 4, lam: float = 0.01, beta: float | None = None) -> Model:
    """FedRZO's network with one hidden layer (section 6.1): ``½ (v − wᵀσ(Zu))² + λ/2 (‖Z‖² + ‖w‖²)``.

    It separates even labels (v = +1) from odd ones (v = −1), and predicts 0 or 1.

    Args:
        features: the length N₀ of an input.
        neurons: the number N₁ of neurons.
        lam: the factor λ of the weight decay.
        beta: the parameter β of σ, the softplus ``ln(1 + exp(β ·))/β``; None is ``max(0, ·)``.
    """
    check("relu_network", features=features, neurons=neurons, lam=lam)
    if beta is not None and not 0 < beta < math.inf:
        raise ValueError(f"relu_network: beta must be a positive number or None, but is {beta!r}.")

    def rectify(t: Array) -> Any:
        return jax.nn.relu(t) if beta is None else jax.nn.softplus(beta * t) / beta

    def init(rng: np.random.Generator) -> PyTree:
        # The scale of He's initialisation; the paper does not give one.
        Z = rng.normal(size=(neurons, features)) * math.sqrt(2 / features)
        return {
            "Z": jnp.asarray(Z, float),
            "w": jnp.asarray(rng.normal(size=neurons) / math.sqrt(neurons), float),
        }

    @recorded
    def apply(x: PyTree, u: Any) -> Any:
        return x["w"] @ rectify(x["Z"] @ jnp.ravel(u))

    def loss(x: PyTree, sample: PyTree) -> Any:
        return 0.5 * (sign(sample["y"]) - apply(x, sample["x"])) ** 2 + lam / 2 * squares(x)

    def decide(score: Array) -> Any:
        return (score <= 0).astype(int)  # a score of 0 is −1

    def correct(x: PyTree, sample: PyTree) -> Any:
        return (decide(apply(x, sample["x"])) == sample["y"] % 2).astype(float)

    return of_functions(init, apply, loss, decide, correct, "two")
