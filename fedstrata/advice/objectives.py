"""The objective F(x) by which points of each problem class are judged, with its derivative.

| class | F(x) |
|---|---|
| `Minimization`, `Composition` | the problem's own objective |
| `DRO` | the risk, minimised over the lifted variable exactly |
| `Bilevel`, `Personalized`, `MPEC` | f(x, y(x)), y(x) solved here; the derivative goes through it |
| `Minimax` | max_y f(x, y), by ascent from several points if f is not concave in y |
| `Hard`, constraints | the loss with an exact penalty of the largest violation |
| `WorstClient`, for `AFL` and `DRFA` | the largest of the clients' losses |
| `RiskOfClients`, for `FedGDRO` | a risk of the clients' losses |

All sums are over all samples of all clients, in float64. Functions without derivatives are differentiated by
differences. Your own class gets its F by ``@fs.certify.register``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, singledispatch
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fedstrata.advice.blocks import at_once, client_means
from fedstrata.advice.feasible import projection
from fedstrata.advice.lower import NotCertifiable, Pooled, Solved, hypergradient, kept, solve_lower, spectrum
from fedstrata.core import tree
from fedstrata.core.client import Client, opened
from fedstrata.core.problem import Level, Problem, Projection, shape_of
from fedstrata.core.term import Term
from fedstrata.core.types import Array, Function, PyTree, Weights
from fedstrata.data.storage import Placed
from fedstrata.problems.classes import Composition, Minimax, MultiSequence
from fedstrata.problems.dro import DRO, Lifted
from fedstrata.problems.fairness import Hard
from fedstrata.problems.of_clients import RiskOfClients, WorstClient
from fedstrata.support.frozen import jit

TOLERANCE = 1e-9  # for lower levels, relative to the length of y
FLAT = 1e-9  # relative to the largest curvature: smaller ones count as zero
WIDTH = 6e-6  # of central differences, relative to the largest entry of x: float64's eps^⅓
APART = 1e-3  # relative distance from which two solutions of a lower level are different
ASCENTS = 8  # starts of a search for a maximum that may not be unique
ASCENT_STEPS = 2_000

Maps: TypeAlias = Callable[[Any, Placed], Any]
Evaluate: TypeAlias = Callable[[Placed, PyTree], tuple[Any, PyTree]]


class OutOfTime(Exception):
    """A certificate took longer than allowed."""


@dataclass(frozen=True)
class Case:
    """A point to be judged.

    Attributes:
        problem: the problem.
        data: the samples.
        weights: the clients' weights.
        x, y: the point; y is None without a second variable.
        x0, y0: the start of the run, or None.
        until: the `time.perf_counter` at which to give up.
    """

    problem: Problem
    data: Placed
    weights: Weights
    x: PyTree
    y: PyTree = None
    x0: PyTree = None
    y0: PyTree = None
    until: float = math.inf

    def mean(self, function: Function, *args: PyTree, part: Any = "train", each: Any = None) -> Any:
        """The problem's own mean; see `fedstrata.core.problem.Mean`."""
        return mean_over(self.data, self.weights, function, *args, part=part, each=each)


def mean_over(
    data: Placed, weights: Weights, function: Function, *args: PyTree, part: Any = "train", each: Any = None
) -> Any:
    """See `fedstrata.core.problem.Mean`."""
    if part == "server":
        return Term.of(function).over(opened(data.server), None, *args)
    if each is None and part != "client":
        tile = at_once(function, data, part, *args)
        return data.mean(function, *args, shares=data.shares(weights), part=part, tile=tile)
    if part != "client":
        return data.shares(weights) @ client_means(data, function, *args, part=part, each=each)

    def value(client: Client, *rest: PyTree) -> Any:
        return function(*args, *rest, client)

    return data.shares(weights) @ data.each_client(value, *(() if each is None else (each,)))


@dataclass
class Objective:
    """F and its derivative.

    Attributes:
        evaluate: F(x) and ∇F(x).
        x: the point, without variables that F does not depend on.
        x0: the start; None if it is not known.
        onto: the projection onto the set of x; None without a set.
        outside: the distance of x from its set.
        remarks: reasons why the point is not a solution, regardless of F.
        notes: further findings.
        solved: y(x), if there is a lower level.
    """

    evaluate: Callable[[PyTree], tuple[Any, PyTree]]
    x: PyTree
    x0: PyTree = None
    onto: Callable[[PyTree], PyTree] | None = None
    outside: float = 0.0
    remarks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    solved: Solved | None = None


