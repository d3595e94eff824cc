"""FedGDRO: a risk of the clients' losses, computed from averages only.

    min_x  λ log(1/m Σ_i exp(F_i(x)/λ))   (``risk="kl"``),  or the CVaR of F_1 … F_m   (``"cvar"``),   over X

    1  before round 0: u_i ← F_i(x);   w ← log(1/m Σ_i exp(u_i/λ)),  or  s ← the mean of the u_i
    2  server: send x and w (or s) to the clients that take part
    3  client i, I times from z = x: draw ξ;  u_i ← (1 − β) u_i + β f_i(P_X(z), ξ);
           q_i ← exp(u_i/λ − w)   (kl),   1/α where u_i > s, else 0   (cvar);   z ← z − γ q_i ∇f_i(P_X(z), ξ)
    4  client i: send z and q_i;  remember u_i
    5  server: x ← P_X(the mean of the z);   w ← w + log(1 − η + η · the mean of the q_i)   (kl),
           s ← s − η (1 − the mean of the q_i)   (cvar)

q_i is the weight of client i in the gradient of the risk; w and s make the mean of the weights one. So the
server sees only averages, while `fedstrata.AFL` sees every client's loss. The limit is exact with I = 1 and
full batches; λ → ∞ is FedAvg, and a small λ or α tends to the worst client. The CVaR has kinks, so γ and η
must decrease.

This follows FGDRO-KL and FGDRO-CVaR (Guo, Yang 2024), of which the abstract and a summary were available: a
composition whose inner values are moving averages at the clients. The paper adds momentum, shares v = exp(w)
inside a round, and has a form with Adam. The risk over groups of samples is `fedstrata.dro.group`.

The result's ``y`` is w, or s. Reveals only averages. Needs gradients and values.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedstrata.core import tree
from fedstrata.core.client import Client
from fedstrata.core.counting import loop
from fedstrata.core.fed import Fed, Remember
from fedstrata.core.method import BatchSize, Count, Fraction, Method, Positive, method
from fedstrata.core.types import Array, Integer, Key, PyTree
from fedstrata.estimators.gradients import gradient
from fedstrata.methods._shared.rules import largest, own_sets
from fedstrata.problems.classes import Minimization
from fedstrata.problems.measured import Conditions, NoRule, Practical
from fedstrata.problems.of_clients import RiskOfClients


class State(NamedTuple):
    """The server's iterate, and w or s."""

    x: PyTree
    y: Array


@method
class FedGDRO(Method[Minimization, State]):
    """``I`` local steps, each weighted by the client's weight in the risk.

    Args:
        gamma: the step size of x.
        level: λ of the KL risk; for the CVaR, the fraction α of the clients.
        risk: ``"kl"`` or ``"cvar"``.
        eta: the step size of w, or of s, which is in the unit of the loss; 1 replaces w by the last mean.
        beta: the fraction of a client's tracked loss that a step replaces; 1 takes the minibatch's loss.
        I: local steps per round. Above 1 the limit is biased when clients differ.
        batch_size: the minibatch size; None uses all of a client's samples.
    """

    gamma: Positive  # γ
    level: Positive  # λ or α
    risk: Literal["kl", "cvar"] = "kl"
    eta: Positive = 1.0  # η
    beta: Fraction = 1.0  # β
    I: Count = 1
    batch_size: BatchSize = None

    solves = (Minimization,)

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """The KL risk with λ = F at the start, γ = 1/(max L_i + ζ²/λ), I = 1."""
        its = at["loss"]
        if its.kinked or not its.value > 0:
            raise NoRule("FedGDRO's rule assumes a smooth loss that is positive at the start")
        lam = its.value
        step = its.within(largest(its) + its.heterogeneity**2 / lam)
        some = ("the tracked losses of absent clients are out of date",) if at.partial else ()
        why = "lam = the loss at the start (another lam is another objective); gamma = 1/(max L + zeta²/lam)"
        return Practical(cls(step, lam), step * max(its.mu, 0.0), (why,), doubts=own_sets(at) + some)

    def judged_as(self, problem: Minimization) -> RiskOfClients:
        return RiskOfClients(problem.loss, problem.project, kind=self.risk, level=self.at(0).level)

    def start_y(self, problem: Minimization, y0: PyTree, clients: int) -> Array:
        return jnp.zeros(()) if y0 is None else jnp.asarray(y0)

    def init(self, problem: Minimization, x0: PyTree, y0: PyTree) -> State:
        return State(x0, y0)

    def memory(self, problem: Minimization, x0: PyTree, y0: PyTree) -> Array:
        return jnp.zeros(())  # u_i

    def first(self, problem: Minimization, client: Client, key: Key, x: PyTree) -> Remember:
        u = client.mean(problem.loss, key, None)(x)
        return Remember(u, u.astype(client.memory.dtype))

    def spread(self, problem: Minimization, client: Client, key: Key, centre: Array) -> Array:
        return jnp.exp((client.memory - centre) / self.level)

    def start(self, problem: Minimization, fed: Fed, key: Key, state: State) -> State:
        centre = fed.average(self.first, key, problem.project.common(state.x))
        if self.risk == "cvar":
            return state._replace(y=centre.astype(state.y.dtype))
        mean = fed.average(self.spread, key, centre)
        return state._replace(y=(centre / self.level + jnp.log(mean)).astype(state.y.dtype))  # line 1

    def local_steps(
        self, problem: Minimization, client: Client, key: Key, x: PyTree, dual: Array
    ) -> Remember:
        def step(carry: tuple[PyTree, Array, Array], key: Key) -> tuple[PyTree, Array, Array]:
            z, u, _ = carry
            f, at = client.mean(problem.loss, key, self.batch_size), problem.project.common(z)
            u = ((1 - self.beta) * u + self.beta * f(at)).astype(u.dtype)
            if self.risk == "kl":
                q = jnp.exp(u / self.level - dual)
            else:
                q = jnp.where(u > dual, 1 / self.level, 0.0).astype(u.dtype)
            z = tree.axpy(-self.gamma * q, gradient(f, at), z)
            return problem.project.own(z, client), u, q.astype(u.dtype)

        u = client.memory
        z, u, q = loop(self.I, step, key, (x, u, jnp.zeros_like(u)))  # line 3
        return Remember((z, q), u)  # line 4

    def round(self, problem: Minimization, fed: Fed, key: Key, r: Integer, state: State) -> State:
        around = (state.x, np.zeros((), state.y.dtype))  # q is new to both sides
        z, q = fed.average(self.local_steps, key, state.x, state.y, around=around)  # line 2
        moved = jnp.log1p(self.eta * (q - 1)) if self.risk == "kl" else -self.eta * (1 - q)
        return State(problem.project.common(z), state.y + moved)  # line 5
