"""The bilevel methods that several experiments compare, and their plots.

α and β are the lengths of one local step in every method, of which all take K in a round: FedNest's and
SimFBO's own steps, of a whole round, are K times as long. Hypergradient descent makes T steps of y and 10 of
CG in a round; a reference makes those of y alone.
"""

from typing import Any

import numpy as np

import fedstrata as fs
from fedstrata.lab import PlotSpec, Setting


def method_of(s: Setting, parts: int = 1, **series: Any) -> fs.Method:
    """The method of a setting, or else its reference, which never moves x.

    Args:
        s: the setting; all clients make local steps, unless it says how many: ``local``.
        parts: of y, one for each client. A client's part has the share 1/parts in the mean, so the steps of
            the mean are that many times those of one client's problem, and its curvature ℓ is that part.
        series: how FedNest inverts.
    """
    if s.method not in ("FedMSA", "FedNest", "SimFBO", "hypergradient descent"):
        return fs.HypergradientDescent(1e-30, s.beta_reference * parts, T=s.T, N=1, inverse="none")
    beta = s.beta * parts
    if s.method == "FedMSA":
        local = s.local if "local" in s else s.clients
        return fs.FedMSA(s.alpha, beta, rho=s.get("rho", 0.5), K=s.K, clients=local)
    whole_x, whole_y = s.K * s.alpha, s.K * beta
    if s.method == "FedNest":
        return fs.FedNest(whole_x, whole_y, T=1, tau=s.K, ell=s.ell / parts, **series)
    if s.method == "SimFBO":
        return fs.SimFBO(whole_x, whole_y, whole_y, s.alpha, s.beta, s.beta, tau=s.K)
    return fs.HypergradientDescent(whole_x, beta, T=s.T, N=10)


def traffic(result: fs.Result) -> np.ndarray:
    """Bytes sent so far, up and down."""
    return result.history["bytes_up"] + result.history["bytes_down"]


def megabytes(result: fs.Result) -> dict[str, np.ndarray]:
    """Those as a series of the history."""
    return {"megabytes": traffic(result) / 1e6}


def along(axes: tuple[str, ...], y: str, what: str, **look: Any) -> tuple[PlotSpec, ...]:
    """A metric's plots along several axes, logarithmic but for rounds unless ``log_x`` says otherwise."""
    look = {"y_label": what[0].lower() + what[1:], **look}
    return tuple(
        PlotSpec(y, x=x, title=f"{what} by {x.removesuffix('s')}s", **{"log_x": x != "round", **look})
        for x in axes
    )
