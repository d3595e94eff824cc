"""CODASCA: descent ascent with control variates, in stages (Yuan, Guo, Xu, Ying, Yang 2021).

    min_x max_y  1/m Σ_i E f_i(x, y, ξ)

    1  server: send w = (x, y), c and x_ref to the clients S that take part
    2  client i, I times from (u, v) = w:  draw ξ;  G ← (∇_x f_i, −∇_y f_i) at (u, v, ξ)
    3      (u, v) ← (u, v) − η_s (G − c_i + c + ((u − x_ref)/γ, 0))
    4  client i: c_i⁺ ← the mean of its I operators G; upload (u, v) − w and c_i⁺ − c_i; remember c_i ← c_i⁺
    5  server: w ← w + η_g mean_S((u, v) − w),   c ← c + |S|/m mean_S(c_i⁺ − c_i)
    6  server: at the end of a stage, x_ref ← the mean of x over its rounds,   η_s ← η_s/3,   and the next
           stage has three times as many rounds

The paper maximises AUC, whose payoff is strongly concave in y and weakly convex in x: each stage minimises a
strongly convex f + ‖x − x_ref‖²/(2γ). The paper averages x in line 6 over the steps of a stage; here it is
the server's points over the rounds of a stage, which need no message. With γ = ∞ and a single stage the
method is SCAFFOLD with the operator instead of the gradient. The factor 3 is from the authors' code.

The paper has one η for both variables, and η_g = 1. With a separate step size of y, η_g, γ = ∞ and a single
stage, the method matches the abstract of SAGDA (Yang, Liu, Zhang, Liu 2022): control variates from sampled
clients, and step sizes at clients and server; SAGDA's pseudo-code was not available.

Reveals only averages. Needs gradients.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import jax.numpy as jnp

from fedstrata.core import tree
from fedstrata.core.client import Client
from fedstrata.core.counting import loop
from fedstrata.core.fed import Fed, Remember
from fedstrata.core.method import BatchSize, Count, Method, NonNegative, Positive, method
from fedstrata.core.types import Array, Integer, Key, PyTree
from fedstrata.methods._shared.descent_ascent import Pair, operator_of, refused_variates
from fedstrata.methods._shared.rules import largest, operator, two_levels
from fedstrata.problems.classes import Minimax
from fedstrata.problems.measured import Conditions, NoRule, Practical

ONE_STAGE = 10**6  # rounds in `CODASCA.practical`


class State(NamedTuple):
    """The server's pair, its control variate, and the state of the stage."""

    x: PyTree
    y: PyTree
    c: Pair
    reference: PyTree  # x_ref
    mean: PyTree  # of x over the stage's rounds
    number: Array  # rounds of the stage so far
    stage: Array  # s = 0, 1, …


@method
class CODASCA(Method[Minimax, State]):
    """``I`` local steps with control variates, on a payoff made convex in x around the last stage's mean.

    Args:
        eta: the step size in the first stage.
        weight: 1/γ, the weight of the term ``‖x − x_ref‖²/2``; 0 leaves it out.
        I: local steps per round.
        rounds: rounds of the first stage.
        factor: the factor by which each stage lengthens, and its step size shrinks.
        batch_size: the minibatch size; None uses all of a client's samples.
        eta_y: the step size of y in the first stage; None takes ``eta``.
        eta_g: the server's step size; 1 takes the mean.
    """

    eta: Positive  # η_0
    weight: NonNegative = 0.0  # 1/γ
    I: Count = 1
    rounds: Count = 100
    factor: Positive = 3.0
    batch_size: BatchSize = None
    eta_y: Positive | None = None
    eta_g: Positive = 1.0  # η_g

    solves = (Minimax,)
    private_samples = True
    feedback = "ef"  # the server sums increments, so what a channel drops must be sent later

    @classmethod
    def refuses(cls, problem: Minimax) -> str | None:
        return refused_variates(cls.__name__, problem)

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """One stage, I = 1, and the faster of one step and two: of `operator` and of `two_levels`."""
        two = two_levels(at, steady=True)
        eta, eta_y, rate, why = two.alpha, two.beta, two.rate, two.why
        with suppress(NoRule):
            one, _, pace = operator(at, largest(at["payoff"]), largest(at["lower"]))
            if pace > rate:
                eta, eta_y, rate = one, one, pace
                why = ("eta = a/(a² + B²), the smaller of a = mu and a = L, with the coupling B",)
        if at.partial:
            eta, eta_y, rate = eta / 3, eta_y / 3, min(rate / 3, at.participants / at.clients / 2)
        return Practical(cls(eta, rounds=ONE_STAGE, eta_y=eta_y), rate, why)

    def init(self, problem: Minimax, x0: PyTree, y0: PyTree) -> State:
        c, zero = tree.zeros_like(Pair(x0, y0)), jnp.zeros((), jnp.int32)
        return State(x0, y0, c, x0, tree.zeros_like(x0), zero, zero)

    def memory(self, problem: Minimax, x0: PyTree, y0: PyTree) -> Pair:
        return tree.zeros_like(Pair(x0, y0))  # c_i

    def local_steps(
        self, problem: Minimax, client: Client, key: Key, w: Pair, c: Pair, reference: PyTree, eta: Pair
    ) -> Remember:
        correction = tree.sub(c, client.memory)

        def step(carry: tuple[Pair, Pair], key: Key) -> tuple[Pair, Pair]:
            at, total = carry
            G = operator_of(problem, client, key, self.batch_size, at)
            by_x, by_y = tree.add(G, correction)
            by_x = tree.axpy(self.weight, tree.sub(at.x, reference), by_x)
            new = Pair(tree.axpy(-eta.x, by_x, at.x), tree.axpy(-eta.y, by_y, at.y))  # line 3
            return new, tree.add(total, G)

        end, total = loop(self.I, step, key, (w, tree.zeros_like(w)))  # line 2
        new = tree.scale(1 / self.I, total)
        return Remember((tree.sub(end, w), tree.sub(new, client.memory)), new)  # line 4

    def round(self, problem: Minimax, fed: Fed, key: Key, r: Integer, state: State) -> State:
        power = self.factor ** state.stage.astype(float)
        w, own = Pair(state.x, state.y), fed.cohort_sizes
        eta = Pair(self.eta / power, (self.eta if self.eta_y is None else self.eta_y) / power)
        moved, changed = fed.average(self.local_steps, key, w, state.c, state.reference, eta, weights=own)
        w, c = tree.axpy(self.eta_g, moved, w), tree.axpy(fed.cohort_share, changed, state.c)  # line 5
        number = state.number + 1
        mean = tree.lerp(1 / number.astype(float), state.mean, w.x)
        over = number >= self.rounds * power
        reference = tree.where(over, mean, state.reference)
        return State(w.x, w.y, c, reference, mean, jnp.where(over, 0, number), state.stage + over)  # line 6
