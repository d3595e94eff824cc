"""Convolutional networks in plain JAX: ResNet20 of He et al. 2016, and a small one.

Parameters are dicts and lists of arrays. A network takes one image (height, width, channels), as losses do,
and XLA forms the batch. Group normalisation replaces batch normalisation, whose statistics depend on the
batch and average badly over clients that differ.

Integer images with values 0 … 255 are scaled to about mean 0 and standard deviation 1 (CIFAR-10's, if they
have three channels); floating-point images are used unchanged.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core.types import Array, DType, Function, PyTree
from fedstrata.models.losses import Loss
from fedstrata.models.model import Model, check, constructor, he, model, scalar_if_one, weight_decay

MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of CIFAR-10's training images


def convolve(u: Array, w: Array, stride: int = 1) -> Array:
    """A padded 3×3 convolution of an image (height, width, channels) with weights (3, 3, in, out)."""
    dimensions = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        u[None], w, (stride, stride), ((1, 1), (1, 1)), dimension_numbers=dimensions
    )[0]


def normalise(u: Array, p: PyTree, groups: int) -> Array:
    """Group normalisation over space and the channels of a group."""
    height, width, channels = u.shape
    parts = u.reshape(height, width, groups, channels // groups)
    centred = parts - parts.mean((0, 1, 3), keepdims=True)
    scaled = centred * jax.lax.rsqrt((centred**2).mean((0, 1, 3), keepdims=True) + 1e-5)
    return scaled.reshape(u.shape) * p["scale"] + p["shift"]


def _norm(channels: int) -> PyTree:
    return {"scale": jnp.ones(channels), "shift": jnp.zeros(channels)}


@constructor
def resnet(
    blocks: int = 3,
    width: int = 16,
    outputs: int = 10,
    groups: int = 8,
    *,
    channels: int = 3,
    shape: tuple[int, ...] | None = None,
    lam: float = 0.0,
    loss: str | Loss | Function = "cross_entropy",
) -> Model:
    """Three stages of ``blocks`` residual blocks, of 1, 2 and 4 ``width`` channels: 6·blocks + 2 layers.

    Args:
        blocks: the number of blocks of a stage.
        width: the channels of the first stage.
        outputs: the number of scores.
        groups: the number of groups in the normalisation; it must divide ``width``.
        channels: the channels of an image.
        shape: ``(height, width, channels)`` for flat inputs.
        lam: the factor λ of the weight decay λ/2 ‖x‖².
        loss: a name of `LOSSES`, or a function of ``(scores, label)``.

    >>> sum(leaf.size for leaf in jax.tree.leaves(resnet().init(0)))  # ResNet20
    269722
    """
    check("resnet", loss, blocks=blocks, width=width, outputs=outputs, groups=groups, lam=lam)
    _check_image("resnet", channels, shape)
    if width % groups:
        raise ValueError(f"resnet: groups must divide width={width}, but is {groups}.")
    plan = [(stage, block) for stage in range(3) for block in range(blocks)]

    def init(rng: np.random.Generator) -> PyTree:
        layers, before = [], width
        for stage, _ in plan:
            after = width * 2**stage
            layers.append(
                {
                    "first": he(rng, 3, 3, before, after),
                    "first norm": _norm(after),
                    "second": he(rng, 3, 3, after, after),
                    "second norm": _norm(after),
                }
            )
            before = after
        head = {"W": he(rng, 4 * width, outputs) / math.sqrt(2), "b": jnp.zeros(outputs)}
        stem = he(rng, 3, 3, channels, width)
        return {"stem": stem, "stem norm": _norm(width), "blocks": layers, "head": head}

    def apply(x: PyTree, image: Array) -> Array:
        u = convolve(_pixels(image, shape, x["stem"].dtype), x["stem"], 1)
        u = jax.nn.relu(normalise(u, x["stem norm"], groups))
        for (stage, block), p in zip(plan, x["blocks"], strict=True):
            stride = 2 if stage > 0 and block == 0 else 1
            v = jax.nn.relu(normalise(convolve(u, p["first"], stride), p["first norm"], groups))
            v = normalise(convolve(v, p["second"], 1), p["second norm"], groups)
            if stride == 2:  # the shortcut has no weights: every second pixel, and channels of zeros
                u = jnp.pad(u[::2, ::2], ((0, 0), (0, 0), (0, v.shape[-1] - u.shape[-1])))
            u = jax.nn.relu(u + v)
        return scalar_if_one(u.mean((0, 1)) @ x["head"]["W"] + x["head"]["b"])

    return model(init, apply, loss, weight_decay(lam))


def resnet20(
    channels: int = 3,
    outputs: int = 10,
    *,
    shape: tuple[int, ...] | None = None,
    lam: float = 0.0,
    loss: str | Loss | Function = "cross_entropy",
) -> Model:
    """ResNet20 (He et al. 2016) with group normalisation: 269,722 parameters for CIFAR-10.

    Args:
        channels: the channels of an image.
        outputs: the number of scores.
        shape: ``(height, width, channels)`` for flat inputs.
        lam: the factor λ of the weight decay λ/2 ‖x‖².
        loss: a name of `LOSSES`, or a function of ``(scores, label)``.
    """
    return resnet(3, 16, outputs, channels=channels, shape=shape, lam=lam, loss=loss)


@constructor
def cnn(
    channels: int = 3,
    outputs: int = 10,
    width: int = 8,
    *,
    shape: tuple[int, ...] | None = None,
    lam: float = 0.0,
    loss: str | Loss | Function = "cross_entropy",
) -> Model:
    """Two convolutions of stride 2 and the mean over the pixels: a few thousand parameters.

    Args:
        channels: the channels of an image.
        outputs: the number of scores.
        width: the channels of the first convolution; the second has twice as many.
        shape: ``(height, width, channels)`` for flat inputs.
        lam: the factor λ of the weight decay λ/2 ‖x‖².
        loss: a name of `LOSSES`, or a function of ``(scores, label)``.
    """
    check("cnn", loss, outputs=outputs, width=width, lam=lam)
    _check_image("cnn", channels, shape)

    def init(rng: np.random.Generator) -> PyTree:
        head = {"W": he(rng, 2 * width, outputs), "b": jnp.zeros(outputs)}
        first, second = he(rng, 3, 3, channels, width), he(rng, 3, 3, width, 2 * width)
        return {"first": first, "second": second, "head": head}

    def apply(x: PyTree, image: Array) -> Array:
        u = jax.nn.relu(convolve(_pixels(image, shape, x["first"].dtype), x["first"], 2))
        u = jax.nn.relu(convolve(u, x["second"], 2))
        return scalar_if_one(u.mean((0, 1)) @ x["head"]["W"] + x["head"]["b"])

    return model(init, apply, loss, weight_decay(lam))


def _check_image(name: str, channels: int, shape: tuple[int, ...] | None) -> None:
    check(name, channels=channels)
    if shape is not None and (len(shape) != 3 or shape[-1] != channels):
        raise ValueError(f"{name}: shape must be (height, width, {channels}), but is {shape}.")


def _pixels(image: Array, shape: tuple[int, ...] | None, dtype: DType) -> Array:
    image = jnp.asarray(image)
    if shape is not None:
        image = image.reshape(shape)
    if image.ndim != 3:
        raise ValueError(
            f"An image has the axes (height, width, channels), but this has shape {image.shape}: give "
            "shape=(height, width, channels) if images are flat."
        )
    if jnp.issubdtype(image.dtype, jnp.floating):
        return image.astype(dtype)
    mean, deviation = (MEAN, DEVIATION) if image.shape[-1] == len(MEAN) else (0.5, 0.25)
    return (image.astype(dtype) / 255 - jnp.asarray(mean, dtype)) / jnp.asarray(deviation, dtype)
