"""The measured constants of a problem, and the hyper-parameters that a method's rule computes from them.

`fedstrata.constants` measures, `Method.practical` computes hyper-parameters, and `fedstrata.plan` calls it. A
rule is one class method in the method's own file, beside `from_theory`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from fedstrata.core.method import Method
from fedstrata.core.method import NoRule as NoRule

KINK = 0.25  # f has kinks if a larger part of the slope's change is within one of 64 intervals
WELL = 1e-12  # a μ below this fraction of L counts as zero
HOLLOW = 1e-3  # relative to L: a μ as far below zero means that f is not convex
NEARLY = 1e-2  # of a decrease: a smaller excess, by ‖∇f‖²/2μ, counts as none
GROWN = 0.1  # a relative growth of curvature along the gradient that counts
LOWER = ("lower", "client", "follower")  # the levels of y
BEYOND = 2.0  # the longest step, relative to the distance of the least value along the gradient


@dataclass(frozen=True)
class Measured:
    """The constants of one function.

    Attributes:
        L, mu: the largest and the smallest curvature of the clients' mean; μ < 0 if it is not convex.
        client_L, client_mu: the same for every client.
        gradient: ‖∇f‖.
        heterogeneity: the difference of the clients' gradients.
        curvature_heterogeneity: the difference of the clients' Hessians.
        noise: the standard deviation of a gradient from one sample.
        kink: the fraction of the slope that jumps along a short line, from 0 (smooth) to 1.
        value: f.
        rounding: the spacing of floats of the size of f, in the precision of the run.
        reach: the distance along the negative gradient at which f is smallest.
        unsure: the error of L and μ as a fraction of L − μ, with a probability of 95 %; 0 if the products are
            as many as the variables.
        growth: how much the curvature grows along the negative gradient, up to most of its decrease; 1 for a
            parabola.
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
    growth: float = 1.0

    @property
    def interval(self) -> tuple[float, float]:
        """An interval that contains L with a probability of at least 95 %."""
        return self.L, self.L + self.unsure / (1 - self.unsure) * (self.L - self.mu)

    @property
    def kinked(self) -> bool:
        """Whether step sizes must decrease, because f has kinks or is linear along its gradient."""
        straight = max(self.L, -self.mu) * self.reach <= WELL * self.gradient
        return self.kink > KINK or (straight and self.gradient > 0)

    @property
    def step(self) -> float:
        """A step size for a smooth f: 1/L, or less if f is smallest closer than that.

        If f is flat at the start, far from its minimum, its L there is too small further on.
        """
        return self.within(self.L)

    def within(self, L: float) -> float:
        """The same for another bound on the curvature."""
        bend = max(L, -self.mu, 0.0)
        if self.gradient > 0 and self.reach > 0:
            bend = max(bend, self.gradient / (BEYOND * self.reach))
        if not 0 < bend < math.inf:
            raise NoRule("the function has zero curvature at the start, so its step size cannot be chosen")
        return 1 / bend

    @property
    def varies(self) -> bool:
        """Whether f is more curved on the way than at the start: it is not convex, or curves up."""
        return not self.kinked and (self.mu < -HOLLOW * self.L or self.growth > 1 + GROWN)

    def curved(self, factor: float) -> Measured:
        """The same function with curvatures that are larger by a factor."""
        return replace(self, L=self.L * factor, client_L=self.client_L * factor, reach=self.reach / factor)

    def nearly_least(self, there: Measured) -> bool:
        """Whether f is nearly as small as possible there, compared with its decrease on the way."""
        return there.gradient**2 <= NEARLY * 2 * there.mu * (self.value - there.value)

    def or_worse(self, there: Measured) -> Measured:
        """The larger curvatures of this point and of one that was reached from it."""
        return replace(
            self,
            L=max(self.L, there.L, -there.mu),
            mu=min(self.mu, there.mu),
            client_L=np.maximum(self.client_L, there.client_L),
            client_mu=np.minimum(self.client_mu, there.client_mu),
            curvature_heterogeneity=max(self.curvature_heterogeneity, there.curvature_heterogeneity),
        )

    @property
    def condition(self) -> float:
        """κ = L/μ; infinite if f is not strongly convex."""
        return self.L / self.mu if self.mu > WELL * self.L > 0 else math.inf


