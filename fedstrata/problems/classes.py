"""The problem classes. Functions take ``(x, …, sample)``; sets are projections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedstrata.problems.base import Function, Mean, Problem, Projection, PyTree, check_scalar, function


@dataclass(frozen=True)
class Minimization(Problem):
    """``min_x 1/m Σ_i E f_i(x, ξ)`` over ``∩ X_i``.

    Args:
        loss: ``loss(x, sample)``, one real number.
        project: ``project(x)``, or ``project(x, client)`` for a client's own set X_i.

    >>> import fedstrata as fs
    >>> problem = fs.Minimization(lambda x, s: (s["a"] @ x - s["b"]) ** 2, project=fs.sets.Ball(1.0))
    """

    loss: Function = function()
    project: Any = None

    def measure(self, mean: Mean, x: PyTree, y: PyTree) -> dict[str, Any]:
        return {"loss": mean(self.loss, x)}

    def check(self, x: PyTree, y: PyTree, sample: PyTree, valid_sample: PyTree) -> None:
        check_scalar("loss(x, sample)", self.loss, x, sample)


@dataclass(frozen=True)
class Bilevel(Problem):
    """``min_x 1/m Σ E f_i(x, y(x), ξ)`` with ``y(x) = argmin_{y ∈ Y(x)} 1/m Σ E h_i(x, y, ζ)``.

    Args:
        upper: ``upper(x, y, sample)``, on validation samples where the data has them.
        lower: ``lower(x, y, sample)``, on training samples.
        project_x: the set of x, ``project_x(x)`` or ``project_x(x, client)``.
        project_y: the set of y, ``project_y(y)``, ``project_y(y, x)`` or ``project_y(y, x, client)``.
    """

    upper: Function = function()
    lower: Function = function()
    project_x: Any = None
    project_y: Any = None

    def measure(self, mean: Mean, x: PyTree, y: PyTree) -> dict[str, Any]:
        return {"upper": mean(self.upper, x, y, part="valid"), "lower": mean(self.lower, x, y)}

    def check(self, x: PyTree, y: PyTree, sample: PyTree, valid_sample: PyTree) -> None:
        require_y(y, "Bilevel")
        check_scalar("upper(x, y, sample)", self.upper, x, y, valid_sample)
        check_scalar("lower(x, y, sample)", self.lower, x, y, sample)


def require_y(y: PyTree, name: str) -> None:
    """Problems with a second variable need its starting point."""
    if y is None:
        raise ValueError(f"{name} has two variables: give the start of the second one, solve(…, x0, y0=…).")


__all__ = ["Bilevel", "Minimization", "Projection"]
