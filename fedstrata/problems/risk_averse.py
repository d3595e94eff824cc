"""Risk-averse optimisation, a composition of three levels.

    min_x  E U(x, ξ) + λ √(E max(0, U(x, ξ) − E U)² + δ)

    f⁰(x) = (x, E U(x, ξ)),   f¹(x, y) = (y, E max(0, U(x, ξ) − y)²),   f²(y, s) = y + λ √(s + δ)

(FedMSA's text leaves out the square of the max, without which f² would take the root of a mean.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from fedstrata.core.problem import Function, PyTree
from fedstrata.problems.classes import Composition


def risk_averse(U: Function, lam: float = 1.0, delta: float = 1e-3) -> Composition:
    """The mean of a loss plus λ times its upper semideviation.

    Args:
        U: ``U(x, sample)``, the loss.
        lam: λ ≥ 0, the aversion; 1 keeps the objective convex and monotone in U where U is convex.
        delta: δ > 0, which keeps the root differentiable.

    >>> import fedstrata as fs
    >>> problem = fs.risk_averse(lambda x, s: (s["a"] @ x - s["b"]) ** 2, lam=0.5)
    >>> len(problem.levels)
    3
    """
    if lam < 0 or delta <= 0:
        raise ValueError(f"risk_averse needs lam ≥ 0 and delta > 0, but they are {lam!r} and {delta!r}.")
    return Composition((_Mean(U), _Deviation(U), _Risk(lam, delta)))


@dataclass(frozen=True)
class _Mean:
    U: Function

    def __call__(self, x: PyTree, sample: PyTree) -> dict[str, Any]:
        return {"x": x, "mean": self.U(x, sample)}


@dataclass(frozen=True)
class _Deviation:
    U: Function

    def __call__(self, z: dict[str, Any], sample: PyTree) -> dict[str, Any]:
        above = jnp.maximum(0, self.U(z["x"], sample) - z["mean"])
        return {"mean": z["mean"], "square": above**2}


@dataclass(frozen=True)
class _Risk:
    lam: float
    delta: float

    def __call__(self, z: dict[str, Any]) -> Any:
        # a followed mean of squares may fall a little below zero
        return z["mean"] + self.lam * jnp.sqrt(jnp.maximum(z["square"], 0) + self.delta)


__all__ = ["risk_averse"]
