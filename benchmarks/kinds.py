"""Problems that differ in kind from those of `benchmarks.verdicts` and `benchmarks.auto`.

    python -m benchmarks.kinds [--seeds 1] [--first 0] [--what points | runs | auto] [--seconds 120] [NAME …]

Variables are trees of arrays, clients have 1 to 200 samples, losses have offsets and several minima, lower
levels have sets, upper levels ignore y or have values only, games are linear in x and in y. A problem has one
or several solutions, or only a least value. Right, wrong, alarms and misses are as in `benchmarks.verdicts`.

``points`` judges solutions, points 0.3 %, 10 % and 50 % away from them, the start, and points at which
gradients vanish elsewhere. ``runs`` judges runs, ``auto`` solves without hyper-parameters.
"""

from __future__ import annotations

import argparse
import itertools
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import optimize

import fedstrata as fs
from benchmarks.verdicts import Rng, Trial, answers, flat

KINDS: dict[str, Callable[[Rng], Kind]] = {}


@dataclass
class Kind(Trial):
    """A problem with several solutions, or with a least value alone.

    Attributes:
        stars: all solutions, flat; the first is ``x_star``.
        least: F there.
        elsewhere: points that are not solutions.
        x64: whether it is in float64.
    """

    stars: list[np.ndarray] = field(default_factory=list)
    least: float | None = None
    elsewhere: list[np.ndarray] = field(default_factory=list)
    x64: bool = False

    def truth(self, x: Any) -> str:
        """Whether an answer is right, wrong, or between."""
        at, start = flat(getattr(x, "x", x)), flat(self.x0)
        sizes = [np.linalg.norm(s) or np.linalg.norm(start - s) for s in self.stars]
        error = min(
            (np.linalg.norm(at - s) / w for s, w in zip(self.stars, sizes, strict=True)), default=np.inf
        )
        excess = np.inf
        if self.F is not None:
            least = min(map(self.F, self.stars)) if self.least is None else self.least
            units = np.array([self.F(start), self.F(0 * at)]) - least
            excess = abs(self.F(at) - least) / min(units[units > 1e-9 * units.max()])
        if error <= 1e-2 or excess <= 1e-4:
            return "right"
        return "wrong" if error > 3e-2 and excess > 1e-3 else "between"


def kind(build: Callable[[Rng], Kind]) -> Callable[[Rng], Kind]:
    """Register a family."""
    KINDS[build.__name__] = build
    return build


@dataclass
class Samples:
    """Regression data of unequal clients: a (samples, n), b, and the samples' weights q."""

    sizes: Any
    weights: str
    a: np.ndarray
    b: np.ndarray

    @classmethod
    def draw(cls, rng: Rng, n: int, sizes: Any = (9, 14, 20, 11), weights: str = "uniform") -> Samples:
        """With a part that is common to a client."""
        common = [np.repeat(rng.normal(size=(len(sizes), k)), sizes, axis=0) for k in (n, 1)]
        a = rng.normal(size=(sum(sizes), n)) + 0.7 * common[0]
        return cls(sizes, weights, a, rng.normal(size=sum(sizes)) + 0.7 * common[1][:, 0] + 1)

    @property
    def q(self) -> np.ndarray:
        """The weight of every sample."""
        sizes = np.array(self.sizes)
        own = sizes / sizes.sum() if self.weights == "size" else np.full(len(sizes), 1 / len(sizes))
        return np.repeat(own / sizes, sizes)

    def clients(self, **more: np.ndarray) -> list[dict[str, np.ndarray]]:
        """Every client's arrays."""
        ends = np.cumsum(self.sizes)[:-1]
        parts = {k: np.split(v, ends) for k, v in {"a": self.a, "b": self.b, **more}.items()}
        return [{k: v[i] for k, v in parts.items()} for i in range(len(self.sizes))]

    def data(self, **more: np.ndarray) -> fs.FederatedData:
        """All clients."""
        return fs.FederatedData.from_clients(self.clients(**more))


