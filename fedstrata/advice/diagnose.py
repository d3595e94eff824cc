"""How good a result is: its gradient, through the lower level where there is one, whatever method found it.

    F(x) = f(x, y(x)),   y(x) solves  G(x, y) = 0,  or on a set  y = P_Y(y − s G(x, y))

    1  y(x): Newton's method with CG where y is free and G = ∇_y g, else extragradient steps
    2  free:     ∇_y G v = ∇_y f by CG,   ∇F = ∇_x f − ∇_x Gᵀ v
       on a set: R(x, y) = y − P_Y(y − s G(x, y)) is differentiated,
                 ∇_y R · ∂y/∂x = −∇_x R by GMRES,   ∇F = ∇_x f + (∂y/∂x)ᵀ ∇_y f

For a `Selection`, min f over argmin h, the set X is argmin h (`fedstrata.advice.selection`); for a
`MultiSequence` there are the norms of its maps, Σ P and Σ Sⁿ, at the result's x and Z.

Where x has a set X, F is judged by x − P_X(x − ∇F(x)) (`fedstrata.advice.feasible`). Games in which y(x) is
not unique, `fedstrata.AFL` and `fedstrata.DRFA`, are judged as saddle points (`fedstrata.advice.saddle`).

All sums are over all samples of all clients, in float64, and nothing is counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.advice.diagnostics import federated_mean
from fedstrata.advice.feasible import outside, projection
from fedstrata.advice.lower import NotCertifiable, Pooled, hypergradient, natural_residual, solve_lower
from fedstrata.advice.objectives import checked_lower, level_of, mean_over
from fedstrata.advice.precision import double_precision
from fedstrata.advice.saddle import Saddle, agnostic, game
from fedstrata.advice.selection import ENOUGH, judge_selection
from fedstrata.core import tree
from fedstrata.core.method import Method
from fedstrata.core.problem import Problem
from fedstrata.core.types import Array, Function, PyTree, Weights
from fedstrata.data.federated import FederatedData
from fedstrata.data.storage import Placed
from fedstrata.problems.classes import (
    MPEC,
    Bilevel,
    Composition,
    Minimax,
    Minimization,
    MultiSequence,
    Personalized,
    Selection,
)
from fedstrata.problems.fairness import Constrained
from fedstrata.problems.of_clients import WorstClient
from fedstrata.solving.result import Result
from fedstrata.support.shown import WIDTH

TwoLevel: TypeAlias = Bilevel | Minimax | Personalized | MPEC
OneLevel: TypeAlias = Minimization | Composition | Selection | MultiSequence
MOST_ENTRIES = 10_000  # of x, for a look at the curvature
CURVED = 1e-6  # to which that system is solved, relatively


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found at x.

    Attributes:
        hypergradient: ∇F(x).
        hypergradient_norm: ‖∇F(x)‖.
        stationarity: ‖x − P_X(x − ∇F(x))‖, the same where x is free. With sets X_i of the clients' own, X is
            their intersection. NaN where it cannot be computed, and ``trouble`` says why.
        outside: ‖x − P_X(x)‖, how far x is outside of its set, of clients' own sets the largest; None where x
            is free.
        distance: ‖[∇²F(x)]⁻¹ ∇F(x)‖, about how far x is from a stationary point: exactly so where F is
            quadratic, and whatever its conditioning, which the gradient alone does not show. None but for
            problems of one level in which x is free and has at most 10,000 entries, and where there is none.
        objective: F(x); None for a `MultiSequence`, which has none.
        y: y(x), like the result's y: for an `MPEC` each client's mean of y(x, ξ) over its samples.
        lower_residual: ‖G(x, y)‖ at the result's own y; on a set ‖y − P_Y(y − s G)‖/s. For an `MPEC` of the
            clients' means over their samples, before the norm.
        lower_distance: ‖y − y(x)‖, how far the result's y is from the solution.
        solved_residual: the residual at y(x).
        system_residual: of the linear system, relative to its right-hand side.
        solved: whether both are within the tolerance, so that the other numbers are exact. It says nothing of
            the result. If not, the lower level has no unique solution that these steps find: nonconvex, or
            too badly scaled.
        reduction: the stationarity relative to that at ``x0``; None where that was not given, NaN or infinite
            where x0 is stationary itself.
        trouble: why numbers are missing; None where none are.
        saddle: whether ``stationarity`` is ‖(x − P_X(x − ∇_x f), y − P_Y(y + ∇_y f))‖ at the result's x and
            y, ``hypergradient`` ∇_x f, and ``lower_residual`` the second part: so for `AFL`, whose y are the
            clients' weights and whose objective is the largest of their losses, and for games in which y(x)
            is not unique.
        sequence_residuals: of a `MultiSequence`, ‖Σ_m S^{m,n}(z^{n−1}, zⁿ)‖ for every n.

    For problems without a lower level ``y`` and what belongs to it are None.

    For a `Selection`, min f over X = argmin h with h convex, ``hypergradient`` is ∇f(x) (of f's smooth
    parts), ``stationarity`` ‖x − x̂‖, x̂ a solution that is found from x; ``lower_residual`` is
    ‖∇h(x)‖ (with a regulariser or a set ‖x − prox(x − s∇h(x))‖/s), ``lower_distance`` ‖x − P_X(x)‖, how far x
    is from the optima of h, and ``solved_residual`` how accurate the projections are. For a `MultiSequence`
    ``hypergradient`` is P(x, Z), ``lower_residual`` the norm of all S together.
    """

    hypergradient: PyTree
    hypergradient_norm: float
    stationarity: float
    objective: float | None
    y: PyTree = None
    lower_residual: float | None = None
    lower_distance: float | None = None
    solved_residual: float | None = None
    system_residual: float | None = None
    solved: bool = True
    reduction: float | None = None
    sequence_residuals: tuple[float, ...] | None = None
    outside: float | None = None
    distance: float | None = None
    trouble: str | None = None
    saddle: bool = False

    def __repr__(self) -> str:
        """All of it, on several lines where one is too short."""
        parts = self._words()
        short = f"Diagnosis({', '.join(parts)})"
        return short if len(short) <= WIDTH else "Diagnosis(\n  " + ",\n  ".join(parts) + ",\n)"

    def _words(self) -> list[str]:
        words = []
        if np.isfinite(self.stationarity):
            name = "residual of the saddle point" if self.saddle else "stationarity"
            words.append(f"{name} {self.stationarity:.3g} ({self._of_start()})")
        if self.outside is not None:
            words.append(f"x {self.outside:.3g} outside of its set" if self.outside else "x in its set")
        if self.distance is not None:
            words.append(f"about {self.distance:.2g} from a stationary point")
        if self.objective is not None and np.isfinite(self.objective):
            words.append(f"objective {self.objective:.6g}")
        if self.sequence_residuals is not None:
            words.append(
                f"residuals of the sequences {', '.join(f'{r:.3g}' for r in self.sequence_residuals)}"
            )
        elif self.lower_residual is not None:
            of = "y" if self.y is not None or self.saddle else "h"
            to = "distance of y to y(x)" if self.y is not None else "distance to its optima"
            words.append(f"residual of {of} {self.lower_residual:.3g}")
            if self.lower_distance is not None and np.isfinite(self.lower_distance):
                words.append(f"{to} {self.lower_distance:.3g}")
        if self.trouble is not None:
            words.append(self.trouble)
        elif not self.solved:
            words.append("NOT exact: the lower level or the linear system was not solved")
        return words

    def _of_start(self) -> str:
        if self.reduction is None and self.saddle:
            return "at the result's x and y"
        if self.reduction is None:
            return "give x0= to compare it with the start"
        if np.isnan(self.reduction):
            return "as at x0, which is stationary itself"
        if np.isinf(self.reduction):
            return "while x0 is stationary itself"
        return f"{self.reduction:.2g} of that at x0"


