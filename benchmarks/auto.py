"""How often ``fs.solve(problem, "auto", …)`` solves: on 300 random problems whose solutions are known.

    python -m benchmarks.auto [--seeds 30] [--first 0] [--who auto] [--seconds 60] [NAME …]
    python -m benchmarks.auto --all --shard 3/48 >> auto.jsonl      a part of all 300, a JSON line each
    python -m benchmarks.auto --summary auto.jsonl                  the table of such lines

    seq 48 | xargs -P 16 -I{} sh -c 'python -m benchmarks.auto --all --shard {}/48' > auto.jsonl

They are of ten classes. Drawn are the units of the loss and of x (10⁻³ to 10³), clients' sizes and weights,
all or half of them in a round, the condition number (to 10⁴), float32 or float64, and whether the start is
near or a hundred times farther away. Solutions come from closed forms, linear programs and SciPy.

*Right* is an x within 1 % of the solution, or an excess within 10⁻⁴ of the start's and of zero's; *value*
counts these, and those whose value of F is within 1 % of the best one, which asks for less. *Told* is a run
that is not right and says that it is not solved, *missed* one that says it is, and *alarmed* a right one that
says it is not. ``--timed`` adds "work", the seconds of all stages, measurements and certificates in a second
call, which finds its programs compiled, and "alone", those of a run of the final method; a median and
quantiles of their ratio are below the table. ``--who docs`` takes the steps of the
documentation's programs in place of "auto", ``--who tuned`` what is usually done: FedAvg, FedNest and
LocalSGDA with a grid of steps, the best by their last loss.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import optimize

import fedstrata as fs
from benchmarks.verdicts import FAMILIES, Rng, Trial, flat, unit

ROUNDS = 1000  # of runs with steps from elsewhere
STEPS = (1e-3, 1e-2, 1e-1, 1.0)  # that a user tries
CLASSES: dict[str, tuple[Callable[[Rng], Trial], ...]] = {}


@dataclass
class Clients:
    """Clients of unequal size and their weights; arrays have all samples on their first axis."""

    sizes: np.ndarray
    weights: str

    @classmethod
    def draw(cls, rng: Rng, least: int = 2) -> Clients:
        """Three to six of them."""
        sizes = rng.integers(least, 3 * least + 6, rng.integers(3, 7))
        return cls(sizes, str(rng.choice(["uniform", "size"])))

    @property
    def share(self) -> np.ndarray:
        """The weight of every client."""
        equal = np.full(len(self.sizes), 1 / len(self.sizes))
        return self.sizes / self.sizes.sum() if self.weights == "size" else equal

    @property
    def q(self) -> np.ndarray:
        """The weight of every sample."""
        return np.repeat(self.share / self.sizes, self.sizes)

    def each(self, rng: Rng, *shape: int, own: float = 0.5) -> np.ndarray:
        """A normal array of every sample, with a part that is common to a client."""
        common = np.repeat(rng.normal(size=(len(self.sizes), *shape)), self.sizes, axis=0)
        return rng.normal(size=(self.sizes.sum(), *shape)) + own * common

    def mean(self, array: np.ndarray) -> np.ndarray:
        """Over all samples, weighed."""
        return np.tensordot(self.q, array, 1)

    def data(self, **arrays: np.ndarray) -> fs.FederatedData:
        """What each client has."""
        return fs.FederatedData.from_clients(self.split(**arrays))

    def split(self, **arrays: np.ndarray) -> list[dict[str, np.ndarray]]:
        """The clients' own arrays."""
        ends = np.cumsum(self.sizes)[:-1]
        parts = {name: np.split(array, ends) for name, array in arrays.items()}
        return [{name: parts[name][i] for name in arrays} for i in range(len(self.sizes))]

    @property
    def options(self) -> dict[str, Any]:
        """Of `fs.solve`."""
        return {"weights": self.weights}


def spread(rng: Rng, n: int, digits: float) -> np.ndarray:
    """Scales of n features: a condition number of up to 10^(2·digits)."""
    return np.geomspace(1, 10 ** -rng.uniform(0, digits), n)


def of_class(name: str) -> Callable[[Callable[[Rng], Trial]], Callable[[Rng], Trial]]:
    """Register a family."""

    def register(build: Callable[[Rng], Trial]) -> Callable[[Rng], Trial]:
        CLASSES[name] = (*CLASSES.get(name, ()), build)
        return build

    return register


