"""Scaffnew, also ProxSkip (Mishchenko et al. 2022): local steps with random communication.

    min_x  1/m Σ_i E f_i(x, ξ),   or   min_x max_y  1/m Σ_i E f_i(x, y, ξ)

    1  server: T ← the number of coins tossed until the first success, which has probability p; send x, T
    2  client i: h ← h + p/γ (x − x̂), with x̂ from its last round
    3  client i, T times from x̂ = x:
    4      x̂ ← x̂ − γ (∇f_i(x̂, ξ) − h)
    5  client i: upload x̂ − γ/p h; remember h, x̂
    6  server: x ← the mean of the uploads

For a `Minimax` x is the pair (x, y) and ∇f_i the operator (∇_x f_i, −∇_y f_i), with the same step size for
both variables: ProxSkip-VIP (Zhang et al.), whose authors' code takes γ = 1/max ℓ_i and p = √(γμ) for
operators that are ℓ_i-Lipschitz and μ-strongly monotone.

A round ends with a success, so one round is one averaging. Reveals only averages. Needs
gradients. p = 1 is parallel gradient descent.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core import tree
from fedstrata.core.client import Client
from fedstrata.core.counting import loop
from fedstrata.core.fed import Fed, Remember
from fedstrata.core.method import BatchSize, Fraction, Method, Positive, method
from fedstrata.core.types import Integer, Key, PyTree
from fedstrata.methods._shared.descent_ascent import Pair, operator_of, refused_variates
from fedstrata.methods._shared.rules import largest, operator
from fedstrata.problems.classes import Minimax, Minimization
from fedstrata.problems.measured import Conditions, NoRule, Practical

FEWEST = 0.02  # the least p in `Scaffnew.practical`: rounds of fifty steps


class Memory(NamedTuple):
    """A client's control variate, its last point before averaging, and that round's p/γ."""

    h: Pair
    x_hat: Pair
    pull: jax.Array


@method
class Scaffnew(Method[Minimization | Minimax, Pair]):
    """Local steps of size ``gamma`` that communicate with probability ``p`` after each.

    Args:
        gamma: the step size, at most 1/L.
        p: the probability of communicating after a step, so that a round has 1/p steps on average; best about
            1/√κ for a condition number κ.
        batch_size: the minibatch size; None uses all of a client's samples.
    """

    gamma: Positive  # γ
    p: Fraction
    batch_size: BatchSize = None

    solves = (Minimization, Minimax)
    full_participation = "its control variates sum to zero only over all clients."

    @classmethod
    def refuses(cls, problem: Minimization | Minimax) -> str | None:
        return refused_variates(cls.__name__, problem)

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """γ = 1/L_max and p = 1/√κ: as many rounds as an accelerated method, of 1/p steps each.

        For a `Minimax` γ is an operator's, by `fedstrata.methods._shared.rules.operator`, and p = √(γμ).
        """
        if at.compressed:
            raise NoRule("its random number of local steps adds up the errors of compression")
        if at.problem.has_y:
            gamma, pull, _ = operator(at, largest(at["payoff"]), largest(at["lower"]))
            p = float(np.clip(np.sqrt(pull), FEWEST, 1.0))
            why = "gamma for both variables, p = √(gamma mu)"
            return Practical(cls(gamma, p), min(pull / 2 / p, p), (why,))
        its = at["loss"]
        if its.kinked or not its.mu > 0:
            raise NoRule("Scaffnew needs a loss that is smooth and strongly convex")
        step = its.within(float(its.client_L.max()))
        p = float(np.clip(np.sqrt(step * its.mu), FEWEST, 1.0))
        why = "gamma = 1/(largest L of a client), p = 1/√κ"
        return Practical(cls(step, p), min(step * its.mu / p, p), (why,))

    def init(self, problem: Minimization | Minimax, x0: PyTree, y0: PyTree) -> Pair:
        return Pair(x0, y0)

    def memory(self, problem: Minimization | Minimax, x0: PyTree, y0: PyTree) -> Memory:
        start = Pair(x0, y0)
        return Memory(tree.zeros_like(start), start, jnp.zeros(()))

    def local_steps(
        self, problem: Minimization | Minimax, client: Client, key: Key, x: Pair, T: Integer
    ) -> Remember:
        before: Memory = client.memory
        h = tree.axpy(before.pull, tree.sub(x, before.x_hat), before.h)  # line 2

        def step(x_hat: Pair, key: Key) -> Pair:
            slope = operator_of(problem, client, key, self.batch_size, x_hat)
            return tree.axpy(-self.gamma, tree.sub(slope, h), x_hat)  # line 4

        x_hat = loop(T, step, key, x)  # line 3
        pull = self.p / self.gamma
        return Remember(
            tree.axpy(-1 / pull, h, x_hat), Memory(h, x_hat, jnp.asarray(pull, before.pull.dtype))
        )  # line 5

    def round(self, problem: Minimization | Minimax, fed: Fed, key: Key, r: Integer, state: Pair) -> Pair:
        key_coin, key_steps = jax.random.split(key)
        T = jax.random.geometric(key_coin, self.p, dtype=jnp.int32)  # line 1
        return fed.average(self.local_steps, key_steps, state, T, around=state)  # line 6
