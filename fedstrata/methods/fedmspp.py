"""FedMSPP (Yuan and Li 2022): federated minibatch stochastic proximal point.

    min_x  1/m Σ_i E f_i(x, ξ)   over X

    1  server: send x̄ to the clients that take part
    2  client i: draw one minibatch B from D_i for the whole round
    3  client i: z ≈ argmin_z f_i(z; B) + ‖z − x̄‖²/(2η), by H gradient steps of size γ from x̄:
    4      z ← z − γ (∇f_i(P_X(z); B) + (z − x̄)/η)
    5  server: x̄ ← P_X(the mean of the clients' z)

The server's lines, 1 and 5, are FedAvg's, and sets enter likewise; the original is unconstrained. Reveals
only averages. Needs gradients. η → ∞ is FedAvg with one minibatch per round.
"""

from __future__ import annotations

import jax

from fedstrata.core import tree
from fedstrata.core.client import Client, steps_of
from fedstrata.core.counting import loop
from fedstrata.core.method import BatchSize, LocalSteps, Positive, method
from fedstrata.core.types import Key, PyTree
from fedstrata.estimators.gradients import gradient
from fedstrata.methods._shared.rules import descent, own_sets, scale
from fedstrata.methods.fedavg import Averaging
from fedstrata.problems.classes import Minimization
from fedstrata.problems.measured import Conditions, Practical


@method
class FedMSPP(Averaging):
    """Proximal steps with parameter ``eta`` on one minibatch per round, by ``H`` steps of size ``gamma``.

    Args:
        eta: the proximal parameter; large values let clients move far from the server's iterate.
        gamma: the step size of the inner solver; at most about 1/(L + 1/η).
        H: local steps of the inner solver: an integer, one per client, or a function of the round.
        batch_size: the size of a round's minibatch; None uses all of a client's samples.
    """

    eta: Positive  # η
    gamma: Positive  # γ
    H: LocalSteps = 10
    batch_size: BatchSize = None

    private_samples = True

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """As FedAvg's, with a pull that is weak relative to L: η = 10 H/L."""
        its = at["loss"]
        steps = descent(at, its, local=True)
        return steps.of(cls(10 * steps.H / scale(its), steps.gamma, steps.H), doubts=own_sets(at))

    def local_steps(self, problem: Minimization, client: Client, key: Key, x_bar: PyTree) -> PyTree:
        key_batch, key_steps = jax.random.split(key)
        f = client.mean(problem.loss, key_batch, self.batch_size)  # line 2

        def step(z: PyTree, key: Key) -> PyTree:
            g = gradient(f, problem.project.common(z))
            direction = tree.axpy(1 / self.eta, tree.sub(z, x_bar), g)
            return problem.project.own(tree.axpy(-self.gamma, direction, z), client)  # line 4

        return loop(steps_of(self.H, client), step, key_steps, x_bar)  # line 3
