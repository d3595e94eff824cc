"""The problem classes. Functions take ``(x, …, sample)``, and ``frozen`` if it is given; sets project."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias

import jax
import jax.numpy as jnp

from fedstrata.core import tree
from fedstrata.core.client import Client, Samples
from fedstrata.core.problem import (
    FUNCTION,
    Level,
    Mean,
    Problem,
    check_like,
    check_scalar,
    require_y,
    shape_of,
)
from fedstrata.core.term import Term, positional
from fedstrata.core.types import Function, Integer, PyTree, Real, Weights
from fedstrata.problems.prox import Regularizer
from fedstrata.problems.terms import known, per_sample
from fedstrata.support.shown import shapes

MOST_STEPS = 1_000  # of the solver in an MPEC's metric
NOTHING = 0.01  # added to ‖y‖, because an error relative to a solution near 0 is meaningless


@dataclass(frozen=True)
class Minimization(Problem):
    """``min_x 1/m Σ_i E f_i(x, ξ)`` over ``∩ X_i``.

    Args:
        loss: ``loss(x, sample)``, a real number.
        project: the projection onto the set of x: ``project(x)``, or ``project(x, client)`` for a client's
            own set X_i.
        frozen: arrays that are held constant, see `fedstrata.with_frozen`.

    >>> import fedstrata as fs
    >>> problem = fs.Minimization(lambda x, s: (s["a"] @ x - s["b"]) ** 2, project=fs.sets.Ball(1.0))
    """

    loss: Function = field(metadata=FUNCTION)
    project: Any = None
    frozen: PyTree = field(default=None, kw_only=True)

    objective = "loss"

    @property
    def levels(self) -> tuple[Level, ...]:
        return (Level.named("loss", self.loss, project=self.project),)


@dataclass(frozen=True)
class Bilevel(Problem):
    """``min_x 1/m Σ E f_i(x, y(x), ξ)`` with ``y(x) = argmin_{y ∈ Y(x)} 1/m Σ E h_i(x, y, ζ)``.

    With ``local=True`` every client has its own lower level, ``1/m Σ E f_i(x, y_i(x), ξ)`` with
    ``y_i(x) = argmin_{y ∈ Y_i(x)} E h_i(x, y, ζ)``: personal heads on a common representation, meta-learning.
    A result's y then has a leading client axis.

    Args:
        upper: the loss ``upper(x, y, sample)``, on validation samples if the data has them.
        lower: the loss ``lower(x, y, sample)``, on training samples.
        project_x: the projection onto the set of x, ``project_x(x)`` or ``project_x(x, client)``.
        project_y: the projection onto the set of y, ``project_y(y)``, ``project_y(y, x)`` or
            ``project_y(y, x, client)``.
        made_for: the clients' weights that the functions contain, see `fedstrata.dro`.
        same_samples: whether both levels deliberately use the same samples; otherwise `fedstrata.solve` warns
            if the data has no validation part.
        local: whether every client has its own lower level and its own y.
        frozen: arrays that are held constant, see `fedstrata.with_frozen`.
    """

    upper: Function = field(metadata=FUNCTION)
    lower: Function = field(metadata=FUNCTION)
    project_x: Any = None
    project_y: Any = None
    made_for: Weights | None = field(default=None, kw_only=True)
    same_samples: bool = field(default=False, kw_only=True)
    local: bool = field(default=False, kw_only=True)
    frozen: PyTree = field(default=None, kw_only=True)

    assumes = "a lower level strongly convex in y"
    settling = ("upper",)

    @property
    def personal(self) -> bool:
        return self.local

    @property
    def levels(self) -> tuple[Level, ...]:
        x, y = ("x", "xy", self.project_x), ("y", "xy", self.project_y)
        by: Literal["all", "client"] = "client" if self.personal else "all"
        return (
            Level.named("upper", self.upper, *x, samples="valid"),
            Level.named("lower", self.lower, *y, solved_by=by),
        )


@dataclass(frozen=True)
class Minimax(Problem):
    """``min_x max_{y ∈ Y(x)} 1/m Σ E f_i(x, y, ξ)``.

    Args:
        payoff: ``payoff(x, y, sample)``, which x minimises and y maximises.
        project_x: the projection onto the set of x, ``project_x(x)`` or ``project_x(x, client)``.
        project_y: the projection onto the set of y, ``project_y(y)`` or ``project_y(y, x)``.
        made_for: the clients' weights that the payoff contains, see `fedstrata.dro`.
        frozen: arrays that are held constant, see `fedstrata.with_frozen`.
    """

    payoff: Function = field(metadata=FUNCTION)
    project_x: Any = None
    project_y: Any = None
    made_for: Weights | None = field(default=None, kw_only=True)
    frozen: PyTree = field(default=None, kw_only=True)

    assumes = "a payoff strongly concave in y"
    settling = ("payoff",)

    @property
    def levels(self) -> tuple[Level, ...]:
        x, y = ("x", "xy", self.project_x), ("y", "xy", self.project_y)
        return (
            Level.named("payoff", self.payoff, *x),
            Level.named("lower", self.payoff, *y, seeks="max"),
        )


@dataclass(frozen=True)
class MPEC(Problem):
    """``min_x 1/m Σ E f_i(x, y(x, ξ), ξ)`` where ``y(x, ξ)`` solves VI(Y(x, ξ), G(x, ·, ξ)).

    Args:
        leader: the leader's loss ``leader(x, y, sample)``.
        follower: the followers' map ``G(x, y, sample)``, which returns a pytree like y.
        project_x: the projection onto the set of x, ``project_x(x)`` or ``project_x(x, client)``.
        project_y: the projection onto the set of y, ``project_y(y)``, ``project_y(y, x)`` or
            ``project_y(y, x, sample)``.
        solution: ``solution(x, sample)`` returns y(x, ξ), if it is known or another program computes it. The
            default metric, the leader's loss at equilibrium, uses it; without it every evaluation solves the
            inequality of every sample by at most 1,000 extragradient steps.
        frozen: arrays that are held constant, see `fedstrata.with_frozen`.

    >>> import fedstrata as fs
    >>> problem = fs.MPEC(  # y(x, ξ) = max(0, x − ξ)
    ...     leader=lambda x, y, s: (x + 1 - y) ** 2,
    ...     follower=lambda x, y, s: y - (x - s["a"]),
    ...     project_y=fs.sets.NonNegative(),
    ... )
    """

    leader: Function = field(metadata=FUNCTION)
    follower: Function = field(metadata=FUNCTION)
    project_x: Any = None
    project_y: Any = None
    solution: Function | None = field(default=None, metadata=FUNCTION)
    frozen: PyTree = field(default=None, kw_only=True)

    assumes = "a follower's map strongly monotone in y"
    objective = "leader"

    @property
    def levels(self) -> tuple[Level, ...]:
        x, y = ("x", "xy", self.project_x), ("y", "xy", self.project_y)
        return (
            Level.named("leader", self.leader, *x),
            Level.named("follower", self.follower, *y, seeks="zero", solved_by="sample"),
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("leader", "follower", "solution"):
            if (function := vars(self)[name]) is None:
                continue
            if per_sample(function, f"MPEC.{name}", "every sample has its own equilibrium").draws:
                raise TypeError(
                    f"MPEC.{name} cannot be marked fs.stochastic, because every sample has one equilibrium."
                )

    def measure(self, mean: Mean, x: PyTree, y: PyTree) -> dict[str, Any]:
        """The leader's loss at equilibrium: by ``solution``, or from the clients' responses ``y``.

        Without a solution also "unsolved", the part of the samples whose equilibrium was not found, for which
        the client's response counts; and nothing if only a black box finds it, as that may be slow.
        """
        solution = self.solution
        if solution is not None:
            return {"leader": mean(lambda x, sample: self.leader(x, solution(x, sample), sample), x)}
        if "follower" in self.without_derivatives:
            return {}
        found: dict[str, Any] = mean(self._at_equilibrium, x, each=y)
        return found

    def _at_equilibrium(self, x: PyTree, start: PyTree, sample: PyTree) -> dict[str, jax.Array]:
        from fedstrata.estimators import vi

        def like(y: PyTree) -> PyTree:  # samples may be in double precision
            return jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), y, start)

        with jax.disable_jit(False):  # where rounds are not compiled, a thousand steps are
            found = vi.extragradient(
                lambda y: like(self.follower(x, y, sample)),
                lambda y: like(self.project_y(y, x, sample)),
                start,
                max_steps=MOST_STEPS,
            )
        solved = (found.steps < MOST_STEPS) & jnp.isfinite(tree.norm(found.y))
        y = jax.tree.map(lambda new, old: jnp.where(solved, new, old), found.y, start)
        return {"leader": self.leader(x, y, sample), "unsolved": 1.0 - solved}

    def check(self, x: PyTree, y: PyTree, sample: PyTree, valid_sample: PyTree) -> None:
        super().check(x, y, sample, valid_sample)
        if self.solution is not None:
            check_like("solution(x, sample)", y, self.solution, x, sample)

    def check_values(self, x: PyTree, samples: list[PyTree]) -> str | None:
        """A warning if ``solution`` does not solve the variational inequalities of these samples."""
        if self.solution is None:
            return None
        at = self.project_x.common(x)
        residuals = [tuple(map(float, self._gap(at, sample))) for sample in samples]
        y, gap = max(residuals, key=lambda each: each[1] / (each[0] + NOTHING))
        words = (
            f"MPEC.solution is {gap:.3g} off at x0, where ‖y‖ = {y:.3g}: this is the residual ‖y − P_Y(y − s "
            "G(x, y))‖ of MPEC.follower at a client's first sample, with s = 1/L for G's Lipschitz constant "
            "L, which should be 0. The metric 'leader' uses solution. Check the signs of both functions."
        )
        if gap > 0.5 * (y + NOTHING):
            raise ValueError(f"{words} Correct it, or leave solution out.")
        return words if gap > 0.01 * (y + NOTHING) else None

    def _gap(self, x: PyTree, sample: PyTree) -> tuple[Any, Any]:
        """‖y‖ and ‖y − P_Y(y − s G(x, y))‖ at the given solution y, s = 1/L with L from one difference."""
        assert self.solution is not None
        y = self.solution(x, sample)
        away = jax.tree.map(lambda leaf: 0.1 * (1 + jnp.abs(leaf)), y)
        G, further = self.follower(x, y, sample), self.follower(x, tree.add(y, away), sample)
        L = tree.norm(tree.sub(further, G)) / tree.norm(away)
        moved = tree.axpy(-1 / jnp.where(L > 0, L, 1), G, y)
        return tree.norm(y), tree.norm(tree.sub(y, self.project_y(moved, x, sample)))


# The user's argument for a level of a selection: a function, a regulariser, or a pair of both.
Parts: TypeAlias = Function | Regularizer | Sequence[Function | Regularizer]


@dataclass(frozen=True)
class Objective:
    """One level of a `Selection`: the sum of up to three parts, each of which may be None.

    Args:
        loss: ``loss(x, sample)``, averaged over the clients.
        known: ``known(x)``, a smooth function without data.
        regularizer: a nonsmooth function with a proximal map, without data.
    """

    loss: Term | None = None
    known: Function | None = None
    regularizer: Regularizer | None = None

    @classmethod
    def of(cls, given: Parts, name: str, term_of: Callable[..., Term]) -> Objective:
        """From the user's argument: a function, a regulariser, or a pair of both."""
        parts = given if isinstance(given, tuple | list) else (given,)
        sides: dict[bool, list[Any]] = {True: [], False: []}
        for part in parts:
            sides[isinstance(part, Regularizer)].append(part)
        regularizers, functions = sides[True], sides[False]
        if len(regularizers) > 1 or len(functions) > 1 or not all(map(callable, functions)) or not parts:
            raise TypeError(
                f"{name} must be a function of (x, sample), a regulariser such as fs.prox.L1(), or a pair of "
                f"both, but is {given!r}."
            )
        regularizer = regularizers[0] if regularizers else None
        if not functions:
            return cls(regularizer=regularizer)
        term = term_of(functions[0], name, known=True)
        if term.reads == "nothing":
            return cls(known=term, regularizer=regularizer)
        return cls(term, regularizer=regularizer)

    def measure(self, mean: Mean, x: PyTree, part: str = "train") -> Any:
        """The value at x, without a set's indicator, which is infinite outside the set."""
        total: Any = 0.0
        if self.loss is not None:
            total = mean(self.loss, x, part=part)
        if self.known is not None:
            total = total + self.known(x)
        if self.regularizer is not None and self.regularizer.finite:
            total = total + self.regularizer.value(x)
        return total

    def check(self, name: str, x: PyTree, sample: PyTree) -> None:
        """Raise if the shapes of a part do not fit the point or the sample."""
        if self.loss is not None:
            check_scalar(f"{name}(x, sample)", self.loss, x, sample)
        if self.known is not None:
            check_scalar(f"{name}(x)", self.known, x)
        if self.regularizer is not None:
            check_like(f"The prox of {name}", x, lambda x: self.regularizer.prox(x, 1.0), x)  # type: ignore[union-attr]


