"""FESS-GDA: federated stochastic smoothed gradient descent ascent (Shen, Huang, Zhang, Shen 2024).

    min_x max_{y ∈ Y}  1/m Σ_i E f_i(x, y, ξ)

    1  server: send x, y to the clients that take part
    2  client i, K times from (u, w) = (x, y):
    3      draw ξ;  u ← u − η_xl ∇_x f_i,   w ← w + η_yl ∇_y f_i,   both at (u, P_Y(w), ξ)
    4  server: x⁺ ← P_X(x + η_xg (the mean of u − x) − η_xl η_xg K p (x − z))
    5  server: y ← P_Y(y + η_yg (the mean of w − y)),   x ← x⁺,   z ← z + β (x − z)

Lines 3 and 4 are descent on f(x, y) + p/2 ‖x − z‖², which a large p makes convex in x, while z tracks x. The
paper takes p = 2ℓ, with ℓ the Lipschitz constant of the gradients, if f is not convex in x, and p = 0 if it
is convex or satisfies the PL condition. p = 0 with server step sizes of 1 is `fedstrata.LocalSGDA`.

The paper's clients project w in every step; here they evaluate gradients at projections, and the server
projects, as in `fedstrata.LocalSGDA`. If clients take different numbers of steps, K in line 4 is their mean.
Reveals only averages. Needs gradients.
"""

from __future__ import annotations

from typing import NamedTuple

from fedstrata.core import tree
from fedstrata.core.client import Client, steps_of
from fedstrata.core.fed import Fed
from fedstrata.core.method import BatchSize, Fraction, LocalSteps, NonNegative, Positive, method
from fedstrata.core.types import Integer, Key, PyTree
from fedstrata.methods._shared.descent_ascent import DescentAscent, Pair, inside, local_steps, mean_steps
from fedstrata.problems.classes import Minimax


class State(NamedTuple):
    """The server's pair, and the centre of the quadratic term."""

    x: PyTree
    y: PyTree
    z: PyTree


@method
class FESSGDA(DescentAscent[State]):
    """Local descent ascent on a payoff that ``p/2 ‖x − z‖²`` smooths in x.

    Args:
        eta_xl: the clients' step size of x.
        eta_yl: the clients' step size of y.
        K: local steps per round: an integer, one per client, or a function of the round. Above 1 the limit is
            biased when clients differ.
        p: the weight of the quadratic term, 2ℓ for payoffs that are not convex in x; 0 leaves it out.
        beta: the step size of z towards x.
        eta_xg: the server's step size of x; 1 takes the mean.
        eta_yg: the server's step size of y.
        batch_size: the minibatch size; None uses all of a client's samples.
    """

    eta_xl: Positive  # η_xl
    eta_yl: Positive  # η_yl
    K: LocalSteps = 1
    p: NonNegative = 0.0
    beta: Fraction = 0.1  # β
    eta_xg: Positive = 1.0  # η_xg
    eta_yg: Positive = 1.0  # η_yg
    batch_size: BatchSize = None

    private_samples = True
    drifts = "K"

    def init(self, problem: Minimax, x0: PyTree, y0: PyTree) -> State:
        return State(x0, y0, x0)

    def local_steps(self, problem: Minimax, client: Client, key: Key, start: Pair) -> Pair:
        K, sizes = steps_of(self.K, client), (self.eta_xl, self.eta_yl)
        return local_steps(problem, client, key, start, K, *sizes, self.batch_size)  # lines 2, 3

    def round(self, problem: Minimax, fed: Fed, key: Key, r: Integer, state: State) -> State:
        start, at_work = Pair(state.x, state.y), fed.at_work(self.K)
        x, y = fed.average(self.local_steps, key, start, weights=at_work, around=start)  # line 1
        pull = -self.eta_xl * self.eta_xg * mean_steps(self.K, fed, at_work) * self.p
        x = tree.axpy(pull, tree.sub(state.x, state.z), tree.lerp(self.eta_xg, state.x, x))
        new = inside(problem, Pair(x, tree.lerp(self.eta_yg, state.y, y)))
        return State(*new, tree.lerp(self.beta, state.z, new.x))  # lines 4, 5
