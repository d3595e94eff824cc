"""How often a certificate is wrong, on random problems with known solutions.

    python -m benchmarks.verdicts [--seeds 3] [--first 0] [--x64] [--points | --reasons] [NAME …]

Some runs reach the solution, others do not. A run is *right* where x is within 1 % of the solution, or its
excess within 10⁻⁴ of the start's and of zero's. It is *wrong* where x is more than 3 % away and its excess
more than 10⁻³ of them; what lies between is left out. An alarm is a right run that is not called solved; a
miss is a wrong run that is. Solutions come from closed forms, linear programs and SciPy, not from the
certificate. Units of losses and variables, weights, sizes, starts and conditioning are drawn too.

`--reasons` counts how often the word for why a wrong run is wrong is right. What is right is found by running
again with four times the rounds: where x is then less than half as far away, or its excess less than a third,
the run was on its way; where it ends farther away than it began, it diverges. Else the cause is the one that
the run was given (`CAUSES`).
"""

from __future__ import annotations

import argparse
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

Rng = np.random.Generator
FAMILIES: dict[str, Callable[[Rng], Trial]] = {}


@dataclass
class Trial:
    """A problem with its solution, and runs: name → method, rounds and further arguments of `fs.solve`."""

    problem: Any
    data: fs.FederatedData
    x0: Any
    x_star: Any
    runs: dict[str, tuple[Any, ...]]
    y0: Any = None
    F: Callable[[np.ndarray], float] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def truth(self, x: Any) -> str:
        """Whether an answer is right, wrong, or between."""
        at, best, start = (flat(getattr(each, "x", each)) for each in (x, self.x_star, self.x0))
        error, excess = float(np.linalg.norm(at - best) / np.linalg.norm(best)), np.inf
        if self.F is not None:
            least = self.F(best)
            excess = (self.F(at) - least) / min(self.F(start) - least, self.F(0 * best) - least)
        if error <= 1e-2 or abs(excess) <= 1e-4:
            return "right"
        return "wrong" if error > 3e-2 and abs(excess) > 1e-3 else "between"

    def error(self, x: Any) -> tuple[float, float]:
        """The distance from the solution, and the excess (infinite where F is not known)."""
        at, best = flat(getattr(x, "x", x)), flat(self.x_star)
        excess = np.inf if self.F is None else self.F(at) - self.F(best)
        return float(np.linalg.norm(at - best)), float(excess)


CAUSES = {  # of a run that further rounds do not help
    "drift": ("biased by drift",),
    "biased": ("biased by drift",),
    "mean": ("biased by drift",),
    "noise": ("at the noise floor",),
    "few clients": ("at the noise floor",),
    "default batch": ("at the noise floor",),
    "values": ("at the noise floor",),
    "decay": ("at the noise floor", "on its way", "oscillating"),
    "constant": ("oscillating",),
    "too long": ("diverging", "oscillating"),
    "early": ("on its way",),
    "slow y": ("on its way",),
    "penalty": ("biased by drift", "on its way"),  # x stays outside of its set
    "few steps": ("at the noise floor", "biased by drift", "on its way"),  # of clients' own models, and drawn
}


def flat(x: Any) -> np.ndarray:
    """All numbers of a pytree, in float64."""
    return np.concatenate([np.ravel(np.asarray(leaf, float)) for leaf in jax.tree.leaves(x)])


def family(build: Callable[[Rng], Trial]) -> Callable[[Rng], Trial]:
    """Register a family of random problems."""
    FAMILIES[build.__name__] = build
    return build


