"""The distance of a point from its set, and projections onto the intersection of clients' own sets.

If sets X_i differ between clients, the set of x is their intersection. Dykstra's method in the product of the
clients' spaces projects onto it:

    q_i = u + p_i,   y_i = P_{X_i}(q_i),   p_i ← q_i − y_i,   u ← 1/m Σ y_i,   from u = z and p_i = 0

As p_i is normal to X_i at y_i and u + 1/m Σ p_i = z throughout, u is the projection of z once all y_i are u.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fedstrata.advice.lower import kept
from fedstrata.core import tree
from fedstrata.core.problem import Problem, Projection
from fedstrata.core.types import Array, PyTree, Weights
from fedstrata.data.storage import Placed
from fedstrata.support.frozen import jit

MOST_SWEEPS = 20_000
ACCURATE = 1e-9  # the largest final distance of a y_i from u, relative to 1 + ‖z‖


def outside(problem: Problem, data: Placed, x: PyTree) -> float | None:
    """‖x − P_X(x)‖, the largest if sets differ between clients; None without a set."""
    project = problem.set_of_x
    if project.trivial:
        return None
    if project.shared:
        return float(project.distance(x))
    return float(data.distances(project, x).max())


def projection(problem: Problem, data: Placed) -> Callable[[PyTree], PyTree | None]:
    """The projection onto the set of x, which returns None if it finds no common point of clients' sets."""
    project = problem.set_of_x
    program = _program(problem, "uniform")  # weights do not matter here
    if project.shared:
        return program

    def onto(z: PyTree) -> PyTree | None:
        found, apart = program(data, z)
        return found if apart <= ACCURATE * (1 + tree.norm(z)) else None

    return onto


@kept
def _program(problem: Problem, _: Weights) -> Callable[..., Any]:
    """The projection onto a common set, or that of `_intersection`, compiled once."""
    project = problem.set_of_x
    return jit(lambda z: project(z)) if project.shared else jit(partial(_intersection, project))


def _intersection(project: Projection, data: Placed, z: PyTree) -> tuple[PyTree, Array]:
    aim = ACCURATE * (1 + tree.norm(z))

    def sweep(state: tuple[PyTree, PyTree, Array, Array]) -> tuple[PyTree, PyTree, Array, Array]:
        u, p, _, count = state
        q = jax.tree.map(lambda u, p: u + p, u, p)
        y = data.each_client(lambda client, q: project(q, client), q)
        u = jax.tree.map(lambda leaf: leaf.mean(0), y)
        apart = jax.vmap(lambda own: tree.norm(tree.sub(own, u)))(y).max()
        return u, tree.sub(q, y), apart, count + 1

    p = jax.tree.map(lambda leaf: jnp.zeros((data.clients, *leaf.shape), leaf.dtype), z)
    first = z, p, jnp.inf * aim, jnp.zeros((), int)
    u, _, apart, _ = jax.lax.while_loop(lambda s: (s[2] > aim) & (s[3] < MOST_SWEEPS), sweep, first)
    return u, apart
