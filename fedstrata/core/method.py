"""What a method is: a frozen dataclass of hyper-parameters with three pure functions.

    init(problem, x0, y0) -> State             where to start
    start(problem, fed, key, state) -> State   optional: exchanges before the first round
    round(problem, fed, key, r, state) -> State

and phases, ``phase(problem, client, key, *message) -> upload``, which the round hands to the verbs of
``fed``. A phase that changes what the client remembers returns ``Remember(upload, memory)``.

Hyper-parameters are data: real ones are leaves of the method as a pytree, so that a new step size does not
recompile and a sweep is a vmap over methods; counts and options are static. A real one may also be a
schedule, a function of the round (any optax schedule); `Method.at` puts in the round's value before `round`
runs, so a method's text never sees schedules.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from types import MethodType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    TypeVar,
    dataclass_transform,
    get_type_hints,
)

import jax
import numpy as np

from fedstrata.core.fed import Fed
from fedstrata.core.problem import Problem
from fedstrata.core.types import Integer, PyTree

Schedule = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """A real hyper-parameter, its range, and whether a schedule is allowed."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    words: str = "a finite number"
    optional: bool = False


@dataclasses.dataclass(frozen=True)
class _Count:
    """A static whole number; ``varied`` also takes one per client or a function of the round."""

    low: int = 1
    optional: bool = False
    varied: bool = False


@dataclasses.dataclass(frozen=True)
class _Part:
    """A part that may be a method itself, whose hyper-parameters then are leaves of the whole."""

    optional: bool = True


_Kind = _Leaf | _Count | _Part

Real = Annotated[Any, _Leaf()]
Positive = Annotated[Any, _Leaf(0.0, open_low=True, words="a positive number")]
NonNegative = Annotated[Any, _Leaf(0.0, words="a number ≥ 0")]
Fraction = Annotated[Any, _Leaf(0.0, 1.0, open_low=True, words="a number in (0, 1]")]
Unit = Annotated[Any, _Leaf(0.0, 1.0, words="a number in [0, 1]")]
Count = Annotated[int, _Count(1)]
Steps = Annotated[Any, _Count(0, varied=True)]
BatchSize = Annotated[int | None, _Count(1, optional=True)]
Part = Annotated[Any, _Part()]


def _kind(annotation: Any) -> _Kind | None:
    """The marker inside an annotation, also where it is one alternative of a union (``Positive | None``)."""
    for marker in getattr(annotation, "__metadata__", ()):
        if isinstance(marker, _Kind):
            return marker
    arguments = getattr(annotation, "__args__", ())
    for argument in arguments:
        if (marker := _kind(argument)) is not None:
            return dataclasses.replace(marker, optional=True) if type(None) in arguments else marker
    return None


METHODS: dict[str, type[Method]] = {}

Reveals = Literal["averages", "replies"]
P = ParamSpec("P")
R = TypeVar("R")


class by_options(Generic[P, R]):
    """A method that a class answers for its default options, and an object for its own."""

    def __init__(self, function: Callable[Concatenate[Any, P], R]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: object, owner: type) -> Callable[P, R]:
        return MethodType(self.function, owner if instance is None else instance)


class Method:
    """Base of all methods: argument checks, schedules, and defaults for the optional parts.

    Class attributes that a method's file sets:
        solves: the problem classes it is for.
        needs: what it asks of the problem's functions, in words for the documentation.
        full_participation: why it needs all clients in every round, or None if it does not.
    """

    solves: ClassVar[tuple[type[Problem], ...]] = ()
    needs: ClassVar[str] = "gradients"
    full_participation: ClassVar[str | None] = None
    _kinds: ClassVar[dict[str, _Kind]] = {}

    def __post_init__(self) -> None:
        for name, kind in self._kinds.items():
            _check(type(self).__name__, name, getattr(self, name), kind)

    def at(self, r: Integer) -> Any:
        """This method with every schedule replaced by its value at round ``r``."""
        now = self.scheduled(r)
        return self.having(now) if now else self

    def scheduled(self, r: Integer) -> dict[str, Any]:
        """The values at round ``r`` of those hyper-parameters that are schedules."""
        names = (name for name, kind in self._kinds.items() if not isinstance(kind, _Part))
        return {name: value(r) for name in names if callable(value := getattr(self, name))}

    def having(self, values: dict[str, Any]) -> Any:
        """A copy with some hyper-parameters replaced, without the checks (values may be traced)."""
        new = object.__new__(type(self))
        for f in dataclasses.fields(self):  # type: ignore[arg-type]
            object.__setattr__(new, f.name, values.get(f.name, getattr(self, f.name)))
        object.__setattr__(new, "_leaves", _leaves(self) | values.keys())
        return new

    def plan(self, rounds: int) -> Any:
        """This method told how many rounds there will be, for rules that need the horizon.

        What it fills in should be leaves, so that another horizon does not recompile. They are part of a
        checkpoint's
        configuration: such a run is resumed with the same ``rounds``.
        """
        return self

    def remarks(self, state: PyTree) -> list[str]:
        """What the user is to be warned of after `start`, whose state has values here."""
        return []

    @classmethod
    def needs_for(cls, problem: Any) -> str:
        """What it asks of this problem's functions, where that differs between the classes it solves."""
        return cls.needs

    @by_options
    def reveals_on(self, problem: Any) -> Reveals:
        """What the server sees on this problem: ``"averages"`` alone, fit for secure aggregation, or replies.

        It follows from the verbs: `Fed.gather` reveals replies, and so does an average over one client. Asked
        of a class, it is the answer for the default options.
        """
        return "averages"

    @classmethod
    def refuses(cls, problem: Any) -> str | None:
        """Why the method cannot be given this problem, whatever its hyper-parameters; or None."""
        return None

    def check(self, problem: Any, clients: int) -> None:
        """Raise where hyper-parameters do not fit the problem; called once before anything is compiled."""

    def second(self, problem: Any, y0: PyTree, clients: int) -> PyTree:
        """The second variable's start, where the method has one that the problem has not; else as given."""
        return y0

    def init(self, problem: Any, x0: PyTree, y0: PyTree) -> Any:
        """The state before the first round."""
        raise NotImplementedError

    def round(self, problem: Any, fed: Any, key: jax.Array, r: Integer, state: PyTree) -> Any:
        """One round: the state after it."""
        raise NotImplementedError

    def start(self, problem: Any, fed: Fed, key: jax.Array, state: Any) -> Any:
        """Exchanges with all clients before the first round; the state after them."""
        return state

    @classmethod
    def starts(cls) -> bool:
        """Whether there are any."""
        return cls.start is not Method.start

    def memory(self, problem: Any, x0: PyTree, y0: PyTree) -> PyTree:
        """What every client remembers before the first round; None where clients remember nothing."""
        return None

    def output(self, state: PyTree, memory: PyTree) -> tuple[PyTree, PyTree]:
        """``(x, y)`` as the result and the metrics see them; ``memory`` has a leading client axis."""
        return state.x, getattr(state, "y", None)

    def describe(self) -> dict[str, Any]:
        """Hyper-parameters as plain values, for configurations and tables."""
        return {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}  # type: ignore[arg-type]


