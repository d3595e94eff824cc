"""Two-point estimates on the sphere: directions from function values only.

    v uniform on the sphere of radius η in Rⁿ
    one-sided   g = n/η² (f(x+v) − f(x)) v
    two-sided   g = n/(2η²) (f(x+v) − f(x−v)) v

Both are unbiased for ∇f^η(x), the gradient of f smoothed over the ball of radius η. Both points use the same
sample. If both sides can draw v, only the factor of v has to travel.

With several directions v_1 … v_b, g is the mean of their estimates. Each v_j is uniform, so orthogonal
directions are unbiased too; with b = n of them and a small η the estimate is the full gradient.

    d = directions(key, x, η, b, orthogonal)       stacked
    z = points(x, d)                               x, x+v_1, …, x+v_b (or x+v_1, …, x−v_1, … two-sided)
    s = scalars(f at z, n, η)                      s_j = n/(bη²) (f(x+v_j) − f(x))
    g = combine(s, d)                              Σ_j s_j v_j
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from fedstrata.core import tree
from fedstrata.core.client import Oracle
from fedstrata.core.counting import each
from fedstrata.core.types import PyTree, Real


def sphere(key: jax.Array, like: PyTree, radius: Real = 1.0) -> PyTree:
    """A point drawn uniformly from the sphere of ``radius`` in the space of the flattened ``like``."""
    v = optax.tree.random_like(key, like, jax.random.normal)
    return tree.scale(radius / tree.norm(v), v)


def two_point(
    f: Callable[[PyTree], jax.Array], x: PyTree, v: PyTree, radius: Real, two_sided: bool = False
) -> PyTree:
    """The two-point estimate ``g`` of ∇f^η(x) along ``v``, where ``‖v‖ = radius``."""
    one = jax.tree.map(lambda leaf: leaf[None], v)
    return combine(estimate(f, x, one, radius, two_sided), one)


def directions(
    key: jax.Array, like: PyTree, radius: Real = 1.0, count: int = 1, orthogonal: bool = False
) -> PyTree:
    """``count`` points of the sphere, stacked: independent or orthogonal."""
    if count == 1:
        return jax.tree.map(lambda leaf: leaf[None], sphere(key, like, radius))
    if not orthogonal:
        return jax.vmap(lambda key: sphere(key, like, radius))(jax.random.split(key, count))
    flat, unravel = ravel_pytree(like)
    columns, triangle = jnp.linalg.qr(jax.random.normal(key, (flat.size, count), flat.dtype))
    # without these signs the distribution would depend on the QR implementation
    columns = columns * jnp.sign(jnp.diagonal(triangle))
    return tree.scale(radius, jax.vmap(unravel)(columns.T))


def points(x: PyTree, stacked: PyTree, two_sided: bool = False) -> PyTree:
    """The points of the estimate, stacked: ``x, x+v_1, …``, or two-sided ``x+v_1, …, x−v_1, …``."""

    def at(a: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.concatenate([a + v, a - v] if two_sided else [a[None], a + v])

    return jax.tree.map(at, x, stacked)


def scalars(values: jax.Array, n: int, radius: Real, two_sided: bool = False) -> jax.Array:
    """The factors of the directions in the estimate, from the values at `points`."""
    change = _changes(values, two_sided)
    return _factor(n, len(change), radius, two_sided) * change


def estimate(
    f: Callable[[PyTree], jax.Array], x: PyTree, stacked: PyTree, radius: Real, two_sided: bool = False
) -> jax.Array:
    """The factors of all directions for a function ``f``: `scalars` of its values at `points`."""
    change = _differences(f, x, stacked, two_sided)
    return _factor(tree.dimension(x), len(change), radius, two_sided) * change


def estimate_of_mean(
    f: Oracle, x: PyTree, stacked: PyTree, radius: Real, two_sided: bool = False
) -> jax.Array:
    """`estimate` of an oracle, whose differences are taken sample by sample."""
    count = jax.tree.leaves(stacked)[0].shape[0]
    f.book("values", 2 * count if two_sided else count + 1)
    change = f.apply(lambda mean: _differences(mean, x, stacked, two_sided), "values")
    return _factor(tree.dimension(x), count, radius, two_sided) * change


def _differences(f: Callable[[PyTree], jax.Array], x: PyTree, stacked: PyTree, two_sided: bool) -> jax.Array:
    """``f(x+v_j) − f(x)``, or ``f(x+v_j) − f(x−v_j)`` two-sided, of all directions."""
    if jax.tree.leaves(stacked)[0].shape[0] == 1:  # two plain calls compile faster than a vmap
        v = tree.row(stacked, 0)
        return (f(tree.add(x, v)) - f(tree.sub(x, v) if two_sided else x))[None]
    return _changes(each(f, points(x, stacked, two_sided)), two_sided)


def _changes(values: jax.Array, two_sided: bool) -> jax.Array:
    """The differences of the values at `points`."""
    half = values.shape[0] // 2
    return values[:half] - values[half:] if two_sided else values[1:] - values[0]


def _factor(n: int, count: int, radius: Real, two_sided: bool) -> Real:
    """n/(bη²), half of it two-sided."""
    return n / ((2 if two_sided else 1) * count * radius**2)


def combine(factors: jax.Array, stacked: PyTree) -> PyTree:
    """``Σ_j factors_j v_j``."""
    return jax.tree.map(lambda v: jnp.tensordot(factors.astype(v.dtype), v, axes=1), stacked)


def check_directions(owner: str, count: int, orthogonal: bool, x: PyTree) -> None:
    """Raise if there are more orthogonal directions than dimensions."""
    if orthogonal and count > tree.dimension(x):
        raise ValueError(
            f"{owner}: {count} orthogonal directions need as many dimensions, but x has {tree.dimension(x)}."
        )


def theory_steps(K: int, clients: int) -> tuple[float, int]:
    """The theorems' γ = √(m/K) and H = ⌈(K/m³)^¼⌉ for K local steps of each of m clients."""
    if K < 1 or clients < 1:
        raise ValueError(f"K and clients must be at least 1, but got {K} and {clients}.")
    return math.sqrt(clients / K), math.ceil((K / clients**3) ** 0.25)
