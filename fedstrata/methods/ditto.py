"""Ditto: a model for every client, near the server's (Li, Hu, Beirami, Smith 2021; Algorithm 1).

    x* = argmin_x  1/m Σ_i E f_i(x, ξ)   over X,      y_i = argmin_{y ∈ X}  E f_i(y, ξ) + λ/2 ‖y − x*‖²

    1  server: send x to the clients that take part
    2  client i, H times from z = x:  draw ξ;  z ← z − γ ∇f_i(P_X(z), ξ)
    3  client i, s times:  draw ξ;  y_i ← P_X(y_i − η (∇f_i(y_i, ξ) + λ (y_i − x)));  remember y_i
    4  server: x ← P_X(the mean of the clients' z)

x is FedAvg's for any λ, and so are lines 1, 2 and 4. With λ = 0 every client learns alone; with λ → ∞ every
y_i is x. The y_i are the result's ``y``, with a client axis; each starts at ``y0``, by default x0.

Reveals only averages. Needs gradients.
"""

from __future__ import annotations

import jax
import numpy as np

from fedstrata.core import tree
from fedstrata.core.client import Client, steps_of
from fedstrata.core.counting import loop
from fedstrata.core.fed import Remember
from fedstrata.core.method import BatchSize, Count, LocalSteps, NonNegative, Positive, method
from fedstrata.core.types import Key, PyTree
from fedstrata.estimators.gradients import gradient
from fedstrata.methods._shared.personal import Personal
from fedstrata.methods._shared.rules import descent, largest, own_sets, scale
from fedstrata.methods.fedavg import local_sgd
from fedstrata.problems.classes import Minimization
from fedstrata.problems.measured import Conditions, Practical


@method
class Ditto(Personal):
    """FedAvg for x, and ``s`` steps of each client's own model, which ``lam`` pulls towards x.

    Args:
        gamma: the step size of x, on the clients.
        eta: the step size of the clients' own models; below 2/(L + lam).
        lam: the weight of the pull of the clients' own models towards x.
        H: local steps of x in a round: an integer, one per client, or a function of the round.
        s: steps of a client's own model in a round.
        batch_size: the minibatch size; None uses all of a client's samples.
    """

    gamma: Positive  # γ
    eta: Positive  # η
    lam: NonNegative = 0.1  # λ
    H: LocalSteps = 1
    s: Count = 1
    batch_size: BatchSize = None

    private_samples = True
    takes_sets = True

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """γ as FedAvg's; λ = L/10 is a choice in the loss's unit; η = 1/(L + λ), s steps keep up with x."""
        its = at["loss"]
        steps, lam = descent(at, its), scale(its) / 10
        eta = steps.gamma if its.kinked else 1 / (largest(its) + lam)
        own = 0.0 if its.kinked else eta * (max(float(its.client_mu.min(initial=its.mu)), 0.0) + lam)
        s = int(np.clip(np.ceil(steps.rate / own), 1, 10)) if own > 0 else 1
        method = cls(steps.gamma, eta, lam, s=s)
        return steps.of(method, "lam = L/10 is a choice", rate=min(steps.rate, s * own), doubts=own_sets(at))

    def local_steps(self, problem: Minimization, client: Client, key: Key, x: PyTree) -> Remember:
        key_x, key_y = jax.random.split(key)
        H = steps_of(self.H, client)
        z = local_sgd(problem, client, key_x, x, H, self.gamma, self.batch_size)  # line 2

        def step(y: PyTree, key: Key) -> PyTree:
            g = gradient(client.mean(problem.loss, key, self.batch_size), y)
            g = tree.axpy(self.lam, tree.sub(y, x), g)
            return problem.project(tree.axpy(-self.eta, g, y), client)

        y = loop(self.s, step, key_y, client.memory)  # line 3
        return Remember(z, tree.where(H > 0, y, client.memory))