@dataclass
class Regression:
    """Clients of unequal size that differ, their pooled arrays and the samples' weights."""

    clients: list[dict[str, np.ndarray]]
    weights: str

    @classmethod
    def draw(cls, rng: Rng, n: int, weights: str | None = None, shift: float = 0.5) -> Regression:
        """Of three to six clients with n features."""
        clients = []
        for size in rng.integers(n + 3, n + 12, rng.integers(3, 7)):
            a = rng.normal(size=(size, n)) + 0.5 * rng.normal(size=n)
            clients.append({"a": a, "b": rng.normal(size=size) + shift * rng.normal()})
        return cls(clients, weights or str(rng.choice(["uniform", "size"])))

    def __post_init__(self) -> None:
        sizes = np.array([len(c["b"]) for c in self.clients])
        own = sizes / sizes.sum() if self.weights == "size" else np.full(len(sizes), 1 / len(sizes))
        self.q = np.repeat(own / sizes, sizes)
        self.a, self.b = (np.concatenate([c[name] for c in self.clients]) for name in "ab")
        self.hessian = (self.a * self.q[:, None]).T @ self.a
        self.slope = (self.a * self.q[:, None]).T @ self.b
        self.L = float(np.linalg.eigvalsh(self.hessian)[-1])
        each = [np.linalg.eigvalsh(c["a"].T @ c["a"] / len(c["b"]))[-1] for c in self.clients]
        self.client_L = float(max(each))
        self.data = fs.FederatedData.from_clients(self.clients)
        self.options = {"weights": self.weights}


def unit(rng: Rng, digits: float = 3) -> float:
    """A unit between 10^−digits and 10^digits."""
    return float(10 ** rng.uniform(-digits, digits))


@family
def minimization(rng: Rng) -> Trial:
    """Ridge regression in any unit of the loss and of x."""
    n, c, s = int(rng.integers(2, 8)), unit(rng), unit(rng, 2)
    d = Regression.draw(rng, n)
    x_star = np.linalg.solve(d.hessian + 0.1 * np.eye(n), d.slope) / s

    def F(x: np.ndarray) -> float:
        return float(c * (d.q @ (d.a @ x * s - d.b) ** 2 + 0.1 * s**2 * x @ x) / 2)

    def loss(x: Any, sample: Any) -> Any:
        return c * ((sample["a"] @ x * s - sample["b"]) ** 2 + 0.1 * s**2 * x @ x) / 2

    step, own = 1 / (c * s**2 * (d.L + 0.1)), 1 / (c * s**2 * (d.client_L + 0.1))
    runs = {
        "full": (fs.FedAvg(step), 500),
        "corrected": (fs.SCAFFOLD(0.3 * own, 1.0, K=5), 500),
        "early": (fs.FedAvg(0.3 * step), 3),
        "drift": (fs.FedAvg(0.5 * own, H=10), 300),
        "noise": (fs.FedAvg(0.3 * own, batch_size=1), 300),
        "few clients": (fs.FedAvg(0.3 * own), 300, {"participation": 0.5}),
        "too long": (fs.FedAvg(2.5 * step), 20),
    }
    return Trial(
        fs.Minimization(loss), d.data, np.full(n, rng.normal()) / s, x_star, runs, F=F, options=d.options
    )


@family
def nonsmooth(rng: Rng) -> Trial:
    """Least absolute deviations, by a linear program."""
    n, c = int(rng.integers(1, 5)), unit(rng)
    d = Regression.draw(rng, n)
    count = len(d.b)
    above = np.block([[d.a, -np.eye(count)], [-d.a, -np.eye(count)]])
    bounds = [(None, None)] * n + [(0, None)] * count
    best = optimize.linprog(np.r_[np.zeros(n), d.q], above, np.r_[d.b, -d.b], bounds=bounds).x[:n]
    problem = fs.Minimization(lambda x, s: c * jnp.abs(s["a"] @ x - s["b"]))
    runs = {
        "decay": (fs.FedAvg(lambda r: 0.5 / c / (1 + r) ** 0.8), 4000),
        "values": (
            fs.FedRZO(lambda r: 0.3 / c / (1 + r) ** 0.75, 0.01, batch_size=None, two_sided=True),
            4000,
        ),
        "constant": (fs.FedAvg(0.3 / c), 300),
        "early": (fs.FedAvg(0.05 / c), 10),
    }
    F = lambda x: float(c * d.q @ np.abs(d.a @ x - d.b))  # noqa: E731
    return Trial(problem, d.data, np.full(n, 2.0), best, runs, F=F, options=d.options)


