"""FCSG-M and Acc-FCSG-M: federated conditional stochastic gradients (Wu, Sun, Hu, Zhang, Huang 2023).

    min_x  1/m Σ_i E_ξ f_i(E_ζ g_i(x, ζ), ξ),    given as  fs.Composition([g, f], local=True)

    1  server: send x and d to the clients that take part
    2  client i, I times from there:
    3      draw ξ, and B samples ζ;  u ← g_i(x_i; ζ),   p ← ∇g_i(x_i; ζ)ᵀ ∇f_i(u; ξ)
    4      M:    d_i ← (1 − α) d_i + α p
           Acc:  d_i ← p + (1 − α) (d_i − the same p at the x_i before, with the same ξ, ζ)
    5      x_i ← x_i − η d_i
    6  server: (x, d) ← the mean of (x_i, d_i)

In the first step of all, d_i = p. α = 1 is FCSG. u is the average of B new samples, so p has a bias of O(1/B)
if f is not linear; with all samples (None) the bias vanishes. In the first step of a round, x_i before is x
itself, so Acc equals M there. This follows the authors' code, which has one inner level; here the number of
levels is arbitrary.

Reveals only averages. Needs gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from fedstrata.core import tree
from fedstrata.core.client import Client, steps_of
from fedstrata.core.counting import loop
from fedstrata.core.fed import Fed
from fedstrata.core.method import BatchSize, Fraction, LocalSteps, Positive, method
from fedstrata.core.types import Integer, Key, PyTree, Real
from fedstrata.methods._shared.local_composition import LocalCompositions, draw
from fedstrata.methods._shared.rules import composed
from fedstrata.problems.classes import Composition
from fedstrata.problems.measured import Conditions, Practical


class State(NamedTuple):
    """The server's point and direction."""

    x: PyTree
    d: PyTree


@method
class FCSGM(LocalCompositions[State]):
    """``I`` local steps along momentum averages of the gradients of the clients' own compositions.

    Args:
        eta: the step size.
        alpha: the weight of a new gradient in the direction; 1 is FCSG, without momentum.
        I: local steps per round: an integer, one per client, or a function of the round.
        accelerated: whether the direction is corrected at the previous point (Acc-FCSG-M).
        batch_size: samples per evaluation of the outer function; None uses all of a client's samples.
        inner_batch_size: samples B per evaluation of the inner functions; None uses all.
    """

    eta: Positive  # η
    alpha: Fraction = 1.0  # α
    I: LocalSteps = 1
    accelerated: bool = False
    batch_size: BatchSize = None
    inner_batch_size: BatchSize = None

    drifts = "I"

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """η = 1/L_Φ, I = 1, with all samples, for which the direction needs no averaging."""
        steps = composed(at)
        return steps.of(cls(steps.gamma))

    def init(self, problem: Composition, x0: PyTree, y0: PyTree) -> State:
        return State(x0, tree.zeros_like(x0))

    def local_steps(
        self, problem: Composition, client: Client, key: Key, start: State, begun: Integer
    ) -> State:
        def step(both: tuple[State, PyTree], key: Key, t: Integer) -> tuple[State, PyTree]:
            (x, d), before = both
            at = draw(problem, client, key, self.batch_size, self.inner_batch_size)
            _, p = at(x)  # line 3
            alpha: Real = jnp.where(begun + t > 0, self.alpha, 1.0)
            left = at(before)[1] if self.accelerated else p
            d = tree.axpy(1 - alpha, tree.sub(d, left), p)  # line 4
            return State(tree.axpy(-self.eta, d, x), d), x  # line 5

        return loop(steps_of(self.I, client), step, key, (start, start.x), indexed=True)[0]  # line 2

    def round(self, problem: Composition, fed: Fed, key: Key, r: Integer, state: State) -> State:
        at_work, begun = fed.at_work(self.I), jnp.asarray(r > 0, jnp.int32)
        return fed.average(self.local_steps, key, state, begun, weights=at_work, around=state)  # lines 1, 6