def diagnose(
    result: Result,
    *,
    problem: TwoLevel | OneLevel | None = None,
    data: FederatedData | None = None,
    tolerance: float = 1e-8,
    weights: Weights | None = None,
    x0: PyTree = None,
) -> Diagnosis:
    """The exact (hyper)gradient at a result's x, and how well its y solves the lower level.

    Args:
        result: of any method, zeroth-order ones too, for any problem.
        problem: where the result was loaded and does not know it.
        data: likewise.
        tolerance: of the lower level (relative to 1 + its residual at the start) and of the linear system
            (relative).
        weights: of the clients, ``"uniform"`` or ``"size"``, where they are not to be the run's own.
        x0: the run's start, to measure the same there: whether a gradient is small depends on the problem.

    Raises:
        ValueError: where the result does not know problem, data or weights, and they are not given.
        TypeError: for sets or regularisers that leave nothing to measure by, which it names.

    >>> import fedstrata as fs, numpy as np
    >>> problem, data, x_star, y_star = fs.quadratic_bilevel(clients=3, n=2, p=3)
    >>> method = fs.FedMSA(alpha=0.1, beta=0.2, K=5)
    >>> result = fs.solve(problem, method, data, np.zeros(2), y0=np.zeros(3), rounds=60, progress=False)
    >>> found = diagnose(result, x0=np.zeros(2))
    >>> found.hypergradient_norm < 1e-4, found.reduction < 1e-4, found.solved
    (True, True, True)
    """
    problem = result.problem if problem is None else problem
    data = result.data if data is None else data
    if problem is None or data is None:
        raise ValueError(
            "This result was loaded, so it knows neither problem nor data: give problem= and data=."
        )
    name = result.method.get("name") if isinstance(result.method, dict) else type(result.method).__name__
    problem = _of_run(problem, result.method)
    _check(problem, data, name, tolerance)
    weights = result.weights if weights is None else weights
    if weights is None:
        raise ValueError("This result does not know the clients' weights of its run: give weights=.")
    problem.check_weights(weights)
    with double_precision():
        placed = data.placed()
        x, y = _double(result.x), _double(result.y)
        if isinstance(problem, MPEC):
            _check_responses(problem, placed, x, y)

        at = partial(_measured, problem, weights, placed, tolerance)
        found = at(x, y)
        found = replace(found, outside=outside(problem, placed, x))
        if isinstance(problem, Minimization | Composition) and not found.saddle:
            away = _newton_distance(problem, weights, placed, x, found.hypergradient)
            found = replace(found, distance=away)
        if x0 is None or (found.saddle and isinstance(problem, Minimax)):  # whose y0 is not known here
            return found
        x0 = _double(problem.start_x(x0))
        if found.saddle:
            y = jnp.full_like(y, 1 / placed.clients)
        return _compared(found, at(x0, y).stationarity, 1e-12 * (1 + float(tree.norm(x0))))


