"""SCAFFOLD (Karimireddy et al. 2020): control variates against client drift.

    min_x  1/m Σ_i E f_i(x, ξ)   over X

    1  server: send x, c to the clients S that take part
    2  client i, K times from y = x:
    3      y ← y − η_l (∇f_i(P_X(y), ξ) − c_i + c)
    4  client i: c_i⁺ ← c_i − c + (x − y)/(K η_l); upload y − x, c_i⁺ − c_i; remember c_i ← c_i⁺
    5  server: x ← P_X(x + η_g mean_S(y − x))
    6  server: c ← c + |S|/m mean_S(c_i⁺ − c_i)

c is the mean of all c_i. If clients have weights, |S|/m is the total weight of S, and the means over S use
these weights, not the inverse probabilities of the sampling (at the solution all clients move alike, so any
weights are correct there). A client with K = 0 keeps its c_i and is not in S. Control variates start at
zero, so the first round is FedAvg.

P_X is not in the paper. At the solution −∇f(x*) is normal to X, and so are all local steps: P_X(y) = x* for
all of them, so that the limit has no bias for any K. With K = 1 this is proximal SAGA.

Reveals only averages. Needs gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from fedstrata.core import tree
from fedstrata.core.client import Client, steps_of
from fedstrata.core.counting import loop
from fedstrata.core.fed import Fed, Remember
from fedstrata.core.method import BatchSize, LocalSteps, Method, Positive, method
from fedstrata.core.types import Integer, Key, PyTree
from fedstrata.estimators.gradients import gradient
from fedstrata.problems.classes import Minimization
from fedstrata.problems.measured import Conditions, NoRule, Practical


class State(NamedTuple):
    """The server's iterate and control variate."""

    x: PyTree
    c: PyTree


@method
class SCAFFOLD(Method[Minimization, State]):
    """``K`` local steps of size ``eta_l``, with control variates, and a server step of size ``eta_g``.

    Args:
        eta_l: the local step size.
        eta_g: the server's step size; 1 takes the mean.
        K: local steps per round: an integer, one per client, or a function of the round.
        batch_size: the minibatch size; None uses all of a client's samples.
    """

    eta_l: Positive  # η_l
    eta_g: Positive = 1.0  # η_g
    K: LocalSteps = 1
    batch_size: BatchSize = None

    solves = (Minimization,)
    private_samples = True
    feedback = "ef"  # the server sums increments, so what a channel drops must be sent later

    @classmethod
    def refuses(cls, problem: Minimization) -> str | None:
        if problem.project.shared:
            return None
        return "SCAFFOLD's server projects onto a set that all clients share; here use FedAvg or FedRZO."

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """K = 1 and a step of 1/L_max; with partial participation 1/(3L_max), as in SAGA."""
        its = at["loss"]
        if its.kinked:
            raise NoRule("SCAFFOLD's control variates assume a smooth loss")
        step = its.within(3 * float(its.client_L.max()) if at.partial else float(its.client_L.max()))
        share = at.participants / at.clients
        rate = min(step * its.mu, share / 2 if at.partial else 1.0)
        return Practical(
            cls(step), rate, ("eta_l = 1/(3 L), or 1/L with all clients, with the largest L of a client",)
        )

    def init(self, problem: Minimization, x0: PyTree, y0: PyTree) -> State:
        return State(x0, tree.zeros_like(x0))

    def memory(self, problem: Minimization, x0: PyTree, y0: PyTree) -> PyTree:
        return tree.zeros_like(x0)  # c_i

    def local_steps(self, problem: Minimization, client: Client, key: Key, x: PyTree, c: PyTree) -> Remember:
        c_i = client.memory
        correction = tree.sub(c, c_i)

        def step(y: PyTree, key: Key) -> PyTree:
            f = client.mean(problem.loss, key, self.batch_size)
            return tree.axpy(
                -self.eta_l, tree.add(gradient(f, problem.project.common(y)), correction), y
            )  # line 3

        K = steps_of(self.K, client)
        moved = tree.sub(loop(K, step, key, x), x)  # line 2
        c_new = tree.axpy(-1 / (jnp.maximum(K, 1) * self.eta_l), moved, tree.sub(c_i, c))  # line 4
        c_new = tree.where(K > 0, c_new, c_i)
        return Remember((moved, tree.sub(c_new, c_i)), c_new)

    def round(self, problem: Minimization, fed: Fed, key: Key, r: Integer, state: State) -> State:
        own, share = fed.cohort_sizes, fed.cohort_share
        at_work = fed.at_work(self.K, given=own)
        moved, changed = fed.average(self.local_steps, key, state.x, state.c, weights=at_work)  # line 1
        x = problem.project.common(tree.axpy(self.eta_g, moved, state.x))  # line 5
        if at_work is not None:
            share *= jnp.sum(fed.weights_of(fed.cohort, own), where=at_work > 0)
        c = tree.axpy(share, changed, state.c)  # line 6
        return State(x, c)
