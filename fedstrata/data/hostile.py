"""Data of hostile clients, for experiments with `fedstrata.channels`' robust means."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedstrata.data.federated import FederatedData
from fedstrata.data.samples import by_name


def flip_labels(data: FederatedData, clients: int, classes: int, label: str = "y") -> FederatedData:
    """Return the data with the first clients' training labels y replaced by ``classes − 1 − y``.

    Args:
        data: the clean data.
        clients: the number of hostile clients.
        classes: the number of classes.
        label: the name of the labels among a sample's entries.

    >>> import fedstrata as fs, numpy as np
    >>> data = fs.FederatedData.from_clients([{"y": np.array([0, 2])}, {"y": np.array([1, 2])}])
    >>> flip_labels(data, clients=1, classes=3).train["y"].tolist()
    [2, 0, 1, 2]
    """
    if label not in by_name(data.train):
        raise ValueError(f"flip_labels: the samples have no entry {label!r}; give label= its name.")
    y = np.array(data.train[label])
    rows = slice(0, int(data.sizes[:clients].sum()))
    y[rows] = classes - 1 - y[rows]
    return replace(data, train={**data.train, label: y})
