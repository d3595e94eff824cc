"""Hypergradients without Hessians: second derivatives along a vector, by one pass over a gradient.

    F(x) = f(x, w(x)),   w(x) = argmin_w g(x, w)
    ∇F(x) = ∇_x f − ∇²_xw g · v   at w = w(x),   where  ∇²_ww g · v = ∇_w f

Differentiating ``w ↦ (∇_x g, ∇_w g)`` along v gives ∇_w g, ∇²_ww g·v and ∇²_xw g·v together, at about the
cost of two gradients and with the memory of at most three.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedstrata.core import tree
from fedstrata.core.client import Oracle
from fedstrata.core.types import Function, PyTree
from fedstrata.estimators.gradients import gradients

Products = Literal["exact", "differences"]


class Derivatives(NamedTuple):
    """First and second derivatives of g at (x, w), the second along v."""

    gradient: PyTree  # ∇_w g
    product: PyTree  # ∇²_ww g · v
    mixed: PyTree  # ∇²_xw g · v


class Coupled(NamedTuple):
    """The sequence z = (w, v) of a bilevel problem, or its map S."""

    w: PyTree  # the lower-level variable
    v: PyTree  # the solution of the linear system


def curvature(g: Oracle, x: PyTree, w: PyTree, v: PyTree, products: Products = "exact") -> Derivatives:
    """∇_w g, ∇²_ww g·v and ∇²_xw g·v from one linearisation.

    Args:
        g: the lower level.
        x: the upper variable.
        w: the lower variable.
        v: the direction, like w.
        products: ``"exact"``, or ``"differences"`` for the first-order approximation (∇g(w+εv) −
            ∇g(w−εv))/2ε, which needs only gradients and is exact for quadratics up to rounding.
    """
    g.book("gradients")
    return _curvature(g, x, w, v, products)


def product(g: Oracle, x: PyTree, w: PyTree, v: PyTree, products: Products = "exact") -> PyTree:
    """Only ∇²_ww g·v; see `curvature`."""
    return _curvature(g, x, w, v, products).product


def mixed_product(g: Oracle, x: PyTree, w: PyTree, v: PyTree, products: Products = "exact") -> PyTree:
    """Only ∇²_xw g·v; see `curvature`."""
    return _curvature(g, x, w, v, products).mixed


def _curvature(g: Oracle, x: PyTree, w: PyTree, v: PyTree, products: Products) -> Derivatives:
    def linearised(f: Function) -> Derivatives:
        (_, gradient), (mixed, along) = jax.jvp(lambda w: jax.grad(f, argnums=(0, 1))(x, w), (w,), (v,))
        return Derivatives(gradient, along, mixed)

    def slopes(w: PyTree) -> Any:
        return g.apply(lambda f: jax.grad(f, argnums=(0, 1))(x, w))

    if products == "exact":
        g.book("products")
        derivatives: Derivatives = g.apply(linearised)
        return derivatives
    g.book("gradients", 2)
    epsilon = difference_step(w, v)
    ahead, behind = slopes(tree.axpy(epsilon, v, w)), slopes(tree.axpy(-epsilon, v, w))
    mixed, along = tree.scale(0.5 / epsilon, tree.sub(ahead, behind))
    return Derivatives(slopes(w)[1], along, mixed)


def difference_step(w: PyTree, v: PyTree) -> jax.Array:
    """ε = ∛u (1 + ‖w‖)/‖v‖, u the roundoff: balances the rounding and truncation errors."""
    norm = tree.norm(v)
    unit = jnp.finfo(norm.dtype).eps ** (1 / 3)
    return unit * (1 + tree.norm(w)) / jnp.where(norm > 0, norm, 1)


def bilevel_maps(
    f: Oracle, g: Oracle, x: PyTree, z: Coupled, products: Products = "exact"
) -> tuple[PyTree, Coupled]:
    """The maps of FedMSA, SOBA and SimFBO.

        P = ∇_x f − ∇²_xw g·v,   S = (∇_w g, ∇²_ww g·v − ∇_w f)

    Both vanish if and only if w = w(x), v solves the linear system and ∇F(x) = 0.

    Args:
        f: the upper level.
        g: the lower level.
        x: the upper variable.
        z: ``(w, v)``.
        products: see `curvature`.

    Returns:
        ``(P, S)``.
    """
    f_x, f_w = gradients(f, x, z.w)
    along = curvature(g, x, z.w, z.v, products)
    return tree.sub(f_x, along.mixed), Coupled(along.gradient, tree.sub(along.product, f_w))
