"""Annotations of hyper-parameters, and the checks that follow from them.

    float, Positive, NonNegative, Fraction, Unit    a number, or a schedule: a function of the round
    PerSequence[Positive]                           also an array, with one number for each sequence
    int, Count                                      a whole number; one ≥ 1
    Counts                                          also a function of the round
    LocalSteps                                      also an array with one for each client; a client with 0 is
                                                    left out of the average, see `Fed.at_work`
    BatchSize                                       samples of a minibatch; None is the full batch
    Literal["a", "b"], bool                         an option
    a class, a protocol, a ``Callable``             an object of it; a method becomes a child of the pytree;
                                                    ``Annotated[cls, "an object that …"]`` gives it words

and unions of these. A field is checked when an object is built; the lengths of arrays when the clients and
the problem are known, see `Method.check`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.support.optimisers import misplaced
from fedstrata.support.words import listed, suggest

Fault = type[TypeError] | type[ValueError] | None


class Kind:
    """One kind of value that a hyper-parameter accepts: its words for the user, and its check.

    Attributes:
        words: as in "gamma must be …".
        real: whether it is a real number, a leaf of the method.
        counts: whether it is a whole number, static unless it is an array.
        of_round: whether it is a schedule.
    """

    words: str
    is_axis: ClassVar[bool] = False
    real: ClassVar[bool] = False
    counts: ClassVar[bool] = False
    of_round: ClassVar[bool] = False

    @property
    def options(self) -> tuple[Any, ...]:
        """The accepted values, if they can be listed."""
        return ()

    def fault(self, value: object) -> Fault:
        """The type of error for a value; None if it is accepted."""
        raise NotImplementedError

    def fits(self, values: np.ndarray) -> np.ndarray:
        """Which values of a schedule are accepted; a step may fade to the lower end of its range."""
        return np.zeros(values.shape, bool)


@dataclass(frozen=True)
class Number(Kind):
    """Real numbers in a range. They are leaves of a method, so that another value compiles nothing."""

    words: str = "a finite number"
    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    real = True

    def fault(self, value: object) -> Fault:  # noqa: D102
        array = np.asarray(value)
        if array.dtype.kind not in "iuf":
            return TypeError
        above = array > self.low if self.open_low else array >= self.low
        return None if (np.isfinite(array) & above & (array <= self.high)).all() else ValueError

    def fits(self, values: np.ndarray) -> np.ndarray:  # noqa: D102
        return np.isfinite(values) & (values >= self.low) & (values <= self.high)


@dataclass(frozen=True)
class Whole(Kind):
    """Whole numbers; static, except in an array."""

    low: float = 1
    counts = True

    @property
    def words(self) -> str:  # type: ignore[override]  # noqa: D102
        return "a whole number" if self.low == -math.inf else f"a whole number ≥ {self.low}"

    def fault(self, value: object) -> Fault:  # noqa: D102
        array = np.asarray(value)
        if callable(value):
            return TypeError
        low = min(self.low, 0) if array.ndim else self.low
        return None if array.dtype.kind in "iu" and (array >= low).all() else ValueError

    def fits(self, values: np.ndarray) -> np.ndarray:  # noqa: D102
        low = min(self.low, 0) if values.ndim > 1 else self.low
        return values >= low if values.dtype.kind in "iu" else super().fits(values)


@dataclass(frozen=True)
class Option(Kind):
    """One value of a `Literal`, or a truth value."""

    value: Any

    @property
    def words(self) -> str:  # type: ignore[override]  # noqa: D102
        return repr(self.value)

    @property
    def options(self) -> tuple[Any, ...]:  # noqa: D102
        return (self.value,)

    def fault(self, value: object) -> Fault:  # noqa: D102
        if not isinstance(value, type(self.value)):
            return TypeError
        return None if value == self.value else ValueError


@dataclass(frozen=True)
class Instance(Kind):
    """An object of a class, or a `Callable`."""

    cls: type
    words: str

    def fault(self, value: object) -> Fault:  # noqa: D102
        return None if isinstance(value, self.cls) else TypeError


@dataclass(frozen=True)
class OfRound(Instance):
    """A function of the round; `Method.at` replaces it by its value."""

    cls: type = Callable  # type: ignore[assignment]
    words: str = "a function of the round"
    of_round = True


@dataclass(frozen=True)
class Axis:
    """The axis of an array, clients for instance, by which its length is checked."""

    name: Literal["client", "sequence", "stage"]
    numbers: str = "one"
    is_axis: ClassVar[bool] = True

    @property
    def words(self) -> str:
        """As in "H must be …"."""
        return f"an array with {self.numbers} for each {self.name}"


T = TypeVar("T")
PerClient = Annotated[T, Axis("client", "one (≥ 0)")]
PerSequence = Annotated[T, Axis("sequence")]

POSITIVE = Number("a positive number", 0.0, open_low=True)
Positive = Annotated[Any, POSITIVE, OfRound()]
NonNegative = Annotated[Any, Number("a number ≥ 0", 0.0), OfRound()]
Fraction = Annotated[Any, Number("a number in (0, 1]", 0.0, 1.0, open_low=True), OfRound()]
Unit = Annotated[Any, Number("a number in [0, 1]", 0.0, 1.0), OfRound()]
Count = Annotated[int, Whole()]
Counts = Annotated[Any, Whole(), OfRound()]
LocalSteps = PerClient[Counts]
BatchSize = Annotated[int | None, Whole(), Instance(NoneType, "None for the full batch")]


@dataclass(frozen=True)
class Field:
    """All kinds of values that a hyper-parameter accepts; without kinds, any value."""

    kinds: tuple[Kind, ...]
    axis: Axis | None = None

    @classmethod
    def of(cls, annotation: object) -> Field:
        """From a field's annotation."""
        notes = list(_kinds(annotation))
        axes = [one for one in notes if one.is_axis]
        return cls(tuple(one for one in notes if not one.is_axis), axes[0] if axes else None)

    def check(self, owner: str, name: str, value: Any) -> Any:
        """Return the value in the form that methods see, or raise and say what it must be."""
        if isinstance(value, list | tuple) and self.axis is not None:
            value = np.asarray(value)
        value = bool(value) if isinstance(value, np.bool_) else value
        faults = {kind: kind.fault(value) for kind in self.kinds}
        fitting = [kind for kind, fault in faults.items() if fault is None]
        if faults and not fitting:
            options = [str(option) for kind in self.kinds for option in kind.options]
            error = ValueError if ValueError in faults.values() else TypeError
            instead = misplaced(value) or f"{value!r}{suggest(str(value), options)}"
            raise error(f"{owner}: {name} must be {self.words}, but is {instead}")
        if not any(kind.real or kind.counts for kind in fitting):
            return value
        if np.ndim(value) > (self.axis is not None):
            raise ValueError(f"{owner}: {name} must be {self.words}, but has the shape {np.shape(value)}.")
        # a count is static, and decides about programs: NumPy's would be another than Python's
        static = np.ndim(value) == 0 and any(kind.counts for kind in fitting)
        return int(value) if static else value

    @property
    def words(self) -> str:
        """What the value must be."""
        words = [kind.words for kind in self.kinds]
        if self.axis is not None:
            words.insert(1, self.axis.words)
        return listed(words)

    def scheduled(self, value: object) -> bool:
        """Whether the value is a schedule."""
        return callable(value) and any(kind.of_round for kind in self.kinds)

    def is_leaf(self, value: Any) -> bool:
        """Whether the value is data of the compiled program: a real number, or an array of counts.

        So are the numbers that a `jax.tree_util.Partial` holds, the schedule ``Partial(f, 0.1)``.
        """
        if isinstance(value, jax.tree_util.Partial):
            return self.scheduled(value)
        if any(kind.real and kind.fault(value) is None for kind in self.kinds):
            return True
        return self.axis is not None and np.ndim(value) == 1

    def check_length(self, owner: str, name: str, value: Any, lengths: Mapping[str, int]) -> None:
        """Raise if an array, or the value of a schedule, does not have one number for each of its axis."""
        shape = np.shape(value)
        if self.scheduled(value):
            try:
                shape = jax.eval_shape(value, jnp.int32(0)).shape
            except Exception as error:
                raise TypeError(
                    f"{owner}: {name} must be {self.words}, but fails at a traced round: "
                    f"{type(error).__name__}: {error}\nWrite it with jnp functions: jnp.where in place of if."
                ) from error
            if len(shape) > (self.axis is not None):
                raise ValueError(f"{owner}: {name} must be {self.words}, but returns the shape {shape}.")
        if shape and self.axis is not None and shape[0] != (wanted := lengths.get(self.axis.name, shape[0])):
            axis = self.axis.name
            raise ValueError(f"{owner}: {name} has {shape[0]} numbers, but there are {wanted} {axis}s.")

    def check_schedule(self, owner: str, name: str, value: Any, rounds: np.ndarray) -> None:
        """Raise if a schedule returns a value that is not accepted at one of these rounds."""
        returned = np.asarray(jax.vmap(lambda r: jnp.asarray(value(r)))(jnp.asarray(rounds, jnp.int32)))
        good = np.zeros(len(rounds), bool)
        for kind in self.kinds:
            good |= kind.fits(returned).reshape(len(rounds), -1).all(axis=1)
        if not good.all():
            first = int(np.argmin(good))
            raise ValueError(
                f"{owner}: {name} must be {self.words}, but this one returns {returned[first]} "
                f"({returned.dtype}) at round {rounds[first]}."
            )


