"""FedDRO: local steps for compositions, with the small embedding averaged in every step (Algorithm 2).

    min_x  Φ(x) = h(x) + f(g(x)),   h and g means over clients

    1  before round 0: ȳ ← the mean of the clients' g_k(x̄; ζ);  x_k^{−1} = x̄
    2  client k, t = 0 … I − 1 from x_k⁰ = x̄:
    3      draw ζ;  y_k ← (1−β) (ȳ − g_k(x_k^{t−1}; ζ)) + g_k(x_k^t; ζ)
    4      server: ȳ ← the mean of the clients' y_k, sent back to them        ("step" in the ledger)
    5      x_k^{t+1} ← x_k^t − η (∇h_k(x_k^t; ζ) + ∇g_k(x_k^t; ζ)ᵀ ∇f(ȳ))
    6  server: x̄ ← the mean of the clients' x_k^I        ("main" in the ledger)

How the paper is read. Line 5 uses the samples of line 3, as the paper's indices say; for KL this bounds the
samples' weights by K/β. Algorithm 2 lists the embedding before the averaging of x, but its analysis needs the
embedding of the averaged x: here line 3 follows line 6, so that I = 1 is parallel compositional SGD, and
MBSGD if also β = 1. In line 3 a client sends g_k(x_k^t) − (1−β) g_k(x_k^{t−1}), and the server adds the rest.
An exchange is a message to the clients and their reply, so x̄ travels with the first step of a round, and the
last ȳ with the exchange of x.

Not in the paper: f may be a mean over clients (its gradient at ȳ is then exchanged too), and g may have
several levels (each is tracked and exchanged). A level in the log domain (`LogMeanExp`) is tracked as log g.

Reveals only averages, and for a level in the log domain each client's log g_k. Needs gradients, and products
with the Jacobian of g.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedstrata.core import tree
from fedstrata.core.client import Client
from fedstrata.core.fed import Fed, Remember
from fedstrata.core.method import BatchSize, Count, Fraction, Positive, method
from fedstrata.core.types import Integer, Key, Phase, PyTree
from fedstrata.estimators import compositional as c
from fedstrata.methods._shared.compositional import Compositional, level_mean
from fedstrata.methods._shared.rules import composed
from fedstrata.problems.classes import Composition
from fedstrata.problems.levels import tracker_of
from fedstrata.problems.measured import Conditions, Practical


class State(NamedTuple):
    """The server's iterate and the embedding, one value for each tracked level."""

    x: PyTree  # x̄
    y: tuple[PyTree, ...]  # ȳ


class Memory(NamedTuple):
    """A client's memory: its last point, the number of the step, and the start of the round."""

    x: PyTree  # x_k
    step: jax.Array  # t
    began: PyTree  # x̄