def lowest(F: Callable[[np.ndarray], float], x: np.ndarray, rng: Rng | None = None) -> np.ndarray:
    """A minimiser near x, with kinks too."""
    options = {"xatol": 1e-10, "fatol": 1e-15, "maxiter": 20_000, "maxfev": 20_000, "adaptive": True}
    found = optimize.minimize(F, x, method="BFGS", options={"gtol": 1e-10})
    for _ in range(1 if rng is None else 8):
        begun = found.x if rng is None else found.x + 0.1 * rng.normal(size=x.size)
        found = min(
            found, optimize.minimize(F, begun, method="Nelder-Mead", options=options), key=lambda r: r.fun
        )
    return found.x


# One level


@kind
def tree(rng: Rng) -> Kind:
    """Ridge regression on a tree, in float64, with clients of 1 to 200 samples, half of them in a round."""
    d = Samples.draw(rng, 3, (1, 2, 40, 200), "size")
    A = np.c_[np.ones(len(d.b)), d.a]
    H = (A * d.q[:, None]).T @ A + 0.1 * np.eye(4)
    best, L = np.linalg.solve(H, A.T @ (d.q * d.b)), float(np.linalg.eigvalsh(H)[-1])

    def F(v: np.ndarray) -> float:
        return float(d.q @ (A @ v - d.b) ** 2 / 2 + v @ v / 20)

    def loss(x: Any, s: Any) -> Any:
        return (s["a"] @ x["w"] + x["b"] - s["b"]) ** 2 / 2 + (x["w"] @ x["w"] + x["b"] ** 2) / 20

    runs = {
        "full": (fs.FedAvg(1 / L), 300, {"participation": 1.0}),
        "early": (fs.FedAvg(0.02 / L), 5),
        "noise": (fs.FedAvg(0.1 / L, batch_size=2), 400),
    }
    x0 = {"b": np.array(5.0), "w": np.full(3, -4.0)}
    options = {"weights": "size", "participation": 0.5}
    return Kind(fs.Minimization(loss), d.data(), x0, best, runs, F=F, options=options, stars=[best], x64=True)


@kind
def offset(rng: Rng) -> Kind:
    """Logistic regression plus 10⁶, in float32."""
    d = Samples.draw(rng, 4)
    b = np.sign(d.b - 1 + d.a[:, 0])

    def F(v: np.ndarray) -> float:
        return float(d.q @ np.logaddexp(0, -b * (d.a @ v)) + 0.01 * v @ v)

    best = lowest(F, np.zeros(4))
    problem = fs.Minimization(lambda x, s: 1e6 + jnp.logaddexp(0, -s["c"] * (s["a"] @ x)) + 0.01 * x @ x)
    runs = {
        "full": (fs.FedAvg(1.0), 1000),
        "early": (fs.FedAvg(0.05), 5),
        "rounded": (fs.FedRZO(0.05, 1e-3, batch_size=None), 300),
    }
    return Kind(problem, d.data(c=b), np.full(4, 2.0), best, runs, F=F, stars=[best])


@kind
def hinge(rng: Rng) -> Kind:
    """A support vector machine, by its dual."""
    d = Samples.draw(rng, 3, weights="size")
    b = np.sign(d.b - 1 + 2 * d.a[:, 0])
    Z = d.a * b[:, None]
    G = Z @ Z.T / 0.1
    tight = {"maxiter": 50_000, "maxfun": 500_000, "ftol": 1e-16, "gtol": 1e-12}
    dual = optimize.minimize(lambda u: (u @ G @ u / 2 - u.sum(), G @ u - 1), d.q / 2, jac=True,
                             bounds=[(0, q) for q in d.q], method="L-BFGS-B", options=tight)  # fmt: skip

    def F(v: np.ndarray) -> float:
        return float(d.q @ np.maximum(0, 1 - Z @ v) + 0.05 * v @ v)

    best = lowest(F, Z.T @ dual.x / 0.1)
    problem = fs.Minimization(lambda x, s: jnp.maximum(0, 1 - s["c"] * (s["a"] @ x)) + 0.05 * x @ x)
    runs = {
        "decay": (fs.FedAvg(lambda r: 5 / (10 + r)), 3000),
        "constant": (fs.FedAvg(0.3), 300),
        "early": (fs.FedAvg(0.01), 10),
    }
    options = {"weights": "size"}
    return Kind(problem, d.data(c=b), np.full(3, -1.0), best, runs, F=F, options=options, stars=[best])


