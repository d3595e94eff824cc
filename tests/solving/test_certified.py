"""Certificates at the end of a run: where they are cheap, where they are asked for, and in what is said."""

from __future__ import annotations

import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.advice import price
from fedstrata.solving import certificate

DATA = fs.FederatedData.from_clients([{"a": np.array([1.0])}, {"a": np.array([3.0, 5.0])}])  # means 1 and 4
ONE = fs.Minimization(lambda x, s: (x - s["a"]) ** 2 / 2)
UNLIKE = fs.Minimization(lambda x, s: s["a"] * (x - s["a"]) ** 2 / 2)


def solve(problem=ONE, method=None, rounds=40, **options):
    method = method or fs.FedAvg(0.5)
    return fs.solve(problem, method, DATA, np.array(0.0), rounds=rounds, progress=False, **options)


@pytest.fixture
def allowed(monkeypatch):
    """As in a process of a user's."""
    allowance = certificate.Allowance()
    monkeypatch.setattr(certificate, "ALLOWANCE", allowance)
    return allowance


def test_a_cheap_certificate_is_there(allowed):
    allowed.left = 100.0  # on a slow machine too
    result = solve()
    assert result.verdict == "solved"
    assert "solved" in repr(result)
    assert "\n" not in repr(result)
    assert np.asarray(result.x) == pytest.approx(2.5, abs=1e-5)
    assert allowed.left < 100.0 + certificate.SHARE * result.seconds


def test_it_changes_no_result(allowed):
    certified, plain = solve(certify=True), solve(certify=False)
    assert plain.verdict is None
    assert certified.verdict == "solved"
    np.testing.assert_array_equal(certified.x, plain.x)
    assert certified.ledger == plain.ledger


def test_nothing_is_spent_beyond_the_allowance(allowed, monkeypatch):
    """Thousands of runs take a tenth longer, and a second, at most."""
    runs = [solve() for _ in range(30)]
    assert allowed.left > -0.5  # one certificate may take longer than was expected
    monkeypatch.setattr(price, "price", lambda result: 2.0)
    allowed.left = 1.0
    assert solve().verdict is None
    assert any(run.verdict for run in runs)


def test_a_second_certificate_of_a_problem_is_known_to_be_cheap():
    fresh = fs.Minimization(lambda x, s: (x - s["a"]) ** 2)
    result = solve(fresh, rounds=3)
    assert price.price(result) > price.ONE_LEVEL
    assert result.certificate.solved  # steps of 1/L
    assert price.price(solve(fresh, rounds=4)) < 0.2
    assert price.price(fs.Result(result.x, None, {}, result.ledger, result.method, 1.0)) == np.inf


def test_a_failure_leaves_the_answer(allowed, monkeypatch):
    def broken(*args, **options):
        raise RuntimeError("broken")

    monkeypatch.setattr(price, "certify", broken)
    assert solve().verdict is None
    with pytest.warns(UserWarning, match="The certificate failed: RuntimeError: broken"):
        solve(certify=True)
    with pytest.raises(ValueError, match="certify must be"):
        solve(certify="always")


def test_it_is_given_up_in_time(allowed):
    """A search that takes longer than expected ends at its deadline."""
    with pytest.raises(price.OutOfTime):
        price.remembered(solve(), until=time.perf_counter())


def test_the_one_thing_to_change_is_said():
    result = solve(UNLIKE, fs.FedAvg(0.1, H=10), rounds=200, certify=True)
    assert result.verdict == "biased by drift"
    line, advice = repr(result).splitlines()
    assert "biased by drift" in line
    assert "H=1" in advice
    assert "H=1" in result._repr_html_()


def test_it_is_saved(tmp_path):
    result = solve(certify=True)
    result.save(tmp_path)
    loaded = fs.Result.load(tmp_path)
    assert loaded.certificate == result.certificate
    assert json.loads(json.dumps(result.certificate.to_dict()))["verdict"] == "solved"
    assert "Solved?" not in repr(loaded)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_programs_are_kept():
    """Another point of the same problem compiles nothing."""
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compiled.append(event) if "backend_compile" in event else None
    )
    sequences = fs.MultiSequence(lambda x, Z, s: x - Z[0], [lambda x, z, s: z - s["a"]])
    selection = fs.Selection(lambda x, s: (x[0] + x[1] - s["a"]) ** 2 / 2, lambda x: x @ x, same_samples=True)
    for problem, x, y in [(sequences, np.array(1.0), (jnp.array(0.0),)), (selection, np.ones(2), None)]:
        fs.certify(problem, DATA, x, y)
        before = len(compiled)
        fs.certify(problem, DATA, x + 0.1, y)
        assert len(compiled) == before
