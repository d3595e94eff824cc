"""Federated data from clients' tables: columns become features, words categories, and gaps means.

A column is an array with an entry per row: numbers (NaN where one is missing), or objects that are words
(None where one is missing). `fedstrata.data.frames` makes such columns of data frames,
`fedstrata.data.files` of CSV files.
"""

from __future__ import annotations

import dataclasses
import os
import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedstrata.data.federated import DataError, FederatedData
from fedstrata.data.preparation import Impute, Preparation, Sample, check_impute, exchange, federated_mean
from fedstrata.support.words import suggest

Columns = Mapping[str, np.ndarray]
_SHOWN = 8  # names that an error lists
_STEPS = 1000  # that float32 must resolve between a feature's least and largest value
_FEW = 20  # rows up to which each may have its own category
_DATE = re.compile(r"(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{2}(\d{2})?)([T ].*)?")


@dataclass(frozen=True)
class ClientTable:
    """A client's rows.

    Attributes:
        name: the client's name.
        columns: name → entries.
        types: name → the source's type, of columns that hold neither numbers nor words.
    """

    name: str
    columns: Columns
    types: Mapping[str, str] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(next(iter(self.columns.values()), ()))


@dataclass(frozen=True, eq=False)
class Encoding:
    """Which columns of a table become ``x`` and ``y``, and how.

    Attributes:
        columns: the features' columns, in order.
        label: the label's column, or None.
        categories: the categories of each column of words; each is a feature, 1 if it holds.
        classes: the words of the label, if it is a word: class c is the c-th of them.
        fill: each feature's replacement for a missing value, or None if none may be missing.
        traffic: the traffic that this needed.
    """

    columns: tuple[str, ...]
    label: str | None
    categories: Mapping[str, tuple[str, ...]]
    classes: tuple[str, ...] | None
    fill: np.ndarray | None = None
    traffic: Counter[str] = field(default_factory=Counter, repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the features: ``age``, ``pain=typical``."""
        words = ((c, self.categories.get(c)) for c in self.columns)
        return tuple(
            n
            for c, categories in words
            for n in ((c,) if categories is None else (f"{c}={w}" for w in categories))
        )

    def apply(self, raw: Any) -> Sample:
        """The samples of a data frame, a dict of columns or a CSV file; ``y`` if the label is present."""
        from fedstrata.data.files import read_csv
        from fedstrata.data.frames import table_of

        if isinstance(raw, str | os.PathLike):
            table = read_csv(Path(raw))
        else:
            table = table_of(raw, "the new data", [*self.columns, *([self.label] if self.label else [])])
        check_columns(table, self.columns)
        samples = {"x": self.complete(self.matrix(table), table.name)}
        if self.label is not None and self.label in table.columns:
            samples["y"] = self.labels(table)
        return samples

    def matrix(self, table: ClientTable) -> np.ndarray:
        """The features of a table's rows in float64, NaN where a value is missing."""
        blocks = [self._block(table, column) for column in self.columns]
        return np.concatenate(blocks, axis=1)

    def _block(self, table: ClientTable, column: str) -> np.ndarray:
        values = table.columns[column]
        if column not in self.categories:
            if not _is_number(values):
                word, row = _odd(values)
                raise DataError(
                    f"{table.name}: {column!r} has {word!r} in row {row}, where a number is expected."
                )
            with np.errstate(over="ignore"):  # a sample's features are float32
                infinite = np.isinf(values.astype(np.float32))
            if infinite.any():
                row = int(infinite.argmax())
                raise DataError(
                    f"{table.name}: {column!r} is infinite in row {row} as float32: {values[row]}. Drop such "
                    "rows, or take another unit."
                )
            return values.astype(np.float64)[:, None]
        known = self.categories[column]
        block = np.full((len(values), len(known)), np.nan)
        there = ~_missing(values)
        block[there] = _codes(table, column, there, known)[:, None] == np.arange(len(known))
        return block

    def complete(self, x: np.ndarray, who: str) -> np.ndarray:
        """The features in float32, without missing values.

        Raises:
            DataError: if a value is missing and has no replacement.
        """
        gaps = np.isnan(x)
        if not gaps.any():
            return x.astype(np.float32)
        if self.fill is None:
            raise DataError(f"{who}: {self.missing([x])}")
        return np.where(gaps, self.fill, x).astype(np.float32)

    def missing(self, x: Sequence[np.ndarray]) -> str:
        """The columns in which values are missing, in words; empty if none."""
        sources = [column for column in self.columns for _ in self.categories.get(column, ("",))]
        counts = dict(zip(sources, sum(np.isnan(rows).sum(axis=0) for rows in x), strict=True))
        words = [f"{column!r} ({count})" for column, count in counts.items() if count]
        if not words:
            return ""
        return (
            f"Values are missing in the columns {_some(words, str)}. Give impute='mean' to put the "
            "federation's mean in their place (found from sums, of training rows), or drop rows or columns "
            "first."
        )

    def labels(self, table: ClientTable) -> np.ndarray:
        """Whole numbers as int32, others as float32, words as the numbers of their classes."""
        assert self.label is not None
        values = table.columns[self.label]
        missing = _missing(values)
        if missing.any():
            raise DataError(
                f"{table.name}: the label {self.label!r} is missing in {int(missing.sum())} rows, first in "
                f"row {int(missing.argmax())}. Drop these rows."
            )
        if self.classes is not None:
            return _codes(table, self.label, ~missing, self.classes).astype(np.int32)
        if not _is_number(values):
            raise DataError(f"{table.name}: the label {self.label!r} holds words such as {_first(values)!r}.")
        if values.dtype.kind == "f":
            return values.astype(np.float32)
        small = np.iinfo(np.int32)
        fits = len(values) == 0 or small.min <= values.min() <= values.max() <= small.max
        return values.astype(np.int32) if fits else values


def federate(
    tables: Sequence[ClientTable],
    *,
    label: str,
    features: Sequence[str] | None = None,
    valid_fraction: float = 0.0,
    test_fraction: float = 0.0,
    seed: int = 0,
    encode: bool = False,
    impute: Impute = None,
    extra: Sequence[str] = (),
    server: Any = None,
    fold: tuple[int, int] | None = None,
) -> FederatedData:
    """Federated data of the clients' tables; see `FederatedData.from_dataframe` for the arguments.

    With ``fold=(k, K)`` the k-th of K parts is held out for the test, in place of ``test_fraction``.
    """
    if fold is not None:
        test_fraction = _fraction(*fold)
    _check_fractions(valid_fraction, test_fraction)
    check_impute(impute)
    chosen = _chosen(tables, label, features, extra)
    tables = [_like_others(table, tables, [*chosen, label, *extra]) for table in tables]
    words = _words(tables, chosen, label, encode)
    categories, traffic = _categories(tables, words)
    classes = categories.pop(label, None)
    encoding = Encoding(tuple(chosen), label, categories, classes, None, traffic)
    y = [encoding.labels(table) for table in tables]
    x = [encoding.matrix(table) for table in tables]
    _check_digits(encoding, x)
    parts = [
        _split(labels, valid_fraction, test_fraction, fold, np.random.default_rng((seed, i)), tables[i].name)
        for i, labels in enumerate(y)
    ]
    encoding = _imputing(encoding, x, parts, impute)
    whole = [
        {
            "x": encoding.complete(arrays, table.name),
            "y": labels,
            **{name: dataclasses.replace(encoding, label=name, classes=None).labels(table) for name in extra},
        }
        for arrays, labels, table in zip(x, y, tables, strict=True)
    ]

    def part(p: int) -> list[Sample]:
        return [
            {name: array[rows[p]] for name, array in arrays.items()}
            for arrays, rows in zip(whole, parts, strict=True)
        ]

    test = None
    if test_fraction > 0:
        held_out = part(2)
        owner = np.repeat(np.arange(len(tables), dtype=np.int32), [len(arrays["y"]) for arrays in held_out])
        test = {name: np.concatenate([arrays[name] for arrays in held_out]) for name in held_out[0]}
        test["client"] = owner
    held = None if server is None else encoding.apply(server)
    valid = part(1) if valid_fraction > 0 else None
    data = FederatedData.from_clients(part(0), valid=valid, test=test, server=held)
    names = tuple(table.name for table in tables)
    return dataclasses.replace(data, names=names, preparation=Preparation((encoding,)))


def check_columns(table: ClientTable, wanted: Sequence[str]) -> None:
    """Raise for a missing column."""
    for column in wanted:
        if column not in table.columns and column not in table.types:
            known = [*table.columns, *table.types]
            raise DataError(
                f"{table.name} has no column {column!r}{suggest(column, known)} It has {_some(known)}."
            )


def _chosen(
    tables: Sequence[ClientTable], label: str, features: Sequence[str] | None, extra: Sequence[str] = ()
) -> list[str]:
    if not tables:
        raise DataError("The list of clients is empty: give at least one table.")
    if isinstance(features, str):
        raise DataError(f"features is a list of columns: write features=[{features!r}].")
    if isinstance(extra, str) or {"x", "y", "client", label} & set(extra):
        raise DataError(
            f"extra is a list of columns beside the label {label!r}, none of them called 'x', 'y' or "
            f"'client', but is {extra!r}."
        )
    first = tables[0]
    every = [*first.columns, *first.types]
    others = [column for column in every if column != label and column not in extra]
    chosen = others if features is None else list(features)
    if not chosen:
        raise DataError(f"The table has no features beside {label!r}.")
    if label in chosen:
        raise DataError(f"{label!r} is the label and cannot be a feature too.")
    if len(set(chosen)) < len(chosen):
        raise DataError(f"A feature is named twice: {_some(chosen)}.")
    for table in tables:
        check_columns(table, [label, *extra])
        if features is None:
            _check_same(first, table)
        check_columns(table, chosen)
        if table.rows == 0:
            raise DataError(f"{table.name} has no rows. Leave out clients without data.")
    return chosen


def _check_same(first: ClientTable, table: ClientTable) -> None:
    """Raise if one of two clients lacks a column of the other."""
    for one, other in ((table, first), (first, table)):
        its, others = ([*t.columns, *t.types] for t in (one, other))
        if more := [column for column in its if column not in others]:
            raise DataError(
                f"{one.name} has a column {more[0]!r} that {other.name} lacks. Name those to use, "
                "features=[…]."
            )


def _like_others(table: ClientTable, tables: Sequence[ClientTable], wanted: Sequence[str]) -> ClientTable:
    """Give a column without any value the kind that it has at the other clients."""
    columns = {}
    for column in wanted:
        values = table.columns.get(column)
        if values is not None and _is_number(values) and _missing(values).all():
            others = [t.columns[column] for t in tables if column in t.columns]
            if any(not _is_number(other) for other in others):
                columns[column] = np.full(len(values), None, object)
    return dataclasses.replace(table, columns={**table.columns, **columns}) if columns else table


def _words(tables: Sequence[ClientTable], chosen: Sequence[str], label: str, encode: bool) -> list[str]:
    """The columns that hold words; raises if words are not allowed."""
    found: dict[str, str] = {}
    for column in (*chosen, label):
        for table in tables:
            if column in table.types:
                raise DataError(
                    f"{table.name}: {column!r} is of type {table.types[column]}. Turn it into numbers first, "
                    "such as days since a date, or leave it out, features=[…]."
                )
        kinds = {_is_number(table.columns[column]): table for table in reversed(tables)}
        if len(kinds) == 2:
            word, row = _odd(kinds[False].columns[column])
            raise DataError(
                f"{column!r} is numeric in {kinds[True].name}, but {kinds[False].name} has {word!r} in row "
                f"{row}."
            )
        if False in kinds:
            there = [word for t in tables for word in t.columns[column] if word is not None]
            if there and all(map(_DATE.fullmatch, there)):
                raise DataError(
                    f"{column!r} holds dates such as {there[0]!r}. Turn it into numbers first, such as days "
                    "since a date, or leave it out, features=[…]."
                )
            found[column] = f"{column!r} (such as {_odd(kinds[False].columns[column])[0]!r})"
    if found and not encode:
        raise DataError(
            f"These columns are not numbers: {_some(list(found.values()), str)}. Give encode=True to make a "
            "feature of each category (a number of each class, for the label), name the columns to use, "
            "features=[…], or turn them into numbers first."
        )
    return list(found)


def _categories(
    tables: Sequence[ClientTable], words: Sequence[str]
) -> tuple[dict[str, tuple[str, ...]], Counter[str]]:
    """The union of the clients' categories, over all rows: a vocabulary reveals nothing about the test."""
    if not words:
        return {}, Counter()
    by_client = [{c: sorted(set(t.columns[c][~_missing(t.columns[c])])) for c in words} for t in tables]
    union = {c: tuple(sorted({word for lists in by_client for word in lists[c]})) for c in words}
    for column, categories in union.items():
        if not categories:
            raise DataError(f"{column!r} has no value in any row: leave it out, features=[…].")
    for column in words:
        _doubt(tables, column, union[column])
    traffic = exchange(len(tables), 0, 0)
    traffic["main/gathers"] = 1  # the server sees who has which category
    traffic["main/bytes_up"] = sum(_size(lists) for lists in by_client)
    traffic["main/bytes_down"] = len(tables) * _size(union)
    return union, traffic


def _doubt(tables: Sequence[ClientTable], column: str, categories: Sequence[str]) -> None:
    """Warn of words by accident: numbers with a few words among them, names, texts, Yes beside yes."""
    first: dict[str, str] = {}
    if twice := [word for word in categories if first.setdefault(word.casefold(), word) != word]:
        warnings.warn(
            f"{column!r} has {first[twice[0].casefold()]!r} and {twice[0]!r}, which count as two categories. "
            "If they are one, write them in the same way.",
            stacklevel=2,
        )
    rows = sum(int((~_missing(table.columns[column])).sum()) for table in tables)
    other = [word for word in categories if not _reads_as_number(word)]
    if 0 < 2 * len(other) <= len(categories):
        why = (
            f"{column!r} has numbers, and words such as {other[0]!r}: every number becomes a category. If "
            "the word marks missing values, declare it (from_csv(missing=[…]))."
        )
    elif rows >= _FEW and 2 * len(categories) > rows:
        why = (
            f"{column!r} has {len(categories)} categories in {rows} rows, such as {categories[0]!r}: is it "
            "an identifier, a text, a number with a comma?"
        )
    else:
        return
    warnings.warn(f"{why} Otherwise turn it into numbers, or leave it out, features=[…].", stacklevel=2)


def _size(lists: Mapping[str, Sequence[str]]) -> int:
    """The bytes of words, each with a terminator."""
    return sum(len(word.encode()) + 1 for words in lists.values() for word in words)


def _check_digits(encoding: Encoding, x: Sequence[np.ndarray]) -> None:
    """Warn of features that float32 cannot resolve, such as seconds since 1970."""
    low, high = (f.reduce([f.reduce(features, axis=0) for features in x]) for f in (np.fmin, np.fmax))
    for name, least, most in zip(encoding.names, low, high, strict=True):
        largest = max(abs(least), abs(most))
        if 0 < (most - least) < _STEPS * np.finfo(np.float32).eps * largest:
            warnings.warn(
                f"{name!r} lies between {least:.12g} and {most:.12g}, whose differences float32 rounds: "
                "subtract a number near them first, or leave it out, features=[…].",
                stacklevel=2,
            )


def _imputing(
    encoding: Encoding, x: Sequence[np.ndarray], parts: Sequence[Sequence[np.ndarray]], impute: Impute
) -> Encoding:
    """The encoding with the means of the training rows, if requested."""
    if impute is None:
        if missing := encoding.missing(x):
            raise DataError(missing)
        return encoding
    mean, traffic = federated_mean([features[rows[0]] for features, rows in zip(x, parts, strict=True)])
    if empty := [name for name, m in zip(encoding.names, mean, strict=True) if np.isnan(m)]:
        raise DataError(
            f"No training row of any client has a value in {_some(empty)}: leave it out, features=[…]."
        )
    return dataclasses.replace(encoding, fill=mean, traffic=encoding.traffic + traffic)


def _split(
    labels: np.ndarray,
    valid: float,
    test: float,
    fold: tuple[int, int] | None,
    rng: np.random.Generator,
    who: str,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rows of training, validation and test, in order, stratified by class to within one."""
    rows = len(labels)
    order = rng.permutation(rows)
    if labels.dtype.kind != "f":
        order = order[np.argsort(labels[order], kind="stable")]
    tested = _every(rows, round(test * rows)) if fold is None else np.arange(rows) % fold[1] == fold[0]
    rest = order[~tested]
    validated = _every(len(rest), round(valid * rows))
    parts = rest[~validated], rest[validated], order[tested]
    for name, part, wanted in zip(("training", "validation"), parts, (True, valid > 0), strict=False):
        if wanted and len(part) == 0:
            raise DataError(
                f"{who} has {rows} rows: too few for valid_fraction={valid} and test_fraction={test}: no "
                f"{name} row is left."
            )
    return tuple(np.sort(part) for part in parts)  # type: ignore[return-value]


def _every(total: int, chosen: int) -> np.ndarray:
    """A mask with ``chosen`` of ``total`` places, evenly spread."""
    steps = np.floor(np.arange(total + 1) * (chosen / total if total else 0) + 0.5 + 1e-9)
    return np.diff(steps) > 0


def _fraction(k: int, folds: int) -> float:
    if folds < 2 or not 0 <= k < folds:
        raise DataError(f"fold=(k, K) needs K ≥ 2 parts and k in 0 … K − 1, but is {(k, folds)}.")
    return 1 / folds


def _check_fractions(valid: float, test: float) -> None:
    for name, fraction in (("valid_fraction", valid), ("test_fraction", test)):
        if not 0 <= fraction < 1:
            raise DataError(f"{name} must be in [0, 1), but is {fraction}.")
    if valid + test >= 1:
        raise DataError(f"valid_fraction + test_fraction is {valid + test}: nothing is left to train on.")


def _codes(table: ClientTable, column: str, rows: np.ndarray, known: Sequence[str]) -> np.ndarray:
    code = {word: c for c, word in enumerate(known)}
    words = [str(word) for word in table.columns[column][rows]]
    if new := sorted(set(words) - code.keys()):
        raise DataError(
            f"{table.name}: {column!r} has {new[0]!r}, which no client had in training; known are "
            f"{_some(known)}."
        )
    return np.array([code[word] for word in words], np.int64)


def _is_number(values: np.ndarray) -> bool:
    return values.dtype.kind != "O"


def _missing(values: np.ndarray) -> np.ndarray:
    if values.dtype.kind == "O":
        return np.array([value is None for value in values], bool)
    return np.isnan(values) if values.dtype.kind == "f" else np.zeros(len(values), bool)


def _first(values: np.ndarray) -> Any:
    return next((value for value in values if value is not None), None)


def _odd(values: np.ndarray) -> tuple[Any, int]:
    """The first entry that is not a number, and its row; if all are numbers, the first of them."""
    there = [(value, row) for row, value in enumerate(values) if value is not None]
    return next((pair for pair in there if not _reads_as_number(pair[0])), there[0])


def _reads_as_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _some(words: Sequence[str], show: Any = repr) -> str:
    more = f" and {len(words) - _SHOWN} more" if len(words) > _SHOWN else ""
    return ", ".join(map(show, words[:_SHOWN])) + more