@kind
def pinball(rng: Rng) -> Kind:
    """A quantile regression, by a linear program."""
    d = Samples.draw(rng, 2, (4, 9, 25, 60), "size")
    A, m, tau = np.c_[np.ones(len(d.b)), d.a], len(d.b), 0.8
    cost, free = np.r_[np.zeros(3), tau * d.q, (1 - tau) * d.q], [(None, None)] * 3
    best = optimize.linprog(cost, A_eq=np.c_[A, np.eye(m), -np.eye(m)], b_eq=d.b,
                            bounds=free + [(0, None)] * (2 * m)).x[:3]  # fmt: skip

    def F(v: np.ndarray) -> float:
        r = d.b - A @ v
        return float(d.q @ np.maximum(tau * r, (tau - 1) * r))

    def loss(x: Any, s: Any) -> Any:
        r = s["b"] - x[0] - s["a"] @ x[1:]
        return jnp.maximum(tau * r, (tau - 1) * r)

    runs = {"decay": (fs.FedAvg(lambda r: 2 / (1 + r) ** 0.8), 4000), "early": (fs.FedAvg(0.05), 10)}
    options = {"weights": "size"}
    return Kind(fs.Minimization(loss), d.data(), np.zeros(3), best, runs, F=F, options=options, stars=[best])


@kind
def saddle(rng: Rng) -> Kind:
    """A start at a saddle point whose value is 0."""
    c = rng.normal(size=(4, 5, 2))
    c -= c.mean((0, 1))
    stars = [np.array([0.0, 1.0]), np.array([0.0, -1.0])]

    def F(v: np.ndarray) -> float:
        return float(v[0] ** 2 / 2 - v[1] ** 2 / 2 + v[1] ** 4 / 4)

    problem = fs.Minimization(lambda x, s: x[0] ** 2 / 2 - x[1] ** 2 / 2 + x[1] ** 4 / 4 + s["c"] @ x)
    runs = {"stays": (fs.FedAvg(0.2), 3)}
    data = fs.FederatedData.from_clients([{"c": own} for own in c])
    return Kind(
        problem, data, np.zeros(2), stars[0], runs, F=F, stars=stars, elsewhere=[np.array([0.5, 0.0])]
    )


@kind
def many_minima(rng: Rng) -> Kind:
    """A sum of double wells (Styblinski, Tang) with 8 minima, 12 saddle points and a maximum."""
    c, t = rng.normal(size=(4, 5, 3)), 0.3 * rng.normal(size=3)
    c -= c.mean((0, 1))
    roots = [np.sort(np.roots([2, 0, -16, 2.5 + own]).real) for own in t]
    stars = [np.array(each) for each in itertools.product(*[(r[0], r[2]) for r in roots])]
    top = np.array([r[1] for r in roots])
    problem = fs.Minimization(lambda x, s: (x**4 - 16 * x**2 + 5 * x).sum() / 2 + (s["c"] + t) @ x)
    runs = {"full": (fs.FedAvg(0.02), 500), "early": (fs.FedAvg(0.0005), 10)}
    data = fs.FederatedData.from_clients([{"c": own} for own in c])
    elsewhere = [top, np.r_[top[0], stars[0][1:]]]
    x0 = np.array([0.3, -0.2, 1.0])
    return Kind(problem, data, x0, stars[0], runs, stars=stars, elsewhere=elsewhere, x64=True)


