"""A warning of zeroth-order methods whose differences are below the floating-point spacing near x0."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from fedstrata.core import tree
from fedstrata.core.method import Moment
from fedstrata.core.types import PyTree


def lost_in_rounding(method: Any, width: str, moment: Moment) -> list[str]:
    """A warning if the entries of a direction, about η/√n, are rounded away when added to x0.

    Args:
        method: with the width η of its differences, a number or a schedule (evaluated in round 0).
        width: the name of that field.
        moment: the warning is given only before the run.
    """
    x0 = moment.x0
    if moment.state is not None:
        return []
    eta, n = float(getattr(method.at(0), width)), tree.dimension(x0)
    gaps = [
        (float(np.spacing(np.abs(leaf).max(initial=0))), leaf.dtype) for leaf in map(np.asarray, _real(x0))
    ]
    gap, dtype = max(gaps, key=lambda pair: pair[0], default=(0.0, None))
    if eta / np.sqrt(n) >= gap:
        return []
    return [
        f"{type(method).__name__}: {width}={eta:g} is lost in rounding: the entries of its directions, about "
        f"{eta / np.sqrt(n):.1g}, are below {gap:.1g}, the spacing of {dtype} numbers near x0. Take a larger "
        f"{width}, scale or centre the data, or use float64: jax.config.update('jax_enable_x64', True)."
    ]


def _real(x0: PyTree) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(x0) if np.issubdtype(leaf.dtype, np.floating)]
