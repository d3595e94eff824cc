"""Samples as engines hold them: a flat array per leaf for all clients, and each client's offset.

    client i of a part:   leaf[offset_i : offset_i + size_i]
    a minibatch:          leaf[offset_i + randint(size_i)]
    all of them:          leaf[offset_i + 0 … capacity − 1], where rows past size_i have weight zero

A program has fixed shapes, so a mean over all samples of a client needs a `capacity` that is known when it is
traced. Clients of like size are therefore grouped: each group runs with the capacity of its largest member,
and a full pass costs about as much as its samples, whatever the spread of sizes. If all sizes are equal,
there is one group, and the flat arrays are a stack of clients' arrays that need no look-up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core import tree
from fedstrata.core.client import Client, Samples, opened
from fedstrata.core.cohorts import place_in
from fedstrata.core.problem import Projection
from fedstrata.core.term import Term
from fedstrata.core.types import Array, Function, Integer, PyTree
from fedstrata.data.samples import DataError
from fedstrata.support.points import wrapping

Found = TypeVar("Found")

NOBODY = 2**31 - 1  # the number of a client that pads an array
PADDING = 1.5  # rows for each real one up to which clients stay in one group
FEW = 64  # clients, up to which a sample's client is found by comparing it with each one's first sample
JOINED = 1.2  # the same, up to which groups of like sizes are joined again
LARGE = 2**22  # bytes of an array from which threads are faster
ALIGNED = 64  # bytes
LAUNCH = 2**22  # numbers of padding that an accelerator reads in the time in which it starts one more group


class SizeGroup(NamedTuple):
    """Clients of like size that run with the same capacities (static)."""

    clients: int
    train: int
    valid: int


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("leaves", "sizes", "offsets"),
    meta_fields=("samples", "equal", "stride", "augment"),
)
@dataclass(frozen=True)
class FlatSamples:
    """The training or the validation samples of all clients.

    Attributes:
        leaves: arrays of shape (samples of all clients, …).
        sizes: the number of samples of each client.
        offsets: the position of its first sample.
        samples: the number of samples of all clients.
        equal: the size of every client, if it is the same for all.
        stride: if offsets are multiples of one number, that number, and the arrays can be seen as a stack:
            it is the size of every client or, over a device mesh, a length to which clients are padded.
        augment: as in `Samples`.
    """

    leaves: PyTree
    sizes: Array
    offsets: Array
    samples: int
    equal: int | None = None
    stride: int | None = None
    augment: Function | None = None

    @property
    def rows(self) -> int:
        """The number of clients, including those that pad a mesh."""
        return self.sizes.shape[0]

    def client(self, index: Integer, capacity: int) -> Samples:
        """The samples of the client in row ``index``; a full batch has ``capacity`` rows."""
        # A size that is known while tracing needs neither a look-up nor a mask.
        size = self.sizes[index].astype(jnp.result_type(int)) if self.equal is None else self.equal
        return Samples(self.leaves, size, self.offsets[index], capacity, self.augment)

    def stacked(self) -> PyTree:
        """Arrays of shape (clients, stride, …), if there is a stride."""
        return jax.tree.map(lambda leaf: leaf.reshape(self.rows, -1, *leaf.shape[1:]), self.leaves)

    def flat(self, clients: int) -> PyTree:
        """The samples of the first ``clients`` clients, one after the other, without padding."""
        if jax.tree.leaves(self.leaves)[0].shape[0] == self.samples:
            return self.leaves
        sizes = self.sizes[:clients]
        gaps = self.offsets[:clients] - (jnp.cumsum(sizes) - sizes)
        rows = jnp.arange(self.samples) + jnp.repeat(gaps, sizes, total_repeat_length=self.samples)
        return jax.tree.map(lambda leaf: leaf[rows], self.leaves)


def offsets_of(sizes: np.ndarray) -> np.ndarray:
    """The position of each client's first sample in flat arrays."""
    return np.cumsum(sizes) - sizes


