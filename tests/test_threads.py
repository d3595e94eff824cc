"""Rows that several threads take, copy and check are the rows that one thread does."""

import os
import signal

import numpy as np
import pytest

import fedstrata as fs
from fedstrata.data import storage
from fedstrata.data.source import taken
from fedstrata.support import threads


@pytest.fixture
def several(monkeypatch):
    """As on a machine with many cores, for arrays of any size."""
    monkeypatch.setattr(storage, "LARGE", 16)
    monkeypatch.setattr(threads, "cores", lambda: 16)


@pytest.mark.parametrize("rows", [0, 1, 7, 1000])
def test_each_row_once(several, rows):
    array = np.arange(rows)
    parts = storage.by_rows(lambda these: array[these], array)
    np.testing.assert_array_equal(np.concatenate(parts), array)
    assert len(parts) == {0: 1, 1: 1, 7: 3, 1000: 8}[rows]


@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.uint16])
def test_taken(several, dtype):
    rng = np.random.default_rng(0)
    array = rng.integers(0, 100, (500, 3, 2)).astype(dtype)
    rows = rng.integers(0, 500, 2000)
    np.testing.assert_array_equal(taken(array, rows), array[rows])


def test_a_store(several, tmp_path):
    """What is read of a store, and a NaN in the last of its samples."""
    rng = np.random.default_rng(1)
    clients = [{"a": rng.standard_normal((size, 3), dtype=np.float32)} for size in (5, 1, 40, 17)]
    data = fs.FederatedData.from_source(fs.data.open_store(fs.data.write_store(tmp_path / "store", clients)))
    who = np.array([0, 2, 3])
    np.testing.assert_array_equal(data.read(who)["a"], np.concatenate([clients[i]["a"] for i in who]))
    placed = data.some(who, 5, {"train": 70}, ())
    np.testing.assert_array_equal(placed.training.leaves["a"][:62], data.read(who)["a"])
    assert not placed.training.leaves["a"][62:].any()

    sizes = np.array([4, 30])
    bad = fs.data.FromFunction(sizes, lambda i: {"a": np.where(np.arange(sizes[i]) < 29, 0.0, np.nan)})
    with pytest.raises(fs.DataError, match="NaN"):
        fs.FederatedData.from_source(bad).read(np.array([0, 1]))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_child_has_threads_of_its_own(several):
    array = np.arange(1000)
    storage.by_rows(lambda these: array[these], array)  # the parent's are there
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # where it waits for a thread that is not there
        parts = storage.by_rows(lambda these: array[these], array)
        os._exit(0 if (np.concatenate(parts) == array).all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
