"""Clients' memory on the host, a row for each client; only rows that were written take room."""

from __future__ import annotations

import tempfile
from typing import NamedTuple

import jax
import numpy as np

from fedstrata.core.types import PyTree


class MemoriesAt(NamedTuple):
    """The clients' memory at one moment of a run."""

    memories: Memories
    version: int


class Memories:
    """Rows that a run reads and writes.

    A run may go back to the beginning of its last chunk of rounds: overwritten rows are kept until the next.

    Args:
        rows: arrays with a leading axis of clients; a row that was broadcast to all clients is not copied.
        limit: bytes above which the rows are in a temporary file.
    """

    def __init__(self, rows: PyTree, limit: int) -> None:
        leaves, self.structure = jax.tree.flatten(rows)
        on_disk = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) > limit
        # Most methods begin with equal memories (zeros): one row stands for all that were never written.
        self.first = [np.array(leaf[0]) for leaf in leaves]
        self.written = np.zeros(len(leaves[0]), bool)
        self.leaves = [_room(leaf, on_disk) for leaf in leaves]
        if any(leaf.strides[0] for leaf in leaves):  # stride 0 is a broadcast row; here rows differ
            for leaf, given in zip(self.leaves, leaves, strict=True):
                leaf[:] = given
            self.written[:] = True
        self.version, self.noted = 0, np.zeros(len(leaves[0]), bool)  # whose rows are in `before`
        self.before: list[tuple[np.ndarray, list[np.ndarray]]] = []

    @property
    def row_bytes(self) -> int:
        """The bytes of one client's memory."""
        return sum(row.nbytes for row in self.first)

    def form(self, rows: int) -> PyTree:
        """The shapes of this many clients' rows."""
        shapes = [jax.ShapeDtypeStruct((rows, *row.shape), row.dtype) for row in self.first]
        return jax.tree.unflatten(self.structure, shapes)

    def take(self, clients: np.ndarray, rows: int | None = None) -> PyTree:
        """The rows of these clients, padded to ``rows``."""
        return jax.tree.unflatten(self.structure, self._take(clients, rows or len(clients)))

    def _take(self, clients: np.ndarray, rows: int) -> list[np.ndarray]:
        number, written, taken = len(clients), self.written[clients], []
        for leaf, first in zip(self.leaves, self.first, strict=True):
            filled = np.empty((rows, *first.shape), first.dtype)
            filled[:number], filled[number:] = leaf[clients], first
            filled[:number][~written] = first
            taken.append(filled)
        return taken

    def put(self, clients: np.ndarray, rows: PyTree) -> None:
        """Write the rows of these clients; there may be more rows than clients."""
        new = clients[~self.noted[clients]]  # the oldest value counts: later ones are of the same chunk
        self.noted[new] = True
        self.before.append((new, self._take(new, len(new))))
        self._put(clients, jax.tree.leaves(rows))

    def _put(self, clients: np.ndarray, rows: list[np.ndarray]) -> None:
        for leaf, own in zip(self.leaves, rows, strict=True):
            leaf[clients] = np.asarray(own)[: len(clients)]
        self.written[clients] = True

    def at(self, version: int) -> Memories:
        """The memory at a version: the current one, or that before the last chunk."""
        if version == self.version - 1:
            for clients, rows in self.before:  # each client is in one of these entries at most
                self._put(clients, rows)
            self._forget(version)
        assert version == self.version, "a run goes back by one chunk at most"
        return self

    def begin(self, version: int) -> None:
        """Begin a chunk at a version."""
        self.at(version)
        self._forget(version + 1)

    def _forget(self, version: int) -> None:
        """Drop the overwritten rows, and set the version."""
        for clients, _ in self.before:
            self.noted[clients] = False
        self.before, self.version = [], version

    def whole(self) -> PyTree:
        """All clients' rows, read-only."""
        for leaf, first in zip(self.leaves, self.first, strict=True):
            if first.any():
                leaf[~self.written] = first
        self.written[:] = self.written | any(first.any() for first in self.first)
        views = [leaf.view() for leaf in self.leaves]
        for view in views:
            view.flags.writeable = False
        return jax.tree.unflatten(self.structure, views)


def _room(like: np.ndarray, on_disk: bool) -> np.ndarray:
    """Zeros that take memory only where they are written."""
    if not on_disk:
        return np.zeros(like.shape, like.dtype)
    # A sparse file without a name: it takes space where written, and is deleted with the mapping.
    with tempfile.TemporaryFile(prefix="fedstrata-memory-") as file:
        file.truncate(like.size * like.dtype.itemsize)
        return np.memmap(file, like.dtype, "r+", shape=like.shape)
