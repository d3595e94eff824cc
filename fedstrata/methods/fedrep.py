"""FedRep: a common representation and a personal head of each client (Collins et al. 2021; Algorithm 1).

    min_{x, y_1 … y_m}  1/m Σ_i E f_i(x, y_i, ξ),    given as  fs.Bilevel(f, f, local=True)

    1  server: send x to the clients that take part
    2  client i, τ times:  draw ξ;  y_i ← P_{Y_i}(y_i − η ∇_y f_i(x, y_i, ξ));  remember y_i
    3  client i, H times from z = x:  draw ξ;  z ← z − γ ∇_x f_i(P_X(z), y_i, ξ)
    4  server: x ← P_X(the mean of the clients' z)

x is the representation (the base), and y_i a head that never leaves its client; the result's ``y`` has all
heads, with a client axis. Both levels are the same function, so ∇_x f at y_i(x) is the gradient of
min_y f_i(x, y). A bilevel problem whose levels differ is refused, because line 3 would not follow its
gradient.

Reveals only averages. Needs gradients.
"""

from __future__ import annotations

import jax

from fedstrata.core import tree
from fedstrata.core.client import Client, steps_of
from fedstrata.core.counting import loop
from fedstrata.core.fed import Fed, Remember
from fedstrata.core.method import BatchSize, Count, LocalSteps, Method, Positive, method
from fedstrata.core.types import Integer, Key, PyTree
from fedstrata.estimators.gradients import gradient
from fedstrata.methods._shared.rules import TwoLevels, largest
from fedstrata.methods._shared.schedules import fading
from fedstrata.methods.fedavg import State
from fedstrata.problems.classes import Bilevel
from fedstrata.problems.measured import WELL, Conditions, NoRule, Practical

HEADS = 5  # steps of a head in `FedRep.practical`


@method
class FedRep(Method[Bilevel, State]):
    """``tau`` steps of each client's head, then ``H`` steps of the common representation.

    Args:
        gamma: the step size of the representation x.
        eta: the step size of the heads y_i.
        H: local steps of x per round: an integer, one per client, or a function of the round.
        tau: steps of a head per round.
        batch_size: the minibatch size; None uses all of a client's samples.
    """

    gamma: Positive  # γ
    eta: Positive  # η
    H: LocalSteps = 1
    tau: Count = 1  # τ
    batch_size: BatchSize = None

    solves = (Bilevel,)
    private_samples = True
    local = True
    drifts = "H"

    @classmethod
    def refuses(cls, problem: Bilevel) -> str | None:
        if not problem.local:
            return (
                "FedRep needs a local lower level, the clients' own heads: use fs.Bilevel(f, f, local=True)."
            )
        if problem.upper != problem.lower:
            return "FedRep minimises the same function in x and y: use fs.Bilevel(f, f, local=True)."
        return None

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """γ = 1/(L_F + ‖∇²_xy f‖²/μ_y), a bound of f's curvature in x; η = 1/max L_y, τ = 5, H = 1."""
        f, F, coupling = at["lower"], at.F, at.constants.coupling or 0.0
        if f.kinked or not f.mu > WELL * f.L:
            raise NoRule("the loss is not smooth and strongly convex in the heads at the start")
        gamma, eta = F.within(F.L + coupling**2 / f.mu), 1 / largest(f)
        rate = min(gamma * max(F.mu, 0.0), HEADS * eta * f.mu / 2)
        why = ("gamma = 1/L of f in x", "eta = 1/L of f in y")
        pair = TwoLevels(gamma, eta, rate, why)
        if at.partial:
            pair = pair._replace(alpha=fading(gamma, rate / 2), rate=0.0, fades=True)
        return pair.of(cls(pair.alpha, eta, tau=HEADS))

    def init(self, problem: Bilevel, x0: PyTree, y0: PyTree) -> State:
        return State(x0)

    def memory(self, problem: Bilevel, x0: PyTree, y0: PyTree) -> PyTree:
        return y0

    def output(self, state: State, memory: PyTree) -> tuple[PyTree, PyTree]:
        return state.x, memory

    def local_steps(self, problem: Bilevel, client: Client, key: Key, x: PyTree) -> Remember:
        key_y, key_x = jax.random.split(key)
        H = steps_of(self.H, client)

        def head(y: PyTree, key: Key) -> PyTree:
            g = gradient(client.mean(problem.lower, key, self.batch_size), x, y, wrt=1)
            return problem.project_y(tree.axpy(-self.eta, g, y), x, client)

        y = loop(self.tau, head, key_y, client.memory)  # line 2
        y = tree.where(H > 0, y, client.memory)

        def base(z: PyTree, key: Key) -> PyTree:
            g = gradient(client.mean(problem.lower, key, self.batch_size), problem.project_x.common(z), y)
            return problem.project_x.own(tree.axpy(-self.gamma, g, z), client)

        return Remember(loop(H, base, key_x, x), y)  # line 3

    def round(self, problem: Bilevel, fed: Fed, key: Key, r: Integer, state: State) -> State:
        at_work = fed.at_work(self.H)
        mean = fed.average(self.local_steps, key, state.x, weights=at_work, around=state.x)  # line 1
        return State(problem.project_x.common(mean))  # line 4
