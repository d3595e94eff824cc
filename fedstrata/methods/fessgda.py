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

import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from fedstrata.core import tree
from fedstrata.core.client import Client, steps_of
from fedstrata.core.fed import Fed
from fedstrata.core.method import BatchSize, Fraction, LocalSteps, NonNegative, Positive, method
from fedstrata.core.types import Integer, Key, PyTree
from fedstrata.methods._shared.descent_ascent import DescentAscent, Pair, inside, local_steps, mean_steps
from fedstrata.problems.classes import Minimax
from fedstrata.problems.measured import Conditions, NoRule, Practical

RISES = (0.03, 0.1, 0.3, 1.0)  # steps of y that are tried, in units of 1/(its curvature once x follows)
FLAT = 1e-3  # relative to the coupling: less counts as zero
FACE = 0.1  # the coupling within a face of a set, relative to the coupling


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

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """As LocalSGDA's with p = 0; if the payoff is not strongly concave, `proximal` finds p and β."""
        return super().practical(at) if at["lower"].condition < math.inf else proximal(cls, at)

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


def proximal(cls: type[FESSGDA], at: Conditions) -> Practical:
    """The steps with the least spectral radius on payoffs a/2 x² + σ x y − c/2 y² of the measured curvatures.

    a is μ_x or L_x, c is 0 or L_y, and σ the least or the largest singular value of the coupling, or their
    geometric mean. If a = c = 0, descent ascent turns outwards, and the term p/2 ‖x − z‖² turns it inwards.
    On sets only the directions of a face couple there, and the least value is not known: it counts as `FACE`.
    """
    f, h, B, least = at["payoff"], at["lower"], at.constants.coupling, at.constants.least_coupling
    if B and not all(project.trivial for project in at.problem.sets.values()):
        least = max(least or 0.0, FACE * B)
    if min(f.mu, h.mu) < -FLAT * (B or 0.0) or not B or not least or least < FLAT * B:
        raise NoRule("the payoff is neither strongly concave in y, nor convex–concave with x and y coupled")
    found: tuple[float, dict[str, Any]] = (math.inf, {})
    worst = [*itertools.product({max(f.mu, 0.0), f.L}, (least, math.sqrt(least * B), B), {0.0, h.L})]
    for by, part, rise, slow in itertools.product((0.5, 1, 2, 4), (0.25, 0.5, 0.9), RISES, range(12)):
        p, beta = by * B, 0.5**slow
        eta_x = part / (f.L + p) / at.slower
        eta_y = rise / (B**2 / p + h.L) / at.slower
        moves = []
        for a, sigma, c in worst:
            x = np.array([1 - eta_x * (p + a), -eta_x * sigma, eta_x * p])
            moves.append([x, [eta_y * sigma, 1 - eta_y * c, 0], beta * x + [0, 0, 1 - beta]])
        radius = float(np.abs(np.linalg.eigvals(np.array(moves))).max())
        if radius < found[0]:
            found = radius, {"eta_xl": eta_x, "eta_yl": eta_y, "p": p, "beta": beta}
    radius, steps = found
    why = "p, beta and both steps: fastest on the measured curvatures and couplings"
    doubts = ("it does not reduce the noise of sampled clients",) if at.partial else ()
    return Practical(cls(**steps), 1 - radius, (why,), doubts=doubts)
