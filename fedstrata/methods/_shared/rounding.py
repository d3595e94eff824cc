"""Where a zeroth-order method's differences are below what numbers near x0 can tell apart."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from fedstrata.core import tree
from fedstrata.core.method import Moment
from fedstrata.core.types import PyTree


def lost_in_rounding(method: Any, width: str, moment: Moment) -> list[str]:
    """A caution where a direction's entries, about η/√n, are rounded away when they are added to x0.

    Args:
        method: with the width η of its differences, a number or a schedule, which is looked at in round 0.
        width: the name of that field.
        moment: nothing is said once the run has begun.
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
        f"{type(method).__name__}: {width}={eta:g} is lost in rounding: entries of its directions, about "
        f"{eta / np.sqrt(n):.1g}, are below {gap:.1g}, the distance of neighbouring {dtype} numbers near x0. "
        f"Take a larger {width}, scale or centre the data, or compute in float64, "
        "jax.config.update('jax_enable_x64', True)."
    ]


def _real(x0: PyTree) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(x0) if np.issubdtype(leaf.dtype, np.floating)]
