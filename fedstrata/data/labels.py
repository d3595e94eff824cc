"""Check labels, whole numbers 0 … K−1: for an index out of bounds, JAX takes another entry."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedstrata.data.federated import DataError, FederatedData
from fedstrata.data.samples import by_name


def check_labels(data: FederatedData, classes: int | None = None, label: str = "y") -> FederatedData:
    """Return the data if all its labels are whole numbers in 0 … ``classes`` − 1 (None: from 0 on).

    Raises:
        DataError: naming the first label that is not, and its client.

    >>> import numpy as np, fedstrata as fs
    >>> data = fs.FederatedData.from_clients([{"y": np.array([1, 2])}])
    >>> check_labels(data, 2)
    Traceback (most recent call last):
        ...
    fedstrata.data.samples.DataError: Client 0 has the label 2 in sample 1 of train['y'], where labels are
    whole numbers from 0 to 1. Number the classes from 0.
    """
    for part, labels, sizes in _parts(data, label):
        good = (labels >= 0) & (labels == np.floor(labels)) & (labels < (classes or np.inf))
        if not good.all():
            row = sample = int(np.argmin(good))
            who = f"The {part} data"
            if sizes is not None:
                ends = np.cumsum(sizes)
                client = int(np.searchsorted(ends, row, side="right"))
                who, sample = f"Client {client}", row - int(ends[client] - sizes[client])
            span = "from 0 on" if classes is None else f"from 0 to {classes - 1}"
            raise DataError(
                f"{who} has the label {labels[row]} in sample {sample} of {part}[{label!r}], where labels "
                f"are whole numbers {span}. Number the classes from 0."
            )
    return data


def count_classes(data: FederatedData, label: str = "y") -> int:
    """The number of classes K of labels 0 … K−1, over all parts of the data.

    Raises:
        DataError: for labels that are not whole numbers ≥ 0.
    """
    check_labels(data, label=label)
    return 1 + max(int(labels.max()) for _, labels, _ in _parts(data, label))


def _parts(data: FederatedData, label: str) -> Iterator[tuple[str, np.ndarray, np.ndarray | None]]:
    for part, samples in data.parts.items():
        if label in by_name(samples):
            yield part, np.asarray(samples[label]), data.part_sizes.get(part)