@family
def boxed(rng: Rng) -> Trial:
    """Least squares in a box that holds it back."""
    n = int(rng.integers(2, 8))
    d = Regression.draw(rng, n, shift=2.0)
    root = np.sqrt(d.q)
    best = optimize.lsq_linear(d.a * root[:, None], d.b * root, bounds=(-0.1, 0.15), tol=1e-13).x
    problem = fs.Minimization(lambda x, s: (s["a"] @ x - s["b"]) ** 2 / 2, project=fs.sets.Box(-0.1, 0.15))
    runs = {
        "full": (fs.FedAvg(1 / d.L), 2000),
        "drift": (fs.FedAvg(0.5 / d.client_L, H=10), 300),
        "early": (fs.FedAvg(0.02 / d.L), 3),
        "penalty": (fs.FedRZO(0.2 / d.L / (1 + n), 0.1, batch_size=None, two_sided=True), 500),
    }
    return Trial(problem, d.data, np.zeros(n), best, runs, options=d.options)


@family
def bilevel(rng: Rng) -> Trial:
    """Quadratic levels, each in its own unit."""
    game = fs.quadratic_bilevel(int(rng.integers(2, 6)), int(rng.integers(2, 5)), int(rng.integers(2, 6)),
                                seed=int(rng.integers(10**6)))  # fmt: skip
    up, low, (n, p) = unit(rng), unit(rng), (len(game.x_star), len(game.y_star))
    problem = fs.Bilevel(
        lambda x, y, s: up * game.problem.upper(x, y, s),
        lambda x, y, s: low * game.problem.lower(x, y, s),
        same_samples=True,
    )
    A, B, M = (np.asarray(game.data.train[name], float).mean(0) for name in "ABM")
    through = np.r_[np.eye(n), np.linalg.solve(A, B)]
    alpha = 0.1 / (up * np.linalg.eigvalsh(through.T @ M @ through)[-1])
    beta = 0.3 / (low * np.linalg.eigvalsh(A)[-1])
    runs = {
        "FedMSA": (fs.FedMSA(alpha, beta, K=5), 1000),
        "exact": (fs.HypergradientDescent(3 * alpha, beta, T=10, N=20), 500),
        "early": (fs.FedMSA(alpha, beta), 5),
        "slow y": (fs.FedMSA(10 * alpha, beta / 300, K=5), 100),
        "drift": (fs.SimFBO(alpha, beta, beta, 1.0, 1.0, 1.0, tau=5), 500),
    }
    return Trial(problem, game.data, np.zeros(n), game.x_star, runs, np.zeros(p))


@family
def tuning(rng: Rng) -> Trial:
    """Penalties of a ridge regression by validation loss: F is not convex."""
    n = int(rng.integers(2, 5))
    d, v = Regression.draw(rng, n, "uniform"), Regression.draw(rng, n, "uniform")
    d.clients, v.clients = d.clients[:3], v.clients[:3]
    d.__post_init__()
    v.__post_init__()

    def F(x: np.ndarray) -> float:
        y = np.linalg.solve(d.hessian + np.diag(np.exp(x)), d.slope)
        return float(v.q @ (v.a @ y - v.b) ** 2 / 2 + 0.01 * x @ x)

    best = optimize.minimize(F, np.zeros(n), method="BFGS", options={"gtol": 1e-9}).x
    problem = fs.Bilevel(
        lambda x, y, s: (s["a"] @ y - s["b"]) ** 2 / 2 + 0.01 * x @ x,
        lambda x, y, s: (s["a"] @ y - s["b"]) ** 2 / 2 + jnp.exp(x) @ y**2 / 2,
    )
    beta = 0.5 / (d.L + 1)
    values = fs.FedRZOBilevel(0.1, 0.05, two_sided=True, batch_size=None, lower_tol=1e-4)
    runs = {
        "exact": (fs.HypergradientDescent(1.0, beta, T=30, N=30), 2000),
        "values": (values, 1500),
        "early": (fs.FedMSA(0.05, beta), 10),
    }
    data = fs.FederatedData.from_clients(d.clients, valid=v.clients)
    return Trial(problem, data, np.full(n, 0.3), best, runs, np.zeros(n), F)


