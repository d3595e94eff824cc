"""The constants that step sizes depend on, at a point: curvature, coupling, noise, heterogeneity, kinks.

    L, μ            the largest and the smallest eigenvalue of ∇²f, of the clients' mean and of every
                    client, by Lanczos' method on Hessian–vector products (`fedstrata.advice.spectrum`)
    coupling        ‖∇²_xy h‖, the largest singular value
    objective       L and μ of F(x) = f(x, y(x)), at the solved y, by differences of ∇F; the same for other
                    functions F of x alone (`fedstrata.advice.objectives`); and ‖∇²F − ∇²_xx f‖
    reach           the distance along −∇f to the least value of f; if there is none, to the end of its set
    heterogeneity   √(1/m Σ ‖∇f_i − ∇f‖²),  and of curvature  max_i ‖∇²f_i − ∇²f‖
    noise           √(1/m Σ_i mean_ξ ‖∇f(x, ξ) − ∇f_i‖²), the error of a gradient from one sample
    kink            the fraction of the change of slope along a short line that is in one step: 0 if smooth
    rounding        the spacing of floats of the size of f: smaller differences are lost

If a loss has values only, its gradient is a central difference, and the clients' constants are not measured.
With as many Lanczos steps as variables the eigenvalues are exact. Everything is a mean over clients, or one
client's number, so that a federation can measure it, in `Constants.exchanges` exchanges. Samples and clients
are measured in blocks that fit into memory (`fedstrata.advice.blocks`). Of many clients, max_i ‖∇²f_i − ∇²f‖
is taken over those with the largest ‖(∇²f_i − ∇²f) v‖ for a random v.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fedstrata.advice.blocks import at_once, block_of, client_means, cost_of, mean_of
from fedstrata.advice.feasible import projection
from fedstrata.advice.lower import NotCertifiable, kept
from fedstrata.advice.objectives import Case, Objective, level_of, mean_over, objective_of, sequences_of
from fedstrata.advice.precision import double, double_precision
from fedstrata.advice.spectrum import CALM, FEWEST, STEPS, ends, lanczos, missed, start_of, used
from fedstrata.core import tree
from fedstrata.core.client import Client
from fedstrata.core.counting import ORACLES
from fedstrata.core.problem import Problem
from fedstrata.core.term import Term
from fedstrata.core.types import Array, Function, Integer, PyTree, Weights
from fedstrata.data.federated import FederatedData
from fedstrata.data.storage import Placed
from fedstrata.problems.classes import MPEC, Composition, Minimization, MultiSequence, Selection
from fedstrata.problems.dro import DRO
from fedstrata.problems.fairness import Constrained
from fedstrata.problems.measured import Constants as Constants
from fedstrata.problems.measured import Measured as Measured
from fedstrata.problems.terms import calling, known
from fedstrata.support.frozen import jit
from fedstrata.support.points import ravel

CLOSE = 0.02  # the relative change of both ends of a spectrum in a step at which the iteration stops
LINES = 4  # the number of lines that are searched for kinks
SHORT = 1e-2  # half the length of such a line, relative to ‖x‖
CUT = 64  # intervals of a line
DOWN = 2.0 ** (np.arange(-60, 61) / 2)  # steps tried along −∇f, in units of a first guess
MOST_MAPS = 200  # entries of a `MultiSequence`'s (x, Z), up to which its Jacobian is computed
FEW = 8  # Lanczos steps for the clients' deviations from the mean
UNLIKE = 16  # clients whose deviations are measured: each of their steps is a pass over all samples
SMALL = 1e-3
ROUNDED = 1e-14  # relative to a value: a smaller decrease is rounding
PASSES = 1_000  # forward passes over all samples that cost about as much as the measurements of a function
FEWER = 4  # the stride in `DOWN` for slow functions
SEEN = 1e-6  # relative to a value: a smaller decrease shows no curvature
MOSTLY = 0.9  # the part of the decrease along −∇f up to which its curvature is followed


class Measurand(NamedTuple):
    """A function of a problem to be measured.

    Attributes:
        function: ``function(x, y, sample)``.
        variable: the argument of differentiation: 0 is x, 1 is y.
        samples: ``"train"`` or ``"valid"``.
        personal: whether every client has its own y.
    """

    function: Function
    variable: Literal[0, 1] = 0
    samples: Literal["train", "valid"] = "train"
    personal: bool = False


def parts_of(problem: Problem) -> dict[str, Measurand]:
    """The functions of a problem that are measured, by name: its levels on clients' samples.

    If each client or sample has its own y, only the level that determines y is measured.
    """
    shared = all(level.solved_by == "all" for level in problem.levels)
    black, found = problem.without_derivatives, {}
    if isinstance(problem, DRO) and problem.risk.additive:  # gives the unit of its threshold
        loss = Term.of(problem.loss)
        found["loss"] = Measurand(calling(lambda v, y, sample: loss(v.x, sample), loss))
    for level in problem.levels:
        if level.seeks not in ("min", "max") or level.samples not in ("train", "valid"):
            continue
        if level.name in black or (level.seeks == "max" and black):  # a payoff is both levels
            continue
        function = _of_x(level.minimised()) if level.arguments == "x" else level.minimised()
        part, personal = "valid" if level.samples == "valid" else "train", level.solved_by == "client"
        if shared or personal:
            found[level.name] = Measurand(function, 0 if level.variable == "x" else 1, part, personal)  # type: ignore[arg-type]
    if isinstance(problem, Constrained) and problem.plain is not None:
        found["plain"] = Measurand(_of_x(problem.plain))
    return found


@kept
def _parts(problem: Problem, weights: Weights) -> dict[str, Measurand]:
    """The same, cached, so that programs are compiled once."""
    return parts_of(problem)


def _of_x(loss: Function) -> Term:
    term = Term.of(loss)
    return calling(lambda x, y, sample: term(x, sample), term)


def constants(
    problem: Problem,
    data: FederatedData,
    x: PyTree,
    y: PyTree = None,
    *,
    weights: Weights = "uniform",
    objective: bool = True,
    steps: int = STEPS,
) -> Constants:
    """Measure a problem's constants at a point.

    Args:
        problem: any problem.
        data: the clients' samples.
        x: the point.
        y: the second variable, if any: y(x) is solved from there, and all is measured at y(x).
        weights: the clients' weights in their mean.
        objective: whether to measure F's constants; False keeps y as given.
        steps: the most steps of Lanczos' method.

    >>> import fedstrata as fs, numpy as np
    >>> data = fs.FederatedData.from_clients([{"a": np.full((2, 1), a)} for a in (1.0, 3.0)])
    >>> problem = fs.Minimization(lambda x, s: 0.5 * s["a"] @ x**2)
    >>> found = fs.constants(problem, data, np.ones(1))
    >>> found.levels["loss"].L, found.levels["loss"].client_L.tolist(), found.levels["loss"].heterogeneity
    (2.0, [1.0, 3.0], 1.0)
    """
    dtype = jnp.result_type(float)
    with double_precision():
        placed = data.placed()
        case = Case(problem, placed, weights, *(double(point) for point in (x, y)))
        if problem.personal and any(np.shape(leaf)[:1] != (placed.clients,) for leaf in jax.tree.leaves(y)):
            case = replace(case, y=jax.tree.map(lambda leaf: jnp.stack([leaf] * placed.clients), case.y))
        alone = isinstance(problem, Minimization | Selection)
        F = _objective(problem, case) if objective and not alone else None
        if F is not None and F.solved is not None:
            case = replace(case, y=level_of(problem, weights).gather(F.solved.y, case.data))
        meter = _Meter(case, steps, float(jnp.finfo(dtype).eps))
        parts = _parts(problem, weights)
        levels = {name: meter.level(part) for name, part in parts.items()}
        match problem:
            case Minimization() if problem.without_derivatives:
                levels["loss"] = meter.objective(objective_of(problem, case))[0]
            case MPEC():
                levels["follower"] = meter.follower(problem)
            case Constrained():
                levels["constraints"] = meter.constraints(problem)
        lower = parts.get("lower")
        least, coupling = (None, None) if lower is None else meter.coupling(lower)
        through = None
        if F is not None:
            levels["objective"], through = meter.objective(F)
        jacobian = meter.jacobian(problem) if isinstance(problem, MultiSequence) else None
        slope_y = meter.slope_y()
    scale_y = None if y is None else _scale(y)
    calls = {ORACLES[kind]: count for kind, count in meter.calls.items()}
    sizes, cost = (_scale(x), scale_y), (meter.exchanges, calls)
    return Constants(levels, coupling, through, *sizes, *cost, jacobian, slope_y, least)


def operations(problem: Problem, data: FederatedData, x: PyTree, y: PyTree = None) -> float:
    """The approximate operations of `constants` for the levels of a problem, from shapes only."""
    total = 0.0
    if problem.personal and all(np.shape(leaf)[:1] == (data.clients,) for leaf in jax.tree.leaves(y)):
        y = _one(y)
    value: PyTree = None  # of the level before, where the next one takes it
    for level in problem.levels:
        args = level.args(x, y) if value is None else (value,)
        if level.samples not in ("train", "valid"):
            continue
        held_out = data.valid_sizes if level.samples == "valid" else None
        sample = data.sample_of("train" if held_out is None else "valid")
        if not known(level):
            once = cost_of(level, sample, *args).operations
            total += PASSES * once * float((data.sizes if held_out is None else held_out).sum())
        if level.seeks == "value":
            value = level.shape(*args) if known(level) else level.shape(*args, sample)
    return total


def _objective(problem: Problem, case: Case) -> Objective | None:
    """F, or None if it is not defined at this point."""
    try:
        return objective_of(problem, case)
    except NotCertifiable:
        return None


def _scale(point: PyTree) -> float:
    return float(tree.norm(point)) / np.sqrt(tree.dimension(point))


@dataclass
class _Meter:
    """The measurements at one point, with a count of their cost."""

    case: Case
    steps: int
    epsilon: float
    exchanges: int = 0
    calls: Counter[str] = field(default_factory=Counter)

    def book(self, kind: str, passes: int, samples: str = "train") -> None:
        """Count passes over all samples."""
        part = self.case.data.validation if samples == "valid" else None
        self.calls[kind] += passes * (part or self.case.data.training).samples

    def level(self, part: Measurand) -> Measured:
        """All constants of a function."""
        case, data = self.case, self.case.data
        moving = _split(part, case.x, case.y)[1]
        size = tree.dimension(_one(moving) if part.personal else moving)
        steps = min(self.steps, size)
        program = _Program(part, case.weights, steps)
        found = jax.tree.map(np.asarray, program(data, case.x, case.y))
        spectra = [ends(a, b)[:2] for a, b in zip(*found.each, strict=True)]
        low, high = (np.array([pair[k] for pair in spectra]) for k in (0, 1))
        common = ends(*found.mean)[:2] if not part.personal else (low.min(), high.max())
        unlike = max((max(map(abs, ends(a, b)[:2])) for a, b in zip(*found.apart, strict=True)), default=0.0)
        share, length = np.asarray(data.shares(case.weights)), float(tree.norm(moving))
        slope, value = found.slope, float(found.value)
        common_steps, few = used(found.mean[1]), min(steps, FEW)
        self.book("products", max(map(used, found.each[1])) + common_steps + few, part.samples)
        self.book("gradients", 2, part.samples)
        self.book("values", 1 + LINES * (CUT + 1) + found.down.size, part.samples)
        self.exchanges += common_steps + few + 3 + LINES
        reach = _least(value, found.down, float(found.unit), length)
        if reach >= float(found.unit) * DOWN[-1] and not part.variable:
            reach = self.confined(reach, case.x, slope)
        return Measured(
            L=float(common[1]),
            mu=float(common[0]),
            client_L=high,
            client_mu=low,
            gradient=float(np.linalg.norm(slope)),
            heterogeneity=float(np.sqrt(share @ found.unlike)),
            curvature_heterogeneity=float(unlike),
            noise=float(np.sqrt(share @ found.noise)),
            kink=_kink(found.lines),
            value=value,
            rounding=self.epsilon * abs(value),
            reach=reach,
            unsure=missed(size, common_steps),
            growth=_growth(value, float(np.linalg.norm(slope)), float(found.unit) * DOWN, found.down),
        )

    def confined(self, reach: float, x: PyTree, slope: np.ndarray) -> float:
        """The distance to the end of the set, for a function that decreases without end along −∇f."""
        size = float(np.linalg.norm(slope))
        if self.case.problem.set_of_x.trivial or not size > 0:
            return reach
        flat, unravel = ravel_pytree(x)
        moved = projection(self.case.problem, self.case.data)(unravel(flat - reach / size * slope))
        return reach if moved is None else min(reach, float(tree.norm(tree.sub(moved, x)))) or reach

    def coupling(self, part: Measurand) -> tuple[float, float]:
        """The least and the largest singular value of ∇²_xy h, by Lanczos' method on its square.

        If clients have their own y, it is the root mean square of the clients' values.
        """
        x, y, case = self.case.x, self.case.y, self.case
        steps = min(self.steps, tree.dimension(x))
        local = case.problem.local
        alpha, beta = map(np.asarray, _coupled(part, case.weights, steps, local, x, y, case.data))
        self.book("products", 2 * used(beta))
        self.exchanges += 2 * used(beta)
        low, high, _ = ends(alpha, beta)
        return math.sqrt(max(low, 0.0)), math.sqrt(max(high, 0.0))

    def objective(self, objective: Objective) -> tuple[Measured, float | None]:
        """The constants of F, which is not a mean over clients; and the curvature of its part through y."""
        flat, unravel = ravel(objective.x)
        steps, width = min(self.steps, flat.size), 1e-4 * (float(np.linalg.norm(flat)) or 1.0)

        def at(z: np.ndarray) -> tuple[float, np.ndarray]:
            value, slope = objective.evaluate(unravel(z))
            return float(value), ravel(slope)[0]

        def product(v: np.ndarray) -> np.ndarray:
            return (at(flat + width * v)[1] - at(flat - width * v)[1]) / (2 * width)

        low, high, basis, images = _lanczos_on_host(product, flat, steps)
        steps, through = len(basis), None
        if (upper := self.direct()) is not None:
            directly = np.array([upper(v) for v in basis])
            self.book("products", steps)
            self.exchanges += steps
            through = float(np.abs(np.linalg.eigvalsh(_symmetric(basis @ (images - directly).T))).max())
        value, slope = at(flat)
        size = float(np.linalg.norm(slope))
        unit = _unit(size, high, float(np.linalg.norm(flat)))
        down = slope / size if size > 0 else slope
        values = _walk(lambda t: at(flat - t * unit * down)[0], DOWN[::FEWER])
        kink = 0.0
        if isinstance(self.case.problem, Composition) or self.case.problem.without_derivatives:
            lines, widths = map(np.asarray, _short_lines(jnp.asarray(flat)))
            kink = _kink(np.array([[at(flat + t * d)[0] for t in widths] for d in lines]))
        self.book("gradients", 2 * steps + 1)
        self.exchanges += 2 * steps + 1
        none, rounding = np.zeros(0), self.epsilon * abs(value)
        reach = _least(value, values, unit, float(np.linalg.norm(flat)), DOWN[::FEWER])
        if reach >= unit * DOWN[-1]:
            reach = self.confined(reach, objective.x, slope)
        unsure = missed(flat.size, steps)
        growth = _growth(value, size, unit * DOWN[::FEWER], values)
        found = Measured(
            high, low, none, none, size, 0.0, 0.0, 0.0, kink, value, rounding, reach, unsure, growth
        )
        return found, through

    def jacobian(self, problem: MultiSequence) -> np.ndarray | None:
        """The Jacobian of all maps by (x, Z), column by column; None if it is too large."""
        z, _ = ravel_pytree((self.case.x, self.case.y))
        if z.size > MOST_MAPS:
            return None
        self.book("products", z.size)
        self.exchanges += int(z.size)
        return np.asarray(_jacobian(problem, self.case.weights)((self.case.x, self.case.y), self.case.data))

    def direct(self) -> Callable[[np.ndarray], np.ndarray] | None:
        """The product with ∇²_xx f at (x, y(x)), if the problem has a lower level."""
        parts = _parts(self.case.problem, self.case.weights)
        part = parts.get("upper") or parts.get("payoff")
        if "lower" not in parts or part is None:
            return None
        x, y, weights, data = self.case.x, self.case.y, self.case.weights, self.case.data
        local = self.case.problem.local
        return lambda v: np.asarray(_directly(part, weights, local, jnp.asarray(v), x, y, data))

    def constraints(self, problem: Constrained) -> Measured:
        """The largest gradient of a constraint c_j(g(x)), and the curvature along it."""
        case = self.case
        flat, unravel = ravel_pytree(case.x)

        def c(z: Array) -> Array:
            return problem.constraints(case.mean(Term.of(problem.inner), unravel(z)))

        slopes = jax.jacrev(c)(flat)
        sizes = jnp.linalg.norm(slopes, axis=1)
        units = slopes / jnp.where(sizes > 0, sizes, 1)[:, None]
        bends = [jnp.abs(jnp.linalg.norm(jax.jvp(jax.jacrev(c), (flat,), (u,))[1], 2)) for u in units]
        self.book("products", len(units) + 1)
        self.exchanges += 2 * (len(units) + 1)
        size, bend, none = float(sizes.max()), float(jnp.stack(bends).max()), np.zeros(0)
        value = float(c(flat).max())
        return Measured(bend, -bend, none, none, size, 0.0, 0.0, 0.0, 0.0, value, self.epsilon * abs(value))

    def slope_y(self) -> float | None:
        """‖∇_y f‖ of the upper level, if all clients share y."""
        parts = _parts(self.case.problem, self.case.weights)
        if "upper" not in parts or "lower" not in parts or self.case.problem.local:
            return None
        case, part = self.case, parts["upper"]
        self.book("gradients", 1, part.samples)
        self.exchanges += 1
        return float(_slope_y(part, case.weights, case.x, case.y, case.data))

    def follower(self, problem: MPEC) -> Measured:
        """‖∇_y G‖ of the followers' map, and the least eigenvalue of its symmetric part, over all samples."""
        case, data = self.case, self.case.data
        y = case.y if _taken(problem, case) else _one(case.y)
        steps = min(self.steps, tree.dimension(y))
        program = _followers(problem, case.weights)
        square, symmetric, G = jax.tree.map(np.asarray, program(steps, case.x, y, data.train))
        L = np.sqrt([max(ends(a, b)[1], 0.0) for a, b in zip(*square, strict=True)])
        mu = np.array([ends(a, b)[0] for a, b in zip(*symmetric, strict=True)])
        owners = np.repeat(np.arange(data.clients), np.asarray(data.sizes))
        L_of, mu_of = (
            np.array([reduce(values[owners == i]) for i in range(data.clients)])
            for values, reduce in ((L, np.max), (mu, np.min))
        )
        self.book("products", 4 * steps)
        self.exchanges += 1
        means = np.array([G[owners == i].mean(0) for i in range(data.clients)])
        share = np.asarray(data.shares(case.weights))
        slope = share @ means
        apart = float(np.sqrt(share @ ((means - slope) ** 2).sum(1)))
        noise = float(
            np.sqrt(share @ [((G[owners == i] - m) ** 2).sum(1).mean() for i, m in enumerate(means)])
        )
        size = float(np.linalg.norm(slope))
        return Measured(
            float(L.max()), float(mu.min()), L_of, mu_of, size, apart, 0.0, noise, 0.0, np.nan, np.nan
        )


