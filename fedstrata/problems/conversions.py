"""Conversions between problem classes, for methods of another class.

    as_multisequence   Bilevel, Minimax, Composition → MultiSequence
    as_bilevel         Minimax, two-level Composition → Bilevel

A method that solves a class takes its problems directly, and draws independent samples for each level;
conversions are for methods of one class. Equal problems convert to equal problems, so compiled programs are
shared. If one of a problem's functions is marked per_batch, all of them are evaluated on
batches: every map is linear in them, so means over samples may be taken first.
"""

from __future__ import annotations

import operator
from functools import singledispatch
from typing import Any, NamedTuple

import jax

from fedstrata.core import tree
from fedstrata.core.problem import Problem
from fedstrata.core.term import Applied, Term
from fedstrata.core.types import PyTree
from fedstrata.problems.classes import Bilevel, Composition, Minimax, MultiSequence
from fedstrata.problems.levels import ARITHMETIC, tracker_of
from fedstrata.problems.terms import on_same_samples, together


def as_multisequence(problem: Problem) -> MultiSequence:
    """Convert a problem to a `MultiSequence` with maps P and S of one sample.

    Args:
        problem: `Bilevel` (one sequence, the pair ``(w, v)``), `Minimax` (one sequence, y), `Composition`
            (one sequence, the pair of tuples ``(z, a)`` of its values and adjoints), or `MultiSequence`,
            which is returned unchanged.

    Raises:
        TypeError: for other classes.
        ValueError: if x or y has a set, because a system of equations has none.

    The gradient of a composition is a product of Jacobians, one per level, and using the same sample for all
    of them would be biased; with adjoints every map is linear in means over samples. Both levels of a
    `Bilevel` use the same sample here. If the data has validation samples, give the method the `Bilevel`.

    >>> import fedstrata as fs
    >>> sequences = fs.as_multisequence(fs.quadratic_bilevel(clients=3, n=2, p=4).problem)
    >>> len(sequences.S)
    1
    """
    if isinstance(problem, MultiSequence):
        return problem
    if bound := [field for field, projection in problem.sets.items() if not projection.trivial]:
        kind = type(problem).__name__
        raise ValueError(f"A MultiSequence does not take sets, but this {kind} has {bound[0]}. Leave it out.")
    if problem.local:
        raise ValueError(
            f"A MultiSequence does not take local levels, but this is {type(problem).__name__}(…, "
            "local=True)."
        )
    if without := problem.without_derivatives:
        raise TypeError(
            f"The maps of a MultiSequence are gradients, but {', '.join(without)} has only values."
        )
    return _sequences_of(problem)


@singledispatch
def _sequences_of(problem: Problem) -> MultiSequence:
    raise TypeError(
        f"{type(problem).__name__} cannot be converted to MultiSequence; Bilevel, Minimax and Composition "
        "can."
    )


@_sequences_of.register
def _(problem: Bilevel) -> MultiSequence:
    f, g = on_same_samples(Term.of(problem.upper), Term.of(problem.lower))
    P, S = (Term(Applied(map_, f, g), f.reads) for map_ in (_bilevel_P, _bilevel_S))
    return MultiSequence(P, (S,))


@_sequences_of.register
def _(problem: Minimax) -> MultiSequence:
    payoff = Term.of(problem.payoff)
    P, S = (Term(Applied(map_, payoff), payoff.reads) for map_ in (_minimax_P, _minimax_S))
    return MultiSequence(P, (S,))


def as_bilevel(problem: Problem) -> Bilevel:
    """Convert a minimax problem or a two-level composition to a bilevel problem.

        min_x max_y f(x, y):   upper f,   lower −f
        min_x h(x) + f(g(x)):  upper h(x) + f(y),   lower ½‖y − g(x)‖²

    Args:
        problem: `Minimax`, a `Composition` of two levels, or `Bilevel`, which is returned unchanged.

    Raises:
        TypeError: for other classes.
        ValueError: for a composition of more than two levels.

    >>> import fedstrata as fs
    >>> fs.as_bilevel(fs.Minimax(lambda x, y, s: x * y - y**2)).lower(3.0, 1.0, None)
    -2.0
    """
    return _levels_of(problem)


@singledispatch
def _levels_of(problem: Problem) -> Bilevel:
    raise TypeError(
        f"{type(problem).__name__} cannot be converted to Bilevel; Minimax and two-level Composition can."
    )


@_levels_of.register
def _(problem: Bilevel) -> Bilevel:
    return problem


@_levels_of.register
def _(problem: Minimax) -> Bilevel:
    payoff, sets = Term.of(problem.payoff), (problem.project_x, problem.project_y)
    negative = payoff.then(operator.neg)
    return Bilevel(payoff, negative, *sets, made_for=problem.made_for, same_samples=True)


