"""Run records: one solve of one method, setting and seed, and the CSV files that keep many of them.

`runs.csv` has one line per run (label, method, seed, seconds, ``setting.*``, ``ledger.*``); `history.csv`
stacks the histories, one line per run and recorded round. Both read back to what was written, to the last
bit: numbers are printed with as many digits as they need, a blank cell means that the run has no such entry.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import ArrayLike

if TYPE_CHECKING:
    from fedstrata.core.counting import Ledger
    from fedstrata.solving.result import Result

Scalar = bool | int | float | str | None
CERTIFIED = ("verdict", "advice", "objective", "value", "relative", "distance")  # that is kept
MEASURED_ON, EVERYONE = "measured_on", "all clients"  # the setting that tells, and what it need not tell


class ReportError(ValueError):
    """A report cannot be written or read; the message says why and what to do."""


@dataclass(frozen=True, eq=False)
class RunRecord:
    """One solve of one method, setting and seed.

    Args:
        label: what tables and legends call it; runs that differ only in their seed share it.
        setting: what tells this run from others of the same label, ``{"H": 5, "partition": "iid"}``.
        seed: its seed.
        history: series of equal length, ``"round"`` among them; kept as int64 or float64.
        ledger: what was communicated and computed; a `Ledger` or a dict. Nested entries are flattened:
            ``{"levels": {"main": {"exchanges": 3}}}`` becomes ``{"levels.main.exchanges": 3}``.
        seconds: its wall-clock time.
        method: the method's name.
        arguments: the method's, as `fedstrata.Method.describe` has them.
        certificate: whether it was solved, where that is known: the ``verdict`` of `fedstrata.certify`, its
            ``advice``, and what it measured; a run that diverged has the verdict alone.

    Raises:
        ReportError: if a field has the wrong form.

    >>> run = RunRecord("A", {"H": 5}, 0, {"round": [0, 1], "loss": [2, 1.0]}, {"bytes_up": 8}, 0.1, "FedAvg")
    >>> run.history["loss"]
    array([2., 1.])
    """

    label: str
    setting: Mapping[str, Scalar]
    seed: int
    history: Mapping[str, np.ndarray]
    ledger: Mapping[str, int | float]
    seconds: float
    method: str
    certificate: Mapping[str, Scalar] = field(default_factory=dict)
    arguments: Mapping[str, Scalar] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.label:
            raise ReportError("a run needs a label")
        who = f"run {self.label!r}, seed {self.seed}"
        history = {n: _series(f"{who}: history[{n!r}]", values) for n, values in self.history.items()}
        if "round" not in history:
            raise ReportError(f"{who}: the history has no 'round', only {sorted(history)}")
        lengths = {name: len(values) for name, values in history.items()}
        if len(set(lengths.values())) > 1:
            raise ReportError(f"{who}: the history's series differ in length: {lengths}")
        if not lengths["round"]:
            raise ReportError(f"{who}: the history is empty; evaluate at least once")
        if not (np.diff(history["round"]) > 0).all():
            raise ReportError(f"{who}: history['round'] does not increase")
        setting = {str(key): _scalar(f"{who}: setting {key!r}", value) for key, value in self.setting.items()}
        if clash := {"label", "method", "seed"} & setting.keys():
            raise ReportError(
                f"{who}: {sorted(clash)} cannot be names of settings, they have their own field"
            )
        set_ = object.__setattr__  # the class is frozen
        set_(self, "history", history)
        set_(self, "setting", setting)
        set_(self, "ledger", _flat(who, as_dict(self.ledger)))
        set_(self, "seed", int(self.seed))
        set_(self, "seconds", float(self.seconds))

    @classmethod
    def of(
        cls, result: Result, label: str, *, seed: int, setting: Mapping[str, Scalar] | None = None
    ) -> Self:
        """The record of a `Result`: of its ``history``, ``ledger``, ``seconds`` and ``method``.

        Where its metrics are of a part of the clients, the setting says so.
        """
        setting = dict(setting or {})
        if result.measured_on != EVERYONE:
            setting[MEASURED_ON] = result.measured_on
        from fedstrata.solving.result import describe_method

        described = result.method if isinstance(result.method, dict) else describe_method(result.method)
        arguments = {
            k: str(v) if type(v) in (list, tuple) else v for k, v in described.items() if k != "name"
        }
        known: dict[str, Scalar] = {"verdict": "diverging"} if result.status == "diverged" else {}
        if result.verdict is not None:
            known = {key: getattr(result.certificate, key) for key in CERTIFIED}
        ledger, method = as_dict(result.ledger), str(described["name"])
        return cls(label, setting, seed, result.history, ledger, result.seconds, method, known, arguments)

    @property
    def verdict(self) -> str:
        """The certificate's verdict; empty if there is none."""
        return str(self.certificate.get("verdict", ""))

    def value(self, key: str) -> Scalar:
        """The run's label, method or seed, or its value of a setting (None where it has none)."""
        if key in ("label", "method", "seed"):
            return getattr(self, key)
        return self.setting.get(key)


def as_dict(ledger: Ledger | Mapping[str, Any]) -> dict[str, Any]:
    """A ledger's entries, whether it is a mapping or a `Ledger`."""
    return dict(ledger) if isinstance(ledger, Mapping) else dict(ledger.to_dict())


PARTS = ("setting", "ledger", "certificate", "arguments")  # of `runs.csv`


def write_runs(runs: Sequence[RunRecord]) -> str:
    """The text of `runs.csv`."""
    keys = [(part, key) for part in PARTS for key in union(getattr(run, part) for run in runs)]
    lines = [["run", "label", "method", "seed", "seconds", *(f"{part}.{key}" for part, key in keys)]]
    for number, run in enumerate(runs):
        own = [(getattr(run, part), key) for part, key in keys]
        cells = [_encode(found[key]) if key in found else "" for found, key in own]
        lines.append([str(number), run.label, run.method, str(run.seed), repr(run.seconds), *cells])
    return to_csv(lines)


