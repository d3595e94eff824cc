"""Local SGDA: simultaneous local descent and ascent (Deng and Mahdavi 2021).

    min_x max_y  1/m Σ_i E f_i(x, y, ξ)   over X and Y

    1  server: send x, y to the clients that take part
    2  client i, τ times from (u, w) = (x, y):
    3      draw ξ;  u ← u − η_x ∇_x f_i,   w ← w + η_y ∇_y f_i,   both at (P_X(u), P_Y(w), ξ)
    4  server: (x, y) ← (P_X, P_Y)(the mean of the clients' (u, w))

Sets enter as in FedAvg, so that τ = 1 is projected gradient descent ascent on the mean. Reveals only
averages. Needs gradients.
"""

from __future__ import annotations

from fedstrata.core.client import Client, steps_of
from fedstrata.core.fed import Fed
from fedstrata.core.method import BatchSize, LocalSteps, Positive, method
from fedstrata.core.types import Integer, Key, PyTree
from fedstrata.methods._shared.descent_ascent import DescentAscent, Pair, inside, local_steps
from fedstrata.problems.classes import Minimax


@method
class LocalSGDA(DescentAscent[Pair]):
    """``tau`` local steps of descent in x (``eta_x``) and ascent in y (``eta_y``), then the mean.

    Args:
        eta_x: the step size of the descent in x.
        eta_y: the step size of the ascent in y.
        tau: local steps per round: an integer, one per client, or a function of the round. Above 1 the limit
            is biased when clients differ.
        batch_size: the minibatch size; None uses all of a client's samples.
    """

    eta_x: Positive  # η_x
    eta_y: Positive  # η_y
    tau: LocalSteps = 1  # τ
    batch_size: BatchSize = None

    private_samples = True
    drifts = "tau"

    def init(self, problem: Minimax, x0: PyTree, y0: PyTree) -> Pair:
        return Pair(x0, y0)

    def local_steps(self, problem: Minimax, client: Client, key: Key, start: Pair) -> Pair:
        tau = steps_of(self.tau, client)
        return local_steps(problem, client, key, start, tau, self.eta_x, self.eta_y, self.batch_size)  # 2, 3

    def round(self, problem: Minimax, fed: Fed, key: Key, r: Integer, state: Pair) -> Pair:
        at_work = fed.at_work(self.tau)
        mean = fed.average(self.local_steps, key, state, weights=at_work, around=state)  # line 1
        return inside(problem, mean)  # line 4
