"""Uploads that are points name one like them that both sides know; differences and directions need none."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest

import fedstrata as fs
from fedstrata.core.fed import Fed
from fedstrata.engines.rounds import before_rounds, one_round
from fedstrata.engines.simulated import SimulatedFed
from fedstrata.solving.pose import pose
from fedstrata.testing.cases import all_cases

CASES = {case.name: case for case in all_cases()}
# Their uploads are differences, directions, scalars, or values that nobody knew before.
WITHOUT = {
    "scaffold", "fedopt", "fedzo", "fedrzo-scalars", "fastdro", "pdsgd", "mbsgd", "soba", "hypergradient",
    "simfbo", "zohfl", "zohfl-scalars", "strfedavg", "ipirfedavg", "ipirfedavg-warm",
    "sequential-regularization", "bigsam", "rapm", "two-stage-scalars",
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_reference_is_like_the_upload(case, monkeypatch):
    named = []

    def book(self, exchange, upload):
        named.append(exchange.around is not None)
        if named[-1]:
            here, there = (
                jax.tree.map(lambda leaf: jax.typeof(leaf).shape, t) for t in (exchange.around, upload)
            )
            assert here == there
            assert jax.tree.structure(exchange.around) == jax.tree.structure(upload)

    monkeypatch.setattr(Fed, "book", book)
    posed = pose(case.problem, case.method, case.data, case.x0, y0=case.y0, rounds=case.rounds, **case.solve)
    make_fed, key = partial(SimulatedFed, fs.engines.Simulated()), jax.random.key(0)
    placed = case.data.placed()

    def trace(method, carry, r):  # which needs no compiling
        if method.starts():
            carry = before_rounds(make_fed, posed.setup, method, carry, key, placed)
        return one_round(make_fed, posed.setup, method, carry, key, placed, r)

    jax.eval_shape(trace, posed.method, posed.carry, jnp.int32(0))
    assert named
    assert any(named) == (case.name not in WITHOUT)
