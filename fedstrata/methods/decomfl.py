"""DeComFL: messages whose size does not depend on the dimension (Li, Ying, Liu, Dong, Yang 2025).

    min_x  1/m Σ_i E f_i(x, ξ)

    1  server: send a new key, and the record of the last round's steps: its key, s̄ and η
    2  client i: x ← x − η/P Σ_p s̄_kp u_kp for k < K, the last round's steps, u drawn from its key
    3  client i, K times from z = x: draw ξ, and u_kp ~ N(0, I), p < P, from the new key and k
    4      s_kp ← (f_i(z + μ u_kp, ξ) − f_i(z, ξ))/μ,   z ← z − η/P Σ_p s_kp u_kp
    5  client i: send s, and forget z
    6  server: s̄ ← the mean of the s;   x as in line 2

In both directions a message is K·P numbers and a key, for any n. All clients draw the same u, so the server
averages scalars and sees no single one. With two-sided differences, full batches and K = 1, up to O(μ²) a
round is x ← x − η/P Σ_p u_p u_pᵀ ∇f(x): the solution is a fixed point, also if clients differ.

A client that missed rounds needs their scalars too. The authors' server sends these; here, with partial
participation, the server sends x instead of line 1's record, and only uploads are scalars. The authors'
differences are one-sided.

Reveals only averages. Needs function values only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from fedstrata.core.client import Client
from fedstrata.core.fed import Fed, Remember
from fedstrata.core.method import BatchSize, Count, Positive, method
from fedstrata.core.types import Array, Integer, Key, PyTree
from fedstrata.methods._shared.scalars import (
    NARROW,
    ScalarsOnly,
    StepRecord,
    by_normals,
    local_scalars,
    nothing,
    replayed,
    words_of,
)
from fedstrata.methods._shared.schedules import fading
from fedstrata.methods._shared.zeroth import value_doubts
from fedstrata.problems.classes import Minimization
from fedstrata.problems.measured import Conditions, Practical


class State(NamedTuple):
    """The server's iterate, and the record of its last steps."""

    x: PyTree
    last: StepRecord


@method
class DeComFL(ScalarsOnly[State]):
    """``K`` local steps of size ``eta`` along ``P`` directions that all clients share; scalars both ways.

    Args:
        eta: the step size.
        mu: the width of the differences.
        K: local steps per round.
        P: directions per step; a step takes P + 1 function values, two-sided 2P.
        two_sided: use ``(f(z + μu) − f(z − μu))/(2μ)`` in line 4, whose error is of order μ² instead of μ.
        batch_size: the minibatch size; None uses all of a client's samples.
    """

    eta: Positive  # η
    mu: Positive  # μ
    K: Count = 1
    P: Count = 1
    two_sided: bool = False
    batch_size: BatchSize = None

    private_samples = True
    drifts = "K"

    @classmethod
    def from_theory(cls, *, L: float, n: int, mu: float, **options: Any) -> DeComFL:
        """The step of Nesterov and Spokoiny (2017, Theorem 8), whose method this is for K = P = 1.

        With η = 1/(4(n + 4)L), full batches, all clients and F strongly convex with modulus τ, after r rounds

            E F(x_r) − F* ≤ ½L (δ + (1 − τ/(8(n + 4)L))^r ‖x_0 − x*‖²),   δ = 18 μ²(n + 4)² L/(25τ)

        Args:
            L: the Lipschitz constant of ∇F.
            n: the dimension of x.
            mu: the width of the differences.
            options: other hyper-parameters.

        >>> import fedstrata as fs
        >>> fs.DeComFL.from_theory(L=2.0, n=6, mu=1e-3).eta
        0.0125
        """
        if not (L > 0 and n >= 1):
            raise ValueError(f"DeComFL.from_theory needs L > 0 and n ≥ 1, but got {L} and {n}.")
        return cls(1 / (4 * (n + 4) * L), mu, **options)

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """By `fedstrata.methods._shared.scalars.by_normals`, K = 1, on both sides."""
        its, n = at["loss"], at.dimension
        found, growth = by_normals(at, its)
        doubts = value_doubts(at)
        P, mu = int(found.options["directions"]), found.options["eta"]
        if its.kinked:
            gamma, width = found.options["gamma"], mu
            return Practical(cls(gamma, width, P=P, two_sided=True), 0.0, found.reasons, True, doubts=doubts)
        eta = its.within(at.cohort_L(its)) / growth
        rate, why = eta * max(its.mu, 0.0), f"{P} normal directions a step; eta = 1/(L·{growth:.3g})"
        gamma = fading(eta, rate / 2) if at.partial else eta
        its_method = cls(gamma, NARROW * mu / n**0.5, P=P, two_sided=True)
        return Practical(its_method, 0.0 if at.partial else rate, (why,), at.partial, doubts=doubts)

    def init(self, problem: Minimization, x0: PyTree, y0: PyTree) -> State:
        return State(x0, nothing(self.K, self.P, x0))

    def memory(self, problem: Minimization, x0: PyTree, y0: PyTree) -> PyTree:
        return x0  # the client's copy of x

    def from_record(
        self, problem: Minimization, client: Client, key: Key, last: StepRecord, words: Array
    ) -> Remember:
        x = replayed(client.memory, last)  # line 2
        return Remember(self.scalars(problem, client, key, x, words), x)

    def scalars(self, problem: Minimization, client: Client, key: Key, x: PyTree, words: Array) -> Array:
        options = (self.K, self.P, self.mu, self.two_sided, self.batch_size)
        return local_scalars(problem, client, key, x, words, self.eta, options)  # lines 3 to 5

    def round(self, problem: Minimization, fed: Fed, key: Key, r: Integer, state: State) -> State:
        words = words_of(key)
        if fed.participants < fed.clients:
            mean = fed.average(self.scalars, key, state.x, words)
        else:
            mean = fed.average(self.from_record, key, state.last, words)  # line 1
        sent = StepRecord(words, mean, jnp.asarray(self.eta, state.last.eta.dtype))
        return State(replayed(state.x, sent), sent)  # line 6