@family
def minimax(rng: Rng) -> Trial:
    """Quadratic payoffs, in any unit."""
    game = fs.quadratic_minimax(int(rng.integers(2, 6)), int(rng.integers(2, 5)), int(rng.integers(2, 6)),
                                seed=int(rng.integers(10**6)))  # fmt: skip
    c, (n, p) = unit(rng), (len(game.x_star), len(game.y_star))
    step = 1 / (c * np.linalg.norm(np.asarray(game.data.train["M"], float).mean(0), 2))
    runs = {
        "LocalSGDA": (fs.LocalSGDA(0.1 * step, 0.2 * step, tau=1), 3000),
        "values": (fs.FedRZOMinimax(0.3 * step / (1 + n), 0.01, two_sided=True, batch_size=None), 1000),
        "drift": (fs.LocalSGDA(0.1 * step, 0.1 * step, tau=10), 500),
        "early": (fs.LocalSGDA(0.02 * step, 0.05 * step, tau=1), 10),
    }
    problem = fs.Minimax(lambda x, y, s: c * game.problem.payoff(x, y, s))
    return Trial(problem, game.data, np.zeros(n), game.x_star, runs, np.zeros(p))


@family
def corners(rng: Rng) -> Trial:
    """A payoff that is convex in y on a box: the maximum is at a corner, which gradients do not look for."""
    n = int(rng.integers(1, 3))
    a = rng.normal(size=(4, 3, n)) + 2 * rng.choice([-1, 1], n)
    centre = a.mean((0, 1))
    problem = fs.Minimax(
        lambda x, y, s: ((x - s["a"]) ** 2).sum() / 2 + y @ x / 2 + y @ y, project_y=fs.sets.Box(-1.0, 1.0)
    )
    best = np.sign(centre) * (np.abs(centre) - 0.5)
    runs = {"descent": (fs.LocalSGDA(0.1, 0.1, tau=1), 500), "early": (fs.LocalSGDA(0.01, 0.1, tau=1), 5)}
    data = fs.FederatedData.from_clients([{"a": own} for own in a])
    y0 = rng.choice([-0.01, 0.01], n)
    return Trial(problem, data, np.zeros(n), best, runs, y0)


@family
def equilibrium(rng: Rng) -> Trial:
    """Cournot games whose solution the problem does not know."""
    game = fs.cournot_game(clients=int(rng.integers(2, 5)), seed=int(rng.integers(10**6)))
    known = game.problem
    problem = fs.MPEC(known.leader, known.follower, known.project_x, known.project_y)

    def method(gamma: float, **options: Any) -> Any:
        return fs.FedRZOTwoStage(gamma, 0.05, lower="extragradient", tol=1e-6, **options)

    runs = {
        "full": (method(0.05, two_sided=True, batch_size=None), 400),
        "default batch": (method(0.02), 100),
        "early": (method(0.02, batch_size=None), 5),
    }
    return Trial(problem, game.data, np.array(0.1), np.array(game.optimum[0]), runs, np.zeros(len(game.c)))


@family
def selection(rng: Rng) -> Trial:
    """The smallest solution of too few equations, levels in any units."""
    n, c, own = int(rng.integers(4, 8)), unit(rng, 2), unit(rng, 2)
    clients = [{"a": rng.normal(size=(1, n)), "b": rng.normal(size=1)} for _ in range(3)]
    a, b = (np.concatenate([each[name] for each in clients]) for name in "ab")
    L = float(c * np.linalg.eigvalsh(a.T @ a / 3)[-1])
    problem = fs.Selection(lambda x, s: c * (s["a"] @ x - s["b"]) ** 2 / 2, lambda x: own * (x @ x) / 2)
    runs = {
        "geometric": (fs.StRFedAvg("geometric"), 3000),
        "BiG-SAM": (fs.BiGSAM(mu_f=own, L_h=L, L_f=own), 3000),
        "constant": (fs.StRFedAvg("convex"), 1000),
        "early": (fs.StRFedAvg("geometric"), 10),
    }
    return Trial(
        problem, fs.FederatedData.from_clients(clients), np.full(n, 0.7), np.linalg.pinv(a) @ b, runs
    )


