"""FedAvg and its relatives, on regression with a vector and an offset."""

from __future__ import annotations

import numpy as np
import optax

import fedstrata as fs

from . import Case, samples


def loss(x, sample):
    """Half the squared residual, and a little curvature for the offset."""
    return 0.5 * (sample["a"] @ x["w"] + x["c"] - sample["b"]) ** 2 + 0.05 * x["c"] ** 2


problem = fs.Minimization(loss)
in_a_ball = fs.Minimization(
    loss, project=lambda x, client: fs.sets.Ball(0.5)({"w": x["w"] - 0.01 * client.index, "c": x["c"]})
)
data = fs.FederatedData.from_clients(samples(0))
x0 = {"w": np.full(3, 0.3), "c": np.array(-0.2)}


def case(name, method, problem=problem, **more):
    return Case(name, method, problem, data, x0, **more)


CASES = [
    case("fedavg", fs.FedAvg(gamma=0.1, H=3, batch_size=2)),
    case("fedavg-full", fs.FedAvg(gamma=lambda r: 0.1 / (r + 1), H=np.array([0, 1, 2, 3, 1]))),
    case(
        "fedopt",
        fs.FedOpt(optax.sgd(0.1, momentum=0.5), optax.adam(0.05, eps=1e-3), H=np.array([0, 1, 2, 3, 1])),
    ),
    case("fedprox", fs.FedProx(gamma=0.1, mu=0.5, H=2, batch_size=2)),
    case("scaffold", fs.SCAFFOLD(eta_l=0.1, eta_g=0.9, K=2, batch_size=2)),
    case("scaffnew", fs.Scaffnew(gamma=0.1, p=0.5, batch_size=2), participation=None),
    case("fedmspp", fs.FedMSPP(eta=0.5, gamma=0.1, H=3, batch_size=2)),
    case("qfedavg", fs.QFedAvg(gamma=0.1, q=2.0, H=2, batch_size=2)),
    case("drfa", fs.DRFA(gamma=0.1, eta_lam=0.1, tau=3, batch_size=2)),
    case("fedapd", fs.FedAPD(gamma=0.1, eta_lam=0.1, J=2, batch_size=2, rho=0.2), participation=None),
    case("fedgdro", fs.FedGDRO(gamma=0.1, level=0.5, eta=0.5, beta=0.5, I=2, batch_size=2)),
    case("fedgdro-cvar", fs.FedGDRO(gamma=0.1, level=0.4, risk="cvar", eta=0.1)),
    case("ditto", fs.Ditto(gamma=0.1, eta=0.1, lam=0.5, H=np.array([0, 1, 2, 3, 1]), s=2, batch_size=2)),
    case("pfedme", fs.PFedMe(eta=0.02, gamma=0.05, lam=2.0, beta=0.9, R=2, K=2, batch_size=2)),
    case("per-fedavg", fs.PerFedAvg(beta=0.1, alpha=0.2, H=2, order="second", batch_size=2)),
    case("apfl", fs.APFL(gamma=0.1, alpha=0.3, adaptive=True, H=2, batch_size=2)),
    case("fedzo", fs.FedZO(eta=0.01, mu=0.1, H=2, b=2, batch_size=2)),
    case("fedrzo", fs.FedRZO(gamma=0.01, eta=0.1, H=2, batch_size=2)),
    case(
        "fedrzo-scalars",
        fs.FedRZO(gamma=0.01, eta=0.1, H=2, batch_size=2, messages="scalars", two_sided=True),
    ),
    case(
        "fedrzo-shared",
        fs.FedRZO(gamma=0.01, eta=0.1, H=2, batch_size=2, messages="scalars", shared_directions=True),
    ),
    case("decomfl", fs.DeComFL(eta=0.01, mu=0.05, K=2, P=3, batch_size=2)),
    case("hiso", fs.HiSo(eta=0.01, mu=0.05, nu=0.9, K=2, P=2, two_sided=True, batch_size=2)),
    case("fedkseed", fs.FedKSeed(eta=0.01, eps=0.05, K=6, tau=np.array([0, 1, 2, 3, 1]), batch_size=2)),
    case("fedrzo-sets", fs.FedRZO(gamma=0.01, eta=0.1, H=2), problem=in_a_ball),
]
