"""Where a zeroth-order method's differences of values are rounding.

A value f has neighbours ε|f| apart. Over a width η a slope G changes f by Gη, of which an estimate in n
dimensions sees 1/√n: rounding moves x as far as the slope does where √n ε|f| > Gη. What G is, the run itself
tells: f changed by D while x went a way of ‖x − x0‖.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core import tree
from fedstrata.core.method import Method
from fedstrata.core.problem import Problem
from fedstrata.core.types import PyTree

FEW = 4  # evaluations


def by_values(method: Method) -> bool:
    """Whether a method takes differences of values."""
    return method.needs.startswith("function values")


def lost_differences(
    problem: Problem, method: Method, x0: PyTree, x: PyTree, history: Mapping[str, Any]
) -> list[str]:
    """A warning where that is so, with the width that it takes."""
    described = method.describe()
    symbol = "eta" if "gamma" in described else "mu"  # FedZO's η is its step
    width, name = described.get(symbol), problem.objective or next(iter(problem.settling), "")
    if not by_values(method) or not isinstance(width, float) or name not in history:
        return []
    values = np.asarray(history[name], float)
    gap = abs(values[-1]) * max(float(jnp.finfo(leaf.dtype).eps) for leaf in jax.tree.leaves(x0))
    change, way = np.ptp(values), float(tree.norm(tree.sub(x, x0)))
    told = change > 0 and change * width >= np.sqrt(tree.dimension(x0)) * gap * way
    # across a width above √gap a loss that curves by one changes by more than rounding, wherever it is
    if len(values) < FEW or told or not gap >= width**2:
        return []
    return [
        f"{type(method).__name__}: differences of {name} across {symbol}={width:g} are lost in rounding: "
        f"numbers of its size, {values[-1]:.6g}, are about {gap:.1g} apart, and x is wherever that took it. "
        f"Subtract a constant from the loss, scale it, take a larger {symbol}, about {np.sqrt(2 * gap):.1g} "
        "where the loss curves by one, or compute in float64, jax.config.update('jax_enable_x64', True)."
    ]
