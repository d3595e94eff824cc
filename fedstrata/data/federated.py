"""Data spread over clients, as users hold it: flat arrays on the host, checked when they come in.

All clients' samples are stored one after the other, with no padding; see `fedstrata.data.storage` for how
engines hold them. A data set is cast and copied to a device once and kept there with the object.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from threading import Lock
from typing import Any, Literal, Protocol
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core.client import is_converted, opened
from fedstrata.core.counting import Ledger
from fedstrata.core.types import Function, PyTree
from fedstrata.data.samples import DataError as DataError
from fedstrata.data.samples import array_of, by_name, finite, flattened, held, length_of, sizes_of, unwrapped
from fedstrata.data.scaled import scaled
from fedstrata.data.source import ScaledSource, Source, rows_of, source_digest, taken
from fedstrata.data.storage import (
    NOBODY,
    FlatSamples,
    Placed,
    SizeGroup,
    by_rows,
    common_size,
    device_dtype,
    groups_of,
    launch_rows,
    offsets_of,
    on_device,
    padded,
    put,
)
from fedstrata.support import html
from fedstrata.support.digest import tree_digest
from fedstrata.support.shown import line, shapes, short


class Splits(Protocol):
    """A way to divide samples among clients, see `fedstrata.data.partition`."""

    def split(
        self, arrays: Mapping[str, np.ndarray], clients: int, rng: np.random.Generator, label: str = "y"
    ) -> list[np.ndarray]:
        """One array of sample indices per client."""


Parts = tuple[FlatSamples, FlatSamples | None]


class Prepares(Protocol):
    """The way samples were made from raw data, see `fedstrata.data.preparation`."""

    @property
    def ledger(self) -> Ledger:
        """The traffic that its statistics needed."""

    def apply(self, raw: Any) -> PyTree:
        """Prepare new data in the same way."""


@dataclass(frozen=True, eq=False)  # compared by identity: placed data is kept with the object
class FederatedData:
    """The clients' samples, and optionally validation, test and server data.

    Attributes:
        train: arrays of shape ``(samples of all clients, …)``, client after client.
        sizes: the number of samples of each client.
        valid: like ``train``; if given, upper levels sample from it and lower levels from ``train``.
        valid_sizes: like ``sizes``.
        test: a pooled test set, arrays of shape ``(samples, …)``.
        server: the server's own data, arrays of shape ``(samples, …)``.
        names: the clients' names, or None.
        preparation: how the samples were made from a table, or scaled; ``preparation.apply(new)`` prepares
            new data, and ``preparation.ledger`` is the traffic that it needed.
        source: the source from which samples are read when needed; ``train`` then has only their shapes.
        valid_source: likewise for ``valid``.
        augment: see `augmented`.

    >>> import numpy as np, fedstrata as fs
    >>> data = fs.FederatedData.from_clients([{"a": np.ones((3, 2))}, {"a": np.ones((5, 2))}])
    >>> data.clients, data.sizes.tolist(), data.train["a"].shape, data.client(1)["a"].shape
    (2, [3, 5], (8, 2), (5, 2))
    """

    train: PyTree
    sizes: np.ndarray
    valid: PyTree = None
    valid_sizes: np.ndarray | None = None
    test: PyTree = None
    server: PyTree = None
    names: tuple[str, ...] | None = None
    preparation: Prepares | None = None
    source: Source | None = None
    valid_source: Source | None = None
    augment: Function | None = None

    def __post_init__(self) -> None:
        parts: list[Any] = [("train", "sizes", self.train, self.sizes)]
        if self.valid is not None or self.valid_sizes is not None:
            parts.append(("valid", "valid_sizes", self.valid, self.valid_sizes))
        for name, name_of_sizes, samples, sizes in parts:
            if samples is None or sizes is None:
                raise DataError(f"FederatedData needs {name} and its sizes together.")
            if self.source is None:
                samples = held(samples, f"{name} data")
                object.__setattr__(self, name, samples)
                number = length_of(samples, f"{name} data")
            else:
                number = jax.tree.leaves(samples)[0].shape[0]
            object.__setattr__(self, name_of_sizes, sizes_of(sizes, number, name))
        if self.valid_sizes is not None and len(self.valid_sizes) != len(self.sizes):
            raise DataError(f"valid has {len(self.valid_sizes)} clients, but train has {len(self.sizes)}.")
        if self.names is not None and len(self.names) != len(self.sizes):
            raise DataError(f"There are {len(self.names)} names for {len(self.sizes)} clients.")
        for name, samples in (("test", self.test), ("server", self.server)):
            if samples is not None:
                who = f"{name} data"
                pooled = held(unwrapped(samples, who), who)
                length_of(pooled, who)
                object.__setattr__(self, name, pooled)

    @classmethod
    def from_clients(
        cls,
        clients: Sequence[PyTree],
        valid: Sequence[PyTree] | None = None,
        test: PyTree = None,
        server: PyTree = None,
        *,
        names: Sequence[str] | None = None,
    ) -> FederatedData:
        """From a list with one pytree of arrays per client (samples on the first axis; sizes may differ).

        Args:
            clients: each client's samples.
            valid: a second list of the same form, for upper levels.
            test: a pooled test set.
            server: data that the server itself holds.
            names: the clients' names.

        Raises:
            DataError: for an empty client, arrays that do not fit together, a NaN or an infinity.
        """
        train, sizes = flattened(clients, "client")
        held_out, valid_sizes = (None, None) if valid is None else flattened(valid, "validation client")
        return cls(train, sizes, held_out, valid_sizes, test, server, _named(names))

    @classmethod
    def from_arrays(
        cls,
        arrays: dict[str, Any],
        clients: int,
        partition: Splits | None = None,
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
            clients: the number of clients.
            partition: the partitioner (default iid), e.g. ``fs.Dirichlet(0.3)``.
            label: the array that label-based partitions look at.
            seed: the random seed of the split.
            valid_fraction: the fraction of each client's samples that becomes its validation set.
            server_fraction: the fraction of all samples that the server keeps, drawn before the split.
            test: a pooled test set.
        """
        arrays = arrays if hasattr(arrays, "columns") else unwrapped(arrays, "arrays")
        length = length_of(arrays, "arrays")
        for name, fraction in (("valid_fraction", valid_fraction), ("server_fraction", server_fraction)):
            if not 0 <= fraction < 1:
                raise DataError(f"{name} must be in [0, 1), but is {fraction}.")
        rng = np.random.default_rng(seed)
        arrays = {name: array_of(array, f"arrays[{name!r}]") for name, array in arrays.items()}
        server = None
        if server_fraction > 0:
            order = rng.permutation(length)
            kept = round(server_fraction * length)
            server = {name: array[order[:kept]] for name, array in arrays.items()}
            arrays = {name: array[order[kept:]] for name, array in arrays.items()}
        if partition is None:
            from fedstrata.data.partition import IID  # partitioners have their own module

            partition = IID()
        if isinstance(partition, str | type) or not hasattr(partition, "split"):
            raise DataError(f"partition must be an object such as fs.Dirichlet(0.3), but is {partition!r}.")
        parts = partition.split(arrays, clients, rng, label=label)
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

    @classmethod
    def from_dataframe(
        cls,
        df: Any,
        by: str | None = None,
        *,
        label: str,
        features: Sequence[str] | None = None,
        valid_fraction: float = 0.0,
        test_fraction: float = 0.0,
        seed: int = 0,
        encode: bool = False,
        impute: Literal["mean"] | None = None,
        extra: Sequence[str] = (),
        server: Any = None,
    ) -> FederatedData:
        """From one data frame with a column that names the client, or from a data frame for each client.

        A sample is ``{"x": features in float32, "y": label}``, a whole-number label in int32; ``test`` also
        has ``client``, the sample's client. Statistics are those of the training rows of the whole
        federation, computed from sums, and are kept: ``data.preparation.apply(new_frame)``.

        Args:
            df: pandas, Polars, PyArrow or whatever narwhals reads; or a dict (or list) with a frame for each
                client.
            by: the column that tells the clients apart; they come in its sorted order.
            label: the column that becomes ``y``.
            features: the columns that become ``x``, in this order; by default all others.
            valid_fraction: the fraction of each client's rows that becomes its validation data.
            test_fraction: the fraction of each client's rows that goes into the pooled test data. Both are
                stratified if the label has classes.
            seed: the random seed of these splits.
            encode: whether words become features, one for each category (0 or 1), and word labels become
                class numbers, in sorted order. If False, words raise an error that names their columns.
            impute: ``"mean"`` replaces a missing value with the federation's mean (a missing category with
                the categories' frequencies). If None, missing values raise an error that names their columns.
            extra: columns that become further entries of a sample under their own names, such as a group for
                `fedstrata.fairness`; they hold numbers, and by default are not features.
            server: the server's own rows, for `Personalized`: a table like the clients', prepared so too.

        Raises:
            DataError: for a column that is missing, is not numeric, or lacks values.

        >>> rows = {"site": ["b", "a", "b"], "age": [50, 40, 60], "ill": [1, 0, 0]}
        >>> import pandas as pd
        >>> data = FederatedData.from_dataframe(pd.DataFrame(rows), by="site", label="ill")
        >>> data.names, data.client(1)["x"].tolist(), data.client(1)["y"].tolist()
        (('a', 'b'), [[50.0], [60.0]], [1, 0])
        """
        from fedstrata.data.frames import from_dataframe  # readers of frames have their own module

        return from_dataframe(
            df, by, label=label, features=features, valid_fraction=valid_fraction,
            test_fraction=test_fraction, seed=seed, encode=encode, impute=impute, extra=extra, server=server,
        )  # fmt: skip

    @classmethod
    def from_source(
        cls,
        source: Source,
        valid: Source | None = None,
        test: PyTree = None,
        server: PyTree = None,
        names: Sequence[str] | None = None,
    ) -> FederatedData:
        """From a source that reads clients' samples on demand, so that they need not fit into memory.

        `fedstrata.solve` reads the next rounds' clients during the current ones. `load` reads all of them.

        Args:
            source: sizes, the form of a sample, and the samples of a list of clients: `fedstrata.data.Store`,
                `fedstrata.data.FromFunction`, `fedstrata.data.FromDataset`, or your own, see
                `fedstrata.data.source.Source`.
            valid: a source of the same clients' validation samples; by default the source's own, if it has
                one. Likewise below.
            test: a pooled test set.
            server: data that the server itself holds.
            names: the clients' names.

        Raises:
            DataError: if its sizes or its form are not valid.
        """
        if not hasattr(source, "sizes"):
            raise DataError(f"Give a source, such as fs.data.open_store(folder), but it is {short(source)}.")
        given = {"valid": valid, "test": test, "server": server, "names": names}
        given = {k: getattr(source, k, None) if v is None else v for k, v in given.items()}

        def part(one: Source | None, who: str) -> tuple[PyTree, np.ndarray | None]:
            if one is None:
                return None, None
            total = int(np.sum(one.sizes, dtype=np.int64))
            shapes = jax.tree.map(lambda f: jax.ShapeDtypeStruct((total, *f.shape), f.dtype), one.form)
            if not jax.tree.leaves(shapes):
                raise DataError(f"The {who}'s form has no arrays: give one jax.ShapeDtypeStruct for each.")
            return shapes, sizes_of(one.sizes, total, who)

        train, sizes = part(source, "source")
        held_out, valid_sizes = part(given["valid"], "validation source")
        assert sizes is not None
        pooled = given["test"], given["server"], _named(given["names"])
        return cls(train, sizes, held_out, valid_sizes, *pooled, None, source, given["valid"])

    def load(self, clients: Sequence[int] | np.ndarray | None = None) -> FederatedData:
        """Read data from a source into memory: all of it, or only some clients'."""
        if clients is None and self.source is None:
            return self
        who = np.arange(self.clients) if clients is None else np.asarray(clients)
        parts = {part: (self.read(who, part), sizes[who]) for part, sizes in self.part_sizes.items()}
        names = None if self.names is None else tuple(self.names[i] for i in who)
        pooled = self.test, self.server, names, self.preparation
        found = FederatedData(*parts["train"], *parts.get("valid", (None, None)), *pooled)
        return replace(found, augment=self.augment)

    def read(self, clients: np.ndarray, part: str = "train") -> PyTree:
        """The samples of these clients, one client after the other.

        Raises:
            DataError: if a source returns other arrays than it declared.
        """
        form, sizes = self._part(part)
        source = self.source if part == "train" else self.valid_source
        if source is None:
            rows = rows_of(sizes[clients], self._starts[part][clients])
            return jax.tree.map(lambda leaf: taken(leaf, rows), form)
        found, number = source.samples(clients), int(sizes[clients].sum())
        structure: Any = jax.tree.structure(form)
        if jax.tree.structure(found) != structure:
            raise DataError(f"The source returned {jax.tree.structure(found)}, but its form is {structure}.")
        leaves = jax.tree_util.tree_leaves_with_path(found)
        for (path, leaf), like in zip(leaves, jax.tree.leaves(form), strict=True):
            name, wanted = jax.tree_util.keystr(path), (number, *like.shape[1:])
            if leaf.shape != wanted or leaf.dtype != like.dtype:
                raise DataError(
                    f"The source returned {name} as {leaf.dtype} {leaf.shape} for {_some(clients)}, but its "
                    f"sizes and form say {like.dtype} {wanted}."
                )
            if not all(by_rows(partial(_finite_in, leaf), leaf)):
                raise DataError(f"{name} has a NaN or an infinity in a sample of {_some(clients)}.")
        return found

    def _part(self, name: str) -> tuple[PyTree, np.ndarray]:
        """All clients' samples, or their form, and the clients' sizes."""
        if name not in self.part_sizes:
            raise DataError(f"The data has no {name} part.")
        return self.train if name == "train" else self.valid, self.part_sizes[name]

    @property
    def parts(self) -> dict[str, PyTree]:
        """The samples, or their form, by part."""
        found = {"train": self.train, "valid": self.valid, "test": self.test, "server": self.server}
        return {name: samples for name, samples in found.items() if samples is not None}

    @cached_property
    def part_sizes(self) -> dict[str, np.ndarray]:
        """The clients' sizes by part: ``"train"``, and ``"valid"`` if there is one."""
        parts = {"train": self.sizes, "valid": self.valid_sizes}
        return {name: sizes for name, sizes in parts.items() if sizes is not None}

    @cached_property
    def _starts(self) -> dict[str, np.ndarray]:
        """Each client's offset by part; cached, because a stream needs it at every window."""
        return {name: offsets_of(sizes) for name, sizes in self.part_sizes.items()}

    @property
    def clients(self) -> int:
        """The number m of clients."""
        return len(self.sizes)

    @property
    def offsets(self) -> np.ndarray:
        """The position of each client's first sample in ``train``."""
        return self._starts["train"]

    def client(self, i: int, part: str = "train") -> PyTree:
        """Client ``i``'s samples of a part; ``"test"`` needs an entry ``client``."""
        if part == "test":
            mine = self.test_clients == i
            return opened(jax.tree.map(lambda leaf: leaf[mine], self.test))
        samples, sizes = self._part(part)
        if not 0 <= i < len(sizes):
            raise IndexError(f"Unknown client {i}: clients are numbered from 0 to {len(sizes) - 1}.")
        if self.source is not None:
            return opened(self.read(np.array([i]), part))
        first = int(self._starts[part][i])
        return opened(jax.tree.map(lambda leaf: leaf[first : first + int(sizes[i])], samples))

    @property
    def test_clients(self) -> np.ndarray:
        """The client of each sample in the pooled test set, from its entry ``client``."""
        if self.test is None:
            raise DataError("The data has no test part.")
        if "client" not in by_name(self.test):
            raise DataError(
                "The test samples do not say which client they belong to. Give them an "
                "array 'client' with the clients' numbers, as from_dataframe(…, test_fraction=…) does."
            )
        return self.test["client"]

    def stacked(self, part: str = "train") -> PyTree:
        """Arrays of shape ``(clients, samples, …)``; all clients must have equally many samples."""
        self.need_memory("stacked")
        samples, sizes = self._part(part)
        if (sizes != sizes[0]).any():
            raise DataError("Only clients of one size can be stacked; take them one by one, data.client(i).")
        shape = len(sizes), int(sizes[0])
        return jax.tree.map(lambda leaf: leaf.reshape(*shape, *leaf.shape[1:]), opened(samples))

    def with_client_index(self) -> FederatedData:
        """Add ``client``, the client's number, to every sample, so that a loss can depend on it."""
        self.need_memory("with_client_index")

        def add(samples: PyTree, sizes: np.ndarray) -> PyTree:
            if not (named := by_name(samples)):
                raise DataError("with_client_index needs samples that are dicts, e.g. {'x': …, 'y': …}.")
            index = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
            if "client" in named and not np.array_equal(named["client"], index):
                raise DataError("The samples have an array 'client' already: give it another name.")
            return {**named, "client": index}

        return replace(self, **{part: add(*self._part(part)) for part in self.part_sizes})

    def augmented(self, augment: Function) -> FederatedData:
        """The same samples, augmented at random when a method draws them; evaluations see them unchanged.

        Args:
            augment: ``augment(sample, key)``, a sample of the same form: an image flipped or shifted.

        >>> import fedstrata as fs, jax
        >>> def flipped(sample, key):
        ...     return {**sample, "x": jax.numpy.where(jax.random.bernoulli(key), sample["x"], -sample["x"])}
        >>> data = fs.data.digits(clients=3).augmented(flipped)
        """
        sample = self.sample_of()
        found = jax.eval_shape(augment, sample, jax.eval_shape(lambda: jax.random.key(0)))
        if jax.tree.map(_form, found) != jax.tree.map(_form, sample):
            raise DataError(
                f"augment(sample, key) must return a sample like the one that it gets, {shapes(sample)}, but "
                f"returns {shapes(found)}."
            )
        return replace(self, augment=augment)

    def scaled(self, **scales: tuple[Any, Any]) -> FederatedData:
        """Keep arrays in their dtype (uint8, say), and show them to functions as ``(x − mean) / deviation``.

        Samples of all parts are converted when they are drawn, in every engine: bytes take a quarter of the
        memory of floats, also on the device.

        Args:
            scales: mean and deviation by name of the array: numbers, or arrays that broadcast against one
                sample. ``x=(0, 255)`` turns bytes into numbers in [0, 1].

        Raises:
            DataError: if an array is absent, or a deviation is not positive.

        >>> import numpy as np, fedstrata as fs
        >>> data = fs.FederatedData.from_clients([{"x": np.array([[0], [255]], np.uint8)}]).scaled(x=(0, 255))
        >>> data.train["x"].dtype, data.client(0)["x"].tolist()
        (dtype('uint8'), [[0.0], [1.0]])
        """
        found = tuple((name, *_scale(self.train, name, *pair)) for name, pair in scales.items())
        source, valid = (
            None if source is None else ScaledSource(source, found)
            for source in (self.source, self.valid_source)
        )
        parts = {part: scaled(samples, found) for part, samples in self.parts.items()}
        return replace(self, **parts, source=source, valid_source=valid)

    def sample_of(self, part: str = "train") -> PyTree:
        """The shapes and dtypes of one sample as a user's function sees it; None if the part is absent."""
        form = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], device_dtype(leaf)), self.parts.get(part)
        )
        return opened(form)

    def form(self) -> tuple[Hashable, ...]:
        """The number of clients, and all shapes: data sets that agree in them can share a program."""
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(self.parts))
        return self.clients, jax.tree.structure(self.parts), shapes

    def placed(self, make: Callable[[FederatedData], Placed] | None = None, kind: Hashable = None) -> Placed:
        """The data on a device, in JAX's dtypes: made once, and kept as long as this object lives.

        Args:
            make: a function that places it; by default on JAX's default device.
            kind: the key of this way of placing.
        """
        key = (kind, jnp.result_type(float), jax.default_backend())
        with _lock:
            mine = _placed.setdefault(self, {})
            if key not in mine:
                mine[key] = self.place() if make is None else make(self)
            return mine[key]

    def place(self) -> Placed:
        """Place the data once more, without keeping it."""
        self.need_memory("This engine")

        def part(name: str, sizes: np.ndarray) -> FlatSamples:
            leaves = jax.tree.map(put, on_device(self._part(name)[0], name))
            offsets, equal = offsets_of(sizes).astype(np.int32), common_size(sizes)
            return FlatSamples(leaves, put(sizes), put(offsets), int(sizes.sum()), equal, equal)

        order, groups = groups_of(self.sizes, self.valid_sizes, launch_rows(self.train))
        by_size = None if order is None else put(order)
        return Placed(*self.each_part(part), *self.pooled(put), by_size, self.clients, groups)

    def each_part(self, make: Callable[[str, np.ndarray], FlatSamples]) -> Parts:
        """``make(part, sizes)`` of the training samples, and of the validation samples or None."""
        valid = None if self.valid_sizes is None else make("valid", self.valid_sizes)
        return replace(make("train", self.sizes), augment=self.augment), valid

    def pooled(self, put: Callable[[Any], Any]) -> tuple[PyTree, PyTree]:
        """The test and the server's samples, with ``put`` applied to each array."""
        test, server = on_device(self.test, "test"), on_device(self.server, "server")
        return jax.tree.map(put, test), jax.tree.map(put, server)

    def need_memory(self, what: str) -> None:
        """Raise if samples come from a source; ``what``, the feature, needs all of them."""
        if self.source is not None:
            raise DataError(
                f"{what} needs all samples in memory, but these are read from a source during the run. "
                "Use engine='streamed', or data.load() if they fit."
            )

    def some(
        self, clients: np.ndarray, rows: int, samples: dict[str, int], groups: tuple[SizeGroup, ...]
    ) -> Placed:
        """Some clients' data on the host, in arrays of fixed shapes: one program serves any of them.

        Args:
            clients: their numbers, ascending.
            rows: the room for clients.
            samples: the room for samples, by part.
            groups: the groups of all clients.
        """
        number = len(clients)

        def filled(values: np.ndarray, rest: int) -> Any:
            return np.append(values, np.full(rows - number, rest)).astype(np.int32)

        def part(name: str, sizes: np.ndarray) -> FlatSamples:
            own, equal = sizes[clients], common_size(sizes)
            leaves = jax.tree.map(partial(padded, samples[name]), on_device(self.read(clients, name), name))
            # Rows without a client have a size too: a phase runs there, and must not divide by zero.
            each = filled(own, equal or 1), filled(offsets_of(own), 0)
            return FlatSamples(leaves, *each, samples[name], equal)

        total: Any = np.asarray(self.sizes.sum(dtype=np.int64), jnp.result_type(float))
        ids = filled(clients, NOBODY)
        return Placed(*self.each_part(part), None, None, None, self.clients, groups, ids, total)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of all samples, by which a resumed run recognises its data."""
        if self.source is not None:
            sources = [s for s in (self.source, self.valid_source) if s is not None]
            own = [np.array(source_digest(source).encode()) for source in sources]
            return tree_digest((own, self.test, self.server))
        parts = (self.train, self.sizes, self.valid, self.valid_sizes, self.test, self.server)
        found = tree_digest(parts)
        scales = [leaf for leaf in jax.tree.leaves(parts, is_leaf=is_converted) if is_converted(leaf)]
        return " ".join([found, *(f"{s.mean} {s.deviation}" for s in scales)])

    @property
    def nbytes(self) -> int:
        """The bytes of the arrays on the host."""
        held = (self.train, self.valid) if self.source is None else ()
        return sum(leaf.nbytes for leaf in jax.tree.leaves((held, self.test, self.server)))

    @property
    def placed_bytes(self) -> int:
        """The bytes that are kept on devices."""
        with _lock:
            return sum(leaf.nbytes for leaf in jax.tree.leaves(list(_placed.get(self, {}).values())))

    def __repr__(self) -> str:
        return line("FederatedData", self._words())

    def _repr_html_(self) -> str:
        drawn = ""
        with suppress(ImportError):  # only the lab draws
            from fedstrata.lab.report.plots import inline_svg
            from fedstrata.lab.report.split import figure_of

            drawn = inline_svg(figure_of(self))
        return html.titled(f"FederatedData: {', '.join(self._words())}", drawn)

    def _words(self) -> list[str]:
        number, low, high = int(self.sizes.sum()), int(self.sizes.min()), int(self.sizes.max())
        each = f"{low}" if low == high else f"{low}–{high}"
        extras = [name for name in self.parts if name != "train"]
        named = {
            jax.tree_util.keystr(path, simple=True, separator="."): leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(self.train, is_leaf=is_converted)
        }
        arrays = [f"{name} {leaf.dtype}{list(leaf.shape[1:])}".strip() for name, leaf in named.items()]
        found = [f"{self.clients} client{'s' * (self.clients > 1)}", f"{number} samples ({each} each)"]
        found += [f"with {' and '.join(extras)}"] * bool(extras)
        return [*found, *["from a source"] * (self.source is not None), *arrays]


# Placed data lives as long as its data set: an entry is removed with the object.
_placed: WeakKeyDictionary[FederatedData, dict[Hashable, Placed]] = WeakKeyDictionary()
_lock = Lock()


def _scale(samples: PyTree, name: str, mean: Any, deviation: Any) -> tuple[Any, Any]:
    """Mean and deviation as plain numbers, or nested tuples of them, that fit an array."""
    known = [k for k, leaf in by_name(samples).items() if not is_converted(leaf)]
    if name not in known:
        raise DataError(
            f"Unknown array {name!r}; arrays that can be scaled: {', '.join(map(repr, known)) or 'none'}."
        )
    shape = samples[name].shape[1:]
    parts = [np.asarray(part, float) for part in (mean, deviation)]
    try:
        for part in parts:
            np.broadcast_to(part, shape)
    except ValueError as error:
        words = f"{name!r}: mean and deviation must broadcast against a sample, which is {shape}."
        raise DataError(words) from error
    if not (np.isfinite(parts[0]).all() and (parts[1] > 0).all() and np.isfinite(parts[1]).all()):
        raise DataError(
            f"{name!r} needs a finite mean and a deviation > 0, but they are {mean!r}, {deviation!r}."
        )

    def plain(value: Any) -> Any:
        return tuple(map(plain, value)) if type(value) is list else value

    return plain(parts[0].tolist()), plain(parts[1].tolist())


def _finite_in(leaf: np.ndarray, rows: slice) -> bool:
    return finite(leaf[rows])


def _some(clients: np.ndarray) -> str:
    """Some clients, in a few words."""
    return f"client {clients[0]}" if len(clients) == 1 else f"{len(clients)} clients from {clients[0]} on"


def _form(leaf: Any) -> tuple[Any, ...]:
    return jnp.shape(leaf), jnp.result_type(leaf)


def _named(names: Sequence[str] | None) -> tuple[str, ...] | None:
    if names is None:
        return None
    named = tuple(names)
    if isinstance(names, str) or any(not isinstance(name, str) for name in named):
        raise DataError(
            f"names must be words, one for each client, e.g. ['Basel', 'Zurich'], but is {names!r}."
        )
    return named
