"""Which clients take part in a round, and with what weight.

From m clients with weights n_i, s are drawn; client i is among them with probability

    π_i = min(1, n_i/θ),    θ such that Σ π_i = s,

and then has the weight n_i/π_i = max(n_i, θ). The weights of a cohort sum to Σ n_i, and client i has the
expected weight n_i: the mean over a cohort is unbiased, and exact if all clients agree. A cohort drawn
uniformly and weighted by normalised n_i has neither property: small clients count too much. If all n_i are
equal, all cohorts are equally likely and their clients have equal weights.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedstrata.core.types import Array, Key

MANY = 1_000  # clients, above which a few are drawn without shuffling all


class Threshold(NamedTuple):
    """θ = ``rest``/``left``: the weight of clients with π_i < 1, and how many of them are drawn."""

    rest: Array
    left: Array

    def certain(self, weights: Array) -> Array:
        """The clients with π_i = 1."""
        return weights >= -(-self.rest // jnp.maximum(self.left, 1))

    def counts(self, weights: Array) -> Array:
        """The weights of these clients once drawn, max(n_i, θ)."""
        theta = self.rest / jnp.maximum(self.left, 1)
        return jnp.maximum(weights, theta.astype(jnp.result_type(float)))


def place_in(ascending: Array, values: Array, side: Literal["left", "right"] = "left") -> Array:
    """The positions at which values belong in an ascending array.

    On a GPU every iteration of a loop launches kernels (H200, 100 of 6,400: 222 µs); unrolled, 13 µs.
    """
    method = "scan" if jax.default_backend() == "cpu" else "scan_unrolled"
    return jnp.searchsorted(ascending, values, side=side, method=method)


def threshold(weights: Array, count: int) -> Threshold:
    """θ for drawing ``count`` clients; clients whose weight exceeds it are set apart until none does."""
    everyone = Threshold(weights.sum(dtype=weights.dtype), jnp.asarray(count, weights.dtype))

    def without(now: Threshold) -> Threshold:
        certain = now.certain(weights)
        rest = jnp.sum(weights, where=~certain, dtype=weights.dtype)
        return Threshold(rest, count - certain.sum(dtype=weights.dtype))

    def step(both: tuple[Threshold, Threshold]) -> tuple[Threshold, Threshold]:
        return both[1], without(both[1])

    both = (everyone, without(everyone))
    return jax.lax.while_loop(lambda both: both[0].left != both[1].left, step, both)[1]


def by_weight(key: Key, weights: Array, count: int, theta: Threshold) -> Array:
    """Draw ``count`` clients with the probabilities π_i; returned in ascending order.

    Systematic sampling: clients lie on a line in random order, each as long as its weight, and points θ apart
    with a random offset hit client i with probability n_i/θ, and none twice. If there are very many clients,
    neighbours are shuffled together.

    Args:
        key: the random key.
        weights: the weights of all clients, whole numbers.
        count: the number of clients to draw.
        theta: see `threshold`.
    """
    key_order, key_start = jax.random.split(key)
    certain = theta.certain(weights)
    open_ = jnp.where(certain, 0, weights)  # who is drawn for certain is left out of the line
    together = -(-weights.shape[0] // MANY)
    lines = jnp.pad(open_, (0, -weights.shape[0] % together)).reshape(-1, together).sum(1, dtype=open_.dtype)
    order = jax.random.permutation(key_order, lines.shape[0])
    ends = jnp.cumsum(lines[order])

    # ⌊(start + k·rest)/left⌋, in parts that stay small
    k, left = jnp.arange(count), jnp.maximum(theta.left, 1)
    start = jax.random.randint(key_start, (), 0, jnp.maximum(theta.rest, 1), open_.dtype)
    fraction = (start % left + k * (theta.rest % left).astype(jnp.result_type(float))) / left
    points = k * (theta.rest // left) + start // left + jnp.floor(fraction).astype(open_.dtype)

    place = jnp.minimum(place_in(ends, points, "right"), lines.shape[0] - 1)
    drawn = order[place]
    if together > 1:
        within = points - (ends - lines[order])[place]
        before = (jnp.cumsum(lines) - lines)[drawn]
        drawn = place_in(jnp.cumsum(open_), before + within, "right")
    others = jnp.nonzero(certain, size=count, fill_value=0)[0]
    return jnp.sort(jnp.where(k < theta.left, drawn, others[k - theta.left])).astype(jnp.int32)
