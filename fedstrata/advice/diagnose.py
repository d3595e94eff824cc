"""The numbers behind a certificate: the exact gradient at x, and the residual of y in its level.

    F(x) = f(x, y(x)),   y(x) solves the lower level         `fedstrata.advice.objectives`

If x has a set X, the stationarity is x − P_X(x − ∇F(x)). Games in which y(x) is not unique, and the game of
`fedstrata.AFL` and `fedstrata.DRFA`, f(x, λ) = Σ_i λ_i f_i(x) over the simplex, are judged as saddle points:

    r(x, y) = (x − P_X(x − ∇_x f),  y − P_Y(y + ∇_y f))

is zero only at saddle points, if f is convex in x and concave in y. All sums are over all samples of all
clients, in float64; oracle calls are not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import singledispatch
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedstrata.advice.blocks import client_means
from fedstrata.advice.certify import case_of, certify
from fedstrata.advice.feasible import outside, projection
from fedstrata.advice.lower import NotCertifiable, natural_residual
from fedstrata.advice.objectives import Case, level_of, mean_over, objective_of, sequences_of, started
from fedstrata.advice.precision import double_precision
from fedstrata.advice.selection import judge_selection
from fedstrata.core import tree
from fedstrata.core.problem import Problem
from fedstrata.core.types import PyTree, Weights
from fedstrata.data.federated import FederatedData
from fedstrata.data.storage import Placed
from fedstrata.problems.classes import Minimax, MultiSequence, Selection
from fedstrata.problems.of_clients import WorstClient
from fedstrata.solving.certificate import Certificate
from fedstrata.solving.result import Result
from fedstrata.support.frozen import jit
from fedstrata.support.shown import WIDTH

Numbers: TypeAlias = dict[str, Any]  # fields of a `Diagnosis`


@dataclass(frozen=True)
class Diagnosis:
    """The result of `diagnose` at x.

    Attributes:
        certificate: whether x is a solution, and what to change; see `fedstrata.certify`.
        hypergradient: ∇F(x).
        hypergradient_norm: ‖∇F(x)‖.
        stationarity: ‖x − P_X(x − ∇F(x))‖; without a set, ‖∇F(x)‖. If the sets X_i differ between clients, X
            is their intersection. NaN if it cannot be computed; ``trouble`` says why.
        objective: F(x); None for a `MultiSequence`.
        y: y(x), like the result's y: for an `MPEC` each client's mean of y(x, ξ) over its samples. None if
            there is no lower level.
        lower_residual: ‖G(x, y)‖ at the result's own y, G the lower level's gradient or map; on a set
            ‖y − P_Y(y − s G)‖/s. For an `MPEC`, the norm of the clients' means over their samples.
        lower_distance: ‖y − y(x)‖, the distance of the result's y from the solution.
        outside: ‖x − P_X(x)‖, the largest if the sets differ between clients; None without a set.
        reduction: the stationarity relative to the start's; None if the start's is not known, NaN or infinite
            if the start is stationary.
        sequence_residuals: for a `MultiSequence`, ‖Σ_m S^{m,n}(z^{n−1}, zⁿ)‖ for every n.
        saddle: whether ``stationarity`` is ‖r(x, y)‖ at the result's x and y, ``hypergradient`` ∇_x f, and
            ``lower_residual`` the part of y.
        trouble: the reason why numbers are missing, or None.

    For a `Selection`, min f over X = argmin h with h convex, ``hypergradient`` is ∇f(x) (of f's smooth
    parts), ``stationarity`` ‖x − x̂‖, x̂ a solution that is found from x; ``lower_residual`` is
    ‖∇h(x)‖ (with a regulariser or a set ‖x − prox(x − s∇h(x))‖/s) and ``lower_distance`` ‖x − P_X(x)‖, the
    distance of x from the optima of h. For a `MultiSequence` ``hypergradient`` is P(x, Z), ``lower_residual``
    the norm of all S together.
    """

    certificate: Certificate
    hypergradient: PyTree = None
    hypergradient_norm: float = np.nan
    stationarity: float = np.nan
    objective: float | None = None
    y: PyTree = None
    lower_residual: float | None = None
    lower_distance: float | None = None
    outside: float | None = None
    reduction: float | None = None
    sequence_residuals: tuple[float, ...] | None = None
    saddle: bool = False
    trouble: str | None = None

    @property
    def solved(self) -> bool:
        """Whether the certificate calls x a solution."""
        return self.certificate.solved

    @property
    def distance(self) -> float:
        """The relative distance of x from the best point that the certificate found."""
        return self.certificate.distance

    def __repr__(self) -> str:
        """All findings, on several lines if one is too short."""
        parts = self._words()
        short = f"Diagnosis({', '.join(parts)})"
        return short if len(short) <= WIDTH else "Diagnosis(\n  " + ",\n  ".join(parts) + ",\n)"

    def _words(self) -> list[str]:
        words: list[str] = [self.certificate.verdict]
        if np.isfinite(self.stationarity):
            name = "residual of the saddle point" if self.saddle else "stationarity"
            words.append(f"{name} {self.stationarity:.3g}{self._of_start()}")
        if self.outside is not None:
            words.append(f"x {self.outside:.3g} outside of its set" if self.outside else "x in its set")
        if self.objective is not None and np.isfinite(self.objective):
            words.append(f"objective {self.objective:.6g}")
        if self.sequence_residuals is not None:
            residuals = ", ".join(f"{r:.3g}" for r in self.sequence_residuals)
            words.append(f"residuals of the sequences {residuals}")
        elif self.lower_residual is not None:
            own = self.y is not None or self.saddle
            words.append(f"residual of {'y' if own else 'h'} {self.lower_residual:.3g}")
            if self.lower_distance is not None:
                to = "distance of y to y(x)" if own else "distance to its optima"
                words.append(f"{to} {self.lower_distance:.3g}")
        return [*words, *filter(None, [self.trouble, self.certificate.advice])]

    def _of_start(self) -> str:
        if self.reduction is None:
            return ""
        if np.isnan(self.reduction):
            return " (as at x0, which is stationary itself)"
        if np.isinf(self.reduction):
            return " (while x0 is stationary itself)"
        return f" ({self.reduction:.2g} of that at x0)"


def diagnose(
    result: Result | Problem,
    data: FederatedData | None = None,
    x: PyTree = None,
    y: PyTree = None,
    *,
    problem: Problem | None = None,
    weights: Weights | None = None,
    x0: PyTree = None,
    y0: PyTree = None,
) -> Diagnosis:
    """The certificate of a result, with the exact (hyper)gradient at x and the residual of y.

    Args:
        result: a result of any method, also a zeroth-order one; or a problem, with data and a point. This and
            the other arguments are those of `fedstrata.certify`.
        data: the samples; by default the result's.
        x: the point, if a problem is given.
        y: its second variable.
        problem: the problem of a loaded result, which does not store it.
        weights: the clients' weights; by default the run's, for a point ``"uniform"``.
        x0: the start to compare with; by default the run's.
        y0: the second variable there.

    Raises:
        ValueError: if the result lacks problem or data, and they are not given.

    >>> import fedstrata as fs, numpy as np
    >>> problem, data, x_star, y_star = fs.quadratic_bilevel(clients=3, n=2, p=3)
    >>> method = fs.FedMSA(alpha=0.1, beta=0.2, K=5)
    >>> result = fs.solve(problem, method, data, np.zeros(2), y0=np.zeros(3), rounds=60, progress=False)
    >>> found = fs.diagnose(result)
    >>> found.hypergradient_norm < 1e-4, found.reduction < 1e-4, found.solved
    (True, True, True)
    >>> fs.diagnose(problem, data, x_star, y_star).lower_residual < 1e-6
    True
    """
    given: dict[str, Any] = {"x": x, "y": y, "data": data, "problem": problem, "weights": weights, "x0": x0}
    asked = any(value is not None for value in given.values())
    if isinstance(result, Result) and not asked and result.problem is not None and result.data is not None:
        certificate = result.certificate
    else:
        certificate = certify(result, y0=y0, **given)
    found: Numbers = {}
    try:
        with double_precision():
            case = case_of(result, y0=y0, **given)
            found["outside"] = outside(case.problem, case.data, case.x)
            found |= measured(case.problem, case)
            if case.x0 is not None and np.isfinite(found["stationarity"]):
                found["reduction"] = _reduction(case, found["stationarity"])
    except NotCertifiable as reason:
        found["trouble"] = str(reason)
    return Diagnosis(certificate, **found)


def _reduction(case: Case, now: float) -> float | None:
    """The stationarity relative to the start's."""
    y = case.y
    if isinstance(case.problem, WorstClient):
        y = jnp.full_like(y, 1 / case.data.clients)
    start = measured(case.problem, Case(case.problem, case.data, case.weights, case.x0, y, None, case.y0))
    before, zero = start["stationarity"], 1e-12 * (1 + float(tree.norm(case.x0)))
    if np.isnan(before) or (start.get("saddle", False) and case.problem.has_y):  # its y0 may be unknown
        return None
    if before <= zero:
        return np.nan if now <= zero else np.inf
    return float(now / before)


