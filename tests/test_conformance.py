"""The conformance kit: its methods by hand, all engines on all of its rows, and faults that it must find."""

from __future__ import annotations

import runpy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.engines.network import Network
from fedstrata.engines.rounds import cohort_of
from fedstrata.engines.simulated import Simulated, SimulatedFed
from fedstrata.solving.pose import pose
from fedstrata.testing import CONFORMANCE, check_engine, check_method, kit
from fedstrata.testing.conformance import in_float64

ROWS = {case.name: case for case in CONFORMANCE}
ENGINES = {
    "two by two": partial(Simulated, chunk=2),
    "one by one": partial(Simulated, chunk=1),
    "sharded": fs.engines.Sharded,
    "streamed": partial(fs.engines.Streamed, ahead=2),
    "debug": fs.engines.Debug,
    "network": Network,
    "network, two at a site": partial(Network, clients_per_site=2),
}


def quick(engine, row):
    """One row in each engine is quick, but for the slowest; not once more with other numbers of clients."""
    soon = row == "replies" and engine in ("two by two", "sharded", "streamed", "network")
    return pytest.param(engine, row, marks=() if soon else pytest.mark.slow)


@pytest.mark.parametrize(("engine", "row"), [quick(e, r) for e in ENGINES for r in ROWS])
def test_every_engine_is_as_simulated(engine, row):
    check_engine(ENGINES[engine](), [ROWS[row]])


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("engine", ["two by two", "sharded", "streamed", "debug", "network"])
def test_every_engine_is_as_simulated_in_float64(engine, row, x64):
    check_engine(ENGINES[engine](), [ROWS[row]])


def means(case):
    """The clients' means, a row of (w, c) each, and x0 like them."""
    own = [np.column_stack([c["a"], c["b"]]).mean(0) for c in map(case.data.client, range(5))]
    return np.array(own), np.append(case.x0["w"], case.x0["c"])


def cohorts(case):
    posed = pose(case.problem, case.method, case.data, case.x0, rounds=3, seed=1, **case.solve)
    placed, key = case.data.placed(), jax.random.key(1)
    return [np.asarray(cohort_of(posed.setup, key, placed, jnp.int32(r))) for r in range(3)]


def assert_at(result, x):
    np.testing.assert_allclose([*result.x["w"], result.x["c"]], x, rtol=1e-5)


def test_averages_by_hand():
    """Two steps of 0.1 in each of three rounds towards the mean of all samples."""
    case = ROWS["everyone by size"]
    own, x0 = means(case)
    goal = np.average(own, axis=0, weights=case.data.sizes)
    assert_at(case.run(), goal + 0.9**6 * (x0 - goal))


def test_replies_by_hand():
    case = ROWS["replies"]
    (own, x), result = means(case), case.run()
    for cohort in cohorts(case):
        slopes, weights = x - own, case.data.sizes[cohort] * (1 + cohort)
        step = np.average(slopes[cohort], axis=0, weights=weights)
        step += 0.1 * (slopes[4] - 2 * slopes[1]) + 0.1 * case.data.sizes[2] * slopes[2]
        x = x - 0.05 * (step + 0.75 * (3 * slopes[0] + slopes[3]) / 4)  # 0.75: the mean of the indices
    assert_at(result, x)
    assert result.ledger.exchanges == 3 * 4
    assert result.ledger.gathers == 3 * 3  # a mean over one client is a reply
    assert result.ledger.floats_up == 3 * (3 * 5 + 2 * 3 + 5 + 2 * 5)


def test_loops_by_hand():
    case = ROWS["loops"]
    (own, x), result = means(case), case.run()
    calls, steps = np.zeros(5), 0

    def turn(x, clients):
        step = np.mean([(1 + 0.1 * calls[i]) * (x - own[i]) for i in clients], 0)
        calls[clients] += 1
        return x - 0.1 * step

    for r in range(3):
        for _ in range(2 + r):
            x = turn(x, [1, 3])
        for _ in range(3):
            if x[0] >= 0.35:
                x, steps = turn(x, [0, 1, 2, 3, 4]), steps + 1
        x = x - 0.1 * (x - own.mean(0))
    assert_at(result, x)
    assert steps == 3 + 1 + 0
    assert np.asarray(result.y).tolist() == calls.tolist()
    exchanges = {level: counts["exchanges"] for level, counts in result.ledger.levels.items()}
    assert exchanges == {"lower": 2 + 3 + 4, "step": steps, "main": 3}


def test_memories_by_hand():
    """Everyone is called before the first round, the cohort in it, clients 0 and 3 once more."""
    case = ROWS["memories"]
    calls = np.ones(5)
    for cohort in cohorts(case):
        calls[cohort] += 1
        calls[[0, 3]] += 1
    assert case.run().y["calls"].tolist() == calls.tolist()


def test_a_method_outside_of_the_project():
    name = str(Path(__file__).parents[1] / "examples" / "own_method.py")
    case = ROWS["minibatches of some"]
    own = runpy.run_path(name)["FedAvgM"](gamma=0.1, H=2, batch_size=2)
    fs.METHODS.pop("FedAvgM")
    check_method(replace(case, name="FedAvgM", method=own))


@kit.kit_method
class Single(kit.Averaging):
    """In float32 whatever the precision."""

    def steps(self, problem, client, key, x):
        return jax.tree.map(lambda u: jnp.float32(u) / 3, super().steps(problem, client, key, x))


def test_a_step_in_float32_is_found():
    case = replace(ROWS["everyone by size"], name="single", method=Single(0.1))
    with pytest.raises(AssertionError, match="single computes in float32"):
        in_float64(case)


class Unweighted(SimulatedFed):
    def exchange(self, exchange):
        return super().exchange(exchange._replace(weights=None))


class OfOthers(SimulatedFed):
    def exchange(self, exchange):
        of = None if exchange.of is None else (exchange.of + 1) % self.clients
        return super().exchange(exchange._replace(of=of))


class Reversed(SimulatedFed):
    def exchange(self, exchange):
        uploads, shape = super().exchange(exchange)
        return (jax.tree.map(lambda u: u[::-1], uploads) if exchange.stacked else uploads), shape


class OneKey(SimulatedFed):
    def exchange(self, exchange):
        def phase(problem, client, key, *message):
            return exchange.phase(problem, client, exchange.key, *message)

        return super().exchange(exchange._replace(phase=phase))


class Forgetful(SimulatedFed):
    def exchange(self, exchange):
        before = self.memory
        found = super().exchange(exchange)
        self.memory = before
        return found


class Mixed(SimulatedFed):
    """What a client remembers goes to its neighbour."""

    def exchange(self, exchange):
        found = super().exchange(exchange)
        self.memory = jax.tree.map(lambda m: jnp.roll(m, 1, 0), self.memory)
        return found


class Uncounted(SimulatedFed):
    def book(self, exchange, upload):
        pass


@dataclass(frozen=True)
class Faulty(Simulated):
    fed: type[SimulatedFed] = SimulatedFed

    def make_fed(self):
        return partial(self.fed, self)


@pytest.mark.parametrize(
    ("fault", "row"),
    [
        (Unweighted, "everyone by size"),
        (Reversed, "replies"),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                (OfOthers, "second draws"),
                (OneKey, "minibatches of some"),
                (Forgetful, "memories"),
                (Mixed, "personal models"),
                (Uncounted, "loops"),
            )
        ),
    ],
)
def test_a_fault_of_an_engine_is_found(fault, row):
    with pytest.raises(AssertionError, match=row):
        check_engine(Faulty(fed=fault), [ROWS[row]])