@family
def personal(rng: Rng) -> Trial:
    """Ridge regressions of the clients' own, drawn to a common one."""
    n = int(rng.integers(1, 4))
    d, server = Regression.draw(rng, n, "uniform"), Regression.draw(rng, n).clients[0]
    hessians = [c["a"].T @ c["a"] / len(c["b"]) + np.eye(n) for c in d.clients]
    slopes = [c["a"].T @ c["b"] / len(c["b"]) for c in d.clients]

    def F(x: np.ndarray) -> float:
        own = [np.linalg.solve(H, r + x) for H, r in zip(hessians, slopes, strict=True)]
        fit = ((server["a"] @ x - server["b"]) ** 2).mean() / 2
        return float(fit + 0.05 * x @ x + np.mean([((x - y) ** 2).sum() / 2 for y in own]))

    best = optimize.minimize(F, np.zeros(n), method="BFGS", options={"gtol": 1e-10}).x
    problem = fs.Personalized(
        lambda x, s: (s["a"] @ x - s["b"]) ** 2 / 2 + 0.05 * x @ x,
        lambda x, y: ((x - y) ** 2).sum() / 2,
        lambda x, y, s: (s["a"] @ y - s["b"]) ** 2 / 2 + ((x - y) ** 2).sum() / 2,
    )
    step = 1 / (d.client_L + 1)

    def method(gamma: Any, H: int) -> Any:
        batches = {"batch_size": None, "server_batch_size": None}
        return fs.ZOHFL(gamma, 0.05, H=H, gamma_client=step, **batches)

    runs = {
        "decay": (method(lambda r: 0.1 / (1 + r / 20), 40), 3000),
        "few steps": (method(0.02, 1), 300),
        "early": (method(0.01, 2), 10),
    }
    data = fs.FederatedData.from_clients(d.clients, server=server)
    return Trial(problem, data, np.full(n, 2.0), best, runs, np.zeros(n), F)


@family
def robust(rng: Rng) -> Trial:
    """KL-robust regression."""
    n = int(rng.integers(2, 5))
    d = Regression.draw(rng, n)

    def F(x: np.ndarray) -> float:
        losses = (d.a @ x - d.b) ** 2 / 2
        return float(losses.max() + np.log(d.q @ np.exp(losses - losses.max())))

    best = optimize.minimize(F, np.zeros(n), method="BFGS", options={"gtol": 1e-9}).x
    runs = {
        "full": (fs.FedDRO(0.05, 0.9), 2000),
        "noise": (fs.FedDRO(0.1, 0.5, I=4, batch_size=2), 200),
        "biased": (fs.CompositionalFedAvg(0.05, I=4), 500),
        "early": (fs.FedDRO(0.01, 0.9), 5),
    }
    problem = fs.dro.kl(lambda x, s: (s["a"] @ x - s["b"]) ** 2 / 2, 1.0)
    return Trial(problem, d.data, np.zeros(n), best, runs, F=F, options=d.options)


@family
def tails(rng: Rng) -> Trial:
    """CVaR of absolute deviations, by a linear program."""
    n, level = int(rng.integers(1, 4)), 0.4
    d = Regression.draw(rng, n)
    count = len(d.b)
    ones, eye = np.ones((count, 1)), np.eye(count)
    above = np.block([[d.a, -ones, -eye], [-d.a, -ones, -eye]])
    bounds = [(None, None)] * (n + 1) + [(0, None)] * count
    cost = np.r_[np.zeros(n), 1, d.q / level]
    best = optimize.linprog(cost, above, np.r_[d.b, -d.b], bounds=bounds).x[:n]

    def F(x: np.ndarray) -> float:
        losses = np.abs(d.a @ x - d.b)
        return float(min(eta + d.q @ np.maximum(losses - eta, 0) / level for eta in losses))

    runs = {
        "decay": (fs.FedDRO(lambda r: 0.3 / (1 + r) ** 0.8, 0.9), 6000),
        "constant": (fs.FedDRO(0.2, 0.9), 100),
        "early": (fs.FedDRO(0.05, 0.9), 5),
    }
    problem = fs.dro.cvar(lambda x, s: jnp.abs(s["a"] @ x - s["b"]), level)
    return Trial(problem, d.data, np.full(n, 2.0), best, runs, F=F, options=d.options)