@dataclass(frozen=True)
class Constants:
    """The constants that `constants` measured.

    Attributes:
        levels: constants by the function's name; ``"objective"`` is F(x), through the lower level.
        coupling: ‖∇²_xy h‖ of the lower level; None without a lower level.
        through: the curvature of F through y; None without y.
        scale_x, scale_y: ‖x‖/√n and ‖y‖/√p.
        exchanges: the number of exchanges of vectors that a federation needs to measure them.
        oracle_calls: the cost of measuring in samples, like `Ledger.oracle_calls`.
        jacobian: the Jacobian of the maps of a `MultiSequence` in (x, Z), if it is small enough.
        slope_y: ‖∇_y f‖ of the upper level at (x, y(x)); None without a y that all clients share.
        least_coupling: the least singular value of ∇²_xy h by x; None without a lower level.
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
    least_coupling: float | None = None

    def curved(self, upper: float, lower: float) -> Constants:
        """The same problem with curvatures of F, and of lower levels, that are larger by factors."""
        factors = {name: lower if name in LOWER else upper for name in self.levels}
        levels = {name: its.curved(factors[name]) for name, its in self.levels.items()}
        return replace(self, levels=levels, through=None if self.through is None else self.through * upper)

    def or_worse(self, there: Constants) -> Constants:
        """The larger curvatures of this point and of one that was reached from it.

        x's speed depends on F's curvature through y and on the lower level's μ: both are those of the point
        where they allow less.
        """
        levels = {name: its.or_worse(there.levels.get(name, its)) for name, its in self.levels.items()}
        its, other, through = self.levels.get("lower"), there.levels.get("lower"), self.through
        if its is not None and other is not None and through is not None and there.through is not None:
            less = there.through * its.mu > through * other.mu
            through, mu = (there.through, other.mu) if less else (through, its.mu)
            levels["lower"] = replace(levels["lower"], mu=mu)
        return replace(self, levels=levels, through=through)

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
        problem: the problem.
        constants: its constants at the start.
        clients: the number of clients.
        participants: the number of clients that take part in a round.
        dimension: the number of entries of x.
        rounds: the horizon of decreasing step sizes.
        slower: the factor by which step sizes are shorter than the constants allow.
        dimension_y: the number of entries of y; 0 without y.
        compressed: whether uploads are compressed so coarsely that momentum adds up the errors.
    """

    problem: Any
    constants: Constants
    clients: int
    participants: int
    dimension: int
    rounds: int
    slower: float = 1.0
    dimension_y: int = 0
    compressed: bool = False

    def __getitem__(self, name: str) -> Measured:
        """The constants of one function."""
        return self.constants.levels[name]

    @property
    def partial(self) -> bool:
        """Whether only some of the clients take part in a round."""
        return self.participants < self.clients

    @property
    def F(self) -> Measured:
        """The objective, or the loss, as a function of x."""
        for name in ("objective", "loss"):
            if name in self.constants.levels:
                return self.constants.levels[name]
        raise NoRule("its objective F could not be measured at the start")

    def cohort_L(self, level: Measured) -> float:
        """A bound on the curvature of the mean over the participating clients."""
        if not self.partial or level.client_L.size == 0:
            return level.L
        worst = np.sort(level.client_L)[-self.participants :].mean()
        return float(min(worst, level.L * self.clients / self.participants))


class Practical(NamedTuple):
    """A method with hyper-parameters, and its expected performance.

    Attributes:
        method: the method, ready to run.
        rate: the relative decrease of x's error in a round, asymptotically; 0 if it is not linear.
        reasons: the reasons for the numbers, in words.
        fades: whether the steps decrease over the horizon, so that a longer run needs a new plan.
        cost: the approximate number of exchanges per round.
        doubts: reasons against the method here, in words; methods without doubts come first.
    """

    method: Method[Any, Any]
    rate: float
    reasons: tuple[str, ...]
    fades: bool = False
    cost: float = 1.0
    doubts: tuple[str, ...] = ()
