"""Data spread over clients: stacked, padded to one length, with the true sizes beside it.

A client of ``n_i`` samples is padded with copies of its own first sample, so that a loss evaluated on padding
is as finite as on real data; padding is never drawn, and its weight in a full-batch mean is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core.client import Client, Samples
from fedstrata.core.types import Array, Integer, PyTree

if TYPE_CHECKING:
    from fedstrata.data.partition import Partitioner


class DataError(ValueError):
    """The data cannot be used as given; the message says which client, which array and what to do."""


def _check(data: PyTree, who: str) -> int:
    """The common length of the sample axis; errors for empty, ragged or non-finite arrays."""
    leaves = jax.tree_util.tree_leaves_with_path(data)
    if not leaves:
        raise DataError(f"{who} has no arrays. Give each client a pytree of arrays, e.g. {{'x': …, 'y': …}}.")
    lengths = {}
    for path, leaf in leaves:
        name = f"{who}{jax.tree_util.keystr(path)}"
        array = np.asarray(leaf)
        if array.dtype.kind in "OSUMm":
            raise DataError(
                f"{name} is not a plain array (dtype {array.dtype}). Convert it to numbers first."
            )
        if array.ndim == 0:
            raise DataError(
                f"{name} is a scalar. Arrays have the samples on their first axis: use shape (1, …)."
            )
        if np.issubdtype(array.dtype, np.inexact) and not np.isfinite(array).all():
            row = int(np.argwhere(~np.isfinite(array))[0][0])
            raise DataError(
                f"{name} has a NaN or an infinity, first in sample {row}. Clean or drop such samples."
            )
        lengths[name] = array.shape[0]
    if len(set(lengths.values())) > 1:
        raise DataError(f"The arrays of {who} differ in their number of samples: {lengths}.")
    length = next(iter(lengths.values()))
    if length == 0:
        raise DataError(
            f"{who} is empty. Drop clients without samples, or use a partition with a minimum size."
        )
    return length


def _signature(data: PyTree) -> tuple[Any, ...]:
    shapes = [(np.shape(leaf)[1:], np.asarray(leaf).dtype) for leaf in jax.tree.leaves(data)]
    return jax.tree.structure(data), *shapes


def _stack(clients: Sequence[PyTree], what: str) -> tuple[PyTree, np.ndarray]:
    """Pad to the longest client and stack; returns the stacked pytree and the true sizes."""
    if len(clients) == 0:
        raise DataError(f"There are no {what}s. Give a list with one pytree of arrays per client.")
    sizes = np.array([_check(data, f"{what} {i}") for i, data in enumerate(clients)], np.int32)
    first = _signature(clients[0])
    for i, data in enumerate(clients):
        if _signature(data) != first:
            raise DataError(
                f"{what} {i} has another structure, shape or dtype than {what} 0: "
                f"{_signature(data)} against {first}. "
                "All clients hold the same arrays, with the samples on the first axis."
            )
    longest = int(sizes.max())

    def pad(*arrays: Any) -> np.ndarray:
        padded = []
        for array in map(np.asarray, arrays):
            filler = np.repeat(array[:1], longest - array.shape[0], axis=0)
            padded.append(np.concatenate([array, filler]))
        return np.stack(padded)

    return jax.tree.map(pad, *clients), sizes


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class FederatedData:
    """The clients' samples, and optionally validation, test and server data.

    Attributes:
        train: arrays of shape ``(clients, longest, …)``.
        sizes: how many samples of each client are real.
        valid: like ``train``; where there is one, upper levels sample from it and lower levels from
            ``train``.
        valid_sizes: like ``sizes``.
        test: a pooled test set, arrays of shape ``(samples, …)``.
        server: the server's own data, arrays of shape ``(samples, …)``.

    >>> import numpy as np, fedstrata as fs
    >>> data = fs.FederatedData.from_clients([{"a": np.ones((3, 2))}, {"a": np.ones((5, 2))}])
    >>> data.clients, data.sizes.tolist(), data.train["a"].shape
    (2, [3, 5], (2, 5, 2))
    """

    train: PyTree
    sizes: Any
    valid: PyTree = None
    valid_sizes: Any = None
    test: PyTree = None
    server: PyTree = None
    # Sizes known to be equal are static, so that full-batch means need no mask.
    equal: int | None = field(default=None, metadata={"static": True})
    valid_equal: int | None = field(default=None, metadata={"static": True})

    @classmethod
    def from_clients(
        cls,
        clients: Sequence[PyTree],
        valid: Sequence[PyTree] | None = None,
        test: PyTree = None,
        server: PyTree = None,
    ) -> FederatedData:
        """From a list with one pytree of arrays per client (samples on the first axis; sizes may differ).

        Args:
            clients: each client's samples.
            valid: a second list of the same form, for upper levels.
            test: a pooled test set.
            server: data that the server itself holds.

        Raises:
            DataError: for an empty client, arrays that do not fit together, a NaN or an infinity.
        """
        train, sizes = _stack(list(clients), "client")
        fields: dict[str, Any] = {"train": train, "sizes": sizes, "equal": _common(sizes)}
        if valid is not None:
            if len(valid) != len(sizes):
                raise DataError(f"valid has {len(valid)} clients where there are {len(sizes)}.")
            stacked, valid_sizes = _stack(list(valid), "validation client")
            fields.update(valid=stacked, valid_sizes=valid_sizes, valid_equal=_common(valid_sizes))
        for name, extra in (("test", test), ("server", server)):
            if extra is not None:
                _check(extra, f"{name} data")
                fields[name] = jax.tree.map(np.asarray, extra)
        return cls(**fields)

    @classmethod
    def from_arrays(
        cls,
        arrays: dict[str, Any],
        clients: int,
        partition: Partitioner | None = None,
        *,
        label: str = "y",
        seed: int = 0,
        valid_fraction: float = 0.0,
        server_fraction: float = 0.0,
        test: PyTree = None,
    ) -> FederatedData:
        """Split pooled arrays over clients.

        Args:
            arrays: name → array, samples on the first axis.
            clients: how many clients.
            partition: how to split (default iid), e.g. ``fs.Dirichlet(0.3)``.
            label: the array that label-based partitions look at.
            seed: of the split.
            valid_fraction: the part of each client's samples that becomes its validation set.
            server_fraction: the part of all samples that the server keeps, drawn before the split.
            test: a pooled test set.
        """
        from fedstrata.data.partition import IID

        length = _check(arrays, "arrays")
        for name, fraction in (("valid_fraction", valid_fraction), ("server_fraction", server_fraction)):
            if not 0 <= fraction < 1:
                raise DataError(f"{name} must be in [0, 1), but is {fraction}.")
        rng = np.random.default_rng(seed)
        arrays = {name: np.asarray(array) for name, array in arrays.items()}
        server = None
        if server_fraction > 0:
            order = rng.permutation(length)
            kept = round(server_fraction * length)
            server = {name: array[order[:kept]] for name, array in arrays.items()}
            arrays = {name: array[order[kept:]] for name, array in arrays.items()}
        parts = (partition or IID()).split(arrays, clients, rng, label=label)
        train, valid = [], []
        for i, part in enumerate(parts):
            part = rng.permutation(part)
            held_out = round(valid_fraction * len(part))
            if valid_fraction > 0 and not 0 < held_out < len(part):
                raise DataError(
                    f"Client {i} has {len(part)} samples: too few to hold out a part of {valid_fraction}. "
                    "Use fewer clients or a partition with a larger minimum size."
                )
            valid.append({name: array[part[:held_out]] for name, array in arrays.items()})
            train.append({name: array[part[held_out:]] for name, array in arrays.items()})
        return cls.from_clients(train, valid=valid if valid_fraction > 0 else None, test=test, server=server)

    @property
    def clients(self) -> int:
        """The number m of clients."""
        return int(self.sizes.shape[0])

    def client(self, i: int) -> PyTree:
        """Client ``i``'s own training samples, without padding."""
        return jax.tree.map(lambda leaf: leaf[i, : int(self.sizes[i])], self.train)

    def with_client_index(self) -> FederatedData:
        """Add ``client``, the client's number, to every sample, so that a loss can depend on it."""

        def add(stacked: PyTree) -> PyTree:
            if not isinstance(stacked, dict):
                raise DataError("with_client_index needs samples that are dicts, e.g. {'x': …, 'y': …}.")
            shape = jax.tree.leaves(stacked)[0].shape[:2]
            index = np.broadcast_to(np.arange(shape[0], dtype=np.int32)[:, None], shape)
            return {**stacked, "client": index}

        return replace(self, train=add(self.train), valid=None if self.valid is None else add(self.valid))

    def cast(self) -> FederatedData:
        """Floating arrays in JAX's default float dtype (float32, or float64 where that is enabled)."""
        default = np.dtype(jnp.result_type(float))

        def convert(leaf: Array) -> Any:
            return leaf.astype(default) if np.issubdtype(leaf.dtype, np.floating) else leaf

        parts = {
            name: jax.tree.map(convert, getattr(self, name)) for name in ("train", "valid", "test", "server")
        }
        return replace(self, **parts)

    def __repr__(self) -> str:
        sizes = np.asarray(self.sizes)
        arrays = {
            jax.tree_util.keystr(p): leaf.shape[2:]
            for p, leaf in jax.tree_util.tree_leaves_with_path(self.train)
        }
        extras = [name for name in ("valid", "test", "server") if getattr(self, name) is not None]
        return (
            f"FederatedData(clients={self.clients}, "
            f"samples={int(sizes.sum())} ({sizes.min()}–{sizes.max()} each), "
            f"arrays={arrays}{', with ' + ', '.join(extras) if extras else ''})"
        )