def _of_run(problem: Problem, method: Method | dict[str, Any] | None) -> Any:
    """The problem that the method solves, where it changes it; a loaded result has the method's name."""
    if isinstance(method, Method):
        return method.judged_as(problem)
    if method is not None and isinstance(problem, Minimization) and method.get("name") in ("AFL", "DRFA"):
        return WorstClient(problem.loss, problem.project)
    return problem


def _check(problem: Problem, data: FederatedData, name: str | None, tolerance: float) -> None:
    """Raise where there is nothing to measure by."""
    if not isinstance(problem, TwoLevel | OneLevel):
        raise TypeError(
            f"diagnose has no measure for {type(problem).__name__}: it has one for Bilevel, Minimax, "
            "Personalized, MPEC, Selection, MultiSequence, Minimization and Composition. Look at "
            "result.history."
        )
    if isinstance(problem, Bilevel | Minimax) and problem.project_y.arity > 2 and not problem.local:
        raise TypeError("A set of y that differs between clients cannot be a set of the common y.")
    if name == "PDSGD" and isinstance(problem, Constrained):
        raise TypeError(
            "diagnose judges the penalty of constraints, which PDSGD does not have: it keeps to the "
            'constraints themselves. Look at result.history["loss"] and ["violation"].'
        )
    if data.source is not None:
        raise ValueError(
            "diagnose goes through all samples at once, and this data comes from a source. Where it fits "
            "into memory, give it loaded: fs.diagnose(result, data=data.load())."
        )
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance must be in (0, 1), but is {tolerance!r}.")


