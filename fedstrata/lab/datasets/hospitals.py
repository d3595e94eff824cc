"""The heart disease data of four hospitals, which comes with the package: a federation by nature.

Cleveland, Budapest (Hungary), Long Beach and Zurich differ in whom they saw and in what they measured: 46,
36, 75 and 93 % of their patients are ill, and hardly anyone outside Cleveland had fluoroscopy (``ca``). The
files, their source and their licence (CC BY 4.0) are in the folder ``heart`` beside this module.
"""

from __future__ import annotations

import dataclasses
from importlib import resources

import numpy as np

from fedstrata.data import preparation
from fedstrata.data.federated import FederatedData
from fedstrata.data.files import read_csv
from fedstrata.data.tables import ClientTable, federate

HOSPITALS = {"cleveland": "Cleveland", "hungary": "Hungary", "long-beach": "Long Beach", "zurich": "Zurich"}
CODES = {
    "cp": {1: "typical", 2: "atypical", 3: "non-anginal", 4: "none"},
    "restecg": {0: "normal", 1: "ST-T", 2: "hypertrophy"},
    "slope": {1: "up", 2: "flat", 3: "down"},
    "thal": {3: "normal", 6: "fixed", 7: "reversible"},
}
NEVER_ZERO = ("chol", "trestbps")


def tables() -> list[ClientTable]:
    """The hospitals' tables as published; ``num`` is 0 without heart disease, 1 to 4 with."""
    folder = resources.files("fedstrata.lab.datasets").joinpath("heart")
    found = []
    for file, name in HOSPITALS.items():
        with resources.as_file(folder.joinpath(f"{file}.csv")) as path:
            found.append(dataclasses.replace(read_csv(path), name=name))
    return found


def arrays() -> dict[str, np.ndarray]:
    """The arrays of `load("heart")`."""
    own = tables()
    names = [name for name in own[0].columns if name != "num"]
    rows = [np.stack([t.columns[name].astype(np.float64) for name in names], axis=1) for t in own]
    num = np.concatenate([t.columns["num"] for t in own]).astype(np.int32)
    return {
        "x": np.concatenate(rows),
        "y": (num > 0).astype(np.int32),
        "num": num,
        "site": np.repeat([t.name for t in own], [t.rows for t in own]),
        "feature_names": np.array(names),
    }


def heart(
    *,
    valid_fraction: float = 0.0,
    test_fraction: float = 0.2,
    seed: int = 0,
    fold: tuple[int, int] | None = None,
    standardize: bool = True,
) -> FederatedData:
    """Heart disease in four hospitals: 303, 294, 200 and 123 patients, label 1 for those who are ill.

    A natural split (`FederatedData.names`): nothing is moved between hospitals. The four coded columns are
    one-hot, which makes 22 features. Values are missing, 16 % of all, and a cholesterol or blood pressure of
    zero is one of them (all of Zurich's cholesterol): they are **imputed** by the mean of the federation's
    training patients (`load("heart")` gives the table as published, NaN where a value is missing). Then
    features are standardised, see `fedstrata.data.standardize`. Both are found from sums, and kept:
    ``data.preparation``.

    Args:
        valid_fraction: the part of each hospital's patients that becomes its validation data.
        test_fraction: the part that goes into the pooled test data, where ``client`` says whose it is. Both
            are drawn class by class.
        seed: of what is held out.
        fold: ``(k, K)`` holds out the k-th of K parts for the test, in place of ``test_fraction``: over k = 0
            … K − 1 every patient is in the test data once.
        standardize: whether features have mean 0 and deviation 1 over the training patients.

    >>> data = heart(valid_fraction=0.2)
    >>> data.names, data.sizes.tolist(), data.train["x"].shape[1]
    (('Cleveland', 'Hungary', 'Long Beach', 'Zurich'), [181, 176, 120, 73], 22)
    """
    data = federate(
        [_coded(table) for table in tables()], label="ill", valid_fraction=valid_fraction,
        test_fraction=test_fraction, seed=seed, encode=True, impute="mean", fold=fold,
    )  # fmt: skip
    return preparation.standardize(data) if standardize else data


def _coded(table: ClientTable) -> ClientTable:
    """Codes as words, impossible zeros as missing values, ``ill`` in place of ``num``."""
    columns = {name: column.astype(np.float64) for name, column in table.columns.items() if name != "num"}
    for name in NEVER_ZERO:
        columns[name][columns[name] == 0] = np.nan
    for name, words in CODES.items():
        coded = [None if np.isnan(value) else words[int(value)] for value in columns[name]]
        columns[name] = np.array(coded, object)
    columns["ill"] = (table.columns["num"] > 0).astype(np.int64)
    return dataclasses.replace(table, columns=columns)
