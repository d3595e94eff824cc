"""Vanilla FedAvg for compositions, Cases I and II, a biased baseline (FedDRO's Algorithm 1, Theorem 4.1).

    min_x  Φ(x) = h(x) + f(g(x)),   h and g means over clients

    1  server: send x̄;  Case II: ȳ ← the mean of the clients' g_k(x̄), sent back
    2  client k, I times from x = x̄:
    3      y_k ← g_k(x), but ȳ in the first step of Case II
    4      x ← x − η (∇h_k(x) + ∇g_k(x)ᵀ ∇f(y_k))
    5  server: x̄ ← the mean of the clients' x

It does not converge to a solution when clients differ: with g₁ = 4x − 4, g₂ = −2x + 4, f = √(y² + 4), I = 2
and x⁰ = ½ both cases stay above ½, but the minimiser is 0. With one client, and in Case II with I = 1, it is
compositional gradient descent. With minibatches, y_k uses the samples of line 4.

Reveals only averages, and in Case II of a level in the log domain each client's log g_k. Needs gradients,
products with g's Jacobian.
"""

from __future__ import annotations

from typing import Literal

import jax

from fedstrata.core import tree
from fedstrata.core.client import Client
from fedstrata.core.counting import loop
from fedstrata.core.fed import Fed
from fedstrata.core.method import BatchSize, Count, Positive, Reveals, by_options, method
from fedstrata.core.types import Integer, Key, PyTree
from fedstrata.estimators import compositional as c
from fedstrata.methods._shared.compositional import Compositional, State
from fedstrata.methods._shared.rules import composed
from fedstrata.problems.classes import Composition
from fedstrata.problems.measured import Conditions, Practical


@method
class CompositionalFedAvg(Compositional[State]):
    """Federated averaging with ``I`` local steps of size ``eta`` on the clients' own compositions.

    Args:
        eta: the step size.
        I: local steps per round.
        case: 1 uses a client's own inner value in every step; 2 uses the clients' mean in the first step.
        batch_size: the minibatch size; None uses all of a client's samples.
    """

    eta: Positive  # η
    I: Count = 1
    case: Literal[1, 2] = 1
    batch_size: BatchSize = None

    private_samples = True

    @by_options
    def reveals_on(self, problem: Composition) -> Reveals:
        return "averages" if self.case == 1 else super().reveals_on(problem)

    def bias(self) -> str | None:
        if self.case == 2 and self.I == 1:
            return None
        return (
            "CompositionalFedAvg uses a client's own g instead of the clients' mean, which is exact only for "
            "a linear f. Use FedMSA, FedDRO with I = 1, GCIVR or MBSGD."
        )

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """η = 1/L_Φ, I = 1 and case 2, which converges to a solution."""
        steps = composed(at)
        doubt = "it is a baseline: with I > 1, or case 1, its limit is biased when clients differ"
        return steps.of(cls(steps.gamma, case=2), cost=2.0, doubts=(doubt,))

    def init(self, problem: Composition, x0: PyTree, y0: PyTree) -> State:
        return State(x0)

    def memory(self, problem: Composition, x0: PyTree, y0: PyTree) -> PyTree:
        return x0 if self.case == 2 else None

    def step(self, drawn: c.Drawn, x: PyTree, used: tuple[c.Values, c.Values] | None = None) -> PyTree:
        if used is None:
            y: c.Values = ()
            for n in range(len(drawn.chain.inner)):
                y = (*y, drawn.value(n, y[-1] if y else x))  # line 3
            used = (y, drawn.pull_locally(y))
        return tree.axpy(-self.eta, drawn.direction(x, *used), x)  # line 4

    def local_steps(self, problem: Composition, client: Client, key: Key, x: PyTree) -> PyTree:
        return loop(self.I, lambda x, key: self.step(self.drawn(problem, client, key), x), key, x)  # line 2

    def local_steps_from(
        self, problem: Composition, client: Client, key: Key, y: PyTree, pulled: PyTree
    ) -> PyTree:
        """Case II: the first step uses the shared embedding, at its x̄ and on its samples."""
        x, rest = self.step(self.drawn(problem, client, key), client.memory, (y, pulled)), self.I - 1
        key = jax.random.fold_in(key, 1)
        x = loop(rest, lambda x, key: self.step(self.drawn(problem, client, key), x), key, x)
        return tree.sub(x, client.memory)  # a difference: the client has x̄ already

    def round(self, problem: Composition, fed: Fed, key: Key, r: Integer, state: State) -> State:
        if self.case == 1:
            return State(fed.average(self.local_steps, key, state.x, around=state.x))  # lines 1, 5
        y = self.values_at(problem, fed, key, self.value_and_keep, state.x)  # line 1
        pulled = self.cotangents(problem, fed, key, y)
        moved = fed.average(self.local_steps_from, key, y, pulled)
        return State(tree.add(state.x, moved))  # lines 1, 5
