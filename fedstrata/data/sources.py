"""Sources of clients' samples that are not in a store: a Python function, a Hugging Face dataset."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from fedstrata.core.types import PyTree
from fedstrata.data.federated import DataError
from fedstrata.data.source import rows_of


@dataclass(frozen=True, eq=False)
class FromFunction:
    """A source that asks a function for one client's samples.

    Args:
        sizes: the number of samples of each client.
        function: ``function(i)`` returns client i's samples, a pytree of arrays with ``sizes[i]`` rows. It is
            called from another thread, and more than once for a client.
        form: one sample, as a pytree of `jax.ShapeDtypeStruct`; None asks for client 0.
        name: identifies the data, so that a resumed run can recognise it.

    >>> import numpy as np, fedstrata as fs
    >>> source = fs.data.FromFunction([1, 2, 3], lambda i: {"x": np.full(i + 1, i)})
    >>> source.samples(np.array([2, 1]))["x"].tolist(), fs.FederatedData.from_source(source).clients
    ([2, 2, 2, 1, 1], 3)
    """

    sizes: Any
    function: Callable[[int], PyTree]
    form: PyTree = None
    name: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", np.asarray(self.sizes))
        if self.form is None:
            arrays = jax.tree.map(np.asarray, self.function(0))
            form = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), arrays)
            object.__setattr__(self, "form", form)

    @property
    def fingerprint(self) -> str | None:
        """Its name, if it has one."""
        return self.name

    def samples(self, clients: np.ndarray) -> PyTree:
        """The samples of these clients, one client after the other."""
        found = []
        for i in clients.tolist():
            samples = jax.tree.map(np.asarray, self.function(i))
            lengths = {leaf.shape[:1] for leaf in jax.tree.leaves(samples)}
            if lengths != {(int(self.sizes[i]),)}:
                raise DataError(
                    f"The function returned arrays of {sorted(lengths)} samples for client {i}, whose size "
                    f"is {self.sizes[i]}."
                )
            found.append(samples)
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *found)


@dataclass(frozen=True, eq=False)
class FromDataset:
    """A Hugging Face dataset whose rows belong to the clients that a column names.

    Args:
        dataset: a `datasets.Dataset` (one split).
        by: the column that tells the clients apart; they come in its sorted order.
        columns: the columns of a sample, name → column, or a list of them; by default all others.

    A row's entry becomes a NumPy array as ``with_format("numpy")`` gives it, images included.
    """

    dataset: Any
    by: str
    columns: dict[str, str] | Sequence[str] | None = None

    def __post_init__(self) -> None:
        if not (hasattr(self.dataset, "with_format") and hasattr(self.dataset, "column_names")):
            raise DataError(f"FromDataset needs a datasets.Dataset, but got {type(self.dataset).__name__}.")
        known = list(self.dataset.column_names)
        missing = [name for name in (self.by, *self._columns.values()) if name not in known]
        if missing:
            raise DataError(f"The dataset has no column {missing[0]!r}; there are {known}.")

    @cached_property
    def _columns(self) -> dict[str, str]:
        if isinstance(self.columns, dict):
            return self.columns
        names = self.columns or [name for name in self.dataset.column_names if name != self.by]
        return {name: name for name in names}

    @cached_property
    def _rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Names, sizes, and the rows of all clients, client after client."""
        owners = np.asarray(self.dataset.with_format("numpy")[self.by][:])
        names, owner, sizes = np.unique(owners, return_inverse=True, return_counts=True)
        return names, sizes, np.argsort(owner, kind="stable")

    @property
    def names(self) -> tuple[str, ...]:
        """The clients' names, from the column."""
        return tuple(map(str, self._rows[0]))

    @property
    def sizes(self) -> np.ndarray:
        """The number of rows of each client."""
        return self._rows[1]

    @property
    def fingerprint(self) -> str:
        """The dataset's own fingerprint, and the columns."""
        return f"{getattr(self.dataset, '_fingerprint', '')} {self.by} {sorted(self._columns.items())}"

    @cached_property
    def form(self) -> PyTree:
        """Shapes and dtypes of one sample."""
        first = self._take(self._rows[2][:1])
        return {name: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for name, leaf in first.items()}

    def samples(self, clients: np.ndarray) -> PyTree:
        """The samples of these clients, one client after the other."""
        _, sizes, order = self._rows
        return self._take(order[rows_of(sizes[clients], (np.cumsum(sizes) - sizes)[clients])])

    def _take(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        columns = list(dict.fromkeys(self._columns.values()))
        batch = self.dataset.select_columns(columns).with_format("numpy")[rows.tolist()]
        return {name: np.asarray(batch[column]) for name, column in self._columns.items()}
