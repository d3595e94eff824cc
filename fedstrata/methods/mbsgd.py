"""MBSGD: minibatch SGD for compositions (after Ghadimi, Lan 2013), in parallel over the clients.

    min_x  Φ(x) = h(x) + f(g(x)),   h and g means over clients

    1  server: send x;  client k: draw B_k
    2  server: y ← the mean of the clients' g_{B_k}(x), sent back to them
    3  server: x ← x − η (mean of ∇h_{B_k}(x) + ∇g_{B_k}(x)ᵀ ∇f(y))

The clients' minibatches form one minibatch B, and the direction is the gradient of h_B + f(g_B). It is biased
for Φ unless f is linear, because the mean of f(g_B) is not f(g). The method is FedDRO with β = 1 and I = 1.
It is linear for the risks that are one mean of x and a threshold (`dro.cvar`, `dro.kl_cvar`,
`dro.chi2(…, nonnegative=True)`); the threshold has the unit of the loss, and thus its own step size.

Reveals only averages, and for a level in the log domain each client's log g_k. Needs gradients, and products
with the Jacobian of g.
"""

from __future__ import annotations

from fedstrata.core import tree
from fedstrata.core.fed import Fed
from fedstrata.core.method import BatchSize, Positive, method
from fedstrata.core.types import Integer, Key
from fedstrata.methods._shared.compositional import AlongTheMean, State
from fedstrata.methods._shared.rules import biased_where_partial, composed, thresholded
from fedstrata.problems.classes import Composition
from fedstrata.problems.dro import DRO, Lifted
from fedstrata.problems.measured import Conditions, Practical


@method
class MBSGD(AlongTheMean):
    """Steps of size ``eta`` along the gradient of the composition of minibatch means.

    Args:
        eta: the step size.
        batch_size: the minibatch size; None uses all of a client's samples.
        threshold: the step size of a risk's threshold, relative to ``eta``.
    """

    eta: Positive  # η
    batch_size: BatchSize = None
    threshold: Positive = 1.0

    private_samples = True

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """η = 1/L_Φ, with all samples; decreasing, with a step of its own, for one mean of (x, threshold)."""
        if isinstance(at.problem, DRO) and at.problem.risk.additive:
            steps, unit = thresholded(at)
            return steps.of(cls(steps.gamma, threshold=unit), cost=2.0)
        steps = composed(at)
        return steps.of(cls(steps.gamma), cost=2.0, doubts=biased_where_partial(at))

    def round(self, problem: Composition, fed: Fed, key: Key, r: Integer, state: State) -> State:
        step = self.gradient(problem, fed, key, state.x)  # lines 1, 2
        if isinstance(problem, DRO) and problem.lifted:
            step = Lifted(step.x, self.threshold * step.eta)
        return State(tree.axpy(-self.eta, step, state.x))  # line 3
