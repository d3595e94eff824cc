"""Metrics that are more than a function of the point: one number for each client, or one of the host's.

fs.per_client(metric)               the mean over clients, and how far they are apart
fs.on_host(metric)                  any Python, between two chunks of the compiled run
fs.per_client(fs.on_host(metric))   any Python, for each client
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core import tree
from fedstrata.core.fed import Fed, Population
from fedstrata.core.hyperparameters import Count, Field
from fedstrata.core.problem import Problem, check_scalar
from fedstrata.core.term import Term, positional
from fedstrata.core.types import Array, PyTree
from fedstrata.data.federated import FederatedData
from fedstrata.support.shown import short

PartName = Literal["train", "valid", "test"]
Mode = Literal["min", "max"]
Point = tuple[PyTree, PyTree, PyTree]  # of a run: the method's state, x and y
Series = dict[str, Any]  # of the history: name → value
MOST_NAMED = 100  # clients whose own numbers are kept one by one


class UserMetric:
    """A user's metric, which is measured besides the problem's own.

    Attributes:
        function: the user's.
        each_client: whether it has a number for every client.
        hosted: whether it is evaluated on the host.
        every: of so many evaluations one is done.
    """

    function: Any
    each_client: ClassVar[bool] = False
    hosted: ClassVar[bool] = False
    every: int = 1

    @property
    def needs_data(self) -> bool:
        """Whether it takes the data, besides the point."""
        return positional(self.function) not in (1, 2)

    def of(self, name: str, data: FederatedData) -> UserMetric:
        """The metric for these clients, where it can be evaluated there."""
        return self

    def check(self, name: str, data: FederatedData, x: PyTree, y: PyTree) -> None:
        """Raise where it does not fit the point and the samples (shapes only)."""

    def measured(self, name: str, problem: Problem, fed: Fed, data: Population, point: Point) -> Series:
        """Its series at a point, inside a program."""
        raise NotImplementedError

    def on(self, name: str, problem: Problem, data: FederatedData, weights: str, point: Point) -> Series:
        """Its series at a point, on the host."""
        raise NotImplementedError


@dataclass(frozen=True)
class OfPoint(UserMetric):
    """A plain function, compiled with the rounds."""

    function: Callable[..., Any]

    def measured(self, name: str, problem: Problem, fed: Fed, data: Population, point: Point) -> Series:
        try:
            return {name: called(self.function, *point, data)}
        except (jax.errors.JAXTypeError, jax.errors.NonConcreteBooleanIndexError) as error:
            raise TypeError(
                f"The metric {name!r} cannot be compiled: NumPy, scikit-learn, `if` and float() cannot look "
                f"at values while JAX compiles ({type(error).__name__}). Mark it as one for the host, "
                f"metrics={{{name!r}: fs.on_host(…)}}, where any Python works; or write it with jax.numpy "
                "and jnp.where."
            ) from error
        except Exception as error:
            raise TypeError(
                f"The metric {name!r} cannot be evaluated: {type(error).__name__}: {error}\n"
                "A metric is a function of (x, y), where y may be None, or of (x, y, data); one of a single "
                "argument is given the method's state, whose point is state.x."
            ) from error


@dataclass(frozen=True)
class OnHost(UserMetric):
    """See `on_host`."""

    function: Callable[..., Any]
    every: int = 1
    hosted: ClassVar[bool] = True

    def on(self, name: str, problem: Problem, data: FederatedData, weights: str, point: Point) -> Series:
        return {name: called(self.function, *point, data)}


@dataclass(frozen=True)
class PerClient(UserMetric):
    """See `per_client`."""

    function: Any
    part: PartName = "train"
    mode: Mode = "min"
    quantiles: tuple[float, ...] = (0.25, 0.5, 0.75)
    each: bool = False
    names: tuple[str, ...] | None = None
    each_client: ClassVar[bool] = True
    needs_data: ClassVar[bool] = True

    def of(self, name: str, data: FederatedData) -> PerClient:
        """The metric for these clients, where it can be evaluated there."""
        if self.part == "valid" and data.valid is None:
            raise ValueError(f"The metric {name!r} uses validation samples, but the data has none.")
        if self.part == "test":
            missing = np.setdiff1d(np.arange(data.clients), data.test_clients)
            if missing.size:
                raise ValueError(
                    f"The metric {name!r} uses test samples, but {missing.size} of {data.clients} clients "
                    f"have none, client {missing[0]} among them."
                )
        if self.each and data.clients > MOST_NAMED:
            raise ValueError(
                f"The metric {name!r} has each=True for {data.clients} clients, but can have at most "
                f"{MOST_NAMED}: leave out each=True for worst, best, quantiles and spread."
            )
        return replace(self, names=data.names) if self.each else self

    def series(self, name: str, values: Any, shares: Any, xp: Any = jnp) -> dict[str, Any]:
        """The history's series of the clients' values: ``name`` itself is their mean by ``shares``."""
        low, high = ("best", "worst") if self.mode == "min" else ("worst", "best")
        values = xp.asarray(values)
        entries = {
            name: (values * shares).sum(),
            f"{name}/{low}": values.min(),
            f"{name}/{high}": values.max(),
        }
        for q in self.quantiles:
            entries[f"{name}/{'median' if q == 0.5 else f'q{100 * q:g}'}"] = xp.quantile(values, q)
        entries[f"{name}/spread"] = values.std()
        if self.each:
            names = self.names or [str(i) for i in range(len(values))]
            for i, who in enumerate(names):
                series = f"{name}/{who}"  # with its number where it is called "worst", or like another
                entries[f"{series} (client {i})" if series in entries else series] = values[i]
        return entries

    def check(self, name: str, data: FederatedData, x: PyTree, y: PyTree) -> None:
        takes_y = positional(self.function.function) == 3
        if not takes_y or y is not None:  # the method may have a y of its own
            point = (x, y) if takes_y else (x,)
            sample = data.sample_of(self.part)
            check_scalar(f"The metric {name!r}", self.function, *point, sample, kind=np.generic)

    def measured(self, name: str, problem: Problem, fed: Fed, data: Population, point: Point) -> Series:
        _, x, y = point
        takes_y = _takes_y(name, self.function.function, y)
        own = y if takes_y and problem.personal else None
        args = (x, y) if takes_y and own is None else (x,)
        term = self.function.then(_as_float)  # of truth values, a mean would be one
        # Test samples are pooled, and belong to clients by a column: no phase sees them.
        if self.part != "test":
            values = fed.means(term, *args, part=self.part, each=own)
        else:
            values = _by_client(term, data.test, fed.clients, args, own)
        return self.series(name, values, fed.weights_of(None))


@dataclass(frozen=True)
class PerClientOnHost(PerClient):
    """A metric of every client whose function is one for the host: it gets the samples as NumPy arrays."""

    every: int = 1
    hosted: ClassVar[bool] = True

    def on(self, name: str, problem: Problem, data: FederatedData, weights: str, point: Point) -> Series:
        # One client at a time: a function of the host gets arrays of each client's own length.
        values, (_, x, y) = [], point
        takes_y = _takes_y(name, self.function, y)
        for i in range(data.clients):
            mine = tree.row(y, i) if problem.personal else y
            values.append(float(self.function(x, *([mine] * takes_y), data.client(i, self.part))))
        shares = data.sizes if weights == "size" else np.ones(data.clients)
        return self.series(name, np.array(values), shares / shares.sum(), np)


def metric_of(name: str, metric: Any) -> UserMetric:
    """A user's metric, a plain function as one."""
    if isinstance(metric, UserMetric):
        return metric
    if not callable(metric):
        raise TypeError(
            f"The metric {name!r} must be a function of (x, y) or of the state, but is {metric!r}."
        )
    return OfPoint(metric)


