"""Convolutional networks in plain JAX: ResNet20 of He et al. 2016, and a small one for trials.

Parameters are dicts and lists of arrays; a network sees one image, as losses do, and XLA puts the batch
together. Group normalisation takes the place of batch normalisation, whose statistics belong to a batch and
not to a sample, and which averages badly over clients that differ.

Where every client has weights of its own, a convolution becomes one with groups, for which GPUs have no
fast kernels. ``conv="patches"`` writes it as a product of matrices instead, which stays one when it is
batched.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core.types import DType, PyTree
from fedstrata.experiments.models import Model, classifier

MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of CIFAR-10's training images


def convolve(u: jax.Array, w: jax.Array, stride: int = 1, conv: str = "lax") -> jax.Array:
    """A padded 3×3 convolution of an image (height, width, channels) with weights (3, 3, in, out)."""
    if conv == "lax":
        dimensions = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            u[None], w, (stride, stride), ((1, 1), (1, 1)), dimension_numbers=dimensions
        )[0]
    height, width, _ = u.shape
    padded = jnp.pad(u, ((1, 1), (1, 1), (0, 0)))
    shifts = [padded[i : i + height : stride, j : j + width : stride] for i in range(3) for j in range(3)]
    return jnp.concatenate(shifts, axis=-1) @ w.reshape(-1, w.shape[-1])


def normalise(u: jax.Array, p: PyTree, groups: int) -> jax.Array:
    """Group normalisation over space and the channels of a group."""
    height, width, channels = u.shape
    parts = u.reshape(height, width, groups, channels // groups)
    centred = parts - parts.mean((0, 1, 3), keepdims=True)
    scaled = centred * jax.lax.rsqrt((centred**2).mean((0, 1, 3), keepdims=True) + 1e-5)
    return scaled.reshape(u.shape) * p["scale"] + p["shift"]


def _he(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape) * math.sqrt(2 / math.prod(shape[:-1])), jnp.result_type(float))


def _norm(channels: int) -> PyTree:
    return {"scale": jnp.ones(channels), "shift": jnp.zeros(channels)}


@functools.cache
def resnet(blocks: int = 3, width: int = 16, classes: int = 10, conv: str = "lax", groups: int = 8) -> Model:
    """Three stages of ``blocks`` residual blocks, of 1, 2 and 4 ``width`` channels: 6·blocks + 2 layers.

    >>> sum(leaf.size for leaf in jax.tree.leaves(resnet().init(0)))  # ResNet20
    269722
    """
    plan = [(stage, block) for stage in range(3) for block in range(blocks)]

    def init(seed: int) -> PyTree:
        rng = np.random.default_rng(seed)
        layers, before = [], width
        for stage, _ in plan:
            channels = width * 2**stage
            layers.append(
                {
                    "first": _he(rng, 3, 3, before, channels),
                    "first norm": _norm(channels),
                    "second": _he(rng, 3, 3, channels, channels),
                    "second norm": _norm(channels),
                }
            )
            before = channels
        head = {"W": _he(rng, 4 * width, classes) / math.sqrt(2), "b": jnp.zeros(classes)}
        return {"stem": _he(rng, 3, 3, 3, width), "stem norm": _norm(width), "blocks": layers, "head": head}

    def scores(x: PyTree, image: jax.Array) -> jax.Array:
        u = convolve(_as_float(image, x["stem"].dtype), x["stem"], 1, conv)
        u = jax.nn.relu(normalise(u, x["stem norm"], groups))
        for (stage, block), p in zip(plan, x["blocks"], strict=True):
            stride = 2 if stage > 0 and block == 0 else 1
            v = jax.nn.relu(normalise(convolve(u, p["first"], stride, conv), p["first norm"], groups))
            v = normalise(convolve(v, p["second"], 1, conv), p["second norm"], groups)
            if stride == 2:  # the shortcut has no weights: every second pixel, and channels of zeros
                u = jnp.pad(u[::2, ::2], ((0, 0), (0, 0), (0, v.shape[-1] - u.shape[-1])))
            u = jax.nn.relu(u + v)
        return u.mean((0, 1)) @ x["head"]["W"] + x["head"]["b"]

    return classifier(init, scores)


@functools.cache
def small_cnn(width: int = 8, classes: int = 10, conv: str = "lax") -> Model:
    """Two convolutions of stride 2, and a mean over what is left; a few thousand parameters, for trials."""

    def init(seed: int) -> PyTree:
        rng = np.random.default_rng(seed)
        head = {"W": _he(rng, 2 * width, classes), "b": jnp.zeros(classes)}
        return {"first": _he(rng, 3, 3, 3, width), "second": _he(rng, 3, 3, width, 2 * width), "head": head}

    def scores(x: PyTree, image: jax.Array) -> jax.Array:
        u = jax.nn.relu(convolve(_as_float(image, x["first"].dtype), x["first"], 2, conv))
        u = jax.nn.relu(convolve(u, x["second"], 2, conv))
        return u.mean((0, 1)) @ x["head"]["W"] + x["head"]["b"]

    return classifier(init, scores)


def _as_float(image: jax.Array, dtype: DType) -> jax.Array:
    return (image.astype(dtype) / 255 - jnp.asarray(MEAN, dtype)) / jnp.asarray(DEVIATION, dtype)
