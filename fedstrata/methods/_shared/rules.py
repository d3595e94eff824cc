"""Practical rules that methods share: steps for a mean, for two levels, and for compositions.

A rule computes step sizes from measured constants (`fedstrata.problems.measured`). Several methods use each
of them; their `practical` names the steps as their papers do.

    one level      γ = 1/L;  at kinks γ decreases from reach/‖∇f‖;  with partial participation it fades
    local steps    H − 1 = 2δ μ/(γ τ (ζ/reach + τ)), τ and ζ the differences of the clients' Hessians and
                   gradients: the bias of drift, about γ (H − 1) τ (ζ + τ reach)/2μ, is at most δ reach
    two levels     β = 1/L_h,  α = min(0.9/L_F, ½ s/L_y), s the fraction of y's error that a round removes and
                   L_y the curvature of F through y: above 2s/L_y the pair oscillates
    an operator    γ = min a/(a² + ‖B‖²) over a = μ, L:  |1 − γ(a ± ib)|² ≤ 1 − γa  for all b ≤ ‖B‖
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fedstrata.methods._shared.schedules import fading, falling
from fedstrata.problems.classes import Bilevel, Composition, Minimax, MultiSequence
from fedstrata.problems.dro import DRO
from fedstrata.problems.measured import WELL, Conditions, Measured, NoRule, Practical

BIAS = 1e-3  # δ, the bias of drift relative to the reach
MOST_STEPS = 50  # local steps
BELOW = 0.9  # α relative to 1/L_F
APART = 0.5  # x's speed relative to y's
APART_BY = 0.1  # the difference of losses along the way, relative to the bound √m ζ reach
LEFT = 1e-2  # the fraction of an inner error that inner steps may leave


class Steps(NamedTuple):
    """A step along a gradient.

    Attributes:
        gamma: the step size, a number or a function of the round.
        rate: the relative decrease of the error in a round with one local step; 0 if unknown.
        why: the reason, in words.
        fades: whether gamma decreases over the horizon.
        H: local steps per round.
    """

    gamma: Any
    rate: float
    why: str
    fades: bool = False
    H: int = 1

    def of(self, method: Any, *reasons: str, **more: Any) -> Practical:
        """The answer of a method's `practical`."""
        rate = more.pop("rate", self.rate * self.H)
        return Practical(method, rate, (self.why, *reasons), fades=self.fades, **more)


def descent(at: Conditions, its: Measured, L: float | None = None, *, local: bool = False) -> Steps:
    """The step for one level, a mean over the participating clients.

    Args:
        at: the problem's constants.
        its: the function's constants.
        L: the curvature that determines the step, instead of the mean's.
        local: whether to take several local steps if clients hardly differ.
    """
    if its.kinked:
        return Steps(downhill(at, its), 0.0, "kinks: the step size decreases geometrically", True)
    step = its.within(at.cohort_L(its) if L is None else L)
    rate = step * max(its.mu, 0.0)
    if at.partial and its.heterogeneity > 0:
        why = "step size 1/L of the participants, decreasing: their choice adds noise"
        return Steps(fading(step, rate / 2), 0.0, why, True)
    H = undrifted(at, its, step) if local else 1
    why = "one local step has no drift" if H == 1 else f"{H} local steps drift by less than {BIAS:g}"
    return Steps(step, rate, f"step size 1/L; {why}", H=H)


def downhill(at: Conditions, its: Measured) -> Any:
    """A decreasing step for kinks; the first one leads to the smallest value along the gradient."""
    return falling(its.reach / (its.gradient or 1.0), at.rounds)


def undrifted(at: Conditions, its: Measured, step: float) -> int:
    """The number of local steps with a bias of drift below ``BIAS`` times the reach.

    One, if curvature varies: then clients with the same Hessian at a point drift apart, too.
    """
    if (
        at.slower > 1
        or its.varies
        or not at.problem.set_of_x.trivial
        or not its.mu > WELL * its.L
        or not its.reach > 0
    ):
        return 1
    unlike = its.curvature_heterogeneity
    pull = step * unlike * (its.heterogeneity / its.reach + unlike)
    enough = min(MOST_STEPS, 1 / (step * its.mu))  # with more, clients reach their own minimisers
    return int(np.clip(1 + 2 * BIAS * its.mu / pull if pull > 0 else enough, 1, max(enough, 1)))


