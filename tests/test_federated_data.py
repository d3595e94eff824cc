"""FederatedData: padding never leaks, bad data is named."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse
from sklearn.utils import Bunch

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


@pytest.mark.slow
@given(sizes_strategy, st.integers(0, 10))
def test_full_batch_means_ignore_padding(sizes, seed):
    clients = clients_of(sizes, seed)
    placed = fs.FederatedData.from_clients(clients).placed()
    for i, client in enumerate(clients):
        oracle = placed.client(jnp.int32(i)).train.full_mean(lambda sample: sample["a"].sum())
        np.testing.assert_allclose(oracle(), client["a"].sum(1).mean(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(oracle.weigh().sum(), 1, rtol=1e-6)


@settings(max_examples=30)
@given(sizes_strategy, st.integers(0, 10))
def test_only_own_samples_are_drawn(sizes, seed):
    first = np.cumsum(sizes) - sizes
    placed = fs.FederatedData.from_clients(
        [{"a": start + np.arange(n)} for start, n in zip(first, sizes, strict=True)]
    ).placed()
    for i, (start, n) in enumerate(zip(first, sizes, strict=True)):
        drawn = placed.client(jnp.int32(i)).train.mean(lambda s: s, jax.random.key(seed), 200).samples["a"]
        assert set(np.asarray(drawn).tolist()) == set(range(start, start + n))


@pytest.mark.slow
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
    taken = fs.FederatedData.from_clients([{"client": np.array([3, 3])}, {"client": np.array([5])}])
    with pytest.raises(fs.DataError, match="'client' already"):
        taken.with_client_index()


@pytest.mark.parametrize("partition", [fs.Dirichlet, "Dirichlet", 0.3])
def test_a_partition_is_an_object(partition):
    with pytest.raises(fs.DataError, match="partition must be an object such as"):
        fs.FederatedData.from_arrays({"x": np.ones(9)}, 3, partition)


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
        ([], "list of clients is empty"),
        ([{"a": np.ones((2, 1))}, {"a": np.ones((0, 1))}], "client 1.* is empty"),
        ([{"a": np.array(["yes", "no"])}], r"client 0\['a'\] is not a plain array \(dtype <U3\)"),
        ([{"a": np.array([[1.0], [np.nan]])}], r"client 0\['a'\] has a NaN.*sample 1"),
        (
            [{"x": np.ones((2, 13))}, {"x": np.ones((5, 10), int)}],
            r"client 1: 'x' is int64 \(10,\), client 0's is float64 \(13,\)",
        ),
        ([{"a": np.ones(2)}, {"b": np.ones(2)}], "client 1 has the arrays 'b', client 0 has 'a'"),
        ([{"a": np.ones(2)}, (np.ones(2),)], "client 1 has the arrays '0', client 0 has 'a'"),
        (
            [np.ones((2, 1)), np.ones((2, 3))],
            r"client 1: the array is float64 \(3,\), client 0's is float64 \(1,\)",
        ),
        ({"a": np.ones(3)}, r"this is one dict, \['a'\].*from_arrays"),
        ([{"a": np.ones(2), "b": np.ones(3)}], "differ in their number of samples"),
        ([{"a": np.float64(3)}], "is a scalar"),
        ([{}], "has no arrays"),
        ([{"a": np.array(["u", None], object)}], "not a plain array"),
        (None, "Give a list with one pytree of arrays per client, but it is None"),
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


def test_dtypes_are_promoted_to_a_common_one():
    clients = [
        {"x": np.array([1, 2]), "y": np.array([True])[[0, 0]]},
        {"x": np.array([0.5]), "y": np.array([3])},
    ]
    data = fs.FederatedData.from_clients(clients)
    assert data.train["x"].dtype == np.float64
    assert data.train["x"].tolist() == [1, 2, 0.5]
    assert data.train["y"].tolist() == [1, 1, 3]


class Tensor:
    """As PyTorch's: NumPy gets at it only after these calls."""

    def __init__(self, values, ready=False):
        self.values, self.ready = np.asarray(values), ready

    def detach(self):
        return self

    def cpu(self):
        return Tensor(self.values, ready=True)

    def __array__(self, dtype=None, copy=None):
        if not self.ready:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad.")
        return self.values


class Holder:
    def __init__(self, **fields):
        self.__dict__.update(fields)

    def __len__(self):
        return 2

    def __getitem__(self, i):
        raise AssertionError("read sample by sample")