def definite(rng: Rng, n: int, digits: float) -> np.ndarray:
    """A symmetric matrix of a condition number of up to 10^digits."""
    turn = np.linalg.qr(rng.normal(size=(n, n)))[0]
    return (turn * np.geomspace(1, 10 ** -rng.uniform(0, digits), n)) @ turn.T


@of_class("minimization")
def least_squares(rng: Rng) -> Trial:
    """Least squares, of a condition number up to 10⁴."""
    n, c, s, k = int(rng.integers(2, 8)), unit(rng), unit(rng), Clients.draw(rng, 10)
    a, b = k.each(rng, n) * spread(rng, n, 2), k.each(rng)
    best = np.linalg.lstsq(np.sqrt(k.q)[:, None] * a, np.sqrt(k.q) * b)[0] / s

    def F(x: np.ndarray) -> float:
        return float(c * k.q @ (a @ x * s - b) ** 2 / 2)

    problem = fs.Minimization(lambda x, S: c * (S["a"] @ x * s - S["b"]) ** 2 / 2)
    return Trial(problem, k.data(a=a, b=b), rng.normal(size=n) / s, best, {}, F=F, options=k.options)


@of_class("minimization")
def logistic(rng: Rng) -> Trial:
    """Logistic regression with a small penalty."""
    n, c, s, k = int(rng.integers(2, 8)), unit(rng), unit(rng), Clients.draw(rng, 10)
    a = k.each(rng, n)
    b = np.sign(k.each(rng) + a[:, 0])

    def F(x: np.ndarray) -> float:
        return float(c * (k.q @ np.logaddexp(0, -b * (a @ x) * s) + 0.01 * s**2 * x @ x))

    best = optimize.minimize(lambda z: F(z / s) / c, np.zeros(n), method="BFGS", options={"gtol": 1e-9}).x / s
    problem = fs.Minimization(
        lambda x, S: c * (jnp.logaddexp(0, -S["b"] * (S["a"] @ x) * s) + 0.01 * s**2 * x @ x)
    )
    return Trial(problem, k.data(a=a, b=b), rng.normal(size=n) / s, best, {}, F=F, options=k.options)


@of_class("constrained")
def boxed(rng: Rng) -> Trial:
    """Least squares in a box that holds it back."""
    n, c, s, k = int(rng.integers(2, 8)), unit(rng), unit(rng), Clients.draw(rng, 10)
    a, b = k.each(rng, n) * spread(rng, n, 1), k.each(rng) + 2
    root, box = np.sqrt(k.q), (-0.1 / s, 0.15 / s)
    best = optimize.lsq_linear(a * root[:, None] * s, b * root, bounds=box, tol=1e-13).x
    problem = fs.Minimization(lambda x, S: c * (S["a"] @ x * s - S["b"]) ** 2 / 2, project=fs.sets.Box(*box))

    def F(x: np.ndarray) -> float:
        return float(c * k.q @ (a @ np.clip(x, *box) * s - b) ** 2 / 2)

    return Trial(problem, k.data(a=a, b=b), np.zeros(n), best, {}, F=F, options=k.options)


@of_class("constrained")
def in_ball(rng: Rng) -> Trial:
    """A quadratic in a ball that its minimiser is outside of: by the multiplier."""
    n, c, s, k = int(rng.integers(2, 8)), unit(rng), unit(rng), Clients.draw(rng, 10)
    A, b = definite(rng, n, 2), k.each(rng, n) + 1
    pull, radius = k.mean(b), 0.3

    def outside(lam: float) -> float:
        return float(np.linalg.norm(np.linalg.solve(A + lam * np.eye(n), pull)) - radius)

    lam = optimize.brentq(outside, 0.0, 10 + 10 * np.linalg.norm(pull), xtol=1e-14)
    best = np.linalg.solve(A + lam * np.eye(n), pull) / s

    def F(x: np.ndarray) -> float:
        z = s * x * min(1.0, radius / max(float(np.linalg.norm(s * x)), 1e-300))
        return float(c * (z @ A @ z / 2 - pull @ z))

    problem = fs.Minimization(
        lambda x, S: c * (s**2 * x @ A @ x / 2 - s * S["b"] @ x), project=fs.sets.Ball(radius / s)
    )
    return Trial(problem, k.data(b=b), rng.normal(size=n) / s, best, {}, F=F, options=k.options)


