"""Stores and other sources: what is written is read again, and damage is named."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.data import store_writing
from fedstrata.data.store_format import HEADER, digest_of

SIZES = (4, 1, 7, 3)


def clients(offset=0):
    rng = np.random.default_rng(offset)
    return [
        {"x": rng.normal(size=(n, 2, 3)).astype(np.float32), "y": rng.integers(0, 255, n).astype(np.uint8)}
        for n in SIZES
    ]


@pytest.fixture
def folder(tmp_path):
    test, server = clients(2)[0], {"z": np.arange(5)}
    names = ["a", "b", "c", "d"]
    return fs.data.write_store(tmp_path / "store", iter(clients()), clients(1), test, server, names)


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for u, v in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert u.dtype == v.dtype
        np.testing.assert_array_equal(u, v)


def test_what_is_written_is_read_again(folder):
    store = fs.data.open_store(folder)
    assert store.sizes.tolist() == list(SIZES)
    some = store.samples(np.array([2, 0]))
    assert_equal(some, jax.tree.map(lambda *u: np.concatenate(u), clients()[2], clients()[0]))
    loaded = store.load()
    whole = fs.FederatedData.from_clients(clients(), valid=clients(1), test=clients(2)[0])
    assert_equal((loaded.train, loaded.valid, loaded.test), (whole.train, whole.valid, whole.test))
    assert loaded.server["z"].tolist() == [0, 1, 2, 3, 4]
    assert loaded.names == ("a", "b", "c", "d")
    # any program that knows NumPy's format can read it
    np.testing.assert_array_equal(np.load(folder / "train.x.npy"), whole.train["x"])


def test_federated_data_reads_what_it_is_asked_for(folder):
    data = fs.FederatedData.from_source(fs.data.open_store(folder))
    assert (data.clients, data.nbytes, data.valid_sizes.tolist()) == (4, 5 * 8 + 4 * 25, list(SIZES))
    assert data.sample_of()["x"].shape == (2, 3)
    assert_equal(data.client(2), clients()[2])
    assert_equal(data.client(1, "valid"), clients(1)[1])
    assert_equal(data.load([3, 1]).train, jax.tree.map(lambda *u: np.concatenate(u), *clients()[3:0:-2]))
    assert "from a source" in repr(data)
    again = fs.FederatedData.from_source(fs.data.open_store(folder))
    assert again.fingerprint == data.fingerprint
    with pytest.raises(fs.DataError, match=r"data\.load\(\)"):
        data.placed()
    with pytest.raises(fs.DataError, match="standardize needs all samples in memory"):
        fs.data.standardize(data)


def test_it_is_written_in_groups_and_from_federated_data(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(store_writing, "AT_ONCE", 3)
    data = fs.data.open_store(folder).load()
    again = fs.data.open_store(fs.data.write_store(tmp_path / "again", data)).load()
    assert_equal((again.train, again.valid, again.server), (data.train, data.valid, data.server))
    bad = [*clients()[:3], {"x": np.full((1, 2, 3), np.nan, np.float32), "y": np.zeros(1, np.uint8)}]
    with pytest.raises(fs.DataError, match=r"from number 3 on.*NaN"):
        fs.data.write_store(tmp_path / "bad", bad)
    other = [*clients()[:3], {"x": np.ones((1, 2, 2), np.float32), "y": np.zeros(1, np.uint8)}]
    with pytest.raises(fs.DataError, match=r"from number 3 on have float32 \(2, 2\)"):
        fs.data.write_store(tmp_path / "bad", other)
    assert {path.name for path in tmp_path.iterdir()} == {"store", "again"}  # nothing is left of a failure


def test_pytrees_of_every_kind(tmp_path):
    samples = [
        (np.ones((2, 1)), [np.zeros(2), {"sizes": np.arange(2)}]),
        (np.ones((1, 1)), [np.ones(1), {"sizes": np.arange(1)}]),
    ]
    assert_equal(
        fs.data.open_store(fs.data.write_store(tmp_path / "s", samples)).samples(np.array([1])), samples[1]
    )


def test_a_store_is_not_replaced_unasked(folder, tmp_path):
    with pytest.raises(fs.DataError, match="exists already"):
        fs.data.write_store(folder, clients())
    fs.data.write_store(folder, clients()[:2], overwrite=True)
    assert fs.data.open_store(folder).sizes.tolist() == [4, 1]
    (tmp_path / "other").mkdir()
    with pytest.raises(fs.DataError, match="exists already"):
        fs.data.write_store(tmp_path / "other", clients(), overwrite=True)


def test_a_store_is_written_into_a_volume(tmp_path, monkeypatch):
    """A container's volume exists, is not moved, and may be all that is writable."""
    volume = tmp_path / "read-only" / "volume"
    (volume / "lost+found").mkdir(parents=True)
    monkeypatch.setattr(type(volume), "is_mount", lambda path: path == volume)
    move = os.rename

    def rename(old, new):
        assert volume not in (Path(old), Path(new)), "busy"
        move(old, new)

    monkeypatch.setattr(os, "rename", rename)
    before = os.stat(volume.parent).st_mtime_ns
    for number in (2, 1):
        at = fs.data.write_store(volume, clients()[:number], clients(1)[:number], overwrite=number == 1)
        assert len(fs.data.open_store(at).sizes) == number
    assert os.stat(volume.parent).st_mtime_ns == before  # nothing was written beside it
    with pytest.raises(fs.DataError, match="exists already"):
        fs.data.write_store(volume, clients())
    assert [file.name for file in volume.iterdir() if file.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("train.x.npy", lambda b: b[:-1]),
        ("train.x.npy", lambda b: b[:-1] + bytes([b[-1] ^ 1])),
        ("valid.y.npy", lambda b: b[:20] + b"?" + b[21:]),
        ("train.sizes.npy", lambda b: b[:-4] + b"\x01\x00\x00\x00"),
        ("index.json", lambda b: b.replace(b'"a"', b'"q"')),
        ("index.json", lambda b: b[:50]),
    ],
)
def test_damage_names_the_file(folder, file, damage):
    path = folder / file
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(fs.data.CorruptData, match=f"{file} is damaged"):
        fs.data.open_store(folder)