@kind
def factors(rng: Rng) -> Kind:
    """A low-rank fit: minimisers are not isolated, and zero is a saddle point."""
    Y = np.einsum("mir,jr->mij", rng.normal(size=(4, 5, 2)), rng.normal(size=(3, 2)))
    mean = Y.mean(0)
    least = float(((Y - mean) ** 2).sum((1, 2)).mean() + (np.linalg.svd(mean)[1][2:] ** 2).sum()) / 2

    def F(x: np.ndarray) -> float:
        return float(((Y - x[:10].reshape(5, 2) @ x[10:].reshape(3, 2).T) ** 2).sum((1, 2)).mean() / 2)

    problem = fs.Minimization(lambda x, s: ((s["Y"] - x["u"] @ x["v"].T) ** 2).sum() / 2)
    x0 = {"u": rng.normal(size=(5, 2)), "v": rng.normal(size=(3, 2))}
    runs = {"full": (fs.FedAvg(0.03), 1500), "early": (fs.FedAvg(0.03), 3)}
    data = fs.FederatedData.from_clients([{"Y": own[None]} for own in Y])
    return Kind(problem, data, x0, None, runs, F=F, least=least, elsewhere=[np.zeros(16)])


@kind
def at_the_solution(rng: Rng) -> Kind:
    """A start at the solution, which local steps leave."""
    d = Samples.draw(rng, 4)
    H = (d.a * d.q[:, None]).T @ d.a
    best, L = np.linalg.solve(H, d.a.T @ (d.q * d.b)), float(np.linalg.eigvalsh(H)[-1])

    def F(v: np.ndarray) -> float:
        return float(d.q @ (d.a @ v - d.b) ** 2 / 2)

    problem = fs.Minimization(lambda x, s: (s["a"] @ x - s["b"]) ** 2 / 2)
    runs = {"full": (fs.FedAvg(0.5 / L), 20), "drift": (fs.FedAvg(0.3 / L, H=30), 100)}
    return Kind(problem, d.data(), best.copy(), best, runs, F=F, stars=[best])


# Two levels


@kind
def ignores_y(rng: Rng) -> Kind:
    """An upper level that does not depend on y."""
    d = Samples.draw(rng, 3)
    best = d.q @ d.a

    def F(v: np.ndarray) -> float:
        return float(((v - best) ** 2).sum() / 2)

    problem = fs.Bilevel(
        lambda x, y, s: ((x - s["a"]) ** 2).sum() / 2,
        lambda x, y, s: ((y - x[:2] * s["a"][:2]) ** 2).sum() / 2,
        same_samples=True,
    )
    runs = {"full": (fs.FedMSA(0.3, 0.3), 100), "early": (fs.FedMSA(0.01, 0.3), 10)}
    return Kind(problem, d.data(), np.zeros(3), best, runs, np.zeros(2), F, stars=[best])


@kind
def lower_in_a_box(rng: Rng) -> Kind:
    """A lower level that a box cuts off, so that F has kinks in its slope, and several minima."""
    d, M, t = Samples.draw(rng, 3), rng.normal(size=(3, 3)), rng.normal(size=3)
    m = d.q @ d.a

    def F(v: np.ndarray) -> float:
        return float(((np.clip(M @ v + m, -0.5, 0.5) - t) ** 2).sum() / 2 + 0.1 * v @ v)

    stars = [lowest(F, rng.normal(size=3)) for _ in range(30)]
    problem = fs.Bilevel(
        lambda x, y, s: ((y - t) ** 2).sum() / 2 + 0.1 * x @ x,
        lambda x, y, s: ((y - M @ x - s["a"]) ** 2).sum() / 2,
        project_y=fs.sets.Box(-0.5, 0.5), same_samples=True,
    )  # fmt: skip
    early = fs.FedRZOBilevel(0.02, 0.01, batch_size=None, two_sided=True)
    return Kind(problem, d.data(), np.zeros(3), stars[0], {"early": (early, 5)}, np.zeros(3), stars=stars)


