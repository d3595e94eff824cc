"""FederatedData: padding never leaks, bad data is named."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedstrata as fs

sizes_strategy = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def clients_of(sizes, seed=0):
    rng = np.random.default_rng(seed)
    return [{"a": rng.normal(size=(n, 2)), "b": rng.integers(0, 5, n)} for n in sizes]


@given(sizes_strategy)
def test_round_trip(sizes):
    clients = clients_of(sizes)
    data = fs.FederatedData.from_clients(clients)
    assert data.sizes.tolist() == sizes
    assert data.train["a"].shape == (sum(sizes), 2)
    for i, client in enumerate(clients):
        jax.tree.map(np.testing.assert_array_equal, data.client(i), client)


@given(sizes_strategy, st.integers(0, 10))
def test_full_batch_means_ignore_padding(sizes, seed):
    clients = clients_of(sizes, seed)
    placed = fs.FederatedData.from_clients(clients).placed()
    for i, client in enumerate(clients):
        oracle = placed.client(jnp.int32(i)).train.full_mean(lambda sample: sample["a"].sum())
        np.testing.assert_allclose(oracle(), client["a"].sum(1).mean(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(oracle.weigh().sum(), 1, rtol=1e-6)


@given(sizes_strategy, st.integers(0, 10))
def test_only_own_samples_are_drawn(sizes, seed):
    first = np.cumsum(sizes) - sizes
    placed = fs.FederatedData.from_clients(
        [{"a": start + np.arange(n)} for start, n in zip(first, sizes, strict=True)]
    ).placed()
    for i, (start, n) in enumerate(zip(first, sizes, strict=True)):
        drawn = placed.client(jnp.int32(i)).train.mean(lambda s: s, jax.random.key(seed), 200).samples["a"]
        assert set(np.asarray(drawn).tolist()) == set(range(start, start + n))


def test_weights_by_size():
    data = fs.FederatedData.from_clients([{"a": np.full((1, 1), 1.0)}, {"a": np.full((3, 1), 2.0)}])
    problem = fs.Minimization(lambda x, s: 0.5 * ((x - s["a"]) ** 2).sum())
    method = fs.FedAvg(gamma=1.0)  # one step lands on the client's mean
    for weights, mean in (("uniform", 1.5), ("size", 1.75)):
        for engine in ("simulated", "debug", fs.engines.Simulated(chunk=1)):
            result = fs.solve(problem, method, data, np.zeros(1), rounds=1, weights=weights, engine=engine)
            np.testing.assert_allclose(result.x, mean, rtol=1e-6)


def test_client_index_reaches_the_loss():
    data = fs.FederatedData.from_clients(
        [{"a": np.zeros((2, 1))}, {"a": np.zeros((4, 1))}]
    ).with_client_index()
    problem = fs.Minimization(lambda x, s: 0.5 * ((x - s["client"]) ** 2).sum())
    result = fs.solve(problem, fs.FedAvg(gamma=1.0), data, np.zeros(1), rounds=1)
    np.testing.assert_allclose(result.x, 0.5)


def test_from_arrays_splits_off_server_and_validation():
    arrays = {"x": np.arange(100.0), "y": np.arange(100) % 4}
    data = fs.FederatedData.from_arrays(arrays, clients=4, valid_fraction=0.25, server_fraction=0.2, seed=3)
    held = np.concatenate([np.ravel(data.server["x"])] + [data.client(i)["x"] for i in range(4)])
    valid = np.concatenate([data.client(i, "valid")["x"] for i in range(4)])
    assert sorted([*held, *valid]) == arrays["x"].tolist()
    assert len(data.server["x"]) == 20
    assert len(valid) == 20


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ([], "no clients"),
        ([{"a": np.ones((2, 1))}, {"a": np.ones((0, 1))}], "client 1.* is empty"),
        ([{"a": np.array(["yes", "no"])}], r"client 0\['a'\] is not a plain array \(dtype <U3\)"),
        ([{"a": np.array([[1.0], [np.nan]])}], r"client 0\['a'\] has a NaN.*sample 1"),
        ([{"a": np.ones((2, 1))}, {"a": np.ones((2, 3))}], "client 1 has another structure"),
        ([{"a": np.ones(2), "b": np.ones(3)}], "differ in their number of samples"),
        ([{"a": np.float64(3)}], "is a scalar"),
        ([{}], "has no arrays"),
        ([{"a": np.array(["u", None], object)}], "not a plain array"),
    ],
)
def test_bad_data_is_named(clients, message):
    with pytest.raises(fs.DataError, match=message):
        fs.FederatedData.from_clients(clients)


def test_per_batch_is_refused_where_it_would_see_padding():
    loss = fs.per_batch(lambda x, batch: ((batch["a"] - batch["a"].mean(0)) @ x).var())
    uneven = fs.FederatedData.from_clients([{"a": np.ones((2, 3))}, {"a": np.ones((4, 3))}])
    with pytest.raises(ValueError, match="per_batch"):
        fs.solve(fs.Minimization(loss), fs.FedAvg(gamma=0.1), uneven, np.ones(3), rounds=1)
    rng = np.random.default_rng(0)
    even = fs.FederatedData.from_clients([{"a": rng.normal(size=(4, 3))} for _ in range(2)])
    result = fs.solve(fs.Minimization(loss), fs.FedAvg(gamma=0.1), even, np.ones(3), rounds=1)
    expected = np.mean([((c - c.mean(0)) @ np.ones(3)).var() for c in even.stacked()["a"]])
    np.testing.assert_allclose(result.history["loss"][0], expected, rtol=1e-5)