@singledispatch
def objective_of(problem: Problem, case: Case) -> Objective:
    """F of a problem: the measure registered for its class, else by its levels.

    Raises:
        NotCertifiable: if none exists.
    """
    kind, levels = type(problem).__name__, problem.levels
    lower = [level for level in levels if level.variable == "y"]
    instead = f"Register a measure, @fs.certify.register({kind}), or look at result.history"
    if not levels:
        raise NotCertifiable(f"there is no measure for {kind}, which does not say its levels. {instead}")
    if len(lower) > 1 or any(level.seeks != "min" for level in levels if level.variable == "x"):
        raise NotCertifiable(f"there is no measure for levels like those of {kind}. {instead}")
    if not lower:
        return _within(case, partial(_own(problem, case.weights), case.data))
    return (_envelope if lower[0].seeks == "max" else _through)(problem, case)


def _within(case: Case, evaluate: Callable[[PyTree], tuple[Any, PyTree]], **more: Any) -> Objective:
    """Add the set of x."""
    found = Objective(evaluate, case.x, case.x0, **more)
    project = case.problem.set_of_x
    if project.trivial:
        return found
    onto = projection(case.problem, case.data)
    inside = onto(case.x)
    if inside is None:
        raise NotCertifiable("the clients' sets have no common point that was found")
    found.outside = float(tree.norm(tree.sub(case.x, inside)))

    def nearest(x: PyTree) -> PyTree:
        near = onto(x)
        return x if near is None else near

    found.onto = nearest
    return found


# One level


@kept
def _own(problem: Problem, weights: Weights) -> Evaluate:
    """The default metric that is the objective; if the class names none, the sum of its levels."""

    def F(x: PyTree, data: Placed) -> Any:
        mean, name = partial(mean_over, data, weights), problem.objective or "objective"
        measured = problem.measure(mean, x, None)
        return measured[name] if name in measured else sum(measured.values())

    return _differentiated(F, not problem.without_derivatives)


def _differentiated(F: Callable[[PyTree, Placed], Any], derivatives: bool) -> Evaluate:
    """The value and the gradient, by central differences without derivatives."""
    if derivatives:
        both = jit(jax.value_and_grad(F))
        return lambda data, x: both(x, data)
    value = jit(F)
    return lambda data, x: _by_differences(lambda x: value(x, data), x)


def _by_differences(F: Callable[[PyTree], Any], x: PyTree) -> tuple[float, PyTree]:
    flat, unravel = ravel_pytree(x)
    width = WIDTH * max(float(jnp.abs(flat).max()), 1e-3)
    value, *rest = (
        float(F(unravel(flat + away)))
        for away in (0.0, *(sign * width * e for e in jnp.eye(flat.size) for sign in (1, -1)))
    )
    return value, unravel(jnp.asarray(rest[::2]) / (2 * width) - jnp.asarray(rest[1::2]) / (2 * width))


@objective_of.register(DRO)
def _risk(problem: DRO, case: Case) -> Objective:
    def plain(x: PyTree) -> PyTree:
        return x.x if isinstance(x, Lifted) else x

    evaluate = partial(_of_risk(problem, case.weights), case.data)
    return Objective(evaluate, plain(case.x), None if case.x0 is None else plain(case.x0))


@kept
def _of_risk(problem: DRO, weights: Weights) -> Evaluate:
    def F(x: PyTree, data: Placed) -> tuple[Any, Any]:
        shares = data.sample_shares(data.shares(weights))
        tile = at_once(problem.loss, data, "train", x)
        losses = Term.of(problem.loss).each(data.train, x, at_once=tile)
        fixed = jax.lax.stop_gradient(losses)
        density = problem.risk.density(fixed, problem.risk.dual(fixed, shares))
        return shares @ (density * losses), problem.risk.value(fixed, shares)

    both = jit(jax.grad(F, has_aux=True))

    def evaluate(data: Placed, x: PyTree) -> tuple[Any, PyTree]:
        slope, value = both(x, data)
        return value, slope

    return evaluate


