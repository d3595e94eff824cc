"""What holds for every method: one row in ``fedstrata.testing.cases`` brings all of these tests."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.core.method import METHODS
from fedstrata.engines.programs import kept
from fedstrata.engines.rounds import one_round
from fedstrata.engines.simulated import Simulated, SimulatedFed
from fedstrata.solving.pose import pose
from fedstrata.testing.cases import CLIENTS, all_cases

pytestmark = pytest.mark.usefixtures("quick_compiler")
CASES = {case.name: case for case in all_cases()}
# The first row of each method is quick; its other forms are slow.
FIRST = {type(case.method): case.name for case in reversed(CASES.values())}.values()
every_case = pytest.mark.parametrize(
    "case", [pytest.param(c, id=n, marks=() if n in FIRST else pytest.mark.slow) for n, c in CASES.items()]
)
# Other engines compile or interpret everything anew: quick for a few methods, slow for all.
SIMPLE = {"fedavg", "scaffold", "scaffnew", "fedrzo-scalars"}
every_case_slowly = pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=n, marks=() if n in SIMPLE else pytest.mark.slow) for n, c in CASES.items()],
)

# What different orders of summation may do to a few float32 steps; zeroth-order quotients magnify it by n/η.
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}


def assert_same(a, b, **tolerance):
    """Points, metrics and ledgers agree."""
    for name in ("x", "y"):
        for u, v in zip(jax.tree.leaves(getattr(a, name)), jax.tree.leaves(getattr(b, name)), strict=True):
            np.testing.assert_allclose(u, v, err_msg=name, **tolerance)
    assert a.history.keys() == b.history.keys()
    for name in a.history.keys() - {"seconds"}:
        np.testing.assert_allclose(a.history[name], b.history[name], err_msg=name, **tolerance)
    assert a.ledger == b.ledger


@pytest.fixture(scope="module")
def reference():
    """Each case's run in the default engine, once."""
    runs = {}

    def run(case):
        if case.name not in runs:
            runs[case.name] = case.run()
        return runs[case.name]

    return run


def test_every_method_has_a_case():
    assert METHODS.keys() == {type(case.method).__name__ for case in CASES.values()}


@every_case
def test_same_seed_same_result(case, reference):
    again = case.run()
    first = reference(case)
    for u, v in zip(jax.tree.leaves((again.x, again.y)), jax.tree.leaves((first.x, first.y)), strict=True):
        np.testing.assert_array_equal(u, v)


@pytest.mark.slow
@every_case_slowly
def test_debugging_agrees_with_partial_participation(case):
    if case.participation is None:
        assert type(case.method).full_participation is not None
        with pytest.raises(ValueError, match="participation"):
            case.run(participation=CLIENTS - 1)
    # Eager rounds take seconds; one of them goes through every phase.
    part = {"participation": case.participation or CLIENTS, "rounds": 1}
    assert_same(case.run(engine="debug", **part), case.run(**part), **TOLERANCE)


@pytest.mark.slow
@every_case
@pytest.mark.parametrize(
    "engine",
    ["sharded", fs.engines.Simulated(chunk=1), fs.engines.Simulated(chunk=2)],
    ids=["sharded", "one-by-one", "two-by-two"],
)
def test_layouts_agree(case, engine, reference):
    assert_same(case.run(engine=engine), reference(case), **TOLERANCE)
    if case.participation is not None and engine != fs.engines.Simulated(chunk=1):
        part = case.run(participation=case.participation)
        assert_same(case.run(participation=case.participation, engine=engine), part, **TOLERANCE)


@pytest.mark.slow
@every_case
def test_float64(case, x64):
    result = case.run()
    assert {leaf.dtype for leaf in jax.tree.leaves(result.x)} == {np.dtype("float64")}
    # Agreement far below float32's precision: no step of the computation is done in float32.
    assert_same(case.run(engine=fs.engines.Simulated(chunk=2)), result, rtol=1e-9, atol=1e-11)


@every_case
def test_ledger_arithmetic(case, reference):
    ledger = reference(case).ledger
    assert ledger.rounds == case.rounds
    assert ledger.bytes_up == 4 * ledger.floats_up
    assert ledger.bytes_down == 4 * ledger.floats_down
    assert ledger.exchanges >= case.rounds
    assert ledger.oracle_calls > 0
    for entry in ("exchanges", "floats_up", "bytes_down"):
        assert sum(level[entry] for level in ledger.levels.values()) == getattr(ledger, entry)


@every_case
def test_reveals_what_it_says(case, reference):
    gathered = reference(case).ledger.gathers > 0
    assert case.method.reveals_on(case.problem) == ("replies" if gathered else "averages")


@every_case
def test_nothing_recompiles(case):
    case.run()  # not the reference: its program may have left the cache since
    before = kept()
    reals = {
        name: 0.9 * getattr(case.method, name)
        for name in case.method.hyperparameters
        if isinstance(getattr(case.method, name), float)
    }
    case.run(rounds=case.rounds + 2, eval_every=2, seed=3, method=dataclasses.replace(case.method, **reals))
    assert kept() == before


@every_case
def test_resume_is_bit_for_bit(case, reference, tmp_path):
    case.run(rounds=1, checkpoint=tmp_path)
    resumed = case.run(checkpoint=tmp_path, resume=True)
    whole = reference(case)
    for u, v in zip(
        jax.tree.leaves((resumed.x, resumed.y)), jax.tree.leaves((whole.x, whole.y)), strict=True
    ):
        np.testing.assert_array_equal(u, v)
    assert resumed.ledger == whole.ledger
    assert resumed.history["round"].tolist() == whole.history["round"].tolist()


@every_case
def test_describes_itself(case):
    assert case.method.describe().keys() == {f.name for f in dataclasses.fields(case.method)}
    assert case.method.solves


@pytest.mark.slow
@every_case
def test_all_samples_of_clients_of_very_unequal_size(case):
    """Full batches where groups of clients have capacities of their own, traced: all shapes fit."""
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
    make_fed = functools.partial(SimulatedFed, Simulated())
    for participation in {1.0, case.participation or 1.0}:
        posed = pose(case.problem, method, data, case.x0, y0=case.y0, rounds=1, participation=participation)
        after = jax.eval_shape(
            lambda method, carry, data, setup=posed.setup: one_round(
                make_fed, setup, method, carry, jax.random.key(0), data, jnp.int32(0)
            ),
            posed.method,
            posed.carry,
            posed.data.placed(),
        )
        assert jax.tree.map(jnp.shape, after.state) == jax.tree.map(jnp.shape, posed.carry.state)
