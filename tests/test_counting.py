"""Counts made while tracing equal counts made while running."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedstrata as fs
from fedstrata.core import counting
from fedstrata.core.counting import Ledger
from fedstrata.engines.programs import add_counts, no_counts, settle

# A program is a nest of counts and loops, whose lengths are fixed or traced from a number.
programs = st.recursive(
    st.integers(1, 4).map(lambda n: ("count", n)),
    lambda inner: st.tuples(
        st.sampled_from(["fixed", "traced"]), st.integers(0, 3), st.lists(inner, max_size=2)
    ),
    max_leaves=5,
)


def by_hand(program):
    if program[0] == "count":
        return program[1]
    return program[1] * sum(map(by_hand, program[2]))


def run(program, one):
    if program[0] == "count":
        counting.count("values", program[1])
        return
    _, times, inner = program

    def body(t, carry):
        for part in inner:
            run(part, carry)
        return carry

    counting.repeat(times if program[0] == "fixed" else one * times, body, one)


@settings(max_examples=25)
@given(programs)
def test_nested_loops(program):
    traced = counting.counted(lambda one: run(program, one))
    _, tally = jax.jit(traced)(jnp.int32(1))
    assert tally.total()["values"] == by_hand(program)
    with jax.disable_jit():
        _, eager = traced(jnp.int32(1))
    assert eager.total()["values"] == by_hand(program)


@pytest.mark.parametrize("disabled", [False, True])
def test_factors_from_outside_a_loop_and_from_inside(disabled):
    """Σ_{k<3} (size + k) values and 2 size gradients of each client, in two loops, one within the other."""

    def phase(size):
        def body(k, carry):
            counting.count("values", 1, size)
            counting.count("gradients", 2, size)
            counting.count("values", 1, k * size // size)
            return carry + size

        return counting.repeat(2, lambda _, carry: counting.repeat(3, body, carry), jnp.int32(0))

    with jax.disable_jit(disabled):
        sums, tally = jax.jit(jax.vmap(counting.counted(phase)))(jnp.array([5, 7], jnp.int32))
    assert sums.tolist() == [6 * 5, 6 * 7]
    assert counting.summed(tally).total() == {"values": 2 * (3 * 12 + 2 * 3), "gradients": 2 * 2 * 3 * 12}
    assert disabled or len(tally.scaled) == 2  # what has one factor is kept as one


@given(st.lists(st.integers(0, 2**31 - 1), max_size=12))
def test_two_words_do_not_overflow(numbers):
    tally = counting.Tally(scaled=[(Counter(values=1), jnp.int32(0))])
    words = no_counts(tally)
    for number in numbers:
        words = add_counts(words, counting.Tally(scaled=[(Counter(values=1), jnp.int32(number))]))
    assert settle(words, 1)["values"] == sum(numbers)


@settings(max_examples=8)
@given(
    st.lists(st.integers(1, 6), min_size=2, max_size=4),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(0, 2),
)
def test_ledger_of_fedavg_in_closed_form(sizes, H, rounds, sit_out):
    clients = [{"a": np.ones((n, 2))} for n in sizes]
    data = fs.FederatedData.from_clients(clients)
    steps = np.array([0 if i < sit_out else H for i in range(len(sizes))])
    problem = fs.Minimization(lambda x, s: ((x - s["a"]) ** 2).sum())
    result = fs.solve(
        problem, fs.FedAvg(gamma=0.1, H=steps), data, np.zeros(2), rounds=rounds, progress=False
    )
    m = len(sizes)
    traffic = {"exchanges": rounds, "gathers": 0, "floats_up": 2 * m * rounds, "floats_down": 2 * m * rounds}
    traffic |= {"bytes_up": 8 * m * rounds, "bytes_down": 8 * m * rounds}
    gradients = rounds * int((steps * np.array(sizes)).sum())
    assert result.ledger == Ledger(rounds=rounds, gradients=gradients, levels={"main": traffic}, **traffic)


def test_ledger_round_trip():
    ledger = Ledger.from_counts(
        3, Counter({"main/exchanges": 3, "lower/exchanges": 7, "values": 5, "products": 2})
    )
    assert Ledger.from_dict(ledger.to_dict()) == ledger
    assert (ledger.exchanges, ledger.lower_rounds, ledger.oracle_calls) == (10, 7, 7)


def solved(dimension, H, problem=None):
    data = fs.FederatedData.from_clients([{"a": np.ones((n, dimension))} for n in (2, 3)])
    problem = problem or fs.Minimization(lambda x, s: 0.5 * ((x - s["a"]) ** 2).sum())
    method = fs.SCAFFOLD(eta_l=0.1, K=H)
    return fs.solve(problem, method, data, np.zeros(dimension), rounds=3, progress=False).ledger


@pytest.mark.slow
def test_threads_have_the_ledgers_of_a_serial_run():
    """Different problems, each traced by its own thread, and then one problem that all of them share."""
    jobs = [(n, 1 + n % 3) for n in range(1, 7)]
    serial = [solved(*job) for job in jobs]
    shared = fs.Minimization(lambda x, s: ((x - s["a"]) ** 2).sum())
    alone = [solved(n, 2, shared) for n in range(1, 7)]
    fresh = fs.Minimization(lambda x, s: ((x - s["a"]) ** 2).sum())
    for _ in range(3):
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(lambda job: solved(*job), jobs)) == serial
            assert list(pool.map(lambda n: solved(n, 2, fresh), range(1, 7))) == alone


@pytest.mark.parametrize("traced", [False, True])
def test_a_loop_that_ends_by_itself_counts_its_turns(traced):
    def run(limit):
        def body(t, x):
            counting.count("gradients", 3)
            return x + t

        return counting.repeat(limit, body, jnp.int32(0), until=lambda x: x >= 5)

    for limit, turns in ((100, 4), (3, 3), (0, 0)):  # 0 + 1 + 2 + 3 = 6
        value, tally = counting.counted(jax.jit(run) if traced else run)(limit)
        assert int(value) == sum(range(turns))
        if not traced:
            assert tally.total()["gradients"] == 3 * turns
