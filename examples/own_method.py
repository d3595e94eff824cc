"""FedAvgM: FedAvg whose server has momentum (Hsu, Qi, Brown 2019), as a file of your own.

    min_x  1/m Σ_i E f_i(x, ξ)

    1  server: send x to the clients that take part
    2  client i, H times from y = x:
    3      draw ξ;  y ← y − γ ∇f_i(y, ξ)
    4      send x − y
    5  server: v ← β v + the mean of the x − y;  x ← x − v

Reveals only averages. Needs gradients. β = 0 is FedAvg.
"""

from typing import NamedTuple

import numpy as np

import fedstrata as fs
from fedstrata.core import tree
from fedstrata.core.client import Client, steps_of
from fedstrata.core.counting import loop
from fedstrata.core.fed import Fed
from fedstrata.core.method import BatchSize, LocalSteps, Method, Positive, Unit, method
from fedstrata.core.types import Integer, Key, PyTree
from fedstrata.estimators.gradients import gradient


class State(NamedTuple):
    """What the server carries from round to round."""

    x: PyTree
    v: PyTree


@method
class FedAvgM(Method[fs.Minimization, State]):
    """FedAvg with server momentum ``beta``."""

    gamma: Positive  # γ
    beta: Unit = 0.9  # β
    H: LocalSteps = 1
    batch_size: BatchSize = None

    solves = (fs.Minimization,)

    def init(self, problem: fs.Minimization, x0: PyTree, y0: PyTree) -> State:
        return State(x0, tree.zeros_like(x0))

    def local_steps(self, problem: fs.Minimization, client: Client, key: Key, x: PyTree) -> PyTree:
        def step(y: PyTree, key: Key) -> PyTree:
            f = client.mean(problem.loss, key, self.batch_size)
            return tree.axpy(-self.gamma, gradient(f, y), y)  # line 3

        return tree.sub(x, loop(steps_of(self.H, client), step, key, x))  # lines 2, 4

    def round(self, problem: fs.Minimization, fed: Fed, key: Key, r: Integer, state: State) -> State:
        change = fed.average(self.local_steps, key, state.x)  # line 1; a difference needs no `around`
        v = tree.axpy(self.beta, state.v, change)
        return State(tree.sub(state.x, v), v)  # line 5


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    data = fs.FederatedData.from_clients([{"a": rng.normal(i, 1, (20 + i, 3))} for i in range(5)])
    problem = fs.Minimization(lambda x, sample: 0.5 * ((x - sample["a"]) ** 2).sum())
    result = fs.solve(problem, FedAvgM(gamma=0.05, H=4), data, np.zeros(3), rounds=200, progress=False)
    print(result.x, result.ledger.gradients)
    np.testing.assert_allclose(
        result.x, np.mean([data.client(i)["a"].mean(0) for i in range(5)], 0), atol=1e-4
    )
