"""A set that all clients share, active where they disagree, against the solution in closed form.

Over a ball the minimiser of the mean of ½‖x − aᵢ‖² is the projection of the mean of the aᵢ. A client that
projects its own step loses what leads out of the ball, and the mean of such points is another one.
"""

from __future__ import annotations

import warnings

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedstrata as fs
from fedstrata.core.method import METHODS

pytestmark = pytest.mark.usefixtures("x64")

A = np.array([[10.0, 0.0], [-9.0, 2.0], [1.0, 1.0]])
B = A[:, ::-1] + 1.0
R = 0.5
BALL = fs.sets.Ball(R)
data = fs.FederatedData.from_clients([{"a": a[None], "b": b[None]} for a, b in zip(A, B, strict=True)])


def onto(point):
    return point * min(1.0, R / np.linalg.norm(point))


def half(x, a):
    return 0.5 * ((x - a) ** 2).sum()


X, Y = onto(A.mean(0)), onto(B.mean(0))
minimization = fs.Minimization(lambda x, s: half(x, s["a"]), project=BALL)
minimax = fs.Minimax(lambda x, y, s: half(x, s["a"]) - half(y, s["b"]), project_x=BALL, project_y=BALL)
bilevel = fs.Bilevel(
    lambda x, y, s: half(y, s["a"]), lambda x, y, s: half(y, x), project_x=BALL, same_samples=True
)
selection = fs.Selection(
    lambda x, s: half(x, s["a"]), lambda x, s: (x**2).sum(), project=BALL, same_samples=True
)

SOLVERS = {
    "FedAvg": (minimization, fs.FedAvg(0.1)),
    "FedProx": (minimization, fs.FedProx(0.1, 0.5)),
    "FedMSPP": (minimization, fs.FedMSPP(0.5, 0.1, H=1)),
    "FedOpt": (minimization, fs.FedOpt(optax.sgd(0.1), optax.sgd(1.0))),
    "FedAC": (minimization, fs.FedAC(0.1, 1.0)),
    "LFD": (minimization, fs.LFD(0.1)),
    "SCAFFOLD": (minimization, fs.SCAFFOLD(0.1)),
    "LocalSGDA": (minimax, fs.LocalSGDA(0.1, 0.1)),
    "FedSGDAPlus": (minimax, fs.FedSGDAPlus(0.1, 0.1)),
    "FESSGDA": (minimax, fs.FESSGDA(0.1, 0.1, p=1.0)),
    "NormalizedSGDA": (minimax, fs.NormalizedSGDA(0.1, 0.1)),
    "FedSTORM": (minimax, fs.FedSTORM(0.1, 0.1)),
    "FedF2SA": (bilevel, fs.FedF2SA(0.01, 0.3, lam=10.0)),
    "FedNest": (minimax, fs.FedNest(0.1, 0.1)),
    "FedMSA": (minimax, fs.FedMSA(0.1, 0.1)),
    "SOBA": (minimax, fs.SOBA(0.1, 0.1)),
    "SimFBO": (bilevel, fs.SimFBO(0.3, 0.3, 0.3, 1.0, 1.0, 1.0)),
    "HypergradientDescent": (bilevel, fs.HypergradientDescent(0.1, 0.1)),
    "StRFedAvg": (selection, fs.StRFedAvg("geometric", eta_end=1e-12)),
    "RAPM": (selection, fs.RAPM()),
    "SequentialRegularization": (selection, fs.SequentialRegularization()),
}
ELSEWHERE = {
    *("AFL", "DRFA", "QFedAvg", "FedZO"),  # below: other objectives, and noise
    "FedGDRO",  # another objective: tests/methods/test_fedgdro.py
    *("FedAPD", "AdaFedSTORM", "DeComFL", "HiSo", "FedKSeed"),  # refuse sets
    *(
        "FedRZO",
        "FedRZOBilevel",
        "FedRZOMinimax",
        "FedRZOTwoStage",
    ),  # a penalty
    *("BiGSAM", "IPIRFedAvg"),  # sublinear rates; a set of h's alone; the server projects
    *("APFL", "PFedMe", "PerFedAvg"),  # refuse sets
    *("Ditto", "FedRep"),  # models of the clients' own: tests/methods/test_personal.py
    "ZOHFL",  # a client's own y alone has a set
    *("Scaffnew", "CODASCA"),  # refuse sets
    *(
        "FCSGM",
        "LocalSCGDM",
        "CompositionalFedAvg",
        "DSFedDRO",
        "MBSGD",
        "FastDRO",
        "FedDRO",
        "GCIVR",
        "PDSGD",
    ),  # compositions: none
}


