"""The streamed engine: the same iterates as in memory, whatever is read when."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.engines import streamed_run
from fedstrata.engines.memories import Memories
from fedstrata.engines.programs import kept
from fedstrata.engines.streamed import Streamed
from fedstrata.testing.conformance import assert_same

SIZES = np.random.default_rng(0).integers(1, 9, 60)


def samples(i):
    rng = np.random.default_rng(i)
    return {"a": rng.normal(size=(SIZES[i], 3)).astype(np.float32), "b": np.full(SIZES[i], i, np.uint8)}


def source(**options):
    return fs.data.FromFunction(SIZES, samples, **options)


def loss(x, sample):
    return 0.5 * ((x - sample["a"]) ** 2).sum() + 0.001 * sample["b"] * x.sum()


problem = fs.Minimization(loss)
scaffold = fs.SCAFFOLD(eta_l=0.05, K=2, batch_size=2)
arguments = {"rounds": 7, "seed": 3, "participation": 8, "progress": False}


@pytest.fixture(scope="module")
def data():
    return fs.FederatedData.from_source(source())


@pytest.fixture(scope="module")
def in_memory(data):
    return fs.solve(problem, scaffold, data.load(), np.zeros(3), weights="size", **arguments)


@pytest.mark.slow
def test_a_source_is_streamed_with_the_same_iterates(data, in_memory):
    """Windows of two rounds, so that clients come back, and their memory with them."""
    engine = Streamed(ahead=2)
    streamed = fs.solve(problem, scaffold, data, np.zeros(3), weights="size", engine=engine, **arguments)
    assert_same(streamed, in_memory, "streamed")
    assert streamed.measured_on == "all clients"
    before = kept()
    other = {**arguments, "seed": 4, "rounds": 9}
    fs.solve(problem, scaffold, data, np.zeros(3), weights="size", engine=engine, **other)
    assert kept() == before  # no cohort compiles anything


def test_equal_clients_by_size_are_drawn_uniformly():
    """One FedAvg step of length one from 0: the mean of the two means of the cohort, whoever they are."""
    means = np.arange(6.0)
    equal = fs.FederatedData.from_clients([{"a": np.full((2, 3), m), "b": np.zeros(2)} for m in means])
    run = {**arguments, "rounds": 1, "participation": 2, "default_metrics": False, "engine": "streamed"}
    x = fs.solve(problem, fs.FedAvg(1.0, 1), equal, np.zeros(3), weights="size", **run).x
    assert x[0] in (means[:, None] + means)[~np.eye(6, dtype=bool)] / 2


@pytest.mark.slow
def test_a_draw_with_room_for_everyone_is_streamed_in_blocks():
    """Who of them was drawn is a value of the round, which the phase of a block closes over."""
    few = fs.FederatedData.from_clients([samples(i) for i in range(5)])
    run = {**arguments, "participation": fs.Poisson(0.5)}
    ours, known = (
        fs.solve(problem, scaffold, few, np.zeros(3), engine=e, **run) for e in ("streamed", "simulated")
    )
    assert_same(ours, known, "streamed")


@pytest.mark.slow
def test_resumed_bit_for_bit(data, tmp_path):
    run = {"weights": "size", "checkpoint": fs.Checkpoint(tmp_path, overwrite=True), **arguments}
    whole = fs.solve(problem, scaffold, data, np.zeros(3), weights="size", **arguments)
    fs.solve(problem, scaffold, data, np.zeros(3), **{**run, "rounds": 3})
    again = fs.solve(problem, scaffold, data, np.zeros(3), resume=True, **run)
    np.testing.assert_array_equal(again.x, whole.x)
    assert again.ledger == whole.ledger
    other = fs.FederatedData.from_source(source(name="other"))
    with pytest.raises(fs.CheckpointError, match="data"):
        fs.solve(problem, scaffold, other, np.zeros(3), resume=True, **run)


@pytest.mark.slow
def test_metrics_of_some_clients(data):
    """They are those of a federation of these clients alone, and the result says so."""
    method = fs.FedAvg(gamma=0.1, H=1)
    engine = Streamed(metrics=10)
    metrics = {"first": lambda x, y: x[0], "largest": lambda x, y, data: data.train["b"].max().astype(float)}
    result = fs.solve(problem, method, data, np.zeros(3), engine=engine, metrics=metrics, **arguments)
    assert result.measured_on == "10 of 60 clients, the same throughout"
    clients = np.sort(np.random.default_rng(arguments["seed"]).choice(60, 10, replace=False))
    own = [
        jax.vmap(lambda a, b: loss(result.x, {"a": a, "b": b}))(*samples(i).values()).mean() for i in clients
    ]
    np.testing.assert_allclose(result.history["loss"][-1], np.mean(own), rtol=1e-5)
    assert result.history["largest"][0] == clients.max()
    assert "10 of 60 clients" in str(result.table().title)
    with pytest.raises(ValueError, match="read in blocks"):
        fs.solve(problem, method, data, np.zeros(3), metrics=metrics, **arguments)


def test_what_is_wrong_is_said(data, monkeypatch):
    with pytest.raises(ValueError, match="metrics must be"):
        Streamed(metrics="some")
    with pytest.raises(fs.DataError, match=r"data\.load\(\)"):
        fs.solve(problem, scaffold, data, np.zeros(3), engine=fs.engines.Simulated(), **arguments)

    monkeypatch.setattr("fedstrata.engines.engine.cores", lambda: 1)
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    with pytest.raises(RuntimeError, match="JAX_NUM_CPU_DEVICES=2"):
        fs.solve(problem, scaffold, data, np.zeros(3), weights="size", **arguments)
    monkeypatch.undo()

    def broken(i):
        if i == 41:
            raise OSError("the disk is gone")
        return samples(i)

    bad = fs.FederatedData.from_source(fs.data.FromFunction(SIZES, broken))
    everyone = {**arguments, "participation": 1.0, "default_metrics": False}
    monkeypatch.setattr(streamed_run, "MANY", 50)
    # From the thread that reads, in a callback; and before that, what it means that all take part.
    with pytest.warns(UserWarning, match="asks all 60 clients"), pytest.raises(OSError, match="disk is gone"):
        fs.solve(problem, fs.FedAvg(gamma=0.1), bad, np.zeros(3), **everyone)


@pytest.mark.slow
def test_divergence_goes_back_to_the_last_finite_point(data):
    steep = fs.SCAFFOLD(eta_l=1e12, K=3)
    for engine, given in (("simulated", data.load()), ("streamed", data)):
        with pytest.raises(fs.Diverged) as caught:
            fs.solve(problem, steep, given, np.zeros(3), engine=engine, eval_every=2, **arguments)
        assert np.isfinite(caught.value.result.x).all()
        assert caught.value.result.history["round"].tolist() == [0]


def test_memories_keep_what_was_written_and_go_back():
    row = {"a": np.array([1.0, 2.0], np.float32), "b": np.array(3, np.int32)}
    rows = jax.tree.map(lambda leaf: np.broadcast_to(leaf, (6, *leaf.shape)), row)
    for limit in (0, 10**9):  # on the disk, in memory
        memories = Memories(rows, limit)
        memories.begin(0)
        memories.put(np.array([1, 4]), {"a": np.zeros((2, 2)), "b": np.array([7, 8])})
        memories.put(np.array([4]), {"a": np.ones((1, 2)), "b": np.array([9])})
        assert memories.take(np.array([0, 1, 4]), 5)["b"].tolist() == [3, 7, 9, 3, 3]
        assert memories.whole()["a"].tolist() == [[1, 2], [0, 0], [1, 2], [1, 2], [1, 1], [1, 2]]
        assert memories.at(0).take(np.array([1, 4]))["b"].tolist() == [3, 3]
        full = Memories(memories.whole(), limit)
        assert full.whole()["b"].tolist() == [3] * 6


@pytest.mark.slow
def test_the_largest_cohorts_get_room():
    """One client has nearly all samples: windows are made for likely cohorts, and grow when it takes part."""
    sizes = np.ones(200, int)
    sizes[17] = 500
    mine = fs.data.FromFunction(sizes, lambda i: {"a": np.full((sizes[i], 3), i, np.float32)})
    data = fs.FederatedData.from_source(mine)
    mean = fs.Minimization(lambda x, s: 0.5 * ((x - s["a"]) ** 2).sum())
    run = {"rounds": 30, "participation": 20, "progress": False, "eval_every": 30}
    streamed = fs.solve(mean, fs.FedAvg(gamma=0.1), data, np.zeros(3), engine=Streamed(ahead=3), **run)
    np.testing.assert_allclose(
        streamed.x, fs.solve(mean, fs.FedAvg(gamma=0.1), data.load(), np.zeros(3), **run).x, rtol=1e-4
    )