@kept
def _followers(problem: MPEC, _: Weights) -> Callable[..., Any]:
    """Every sample's spectra of ∇_y Gᵀ∇_y G and of ∇_y G's symmetric part, and G."""

    def program(steps: int, x: PyTree, y: PyTree, samples: PyTree) -> Any:
        flat, unravel = ravel_pytree(y)

        def of_sample(sample: PyTree) -> Any:
            def G(z: Array) -> Array:
                return ravel_pytree(problem.follower(x, unravel(z), sample))[0]

            def product(v: Array) -> Array:
                return jax.jvp(G, (flat,), (v,))[1]

            def transposed(v: Array) -> Array:
                return jax.vjp(G, flat)[1](v)[0]

            v = start_of(flat)
            square = lanczos(lambda v: transposed(product(v)), v, steps)[:2]
            return square, lanczos(lambda v: (product(v) + transposed(v)) / 2, v, steps)[:2], G(flat)

        return jax.vmap(of_sample)(samples)

    return jit(program, static_argnums=0)


@kept
def _jacobian(problem: MultiSequence, weights: Weights) -> Callable[[PyTree, Placed], Array]:
    """The Jacobian of all maps at a point."""
    maps = sequences_of(problem, weights)

    def program(point: PyTree, data: Placed) -> Array:
        z, unravel = ravel_pytree(point)
        return jax.jacfwd(lambda z: ravel_pytree(maps(unravel(z), data))[0])(z)

    return jit(program)


