"""A folder of plain arrays from which clients' samples are read as they are needed.

    index.json       the contents: parts, arrays (file, dtype, shape, sha256 of their bytes), names
    train.sizes.npy  the number of samples of each client
    train.x.npy      the samples of all clients, one client after the other, an array for each leaf
    valid.…          likewise, if clients have validation samples
    test.…, server.… pooled samples, if there are any; no sizes

The arrays are NumPy's own `.npy` files, so that anything can read them; they are mapped into memory, and only
the requested samples are read. A store is written (`fedstrata.data.store_writing`) beside its place and then
moved there: it is complete or absent. `scaled` arrays are written in the bytes that are kept.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedstrata.core.types import PyTree
from fedstrata.data.federated import DataError, FederatedData
from fedstrata.data.samples import CorruptData
from fedstrata.data.source import rows_of, taken
from fedstrata.data.store_format import FORMAT, HEADER, VERSION, described, digest_of, rebuilt
from fedstrata.support.shown import line

KEPT = 2**28  # bytes that are read before their pages are given back
VERIFIED = 2**30  # bytes up to which checksums are verified when a store is opened


@dataclass(frozen=True)
class _File:
    """An array of a store, mapped into memory."""

    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    sha256: str

    @cached_property
    def pages(self) -> mmap.mmap:
        """The mapped file, after a check of its length and header against the index."""
        try:
            with open(self.path, "rb") as file:
                head, length = file.read(HEADER), os.fstat(file.fileno()).st_size
                pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if length else None
        except OSError as error:
            raise CorruptData(f"{self.path} cannot be read ({error.strerror or error}).") from error
        expected = HEADER + math.prod(self.shape) * self.dtype.itemsize
        if length != expected or pages is None:
            raise CorruptData(f"{self.path} is damaged: it has {length} bytes instead of {expected}.")
        if head[10:].decode("latin-1").strip() != described(self.dtype, self.shape):
            raise CorruptData(f"{self.path} is damaged: its header differs from the store's index.")
        return pages

    @cached_property
    def array(self) -> np.ndarray:
        found = np.frombuffer(self.pages, self.dtype, offset=HEADER).reshape(self.shape)
        return found if self.dtype.isnative else found.astype(self.dtype.newbyteorder("="))

    def verify(self) -> None:
        if hashlib.sha256(memoryview(self.pages)[HEADER:]).hexdigest() != self.sha256:
            raise CorruptData(f"{self.path} is damaged: its bytes have changed since it was written.")

    @cached_property
    def read(self) -> list[int]:
        """The bytes read since pages were last given back."""
        return [0]

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Some rows; now and then, the pages that were read are returned to the system."""
        found = taken(self.array, rows)
        self.read[0] += found.nbytes
        if self.read[0] > KEPT and hasattr(mmap, "MADV_DONTNEED"):
            self.pages.madvise(mmap.MADV_DONTNEED)
            self.read[0] = 0
        return found


