"""Federations by nature, of tables that do not come with the package: dialysis centres, schools, a trial.

Every loader keeps the sites as they are (`FederatedData.names`), holds samples out class by class, and
standardises features by the training samples' sums. Where the files come from, and their licences, is in
docs/data.md.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

import numpy as np

from fedstrata.data import preparation
from fedstrata.data.federated import FederatedData
from fedstrata.data.tables import ClientTable, federate
from fedstrata.lab.datasets.fetch import read


class NaturalOptions(TypedDict, total=False):
    """Keyword arguments that these loaders take.

    Attributes:
        data_dir: the folder with the file; only it is searched.
        valid_fraction: the part of each site's samples that becomes its validation data. Default 0.
        test_fraction: the part that goes into the pooled test data, where ``client`` says whose it is.
            Default 0.2.
        seed: of what is held out. Default 0.
        standardize: whether features have mean 0 and deviation 1 over the training samples. Default True.
    """

    data_dir: str | os.PathLike[str] | None
    valid_fraction: float
    test_fraction: float
    seed: int
    standardize: bool


def dialysis(**options: Unpack[NaturalOptions]) -> FederatedData:
    """Survival on dialysis at 67 centres of Rio de Janeiro: 6,805 patients, of whom 1,603 died.

    A sample has ``x``: age, month of entry (1 to 44) and the cause of renal failure, one-hot; ``y``: 1 where
    the patient died, 0 where the follow-up ended before; ``time``: months until then, 1 to 44. For
    `fedstrata.models.hazard`. The smallest centre has 4 patients, the largest 241.
    """
    columns = read("dialysis", options.get("data_dir"))
    return _federated(
        columns, "fac_center", "event", ["num_age", "num_begin", "fac_disease"], ["time"], **options
    )


def schools(**options: Unpack[NaturalOptions]) -> FederatedData:
    """A-level chemistry of 1997 at 2,410 schools: 31,022 pupils, 1 to 188 of a school.

    A sample has ``x``: the pupil's mean score two years before (GCSE), age in months from 18½ years, gender,
    one-hot; ``y``: the score, 0 to 10 in steps of two; ``authority``: the number of the local one, 1 to 131.
    A school with fewer than two pupils of a score holds none of them out.
    """
    columns = read("schools", options.get("data_dir"))
    return _federated(columns, "school", "score", ["gcsescore", "age", "gender"], ["lea"], **options)


def indo_rct(**options: Unpack[NaturalOptions]) -> FederatedData:
    """A trial of rectal indomethacin against pancreatitis after ERCP: 602 patients at 4 sites.

    A sample has ``x``: age, risk score, gender, whether there were dysfunction of the sphincter of Oddi, an
    earlier pancreatitis after ERCP and an ampullectomy, status and type, one-hot; ``y``: whether there was
    pancreatitis; ``treated``: 1 for indomethacin, 0 for the placebo.
    """
    columns = read("indo_rct", options.get("data_dir"))
    columns["ill"] = (columns["outcome"] == "1_yes").astype(np.int64)
    columns["treated"] = (columns["rx"] == "1_indomethacin").astype(np.int64)
    features = ["age", "risk", "gender", "sod", "pep", "amp", "status", "type"]
    return _federated(columns, "site", "ill", features, ["treated"], **options)


def _federated(
    columns: dict[str, np.ndarray],
    site: str,
    label: str,
    features: Sequence[str],
    extra: Sequence[str],
    *,
    data_dir: object = None,
    test_fraction: float = 0.2,
    standardize: bool = True,
    **options: Any,
) -> FederatedData:
    used = {name: columns[name] for name in (*features, label, *extra)}
    sites = columns[site]
    names, of = np.unique(sites.astype(str) if sites.dtype == object else sites, return_inverse=True)
    rows = np.split(np.argsort(of, kind="stable"), np.cumsum(np.bincount(of))[:-1])
    tables = [
        ClientTable(str(name), {key: column[own] for key, column in used.items()})
        for name, own in zip(names, rows, strict=True)
    ]
    data = federate(
        tables, label=label, features=features, extra=extra, test_fraction=test_fraction, encode=True,
        **options,
    )  # fmt: skip
    return preparation.standardize(data) if standardize else data
