"""What is known of a problem before it is solved, and the steps that follow from it.

`fedstrata.constants` measures; a method's `Method.practical` turns that into hyper-parameters, and
`fedstrata.plan` asks it. A rule is one class method in the method's own file, beside `from_theory`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from fedstrata.core.method import Method
from fedstrata.core.method import NoRule as NoRule

KINK = 0.25  # of the slope's change within one of 64 intervals: above it, steps must fall
WELL = 1e-12  # of L: a smaller μ is none
BEYOND = 2.0  # how far beyond the least value on the way a step may lead


@dataclass(frozen=True)
class Measured:
    """The constants of one function.

    Attributes:
        L, mu: the largest and the smallest curvature of the clients' mean; μ < 0 where it is not convex.
        client_L, client_mu: those of every client.
        gradient: ‖∇f‖.
        heterogeneity: how much the clients' gradients differ.
        curvature_heterogeneity: how much their Hessians do.
        noise: of a gradient from one sample.
        kink: how much of the slope jumps within a short line, between 0 (smooth) and 1.
        value: f.
        rounding: the distance of two neighbouring floats of that size, in the precision of the run.
        reach: how far down the gradient f is least.
        unsure: the part of L − μ that either may be away, with a probability of 95 %; 0 where as many
            products were taken as there are variables.
    """

    L: float
    mu: float
    client_L: np.ndarray
    client_mu: np.ndarray
    gradient: float
    heterogeneity: float
    curvature_heterogeneity: float
    noise: float
    kink: float
    value: float
    rounding: float
    reach: float = math.nan
    unsure: float = 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """What L lies between, with a probability of at least 95 %."""
        return self.L, self.L + self.unsure / (1 - self.unsure) * (self.L - self.mu)

    @property
    def kinked(self) -> bool:
        """Whether steps must fall, since the gradient does not: at kinks, or where nothing else bends f."""
        straight = max(self.L, -self.mu) * self.reach <= WELL * self.gradient
        return self.kink > KINK or (straight and self.gradient > 0)

    @property
    def step(self) -> float:
        """A step down the gradient of a smooth f: 1/L, or less where f is least before that, far away.

        Of a function that flattens out, far from its minimum, L at the start is none of the way.
        """
        return self.within(self.L)

    def within(self, L: float) -> float:
        """The same for another bound of the curvature."""
        bend = max(L, -self.mu, 0.0)
        if self.gradient > 0 and self.reach > 0:
            bend = max(bend, self.gradient / (BEYOND * self.reach))
        if not 0 < bend < math.inf:
            raise NoRule("the function has no curvature at the start, by which a step could be chosen")
        return 1 / bend

    @property
    def condition(self) -> float:
        """κ = L/μ; infinite where f is not strongly convex."""
        return self.L / self.mu if self.mu > WELL * self.L > 0 else math.inf


@dataclass(frozen=True)
class Constants:
    """What `constants` measured.

    Attributes:
        levels: by the function's name; ``"objective"`` is F, a function of x alone, through the lower level.
        coupling: ‖∇²_xy h‖ of the lower level; None where there is none.
        through: the curvature of that part of F which goes through y; None where there is no y.
        scale_x, scale_y: ‖x‖/√n and ‖y‖/√p.
        exchanges: how many exchanges of vectors a federation needs for it.
        oracle_calls: what it cost, in samples, like `Ledger.oracle_calls`.
        jacobian: of the maps of a `MultiSequence` by (x, Z), where they are few.
        slope_y: ‖∇_y f‖ of the upper level at (x, y(x)); None where there is none that all clients share.
    """

    levels: dict[str, Measured]
    coupling: float | None
    through: float | None
    scale_x: float
    scale_y: float | None
    exchanges: int
    oracle_calls: dict[str, int] = field(default_factory=dict)
    jacobian: np.ndarray | None = None
    slope_y: float | None = None

    def __repr__(self) -> str:
        lines = [
            f"{name}: L {its.interval[0]:.3g} to {its.interval[1]:.3g}, mu {its.mu:.3g}, "
            f"clients' L {its.client_L.min(initial=its.L):.3g}–{its.client_L.max(initial=its.L):.3g}, "
            f"heterogeneity {its.heterogeneity:.3g}, noise {its.noise:.3g}, kink {its.kink:.2g}"
            for name, its in self.levels.items()
        ]
        if self.coupling is not None:
            lines.append(f"coupling {self.coupling:.3g}")
        if self.through is not None:
            lines.append(f"curvature of F through y {self.through:.3g}")
        lines.append(f"{self.exchanges} exchanges, {self.oracle_calls}")
        return "Constants(\n  " + ",\n  ".join(lines) + ",\n)"


@dataclass(frozen=True)
class Conditions:
    """A problem with its constants, and the federation that solves it.

    Attributes:
        problem: what is to be solved.
        constants: of it, at the start.
        clients: how many there are.
        participants: how many of them take part in a round.
        dimension: numbers in x.
        rounds: the horizon of steps that fall with it.
        slower: how much shorter steps are to be than the constants ask for.
    """

    problem: Any
    constants: Constants
    clients: int
    participants: int
    dimension: int
    rounds: int
    slower: float = 1.0

    def __getitem__(self, name: str) -> Measured:
        """The constants of one function."""
        return self.constants.levels[name]

    @property
    def partial(self) -> bool:
        """Whether only some of the clients take part in a round."""
        return self.participants < self.clients

    @property
    def F(self) -> Measured:
        """The function of x that is made small."""
        for name in ("objective", "loss"):
            if name in self.constants.levels:
                return self.constants.levels[name]
        raise NoRule("its objective F could not be measured at the start")

    def cohort_L(self, level: Measured) -> float:
        """A bound on the curvature of the mean of those clients that take part."""
        if not self.partial or level.client_L.size == 0:
            return level.L
        worst = np.sort(level.client_L)[-self.participants :].mean()
        return float(min(worst, level.L * self.clients / self.participants))


class Practical(NamedTuple):
    """A method with steps, and what to expect of it.

    Attributes:
        method: ready to be run.
        rate: by which part the error of x falls in a round, in the end; 0 where it does not fall like that.
        reasons: where the numbers come from, in words.
        fades: whether the steps fall with the horizon, so that a longer run needs another plan.
        cost: exchanges of a round, about.
        doubts: what speaks against the method here, in words; where there is any, others come first.
    """

    method: Method[Any, Any]
    rate: float
    reasons: tuple[str, ...]
    fades: bool = False
    cost: float = 1.0
    doubts: tuple[str, ...] = ()
