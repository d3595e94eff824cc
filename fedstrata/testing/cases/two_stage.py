"""FedRZO for two-stage problems, on a game of a vector and a number whose sets move with x and the sample."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import fedstrata as fs

from . import Case, samples


def leader(x, y, sample):
    return jnp.abs(sample["a"] @ y["p"] - sample["b"]) + 0.5 * (x["u"] ** 2).sum() + x["s"] * y["q"]


def follower(x, y, sample):
    """Not a gradient: the coupling of p and q has the sign of a game's."""
    p = 2 * y["p"] + y["q"] - sample["a"] - x["u"].sum()
    return {"p": p, "q": y["q"] - y["p"].sum() - x["s"]}


def inside(y, x, sample):
    return {"p": jnp.clip(y["p"], -0.5, 0.5 + 0.1 * x["s"]), "q": jnp.maximum(y["q"], 0.1 * sample["b"])}


def own_box(x, client):
    return {"u": jnp.clip(x["u"], -0.1, 0.1 + 0.01 * client.index), "s": x["s"]}


problem = fs.MPEC(leader, follower, project_y=inside)
with_sets = fs.MPEC(leader, follower, project_x=own_box, project_y=inside)
data = fs.FederatedData.from_clients(samples(5))
x0 = {"u": np.array([0.2, -0.1]), "s": np.array(0.1)}
y0 = {"p": np.full(3, 0.2), "q": np.array(-0.1)}


def case(name, method, problem=problem):
    return Case(name, method, problem, data, x0, y0, rounds=2)


CASES = [
    case("two-stage", fs.FedRZOTwoStage(0.01, 0.2, H=2, alpha=0.2, tau=20.0, batch_size=2)),
    case(
        "two-stage-scalars",
        fs.FedRZOTwoStage(
            0.01,
            0.2,
            H=2,
            lower="extragradient",
            tau=20.0,
            warm_start=True,
            batch_size=2,
            messages="scalars",
            two_sided=True,
            directions=2,
            orthogonal=True,
        ),
    ),
    case(
        "two-stage-sets",
        fs.FedRZOTwoStage(
            0.01,
            0.2,
            H=np.array([0, 1, 2, 1, 1]),
            lower="projection",
            tol=1e-2,
            warm_start=True,
            batch_size=None,
        ),
        problem=with_sets,
    ),
]