class TwoLevels(NamedTuple):
    """The steps of two levels.

    Attributes:
        alpha, beta: the step sizes of x and of y, numbers or functions of the round.
        rate: the relative decrease of x's error in a round.
        why: the reasons, in words.
        fades: whether they decrease over the horizon.
    """

    alpha: Any
    beta: Any
    rate: float
    why: tuple[str, ...]
    fades: bool = False

    def of(self, method: Any, *reasons: str, **more: Any) -> Practical:
        """The answer of a method's `practical`."""
        return Practical(method, more.pop("rate", self.rate), (*self.why, *reasons), fades=self.fades, **more)

    def faded(self, at: Conditions) -> TwoLevels:
        """Decrease both at the same pace if clients are sampled, whose noise the method does not reduce."""
        homogeneous = isinstance(at.problem, Bilevel | Minimax) and not any(
            its.heterogeneity > 0 for its in at.constants.levels.values()
        )
        if not at.partial or homogeneous:
            return self
        alpha, beta = (fading(step, self.rate / 2) for step in (self.alpha, self.beta))
        return TwoLevels(
            alpha, beta, 0.0, (*self.why, "both decrease, because the choice of clients adds noise"), True
        )


def strongly_convex(at: Conditions) -> Measured:
    """The lower level's constants; for a payoff, those of −f in y."""
    h = at["lower"]
    if not h.mu > WELL * h.L:
        raise NoRule("the lower level is not strongly convex in y at the start (a payoff: strongly concave)")
    return h


def curvature_through(at: Conditions) -> float:
    """L_y; it is not measured for local lower levels, where it is at most about F's."""
    through = at.constants.through
    return max(at.F.L, -at.F.mu) if through is None else through


def two_levels(
    at: Conditions, *, y_steps: int = 1, drift: float = 0.0, steady: bool = False, slower: float = 1.0
) -> TwoLevels:
    """The steps of x and y.

    Args:
        at: the problem's constants.
        y_steps: steps of y per round.
        drift: the addition to L_h for local steps.
        steady: whether the method itself reduces the noise of sampled clients.
        slower: the factor by which x's step is shorter.
    """
    h, F = strongly_convex(at), at.F
    beta = 1 / (at.cohort_L(h) + drift)
    speed = 1 - (1 - min(beta * h.mu, 1.0)) ** y_steps
    alpha, through = BELOW * F.step / slower, curvature_through(at)
    why = "alpha = 0.9/L_F"
    if through > 0 and APART * speed / through / slower < alpha:
        alpha, why = APART * speed / through / slower, "alpha keeps x slower than y"
    # until y and its linear system are solved, x moves in a wrong direction, by about this much times α
    astray = 0.0 if y_steps > 1 else (at.constants.coupling or 0.0) * (at.constants.slope_y or 0.0) / h.L
    if F.reach > 0 and alpha * astray > speed * F.reach:
        alpha, why = speed * F.reach / astray, "alpha waits for y, which is not solved at the start"
    rate = min(alpha * max(F.mu, 0.0), speed / 2)
    pair = TwoLevels(alpha, beta, rate, ("beta = 1/L of the lower level", why))
    return pair if steady else pair.faded(at)


def operator(at: Conditions, L_x: float, L_y: float) -> tuple[float, float, float]:
    """One step size γ for (∇_x f, −∇_y f), γμ and the rate, for a convex–concave payoff.

    Args:
        at: the problem's constants.
        L_x: the payoff's curvature in x.
        L_y: its curvature in y.
    """
    f, h, B = at["payoff"], strongly_convex(at), at.constants.coupling or 0.0
    if not f.mu > WELL * f.L:
        raise NoRule("the payoff is not strongly convex in x at the start, which one step for x and y needs")
    mu, L = min(f.mu, h.mu), max(L_x, L_y)
    gamma = min(a / (a**2 + B**2) for a in (mu, L))
    return gamma, gamma * mu, 1 - max(math.hypot(1 - gamma * a, gamma * B) for a in (mu, L))


