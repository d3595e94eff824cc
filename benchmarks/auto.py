"""How often ``fs.solve(problem, "auto", …)`` solves, on random problems with known solutions.

    python -m benchmarks.auto [--seeds 3] [--first 200] [--x64] [--docs] [NAME …]

The problems are those of `benchmarks.verdicts` (units of the loss and of x from 10⁻³ to 10³, unequal
clients, both weights), and further ones of condition numbers up to 10⁴. Of some classes half of the runs have
half of the clients in a round; a third starts a hundred times farther away. *Right* is an x within 1 % of the
solution, or an excess within 10⁻⁴ of the start's; *told* is a run that is not right and says that it is not
solved; *missed* is one that says it is, and *alarmed* a right one that says it is not. ``--docs`` runs the
numbers of the documentation's programs for the class in place of "auto".
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import optimize

import fedstrata as fs
from benchmarks.verdicts import FAMILIES, Regression, Rng, Trial, flat, unit

LEFT_OUT = ("worst_client",)  # what AFL solves: a method's own objective, not the problem's
HALF = ("minimization", "conditioned", "logistic", "boxed", "bilevel", "minimax", "sequences", "selection")
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


def conditioned(rng: Rng) -> Trial:
    """Ridge regression of a condition number up to 10⁴, in any unit."""
    n, c, s = int(rng.integers(2, 8)), unit(rng), unit(rng)
    d = Regression.draw(rng, n)
    spread = np.geomspace(1, 10 ** -rng.uniform(0, 2), n)
    for client in d.clients:
        client["a"] = client["a"] * spread
    d.__post_init__()
    best = np.linalg.solve(d.hessian, d.slope) / s

    def F(x: np.ndarray) -> float:
        return float(c * d.q @ (d.a @ x * s - d.b) ** 2 / 2)

    problem = fs.Minimization(lambda x, sample: c * (sample["a"] @ x * s - sample["b"]) ** 2 / 2)
    return Trial(problem, d.data, rng.normal(size=n) / s, best, {}, F=F, options=d.options)


def logistic(rng: Rng) -> Trial:
    """Logistic regression with a small penalty, in any unit."""
    n, c, s = int(rng.integers(2, 8)), unit(rng), unit(rng)
    d = Regression.draw(rng, n)
    for client in d.clients:
        client["b"] = np.sign(client["b"] + client["a"][:, 0])
    d.__post_init__()

    def F(z: np.ndarray) -> float:
        return float(d.q @ np.logaddexp(0, -d.b * (d.a @ z)) + 0.01 * z @ z)

    best = optimize.minimize(F, np.zeros(n), method="BFGS", options={"gtol": 1e-9}).x / s
    problem = fs.Minimization(
        lambda x, sample: c * (jnp.logaddexp(0, -sample["b"] * (sample["a"] @ x) * s) + 0.01 * s**2 * x @ x)
    )
    start = rng.normal(size=n) / s
    return Trial(problem, d.data, start, best, {}, F=lambda x: c * F(s * x), options=d.options)


def ill_bilevel(rng: Rng) -> Trial:
    """Quadratic levels, the lower one of a condition number up to 10³, each in its own unit."""
    n, p, m = int(rng.integers(2, 5)), int(rng.integers(2, 6)), int(rng.integers(2, 6))
    up, low, s = unit(rng), unit(rng), unit(rng)
    q = np.linalg.qr(rng.normal(size=(p, p)))[0]
    A0 = (q * np.geomspace(1, 10 ** -rng.uniform(0, 3), p)) @ q.T
    A = np.array([A0 * (1 + 0.3 * rng.random()) for _ in range(m)])
    B, c = rng.normal(size=(m, p, n)), rng.normal(size=(m, p))
    B = np.einsum("ij,mjk->mik", A0, B)
    d, e = rng.normal(size=(m, n)), rng.normal(size=(m, p))
    data = fs.FederatedData.from_clients(
        [
            {"A": A[i][None], "B": B[i][None], "c": c[i][None], "d": d[i][None], "e": e[i][None]}
            for i in range(m)
        ]
    )
    problem = fs.Bilevel(
        lambda x, y, S: up * (s**2 * (x @ x) / 2 + s * S["d"] @ x + 0.1 * y @ y / 2 + 0.1 * S["e"] @ y),
        lambda x, y, S: low * (y @ S["A"] @ y / 2 - y @ (S["B"] @ x * s + S["A"] @ S["c"])),
        same_samples=True,
    )
    mean = {"A": A.mean(0), "B": B.mean(0), "c": np.einsum("mij,mj->mi", A, c).mean(0)}
    T, t = np.linalg.solve(mean["A"], mean["B"]), np.linalg.solve(mean["A"], mean["c"])
    H = np.eye(n) + 0.1 * T.T @ T
    best = -np.linalg.solve(H, d.mean(0) + 0.1 * T.T @ (t + e.mean(0))) / s
    return Trial(problem, data, np.zeros(n), best, {}, np.zeros(p))


EVERY: dict[str, Callable[[Rng], Trial]] = {
    **{name: build for name, build in FAMILIES.items() if name not in LEFT_OUT},
    **{build.__name__: build for build in (conditioned, logistic, ill_bilevel)},
}


def drawn(name: str, seed: int) -> tuple[Trial, float]:
    """A trial, with its start moved and a part of the clients drawn."""
    rng = np.random.default_rng([seed, *name.encode()])
    trial, participation = EVERY[name](rng), 1.0
    if name in HALF and rng.random() < 0.5:
        participation = 0.5
    if isinstance(trial.problem, fs.Minimization | fs.Bilevel) and rng.random() < 1 / 3 and name != "tuning":
        trial = replace(trial, x0=100 * np.asarray(trial.x0))
    return trial, participation


def run(trial: Trial, participation: float, seed: int, docs: bool) -> fs.Result:
    """One call."""
    options = {"y0": trial.y0, "seed": seed, "progress": False, **trial.options}
    if not docs:
        options |= {"participation": participation}
        return fs.solve(trial.problem, "auto", trial.data, trial.x0, **options)
    (method,) = (build() for kind, build in DOCS.items() if isinstance(trial.problem, kind))
    options |= {"rounds": 1000, "eval_every": 10}
    try:
        return fs.solve(trial.problem, method, trial.data, trial.x0, **options)
    except fs.Diverged as diverged:
        return diverged.result


def count(name: str, seeds: range, docs: bool) -> Counter[str]:
    """All runs of a family."""
    found: Counter[str] = Counter()
    for seed in seeds:
        trial, participation = drawn(name, seed)
        began = time.perf_counter()
        try:
            result = run(trial, participation, seed, docs)
        except Exception as error:  # a crash is a failure that was told
            found |= Counter(runs=found["runs"] + 1, told=found["told"] + 1)
            print(f"{name} {seed}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            continue
        right, solved = trial.truth(result.x) == "right", result.certificate.solved
        wrong = trial.truth(result.x) == "wrong"
        key = "right" if right else "missed" if solved and wrong else "told" if not solved else "between"
        found.update(["runs", key, *(["alarmed"] if right and not solved else [])])
        if not right or not solved:
            best = flat(trial.x_star)
            error = np.linalg.norm(flat(getattr(result.x, "x", result.x)) - best) / np.linalg.norm(best)
            part = f"participation {participation}" if participation < 1 else ""
            notes = " | ".join(result.notes)
            print(f"{name} {seed} {part}: {key}, {error:.2g} off, {result.certificate!r} {notes}", flush=True)
        found["seconds"] += round(time.perf_counter() - began)
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=200, help="the first seed")
    parser.add_argument("--x64", action="store_true")
    parser.add_argument("--docs", action="store_true", help="the documentation's numbers in place of auto")
    parser.add_argument("names", nargs="*", default=[])
    asked = parser.parse_args()
    jax.config.update("jax_enable_x64", asked.x64)
    warnings.simplefilter("ignore")
    total: Counter[str] = Counter()
    columns = ("runs", "right", "alarmed", "told", "missed", "seconds")
    rows = []
    for name in asked.names or EVERY:
        found = count(name, range(asked.first, asked.first + asked.seeds), asked.docs)
        total.update(found)
        rows.append(f"| {name} | {' | '.join(str(found[key]) for key in columns)} |")
        print(rows[-1], flush=True)
    print(f"\n| class | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    print("\n".join([*rows, f"| all | {' | '.join(str(total[key]) for key in columns)} |"]))


if __name__ == "__main__":
    main()
