"""Write a store: clients one after the other, into growing files in a temporary folder that is then moved."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np

from fedstrata.core.types import PyTree
from fedstrata.data.federated import DataError, FederatedData
from fedstrata.data.store_format import FORMAT, HEADER, VERSION, described, digest_of, shape_of
from fedstrata.support.writing import beside, write_atomically

AT_ONCE = 4_096  # clients that are checked and written together


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
        folder: the folder; it must not exist, unless ``overwrite`` or it is an empty volume.
        clients: federated data; or each client's samples, as in `FederatedData.from_clients`. A generator is
            consumed step by step, so that the samples need not fit into memory.
        valid: each client's validation samples.
        test: a pooled test set.
        server: data that the server itself holds.
        names: the clients' names.
        overwrite: whether to replace an existing store.

    Raises:
        DataError: for samples that do not fit together, or a folder that exists already.

    >>> import numpy as np, tempfile, fedstrata as fs
    >>> with tempfile.TemporaryDirectory() as place:
    ...     at = fs.data.write_store(place + "/store", ({"x": np.full((n, 2), n)} for n in (1, 2, 3)))
    ...     fs.data.open_store(at).samples(np.array([2, 0]))["x"].tolist()
    [[3, 3], [3, 3], [3, 3], [1, 1]]
    """
    target = Path(folder)
    volume = target.is_mount()  # it always exists, and cannot be moved; perhaps nothing else is writable
    empty = volume and all(file.name == "lost+found" for file in target.iterdir())
    if target.exists() and not (empty or (overwrite and (target / "index.json").is_file())):
        raise DataError(
            f"{target} exists already. Give another folder, or overwrite=True to replace a store."
        )
    with beside(target / "store" if volume else target) as temporary:
        if isinstance(clients, FederatedData):
            test = clients.test if test is None else test
            server = clients.server if server is None else server
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
                f"valid has {parts['valid']['sizes']['shape'][0]} clients, but train has {number}."
            )
        if names is not None and len(names) != number:
            raise DataError(f"There are {len(names)} names for {number} clients.")
        index = {"format": FORMAT, "version": VERSION, "clients": number, "names": names, "parts": parts}
        index["sha256"] = digest_of(index)
        write_atomically(temporary / "index.json", json.dumps(index, indent=1).encode())
        (_fill if volume else _move)(temporary, target)
    return target


def _move(temporary: Path, target: Path) -> None:
    """Move a folder to its place; an existing one is moved aside first and then removed."""
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


def _fill(temporary: Path, target: Path) -> None:
    """Move files into a folder; if it is killed in between, there is no index, and so no store."""
    (target / "index.json").unlink(missing_ok=True)
    for old in target.glob("*.npy"):
        old.unlink()
    for file in sorted(temporary.iterdir(), key=lambda file: file.name == "index.json"):  # the index last
        os.replace(file, target / file.name)


def _each(data: FederatedData, part: str) -> Iterator[PyTree]:
    sizes = data.sizes if part == "train" else data.valid_sizes
    assert sizes is not None
    for start in range(0, data.clients, AT_ONCE):
        some = np.arange(start, min(start + AT_ONCE, data.clients))
        samples, ends = data.read(some, part), np.cumsum(sizes[some])
        for stop, size in zip(ends.tolist(), sizes[some].tolist(), strict=True):
            yield jax.tree.map(lambda leaf, a=stop - size, b=stop: leaf[a:b], samples)


def _write_clients(folder: Path, part: str, clients: Iterable[PyTree]) -> dict[str, Any]:
    """Write a part's arrays, and return their entry in the index."""
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
                    f"{part}: the clients from number {first} on have other arrays than the first ones."
                )
            sizes.append(data.sizes)
            first += len(some)
        if not sizes:
            raise DataError(f"{part}: give at least one client to write.")
        entries = [array.close() for array in arrays]
    finally:
        for array in arrays:
            array.file.close()
    own = np.concatenate(sizes)
    counts = _Array(folder, part, "sizes", own)
    counts.append(own, 0)
    tree = shape_of(jax.tree.unflatten(structure, range(len(arrays))))
    return {"tree": tree, "arrays": entries, "sizes": counts.close()}


def _leaves(samples: PyTree) -> list[tuple[str, np.ndarray]]:
    """The arrays by names that are valid file names."""

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
                f"the first ones {self.dtype} {self.shape}. A sample must have the same dtype and "
                "shape at all clients."
            )
        rows = np.ascontiguousarray(rows, self.dtype)
        content = rows.reshape(-1).view(np.uint8).data
        self.file.write(content)
        self.digest.update(content)
        self.length += rows.shape[0]

    def close(self) -> dict[str, Any]:
        """Write the header, flush to disk, and return the entry in the index."""
        shape = (self.length, *self.shape)
        before = b"\x93NUMPY\x01\x00" + (HEADER - 10).to_bytes(2, "little")
        self.file.seek(0)
        self.file.write(before + described(self.dtype, shape).ljust(HEADER - 11).encode() + b"\n")
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        return {
            "file": self.path.name,
            "dtype": self.dtype.str,
            "shape": list(shape),
            "sha256": self.digest.hexdigest(),
        }
