"""APFL: mixtures of the server's model and each client's own (Deng, Kamani, Mahdavi 2020; Algorithm 1).

    min_x  1/m Σ_i E f_i(x, ξ),       y_i = α_i v_i + (1 − α_i) x,   where v_i minimises  E f_i(y_i, ξ)

    1  server: send x to the clients that take part
    2  client i, H times from z = x:
    3      draw ξ;  z ← z − γ ∇f_i(z, ξ)
    4      y ← α_i v_i + (1 − α_i) z;   v_i ← v_i − γ α_i ∇f_i(y, ξ)
    5      in the first step, if adaptive:  α_i ← P_[0,1](α_i − γ ⟨v_i − z, ∇f_i(y, ξ)⟩)
    6  client i: remember v_i and α_i;   server: x ← the mean of the clients' z

The factor α_i in line 4 comes from the chain rule. Line 5 uses the gradient of line 4 and both models from
before the step, as the derivative of the mixture by α_i requires; the authors' code evaluates it after line 4
and adds 0.02 α_i. The result's ``y`` has the mixtures y_i of each client's last round, with a client axis.
α = 0 is FedAvg, whose server's lines, 1 and 6, are the same.

With full batches, H = 1 and a constant α > 0, the limit of α v_i + (1 − α) x is the client's own minimiser
for any α: clients benefit from each other only before convergence, or by early stopping.

Reveals only averages. Needs gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from fedstrata.core import tree
from fedstrata.core.client import Client, steps_of
from fedstrata.core.counting import loop
from fedstrata.core.fed import Remember
from fedstrata.core.method import BatchSize, LocalSteps, Positive, Unit, method
from fedstrata.core.types import Array, Integer, Key, PyTree
from fedstrata.estimators.gradients import gradient
from fedstrata.methods._shared.personal import Personal
from fedstrata.methods._shared.rules import descent, largest
from fedstrata.methods.fedavg import State
from fedstrata.problems.classes import Minimization
from fedstrata.problems.measured import Conditions, Practical


class Memory(NamedTuple):
    """A client's own model, its weight, and the mixture at its last step."""

    v: PyTree
    alpha: Array
    y: PyTree


@method
class APFL(Personal):
    """FedAvg for x, and for each client its own model ``v_i``, mixed with x by the weight ``alpha``.

    Args:
        gamma: the step size of x and of the clients' own models.
        alpha: the weight of a client's own model; if ``adaptive``, the initial weight.
        adaptive: whether every client learns its own weight.
        H: local steps per round: an integer, one per client, or a function of the round.
        batch_size: the minibatch size; None uses all of a client's samples.
    """

    gamma: Positive  # γ
    alpha: Unit = 0.5  # α
    adaptive: bool = False
    H: LocalSteps = 1
    batch_size: BatchSize = None

    private_samples = True

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """γ as FedAvg's, at most 1/(α² L) for each client, and H = 1."""
        its = at["loss"]
        steps = descent(at, its, max(at.cohort_L(its), cls.alpha**2 * largest(its)))
        return steps.of(cls(steps.gamma), "alpha = 0.5 is a choice")

    def memory(self, problem: Minimization, x0: PyTree, y0: PyTree) -> Memory:
        v = x0 if y0 is None else y0
        alpha = jnp.asarray(self.at(0).alpha, jnp.result_type(float))
        return Memory(v, alpha, tree.lerp(alpha, x0, v))

    def output(self, state: State, memory: Memory) -> tuple[PyTree, PyTree]:
        return state.x, memory.y

    def local_steps(self, problem: Minimization, client: Client, key: Key, x: PyTree) -> Remember:
        def step(both: tuple[PyTree, Memory], key: Key, t: Integer) -> tuple[PyTree, Memory]:
            z, (v, alpha, _) = both
            f = client.mean(problem.loss, key, self.batch_size)
            new = tree.axpy(-self.gamma, gradient(f, z), z)  # line 3
            g = gradient(f, tree.lerp(alpha, z, v))
            v_new = tree.axpy(-self.gamma * alpha, g, v)  # line 4
            if self.adaptive:
                moved = jnp.clip(alpha - self.gamma * tree.dot(tree.sub(v, z), g), 0, 1)
                alpha = jnp.where(t == 0, moved.astype(alpha.dtype), alpha)  # line 5
            return new, Memory(v_new, alpha, tree.lerp(alpha, new, v_new))

        H = steps_of(self.H, client)
        return Remember(*loop(H, step, key, (x, client.memory), indexed=True))  # lines 2, 6