def _split(part: Measurand, x: PyTree, y: PyTree) -> tuple[PyTree, PyTree]:
    """The fixed argument, and the one of differentiation."""
    return (x, y) if part.variable else (y, x)


def _taken(problem: MPEC, case: Case) -> bool:
    """Whether the followers' map takes y unchanged; a run's y has a leading client axis."""
    sample = _one(case.data.train)
    try:
        found = jax.eval_shape(problem.follower, case.x, case.y, sample)
    except (TypeError, ValueError):
        return False
    return [leaf.shape for leaf in jax.tree.leaves(found)] == [np.shape(y) for y in jax.tree.leaves(case.y)]


def _one(y: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[0], y)


class _Found(NamedTuple):
    """The output of a function's program: arrays, whose eigenvalues the host computes."""

    value: Array
    slope: Array
    unlike: Array
    each: tuple[Array, Array]
    mean: tuple[Array, Array]
    apart: tuple[Array, Array]
    noise: Array
    lines: Array
    down: Array
    unit: Array


@dataclass(frozen=True)
class _Program:
    """One compiled program for all measurements of a function; equal ones are compiled once."""

    part: Measurand
    weights: Weights
    steps: int

    def __call__(self, data: Placed, x: PyTree, y: PyTree) -> _Found:
        return _measured(self, data, x, y)

    def flat(self, unravel: Callable[[Array], PyTree], fixed: PyTree) -> Term:
        """The function of a flat vector and a sample."""
        term, second = Term.of(self.part.function), self.part.variable

        def of(z: Array, sample: PyTree) -> Any:
            return term(*((fixed, unravel(z)) if second else (unravel(z), fixed)), sample)

        return replace(term, function=of)


