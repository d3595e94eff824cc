"""Counts made while tracing equal counts made while running."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import fedstrata as fs
from fedstrata.core import counting
from fedstrata.core.counting import Ledger, settle
from fedstrata.engines.debug import total
from fedstrata.engines.simulated import _add_words

# A program is a nest of counts and loops; a loop's length is fixed, or traced from a number given at run
# time.
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
    counted = []

    @jax.jit
    def traced(one):
        with counting.collect() as inside:
            run(program, one)
        counted[:] = [inside]
        return inside.factors

    factors = traced(jnp.int32(1))
    words = [(0, int(f)) for f in factors]
    assert settle(counted[0], 1, words)["values"] == by_hand(program)
    with jax.disable_jit(), counting.collect() as eager:
        run(program, jnp.int32(1))
    assert total(eager)["values"] == by_hand(program)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=12))
def test_two_words_do_not_overflow(numbers):
    words = jnp.zeros(2, jnp.uint32)
    for number in numbers:
        words = _add_words(words, jnp.int32(number))
    assert (int(words[0]) << 32) + int(words[1]) == sum(numbers)


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
    traffic = {"exchanges": rounds, "floats_up": 2 * m * rounds, "floats_down": 2 * m * rounds}
    traffic |= {"bytes_up": 8 * m * rounds, "bytes_down": 8 * m * rounds}
    gradients = rounds * int((steps * np.array(sizes)).sum())
    assert result.ledger == Ledger(rounds=rounds, gradients=gradients, levels={"main": traffic}, **traffic)


def test_ledger_round_trip():
    ledger = Ledger.from_counts(
        3, Counter({"main/exchanges": 3, "lower/exchanges": 7, "values": 5, "products": 2})
    )
    assert Ledger.from_dict(ledger.to_dict()) == ledger
    assert (ledger.exchanges, ledger.lower_rounds, ledger.oracle_calls) == (10, 7, 7)