@cache
def fields_of(cls: Any) -> dict[str, Field]:
    """The `Field` of each field of a dataclass, from its annotations."""
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: Field.of(hints[field.name]) for field in dataclasses.fields(cls)}


def check_fields(owner: object) -> None:
    """Raise if a field of a frozen dataclass does not fit its annotation."""
    cls: Any = type(owner)
    for name, field in fields_of(cls).items():
        field.check(cls.__name__, name, vars(owner)[name])


def _kinds(annotation: object) -> Iterable[Any]:
    """The kinds and the axis in an annotation; none if it cannot be checked."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        base, *notes = arguments
        if isinstance(notes[0], str):  # the words for a class
            return [Instance(get_origin(base) or base, notes[0])]
        return notes
    if origin in (Union, UnionType):
        return [kind for argument in arguments for kind in _kinds(argument)]
    if origin is Literal:
        return [Option(value) for value in arguments]
    if annotation in PLAIN:
        return PLAIN[annotation]
    cls = origin or annotation
    return [Instance(cls, cls.__name__)] if isinstance(cls, type) else []


PLAIN: dict[Any, list[Kind]] = {
    Any: [Instance(object, "anything")],
    NoneType: [Instance(NoneType, "None")],
    bool: [Option(True), Option(False)],
    float: [Number(), OfRound()],
    int: [Whole(-math.inf)],
}
