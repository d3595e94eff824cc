"""FedF2SA: bilevel problems by gradients only, with a penalty instead of second derivatives.

    min_x  1/m Σ E f_i(x, y(x), ξ),    y(x) = argmin_{y ∈ Y} 1/m Σ E h_i(x, y, ζ)

    1  server: send x, y, z to the clients that take part
    2  client i, H times from there: draw ξ, ζ; at the projection of its point
    3      d_y ← ∇_y h_i(x, y) + ∇_y f_i(x, y)/λ,    d_z ← ∇_y h_i(x, z)                       (order 1)
                                                     d_z ← ∇_y h_i(x, z) − ∇_y f_i(x, z)/λ     (order 2)
    4      d_x ← ∇_x f_i(x, y) + λ (∇_x h_i(x, y) − ∇_x h_i(x, z))                            (order 1)
           d_x ← ½ (∇_x f_i(x, y) + ∇_x f_i(x, z)) + λ/2 (∇_x h_i(x, y) − ∇_x h_i(x, z))      (order 2)
    5      x ← x − γ d_x,   y ← y − η d_y,   z ← z − η d_z
    6  server: (x, y, z) ← (P_X, P_Y, P_Y)(the mean of the clients' points)

Let Φ(x, ν) = min_{y ∈ Y} h(x, y) + ν f(x, y); y and z solve it for ν = 1/λ and for ν = 0 or −1/λ. The
derivative of Φ in ν at 0 is f(x, y(x)). Line 4 is the gradient of its one-sided or central difference, so the
limit has a bias of O(1/λ) or O(1/λ²). Y may be a set, because nothing is differentiated through y(x), but it
must not depend on x. As λ also multiplies the errors of y and z in d_x, γ λ should be well below η. The
result's ``y`` is z at order 1, and the mean of y and z at order 2, whose errors of O(1/λ) have opposite
signs.

F²SA (Kwon, Kwon, Wright, Nowak 2023) has order 1 and one client, in a benchmark's code with several steps of
y and z before each of x; order 2 is F²SA-p with p = 2. MemFBO (Yang, Xiao, Ma, Ji 2025) is a federated form
of which only the abstract was available; its scaling, schedule of λ and server steps may differ, hence the
name FedF2SA. With ``fs.Bilevel(…, local=True)`` y and z stay with their client, which projects them onto its
own set.

Reveals only averages. Needs gradients.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax

from fedstrata.core import tree
from fedstrata.core.client import Client, steps_of
from fedstrata.core.counting import loop
from fedstrata.core.fed import Fed, Remember
from fedstrata.core.method import BatchSize, LocalSteps, Method, Positive, method
from fedstrata.core.types import Integer, Key, PyTree
from fedstrata.estimators.gradients import gradients
from fedstrata.methods._shared.rules import BIAS, curvature_through, scale, two_levels
from fedstrata.problems.classes import Bilevel
from fedstrata.problems.measured import Conditions, Practical

PENALTY = 30.0  # λ in `FedF2SA.practical`, relative to f's curvature over h's


class State(NamedTuple):
    """The server's x and both lower-level points, None if each client has its own."""

    x: PyTree
    y: PyTree
    z: PyTree