@dataclass(frozen=True)
class Selection(Problem):
    """``min_x f(x)`` over ``x ∈ argmin h``: among the optima of the primary h, the best by the secondary f.

    Each of the two is a function, a regulariser (nonsmooth, with a proximal map), or a pair ``(function,
    regulariser)``, which stands for their sum. A function of x alone does not depend on data.

    Args:
        primary: the primary loss h: ``primary(x, sample)``, on training samples.
        secondary: the secondary loss f: ``secondary(x, sample)``, on validation samples if the data has them,
            or ``secondary(x)``.
        project: the projection onto a set of x, ``project(x)`` or ``project(x, client)``.
        same_samples: as in `Bilevel`.
        frozen: arrays that are held constant, see `fedstrata.with_frozen`.

    Attributes:
        h: the primary level.
        f: the secondary level.

    >>> import fedstrata as fs
    >>> def residual(x, s):
    ...     return 0.5 * (s["a"] @ x - s["b"]) ** 2
    >>> sparsest = fs.Selection(residual, fs.prox.L1())
    >>> smallest_lasso = fs.Selection((residual, fs.prox.L1(0.1)), lambda x: 0.5 * (x @ x))
    """

    primary: Parts
    secondary: Parts
    project: Any = None
    same_samples: bool = field(default=False, kw_only=True)
    frozen: PyTree = field(default=None, kw_only=True)
    h: Objective = field(init=False, repr=False, compare=False)
    f: Objective = field(init=False, repr=False, compare=False)

    assumes = "a convex primary loss"
    settling = ("primary",)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "h", Objective.of(self.primary, "Selection.primary", self.term))
        object.__setattr__(self, "f", Objective.of(self.secondary, "Selection.secondary", self.term))

    @property
    def levels(self) -> tuple[Level, ...]:
        """The losses f and h; functions without data and regularisers are left out."""
        secondary = () if self.f.loss is None else (Level.named("secondary", self.f.loss, samples="valid"),)
        return (
            *secondary,
            *(() if self.h.loss is None else (Level.named("primary", self.h.loss, project=self.project),)),
        )

    @property
    def has_y(self) -> bool:
        return False

    def measure(self, mean: Mean, x: PyTree, y: PyTree) -> dict[str, Any]:
        return {"primary": self.h.measure(mean, x), "secondary": self.f.measure(mean, x, part="valid")}

    def check(self, x: PyTree, y: PyTree, sample: PyTree, valid_sample: PyTree) -> None:
        self.h.check("primary", x, sample)
        self.f.check("secondary", x, valid_sample)


