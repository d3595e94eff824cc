"""ZO-HFL, on regression with a server's own data and a model for every client."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import fedstrata as fs

from . import Case, samples


def server(x, sample):
    return 0.5 * (sample["a"] @ x["w"] + x["c"] - sample["b"]) ** 2


def coupling(x, y, client):
    return client.fraction * (jnp.abs(x["w"] - y["w"]).sum() + (x["c"] - y["c"]) ** 2)


def personal(x, y, sample):
    return server(y, sample) + 0.5 * ((x["w"] - y["w"]) ** 2).sum() + 0.5 * (x["c"] - y["c"]) ** 2


def near(y, x, client):
    """Each client has its own bound on how far it may be from x."""
    return {"w": jnp.clip(y["w"], x["w"] - 0.1 * client.index, x["w"] + 0.3), "c": y["c"]}


problem = fs.Personalized(server, coupling, personal)
with_sets = fs.Personalized(server, coupling, personal, project_y=near)
data = fs.FederatedData.from_clients(samples(6), server=samples(7)[0])
x0 = {"w": np.full(3, 0.3), "c": np.array(-0.2)}
y0 = {"w": np.full(3, 0.1), "c": np.array(0.2)}


def joint(x, y, sample):
    """A head w on a scaled and shifted representation x, both with a little curvature."""
    fit = 0.5 * (sample["a"] @ (x["w"] * y["w"]) + x["c"] + y["c"] - sample["b"]) ** 2
    return fit + 0.1 * ((x["w"] ** 2).sum() + (y["w"] ** 2).sum() + x["c"] ** 2 + y["c"] ** 2)


heads = fs.Bilevel(joint, joint, same_samples=True, local=True)


def case(name, method, problem=problem):
    return Case(name, method, problem, data, x0, y0, warned="ZOHFL: the clients' models have not converged")


CASES = [
    case("fedrep", fs.FedRep(0.1, 0.2, H=np.array([0, 1, 2, 3, 1]), tau=2, batch_size=2), heads),
    case("zohfl", fs.ZOHFL(0.05, 0.2, H=2, gamma_client=0.2, batch_size=2, server_batch_size=2)),
    case("zohfl-bilevel", fs.ZOHFL(0.05, 0.2, H=2, gamma_client=0.2, batch_size=2), heads),
    case(
        "zohfl-scalars",
        fs.ZOHFL(
            lambda r: 0.05 / (r + 1),
            0.2,
            H=np.array([0, 1, 2, 3, 1]),
            gamma_client=0.2,
            Gamma=2.0,
            messages="scalars",
            directions=2,
            orthogonal=True,
        ),
        problem=with_sets,
    ),
]