@kept
def _of_clients(problem: WorstClient | RiskOfClients, weights: Weights) -> Evaluate:
    """The largest of the clients' losses, or a risk of them."""

    def F(x: PyTree, data: Placed) -> Any:
        losses = client_means(data, problem.loss, x)
        return problem.risk(jnp.asarray(losses), jnp.asarray(data.shares(weights)))

    return _differentiated(F, not problem.without_derivatives)


for _kind, _F in ((Composition, _own), (WorstClient, _of_clients), (RiskOfClients, _of_clients)):
    objective_of.register(_kind, lambda p, case, F=_F: _within(case, partial(F(p, case.weights), case.data)))


@objective_of.register(Hard)
def _constrained(problem: Hard, case: Case) -> Objective:
    """The loss and an exact penalty of the largest violation: a minimiser satisfies the constraints."""
    plain = Term.of(problem.plain)

    def parts(x: PyTree, data: Placed) -> tuple[Any, Any]:
        mean = Case(problem, data, case.weights, x).mean
        return mean(plain, x), problem.constraints(mean(problem.inner, x))

    slope, across = jit(jax.jacrev(parts))(case.x, case.data)
    steepest = min(
        float(jnp.sqrt(sum((leaf[j] ** 2).sum() for leaf in jax.tree.leaves(across))))
        for j in range(problem.count)
    )
    rho = 10 * max(problem.rho, float(tree.norm(slope)) / (steepest or 1.0))

    def F(x: PyTree, data: Placed) -> Any:
        loss, violation = parts(x, data)
        return loss + rho * jnp.maximum(jnp.max(violation), 0)

    return _within(case, partial(_differentiated(F, not problem.without_derivatives), case.data))


# Two levels


@kept
def level_of(problem: Problem, weights: Weights) -> Pooled:
    """The two levels over pooled data."""
    return _level(problem, weights)


def _level(problem: Problem, weights: Weights) -> Pooled:
    lower = [level for level in problem.levels if level.variable == "y"]
    if len(lower) != 1:
        raise NotCertifiable(f"{type(problem).__name__} has no lower level, or several")
    if {lower[0].name, "payoff"} & set(problem.without_derivatives):
        raise NotCertifiable("the lower level has values only, so that y(x) cannot be computed")
    return {"all": _common, "client": _personal, "sample": _per_sample}[lower[0].solved_by](
        problem, lower[0].minimised(), weights
    )


def _upper_mean(problem: Problem, weights: Weights) -> Function:
    """f(x, y, data): the sum of the levels of x."""
    levels = [level for level in problem.levels if level.variable == "x"]

    def upper(x: PyTree, y: PyTree, data: Placed) -> Any:
        mean = partial(mean_over, data, weights)
        return sum(problem.mean_of(level, mean, x, y) for level in levels)

    return upper


def _common(problem: Problem, lower: Level, weights: Weights) -> Pooled:
    """All clients share one y."""

    def mean(x: PyTree, y: PyTree, data: Placed) -> Any:
        return mean_over(data, weights, lower, *lower.args(x, y), part=lower.samples)

    def nearest(y: PyTree, x: PyTree, data: Placed) -> PyTree:
        return lower.project(y, x)

    project, upper = None if lower.project.trivial else nearest, _upper_mean(problem, weights)
    if lower.seeks == "zero":
        return Pooled(upper, mean, project, None)
    return Pooled(upper, jax.grad(mean, argnums=1), project, mean)


def _personal(problem: Problem, lower: Level, weights: Weights) -> Pooled:
    """Every client has its own lower level; y has a leading client axis."""

    def each(x: PyTree, y: PyTree, data: Placed) -> PyTree:
        return client_means(data, lower, *lower.args(x, y)[:-1], part=lower.samples, each=y)

    def potential(x: PyTree, y: PyTree, data: Placed) -> PyTree:
        return each(x, y, data).sum()

    def nearest(y: PyTree, x: PyTree, data: Placed) -> PyTree:
        return data.each_client(lambda client, y: lower.project(y, x, client), y)

    project, upper = None if lower.project.trivial else nearest, _upper_mean(problem, weights)
    if lower.seeks == "zero":
        return Pooled(upper, each, project, None)
    return Pooled(upper, jax.grad(potential, argnums=1), project, potential)


