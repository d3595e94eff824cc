"""Proofs that the intersection of sets is empty, from conditions that each set implies."""

from __future__ import annotations

import numpy as np

from fedstrata.core.types import PyTree
from fedstrata.problems._parameters import vector


class Implied:
    """Bounds, linear (in)equalities and balls that a common point of some sets in R^n must satisfy.

    All conditions are relaxed by a relative 1e-6, so that rounding does not make sets that touch infeasible.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.lower, self.upper = np.full(n, -np.inf), np.full(n, np.inf)
        self.rows, self.bounds = np.zeros((0, n)), np.zeros(0)
        self.balls: list[tuple[np.ndarray, float]] = []

    def between(self, lower: PyTree, upper: PyTree) -> None:
        """``lower ≤ x ≤ upper``."""
        low, high = vector(lower, self.n), vector(upper, self.n)
        self.lower = np.maximum(self.lower, low - _loose(low))
        self.upper = np.minimum(self.upper, high + _loose(high))

    def at_most(self, rows: PyTree, bounds: PyTree) -> None:
        """``rows · x ≤ bounds``, with nonzero rows."""
        rows = np.asarray(rows, np.float64).reshape(-1, self.n)
        length = np.linalg.norm(rows, axis=1)
        bounds = vector(bounds, len(rows)) / length
        self.rows = np.vstack([self.rows, rows / length[:, None]])
        self.bounds = np.append(self.bounds, bounds + _loose(bounds))

    def in_ball(self, center: PyTree, radius: float) -> None:
        """``‖x − center‖ ≤ radius``."""
        center = vector(center, self.n)
        self.between(center - radius, center + radius)
        self.balls.append((center, radius + 1e-6 * (1 + radius + float(np.linalg.norm(center)))))

    def contradiction(self) -> str | None:
        """The reason why no point satisfies all conditions; None if none was found."""
        if (self.lower > self.upper).any():
            return "their bounds exclude each other"
        for i, (center, radius) in enumerate(self.balls):
            if np.linalg.norm(center - np.clip(center, self.lower, self.upper)) > radius:
                return f"the ball of radius {radius:.6g} is too far from the bounds"
            if (self.rows @ center - self.bounds > radius).any():
                return f"the ball of radius {radius:.6g} is too far from a half-space or an affine set"
            for other, reach in self.balls[i + 1 :]:
                if np.linalg.norm(center - other) > radius + reach:
                    return f"the balls of radius {radius:.6g} and {reach:.6g} are too far apart"
        if 0 < self.rows.size <= 1_000_000 and self._linear_program_fails():
            return "no point satisfies all the linear constraints"
        return None

    def _linear_program_fails(self) -> bool:
        from scipy.optimize import linprog  # slow to import, rarely needed

        bounds = np.stack([self.lower, self.upper], axis=1)
        return bool(linprog(np.zeros(self.n), self.rows, self.bounds, bounds=bounds).status == 2)


def _loose(bound: np.ndarray) -> np.ndarray:
    return 1e-6 * (1 + np.where(np.isfinite(bound), np.abs(bound), 0))