@of_class("nonsmooth")
def deviations(rng: Rng) -> Trial:
    """Least absolute deviations, by a linear program."""
    n, c, s, k = int(rng.integers(1, 5)), unit(rng), unit(rng), Clients.draw(rng, 8)
    a, b = k.each(rng, n), k.each(rng)
    count = len(b)
    above = np.block([[a, -np.eye(count)], [-a, -np.eye(count)]])
    bounds = [(None, None)] * n + [(0, None)] * count
    best = optimize.linprog(np.r_[np.zeros(n), k.q], above, np.r_[b, -b], bounds=bounds).x[:n] / s
    problem = fs.Minimization(lambda x, S: c * jnp.abs(S["a"] @ x * s - S["b"]))

    def F(x: np.ndarray) -> float:
        return float(c * k.q @ np.abs(a @ x * s - b))

    return Trial(problem, k.data(a=a, b=b), np.full(n, 2 / s), best, {}, F=F, options=k.options)


@of_class("nonsmooth")
def tails(rng: Rng) -> Trial:
    """CVaR of absolute deviations, by a linear program."""
    n, c, level, k = int(rng.integers(1, 4)), unit(rng), 0.4, Clients.draw(rng, 8)
    a, b = k.each(rng, n), k.each(rng)
    count = len(b)
    ones, eye = np.ones((count, 1)), np.eye(count)
    above = np.block([[a, -ones, -eye], [-a, -ones, -eye]])
    bounds = [(None, None)] * (n + 1) + [(0, None)] * count
    best = optimize.linprog(np.r_[np.zeros(n), 1, k.q / level], above, np.r_[b, -b], bounds=bounds).x[:n]

    def F(x: np.ndarray) -> float:
        losses = np.abs(a @ x - b)
        return float(c * min(eta + k.q @ np.maximum(losses - eta, 0) / level for eta in losses))

    problem = fs.dro.cvar(lambda x, S: c * jnp.abs(S["a"] @ x - S["b"]), level)
    return Trial(problem, k.data(a=a, b=b), np.full(n, 2.0), best, {}, F=F, options=k.options)


@of_class("bilevel")
def quadratic_levels(rng: Rng) -> Trial:
    """Quadratic levels, each in its own unit, the lower one of a condition number up to 10³."""
    n, p, k = int(rng.integers(2, 5)), int(rng.integers(2, 6)), Clients.draw(rng)
    up, low, s = unit(rng), unit(rng), unit(rng)
    A0 = definite(rng, p, 3)
    A = np.repeat([A0 * (1 + 0.3 * rng.random()) for _ in k.sizes], k.sizes, axis=0)
    B, c, d, e = A0 @ k.each(rng, p, n), k.each(rng, p), k.each(rng, n), k.each(rng, p)
    problem = fs.Bilevel(
        lambda x, y, S: up * (s**2 * (x @ x) / 2 + s * S["d"] @ x + 0.1 * y @ y / 2 + 0.1 * S["e"] @ y),
        lambda x, y, S: low * (y @ S["A"] @ y / 2 - y @ (S["B"] @ x * s + S["A"] @ S["c"])),
        same_samples=True,
    )
    mean = k.mean(A)
    T, t = (np.linalg.solve(mean, k.mean(part)) for part in (B, np.einsum("mij,mj->mi", A, c)))
    H = np.eye(n) + 0.1 * T.T @ T
    best = -np.linalg.solve(H, k.mean(d) + 0.1 * T.T @ (t + k.mean(e))) / s

    def F(x: np.ndarray) -> float:
        z, y = s * x, T @ (s * x) + t
        return float(up * (z @ z / 2 + k.mean(d) @ z + 0.1 * y @ y / 2 + 0.1 * k.mean(e) @ y))

    x0 = np.zeros(n) if rng.random() < 0.5 else rng.normal(size=n) / s
    return Trial(problem, k.data(A=A, B=B, c=c, d=d, e=e), x0, best, {}, np.zeros(p), F, k.options)


