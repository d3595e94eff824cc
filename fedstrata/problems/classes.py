"""The problem classes. Functions take ``(x, …, sample)``; sets are projections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedstrata import tree
from fedstrata.problems.base import (
    Function,
    Mean,
    Problem,
    Projection,
    PyTree,
    check_like,
    check_scalar,
    function,
    positional,
)


@dataclass(frozen=True)
class Minimization(Problem):
    """``min_x 1/m Σ_i E f_i(x, ξ)`` over ``∩ X_i``.

    Args:
        loss: ``loss(x, sample)``, one real number.
        project: ``project(x)``, or ``project(x, client)`` for a client's own set X_i.

    >>> import fedstrata as fs
    >>> problem = fs.Minimization(lambda x, s: (s["a"] @ x - s["b"]) ** 2, project=fs.sets.Ball(1.0))
    """

    loss: Function = function()
    project: Any = None

    def measure(self, mean: Mean, x: PyTree, y: PyTree) -> dict[str, Any]:
        return {"loss": mean(self.loss, x)}

    def check(self, x: PyTree, y: PyTree, sample: PyTree, valid_sample: PyTree) -> None:
        check_scalar("loss(x, sample)", self.loss, x, sample)


@dataclass(frozen=True)
class Bilevel(Problem):
    """``min_x 1/m Σ E f_i(x, y(x), ξ)`` with ``y(x) = argmin_{y ∈ Y(x)} 1/m Σ E h_i(x, y, ζ)``.

    Args:
        upper: ``upper(x, y, sample)``, on validation samples where the data has them.
        lower: ``lower(x, y, sample)``, on training samples.
        project_x: the set of x, ``project_x(x)`` or ``project_x(x, client)``.
        project_y: the set of y, ``project_y(y)``, ``project_y(y, x)`` or ``project_y(y, x, client)``.
    """

    upper: Function = function()
    lower: Function = function()
    project_x: Any = None
    project_y: Any = None

    def measure(self, mean: Mean, x: PyTree, y: PyTree) -> dict[str, Any]:
        return {"upper": mean(self.upper, x, y, part="valid"), "lower": mean(self.lower, x, y)}

    def check(self, x: PyTree, y: PyTree, sample: PyTree, valid_sample: PyTree) -> None:
        require_y(y, "Bilevel")
        check_scalar("upper(x, y, sample)", self.upper, x, y, valid_sample)
        check_scalar("lower(x, y, sample)", self.lower, x, y, sample)


@dataclass(frozen=True)
class Minimax(Problem):
    """``min_x max_{y ∈ Y(x)} 1/m Σ E f_i(x, y, ξ)``.

    Args:
        payoff: ``payoff(x, y, sample)``; x makes it small, y makes it large.
        project_x: the set of x, ``project_x(x)`` or ``project_x(x, client)``.
        project_y: the set of y, ``project_y(y)`` or ``project_y(y, x)``.
    """

    payoff: Function = function()
    project_x: Any = None
    project_y: Any = None

    def measure(self, mean: Mean, x: PyTree, y: PyTree) -> dict[str, Any]:
        return {"payoff": mean(self.payoff, x, y)}

    def check(self, x: PyTree, y: PyTree, sample: PyTree, valid_sample: PyTree) -> None:
        require_y(y, "Minimax")
        check_scalar("payoff(x, y, sample)", self.payoff, x, y, sample)


@dataclass(frozen=True)
class MPEC(Problem):
    """``min_x 1/m Σ E f_i(x, y(x, ξ), ξ)`` where ``y(x, ξ)`` solves the variational inequality VI(Y(x, ξ), G(x, ·, ξ)).

    Args:
        leader: ``leader(x, y, sample)``.
        follower: the map ``G(x, y, sample)``, of the structure of y.
        project_x: the set of x, ``project_x(x)`` or ``project_x(x, client)``.
        project_y: the set of y, ``project_y(y)``, ``project_y(y, x)`` or ``project_y(y, x, sample)``.
    """

    leader: Function = function()
    follower: Function = function()
    project_x: Any = None
    project_y: Any = None

    def measure(self, mean: Mean, x: PyTree, y: PyTree) -> dict[str, Any]:
        return {}

    def check(self, x: PyTree, y: PyTree, sample: PyTree, valid_sample: PyTree) -> None:
        require_y(y, "MPEC")
        check_scalar("leader(x, y, sample)", self.leader, x, y, sample)
        check_like("follower(x, y, sample)", y, self.follower, x, y, sample)


@dataclass(frozen=True)
class Selection(Problem):
    """``min_x f(x)`` over ``x ∈ argmin h``: among the optima of the primary loss h, the best by the secondary f.

    Args:
        primary: ``primary(x, sample)``, h.
        secondary: ``secondary(x, sample)``, f.
        project: a set of x, ``project(x)``.
    """

    primary: Function = function()
    secondary: Function = function()
    project: Any = None

    def measure(self, mean: Mean, x: PyTree, y: PyTree) -> dict[str, Any]:
        return {"primary": mean(self.primary, x), "secondary": mean(self.secondary, x)}

    def check(self, x: PyTree, y: PyTree, sample: PyTree, valid_sample: PyTree) -> None:
        check_scalar("primary(x, sample)", self.primary, x, sample)
        check_scalar("secondary(x, sample)", self.secondary, x, sample)


@dataclass(frozen=True)
class Personalized(Problem):
    """``min_x E f₁(x, ξ) + 1/m Σ f₂(x, y_i(x))`` with ``y_i(x) = argmin_{Y_i(x)} E h_i(x, y, ζ)``, one model per client.

    Args:
        server: ``server(x, sample)``, f₁, on the server's own data.
        coupling: ``coupling(x, y)``, or ``coupling(x, y, client)`` where it depends on the client.
        client: ``client(x, y, sample)``, h_i, on the client's data.
        project_y: the set Y_i(x), ``project_y(y)``, ``project_y(y, x)`` or ``project_y(y, x, client)``.
    """

    server: Function = function()
    coupling: Function = function()
    client: Function = function()
    project_y: Any = None

    def measure(self, mean: Mean, x: PyTree, y: PyTree) -> dict[str, Any]:
        return {"client": mean(self.client, x, each=y)}

    def check(self, x: PyTree, y: PyTree, sample: PyTree, valid_sample: PyTree) -> None:
        require_y(y, "Personalized")
        check_scalar("client(x, y, sample)", self.client, x, y, sample)


@dataclass(frozen=True)
class Composition(Problem):
    """``min_x h(x) + f(g_N(… g_1(x)))``, where levels are federated means and the outermost is scalar.

    Args:
        levels: from the innermost to the outermost: ``g(z, sample)`` for a federated mean, ``g(z)`` for a function that
            everyone knows.
        plain: ``plain(x, sample)``, h, or None.
    """

    levels: tuple[Function, ...] = ()
    plain: Function | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", tuple(self.levels))
        if not self.levels or not all(callable(level) for level in self.levels):
            raise TypeError(f"Composition.levels must be functions, from the innermost on, but is {self.levels!r}.")
        if self.plain is not None and not callable(self.plain):
            raise TypeError(f"Composition.plain must be a function of (x, sample), but is {self.plain!r}.")
        super().__post_init__()

    def measure(self, mean: Mean, x: PyTree, y: PyTree) -> dict[str, Any]:
        z = x
        for level in self.levels:
            z = level(z) if positional(level) == 1 else mean(level, z)
        return {"objective": z if self.plain is None else z + mean(self.plain, x)}


@dataclass(frozen=True)
class MultiSequence(Problem):
    """Find x, z¹ … z^N with ``Σ_m P^m(x, Z) = 0`` and ``Σ_m S^{m,n}(z^{n−1}, z^n) = 0``, where z⁰ = x.

    Args:
        P: ``P(x, Z, sample)``, of the structure of x; Z is the tuple (z¹, …, z^N).
        S: functions ``S_n(z_before, z, sample)``, of the structure of zⁿ, one per sequence.
    """

    P: Function = function()
    S: tuple[Function, ...] = ()

    def __post_init__(self) -> None:
        sequences = (self.S,) if callable(self.S) else tuple(self.S)
        object.__setattr__(self, "S", sequences)
        if not sequences or not all(callable(s) for s in sequences):
            raise TypeError(f"MultiSequence.S must be one function per sequence, but is {self.S!r}.")
        super().__post_init__()

    def measure(self, mean: Mean, x: PyTree, y: PyTree) -> dict[str, Any]:
        return {"residual": tree.norm(mean(self.P, x, y))}


def require_y(y: PyTree, name: str) -> None:
    """Problems with a second variable need its starting point."""
    if y is None:
        raise ValueError(f"{name} has two variables: give the start of the second one, solve(…, x0, y0=…).")


__all__ = [
    "MPEC",
    "Bilevel",
    "Composition",
    "Minimax",
    "Minimization",
    "MultiSequence",
    "Personalized",
    "Projection",
    "Selection",
]
