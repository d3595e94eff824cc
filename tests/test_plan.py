"""Plans: steps from constants, held to closed forms by solving with nothing else."""

from __future__ import annotations

import itertools
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.channels.compression import pace
from fedstrata.problems.measured import Conditions, Constants, Measured, NoRule
from fedstrata.testing.cases import all_cases


def ridge(seed=0, n=4):
    """Unequal clients, and the minimiser by both weights."""
    rng = np.random.default_rng(seed)
    clients = [{"a": rng.normal(size=(k, n)), "b": rng.normal(size=k)} for k in (5, 9, 20)]
    problem = fs.Minimization(lambda x, s: 0.5 * (s["a"] @ x - s["b"]) ** 2)
    pooled = np.concatenate([c["a"] for c in clients]), np.concatenate([c["b"] for c in clients])
    return problem, fs.FederatedData.from_clients(clients), np.linalg.lstsq(*pooled)[0]


@pytest.mark.parametrize("participation", [pytest.param(1.0, marks=pytest.mark.slow), 2])
def test_a_plan_solves_a_ridge_regression(participation):
    problem, data, best = ridge()
    options = {"weights": "size", "participation": participation}
    found = fs.plan(problem, data, np.zeros(4), **options)
    result = fs.solve(
        problem, found.method, data, np.zeros(4), rounds=found.rounds, progress=False, **options
    )
    assert found.known
    np.testing.assert_allclose(result.x, best, atol=1e-2 * np.linalg.norm(best))


@pytest.mark.slow
def test_the_page_shows_the_plan_that_its_lines_make():
    page = (Path(__file__).parents[1] / "docs" / "plan.md").read_text("utf-8")
    problem, data, _, _ = fs.quadratic_bilevel(clients=3, n=2, p=3)
    found = fs.plan(problem, data, np.zeros(2), np.zeros(3))
    (alpha, beta), (rounds,), counts = (
        [float(number) for number in re.search(shown, page).groups()]
        for shown in (r"SOBA\(alpha=(.+), beta=(.+)\)", r"the same, (\d+) rounds", r"# (\d+), (\d+), (\d+)\n")
    )
    assert isinstance(found.method, fs.SOBA)
    assert (alpha, beta) == pytest.approx((found.method.alpha, found.method.beta), rel=1e-3)
    assert [rounds, *counts] == [found.rounds, found.exchanges, found.bytes, found.oracle_calls]


def test_gradient_descent_keeps_what_its_theorem_promises():
    """From the worst start, along the two extreme eigenvectors, in just so many rounds."""
    problem, data, best = ridge()
    theory = fs.plan(problem, data, np.zeros(4), method=fs.FedAvg, weights="size").theory
    assert all(condition.holds for condition in theory.conditions)
    values, vectors = np.linalg.eigh(sum(c["a"].T @ c["a"] for c in map(data.client, range(3))) / 34)
    assert theory.method.gamma == pytest.approx(2 / (values[0] + values[-1]), rel=1e-4)
    start, rounds = best + vectors[:, 0] + vectors[:, -1], int(np.ceil(theory.rounds))
    options = {"weights": "size", "progress": False, "default_metrics": False}
    result = fs.solve(problem, theory.method, data, start, rounds=rounds, **options)
    away = np.linalg.norm(result.x - best) / np.sqrt(2)
    assert away == pytest.approx((1 - theory.method.gamma * values[0]) ** rounds, rel=1e-2)
    assert away <= 1e-2


@pytest.mark.slow
def test_scaffold_keeps_what_its_theorem_promises():
    problem, data, _ = ridge()
    theory = fs.plan(problem, data, np.zeros(4), method=fs.SCAFFOLD).theory
    assert all(condition.holds for condition in theory.conditions)
    rounds = int(np.ceil(theory.rounds))
    result = fs.solve(problem, theory.method, data, np.zeros(4), rounds=rounds, progress=False)
    assert result.certificate.distance <= 1e-2


@pytest.mark.slow
def test_a_diverged_run_names_the_step_at_fault():
    game = fs.quadratic_bilevel(clients=3, n=2, p=3)
    found = fs.plan(game.problem, game.data, np.zeros(2), np.zeros(3), method=fs.SOBA).method
    for alpha, beta, words in (
        (100 * found.alpha, found.beta, "Lower alpha alone, .*, to 0.05"),
        (found.alpha, 100 * found.beta, "Lower beta alone, .*, to 0.55"),
    ):
        with pytest.raises(fs.Diverged, match=words):
            fs.solve(game.problem, fs.SOBA(alpha, beta), game.data, np.zeros(2), y0=np.zeros(3), rounds=3000)


