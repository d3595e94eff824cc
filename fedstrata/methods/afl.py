"""AFL: agnostic federated learning (Mohri, Sivek, Suresh 2019), with local steps.

    min_x max_{λ ∈ Δ}  Σ_i λ_i E f_i(x, ξ)   over X

    1  client i, H times from z_i = x:  draw ξ;  z_i ← z_i − γ ∇f_i(P_X(z_i), ξ)
    2  client i: send f_i(x, ξ)
    3  server: x ← P_X(Σ_i λ_i z_i)
    4  server: λ ← P_Δ(λ + η_λ (f_1(x), …, f_m(x))), the losses at the x that line 1 started from

H = 1 is the paper's method. If each client has its own set X_i, clients project after every step instead of
the server. λ is the result's ``y``. Reveals an average, and every client's loss. Needs gradients.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from fedstrata.core.client import Client, steps_of
from fedstrata.core.fed import Fed
from fedstrata.core.method import BatchSize, LocalSteps, Positive, method
from fedstrata.core.types import Integer, Key, PyTree
from fedstrata.methods._shared.agnostic import Agnostic, State
from fedstrata.methods.fedavg import local_sgd
from fedstrata.problems.classes import Minimization


@method
class AFL(Agnostic[State]):
    """``H`` local steps of size ``gamma`` in x, one step of size ``eta_lam`` in the clients' weights.

    Args:
        gamma: the step size of x, on the clients.
        eta_lam: the step size of the clients' weights λ, on the server.
        H: local steps per round: an integer, one per client, or a function of the round.
        batch_size: the minibatch size; None uses all of a client's samples.
    """

    gamma: Positive  # γ
    eta_lam: Positive  # η_λ
    H: LocalSteps = 1
    batch_size: BatchSize = None

    private_samples = True
    drifts = "H"
    full_participation = "every client's loss moves its weight."

    def init(self, problem: Minimization, x0: PyTree, y0: PyTree) -> State:
        return State(x0, y0)

    def local_steps(self, problem: Minimization, client: Client, key: Key, x: PyTree) -> PyTree:
        H = steps_of(self.H, client)
        return local_sgd(problem, client, key, x, H, self.gamma, self.batch_size)  # line 1

    def round(self, problem: Minimization, fed: Fed, key: Key, r: Integer, state: State) -> State:
        key_steps, key_loss = jax.random.split(key)
        losses = fed.gather(self.loss, key_loss, state.x)
        at_work = fed.at_work(self.H, given=state.y)
        x = fed.average(self.local_steps, key_steps, state.x, weights=at_work, around=state.x)
        weights = optax.projections.projection_simplex(state.y + self.eta_lam * jnp.asarray(losses))  # line 4
        return State(problem.project.common(x), weights)  # line 3
