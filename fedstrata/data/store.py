"""A folder of plain arrays from which clients' samples are read as they are needed.

    index.json       what there is: parts, arrays (file, dtype, shape, sha256 of their bytes), names
    train.sizes.npy  how many samples each client has
    train.x.npy      the samples of all clients, one client after the other, an array for each leaf
    valid.…          likewise, where clients have validation samples
    test.…, server.… pooled samples, where there are any; no sizes

The arrays are NumPy's own `.npy` files, so that anything can read them; here they are mapped into memory, and
only what is asked for is read. A store is written beside its place and then moved there: it is whole, or it
is not there.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np

from fedstrata.core.federated import DataError, FederatedData
from fedstrata.core.source import rows_of
from fedstrata.core.types import PyTree
from fedstrata.data.formats import CorruptData

FORMAT, VERSION = "fedstrata-store", 1
HEADER = 256  # bytes before an array's own; its shape is known only when all of it is written
AT_ONCE = 4_096  # clients that are checked and written together
KEPT = 2**28  # bytes that are read before their pages are given back
VERIFIED = 2**30  # bytes up to which checksums are verified when a store is opened


def write_store(
    folder: str | os.PathLike[str],
    clients: FederatedData | Iterable[PyTree],
    valid: Iterable[PyTree] | None = None,
    test: PyTree = None,
    server: PyTree = None,
    names: Sequence[str] | None = None,
    *,
    overwrite: bool = False,
) -> Path:
    """Write clients' samples into a folder, from which `open_store` reads them.

    Args:
        folder: where; it must not exist, unless ``overwrite``.
        clients: federated data; or each client's samples, as in `FederatedData.from_clients`. A generator is
            written as it goes, so that they need not fit into memory.
        valid: each client's validation samples.
        test: a pooled test set.
        server: data that the server itself holds.
        names: what the clients are called.
        overwrite: whether a store that is there is replaced.

    Raises:
        DataError: for samples that do not fit together, or a folder that is there already.

    >>> import numpy as np, tempfile, fedstrata as fs
    >>> with tempfile.TemporaryDirectory() as place:
    ...     at = fs.data.write_store(place + "/store", ({"x": np.full((n, 2), n)} for n in (1, 2, 3)))
    ...     fs.data.open_store(at).samples(np.array([2, 0]))["x"].tolist()
    [[3, 3], [3, 3], [3, 3], [1, 1]]
    """
    target = Path(folder)
    if target.exists() and not (overwrite and (target / "index.json").is_file()):
        raise DataError(
            f"{target} exists already. Give another folder, or overwrite=True to replace a store."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}"
    temporary.mkdir()
    try:
        if isinstance(clients, FederatedData):
            test, server = (
                (clients.test if test is None else test),
                (clients.server if server is None else server),
            )
            names = clients.names if names is None else names
            if valid is None and clients.valid_sizes is not None:
                valid = _each(clients, "valid")
            clients = _each(clients, "train")
        parts = {"train": _write_clients(temporary, "train", clients)}
        if valid is not None:
            parts["valid"] = _write_clients(temporary, "valid", valid)
        for name, samples in (("test", test), ("server", server)):
            if samples is not None:
                pooled = _write_clients(temporary, name, [samples])
                (temporary / pooled.pop("sizes")["file"]).unlink()
                parts[name] = pooled
        number = parts["train"]["sizes"]["shape"][0]
        if "valid" in parts and parts["valid"]["sizes"]["shape"][0] != number:
            raise DataError(
                f"valid has {parts['valid']['sizes']['shape'][0]} clients where there are {number}."
            )
        if names is not None and len(names) != number:
            raise DataError(f"There are {len(names)} names of {number} clients.")
        index = {"format": FORMAT, "version": VERSION, "clients": number, "names": names, "parts": parts}
        index["sha256"] = _digest_of(index)
        with open(temporary / "index.json", "x", encoding="utf-8") as file:
            json.dump(index, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _move(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return target


def _move(temporary: Path, target: Path) -> None:
    """Put a folder into its place; what was there is moved aside first and then removed."""
    if not target.exists():
        os.rename(temporary, target)
        return
    aside = temporary.with_name(f"{temporary.name}.old")
    os.rename(target, aside)
    try:
        os.rename(temporary, target)
    except BaseException:
        os.rename(aside, target)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _each(data: FederatedData, part: str) -> Iterator[PyTree]:
    sizes = data.sizes if part == "train" else data.valid_sizes
    assert sizes is not None
    for start in range(0, data.clients, AT_ONCE):
        these = np.arange(start, min(start + AT_ONCE, data.clients))
        samples, ends = data.read(these, part), np.cumsum(sizes[these])
        for stop, size in zip(ends.tolist(), sizes[these].tolist(), strict=True):
            yield jax.tree.map(lambda leaf, a=stop - size, b=stop: leaf[a:b], samples)


def _write_clients(folder: Path, part: str, clients: Iterable[PyTree]) -> dict[str, Any]:
    """Write a part's arrays, and say what they are."""
    arrays: list[_Array] = []
    structure: Any = None
    sizes, first, walk = [], 0, iter(clients)
    try:
        while some := list(islice(walk, AT_ONCE)):
            try:
                data = FederatedData.from_clients(some)
            except DataError as error:
                where = "" if first == 0 else f"Of the clients from number {first} on, counted from there: "
                raise DataError(f"{part}: {where}{error}") from error
            if structure is None:
                structure = jax.tree.structure(data.train)
                arrays = [_Array(folder, part, path, leaf) for path, leaf in _leaves(data.train)]
            for array, leaf in zip(arrays, jax.tree.leaves(data.train), strict=True):
                array.append(leaf, first)
            if jax.tree.structure(data.train) != structure:
                raise DataError(
                    f"{part}: the clients from number {first} on hold other arrays than the first."
                )
            sizes.append(data.sizes)
            first += len(some)
        if not sizes:
            raise DataError(f"{part}: there are no clients to write.")
        described = [array.close() for array in arrays]
    finally:
        for array in arrays:
            array.file.close()
    own = np.concatenate(sizes)
    counts = _Array(folder, part, "sizes", own)
    counts.append(own, 0)
    tree = _shape_of(jax.tree.unflatten(structure, range(len(arrays))))
    return {"tree": tree, "arrays": described, "sizes": counts.close()}