@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        ([2**30, 1, 1, 1], {}),
        ([-1, 8, 4, 4], {}),
        ([1, 1, 1, 1], {}),
        (None, {"file": "../train.x.npy"}),
        (None, {"shape": [-1, 2]}),
        (None, {"shape": None}),
    ],
    ids=str,
)
def test_a_crafted_index_asks_for_no_memory(folder, sizes, changes):
    """All digests are right: who writes a store can claim anything."""
    index = json.loads((folder / "index.json").read_text())
    part = index["parts"]["train"]
    if sizes is not None:
        path = folder / part["sizes"]["file"]
        content = path.read_bytes()[:HEADER] + np.array(sizes, part["sizes"]["dtype"]).tobytes()
        path.write_bytes(content)
        part["sizes"]["sha256"] = hashlib.sha256(content[HEADER:]).hexdigest()
    part["arrays"][0] |= changes
    (folder / "index.json").write_text(json.dumps(index | {"sha256": digest_of(index)}))
    with pytest.raises(fs.data.CorruptData, match=r"index\.json does not describe a store"):
        fs.data.open_store(folder)


def test_absence_names_the_file(folder, tmp_path):
    (folder / "valid.x.npy").unlink()
    with pytest.raises(fs.data.CorruptData, match=r"valid\.x\.npy cannot be read"):
        fs.data.open_store(folder)
    with pytest.raises(fs.DataError, match="is not a store"):
        fs.data.open_store(tmp_path)
    (folder / "index.json").write_text(json.dumps({"format": "another"}))
    with pytest.raises(fs.DataError, match="not the index of a store"):
        fs.data.open_store(folder)


def test_functions_and_sources_that_are_wrong():
    data = fs.FederatedData.from_source(fs.data.FromFunction(SIZES, lambda i: clients()[i]))
    assert_equal(data.load().train, fs.FederatedData.from_clients(clients()).train)
    with pytest.raises(fs.DataError, match=r"arrays of \[\(1,\)\] samples for client 1, whose size is 2"):
        fs.FederatedData.from_source(fs.data.FromFunction([4, 2], lambda i: clients()[i])).client(1)
    with pytest.raises(fs.DataError, match="whole numbers ≥ 1"):
        fs.FederatedData.from_source(fs.data.FromFunction([4, 0], lambda i: clients()[i]))
    holes = fs.data.FromFunction([1, 1], lambda i: {"x": np.full(1, np.nan if i else 0.0)})
    with pytest.raises(fs.DataError, match="NaN or an infinity in a sample of client 1"):
        fs.FederatedData.from_source(holes).client(1)


@pytest.mark.long  # not for its time: what it needs is installed for the nightly run only
def test_a_dataset_divided_by_a_column():
    datasets = pytest.importorskip("datasets", reason="pip install 'fedstrata[test-long]'")
    rows = {
        "who": ["b", "a", "b", "c"],
        "x": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]],
        "y": [0, 1, 2, 3],
    }
    data = fs.FederatedData.from_source(fs.data.FromDataset(datasets.Dataset.from_dict(rows), by="who"))
    assert (data.names, data.sizes.tolist()) == (("a", "b", "c"), [1, 2, 1])
    assert data.client(1)["x"].tolist() == [[1.0, 2.0], [5.0, 6.0]]
    assert data.load().train["y"].tolist() == [1, 0, 2, 3]
    with pytest.raises(fs.DataError, match="no column 'site'"):
        fs.data.FromDataset(datasets.Dataset.from_dict(rows), by="site")


def test_scaled_samples_are_kept_in_their_bytes(tmp_path):
    """The store holds bytes and how they are converted; who reads it sees what was written."""
    many = [{"x": c["x"].astype(np.uint8), "y": c["y"]} for c in clients()]
    mean, deviation = ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0)), 50.0
    data = fs.FederatedData.from_clients(many, valid=many[::-1], test=many[2]).scaled(x=(mean, deviation))
    at = fs.data.write_store(tmp_path / "scaled", data)
    (file,) = at.glob("train.x*.npy")
    assert np.load(file).dtype == np.uint8
    source = fs.FederatedData.from_source(fs.data.open_store(at))
    assert source.sample_of()["x"].dtype == np.float32
    for part in ("train", "valid"):
        assert_equal(source.client(2, part), data.client(2, part))
    expected = (many[1]["x"].astype(np.float32) - np.float32(mean)) / np.float32(deviation)
    np.testing.assert_array_equal(source.client(1)["x"], expected)
    assert source.load().fingerprint == data.fingerprint
    again = fs.data.write_store(tmp_path / "again", source)
    assert fs.data.open_store(again).fingerprint == fs.data.open_store(at).fingerprint
