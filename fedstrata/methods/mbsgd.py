"""MBSGD: minibatch SGD for compositions (after Ghadimi, Lan 2013), in parallel over the clients.

    min_x  Φ(x) = h(x) + f(g(x)),   h and g means over clients

    1  server: send x;  client k: draw B_k
    2  server: y ← the mean of the clients' g_{B_k}(x), sent back to them
    3  server: x ← x − η (mean of ∇h_{B_k}(x) + ∇g_{B_k}(x)ᵀ ∇f(y))

The clients' minibatches form one minibatch B, and the direction is the gradient of h_B + f(g_B). It is biased
for Φ unless f is linear, because the mean of f(g_B) is not f(g). The method is FedDRO with β = 1 and I = 1.

Reveals only averages, and for a level in the log domain each client's log g_k. Needs gradients, and products
with the Jacobian of g.
"""

from __future__ import annotations

from fedstrata.core import tree
from fedstrata.core.client import Client
from fedstrata.core.fed import Fed
from fedstrata.core.method import BatchSize, Positive, method
from fedstrata.core.types import Integer, Key, PyTree
from fedstrata.methods._shared.compositional import Compositional, State
from fedstrata.methods._shared.rules import biased_where_partial, composed
from fedstrata.problems.classes import Composition
from fedstrata.problems.measured import Conditions, Practical


@method
class MBSGD(Compositional[State]):
    """Steps of size ``eta`` along the gradient of the composition of minibatch means.

    Args:
        eta: the step size.
        batch_size: the minibatch size; None uses all of a client's samples.
    """

    eta: Positive  # η
    batch_size: BatchSize = None

    private_samples = True

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """η = 1/L_Φ, with all samples."""
        steps = composed(at)
        return steps.of(cls(steps.gamma), cost=2.0, doubts=biased_where_partial(at))

    def init(self, problem: Composition, x0: PyTree, y0: PyTree) -> State:
        return State(x0)

    def memory(self, problem: Composition, x0: PyTree, y0: PyTree) -> PyTree:
        return x0

    def direction(self, problem: Composition, client: Client, key: Key, y: PyTree, pulled: PyTree) -> PyTree:
        return self.drawn(problem, client, key).direction(client.memory, y, pulled)

    def round(self, problem: Composition, fed: Fed, key: Key, r: Integer, state: State) -> State:
        y = self.values_at(problem, fed, key, self.value_and_keep, state.x)  # lines 1, 2
        step = fed.average(self.direction, key, y, self.cotangents(problem, fed, key, y))
        return State(tree.axpy(-self.eta, step, state.x))  # line 3