@of_class("bilevel")
def penalties(rng: Rng) -> Trial:
    """Penalties of a ridge regression by validation loss: F is not convex."""
    n, up, low, k = int(rng.integers(2, 5)), unit(rng), unit(rng), Clients.draw(rng, 6)
    (a, b), (va, vb) = ((k.each(rng, n), k.each(rng)) for _ in range(2))
    hessian, slope = k.mean(a[:, :, None] * a[:, None]), k.mean(a * b[:, None])

    def F(x: np.ndarray) -> float:
        y = np.linalg.solve(hessian + np.diag(np.exp(x)), slope)
        return float(up * (k.q @ (va @ y - vb) ** 2 / 2 + 0.01 * x @ x))

    best = optimize.minimize(lambda x: F(x) / up, np.zeros(n), method="BFGS", options={"gtol": 1e-9}).x
    problem = fs.Bilevel(
        lambda x, y, S: up * ((S["a"] @ y - S["b"]) ** 2 / 2 + 0.01 * x @ x),
        lambda x, y, S: low * ((S["a"] @ y - S["b"]) ** 2 / 2 + jnp.exp(x) @ y**2 / 2),
    )
    data = fs.FederatedData.from_clients(k.split(a=a, b=b), valid=k.split(a=va, b=vb))
    return Trial(problem, data, np.full(n, 0.3), best, {}, np.zeros(n), F, k.options)


@of_class("minimax")
def saddle(rng: Rng) -> Trial:
    """Quadratic payoffs, strongly convex and strongly concave."""
    n, p, c, s, k = int(rng.integers(2, 5)), int(rng.integers(2, 6)), unit(rng), unit(rng), Clients.draw(rng)
    P, R, Q, u, v = (
        definite(rng, n, 1),
        definite(rng, p, 2),
        k.each(rng, n, p),
        k.each(rng, n),
        k.each(rng, p),
    )
    problem = fs.Minimax(
        lambda x, y, S: (
            c * (s**2 * x @ P @ x / 2 + s * x @ S["Q"] @ y - y @ R @ y / 2 + s * S["u"] @ x + S["v"] @ y)
        )
    )
    T, t = np.linalg.solve(R, k.mean(Q).T), np.linalg.solve(R, k.mean(v))
    best = -np.linalg.solve(P + k.mean(Q) @ T, k.mean(Q) @ t + k.mean(u)) / s

    def F(x: np.ndarray) -> float:
        z, y = s * x, T @ (s * x) + t
        return float(c * (z @ P @ z / 2 + y @ R @ y / 2 + k.mean(u) @ z))

    return Trial(problem, k.data(Q=Q, u=u, v=v), np.zeros(n), best, {}, np.zeros(p), F, k.options)


@of_class("minimax")
def saddle_in_box(rng: Rng) -> Trial:
    """The same with the adversary in a box, so that F has corners in its slope."""
    n, p, c, s, k = int(rng.integers(2, 5)), int(rng.integers(2, 6)), unit(rng), unit(rng), Clients.draw(rng)
    Q, u, v = k.each(rng, n, p), k.each(rng, n), k.each(rng, p)
    M, w, z = k.mean(Q), k.mean(u), k.mean(v)

    def F(x: np.ndarray) -> float:
        y = np.clip(s * x @ M + z, -0.5, 0.5)
        return float(c * (s**2 * x @ x / 2 + s * w @ x + (s * x @ M + z) @ y - y @ y / 2))

    best = (
        optimize.minimize(lambda x: F(x / s) / c, np.zeros(n), method="BFGS", options={"gtol": 1e-10}).x / s
    )
    problem = fs.Minimax(
        lambda x, y, S: c * (s**2 * x @ x / 2 + s * (x @ S["Q"] @ y + S["u"] @ x) + S["v"] @ y - y @ y / 2),
        project_y=fs.sets.Box(-0.5, 0.5),
    )
    return Trial(problem, k.data(Q=Q, u=u, v=v), np.zeros(n), best, {}, np.zeros(p), F, k.options)


@of_class("equilibrium")
def cournot(rng: Rng) -> Trial:
    """Cournot games whose solution the problem does not know."""
    trial = FAMILIES["equilibrium"](rng)
    return replace(trial, runs={})


