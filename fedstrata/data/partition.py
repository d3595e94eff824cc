"""Partitioners: which client holds which sample.

A partitioner is a frozen dataclass with one method,

    split(arrays, clients, rng, label="y") -> [indices of client 0, indices of client 1, ...]

whose index arrays are disjoint, cover every sample and are never empty. Each client's indices come in random
order, so that a prefix of them is a random sample of that client. `draw` shows the split as a picture.
"""

import abc
import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np

from fedstrata.core.hyperparameters import Count, Field, Number, check_fields
from fedstrata.support.lazy import extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Arrays = Mapping[str, np.ndarray]
Parts = list[np.ndarray]
Rng = np.random.Generator

Concentration = Annotated[float, Number("a finite number > 0 (the limit ∞ is IID())", 0.0, open_low=True)]

_REDRAWS = 20  # Dirichlet draws before short clients are topped up


@dataclasses.dataclass(frozen=True)
class Partitioner(abc.ABC):
    """Base of the partitioners: the checks, the random order and the picture."""

    def __post_init__(self) -> None:
        check_fields(self)

    def split(self, arrays: Arrays, clients: int, rng: Rng, label: str = "y") -> Parts:
        """Divides the samples among the clients.

        Args:
            arrays: Named arrays whose first axis is the sample.
            clients: The number of clients.
            rng: The source of all randomness of the split.
            label: Name of the array that holds the class of each sample.

        Returns:
            One array of sample indices per client: disjoint, covering, non-empty, in random order.

        Raises:
            ValueError: If the arrays disagree in length, or there are fewer samples than clients.
            KeyError: If the split needs an array that is missing.
        """
        total = _samples(arrays)
        Field.of(Count).check(str(self), "clients", clients)
        if clients > total:
            raise ValueError(f"{clients} clients need at least {clients} samples, but there are {total}.")
        parts = self._split(arrays, total, clients, rng, label)
        return [rng.permutation(part) for part in parts]

    @abc.abstractmethod
    def _split(self, arrays: Arrays, total: int, clients: int, rng: Rng, label: str) -> Parts:
        """The rule itself; its arguments have been checked."""

    def draw(
        self, arrays: Arrays, clients: int, seed: int = 0, label: str = "y", path: str | Path | None = None
    ) -> "Figure":
        """Draws the split that `FederatedData.from_arrays` makes: each client's samples, by class.

        Args:
            arrays: Named arrays whose first axis is the sample.
            clients: The number of clients; of more than 60, only sizes are drawn.
            seed: Seed of the split, `np.random.default_rng(seed)`.
            label: Name of the class array; if it is absent or continuous, only sizes are drawn.
            path: Where to save the picture, if anywhere; the suffix chooses the format.

        Returns:
            The matplotlib figure.
        """
        from fedstrata.data.federated import FederatedData

        with extra("lab", "The picture of a split"):
            from fedstrata.lab.report.split import figure_of

        data = FederatedData.from_arrays(dict(arrays), clients, self, label=label, seed=seed)
        figure = figure_of(data, label)
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure


@dataclasses.dataclass(frozen=True)
class IID(Partitioner):
    """Every client holds a random sample of the whole; sizes differ by at most one.

    >>> parts = IID().split({"y": np.arange(7)}, 3, np.random.default_rng(0))
    >>> [len(part) for part in parts]
    [3, 2, 2]
    """

    def _split(self, arrays: Arrays, total: int, clients: int, rng: Rng, label: str) -> Parts:
        return np.array_split(rng.permutation(total), clients)


@dataclasses.dataclass(frozen=True)
class Dirichlet(Partitioner):
    """Label skew: each class is shared out in Dirichlet proportions over the clients.

        p_c ~ Dir(α 1_m)  for every class c;   client i gets the share p_{c,i} of class c

    α → ∞ is the iid split, α → 0 gives each class to one client. This is the per-class form that most
    federated benchmarks use (Yurochkin et al. 2019); Hsu et al. (2019) draw the classes' proportions per
    client instead, which keeps the sizes equal. Draws that leave a client with fewer than `min_size` samples
    are repeated up to twenty times; after that the short clients are topped up from the largest ones.

    Args:
        alpha: The concentration α > 0.
        min_size: The fewest samples a client may hold.

    >>> Dirichlet(alpha=0.3)
    Dirichlet(alpha=0.3, min_size=1)
    """

    alpha: Concentration
    min_size: Count = 1

    def _split(self, arrays: Arrays, total: int, clients: int, rng: Rng, label: str) -> Parts:
        _check_min_size(self.min_size, clients, total)
        classes, members = _classes(arrays, label, "Dirichlet")
        by_class = [np.flatnonzero(members == c) for c in range(len(classes))]
        for _ in range(_REDRAWS):
            owner = np.empty(total, dtype=np.int64)
            for indices in by_class:
                owner[rng.permutation(indices)] = _shares(self.alpha, len(indices), clients, rng)
            sizes = np.bincount(owner, minlength=clients)
            if sizes.min() >= self.min_size:
                break
        while sizes.min() < self.min_size:
            poor, rich = int(sizes.argmin()), int(sizes.argmax())
            moved = min(self.min_size - sizes[poor], sizes[rich] - self.min_size)
            owner[rng.choice(np.flatnonzero(owner == rich), size=moved, replace=False)] = poor
            sizes[poor] += moved
            sizes[rich] -= moved
        return [np.flatnonzero(owner == i) for i in range(clients)]