def write_history(runs: Sequence[RunRecord]) -> str:
    """The text of `history.csv`."""
    names = union(run.history for run in runs)
    lines: list[list[str]] = [["run", "label", "seed", *names]]
    for number, run in enumerate(runs):
        nothing = [""] * len(run.history["round"])
        columns = [
            [*map(repr, run.history[name].tolist())] if name in run.history else nothing for name in names
        ]
        lines += [[str(number), run.label, str(run.seed), *row] for row in zip(*columns, strict=True)]
    return to_csv(lines)


def read_runs(runs: str, history: str) -> list[RunRecord]:
    """Read the texts of `write_runs` and `write_history`.

    Raises:
        ReportError: if the two do not fit together, or hold something that is not a number.
    """
    head, *lines = _rows("runs.csv", runs)
    series = _read_history(history)
    found = []
    for line in lines:
        cells = dict(zip(head, line, strict=True))
        number = cells.get("run", "")
        if number not in series:
            raise ReportError(f"history.csv has no line of run {number!r}, which runs.csv lists")
        parts: dict[str, Any] = {
            part: {key: _decode(c) for name, c in cells.items() if c and (key := _key(name, part))}
            for part in PARTS
        }
        try:
            label, seed, seconds = cells["label"], int(cells["seed"]), float(cells["seconds"])
            found.append(
                RunRecord(
                    label, seed=seed, seconds=seconds, method=cells["method"], history=series[number], **parts
                )
            )
        except (KeyError, ValueError) as error:
            raise ReportError(f"runs.csv, run {number}: {error}") from error
    return found


def _read_history(text: str) -> dict[str, dict[str, np.ndarray]]:
    head, *lines = _rows("history.csv", text)
    by_run: dict[str, list[list[str]]] = {}
    for line in lines:
        by_run.setdefault(line[0], []).append(line)
    series: dict[str, dict[str, np.ndarray]] = {}
    for number, rows in by_run.items():
        columns = dict(zip(head, zip(*rows, strict=True), strict=True))
        present = {name: cells for name, cells in columns.items() if name not in ("run", "label", "seed")}
        try:
            series[number] = {name: _parse(cells) for name, cells in present.items() if any(cells)}
        except ValueError as error:
            raise ReportError(f"history.csv, run {number}: {error}") from error
    return series


def to_csv(lines: Iterable[Sequence[str]]) -> str:
    """Lines of cells as CSV text, each ended by a line feed.

    >>> print(to_csv([["a", "b,c"]]), end="")
    a,"b,c"
    """
    return "".join(",".join(map(_quoted, line)) + "\n" for line in lines)


def _quoted(cell: str) -> str:
    # Before Python 3.13, csv.writer leaves a carriage return bare, and the reader takes it for a line's end.
    return f'"{cell.replace(chr(34), 2 * chr(34))}"' if re.search('[",\\r\\n]', cell) else cell


def union(mappings: Iterable[Mapping[str, Any]]) -> list[str]:
    """All keys, in the order in which they first appear."""
    return list(dict.fromkeys(key for mapping in mappings for key in mapping))


def _rows(name: str, text: str) -> list[list[str]]:
    rows = list(csv.reader(io.StringIO(text, newline="")))
    if not rows:
        raise ReportError(f"{name} is empty")
    for number, row in enumerate(rows, 1):
        if len(row) != len(rows[0]):
            raise ReportError(
                f"{name}, line {number}: {len(row)} cells where the first line has {len(rows[0])}"
            )
    return rows


def _parse(cells: Sequence[str]) -> np.ndarray:
    try:
        return np.array([int(cell) for cell in cells], np.int64)
    except ValueError:
        return np.array([float(cell) for cell in cells], np.float64)


def _encode(value: Scalar) -> str:
    """A cell that `_decode` reads back: JSON, except that a string that is not JSON stays as it is."""
    if not isinstance(value, str):
        return json.dumps(value)
    return value if value and _decode(value) == value else json.dumps(value)


def _decode(cell: str) -> Scalar:
    try:
        value = json.loads(cell)
    except ValueError:
        return cell
    return cell if isinstance(value, dict | list) else value


def _key(name: str, part: str) -> str:
    """The key of a column ``part.key``; empty for a column of another part."""
    return name.removeprefix(f"{part}.") if name.startswith(f"{part}.") else ""


def _series(what: str, values: ArrayLike) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1:
        raise ReportError(f"{what} has shape {array.shape}; a series has one axis")
    if np.issubdtype(array.dtype, np.integer) or array.dtype == bool:
        return array.astype(np.int64)
    try:
        return array.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise ReportError(f"{what} must hold real numbers, but has the type {array.dtype}") from error


def _scalar(what: str, value: Any) -> Scalar:
    if hasattr(value, "item") and np.ndim(value) == 0:
        value = value.item()
    if not isinstance(value, bool | int | float | str | None):
        raise ReportError(f"{what} is {value!r}; a setting is a number, a string, a truth value or None")
    return value


def _flat(who: str, ledger: Mapping[str, Any]) -> dict[str, int | float]:
    flat: dict[str, int | float] = {}
    for name, entry in ledger.items():
        if isinstance(entry, Mapping):
            flat |= {f"{name}.{inner}": value for inner, value in _flat(who, entry).items()}
        elif isinstance(value := _scalar(f"{who}: ledger entry {name!r}", entry), int | float):
            flat[name] = value
        else:
            raise ReportError(f"{who}: ledger entry {name!r} is {value!r}; an entry is a number")
    return flat