@method
class FedF2SA(Method[Bilevel, State]):
    """Gradient steps in x, and in the lower level with and without f, weighted by 1/``lam``.

    Args:
        gamma: the step size of x.
        eta: the step size of y and z.
        lam: the weight λ of the lower level: a number, or an increasing function of the round.
        H: local steps per round: an integer, one per client, or a function of the round. Above 1 the limit is
            biased when clients differ.
        order: the order of the bias in 1/λ: 1, or 2, which needs one more gradient of f per step.
        batch_size: the minibatch size; None uses all of a client's samples.
    """

    gamma: Positive  # γ
    eta: Positive  # η
    lam: Positive = 10.0  # λ
    H: LocalSteps = 1
    order: Literal[1, 2] = 1
    batch_size: BatchSize = None

    solves = (Bilevel,)
    exact = "multiplies small differences of gradients by λ"
    private_samples = True
    local = True
    drifts = "H"

    @classmethod
    def refuses(cls, problem: Bilevel) -> str | None:
        if problem.project_y.arity > 1 and not (problem.local and problem.project_y.arity == 3):
            return "FedF2SA: the set of y depends on x, which its gradients do not take into account."
        return None

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """Order 2, λ = 30 times f's curvature in y over h's, for a bias of 10⁻³; η = 1/L_h, H = 1.

        f's curvature in y is about that of F through y over ‖y'‖², ‖y'‖ about ‖∇²_xy h‖/√(μ_h L_h).
        """
        pair, h, coupling = two_levels(at, slower=2), at["lower"], at.constants.coupling or 0.0
        through = curvature_through(at)
        in_y = through * h.mu * h.L / coupling**2 if coupling > 0 else at.F.L
        lam = PENALTY * max(in_y / h.mu, scale(at.F) / h.L * BIAS) or 1.0
        its = cls(pair.alpha, pair.beta, lam, order=2)
        off = f"its limit has a relative error of about {1 / PENALTY**2:.1g}; second-order methods are exact"
        return pair.of(its, doubts=(off,) if at.problem.project_y.trivial else ())

    def init(self, problem: Bilevel, x0: PyTree, y0: PyTree) -> State:
        return State(x0, None, None) if problem.local else State(x0, y0, y0)

    def memory(self, problem: Bilevel, x0: PyTree, y0: PyTree) -> tuple[PyTree, PyTree] | None:
        return (y0, y0) if problem.local else None

    def output(self, state: State, memory: tuple[PyTree, PyTree] | None) -> tuple[PyTree, PyTree]:
        y, z = (state.y, state.z) if memory is None else memory
        return state.x, z if self.order == 1 else tree.lerp(0.5, y, z)

    def local_steps(self, problem: Bilevel, client: Client, key: Key, start: State) -> State | Remember:
        if problem.local:
            start = State(start.x, *client.memory)
        two = self.order == 2
        half = 0.5 if two else 1.0

        def step(at: State, key: Key) -> State:
            key_f, key_h = jax.random.split(key)
            f = client.valid.mean(problem.upper, key_f, self.batch_size)
            h = client.train.mean(problem.lower, key_h, self.batch_size)
            x, y, z = self.inside(problem, at)
            f_x, f_y = gradients(f, x, y)
            h_x, h_y = gradients(h, x, y)
            k_x, k_y = gradients(h, x, z)
            if two:
                g_x, g_y = gradients(f, x, z)
                f_x, k_y = tree.add(f_x, g_x), tree.axpy(-1 / self.lam, g_y, k_y)
            d_y = tree.axpy(1 / self.lam, f_y, h_y)  # line 3
            d_x = tree.scale(half, tree.axpy(self.lam, tree.sub(h_x, k_x), f_x))  # line 4
            x = problem.project_x.own(tree.axpy(-self.gamma, d_x, at.x), client)
            new = State(x, tree.axpy(-self.eta, d_y, at.y), tree.axpy(-self.eta, k_y, at.z))  # line 5
            if not problem.local:
                return new
            return State(new.x, *(problem.project_y(each, new.x, client) for each in new[1:]))

        end = loop(steps_of(self.H, client), step, key, start)  # line 2
        return Remember(State(end.x, None, None), (end.y, end.z)) if problem.local else end

    def inside(self, problem: Bilevel, at: State) -> State:
        """The projections onto the sets that all clients share."""
        x = problem.project_x.common(at.x)
        return at._replace(x=x) if problem.local else State(x, *map(problem.project_y, at[1:]))

    def round(self, problem: Bilevel, fed: Fed, key: Key, r: Integer, state: State) -> State:
        at_work = fed.at_work(self.H)
        mean = fed.average(self.local_steps, key, state, weights=at_work, around=state)  # line 1
        return self.inside(problem, mean)  # line 6
