"""FedProx (Li et al. 2020): FedAvg with a pull towards the server's iterate.

    min_x  1/m Σ_i E f_i(x, ξ)   over X

    1  server: send x̂ to the clients that take part
    2  client i, H times from z = x̂:
    3      draw ξ from D_i
    4      z ← z − γ (∇f_i(P_X(z), ξ) + μ (z − x̂))
    5  server: x̂ ← P_X(the mean of the clients' z)

The server's lines, 1 and 5, are FedAvg's, and sets enter likewise. Reveals only averages. Needs gradients.
μ = 0 is FedAvg.
"""

from __future__ import annotations

from fedstrata.core import tree
from fedstrata.core.client import Client, steps_of
from fedstrata.core.counting import loop
from fedstrata.core.method import BatchSize, LocalSteps, NonNegative, Positive, method
from fedstrata.core.types import Key, PyTree
from fedstrata.estimators.gradients import gradient
from fedstrata.methods._shared.rules import descent, own_sets
from fedstrata.methods.fedavg import Averaging
from fedstrata.problems.classes import Minimization
from fedstrata.problems.measured import Conditions, Practical


@method
class FedProx(Averaging):
    """Federated averaging with ``H`` local steps of size ``gamma``, and a proximal term of weight ``mu``.

    Args:
        gamma: the step size.
        mu: the weight of the proximal term ``‖z − x̂‖²/2``; 0 is FedAvg.
        H: local steps per round: an integer, one per client, or a function of the round.
        batch_size: the minibatch size; None uses all of a client's samples.
    """

    gamma: Positive  # γ
    mu: NonNegative = 0.1  # μ
    H: LocalSteps = 1
    batch_size: BatchSize = None

    private_samples = True

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """As FedAvg's, with a pull as strong as the difference of the clients' Hessians."""
        its = at["loss"]
        steps = descent(at, its, local=True)
        return steps.of(cls(steps.gamma, its.curvature_heterogeneity, steps.H), doubts=own_sets(at))

    def local_steps(self, problem: Minimization, client: Client, key: Key, x_hat: PyTree) -> PyTree:
        def step(z: PyTree, key: Key) -> PyTree:
            f = client.mean(problem.loss, key, self.batch_size)  # line 3
            g = gradient(f, problem.project.common(z))
            direction = tree.axpy(self.mu, tree.sub(z, x_hat), g)
            return problem.project.own(tree.axpy(-self.gamma, direction, z), client)  # line 4

        return loop(steps_of(self.H, client), step, key, x_hat)  # line 2