@family
def worst_client(rng: Rng) -> Trial:
    """The largest of the clients' losses, by sequential quadratic programming."""
    n = int(rng.integers(1, 4))
    d = Regression.draw(rng, n, "uniform")

    def losses(x: np.ndarray) -> np.ndarray:
        return np.array([((c["a"] @ x - c["b"]) ** 2).mean() / 2 + 0.05 * x @ x for c in d.clients])

    bound = {"type": "ineq", "fun": lambda z: z[-1] - losses(z[:-1])}
    options = {"ftol": 1e-14, "maxiter": 500}
    best = optimize.minimize(
        lambda z: z[-1], np.r_[np.zeros(n), 9.0], constraints=[bound], options=options
    ).x[:-1]
    problem = fs.Minimization(lambda x, s: (s["a"] @ x - s["b"]) ** 2 / 2 + 0.05 * x @ x)
    runs = {
        "AFL": (fs.AFL(0.05, 0.05), 8000),
        "early": (fs.AFL(0.01, 0.01), 20),
        "mean": (fs.AFL(0.1, 1e-6), 300),
    }
    return Trial(problem, d.data, np.full(n, 2.0), best, runs, F=lambda x: float(losses(x).max()))


@family
def sequences(rng: Rng) -> Trial:
    """Linear maps of two sequences."""
    n, p, m = 3, 2, 3
    shapes = {"A": (n, n), "B": (n, p), "C": (p, n), "D": (p, p), "e": (n,), "f": (p,)}
    arrays = {name: 0.3 * rng.normal(size=(m, 2, *shape)) for name, shape in shapes.items()}
    arrays["A"] += 2 * np.eye(n)
    arrays["D"] += 1.5 * np.eye(p)
    mean = {name: array.mean((0, 1)) for name, array in arrays.items()}
    matrix = np.block([[mean["A"], mean["B"]], [mean["C"], mean["D"]]])
    best = np.linalg.solve(matrix, np.r_[mean["e"], mean["f"]])[:n]
    problem = fs.MultiSequence(
        lambda x, Z, s: s["A"] @ x + s["B"] @ Z[0] - s["e"],
        [lambda x, z, s: s["C"] @ x + s["D"] @ z - s["f"]],
    )
    data = fs.FederatedData.from_clients([{k: v[i] for k, v in arrays.items()} for i in range(m)])
    runs = {"FedMSA": (fs.FedMSA(0.05, 0.1, K=5), 400), "early": (fs.FedMSA(0.01, 0.1), 10)}
    return Trial(problem, data, np.full(n, 1.5), best, runs, (np.zeros(p),))