def solve(problem, method, rounds=500, **more):
    more = {"y0": np.zeros(2)} | more if problem.has_y else more
    return fs.solve(
        problem, method, data, np.zeros(2), rounds=rounds, progress=False, default_metrics=False, **more
    )


def test_every_method_is_here_or_has_a_reason():
    assert SOLVERS.keys() | ELSEWHERE == METHODS.keys()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ("FedAvg", "LocalSGDA") else pytest.mark.slow) for n in SOLVERS]
)
def test_one_local_step_finds_the_solution_on_the_boundary(name):
    problem, method = SOLVERS[name]
    result = solve(problem, method)
    np.testing.assert_allclose(result.x, X, atol=1e-6)
    if isinstance(problem, fs.Minimax):
        np.testing.assert_allclose(result.y, Y, atol=1e-6)


@pytest.mark.parametrize("radius", [0.5, 100.0], ids=["active", "idle"])
def test_fedavg_with_one_local_step_is_projected_gradient_descent(radius):
    """Round by round, also with weights of the clients' sizes."""
    sizes = fs.FederatedData.from_clients(
        [{"a": np.repeat(a[None], n, 0)} for a, n in zip(A, (3, 1, 2), strict=True)]
    )
    problem = fs.Minimization(minimization.loss, project=fs.sets.Ball(radius))
    result = fs.solve(problem, fs.FedAvg(0.3), sizes, np.zeros(2), rounds=7, weights="size", progress=False)
    x, mean = np.zeros(2), np.average(A, axis=0, weights=(3, 1, 2))
    for _ in range(7):
        x = x - 0.3 * (x - mean)
        x = x * min(1.0, radius / np.linalg.norm(x))
    np.testing.assert_allclose(result.x, x, rtol=1e-12)


