"""One problem in another's form, so that it can be given to methods of the other class.

    as_multisequence   Bilevel, Minimax, Composition → MultiSequence
    as_bilevel         Minimax, two-level Composition → Bilevel

Methods that list a class among those they solve take it as it is, and draw each level's samples apart; a
converted problem is for methods (and questions) that know one form only. Equal problems convert to equal
problems, so compiled programs are shared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from fedstrata.core import tree
from fedstrata.core.problem import Function, Problem, PyTree
from fedstrata.problems.classes import Bilevel, Composition, Minimax, MultiSequence, known
from fedstrata.problems.levels import ARITHMETIC, rule_of


def as_multisequence(problem: Problem) -> MultiSequence:
    """The maps P and S of a problem, each for one sample.

    Args:
        problem: `Bilevel` (one sequence, the pair ``(w, v)``), `Minimax` (one sequence, y), `Composition`
            (one sequence, the pair of tuples ``(z, a)`` of its values and adjoints), or `MultiSequence`,
            returned as it is.

    Raises:
        TypeError: for other classes.
        ValueError: for a set of x or y, which a system of equations has no place for.

    A composition's product of Jacobians has a factor from each level, and one sample for all of them would
    bias it; with adjoints every map is linear in means over samples. Both levels of a `Bilevel` see the same
    sample here. Where the data has validation samples, give the method the `Bilevel` itself.

    >>> import fedstrata as fs
    >>> sequences = fs.as_multisequence(fs.quadratic_bilevel(clients=3, n=2, p=4).problem)
    >>> len(sequences.S)
    1
    """
    if isinstance(problem, MultiSequence):
        return problem
    _refuse_sets(problem, "MultiSequence")
    if isinstance(problem, Bilevel):
        return MultiSequence(
            _BilevelP(problem.upper, problem.lower), (_BilevelS(problem.upper, problem.lower),)
        )
    if isinstance(problem, Minimax):
        return MultiSequence(_MinimaxP(problem.payoff), (_MinimaxS(problem.payoff),))
    if isinstance(problem, Composition):
        if rule_of(problem.levels[-1]) is not ARITHMETIC:  # the identity above it is the outermost level then
            problem = Composition((*problem.levels, _identity), problem.plain)
        if len(problem.levels) == 1:
            raise ValueError("A composition of one level has no inner sequence: use Minimization.")
        return MultiSequence(_CompositionP(problem), (_CompositionS(problem),))
    raise TypeError(f"{type(problem).__name__} is no MultiSequence: Bilevel, Minimax and Composition are.")


def as_bilevel(problem: Problem) -> Bilevel:
    """A minimax problem or a two-level composition as a bilevel problem.

        min_x max_y f(x, y):   upper f,   lower −f
        min_x h(x) + f(g(x)):  upper h(x) + f(y),   lower ½‖y − g(x)‖²

    Args:
        problem: `Minimax` or a `Composition` of two levels, or `Bilevel`, returned as it is.

    Raises:
        TypeError: for other classes.
        ValueError: for a composition of more than two levels.

    >>> import fedstrata as fs
    >>> fs.as_bilevel(fs.Minimax(lambda x, y, s: x * y - y**2)).lower(3.0, 1.0, None)
    -2.0
    """
    if isinstance(problem, Bilevel):
        return problem
    if isinstance(problem, Minimax):
        return Bilevel(problem.payoff, _Negative(problem.payoff), problem.project_x, problem.project_y)
    if isinstance(problem, Composition):
        if len(problem.levels) != 2:
            raise ValueError(f"A composition of {len(problem.levels)} levels is not bilevel: two levels are.")
        if rule_of(problem.levels[0]) is not ARITHMETIC:
            raise ValueError("A level that is followed as its logarithm is no solution of least squares.")
        return Bilevel(_Outer(problem.levels[1], problem.plain), _Tracking(problem.levels[0]))
    raise TypeError(f"{type(problem).__name__} is not bilevel: Minimax and two-level Composition are.")


def _refuse_sets(problem: Any, name: str) -> None:
    for field in ("project_x", "project_y"):
        projection = getattr(problem, field, None)
        if projection is not None and not projection.trivial:
            raise ValueError(
                f"A {name} has no sets, but this {type(problem).__name__} has {field}. Leave it out."
            )


def _identity(z: PyTree) -> PyTree:
    return z


def _at(level: Function, sample: PyTree) -> Function:
    """A level at one sample, as a function of z."""
    return level if known(level) else lambda z: level(z, sample)


@dataclass(frozen=True)
class _BilevelP:
    """``∇_x f − ∇²_xw g·v``."""

    upper: Function
    lower: Function

    def __call__(self, x: PyTree, Z: PyTree, sample: PyTree) -> PyTree:
        ((w, v),) = Z
        _, mixed = jax.jvp(lambda w: jax.grad(self.lower)(x, w, sample), (w,), (v,))
        return tree.sub(jax.grad(self.upper)(x, w, sample), mixed)


@dataclass(frozen=True)
class _BilevelS:
    """``(∇_w g, ∇²_ww g·v − ∇_w f)``."""

    upper: Function
    lower: Function

    def __call__(self, x: PyTree, z: PyTree, sample: PyTree) -> PyTree:
        w, v = z
        slope, product = jax.jvp(lambda w: jax.grad(self.lower, 1)(x, w, sample), (w,), (v,))
        return slope, tree.sub(product, jax.grad(self.upper, 1)(x, w, sample))


@dataclass(frozen=True)
class _MinimaxP:
    """``∇_x f``."""

    payoff: Function

    def __call__(self, x: PyTree, Z: PyTree, sample: PyTree) -> PyTree:
        return jax.grad(self.payoff)(x, Z[0], sample)


@dataclass(frozen=True)
class _MinimaxS:
    """``−∇_y f``."""

    payoff: Function

    def __call__(self, x: PyTree, y: PyTree, sample: PyTree) -> PyTree:
        return tree.scale(-1, jax.grad(self.payoff, 1)(x, y, sample))


@dataclass(frozen=True)
class _CompositionP:
    """``∇h + ∇f⁰(x) a¹``."""

    problem: Composition

    def __call__(self, x: PyTree, Z: PyTree, sample: PyTree) -> PyTree:
        ((inner, adjoint),) = Z
        (a,) = jax.vjp(_gap(self.problem.levels[0], inner[0], sample), x)[1](adjoint[0])
        return _plus(self.problem, a, x, sample)


@dataclass(frozen=True)
class _CompositionS:
    """``zⁿ − f^{n−1}(z^{n−1})`` and ``aⁿ − ∇fⁿ(zⁿ) a^{n+1}``, for all n."""

    problem: Composition

    def __call__(self, x: PyTree, z: PyTree, sample: PyTree) -> PyTree:
        inner, adjoint = z
        *levels, outer = self.problem.levels
        gaps = [_gap(level, u, sample) for level, u in zip(levels, inner, strict=True)]
        S = tuple(tree.scale(-1, g(before)) for g, before in zip(gaps, (x, *inner), strict=False))
        pairs = zip(gaps[1:], inner, adjoint[1:], strict=False)
        targets = [jax.vjp(g, before)[1](a)[0] for g, before, a in pairs]
        targets.append(jax.grad(_at(outer, sample))(inner[-1]))
        return S, tuple(map(tree.sub, adjoint, targets))


def _gap(level: Function, u: PyTree, sample: PyTree) -> Function:
    """``z ↦ gap(f(z), u)`` at one sample; usually f(z) − u."""
    return lambda z: rule_of(level).gap(_at(level, sample)(z), u)


def _plus(problem: Composition, direction: PyTree, x: PyTree, sample: PyTree) -> PyTree:
    if problem.plain is None:
        return direction
    return tree.add(direction, jax.grad(problem.plain)(x, sample))


@dataclass(frozen=True)
class _Negative:
    """``−f(x, y)``."""

    payoff: Function

    def __call__(self, x: PyTree, y: PyTree, sample: PyTree) -> Any:
        return -self.payoff(x, y, sample)


@dataclass(frozen=True)
class _Outer:
    """``h(x) + f(y)``."""

    level: Function
    plain: Function | None

    def __call__(self, x: PyTree, y: PyTree, sample: PyTree) -> Any:
        value = _at(self.level, sample)(y)
        return value if self.plain is None else value + self.plain(x, sample)


@dataclass(frozen=True)
class _Tracking:
    """``½‖y − g(x)‖²``."""

    level: Function

    def __call__(self, x: PyTree, y: PyTree, sample: PyTree) -> Any:
        return tree.norm(tree.sub(y, _at(self.level, sample)(x)), squared=True) / 2


__all__ = ["as_bilevel", "as_multisequence"]