def _noise(term: Term, samples: str, tile: int | None, client: Client, z: Array) -> Array:
    """The mean square distance of a sample's gradient from their mean."""
    oracle = vars(client)[samples].full_mean(term)
    if term.reads != "sample":
        return jnp.zeros(())
    rows, mean = (
        oracle.weigh().size,
        jax.grad(partial(term.over, oracle.samples, oracle.weights, at_once=tile))(z),
    )

    def away(sample: PyTree) -> Array:
        return ((jax.grad(term.function)(z, sample) - mean) ** 2).sum()

    return oracle.weigh() @ jax.lax.map(away, oracle.samples, batch_size=min(tile or rows, rows))


@partial(jit, static_argnums=0)
def _measured(program: _Program, data: Placed, x: PyTree, y: PyTree) -> _Found:
    fixed, moving = _split(program.part, x, y)
    flat, unravel = ravel_pytree(_one(moving) if program.part.personal else moving)
    term = program.flat(unravel, fixed)
    samples, personal = program.part.samples, program.part.personal
    spots = jax.vmap(lambda own: ravel_pytree(own)[0])(moving) if personal else None
    start, tile = start_of(flat), at_once(term, data, samples, flat)
    block = block_of(data, samples, tile, 2 * program.steps * flat.nbytes)
    noisy = at_once(term, data, samples, flat, bytes_each=flat.nbytes)

    def f(client: Client, z: Array) -> Any:
        return mean_of(client, term, z, part=samples, tile=tile)

    def each_client(function: Function, block: int | None = block) -> Any:
        if spots is None:
            return data.each_client(lambda client: function(client, flat), block=block)
        return data.each_client(function, spots, block=block)

    def product(client: Client, z: Array, v: Array) -> Array:
        return jax.jvp(jax.grad(lambda z: f(client, z)), (z,), (v,))[1]

    def at(z: Array) -> Any:
        if spots is None:
            return mean_over(data, program.weights, term, z, part=samples)
        return mean_over(data, program.weights, term, part=samples, each=spots + (z - flat))

    def mean(v: Array) -> Array:
        return jax.jvp(jax.grad(at), (flat,), (v,))[1]

    def deviation(row: Integer) -> Any:
        client, z = data.client(row), flat if spots is None else spots[row]
        return lanczos(lambda v: product(client, z, v) - mean(v), start, min(program.steps, FEW))[:2]

    each = each_client(lambda c, z: lanczos(partial(product, c, z), start, program.steps, CLOSE)[:2])
    common = lanczos(mean, start, program.steps, CLOSE)[:2]
    rows = jnp.arange(data.clients)
    if data.clients > UNLIKE:
        typical = mean(start)
        rows = jax.lax.top_k(each_client(lambda c, z: _square(product(c, z, start) - typical)), UNLIKE)[1]
    apart = jax.lax.map(deviation, rows)
    slope = jax.grad(at)(flat)
    unlike = each_client(lambda client, z: _square(jax.grad(partial(f, client))(z) - slope))
    lines, widths = _short_lines(flat)
    along = jax.lax.map(lambda d: jax.lax.map(lambda t: at(flat + t * d), widths), lines)
    size = jnp.linalg.norm(slope)
    bend = jnp.linalg.norm(mean(slope)) / jnp.where(size > 0, size, 1)
    unit = _unit(size, bend, jnp.linalg.norm(flat))
    down = slope / jnp.where(size > 0, size, 1)
    ahead = jax.lax.map(lambda t: at(flat - t * unit * down), jnp.asarray(DOWN))
    noise = each_client(partial(_noise, term, samples, noisy), block_of(data, samples, noisy, flat.nbytes))
    return _Found(at(flat), slope, unlike, each, common, apart, noise, along, ahead, unit)


