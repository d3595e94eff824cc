"""PDSGD: a primal-dual method for many functional constraints (Xu 2020), in parallel over the clients.

    min_x  f₀(x)  s.t.  f_j(x) ≤ 0,  j = 1 … M;   here f₀ = h and f_j = c_j(g(x)), h and g means over clients

    1  server: send x;  client k: draw B_k;  server: y ← the mean of g_{B_k}(x), so that f_j = c_j(y)
    2  server: draw a constraint j;  λ_j ← [β f_j + z_j]₊, and λ_i ← 0 for the others
    3  server: x ← x − α (the clients' mean of ∇h_{B_k}(x) + ∇g_{B_k}(x)ᵀ ∇c(y)ᵀ λ)
    4  server: z_j ← z_j + ρ max(−z_j/β, f_j)

``constraints="all"`` uses all constraints in every round, λ ← [β f + z]₊/M and z ← z + ρ max(−z/β, f), the
mean over j of lines 2 and 3. A composition without constraints, h(x) + f(g(x)), is solved in epigraph form,
min h(x) + t s.t. f(g(x)) − t ≤ 0: its one constraint has the multiplier 1, and t ← t − α(1 − λ) starts at the
first f(y).

Reveals only averages, and for a level in the log domain each client's log g_k. Needs gradients, and products
with the Jacobian of g.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedstrata.core import tree
from fedstrata.core.client import Client
from fedstrata.core.fed import Fed
from fedstrata.core.method import BatchSize, Positive, method
from fedstrata.core.types import Integer, Key, PyTree
from fedstrata.estimators import compositional as c
from fedstrata.estimators.gradients import value_and_gradient
from fedstrata.methods._shared.compositional import Compositional
from fedstrata.methods._shared.rules import biased_where_partial, scale
from fedstrata.problems.classes import Composition
from fedstrata.problems.fairness import Constrained
from fedstrata.problems.measured import Conditions, NoRule, Practical

MOST = 1e4  # rounds that the epigraph's variable may take
DUAL = 0.13  # the least fraction of the multipliers' error that a round removes


class State(NamedTuple):
    """The iterate, the epigraph's variable and the multipliers."""

    x: PyTree
    t: jax.Array
    z: jax.Array


@method
class PDSGD(Compositional[State]):
    """Primal steps of size ``alpha`` and dual steps of size ``rho`` on an augmented Lagrangian with ``beta``.

    Args:
        alpha: the primal step size.
        rho: the dual step size.
        beta: the penalty parameter of the augmented Lagrangian.
        constraints: ``"sampled"`` uses one constraint per round, as in the paper; ``"all"`` uses all.
        batch_size: the minibatch size; None uses all of a client's samples.
    """

    alpha: Positive  # α
    rho: Positive  # ρ
    beta: Positive  # β
    constraints: Literal["sampled", "all"] = "sampled"
    batch_size: BatchSize = None

    private_samples = True

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """With c = f_j: β ‖∇c‖² = L M, α = 1/(2L + λ L_c), ρ = β/2, λ ≈ ‖∇h‖/‖∇c‖, all M in a round.

        Line 3 has the curvature L + β ‖∇c‖²/M + λ L_c. Of an epigraph ∇c = (∇f(g), −1) and β = L/‖∇c‖².
        """
        if isinstance(at.problem, Constrained):
            h, c, count = at["plain"], at["constraints"], at.problem.count
            if not c.gradient > 0:
                raise NoRule("the constraints have zero gradients at the start")
            L, steep = scale(h), c.gradient
            alpha = 1 / (2 * L + h.gradient / steep * c.L)
            beta = L * count / steep**2
        else:
            h = at.F
            if at.problem.lifted:
                raise NoRule("x and the threshold, which has the unit of the loss, have the same step size")
            L = scale(h)
            alpha, beta = 1 / (2 * L), L / (1 + h.gradient**2)
            fall = h.gradient * h.reach / 2
            if not (fall < MOST * alpha and MOST * alpha * beta > 1):  # t falls by α in a round, at most
                large = f"divide the loss by {max(fall, h.gradient):.2g}"
                raise NoRule(f"x and t, which has the unit of the loss, have the same step size: {large}")
        rate = min(alpha * max(h.mu, 0.0) / 2, DUAL)
        why = "beta balances the constraints' curvature with the loss's, alpha = 1/their sum, rho = beta/2"
        doubts = biased_where_partial(at)
        return Practical(cls(alpha, beta / 2, beta, "all"), rate, (why,), cost=2.0, doubts=doubts)

    def judged_as(self, problem: Composition) -> Composition:
        return problem.exact()

    def init(self, problem: Composition, x0: PyTree, y0: PyTree) -> State:
        count = problem.count if isinstance(problem, Constrained) else 1
        return State(x0, jnp.zeros(()), jnp.zeros(count))

    def memory(self, problem: Composition, x0: PyTree, y0: PyTree) -> PyTree:
        return x0

    def outer(self, problem: Composition, client: Client, key: Key, y: c.Values) -> tuple[jax.Array, PyTree]:
        """The value and the gradient of f, if it is a mean over clients."""
        return value_and_gradient(client.train.mean(c.chain_of(problem).outer, key, self.batch_size), y[-1])

    def drawn(self, problem: Composition, client: Client, key: Key) -> c.Drawn:
        """The composition; the server provides its uppermost cotangent."""
        return c.chain_of(problem)._replace(federated=True).drawn(client, key, self.batch_size)

    def direction(self, problem: Composition, client: Client, key: Key, y: PyTree, pulled: PyTree) -> PyTree:
        return self.drawn(problem, client, key).direction(client.memory, y, pulled)

    def round(self, problem: Composition, fed: Fed, key: Key, r: Integer, state: State) -> State:
        key, key_j = jax.random.split(key)
        x, t, z = state
        y = self.values_at(problem, fed, key, self.value_and_keep, x)  # line 1
        chain = c.chain_of(problem)
        if isinstance(problem, Constrained):
            f, transposed = jax.vjp(problem.constraints, y[-1])
        else:
            pair = (
                fed.average(self.outer, key, y) if chain.federated else jax.value_and_grad(chain.outer)(y[-1])
            )
            value, slope = pair
            t = jnp.where(r == 0, value, t)
            f, transposed = (value - t)[None], lambda multiplier: (tree.scale(multiplier[0], slope),)
        drawn = jnp.ones_like(z)
        if self.constraints == "sampled":
            drawn = jax.nn.one_hot(jax.random.randint(key_j, (), 0, z.size), z.size, dtype=z.dtype)
        multiplier = drawn * jax.nn.relu(self.beta * f + z) / drawn.sum()  # line 2
        pulled: c.Values = (transposed(multiplier.astype(f.dtype))[0],)
        for _ in range(len(chain.inner) - 1):
            pulled = (*pulled, fed.average(self.pull, key, y, pulled))
        x = tree.axpy(-self.alpha, fed.average(self.direction, key, y, pulled), x)  # line 3
        if not isinstance(problem, Constrained):
            t = t - self.alpha * (1 - multiplier.sum())
        return State(x, t, z + drawn * self.rho * jnp.maximum(-z / self.beta, f))  # line 4