X, Y = [[1.0, 2.0], [3.0, 4.0]], [0, 1]


@pytest.mark.parametrize(
    "client",
    [
        {"x": X, "y": Y},
        {"x": Tensor(X), "y": Tensor(Y)},
        Holder(tensors=(Tensor(X), Tensor(Y))),
        Bunch(data=np.array(X), target=np.array(Y), DESCR="words", feature_names=["a", "b"]),
    ],
    ids=["lists", "tensors", "TensorDataset", "Bunch"],
)
def test_other_libraries_containers_are_read(client):
    data = fs.FederatedData.from_clients([client, {"x": np.array(X), "y": np.array(Y)}])
    assert data.client(0)["x"].tolist() == X
    assert data.client(0)["y"].tolist() == Y


@pytest.mark.parametrize(
    ("client", "line"),
    [
        (Holder(tensors=(Tensor(Y),) * 3), r"TensorDataset of 3 tensors.*ds\.tensors\[0\]"),
        (Holder(with_format=None, column_names=[]), r"Hugging Face.*dict\(ds\.with_format\('numpy'\)\[:\]\)"),
        (Holder(dataset=None, batch_sampler=None), r"client 0 is a DataLoader.*Give its dataset"),
        ({"x": sparse.eye(2).tocsr()}, r"client 0\['x'\] is a sparse matrix.*toarray"),
        ({"x": [[1, 2], [3]]}, r"client 0\['x'\] has rows of different lengths"),
        (pd.DataFrame({"x": Y}), r"client 0 is a data frame.*from_dataframe"),
        (Bunch(data=pd.DataFrame({"x": Y}), target=Y), "as_frame=False"),
    ],
)
def test_others_are_answered_with_the_line_to_write(client, line):
    with pytest.raises(fs.DataError, match=line):
        fs.FederatedData.from_clients([client])


def test_one_container_in_place_of_a_list_says_so():
    with pytest.raises(fs.DataError, match=r"one dict, \['a', 'b'\].*list\(clients\.values\(\)\)"):
        fs.FederatedData.from_clients({"a": {"x": X}, "b": {"x": X}})
    with pytest.raises(fs.DataError, match=r"one dict, \['x', 'y'\].*from_arrays"):
        fs.FederatedData.from_clients([{"x": X, "y": Y}], valid={"x": X, "y": Y})
    with pytest.raises(fs.DataError, match=r"this is one Holder\. Pooled samples.*from_arrays"):
        fs.FederatedData.from_clients(Holder(with_format=None))


def test_pooled_and_test_data_have_the_same_doors():
    bunch = Bunch(data=np.array(X), target=np.array(Y))
    for pooled in (bunch, {"x": X, "y": Y}, Holder(tensors=(Tensor(X), Tensor(Y)))):
        data = fs.FederatedData.from_arrays(pooled, 2, test=pooled)
        assert sorted(data.train["x"].tolist()) == X
        assert data.test["x"].tolist() == X
        assert data.test["y"].tolist() == Y


def test_datasets_of_pytorch():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'fedstrata[torch]'")
    from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

    x, y = torch.arange(12.0).reshape(6, 2).requires_grad_(True), torch.arange(6)
    whole = TensorDataset(x, y)
    parts = random_split(whole, [4, 2])
    data = fs.FederatedData.from_clients(parts, test=whole)
    assert data.sizes.tolist() == [4, 2]
    for i, part in enumerate(parts):
        assert data.client(i)["y"].tolist() == list(part.indices)
        np.testing.assert_array_equal(data.client(i)["x"], x.detach().numpy()[part.indices])
    assert data.test["x"].shape == (6, 2)
    half = fs.FederatedData.from_clients([{"x": x.bfloat16()}])
    assert half.train["x"].dtype == np.float32

    class Images(Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, i):
            raise AssertionError("read sample by sample")

    for container, message in [
        ([Images()], r"client 0 is a PyTorch dataset.*np\.stack"),
        ([DataLoader(whole)], "client 0 is a DataLoader"),
        (whole, r"this is one TensorDataset\. Pooled samples"),
    ]:
        with pytest.raises(fs.DataError, match=message):
            fs.FederatedData.from_clients(container)


@pytest.mark.parametrize("names", ["ab", [1, 2]])
def test_names_are_words(names):
    clients = [np.zeros((2, 1)), np.ones((3, 1))]
    with pytest.raises(fs.DataError, match="names must be words, one for each client"):
        fs.FederatedData.from_clients(clients, names=names)
