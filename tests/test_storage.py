"""Flat storage: groups of like sizes, cohorts, memory and means agree with each client by hand."""

from __future__ import annotations

import gc
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.core.client import Samples
from fedstrata.data import federated, storage
from fedstrata.engines import simulated
from fedstrata.engines.simulated import Simulated

SIZES = (1, 40, 2, 3, 17, 1, 5, 2, 33, 1)
RNG = np.random.default_rng(0)
CLIENTS = [{"a": RNG.normal(size=(n, 2)), "b": RNG.normal(size=n)} for n in SIZES]
DATA = fs.FederatedData.from_clients(CLIENTS)
VALID = fs.FederatedData.from_clients(CLIENTS, valid=[CLIENTS[(i + 3) % 10] for i in range(10)])


def loss(x, s):
    return 0.5 * (s["a"] @ x - s["b"]) ** 2


problem = fs.Minimization(loss)


def scaffold_by_hand(rounds, cohorts, weights):
    """SCAFFOLD with full batches and K = 2, one client at a time."""
    x, c, own = np.zeros(2), np.zeros(2), np.zeros((10, 2))
    sizes = np.array(SIZES, float)
    for r in range(rounds):
        of = cohorts[r]
        w = np.full(len(of), 1 / len(of)) if weights == "uniform" else sizes[of] / sizes[of].sum()
        share = len(of) / 10 if weights == "uniform" else sizes[of].sum() / sizes.sum()
        dx, dc = np.zeros(2), np.zeros(2)
        for i, weight in zip(of, w, strict=True):
            A, b = CLIENTS[i]["a"], CLIENTS[i]["b"]
            y = x.copy()
            for _ in range(2):
                y = y - 0.1 * (A.T @ (A @ y - b) / len(b) - own[i] + c)
            new = own[i] - c + (x - y) / (2 * 0.1)
            dx, dc = dx + weight * (y - x), dc + weight * (new - own[i])
            own[i] = new
        x, c = x + dx, c + share * dc
    return x


def test_sizes_that_differ_much_are_grouped():
    placed = DATA.placed()
    assert sum(group.clients for group in placed.groups) == 10
    assert len(placed.groups) > 2
    assert sum(group.clients * group.train for group in placed.groups) < 1.5 * sum(SIZES)
    assert jax.tree.leaves(placed.train)[0].shape[0] == sum(SIZES)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["uniform", "size"])
@pytest.mark.parametrize("participation", [10, 4])
def test_full_batches_cohorts_and_memory_by_hand(weights, participation, x64):
    from fedstrata.core.fed import Setup
    from fedstrata.engines.rounds import cohort_of

    setup, placed = Setup(problem, 10, participation, weights), DATA.placed()
    cohorts = []
    for r in range(3):
        cohort = cohort_of(setup, jax.random.key(5), placed, r)
        cohorts.append(np.arange(10) if cohort is None else np.asarray(cohort))
    method = fs.SCAFFOLD(eta_l=0.1, K=2)
    result = fs.solve(
        problem, method, DATA, np.zeros(2), rounds=3, seed=5, participation=participation, weights=weights,
        progress=False,
    )  # fmt: skip
    np.testing.assert_allclose(result.x, scaffold_by_hand(3, cohorts, weights), rtol=1e-9)
    gradients = sum(2 * sum(SIZES[i] for i in cohort) for cohort in cohorts)
    assert result.ledger.gradients == gradients
    means = [
        np.mean([loss(np.zeros(2), {"a": a, "b": b}) for a, b in zip(*c.values(), strict=True)])
        for c in CLIENTS
    ]
    w = np.full(10, 0.1) if weights == "uniform" else np.array(SIZES) / sum(SIZES)
    np.testing.assert_allclose(result.history["loss"][0], np.dot(w, means), rtol=1e-9)


@pytest.mark.slow
def test_gathered_replies_come_in_the_clients_order(x64):
    """FedRZO's scalars are gathered: with groups they must be put back where they belong."""
    arguments = {"rounds": 2, "seed": 3, "progress": False}
    for part in (10, 5):
        found = [
            fs.solve(
                problem, fs.FedRZO(gamma=0.05, eta=0.1, H=2, batch_size=None, messages=messages), DATA,
                np.zeros(2), participation=part, **arguments,
            ).x
            for messages in ("scalars", "vectors")
        ]  # fmt: skip
        np.testing.assert_allclose(*found, rtol=1e-9)