@dataclass(frozen=True)
class Personalized(Problem):
    """``min_x E f₁(x, ξ) + 1/m Σ f₂(x, y_i(x))``, ``y_i(x) = argmin_{Y_i(x)} E h_i(x, y, ζ)``.

    Args:
        server: the server's loss f₁, ``server(x, sample)``, on the server's data.
        coupling: the coupling f₂, ``coupling(x, y)``, or ``coupling(x, y, client)`` if it depends on the
            client (its ``index``, its ``fraction`` of the samples).
        client: the clients' loss h_i, ``client(x, y, sample)``, on the client's data.
        project_y: the projection onto Y_i(x), ``project_y(y)``, ``project_y(y, x)`` or
            ``project_y(y, x, client)``.
        frozen: arrays that are held constant, see `fedstrata.with_frozen`.

    >>> import fedstrata as fs, jax.numpy as jnp
    >>> problem = fs.Personalized(
    ...     server=lambda x, s: (s["a"] @ x - s["b"]) ** 2,
    ...     coupling=lambda x, y: 0.1 * ((x - y) ** 2).sum(),
    ...     client=lambda x, y, s: (s["a"] @ y - s["b"]) ** 2 + 0.5 * ((x - y) ** 2).sum(),
    ... )
    """

    server: Function = field(metadata=FUNCTION)
    coupling: Function
    client: Function = field(metadata=FUNCTION)
    project_y: Any = None
    frozen: PyTree = field(default=None, kw_only=True)

    personal = True
    assumes = "clients' losses strongly convex in y"
    settling = ("objective",)

    @property
    def levels(self) -> tuple[Level, ...]:
        y = ("y", "xy", self.project_y)
        return (
            Level.named("server", self.server, samples="server"),
            Level.named("coupling", self.couple, arguments="xy", samples="client"),
            Level.named("client", self.client, *y, solved_by="client"),
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.coupling) or isinstance(self.coupling, Term):
            raise TypeError(
                "Personalized.coupling must be a function of (x, y) or (x, y, client), without a sample, "
                f"but is {self.coupling!r}."
            )

    def couple(self, x: PyTree, y: PyTree, client: Client) -> Any:
        """f₂ of one client."""
        return self.coupling(x, y, client) if positional(self.coupling) == 3 else self.coupling(x, y)

    def measure(self, mean: Mean, x: PyTree, y: PyTree) -> dict[str, Any]:
        """The means of f₁, of f₂ and of h_i at the clients' models, and the objective f₁ + f₂."""
        metrics = super().measure(mean, x, y)
        return {**metrics, "objective": metrics["server"] + metrics["coupling"]}

    def check(self, x: PyTree, y: PyTree, sample: PyTree, valid_sample: PyTree) -> None:
        super().check(x, y, sample, valid_sample)
        number, part = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.result_type(float))
        only = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype), sample)

        def couple(x: PyTree, y: PyTree, index: Integer, fraction: Real, data: PyTree) -> Any:
            own = Samples(data, 1)
            return self.couple(x, y, Client(index, own, own, fraction=fraction))

        check_scalar("coupling(x, y) or coupling(x, y, client)", couple, x, y, number, part, only)

    def check_server(self, x: PyTree, sample: PyTree) -> None:
        if sample is None:
            raise ValueError(
                "Personalized needs data at the server: give FederatedData.from_clients(…, server=…), or a "
                "loader's server_fraction."
            )
        check_scalar("server(x, sample)", self.server, x, sample)


