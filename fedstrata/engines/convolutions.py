"""Convolutions with weights of each client's own become products of matrices, before a program is compiled.

If each client has its own weights, `jax.vmap` makes one convolution with a group for each client of a
user's convolution, and so of its derivatives. GPUs have no fast kernels for those. With g the client, k over
the window and p over the output's positions, such a convolution is

    y[g, n, p, o] = Σ_{k, c} u[g, n, s p + d k, c] w[g, k, c, o],

a product of matrices for each client, once the entries u[…, s p + d k, …] lie side by side. Three forms:

    patches    side by side over the window k; one product over (k, c)
    sums       the products over c for all k at once, shifted and added: fewer numbers where o is less than c
               or u is dilated, as in the derivative by a layer's input
    positions  side by side over the few positions p of a large window, as in the derivative by the weights

On an H200 products are the quicker for all shapes of ``python -m benchmarks.networks forms``: windows of 3×3
and 5×5, 3 to 256 channels, 8 to 50 clients.

The pass sees the program after it was mapped and differentiated. So it touches what has groups and nothing
else: evaluations at one point and frozen layers stay as they are, and neither layout, stride, padding and
dilation nor the library that a model is written in make a difference.

On a CPU the axes of all other convolutions are put in the order that XLA's kernel takes, see `in_order`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from fedstrata.core.types import Array
from fedstrata.support.equations import Equation, Jaxpr, replaced

MOST = 32  # entries of a window, or positions, that are put side by side


class Shape(NamedTuple):
    """A convolution with groups, as the rule that chooses a form sees it.

    Attributes:
        groups: how many there are.
        batch: the images of a group.
        positions: of the output.
        window: entries of it.
        channels, outputs: of a group.
        entries: of an image.
    """

    groups: int
    batch: int
    positions: int
    window: int
    channels: int
    outputs: int
    entries: int


def form_of(shape: Shape, platform: str) -> str | None:
    """The form in which a convolution is computed; None as it is."""
    if shape.groups == 1 or min(shape.window, shape.positions) > MOST:
        return None
    if shape.channels * shape.outputs == 1:  # a user's own depthwise layer: there is nothing to multiply
        return None
    if shape.window > shape.positions:
        return "positions"
    # what is written side by side, in each form
    return "sums" if shape.outputs * shape.entries < shape.channels * shape.positions else "patches"


def product(form: str, u: Array, w: Array, *, params: dict[str, Any]) -> Array:
    """The convolution ``lax.conv_general_dilated_p.bind(u, w, **params)`` by products of matrices."""
    spec, groups, rank = params["dimension_numbers"], params["feature_group_count"], u.ndim - 2

    def ordered(a: Array, grouped: int, *axes: int) -> Array:
        """The axes in this order behind one of the groups, which is split off where it was merged.

        So what `jax.vmap` merged cancels, and equal arrays are equal to the compiler.
        """
        a = a.reshape(*a.shape[:grouped], groups, -1, *a.shape[grouped + 1 :])
        return a.transpose(grouped, *(axis + (axis >= grouped) for axis in axes))

    n, c, *space = spec.lhs_spec
    o, i, *over = spec.rhs_spec
    w = ordered(w, o, *over, i, o)  # g, window, c, o
    # By positions, channels are the batch of a forward pass, whose patches are then the same array.
    u = ordered(u, c, c, *space, n) if form == "positions" else ordered(u, c, n, *space, c)
    dilated = zip(params["padding"], params["lhs_dilation"], strict=True)
    within = [(0, 0, 0)] * 2 + [(low, high, d - 1) for (low, high), d in dilated] + [(0, 0, 0)]

    def padded(u: Array) -> Array:
        return lax.pad(u, jnp.zeros((), u.dtype), within)

    raw, u = u, padded(u)
    window, strides, dilation = w.shape[1 : 1 + rank], params["window_strides"], params["rhs_dilation"]
    sizes = zip(u.shape[2 : 2 + rank], window, strides, dilation, strict=True)
    out = [(size - (k - 1) * d - 1) // s + 1 for size, k, s, d in sizes]

    def cut(starts: tuple[int, ...], lengths: Any, steps: Any, u: Array = u) -> Array:
        ends = [a + s * (length - 1) + 1 for a, length, s in zip(starts, lengths, steps, strict=True)]
        return lax.slice(u, (0, 0, *starts, 0), (*u.shape[:2], *ends, u.shape[-1]), (1, 1, *steps, 1))

    def at(index: tuple[int, ...], factor: Any) -> tuple[int, ...]:
        return tuple(i * f for i, f in zip(index, factor, strict=True))

    def times(rows: Array, columns: Array, of_rows: Sequence[int], of_columns: Sequence[int]) -> Array:
        dimensions = ((tuple(of_rows), tuple(of_columns)), ((0,), (0,)))
        precision, dtype = params["precision"], params["preferred_element_type"]
        return lax.dot_general(rows, columns, dimensions, precision=precision, preferred_element_type=dtype)

    entries, last = list(itertools.product(*map(range, window))), rank + 2
    if form == "patches":
        beside = jnp.concatenate([cut(at(k, dilation), out, strides) for k in entries], -1)
        y = times(beside, w.reshape(groups, -1, w.shape[-1]), [last], [1])
    elif form == "sums":
        all_k = jnp.moveaxis(w, -2, 1).reshape(groups, w.shape[-2], -1)  # g, c, (window o)
        z = jnp.split(times(raw, all_k, [last], [1]), len(entries), -1)
        pieces = [
            cut(at(k, dilation), out, strides, padded(part)) for k, part in zip(entries, z, strict=True)
        ]
        # added up in float32: in bfloat16 every sum would be rounded
        dtype = pieces[0].dtype
        wide = jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.inexact) else dtype
        y = sum((piece.astype(wide) for piece in pieces[1:]), pieces[0].astype(wide)).astype(dtype)
    else:
        pieces = [cut(at(p, strides), window, dilation) for p in itertools.product(*map(range, out))]
        beside = jnp.concatenate(pieces, -1)  # g, c, window, (positions n)
        y = times(beside, w, range(1, last), [last - 1, *range(1, last - 1)])
        y = jnp.moveaxis(y.reshape(groups, *out, -1, y.shape[-1]), -2, 1)  # g, n, positions, o
    return _in_place(y, spec.out_spec)


def _in_place(y: Array, out_spec: Sequence[int]) -> Array:
    """The axes of y, which are g, n, space and o, where they belong: g before o, merged with it."""
    n, o, *space = out_spec
    places = [(n, 1), (o, 0), (o, y.ndim - 1), *((axis, 2 + k) for k, axis in enumerate(space))]
    y = y.transpose([axis for _, axis in sorted(places)])
    return y.reshape(*y.shape[:o], -1, *y.shape[o + 2 :])


def in_order(u: Array, w: Array, *, params: dict[str, Any]) -> Array:
    """The same convolution with its axes in the order that XLA's kernel for CPUs takes: channels last.

    XLA orders them by itself, but not inside of loops, where all training is. There a derivative by the
    weights (10 images of 30×30, 32 to 64 channels) takes 510 ms with JAX 0.10, and 3 ms in order.
    """
    spec, numbers = params["dimension_numbers"], _channels_last(u.ndim)
    (n, c, *space), (o, i, *over) = spec.lhs_spec, spec.rhs_spec
    u, w = u.transpose(n, *space, c), w.transpose(*over, i, o)
    y = lax.conv_general_dilated_p.bind(u, w, **{**params, "dimension_numbers": numbers})
    places = zip(spec.out_spec, numbers.out_spec, strict=True)  # of batch, channels and space, there and here
    return y.transpose([here for _, here in sorted(places)])


def _channels_last(ndim: int) -> lax.ConvDimensionNumbers:
    last, space = ndim - 1, range(1, ndim - 1)
    image, window = (0, last, *space), (last, last - 1, *range(ndim - 2))
    return lax.ConvDimensionNumbers(image, window, image)


def rewritten(
    jaxpr: Jaxpr, platform: str, choose: Callable[[Shape, str], str | None] = form_of
) -> tuple[Jaxpr, int]:
    """A jaxpr whose convolutions with groups are products, and the number of these.

    Args:
        jaxpr: of a program, after it was mapped and differentiated.
        platform: of the device.
        choose: the rule, see `form_of`.
    """
    number = 0

    def instead(eqn: Equation) -> Callable[..., Array] | None:
        nonlocal number
        if (shape := _shape(eqn)) is None:
            return None
        if (form := choose(shape, platform)) is not None:
            number += 1
            return partial(product, form, params=eqn.params)
        ordered = eqn.params["dimension_numbers"] == _channels_last(eqn.invars[0].aval.ndim)
        return None if platform != "cpu" or ordered else partial(in_order, params=eqn.params)

    return replaced(jaxpr, instead), number


def _shape(eqn: Equation) -> Shape | None:
    """Of a convolution with groups; None where the batch is what has groups, and for other equations."""
    if eqn.primitive.name != "conv_general_dilated":
        return None
    spec, groups = eqn.params["dimension_numbers"], eqn.params["feature_group_count"]
    if eqn.params["batch_group_count"] != 1:
        return None
    u, w, y = (v.aval.shape for v in (*eqn.invars, *eqn.outvars))
    if 0 in (*u, *w, *y):
        return None
    return Shape(
        groups, u[spec.lhs_spec[0]], math.prod(y[i] for i in spec.out_spec[2:]),
        math.prod(w[i] for i in spec.rhs_spec[2:]), w[spec.rhs_spec[1]], w[spec.rhs_spec[0]] // groups,
        math.prod(u[i] for i in spec.lhs_spec[2:]),
    )  # fmt: skip
