"""Data frames (pandas, Polars, PyArrow, … through narwhals) as tables of clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedstrata.data.federated import DataError, FederatedData
from fedstrata.data.tables import Table, check_columns, federate, spread


def from_dataframe(frames: Any, by: str | None, **options: Any) -> FederatedData:
    """See `fedstrata.data.federated.FederatedData.from_dataframe`."""
    several = isinstance(frames, Mapping | list | tuple)
    if several and by is not None:
        raise DataError(
            f"by={by!r} names the column that divides one data frame; here is one for each client. Leave it "
            "out, or join the frames."
        )
    if isinstance(frames, Mapping):
        tables = [table_of(frame, str(name)) for name, frame in frames.items()]
    elif several:
        tables = [table_of(frame, f"client {i}") for i, frame in enumerate(frames)]
    else:
        whole = table_of(frames, "the data frame")
        if by is None:
            raise DataError(
                f"Give by=, the column that says whose row it is, one of {list(whole.columns)}; or a "
                "dict with a data frame for each client."
            )
        tables = _divided(whole, by)
    return federate(tables, **options)


def table_of(frame: Any, name: str, only: Sequence[str] | None = None) -> Table:
    """The columns of a data frame, or of a dict of sequences.

    Args:
        frame: the data frame.
        name: what errors call it.
        only: the columns to look at, of those that are there; by default all.

    Raises:
        DataError: where it is no data frame.
    """
    import narwhals as nw

    if isinstance(frame, Mapping):
        columns = {str(key): _objects(list(values)) for key, values in frame.items()}
        return Table(name, columns)
    try:
        eager = nw.from_native(frame, eager_only=True)
    except TypeError:
        if hasattr(frame, "collect"):
            raise DataError(f"{name} is lazy: give {name}.collect().") from None
        if hasattr(frame, "to_pandas"):
            raise DataError(f"{name} is a {type(frame).__name__}: give its .to_pandas().") from None
        raise DataError(
            f"{name} is no data frame (pandas, Polars, PyArrow, …) but {type(frame).__name__}. Arrays enter "
            "through fs.FederatedData.from_clients or from_arrays."
        ) from None
    found, types = {}, {}
    if other := [key for key in eager.columns if not isinstance(key, str)]:
        raise DataError(
            f"{name} has columns that are called by no words, such as {other[0]!r}: give them names, "
            "df.columns = df.columns.astype(str)."
        )
    for key in eager.columns:
        if only is not None and key not in only:
            continue
        series = eager[key]
        kind, there = series.dtype, ~series.is_null()
        if kind.is_numeric() or kind == nw.Boolean:
            values = series.filter(there).to_numpy()
            whole = kind == nw.Boolean or kind.is_integer()
            found[key] = spread(values, there.to_numpy(), np.int64 if whole else np.float64)
        elif kind in (nw.String, nw.Categorical, nw.Enum, nw.Object):
            entries = zip(series.to_list(), there.to_list(), strict=True)
            found[key] = _objects([value if here else None for value, here in entries])
        else:
            types[key] = str(kind)
    return Table(name, found, types)


def _objects(values: list[Any]) -> np.ndarray:
    """Numbers where all are, else words; None (or NaN) where one is missing."""
    kept = [None if value is None or value != value else value for value in values]
    there = [value for value in kept if value is not None]
    whole = (bool, int, np.integer, np.bool_)
    for kinds, dtype in ((whole, np.int64), ((*whole, float, np.floating), np.float64)):
        if all(isinstance(value, kinds) for value in there):
            return spread(np.array(there, dtype), np.array([v is not None for v in kept], bool), dtype)
    words = np.empty(len(kept), object)
    words[:] = [None if value is None else str(value) for value in kept]
    return words


def _divided(whole: Table, by: str) -> list[Table]:
    """One table per value of a column, in sorted order."""
    check_columns(whole, [by])
    if by in whole.types:
        raise DataError(f"{by!r} is of type {whole.types[by]}; clients are told apart by words or numbers.")
    keys = whole.columns[by]
    missing = [i for i, key in enumerate(keys) if key is None or key != key]
    if missing:
        raise DataError(
            f"{by!r} is missing in {len(missing)} rows, first in row {missing[0]}: drop them, or say whose "
            "they are."
        )
    values = sorted(set(keys.tolist()))
    others = {name: column for name, column in whole.columns.items() if name != by}
    return [
        Table(str(value), {name: column[keys == value] for name, column in others.items()}, whole.types)
        for value in values
    ]