@singledispatch
def measured(problem: Problem, case: Case) -> Numbers:
    """The numbers at a point, by the problem's class; by default those of F and of the lower level."""
    objective = objective_of(problem, case)
    value, slope = objective.evaluate(objective.x)
    found = {"objective": float(value), **_stationary(case, objective.x, slope)}
    if objective.remarks:
        found["trouble"] = objective.remarks[0]
    if objective.solved is None:
        return found
    level, solved, data = level_of(problem, case.weights), objective.solved, case.data
    gap = natural_residual(level, data, case.x, level.spread(started(problem, case), data), solved.step)
    y = level.gather(solved.y, data)
    return {
        **found,
        "y": y,
        "lower_residual": float(tree.norm(level.gather(gap, data)) / solved.step),
        "lower_distance": float(tree.norm(tree.sub(started(problem, case), y))),
    }


def _stationary(case: Case, x: PyTree, slope: PyTree) -> Numbers:
    """‖x − P_X(x − ∇F)‖, or the reason why it is missing."""
    size = float(tree.norm(slope))
    found: Numbers = {"hypergradient": slope, "hypergradient_norm": size, "stationarity": np.nan}
    if not np.isfinite(size):
        return {
            **found,
            "trouble": "∇F is not finite (the lower level is singular at y(x), or was not solved)",
        }
    moved = projection(case.problem, case.data)(tree.sub(x, slope))
    if moved is None:
        return {**found, "trouble": "the clients' sets have no common point that was found"}
    return {**found, "stationarity": float(tree.norm(tree.sub(x, moved)))}