def _square(v: Array) -> Array:
    return (v**2).sum()


@partial(jit, static_argnums=(0, 1, 2, 3))
def _coupled(
    part: Measurand, weights: Weights, steps: int, local: bool, x: PyTree, y: PyTree, data: Placed
) -> Any:
    flat, unravel = ravel_pytree(x)

    def slope(x: PyTree) -> PyTree:
        if local:
            roots = jnp.sqrt(data.shares(weights))
            return jax.grad(lambda y: roots @ client_means(data, part.function, x, each=y))(y)
        return jax.grad(lambda y: mean_over(data, weights, part.function, x, y))(y)

    def square(v: Array) -> Array:
        mixed = jax.jvp(slope, (x,), (unravel(v),))[1]
        return ravel_pytree(jax.vjp(slope, x)[1](mixed)[0])[0]

    return lanczos(square, start_of(flat), steps, CLOSE)[:2]


@partial(jit, static_argnums=(0, 1))
def _slope_y(part: Measurand, weights: Weights, x: PyTree, y: PyTree, data: Placed) -> Array:
    f = partial(mean_over, data, weights, part.function, x, part=part.samples)
    return tree.norm(jax.grad(f)(y))


@partial(jit, static_argnums=(0, 1, 2))
def _directly(
    part: Measurand, weights: Weights, local: bool, v: Array, x: PyTree, y: PyTree, data: Placed
) -> Array:
    flat, unravel = ravel_pytree(x)

    def f(z: Array) -> Any:
        shared, each = ((), y) if local else ((y,), None)
        return mean_over(data, weights, part.function, unravel(z), *shared, part=part.samples, each=each)

    return jax.jvp(jax.grad(f), (flat,), (v,))[1]