@of_class("equilibrium")
def linear_responses(rng: Rng) -> Trial:
    """The response of every sample solves linear equations that are not symmetric."""
    n, p, c, s, k = int(rng.integers(1, 3)), int(rng.integers(2, 4)), unit(rng), unit(rng), Clients.draw(rng)
    A = definite(rng, p, 1) + 0.3 * (turn := rng.normal(size=(p, p))) - 0.3 * turn.T
    B, u = rng.normal(size=(p, n)), k.each(rng, p) + 1
    problem = fs.MPEC(
        lambda x, y, S: c * (s**2 * x @ x / 2 + (y - 1) @ (y - 1) / 2),
        lambda x, y, S: A @ y - s * B @ x - S["u"],
    )
    T, t = np.linalg.solve(A, B), np.linalg.solve(A, k.mean(u)) - 1
    best = -np.linalg.solve(np.eye(n) + T.T @ T, T.T @ t) / s
    return Trial(problem, k.data(u=u), np.zeros(n), best, {}, np.zeros(p), options=k.options)


@of_class("selection")
def least_norm(rng: Rng) -> Trial:
    """The smallest solution of too few equations, both levels in any unit."""
    n, c, own, k = int(rng.integers(4, 8)), unit(rng), unit(rng), Clients(np.ones(3, int), "uniform")
    a, b = k.each(rng, n), k.each(rng)
    problem = fs.Selection(lambda x, S: c * (S["a"] @ x - S["b"]) ** 2 / 2, lambda x: own * (x @ x) / 2)
    return Trial(problem, k.data(a=a, b=b), np.full(n, 0.7), np.linalg.pinv(a) @ b, {})


@of_class("selection")
def nearest_fit(rng: Rng) -> Trial:
    """Of the least squares solutions with more features than directions the nearest one to a point."""
    n, c, own, k = int(rng.integers(4, 8)), unit(rng), unit(rng), Clients.draw(rng)
    a, b, aim = k.each(rng, 2) @ rng.normal(size=(2, n)), k.each(rng), rng.normal(size=n)
    root = np.sqrt(k.q)
    best = aim + np.linalg.pinv(root[:, None] * a, rcond=1e-10) @ (root * (b - a @ aim))
    problem = fs.Selection(
        lambda x, S: c * (S["a"] @ x - S["b"]) ** 2 / 2, lambda x: own * ((x - aim) ** 2).sum() / 2
    )
    return Trial(problem, k.data(a=a, b=b), np.full(n, 0.7), best, {}, options=k.options)


@of_class("personal")
def drawn_together(rng: Rng) -> Trial:
    """Ridge regressions of the clients' own, drawn to a common one."""
    n, c, k = int(rng.integers(1, 4)), unit(rng), Clients.draw(rng, 6)
    a, b = k.each(rng, n), k.each(rng)
    server = {"a": rng.normal(size=(9, n)), "b": rng.normal(size=9)}
    own = k.split(a=a, b=b)
    H = [each["a"].T @ each["a"] / len(each["b"]) + np.eye(n) for each in own]
    r = [each["a"].T @ each["b"] / len(each["b"]) for each in own]

    def F(x: np.ndarray) -> float:
        ys = [np.linalg.solve(each, slope + x) for each, slope in zip(H, r, strict=True)]
        fit = ((server["a"] @ x - server["b"]) ** 2).mean() / 2
        return float(c * (fit + 0.05 * x @ x + k.share @ [((x - y) ** 2).sum() / 2 for y in ys]))

    best = optimize.minimize(lambda x: F(x) / c, np.zeros(n), method="BFGS", options={"gtol": 1e-10}).x
    problem = fs.Personalized(
        lambda x, S: c * ((S["a"] @ x - S["b"]) ** 2 / 2 + 0.05 * x @ x),
        lambda x, y: c * ((x - y) ** 2).sum() / 2,
        lambda x, y, S: c * ((S["a"] @ y - S["b"]) ** 2 / 2 + ((x - y) ** 2).sum() / 2),
    )
    data = fs.FederatedData.from_clients(own, server=server)
    return Trial(problem, data, np.full(n, 2.0), best, {}, np.zeros(n), F, k.options)