@kind
def moving_ball(rng: Rng) -> Kind:
    """A lower level in a ball whose radius is |x|."""
    d, t = Samples.draw(rng, 2), np.array([0.5, 0.5])
    d.a += 2
    m = d.q @ d.a

    def F(v: np.ndarray) -> float:
        y = m * min(1.0, abs(v[0]) / float(np.linalg.norm(m)))
        return float(((y - t) ** 2).sum() / 2 + 0.05 * v[0] ** 2)

    r = optimize.minimize_scalar(lambda z: F(np.array([z])), bounds=(0.01, 6), method="bounded",
                                 options={"xatol": 1e-10}).x  # fmt: skip
    problem = fs.Bilevel(
        lambda x, y, s: ((y - t) ** 2).sum() / 2 + 0.05 * x[0] ** 2,
        lambda x, y, s: ((y - s["a"]) ** 2).sum() / 2,
        project_y=lambda y, x: y * jnp.minimum(1.0, jnp.abs(x[0]) / jnp.maximum(jnp.linalg.norm(y), 1e-12)),
        same_samples=True,
    )
    values = {"batch_size": None, "two_sided": True, "lower_tol": 1e-6}
    runs = {"full": (fs.FedRZOBilevel(0.2, 0.01, **values), 300), "early": (fs.FedRZOBilevel(0.01, 0.01), 3)}
    stars = [np.array([r]), np.array([-r])]
    return Kind(problem, d.data(), np.array([2.5]), stars[0], runs, np.zeros(2), F, stars=stars)


@kind
def values_above(rng: Rng) -> Kind:
    """An upper level with values only, and with kinks."""
    d = Samples.draw(rng, 2, (3, 4, 3))
    m = d.q @ d.a

    def F(v: np.ndarray) -> float:
        return float(np.abs(v + m - 1).sum() + v @ v / 4)

    best = lowest(F, np.zeros(2), rng)

    def upper(x: Any, y: Any, s: Any) -> float:
        return float(np.abs(np.asarray(y) - 1).sum() + np.sum(np.asarray(x) ** 2) / 4)

    problem = fs.Bilevel(
        fs.black_box(upper), lambda x, y, s: ((y - x - s["a"]) ** 2).sum() / 2, same_samples=True
    )
    early = fs.FedRZOBilevel(0.01, 0.01, batch_size=None, two_sided=True)
    return Kind(problem, d.data(), np.full(2, 3.0), best, {"early": (early, 3)}, np.zeros(2), F, stars=[best])


@kind
def singletons(rng: Rng) -> Kind:
    """Personal models of clients with one sample each."""
    m, n = 6, 2
    a, b = 0.5 * rng.normal(size=(m, 1, n)), rng.normal(size=(m, 1))
    sa, sb = rng.normal(size=(20, n)), rng.normal(size=20) + 1

    def F(v: np.ndarray) -> float:
        own = [np.linalg.solve(A.T @ A + np.eye(n), A.T @ B + v) for A, B in zip(a, b, strict=True)]
        return float(np.mean((sa @ v - sb) ** 2) / 2 + np.mean([((v - y) ** 2).sum() / 2 for y in own]))

    best = lowest(F, np.zeros(n))
    problem = fs.Personalized(
        lambda x, s: (s["a"] @ x - s["b"]) ** 2 / 2,
        lambda x, y: ((x - y) ** 2).sum() / 2,
        lambda x, y, s: (s["a"] @ y - s["b"]) ** 2 / 2 + ((y - x) ** 2).sum() / 2,
    )
    clients = [{"a": A, "b": B} for A, B in zip(a, b, strict=True)]
    data = fs.FederatedData.from_clients(clients, server={"a": sa, "b": sb})
    runs = {"early": (fs.ZOHFL(0.01, 0.05, 20, gamma_client=0.3), 5)}
    return Kind(problem, data, np.full(n, 3.0), best, runs, np.zeros(n), F, stars=[best])


# Games