def _short_lines(flat: Array) -> tuple[Array, Array]:
    """Random unit vectors, and the positions along them at which a function is evaluated."""
    size = jnp.linalg.norm(flat)
    width = SHORT * jnp.where(size > 0, size, 1.0)
    lines = jax.random.normal(jax.random.key(3), (LINES, flat.size), flat.dtype)
    steps = width * jnp.linspace(-1, 1, CUT + 1)
    return lines / jnp.linalg.norm(lines, axis=1, keepdims=True), steps


def _kink(values: np.ndarray) -> float:
    """The largest fraction of the change of slope along a line that is in one of its intervals."""
    bends = np.abs(np.diff(values, n=2, axis=1))
    # the slope of a smooth function changes evenly; at a kink almost all of it changes in one interval
    floor = 1e-12 * np.abs(values).max() + 1e-300
    share = bends.max(1) / np.maximum(bends.sum(1), floor * CUT)
    return float(np.clip((share.max() - 4 / CUT) / (1 - 4 / CUT), 0, 1))


def _unit(slope: Any, bend: Any, size: Any) -> Any:
    """The length of a step down the gradient, by the curvature; without curvature, ‖x‖."""
    curved = bend > 1e-12 * slope
    return jnp.where(curved, slope / jnp.where(curved, bend, 1), jnp.where(size > 0, size, 1.0))


