"""How good a point is, without a closed form: stationarity, feasibility, lower-level accuracy, consensus.

A point is 2η-Clarke stationary where the smoothed problem's gradient vanishes:

    ∇f^η(x) + 1/m Σ_i (x − P_{X_i}(x))/η = 0,     f^η(x) = E f(x + ηu), u uniform in the unit ball.

Its norm is estimated from two-point estimates g_b (means over batches b < B): for the square,
(‖Σ g_b‖² − Σ ‖g_b‖²)/(B(B − 1)) is unbiased, and the jackknife over the batches gives the interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from fedstrata.advice.objectives import mean_over
from fedstrata.core import tree
from fedstrata.core.problem import Problem
from fedstrata.core.term import Applied
from fedstrata.core.types import Function, PyTree, Real, Weights
from fedstrata.data.federated import FederatedData
from fedstrata.data.storage import Placed
from fedstrata.estimators.sphere import sphere, two_point
from fedstrata.solving.result import Result
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
    """‖∇f^η(x)‖ with a confidence interval, from values of ``f`` alone.

    Args:
        f: the objective, a function of x that JAX can trace.
        x: the point.
        eta: the smoothing radius η.
        samples: how many two-sided estimates, two values each; rounded up to a multiple of `BATCHES`.
        confidence: of the interval.
        seed: of the directions.
        shift: a known part of the gradient that is added, like x.

    >>> import jax.numpy as jnp
    >>> estimate = gradient_norm(lambda x: (x**2).sum(), jnp.array([3.0, 4.0]), eta=0.1)
    >>> estimate.low < 10 < estimate.high
    True
    """
    return _norm(Applied(_alone, f), None, as_floats(x, "x"), eta, samples, confidence, seed, shift)


def _alone(f: Callable[[PyTree], Any], x: PyTree, context: None) -> Any:
    return f(x)


@dataclass(frozen=True, eq=False)
class _Implicit:
    """The implicit objective of a problem. Equal ones share a program, and its sets need no hash."""

    problem: Any
    solution: Callable[..., PyTree] | None
    weights: Weights

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Implicit)
            and (self.problem is other.problem)
            and (self.solution, self.weights) == (other.solution, other.weights)
        )

    def __hash__(self) -> int:
        return hash((id(self.problem), self.solution, self.weights))

    def __call__(self, x: PyTree, data: Placed) -> Any:
        problem, mean = self.problem, partial(mean_over, data, self.weights)
        levels = [level for level in problem.levels if level.variable == "x"]
        if not levels or any(level.seeks != "min" for level in levels):
            raise TypeError(f"stationarity is not known for {type(problem).__name__}.")
        if not problem.has_y:
            return sum(problem.mean_of(level, mean, x, None) for level in levels)
        if (solution := self.solution) is None:
            raise ValueError(f"stationarity of {type(problem).__name__} needs the lower level's solution.")
        if all(level.solved_by != "sample" for level in problem.levels):
            return sum(problem.mean_of(level, mean, x, solution(x)) for level in levels)
        return sum(mean(lambda x, s, f=f: f(*f.args(x, solution(x, s)), s), x) for f in levels)


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


@partial(jax.jit, static_argnums=0)
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
    """A point, or a result's, and the clients' weights: those given, else the result's, else uniform."""
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
        x: the point, or a result, whose x and weights are then taken.
        eta: the smoothing radius η.
        solution: the lower level's solution, ``solution(x)``, or ``solution(x, sample)`` for `MPEC`.
        samples: see `gradient_norm`.
        confidence: likewise.
        seed: likewise.
        weights: of the clients, as given to `fedstrata.solve`; None is a result's own, else uniform.

    Raises:
        ValueError: where a solution is needed and not given.
    """
    x, weights = _at(x, weights)
    problem.check_weights(weights)
    x, placed = as_floats(x, "x"), data.placed()
    outside = placed.each_client(lambda client: tree.sub(x, problem.set_of_x(x, client)))
    shares = placed.shares(weights)
    shift = jax.tree.map(lambda leaf: jnp.tensordot(shares.astype(leaf.dtype), leaf, 1) / eta, outside)
    return _norm(_Implicit(problem, solution, weights), placed, x, eta, samples, confidence, seed, shift)


def set_distances(problem: Problem, data: FederatedData, x: PyTree) -> np.ndarray:
    """dist(x, X_i) for every client; all zero is feasible.

    >>> import numpy as np, fedstrata as fs
    >>> data = fs.FederatedData.from_clients([{"a": np.ones(1)}] * 2)
    >>> problem = fs.Minimization(lambda x, s: x.sum(), project=fs.sets.Ball(1.0))
    >>> set_distances(problem, data, np.array([3.0, 4.0])).tolist()
    [4.0, 4.0]
    """
    return np.asarray(data.placed().distances(problem.set_of_x, as_floats(x, "x")))


def lower_residual(
    problem: Problem,
    data: FederatedData,
    x: PyTree | Result,
    y: PyTree = None,
    step: float = 1.0,
    weights: Weights | None = None,
) -> float:
    """``‖y − P_{Y(x)}(y − step · G)‖/step``, zero where y = y(x).

    Args:
        problem: `Bilevel`, `Minimax` or `MPEC`; G is the gradient of the lower level's mean, or the map.
        data: the clients' samples.
        x: the point, or a result, whose x, y and weights are then taken.
        y: the lower level's variable, where x is not a result; for an `MPEC`, where every sample has an
            equilibrium of its own, a function ``y(x, sample)``, and the result is the mean over the clients'
            samples.
        step: of the residual.
        weights: of the clients, as given to `fedstrata.solve`; None is a result's own, else uniform.

    >>> import fedstrata as fs
    >>> problem, data, x_star, y_star = fs.quadratic_bilevel()
    >>> lower_residual(problem, data, x_star, y_star) < 1e-5
    True
    """
    lower = [level.minimised() for level in problem.levels if level.variable == "y"]
    if problem.personal:
        raise TypeError("There is a lower level for every client: see fs.diagnose(result).")
    if len(lower) != 1:
        raise TypeError(f"lower_residual is for Bilevel, Minimax and MPEC, not {type(problem).__name__}.")
    (level,) = lower
    if y is None and isinstance(x, Result) and level.solved_by == "all":
        y = x.y
    x, weights = _at(x, weights)
    x, placed = as_floats(x, "x"), data.placed()
    problem.check_weights(weights)

    def away(x: PyTree, y: PyTree, G: PyTree, *context: PyTree) -> Any:
        return tree.norm(tree.sub(y, level.project(tree.axpy(-step, G, y), x, *context))) / step

    if level.solved_by == "sample":
        if not callable(y):
            raise TypeError(f"lower_residual of an {type(problem).__name__} needs a function y(x, sample).")

        def of_sample(x: PyTree, sample: PyTree) -> Any:
            at = y(x, sample)
            return away(x, at, level(*level.args(x, at), sample), sample)

        return float(jax.jit(lambda x, data: mean_over(data, weights, of_sample, x))(x, placed))
    if y is None:
        raise TypeError("lower_residual needs y, or a result in place of x.")
    y = as_floats(y, "y")

    @jax.jit
    def G(x: PyTree, y: PyTree, data: Placed) -> PyTree:
        def mean(y: PyTree) -> Any:
            return mean_over(data, weights, level, *level.args(x, y))

        return mean(y) if level.seeks == "zero" else jax.grad(mean)(y)

    return float(away(x, y, G(x, y, placed)))


def consensus_error(stacked: PyTree) -> float:
    """``1/m Σ_i ‖x_i − x̄‖²`` of the clients' points, stacked on the first axis.

    >>> consensus_error(np.array([[1.0, 0.0], [-1.0, 0.0]]))
    1.0
    """
    errors = [((leaf - leaf.mean(0)) ** 2).sum() / leaf.shape[0] for leaf in jax.tree.leaves(stacked)]
    return float(sum(errors))


def federated_mean(
    function: Function,
    data: FederatedData | Placed,
    part: Literal["train", "valid"] = "train",
    weights: Weights = "uniform",
) -> Function:
    """The clients' mean of the full-batch mean of ``function(…, sample)``, as a function of the rest."""
    placed = data.placed() if isinstance(data, FederatedData) else data
    return partial(placed.mean, function, shares=placed.shares(weights), part=part)


if not TYPE_CHECKING:  # to which a module with a __getattr__ has every name
    __getattr__ = misspelt(__name__)