@kind
def boxes(rng: Rng) -> Kind:
    """A payoff that is linear in x and in y, both in boxes, by a linear program."""
    d, n, p = Samples.draw(rng, 3), 3, 4
    A, c = rng.normal(size=(len(d.b), n, p)), rng.normal(size=p)
    Am, bm = np.tensordot(d.q, A, 1), d.q @ d.a

    def F(v: np.ndarray) -> float:
        outside = np.abs(v - np.clip(v, 0, 1)).max() > 0.01
        return np.inf if outside else float(bm @ v + np.abs(Am.T @ v + c).sum())

    above = np.block([[Am.T, -np.eye(p)], [-Am.T, -np.eye(p)]])
    bounds = [(0, 1)] * n + [(0, None)] * p
    best = optimize.linprog(np.r_[bm, np.ones(p)], above, np.r_[-c, c], bounds=bounds).x[:n]
    problem = fs.Minimax(
        lambda x, y, s: x @ s["A"] @ y + s["a"] @ x + c @ y,
        project_x=fs.sets.Box(0.0, 1.0), project_y=fs.sets.Box(-1.0, 1.0),
    )  # fmt: skip
    runs = {"GDA": (fs.LocalSGDA(0.02, 0.2), 3000), "early": (fs.LocalSGDA(0.001, 0.1), 5)}
    return Kind(problem, d.data(A=A), np.full(n, 0.5), best, runs, np.zeros(p), F, stars=[best])


@kind
def bilinear(rng: Rng) -> Kind:
    """A payoff that is linear in x and in y, without sets."""
    A, n = 2 * np.eye(3) + 0.3 * rng.normal(size=(4, 5, 3, 3)), 3
    b, c = rng.normal(size=(4, 5, n)), rng.normal(size=(4, 5, n))
    mean = A.mean((0, 1))
    best, y_star = -np.linalg.solve(mean.T, c.mean((0, 1))), -np.linalg.solve(mean, b.mean((0, 1)))
    problem = fs.Minimax(lambda x, y, s: x @ s["A"] @ y + s["b"] @ x + s["c"] @ y)
    runs = {"outwards": (fs.LocalSGDA(0.05, 0.05), 300)}
    data = fs.FederatedData.from_clients([{"A": A[i], "b": b[i], "c": c[i]} for i in range(4)])
    return Kind(problem, data, np.ones(n), best, runs, y_star + 1, stars=[best])


@kind
def simplex(rng: Rng) -> Kind:
    """The worst of three groups, by weights on a simplex."""
    d, g = Samples.draw(rng, 2), rng.integers(0, 3, 54)
    d.b += 1.5 * g

    def F(v: np.ndarray) -> float:
        own = (d.a @ v - d.b) ** 2 / 2 + 0.05 * v @ v
        return float(max(3 * d.q @ (own * (g == j)) for j in range(3)))

    best = lowest(F, np.zeros(2), rng)
    problem = fs.Minimax(
        lambda x, y, s: 3 * y[s["g"]] * ((s["a"] @ x - s["b"]) ** 2 / 2 + 0.05 * x @ x),
        project_y=fs.sets.Simplex(),
    )
    runs = {"GDA": (fs.LocalSGDA(0.01, 0.01), 4000), "early": (fs.LocalSGDA(0.001, 0.01), 5)}
    return Kind(problem, d.data(g=g), np.zeros(2), best, runs, np.full(3, 1 / 3), F, stars=[best])


# Compositions, selections, equations


@kind
def three_levels(rng: Rng) -> Kind:
    """log mean exp of a linear mean, with a third level outside."""
    d, V = Samples.draw(rng, 3), rng.normal(size=(2, 3))
    w = rng.normal(size=(len(d.b), 2, 3))
    W = np.tensordot(d.q, w, 1)

    def F(v: np.ndarray) -> float:
        own = d.a @ (V.T @ (W @ v))
        return float(np.log(d.q @ np.exp(own - own.max())) + own.max() + v @ v / 2)

    best = lowest(F, np.zeros(3))
    problem = fs.Composition(
        [lambda x, s: s["w"] @ x, fs.LogMeanExp(lambda z, s: s["a"] @ (V.T @ z)), lambda u: u],
        plain=lambda x, s: x @ x / 2,
    )
    runs = {"FedMSA": (fs.FedMSA(0.03, 0.5), 1500), "early": (fs.FedMSA(0.001, 0.5), 10)}
    return Kind(problem, d.data(w=w), np.full(3, 2.0), best, runs, F=F, stars=[best])


