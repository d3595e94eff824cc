"""Sources of samples that are not all in memory: sizes, the form of a sample, and samples on demand.

Further attributes are used if a source has them: ``valid``, a source of the same clients' validation samples;
``test``, ``server``, ``names``; ``fingerprint``, by which a resumed run recognises its data. See
`fedstrata.data.federated.FederatedData.from_source`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax
import numpy as np

from fedstrata.core.types import PyTree
from fedstrata.data.scaled import Scales, scaled
from fedstrata.data.storage import by_rows, offsets_of
from fedstrata.support.digest import tree_digest


class Source(Protocol):
    """Clients' samples that are read on demand."""

    @property
    def sizes(self) -> np.ndarray:
        """The number of samples of each client, at least one."""

    @property
    def form(self) -> PyTree:
        """One sample: a pytree of `jax.ShapeDtypeStruct`."""

    def samples(self, clients: np.ndarray) -> PyTree:
        """The samples of these clients, one client after the other: arrays of shape (their samples, …).

        It may be called from another thread.
        """


@dataclass(frozen=True)
class ScaledSource:
    """A source with arrays that are converted when samples are drawn, see `fedstrata.data.scaled`.

    Attributes:
        source: the source of the unconverted samples.
        scales: mean and deviation, by name of the array.
    """

    source: Source
    scales: Scales

    @property
    def sizes(self) -> np.ndarray:
        return self.source.sizes

    @property
    def form(self) -> PyTree:
        return scaled(self.source.form, self.scales)

    def samples(self, clients: np.ndarray) -> PyTree:
        return scaled(self.source.samples(clients), self.scales)

    @property
    def fingerprint(self) -> str:
        """The source's fingerprint and the scales."""
        return f"{source_digest(self.source)} {self.scales}"


def rows_of(sizes: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """The positions of clients' samples in flat arrays, client after client."""
    return np.arange(sizes.sum()) + np.repeat(offsets - offsets_of(sizes), sizes)


def taken(array: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """A copy of these rows, which must exist."""
    found = np.empty((len(rows), *array.shape[1:]), array.dtype)

    def take(part: slice) -> None:
        # mode="raise" checks the rows first, and would use another buffer for them
        np.take(array, rows[part], axis=0, out=found[part], mode="clip")

    by_rows(take, found)
    return found


def source_digest(source: Source) -> str:
    """A source's own fingerprint, or else a digest of its sizes and form."""
    match source:
        case object(fingerprint=str(given)):
            return given
    form = jax.tree.map(lambda leaf: np.array(f"{leaf.dtype} {leaf.shape}".encode()), source.form)
    return tree_digest((np.asarray(source.sizes), form))
