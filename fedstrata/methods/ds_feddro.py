"""DS-FedDRO: compositions with step sizes on both sides and no exchange between local steps (Algorithm 3).

    min_x  Φ(x) = h(x) + f(g(x)),   h and g means over clients

    1  before round 0: y ← the mean of the clients' g_k(x; ζ)
    2  server: send x, y
    3  client k, t = 0 … I − 1 from x_k = x, y_k = y:
    4      x_k ← x_k − η (∇h_k(x_k; ζ_t) + ∇g_k(x_k; ζ_t)ᵀ ∇f(ŷ))
    5      y_k ← (1−β) y_k + β g_k(x_k; ζ_{t+1})
    6  server: x ← x − γ_x mean(x − x_k);  y ← y − γ_y mean(y − y_k)

The paper does not say which ŷ enters line 4. With ``embedding="server"`` ŷ = y, held constant during the
round. Line 5 evaluates g_k at client k's moving point, so y lags behind g(x) by about η mean ∇g_k(∇h_k +
∇g_kᵀ∇f): when clients differ, ‖∇Φ‖ at the limit is proportional to ηI, also with I = 1. With
``embedding="anchored"`` (not in the paper) line 5 uses g_k(x; ζ_{t+1}), at the server's x: with I = 1 the
fixed points satisfy ∇Φ = 0, and with more steps only line 4 drifts, by η(I − 1). With ``embedding="local"``
ŷ = y_k, which is the same for I = 1; with more steps and different clients its fixed point is biased at any
η, on the paper's own counterexample to about 6β/(1 + 4.5β) instead of 0.

Not in the paper: f may be a mean over clients and g may have several levels; then, except for the local
embedding, separate exchanges before line 3 average the cotangents at y. A level in the log domain
(`LogMeanExp`) is tracked as log g. There y is kept above β times the newest estimate, which γ_y > 1 could
pass, and in line 4 above β/K times g_k(x_k; ζ_t), so that no sample weighs more than K/β when y lags behind.

With minibatches and a level in the log domain, training is chaotic, more so with γ_x, γ_y > 1: rounding alone
changes the final accuracy by several points (docs/methods/robust.md). Compare several seeds.

Reveals only averages, and with a level in the log domain each client's replies. Needs gradients, and products
with the Jacobian of g.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, Literal, NamedTuple

import jax

from fedstrata.core import tree
from fedstrata.core.client import Client
from fedstrata.core.counting import loop
from fedstrata.core.fed import Fed
from fedstrata.core.method import BatchSize, Count, Fraction, Positive, method
from fedstrata.core.types import Integer, Key, PyTree, Real
from fedstrata.estimators import compositional as c
from fedstrata.methods._shared.compositional import Compositional
from fedstrata.methods._shared.rules import biased_where_partial, composed
from fedstrata.problems.classes import Composition
from fedstrata.problems.levels import ARITHMETIC, tracker_of
from fedstrata.problems.measured import Conditions, Practical


class State(NamedTuple):
    """The server's iterate and embedding."""

    x: PyTree
    y: tuple[PyTree, ...]