@pytest.mark.slow
def test_validation_sizes_need_not_follow_the_training_sizes(x64):
    bilevel = fs.Bilevel(
        lambda x, y, s: 0.5 * (s["a"] @ y - s["b"]) ** 2,
        lambda x, y, s: loss(y, s) + x @ x + y @ y,
        same_samples=True,
    )
    method = fs.FedMSA(alpha=0.01, beta=0.1, K=2, clients=4)
    grouped = fs.solve(bilevel, method, VALID, np.zeros(2), y0=np.zeros(2), rounds=2, progress=False)
    eager = fs.solve(
        bilevel, method, VALID, np.zeros(2), y0=np.zeros(2), rounds=2, progress=False, engine="debug"
    )
    np.testing.assert_allclose(grouped.y, eager.y, rtol=1e-9)
    np.testing.assert_allclose(grouped.history["upper"], eager.history["upper"], rtol=1e-9)
    assert grouped.ledger == eager.ledger


def test_evaluation_in_tiles(monkeypatch, x64):
    whole = fs.solve(
        problem, fs.FedAvg(gamma=0.1), DATA, np.ones(2), rounds=1, weights="size", progress=False
    )
    monkeypatch.setattr(fs.engines.Simulated, "tile", lambda *args: 16)
    tiled = fs.solve(
        fs.Minimization(lambda x, s: loss(x, s)), fs.FedAvg(gamma=0.1), DATA, np.ones(2), rounds=1,
        weights="size", progress=False,
    )  # fmt: skip
    np.testing.assert_allclose(tiled.history["loss"], whole.history["loss"], rtol=1e-12)


def test_data_is_placed_once_and_freed_with_the_object():
    data = fs.FederatedData.from_clients(CLIENTS)
    assert data.placed_bytes == 0
    assert data.placed() is data.placed()
    assert data.placed_bytes == sum(SIZES) * 3 * 4 + 10 * 3 * 4  # float32 samples; sizes, offsets, order
    gc.collect()  # what other tests left goes first
    before = len(federated._placed)
    del data
    gc.collect()
    assert len(federated._placed) == before - 1
    with pytest.raises(ValueError, match="read-only"):
        DATA.train["a"][0] = 1.0


def test_a_hundred_thousand_clients_are_built_quickly():
    clients = [{"x": np.zeros((3, 4), np.float32), "y": np.zeros(3, np.int32)} for _ in range(100_000)]
    began = time.process_time()
    data = fs.FederatedData.from_clients(clients)
    assert time.process_time() - began < 1.0  # 0.5 s on an idle machine
    assert data.clients == 100_000


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: fs.FederatedData({"a": np.ones(3)}, np.array([99])), "add up to 99.* 3 samples"),
        (lambda: fs.FederatedData({"a": np.ones(3)}, np.array([3, 0])), "whole numbers ≥ 1"),
        (lambda: fs.FederatedData({"a": np.ones(3)}, np.array([3]), valid={"a": np.ones(1)}), "together"),
        (lambda: fs.FederatedData.from_clients({"a": np.ones(3)}), "one dict"),
        (lambda: fs.FederatedData.from_clients([{"a": np.ma.masked_array([1.0], [True])}]), "masked"),
        (lambda: fs.FederatedData.from_clients([{"a": np.array([2**32 + 1])}]).placed(), "wrap around"),
    ],
)
def test_data_that_would_go_wrong_is_refused(build, message):
    with pytest.raises(fs.DataError, match=message):
        build()


def test_small_dtypes_stay_small():
    data = fs.FederatedData.from_clients([{"image": np.zeros((2, 8), np.uint8), "y": np.zeros(2, np.int64)}])
    placed = data.placed()
    assert placed.train["image"].dtype == jnp.uint8
    assert placed.train["y"].dtype == jnp.int32


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "seeds"), [([0.1], 3), ([0.1, 0.2], 3), ([0.1], 2)])
def test_sets_of_one_size_can_differ_in_their_split_in_a_sweep(x64, steps, seeds):
    """Each seed its own split: sizes differ, the program is one, or one for each core's seeds or methods."""
    rng = np.random.default_rng(1)
    arrays = {"a": rng.normal(size=(60, 2)), "b": rng.normal(size=60), "y": np.arange(60) % 3}
    splits = [fs.FederatedData.from_arrays(arrays, 4, fs.Dirichlet(0.3), seed=s) for s in range(seeds)]
    methods = [fs.FedAvg(gamma=gamma, H=2) for gamma in steps]
    together = fs.sweep(problem, methods, splits, np.zeros(2), rounds=2, seeds=range(seeds), progress=False)
    runs = [(method, seed) for method in methods for seed in range(seeds)]
    for (method, seed), found in zip(runs, together, strict=True):
        alone = fs.solve(problem, method, splits[seed], np.zeros(2), rounds=2, seed=seed, progress=False)
        np.testing.assert_allclose(found.x, alone.x, rtol=1e-9)
        np.testing.assert_allclose(found.history["loss"], alone.history["loss"], rtol=1e-9)
        assert found.ledger == alone.ledger