@pytest.mark.slow
def test_a_diverged_run_of_a_robust_risk_names_its_step():
    """One client, one sample in each direction: the risk's curvature at 0 is that of the mean loss, ½."""
    data = fs.FederatedData.from_clients([{"a": np.eye(2, dtype=np.float32)}])
    problem = fs.dro.kl(lambda x, s: (s["a"] @ x - 1) ** 2 / 2 + (s["a"] @ x - 1) ** 4, 1e6)
    with pytest.raises(fs.Diverged, match=r"Lower eta alone, 100, to 0\.\d+"):
        fs.solve(problem, fs.FedDRO(100.0, 0.9), data, np.zeros(2), rounds=100, progress=False)


@pytest.mark.slow
def test_a_diverged_run_names_the_function_that_grew():
    """The upper level falls as exp(x) rises, so that no step of y stays short enough."""
    data = fs.FederatedData.from_clients([{"a": np.ones(3)}, {"a": np.zeros(3)}])
    problem = fs.Bilevel(
        lambda x, y, s: (y - s["a"]) ** 2 / 2 - 2 * x,
        lambda x, y, s: (y - s["a"]) ** 2 / 2 + jnp.exp(x) * y**2,
        same_samples=True,
    )
    words = r"on the way the curvature of 'lower' grew from 1\.\d+ to \d+"
    with pytest.raises(fs.Diverged, match=words):
        fs.solve(problem, fs.SOBA(0.1, 0.3), data, -2.0, y0=0.0, rounds=300, progress=False)


def test_steps_are_tried_where_f_curves_up():
    """eˣ − 5x from −5, where its curvature is 0.007, to ln 5, where it is 5."""
    data = fs.FederatedData.from_clients([{"a": np.full((2, 1), a)} for a in (4.0, 6.0)])
    problem = fs.Minimization(lambda x, s: (jnp.exp(x) - s["a"] * x).sum())
    found = fs.plan(problem, data, np.full(1, -5.0), method=fs.FedAvg)
    assert "F may be more curved on the way" in found.reasons[-1]
    result = fs.solve(problem, found.method, data, np.full(1, -5.0), rounds=found.rounds, progress=False)
    np.testing.assert_allclose(result.x, np.log(5.0), rtol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("start", [-4.0, -2.0, 0.0])
def test_steps_are_tried_where_f_is_not_convex(start):
    """y(x) = 2/(1 + eˣ) should be ½, so that x* = ln 3. The start's curvature allows steps that diverge."""
    data = fs.FederatedData.from_clients([{"a": np.full(2, a)} for a in (1.0, 3.0)])
    problem = fs.Bilevel(
        lambda x, y, s: ((y - 0.5) ** 2).sum() / 2,
        lambda x, y, s: ((y - s["a"]) ** 2 + jnp.exp(x) * y**2).sum() / 2,
        same_samples=True,
    )
    x0, y0 = np.full(1, start), np.zeros(1)
    found = fs.plan(problem, data, x0, y0, method=fs.SOBA)
    result = fs.solve(problem, found.method, data, x0, y0=y0, rounds=found.rounds, progress=False)
    np.testing.assert_allclose(result.x, np.log(3.0), rtol=2e-2)
    assert result.certificate.solved


@pytest.mark.slow
def test_a_plan_says_what_its_rounds_cost():
    game = fs.quadratic_bilevel(clients=3, n=2, p=3)
    start = {"x0": np.zeros(2), "y0": np.zeros(3)}
    found = fs.plan(game.problem, game.data, **start)
    result = fs.solve(
        game.problem, found.method, game.data, **start, rounds=found.rounds, default_metrics=False
    )
    np.testing.assert_allclose(result.x, game.x_star, atol=1e-2 * np.linalg.norm(game.x_star))
    ledger = result.ledger
    assert found.exchanges == ledger.exchanges
    assert found.bytes == ledger.bytes_up + ledger.bytes_down
    assert found.oracle_calls == ledger.oracle_calls


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "compress"),
    [("FedAvg", fs.RandK(0.25)), ("SCAFFOLD", fs.TopK(0.1)), ("SOBA", fs.TopK(0.1)), (None, fs.QSGD(2))],
)
def test_a_plan_under_compression_leads_to_the_solution(method, compress):
    game = fs.quadratic_bilevel(clients=4, n=20, p=20)
    problem, data, best, start = (
        game.problem,
        game.data,
        game.x_star,
        {"x0": np.zeros(20), "y0": np.zeros(20)},
    )
    if method in ("FedAvg", "SCAFFOLD"):
        problem, data, best = ridge(n=20)
        start = {"x0": np.zeros(20)}
    channel = fs.Channel(compress=compress)
    options = {"channel": channel, "weights": "uniform" if method in (None, "SOBA") else "size"}
    found = fs.plan(problem, data, **start, method=method, **options)
    plain = fs.plan(problem, data, **start, method=type(found.method), weights=options["weights"])
    run = fs.solve(problem, found.method, data, **start, rounds=found.rounds, progress=False, **options)
    np.testing.assert_allclose(run.x, best, atol=1e-2 * np.linalg.norm(best))
    assert found.known
    assert found.rounds > plain.rounds
    assert found.bytes == run.ledger.bytes_up + run.ledger.bytes_down
    assert any("compression" in reason for reason in found.reasons)