@method
class DSFedDRO(Compositional[State]):
    """``I`` local steps of size ``eta`` with momentum ``beta``, then server steps in x and y.

    Args:
        eta: the clients' step size of x.
        beta: the weight β in (0, 1] of a new inner value; 1 keeps nothing of the old ones.
        I: local steps per round.
        gamma_x: the server's step size of x; 1 takes the mean.
        gamma_y: the server's step size of the embedding y.
        embedding: the inner value that enters the gradient: ``"server"`` (held constant during a round),
            ``"anchored"`` (the same, but updated at the server's x: exact with I = 1) or ``"local"`` (each
            client's own).
        batch_size: the minibatch size; None uses all of a client's samples.
    """

    eta: Positive  # η
    beta: Fraction  # β
    I: Count = 1
    gamma_x: Positive = 1.0  # γ_x
    gamma_y: Positive = 1.0  # γ_y
    embedding: Literal["server", "anchored", "local"] = "server"
    batch_size: BatchSize = None

    private_samples = True
    drifts = "I"

    @classmethod
    def from_theory(
        cls,
        *,
        T: int,
        clients: int,
        I: int = 1,
        c_eta: float = 1.0,
        c_beta: float = 1.0,
        c_x: float = 1.0,
        c_y: float = 1.0,
        **options: Any,
    ) -> DSFedDRO:
        """The orders of Theorem 5.2: η = c_η√(I/T), β = c_β η, γ_x = c_x√(K/T), γ_y = c_y γ_x.

        Args:
            T: local steps in total; run ``rounds = ⌈T/I⌉``.
            clients: the number of clients K.
            I: local steps per round.
            c_eta: the constant of O(·) in η.
            c_beta: the constant c_β.
            c_x: the constant of O(·) in γ_x.
            c_y: the constant c_γy.
            options: other hyper-parameters.

        Raises:
            ValueError: if T is so small that β would exceed 1.

        Warns:
            UserWarning: if γ_x < 1, as in the theorem: the sum of all steps is bounded, and x does not
                converge.

        >>> import fedstrata as fs
        >>> m = fs.DSFedDRO.from_theory(T=10_000, clients=4, I=4, c_beta=2.0, c_x=50.0)
        >>> m.eta, m.beta, m.gamma_x
        (0.02, 0.04, 1.0)
        """
        if T < 1 or clients < 1 or I < 1:
            raise ValueError(f"DSFedDRO.from_theory needs T, clients, I ≥ 1, but got {T}, {clients}, {I}.")
        eta, gamma_x = c_eta * math.sqrt(I / T), c_x * math.sqrt(clients / T)
        if c_beta * eta > 1:
            raise ValueError(
                f"DSFedDRO.from_theory: T={T} is too small: β would be {c_beta * eta:.3g} > 1. Give a "
                "larger T."
            )
        if gamma_x < 1:
            warnings.warn(
                f"DSFedDRO.from_theory: with Theorem 5.2's γ_x = {gamma_x:.3g} x does not converge: {T} "
                f"steps of size γ_x η sum to {T * gamma_x * eta:.3g} times the gradient for any T. Give "
                f"c_x={math.sqrt(T / clients):.3g}, so that γ_x = 1 (docs/errata.md).",
                stacklevel=2,
            )
        return cls(eta, c_beta * eta, I, gamma_x, c_y * gamma_x, **options)

    def bias(self) -> str | None:
        if self.embedding != "local":
            return None
        return (
            "With embedding='local' a client's embedding drifts to its own g, which is exact only for a "
            "linear f. Use embedding='anchored', which is exact with I=1."
        )

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """η = 1/(2 L_Φ), as y is a round behind x, β = 1, I = 1, at the server's x: its limit is exact."""
        steps = composed(at, 2)
        return steps.of(cls(steps.gamma, 1.0, embedding="anchored"), doubts=biased_where_partial(at))

    def init(self, problem: Composition, x0: PyTree, y0: PyTree) -> State:
        return State(x0, c.followed(problem, y0))

    def start(self, problem: Composition, fed: Fed, key: Key, state: State) -> State:
        return State(state.x, self.values_at(problem, fed, key, self.value_of_level, (state.x,)))  # line 1

    def local_steps(
        self,
        problem: Composition,
        client: Client,
        key: Key,
        x: PyTree,
        y: c.Values,
        pulled: c.Values,
        floor: Real,
    ) -> PyTree:
        trackers = [tracker_of(level) for level in c.chain_of(problem).inner]

        def step(carry: Any, key_t: Key, t: Integer) -> Any:
            x_k, y_k, _ = carry
            now, then = (self.drawn(problem, client, k) for k in (key_t, jax.random.fold_in(key, t + 1)))
            used, slopes = (y, pulled)
            if self.embedding == "local":
                used, slopes = y_k, now.pull_locally(y_k)
            if floor is not None:
                used = (trackers[0].guard(used[0], now.value(0, x_k), floor), *used[1:])
            x_k = tree.axpy(-self.eta, now.direction(x_k, used, slopes), x_k)  # line 4
            points = (x if self.embedding == "anchored" else x_k, *(y_k if self.embedding == "local" else y))
            newest = [then.value(n, points[n]) for n in range(len(trackers))]
            blends = (
                tracker.blend(self.beta, *pair) for tracker, *pair in zip(trackers, y_k, newest, strict=True)
            )
            return x_k, tuple(blends), tuple(newest)  # line 5

        x_k, y_k, newest = loop(self.I, step, key, (x, y, y), indexed=True)  # line 3
        return x_k, tuple(tracker.report(*pair) for tracker, *pair in zip(trackers, y_k, newest, strict=True))

    def round(self, problem: Composition, fed: Fed, key: Key, r: Integer, state: State) -> State:
        x, y = state
        trackers = [tracker_of(level) for level in c.chain_of(problem).inner]
        key_local, key_pull = jax.random.split(key)
        pulled = () if self.embedding == "local" else self.cotangents(problem, fed, key_pull, y)
        plain = all(tracker is ARITHMETIC for tracker in trackers)
        floor = None if plain else self.beta / fed.participants
        known = (x, tuple(tracker.report(old, old) for tracker, old in zip(trackers, y, strict=True)))
        message = (self.local_steps, key_local, x, y, pulled, floor)  # line 2
        if plain:
            x_k, y_k = fed.average(*message, around=known)
        else:
            (x_k, y_k), weights = fed.gather(*message, around=known), fed.cohort_weights
            x_k = ARITHMETIC.mean(x_k, weights)
            y_k = tuple(tracker.mean(report, weights) for tracker, report in zip(trackers, y_k, strict=True))
        new = (
            tracker.step(self.gamma_y, old, mean, self.beta)
            for tracker, old, mean in zip(trackers, y, y_k, strict=True)
        )
        return State(tree.lerp(self.gamma_x, x, x_k), tuple(new))  # line 6