def _takes_y(name: str, function: Callable[..., Any], y: PyTree) -> bool:
    takes_y = positional(function) == 3
    if takes_y and y is None:
        raise TypeError(
            f"The metric {name!r} takes (x, y, sample), but the problem has one variable: make it one of "
            "(x, sample)."
        )
    return takes_y


def _by_client(term: Term, test: PyTree, clients: int, args: tuple[PyTree, ...], own: PyTree) -> Array:
    """The clients' means over a pooled test set whose samples say whose they are."""

    def value(sample: PyTree) -> Array:
        mine = tree.row(own, sample["client"])
        return term(*args, *([] if own is None else [mine]), sample)

    values = Term(value).each(test)
    sums = jax.ops.segment_sum(values, test["client"], clients)
    return sums / jax.ops.segment_sum(jnp.ones_like(values), test["client"], clients)


def _as_float(value: Any) -> Array:
    return jnp.asarray(value, jnp.result_type(float))


def called(metric: Callable[..., Any], state: PyTree, x: PyTree, y: PyTree, data: Any) -> Any:
    """A metric's value: the number of its arguments says what it is a function of."""
    return metric(*{1: (state,), 2: (x, y)}.get(positional(metric), (x, y, data)))


def taken_name(name: str) -> str:
    """The error for a user's metric with the name of one of the problem's own."""
    return f"The metric name {name!r} is taken by the problem's own metric: give it another one."


