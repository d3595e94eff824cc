"""Data frames (pandas, Polars, PyArrow, … through narwhals) as tables of clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedstrata.data.federated import DataError, FederatedData
from fedstrata.data.tables import ClientTable, check_columns, federate


def from_dataframe(frames: Any, by: str | None, **options: Any) -> FederatedData:
    """See `fedstrata.data.federated.FederatedData.from_dataframe`."""
    match frames:
        case Mapping() | list() | tuple() if by is not None:
            raise DataError(
                f"by={by!r} names the column that divides one data frame; here is one for each client. Leave "
                "it out, or join the frames."
            )
        case Mapping():
            tables = [table_of(frame, str(name)) for name, frame in frames.items()]
        case list() | tuple():
            tables = [table_of(frame, f"client {i}") for i, frame in enumerate(frames)]
        case _:
            whole = table_of(frames, "the data frame")
            if by is None:
                raise DataError(
                    f"Give by=, the column that says whose row it is, one of {list(whole.columns)}; or a "
                    "dict with a data frame for each client."
                )
            tables = _divided(whole, by)
    return federate(tables, **options)


def table_of(frame: Any, name: str, only: Sequence[str] | None = None) -> ClientTable:
    """The columns of a data frame, or of a dict of sequences.

    Args:
        frame: the data frame.
        name: its name in errors.
        only: the columns to read, as far as they exist; by default all.

    Raises:
        DataError: if it is not a data frame.
    """
    import narwhals as nw

    if isinstance(frame, Mapping):
        lists = {str(key): list(values) for key, values in frame.items()}
        if len({len(values) for values in lists.values()}) > 1:
            lengths = ", ".join(f"{key!r} {len(values)}" for key, values in lists.items())
            raise DataError(
                f"{name} has columns of unequal length ({lengths}): a row needs one entry of each."
            )
        return ClientTable(
            name, {key: column_of(f"{name}: {key!r}", values) for key, values in lists.items()}
        )
    try:
        eager = nw.from_native(frame, eager_only=True)
    except TypeError:
        kind, hint = (
            type(frame).__name__,
            "Arrays enter through fs.FederatedData.from_clients or from_arrays.",
        )
        for method in ("collect", "to_pandas"):  # a lazy frame, and Spark's or the like
            if hasattr(frame, method):
                hint = f"Give its .{method}()."
        raise DataError(
            f"{name} is not a data frame in memory (pandas, Polars, PyArrow, …), but is a {kind}. {hint}"
        ) from None
    except nw.exceptions.DuplicateError as error:
        raise DataError(f"{name}: {error}") from error
    found, types = {}, {}
    if other := [key for key in eager.columns if not isinstance(key, str)]:
        raise DataError(
            f"{name} has columns whose names are not strings, such as {other[0]!r}: rename them, "
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
            dtype = _whole(f"{name}: {key!r}", values) if whole else np.float64
            found[key] = _spread(values, there.to_numpy(), dtype)
        elif kind in (nw.String, nw.Categorical, nw.Enum, nw.Object):
            entries = zip(series.to_list(), there.to_list(), strict=True)
            plain = kind == nw.Object  # else it is a word: a category may be called 1
            kept = [(value if plain else str(value)) if here else None for value, here in entries]
            found[key] = column_of(f"{name}: {key!r}", kept)
        else:
            types[key] = str(kind)
    return ClientTable(name, found, types)


def _whole(where: str, values: Any) -> type[np.integer[Any]]:
    """The dtype for whole numbers; unsigned ones of 64 bits are often keys."""
    least, most = (int(np.min(values)), int(np.max(values))) if len(values) else (0, 0)
    if least >= -(2**63) and most < 2**63:
        return np.int64
    if least >= 0 and most < 2**64:
        return np.uint64
    raise DataError(f"{where} has whole numbers beyond 64 bits. Give them as strings, or as floats.")


def column_of(where: str, values: list[Any]) -> np.ndarray:
    """A column of numbers if all entries are numbers, else of words; None (or NaN) for missing ones."""
    kept = [None if value is None or value != value else value for value in values]
    there = [value for value in kept if value is not None]
    whole = (bool, int, np.integer, np.bool_)
    if all(isinstance(value, (*whole, float, np.floating)) for value in there):
        exact = np.array(there, object)  # among others, NumPy reads numbers from 2⁶³ on as floats
        dtype = _whole(where, exact) if all(isinstance(v, whole) for v in there) else np.float64
        return _spread(np.array(there, dtype), np.array([v is not None for v in kept], bool), dtype)
    words = np.empty(len(kept), object)
    words[:] = [None if value is None else str(value) for value in kept]
    return words


def _spread(values: np.ndarray, there: np.ndarray, dtype: Any) -> np.ndarray:
    """The values, with NaN for missing ones."""
    if there.all():
        return values.astype(dtype)
    column = np.full(len(there), np.nan)
    column[there] = values
    return column


def _divided(whole: ClientTable, by: str) -> list[ClientTable]:
    """One table per value of a column, in sorted order."""
    check_columns(whole, [by])
    if by in whole.types:
        raise DataError(f"{by!r} is of type {whole.types[by]}, but must be a column of strings or numbers.")
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
        ClientTable(str(value), {name: column[keys == value] for name, column in others.items()}, whole.types)
        for value in values
    ]