def composed(at: Conditions, slower: float = 1.0, *, threshold: bool = False) -> Steps:
    """A step along the gradient of a composition, or of a risk.

    Args:
        at: the problem's constants.
        slower: the factor by which the step is shorter than 1/L.
        threshold: whether the method computes a risk's threshold itself.
    """
    if not threshold and isinstance(at.problem, DRO) and at.problem.lifted:
        raise NoRule(
            "x and the threshold, which has the unit of the loss, have the same step size: see FastDRO"
        )
    its = at.F
    if its.kinked:
        return Steps(downhill(at, its), 0.0, "kinks: eta falls geometrically", True)
    step = its.step / slower
    if at.partial:
        why = "eta = 1/L, decreasing because the choice of clients adds noise"
        return Steps(fading(step, step * max(its.mu, 0) / 2), 0.0, why, True)
    return Steps(step, step * max(its.mu, 0), "eta = 1/L" if slower == 1 else f"eta = 1/({slower:g} L)")


def thresholded(at: Conditions) -> tuple[Steps, float]:
    """A decreasing step for (x, threshold), and the threshold's factor, the square of a sample's slope.

    Their curvature together is not measured, and clients may be drawn.
    """
    its = at["loss"]
    steep = its.gradient**2 + its.heterogeneity**2 + its.noise**2
    if not steep > 0:
        raise NoRule("the losses do not depend on x at the start, so the threshold has no unit")
    why = "eta falls geometrically, for the threshold times the mean square of a sample's slope"
    return Steps(downhill(at, at.F), 0.0, why, True), steep


PART_IS_BIASED = "inner means over a part of the clients bias the limit"


def biased_where_partial(at: Conditions) -> tuple[str, ...]:
    """Doubts about plain composed gradients."""
    return (PART_IS_BIASED,) if at.partial else ()


def largest(its: Measured) -> float:
    """The largest absolute curvature of a client's function; the mean's if only values are known."""
    return float(max(its.client_L.max(initial=its.L), -its.client_mu.min(initial=its.mu)))


def scale(its: Measured) -> float:
    """A curvature; for a function with kinks, its slope over its reach."""
    return its.gradient / its.reach if its.kinked and its.reach > 0 else 1 / its.step


def own_sets(at: Conditions) -> tuple[str, ...]:
    """Doubts about means of points that clients project onto their own sets."""
    return (
        ()
        if at.problem.set_of_x.shared
        else ("the mean of the clients' projections is outside some of their sets",)
    )


class Worst(NamedTuple):
    """Descent in x, ascent in the clients' weights.

    Attributes:
        gamma, eta_lam: the step sizes, numbers or functions of the round.
        steps: the step of x with its reasons.
    """

    gamma: Any
    eta_lam: Any
    steps: Steps


def worst_client(at: Conditions) -> Worst:
    """γ = 1/L, η_λ = μ/‖J‖², J the losses' derivative, ‖J‖² ≤ m ζ².

    Near the solution the pair is multiplied by [[1 − γμ, −γJᵀ], [ηJ, 1]], which expands if η‖J‖² > μ. Weights
    of clients whose losses are nearly the largest converge slowly: the rate is a guess.
    """
    its = at["loss"]
    steps = descent(at, its, largest(its))
    spread = spread_of_losses(at)
    eta, why = max(its.mu, 1 / at.rounds * scale(its)) / spread, "eta_lam = mu over the spread of gradients"
    if its.kinked and its.reach > 0:  # no μ: both first steps are as long as the distance to go
        apart = APART_BY * its.reach * math.sqrt(spread)
        eta, why = 1 / apart, "eta_lam begins with a move through all weights"
    if steps.fades:
        falls = falling(eta, at.rounds) if its.kinked else fading(eta, max(its.mu, 0) / scale(its) / 2)
        return Worst(steps.gamma, falls, steps._replace(why=f"{steps.why}; {why}"))
    return Worst(steps.gamma, eta, Steps(steps.gamma, steps.rate / 20, f"gamma = 1/L; {why}"))


