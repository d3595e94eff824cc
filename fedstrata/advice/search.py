"""The certificate's minimisers, for a function of a flat NumPy vector with its gradient.

    bfgs       without a set: dense BFGS with a weak Wolfe search, which handles kinks (Lewis & Overton 2013)
    lbfgs      without a set, if x is long: SciPy's
    measured   bfgs whose first matrix comes from differences of gradients, independent of the units of x
    projected  with a set: spectral projected gradients (Birgin et al. 2000)
    penalised  if these do not converge, at kinks: bfgs on F(x) + ρ ‖x − P(x)‖, ρ above the slopes of F

They need only values, gradients and projections, so that one objective serves every problem class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy import optimize

Objective = Callable[[np.ndarray], tuple[float, np.ndarray]]
LONG = 400  # entries from which a dense matrix is too large
SEARCHES = 40  # evaluations of one line search
SHORT = 60  # entries to which curvature is measured by differences
WIDTH = 1e-4  # of these differences, relative to an entry of x
ALIKE = 1e-2  # the asymmetry of such a matrix above which F has kinks
MEMORY = 10  # recent values, whose maximum a projected step must not exceed


class Found(NamedTuple):
    """The end of a search.

    Attributes:
        x: the point.
        value: F there.
        left: an estimate of the remaining decrease of F, ½ gᵀH⁻¹g by the search's model.
        converged: whether the search converged.
        evaluations: the evaluations of F and its gradient.
    """

    x: np.ndarray
    value: float
    left: float
    converged: bool
    evaluations: int


@np.errstate(over="ignore", invalid="ignore")  # if F is not bounded below
def minimise(
    f: Objective,
    x: np.ndarray,
    *,
    length: float,
    enough: float,
    onto: Callable[[np.ndarray], np.ndarray] | None = None,
    most: int = 1000,
    measured: bool = False,
) -> Found:
    """Minimise F from x.

    Args:
        f: F and its gradient; values that are not finite count as too large.
        x: the start.
        length: the length of the first step.
        enough: the decrease at which the search stops.
        onto: the projection onto the set of x; None without a set.
        most: the largest number of evaluations.
        measured: whether to start with a matrix from differences, if x is short and F smooth.
    """
    if onto is not None:
        found = _projected(f, onto, x, length, enough, most // 2)
        return found if found.converged else _penalised(f, onto, found, length, enough, most // 2)
    if x.size > LONG:
        return _lbfgs(f, x, length, enough, most)
    H = _inverse_curvature(f, x) if measured and x.size <= SHORT else None
    return _bfgs(f, x, length, enough, most, H)


def _inverse_curvature(f: Objective, x: np.ndarray) -> np.ndarray | None:
    """The inverse Hessian with positive eigenvalues; None if F has kinks or no curvature."""
    width = WIDTH * np.where(np.abs(x) > 1e-8 * np.linalg.norm(x), np.abs(x), np.linalg.norm(x) or 1.0)
    slopes = [(f(x + h)[1] - f(x - h)[1]) / (2 * h[i]) for i, h in enumerate(np.diag(width))]
    H, unit = np.array(slopes), np.sqrt(np.abs(np.diag(slopes)))
    if not np.isfinite(H).all() or not unit.all():
        return None
    H = H / np.outer(unit, unit)
    if np.linalg.norm(H - H.T) > ALIKE * np.linalg.norm(H):
        return None
    values, vectors = np.linalg.eigh((H + H.T) / 2)
    values = np.maximum(np.abs(values), 1e-12 * np.abs(values).max())
    return (vectors / values) @ vectors.T / np.outer(unit, unit)


def _bfgs(
    f: Objective, x: np.ndarray, length: float, enough: float, most: int, known: np.ndarray | None = None
) -> Found:
    value, g = f(x)
    count, H, first = 1, known, known is None
    size = np.linalg.norm(g)
    if not np.isfinite(value) or size == 0:
        return Found(x, value, 0.0, bool(np.isfinite(value)), count)
    if H is None:
        H = np.eye(x.size) * (length / size)
    while count < most:
        d = -H @ g
        left = -float(g @ d) / 2
        if left <= enough and not first:
            return Found(x, value, max(left, 0.0), True, count)
        step, new, new_value, new_g, used = _weak_wolfe(f, x, value, g, d)
        count += used
        if step == 0.0:  # rounding, or a kink at which this direction does not descend
            return Found(x, value, max(left, 0.0), left <= 100 * enough, count)
        s, y = new - x, new_g - g
        x, value, g = new, new_value, new_g
        if (curved := float(s @ y)) > 0:
            if first:
                H = np.eye(x.size) * curved / float(y @ y)
            H = _updated(H, s, y, curved)
            first = False
    return Found(x, value, float(g @ H @ g) / 2, False, count)


def _updated(H: np.ndarray, s: np.ndarray, y: np.ndarray, curved: float) -> np.ndarray:
    """The BFGS update of the inverse Hessian."""
    Hy = H @ y
    return H + np.outer(s, s) * (1 + y @ Hy / curved) / curved - (np.outer(Hy, s) + np.outer(s, Hy)) / curved


def _weak_wolfe(
    f: Objective, x: np.ndarray, value: float, g: np.ndarray, d: np.ndarray
) -> tuple[float, np.ndarray, float, np.ndarray, int]:
    """A step that satisfies the weak Wolfe conditions, by bisection; 0 if none is found."""
    slope, low, high, step = float(g @ d), 0.0, np.inf, 1.0
    best = 0.0, x, value, g
    for used in range(1, SEARCHES + 1):
        new = x + step * d
        new_value, new_g = f(new)
        if not new_value < value + 1e-4 * step * slope:
            high = step
        else:
            best = step, new, new_value, new_g
            if float(new_g @ d) >= 0.9 * slope:
                return *best, used
            low = step
        step = 2 * low if np.isinf(high) else (low + high) / 2
    return *best, SEARCHES


def _lbfgs(f: Objective, x: np.ndarray, length: float, enough: float, most: int) -> Found:
    size = float(np.linalg.norm(f(x)[1])) or 1.0
    unit = length * size or 1.0  # the unit of F: SciPy's first step has length 1 in units of ‖g‖

    def scaled_f(u: np.ndarray) -> tuple[float, np.ndarray]:
        value, g = f(x + length * u)
        return value / unit, g * (length / unit)

    scaled = optimize.minimize(
        scaled_f,
        np.zeros_like(x),
        jac=True,
        method="L-BFGS-B",
        options={"maxfun": most, "maxiter": most, "ftol": 0.0, "gtol": 0.0, "maxls": SEARCHES},
        callback=_until(enough / unit),
    )
    g = scaled.jac
    left = float(g @ (scaled.hess_inv @ g)) / 2 * unit
    return Found(x + length * scaled.x, float(scaled.fun) * unit, left, left <= 100 * enough, scaled.nfev)


def _until(enough: float) -> Callable[[optimize.OptimizeResult], None]:
    """Stop if ten steps together gained less than ``enough``."""
    values: list[float] = []

    def look(intermediate_result: optimize.OptimizeResult) -> None:
        values.append(float(intermediate_result.fun))
        if len(values) > MEMORY and values[-MEMORY - 1] - values[-1] <= enough:
            raise StopIteration

    return look


def _penalised(
    f: Objective,
    onto: Callable[[np.ndarray], np.ndarray],
    before: Found,
    length: float,
    enough: float,
    most: int,
) -> Found:
    rho = 10 * float(np.linalg.norm(f(before.x)[1]))

    def penalised(x: np.ndarray) -> tuple[float, np.ndarray]:
        value, g = f(x)
        out = x - onto(x)
        distance = float(np.linalg.norm(out))
        return value + rho * distance, g + out * (rho / distance if distance > 0 else 0.0)

    found = _bfgs(penalised, before.x, length, enough, most)
    x = onto(found.x)
    value = f(x)[0]
    if not value <= before.value + enough:
        return before
    left = found.left + max(value - found.value, 0.0)
    return Found(x, value, left, found.converged and left <= 100 * enough, before.evaluations)


def _projected(
    f: Objective,
    onto: Callable[[np.ndarray], np.ndarray],
    x: np.ndarray,
    length: float,
    enough: float,
    most: int,
) -> Found:
    x = onto(x)
    value, g = f(x)
    count, values, best = 1, [value], (value, x)
    step = length / (float(np.linalg.norm(g)) or 1.0)
    left, quiet = np.inf, 0
    while count < most:
        d = onto(x - step * g) - x
        slope = float(g @ d)
        left = -slope / 2 if slope < 0 else 0.0
        quiet = quiet + 1 if left <= enough else 0
        if quiet >= 3 or not np.any(d):
            return Found(best[1], best[0], left, True, count)
        t, ceiling = 1.0, max(values[-MEMORY:])
        for _ in range(SEARCHES):
            new_value, new_g = f(x + t * d)
            count += 1
            if new_value <= ceiling + 1e-4 * t * slope:
                break
            t /= 2
        else:
            return Found(best[1], best[0], left, left <= 100 * enough, count)
        s, y = t * d, new_g - g
        x, value, g = x + s, new_value, new_g
        values.append(value)
        best = min(best, (value, x), key=lambda pair: pair[0])
        curved = float(s @ y)
        step = float(s @ s) / curved if curved > 0 else 10 * step
    return Found(best[1], best[0], left, False, count)
