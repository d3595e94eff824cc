"""Uploads that are points name one like them that both sides know; differences and directions need none."""

from __future__ import annotations

import jax
import pytest

import fedstrata as fs
from fedstrata.core.fed import Fed

from ..cases import all_cases

pytestmark = pytest.mark.usefixtures("quick_compiler")
CASES = {case.name: case for case in all_cases()}
# Their uploads are differences, directions, scalars, or values that nobody knew before.
WITHOUT = {
    "scaffold", "fedzo", "fedrzo-scalars", "fastdro", "pdsgd", "mbsgd", "soba", "hypergradient", "simfbo",
    "zohfl", "zohfl-scalars", "strfedavg", "ipirfedavg", "ipirfedavg-warm", "sequential-regularization",
    "bigsam", "rapm", "two-stage-scalars",
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
    case.run(rounds=1, engine=fs.engines.Simulated(chunk=4))  # a program that no other test has traced
    assert named
    assert any(named) == (case.name not in WITHOUT)
