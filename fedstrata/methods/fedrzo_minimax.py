"""FedRZO for minimax problems (Qiu, Shanbhag, Yousefian; Section 4): FedRZO_bl with h = −f.

    min_x max_{y ∈ Y(x)}  1/m Σ_i E f_i(x, y, ξ)   over  ∩ X_i

    1–8  of `fedstrata.methods.fedrzo_bilevel`, where y(x) = argmin over Y(x) of 1/m Σ_i E −f_i(x, ·, ξ)

Y(x) may depend on x; then the order of min and max matters, and primal-dual methods fail.

Reveals what `FedRZOBilevel` does. Needs function values, and gradients in y.
"""

from __future__ import annotations

from fedstrata.core.method import method
from fedstrata.methods.fedrzo_bilevel import FedRZOBilevel
from fedstrata.problems.classes import Minimax


@method
class FedRZOMinimax(FedRZOBilevel):
    """`FedRZOBilevel` on a minimax problem, with the same hyper-parameters."""

    solves = (Minimax,)
    needs = "function values, gradients in y"
