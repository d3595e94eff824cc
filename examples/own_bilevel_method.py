"""A penalty method for bilevel problems that needs only gradients, as a file of your own.

    min_x  1/m Σ_i E f_i(x, y(x), ξ),    y(x) = argmin_y 1/m Σ_i E h_i(x, y, ζ)

    1  server: send x, y, z to the clients
    2  client i: d_y ← ∇_y h_i(x, y) + ∇_y f_i(x, y)/λ,    d_z ← ∇_y h_i(x, z)
    3            d_x ← ∇_x f_i(x, y) + λ (∇_x h_i(x, y) − ∇_x h_i(x, z));    send d_x, d_y, d_z
    4  server: x ← x − α times the mean d_x,    y ← y − β times the mean d_y,    z ← z − β times the mean d_z

The limit minimises min_y f(x, y) + λ (h(x, y) − min_z h(x, z)), whose bias is of order 1/λ.
"""

from typing import NamedTuple

import numpy as np

import fedstrata as fs
from fedstrata.core import tree
from fedstrata.core.client import Client
from fedstrata.core.fed import Fed
from fedstrata.core.method import BatchSize, Method, Positive, method
from fedstrata.core.types import Integer, Key, PyTree
from fedstrata.estimators.gradients import gradients
from fedstrata.problems.measured import Conditions, Practical


class State(NamedTuple):
    """What the server carries from round to round; the result's ``x`` and ``y`` are its first two."""

    x: PyTree
    y: PyTree
    z: PyTree


@method
class Penalty(Method[fs.Bilevel, State]):
    """Steps ``alpha`` of x and ``beta`` of both lower points, with the lower level weighted by ``lam``."""

    alpha: Positive  # α
    beta: Positive  # β
    lam: Positive = 100.0  # λ
    batch_size: BatchSize = None

    solves = (fs.Bilevel,)

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """For `fs.plan` and `fs.recommend`: β = 1/L_h, α = β/λ, as λ multiplies the errors of y and z."""
        beta, lam = 1 / at["lower"].L, 100.0
        why = "beta = 1/L_h, alpha = beta/lam"
        return Practical(cls(beta / lam, beta, lam), beta / lam * at.F.mu, (why,))

    def init(self, problem: fs.Bilevel, x0: PyTree, y0: PyTree) -> State:
        return State(x0, y0, y0)

    def slopes(self, problem: fs.Bilevel, client: Client, key: Key, at: State) -> State:
        f = client.valid.mean(problem.upper, key, self.batch_size)
        h = client.train.mean(problem.lower, key, self.batch_size)
        f_x, f_y = gradients(f, at.x, at.y)
        h_x, h_y = gradients(h, at.x, at.y)
        k_x, d_z = gradients(h, at.x, at.z)
        d_y = tree.axpy(1 / self.lam, f_y, h_y)  # line 2
        return State(tree.axpy(self.lam, tree.sub(h_x, k_x), f_x), d_y, d_z)  # line 3

    def round(self, problem: fs.Bilevel, fed: Fed, key: Key, r: Integer, state: State) -> State:
        d = fed.average(self.slopes, key, state)  # line 1
        y, z = (tree.axpy(-self.beta, slope, at) for slope, at in ((d.y, state.y), (d.z, state.z)))
        return State(tree.axpy(-self.alpha, d.x, state.x), y, z)  # line 4


if __name__ == "__main__":
    a, c = np.array([1.0, 3.0, 2.0]), np.array([0.5, 2.0, 1.0])  # one number for each client
    clients = [{"a": np.full(4, i), "c": np.full(4, j)} for i, j in zip(a, c, strict=True)]
    data = fs.FederatedData.from_clients(clients)
    problem = fs.Bilevel(
        lambda x, y, s: 0.5 * (y - s["a"]) ** 2 + 0.05 * x**2,
        lambda x, y, s: 0.5 * (y - s["c"] * x) ** 2,
        same_samples=True,
    )
    plan = fs.plan(problem, data, 0.0, 0.0, method=Penalty)
    result = fs.solve(problem, plan.method, data, 0.0, y0=0.0, rounds=2 * plan.rounds, progress=False)
    part, mean_a, mean_c = 100 / 101, a.mean(), c.mean()
    limit = part * mean_c * mean_a / (part * mean_c**2 + 0.1)  # the penalty's minimiser, in closed form
    print(plan, result.x, limit, result.certificate, sep="\n")
    np.testing.assert_allclose(result.x, limit, rtol=1e-5)
