"""What is to be solved: problem classes as frozen dataclasses of plain JAX functions.

A user's function sees one sample ξ (a pytree without the sample axis) and returns its value; see
`fedstrata.core.client`. Every class says by `measure` what its default metrics are: full means over all
clients, computed by the engine and not counted in the ledger.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Protocol, Self, get_args

import jax
import jax.numpy as jnp

from fedstrata.core import tree
from fedstrata.core.term import Term, positional
from fedstrata.core.types import Function, PyTree, Weights
from fedstrata.support import html
from fedstrata.support.digest import marked, reached
from fedstrata.support.frozen import Frozen
from fedstrata.support.hints import hint
from fedstrata.support.shown import line, shapes, short
from fedstrata.support.words import check_spelling


class Mean(Protocol):
    """``mean(function, *args, part="train", each=None)``: the clients' mean of a full-batch mean.

    ``each`` is a pytree with a leading client axis; a client's slice of it follows ``args``. Other parts
    are ``"valid"``; ``"server"``, the mean over the server's own samples; and ``"client"``, the clients' mean
    of ``function(*args, client)``, which sees no sample.
    """

    def __call__(self, function: Function, *args: PyTree, part: str = "train", each: PyTree = None) -> Any:
        """The mean of ``function(*args, sample)``."""


@dataclass(frozen=True)
class Projection:
    """A projection given as a function of one, two or three arguments, called with all that is known.

    ``project_x(x)`` or ``project_x(x, client)``; ``project_y(y)``, ``project_y(y, x)`` or
    ``project_y(y, x, client)`` (a sample in place of the client where the set belongs to a sample). None is
    the whole space.
    """

    function: Function | None = None
    arity: int = field(default=0)

    @classmethod
    def of(cls, function: Function | Projection | None, name: str) -> Projection:
        """Wrap a user's argument; an instance passes through."""
        match function:
            case None:
                return cls()
            case Projection():
                return function
            case type():
                raise TypeError(
                    f"{name} must be a function that projects, but is the class {function.__name__}: make a "
                    "set of it, e.g. fs.sets.Ball(1.0)."
                )
        if not callable(function):
            raise TypeError(
                f"{name} must be a function that projects, e.g. fs.sets.Box(-1, 1), but is {function!r}."
            )
        return cls(function, positional(function))

    @property
    def trivial(self) -> bool:
        """Whether the set is the whole space."""
        return self.function is None

    @property
    def shared(self) -> bool:
        """Whether the set is the same for all clients."""
        return self.arity <= 1

    def __call__(self, point: PyTree, *context: Any) -> PyTree:
        """The projection of ``point``, given what else is known (x, the client, a sample)."""
        if self.function is None:
            return point
        return self.function(point, *context[: self.arity - 1])

    def distance(self, point: PyTree, *context: Any) -> jax.Array:
        """How far ``point`` is from its projection."""
        return tree.norm(tree.sub(point, self(point, *context)))

    def common(self, point: PyTree) -> PyTree:
        """The projection onto a set that all clients share; a point as it is where they have their own.

        A server takes it after averaging, and clients step from points that they do not project themselves,
        along gradients at their projections: the mean of projected points stays off a boundary on which
        clients disagree, however short their steps.
        """
        return self(point) if self.shared else point

    def own(self, point: PyTree, client: Any) -> PyTree:
        """The projection onto a client's own set; a point as it is where all clients share theirs."""
        return point if self.shared else self(point, client)


@dataclass(frozen=True, repr=False)
class Level(Term):
    """One level of a problem: a function, and what is to be done with it.

    It is a `Term`: call it, or take its mean over samples. An objective that is a sum has one level for each
    part, of the same variable.

    Attributes:
        name: of the function, as in the history and in `fedstrata.constants`.
        variable: which variable it determines: ``"x"`` or ``"y"``.
        arguments: what it takes before the sample: ``"x"``, ``"y"`` or ``"xy"``.
        project: the variable's set.
        seeks: a minimum, a maximum, a ``"zero"`` of a map (on a set the solution of its variational
            inequality), or nothing but its ``"value"``, which the next level takes.
        solved_by: who has the variable: ``"all"`` clients together, each ``"client"`` its own, or each
            ``"sample"``.
        samples: whose samples it sees: ``"train"``, ``"valid"``, ``"server"``; or ``"client"``, where it sees
            a client in place of a sample.
    """

    name: str = ""
    variable: Literal["x", "y"] = "x"
    arguments: Literal["x", "y", "xy"] = "x"
    project: Projection = field(default_factory=Projection)
    seeks: Literal["min", "max", "zero", "value"] = "min"
    solved_by: Literal["all", "client", "sample"] = "all"
    samples: Literal["train", "valid", "server", "client"] = "train"

    @classmethod
    def named(cls, name: str, function: Function, *facts: Any, **more: Any) -> Level:
        """The level of a function, with its marks, under a name; then its variable and so on."""
        term = Term.of(function, name)
        return cls(term.function, term.reads, term.mean, name, *facts, **more)

    def args(self, x: PyTree, y: PyTree) -> tuple[PyTree, ...]:
        """Its arguments at a point, without the sample."""
        return tuple(x if argument == "x" else y for argument in self.arguments)

    def minimised(self) -> Level:
        """The level as a minimisation: a function to be maximised becomes its negative."""
        return replace(self.then(jnp.negative), seeks="min") if self.seeks == "max" else self


