"""Per-FedAvg: a model that each client adapts by one gradient step (Fallah, Mokhtari, Ozdaglar 2020).

    min_x  1/m Σ_i f_i(x − α ∇f_i(x)),    f_i(x) = E f_i(x, ξ)

    1  server: send x to the clients that take part
    2  client i, H times from z = x:
    3      draw ξ, ξ';  y ← z − α ∇f_i(z, ξ)
    4      z ← z − β (I − α ∇²f_i(z, ξ)) ∇f_i(y, ξ'),     or, first-order, z ← z − β ∇f_i(y, ξ')
    5  client i: remember y_i, the y of its first step, that is x − α ∇f_i(x, ξ)
    6  server: x ← the mean of the clients' z

The first-order form leaves out the Hessian; its limit differs by O(α) when clients differ. α = 0 is FedAvg,
whose server's lines, 1 and 6, are the same. The paper draws a third minibatch for the Hessian; here it is ξ.
The y_i, each at the x of the client's last round, are the result's ``y``, with a client axis.

Reveals only averages. Needs gradients, with ``order="second"`` Hessian-vector products.
"""

from __future__ import annotations

from typing import Literal

import jax

from fedstrata.core import tree
from fedstrata.core.client import Client, steps_of
from fedstrata.core.counting import loop
from fedstrata.core.fed import Remember
from fedstrata.core.method import BatchSize, LocalSteps, NonNegative, Positive, method
from fedstrata.core.types import Integer, Key, PyTree
from fedstrata.estimators.curvature import hessian_product
from fedstrata.estimators.gradients import gradient
from fedstrata.methods._shared.personal import Personal
from fedstrata.methods._shared.rules import descent, largest, scale
from fedstrata.problems.classes import Minimization
from fedstrata.problems.measured import Conditions, Practical
from fedstrata.problems.of_clients import Adapted


@method
class PerFedAvg(Personal):
    """``H`` local steps on the clients' losses after a gradient step of size ``alpha``.

    Args:
        beta: the step size of x.
        alpha: the step size of the clients' adaptation step.
        H: local steps per round: an integer, one per client, or a function of the round.
        order: ``"second"`` is exact, with one Hessian-vector product in each step; ``"first"`` leaves it out.
        batch_size: the minibatch size; None uses all of a client's samples.
    """

    beta: Positive  # β
    alpha: NonNegative = 0.01  # α
    H: LocalSteps = 1
    order: Literal["first", "second"] = "first"
    batch_size: BatchSize = None

    private_samples = True
    needs = "gradients; products with order='second'"

    def judged_as(self, problem: Minimization) -> Adapted:
        return Adapted(problem.loss, problem.project, self.at(0).alpha)

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """α = 0.1/max L_i, a choice in the loss's unit; β = 1/L, H = 1, second order."""
        its = at["loss"]
        steps, alpha = descent(at, its), 0.1 / max(largest(its), scale(its))
        rate = steps.rate * (1 - alpha * max(its.mu, 0)) ** 2
        method = cls(steps.gamma, alpha, order="first" if its.kinked else "second")
        return steps.of(method, "alpha = 0.1/L is a choice", rate=rate)

    def local_steps(self, problem: Minimization, client: Client, key: Key, x: PyTree) -> Remember:
        def step(both: tuple[PyTree, PyTree], key: Key, t: Integer) -> tuple[PyTree, PyTree]:
            z, first = both
            key_own, key_after = jax.random.split(key)
            f = client.mean(problem.loss, key_own, self.batch_size)
            y = tree.axpy(-self.alpha, gradient(f, z), z)  # line 3
            g = gradient(client.mean(problem.loss, key_after, self.batch_size), y)
            if self.order == "second":
                g = tree.axpy(-self.alpha, hessian_product(f, z, g), g)
            kept = tree.where(t == 0, y, first)
            return tree.axpy(-self.beta, g, z), kept  # line 4

        H = steps_of(self.H, client)
        return Remember(*loop(H, step, key, (x, client.memory), indexed=True))  # lines 2, 5