@method
class FedDRO(Compositional[State]):
    """``I`` local steps of size ``eta``; each step averages an embedding with momentum ``beta``.

    Args:
        eta: the step size.
        beta: the weight β in (0, 1] of a new inner value; small values average over many steps, 1 over none.
        I: local steps per round, each with an exchange of the small embedding.
        batch_size: the minibatch size; None uses all of a client's samples.
    """

    eta: Positive  # η
    beta: Fraction  # β
    I: Count = 1
    batch_size: BatchSize = None

    private_samples = True
    drifts = "I"

    @classmethod
    def from_theory(
        cls,
        *,
        T: int,
        clients: int,
        batch_size: int = 1,
        B_g: float = 1.0,
        L_f: float = 1.0,
        B_f: float | None = None,
        L_g: float | None = None,
        L_h: float | None = None,
        c_eta: float = 1.0,
        **options: Any,
    ) -> FedDRO:
        """The rules of Theorem F.1: η = c_η√(bK/T), β = 4B_g⁴L_f²η, I = ⌊T^¼/(bK)^¾⌋ and at least 1.

        Args:
            T: local steps in total; run ``rounds = ⌈T/I⌉``.
            clients: the number of clients K.
            batch_size: the minibatch size b.
            B_g: a bound on ‖∇g‖.
            L_f: the Lipschitz constant of ∇f.
            B_f: a bound on ‖∇f‖.
            L_g: the Lipschitz constant of ∇g.
            L_h: the Lipschitz constant of ∇h. If L_h, B_f and L_g are given, T must be at least the
                theorem's T_th.
            c_eta: the factor of η; 1 in the theorem, which relies on a large T for a small enough η.
            options: other hyper-parameters.

        Raises:
            ValueError: if β would exceed 1, or if T is below T_th.

        >>> import fedstrata as fs
        >>> m = fs.FedDRO.from_theory(T=10_000, clients=4)
        >>> m.eta, m.beta, m.I
        (0.02, 0.08, 3)
        """
        if T < 1 or clients < 1 or batch_size < 1:
            raise ValueError(
                f"FedDRO.from_theory needs T, clients, batch_size ≥ 1, but got {T}, {clients}, {batch_size}."
            )
        eta = c_eta * math.sqrt(batch_size * clients / T)
        beta = 4 * B_g**4 * L_f**2 * eta
        if beta > 1:
            raise ValueError(
                f"FedDRO.from_theory: T={T} is too small for the theorem: β would be {beta:.3g} > 1. Give "
                "a larger T."
            )
        I = max(1, math.floor(T**0.25 / (batch_size * clients) ** 0.75 + 1e-9))
        if B_f is not None and L_g is not None and L_h is not None:
            steep, square = L_h + B_f * L_g + B_g**2 * L_f, L_h**2 + B_f**2 * L_g**2  # L_Φ of Lemma 3.5
            b_K, below = batch_size * clients, square + B_f**2 * L_g**2 + 4 * B_g**4 * L_f**2
            T_th = max(
                4 * (steep * b_K + 8 * B_g**2) ** 2 / b_K,
                (96 * B_g**2 * square / below) ** 2 / b_K,
                216 * square * I**2 * b_K,
            )
            if T_th > T:
                raise ValueError(
                    f"FedDRO.from_theory: T={T} is below the theorem's T_th = {T_th:.4g}, so its guarantee "
                    "does not hold. Give a larger T, or leave L_h, L_g and B_f out."
                )
        return cls(eta, beta, I, batch_size, **options)

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """η = 1/L_Φ, β = 0.9, I = 1."""
        steps = composed(at)
        return steps.of(cls(steps.gamma, 0.9), cost=2.0)

    full_participation = "its embedding follows every client from step to step."

    def init(self, problem: Composition, x0: PyTree, y0: PyTree) -> State:
        return State(x0, c.followed(problem, y0))

    def memory(self, problem: Composition, x0: PyTree, y0: PyTree) -> Memory:
        return Memory(x0, jnp.int32(0), x0)

    def start(self, problem: Composition, fed: Fed, key: Key, state: State) -> State:
        with fed.level("step"):
            y = self.values_at(problem, fed, key, self.value_of_level, (state.x,))
        return State(state.x, y)  # line 1

    def embed(
        self, problem: Composition, client: Client, key: Key, n: int, before: PyTree, now: PyTree
    ) -> PyTree:
        """Line 3 without ȳ, at level n + 1."""
        return self.drawn(problem, client, key).change(n, self.beta, before, now)

    def move(self, problem: Composition, client: Client, key: Key, y: PyTree, pulled: PyTree) -> PyTree:
        """Line 5."""
        x, t, _ = client.memory
        step = self.drawn(problem, client, jax.random.fold_in(key, t)).direction(x, y, pulled)
        return tree.axpy(-self.eta, step, x)

    def end(self, problem: Composition, client: Client, key: Key, y: PyTree, pulled: PyTree) -> PyTree:
        """Line 5 of the last step; uploads the change of x over the round."""
        return tree.sub(self.move(problem, client, key, y, pulled), client.memory.began)

    def first_step(self, problem: Composition, client: Client, key: Key, x: PyTree) -> Remember:
        """Line 3 of the first step, at the round's x̄."""
        change = self.embed(problem, client, jax.random.fold_in(key, 0), 0, client.memory.x, x)
        return Remember(change, Memory(x, jnp.int32(0), x))

    def next_step(
        self, problem: Composition, client: Client, key: Key, y: PyTree, pulled: PyTree
    ) -> Remember:
        """Line 5 of a step and line 3 of the next."""
        x, t = self.move(problem, client, key, y, pulled), client.memory.step + 1
        change = self.embed(problem, client, jax.random.fold_in(key, t), 0, client.memory.x, x)
        return Remember(change, Memory(x, t, client.memory.began))

    def embed_above(
        self, problem: Composition, client: Client, key: Key, before: PyTree, now: PyTree
    ) -> PyTree:
        """Line 3 of level n > 1; the values of the level below come after n − 2 times None."""
        return self.embed(problem, client, key, len(now), before[-1], now[-1])

    def follow(
        self, problem: Composition, fed: Fed, key: Key, t: Integer, y: PyTree, phase: Phase, *message: Any
    ) -> PyTree:
        """Lines 3 and 4, level by level; then ∇f(ȳ) if f is a mean over clients."""
        above, slopes = jax.random.split(jax.random.fold_in(key, t))
        new: tuple[PyTree, ...] = ()
        with fed.level("step"):
            for n, level in enumerate(c.chain_of(problem).inner):
                if n > 0:
                    before, now = ((*[None] * (n - 1), z[n - 1]) for z in (y, new))
                    phase, key, message = self.embed_above, above, (before, now)
                tracker = tracker_of(level)
                change = level_mean(fed, tracker, phase, key, *message)
                new = (*new, tracker.follow(self.beta, y[n], change))
            return new, self.cotangents(problem, fed, slopes, new)

    def round(self, problem: Composition, fed: Fed, key: Key, r: Integer, state: State) -> State:
        def step(t: Integer, y: PyTree) -> Any:
            return self.follow(problem, fed, key, t + 1, y[0], self.next_step, *y)

        y = self.follow(problem, fed, key, 0, state.y, self.first_step, state.x)
        y = fed.repeat(self.I - 1, step, y)
        moved = fed.average(self.end, key, *y)
        return State(tree.add(state.x, moved), y[0])  # lines 2, 6