def _least(now: float, values: np.ndarray, unit: float, size: float, steps: np.ndarray = DOWN) -> float:
    """The step with the least value; at a solution, where none is lower, a small fraction of ‖x‖."""
    finite = np.where(np.isfinite(values), values, np.inf)
    if not now - finite.min() > ROUNDED * abs(now):
        return SMALL * (size or 1.0)
    return float(unit * steps[int(np.argmin(finite))])


def _walk(f: Callable[[float], float], steps: np.ndarray) -> np.ndarray:
    """Values from the middle of the steps in the direction of descent, to the first rise; infinite elsewhere.

    The least value next to a step by the curvature counts, and each may take a solved lower level.
    """
    values, middle = np.full(len(steps), np.inf), len(steps) // 2

    def look(k: int) -> None:
        found = f(steps[k])
        values[k] = found if math.isfinite(found) else math.inf

    for k in (middle - 1, middle, middle + 1):
        look(k)
    on = 1 if values[middle] <= min(values[middle - 1], sys.float_info.max) else -1
    k = middle + on
    while 0 < k < len(steps) - 1 and values[k] <= values[k - on]:
        k += on
        look(k)
    return values


def _growth(now: float, slope: float, steps: np.ndarray, values: np.ndarray) -> float:
    """The curvature up to the first step with most of the decrease, relative to that up to the step before.

    With exact values it is one for a parabola, f(t) = f(0) − slope t + ½ curvature t².
    """
    falls = now - np.where(np.isfinite(values), values, np.inf)
    last = int(np.argmax(falls >= MOSTLY * falls.max()))
    if last == 0 or not falls.max() > SEEN * abs(now):
        return 1.0
    last += not np.isfinite(falls[last - 1])  # where a walk began
    before, up_to = ((slope * steps[k] - falls[k]) / steps[k] ** 2 for k in (last - 1, last))
    return float(up_to / before) if before > 0 else math.inf if up_to > before else 1.0


