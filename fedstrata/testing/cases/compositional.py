"""FedDRO and its baselines: each on another kind of composition, so that together they see them all."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import fedstrata as fs

from . import Case, samples


def loss(x, sample):
    """Half the squared residual, and a little curvature for the offset."""
    return 0.5 * (sample["a"] @ x["w"] + x["c"] - sample["b"]) ** 2 + 0.05 * x["c"] ** 2


def grouped(clients):
    """The samples with a group each, and a label: whether the target is positive."""
    return [
        {**c, "group": np.arange(len(c["b"]), dtype=np.int32) % 2, "y": (c["b"] > 0).astype(np.int32)}
        for c in clients
    ]


# f is a mean over clients too
federated = fs.Composition(
    [
        lambda x, s: {"r": s["a"] @ x["w"] - s["b"], "c": x["c"]},
        lambda z, s: jnp.sqrt(1 + (z["r"] - s["b"]) ** 2) + 0.5 * z["c"] ** 2,
    ],
    plain=loss,
)
local = fs.Composition(federated.levels, plain=loss, local=True)
fair = fs.fairness.equal_opportunity(lambda x, s: s["a"] @ x["w"] + x["c"], loss, groups=2)
data = fs.FederatedData.from_clients(grouped(samples(0)))
x0 = {"w": np.full(3, 0.3), "c": np.array(-0.2)}


def case(name, method, problem, **more):
    return Case(name, method, problem, data, x0, **more)


CASES = [
    case("feddro", fs.FedDRO(0.1, 0.5, I=3, batch_size=2), fs.dro.kl(loss, 0.5), participation=None),
    case("dsfeddro", fs.DSFedDRO(0.1, 0.5, 2, 1.1, 1.2, batch_size=2), fs.dro.kl(loss, 0.5)),
    case("compositional-fedavg", fs.CompositionalFedAvg(0.05, I=2, case=2, batch_size=2), federated),
    case("fcsgm", fs.FCSGM(0.05, 0.5, I=2, accelerated=True, batch_size=2, inner_batch_size=2), local),
    case("local-scgdm", fs.LocalSCGDM(0.05, 0.5, 0.5, I=2, batch_size=2), local),
    case("gcivr", fs.GCIVR(0.1, tau=2, batch_size=2), fs.dro.chi2(loss, 2.0), participation=None),
    case("fastdro", fs.FastDRO(0.1, batch_size=2), fs.dro.cvar(loss, 0.5)),
    case("pdsgd", fs.PDSGD(0.1, 0.2, 0.5, batch_size=2), fair),
    case("mbsgd", fs.MBSGD(0.1, batch_size=2), fs.dro.mean_semideviation(loss, 0.5)),
]