def _measured(
    problem: TwoLevel | OneLevel,
    weights: Weights,
    placed: Placed,
    tolerance: float,
    x: PyTree,
    y: PyTree,
) -> Diagnosis:
    """What is measured at a point, by the problem's class."""
    if isinstance(problem, Selection):
        return _selection(problem, weights, placed, x, tolerance)
    if isinstance(problem, MultiSequence):
        return _sequences(problem, weights, placed, x, y)
    if isinstance(problem, WorstClient):
        return _saddle(problem, placed, x, agnostic(problem, placed, x, y))
    if not isinstance(problem, TwoLevel):
        return _single(problem, weights, placed, x)
    level = level_of(problem, weights)
    found = _diagnose(problem, level, placed, x, y, tolerance)
    if not isinstance(problem, Minimax):
        doubt = _doubt(level, placed, x, y) if found.solved else None
        return replace(found, solved=found.solved and doubt is None, trouble=found.trouble or doubt)
    if _unique(problem, found):
        return found
    pair = _saddle(problem, placed, x, game(problem, weights, placed, x, y))
    return replace(pair, solved=False, trouble="as y(x) is not unique, or was not found")


def _doubt(level: Pooled, data: Placed, x: PyTree, y: PyTree) -> str | None:
    """Why the stationary y that was found is not the lower level's solution, or not the only one."""
    try:
        _, remarks = checked_lower(level, data, x, level.spread(y, data))
    except NotCertifiable as reason:
        return str(reason)
    return remarks[0] if remarks else None


def _unique(problem: Minimax, found: Diagnosis) -> bool:
    """Whether there is a gradient through y(x), be it inexact.

    Where y is free, ∇_y f is zero at y(x), and so is the right-hand side of the linear system: its relative
    residual says nothing.
    """
    if found.solved:
        return True
    assert found.solved_residual is not None
    assert found.lower_residual is not None
    assert found.system_residual is not None
    near = found.solved_residual <= 1e-4 * (1 + found.lower_residual)
    through = problem.project_y.trivial or found.system_residual < 0.01
    return bool(np.isfinite(found.hypergradient_norm) and near and through)


def _compared(found: Diagnosis, start: float, zero: float) -> Diagnosis:
    """With the stationarity relative to that of the start."""
    if np.isnan(start):
        return replace(found, trouble=found.trouble or "of x0 it cannot be computed")
    if start <= zero:
        return replace(found, reduction=np.nan if found.stationarity <= zero else np.inf)
    return replace(found, reduction=found.stationarity / start)


def _check_responses(problem: MPEC, data: Placed, x: PyTree, y: PyTree) -> None:
    """Raise where y is not a response of every client, stacked."""
    shapes = [leaf.shape for leaf in jax.tree.leaves(y)]
    if any(shape[:1] != (data.clients,) for shape in shapes):
        raise ValueError(
            f"The y of a result for MPEC has a response of each of the {data.clients} clients along its "
            f"first axis, but is of shape {shapes[0] if len(shapes) == 1 else shapes}."
        )
    one, sample = (jax.tree.map(lambda leaf: leaf[0], each) for each in (y, data.train))
    problem.check(x, one, sample, sample)


def _double(point: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), float), point)


def _diagnose(
    problem: TwoLevel, level: Pooled, data: Placed, x: PyTree, y: PyTree, tolerance: float
) -> Diagnosis:
    start = level.spread(y, data)
    solved = solve_lower(level, data, x, start, tolerance)
    gradient, relative = hypergradient(level, data, x, solved, tolerance)
    first, last, found = solved.first, solved.last, level.gather(solved.y, data)
    if not level.free:  # a result has its clients' mean responses, and so is their residual
        gap = natural_residual(level, data, x, start, solved.step)
        first = tree.norm(level.gather(gap, data)) / solved.step
    return Diagnosis(
        hypergradient=gradient,
        hypergradient_norm=float(tree.norm(gradient)),
        objective=float(level.upper(x, solved.y, data)),
        y=found,
        lower_residual=float(first),
        lower_distance=float(tree.norm(tree.sub(y, found))),
        solved_residual=float(last),
        system_residual=float(relative),
        solved=bool(last <= tolerance * (1 + solved.first) and relative <= 10 * tolerance),
        **_judged(problem, data, x, gradient),
    )


def _judged(problem: Problem, data: Placed, x: PyTree, gradient: PyTree) -> dict[str, Any]:
    """The stationarity ‖x − P_X(x − ∇F)‖, or why there is none."""
    if not np.isfinite(float(tree.norm(gradient))):
        words = "stationarity cannot be computed: ∇F is not finite"
        if isinstance(problem, TwoLevel):
            words += " (the lower level is singular at y(x), or was not solved)"
        return {"stationarity": np.nan, "trouble": words}
    moved = projection(problem, data)(tree.sub(x, gradient))
    if moved is None:
        words = "stationarity is not judged: the clients' sets have no common point that was found"
        return {"stationarity": np.nan, "trouble": words}
    return {"stationarity": float(tree.norm(tree.sub(x, moved)))}