LOCAL = {
    "FedAvg": lambda gamma: (minimization, fs.FedAvg(gamma, H=4)),
    "LFD": lambda gamma: (minimization, fs.LFD(gamma, tau=4)),
    "FedOpt": lambda gamma: (minimization, fs.FedOpt(optax.sgd(gamma), optax.sgd(1.0), H=4)),
    "FedProx": lambda gamma: (minimization, fs.FedProx(gamma, 0.5, H=4)),
    "FedMSPP": lambda gamma: (minimization, fs.FedMSPP(0.5, gamma, H=4)),
    "FedAC": lambda gamma: (minimization, fs.FedAC(gamma, 1.0, K=4)),
    "LocalSGDA": lambda gamma: (minimax, fs.LocalSGDA(gamma, gamma, tau=4)),
    "FESSGDA": lambda gamma: (minimax, fs.FESSGDA(gamma, gamma, K=4)),
    "StRFedAvg": lambda gamma: (
        selection,
        fs.StRFedAvg("geometric", K=4, gamma=4 * gamma, L_h=1.0, eta=1e-9, eta_end=1e-12),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOCAL)
def test_the_drift_of_local_steps_vanishes_with_the_step(name):
    """Projected by clients, steps would end at another point, however short they are."""
    far, near = (
        np.linalg.norm(solve(*LOCAL[name](gamma), rounds=round(8 / gamma)).x - X) for gamma in (4e-3, 4e-4)
    )
    assert near < 0.2 * far + 1e-6  # first order in γ: a tenth; FedAC's γ is at least √η: a third at best
    assert far < 0.05


@pytest.mark.parametrize(("K", "participation"), [(4, 1.0), (1, 2)])
def test_control_variates_leave_no_bias_on_a_set(K, participation):
    """Neither of local steps nor of the choice of clients, which FedAvg averages out slowly."""
    result = solve(minimization, fs.SCAFFOLD(0.1, K=K), rounds=600, participation=participation)
    np.testing.assert_allclose(result.x, X, atol=1e-9)


def test_sets_of_their_own_are_projected_onto_by_the_clients():
    """One step by hand, after which the server's mean is outside of every set."""
    own = fs.Minimization(minimization.loss, project=lambda x, client: jnp.minimum(x, 0.1 * client.index))
    result = fs.solve(own, fs.FedAvg(0.1), data, np.zeros(2), rounds=1, progress=False)
    steps = np.minimum(0.1 * A, 0.1 * np.arange(3)[:, None])
    np.testing.assert_allclose(result.x, steps.mean(0), rtol=1e-12)


def test_no_loss_of_a_selection_is_evaluated_outside_of_its_set():
    """log(1 + x) has no value below −1, where the first of two local steps leads. By hand, from x = ½."""
    growth = fs.Selection(
        lambda x, s: half(x, s["a"]),
        lambda x, s: jnp.log1p(x).sum(),
        project=fs.sets.NonNegative(),
        same_samples=True,
    )
    method = fs.StRFedAvg("decreasing", K=2, gamma=0.8, L_h=1.0, eta=0.1)
    start = {"rounds": 1, "progress": False, "default_metrics": False}
    result = fs.solve(growth, method, data, np.full(2, 0.5), **start)
    y = np.full((3, 2), 0.5)
    for _ in range(2):
        at = np.maximum(y, 0)
        y = y - 0.4 * (at - A + 0.1 / (1 + at))
    np.testing.assert_allclose(result.x, np.maximum(y.mean(0), 0), rtol=1e-12)


@pytest.mark.slow
def test_afl_over_a_ball():
    """The worst two clients get all weight; where their losses are equal, x is the projection of aλ."""

    def at(lam):
        return onto(lam * A[0] + (1 - lam) * A[1])

    low, high = 0.0, 1.0
    for _ in range(60):
        lam = (low + high) / 2
        x = at(lam)
        low, high = (lam, high) if half(x, A[0]) > half(x, A[1]) else (low, lam)
    result = solve(minimization, fs.AFL(0.05, 0.001), rounds=20_000)
    np.testing.assert_allclose(result.x, at(lam), atol=1e-5)


@pytest.mark.slow
def test_fedzo_over_a_ball():
    """Its noise, of η times the clients' gradients, moves x along the boundary only."""
    result = solve(minimization, fs.FedZO(1e-3, 1e-4, b=20), rounds=6_000)
    assert np.linalg.norm(result.x) == pytest.approx(R)
    # √(η/2) times the deviation of g, which is at most ‖a_i‖/√(b m) ≈ 1.3, thrice
    np.testing.assert_allclose(result.x, X, atol=3 * 1.3 * np.sqrt(1e-3 / 2))


def test_a_penalty_ends_outside_and_says_so(x64):
    """−2x over x ≤ 1: in one dimension FedRZO's slope is exact, and its pull (x − 1)/η is 2 at 1 + 2η."""
    data = fs.FederatedData.from_clients([{"a": np.full((1, 1), 2.0)}])
    problem = fs.Minimization(lambda x, s: -(s["a"] @ x), project=fs.sets.Box(-np.inf, 1.0))

    def run(method):
        return fs.solve(problem, method, data, np.zeros(1), rounds=60, eval_every=60, progress=False)

    words = r"FedRZO ended outside of the set: x is 0\.2 from it, and ‖x‖ = 1\.2.*smaller eta \(it is 0\.1\)"
    with pytest.warns(UserWarning, match=words):
        result = run(fs.FedRZO(0.05, 0.1, two_sided=True))
    np.testing.assert_allclose(result.x, 1.2, rtol=1e-6)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run(fs.FedAvg(0.05))
    assert not told


@pytest.mark.slow
def test_ending_outside_of_clients_own_sets_is_told_of():
    """Sets [0, 1], [½, 4] and [−1, 2] have [½, 1] in common; drawn to 2, 3 and 5 the best point is 1.

    Means of projected steps end where 3x = 1 + (x + γ(3 − x)) + (x + γ(5 − x)), at 3/2 with γ = 0.1.
    """
    data = fs.FederatedData.from_clients([{"c": np.full(n, c)} for n, c in ((1, 2.0), (4, 3.0), (9, 5.0))])
    low, high = jnp.array([0.0, 0.5, -1.0]), jnp.array([1.0, 4.0, 2.0])

    def own(x, client):
        return jnp.clip(x, low[client.index], high[client.index])

    problem = fs.Minimization(lambda x, s: (x - s["c"]) ** 2 / 2, project=own)
    words = (
        r"outside of clients' own sets: x is 0\.5 from that of client 0, and .*penalty of the FedRZO methods"
    )
    with pytest.warns(UserWarning, match=words):
        result = fs.solve(problem, fs.FedAvg(0.1), data, 0.0, rounds=300, progress=False)
    assert float(result.x) == pytest.approx(1.5, rel=1e-5)
    inside = fs.Minimization(lambda x, s: (x - s["c"] / 5) ** 2 / 2, project=own)  # at 2/3, in all sets
    result = fs.solve(inside, fs.FedAvg(0.1), data, 0.6, rounds=300, progress=False)
    assert float(result.x) == pytest.approx(2 / 3, rel=1e-3)
