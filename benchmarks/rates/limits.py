"""Limits of baselines: bias of local steps and of penalties, communication against κ, variance of scalars,
and how near fair and personal objectives are to their ends.

Clients differ in curvature and in solution, and all solutions are known in closed form.
"""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from scipy import optimize

import fedstrata as fs
from benchmarks.rates.law import Law, runs

CURVATURES = np.array([[1.0, 0.5], [0.4, 1.0], [0.7, 0.2]])
CENTRES = np.array([[1.0, -2.0], [-1.5, 0.5], [2.0, 1.0]])
STEPS = (16, 64, 256)  # over the step size


def federation(curvatures: np.ndarray, centres: np.ndarray) -> fs.FederatedData:
    return fs.FederatedData.from_clients(
        [{"d": d[None], "a": a[None]} for d, a in zip(curvatures, centres, strict=True)]
    )


DATA = federation(CURVATURES, CENTRES)


def loss(x: Any, s: Any) -> Any:
    return (s["d"] * (x - s["a"]) ** 2).sum() / 2


def payoff(x: Any, y: Any, s: Any) -> Any:
    """For x pulled to a, y to −a, and a product of both: strongly monotone."""
    return loss(x, s) + 0.3 * (x * y).sum() - (s["d"] * (y + s["a"]) ** 2).sum() / 2


def centre(curvatures: np.ndarray, centres: np.ndarray) -> np.ndarray:
    return (curvatures * centres).sum(0) / curvatures.sum(0)


def saddle() -> np.ndarray:
    """x of the solution of d̄x + 0.3y = b, 0.3x − d̄y = b, by coordinates; b is the mean of d a."""
    means = zip(CURVATURES.mean(0), (CURVATURES * CENTRES).mean(0), strict=True)
    return np.array([np.linalg.solve([[d, 0.3], [0.3, -d]], [b, b])[0] for d, b in means])


def off(problem: Any, method: Any, expected: np.ndarray, rounds: int, **options: Any) -> float:
    (found,) = runs(problem, method, DATA, np.zeros(2), rounds, seeds=range(1), eval_every=rounds, **options)
    return float(np.linalg.norm(found.x - expected))


# Local steps: fixed points are off by O(γ (H − 1)), Woodworth et al. 2020 and others


def drift(number: int) -> float:
    return off(fs.Minimization(loss), fs.FedAvg(1 / number, H=2), centre(CURVATURES, CENTRES), 20 * number)


