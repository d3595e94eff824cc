"""Checks that every engine and every method must pass, also outside the project; they raise if one fails.

check_engine(engine)   the same iterates and ledgers as the simulated engine, for every use of every verb
check_method(case)     one seed is one run, also resumed, in float64 and in another engine; ledgers add up
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.engines.engine import Engine
from fedstrata.engines.programs import kept
from fedstrata.engines.rounds import before_rounds, one_round
from fedstrata.engines.simulated import Simulated
from fedstrata.solving.pose import pose
from fedstrata.solving.result import Result
from fedstrata.testing.cases import Case
from fedstrata.testing.kit import CONFORMANCE

# The effect of another order of summation on a few steps; zeroth-order quotients magnify it by n/η.
SINGLE, DOUBLE = (2e-4, 2e-5), (1e-9, 1e-11)  # relative, absolute


def check_engine(engine: str | Engine, cases: Iterable[Case] = CONFORMANCE) -> None:
    """Raise if an engine's runs of the small cases differ from those of the simulated engine.

    Points, metrics and ledgers are compared. If clients have memory, a run is saved after its first round and
    resumed. The current precision is used: call it again under ``jax.enable_x64(True)`` for float64.

    Args:
        engine: its name, or the engine itself.
        cases: all rows of the kit, or some of them.

    >>> from fedstrata.testing import CONFORMANCE, check_engine
    >>> check_engine("sharded", CONFORMANCE[:1])
    """
    for case in cases:
        remembers = case.method.memory(case.problem, case.x0, case.y0) is not None or "channel" in case.solve
        result = resumed(case, engine) if remembers else case.run(engine=engine)
        assert_same(result, case.run(), case.name)


def check_method(case: Case, engine: str | Engine | None = "sharded") -> None:
    """Raise if a method fails a check that every method must pass.

    The same seed gives the same run, bit for bit, also resumed from a checkpoint; new values of the
    hyper-parameters, the seed and the rounds do not recompile; the ledger adds up; the method reveals what it
    declares; in float64 no step is computed in float32; and another engine has the same iterates.

    Args:
        case: the method on a small problem, with the participation that it gives.
        engine: the other engine; None leaves it out.
    """
    if not isinstance(case, Case):
        raise TypeError(
            f"check_method takes a case, testing.Case(name, method, problem, data, x0), but has {case!r}."
        )
    case = with_participation(case)
    whole = case.run()
    programs = kept()
    assert_same(resumed(case), whole, f"{case.name}, resumed", exact=True)
    real = {name: 0.9 * value for name, value in vars(case.method).items() if isinstance(value, float)}
    other = dataclasses.replace(case.method, **real)
    case.run(rounds=case.rounds + 2, eval_every=2, seed=3, method=other)
    assert kept() == programs, f"{case.name}: new values of the numbers compiled another program"
    adds_up(case, whole)
    gathered = "replies" if whole.ledger.gathers else "averages"
    assert case.method.reveals_on(case.problem) == gathered, f"{case.name} reveals {gathered}"
    in_float64(case)
    if engine is not None:
        assert_same(case.run(engine=engine), whole, case.name)


def resumed(case: Case, engine: str | Engine = "simulated") -> Result:
    """A case's run that ends after its first round, and is resumed from its checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        case.run(engine=engine, rounds=1, checkpoint=folder)
        return case.run(engine=engine, checkpoint=folder, resume=True)


def assert_same(a: Result, b: Result, name: str, exact: bool = False) -> None:
    """Raise if points, metrics or ledgers of two runs differ by more than rounding; if ``exact``, at all."""
    rtol, atol = (0.0, 0.0) if exact else DOUBLE if jax.config.read("jax_enable_x64") else SINGLE
    for what in ("x", "y"):
        one, other = jax.tree.leaves(vars(a)[what]), jax.tree.leaves(vars(b)[what])
        for u, v in zip(one, other, strict=True):
            assert u.dtype == v.dtype, f"{name}: {what} is {u.dtype}, not {v.dtype}"
            np.testing.assert_allclose(u, v, rtol, atol, err_msg=f"{name}: {what}")
    assert a.history.keys() == b.history.keys(), f"{name}: the metrics differ"
    for metric in a.history.keys() - {"seconds"}:
        u, v = a.history[metric], b.history[metric]
        np.testing.assert_allclose(u, v, rtol, atol, err_msg=f"{name}: {metric}")
    assert a.ledger == b.ledger, f"{name}: {a.ledger.to_dict()} is not {b.ledger.to_dict()}"


def adds_up(case: Case, result: Result) -> None:
    """Raise if a run's ledger is not the sum of its levels, or its bytes do not follow from its numbers."""
    ledger, width = result.ledger, jnp.dtype(jnp.result_type(float)).itemsize
    assert ledger.rounds == case.rounds <= ledger.exchanges
    assert ledger.oracle_calls > 0
    totals = vars(ledger)
    for way in ("up", "down"):
        assert totals[f"bytes_{way}"] == width * totals[f"floats_{way}"], way
    for entry in ("exchanges", "floats_up", "bytes_down"):
        assert sum(level[entry] for level in ledger.levels.values()) == totals[entry], entry


def in_float64(case: Case) -> None:
    """Raise if a step of the method is computed in float32 although JAX is in 64-bit mode."""
    with jax.enable_x64(True):
        lines = [line.strip() for line in str(traced(case)).splitlines() if "f32[" in line]
    assert not lines, f"{case.name} computes in float32: {lines[0]}"


def traced(case: Case, **changes: Any) -> Any:
    """The jaxpr of a case's start and first round in the simulated engine, without compiling it.

    Args:
        case: the method on a small problem.
        changes: changed arguments: ``method``, ``data``, ``participation``, ``weights``.
    """
    options = {"rounds": 1, "method": case.method, "data": case.data, **case.solve, **changes}
    method, data = options.pop("method"), options.pop("data")
    posed = pose(case.problem, method, data, case.x0, y0=case.y0, **options)
    make_fed, key, placed = Simulated().make_fed(), jax.random.key(0), data.placed()

    def text(method: Any, carry: Any, data: Any, r: Any) -> Any:
        if method.starts():
            carry = before_rounds(make_fed, posed.setup, method, carry, key, data)
        return one_round(make_fed, posed.setup, method, carry, key, data, r)

    return jax.make_jaxpr(text)(posed.method, posed.carry, placed, jnp.int32(0))


def with_participation(case: Case) -> Case:
    """The case with only some clients in a round, if its method allows that."""
    if case.participation is None:
        return case
    return dataclasses.replace(case, solve={**case.solve, "participation": case.participation})
