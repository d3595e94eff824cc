"""The preparation of samples, kept so that new data can be prepared in the same way.

    data = fs.data.standardize(data)
    data.preparation.apply(new)          # the same means and deviations
    data.preparation.save("prepared.json")
    data.preparation.ledger              # the traffic that this needed

Statistics are those of the whole federation's training samples, computed from sums that clients can send
without revealing a sample. They equal scikit-learn's on the pooled samples.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import numpy as np

from fedstrata.core.counting import Ledger
from fedstrata.core.types import PyTree
from fedstrata.data.federated import DataError, FederatedData
from fedstrata.data.samples import by_name

Impute = Literal["mean"] | None
Sample = dict[str, np.ndarray]


class Step(Protocol):
    """One step of a preparation."""

    @property
    def traffic(self) -> Counter[str]:
        """The traffic that it needed."""

    @property
    def names(self) -> tuple[str, ...] | None:
        """The names of the columns of ``x``, if they came from a table."""

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The names of the classes, if the label was a word."""

    def apply(self, raw: Any) -> Sample:
        """Apply it to new data."""


@dataclass(frozen=True)
class Preparation:
    """The steps that made a data set's samples; `FederatedData.preparation`."""

    steps: tuple[Step, ...]

    def apply(self, raw: Any) -> Sample:
        """Prepare new data like the samples.

        Args:
            raw: the input of the first step: a data frame, a dict of columns or a CSV file if the data came
                from a table (the label may be missing), else a dict of arrays.
        """
        for step in self.steps:
            raw = step.apply(raw)
        return raw

    def save(self, file: str | os.PathLike[str]) -> Path:
        """Write it as JSON, to prepare data in the same way elsewhere; returns the path.

        Raises:
            DataError: if a step is not one of FedStrata's own.
        """
        from fedstrata.data.saved import write

        return write(self, Path(file))

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> Preparation:
        """Read what `save` wrote.

        Raises:
            DataError: if the file is not a saved preparation.
        """
        from fedstrata.data.saved import read

        return read(Path(file))

    @property
    def ledger(self) -> Ledger:
        """The traffic between clients and server."""
        return Ledger.from_counts(0, sum((step.traffic for step in self.steps), Counter()))

    @property
    def features(self) -> tuple[str, ...] | None:
        """The names of the columns of ``x``, if they came from a table."""
        return next((step.names for step in self.steps if step.names is not None), None)

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The names of the classes, by number, if the label was a word."""
        return next((step.classes for step in self.steps if step.classes is not None), None)

    def then(self, step: Step) -> Preparation:
        """Add a step."""
        return dataclasses.replace(self, steps=(*self.steps, step))


def exchange(clients: int, up: int, down: int, size: int = 8) -> Counter[str]:
    """The counts of one exchange of sums: ``up`` numbers from every client, and ``down`` to it."""
    counts = {"exchanges": 1, "floats_up": up, "floats_down": down}
    counts |= {"bytes_up": up * size, "bytes_down": down * size}
    return Counter({f"main/{name}": n if name == "exchanges" else n * clients for name, n in counts.items()})


def federated_mean(clients: Sequence[np.ndarray]) -> tuple[np.ndarray, Counter[str]]:
    """The mean over all clients' samples that are not NaN (NaN if all are), from sums and counts."""
    count = sum((~np.isnan(own)).sum(axis=0) for own in clients)
    total = sum(np.nansum(own, axis=0, dtype=np.float64) for own in clients)
    mean = np.divide(total, count, out=np.full(np.shape(total), np.nan), where=np.asarray(count) > 0)
    return mean, exchange(len(clients), 2 * mean.size, mean.size)


@dataclass(frozen=True, eq=False)
class Scaling:
    """``(x − mean)/deviation`` for some arrays; with ``impute``, missing values become the mean."""

    mean: Mapping[str, np.ndarray]
    deviation: Mapping[str, np.ndarray]
    impute: Impute = None
    traffic: Counter[str] = field(default_factory=Counter, repr=False)
    names: ClassVar[None] = None
    classes: ClassVar[None] = None

    def apply(self, raw: Any) -> Sample:
        """New samples on the same scale; arrays of other names stay as they are."""
        raw = dict(raw)
        if missing := [name for name in self.mean if name not in raw]:
            raise DataError(f"The samples have no {missing[0]!r}; they have {', '.join(map(repr, raw))}.")
        for name, mean in self.mean.items():
            given = np.asarray(raw[name])
            if given.shape[1:] != mean.shape:
                raise DataError(f"{name!r} has samples of shape {given.shape[1:]}, but needs {mean.shape}.")
            scaled = (given - mean) / self.deviation[name]
            if self.impute is not None:
                scaled = np.where(np.isnan(scaled), 0.0, scaled)
            raw[name] = scaled.astype(given.dtype if given.dtype.kind == "f" else np.float32)
        return raw