def _objective(problem: Minimization | Composition, weights: Weights, data: Placed, x: PyTree) -> Any:
    measured = problem.measure(partial(mean_over, data, weights), x, None)
    return measured[problem.objective or "objective"]


def _single(problem: Minimization | Composition, weights: Weights, data: Placed, x: PyTree) -> Diagnosis:
    """Without a lower level: the gradient of the problem's own objective."""
    objective = partial(_objective, problem, weights)
    value, gradient = jax.jit(jax.value_and_grad(objective, argnums=1))(data, x)
    judged = _judged(problem, data, x, gradient)
    return Diagnosis(gradient, float(tree.norm(gradient)), objective=float(value), **judged)


def _newton_distance(
    problem: Minimization | Composition, weights: Weights, data: Placed, x: PyTree, gradient: PyTree
) -> float | None:
    """‖[∇²F]⁻¹ ∇F‖ where x is free, not too long, and conjugate gradients find it."""
    size = float(tree.norm(gradient))
    if not problem.set_of_x.trivial or tree.dimension(x) > MOST_ENTRIES or not np.isfinite(size):
        return None
    if size == 0:
        return 0.0

    def slope(x: PyTree, data: Placed) -> PyTree:
        return jax.grad(partial(_objective, problem, weights), argnums=1)(data, x)

    step, relative = jax.jit(lambda data, x, g: _newton_step(slope, data, x, g))(data, x, gradient)
    found = float(tree.norm(step))
    return found if float(relative) <= 10 * CURVED and float(tree.dot(step, gradient)) > 0 else None


def _newton_step(slope: Function, data: Placed, x: PyTree, b: PyTree) -> tuple[PyTree, Array]:
    """``[∇²F]⁻¹ b`` and the relative residual."""

    def product(v: PyTree) -> PyTree:
        return jax.jvp(lambda x: slope(x, data), (x,), (v,))[1]

    v, _ = jax.scipy.sparse.linalg.cg(product, b, tol=CURVED, maxiter=1_000)
    return v, tree.norm(tree.sub(product(v), b)) / tree.norm(b)


def _saddle(problem: Minimization | Minimax, data: Placed, x: PyTree, found: Saddle) -> Diagnosis:
    judged = _judged(problem, data, x, found.slope)
    second = float(tree.norm(found.ascent))
    return Diagnosis(
        hypergradient=found.slope,
        hypergradient_norm=float(tree.norm(found.slope)),
        stationarity=float(np.hypot(judged.pop("stationarity"), second)),
        objective=found.value,
        lower_residual=second,
        saddle=True,
        **judged,
    )


def _selection(problem: Selection, weights: Weights, data: Placed, x: PyTree, tolerance: float) -> Diagnosis:
    """Of f over the optima of h."""
    found = judge_selection(problem, weights, data, x, tolerance)
    return Diagnosis(
        hypergradient=found.slope,
        hypergradient_norm=float(tree.norm(found.slope)),
        stationarity=float(tree.norm(tree.sub(x, found.solution))),
        objective=found.f,
        lower_residual=found.residual,
        lower_distance=float(tree.norm(tree.sub(x, found.nearest))),
        solved_residual=found.moved,
        solved=found.moved <= max(tolerance, ENOUGH),
    )


def _sequences(problem: MultiSequence, weights: Weights, data: Placed, x: PyTree, Z: PyTree) -> Diagnosis:
    """The maps' means at x and Z themselves."""

    @jax.jit
    def maps(x: PyTree, Z: PyTree, data: Placed) -> tuple[PyTree, list[PyTree]]:
        mean = partial(federated_mean, data=data, weights=weights)
        S = [mean(s)(before, z) for s, before, z in zip(problem.S, (x, *Z), Z, strict=False)]
        return mean(problem.P)(x, Z), S

    P, S = maps(x, Z, data)
    norm = float(tree.norm(P))
    return Diagnosis(
        hypergradient=P,
        hypergradient_norm=norm,
        stationarity=norm,
        objective=None,
        y=Z,
        lower_residual=float(tree.norm(S)),
        sequence_residuals=tuple(float(tree.norm(s)) for s in S),
    )
