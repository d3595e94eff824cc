"""Sequential regularisation: solve h + ηf for one η after another (Tikhonov 1963), the usual practice.

    min_x f(x)   over   x ∈ argmin h

    1  for η of a grid, each with an equal share of the R rounds:
    2      x̂ ← x⁰ (with a warm start: keep x̂ from the last η)
    3      FedAvg on h/L_h + ηf/S_f: K local steps, x̂ ← x̂ + γ_g mean(y − x̂)
    4      keep x̂ as the solution of this η

This is the baseline for the methods that choose η themselves. The user compares all solutions, one slice of
``result.state.solutions`` for each η, and chooses one; the result's x is the solution of the last η. The
steps are those of `StRFedAvg`. Reveals only averages. Needs gradients, and products for the scale.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core import tree
from fedstrata.core.fed import Fed
from fedstrata.core.hyperparameters import POSITIVE, Axis
from fedstrata.core.method import BatchSize, Count, Moment, Positive, method
from fedstrata.core.types import Integer, Key, PyTree
from fedstrata.methods._shared.regularized import Regularized, Scale
from fedstrata.problems.classes import Selection
from fedstrata.problems.measured import Conditions, Practical


class State(NamedTuple):
    """The iterate, the start of every η, the solutions, and the scale."""

    x: PyTree  # x̂
    x0: PyTree
    solutions: PyTree  # a leading axis over the grid
    scale: Scale


@method
class SequentialRegularization(Regularized[State]):
    """FedAvg on ``h + ηf`` for a grid of η, one after another.

    Args:
        eta: the grid of regularisation weights η, in order.
        K: local steps per round.
        gamma: the step size γ̃ = γ_g γ_ℓ K of a round; None takes the largest that the curvatures allow.
        gamma_g: the server's step size γ_g.
        warm_start: whether an η starts from the solution of the previous one.
        R: the number of rounds to divide among the grid; None takes the run's.
        mu: the parameter of the Moreau envelope that smooths a secondary regulariser; None uses its
            proximal map.
        L_h: the divisor of the primary loss; None estimates its curvature, 1 leaves the loss unscaled.
        power_steps: the number of exchanges for that estimate.
        batch_size: samples per gradient; None uses all.
    """

    eta: Annotated[Any, POSITIVE, Axis("stage")] = (1.0, 0.1, 0.01, 0.001)  # η
    K: Count = 1
    gamma: Positive | None = None  # γ̃
    gamma_g: Positive = 1.0  # γ_g
    warm_start: bool = False
    R: Positive | None = None
    mu: Positive | None = None  # μ
    L_h: Positive | None = None
    power_steps: Count = 20
    batch_size: BatchSize = None

    def __post_init__(self) -> None:
        super().__post_init__()
        grid = np.atleast_1d(np.asarray(self.eta, float))
        if grid.size == 0:
            raise ValueError("SequentialRegularization: eta must be a sequence of numbers, but is empty.")
        object.__setattr__(self, "eta", grid)

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """Eight η from 1 to 10⁻⁴, each from where the last one ended."""
        grid = tuple(float(eta) for eta in np.geomspace(1, 1e-4, 8))
        why = "eta from 1 to 1e-4, each with its share of the rounds; scales are estimated"
        noisy = ("h's step size is constant, so the noise of sampled clients remains",) if at.partial else ()
        return Practical(cls(grid, warm_start=True), 0.0, (why,), fades=True, doubts=noisy)

    def plan(self, rounds: int) -> Self:
        shared = rounds if self.R is None else self.R
        if 0 < shared < len(self.eta):
            raise ValueError(
                f"SequentialRegularization: {shared:g} rounds are too few for {len(self.eta)} values of "
                "eta; give more."
            )
        return super().plan(rounds)

    def stage(self, r: Integer) -> jax.Array:
        """The index of the η of round ``r``."""
        count = self.eta.shape[0]
        return jnp.clip(jnp.floor((r + 0.5) * count / self.R).astype(int), 0, count - 1)

    def cautions(self, moment: Moment) -> list[str]:
        return self.flat(moment)

    def init(self, problem: Selection, x0: PyTree, y0: PyTree) -> State:
        count = self.eta.shape[0]
        solutions = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape)), x0)
        return State(x0, x0, solutions, Scale.unknown(x0))

    def round(self, problem: Selection, fed: Fed, key: Key, r: Integer, state: State) -> State:
        stage, x = self.stage(r), state.x
        if not self.warm_start:
            fresh = stage != self.stage(r - 1)
            x = tree.where(fresh, state.x0, x)  # line 2
        gamma, eta = 1.0 if self.gamma is None else self.gamma, jnp.asarray(self.eta)[stage]
        steps = self.step_sizes(gamma, eta, state.scale, safe=self.gamma is None)
        moved = fed.average(self.local_steps, key, x, steps)  # line 3
        x = self.server_step(problem, x, moved, steps)
        solutions = jax.tree.map(lambda all_, one: all_.at[stage].set(one), state.solutions, x)  # line 4
        return State(x, state.x0, solutions, state.scale)