def per_client(
    metric: Callable[..., Any] | Term | OnHost,
    *,
    part: PartName = "train",
    mode: Mode = "min",
    quantiles: Sequence[float] = (0.25, 0.5, 0.75),
    each: bool = False,
) -> PerClient:
    """A metric of every client, of which the history has the mean, worst, best, quantiles and spread.

    ``metrics={"loss": fs.per_client(loss)}`` gives ``history["loss"]``, the mean with the run's weights of
    clients, ``"loss/worst"``, ``"loss/best"``, ``"loss/q25"``, ``"loss/median"``, ``"loss/q75"`` and
    ``"loss/spread"``, the standard deviation over clients. A client's value is the mean over its samples.
    Over a network each client's value reaches the server, so that it is refused there unless the method
    itself reveals single replies.

    Args:
        metric: ``metric(x, sample)`` or ``metric(x, y, sample)``, of one sample like a loss; where clients
            have a y of their own it is that. One marked `on_host` sees all samples of a client at once, as
            NumPy arrays.
        part: whose samples: ``"train"``, ``"valid"`` or ``"test"``, whose samples must have ``client``.
        mode: ``"min"`` where small is good, ``"max"`` where large is.
        quantiles: over clients, in (0, 1); between two clients they are interpolated.
        each: whether every client's own number is kept, too, as ``"loss/<name or number>"``.

    >>> import numpy as np, fedstrata as fs
    >>> data = fs.FederatedData.from_clients([{"a": np.ones((2, 1))}, {"a": np.zeros((3, 1))}])
    >>> def loss(x, sample):
    ...     return 0.5 * ((x - sample["a"]) ** 2).sum()
    >>> result = fs.solve(fs.Minimization(loss), fs.FedAvg(0.1), data, np.zeros(1), rounds=0,
    ...                   metrics={"each": fs.per_client(loss)}, progress=False)
    >>> float(result.history["each/worst"][0]), float(result.history["each/best"][0])
    (0.5, 0.0)
    """
    Field.of(PartName).check("per_client", "part", part)
    Field.of(Mode).check("per_client", "mode", mode)
    if not all(0 < q < 1 for q in quantiles):
        raise ValueError(f"per_client: quantiles are numbers in (0, 1), but are {quantiles!r}.")
    options = part, mode, tuple(map(float, quantiles)), bool(each)
    match metric:
        case PerClient():
            raise TypeError("per_client: the metric is a per_client metric already.")
        case OnHost(function, every):
            made: PerClient = PerClientOnHost(function, *options, every=every)
        case _:
            term = Term.of(metric, "per_client's metric")
            made, function = PerClient(term, *options), term.function
    if (takes := positional(function)) not in (2, 3):
        raise TypeError(
            "per_client: the metric must be a function of (x, sample) or (x, y, sample), but takes "
            f"{takes} arguments."
        )
    return made


def on_host(metric: Callable[..., Any], *, every: int = 1) -> OnHost:
    """A metric in plain Python (scikit-learn's, a file's, a service's), evaluated between compiled chunks.

    Args:
        metric: ``metric(x, y)``, ``metric(state)`` or ``metric(x, y, data)``, which gets NumPy arrays and the
            `FederatedData`, and returns one number. It need not be traceable.
        every: of so many evaluations one is done; the others are NaN in the history. The compiled run is
            interrupted there and nowhere else. The start and the last round are always evaluated.

    >>> import numpy as np, fedstrata as fs
    >>> from sklearn.metrics import roc_auc_score
    >>> a, b = np.array([[0.1], [0.4], [0.35], [0.8]]), np.array([0, 0, 1, 1])
    >>> auc = fs.on_host(lambda x, y: roc_auc_score(b, a @ x))
    >>> data = fs.FederatedData.from_clients([{"a": a, "b": b}])
    >>> problem = fs.Minimization(lambda x, s: (s["a"] @ x - s["b"]) ** 2)
    >>> result = fs.solve(problem, fs.FedAvg(0.1), data, np.ones(1), rounds=1, metrics={"auc": auc},
    ...                   progress=False)
    >>> result.history["auc"].tolist()
    [0.75, 0.75]
    """
    if isinstance(metric, PerClient):
        raise TypeError("on_host goes inside: fs.per_client(fs.on_host(metric)).")
    if not callable(metric):
        raise TypeError(f"on_host: the metric must be a function, but is {metric!r}.")
    return OnHost(metric, Field.of(Count).check("on_host", "every", every))


Metric: TypeAlias = Callable[..., Any] | UserMetric


def is_asked(name: str, asked: tuple[str, ...]) -> bool:
    """Whether a quantity of the history belongs to one of these metrics, those that a user asked for."""
    return name in asked or name.startswith(tuple(f"{one}/" for one in asked))


def is_due(metric: UserMetric, evaluation: int) -> bool:
    """Whether it is evaluated at this evaluation, counted from zero."""
    return evaluation % metric.every == 0


def evaluate(
    metrics: Mapping[str, UserMetric],
    problem: Problem,
    data: FederatedData,
    weights: str,
    state: PyTree,
    x: PyTree,
    y: PyTree,
) -> dict[str, float]:
    """The values of metrics on the host, as series of the history."""
    history: dict[str, float] = {}
    point = jax.tree.map(np.asarray, (state, x, y))
    for name, metric in metrics.items():
        try:
            values = metric.on(name, problem, data, weights, point)
        except Exception as error:
            raise TypeError(
                f"The metric {name!r} cannot be evaluated on the host: {type(error).__name__}: {error}"
            ) from error
        for key, value in values.items():
            try:
                history[key] = float(value)
            except (TypeError, ValueError) as error:
                words = f"The metric {name!r} must return one number, but returned {short(value)}."
                raise TypeError(words) from error
    return history