def _per_sample(problem: Problem, lower: Level, weights: Weights) -> Pooled:
    """Every sample has its own variational inequality; y has a leading axis of all samples.

    A result's y has a client axis, with the clients' mean responses.
    """
    levels = [level for level in problem.levels if level.variable == "x"]

    def spread(y: PyTree, data: Placed) -> PyTree:
        owners = jnp.repeat(jnp.arange(data.clients), data.sizes, total_repeat_length=data.training.samples)
        return jax.tree.map(lambda leaf: leaf[owners], y)

    def gather(y: PyTree, data: Placed) -> PyTree:
        owners = spread(jnp.arange(data.clients), data)

        def mean(leaf: Array) -> Array:
            sums = jax.ops.segment_sum(leaf, owners, data.clients)
            return sums / data.sizes.reshape(-1, *[1] * (sums.ndim - 1))

        return jax.tree.map(mean, y)

    def upper(x: PyTree, y: PyTree, data: Placed) -> Any:
        values = jax.vmap(lambda y, s: sum(level(*level.args(x, y), s) for level in levels))(y, data.train)
        return data.sample_shares(data.shares(weights)) @ values

    def value(x: PyTree, y: PyTree, data: Placed) -> PyTree:
        return jax.vmap(lambda y, sample: lower(*lower.args(x, y), sample))(y, data.train)

    def potential(x: PyTree, y: PyTree, data: Placed) -> Any:
        return value(x, y, data).sum()

    def nearest(y: PyTree, x: PyTree, data: Placed) -> PyTree:
        return jax.vmap(lambda y, sample: lower.project(y, x, sample))(y, data.train)

    project = None if lower.project.trivial else nearest
    if lower.seeks == "zero":
        return Pooled(upper, value, project, None, spread, gather)
    return Pooled(upper, jax.grad(potential, argnums=1), project, potential, spread, gather)


def _lower(problem: Problem) -> Level:
    return next(level for level in problem.levels if level.variable == "y")


def _through(problem: Problem, case: Case) -> Objective:
    """F(x) = f(x, y(x)): y(x) is solved from the previous one."""
    lower = _lower(problem)
    if lower.project.arity > 2 and lower.solved_by == "all":
        raise NotCertifiable("the set of y differs between clients, who share one y")
    level, data = level_of(problem, case.weights), case.data
    start = level.spread(started(problem, case), data)
    solved, remarks = checked_lower(level, data, case.x, start)
    last = [solved.y]

    def solved_at(x: PyTree) -> Solved | None:
        found = solve_lower(level, data, x, last[0], TOLERANCE)
        if not found.close:
            return None
        last[0] = found.y
        return found

    def value(x: PyTree) -> Any:
        found = solved_at(x)
        return np.nan if found is None else _upper(level, x, found.y, data)

    def evaluate(x: PyTree) -> tuple[Any, PyTree]:
        found = solved_at(x)
        return (np.nan, x) if found is None else hypergradient(level, data, x, found, TOLERANCE)

    if problem.without_derivatives:
        return _within(case, partial(_by_differences, value), remarks=remarks, solved=solved)
    return _within(case, evaluate, remarks=remarks, solved=solved)


@partial(jit, static_argnums=0)
def _upper(level: Pooled, x: PyTree, y: PyTree, data: Placed) -> Any:
    return level.upper(x, y, data)


@partial(jit, static_argnums=0)
def _upper_slope(level: Pooled, x: PyTree, y: PyTree, data: Placed) -> tuple[Any, PyTree]:
    return jax.value_and_grad(level.upper)(x, y, data)


def started(problem: Problem, case: Case) -> PyTree:
    """The start of the search for y(x): the result's y, with a client axis if clients have their own."""
    if case.y is None:
        raise NotCertifiable("there is no y to start the lower level from: give y")
    y, clients = case.y, case.data.clients
    shared = _lower(problem).solved_by == "all"
    if not shared:
        shapes, begun = ([np.shape(leaf) for leaf in jax.tree.leaves(each)] for each in (y, case.y0))
        apart = all(shape[:1] == (clients,) for shape in shapes)
        apart = apart and _fits(problem, case, jax.tree.map(lambda leaf: leaf[0], y))
        # n clients may share a y with n entries: a y of y0's shape is then the shared one
        if not apart or (shapes == begun and _fits(problem, case, y)):
            y = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (clients, *jnp.shape(leaf))), y)
    train, valid = (
        jax.tree.map(lambda leaf: leaf[0], opened(part.leaves))
        for part in (case.data.training, case.data.validation or case.data.training)
    )
    try:
        problem.check(case.x, y if shared else jax.tree.map(lambda leaf: leaf[0], y), train, valid)
    except (TypeError, ValueError) as error:
        raise NotCertifiable(f"y does not fit the problem ({str(error).splitlines()[0]})") from error
    return y