def _lanczos_on_host(
    product: Callable[[np.ndarray], np.ndarray], like: np.ndarray, steps: int
) -> tuple[float, float, np.ndarray, np.ndarray]:
    """The extreme eigenvalues of a product that cannot be traced; the vectors and their images."""
    v = np.asarray(start_of(jnp.asarray(like)))
    v = v / np.linalg.norm(v)
    basis, images, before, calm = np.zeros((0, v.size)), np.zeros((0, v.size)), np.zeros(2), 0
    for k in range(steps):
        basis, images = np.vstack([basis, v]), np.vstack([images, product(v)])
        found = np.linalg.eigvalsh(_symmetric(basis @ images.T))[[0, -1]]
        high = np.abs(found).max()
        same = (np.abs(found - before) <= CLOSE * np.maximum(np.abs(found), 1e-3 * high)).all()
        calm, before, w = calm + 1 if same and k else 0, found, images[-1]
        for _ in range(2):
            w = w - basis.T @ (basis @ w)
        size = np.linalg.norm(w)
        if (calm >= CALM and k + 1 >= FEWEST) or size <= 1e-10 * high:
            break
        v = w / size
    return float(before[0]), float(before[1]), basis, images


def _symmetric(matrix: np.ndarray) -> np.ndarray:
    return (matrix + matrix.T) / 2
