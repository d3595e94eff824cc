"""What holds for every method: one row in ``fedstrata.testing.cases`` brings all of these tests.

Engines carry out exchanges, whatever the method: ``test_conformance.py`` tries them in full. A row runs in
the simulated engine and in one other.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.core.fed import Fed
from fedstrata.core.method import METHODS
from fedstrata.engines.network import Network
from fedstrata.engines.simulated import Simulated
from fedstrata.testing import check_method
from fedstrata.testing.cases import CLIENTS, all_cases
from fedstrata.testing.conformance import assert_same, traced, with_participation

CASES = {case.name: case for case in all_cases()}
# Quick are those that differ in what they exchange, remember and begin with; all rows are traced.
QUICK = {
    "fedavg", "scaffold", "fedrzo-scalars", "fedrzo-bilevel", "zohfl", "strfedavg", "fedmsa",
    "fednest", "feddro", "drfa", "fedrep",
}  # fmt: skip
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
ENGINES = {
    "sharded": fs.engines.Sharded,
    "two-by-two": partial(Simulated, chunk=2),
    "streamed": partial(fs.engines.Streamed, ahead=2),
    "network": partial(Network, clients_per_site=3),  # each site compiles: two are quicker than five
    "debug": fs.engines.Debug,
}
EAGER = ("fedavg", "scaffold", "scaffnew", "fedrzo-scalars", "simfbo")  # others take half a minute so
# Their uploads are differences, directions, scalars, or values that nobody knew before.
WITHOUT_REFERENCE = {
    "scaffold", "fedopt", "fedzo", "fedrzo-scalars", "fedrzo-shared", "fastdro", "pdsgd", "mbsgd", "soba",
    "hypergradient", "simfbo", "zohfl", "zohfl-bilevel", "zohfl-scalars", "strfedavg", "ipirfedavg",
    "ipirfedavg-warm",
    "qfedavg", "codasca", "decomfl", "hiso", "fedkseed", "fedapd", "normalized-sgda",
    "sequential-regularization", "bigsam", "rapm", "two-stage-scalars",
    "fedrzo-bilevel-accurate", "fedrzo-minimax-accurate", "feddro", "compositional-fedavg", "gcivr",
}  # fmt: skip


def test_every_method_has_a_case():
    assert METHODS.keys() == {type(case.method).__name__ for case in CASES.values()}


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=n, marks=() if n in QUICK else pytest.mark.slow) for n, c in CASES.items()],
)
def test_resumed_counted_compiled_once_and_in_float64(case):
    check_method(case, engine=None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "engine"),
    [
        pytest.param(case, engine, id=f"{case.name}-{engine}")
        for number, case in enumerate(CASES.values())
        for engine in ["debug" if case.name in EAGER else list(ENGINES)[number % 4]]
    ],
)
def test_in_another_engine(case, engine):
    """Another one from row to row."""
    case = with_participation(case)
    if engine == "debug":  # one round goes through every phase
        case = dataclasses.replace(case, rounds=1)
    assert_same(case.run(engine=ENGINES[engine]()), case.run(), case.name)


@pytest.mark.long
@every_case
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("everyone", [True, False], ids=["everyone", "some"])
def test_in_every_engine(case, engine, precision, everyone):
    case = dataclasses.replace(case if everyone else with_participation(case), rounds=1 + (engine != "debug"))
    with jax.enable_x64(precision == "float64"):
        assert_same(case.run(engine=ENGINES[engine]()), case.run(), case.name)


@every_case
def test_describes_itself(case):
    assert case.method.describe().keys() == {f.name for f in dataclasses.fields(case.method)}
    assert case.method.solves
    if case.participation is None:
        assert type(case.method).full_participation is not None
        with pytest.raises(ValueError, match="participation"):
            case.run(participation=CLIENTS - 1)


@every_case
def test_a_reference_is_like_the_upload(case, monkeypatch):
    """Uploads that are points name one of the message, or a constant, like them; differences need none."""
    named = []

    def book(self, exchange, upload):
        named.append(exchange.around is not None)
        if named[-1]:
            here, there = (
                jax.tree.map(lambda leaf: jax.typeof(leaf).shape, t) for t in (exchange.around, upload)
            )
            assert here == there
            assert jax.tree.structure(exchange.around) == jax.tree.structure(upload)
            sent = jax.tree.leaves(exchange.message)
            for leaf in jax.tree.leaves(exchange.around):
                assert isinstance(leaf, np.ndarray) or any(leaf is one for one in sent), "it is not sent"

    monkeypatch.setattr(Fed, "book", book)
    traced(case)
    assert named
    assert any(named) == (case.name not in WITHOUT_REFERENCE)


@pytest.mark.slow
@every_case
def test_all_samples_of_clients_of_very_unequal_size(case):
    """Full batches where groups of clients have capacities of their own: all shapes fit."""
    full = {name: None for name in case.method.hyperparameters if name.startswith("batch")}
    try:
        method = dataclasses.replace(case.method, **full)
    except (TypeError, ValueError):
        pytest.skip("it draws minibatches")

    def repeated(part, sizes):
        rows = [case.data.client(i, part) for i in range(CLIENTS)]
        return [
            jax.tree.map(lambda leaf, n=n: np.resize(leaf, (n, *leaf.shape[1:])), its)
            for its, n in zip(rows, sizes, strict=True)
        ]

    valid = None if case.data.valid is None else repeated("valid", (3, 1, 20, 5, 2))
    data = fs.FederatedData.from_clients(
        repeated("train", (2, 40, 3, 9, 17)), valid=valid, server=case.data.server
    )
    assert len(data.placed().groups) > 1
    for participation in {1.0, case.participation or 1.0}:
        traced(case, method=method, data=data, participation=participation)
