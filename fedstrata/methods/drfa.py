"""DRFA: distributionally robust federated averaging (Deng, Kamani, Mahdavi 2020).

    min_x max_{λ ∈ Δ}  Σ_i λ_i E f_i(x, ξ)   over X

    1  server: draw t' uniformly from 1 … τ; send x, t' to the clients that take part
    2  client i, τ times from z = x:  draw ξ;  z ← z − γ ∇f_i(P_X(z), ξ);  keep z' = z after the step t'
    3  server: x⁺ ← P_X(x + Σ (m/n) λ_i (z_i − x)),   x' ← P_X(x + Σ (m/n) λ_i (z'_i − x)),   over these n
    4  server: n clients, drawn uniformly, send f_i(x', ξ);   v_i ← (m/n) f_i(x', ξ), 0 for the others
    5  server: λ ← P_Δ(λ + η_λ τ v),   x ← x⁺

x' is the clients' mean after a random local step, so that in expectation line 5 sums the losses at all τ
steps; `fedstrata.AFL` would need an exchange of models for each. The paper samples the clients of line 1 by
λ and takes their plain mean; here they are sampled as in every method, and the factor m/n (with weights by
size, the inverse probability of a client) makes line 3 unbiased. With all clients x⁺ is Σ λ_i z_i.

λ is the result's ``y``. Reveals an average, and the losses of the clients in line 4. Needs gradients.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from fedstrata.core import tree
from fedstrata.core.client import Client
from fedstrata.core.counting import loop
from fedstrata.core.fed import Fed
from fedstrata.core.method import BatchSize, Count, Positive, method
from fedstrata.core.types import Array, Integer, Key, PyTree
from fedstrata.estimators.gradients import gradient
from fedstrata.methods._shared.agnostic import Agnostic, State
from fedstrata.problems.classes import Minimization


@method
class DRFA(Agnostic[State]):
    """``tau`` local steps of size ``gamma`` in x, then one step in the clients' weights.

    Args:
        gamma: the step size of x, on the clients.
        eta_lam: the step size of the clients' weights λ, on the server, multiplied by tau in line 5.
        tau: local steps per round.
        batch_size: the minibatch size; None uses all of a client's samples.
    """

    gamma: Positive  # γ
    eta_lam: Positive  # η_λ
    tau: Count = 1  # τ
    batch_size: BatchSize = None

    private_samples = True

    def init(self, problem: Minimization, x0: PyTree, y0: PyTree) -> State:
        return State(x0, y0)

    def local_steps(
        self, problem: Minimization, client: Client, key: Key, x: PyTree, kept: Integer
    ) -> tuple[PyTree, PyTree]:
        def step(both: tuple[PyTree, PyTree], key: Key, t: Integer) -> tuple[PyTree, PyTree]:
            z, snapshot = both
            f = client.mean(problem.loss, key, self.batch_size)
            g = gradient(f, problem.project.common(z))
            z = problem.project.own(tree.axpy(-self.gamma, g, z), client)
            return z, tree.where(t + 1 == kept, z, snapshot)

        return loop(self.tau, step, key, (x, x), indexed=True)  # line 2

    def stand_for(self, fed: Fed) -> Array:
        """The number of clients that each client of the cohort represents: one over its probability."""
        sizes = fed.cohort_sizes
        if sizes is None:
            return fed.clients * fed.cohort_weights
        return fed.cohort_weights * sizes.sum() / (sizes * fed.cohort_share)

    def round(self, problem: Minimization, fed: Fed, key: Key, r: Integer, state: State) -> State:
        key_kept, key_steps, key_drawn, key_loss = jax.random.split(key, 4)
        kept = jax.random.randint(key_kept, (), 1, self.tau + 1)  # line 1
        weights = state.y[fed.cohort] * self.stand_for(fed)
        total = weights.sum()
        weights = jnp.where(total > 0, weights, 1.0)  # if the cohort has no weight, x stays
        around = (state.x, state.x)
        ends = fed.average(self.local_steps, key_steps, state.x, kept, weights=weights, around=around)
        x, snapshot = (problem.project.common(tree.lerp(total, state.x, end)) for end in ends)  # line 3
        n, of = fed.participants, None
        if n < fed.clients:
            of = jnp.sort(jax.random.choice(key_drawn, fed.everyone, (n,), replace=False))
        losses = jnp.asarray(fed.gather(self.loss, key_loss, snapshot, of=of))  # line 4
        v = losses if of is None else jnp.zeros_like(state.y).at[of].set(losses * (fed.clients / n))
        weights = optax.projections.projection_simplex(state.y + self.eta_lam * self.tau * v)  # line 5
        return State(x, weights)
