"""Methods that select among optima, on regression with fewer equations than unknowns would need."""

from __future__ import annotations

import numpy as np

import fedstrata as fs

from . import Case, samples


def residual(x, sample):
    """Half the squared residual; it does not determine the offsets one by one."""
    return 0.5 * (sample["a"] @ x["w"] + x["c"].sum() - sample["b"]) ** 2


def spread(x, sample):
    """Strongly convex, and different for every client."""
    return 0.5 * ((x["w"] - sample["a"]) ** 2).sum() + 0.5 * (x["c"] @ x["c"])


def size(x):
    """Known to everyone."""
    return 0.5 * (x["w"] @ x["w"] + x["c"] @ x["c"])


data = fs.FederatedData.from_clients(samples(0))
x0 = {"w": np.full(3, 0.3), "c": np.array([-0.2, 0.5])}


def case(name, method, primary, secondary, **more):
    return Case(name, method, fs.Selection(primary, secondary, same_samples=True), data, x0, **more)


CASES = [
    case("strfedavg", fs.StRFedAvg(K=2, eta=0.75, R=3.0, power_steps=2, batch_size=2), residual, spread),
    case("ipirfedavg", fs.IPIRFedAvg(0.1, 0.5, K=2, mu=0.1, L_h=2.0), residual, fs.prox.LogSum()),
    case(
        "ipirfedavg-warm",
        fs.IPIRFedAvg(0.1, 0.5, inner="warm", inner_rounds=2, L_h=2.0, batch_size=2),
        residual,
        spread,
    ),
    case(
        "sequential-regularization",
        fs.SequentialRegularization((0.5, 0.1), K=2, R=3.0, L_h=2.0),
        residual,
        (size, fs.prox.L1(0.1)),
    ),
    case("bigsam", fs.BiGSAM(mu_f=0.5, L_h=2.0, L_f=1.0), residual, size),
    case(
        "rapm", fs.RAPM(R=3.0, L_h=2.0), (residual, fs.prox.ElasticNet(0.1, 0.1)), spread, participation=None
    ),
]
