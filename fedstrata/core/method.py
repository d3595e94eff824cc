"""What a method is: a frozen dataclass of hyper-parameters with three pure functions.

    init(problem, x0, y0) -> State             where to start
    start(problem, fed, key, state) -> State   optional: exchanges before the first round
    round(problem, fed, key, r, state) -> State

and phases, ``phase(problem, client, key, *message) -> upload``, which the round hands to the verbs of
``fed``. A phase that changes what the client remembers returns ``Remember(upload, memory)``.

Hyper-parameters are data: real ones are leaves of the method as a pytree, so that a new step size does not
recompile and a sweep is a vmap over methods; counts and options are static. A real one may also be a
schedule, a function of the round (any optax schedule); `Method.at` puts in the round's value before `round`
runs, so a method's text never sees schedules. The numbers in ``jax.tree_util.Partial(f, 0.1)``, the schedule
``r ↦ f(0.1, r)``, are leaves too: several such steps are one sweep.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from types import MethodType
from typing import (
    Any,
    ClassVar,
    Concatenate,
    Generic,
    Literal,
    NamedTuple,
    ParamSpec,
    Self,
    dataclass_transform,
)

import jax
import numpy as np
from typing_extensions import TypeVar  # with defaults, which the standard library has from 3.13

from fedstrata.core import tree
from fedstrata.core.fed import Fed
from fedstrata.core.hyperparameters import BatchSize as BatchSize
from fedstrata.core.hyperparameters import Count as Count
from fedstrata.core.hyperparameters import Counts as Counts
from fedstrata.core.hyperparameters import Field, fields_of
from fedstrata.core.hyperparameters import Fraction as Fraction
from fedstrata.core.hyperparameters import LocalSteps as LocalSteps
from fedstrata.core.hyperparameters import NonNegative as NonNegative
from fedstrata.core.hyperparameters import PerSequence as PerSequence
from fedstrata.core.hyperparameters import Positive as Positive
from fedstrata.core.hyperparameters import Unit as Unit
from fedstrata.core.problem import Problem
from fedstrata.core.types import Integer, Key, PyTree
from fedstrata.support import html
from fedstrata.support.shown import line, plain, short
from fedstrata.support.words import documentation, spelling

METHODS: dict[str, type[Method]] = {}

Reveals = Literal["averages", "replies"]
LOOKED = 256  # rounds at which a schedule is looked at, always as many: they are one small program


# Covariant: methods for different problems have a type in common, and `solve` checks that they fit.
# mypy: disable-error-code="misc"
ProblemT = TypeVar("ProblemT", bound=Problem, covariant=True, default=Any)
StateT = TypeVar("StateT", covariant=True, default=Any)
P = ParamSpec("P")
R = TypeVar("R")


class by_options(Generic[P, R]):
    """A method that works on a class, with its default options, and on an object, with its own."""

    def __init__(self, function: Callable[Concatenate[Any, P], R]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: object, owner: type) -> Callable[P, R]:
        # a dataclass keeps a field's default as an attribute of the class, which is all that this needs
        return MethodType(self.function, owner if instance is None else instance)


class NoRule(ValueError):
    """Why a method has no practical rule for a problem."""


class Moment(NamedTuple):
    """When `Method.cautions` is called.

    Attributes:
        problem, rounds, x0: of the run.
        state: after `Method.start`, or after the last round; None before anything is computed.
        ended: whether the last round is over.
    """

    problem: Any
    rounds: int
    x0: PyTree
    state: Any = None
    ended: bool = False


class Method(Generic[ProblemT, StateT]):
    """Base of all methods: argument checks, schedules, and defaults for the optional parts.

    Class attributes that a method's file sets:
        solves: the problem classes it is for.
        local: whether it takes problems of these classes with ``local=True``.
        needs: what it needs of the problem's functions, in words for the documentation.
        full_participation: why it needs all clients in every round, or None if it does not.
        drifts: the field of local steps, if end points are averaged and drift is not corrected.
        exact: what it does that products rounded to eight bits are too coarse for, or None.
        feedback: the error feedback that its uploads support, see `fedstrata.channels`.
        linear: the levels in the ledger whose exchanges are a recursion that a biased compressor breaks.
        private_samples: whether its phases take of samples means by `Oracle.apply` alone, see `channels`.
        hyperparameters: what each of its fields may be; `method` sets it.
    """

    solves: ClassVar[tuple[type[Problem], ...]] = ()
    local: ClassVar[bool] = False
    needs: ClassVar[str] = "gradients"
    full_participation: ClassVar[str | None] = None
    exact: ClassVar[str | None] = None
    drifts: ClassVar[str | None] = None
    feedback: ClassVar[Literal["ef", "ef21"]] = "ef21"
    linear: ClassVar[frozenset[str]] = frozenset()
    private_samples: ClassVar[bool] = False
    hyperparameters: ClassVar[dict[str, Field]] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError(
            f"{type(self).__name__} lacks its decorator: write @method above the class (from "
            "fedstrata.core.method import method), which makes arguments of its fields."
        )

    def __post_init__(self) -> None:
        for name, value in self._values().items():
            checked = self.hyperparameters[name].check(type(self).__name__, name, value)
            object.__setattr__(self, name, checked)

    def _values(self) -> dict[str, Any]:
        """The hyper-parameters by name."""
        return {name: vars(self)[name] for name in self.hyperparameters}

    def at(self, r: Integer) -> Self:
        """This method with every schedule replaced by its value at round ``r``."""
        now = self.scheduled(r)
        return self.replaced(now) if now else self

    def scheduled(self, r: Integer) -> dict[str, Any]:
        """The values at round ``r`` of those hyper-parameters that are schedules."""
        return {name: v(r) for name, v in self._values().items() if self.hyperparameters[name].scheduled(v)}

    def replaced(self, values: dict[str, Any]) -> Self:
        """A copy with some hyper-parameters replaced by leaves, without the checks: they may be traced."""
        new = object.__new__(type(self))
        for name, value in {**self._values(), **values}.items():
            object.__setattr__(new, name, value)
        tree.fix_leaves(new, tree.leaf_names(self, _leaves) | values.keys())
        return new

    def plan(self, rounds: int) -> Self:
        """Return the method for a number of rounds, for rules that need the horizon.

        What it fills in should be leaves, so that another horizon does not recompile. They are part of a
        checkpoint's configuration: such a run is resumed with the same ``rounds``.
        """
        return self

    def cautions(self, moment: Moment) -> list[str]:
        """Warnings for the user: before anything is computed, after `start`, and at the end.

        Only what is certain belongs here; `fedstrata.certify` judges whether an answer is good.
        """
        return []

    def bias(self) -> str | None:
        """Why its limit may be biased when clients differ, and what to change: the certificate's advice."""
        return None

    def judged_as(self, problem: ProblemT) -> Problem:
        """The problem that it solves and is measured by, if that differs from the given one."""
        return problem

    def metrics(self, state: StateT) -> dict[str, jax.Array]:
        """The method's own metrics, for the history."""
        return {}

    @classmethod
    def needs_for(cls, problem: ProblemT) -> str:
        """What it needs of this problem's functions, if that differs between problem classes."""
        return cls.needs

    @by_options
    def reveals_on(self, problem: ProblemT) -> Reveals:
        """What the server sees: ``"averages"`` alone, fit for secure aggregation, or ``"replies"``.

        It follows from the verbs: `Fed.gather` reveals replies, as an average over one client does. A method
        that gathers says so here, or its first round is refused. A class answers for its default options.
        """
        return "averages"

    @classmethod
    def differentiates(cls, problem: ProblemT) -> Collection[str]:
        """The problem's functions, by their fields, of which it takes derivatives; by default all."""
        return [f.name for f in dataclasses.fields(problem)]  # type: ignore[arg-type]

    @classmethod
    def lacks(cls, problem: ProblemT) -> list[str]:
        """The functions it differentiates that have no derivatives."""
        without = problem.without_derivatives
        return [name for name in cls.differentiates(problem) if name in without] if without else []

    @classmethod
    def fits(cls, problem: Problem) -> bool:
        """Whether the method can be given this problem."""
        its: Any = problem
        return isinstance(problem, cls.solves) and not cls.lacks(its) and cls.unfit(its) is None

    @classmethod
    def refuses(cls, problem: ProblemT) -> str | None:
        """Why the method cannot be given this problem, whatever its hyper-parameters; or None."""
        return None

    @classmethod
    def unfit(cls, problem: ProblemT) -> str | None:
        """Why the method cannot take the problem: it refuses it, or averages what is each client's own."""
        if problem.local and not cls.local:
            return f"{cls.__name__} averages what belongs to each client here; see fs.applicable(problem)."
        return cls.refuses(problem)

    @classmethod
    def practical(cls, at: Any) -> Any:
        """The method with steps for a problem that was measured, see `fedstrata.problems.measured`."""
        raise NoRule(f"{cls.__name__} has no rule for its steps")

    def lengths(self, problem: ProblemT, clients: int) -> dict[str, int]:
        """The length of an array for each axis, if known."""
        return {"client": clients}

    def check(self, problem: ProblemT, clients: int) -> None:
        """Raise if hyper-parameters do not fit the problem; called once before anything is compiled."""
        if (reason := self.unfit(problem)) is not None:
            raise ValueError(reason)
        lengths = self.lengths(problem, clients)
        for name, value in self._values().items():
            self.hyperparameters[name].check_length(type(self).__name__, name, value, lengths)

    def check_schedules(self, rounds: int) -> None:
        """Raise if a schedule leaves its range: checked at all of the first rounds, then at some."""
        looked = np.minimum(np.arange(LOOKED), max(rounds - 1, 0))
        if rounds > LOOKED:
            looked[LOOKED // 2 :] = np.linspace(LOOKED // 2, rounds - 1, LOOKED // 2)
        for name, value in self._values().items():
            if (field := self.hyperparameters[name]).scheduled(value):
                field.check_schedule(type(self).__name__, name, value, looked)

    def start_y(self, problem: ProblemT, y0: PyTree, clients: int) -> PyTree:
        """The start of y, for a method with a second variable that the problem lacks; else as given."""
        return y0

    def init(self, problem: ProblemT, x0: PyTree, y0: PyTree) -> StateT:
        """The state before the first round."""
        raise NotImplementedError

    def start(self, problem: ProblemT, fed: Fed, key: Key, state: StateT) -> StateT:
        """Exchanges before the first round, with all clients: the state after them."""
        return state

    @classmethod
    def starts(cls) -> bool:
        """Whether the method overrides `start`; if not, engines compile no program for it."""
        return cls.start is not Method.start

    def round(self, problem: ProblemT, fed: Fed, key: Key, r: Integer, state: StateT) -> StateT:
        """One round: the state after it."""
        raise NotImplementedError

    def memory(self, problem: ProblemT, x0: PyTree, y0: PyTree) -> PyTree:
        """The memory of every client before the first round; None if clients remember nothing."""
        return None

    def plain_state(self, state: Any) -> Any:
        """The state without what channels keep there."""
        return state

    def output(self, state: StateT, memory: PyTree) -> tuple[PyTree, PyTree]:
        """``(x, y)`` as the result and the metrics see them; ``memory`` has a leading client axis."""
        at: Any = state  # a NamedTuple with the main variable x, and what else passes from round to round
        return at.x, getattr(at, "y", None)

    def __repr__(self) -> str:
        return line(type(self).__name__, self._given())

    def _repr_html_(self) -> str:
        given = {name: short(value) for name, value in self._values().items()}
        return html.facts(type(self).__name__, given)

    def _given(self) -> dict[str, Any]:
        """The hyper-parameters that are not what they are by default."""
        defaults = {f.name: f.default for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {name: value for name, value in self._values().items() if not _same(value, defaults[name])}

    def describe(self) -> dict[str, Any]:
        """Hyper-parameters as plain values, for configurations and tables."""
        return {name: plain(value) for name, value in self._values().items()}


def _same(value: Any, default: Any) -> bool:
    plain = type(value) is type(default) and type(value) in (bool, int, float, str)
    return value is default or (plain and value == default)


def _leaves(method: Method) -> set[str]:
    """The fields that are leaves: numbers, arrays, and parts that are methods themselves."""
    return {
        name
        for name, field in method.hyperparameters.items()
        if field.is_leaf(value := vars(method)[name]) or isinstance(value, Method)
    }


MethodT = TypeVar("MethodT", bound=type[Method])


@dataclass_transform(frozen_default=True)
def method(cls: MethodT) -> MethodT:
    """Make a frozen dataclass of a method's class, register it as a pytree and in `METHODS`.

    What is a leaf depends on the value, not on the class alone: a schedule is a function, which is static
    (but for the numbers in a `jax.tree_util.Partial`), and an optional number may be None.
    """
    cls = dataclasses.dataclass(frozen=True, repr=False)(cls)  # type: ignore[assignment]
    theory = f", {cls.__name__}.from_theory(…) by its theorem" if hasattr(cls, "from_theory") else ""
    planned = f"fs.plan(problem, data, x0, method={cls.__name__!r})"
    instead = f"{planned} finds steps from measured constants{theory}."
    cls.__init__ = spelling(cls.__name__, documentation(cls), missing=instead)(cls.__init__)  # type: ignore[method-assign]
    cls.hyperparameters = fields_of(cls)  # type: ignore[arg-type]
    if callable(own := vars(cls).get("reveals_on")):
        cls.reveals_on = by_options(own)  # type: ignore[method-assign]
    tree.register(cls, _leaves)
    METHODS[cls.__name__] = cls
    return cls