@dataclasses.dataclass(frozen=True)
class OneClass(Partitioner):
    """One dominant class per client: the heterogeneity level q of FedMSA's experiments.

        client i:  ⌊q n⌋ samples of class i mod C, the rest from whatever remains;   n = ⌊N/m⌋

    All clients have the same size, to within one sample. A class that is too small to give ⌊q n⌋ samples to
    each of its clients is shared evenly among them. The gaps are filled uniformly from what is left over.

    q = 0 is the iid split; q = 1 gives each client one class only, as far as the classes are large enough.
    So q measures heterogeneity, in the paper's text (section 4) and in its published code alike.

    Args:
        q: The fraction of a client's samples that come from its own class, in [0, 1].

    >>> labels = np.repeat([0, 1], 50)
    >>> first, second = OneClass(1.0).split({"y": labels}, 2, np.random.default_rng(0))
    >>> set(labels[first].tolist()), set(labels[second].tolist())
    ({0}, {1})
    """

    q: Annotated[float, Number("in [0, 1] (0: iid, 1: one class per client)", 0.0, 1.0)]

    def _split(self, arrays: Arrays, total: int, clients: int, rng: Rng, label: str) -> Parts:
        classes, members = _classes(arrays, label, "OneClass")
        sizes = [len(part) for part in np.array_split(np.arange(total), clients)]
        wanted = math.floor(self.q * (total // clients) + 1e-9)  # 0.29 * 100 is 28.999…
        primary: list[np.ndarray] = [np.empty(0, dtype=np.int64)] * clients
        for c in range(len(classes)):
            holders = range(c, clients, len(classes))
            if holders:
                pool = rng.permutation(np.flatnonzero(members == c))
                count = min(wanted, len(pool) // len(holders))
                for j, i in enumerate(holders):
                    primary[i] = pool[j * count : (j + 1) * count]
        free = np.ones(total, dtype=bool)
        free[np.concatenate(primary)] = False
        gaps = np.cumsum([size - len(part) for size, part in zip(sizes, primary, strict=True)])
        fill = np.split(rng.permutation(np.flatnonzero(free)), gaps[:-1])
        return [np.concatenate(pair) for pair in zip(primary, fill, strict=True)]


@dataclasses.dataclass(frozen=True)
class ByKey(Partitioner):
    """The natural split: samples with the same key (a site, a writer, a region) stay together.

    With as many clients as key values, client i holds the i-th value in sorted order. With fewer clients the
    values are grouped, the most frequent first, each into the group that is smallest so far.

    Args:
        key: Name of the array that holds the key of each sample.

    >>> arrays = {"x": np.zeros(5), "site": np.array(["b", "a", "b", "c", "a"])}
    >>> [sorted(part.tolist()) for part in ByKey("site").split(arrays, 3, np.random.default_rng(0))]
    [[1, 4], [0, 2], [3]]
    """

    key: Annotated[str, "the name of an array"]

    def _split(self, arrays: Arrays, total: int, clients: int, rng: Rng, label: str) -> Parts:
        values, members = _values(arrays, self.key, "ByKey")
        if clients > len(values):
            raise ValueError(
                f"{clients} clients asked for, but {self.key!r} has only {len(values)} different values; "
                f"ask for at most {len(values)} clients."
            )
        group = np.arange(len(values))
        if clients < len(values):
            counts = np.bincount(members)
            shuffled = rng.permutation(len(values))  # ties between equal counts are broken at random
            sizes = np.zeros(clients, dtype=np.int64)
            for value in shuffled[np.argsort(-counts[shuffled], kind="stable")]:
                group[value] = sizes.argmin()
                sizes[group[value]] += counts[value]
        return [np.flatnonzero(group[members] == i) for i in range(clients)]


@dataclasses.dataclass(frozen=True)
class QuantitySkew(Partitioner):
    """Sizes differ, distributions do not: sizes in Dirichlet proportions, samples at random.

        p ~ Dir(α 1_m);   n_i ≈ n_min + p_i (N − m n_min)

    Args:
        alpha: The concentration α > 0; large values give equal sizes.
        min_size: n_min, the fewest samples a client may hold.

    >>> parts = QuantitySkew(0.5).split({"y": np.zeros(100)}, 4, np.random.default_rng(0))
    >>> sum(len(part) for part in parts)
    100
    """

    alpha: Concentration
    min_size: Count = 1

    def _split(self, arrays: Arrays, total: int, clients: int, rng: Rng, label: str) -> Parts:
        _check_min_size(self.min_size, clients, total)
        floor = np.repeat(np.arange(clients), self.min_size)
        rest = _shares(self.alpha, total - len(floor), clients, rng)
        owner = rng.permutation(np.concatenate([floor, rest]))
        return [np.flatnonzero(owner == i) for i in range(clients)]


@dataclasses.dataclass(frozen=True)
class Shards(Partitioner):
    """A few classes per client: the pathological split of McMahan et al. (2017).

    The samples are sorted by class and cut into m·k shards of equal size (to within one); every client gets k
    of them at random. A client then holds about k classes, more where a shard spans two.

    Args:
        per_client: k, the shards of a client.

    >>> labels = np.repeat([0, 1, 2, 3], 25)
    >>> parts = Shards(2).split({"y": labels}, 2, np.random.default_rng(0))
    >>> [len(set(labels[part].tolist())) for part in parts], [len(part) for part in parts]
    ([2, 2], [50, 50])
    """

    per_client: Count = 2

    def _split(self, arrays: Arrays, total: int, clients: int, rng: Rng, label: str) -> Parts:
        shards = clients * self.per_client
        if shards > total:
            raise ValueError(
                f"{clients} clients with {self.per_client} shards each need {shards} samples, but there are "
                f"only {total}; lower `per_client` or the number of clients."
            )
        _, members = _classes(arrays, label, "Shards")
        order = rng.permutation(total)  # samples of one class come together at random
        cut = np.array_split(order[np.argsort(members[order], kind="stable")], shards)
        dealt = rng.permutation(shards).reshape(clients, self.per_client)
        return [np.concatenate([cut[shard] for shard in hand]) for hand in dealt]


@dataclasses.dataclass(frozen=True)
class FeatureShift(Partitioner):
    """Feature shift with equal labels: samples of each class are sorted along a direction of the features.

        s = ⟨u, x⟩ + σ noise, both of deviation one;   client i of m gets the i-th m-th of each class by s

    With ``noise`` 0 the clients' features do not overlap along u, and noise → ∞ is the iid split. Classes are
    shared out evenly, so that only the features differ. A continuous label is one class.

    Args:
        noise: the noise level σ ≥ 0.
        key: the array of features; u is drawn at random for it.

    >>> x = np.arange(8.0)[:, None]
    >>> parts = FeatureShift().split({"x": x, "y": np.zeros(8)}, 2, np.random.default_rng(0))
    >>> sorted(sorted(part.tolist()) for part in parts)
    [[0, 1, 2, 3], [4, 5, 6, 7]]
    """

    noise: Annotated[float, Number("a finite number ≥ 0 (the limit ∞ is IID())", 0.0)] = 0.0
    key: str = "x"

    def _split(self, arrays: Arrays, total: int, clients: int, rng: Rng, label: str) -> Parts:
        if self.key not in arrays:
            raise KeyError(f"FeatureShift needs the array {self.key!r}, but there are only {sorted(arrays)}.")
        x = np.asarray(arrays[self.key], float).reshape(total, -1)
        along = x @ rng.normal(size=x.shape[1])
        spread = along.std()
        score = (along - along.mean()) / (spread if spread > 0 else 1.0) + self.noise * rng.normal(size=total)
        members = np.zeros(total, np.int64)
        if label in arrays and not _continuous(np.asarray(arrays[label])):
            _, members = _classes(arrays, label, "FeatureShift")
        # Each class fills the room that is left in proportion, so that sizes stay equal to within one.
        sizes = [len(part) for part in np.array_split(np.arange(total), clients)]
        owner = np.empty(total, np.int64)
        left = np.array(sizes)
        counts = np.bincount(members)
        for c, count in enumerate(counts):
            samples = np.flatnonzero(members == c)
            quota = _apportion(left, count)
            owner[samples[np.argsort(score[samples], kind="stable")]] = np.repeat(np.arange(clients), quota)
            left = left - quota
        return [np.flatnonzero(owner == i) for i in range(clients)]


@dataclasses.dataclass(frozen=True)
class TwoLevel(Partitioner):
    """Groups of clients, such as regions: one rule makes them, another divides each among its clients.

        outer divides the samples among g groups;  inner divides each group among its clients

    Clients 0, 1, … of group 0 come first, then those of group 1; groups have equally many clients, to within
    one.

    Args:
        groups: the number g of groups.
        outer: the rule between groups.
        inner: the rule within a group.

    >>> labels = np.arange(100) % 2
    >>> rule = TwoLevel(2, outer=OneClass(1.0), inner=IID())
    >>> [set(labels[part].tolist()) for part in rule.split({"y": labels}, 4, np.random.default_rng(0))]
    [{0}, {0}, {1}, {1}]
    """

    groups: Count
    outer: Annotated[Partitioner, "a partition, such as IID()"]
    inner: Annotated[Partitioner, "a partition, such as IID()"] = IID()

    def _split(self, arrays: Arrays, total: int, clients: int, rng: Rng, label: str) -> Parts:
        if self.groups > clients:
            raise ValueError(f"{self.groups} groups need at least as many clients, but there are {clients}.")
        members = [len(part) for part in np.array_split(np.arange(clients), self.groups)]
        parts = []
        for group, count in zip(self.outer.split(arrays, self.groups, rng, label), members, strict=True):
            if len(group) < count:
                raise ValueError(
                    f"A group of {len(group)} samples cannot be divided among {count} clients; take fewer "
                    "clients or an outer rule with a larger min_size."
                )
            inside = {name: np.asarray(array)[group] for name, array in arrays.items()}
            parts += [group[part] for part in self.inner.split(inside, count, rng, label)]
        return parts


def _apportion(room: np.ndarray, count: int) -> np.ndarray:
    """``count`` divided in proportion to the room that is left, in whole numbers that fit."""
    edges = np.rint(np.cumsum(room) * (count / max(1, room.sum()))).astype(np.int64)
    return np.diff(edges, prepend=0)


def _shares(alpha: float, count: int, clients: int, rng: Rng) -> np.ndarray:
    """The owner of each of `count` samples, in Dirichlet proportions."""
    edges = np.rint(np.cumsum(rng.dirichlet(np.full(clients, alpha))) * count).astype(np.int64)
    edges[-1] = count
    # Rounding favours some positions, so the clients take theirs in random order.
    return np.repeat(rng.permutation(clients), np.diff(edges, prepend=0))


def _samples(arrays: Arrays) -> int:
    if not arrays:
        raise ValueError("There is nothing to split: `arrays` is empty.")
    scalars = [name for name, array in arrays.items() if np.ndim(array) == 0]
    if scalars:
        raise ValueError(f"Arrays need the samples on their first axis, but {scalars} have no axis.")
    sizes = {name: len(array) for name, array in arrays.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"Arrays must have the same number of samples on their first axis, got {sizes}.")
    return next(iter(sizes.values()))


def _values(arrays: Arrays, name: str, rule: str) -> tuple[np.ndarray, np.ndarray]:
    """The different values of a column and, for each sample, the position of its value among them."""
    if name not in arrays:
        raise KeyError(f"{rule} needs the array {name!r}, but there are only {sorted(arrays)}.")
    column = np.asarray(arrays[name])
    if column.ndim != 1:
        raise ValueError(f"{rule} needs one value of {name!r} per sample, got shape {column.shape}.")
    return np.unique(column, return_inverse=True)


def _classes(arrays: Arrays, label: str, rule: str) -> tuple[np.ndarray, np.ndarray]:
    classes, members = _values(arrays, label, rule)
    if _continuous(classes):
        raise ValueError(
            f"{rule} splits by class, but {label!r} is continuous ({len(classes)} different values). "
            "Use IID, QuantitySkew or ByKey, or name an array of classes as `label`."
        )
    return classes, members


def _continuous(values: np.ndarray) -> bool:
    return values.dtype.kind in "fc" and bool((values != np.round(values)).any())


def _check_min_size(min_size: int, clients: int, total: int) -> None:
    if min_size * clients > total:
        raise ValueError(
            f"{clients} clients with at least {min_size} samples each need {min_size * clients} samples, "
            f"but there are only {total}; lower `min_size` or the number of clients."
        )
