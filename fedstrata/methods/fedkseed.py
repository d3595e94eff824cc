"""FedKSeed: a run's steps lie along K directions that all clients can draw (Qin et al. 2024, authors' code).

    min_x  1/m Σ_i E f_i(x, ξ)

    z_1 … z_K ~ N(0, I), one for each of K seeds that are fixed for the run;   x = x_0 − Σ_j A_j z_j

    1  server: send A to the clients that take part
    2  client i: x ← x_0 − Σ_j A_j z_j,   a ← 0
    3  client i, τ times: draw ξ and a seed j;   s ← (f_i(x + ε z_j, ξ) − f_i(x − ε z_j, ξ))/(2ε)
    4      x ← x − η s z_j,   a_j ← a_j + η s
    5  client i: send a;   server: A ← A + the mean of the a

Messages are K numbers in both directions, for any τ and dimension n, and a client that missed rounds needs
only A. In return, x stays in x_0 + the span of the z_j: with K < n the limit minimises the loss over that
space only. Lines 2 and 5 draw K directions. Clients draw their own seeds, so that x keeps fluctuating if they
differ; η must decrease.

The authors' A sums s, and line 2 multiplies by η; here a contains η, so that η may be a schedule. Their
variant FedKSeed-Pro, which draws j by the size of its earlier s, is not included.

Reveals only averages. Needs function values only.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedstrata.core import tree
from fedstrata.core.client import Client, steps_of
from fedstrata.core.counting import loop
from fedstrata.core.fed import Fed
from fedstrata.core.method import BatchSize, Count, LocalSteps, Positive, method
from fedstrata.core.types import Array, Integer, Key, PyTree
from fedstrata.methods._shared.scalars import NARROW, ScalarsOnly, normals, slopes
from fedstrata.methods._shared.schedules import fading
from fedstrata.methods._shared.zeroth import by_values, value_doubts
from fedstrata.problems.classes import Minimization
from fedstrata.problems.measured import Conditions, NoRule, Practical

FEWEST, PER_ENTRY = 64, 4  # seeds in `FedKSeed.practical`
DRAWS = 64  # its local steps, each along one direction: their mean has less noise


class State(NamedTuple):
    """The server's iterate and the sum of the steps along each direction."""

    x: PyTree
    A: Array


@method
class FedKSeed(ScalarsOnly[State]):
    """``tau`` local steps of size ``eta`` along directions of ``K`` fixed seeds.

    Args:
        eta: the step size.
        eps: the width of the differences.
        K: the number of seeds, and of scalars in a message.
        tau: local steps per round: an integer, one per client, or a function of the round.
        batch_size: the minibatch size; None uses all of a client's samples.
    """

    eta: Positive  # η
    eps: Positive  # ε
    K: Count = 1024
    tau: LocalSteps = 1  # τ
    batch_size: BatchSize = None

    private_samples = True
    drifts = "tau"
    width = "eps"

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """K = max(64, 4n), τ = 64 and τη = 1/(L (1 + (n + 1)/(τp))), decreasing: draws add noise.

        The drift of τ steps decreases with η.
        """
        its, n = at["loss"], at.dimension
        if its.kinked:
            raise NoRule("FedKSeed's rule assumes a smooth loss")
        options, _, _, _ = by_values(at, its, own=True)
        K, eps = max(FEWEST, PER_ENTRY * n), NARROW * float(options["eta"]) / n**0.5
        eta = its.within(at.cohort_L(its)) / (1 + (n + 1) / (DRAWS * at.participants))
        method = cls(fading(eta / DRAWS, eta * max(its.mu, 0.0) / 2), eps, K, DRAWS)
        why = f"{K} seeds, {DRAWS} steps; tau eta = 1/(L (1 + (n + 1)/(tau p))), decreasing: draws are noise"
        doubts = value_doubts(at)
        return Practical(method, 0.0, (why,), True, doubts=doubts)

    def init(self, problem: Minimization, x0: PyTree, y0: PyTree) -> State:
        return State(x0, jnp.zeros(self.K, jnp.result_type(*jax.tree.leaves(x0))))

    def memory(self, problem: Minimization, x0: PyTree, y0: PyTree) -> PyTree:
        return x0

    def direction(self, j: Integer, like: PyTree) -> PyTree:
        """z_j, stacked as one."""
        return normals(jax.random.fold_in(jax.random.key(0), j), like, 1)

    def moved(self, x: PyTree, a: Array) -> PyTree:
        """``x − Σ_j a_j z_j``."""
        a = jnp.asarray(a)

        def along(x: PyTree, _: Key, j: Integer) -> PyTree:
            z = self.direction(j, x)
            return jax.tree.map(lambda leaf, d: leaf - a[j].astype(leaf.dtype) * d[0], x, z)

        return loop(self.K, along, jax.random.key(0), x, indexed=True)

    def local_steps(self, problem: Minimization, client: Client, key: Key, A: Array) -> Array:
        def step(carry: tuple[PyTree, Array], key: Key) -> tuple[PyTree, Array]:
            x, a = carry
            key_xi, key_j = jax.random.split(key)
            j = jax.random.randint(key_j, (), 0, self.K)
            z, f = self.direction(j, x), client.mean(problem.loss, key_xi, self.batch_size)
            s = self.eta * slopes(f, x, z, self.eps, True)[0]  # line 3
            x = jax.tree.map(lambda leaf, d: leaf - s.astype(leaf.dtype) * d[0], x, z)
            return x, a.at[j].add(s.astype(a.dtype))  # line 4

        start = self.moved(client.memory, A)  # line 2
        return loop(steps_of(self.tau, client), step, key, (start, jnp.zeros_like(A)))[1]

    def round(self, problem: Minimization, fed: Fed, key: Key, r: Integer, state: State) -> State:
        a = fed.average(self.local_steps, key, state.A, weights=fed.at_work(self.tau))  # line 1
        return State(self.moved(state.x, a), tree.add(state.A, a))  # line 5