def standardize(
    data: FederatedData | Sequence[Mapping[str, Any]], *, of: Sequence[str] = ("x",), impute: Impute = None
) -> FederatedData:
    """Features with mean 0 and deviation 1 over the training samples of the whole federation.

    Two exchanges find them: clients send counts and sums, learn the means, send the sums of squares about
    them, and learn the deviations. A feature that does not vary is only centred. Validation, test and server
    data are put on the same scale, and `FederatedData.preparation` keeps it for new data.

    Args:
        data: federated data; or a list with a dict of arrays per client, in which a NaN is a missing value.
        of: the names of the arrays.
        impute: ``"mean"`` replaces missing values with the federation's mean.

    Raises:
        DataError: if an array is absent, does not hold numbers, or lacks values while ``impute`` is None.

    >>> data = FederatedData.from_clients([{"x": np.array([[1.0], [3.0]])}, {"x": np.array([[5.0]])}])
    >>> scaled = standardize(data)
    >>> scaled.train["x"].ravel().round(3).tolist(), scaled.preparation.ledger.bytes_up
    ([-1.225, 0.0, 1.225], 48)
    """
    check_impute(impute)
    if isinstance(data, FederatedData):
        data.need_memory("standardize")
        step = _scaling([data.client(i) for i in range(data.clients)], of, impute)
        before: Any = data.preparation or Preparation(())
        parts: dict[str, Any] = {part: step.apply(samples) for part, samples in data.parts.items()}
        return dataclasses.replace(data, **parts, preparation=before.then(step))
    clients = list(data)
    step = _scaling(clients, of, impute)
    made = FederatedData.from_clients([step.apply(own) for own in clients])
    return dataclasses.replace(made, preparation=Preparation((step,)))


def _scaling(clients: Sequence[PyTree], of: Sequence[str], impute: Impute) -> Scaling:
    """Means and deviations of the clients' samples."""
    mean, deviation = {}, {}
    traffic: Counter[str] = Counter()
    for name in of:
        arrays = [_numbers(own, name, i) for i, own in enumerate(clients)]
        if len(shapes := {array.shape[1:] for array in arrays}) > 1:
            raise DataError(f"The clients' {name!r} have samples of different shapes: {sorted(shapes)}.")
        missing = [i for i, array in enumerate(arrays) if np.isnan(array).any()]
        if missing and impute is None:
            raise DataError(
                f"client {missing[0]}: {name!r} has missing values (NaN). Give impute='mean' to put the "
                "federation's mean in their place, or drop these samples."
            )
        mean[name], counts = federated_mean(arrays)
        if np.isnan(mean[name]).any():
            raise DataError(f"{name!r} has a feature without a value at any client: leave it out.")
        traffic += counts
        squares = sum(np.nansum((array - mean[name]) ** 2, axis=0) for array in arrays)
        deviation[name] = np.sqrt(squares / sum(len(array) for array in arrays))
        # The deviation of a constant is rounding error alone, if its mean was rounded.
        noise = 10 * np.finfo(float).eps * np.abs(mean[name])
        deviation[name] = np.where(deviation[name] > noise, deviation[name], 1.0)
        traffic += exchange(len(clients), mean[name].size, mean[name].size)
    return Scaling(mean, deviation, impute, traffic)


def check_impute(impute: object) -> None:
    """Raise for an unknown way to impute."""
    if impute not in (None, "mean"):
        raise DataError(
            f"impute must be 'mean' (the federation's, found from sums) or None, but is {impute!r}."
        )


def _numbers(samples: PyTree, name: str, client: int) -> np.ndarray:
    known = list(by_name(samples))
    if name not in known:
        has = f"it has {', '.join(map(repr, known))}" if known else "its samples are not a dict of arrays"
        raise DataError(f"client {client} has no array {name!r}; {has}. Name the arrays, of=('x',).")
    array = np.asarray(samples[name])
    if array.dtype.kind not in "biuf" or array.ndim == 0:
        raise DataError(f"client {client}: {name!r} is not an array of numbers (dtype {array.dtype}).")
    return array.astype(np.float64)
