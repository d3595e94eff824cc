"""LFD: local federated descent (Haddadpour, Mahdavi 2019), local gradient steps on sampled devices.

    min_x  1/m Σ_i E f_i(x, ξ)   over X

    1  server: draw ``devices`` of the clients; send them x̂
    2  client i, τ times from z = x̂:
    3      draw ξ from D_i
    4      z ← z − γ_r ∇f_i(P_X(z), ξ)
    5  server: x̂ ← P_X(the mean of the devices' z)

The original is unconstrained; here sets enter as in FedAvg, whose lines 2 to 4 are the same.

Under strong convexity the paper's step sizes decrease, γ_r = 4/(μ(a + rτ)): give ``gamma`` as that function.

Reveals only averages; with ``devices=1``, the point of that device. Needs gradients. With all devices it is
FedAvg.
"""

from __future__ import annotations

import jax

from fedstrata.core.client import Client
from fedstrata.core.fed import Fed
from fedstrata.core.method import BatchSize, Count, Method, Positive, Reveals, by_options, method
from fedstrata.core.types import Integer, Key, PyTree
from fedstrata.methods._shared.rules import descent, own_sets
from fedstrata.methods.fedavg import State, local_sgd
from fedstrata.problems.classes import Minimization
from fedstrata.problems.measured import Conditions, Practical


@method
class LFD(Method[Minimization, State]):
    """Local descent on sampled devices, averaged every ``tau`` steps.

    Args:
        gamma: the step size γ: a number or a function of the round.
        tau: local steps per round.
        devices: the number of clients drawn from a round's cohort; None takes all.
        batch_size: samples per gradient; None uses all.
    """

    gamma: Positive  # γ
    tau: Count = 1  # τ
    devices: Count | None = None
    batch_size: BatchSize = None

    solves = (Minimization,)
    private_samples = True

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """As FedAvg's, on all devices of a round."""
        steps = descent(at, at["loss"], local=True)
        return steps.of(cls(steps.gamma, steps.H), doubts=own_sets(at))

    @by_options
    def reveals_on(self, problem: Minimization) -> Reveals:
        return "replies" if self.devices == 1 else "averages"

    def check(self, problem: Minimization, clients: int) -> None:
        super().check(problem, clients)
        if self.devices is not None and self.devices > clients:
            raise ValueError(f"LFD: devices={self.devices} is more than the {clients} clients.")

    def init(self, problem: Minimization, x0: PyTree, y0: PyTree) -> State:
        return State(x0)

    def local_steps(self, problem: Minimization, client: Client, key: Key, x: PyTree) -> PyTree:
        return local_sgd(problem, client, key, x, self.tau, self.gamma, self.batch_size)  # lines 2 to 4

    def round(self, problem: Minimization, fed: Fed, key: Key, r: Integer, state: State) -> State:
        key_devices, key_steps = jax.random.split(key)
        chosen = None if self.devices is None else fed.sample(key_devices, self.devices)  # line 1
        x = fed.average(self.local_steps, key_steps, state.x, of=chosen, around=state.x)
        return State(problem.project.common(x))  # line 5
