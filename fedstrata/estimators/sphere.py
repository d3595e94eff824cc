"""Two-point estimates on the sphere: a direction from function values alone.

    v uniform on the sphere of radius η in Rⁿ
    one-sided   g = n/η² (f(x+v) − f(x)) v
    two-sided   g = n/(2η²) (f(x+v) − f(x−v)) v

Both are unbiased for ∇f^η(x), the gradient of f smoothed over the ball of radius η. The sample is the same at both
points. The scalar in front of v is all that has to travel where both sides can draw v.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax

from fedstrata import tree

PyTree = Any


def sphere(key: jax.Array, like: PyTree, radius: Any = 1.0) -> PyTree:
    """A point drawn uniformly from the sphere of ``radius`` in the space of the flattened ``like``."""
    v = optax.tree.random_like(key, like, jax.random.normal)
    return tree.scale(radius / tree.norm(v), v)


def two_point_scalar(
    f: Callable[[PyTree], jax.Array], x: PyTree, v: PyTree, radius: Any, two_sided: bool = False
) -> jax.Array:
    """The factor of ``v`` in the two-point estimate, where ``‖v‖ = radius``."""
    n = tree.dimension(x)
    if two_sided:
        return n / (2 * radius**2) * (f(tree.add(x, v)) - f(tree.sub(x, v)))
    return n / radius**2 * (f(tree.add(x, v)) - f(x))


def two_point(
    f: Callable[[PyTree], jax.Array], x: PyTree, v: PyTree, radius: Any, two_sided: bool = False
) -> PyTree:
    """The two-point estimate ``g`` of ∇f^η(x) along ``v``, where ``‖v‖ = radius``."""
    return tree.scale(two_point_scalar(f, x, v, radius, two_sided), v)