@_levels_of.register
def _(problem: Composition) -> Bilevel:
    if len(problem.levels) != 2:
        raise ValueError(
            f"A composition of {len(problem.levels)} levels cannot be converted to Bilevel; only two "
            "levels can."
        )
    if tracker_of(problem.levels[0]) is not ARITHMETIC:
        raise ValueError(
            "A LogMeanExp level does not solve a least-squares problem, so it cannot be a lower level."
        )
    inner, outer = map(Term.of, problem.levels)
    upper = (outer,) if problem.plain is None else on_same_samples(outer, Term.of(problem.plain))
    terms = Term(Applied(_outer, upper), together(*upper)), Term(Applied(_tracking, inner), together(inner))
    return Bilevel(*terms, same_samples=True, local=problem.local)


def _bilevel_P(upper: Term, lower: Term, x: PyTree, Z: PyTree, sample: PyTree) -> PyTree:
    """``∇_x f − ∇²_xw g·v``."""
    ((w, v),) = Z
    _, mixed = jax.jvp(lambda w: jax.grad(lower)(x, w, sample), (w,), (v,))
    return tree.sub(jax.grad(upper)(x, w, sample), mixed)


def _bilevel_S(upper: Term, lower: Term, x: PyTree, z: PyTree, sample: PyTree) -> PyTree:
    """``(∇_w g, ∇²_ww g·v − ∇_w f)``."""
    w, v = z
    slope, product = jax.jvp(lambda w: jax.grad(lower, 1)(x, w, sample), (w,), (v,))
    return slope, tree.sub(product, jax.grad(upper, 1)(x, w, sample))


def _minimax_P(payoff: Term, x: PyTree, Z: PyTree, sample: PyTree) -> PyTree:
    """``∇_x f``."""
    return jax.grad(payoff)(x, Z[0], sample)


def _minimax_S(payoff: Term, x: PyTree, y: PyTree, sample: PyTree) -> PyTree:
    """``−∇_y f``."""
    return tree.scale(-1, jax.grad(payoff, 1)(x, y, sample))


@_sequences_of.register
def _(problem: Composition) -> MultiSequence:
    levels = tuple(map(Term.of, problem.levels))
    if len(levels) == 1:
        raise ValueError("A composition of one level has no inner sequence. Use Minimization.")
    *inner, outer = levels
    gaps = [Term(Applied(_gap, level), level.reads) for level in inner]
    plain = () if problem.plain is None else (Term.of(problem.plain),)
    outer, *terms = on_same_samples(outer, *gaps, *plain)
    chain = _Chain(tuple(terms[: len(gaps)]), outer, *terms[len(gaps) :])
    reads = together(outer, *terms)
    P, S = (Term(Applied(map_, chain), reads) for map_ in (_composition_P, _composition_S))
    return MultiSequence(P, (S,))


def _gap(level: Term, z: PyTree, u: PyTree, *sample: PyTree) -> PyTree:
    """``(z, u) ↦ gap(f(z), u)``, usually f(z) − u, whose mean over samples is zero at the level's value."""
    return tracker_of(level).gap(level(z, *sample), u)


class _Chain(NamedTuple):
    """A composition's levels, evaluated on the same samples."""

    gaps: tuple[Term, ...]
    outer: Term
    plain: Term | None = None


def _composition_P(chain: _Chain, x: PyTree, Z: PyTree, sample: PyTree) -> PyTree:
    """``∇h + ∇f⁰(x) a¹``."""
    ((inner, adjoint),) = Z
    gap, plain = chain.gaps[0].at(sample), chain.plain
    (a,) = jax.vjp(lambda x: gap(x, inner[0]), x)[1](adjoint[0])
    return a if plain is None else tree.add(a, jax.grad(plain)(x, sample))


def _composition_S(chain: _Chain, x: PyTree, z: PyTree, sample: PyTree) -> PyTree:
    """``zⁿ − f^{n−1}(z^{n−1})`` and ``aⁿ − ∇fⁿ(zⁿ) a^{n+1}``, for all n."""
    inner, adjoint = z
    levels = list(zip(chain.gaps, (x, *inner[:-1]), inner, strict=True))
    S = tuple(tree.scale(-1, gap.at(sample)(before, u)) for gap, before, u in levels)
    targets = [
        jax.vjp(lambda z, gap=gap, u=u: gap.at(sample)(z, u), before)[1](a)[0]
        for (gap, before, u), a in zip(levels[1:], adjoint[1:], strict=True)
    ]
    targets.append(jax.grad(chain.outer.at(sample))(inner[-1]))
    return S, tuple(map(tree.sub, adjoint, targets))


def _outer(levels: tuple[Term, ...], x: PyTree, y: PyTree, sample: PyTree) -> Any:
    """``h(x) + f(y)``."""
    level, *plain = levels
    value = level.at(sample)(y)
    return value + plain[0](x, sample) if plain else value


def _tracking(level: Term, x: PyTree, y: PyTree, sample: PyTree) -> Any:
    """``½‖y − g(x)‖²``."""
    return tree.norm(tree.sub(y, level.at(sample)(x)), squared=True) / 2