@kind
def mean_variance(rng: Rng) -> Kind:
    """Mean and variance of losses that are not convex, half of the clients in a round."""
    d = Samples.draw(rng, 3, (5, 20, 60), "size")

    def F(v: np.ndarray) -> float:
        own = np.log1p((d.a @ v - d.b) ** 2)
        return float(d.q @ own + 0.3 * (d.q @ own**2 - (d.q @ own) ** 2) + 0.05 * v @ v)

    def two(x: Any, s: Any) -> Any:
        own = jnp.log1p((s["a"] @ x - s["b"]) ** 2)
        return jnp.stack([own, own**2])

    stars = [lowest(F, rng.normal(size=3)) for _ in range(6)]
    problem = fs.Composition(
        [two, lambda z: z[0] + 0.3 * (z[1] - z[0] ** 2)], plain=lambda x, s: 0.05 * x @ x
    )
    runs = {
        "FedMSA": (fs.FedMSA(0.1, 0.5), 1500, {"participation": 1.0}),
        "early": (fs.FedMSA(0.001, 0.5), 10),
    }
    options = {"weights": "size", "participation": 0.5}
    return Kind(problem, d.data(), np.ones(3), stars[0], runs, options=options, stars=stars)


@kind
def sparse(rng: Rng) -> Kind:
    """The solution of too few equations with the least ℓ₁ norm, by a linear program."""
    n = 8
    A, known = rng.normal(size=(4, n)), np.zeros(n)
    known[:2] = 2, -1
    both = optimize.linprog(np.ones(2 * n), A_eq=np.c_[A, -A], b_eq=A @ known, bounds=[(0, None)] * (2 * n)).x
    best = both[:n] - both[n:]
    clients = [{"a": row[None], "b": np.array([row @ known])} for row in A]
    problem = fs.Selection(lambda x, s: (s["a"] @ x - s["b"]) ** 2 / 2, fs.prox.L1())
    runs = {"geometric": (fs.StRFedAvg("geometric"), 4000), "early": (fs.StRFedAvg("geometric"), 20)}
    data = fs.FederatedData.from_clients(clients)
    return Kind(problem, data, np.full(n, 0.5), best, runs, stars=[best])


@kind
def bent_secondary(rng: Rng) -> Kind:
    """A secondary loss with two minima and a maximum on the line of optima; it bends down at the start."""
    tilt = 0.2 * rng.uniform(0.5, 1)
    roots = np.sort(np.roots([1, 0, -1, tilt]).real)
    on_line = [np.array([1 + z, 1 - z]) / 2 for z in roots]
    clients = [{"a": np.array([[k, k]]), "b": np.array([k])} for k in (1.0, 2.0)]
    problem = fs.Selection(
        lambda x, s: (s["a"] @ x - s["b"]) ** 2 / 2,
        lambda x: ((x[0] - x[1]) ** 2 - 1) ** 2 / 4 + tilt * (x[0] - x[1]),
    )
    runs = {"geometric": (fs.StRFedAvg("geometric"), 4000)}
    stars, elsewhere = [on_line[0], on_line[2]], [on_line[1]]
    data = fs.FederatedData.from_clients(clients)
    return Kind(problem, data, np.array([0.3, 0.2]), stars[0], runs, stars=stars, elsewhere=elsewhere)


