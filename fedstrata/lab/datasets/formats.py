"""Readers of the data sets' file formats: paths in, named arrays out. None of them unpickles."""

import contextlib
import csv
import gzip
import hashlib
import json
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedstrata.data.files import read_csv
from fedstrata.data.samples import CorruptData
from fedstrata.support.lazy import extra

Arrays = dict[str, np.ndarray]

ADULT_TRAIN_ROWS = 32_561  # the rest of the pooled file is the test part
ADULT_COLUMNS = (
    "age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation",
    "relationship", "race", "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country",
    "income",
)  # fmt: skip
_NUMERIC = {"age", "fnlwgt", "education-num", "capital-gain", "capital-loss", "hours-per-week"}
_CIFAR_PIXELS = 3 * 32 * 32
_IDX_UBYTE = 0x08

_BROKEN = (
    OSError, EOFError, ValueError, LookupError, TypeError, zlib.error, zipfile.BadZipFile, tarfile.TarError,
)  # fmt: skip


@contextlib.contextmanager
def _reading(path: Path, form: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except _BROKEN as error:
        reason = f"no entry {error}" if isinstance(error, KeyError) else str(error)
        raise CorruptData(
            f"{path} cannot be read as {form} ({reason}). "
            "It may be truncated or of another format: delete it and get it again."
        ) from error


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def read_image_npz(path: Path) -> Arrays:
    """`x_train, y_train, x_test, y_test` of an npz file, as Keras publishes MNIST."""
    with _reading(path, "an npz file of images"):
        return _images(_npz(path, "x_train", "y_train", "x_test", "y_test"))


def _npz(path: Path, *names: str) -> Arrays:
    # numpy leaves a broken file open that it has opened itself
    with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
        for name in names:
            _expect(name in file, f"no array {name!r}")
        return {name: file[name] for name in names}


def read_idx(train_x: Path, train_y: Path, test_x: Path, test_y: Path) -> Arrays:
    """The four gzipped IDX files in which MNIST and Fashion-MNIST are published."""
    names = ("x_train", "y_train", "x_test", "y_test")
    arrays = {}
    for name, path in zip(names, (train_x, train_y, test_x, test_y), strict=True):
        with _reading(path, "a gzipped IDX file"), gzip.open(path) as file:
            arrays[name] = _idx(file.read())
    with _reading(train_x.parent, "a folder of IDX files"):
        return _images(arrays)


def _idx(raw: bytes) -> np.ndarray:
    zeros, kind, ndim = raw[:2], raw[2], raw[3]
    _expect(zeros == b"\0\0" and kind == _IDX_UBYTE, "no IDX header of unsigned bytes")
    shape = np.frombuffer(raw, ">u4", count=ndim, offset=4).astype(np.int64)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * ndim).reshape(shape)


def read_cifar_grids(labels: Path, test: Path, *train: Path) -> Arrays:
    """CIFAR-10 as lossless pictures, each a grid of 32×32 tiles row by row, and an npz file of labels."""
    with _reading(labels, "an npz file of labels"):
        arrays = _npz(labels, "y_train", "y_test")
    arrays["x_train"] = np.concatenate([_grid(path) for path in train])
    arrays["x_test"] = _grid(test)
    with _reading(labels, "the labels of the pictures beside it"):
        return _images(arrays)