def common_size(sizes: np.ndarray | None) -> int | None:
    """The size of every client, if it is the same for all."""
    return None if sizes is None or (sizes != sizes[0]).any() else int(sizes[0])


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("training", "validation", "test", "server", "order", "ids", "total", "every"),
    meta_fields=("clients", "groups"),
)
@dataclass(frozen=True)
class Placed:
    """A data set where phases run. It is an argument of compiled programs, so its structure is static.

    Attributes:
        training, validation: the clients' samples; ``validation`` is None if they have none.
        test, server: as in `FederatedData`.
        order: the clients by size, in which `groups` are consecutive; None if there is one group.
        clients: the number of clients.
        groups: clients of like size.
        ids: if only some clients are placed, their numbers, ascending; arrays then have a row for each.
        total: the number of training samples of all clients, if only some are placed.
        every: each client's number of training samples, if only some are placed and they are drawn by size.
    """

    training: FlatSamples
    validation: FlatSamples | None
    test: PyTree
    server: PyTree
    order: Array | None
    clients: int
    groups: tuple[SizeGroup, ...]
    ids: Array | None = None
    total: Array | None = None
    every: Array | None = None

    @property
    def train(self) -> PyTree:
        """All clients' training samples, flat."""
        return opened(self.training.flat(self.clients))

    @property
    def valid(self) -> PyTree:
        """All clients' validation samples, flat, or None."""
        return None if self.validation is None else opened(self.validation.flat(self.clients))

    @property
    def sizes(self) -> Array:
        """The number of training samples of each client."""
        return self.training.sizes[: self.clients]

    @property
    def equal(self) -> int | None:
        """The size of every client, if it is the same for all."""
        return self.training.equal

    def slots(self, of: Array) -> Array:
        """The rows of clients, given by their numbers; `NOBODY` is past the last row."""
        if self.ids is None:
            return of
        return jnp.where(of == NOBODY, self.training.rows, place_in(self.ids, of))

    def sizes_of(self, of: Array | None) -> Array:
        """The number of training samples of some clients; None is everyone."""
        return self.sizes if of is None else self.training.sizes[self.slots(of)]

    @property
    def every_size(self) -> Array:
        """The number of training samples of each client, placed or not."""
        return self.sizes if self.every is None else self.every

    @property
    def all_samples(self) -> Array:
        """The number of training samples of all clients."""
        return self.sizes.sum() if self.total is None else self.total

    def seen(self) -> Placed:
        """A copy whose server and test samples are converted for functions."""
        return replace(self, test=opened(self.test), server=opened(self.server))

    def group_numbers(self) -> Array:
        """The number of the smallest group that suffices for each client; groups ascend."""
        numbers = jnp.searchsorted(jnp.array([g.train for g in self.groups]), self.training.sizes)
        if self.validation is not None:
            caps = jnp.array([g.valid for g in self.groups])
            numbers = jnp.maximum(numbers, jnp.searchsorted(caps, self.validation.sizes))
        return numbers

    @property
    def largest(self) -> SizeGroup:
        """The capacities that suffice for every client."""
        return SizeGroup(self.clients, max(g.train for g in self.groups), max(g.valid for g in self.groups))

    def client(self, index: Integer, memory: PyTree = None, group: SizeGroup | None = None) -> Client:
        """The client in row ``index`` (may be traced), whose samples are fetched from the flat arrays.

        Args:
            index: its row; if all clients are placed, its number.
            memory: its memory.
            group: the group whose capacities it gets; by default those that suffice for everyone.
        """
        group = group or self.largest
        train = self.training.client(index, group.train)
        valid = train if self.validation is None else self.validation.client(index, group.valid)
        # Like sizes, of the default width in every engine: 1/index of a 32-bit integer would be a float32.
        number = jnp.asarray(index if self.ids is None else self.ids[index], jnp.result_type(int))
        return Client(number, train, valid, memory, self.training.sizes[index] / self.all_samples)

    def shares(self, weights: str) -> Array:
        """The clients' weights in a mean: ``"uniform"``, or by their training ``"size"``; they sum to one."""
        if weights == "uniform":
            return jnp.full((self.clients,), 1 / self.clients)
        sizes = self.sizes.astype(jnp.result_type(float))
        return sizes / sizes.sum()

    def each_client(self, function: Function, *own: PyTree, block: int | None = None) -> PyTree:
        """``function(client, *its slices of own)`` of every client, stacked; ``block`` at once, or all."""
        one = jax.vmap(lambda index, *own: function(self.client(index), *own))
        if block is None or block >= self.clients:
            return one(jnp.arange(self.clients), *own)
        blocks = -(-self.clients // block)
        rows = jnp.minimum(jnp.arange(blocks * -(-self.clients // blocks)), self.clients - 1)  # equal blocks
        split = jax.tree.map(lambda leaf: leaf[rows].reshape(blocks, -1, *leaf.shape[1:]), own)
        found = jax.lax.map(lambda some: jax.checkpoint(one)(*some), (rows.reshape(blocks, -1), *split))
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[: self.clients], found)

    def distances(self, project: Projection, x: PyTree) -> Array:
        """The distance of x from every client's set."""
        return self.each_client(lambda client: project.distance(x, client))

    def sample_shares(self, shares: Array, part: str = "train") -> Array:
        """The weight of every sample of a part, given the clients' shares."""
        of = self.part(part)
        length, each = jax.tree.leaves(of.leaves)[0].shape[0], shares / of.sizes
        if of.rows > FEW:
            return jnp.repeat(each, of.sizes, total_repeat_length=length)
        samples, ends = jnp.arange(length)[:, None], jnp.append(of.offsets[1:], length)
        member = (samples >= of.offsets) & (samples < ends)  # of one client each: the sum is exact
        return jnp.where(member, each, 0).sum(1)  # compiles in a fraction of the time

    def part(self, name: str) -> FlatSamples:
        """The training samples or, if there are any, the validation samples."""
        return self.training if name == "train" or self.validation is None else self.validation

    def mean(
        self, function: Function, *args: PyTree, shares: Array, part: str = "train", tile: int | None = None
    ) -> PyTree:
        """The clients' mean of the mean over their samples: a flat pass over all samples, with weights.

        Args:
            function: ``function(*args, sample)``; one that reads batches sees a client's samples as one.
            args: the arguments before the sample.
            shares: the clients' weights, see `shares`.
            part: ``"train"`` or ``"valid"``.
            tile: the number of samples evaluated at once; None is all.
        """
        term = Term.of(function)
        if term.reads == "batch":
            values = self.each_client(lambda client: vars(client)[part].full_mean(term).silent(*args))
            if term.mean is not None:
                return term.mean(values, shares)
            return jax.tree.map(lambda v: jnp.tensordot(shares.astype(v.dtype), v, 1), values)
        leaves, weights = self.part(part).leaves, self.sample_shares(shares, part)
        length = weights.shape[0]
        tile = length if tile is None else min(tile, length)

        def values_of(first: Integer, rows: int) -> PyTree:
            some = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, first, rows), leaves)
            return term.each(opened(some if rows < length else leaves), *args)

        def summed(first: Integer, rows: int) -> PyTree:
            own = jax.lax.dynamic_slice_in_dim(weights, first, rows)
            return jax.tree.map(lambda v: jnp.tensordot(own.astype(v.dtype), v, 1), values_of(first, rows))

        if term.mean is not None:  # such a mean needs every value
            found = [values_of(first, min(tile, length - first)) for first in range(0, length, tile)]
            return term.mean(jax.tree.map(lambda *v: jnp.concatenate(v), *found), weights)
        if tile < length:  # a derivative, too, keeps the values of one tile at a time
            summed = jax.checkpoint(summed, static_argnums=1)
        total = summed(0, tile)
        full, rest = divmod(length, tile)
        if full > 1:
            total = jax.lax.fori_loop(1, full, lambda t, sum: tree.add(sum, summed(t * tile, tile)), total)
        return tree.add(total, summed(full * tile, rest)) if rest else total


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Outline:
    """The `Population` of data that is elsewhere: all clients' sizes, the server's and the test samples.

    ``equal`` is the size of every client, if it is the same for all.
    """

    sizes: Array
    server: PyTree
    test: PyTree = None
    equal: int | None = field(default=None, metadata={"static": True})

    @property
    def every_size(self) -> Array:
        """See `Placed.every_size`."""
        return self.sizes

    @property
    def all_samples(self) -> Array:
        """See `Placed.all_samples`."""
        return self.sizes.sum()

    def sizes_of(self, of: Array | None) -> Array:
        """See `Placed.sizes_of`."""
        return self.sizes if of is None else self.sizes[of]

    def seen(self) -> Outline:
        """See `Placed.seen`."""
        return replace(self, test=opened(self.test), server=opened(self.server))


def groups_of(
    sizes: np.ndarray, valid_sizes: np.ndarray | None, launch: int = 0
) -> tuple[np.ndarray | None, tuple[SizeGroup, ...]]:
    """The clients by size and their groups; the order is None if one group suffices.

    Args:
        sizes: the number of training samples of each client.
        valid_sizes: the number of validation samples, if there are any.
        launch: the rows that cost as much as one more group, see `launch_rows`.
    """
    valid = np.zeros_like(sizes) if valid_sizes is None else valid_sizes
    whole = whole_group(sizes, valid)
    real = int(sizes.sum() + valid.sum())
    if _rows([whole]) <= PADDING * real:
        return None, (whole,)
    order = np.argsort(sizes, kind="stable").astype(np.int32)
    octave = np.ceil(np.log2(sizes[order])).astype(int)
    parts = np.split(order, np.flatnonzero(np.diff(octave)) + 1)
    caps = np.maximum.accumulate([valid[p].max() for p in parts])  # a later group suffices for an earlier one
    groups = [SizeGroup(len(p), int(sizes[p].max()), int(v)) for p, v in zip(parts, caps, strict=True)]
    # Each group compiles a copy of the phase, so groups are joined, the cheapest first, while little is lost.
    allowed = max(1.02 * _rows(groups), JOINED * real)
    while len(groups) > 1:
        joined = [[*groups[:g], _join(*groups[g : g + 2]), *groups[g + 2 :]] for g in range(len(groups) - 1)]
        best = min(joined, key=_rows)
        if _rows(best) > allowed and _rows(best) - _rows(groups) > launch:
            break
        groups = best
    return order, tuple(groups)


def whole_group(sizes: np.ndarray, valid_sizes: np.ndarray | None) -> SizeGroup:
    """All clients in one group."""
    valid = 0 if valid_sizes is None else int(valid_sizes.max())
    return SizeGroup(len(sizes), int(sizes.max()), valid)


def launch_rows(samples: PyTree) -> int:
    """The number of rows of these arrays that cost as much as one more group; zero on a CPU."""
    if jax.default_backend() == "cpu":
        return 0
    return LAUNCH // max(1, sum(math.prod(leaf.shape[1:]) for leaf in jax.tree.leaves(samples)))


def _rows(groups: list[SizeGroup]) -> int:
    """The number of rows of a pass over all clients."""
    return sum(g.clients * (g.train + g.valid) for g in groups)


def _join(small: SizeGroup, large: SizeGroup) -> SizeGroup:
    return SizeGroup(small.clients + large.clients, large.train, large.valid)


def common_structure(datasets: list[Placed]) -> list[Placed]:
    """Give data sets one structure, with common capacities, so that one program serves them all.

    They must agree in the numbers of clients and samples and in the form of a sample.
    """
    if len({jax.tree.structure(d) for d in datasets}) == 1:
        return datasets
    largest = [d.largest for d in datasets]
    group = SizeGroup(datasets[0].clients, max(g.train for g in largest), max(g.valid for g in largest))

    def unequal(part: FlatSamples) -> FlatSamples:
        return replace(part, equal=None, stride=None)

    return [
        replace(
            d, training=unequal(d.training), validation=d.validation and unequal(d.validation), order=None,
            groups=(group,),
        )
        for d in datasets
    ]  # fmt: skip


def free_bytes() -> int | None:
    """The bytes that are free on the device, if it says so; CPUs do not."""
    stats = jax.local_devices()[0].memory_stats()
    return None if not stats else stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)