@dataclass(frozen=True)
class Composition(Problem):
    """``min_x h(x) + f^N(… f^1(f^0(x)))``, where levels are federated means and the outermost is scalar.

    Methods track the inner values z^n = f^{n−1}(z^{n−1}), which are not a second variable. With
    ``local=True`` the inner means are over each client's own samples, and the objective is the mean of the
    clients' compositions, ``1/m Σ f_i^N(… f_i^0(x))``: meta-learning, AUPRC, invariant risks.

    Args:
        levels: the levels, innermost first: ``f(z, sample)`` for a federated mean, ``f(z)`` for a function
            without data. If the outermost is a `LogMeanExp`, the identity is added after it.
        plain: the loss h, ``plain(x, sample)``, or None.
        local: whether means are over each client's own samples.
        frozen: arrays that are held constant, see `fedstrata.with_frozen`.

    >>> import fedstrata as fs, jax.numpy as jnp
    >>> problem = fs.Composition([lambda x, s: jnp.exp(s["a"] @ x), jnp.log])  # log E exp(aᵀx)
    """

    levels: Any = ()  # given as a sequence of functions, stored as a tuple of `Level`s
    plain: Function | None = field(default=None, metadata=FUNCTION)
    local: bool = field(default=False, kw_only=True)
    frozen: PyTree = field(default=None, kw_only=True)

    assumes = "smooth levels"
    objective: ClassVar[str | None] = "objective"

    @property
    def lifted(self) -> bool:
        """Whether its main variable is (x, η), with a risk's threshold."""
        return False

    def exact(self) -> Composition:
        """The problem that methods with multipliers solve: without the penalty, where it has one."""
        return self

    def __post_init__(self) -> None:
        super().__post_init__()
        levels = (self.levels,) if callable(self.levels) else tuple(self.levels)
        if not levels or not all(callable(level) for level in levels):
            raise TypeError(f"Composition.levels must be functions, innermost first, but is {self.levels!r}.")
        terms = tuple(self.term(f, f"levels[{n}]", known=True) for n, f in enumerate(levels))
        if (
            terms[-1].mean is not None
        ):  # its gradient is not a mean over clients, so it is tracked like the inner levels
            terms = (*terms, Term(_identity, "nothing"))
        names = [f"levels[{n}]" for n in range(len(terms))]
        levels = tuple(Level.named(name, f, seeks="value") for name, f in zip(names, terms, strict=True))
        object.__setattr__(self, "levels", levels)

    def client_value(self, x: PyTree, client: Client) -> Any:
        """The composition of one client's own means."""
        z = x
        for level in self.levels:
            z = level(z) if known(level) else client.train.full_mean(level).silent(z)
        return z

    def measure(self, mean: Mean, x: PyTree, y: PyTree) -> dict[str, Any]:
        z = mean(self.client_value, x, part="client") if self.local else x
        for level in () if self.local else self.levels:
            z = level(z) if known(level) else mean(level, z)
        return {"objective": z if self.plain is None else z + mean(self.plain, x)}

    def start_y(self, x: PyTree, y: PyTree, sample: PyTree) -> PyTree:
        """Zeros with the shapes of the inner values z¹, …, z^N, innermost first."""
        shapes, z = [], x
        for n, level in enumerate(self.levels[:-1]):
            z = shape_of(f"levels[{n}]", level, _arguments(level, z, sample))
            shapes.append(z)
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tuple(shapes))

    def check(self, x: PyTree, y: PyTree, sample: PyTree, valid_sample: PyTree) -> None:
        if y is not None:
            raise ValueError(
                "A Composition has one variable; its inner values are computed by the method. Leave y0 out."
            )
        z = x
        for n, level in enumerate(self.levels):
            name = f"levels[{n}]" + ("(z)" if known(level) else "(z, sample)")
            if n == len(self.levels) - 1:
                check_scalar(name, level, *_arguments(level, z, sample))
            else:
                z = shape_of(name, level, _arguments(level, z, sample))
        if self.plain is not None:
            check_scalar("plain(x, sample)", self.plain, x, sample)