@kind
def chained(rng: Rng) -> Kind:
    """Three sequences that are not linear."""
    d = Samples.draw(rng, 2)
    m = d.q @ d.a

    def equations(u: np.ndarray) -> np.ndarray:
        x, z1, z2, z3 = np.split(u, 4)
        P = 2 * x + 0.3 * z3 + 0.2 * np.sin(z1) - m
        return np.r_[P, z1 - x / 2 - m, 2 * z2 - z1 + 0.1 * z2**3, z3 - z2 - 1]

    best = optimize.fsolve(equations, np.zeros(8), xtol=1e-13)[:2]
    problem = fs.MultiSequence(
        lambda x, Z, s: 2 * x + 0.3 * Z[2] + 0.2 * jnp.sin(Z[0]) - s["a"],
        [
            lambda x, z, s: z - x / 2 - s["a"],
            lambda y, z, s: 2 * z - y + 0.1 * z**3,
            lambda y, z, s: z - y - 1,
        ],
    )
    runs = {"FedMSA": (fs.FedMSA(0.1, 0.3), 500), "early": (fs.FedMSA(0.001, 0.3), 5)}
    y0 = tuple(np.zeros(2) for _ in range(3))
    return Kind(problem, d.data(), np.full(2, 3.0), best, runs, y0, stars=[best])


# Counting


def like(x: Any, values: np.ndarray) -> Any:
    """Flat numbers in the form of x."""
    leaves, form = jax.tree.flatten(x)
    ends = np.cumsum([np.size(leaf) for leaf in leaves])[:-1]
    parts = np.split(np.asarray(values), ends)
    return form.unflatten([part.reshape(np.shape(leaf)) for part, leaf in zip(parts, leaves, strict=True)])


def points(trial: Kind, seed: int) -> Iterator[tuple[str, Any, fs.Certificate]]:
    """Solutions, points around them, the start, and points that are not solutions."""
    rng, asked = np.random.default_rng(seed), [("start", flat(trial.x0))]
    asked += [(f"elsewhere {i}", x) for i, x in enumerate(trial.elsewhere)]
    for i, star in enumerate(trial.stars[:2]):
        away = rng.normal(size=star.size)
        away *= np.linalg.norm(star) / np.linalg.norm(away)
        asked += [(f"{part:.1%} from {i}", star + part * away) for part in (0.0, 0.003, 0.1, 0.5)]
    weights = trial.options.get("weights", "uniform")
    for name, at in asked:
        x = like(trial.x0, at)
        yield (
            name,
            x,
            fs.certify(trial.problem, trial.data, x, trial.y0, x0=trial.x0, y0=trial.y0, weights=weights),
        )


def by_auto(trial: Kind, seed: int, seconds: float) -> Iterator[tuple[str, Any, fs.Certificate]]:
    """One run without hyper-parameters."""
    options = {
        "y0": trial.y0,
        "seed": seed,
        "progress": False,
        "budget": {"seconds": seconds},
        **trial.options,
    }
    result = fs.solve(trial.problem, "auto", trial.data, trial.x0, **options)
    yield "auto", result.x, result.certificate


def main() -> None:
    """Print what was wrong, and the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--what", choices=("points", "runs", "auto"), default="points")
    parser.add_argument("--seconds", type=float, default=120.0, help="of a run of auto")
    parser.add_argument("names", nargs="*", metavar="NAME")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    judged = {"points": points, "runs": answers, "auto": lambda t, seed: by_auto(t, seed, asked.seconds)}
    found: Counter[str] = Counter()
    for name in asked.names or KINDS:
        for seed in range(asked.first, asked.first + asked.seeds):
            trial, began = KINDS[name](np.random.default_rng([seed, *name.encode()])), time.perf_counter()
            jax.config.update("jax_enable_x64", trial.x64)
            for label, x, certificate in judged[asked.what](trial, seed):
                truth = trial.truth(x)
                wrong = {"right": "alarms", "wrong": "misses"}.get(truth, "")
                found[truth] += 1
                if wrong and certificate.solved != (truth == "right"):
                    found[wrong] += 1
                    print(f"{wrong}: {name}, {label}, seed {seed}: {certificate!r}", flush=True)
                elif asked.what == "auto" and truth != "right":
                    print(f"{name}, seed {seed}, {truth}: {certificate!r}", flush=True)
            print(f"{name} {seed}: {time.perf_counter() - began:.0f} s", flush=True)
    columns = ("right", "alarms", "wrong", "misses", "between")
    print(f"\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    print(f"| {' | '.join(str(found[key]) for key in columns)} |")


if __name__ == "__main__":
    main()
