"""Methods of coupled sequences: bilevel, minimax, compositional problems with a vector and an offset."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import fedstrata as fs

from . import Case, samples


def upper(x, y, sample):
    """Half the squared residual of the lower model, and a little curvature in x."""
    return 0.5 * (sample["a"] @ y["w"] + y["c"] - sample["b"]) ** 2 + 0.05 * (x["s"] @ x["s"] + x["t"] ** 2)


def lower(x, y, sample):
    """Regression on shifted targets, with a quadratic penalty."""
    residual = sample["a"] @ y["w"] + y["c"] - sample["b"] + x["s"] @ sample["a"][:2]
    return 0.5 * residual**2 + 0.5 * (y["w"] @ y["w"] + (y["c"] - x["t"]) ** 2)


def payoff(x, y, sample):
    """Convex in x, strongly concave in y."""
    value = 0.5 * (sample["a"][:2] @ x["s"] + x["t"] - sample["b"]) ** 2 + sample["a"] @ y["w"] * x["t"]
    return value + y["c"] * x["s"][0] - 0.5 * (y["w"] @ y["w"] + y["c"] ** 2)


def inner(x, sample):
    """A vector level."""
    return {"u": jnp.tanh(sample["a"] * x["t"]), "v": sample["a"][:2] @ x["s"] - sample["b"]}


def middle(z, sample):
    """Another, down to two numbers."""
    return jnp.stack([z["u"] @ sample["a"] + z["v"], z["v"] ** 2])


def middle_of_u(u, sample):
    """A level on one number."""
    return jnp.stack([u * sample["b"], u**2])


def outer(z):
    """The outermost level, which everyone knows."""
    return jnp.sqrt(1 + z[0] ** 2) + 0.5 * z[1]


def plain(x, sample):
    """A term beside the composition."""
    return 0.05 * (x["s"] @ x["s"] + (x["t"] - sample["b"]) ** 2)


bilevel = fs.Bilevel(upper, lower, same_samples=True)
bounded = fs.Bilevel(
    upper, lower, project_y=lambda y: {"w": jnp.clip(y["w"], -0.1, 0.3), "c": y["c"]}, same_samples=True
)
local = fs.Bilevel(upper, lower, local=True, same_samples=True)
minimax = fs.Minimax(payoff, project_x=fs.sets.Ball(2.0), project_y=fs.sets.Ball(0.5))
free = fs.Minimax(payoff)
composition = fs.Composition([inner, middle, outer], plain=plain)
sequences = fs.MultiSequence(
    P=lambda x, Z, s: {"s": x["s"] + Z[0][:2] * s["b"], "t": x["t"] - Z[1]},
    S=(lambda x, z, s: 2 * z - s["a"] * x["t"], lambda before, z, s: z - before @ s["a"]),
)
data = fs.FederatedData.from_clients(samples(3), valid=samples(4, sizes=(3, 2, 5, 4, 2)))
x0 = {"s": np.array([0.4, -0.3]), "t": np.array(0.5)}
y0 = {"w": np.full(3, 0.2), "c": np.array(0.1)}
Z0 = (np.full(3, 0.2), np.array(0.3))
weights = {"w": np.full(3, 0.3), "c": np.array(-0.2)}


def loss(x, sample):
    """Half the squared residual."""
    return 0.5 * (sample["a"] @ x["w"] + x["c"] - sample["b"]) ** 2


simfbo = fs.SimFBO(0.1, 0.2, 0.2, 0.05, 0.1, 0.1, tau=np.array([1, 2, 0, 3, 1]))

normalized = fs.NormalizedSGDA(0.05, 0.1, np.array([1, 2, 0, 3, 1]), eta_xg=0.9, batch_size=2)

fessgda = fs.FESSGDA(0.05, 0.1, np.array([1, 2, 0, 3, 1]), p=2.0, beta=0.5, eta_xg=0.9, batch_size=2)

CASES = [
    Case("fedmsa", fs.FedMSA(0.05, 0.1, rho=0.3, K=2, clients=2, batch_size=2), bilevel, data, x0, y0),
    Case("fedmsa-full", fs.FedMSA(0.05, np.array([0.1, 0.3]), K=2, clients=3), sequences, data, x0, Z0),
    Case("soba", fs.SOBA(0.05, 0.3), composition, data, x0),
    Case("fedstorm", fs.FedSTORM(0.05, 0.1, c=0.3, I=3, batch_size=2), bilevel, data, x0, y0),
    Case("fedstorm-composition", fs.FedSTORM(0.05, 0.3, c=0.3, I=2), composition, data, x0),
    Case("fedstorm-local", fs.FedSTORM(0.05, 0.1, c=0.3, I=2, batch_size=2), local, data, x0, y0),
    Case("ada-fedstorm", fs.AdaFedSTORM(0.01, 0.02, c=0.3, I=3, batch_size=2), bilevel, data, x0, y0),
    Case("fedf2sa", fs.FedF2SA(0.01, 0.1, order=2, H=2, batch_size=2), bounded, data, x0, y0),
    Case("fedf2sa-local", fs.FedF2SA(0.01, 0.1, H=2, batch_size=2), local, data, x0, y0),
    Case("hypergradient", fs.HypergradientDescent(0.1, 0.3, T=2, N=2), bilevel, data, x0, y0),
    Case("fednest", fs.FedNest(0.1, 0.3, T=2, tau=2, N=3, ell=3.0), bilevel, data, x0, y0),
    Case("simfbo", simfbo, bilevel, data, x0, y0),
    Case("local-sgda", fs.LocalSGDA(0.05, 0.1, tau=2, batch_size=2), minimax, data, x0, y0),
    Case("normalized-sgda", normalized, minimax, data, x0, y0),
    Case("fedsgda-plus", fs.FedSGDAPlus(0.05, 0.1, K=2, S=2, eta=0.9, batch_size=2), minimax, data, x0, y0),
    Case("fessgda", fessgda, minimax, data, x0, y0),
    Case("scaffnew-minimax", fs.Scaffnew(0.1, 0.5, batch_size=2), free, data, x0, y0, participation=None),
    Case("codasca", fs.CODASCA(0.1, 0.5, I=2, rounds=2, batch_size=2, eta_y=0.15), free, data, x0, y0),
    Case("afl", fs.AFL(0.1, 0.1, H=2), fs.Minimization(loss), data, weights, participation=None),
]
