"""Extreme eigenvalues of symmetric maps from their products with vectors: Lanczos' method.

    β₀ = 0,  v₁ a random unit vector
    k = 1, 2, …   w = A v_k,  α_k = ⟨w, v_k⟩,  w ← w − α_k v_k − β_{k−1} v_{k−1},  β_k = ‖w‖,  v_{k+1} = w/β_k

The eigenvalues of the tridiagonal matrix (α, β) converge to A's, the extreme ones first; with as many steps
as dimensions they are exact. Every w is orthogonalised twice against all previous vectors, because of
rounding. With a tolerance, the iteration stops after two steps in a row that changed neither end by more.

From a random start, k < n steps miss the largest eigenvalue of a positive map by more than a fraction ε with
a probability of at most 1.648 √n e^{−√ε(2k−1)} (Kuczyński, Woźniakowski 1992, Theorem 4.2).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from scipy.linalg import eigh_tridiagonal

from fedstrata.core.types import Array, PyTree
from fedstrata.support.frozen import jit

STEPS = 30
FEWEST = 8  # steps before a tolerance ends the iteration
CALM = 2  # steps in a row that change the ends by less than a tolerance
NONE_LEFT = 1e-10  # relative to the largest entry: a smaller β means that the Krylov space is complete


def missed(n: int, k: int, doubt: float = 0.05) -> float:
    """The bound ε on an end's error, relative to the spread of eigenvalues, except with ``doubt``."""
    return 0.0 if k >= n else min(float(np.log(1.648 * np.sqrt(n) / doubt) / (2 * k - 1)) ** 2, 0.9)


def used(beta: np.ndarray) -> int:
    """The number of steps that were made."""
    done = np.flatnonzero(beta[:-1] <= NONE_LEFT * beta.max(initial=0.0))
    return int(done[0]) + 1 if len(done) else len(beta)


def lanczos(
    product: Callable[[Array], Array], v: Array, steps: int, tol: float = 0.0
) -> tuple[Array, Array, Array]:
    """α, β and the vectors; the start need not be a unit vector, and β is zero from the last step on."""
    v = v / jnp.linalg.norm(v)
    if tol > 0:
        return _until(product, v, steps, tol)

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


class _Going(NamedTuple):
    """The Lanczos iteration after k steps; calm counts steps in a row that changed the ends by little."""

    k: Array
    v: Array
    basis: Array
    alpha: Array
    beta: Array
    ends: Array
    calm: Array


def _until(product: Callable[[Array], Array], v: Array, steps: int, tol: float) -> tuple[Array, Array, Array]:
    def goes_on(at: _Going) -> Array:
        return (at.k < steps) & (at.calm < CALM)

    def step(at: _Going) -> _Going:
        basis = at.basis.at[at.k].set(at.v)
        w = product(at.v)
        alpha = at.alpha.at[at.k].set(jnp.vdot(at.v, w))
        for _ in range(2):
            w = w - basis.T @ (basis @ w)
        size = jnp.linalg.norm(w)
        filled = jnp.where(jnp.arange(steps) > at.k, alpha[0], alpha)  # α₀ lies between the ends
        T = jnp.diag(filled) + jnp.diag(at.beta[:-1], 1) + jnp.diag(at.beta[:-1], -1)
        found = jnp.linalg.eigvalsh(T)[jnp.array([0, -1])]
        high = jnp.abs(found).max()
        enough = tol * jnp.maximum(jnp.abs(found), 1e-3 * high)
        same = (jnp.abs(found - at.ends) <= enough).all() & (at.k >= FEWEST - CALM)
        calm = jnp.where(size <= NONE_LEFT * high, CALM, jnp.where(same, at.calm + 1, 0))
        last = (calm >= CALM) | (at.k + 1 >= steps)
        beta = at.beta.at[at.k].set(jnp.where(last, 0.0, size))
        return _Going(at.k + 1, w / jnp.where(size > 0, size, 1), basis, alpha, beta, found, calm)

    empty, zero = jnp.zeros(steps, v.dtype), jnp.int32(0)
    begin = _Going(zero, v, jnp.zeros((steps, v.size), v.dtype), empty, empty, jnp.zeros(2, v.dtype), zero)
    end = jax.lax.while_loop(goes_on, step, begin)
    return end.alpha, end.beta, end.basis


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
    """A fixed random vector."""
    return jax.random.normal(jax.random.key(0), flat.shape, flat.dtype)


@partial(jit, static_argnums=(0, 1))
def _run(product: Any, steps: int, like: PyTree, context: Any) -> tuple[Array, Array, Array]:
    flat, unravel = ravel_pytree(like)
    return lanczos(lambda v: ravel_pytree(product(unravel(v), context))[0], start_of(flat), steps)
