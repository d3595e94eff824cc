"""CSV files, one per client."""

from __future__ import annotations

import csv
import glob
import gzip
import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from fedstrata.data.federated import DataError, FederatedData
from fedstrata.data.frames import column_of
from fedstrata.data.preparation import Impute
from fedstrata.data.tables import ClientTable, federate

MISSING = ("", "?", "NA", "N/A", "NaN", "nan", "null", "None")


def from_csv(
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    label: str,
    features: Sequence[str] | None = None,
    valid_fraction: float = 0.0,
    test_fraction: float = 0.0,
    seed: int = 0,
    encode: bool = False,
    impute: Impute = None,
    missing: Collection[str] = MISSING,
    delimiter: str = ",",
    extra: Sequence[str] = (),
    server: str | os.PathLike[str] | None = None,
) -> FederatedData:
    """Federated data from CSV files with a header: one client per file, named after the file.

    Args:
        files: a pattern such as ``"site-*.csv"``, whose files are taken in sorted order, or a list of files.
        label: the column that becomes ``y``.
        features: the columns that become ``x``; by default all others.
        valid_fraction: the fraction of each client's rows that becomes its validation data.
        test_fraction: the fraction of each client's rows that goes into the pooled test data.
        seed: the random seed of these splits.
        encode: whether words become features, one for each category.
        impute: ``"mean"`` replaces missing values with the federation's mean. These five are as in
            `FederatedData.from_dataframe`.
        missing: the cells that stand for a missing value.
        delimiter: the character between cells.
        extra: columns kept under their own names, as in `FederatedData.from_dataframe`.
        server: a file with the server's own rows.

    Raises:
        DataError: if a file is not a table, columns differ, or words stand where numbers are expected.
    """
    tables = [read_csv(path, missing, delimiter) for path in _paths(files)]
    return federate(
        tables, label=label, features=features, valid_fraction=valid_fraction, test_fraction=test_fraction,
        seed=seed, encode=encode, impute=impute, extra=extra, server=server,
    )  # fmt: skip


def _paths(files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Path]:
    if isinstance(files, str | os.PathLike):
        found = [Path(path) for path in sorted(glob.glob(os.fspath(files)))]
        if not found:
            raise DataError(
                f"No file matches {os.path.abspath(files)}. Give a pattern such as 'data/site-*.csv'."
            )
        if folders := [path for path in found if path.is_dir()]:
            pattern = str(folders[0] / "*.csv")
            raise DataError(f"{folders[0]} is a folder. Give its files, {pattern!r}, one for each client.")
    else:
        found = [Path(path) for path in files]
        if absent := [path for path in found if not path.is_file()]:
            raise DataError(f"File not found: {absent[0].absolute()}.")
    if len({path.stem for path in found}) < len(found):
        raise DataError(f"Two files have the same name: {[str(path) for path in found]}.")
    return found


def read_csv(path: Path, missing: Collection[str] = MISSING, delimiter: str = ",") -> ClientTable:
    """A CSV file (.gz: gzipped) with a header: columns of whole numbers (true is 1), numbers, words.

    Raises:
        DataError: if it cannot be read as such a file.
    """
    if not path.is_file():
        raise DataError(f"File not found: {path.absolute()}.")
    try:
        reader = gzip.open if path.suffix == ".gz" else open
        with reader(path, "rt", newline="", encoding="utf-8-sig") as file:
            rows = [row for row in csv.reader(file, delimiter=delimiter, strict=True) if row]
    except (UnicodeDecodeError, csv.Error, gzip.BadGzipFile, EOFError) as error:
        raise DataError(f"{path} cannot be read as CSV in UTF-8: {error}.") from error
    if len(rows) < 2:
        raise DataError(f"{path} needs a header and at least one row.")
    header, *body = rows
    header = [name.strip() for name in header]
    for other in ";\t|":
        if len(header) == 1 and other in header[0]:
            raise DataError(f"{path}: the header is one cell, {header[0][:60]!r}. Give delimiter={other!r}.")
    if len(set(header)) < len(header) or "" in header:
        raise DataError(f"{path}: the header must name every column once, but is {header}.")
    for number, row in enumerate(body, start=1):
        if len(row) != len(header):
            raise DataError(
                f"{path}: row {number} has {len(row)} cells, the header has {len(header)}. "
                "Give delimiter= if it is not a comma."
            )
    columns = zip(header, zip(*body, strict=True), strict=True)
    return ClientTable(path.stem, {name: _column(name, entries, missing) for name, entries in columns})


def _column(name: str, entries: Sequence[str], missing: Collection[str]) -> np.ndarray:
    cells = [None if (cell := entry.strip()) in missing else cell for entry in entries]
    plain = not any("_" in cell for cell in cells if cell)  # only Python reads 1_000 as a number
    for read in (int, float, _truth) if plain else (_truth,):
        with suppress(ValueError):
            return column_of(name, [None if cell is None else read(cell) for cell in cells])
    return column_of(name, cells)


def _truth(cell: str) -> bool:
    return bool(("false", "true").index(cell.lower()))