def _common(sizes: np.ndarray) -> int | None:
    return int(sizes[0]) if (sizes == sizes[0]).all() else None


def client_of(data: FederatedData, clients: int, index: Integer, memory: PyTree = None) -> Client:
    """Client ``index`` (may be traced), whose rows are fetched from the stack as needed.

    Args:
        data: of all clients.
        clients: how many there are; rows past them fill up a device mesh.
        index: which one.
        memory: what it remembers.
    """
    train = Samples(data.train, data.equal if data.equal is not None else data.sizes[index], index)
    valid = train
    if data.valid is not None:
        valid = Samples(data.valid, data.valid_equal or data.valid_sizes[index], index)
    return Client(index, train, valid, memory, data.sizes[index] / data.sizes[:clients].sum())


def each_client(
    visit: Callable[[Client], PyTree],
    data: FederatedData,
    memory: PyTree = None,
    *,
    clients: int | None = None,
    indices: Array | None = None,
) -> PyTree:
    """``visit`` of every client, stacked, in one `vmap` over the data's own client axis: nothing is copied.

    Args:
        visit: a function of a client.
        data: of all clients.
        memory: what they remember, with a leading client axis.
        clients: how many there are, if not all rows; see `client_of`.
        indices: their numbers, where an engine lays them out.
    """
    total = data.sizes[:clients].sum()

    def one(
        index: Array, size: Array, train: PyTree, valid: PyTree, valid_size: Array, memory: PyTree
    ) -> PyTree:
        own = Samples(train, data.equal or size)
        held_out = own if valid is None else Samples(valid, data.valid_equal or valid_size)
        return visit(Client(index, own, held_out, memory, size / total))

    indices = jnp.arange(data.sizes.shape[0]) if indices is None else indices
    return jax.vmap(one)(indices, data.sizes, data.train, data.valid, data.valid_sizes, memory)
