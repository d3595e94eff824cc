"""Extreme eigenvalues of symmetric maps that are known by their products alone: Lanczos' method.

    β₀ = 0,  v₁ a random unit vector
    k = 1, 2, …   w = A v_k,  α_k = ⟨w, v_k⟩,  w ← w − α_k v_k − β_{k−1} v_{k−1},  β_k = ‖w‖,  v_{k+1} = w/β_k

The eigenvalues of the tridiagonal matrix (α, β) tend to those of A, the extreme ones first; with as many
steps as dimensions they are exact. Every w is made orthogonal to all vectors before it, twice, which rounding
would otherwise undo.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from scipy.linalg import eigh_tridiagonal

from fedstrata.core.types import Array, PyTree

STEPS = 30
NONE_LEFT = 1e-10  # of the largest entry: a β after which all of the space that A reaches was seen


def lanczos(product: Callable[[Array], Array], v: Array, steps: int) -> tuple[Array, Array, Array]:
    """α, β and the vectors, from a start that need not be a unit vector."""
    v = v / jnp.linalg.norm(v)

    def step(state: tuple[Array, Array], k: Array) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        v, basis = state
        basis = basis.at[k].set(v)
        w = product(v)
        alpha = jnp.vdot(v, w)
        for _ in range(2):
            w = w - basis.T @ (basis @ w)
        beta = jnp.linalg.norm(w)
        return (w / jnp.where(beta > 0, beta, 1), basis), (alpha, beta)

    basis = jnp.zeros((steps, v.size), v.dtype)
    (_, basis), (alpha, beta) = jax.lax.scan(step, (v, basis), jnp.arange(steps))
    return alpha, beta, basis


def ends(alpha: np.ndarray, beta: np.ndarray) -> tuple[float, float, np.ndarray]:
    """The smallest and the largest eigenvalue, and the smallest's vector in the Lanczos basis."""
    if not np.isfinite(alpha).all():
        return np.nan, np.nan, np.zeros(len(alpha))
    largest = max(np.abs(alpha).max(), beta[:-1].max(initial=0.0))
    done = np.flatnonzero(beta[:-1] <= NONE_LEFT * largest)
    count = int(done[0]) + 1 if len(done) else len(alpha)
    values, vectors = eigh_tridiagonal(alpha[:count], beta[: count - 1])
    vector = np.zeros(len(alpha))
    vector[:count] = vectors[:, 0]
    return float(values[0]), float(values[-1]), vector


def extremes(
    product: Callable[[PyTree, Any], PyTree], like: PyTree, context: Any, steps: int = STEPS
) -> tuple[float, float, PyTree]:
    """The smallest and the largest eigenvalue of ``v ↦ product(v, context)``, and the smallest's vector."""
    flat, unravel = ravel_pytree(like)
    alpha, beta, basis = _run(product, min(steps, flat.size), like, context)
    low, high, vector = ends(np.asarray(alpha), np.asarray(beta))
    return low, high, unravel(jnp.asarray(vector @ np.asarray(basis)))


def start_of(flat: Array) -> Array:
    """A random vector, always the same."""
    return jax.random.normal(jax.random.key(0), flat.shape, flat.dtype)


@partial(jax.jit, static_argnums=(0, 1))
def _run(product: Any, steps: int, like: PyTree, context: Any) -> tuple[Array, Array, Array]:
    flat, unravel = ravel_pytree(like)
    return lanczos(lambda v: ravel_pytree(product(unravel(v), context))[0], start_of(flat), steps)