class Problem:
    """Base of the problem classes: makes terms of functions and wraps projections when an object is built.

    A field whose metadata is `FUNCTION` holds a `Term` then, or None where that is its default. A class says
    its `levels`; default metrics, checks of shapes, `fedstrata.constants` and `fedstrata.certify` follow.

    Attributes:
        made_for: the clients' weights that the problem's functions assume; None if they fit any.
        same_samples: whether levels on validation samples are meant to see training samples where the data
            has no others.
        local: whether each client has a second variable, or inner values, of its own.
        frozen: arrays that no method changes, such as the parameters of a pre-trained network. Functions get
            them as their last argument, ``loss(x, sample, frozen)``, and all clients share one copy.
        assumes: what the theory of the class's methods assumes, in words.
        objective: the default metric that depends on x alone and should fall, if there is one.
        settling: default metrics that may rise at first, while y approaches its solution, but must stay
            bounded.
    """

    made_for: Weights | None = None
    same_samples: bool = False
    local: bool = False
    frozen: PyTree = None
    assumes: ClassVar[str] = ""
    objective: ClassVar[str | None] = None
    settling: ClassVar[tuple[str, ...]] = ()

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Create an object; an unknown argument is an error that lists the known ones."""
        if options:
            known = inspect.signature(cls.__init__).parameters
            plain = [name for name, p in known.items() if p.kind is not p.VAR_KEYWORD and name != "self"]
            if len(plain) == len(known) - 1:
                check_spelling(cls.__name__, options, plain)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.frozen is not None:
            object.__setattr__(self, "frozen", Frozen.of(self.frozen))
        for f in [f for f in fields(self) if f.init]:  # type: ignore[arg-type]
            value, name = vars(self)[f.name], f"{type(self).__name__}.{f.name}"
            if f.name.startswith("project"):
                object.__setattr__(self, f.name, Projection.of(value, name))
            elif f.metadata.get("function", False) and not (value is None and f.default is None):
                object.__setattr__(self, f.name, self.term(value, name))

    def term(self, function: Function, name: str, *, known: bool = False) -> Term:
        """The term of a user's function, which gets the problem's frozen arrays where it reads samples."""
        term = Term.of(function, name, known=known)
        return term if self.frozen is None or term.reads == "nothing" else term.reading(self.frozen)

    @cached_property
    def held(self) -> tuple[Frozen, ...]:
        """The frozen arrays that its functions read, wherever in them."""
        return tuple({id(f): f for f in reached(self) if isinstance(f, Frozen)}.values())

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__repr__" not in vars(cls):  # or `dataclass` would make one
            cls.__repr__ = Problem.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        return line(type(self).__name__, [f"{name}={value}" for name, value in self._parts().items()])

    def _repr_html_(self) -> str:
        return html.facts(type(self).__name__, self._parts())

    def _parts(self) -> dict[str, str]:
        """The arguments that differ from their defaults, in words."""
        given = {f.name: vars(self)[f.name] for f in fields(self) if f.init}  # type: ignore[arg-type]
        default = {f.name: f.default for f in fields(self)}  # type: ignore[arg-type]
        inner = {n: v.function if isinstance(v, Term | Projection) else v for n, v in given.items()}
        return {n: short(v) for n, v in inner.items() if v is not None and v is not default[n]}

    @property
    def sets(self) -> dict[str, Projection]:
        """The fields that are sets, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Projection)}

    @property
    def set_of_x(self) -> Projection:
        """The set of the main variable; the whole space where the class has none."""
        return self.sets.get("project", self.sets.get("project_x", Projection()))

    @property
    def levels(self) -> tuple[Level, ...]:
        """The problem's levels, those of x first; empty if the class does not declare them."""
        return ()

    @property
    def personal(self) -> bool:
        """Whether every client has a second variable of its own; a result's y has a client axis then."""
        return False

    @property
    def has_y(self) -> bool:
        """Whether there is a second variable; assumed if the class does not declare its levels."""
        return not self.levels or any(level.variable == "y" for level in self.levels)

    @property
    def validated(self) -> str | None:
        """The function meant for validation samples, if there is one."""
        names = [level.name for level in self.levels if level.samples == "valid"]
        return names[0] if names and not self.same_samples else None

    @property
    def without_derivatives(self) -> list[str]:
        """The fields whose functions have no derivatives; see `fedstrata.black_box`."""
        names = [f.name for f in fields(self) if f.init and f.name not in self.sets]  # type: ignore[arg-type]
        return [name for name in names if marked(vars(self)[name], "values_only")]

    def measure(self, mean: Mean, x: PyTree, y: PyTree) -> dict[str, Any]:
        """The default metrics at a point, by the engine's full ``mean``: of every level that is minimised."""
        levels = [level for level in self.levels if level.seeks == "min"]
        return {level.name: self.mean_of(level, mean, x, y) for level in levels}

    def mean_of(self, level: Level, mean: Mean, x: PyTree, y: PyTree) -> Any:
        """The clients' mean of a level at a point."""
        if not (self.personal and "y" in level.arguments):
            return mean(level, *level.args(x, y), part=level.samples)
        return mean(level, *level.args(x, y)[:-1], part=level.samples, each=y)

    def check(self, x: PyTree, y: PyTree, sample: PyTree, valid_sample: PyTree) -> None:
        """Raise if a function does not fit the point or the sample (shapes only)."""
        if self.levels and self.has_y:
            require_y(y, type(self).__name__)
        for level in self.levels:
            if level.seeks in ("min", "zero") and level.samples in ("train", "valid"):
                name = f"{level.name}({', '.join(level.arguments)}, sample)"
                given = (*level.args(x, y), valid_sample if level.samples == "valid" else sample)
                if level.seeks == "min":
                    check_scalar(name, level, *given)
                else:
                    check_like(name, y if level.variable == "y" else x, level, *given)

    def check_values(self, x: PyTree, samples: list[PyTree]) -> str | None:
        """Raise if a property that the user claims of functions fails at a point and a few samples.

        Returns a warning if it fails by little.
        """
        return None

    def check_weights(self, weights: str) -> None:
        """Raise if the weights are unknown, or the problem was made for others."""
        known_weights(weights)
        if self.made_for not in (None, weights):
            raise ValueError(
                f"This {type(self).__name__} was made for weights={self.made_for!r}: give these, or make it "
                f"for others, problem.minimax(data, weights={weights!r})."
            )

    def check_server(self, x: PyTree, sample: PyTree) -> None:
        """Like `check`, for functions of the server's own data; ``sample`` is None if it has none."""

    def start_x(self, x: PyTree) -> PyTree:
        """The start of x: the user's, extended by what the problem adds."""
        return x

    def start_y(self, x: PyTree, y: PyTree, sample: PyTree) -> PyTree:
        """The start of y: the user's, or zeros if y is an auxiliary variable."""
        return y


