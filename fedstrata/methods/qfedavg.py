"""q-FedAvg: clients with larger losses have larger weights (Li, Sanjabi, Beirami, Smith 2020).

    min_x  1/m Σ_i f_i(x)^(q+1) / (q+1)   over X,   f_i(x) = E f_i(x, ξ) ≥ 0

    1  server: send x to the clients that take part
    2  client i, H times from z = x:  draw ξ;  z ← z − γ ∇f_i(P_X(z), ξ)
    3  client i: F ← f_i(x, ξ),  Δ ← (x − z)/γ;  send  d_i = F^q Δ  and  h_i = q F^(q−1) ‖Δ‖² + F^q/γ
    4  server: x ← P_X(x − Σ d_i / Σ h_i)

1/γ stands for the Lipschitz constant L of the gradients, so that h_i bounds the curvature of f_i^(q+1)/(q+1)
along Δ. q = 0 is FedAvg. As in Flower, F is increased by 1e-10, because F^(q−1) is undefined at 0. Losses
must not be negative. With H = 1 and full batches the limit is exact; more local steps bias it, as in
FedAvg.

Reveals only averages (of the two uploads in line 3). Needs gradients and values.
"""

from __future__ import annotations

import jax

from fedstrata.core import tree
from fedstrata.core.client import Client, steps_of
from fedstrata.core.fed import Fed
from fedstrata.core.method import BatchSize, LocalSteps, NonNegative, Positive, method
from fedstrata.core.types import Array, Integer, Key, PyTree
from fedstrata.methods._shared.rules import descent, largest, scale
from fedstrata.methods.fedavg import Averaging, State, local_sgd
from fedstrata.problems.classes import Minimization
from fedstrata.problems.measured import Conditions, NoRule, Practical
from fedstrata.problems.of_clients import PowerOfLosses


@method
class QFedAvg(Averaging):
    """Fair federated averaging: a client's weight is its loss to the power of ``q``.

    Args:
        gamma: the clients' step size; 1/gamma stands for the Lipschitz constant of the gradients.
        q: the exponent of the weights; 0 is FedAvg, and q → ∞ tends to the largest loss.
        H: local steps per round: an integer, one per client, or a function of the round.
        batch_size: the minibatch size; None uses all of a client's samples.
    """

    gamma: Positive  # γ
    q: NonNegative = 1.0
    H: LocalSteps = 1
    batch_size: BatchSize = None

    needs = "gradients, losses ≥ 0"

    @classmethod
    def refuses(cls, problem: Minimization) -> str | None:
        if problem.project.shared:
            return None
        return "QFedAvg: the server updates x, so it cannot use a client-dependent project(x, client)."

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """1/γ = max L_i, H = 1, q = 1; the rate accounts for the factor F^q."""
        its = at["loss"]
        if not its.value >= 0:
            raise NoRule("the loss is negative at the start, so its power is not defined")
        steps = descent(at, its, largest(its))
        slopes = its.gradient**2 + its.heterogeneity**2
        rate = steps.rate / (1 + slopes / (its.value * scale(its))) if its.value > 0 else 0.0
        return steps.of(cls(steps.gamma), "q = 1 is a choice of the objective", rate=rate)

    def judged_as(self, problem: Minimization) -> PowerOfLosses:
        return PowerOfLosses(problem.loss, problem.project, self.at(0).q)

    def local_steps(self, problem: Minimization, client: Client, key: Key, x: PyTree) -> tuple[PyTree, Array]:
        key_steps, key_value = jax.random.split(key)

        H = steps_of(self.H, client)
        z = local_sgd(problem, client, key_steps, x, H, self.gamma, self.batch_size)  # line 2
        F = client.mean(problem.loss, key_value, self.batch_size)(x) + 1e-10
        delta = tree.scale(1 / self.gamma, tree.sub(x, z))
        curvature = self.q * F ** (self.q - 1) * tree.dot(delta, delta) + F**self.q / self.gamma
        return tree.scale(F**self.q, delta), curvature  # line 3

    def round(self, problem: Minimization, fed: Fed, key: Key, r: Integer, state: State) -> State:
        d, h = fed.average(self.local_steps, key, state.x, weights=fed.at_work(self.H))  # line 1
        return State(problem.project.common(tree.axpy(-1 / h, d, state.x)))  # line 4