def _grid(path: Path) -> np.ndarray:
    with extra("lab", "A data set of pictures"):
        from PIL import Image

    with _reading(path, "a grid of 32×32 tiles"):
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"))
        height, width, _ = pixels.shape
        _expect(height % 32 == width % 32 == 0, f"{width}×{height} pixels are not a multiple of 32")
        tiles = pixels.reshape(height // 32, 32, width // 32, 32, 3).transpose(0, 2, 1, 3, 4)
        return tiles.reshape(-1, 32, 32, 3)


def read_cifar_binary(path: Path) -> Arrays:
    """CIFAR-10's binary version: records of a label and three 32×32 planes, in a tar archive."""
    return _cifar(path, 10, [f"data_batch_{i}.bin" for i in range(1, 6)], "test_batch.bin")


def read_cifar100_binary(path: Path) -> Arrays:
    """CIFAR-100's: the same with two labels, of the twenty kinds and of the hundred classes."""
    return _cifar(path, 100, ["train.bin"], "test.bin", labels=2)


def _cifar(path: Path, classes: int, batches: list[str], last: str, labels: int = 1) -> Arrays:
    with _reading(path, f"CIFAR-{classes}'s binary version"):
        record = labels + _CIFAR_PIXELS
        with tarfile.open(path) as archive:
            members = {Path(member.name).name: member for member in archive if member.isfile()}

            def batch(name: str) -> np.ndarray:
                _expect(name in members, f"{name} is missing")
                file = archive.extractfile(members[name])
                raw = np.frombuffer(file.read() if file else b"", np.uint8)
                _expect(raw.size > 0 and raw.size % record == 0, f"{name} has a broken record")
                return raw.reshape(-1, record)

            train, test = np.concatenate([batch(name) for name in batches]), batch(last)
        arrays = {}
        for part, records in (("train", train), ("test", test)):
            arrays[f"y_{part}"] = records[:, labels - 1]
            arrays[f"x_{part}"] = records[:, labels:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1).copy()
        return _images(arrays, classes)


def _images(arrays: Arrays, classes: int = 10) -> Arrays:
    for part in ("train", "test"):
        x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
        _expect(x.dtype == np.uint8 and x.ndim in (3, 4), f"x_{part} is not an array of byte images")
        _expect(y.shape == x.shape[:1], f"{len(x)} images in x_{part} but labels of shape {y.shape}")
        _expect(bool((y < classes).all()), f"y_{part} has labels beyond {classes - 1}")
        arrays[f"y_{part}"] = y.astype(np.int32)
    return arrays


def read_table(digest: str, path: Path) -> Arrays:
    """The columns of a gzipped csv file, which must be the one of this SHA-256."""
    with _reading(path, "the table of that name"):
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        _expect(found == digest, f"its SHA-256 is {found[:12]}…, not {digest[:12]}…")
        return dict(read_csv(path).columns)


def read_adult_csv(path: Path) -> Arrays:
    """Adult as one gzipped csv file with a header: the training rows, then the test rows."""
    with _reading(path, "the Adult table"):
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            header, *rows = _rows(file)
        _expect(tuple(header) == ADULT_COLUMNS, f"the header is {header}")
        _expect(len(rows) > ADULT_TRAIN_ROWS, f"only {len(rows)} rows")
        return _encode_adult(rows[:ADULT_TRAIN_ROWS], rows[ADULT_TRAIN_ROWS:])


def read_adult_uci(train: Path, test: Path) -> Arrays:
    """Adult as UCI publishes it: `adult.data` and `adult.test`, without headers."""
    tables = []
    for path in (train, test):
        with _reading(path, "a part of the Adult table"), path.open(encoding="utf-8", newline="") as file:
            tables.append(list(_rows(file)))
            _expect(len(tables[-1]) > 0, "no rows")
    with _reading(train.parent, "the Adult table"):
        return _encode_adult(*tables)


def _rows(file: Iterable[str]) -> Iterator[list[str]]:
    for number, cells in enumerate(csv.reader(file, skipinitialspace=True), start=1):
        if not cells or cells[0].startswith("|"):  # adult.test begins with a remark
            continue
        _expect(len(cells) == len(ADULT_COLUMNS), f"line {number} has {len(cells)} cells")
        yield [cell.strip() for cell in cells]


def _encode_adult(train: list[list[str]], test: list[list[str]]) -> Arrays:
    """Numbers standardised, categories one-hot (`?` is one); all statistics from the training rows."""
    columns = {
        part: dict(zip(ADULT_COLUMNS, map(np.array, zip(*rows, strict=True)), strict=True))
        for part, rows in (("train", train), ("test", test))
    }
    names: list[str] = []
    features: dict[str, list[np.ndarray]] = {"train": [], "test": []}
    for name in ADULT_COLUMNS[:-1]:
        if name in _NUMERIC:
            values = columns["train"][name].astype(np.float64)
            centre, spread = values.mean(), values.std() or 1.0
            names.append(name)
            for part, block in features.items():
                block.append((columns[part][name].astype(np.float64)[:, None] - centre) / spread)
        else:
            categories = np.unique(columns["train"][name])
            names += [f"{name}={category}" for category in categories]
            for part, block in features.items():
                block.append(columns[part][name][:, None] == categories)
    arrays = {"feature_names": np.array(names)}
    for part, column in columns.items():
        income = np.char.rstrip(column["income"], ".")
        _expect(bool(np.isin(income, ["<=50K", ">50K"]).all()), f"incomes {np.unique(income)}")
        arrays[f"x_{part}"] = np.concatenate(features[part], axis=1).astype(np.float32)
        arrays[f"y_{part}"] = (income == ">50K").astype(np.int32)
        arrays[f"group_{part}"] = np.select(
            [column["race"] == "White", column["race"] == "Black"], [0, 1], default=2
        ).astype(np.int32)
        arrays[f"sex_{part}"] = (column["sex"] == "Male").astype(np.int32)
    return arrays


def read_bus_npz(path: Path) -> Arrays:
    """The Montevideo bus graph as an npz file."""
    with _reading(path, "an npz file of bus stops"):
        return _graph(_npz(path, "visits", "edges", "weights", "bus_stop", "lon", "lat"))


def read_bus_json(path: Path) -> Arrays:
    """The Montevideo bus graph as PyTorch Geometric Temporal publishes it."""
    with _reading(path, "PyTorch Geometric Temporal's bus graph"):
        graph = _json(path)
        nodes, links = graph["nodes"], graph["links"]
        row = {node["bus_stop"]: i for i, node in enumerate(nodes)}
        return _graph(
            {
                "visits": np.array([node["y"] for node in nodes], dtype=np.int16),
                "edges": np.array([(row[e["source"]], row[e["target"]]) for e in links], dtype=np.int32),
                "weights": np.array([e["weight"] for e in links], dtype=np.float64),
                "bus_stop": np.array([node["bus_stop"] for node in nodes], dtype=np.int32),
                "lon": np.array([node["lon"] for node in nodes], dtype=np.int64),
                "lat": np.array([node["lat"] for node in nodes], dtype=np.int64),
            }
        )


def read_wikimaths_json(path: Path) -> Arrays:
    """Daily visits of Wikipedia's mathematics pages as PyTorch Geometric Temporal publishes them."""
    with _reading(path, "PyTorch Geometric Temporal's page graph"):
        graph = _json(path)
        days = [graph[str(day)]["y"] for day in range(graph["time_periods"])]
        pages = sorted(graph["node_ids"], key=graph["node_ids"].__getitem__)
        _expect(
            sorted(graph["node_ids"].values()) == list(range(len(pages))), "node_ids do not count the pages"
        )
        _expect(all(len(day) == len(pages) for day in days), "a day without a number for every page")
        return _graph(
            {
                "visits": np.array(days).T,
                "edges": np.array(graph["edges"], dtype=np.int32),
                "weights": np.array(graph["weights"], dtype=np.float64),
                "page": np.array(pages),
            }
        )


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _graph(arrays: Arrays) -> Arrays:
    visits, edges, weights = arrays["visits"], arrays["edges"], arrays["weights"]
    _expect(visits.ndim == 2 and visits.size > 0, f"visits have shape {visits.shape}")
    _expect(visits.dtype.kind in "iuf", f"visits must be numbers, but are {visits.dtype}")
    _expect(edges.shape == (len(weights), 2), f"edges {edges.shape} do not fit weights {weights.shape}")
    _expect(edges.size == 0 or 0 <= edges.min() <= edges.max() < len(visits), "an edge without its node")
    return arrays