def _leaves(samples: PyTree) -> list[tuple[str, np.ndarray]]:
    """The arrays with names that files can have."""

    def name(path: Any, number: int) -> str:
        words = jax.tree_util.keystr(path, simple=True, separator=".")
        plain = "".join(c if c.isalnum() or c in "._-" else "_" for c in words) or "array"
        return plain if plain != "sizes" else f"{plain}_{number}"

    found = [
        (name(path, j), leaf) for j, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(samples))
    ]
    if len({key for key, _ in found}) < len(found):
        found = [(f"{key}_{j}", leaf) for j, (key, leaf) in enumerate(found)]
    return found


class _Array:
    """An `.npy` file that grows."""

    def __init__(self, folder: Path, part: str, name: str, like: np.ndarray) -> None:
        self.path = folder / f"{part}.{name}.npy"
        self.file: BinaryIO = open(self.path, "xb")  # noqa: SIM115 (closed by `close`, or where writing fails)
        self.dtype, self.shape, self.length = like.dtype.newbyteorder("<"), like.shape[1:], 0
        self.digest = hashlib.sha256()
        self.file.write(bytes(HEADER))

    def append(self, rows: np.ndarray, first: int) -> None:
        if rows.shape[1:] != self.shape or not np.can_cast(rows.dtype, self.dtype):
            raise DataError(
                f"{self.path.name}: the clients from number {first} on have {rows.dtype} {rows.shape[1:]}, "
                f"the first ones {self.dtype} {self.shape}. That is the form of one sample: it is the same "
                "for all."
            )
        rows = np.ascontiguousarray(rows, self.dtype)
        content = rows.reshape(-1).view(np.uint8).data
        self.file.write(content)
        self.digest.update(content)
        self.length += rows.shape[0]

    def close(self) -> dict[str, Any]:
        """Write what is known now, bring it to the disk, and describe it."""
        shape = (self.length, *self.shape)
        words = f"{{'descr': {self.dtype.str!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
        before = b"\x93NUMPY\x01\x00" + (HEADER - 10).to_bytes(2, "little")
        self.file.seek(0)
        self.file.write(before + words.ljust(HEADER - 11).encode() + b"\n")
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        return {
            "file": self.path.name,
            "dtype": self.dtype.str,
            "shape": list(shape),
            "sha256": self.digest.hexdigest(),
        }


def _shape_of(node: Any) -> Any:
    """The containers of a pytree of numbers as JSON."""
    match node:
        case dict():
            if not all(isinstance(key, str) for key in node):
                raise DataError(f"A store's samples have words as their names, not {list(node)}.")
            return {"dict": {key: _shape_of(value) for key, value in node.items()}}
        case tuple() | list():
            return {"list" if isinstance(node, list) else "tuple": [_shape_of(value) for value in node]}
        case int():
            return node
    raise DataError(f"A store holds dicts, lists and tuples of arrays, not {type(node).__name__}.")


def _rebuilt(shape: Any, leaves: Sequence[Any]) -> PyTree:
    if isinstance(shape, int):
        return leaves[shape]
    ((kind, inner),) = shape.items()
    if kind == "dict":
        return {name: _rebuilt(part, leaves) for name, part in inner.items()}
    parts = [_rebuilt(part, leaves) for part in inner]
    return tuple(parts) if kind == "tuple" else parts


