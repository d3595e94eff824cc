"""FedAvg, also Local SGD (McMahan et al. 2017; Stich 2019).

    min_x  1/m Σ_i E f_i(x, ξ)   over X

    1  server: send x̂ to the clients that take part
    2  client i, H times from z = x̂:
    3      draw ξ from D_i
    4      z ← z − γ ∇f_i(P_X(z), ξ)
    5  server: x̂ ← P_X(the mean of the clients' z)

The original is unconstrained. Here the server projects, and clients evaluate gradients at projections
(lazily, like the dual averaging of Yuan, Zaheer, Reddi 2021): if clients projected themselves and disagreed
about a boundary, the mean of their points would stay off it at any γ. So H = 1 is projected parallel SGD, and
H > 1 adds the drift of local steps, of order γ(H − 1), as without a set. If each client has its own set
X_i, clients project every step, x ← P_{X_i}(x − γ ∇f_i(x, ξ)), and the server takes the mean.

Reveals only averages. Needs gradients. H = 1 is parallel SGD.
"""

from __future__ import annotations

from typing import NamedTuple

from fedstrata.core import tree
from fedstrata.core.client import Client, steps_of
from fedstrata.core.counting import loop
from fedstrata.core.fed import Fed
from fedstrata.core.method import BatchSize, LocalSteps, Method, Positive, method
from fedstrata.core.types import Integer, Key, PyTree, Real
from fedstrata.estimators.gradients import gradient
from fedstrata.methods._shared.rules import descent, own_sets
from fedstrata.problems.classes import Minimization
from fedstrata.problems.measured import Conditions, Practical


class State(NamedTuple):
    """The server's iterate."""

    x: PyTree  # x̂


class Averaging(Method[Minimization, State]):
    """Base of FedAvg and its relatives: the server's lines; a subclass has the clients' and the fields."""

    solves = (Minimization,)
    drifts = "H"

    H: LocalSteps

    def init(self, problem: Minimization, x0: PyTree, y0: PyTree) -> State:
        return State(x0)

    def local_steps(self, problem: Minimization, client: Client, key: Key, x: PyTree) -> PyTree:
        raise NotImplementedError

    def round(self, problem: Minimization, fed: Fed, key: Key, r: Integer, state: State) -> State:
        at_work = fed.at_work(self.H)
        mean = fed.average(self.local_steps, key, state.x, weights=at_work, around=state.x)  # line 1
        return State(problem.project.common(mean))  # line 5


@method
class FedAvg(Averaging):
    """Federated averaging with ``H`` local steps of size ``gamma``.

    Args:
        gamma: the step size: a number, or a function of the round.
        H: local steps per round: an integer, one per client, or a function of the round.
        batch_size: the minibatch size; None uses all of a client's samples.
    """

    gamma: Positive  # γ
    H: LocalSteps = 1
    batch_size: BatchSize = None

    private_samples = True

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """By `fedstrata.methods._shared.rules.descent`: γ = 1/L; H = 1 where clients differ."""
        steps = descent(at, at["loss"], local=True)
        return steps.of(cls(steps.gamma, steps.H), doubts=own_sets(at))

    def local_steps(self, problem: Minimization, client: Client, key: Key, x: PyTree) -> PyTree:
        return local_sgd(problem, client, key, x, steps_of(self.H, client), self.gamma, self.batch_size)


def local_sgd(
    problem: Minimization, client: Client, key: Key, x: PyTree, steps: Integer, gamma: Real, batch: int | None
) -> PyTree:
    """Lines 2 to 4 of a client, from x."""

    def step(z: PyTree, key: Key) -> PyTree:
        f = client.mean(problem.loss, key, batch)  # line 3
        g = gradient(f, problem.project.common(z))
        return problem.project.own(tree.axpy(-gamma, g, z), client)  # line 4

    return loop(steps, step, key, x)  # line 2
