"""HiSo: scalar messages along directions scaled by a diagonal of curvature (Li et al. 2026, authors' code).

    min_x  1/m Σ_i E f_i(x, ξ)

    1  server: send a new key, and the record of the last round's steps: its key, s̄, η and ν
    2  client i: x ← x − η/P Σ_p s̄_kp u_kp for k < K, the last round's steps
    3  client i: Δ ← 1/P Σ_p s̄_Kp u_Kp, of the last local step;   H ← ν H + (1 − ν) Δ²,  entry by entry
    4  client i, K times from z = x: draw ξ, and u_kp ~ H^(−½) N(0, I), p < P, from the new key and k
    5      s_kp ← (f_i(z + μ u_kp, ξ) − f_i(z, ξ))/μ,   z ← z − η/P Σ_p s_kp u_kp
    6  client i: send s, and forget z
    7  server: s̄ ← the mean of the s;   x and H as in lines 2 and 3

This is `fedstrata.DeComFL` with H, which starts at 1 and is never sent: server and clients compute it from
the scalars. ν = 1 is DeComFL. The mean step is −η H⁻¹ ∇f. If Δ vanishes, at a solution without noise, H is
multiplied by ν in every round and the steps grow, so η must decrease there.

The authors' code has two forms for P > 1; this is the one that squares the sum over p (its `Batch` class),
and updates H once in a round. As in DeComFL, with partial participation the server sends x and H. Reveals
only averages. Needs function values only.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedstrata.core import tree
from fedstrata.core.client import Client
from fedstrata.core.fed import Fed, Remember
from fedstrata.core.method import BatchSize, Count, Fraction, Positive, method
from fedstrata.core.types import Array, Integer, Key, PyTree, Real
from fedstrata.estimators.sphere import combine
from fedstrata.methods._shared.scalars import (
    ScalarsOnly,
    StepRecord,
    directions,
    local_scalars,
    nothing,
    replayed,
    words_of,
)
from fedstrata.methods.decomfl import DeComFL
from fedstrata.problems.classes import Minimization
from fedstrata.problems.measured import Conditions, Practical


class Copy(NamedTuple):
    """The state that server and clients keep."""

    x: PyTree
    H: PyTree


class State(NamedTuple):
    """The server's iterate and curvature, the record of its last steps, and their ν."""

    x: PyTree
    H: PyTree
    last: StepRecord
    nu: Array


@method
class HiSo(ScalarsOnly[State]):
    """``K`` local steps of size ``eta`` along ``P`` shared directions, scaled by H; messages are scalars.

    Args:
        eta: the step size.
        mu: the width of the differences.
        nu: the fraction of H that a round keeps; 1 keeps H = 1, which is DeComFL.
        K: local steps per round.
        P: directions per step; a step takes P + 1 function values, two-sided 2P.
        two_sided: use differences on both sides in line 5.
        batch_size: the minibatch size; None uses all of a client's samples.
    """

    eta: Positive  # η
    mu: Positive  # μ
    nu: Fraction = 0.95  # ν
    K: Count = 1
    P: Count = 1
    two_sided: bool = False
    batch_size: BatchSize = None

    private_samples = True
    drifts = "K"

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """DeComFL's steps with ν = 1: constants do not say how H moves."""
        found = DeComFL.practical(at)
        plain: DeComFL = found.method  # type: ignore[assignment]
        method = cls(plain.eta, plain.mu, 1.0, P=plain.P, two_sided=plain.two_sided)
        return found._replace(method=method, reasons=(*found.reasons, "nu = 1, which is DeComFL"))

    def init(self, problem: Minimization, x0: PyTree, y0: PyTree) -> State:
        last = nothing(self.K, self.P, x0)
        return State(x0, jax.tree.map(jnp.ones_like, x0), last, jnp.ones_like(last.eta))

    def memory(self, problem: Minimization, x0: PyTree, y0: PyTree) -> Copy:
        return Copy(x0, jax.tree.map(jnp.ones_like, x0))

    def caught_up(self, at: Copy, sent: StepRecord, nu: Real) -> Copy:
        """Lines 2 and 3."""
        K, P = sent.scalars.shape
        u = directions(sent.words, K - 1, at.x, P, at.H)
        delta = tree.scale(1 / P, combine(sent.scalars[-1], u))
        H = jax.tree.map(lambda h, d: nu * h + (1 - nu) * d**2, at.H, delta)
        return Copy(replayed(at.x, sent, at.H), H)

    def from_record(
        self, problem: Minimization, client: Client, key: Key, last: StepRecord, nu: Array, words: Array
    ) -> Remember:
        at = self.caught_up(client.memory, last, nu)
        return Remember(self.scalars(problem, client, key, at, words), at)

    def scalars(self, problem: Minimization, client: Client, key: Key, at: Copy, words: Array) -> Array:
        options = (self.K, self.P, self.mu, self.two_sided, self.batch_size)
        return local_scalars(problem, client, key, at.x, words, self.eta, options, at.H)  # lines 4 to 6

    def round(self, problem: Minimization, fed: Fed, key: Key, r: Integer, state: State) -> State:
        words, at = words_of(key), Copy(state.x, state.H)
        if fed.participants < fed.clients:
            mean = fed.average(self.scalars, key, at, words)
        else:
            mean = fed.average(self.from_record, key, state.last, state.nu, words)  # line 1
        sent = StepRecord(words, mean, jnp.asarray(self.eta, state.last.eta.dtype))
        nu = jnp.asarray(self.nu, state.nu.dtype)
        return State(*self.caught_up(at, sent, nu), sent, nu)  # line 7
