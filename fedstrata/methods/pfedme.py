"""pFedMe: the Moreau envelopes of the clients' losses (Dinh, Tran, Nguyen 2020; Algorithm 1).

    min_x  1/m Σ_i F_i(x),     F_i(x) = min_y  E f_i(y, ξ) + λ/2 ‖y − x‖²

    1  server: send x to the clients that take part
    2  client i, R times from w = x:
    3      draw ξ;  K times:  y_i ← y_i − γ (∇f_i(y_i, ξ) + λ (y_i − w)), all with this ξ;  remember y_i
    4      w ← w − η λ (w − y_i)
    5  server: x ← (1 − β) x + β (the mean of the clients' w)

The gradient of F_i is λ (x − y_i(x)), which line 4 uses with the y_i of line 3. As in the authors' code y_i
starts from its last value. λ → ∞ is FedAvg's problem. The y_i are the result's ``y``, with a client axis;
each starts at ``y0``, by default x0. `fedstrata.certify` evaluates the problem as ``fs.Bilevel(h, h,
local=True)`` with h(x, y) = f(y) + λ/2 ‖y − x‖².

Reveals only averages. Needs gradients.
"""

from __future__ import annotations

import numpy as np

from fedstrata.core import tree
from fedstrata.core.client import Client, steps_of
from fedstrata.core.counting import loop
from fedstrata.core.fed import Fed, Remember
from fedstrata.core.method import BatchSize, Count, LocalSteps, Positive, method
from fedstrata.core.types import Integer, Key, PyTree
from fedstrata.estimators.gradients import gradient
from fedstrata.methods._shared.personal import Personal
from fedstrata.methods._shared.rules import LEFT, descent, largest, scale
from fedstrata.methods._shared.schedules import fading, falling
from fedstrata.methods.fedavg import State
from fedstrata.problems.classes import Minimization
from fedstrata.problems.measured import Conditions, Practical
from fedstrata.problems.of_clients import Envelopes


@method
class PFedMe(Personal):
    """``R`` local steps on a client's Moreau envelope, each with ``K`` gradient steps for the proximal point.

    Args:
        eta: the step size of line 4; at most 1/lam.
        gamma: the step size of line 3; below 2/(L + lam).
        lam: the weight of the pull of the clients' models towards x.
        beta: the server's step size; 1 takes the mean.
        R: local steps per round: an integer, one per client, or a function of the round.
        K: gradient steps per local step.
        batch_size: the minibatch size; None uses all of a client's samples.
    """

    eta: Positive  # η
    gamma: Positive  # γ
    lam: Positive = 15.0  # λ
    beta: Positive = 1.0  # β
    R: LocalSteps = 1
    K: Count = 5
    batch_size: BatchSize = None

    private_samples = True
    drifts = "R"

    def judged_as(self, problem: Minimization) -> Envelopes:
        return Envelopes.of(problem.loss, self.at(0).lam)

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """λ = L, a choice; γ = 1/(L_max + λ), K for an accuracy of 1 %, η = 1/λ: w ← y_i."""
        its = at["loss"]
        lam = scale(its)
        mu, within = max(its.mu, 0.0), 1 / (largest(its) + lam)
        K = int(np.ceil(np.log(1 / LEFT) / -np.log1p(-min(within * lam, 0.9))))
        rate, steps = mu / (lam + mu), descent(at, its)
        if steps.fades and not its.kinked:
            return steps.of(cls(fading(1 / lam, rate / 2), within, lam, K=K), "lam = L is a choice", rate=0.0)
        gamma = falling(within, at.rounds) if its.kinked else within
        why = "eta = 1/lam, gamma = 1/(L + lam), K for an accuracy of 1 %; lam = L is a choice"
        return steps._replace(why=why).of(cls(1 / lam, gamma, lam, K=K), rate=0.0 if its.kinked else rate)

    def local_steps(self, problem: Minimization, client: Client, key: Key, x: PyTree) -> Remember:
        def outer(both: tuple[PyTree, PyTree], key: Key) -> tuple[PyTree, PyTree]:
            w, y = both
            f = client.mean(problem.loss, key, self.batch_size)

            def inner(y: PyTree, key: Key) -> PyTree:
                return tree.axpy(-self.gamma, tree.axpy(self.lam, tree.sub(y, w), gradient(f, y)), y)

            y = loop(self.K, inner, key, y)  # line 3
            return tree.axpy(-self.eta * self.lam, tree.sub(w, y), w), y  # line 4

        return Remember(*loop(steps_of(self.R, client), outer, key, (x, client.memory)))  # line 2

    def round(self, problem: Minimization, fed: Fed, key: Key, r: Integer, state: State) -> State:
        at_work = fed.at_work(self.R)
        mean = fed.average(self.local_steps, key, state.x, weights=at_work, around=state.x)  # line 1
        return State(tree.lerp(self.beta, state.x, mean))  # line 5