def solved(trial: Trial, run: str, seed: int, times: int = 1) -> fs.Result:
    """A run, with so many times the rounds."""
    method, rounds, *more = trial.runs[run]
    options = {"eval_every": max(1, rounds * times // 200), "progress": False, "certify": False}
    options |= {"x0": trial.x0, "y0": trial.y0, "rounds": rounds * times, "seed": seed}
    try:
        return fs.solve(trial.problem, method, trial.data, **{**options, **trial.options, **dict(*more)})
    except fs.Diverged as diverged:
        return diverged.result


def answers(trial: Trial, seed: int) -> Iterator[tuple[str, Any, fs.Certificate]]:
    """The runs' names, answers and certificates."""
    for run in trial.runs:
        result = solved(trial, run, seed)
        yield run, result.x, fs.certify(result)


def reason(trial: Trial, run: str, x: Any, seed: int) -> tuple[str, ...]:
    """Why a run is wrong: what a right verdict may say."""
    begun, (away, excess) = trial.error(trial.x0), trial.error(x)
    if run == "early":
        return CAUSES[run]
    if (away if trial.F is None else excess) > begun[trial.F is not None]:
        return ("diverging", *CAUSES.get(run, ()))
    if run == "constant" and isinstance(trial.problem, fs.Selection):
        return ("biased by drift", "on its way")  # its eta falls with the rounds, by their root
    further, excess_further = trial.error(solved(trial, run, seed, times=4).x)
    if further < away / 2 or excess_further < excess / 3:
        return ("on its way", *(CAUSES[run] if run == "constant" else ()))
    return CAUSES.get(run, ("biased by drift", "on its way"))


def count_reasons(names: list[str], seeds: range) -> Counter[tuple[str, str]]:
    """How often which verdict was given for which reason."""
    found: Counter[tuple[str, str]] = Counter()
    for name in names:
        for seed in seeds:
            trial = FAMILIES[name](np.random.default_rng([seed, *name.encode()]))
            for run, x, certificate in answers(trial, seed):
                if trial.truth(x) != "wrong" or certificate.solved:
                    continue
                right = reason(trial, run, x, seed)
                said = certificate.verdict
                found[said if said in right else right[0], said] += 1
                if said not in right:
                    print(f"{name}, {run}, seed {seed}: {right} but {certificate!r}", flush=True)
    return found


def table_of_reasons(found: Counter[tuple[str, str]]) -> str:
    """Rows are what was the reason, columns what was said."""
    words = list(dict.fromkeys(each for pair in found for each in pair))
    lines = [f"| reason | {' | '.join(words)} |", "|---" * (len(words) + 1) + "|"]
    lines += [f"| {why} | {' | '.join(str(found[why, said]) for said in words)} |" for why in words]
    right = sum(count for (why, said), count in found.items() if why == said)
    return "\n".join([*lines, f"\nright: {right} of {found.total()}"])


def points(trial: Trial, seed: int) -> Iterator[tuple[str, Any, fs.Certificate]]:
    """The same of points beside the solution, of the problem that the trial's methods solve."""
    best, (method, *_) = flat(trial.x_star), next(iter(trial.runs.values()))
    problem = method.judged_as(trial.problem)
    away = np.random.default_rng(seed).normal(size=best.size)
    away *= np.linalg.norm(best) / np.linalg.norm(away)
    for part in (0.0, 0.003, 0.1, 0.5):
        x = (best + part * away).reshape(np.shape(trial.x_star))
        found = fs.certify(problem, trial.data, x, trial.y0, x0=trial.x0, y0=trial.y0, **trial.options)
        yield f"{part:.1%} away", x, found


def count(
    name: str, seeds: range, judged: Callable[..., Iterator[tuple[str, Any, fs.Certificate]]]
) -> Counter[str]:
    """Judge all answers of a family."""
    found: Counter[str] = Counter()
    for seed in seeds:
        trial = FAMILIES[name](np.random.default_rng([seed, *name.encode()]))
        for run, x, certificate in judged(trial, seed):
            truth = trial.truth(x)
            found[truth] += 1
            wrong = {"right": "alarms", "wrong": "misses"}.get(truth, "")
            if wrong and certificate.solved != (truth == "right"):
                found[wrong] += 1
                print(f"{wrong}: {name}, {run}, seed {seed}: {certificate!r}")
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--x64", action="store_true")
    parser.add_argument("--points", action="store_true", help="judge points beside the solutions, not runs")
    parser.add_argument("--reasons", action="store_true", help="count how often the verdict's word is right")
    parser.add_argument("names", nargs="*", default=[])
    asked = parser.parse_args()
    jax.config.update("jax_enable_x64", asked.x64)
    warnings.simplefilter("ignore")
    if asked.reasons:
        names = asked.names or list(FAMILIES)
        print(table_of_reasons(count_reasons(names, range(asked.first, asked.first + asked.seeds))))
        return
    total: Counter[str] = Counter()
    rows = []
    for name in asked.names or FAMILIES:
        found = count(
            name, range(asked.first, asked.first + asked.seeds), points if asked.points else answers
        )
        total += found
        rows.append(row(name, found))
        print(rows[-1], flush=True)
    print("\n| class | right runs | of them alarmed | wrong runs | of them called solved | between |")
    print("|---|---|---|---|---|---|")
    print("\n".join([*rows, row("all", total)]))


def row(name: str, found: Counter[str]) -> str:
    """A line of the table."""
    columns = (found[key] for key in ("right", "alarms", "wrong", "misses", "between"))
    return f"| {name} | {' | '.join(map(str, columns))} |"


if __name__ == "__main__":
    main()
