"""FedSGDA+: local descent ascent with ascent at a snapshot of x (Wu, Sun, Hu, Zhang, Huang 2023).

    min_x max_{y ∈ Y}  1/m Σ_i E f_i(x, y, ξ)

    1  server: every S rounds, starting with the first, x̃ ← x;  send x, y, x̃ to the clients that take part
    2  client i, K times from (u, w) = (x, y):
    3      draw ξ;  u ← u − γ_x ∇_x f_i(u, P_Y(w), ξ),   w ← w + γ_y ∇_y f_i(x̃, P_Y(w), ξ)
    4  server: x ← P_X(x + η (the mean of u − x)),   y ← P_Y(y + η (the mean of w − y))

Local SGDA+ (Sharma et al. 2022) is η = 1. S = 1 and K = 1 is descent ascent. The authors' code has one η for
both variables, and projects onto the simplex by clipping at zero and dividing by the sum; here the server
uses the Euclidean projection, as in `fedstrata.LocalSGDA`.

The method is for payoffs that are concave but not strongly concave in y: the snapshot keeps the problem in y
constant for S rounds. Reveals only averages. Needs gradients.
"""

from __future__ import annotations

from typing import NamedTuple

from fedstrata.core import tree
from fedstrata.core.client import Client, steps_of
from fedstrata.core.fed import Fed
from fedstrata.core.method import BatchSize, Count, LocalSteps, Positive, method
from fedstrata.core.types import Integer, Key, PyTree
from fedstrata.methods._shared.descent_ascent import DescentAscent, Pair, inside, local_steps
from fedstrata.problems.classes import Minimax


class State(NamedTuple):
    """The server's pair and the snapshot."""

    x: PyTree
    y: PyTree
    snapshot: PyTree  # x̃


@method
class FedSGDAPlus(DescentAscent[State]):
    """``K`` local steps of descent in x and of ascent in y at a snapshot of x, updated every ``S`` rounds.

    Args:
        gamma_x: the step size of the descent in x.
        gamma_y: the step size of the ascent in y.
        K: local steps per round: an integer, one per client, or a function of the round. Above 1 the limit is
            biased when clients differ.
        S: rounds between two snapshots.
        eta: the server's step size; 1 takes the mean.
        batch_size: the minibatch size; None uses all of a client's samples.
    """

    gamma_x: Positive  # γ_x
    gamma_y: Positive  # γ_y
    K: LocalSteps = 1
    S: Count = 1
    eta: Positive = 1.0  # η
    batch_size: BatchSize = None

    private_samples = True
    drifts = "K"

    def init(self, problem: Minimax, x0: PyTree, y0: PyTree) -> State:
        return State(x0, y0, x0)

    def local_steps(self, problem: Minimax, client: Client, key: Key, start: Pair, snapshot: PyTree) -> Pair:
        K, sizes = steps_of(self.K, client), (self.gamma_x, self.gamma_y)
        return local_steps(problem, client, key, start, K, *sizes, self.batch_size, snapshot)  # lines 2, 3

    def round(self, problem: Minimax, fed: Fed, key: Key, r: Integer, state: State) -> State:
        snapshot = tree.where(r % self.S == 0, state.x, state.snapshot)
        start, at_work = Pair(state.x, state.y), fed.at_work(self.K)
        mean = fed.average(self.local_steps, key, start, snapshot, weights=at_work, around=start)  # line 1
        return State(*inside(problem, tree.lerp(self.eta, start, mean)), snapshot)  # line 4