def _plain(value: Any) -> Any:
    if isinstance(value, int | float | str | bool | type(None)):
        return value
    if isinstance(value, np.ndarray | jax.Array):
        return np.asarray(value).tolist()
    if callable(value) and not dataclasses.is_dataclass(value):
        return getattr(value, "__qualname__", type(value).__name__)
    return repr(value)


def _check(owner: str, name: str, value: Any, kind: _Kind) -> None:
    if isinstance(kind, _Part):
        return
    if callable(value):
        if isinstance(kind, _Count) and not kind.varied:
            raise TypeError(f"{owner}: {name} must be a whole number, but is the function {value!r}.")
        return
    if value is None and kind.optional:
        return
    if isinstance(kind, _Leaf):
        array = np.asarray(value)
        if array.dtype.kind not in "iuf":
            raise TypeError(
                f"{owner}: {name} must be {kind.words} or a schedule of the round, but is {value!r}."
            )
        good = (
            np.isfinite(array)
            & (array <= kind.high)
            & ((array > kind.low) if kind.open_low else (array >= kind.low))
        )
        if not good.all():
            raise ValueError(f"{owner}: {name} must be {kind.words}, but is {value!r}.")
        return
    if kind.varied and getattr(value, "ndim", 0) == 1:
        if not np.issubdtype(value.dtype, np.integer) or (np.asarray(value) < kind.low).any():
            raise ValueError(f"{owner}: {name} must hold whole numbers ≥ {kind.low}, but is {value!r}.")
        return
    low = 1 if kind.varied else kind.low
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < low:
        also = ", None for the full batch" if kind.optional else ""
        also = ", an array with one per client, or a function of the round" if kind.varied else also
        raise ValueError(f"{owner}: {name} must be a whole number ≥ {low}{also}, but is {value!r}.")


def _leaves(method: Any) -> frozenset[str]:
    """The names of the fields that are leaves: fixed when a tree is put together, else told by the values."""
    fixed = getattr(method, "_leaves", None)
    if fixed is not None:
        return fixed
    return frozenset(name for name, kind in method._kinds.items() if _is_leaf(getattr(method, name), kind))


def _is_leaf(value: Any, kind: _Kind) -> bool:
    if isinstance(kind, _Part):
        return isinstance(value, Method)
    if callable(value) or value is None:
        return False
    return isinstance(kind, _Leaf) or getattr(value, "ndim", 0) >= 1


T = TypeVar("T", bound=type[Method])


@dataclass_transform(frozen_default=True)
def method(cls: T) -> T:
    """Make a frozen dataclass of a method's class, register it as a pytree and in `METHODS`."""
    cls = dataclasses.dataclass(frozen=True)(cls)  # type: ignore[assignment]
    hints = get_type_hints(cls, include_extras=True)
    names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    cls._kinds = {name: kind for name in names if (kind := _kind(hints[name])) is not None}

    def flatten(obj: Any) -> tuple[list[Any], tuple[Any, ...]]:
        leaves = _leaves(obj)
        children = [getattr(obj, name) for name in names if name in leaves]
        return children, tuple(
            (name, name in leaves, None if name in leaves else getattr(obj, name)) for name in names
        )

    def unflatten(static: tuple[Any, ...], children: Any) -> Any:
        obj = object.__new__(cls)
        leaves: Iterator[Any] = iter(children)
        for name, is_leaf, value in static:
            object.__setattr__(obj, name, next(leaves) if is_leaf else value)
        object.__setattr__(obj, "_leaves", frozenset(name for name, is_leaf, _ in static if is_leaf))
        return obj

    jax.tree_util.register_pytree_node(cls, flatten, unflatten)
    METHODS[cls.__name__] = cls
    return cls