def spread_of_losses(at: Conditions) -> float:
    """M ζ², a bound on ‖J‖² of the clients' losses."""
    its = at["loss"]
    spread = at.clients * max(its.heterogeneity, LEFT * its.gradient) ** 2
    if not spread > 0:
        raise NoRule("the clients' losses do not differ at the start, so their weights cannot be learned")
    return float(spread)


# Coupled sequences

LONGEST = 10  # local steps of two levels
MOST_INNER = 20  # steps of y, and products of conjugate gradients, per round
DAMPED = 1.5  # steps longer by this factor must still contract


def unlike(at: Conditions) -> tuple[int, float]:
    """Local steps K with K β τ ≤ ½, τ the difference of the clients' Hessians, and 2τ, their addition to L_h.

    K = 1 on sets, because means of points that clients project drift, under compression, and for a
    composition. Other differences of the clients are not measured, so a round of K steps counts as √K.
    """
    if at.problem.local or "lower" not in at.constants.levels:
        return 1, 0.0
    h = strongly_convex(at)
    tau = h.curvature_heterogeneity
    single = at.partial or at.compressed or not all(project.trivial for project in at.problem.sets.values())
    K = 1 if single else int(np.clip(h.L / (2 * max(tau, 1e-3 * h.L)), 1, LONGEST))
    return K, 2 * tau if K > 1 else 0.0


def coupled(at: Conditions, *, drift: float = 0.0, steady: bool = False) -> TwoLevels:
    """The steps of x and of the sequences for all problems of `SOLVES`; β = ½ tracks a composition's values.

    Args:
        at: the problem's constants.
        drift: the addition to L_h for local steps.
        steady: whether the method itself reduces the noise of sampled clients.
    """
    match at.problem:
        case MultiSequence():
            pair = equations(at)
        case Composition():
            if at.F.kinked:
                raise NoRule("its sequences assume smooth levels")
            alpha, rate, _, _, _ = composed(replace(at, participants=at.clients), 4)
            pair = TwoLevels(alpha, 0.5, rate, ("alpha = 1/(4 L)", "beta = ½"))
        case _:
            return two_levels(at, drift=drift, steady=steady)
    return pair if steady else pair.faded(at)


def equations(at: Conditions) -> TwoLevels:
    """The α and β among powers of two with the least spectral radius of 1 − diag(α, β) J."""
    J, n = at.constants.jacobian, at.dimension
    if J is None:
        raise NoRule("the Jacobian of the maps was not measured, because there are too many variables")
    size, of_x = np.abs(np.linalg.eigvals(J)).max(), np.arange(len(J)) < n
    powers = np.meshgrid(0.5 ** np.arange(-1, 16), 0.5 ** np.arange(-4, 12), indexing="ij")
    pairs = np.stack(powers, -1).reshape(-1, 2) / size
    radii = _radii(J, np.where(of_x, pairs[:, :1], pairs[:, 1:]))
    best = int(np.argmin(radii))
    if not radii[best] < 1:
        raise NoRule("no steps make the maps' linearisation contract")
    alpha, beta = pairs[best] * (at.participants / at.clients / at.slower)
    radius = float(_radii(J, np.where(of_x, alpha, beta)))
    return TwoLevels(float(alpha), float(beta), 1 - radius, ("alpha, beta: fastest on the maps' Jacobian",))


def _radii(J: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """The spectral radii of the iterations; infinite if somewhat longer steps diverge."""

    def of(factor: float) -> np.ndarray:
        return np.abs(np.linalg.eigvals(np.eye(len(J)) - factor * steps[..., None] * J)).max(-1)

    return np.where(of(DAMPED) < 1, of(1.0), np.inf)


def inner_steps(at: Conditions) -> tuple[int, int]:
    """Steps of y that leave a tenth of its error, and CG products that leave 10⁻³."""
    h = strongly_convex(at)
    kappa = max(at.cohort_L(h) / h.mu, 1.0)
    return (
        int(np.clip(np.ceil(kappa * np.log(10)), 1, MOST_INNER)),
        int(np.clip(np.ceil(np.sqrt(kappa) * np.log(2e3) / 2), 2, MOST_INNER)),
    )