def test_what_a_compressor_allows():
    """By the theorems: 1/(1 − √(1−δ)) of a contraction, 1 + 6ω/m without bias."""
    assert pace(fs.RandK(0.19), 100, 5).slower == pytest.approx(10)
    assert pace(fs.RandK(0.5, scaled=True), 100, 5).slower == pytest.approx(7)  # all draw the same
    assert pace(fs.TopK(1.0), 100, 5) == (1, 1)
    assert pace(fs.TopK(0.1), 10_000, 5).slower < pace(fs.RandK(0.1), 10_000, 5).slower / 4
    assert pace(fs.QSGD(8), 100, 5).slower < 1.01
    shares = np.random.default_rng(0).normal(size=100_000) ** 2
    part = np.sort(shares)[-10_000:].sum() / shares.sum()  # of the tenth that TopK sends
    assert 1 - (1 - 1 / pace(fs.TopK(0.1), 100_000, 5).slower) ** 2 == pytest.approx(part, rel=1e-2)


@pytest.mark.slow
def test_a_method_that_does_not_bear_a_channel_is_refused():
    game = fs.quadratic_bilevel(clients=3, n=2, p=3)
    channel = {"*": fs.Channel(compress=fs.Sign())}
    with pytest.raises(ValueError, match=r"HypergradientDescent: .*linear recursion"):
        fs.plan(
            game.problem, game.data, np.zeros(2), np.zeros(3), method="HypergradientDescent", channel=channel
        )


def test_methods_that_do_not_fit_are_refused():
    problem, data, _ = ridge()
    with pytest.raises(ValueError, match=r"FedMSA does not fit this Minimization. These do: "):
        fs.plan(problem, data, np.zeros(4), method=fs.FedMSA)
    with pytest.raises(ValueError, match=r"Unknown method 'FedAgv'. Did you mean 'FedAvg'"):
        fs.plan(problem, data, np.zeros(4), method="FedAgv")
    kinked = fs.Minimization(lambda x, s: abs(s["a"] @ x - s["b"]))
    with pytest.raises(NoRule, match="FedAC: its acceleration assumes a smooth loss"):
        fs.plan(kinked, data, np.zeros(4), method="FedAC")


SMOOTH = Measured(2.0, 0.5, np.full(5, 3.0), np.full(5, 0.2), 1.0, 0.5, 0.3, 0.1, 0.0, 1.0, 1e-7, 1.0)
NAMES = (
    *("loss", "upper", "payoff", "objective", "lower", "client", "follower", "plain", "constraints"),
    "secondary",
)


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_every_method_has_steps_or_a_reason(case):
    """Of made-up constants: what a rule gives can be run, and of smooth ones every method has one."""
    method = type(case.method)
    jacobian = np.diag([1.0, 1, 1, 2, 2, 2, 2]) if isinstance(case.problem, fs.MultiSequence) else None
    for kink, participants in itertools.product((0.0, 0.9), (5, 3)):
        levels = dict.fromkeys(NAMES, replace(SMOOTH, kink=kink))
        found = Constants(levels, 0.5, 0.4, 1.0, 1.0, 10, jacobian=jacobian)
        at = Conditions(case.problem, found, 5, participants, 3, 100)
        if kink:
            with suppress(NoRule):  # some need smooth functions
                method.practical(at).method.check_schedules(100)
            continue
        its = method.practical(at)
        its.method.check(case.problem, 5)
        its.method.check_schedules(100)
        assert 0 <= its.rate <= 10
        assert its.reasons
        assert participants < 5 or its.rate > 0 or isinstance(case.problem, fs.Selection) or its.fades


def test_recommendations_leave_out_what_needs_all_clients_or_solves_another_problem():
    problem, data, _ = ridge()
    found = fs.recommend(problem, data, np.zeros(4), participation=2)
    assert found.names[0] == "SCAFFOLD"
    by_name = {its.name: its for its in found}
    assert by_name["Scaffnew"].avoid
    assert "all clients" in by_name["Scaffnew"].reasons[0]
    assert by_name["AFL"].avoid
    assert "SCAFFOLD" in repr(found)


@pytest.mark.slow
def test_independent_draws_are_planned_for_as_cohorts_of_that_size():
    problem, data, _ = ridge()
    cohort, drawn = (fs.plan(problem, data, np.zeros(4), participation=p) for p in (2, fs.Poisson(0.9)))
    assert repr(cohort.method) == repr(drawn.method)
