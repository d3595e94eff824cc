"""FedRZO for bilevel and minimax problems, and the methods that solve their lower levels."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import fedstrata as fs

from . import Case, samples
from .averaging import data as regression_data
from .averaging import problem as regression
from .averaging import x0 as regression_x0


def upper(x, y, sample):
    """Validation error, kinked, and a little curvature in x."""
    return (
        jnp.abs(sample["a"] @ y["w"] + y["c"] - sample["b"]) + 0.1 * (x["r"] ** 2).sum() + 0.1 * x["s"] ** 2
    )


def lower(x, y, sample):
    """Ridge regression with weights e^r."""
    fit = 0.5 * (sample["a"] @ y["w"] + y["c"] - sample["b"] - x["s"]) ** 2
    return fit + 0.5 * (jnp.exp(x["r"]) * y["w"] ** 2).sum() + 0.5 * y["c"] ** 2


def payoff(x, y, sample):
    return upper(x, y, sample) - lower(x, y, sample)


def below(y, x):
    """The set of y moves with x."""
    return {"w": jnp.clip(y["w"], -0.4, 0.4 + 0.1 * x["s"]), "c": y["c"]}


def own_box(x, client):
    return {"r": jnp.clip(x["r"], -0.1, 0.1 + 0.01 * client.index), "s": x["s"]}


bilevel = fs.Bilevel(upper, lower, project_x=own_box, project_y=below, same_samples=True)
unbounded = fs.Bilevel(upper, lower, project_x=own_box, same_samples=True)
minimax = fs.Minimax(payoff, project_y=below)
data = fs.FederatedData.from_clients(samples(3), valid=samples(4, sizes=(3, 2, 4, 2, 5)))
x0 = {"r": np.array([0.2, -0.1, 0.3]), "s": np.array(0.1)}
y0 = {"w": np.full(3, 0.2), "c": np.array(-0.1)}


def case(name, method, problem):
    return Case(name, method, problem, data, x0, y0, rounds=2)


CASES = [
    case(
        "fedrzo-bilevel",
        fs.FedRZOBilevel(
            0.01, 0.2, H=2, batch_size=2, lower="local_sgd", lower_rounds=lambda r: 1 + r,
            mu_h=1.0, kappa_h=1.0,
        ),
        bilevel,
    ),
    case(
        "fedrzo-minimax",
        fs.FedRZOMinimax(
            0.01, 0.2, two_sided=True, directions=2, orthogonal=True, messages="scalars", warm_start=True,
            lower=fs.FedAC(0.2, 0.5, batch_size=2), lower_rounds=1, common_random_numbers=False,
        ),
        minimax,
    ),
    case("fedrzo-bilevel-accurate", fs.FedRZOBilevel(0.01, 0.2, batch_size=2, lower_tol=0.01), unbounded),
    case("fedrzo-minimax-accurate", fs.FedRZOMinimax(0.01, 0.2, batch_size=2, lower_tol=0.01), minimax),
    Case("fedac", fs.FedAC(0.1, 0.1, K=2, batch_size=2), regression, regression_data, regression_x0),
    Case("lfd", fs.LFD(0.1, tau=2, devices=2, batch_size=2), regression, regression_data, regression_x0),
]  # fmt: skip