@of_class("composition")
def worst_case(rng: Rng) -> Trial:
    """KL-robust regression in any unit."""
    n, c, k = int(rng.integers(2, 5)), unit(rng), Clients.draw(rng, 8)
    a, b, lam = k.each(rng, n), k.each(rng), c * float(rng.uniform(0.5, 2))

    def F(x: np.ndarray) -> float:
        losses = c * (a @ x - b) ** 2 / 2
        return float(losses.max() + lam * np.log(k.q @ np.exp((losses - losses.max()) / lam)))

    best = optimize.minimize(lambda x: F(x) / c, np.zeros(n), method="BFGS", options={"gtol": 1e-9}).x
    problem = fs.dro.kl(lambda x, S: c * (S["a"] @ x - S["b"]) ** 2 / 2, lam)
    return Trial(problem, k.data(a=a, b=b), np.zeros(n), best, {}, F=F, options=k.options)


@of_class("composition")
def bellman(rng: Rng) -> Trial:
    """The squared residual of a mean equation, ½ ‖E[A] x − E[b]‖², as of a policy's value."""
    n, c, s, k = int(rng.integers(2, 5)), unit(rng), unit(rng), Clients.draw(rng)
    A, b = np.eye(n) + 0.2 * k.each(rng, n, n), k.each(rng, n)
    mean, aim = k.mean(A), k.mean(b)
    problem = fs.Composition([lambda x, S: s * S["A"] @ x - S["b"], lambda u, S: c * u @ u / 2])

    def F(x: np.ndarray) -> float:
        return float(c * ((s * mean @ x - aim) ** 2).sum() / 2)

    best = np.linalg.solve(mean, aim) / s
    return Trial(problem, k.data(A=A, b=b), rng.normal(size=n) / s, best, {}, F=F, options=k.options)


@of_class("sequences")
def linear_maps(rng: Rng) -> Trial:
    """Linear maps of two sequences."""
    n, p, c, k = 3, 2, unit(rng), Clients.draw(rng)
    shapes = {"A": (n, n), "B": (n, p), "C": (p, n), "D": (p, p), "e": (n,), "f": (p,)}
    arrays = {name: 0.3 * k.each(rng, *shape) for name, shape in shapes.items()}
    arrays["A"] += 2 * np.eye(n)
    arrays["D"] += 1.5 * np.eye(p)
    m = {name: k.mean(array) for name, array in arrays.items()}
    best = np.linalg.solve(np.block([[m["A"], m["B"]], [m["C"], m["D"]]]), np.r_[m["e"], m["f"]])[:n]
    problem = fs.MultiSequence(
        lambda x, Z, S: c * (S["A"] @ x + S["B"] @ Z[0] - S["e"]),
        (lambda x, z, S: c * (S["C"] @ x + S["D"] @ z - S["f"]),),
    )
    return Trial(problem, k.data(**arrays), np.full(n, 1.5), best, {}, (np.zeros(p),), options=k.options)


# What is drawn beside the problem

FAR = ("minimization", "constrained", "bilevel", "minimax", "composition", "sequences")


@dataclass(frozen=True)
class Drawn:
    """One of the 300."""

    name: str
    seed: int

    @property
    def rng(self) -> Rng:
        """Of everything that is drawn."""
        return np.random.default_rng([self.seed, *self.name.encode()])

    @property
    def x64(self) -> bool:
        """A third is in float64."""
        return self.seed % 3 == 2

    def build(self) -> tuple[Trial, float]:
        """The trial with its start, and the part of the clients in a round."""
        rng, builds = self.rng, CLASSES[self.name]
        trial = builds[self.seed % len(builds)](rng)
        participation = 0.5 if rng.random() < 0.5 else 1.0
        if self.name in FAR and rng.random() < 1 / 3 and trial.problem.__class__ is not fs.dro.DRO:
            away = np.random.default_rng(self.seed).normal(size=np.shape(trial.x_star))
            size = np.linalg.norm(flat(trial.x_star)) / np.linalg.norm(away)
            if "penalties" not in builds[self.seed % len(builds)].__name__:
                trial = replace(trial, x0=np.asarray(trial.x_star) + 100 * size * away)
        return trial, participation


# Who solves it