def _fits(problem: Problem, case: Case, y: PyTree) -> bool:
    """Whether the lower level accepts this y."""
    sample = jax.tree.map(lambda leaf: leaf[0], case.data.train)
    try:
        shape_of("lower", _lower(problem), (case.x, y, sample))
    except (TypeError, ValueError):
        return False
    return True


def checked_lower(level: Pooled, data: Placed, x: PyTree, start: PyTree) -> tuple[Solved, list[str]]:
    """y(x), checked to be a solution and, as far as can be checked, the only one."""
    solved = solve_lower(level, data, x, start, TOLERANCE)
    size = float(tree.norm(solved.y))
    if not np.isfinite(float(solved.last)) or size > 1e12 * (1 + float(tree.norm(start))):
        raise NotCertifiable("the lower level has no solution at x: it is not bounded below, or not finite")
    remarks: list[str] = []
    if level.free:
        low, high, bend = spectrum(level, data, x, solved.y)
        if low < -FLAT * abs(high):
            again = tree.axpy(0.01 * max(size, 1.0), bend, solved.y)
            solved = solve_lower(level, data, x, again, TOLERANCE)
            size = float(tree.norm(solved.y))
            remarks.append("y is at a saddle point or a maximiser of the lower level")
            low, high, _ = spectrum(level, data, x, solved.y)
            if not np.isfinite(float(solved.last)) or size > 1e6 * (1 + float(tree.norm(again))) or low < 0:
                raise NotCertifiable("the lower level has no minimiser at x: it is concave there")
        if low <= FLAT * high:
            if solved.last > 1e-3 * solved.first:
                raise NotCertifiable("no solution of the lower level was found at x: it is linear somewhere")
            raise NotCertifiable(
                "the lower level has many solutions at x, or a kink there, so that F is not defined by it"
            )
    else:
        _unique(level, data, x, solved, start)
    if not solved.close:
        raise NotCertifiable("the lower level could not be solved at x")
    return solved, remarks


def _unique(level: Pooled, data: Placed, x: PyTree, solved: Solved, start: PyTree) -> None:
    """Raise if another start leads to another solution."""
    width = max(float(tree.norm(solved.y)), float(tree.norm(tree.sub(solved.y, start)))) or 1.0
    flat, unravel = ravel_pytree(solved.y)
    noise = jax.random.normal(jax.random.key(1), flat.shape, flat.dtype) * width / np.sqrt(flat.size)
    other = solve_lower(level, data, x, unravel(flat + noise), TOLERANCE)
    if float(tree.norm(tree.sub(other.y, solved.y))) > APART * width:
        raise NotCertifiable("the lower level has many solutions at x, so that F is not defined by it")


def _envelope(problem: Problem, case: Case) -> Objective:
    """F(x) = max_y f(x, y), whose derivative is ∇_x f at the maximiser."""
    level, data = level_of(problem, case.weights), case.data
    project = _lower(problem).project
    if project.arity > 1:  # a set that depends on x moves the maximiser
        return _through(problem, case)
    low, high, _ = spectrum(level, data, case.x, case.y)
    concave = low >= -FLAT * abs(high)
    if project.trivial and not concave:
        raise NotCertifiable("the payoff is convex in y, and y has no set: it has no maximum")
    both = partial(_upper_slope, level)
    last = [case.y]

    def evaluate(x: PyTree) -> tuple[Any, PyTree]:
        found = solve_lower(level, data, x, last[0], TOLERANCE)
        if not found.close:
            return np.nan, x
        last[0] = found.y
        return both(x, found.y, data)

    if low > FLAT * abs(high):
        return _within(case, evaluate, solved=solve_lower(level, data, case.x, case.y, TOLERANCE))
    if project.trivial:
        raise NotCertifiable("the payoff is linear in some direction of y, and y has no set")
    starts = _starts(project, case)
    if concave:  # all ascents end at the same value
        starts = jax.tree.map(lambda leaf: leaf[:3], starts)
    ascend = partial(_highest, level, data, starts, abs(high))

    def highest(x: PyTree) -> tuple[Any, PyTree]:
        return both(x, ascend(x), data)

    objective = _within(case, highest)
    best = ascend(case.x)
    gained = float(level.upper(case.x, best, data) - level.upper(case.x, case.y, data))
    if gained > 0:
        objective.notes.append(f"another y makes the payoff {gained:.3g} larger than the result's")
    return objective


