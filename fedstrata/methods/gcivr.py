"""GCIVR: composite incremental variance reduction (Zhang, Xiao 2019; Haddadpour et al. 2022), in parallel.

    min_x  Φ(x) = h(x) + f(g(x)),   h and g means over clients

    1  every τ rounds: y ← g(x), z ← ∇g(x), w ← ∇h(x), means over all samples of all clients
    2  in other rounds, client k: draw B;  send g_B(x) − g_B(x⁻), ∇g_B(x) − ∇g_B(x⁻), ∇h_B(x) − ∇h_B(x⁻)
    3      server: add the clients' means to y, z, w
    4  server: x⁻ ← x,  x ← x − η (w + zᵀ ∇f(y))

z is the full Jacobian, so a round uploads d_g·n numbers. y is exchanged first, because in the log domain
(`LogMeanExp`) z is stored in units of y; there y is kept above 1/τ times the newest estimate, and z is
recomputed from the minibatch where g has decreased to less than a tenth. With several levels every Jacobian
is stored. With full batches it is compositional gradient descent for any τ.

Reveals only averages, and for a level in the log domain each client's log g_k. Needs gradients, and the
Jacobian of g.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fedstrata.core import tree
from fedstrata.core.client import Client
from fedstrata.core.fed import Fed, Remember
from fedstrata.core.method import BatchSize, Count, Positive, method
from fedstrata.core.types import Function, Integer, Key, PyTree
from fedstrata.estimators import compositional as c
from fedstrata.estimators.gradients import gradient
from fedstrata.methods._shared.compositional import Compositional, level_mean
from fedstrata.methods._shared.rules import composed
from fedstrata.problems.classes import Composition
from fedstrata.problems.levels import tracker_of
from fedstrata.problems.measured import Conditions, Practical


class State(NamedTuple):
    """The iterate, and the estimates."""

    x: PyTree
    y: tuple[PyTree, ...]
    z: tuple[jax.Array, ...]  # Jacobians, d_n × d_{n−1}
    w: PyTree  # the estimate of ∇h; None without h


class Memory(NamedTuple):
    """The last two points that a client received."""

    x: PyTree
    before: PyTree  # x⁻


@method
class GCIVR(Compositional[State]):
    """Steps of size ``eta`` along recursive estimates, restarted on the full batch every ``tau`` rounds.

    Args:
        eta: the step size.
        tau: rounds between two full batches.
        batch_size: the size of a client's minibatch in the other rounds; None uses all samples.
    """

    eta: Positive  # η
    tau: Count = 10  # τ
    batch_size: BatchSize = None

    needs = "gradients, the Jacobian of g"
    full_participation = "its estimates are recursive, over all clients."

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """η = 1/L_Φ, with all samples, for which τ has no effect."""
        steps = composed(at)
        return steps.of(cls(steps.gamma), cost=2.0)

    def init(self, problem: Composition, x0: PyTree, y0: PyTree) -> State:
        y = c.followed(problem, y0)
        sizes = [tree.dimension(z) for z in (x0, *y)]
        dtype = ravel_pytree(x0)[0].dtype
        z = tuple(jnp.zeros((rows, columns), dtype) for columns, rows in pairwise(sizes))
        return State(x0, y, z, None if problem.plain is None else tree.zeros_like(x0))

    def memory(self, problem: Composition, x0: PyTree, y0: PyTree) -> Memory:
        return Memory(x0, x0)

    def full(self, problem: Composition, client: Client, key: Key) -> c.Drawn:
        """The composition on all of a client's samples."""
        return c.chain_of(problem).drawn(client, key, None)

    def change(
        self, problem: Composition, client: Client, key: Key, n: int, before: PyTree, now: PyTree
    ) -> PyTree:
        """A client's change of level n + 1 from the argument ``before`` to ``now``."""
        return self.drawn(problem, client, key).change(n, 0.0, before, now)

    def keep(self, problem: Composition, client: Client, key: Key, x: PyTree) -> Remember:
        """The change of g_B from x⁻ to x; the client remembers x."""
        return Remember(self.change(problem, client, key, 0, client.memory.x, x), Memory(x, client.memory.x))

    def keep_full(self, problem: Composition, client: Client, key: Key, x: PyTree) -> Remember:
        """The value g(x); the client remembers x."""
        return Remember(self.full(problem, client, key).value(0, x), Memory(x, client.memory.x))

    def change_above(
        self, problem: Composition, client: Client, key: Key, before: PyTree, now: PyTree
    ) -> PyTree:
        return self.change(problem, client, key, len(now), before[-1], now[-1])

    def full_above(self, problem: Composition, client: Client, key: Key, now: PyTree) -> PyTree:
        return self.full(problem, client, key).value(len(now), now[-1])

    def slopes(self, problem: Composition, client: Client, key: Key, before: PyTree, y: PyTree) -> PyTree:
        """∇g_B and ∇h_B at x minus those at x⁻, in units of the new y."""
        drawn = self.drawn(problem, client, key)
        z, w = _slopes(drawn, client.memory.x, y, y)
        z_before, w_before = _slopes(drawn, client.memory.before, before, y)
        kept = [_units(*three) > 0 for three in zip(drawn.chain.inner, before, y, strict=True)]
        z = tuple(a - jnp.where(keep, b, 0) for a, b, keep in zip(z, z_before, kept, strict=True))
        return z, tree.sub(w, w_before)

    def full_slopes(self, problem: Composition, client: Client, key: Key, y: PyTree) -> PyTree:
        """∇g and ∇h at x."""
        return _slopes(self.full(problem, client, key), client.memory.x, y, y)

    def restart(self, problem: Composition, fed: Fed, key: Key, state: State) -> State:
        """Line 1."""
        y: c.Values = ()
        for n, level in enumerate(c.chain_of(problem).inner):
            phase, message = cast(Any, self.keep_full), state.x
            if n > 0:
                phase, message = self.full_above, (*[None] * (n - 1), y[-1])
            y = (*y, level_mean(fed, tracker_of(level), phase, key, message))
        return State(state.x, y, *fed.average(self.full_slopes, key, y))

    def update(self, problem: Composition, fed: Fed, key: Key, state: State) -> State:
        """Lines 2 and 3."""
        trackers = [tracker_of(level) for level in c.chain_of(problem).inner]
        y: c.Values = ()
        for n, tracker in enumerate(trackers):
            phase, message = cast(Any, self.keep), cast(Any, (state.x,))
            if n > 0:
                phase, message = self.change_above, tuple((*[None] * (n - 1), v[n - 1]) for v in (state.y, y))
            change = level_mean(fed, tracker, phase, key, *message)
            y = (*y, tracker.follow(0.0, state.y[n], change, floor=1 / self.tau))
        units = [_units(*three) for three in zip(c.chain_of(problem).inner, state.y, y, strict=True)]
        z = tuple(unit * z for unit, z in zip(units, state.z, strict=True))
        return State(state.x, y, *tree.add((z, state.w), fed.average(self.slopes, key, state.y, y)))

    def round(self, problem: Composition, fed: Fed, key: Key, r: Integer, state: State) -> State:
        chain = c.chain_of(problem)
        fresh = jnp.asarray(r % self.tau == 0, jnp.int32)
        key, key_top = jax.random.split(key)
        state = fed.repeat(fresh, lambda _, state: self.restart(problem, fed, key, state), state)
        state = fed.repeat(1 - fresh, lambda _, state: self.update(problem, fed, key, state), state)
        pulled = (fed.average(self.pull, key_top, state.y, ()),) if chain.federated else ()
        v = ravel_pytree(c.cotangent(chain, state.y, pulled))[0]
        for z in reversed(state.z):
            v = v @ z
        step = ravel_pytree(state.x)[1](v)
        step = step if state.w is None else tree.add(step, state.w)
        return state._replace(x=tree.axpy(-self.eta, step, state.x))  # line 4


def _slopes(drawn: c.Drawn, x: PyTree, below: c.Values, y: PyTree) -> PyTree:
    """The levels' Jacobians, and ∇h or None, at x and the values ``below``, in units of y."""
    points, plain = (x, *below[:-1]), drawn.chain.plain
    z = tuple(drawn.jacobian(n, points[n], y[n]) for n in range(len(y)))
    return z, None if plain is None else gradient(drawn.mean(plain), x)


def _units(level: Function, before: PyTree, now: PyTree) -> jax.Array:
    """The factors that convert the rows of a level's Jacobian to new units, as a column."""
    return ravel_pytree(tracker_of(level).ratio(before, now))[0][:, None]
