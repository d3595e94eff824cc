"""NormalizedSGDA: local descent ascent whose limit does not depend on the clients' numbers of steps.

    min_x max_{y ∈ Y}  1/m Σ_i E f_i(x, y, ξ)

    1  server: send x, y to the clients that take part
    2  client i, K_i times from (u, w) = (x, y):
    3      draw ξ;  u ← u − η_x ∇_x f_i,   w ← w + η_y ∇_y f_i,   both at (u, P_Y(w), ξ)
    4  client i: send d_i = ((u, w) − (x, y))/K_i
    5  server: (x, y) ← (P_X, P_Y)((x, y) + (η_xg, η_yg) K̄ · the mean of d_i),   K̄ the mean of the K_i

In `fedstrata.LocalSGDA` a client that takes more steps has more influence: with different K_i the limit is
that of a mean with weights K_i, at any step size. Here every client's mean direction has the same weight, and
only the bias of drift is left, which decreases with the step sizes. With equal K_i and server step sizes of 1
the method is LocalSGDA.

This follows Fed-Norm-SGDA (Sharma, Panda, Joshi 2023), of which the abstract and an excerpt were available:
the paper weighs the steps of a round by general vectors a_i, as FedNova does, and chooses K̄ otherwise.
Reveals only averages. Needs gradients.
"""

from __future__ import annotations

import jax.numpy as jnp

from fedstrata.core import tree
from fedstrata.core.client import Client, steps_of
from fedstrata.core.fed import Fed
from fedstrata.core.method import BatchSize, LocalSteps, Positive, method
from fedstrata.core.types import Integer, Key, PyTree
from fedstrata.methods._shared.descent_ascent import DescentAscent, Pair, inside, local_steps, mean_steps
from fedstrata.problems.classes import Minimax


@method
class NormalizedSGDA(DescentAscent[Pair]):
    """``K`` local steps of descent ascent; the server averages the clients' mean directions.

    Args:
        eta_x: the clients' step size of x.
        eta_y: the clients' step size of y.
        K: local steps per round: an integer, one per client, or a function of the round. Above 1 the limit
            has a bias of the order of the step sizes when clients differ.
        eta_xg: the server's step size of x; 1 takes the mean.
        eta_yg: the server's step size of y.
        batch_size: the minibatch size; None uses all of a client's samples.
    """

    eta_x: Positive  # η_x
    eta_y: Positive  # η_y
    K: LocalSteps = 1
    eta_xg: Positive = 1.0  # η_xg
    eta_yg: Positive = 1.0  # η_yg
    batch_size: BatchSize = None

    private_samples = True
    drifts = "K"

    def init(self, problem: Minimax, x0: PyTree, y0: PyTree) -> Pair:
        return Pair(x0, y0)

    def local_steps(self, problem: Minimax, client: Client, key: Key, start: Pair) -> Pair:
        K = steps_of(self.K, client)
        end = local_steps(problem, client, key, start, K, self.eta_x, self.eta_y, self.batch_size)  # 2, 3
        return tree.scale(1 / jnp.maximum(K, 1), tree.sub(end, start))  # line 4

    def round(self, problem: Minimax, fed: Fed, key: Key, r: Integer, state: Pair) -> Pair:
        at_work = fed.at_work(self.K)
        mean = fed.average(self.local_steps, key, state, weights=at_work)  # line 1
        K = mean_steps(self.K, fed, at_work)
        x = tree.axpy(self.eta_xg * K, mean.x, state.x)
        return inside(problem, Pair(x, tree.axpy(self.eta_yg * K, mean.y, state.y)))  # line 5