def device_dtype(leaf: np.ndarray) -> np.dtype:
    """JAX's default dtype for floats, JAX's own for wide integers; small integers stay as they are."""
    if leaf.dtype.kind == "f":
        return np.dtype(jnp.result_type(float))
    return jax.dtypes.canonicalize_dtype(leaf.dtype)


def on_device(samples: PyTree, who: str) -> PyTree:
    """Convert arrays to their dtypes on a device.

    Raises:
        DataError: for whole numbers that would wrap around.
    """

    def one(path: Any, leaf: np.ndarray) -> np.ndarray:
        return _for_device(leaf, f"{who}{jax.tree_util.keystr(path)}")

    return jax.tree_util.tree_map_with_path(one, samples)


def _for_device(leaf: np.ndarray, name: str) -> np.ndarray:
    dtype = device_dtype(leaf)
    if why := wrapping(leaf, dtype):
        raise DataError(f"{name} {why}")
    return np.asarray(leaf, dtype)


def by_rows(work: Callable[[slice], Found], array: np.ndarray) -> list[Found]:
    """Apply ``work`` to slices that make up an array's rows: to one slice, or for a large array in threads.

    >>> by_rows(lambda rows: int(np.arange(5)[rows].sum()), np.arange(5))
    [10]
    """
    if array.nbytes < 2 * LARGE:
        return [work(slice(0, len(array)))]
    from fedstrata.support.threads import in_threads

    return in_threads(work, len(array), array.nbytes // LARGE)


def put(leaf: np.ndarray) -> jax.Array:
    """A copy on the default device; `jnp.asarray` would compile a program for each shape."""
    return jax.device_put(padded(len(leaf), leaf) if jax.default_backend() == "cpu" else leaf)


def padded(rows: int, leaf: np.ndarray) -> np.ndarray:
    """A copy padded to ``rows``, aligned as JAX needs it on a CPU, so that it is not copied again."""
    shape = (rows, *leaf.shape[1:])
    length = int(np.prod(shape, dtype=np.int64)) * leaf.dtype.itemsize
    raw = np.empty(length + ALIGNED, np.uint8)
    first = -raw.ctypes.data % ALIGNED
    found = raw[first : first + length].view(leaf.dtype).reshape(shape)
    by_rows(lambda part: np.copyto(found[: len(leaf)][part], leaf[part]), leaf)
    found[len(leaf) :] = 0
    return found