@measured.register
def _(problem: Selection, case: Case) -> Numbers:
    """The numbers of f over the optima of h."""
    found = judge_selection(problem, case.weights, case.data, case.x, 1e-8)
    return {
        "hypergradient": found.slope,
        "hypergradient_norm": float(tree.norm(found.slope)),
        "stationarity": float(tree.norm(tree.sub(case.x, found.solution))),
        "objective": found.f,
        "lower_residual": found.residual,
        "lower_distance": float(tree.norm(tree.sub(case.x, found.nearest))),
    }


@measured.register
def _(problem: MultiSequence, case: Case) -> Numbers:
    """The maps' means at the point (x, Z)."""
    P, S = jit(sequences_of(problem, case.weights))((case.x, case.y), case.data)
    norm = float(tree.norm(P))
    return {
        "hypergradient": P,
        "hypergradient_norm": norm,
        "stationarity": norm,
        "y": case.y,
        "lower_residual": float(tree.norm(S)),
        "sequence_residuals": tuple(float(tree.norm(s)) for s in S),
    }


@measured.register
def _(problem: Minimax, case: Case) -> Numbers:
    """The numbers of max_y f, or of a saddle point if y(x) is not unique."""
    try:
        found = measured.dispatch(Problem)(problem, case)
        if "y" in found:
            return found
    except NotCertifiable:
        pass

    def payoff(x: PyTree, y: PyTree, data: Placed) -> Any:
        return mean_over(data, case.weights, problem.payoff, x, y)

    return _saddle(case, payoff, lambda y: problem.project_y(y, case.x))


@measured.register
def _(problem: WorstClient, case: Case) -> Numbers:
    """The numbers of the clients' losses with the worst weights."""

    def losses(x: PyTree, data: Placed) -> Any:
        return client_means(data, problem.loss, x)

    def mixed(x: PyTree, y: PyTree, data: Placed) -> Any:
        return problem.mixed(y, jnp.asarray(losses(x, data)))

    found = _saddle(case, mixed, optax.projections.projection_simplex)
    return {**found, "objective": float(problem.risk(jit(losses)(case.x, case.data)))}


def _saddle(case: Case, payoff: Callable[..., Any], onto: Callable[[PyTree], PyTree]) -> Numbers:
    value, (slope, rise) = jit(jax.value_and_grad(payoff, argnums=(0, 1)))(case.x, case.y, case.data)
    second = float(tree.norm(tree.sub(case.y, onto(tree.add(case.y, rise)))))
    found = _stationary(case, case.x, slope)
    together = float(np.hypot(found["stationarity"], second))
    return {
        **found,
        "stationarity": together,
        "objective": float(value),
        "lower_residual": second,
        "saddle": True,
    }