def _digest_of(index: dict[str, Any]) -> str:
    plain = json.loads(json.dumps({key: value for key, value in index.items() if key != "sha256"}))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class _File:
    """An array of a store, mapped into memory."""

    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    sha256: str

    @cached_property
    def pages(self) -> mmap.mmap:
        """The whole file, checked for being as long as it should and saying what the index says."""
        try:
            with open(self.path, "rb") as file:
                head, length = file.read(HEADER), os.fstat(file.fileno()).st_size
                pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if length else None
        except OSError as error:
            raise CorruptData(f"{self.path} cannot be read ({error.strerror or error}).") from error
        expected = HEADER + int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize
        words = f"{{'descr': {self.dtype.str!r}, 'fortran_order': False, 'shape': {self.shape!r}, }}"
        if length != expected or pages is None:
            raise CorruptData(f"{self.path} is damaged: it has {length} bytes in place of {expected}.")
        if head[10:].decode("latin-1").strip() != words:
            raise CorruptData(f"{self.path} is damaged: its header is not what the store's index says.")
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
        """How many bytes were, lately."""
        return [0]

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Some rows. Of pages that were read, the system gets back its own now and then."""
        found = np.take(self.array, rows, axis=0)
        self.read[0] += found.nbytes
        if self.read[0] > KEPT and hasattr(mmap, "MADV_DONTNEED"):
            self.pages.madvise(mmap.MADV_DONTNEED)
            self.read[0] = 0
        return found


@dataclass(frozen=True, eq=False)
class Store:
    """A store that is open: a source of clients' samples, see `open_store`.

    Attributes:
        folder: where it is.
        index: what ``index.json`` says.
        part: which samples it gives.
    """

    folder: Path
    index: dict[str, Any]
    part: str = "train"

    @cached_property
    def _files(self) -> list[_File]:
        return [self._file(entry) for entry in self.index["parts"][self.part]["arrays"]]

    def _file(self, entry: dict[str, Any]) -> _File:
        return _File(
            self.folder / entry["file"], np.dtype(entry["dtype"]), tuple(entry["shape"]), entry["sha256"]
        )

    @cached_property
    def sizes(self) -> np.ndarray:
        """How many samples each client has."""
        return self._file(self.index["parts"][self.part]["sizes"]).array.copy()

    @cached_property
    def _offsets(self) -> np.ndarray:
        return np.cumsum(self.sizes) - self.sizes

    @property
    def form(self) -> PyTree:
        """Shapes and dtypes of one sample."""
        return self._tree([jax.ShapeDtypeStruct(f.shape[1:], f.dtype) for f in self._files])

    def _tree(self, leaves: Sequence[Any]) -> PyTree:
        return _rebuilt(self.index["parts"][self.part]["tree"], leaves)

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
        """What the clients are called, or None."""
        return None if self.index["names"] is None else tuple(self.index["names"])

    @property
    def fingerprint(self) -> str:
        """By which a run knows it again: of all checksums."""
        return f"{self.index['sha256'][:24]} {self.part}"

    @property
    def nbytes(self) -> int:
        """What its arrays take on the disk."""
        return sum(file.path.stat().st_size for file in self._all())

    def _all(self) -> list[_File]:
        entries = [p for part in self.index["parts"].values() for p in part["arrays"]]
        entries += [part["sizes"] for part in self.index["parts"].values() if "sizes" in part]
        return [self._file(entry) for entry in entries]

    def verify(self) -> None:
        """Read everything and compare checksums.

        Raises:
            CorruptData: which names the file that is not what was written.
        """
        for file in self._all():
            file.verify()

    def load(self) -> FederatedData:
        """All of it in memory."""
        return FederatedData.from_source(self).load()


def open_store(folder: str | os.PathLike[str], *, verify: bool | None = None) -> Store:
    """Open what `write_store` wrote: a source for `FederatedData.from_source`; ``.load()`` reads all of it.

    Args:
        folder: where it is.
        verify: whether checksums are compared now, for which all of it is read; by default where it has at
            most 1 GiB. Lengths and headers always are.

    Raises:
        DataError: where there is no store.
        CorruptData: which names the file that is damaged.
    """
    folder = Path(folder)
    file = folder / "index.json"
    if not file.is_file():
        raise DataError(
            f"There is no store in {folder}: it has no index.json. fs.data.write_store makes one."
        )
    try:
        index = json.loads(file.read_text("utf-8"))
        known = index["format"] == FORMAT
        whole = known and index["sha256"] == _digest_of(index)
    except (ValueError, KeyError, TypeError, UnicodeDecodeError):
        known, whole = True, False
    if not known:
        raise DataError(f"{file} is no index of a store.")
    if not whole:
        raise CorruptData(f"{file} is damaged: it is not what was written.")
    if index["version"] != VERSION:
        raise DataError(f"{file} has the format {index['version']}, this version reads {VERSION}.")
    store = Store(folder, index)
    files = store._all()
    for one in files:
        _ = one.pages
    if verify or (verify is None and store.nbytes <= VERIFIED):
        for one in files:
            one.verify()
    return store