DOCS: dict[type, Callable[[], Any]] = {
    fs.Minimization: lambda: fs.FedAvg(0.1, H=5),
    fs.Bilevel: lambda: fs.FedMSA(0.1, 0.2, K=5),
    fs.Minimax: lambda: fs.LocalSGDA(0.1, 0.1),
    fs.MPEC: lambda: fs.FedRZOTwoStage(0.01, 0.1),
    fs.Selection: lambda: fs.StRFedAvg("geometric"),
    fs.Personalized: lambda: fs.ZOHFL(0.01, 0.1, H=20),
    fs.Composition: lambda: fs.FedDRO(0.1, 0.5),
    fs.MultiSequence: lambda: fs.FedMSA(0.05, 0.1, K=5),
}
GRIDS: dict[type, Callable[[], Iterable[Any]]] = {
    fs.Minimization: lambda: (fs.FedAvg(step, H=5) for step in STEPS),
    fs.Bilevel: lambda: (fs.FedNest(a, b, T=1, tau=1, N=5) for a, b in itertools.product(STEPS, STEPS)),
    fs.Minimax: lambda: (fs.LocalSGDA(a, b, tau=1) for a, b in itertools.product(STEPS, STEPS)),
}


def solved(
    trial: Trial, participation: float, seed: int, who: str, seconds: float | None
) -> fs.Result | None:
    """One answer; None where there is nothing that is usually done."""
    options = {"y0": trial.y0, "seed": seed, "progress": False, **trial.options}
    options |= {"participation": participation}
    if who == "auto":
        budget = None if seconds is None else {"seconds": seconds}
        return fs.solve(trial.problem, "auto", trial.data, trial.x0, budget=budget, **options)
    options |= {"rounds": ROUNDS, "eval_every": ROUNDS // 100, "certify": False}
    if who == "docs":
        methods: Iterable[Any] = [_of(DOCS, trial.problem)()]
    else:
        methods = build() if (build := _of(GRIDS, trial.problem)) else ()
    runs = [_one(trial, method, options) for method in methods]
    return min(runs, key=_last_loss, default=None)


def _one(trial: Trial, method: Any, options: dict[str, Any]) -> fs.Result:
    if type(method).full_participation is not None:
        options = {**options, "participation": 1.0}
    try:
        return fs.solve(trial.problem, method, trial.data, trial.x0, **options)
    except fs.Diverged as diverged:
        return diverged.result


def _of(table: dict[type, Any], problem: Any) -> Any:
    return next((found for kind, found in table.items() if isinstance(problem, kind)), None)


def _last_loss(result: fs.Result) -> float:
    last = float(next(iter(result.metrics.values()))[-1])
    return last if math.isfinite(last) and result.status != "diverged" else math.inf


def alone(trial: Trial, result: fs.Result, options: dict[str, Any]) -> float:
    """Seconds, without compilation, of a run of the final method, for as many rounds as its stages had."""
    name = type(result.method).__name__
    rounds = sum(map(int, re.findall(rf"\b{name} (\d+) \(", result.notes[1])))
    options = {**options, "y0": trial.y0, "rounds": rounds, "progress": False, "certify": False}
    runs = [_one(trial, result.method, {**options, "eval_every": max(1, rounds // 200)}) for _ in range(2)]
    return max(runs[-1].seconds - runs[-1].compiling, 1e-4)


def outcome(drawn: Drawn, who: str, seconds: float | None, timed: bool = False) -> dict[str, Any]:
    """Solve one problem, and judge the answer."""
    jax.config.update("jax_enable_x64", drawn.x64)
    trial, participation = drawn.build()
    line: dict[str, Any] = {
        "class": drawn.name, "seed": drawn.seed, "who": who, "x64": drawn.x64, "participation": participation,
        **trial.options, "problem": CLASSES[drawn.name][drawn.seed % len(CLASSES[drawn.name])].__name__,
    }  # fmt: skip
    began = time.perf_counter()
    try:
        result = solved(trial, participation, drawn.seed, who, seconds)
    except Exception as error:  # a crash is a failure that was told
        words = f"{type(error).__name__}: {str(error)[:300]}"
        return line | {"key": "told", "error": None, "seconds": _since(began), "crash": words}
    if result is None:
        return line | {"key": "none"}
    took, truth, certificate = _since(began), trial.truth(result.x), result.certificate
    if timed:
        began = time.perf_counter()
        again = solved(trial, participation, drawn.seed, who, seconds)
        work = _since(began) - (again.compiling if again else 0.0)
        options = {**trial.options, "participation": participation, "seed": drawn.seed}
        line |= {"work": round(work, 3), "alone": round(alone(trial, result, options), 4)}
    at, best = flat(getattr(result.x, "x", result.x)), flat(trial.x_star)
    value = None
    if trial.F is not None and abs(least := trial.F(best)) > 1e-9 * abs(trial.F(flat(trial.x0)) - least):
        value = abs(trial.F(at) / least - 1)
    away = float(np.linalg.norm(at - best) / np.linalg.norm(best))
    key = "right" if truth == "right" else "told" if not certificate.solved else "missed"
    return line | {
        "key": "between" if key == "missed" and truth == "between" else key,
        "alarmed": truth == "right" and not certificate.solved,
        "error": away, "value_error": value, "seconds": took, "rounds": result.ledger.rounds,
        "compiling": round(result.compiling, 1),
        "certificate": repr(certificate), "notes": list(result.notes), "method": repr(result.method),
    }  # fmt: skip


def _since(began: float) -> float:
    return round(time.perf_counter() - began, 2)


def lines_of(everything: list[Drawn], shard: str) -> list[Drawn]:
    """Part i of n, 1 ≤ i ≤ n; those in float64 last, so that the precision changes once."""
    part, of = map(int, shard.split("/"))
    return sorted(everything[part % of :: of], key=lambda drawn: drawn.x64)


def _close(value: float | None) -> bool:
    return value is not None and value <= 1e-2


def summary(outcomes: Iterable[dict[str, Any]]) -> str:
    """The table of all outcomes."""
    lines = list(outcomes)
    counts: dict[str, Counter[str]] = {}
    for line in lines:
        if line["key"] == "none":
            continue
        for name in (line["class"], "all"):
            found = counts.setdefault(name, Counter())
            close = line["key"] == "right" or _close(line.get("value_error"))
            found.update(["problems", line["key"], *["alarmed"] * line.get("alarmed", False)])
            found["value"] += close
            found["seconds"] += round(line["seconds"])
    columns = ("problems", "right", "value", "told", "missed", "between", "alarmed", "seconds")
    names = [name for name in (*CLASSES, "all") if name in counts]
    rows = [f"| {name} | {' | '.join(str(counts[name][key]) for key in columns)} |" for name in names]
    table = [f"| class | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|", *rows]
    if times := [(line["work"], line["alone"]) for line in lines if "work" in line]:
        work, alone = np.array(times).T
        for name, values in (("work/alone", work / alone), ("work − alone, s", work - alone)):
            marks = ", ".join(f"{q} % {np.percentile(values, q):.2g}" for q in (10, 50, 90))
            table.append(f"\n{name}: {marks} ({len(times)} runs)")
    return "\n".join(table)


def read(files: list[str]) -> Iterator[dict[str, Any]]:
    """The lines of files of outcomes."""
    for file in files:
        for line in Path(file).read_text().splitlines():
            if line.startswith("{"):
                yield json.loads(line)


def main() -> None:
    """Print the outcomes, and the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--all", action="store_true", help="30 problems of every class, as JSON lines")
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="part I of N of them")
    parser.add_argument("--summary", action="store_true", help="the table of files of such lines")
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--who", choices=("auto", "docs", "tuned"), default="auto")
    parser.add_argument("--seconds", type=float, help="the budget of a problem")
    parser.add_argument("--timed", action="store_true", help="compare with a run of the final method alone")
    parser.add_argument("names", nargs="*", metavar="NAME", help="classes; with --summary, files")
    asked = parser.parse_args()
    if asked.summary:
        print(summary(read(asked.names)))
        return
    warnings.simplefilter("ignore")
    seeds = range(asked.first, asked.first + asked.seeds)
    names = list(CLASSES) if asked.all or not asked.names else asked.names
    if unknown := set(names) - set(CLASSES):
        parser.error(f"unknown classes: {', '.join(unknown)}; there are {', '.join(CLASSES)}")
    lines = []
    for drawn in lines_of([Drawn(name, seed) for seed in seeds for name in names], asked.shard):
        lines.append(outcome(drawn, asked.who, asked.seconds, asked.timed))
        if asked.all:
            print(json.dumps(lines[-1]), flush=True)
        elif lines[-1]["key"] != "right" or lines[-1]["alarmed"]:
            print(json.dumps(lines[-1], indent=1, ensure_ascii=False), flush=True)
    if not asked.all:
        print(summary(lines))
    if asked.all:
        sys.stdout.flush()
        os._exit(0)  # XLA takes a second to say goodbye


if __name__ == "__main__":
    main()
