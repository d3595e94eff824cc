"""Local-SCGDM: local compositional gradients with momentum (Gao, Li, Huang 2022).

    min_x  1/m Σ_i E_ξ f_i(E_ζ g_i(x, ζ), ξ),    given as  fs.Composition([g, f], local=True)

    1  server: send x, u, d to the clients that take part
    2  client i, I times from there:
    3      draw ξ, ζ;  u_i ← (1 − β) u_i + β g_i(x_i; ζ),   p ← ∇g_i(x_i; ζ)ᵀ ∇f_i(u_i; ξ)
    4      d_i ← (1 − α) d_i + α p
    5      x_i ← x_i − η d_i
    6  server: (x, u, d) ← the mean of (x_i, u_i, d_i)

In the first step of all, u_i and d_i are the new values. β = 1 is `fedstrata.FCSGM`. This follows a third
party's code (Wu et al. 2023), which averages u as in line 6: with β < 1 and different clients, a round starts
from an inner value that belongs to no client, and the limit has a bias of order (1 − β)^I.

Reveals only averages. Needs gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from fedstrata.core import tree
from fedstrata.core.client import Client
from fedstrata.core.counting import loop
from fedstrata.core.fed import Fed
from fedstrata.core.method import BatchSize, Count, Fraction, Positive, method
from fedstrata.core.types import Integer, Key, PyTree
from fedstrata.methods._shared.local_composition import LocalCompositions, Tracked, draw
from fedstrata.methods._shared.rules import composed
from fedstrata.problems.classes import Composition
from fedstrata.problems.measured import Conditions, Practical


class State(NamedTuple):
    """The server's point, inner values and direction."""

    x: PyTree
    u: Tracked
    d: PyTree


@method
class LocalSCGDM(LocalCompositions[State]):
    """``I`` local steps with momentum averages of the inner values and of the direction.

    Args:
        eta: the step size.
        beta: the weight of new inner values; 1 keeps nothing of the old ones, and has no bias with all
            samples.
        alpha: the weight of a new gradient in the direction.
        I: local steps per round.
        batch_size: samples per level; None uses all of a client's samples.
    """

    eta: Positive  # η
    beta: Fraction = 0.5  # β
    alpha: Fraction = 1.0  # α
    I: Count = 1
    batch_size: BatchSize = None

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """η = 1/L_Φ, I = 1, β = 1, which has no bias with all samples."""
        steps = composed(at)
        return steps.of(cls(steps.gamma, 1.0))

    def init(self, problem: Composition, x0: PyTree, y0: PyTree) -> State:
        return State(x0, y0, tree.zeros_like(x0))

    def output(self, state: State, memory: PyTree) -> tuple[PyTree, PyTree]:
        return state.x, state.u

    def local_steps(
        self, problem: Composition, client: Client, key: Key, start: State, begun: Integer
    ) -> State:
        def step(at: State, key: Key, t: Integer) -> State:
            old = begun + t > 0
            alpha, beta = (jnp.where(old, share, 1.0) for share in (self.alpha, self.beta))
            drawn = draw(problem, client, key, self.batch_size, self.batch_size)
            u, p = drawn(at.x, lambda n, new: tree.lerp(beta, at.u[n], new))  # line 3
            d = tree.lerp(alpha, at.d, p)  # line 4
            return State(tree.axpy(-self.eta, d, at.x), u, d)  # line 5

        return loop(self.I, step, key, start, indexed=True)  # line 2

    def round(self, problem: Composition, fed: Fed, key: Key, r: Integer, state: State) -> State:
        begun = jnp.asarray(r > 0, jnp.int32)
        return fed.average(self.local_steps, key, state, begun, around=state)  # lines 1, 6