@dataclass(frozen=True, eq=False)
class Store:
    """An open store, a source of clients' samples; see `open_store`.

    Attributes:
        folder: its folder.
        index: the content of ``index.json``.
        part: the part whose samples it reads.
    """

    folder: Path
    index: dict[str, Any]
    part: str = "train"

    def __repr__(self) -> str:
        whose = f"{self.index['clients']} clients"
        return line("Store", [str(self.folder), whose, f"{int(self.sizes.sum())} samples for {self.part}"])

    @cached_property
    def _files(self) -> list[_File]:
        return [self._file(entry) for entry in self.index["parts"][self.part]["arrays"]]

    def _file(self, entry: dict[str, Any]) -> _File:
        return _File(
            self.folder / entry["file"], np.dtype(entry["dtype"]), tuple(entry["shape"]), entry["sha256"]
        )

    @cached_property
    def sizes(self) -> np.ndarray:
        """The number of samples of each client."""
        return self._file(self.index["parts"][self.part]["sizes"]).array.copy()

    @cached_property
    def _offsets(self) -> np.ndarray:
        return np.cumsum(self.sizes) - self.sizes

    @property
    def form(self) -> PyTree:
        """Shapes and dtypes of one sample."""
        return self._tree([jax.ShapeDtypeStruct(f.shape[1:], f.dtype) for f in self._files])

    def _tree(self, leaves: Sequence[Any]) -> PyTree:
        return rebuilt(self.index["parts"][self.part]["tree"], leaves)

    def samples(self, clients: np.ndarray) -> PyTree:
        """The samples of these clients, one client after the other."""
        rows = rows_of(self.sizes[clients], self._offsets[clients])
        found = [file.take(rows) for file in self._files]
        return self._tree(found)

    @cached_property
    def valid(self) -> Store | None:
        """The clients' validation samples, or None."""
        return replace(self, part="valid") if "valid" in self.index["parts"] else None

    def _pooled(self, part: str) -> PyTree:
        if part not in self.index["parts"]:
            return None
        other = replace(self, part=part)
        return other._tree([file.array for file in other._files])

    @property
    def test(self) -> PyTree:
        """The pooled test set, or None."""
        return self._pooled("test")

    @property
    def server(self) -> PyTree:
        """The server's own samples, or None."""
        return self._pooled("server")

    @property
    def names(self) -> tuple[str, ...] | None:
        """The clients' names, or None."""
        return None if self.index["names"] is None else tuple(self.index["names"])

    @property
    def fingerprint(self) -> str:
        """A digest of all checksums, by which a resumed run recognises its data."""
        return f"{self.index['sha256'][:24]} {self.part}"

    @property
    def nbytes(self) -> int:
        """The bytes of its files."""
        return sum(file.path.stat().st_size for file in self._all())

    def _all(self) -> list[_File]:
        entries = [p for part in self.index["parts"].values() for p in part["arrays"]]
        entries += [part["sizes"] for part in self.index["parts"].values() if "sizes" in part]
        return [self._file(entry) for entry in entries]

    def verify(self) -> None:
        """Read everything and compare checksums.

        Raises:
            CorruptData: with the name of the damaged file.
        """
        for file in self._all():
            file.verify()

    def load(self) -> FederatedData:
        """Read all of it into memory."""
        return FederatedData.from_source(self).load()


def open_store(folder: str | os.PathLike[str], *, verify: bool | None = None) -> Store:
    """Open what `write_store` wrote: a source for `FederatedData.from_source`; ``.load()`` reads all of it.

    Args:
        folder: its folder.
        verify: whether to read everything and compare checksums now; by default up to 1 GiB. Lengths and
            headers are always compared.

    Raises:
        DataError: if the folder has no store.
        CorruptData: with the name of the damaged file.
    """
    folder = Path(folder)
    file = folder / "index.json"
    if not file.is_file():
        raise DataError(f"{folder} is not a store: it has no index.json. fs.data.write_store makes one.")
    try:
        index = json.loads(file.read_text("utf-8"))
        known = index["format"] == FORMAT
        whole = known and index["sha256"] == digest_of(index)
    except (ValueError, KeyError, TypeError, UnicodeDecodeError):
        known, whole = True, False
    if not known:
        raise DataError(f"{file} is not the index of a store.")
    if not whole:
        raise CorruptData(f"{file} is damaged: it has changed since it was written.")
    if index["version"] != VERSION:
        raise DataError(f"{file} has the format {index['version']}, this version reads {VERSION}.")
    store = Store(folder, index)
    try:
        _check(store)
    except CorruptData:
        raise
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CorruptData(f"{file} does not describe a store ({type(error).__name__}: {error}).") from error
    files = store._all()
    if verify or (verify is None and store.nbytes <= VERIFIED):
        for one in files:
            one.verify()
    return store


def _check(store: Store) -> None:
    """Raise if files are missing or do not fit together, before memory is allocated for them."""
    for part in store.index["parts"].values():
        arrays = [store._file(entry) for entry in part["arrays"]]
        sizes = [store._file(part["sizes"])] if "sizes" in part else []
        for one in (*arrays, *sizes):
            if one.path.parent != store.folder or not all(type(n) is int and n >= 0 for n in one.shape):
                raise ValueError(f"{one.path.name} is not an array of this folder")
            _ = one.pages
        for one in sizes:
            one.verify()
            counts = one.array
            rows = {one.shape[0] for one in arrays}
            whole = counts.ndim == 1 and counts.dtype.kind in "iu" and counts.min(initial=0) >= 0
            if not whole or counts.max(initial=0) > min(rows):
                raise ValueError("sizes that are not counts of samples")
            if rows != {int(counts.sum())}:
                raise ValueError(f"clients with {int(counts.sum())} samples, but arrays of {sorted(rows)}")
