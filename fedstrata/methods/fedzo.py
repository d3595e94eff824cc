"""FedZO (Fang et al. 2022): federated zeroth-order descent.

    min_x  1/m Σ_i E f_i(x, ξ)   over X

    1  server: send x̂ to the clients that take part
    2  client i, H times from z = x̂:
    3      draw ξ from D_i, and v_1 … v_b on the unit sphere;  x ← P_X(z)
    4      g ← d/(μ b) Σ_j (f_i(x + μ v_j, ξ) − f_i(x, ξ)) v_j
    5      z ← z − η g
    6  server: x̂ ← P_X(x̂ + the mean of the clients' z − x̂)

Sets enter as in FedAvg. Reveals only averages. Needs function values only.
"""

from __future__ import annotations

import jax

from fedstrata.core import tree
from fedstrata.core.client import Client, steps_of
from fedstrata.core.counting import loop
from fedstrata.core.fed import Fed
from fedstrata.core.method import BatchSize, Count, LocalSteps, Moment, Positive, method
from fedstrata.core.types import Integer, Key, PyTree
from fedstrata.estimators.sphere import sphere
from fedstrata.methods._shared.schedules import fading
from fedstrata.methods._shared.two_point import lost_in_rounding
from fedstrata.methods._shared.zeroth import MOST, by_values, value_doubts
from fedstrata.methods.fedavg import Averaging, State
from fedstrata.problems.classes import Minimization
from fedstrata.problems.measured import Conditions, Practical

NARROW = 0.1  # the width in `FedZO.practical`, relative to that of two-sided differences


@method
class FedZO(Averaging):
    """``H`` local steps of size ``eta`` along differences of width ``mu`` in ``b`` directions.

    Args:
        eta: the step size.
        mu: the width of the differences, which biases the estimate.
        H: local steps per round: an integer, one per client, or a function of the round.
        b: directions per step; a step takes b + 1 function values, and its variance decreases like 1/b.
        batch_size: the minibatch size; None uses all of a client's samples.
    """

    eta: Positive  # η
    mu: Positive  # μ
    H: LocalSteps = 1
    b: Count = 1
    batch_size: BatchSize = None

    exact = "divides small differences of values"
    needs = "function values"

    @classmethod
    def differentiates(cls, problem: Minimization) -> tuple[str, ...]:
        return ()

    def cautions(self, moment: Moment) -> list[str]:
        return super().cautions(moment) + lost_in_rounding(self, "mu", moment)

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """B = 32 directions, η = 1/(L (1 + (n − 1)/(b p))), decreasing because they are random.

        They are not orthogonal, so that more than n of them still reduce the noise.
        """
        its, n, b = at["loss"], at.dimension, MOST
        options, _, _, _ = by_values(at, its, own=True)
        doubts = value_doubts(at)
        if its.kinked:
            falling = cls(options["gamma"], options["eta"], b=b)
            return Practical(falling, 0.0, ("kinks: both decrease",), True, doubts=doubts)
        eta = its.within(at.cohort_L(its)) / (1 + (n - 1) / (b * at.participants))
        rate = eta * max(its.mu, 0.0)
        width, why = NARROW * options["eta"], "eta = 1/(L (1 + (n − 1)/(b p)))"
        if at.clients > 1:
            method, why = (
                cls(fading(eta, rate / 2), width, b=b),
                f"{why}, decreasing because directions are random",
            )
            return Practical(method, 0.0, (why,), True, doubts=doubts)
        return Practical(cls(eta, width, b=b), rate, (why,), doubts=doubts)

    def local_steps(self, problem: Minimization, client: Client, key: Key, x_hat: PyTree) -> PyTree:
        d = tree.dimension(x_hat)

        def step(z: PyTree, key: Key) -> PyTree:
            key_xi, key_v = jax.random.split(key)
            f = client.mean(problem.loss, key_xi, self.batch_size)
            x = problem.project.common(z)  # line 3
            value = f(x)

            def along(g: PyTree, key: Key) -> PyTree:
                v = sphere(key, x)
                difference = f(tree.axpy(self.mu, v, x)) - value
                return tree.axpy(d / (self.mu * self.b) * difference, v, g)

            g = loop(self.b, along, key_v, tree.zeros_like(x))  # line 4
            return problem.project.own(tree.axpy(-self.eta, g, z), client)  # line 5

        return tree.sub(loop(steps_of(self.H, client), step, key, x_hat), x_hat)  # line 2

    def round(self, problem: Minimization, fed: Fed, key: Key, r: Integer, state: State) -> State:
        moved = fed.average(self.local_steps, key, state.x, weights=fed.at_work(self.H))  # line 1
        return State(problem.project.common(tree.add(state.x, moved)))  # line 6