def test_groups_cost_what_their_samples_cost():
    """Rows that are computed for each real one, over sizes as they come."""
    rng = np.random.default_rng(0)
    for sizes in (rng.zipf(1.5, 400).clip(1, 2000), rng.integers(1, 2000, 100), np.full(10, 7)):
        _, groups = storage.groups_of(sizes.astype(np.int32), None)
        assert sum(g.clients for g in groups) == len(sizes)
        assert sum(g.clients * g.train for g in groups) <= 1.5 * sizes.sum()


def test_an_accelerator_starts_fewer_groups_while_padding_is_cheaper():
    """Joining costs at most what it saves: ``launch`` rows for each group less."""
    sizes = np.random.default_rng(0).zipf(1.5, 400).clip(1, 2000).astype(np.int32)
    rows = [storage.groups_of(sizes, None, launch)[1] for launch in (0, 10_000, 10**9)]
    counts, passes = [len(g) for g in rows], [sum(g.clients * g.train for g in own) for own in rows]
    assert counts[0] > counts[1] > counts[2] == 1
    assert passes[1] - passes[0] <= 10_000 * (counts[0] - counts[1])
    assert all(sum(g.clients for g in own) == len(sizes) for own in rows)


def of_sizes(rng, sizes):
    return [{"a": rng.normal(size=(n, 2)), "b": rng.normal(size=n)} for n in sizes]


@pytest.mark.parametrize(
    ("sizes", "participation", "levels"),
    [
        ([1, 2, 3, 90], 1.0, 1),  # in groups
        ([5, 6, 7, 7], 1.0, 1),  # side by side
        pytest.param([1, 2, 3, 90], 0.5, 2, marks=pytest.mark.slow),  # of a cohort, in validation samples too
        pytest.param([6, 6, 6, 6], 0.5, 1, marks=pytest.mark.slow),
        ([6, 6, 6, 6], 1.0, 1),  # these are stacked as they are
    ],
)
def test_samples_fetched_before_a_phase_give_the_same_iterates(
    x64, monkeypatch, sizes, participation, levels
):
    """As on an accelerator, where looking them up at every step takes longer."""
    rng = np.random.default_rng(0)
    data = fs.FederatedData.from_clients(of_sizes(rng, sizes), valid=of_sizes(rng, sizes[::-1]))
    two = fs.Bilevel(
        upper=lambda x, y, s: loss(y, s),
        lower=lambda x, y, s: loss(y, s) + 0.5 * jnp.exp(x) * y @ y,
        same_samples=True,
    )
    task = (problem, fs.FedAvg(gamma=0.1, H=3)) if levels == 1 else (two, fs.FedMSA(0.1, 0.1, K=3))
    start = {"x0": np.zeros(2)} if levels == 1 else {"x0": 0.0, "y0": np.zeros(2)}

    def run(chunk):
        return fs.solve(
            *task,
            data,
            **start,
            rounds=4,
            participation=participation,
            engine=Simulated(chunk),
            progress=False,
        )

    plain, fetched, own = run("auto"), [], Samples.fetched
    monkeypatch.setattr(simulated, "CACHED", 0)  # so that a small data set counts as a large one
    monkeypatch.setattr(Simulated, "fetches", True)
    monkeypatch.setattr(Samples, "fetched", lambda samples: fetched.append(1) or own(samples))
    found = run(None)
    assert bool(fetched) == (participation < 1 or len(set(sizes)) > 1)
    np.testing.assert_allclose(found.x, plain.x, rtol=1e-10)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), found.y, plain.y)
    assert found.ledger == plain.ledger