def drift_in_steps(H: int) -> float:
    return off(fs.Minimization(loss), fs.FedAvg(5e-3, H=H + 1), centre(CURVATURES, CENTRES), 8_000 // H)


def drift_of_games(make: Any) -> Any:
    def measure(number: int) -> float:
        return off(fs.Minimax(payoff), make(1 / number), saddle(), 20 * number, y0=np.zeros(2))

    return measure


def forgetting(number: int) -> float:
    """FedSTORM's drift is that of plain steps times c."""
    method = fs.FedSTORM(0.01, 0.01, c=1 / number, I=4)
    return off(fs.Minimax(payoff), method, saddle(), 3_000, y0=np.zeros(2))


def heads(number: int) -> float:
    """FedRep on ½d(x + y − a)² + ½y², whose least value over y has the curvature d/(d + 1) in x."""

    def joint(x: Any, y: Any, s: Any) -> Any:
        return loss(x + y, s) + (y**2).sum() / 2

    problem = fs.Bilevel(joint, joint, same_samples=True, local=True)
    expected = centre(CURVATURES / (CURVATURES + 1), CENTRES)
    return off(problem, fs.FedRep(1 / number, 0.5, H=2), expected, 100 * number, y0=np.zeros(2))


def mixtures(number: int) -> float:
    """APFL's answers, whose v is a step behind its x, from the clients' own minimisers."""
    method, rounds = fs.APFL(1 / number, 0.9), 100 * number
    options = {"seeds": range(1), "eval_every": rounds}
    (found,) = runs(fs.Minimization(loss), method, DATA, np.zeros(2), rounds, **options)
    return float(np.linalg.norm(found.y - CENTRES))


def first_order(number: int) -> float:
    """FO-MAML's limit, against that of the second order's problem: clients Σ d(1 − αd)²(x − a) = 0."""
    curvatures = CURVATURES * (1 - CURVATURES / number) ** 2
    method = fs.PerFedAvg(0.5, 1 / number)
    return off(fs.Minimization(loss), method, centre(curvatures, CENTRES), 400)


# Penalties: y and z solve h + f/λ and h, or h − f/λ


def penalty(order: Literal[1, 2]) -> Any:
    """h = ½d(y − x − a)², f = ¼(y − 1)⁴ + ½x²: F is a function of x alone, whose minimum is a root."""
    problem = fs.Bilevel(
        lambda x, y, s: ((y - 1) ** 4 / 4 + x**2 / 2).sum(),
        lambda x, y, s: (s["d"] * (y - x - s["a"]) ** 2).sum() / 2,
        same_samples=True,
    )
    shift = centre(CURVATURES, CENTRES)
    expected = np.array([_root(a) for a in shift])

    def measure(lam: int) -> float:
        method = fs.FedF2SA(0.2 / lam, 0.5, lam, order=order)
        return off(problem, method, expected, 400 * lam, y0=np.zeros(2))

    return measure


def _root(shift: float) -> float:
    """The real x with x + (x + shift − 1)³ = 0."""
    roots = np.roots(np.poly1d([1.0, shift - 1]) ** 3 + np.poly1d([1.0, 0.0]))
    return float(roots[np.argmin(abs(roots.imag))].real)


# Communication: √κ averages, Mishchenko et al. 2022, Zhang et al.


def averages(problem: Any, make: Any, saddle: bool, rounds: Any) -> Any:
    """Rounds until ‖x − x*‖ is 10⁻⁴ of the start's, the median of 16 seeds; curvatures 1/κ … 1."""

    def measure(kappa: int) -> float:
        curvatures = np.tile(np.geomspace(1 / kappa, 1, 4), (3, 1))
        centres = np.random.default_rng(0).normal(size=(3, 4))
        expected, x0 = centre(curvatures, centres), np.full(4, 3.0)
        metrics = {"off": lambda x, y: ((x - expected) ** 2).sum() ** 0.5}
        options = {"y0": np.zeros(4)} if saddle else {}
        data = federation(curvatures, centres)
        found = runs(problem, make(kappa), data, x0, rounds(kappa), metrics=metrics, **options)
        # the last round above it: iterates of games go round the solution
        last = [np.flatnonzero(run.history["off"] > 1e-4 * run.history["off"][0])[-1] for run in found]
        return float(np.median([run.history["round"][i] for run, i in zip(found, last, strict=True)]))

    return measure


def skipping(step: float) -> dict[str, Any]:
    """Scaffnew with p = √(γμ), for the rounds that it needs."""
    return {
        "make": lambda kappa: fs.Scaffnew(step, (step / kappa) ** 0.5),
        "rounds": lambda kappa: int(80 * kappa**0.5),
    }


def rotating(x: Any, y: Any, s: Any) -> Any:
    """The operator's eigenvalues are d(1 ± i); x is a solution where it is one of the loss."""
    return loss(x, s) + (s["d"] * x * y).sum() - (s["d"] * (y + s["a"]) ** 2).sum() / 2


# Scalars: the variance of a step along P normal directions is (n + 1)/P ‖∇f‖²


def variance(P: int) -> float:
    x0, eta = np.array([3.0, -1.0]), 0.01
    gradient = (CURVATURES * (x0 - CENTRES)).mean(0)
    method = fs.DeComFL(eta, 1e-2, P=P, two_sided=True)
    found = runs(fs.Minimization(loss), method, DATA, x0, 1, seeds=range(512))
    steps = np.array([(x0 - np.asarray(run.x)) / eta for run in found])
    return float(((steps - gradient) ** 2).sum(1).mean())


# Local compositions: inner values that are averaged, ū in place of g_i(x) by a part of 1 − β


def averaged_values(number: int) -> float:
    """g_i(x) = x − a_i, f_i(u) = ½ d_i u²: the problem's solution is the loss's."""
    levels = [lambda x, s: x - s["a"], lambda u, s: (s["d"] * u**2).sum() / 2]
    problem, method = fs.Composition(levels, local=True), fs.LocalSCGDM(0.5, 1 - 1 / number)
    return off(problem, method, centre(CURVATURES, CENTRES), 2_000)


def few_inner(size: int) -> float:
    """f(u) = eᵘ − u, g = x − c with c = ±1: the mean of B draws of c moves the limit by about 1/(2B)."""
    levels = [lambda x, s: x - s["c"], lambda u, s: jnp.exp(u) - u]
    problem, data = fs.Composition(levels, local=True), [{"c": np.array([-1.0, 1.0])}] * 4
    method, its = fs.FCSGM(0.02, batch_size=1, inner_batch_size=size), {"x": lambda x, y: x}
    found = runs(problem, method, fs.FederatedData.from_clients(data), 0.0, 4_000, metrics=its)
    return -float(np.mean([run.history["x"][1_000:].mean() for run in found]))


# Objectives of the clients: their ends as λ or q grows


def envelopes(lam: int) -> float:
    """Envelopes have curvatures λd/(d + λ) and the losses' minimisers."""
    method = fs.PFedMe(1 / lam, 0.5 / lam, lam=lam, K=60)
    return off(fs.Minimization(loss), method, centre(CURVATURES, CENTRES), 40 * lam)


def apart(lam: int) -> float:
    """Ditto's models, from the common one."""
    method = fs.Ditto(0.5, 1 / (lam + 1), lam=lam)
    (found,) = runs(fs.Minimization(loss), method, DATA, np.zeros(2), 400, seeds=range(1), eval_every=400)
    return float(np.linalg.norm(found.y - found.x))


def tilted(lam: int) -> float:
    return off(fs.Minimization(loss), fs.FedGDRO(0.1, lam), centre(CURVATURES, CENTRES), 1_000)


WORST = federation(CURVATURES / 2, CENTRES)  # losses near 1, whose powers float32 can hold


def losses(x: np.ndarray) -> np.ndarray:
    return (CURVATURES / 2 * (x - CENTRES) ** 2).sum(1) / 2


def fairest(clients: int = 3) -> np.ndarray:
    """The minimiser of the largest loss of the first clients, by sequential quadratic programming."""
    each = {"type": "ineq", "fun": lambda z: z[2] - losses(z[:2])[:clients]}
    start, options = np.array([0.0, 0.0, 9.0]), {"ftol": 1e-15, "maxiter": 500}
    return optimize.minimize(lambda z: z[2], start, constraints=[each], options=options).x[:2]


def beyond(make: Any) -> Any:
    """The largest loss of a method's answer over the least that there is."""

    def measure(number: int) -> float:
        method, rounds = make(number), 1_000 * number
        (found,) = runs(
            fs.Minimization(loss), method, WORST, np.zeros(2), rounds, seeds=range(1), eval_every=rounds
        )
        return float(losses(np.asarray(found.x, float)).max() - losses(fairest()).max())

    return measure


def drift_of_two(number: int) -> float:
    """DRFA with two clients, both of which have the largest loss at the solution, in the plane."""
    data, rounds = federation(CURVATURES[:2] / 2, CENTRES[:2]), 400 * number
    options = {"seeds": range(1), "eval_every": rounds}
    method = fs.DRFA(1 / number, 1 / number, tau=2)
    (found,) = runs(fs.Minimization(loss), method, data, np.zeros(2), rounds, **options)
    return float(np.linalg.norm(found.x - fairest(2)))


def directions(size: int) -> float:
    """Rounds with one direction each until ‖x − x*‖ is 1 % of the start's; n is size − 4."""
    n = size - 4
    data = federation(np.ones((1, n)), np.zeros((1, n)))
    method = fs.DeComFL.from_theory(L=1.0, n=n, mu=1e-3, two_sided=True)
    metrics = {"off": lambda x, y: (x**2).sum() ** 0.5}
    found = runs(fs.Minimization(loss), method, data, np.ones(n), 40 * size, metrics=metrics)
    first = [np.flatnonzero(run.history["off"] <= 1e-2 * run.history["off"][0])[0] for run in found]
    return float(np.median([run.history["round"][i] for run, i in zip(found, first, strict=True)]))


# Seeds: FedKSeed's answer is the projection of x* − x0 onto the span of K directions


def beyond_seeds(left: int) -> float:
    """‖x − x*‖² with K of 256 directions, the mean of eight x*; randomised Kaczmarz steps, η = 1/n."""
    n, solutions = 256, np.random.default_rng(0).normal(size=(8, 256)) / 16
    method = fs.FedKSeed(1 / n, 1e-2, K=n - left, tau=50)
    away = []
    for solution in solutions:
        data = federation(np.ones((1, n)), solution[None])
        (found,) = runs(fs.Minimization(loss), method, data, np.zeros(n), 400, seeds=range(1), eval_every=400)
        away.append(float(((found.x - solution) ** 2).sum()))
    return float(np.mean(away))


LAWS = (
    Law("FedAvg", "drift", "‖x − x*‖", "1/γ", -1, STEPS, drift),
    Law("FedAvg", "drift", "‖x − x*‖", "H − 1", 1, (1, 4, 16), drift_in_steps),
    Law(
        "LocalSGDA",
        "drift",
        "‖x − x*‖",
        "1/η",
        -1,
        STEPS,
        drift_of_games(lambda g: fs.LocalSGDA(g, g, tau=2)),
    ),
    Law(
        "NormalizedSGDA",
        "drift",
        "‖x − x*‖",
        "1/η",
        -1,
        STEPS,
        drift_of_games(lambda g: fs.NormalizedSGDA(g, g, K=(1, 2, 3))),
    ),
    Law(
        "FedSGDAPlus",
        "drift",
        "‖x − x*‖",
        "1/γ",
        -1,
        STEPS,
        drift_of_games(lambda g: fs.FedSGDAPlus(g, g, K=2)),
    ),
    Law(
        "FESSGDA",
        "drift, p = 1",
        "‖x − x*‖",
        "1/η",
        -1,
        STEPS,
        drift_of_games(lambda g: fs.FESSGDA(g, g, K=2, p=1.0, beta=0.5)),
    ),
    Law(
        "FedSTORM",
        "drift, c = ½",
        "‖x − x*‖",
        "1/α",
        -1,
        STEPS,
        drift_of_games(lambda g: fs.FedSTORM(g, g, c=0.5, I=4)),
    ),
    Law("FedSTORM", "drift", "‖x − x*‖", "1/c", -1, (1, 4, 16), forgetting),
    Law(
        "AdaFedSTORM",
        "drift, c = ½",
        "‖x − x*‖",
        "1/α",
        -1,
        STEPS,
        drift_of_games(lambda g: fs.AdaFedSTORM(g, g, c=0.5, I=4)),
    ),
    Law("LocalSCGDM", "averaged values", "‖x − x*‖", "1/(1 − β)", -1, (4, 16, 64), averaged_values),
    Law("FCSGM", "few inner samples", "x* − mean x", "B", -1, (2, 4, 8), few_inner),
    Law("FedRep", "drift", "‖x − x*‖", "1/γ", -1, STEPS, heads),
    Law("APFL", "drift", "‖y − y*‖", "1/γ", -1, STEPS, mixtures),
    Law("DRFA", "drift", "‖x − x*‖", "1/γ", -1, STEPS, drift_of_two),
    Law("PerFedAvg", "first order", "‖x − x*‖", "1/α", -1, STEPS, first_order),
    Law("FedF2SA", "order 1", "‖x − x*‖", "λ", -1, (8, 32, 128), penalty(1)),
    Law("FedF2SA", "order 2", "‖x − x*‖", "λ", -2, (16, 32, 64), penalty(2)),
    Law(
        "Scaffnew",
        "Mishchenko et al.",
        "exchanges",
        "κ",
        1 / 2,
        (16, 64, 256),
        averages(fs.Minimization(loss), saddle=False, **skipping(1.0)),
    ),
    Law(
        "Scaffnew",
        "Zhang et al.",
        "exchanges",
        "κ",
        1 / 2,
        (16, 64, 256),
        averages(fs.Minimax(rotating), saddle=True, **skipping(0.5)),
    ),
    Law(
        "CODASCA",
        "descent ascent",
        "exchanges",
        "κ",
        1,
        (16, 64, 256),
        averages(
            fs.Minimax(rotating),
            lambda kappa: fs.CODASCA(0.5, rounds=10**6),
            saddle=True,
            rounds=lambda kappa: 40 * kappa,
        ),
    ),
    Law("PFedMe", "λ → ∞", "‖x − x*‖", "λ", -1, (8, 32, 128), envelopes),
    Law("Ditto", "λ → ∞", "‖y − x‖", "λ", -1, (8, 32, 128), apart),
    Law("FedGDRO", "λ → ∞", "‖x − x*‖", "λ", -1, (8, 32, 128), tilted),
    Law(
        "FedGDRO",
        "λ → 0",
        "largest loss",
        "1/λ",
        -1,
        (4, 16, 64),
        beyond(lambda n: fs.FedGDRO(0.2 / n, 1 / n)),
    ),
    Law("QFedAvg", "q → ∞", "largest loss", "q", -1, (4, 8, 16), beyond(lambda q: fs.QFedAvg(1.0, q))),
    Law("FedKSeed", "span", "‖x − x*‖²", "n − K", 1, (128, 192, 240), beyond_seeds),
    Law("DeComFL", "Nesterov, Spokoiny", "rounds", "n + 4", 1, (8, 32, 128), directions),
    Law("DeComFL", "variance", "E‖d − ∇f‖²", "P", -1, (1, 4, 16), variance),
)