def _identity(z: PyTree) -> PyTree:
    return z


def _arguments(level: Function, z: PyTree, sample: PyTree) -> tuple[PyTree, ...]:
    return (z,) if known(level) else (z, sample)


@dataclass(frozen=True)
class MultiSequence(Problem):
    """Find x, z¹ … z^N with ``Σ_m P^m(x, Z) = 0`` and ``Σ_m S^{m,n}(z^{n−1}, z^n) = 0``, where z⁰ = x.

    The second variable is the tuple Z = (z¹, …, z^N), also for N = 1. `fedstrata.as_multisequence` converts
    `Bilevel`, `Minimax` and `Composition`.

    Args:
        P: the map ``P(x, Z, sample)``, which returns a pytree like x.
        S: the maps ``S_n(z_before, z, sample)``, one per sequence, each of which returns a pytree like zⁿ.
        frozen: arrays that are held constant, see `fedstrata.with_frozen`.

    >>> import fedstrata as fs
    >>> problem = fs.MultiSequence(
    ...     P=lambda x, Z, s: x + Z[0], S=[lambda x, z, s: 2 * z - s["b"] - x]
    ... )
    """

    P: Function = field(metadata=FUNCTION)
    S: tuple[Function, ...] = ()
    frozen: PyTree = field(default=None, kw_only=True)

    assumes = "maps S strongly monotone in z"
    settling = ("P", "S")

    @property
    def levels(self) -> tuple[Level, ...]:
        S = [Level.named(f"S[{n}]", s, "y", seeks="zero") for n, s in enumerate(self.S)]
        return (Level.named("P", self.P, "x", arguments="xy", seeks="zero"), *S)

    def __post_init__(self) -> None:
        super().__post_init__()
        sequences = (self.S,) if callable(self.S) else tuple(self.S)
        if not sequences or not all(callable(s) for s in sequences):
            raise TypeError(f"MultiSequence.S must be one function per sequence, but is {self.S!r}.")
        object.__setattr__(self, "S", tuple(self.term(s, f"S[{n}]") for n, s in enumerate(sequences)))

    def measure(self, mean: Mean, x: PyTree, y: PyTree) -> dict[str, Any]:
        """The norms of P and of all S together."""
        S = [mean(s, before, z) for s, before, z in zip(self.S, (x, *y), y, strict=False)]
        return {"P": tree.norm(mean(self.P, x, y)), "S": tree.norm(S)}

    def check(self, x: PyTree, y: PyTree, sample: PyTree, valid_sample: PyTree) -> None:
        require_y(y, "MultiSequence")
        if not isinstance(y, tuple) or len(y) != len(self.S):
            given = f"a tuple of {len(y)}" if isinstance(y, tuple) else shapes(y)
            wanted = ", ".join(f"z{n + 1}" for n in range(len(self.S))) + "," * (len(self.S) == 1)
            raise ValueError(
                f"y0 must be a tuple ({wanted}) with the start of each sequence, but is {given}."
            )
        check_like("P(x, Z, sample)", x, self.P, x, y, sample)
        for n, S in enumerate(self.S):
            check_like(f"S[{n}](z_before, z, sample)", y[n], S, (x, *y)[n], y[n], sample)