def require_y(y: PyTree, name: str) -> None:
    """Raise if the start of the second variable is missing."""
    if y is None:
        raise ValueError(f"{name} has two variables: give the start of the second one, solve(…, x0, y0=…).")


def known_weights(weights: str) -> None:
    """Raise unless clients can be weighted like this."""
    if weights not in get_args(Weights):
        raise ValueError(f"weights must be 'uniform' or 'size', but is {weights!r}.")


FUNCTION = {"function": True}  # the metadata of a dataclass field that is a user's function


def shape_of(name: str, function: Function, args: tuple[PyTree, ...]) -> PyTree:
    """The shape of a value, or an error that shows the shapes of the arguments."""
    term = Term.of(function)
    try:
        return term.shape(*args)
    except Exception as error:
        given = ", ".join(map(shapes, args))
        raise TypeError(
            f"{name} cannot be evaluated at the given point and one sample ({given}): "
            f"{type(error).__name__}: {error}\n{hint(error)}"
        ) from error


def check_scalar(name: str, function: Function, *args: PyTree, kind: type = jnp.floating) -> None:
    """The value must be one number, a real one, or of another ``kind`` (shapes only)."""
    value = shape_of(name, function, args)
    leaves, bare = jax.tree.leaves(value), jax.tree_util.all_leaves([value])
    if not bare or leaves[0].shape != () or not jnp.issubdtype(leaves[0].dtype, kind):
        shapes = [f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves]
        returned = shapes if bare or not leaves else f"a {type(value).__name__} of {shapes}"
        real = "real " if kind is jnp.floating else ""
        raise TypeError(f"{name} must return one {real}number for one sample, but returns {returned}.")


def check_like(name: str, like: PyTree, function: Function, *args: PyTree) -> None:
    """The value must have the structure and shapes of ``like``."""
    value = shape_of(name, function, args)
    wanted = [(jax.tree.structure(like), [jnp.shape(leaf) for leaf in jax.tree.leaves(like)])]
    returned = [(jax.tree.structure(value), [leaf.shape for leaf in jax.tree.leaves(value)])]
    if wanted != returned:
        raise TypeError(f"{name} must have the structure and shapes {wanted}, but has {returned}.")
