"""AdaFedSTORM: FedSTORM with steps that an optax optimiser rescales, with a state at the server.

    find x, z¹ … z^N with  Σ_i P_i(x, Z) = 0  and  Σ_i S_iⁿ(z^{n−1}, zⁿ) = 0,   z⁰ = x

    as `fedstrata.FedSTORM`, with D(h, q; s) the optimiser's update of (h, q) at its state s:

    2′ server: send s, too
    3′ client i:  (d, e) ← D(h_i, q_i; s);   x_i ← x_i − α d,   z_iⁿ ← z_iⁿ − β_n e_iⁿ
    7′ server: s ← the state after D(h, q; s), of the round's first estimates

All clients rescale by the server's state, so that they agree on the metric of a round; changes of it by their
own steps are discarded. ``optax.identity()`` is FedSTORM. With AMSGrad, the default, the scaling converges,
so that the limit is FedSTORM's; Adam's and RMSProp's follow the last estimates, and need decreasing α and β.
A state travels in every round: for AMSGrad three numbers for each of x and Z.

AdaFBiO (bilevel) and AdaFGDA (minimax; Huang 2022) are of this kind, with matrices A_t and B_t that the
server computes from the estimates; only their abstracts were available. Reveals only averages. Needs
gradients, for bilevel problems also Hessian-vector products.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import optax

from fedstrata.core import tree
from fedstrata.core.fed import Fed
from fedstrata.core.method import method
from fedstrata.core.problem import Problem
from fedstrata.core.types import Integer, Key, PyTree
from fedstrata.methods._shared.sequences import Point
from fedstrata.methods.fedopt import Optimiser
from fedstrata.methods.fedstorm import FedSTORM, State, inside
from fedstrata.problems.measured import Conditions, Practical
from fedstrata.support.optimisers import first_like

AMSGRAD = optax.scale_by_amsgrad(b1=0.0, b2=0.99)


@method
class AdaFedSTORM(FedSTORM):
    """FedSTORM with directions that ``optimiser`` rescales.

    Args:
        alpha: the step size of x, times the rescaled direction.
        beta: the step size of the sequences: one number, or an array with one per sequence.
        c: the fraction of the old estimate that a step discards: 1 is a plain estimate, 0 keeps all of it.
        I: local steps per round.
        adjoint: in compositions, track the adjoints too; see `FedMSA`.
        products: ``"exact"`` Hessian-vector products, or ``"differences"`` of gradients.
        batch_size: samples per evaluation of a map; None uses the full batch.
        optimiser: an optax transformation without a step size, ``optax.scale_by_adam()``.
    """

    optimiser: Optimiser = AMSGRAD

    private_samples = True
    local = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "optimiser", first_like(self.optimiser))

    @classmethod
    def refuses(cls, problem: Problem) -> str | None:
        if (reason := super().refuses(problem)) is not None:
            return reason
        if all(project.trivial for project in problem.sets.values()):
            return None
        return (
            "AdaFedSTORM rescales its steps, and their projections end elsewhere; with a set, use FedSTORM."
        )

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """FedSTORM's steps without rescaling, because rescaled directions have no unit."""
        found = super().practical(at)
        plain = dataclasses.replace(found.method, optimiser=optax.identity())  # type: ignore[type-var]
        why = "optimiser = identity: constants do not determine the steps of rescaled directions"
        return found._replace(method=plain, reasons=(*found.reasons, why))

    def init(self, problem: Problem, x0: PyTree, y0: PyTree) -> State:
        begun = super().init(problem, x0, y0)
        return begun._replace(scaling=self.optimiser.init(begun.direction))

    def scaled(self, direction: Point, *scaling: PyTree) -> Point:
        return self.optimiser.update(direction, scaling[0])[0]  # line 3′

    def round(self, problem: Problem, fed: Fed, key: Key, r: Integer, state: State) -> State:
        start = Point(state.x, state.Z)
        around = (start, jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), state.direction))
        message = (start, state.direction, state.scaling)
        now, left = fed.average(self.local_steps, key, *message, around=around)  # line 2′
        now = inside(problem, now)
        direction = tree.add(left, fed.average(self.last_estimate, key, now))
        scaling = self.optimiser.update(state.direction, state.scaling)[1]  # line 7′
        return State(now.x, now.Z, direction, scaling)
