"""Data for experiments: whether it is there, and the same object again for the same arguments.

A `FederatedData` that is the same object in every setting is split and padded once.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from fedstrata import data as loaders
from fedstrata.data import DataError, FederatedData, Partitioner
from fedstrata.lab.datasets.fetch import ENVIRONMENT, FORMS
from fedstrata.lab.experiments.errors import ExperimentError
from fedstrata.support.words import suggest


def csv(
    files: str | Sequence[str] | None = None,
    target: str | None = None,
    *,
    features: Sequence[str] | None = None,
    encode: bool = False,
    impute: Literal["mean"] | None = None,
    standardize: bool = True,
    valid_fraction: float = 0.0,
    test_fraction: float = 0.2,
    server: str | None = None,
    seed: int = 0,
) -> FederatedData:
    """Your own files, one for each client; see `fedstrata.data.from_csv`.

    Raises:
        DataError: if no files or no target are named, or they do not fit.
    """
    if files is None or target is None:
        raise DataError("csv needs files, such as 'site-*.csv', and target, the column of the labels.")
    made = loaders.from_csv(
        files, label=target, features=features, encode=encode, impute=impute,
        valid_fraction=valid_fraction, test_fraction=test_fraction, server=server, seed=seed,
    )  # fmt: skip
    return loaders.standardize(made) if standardize else made


LOADERS: dict[str, Callable[..., FederatedData]] = {
    **{name: getattr(loaders, name) for name in ("digits", "breast_cancer", "heart", *FORMS)},
    "csv": csv,
}
NATURAL = ("heart", "csv", "dialysis", "schools", "indo_rct")  # whose clients are not drawn
PARTITIONS: dict[str, type[Partitioner]] = {
    name: getattr(loaders, name)
    for name in ("IID", "Dirichlet", "OneClass", "ByKey", "QuantitySkew", "Shards", "FeatureShift")
}


def present(name: str) -> bool:
    """Whether a data set can be loaded without a network."""
    if name not in FORMS:
        return True
    import pooch

    folders = [os.environ.get(ENVIRONMENT), pooch.os_cache("fedstrata")]
    return any(
        all((Path(folder) / file).is_file() for file in form.files)
        for folder in folders
        if folder
        for form in FORMS[name]
    )


@functools.lru_cache(maxsize=4)
def federated(
    name: str, clients: int | None = None, partition: Partitioner | None = None, seed: int = 0, **options: Any
) -> FederatedData:
    """A loader's data, kept for the next call with the same arguments.

    ``clients`` and ``partition`` are left out for data that is divided by nature.

    >>> federated("digits", 5) is federated("digits", 5)
    True
    """
    if name not in LOADERS:
        raise ExperimentError(
            f"Unknown data set {name!r}{suggest(name, list(LOADERS))} There are {', '.join(LOADERS)}."
        )
    if name in NATURAL and (clients is not None or partition is not None):
        raise ExperimentError(f"{name} is already divided into clients: leave clients and partition out.")
    chosen = {"clients": clients, "partition": partition}
    given = {key: value for key, value in chosen.items() if value is not None}
    return LOADERS[name](seed=seed, **given, **options)