def _starts(project: Projection, case: Case) -> PyTree:
    """The point, and projections of far points onto the set, such as corners; the first two are opposites."""
    flat, unravel = ravel_pytree(case.y)
    away = jax.random.normal(jax.random.key(2), (ASCENTS // 2, flat.size), flat.dtype)
    away = 1e3 * (1 + jnp.abs(flat).max()) * jnp.stack([away, -away], 1).reshape(-1, flat.size)
    far = jnp.concatenate([flat[None], away])
    return jax.vmap(lambda y: project(unravel(y), case.x))(far)


@partial(jit, static_argnums=0)
def _highest(level: Pooled, data: Placed, starts: PyTree, L: Any, x: PyTree) -> PyTree:
    """The best end of projected ascents."""
    assert level.project is not None
    assert level.potential is not None
    first = jax.vmap(lambda y: tree.norm(level.lower(x, y, data)))(starts).max()
    reach = jax.tree.reduce(jnp.maximum, jax.tree.map(lambda leaf: jnp.abs(leaf - leaf[0]).max(), starts))
    # steps of 1/L; without curvature, a step across the set
    across = jnp.where(first > 0, 10 * reach / jnp.where(first > 0, first, 1), 1.0)
    step = jnp.where(L * reach > 1e-6 * first, 1 / jnp.where(L > 0, L, 1), across)

    def ascent(y: PyTree) -> PyTree:
        def body(state: tuple[PyTree, Array, Array]) -> tuple[PyTree, Array, Array]:
            y, _, count = state
            new = level.project(tree.axpy(-step, level.lower(x, y, data), y), x, data)  # type: ignore[misc]
            return new, tree.norm(tree.sub(new, y)), count + 1

        def moves(state: tuple[PyTree, Array, Array]) -> Array:
            return (state[1] > 1e-12 * reach) & (state[2] < ASCENT_STEPS)

        return jax.lax.while_loop(moves, body, (y, jnp.inf * reach, jnp.zeros((), int)))[0]

    ends = jax.vmap(ascent)(starts)
    values = jax.vmap(lambda y: level.potential(x, y, data))(ends)  # type: ignore[misc]
    return jax.tree.map(lambda leaf: leaf[jnp.argmin(values)], ends)


# Equations


@kept
def sequences_of(problem: MultiSequence, weights: Weights) -> Maps:
    """All maps of ((x, Z), data), means over the clients."""

    def maps(point: tuple[PyTree, PyTree], data: Placed) -> tuple[PyTree, PyTree]:
        x, Z = point
        mean = Case(problem, data, weights, x).mean
        S = tuple(mean(s, *pair) for s, *pair in zip(problem.S, (x, *Z[:-1]), Z, strict=True))
        return mean(problem.P, x, Z), S

    return maps


@singledispatch
def equations_of(problem: Problem, case: Case) -> Maps | None:
    """The equations that a problem without an F solves; None if it has an F."""
    return None


@equations_of.register
def _(problem: MultiSequence, case: Case) -> Maps:
    return sequences_of(problem, case.weights)


@equations_of.register
def _(problem: Minimax, case: Case) -> Maps | None:
    """Both gradients, if the payoff has no curvature in some direction of y, and y no set."""
    if case.y is None:
        raise NotCertifiable("there is no y to start the inner maximisation from: give y")
    if not problem.project_y.trivial:
        return None
    low, high, _ = spectrum(level_of(problem, case.weights), case.data, case.x, case.y)
    if abs(low) > FLAT * abs(high):
        return None
    if not problem.set_of_x.trivial:
        raise NotCertifiable("the payoff is not strongly concave in y, and y has no set, but x has one")
    return _slopes_of(problem, case.weights)


@kept
def _slopes_of(problem: Minimax, weights: Weights) -> Maps:
    def maps(point: tuple[PyTree, PyTree], data: Placed) -> tuple[PyTree, PyTree]:
        mean = Case(problem, data, weights, point[0]).mean
        by_x, by_y = jax.grad(lambda x, y: mean(problem.payoff, x, y), (0, 1))(*point)
        return by_x, jax.tree.map(jnp.negative, by_y)

    return maps
