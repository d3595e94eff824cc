"""Diagnostics from values only: the gradient's norm of the smoothed problem, and distances to sets.

A point is 2η-Clarke stationary where the smoothed problem's gradient vanishes:

    ∇f^η(x) + 1/m Σ_i (x − P_{X_i}(x))/η = 0,     f^η(x) = E f(x + ηu), u uniform in the unit ball.

Its norm is estimated from two-point estimates g_b (means over batches b < B): for the square,
(‖Σ g_b‖² − Σ ‖g_b‖²)/(B(B − 1)) is unbiased, and the jackknife over the batches gives the interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from fedstrata.advice.lower import kept
from fedstrata.advice.objectives import mean_over
from fedstrata.core import tree
from fedstrata.core.problem import Problem
from fedstrata.core.term import Applied
from fedstrata.core.types import Function, PyTree, Real, Weights
from fedstrata.data.federated import FederatedData
from fedstrata.data.storage import Placed
from fedstrata.estimators.sphere import sphere, two_point
from fedstrata.solving.result import Result
from fedstrata.support.frozen import jit
from fedstrata.support.points import as_floats
from fedstrata.support.words import misspelt

BATCHES = 32  # enough for a t-interval, few enough to keep a gradient of each


class GradientNorm(NamedTuple):
    """An estimate of ‖∇f^η(x)‖.

    Attributes:
        norm: the estimate.
        low, high: the confidence interval.
        squared: the unbiased estimate of the square, which may be negative near a stationary point.
        error: its standard error.
    """

    norm: float
    low: float
    high: float
    squared: float
    error: float


def gradient_norm(
    f: Callable[[PyTree], Any],
    x: PyTree,
    eta: float,
    *,
    samples: int = 3200,
    confidence: float = 0.95,
    seed: int = 0,
    shift: PyTree = None,
) -> GradientNorm:
    """‖∇f^η(x)‖ with a confidence interval, from values of ``f`` only.

    Args:
        f: the objective, a function of x that JAX can trace.
        x: the point.
        eta: the smoothing radius η.
        samples: the number of two-sided estimates, two values each; rounded up to a multiple of `BATCHES`.
        confidence: the confidence of the interval.
        seed: the seed of the directions.
        shift: a known part of the gradient that is added, like x.

    >>> import jax.numpy as jnp
    >>> estimate = gradient_norm(lambda x: (x**2).sum(), jnp.array([3.0, 4.0]), eta=0.1)
    >>> estimate.low < 10 < estimate.high
    True
    """
    return _norm(Applied(_alone, f), None, as_floats(x, "x"), eta, samples, confidence, seed, shift)


def _alone(f: Callable[[PyTree], Any], x: PyTree, context: None) -> Any:
    return f(x)


@kept
def _implicit(asked: tuple[Problem, Callable[..., PyTree] | None], weights: Weights) -> Function:
    """F(x, data), the implicit objective of a problem with a given lower-level solution."""
    problem, solution = asked
    levels = [level for level in problem.levels if level.variable == "x"]
    if not levels or any(level.seeks != "min" for level in levels):
        raise TypeError(f"stationarity is not known for {type(problem).__name__}.")
    if problem.has_y and solution is None:
        raise ValueError(f"stationarity of {type(problem).__name__} needs the lower level's solution.")
    by_sample = any(level.solved_by == "sample" for level in problem.levels)

    def F(x: PyTree, data: Placed) -> Any:
        mean = partial(mean_over, data, weights)
        if by_sample:
            return sum(mean(lambda x, s, f=f: f(*f.args(x, solution(x, s)), s), x) for f in levels)  # type: ignore[misc]
        y = None if solution is None else solution(x)
        return sum(problem.mean_of(level, mean, x, y) for level in levels)

    return F


def _norm(
    f: Callable[[PyTree, PyTree], Any],
    context: PyTree,
    x: PyTree,
    eta: float,
    samples: int,
    confidence: float,
    seed: int,
    shift: PyTree,
) -> GradientNorm:
    """The estimate for ``f(·, context)``; the context is an argument of the program, not a constant in it."""
    if not (eta > 0 and 0 < confidence < 1 and samples >= 1):
        raise ValueError(
            f"The norm's estimate needs eta > 0, a confidence in (0, 1) and samples ≥ 1, but eta={eta}, "
            f"confidence={confidence}, samples={samples}."
        )
    keys = jax.random.split(jax.random.key(seed), (BATCHES, math.ceil(samples / BATCHES)))
    batches = _batch_means(f, context, x, eta, keys)
    if shift is not None:
        batches = jax.tree.map(jnp.add, batches, shift)
    rows = [np.asarray(leaf, np.float64).reshape(BATCHES, -1) for leaf in jax.tree.leaves(batches)]
    g = np.concatenate(rows, axis=1)
    total, squares = g.sum(0), (g**2).sum(1)

    def unbiased(of_sum: np.ndarray, of_squares: np.ndarray, number: int) -> np.ndarray:
        return (of_sum - of_squares) / (number * (number - 1))

    squared = unbiased(total @ total, squares.sum(), BATCHES)
    without = unbiased(((total - g) ** 2).sum(1), squares.sum() - squares, BATCHES - 1)
    error = math.sqrt((BATCHES - 1) / BATCHES * ((without - without.mean()) ** 2).sum())
    width = special.stdtrit(BATCHES - 1, (1 + confidence) / 2) * error
    norm, low, high = (math.sqrt(max(v, 0.0)) for v in (squared, squared - width, squared + width))
    return GradientNorm(norm, low, high, float(squared), error)


@partial(jit, static_argnums=0)
def _batch_means(
    f: Callable[[PyTree, PyTree], Any], context: PyTree, x: PyTree, eta: Real, keys: jax.Array
) -> PyTree:
    def value(x: PyTree) -> Any:
        return f(x, context)

    def batch(keys: jax.Array) -> PyTree:
        def add(total: PyTree, key: jax.Array) -> tuple[PyTree, None]:
            return tree.add(total, two_point(value, x, sphere(key, x, eta), eta, two_sided=True)), None

        total, _ = jax.lax.scan(add, tree.zeros_like(x), keys)
        return tree.scale(1 / keys.shape[0], total)

    return jax.vmap(batch)(keys)


def _at(x: PyTree | Result, weights: Weights | None) -> tuple[PyTree, Weights]:
    """The given point or the result's, and the weights: the given ones, else the result's, else uniform."""
    if isinstance(x, Result):
        x, weights = x.x, x.weights if weights is None else weights
    return x, "uniform" if weights is None else weights


def stationarity(
    problem: Problem,
    data: FederatedData,
    x: PyTree | Result,
    eta: float,
    *,
    solution: Callable[..., PyTree] | None = None,
    samples: int = 3200,
    confidence: float = 0.95,
    seed: int = 0,
    weights: Weights | None = None,
) -> GradientNorm:
    """The norm of the smoothed problem's gradient at x, local sets included; zero is 2η-Clarke stationary.

    Args:
        problem: `Minimization`, `Bilevel`, `Minimax` or `MPEC`.
        data: the clients' samples; values are full means.
        x: the point, or a result, whose x and weights are then used.
        eta: the smoothing radius η.
        solution: the lower level's solution, ``solution(x)``, or ``solution(x, sample)`` for `MPEC`.
        samples: see `gradient_norm`.
        confidence: likewise.
        seed: likewise.
        weights: the clients' weights, as for `fedstrata.solve`; None is a result's own, else uniform.

    Raises:
        ValueError: if a solution is needed and not given.
    """
    x, weights = _at(x, weights)
    problem.check_weights(weights)
    x, placed = as_floats(x, "x"), data.placed()
    outside = placed.each_client(lambda client: tree.sub(x, problem.set_of_x(x, client)))
    shares = placed.shares(weights)
    shift = jax.tree.map(lambda leaf: jnp.tensordot(shares.astype(leaf.dtype), leaf, 1) / eta, outside)
    return _norm(_implicit((problem, solution), weights), placed, x, eta, samples, confidence, seed, shift)


def set_distances(problem: Problem, data: FederatedData, x: PyTree) -> np.ndarray:
    """dist(x, X_i) for every client; all zero is feasible.

    >>> import numpy as np, fedstrata as fs
    >>> data = fs.FederatedData.from_clients([{"a": np.ones(1)}] * 2)
    >>> problem = fs.Minimization(lambda x, s: x.sum(), project=fs.sets.Ball(1.0))
    >>> set_distances(problem, data, np.array([3.0, 4.0])).tolist()
    [4.0, 4.0]
    """
    return np.asarray(data.placed().distances(problem.set_of_x, as_floats(x, "x")))


def federated_mean(
    function: Function,
    data: FederatedData | Placed,
    part: Literal["train", "valid"] = "train",
    weights: Weights = "uniform",
) -> Function:
    """The clients' mean of the full-batch mean of ``function(…, sample)``, as a function of the rest."""
    placed = data.placed() if isinstance(data, FederatedData) else data
    return partial(placed.mean, function, shares=placed.shares(weights), part=part)


if not TYPE_CHECKING:  # for type checkers, a module with __getattr__ has every name
    __getattr__ = misspelt(__name__)
