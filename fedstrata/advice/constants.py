"""The constants that step sizes hang on, measured at a point: curvature, coupling, noise, unlikeness, kinks.

    L, μ            the largest and the smallest eigenvalue of ∇²f, of the clients' mean and of every
                    client, by Lanczos' method on Hessian–vector products (`fedstrata.advice.spectrum`)
    coupling        ‖∇²_xy h‖, the largest singular value
    implicit        dᵀ∇²F d along random unit vectors d, F(x) = f(x, y(x)), by differences of ∇F
    heterogeneity   √(1/m Σ ‖∇f_i − ∇f‖²),  and of curvature  max_i ‖∇²f_i − ∇²f‖
    noise           √(1/m Σ_i mean_ξ ‖∇f(x, ξ) − ∇f_i‖²), the error of a gradient from one sample
    kink            how much of the slope jumps within a short line: 0 where f is smooth
    rounding        the distance of two neighbouring floats of the size of f: differences below it are lost

Where a function has values only, gradients are central differences and products differences of these. With
as many Lanczos steps as variables the eigenvalues are exact. Everything is a mean over clients, or one
client's own number, so it can be measured in a federation: `Constants.exchanges` says in how many exchanges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fedstrata.advice.lower import NotCertifiable
from fedstrata.advice.objectives import Case, objective_of
from fedstrata.advice.precision import double_precision
from fedstrata.advice.spectrum import STEPS, ends, lanczos, start_of
from fedstrata.core import tree
from fedstrata.core.client import Client
from fedstrata.core.counting import ORACLES
from fedstrata.core.problem import Problem
from fedstrata.core.term import Term
from fedstrata.core.types import Array, Function, PyTree, Weights
from fedstrata.data.federated import FederatedData
from fedstrata.data.storage import Placed
from fedstrata.problems.classes import MPEC, Composition, Minimization, Selection

LINES = 4  # along which a kink is looked for
SHORT = 1e-2  # the half length of such a line, relative to that of the variable
CUT = 64  # its intervals


class Part(NamedTuple):
    """A function of a problem whose constants are measured.

    Attributes:
        function: ``function(x, y, sample)``.
        variable: the argument that it is differentiated by: 0 is x, 1 is y.
        samples: ``"train"`` or ``"valid"``.
        personal: whether every client has its own y.
    """

    function: Function
    variable: Literal[0, 1] = 0
    samples: Literal["train", "valid"] = "train"
    personal: bool = False


@dataclass(frozen=True)
class Level:
    """The constants of one function.

    Attributes:
        L, mu: the largest and the smallest curvature of the clients' mean; μ < 0 where it is not convex.
        client_L, client_mu: those of every client.
        gradient: ‖∇f‖.
        heterogeneity: how much the clients' gradients differ.
        curvature_heterogeneity: how much their Hessians do.
        noise: of a gradient from one sample.
        kink: how much of the slope jumps within a short line, between 0 (smooth) and 1.
        value: f.
        rounding: the distance of two neighbouring floats of that size, in the precision of the run.
    """

    L: float
    mu: float
    client_L: np.ndarray
    client_mu: np.ndarray
    gradient: float
    heterogeneity: float
    curvature_heterogeneity: float
    noise: float
    kink: float
    value: float
    rounding: float


@dataclass(frozen=True)
class Constants:
    """What `constants` measured.

    Attributes:
        levels: by the function's name.
        coupling: ‖∇²_xy h‖ of the lower level; None where there is none.
        implicit: the curvature of F along a few random directions, through the lower level.
        scale_x, scale_y: ‖x‖/√n and ‖y‖/√p.
        exchanges: how many exchanges of vectors a federation needs for it.
        oracle_calls: what it cost, in samples, like `Ledger.oracle_calls`.
    """

    levels: dict[str, Level]
    coupling: float | None
    implicit: np.ndarray
    scale_x: float
    scale_y: float | None
    exchanges: int
    oracle_calls: dict[str, int] = field(default_factory=dict)

    def __repr__(self) -> str:
        lines = [
            f"{name}: L {its.L:.3g}, mu {its.mu:.3g}, clients' L {its.client_L.min(initial=its.L):.3g}–"
            f"{its.client_L.max(initial=its.L):.3g}, "
            f"heterogeneity {its.heterogeneity:.3g}, noise {its.noise:.3g}, kink {its.kink:.2g}"
            for name, its in self.levels.items()
        ]
        if self.coupling is not None:
            lines.append(f"coupling {self.coupling:.3g}")
        if self.implicit.size:
            lines.append(f"curvature of F {self.implicit.min():.3g} to {self.implicit.max():.3g}")
        lines.append(f"{self.exchanges} exchanges, {self.oracle_calls}")
        return "Constants(\n  " + ",\n  ".join(lines) + ",\n)"


def parts_of(problem: Problem) -> dict[str, Part]:
    """The functions of a problem that have constants, by name: of its levels those on clients' samples.

    Where y is a client's or a sample's own, only its own level is measured.
    """
    shared = all(level.solved_by == "all" for level in problem.levels)
    found = {}
    for level in problem.levels:
        if level.seeks not in ("min", "max") or level.samples not in ("train", "valid"):
            continue
        function = _of_x(level.minimised()) if level.arguments == "x" else level.minimised()
        part, own = "valid" if level.samples == "valid" else "train", level.solved_by == "client"
        if shared or own:
            found[level.name] = Part(function, 0 if level.variable == "x" else 1, part, own)  # type: ignore[arg-type]
    return found


def _of_x(loss: Function) -> Term:
    term = Term.of(loss)
    return Term(lambda x, y, sample: term.function(x, sample), term.reads)


def constants(
    problem: Problem,
    data: FederatedData,
    x: PyTree,
    y: PyTree = None,
    *,
    weights: Weights = "uniform",
    directions: int = 3,
    steps: int = STEPS,
) -> Constants:
    """Measure a problem's constants at a point.

    Args:
        problem: any problem.
        data: the clients' samples.
        x: the point.
        y: the second variable, where there is one: its start, or better y(x).
        weights: of the clients in their mean.
        directions: along which the curvature of F is measured; 0 leaves it out.
        steps: of Lanczos' method, at most.

    >>> import fedstrata as fs, numpy as np
    >>> data = fs.FederatedData.from_clients([{"a": np.full((2, 1), a)} for a in (1.0, 3.0)])
    >>> problem = fs.Minimization(lambda x, s: 0.5 * s["a"] @ x**2)
    >>> found = fs.constants(problem, data, np.ones(1))
    >>> found.levels["loss"].L, found.levels["loss"].client_L.tolist(), found.levels["loss"].heterogeneity
    (2.0, [1.0, 3.0], 1.0)
    """
    dtype = jnp.result_type(float)
    with double_precision():
        case = Case(problem, data.placed(), weights, *(_double(point) for point in (x, y)))
        meter = _Meter(case, steps, float(jnp.finfo(dtype).eps))
        levels = {name: meter.level(name, part) for name, part in parts_of(problem).items()}
        if isinstance(problem, MPEC):
            levels["follower"] = meter.follower(problem)
        if isinstance(problem, Composition):
            levels["objective"] = meter.objective()
        lower = parts_of(problem).get("lower")
        coupling = None if lower is None else meter.coupling(lower)
        implicit = meter.implicit(directions)
    scale_y = None if y is None else _scale(y)
    calls = {ORACLES[kind]: count for kind, count in meter.calls.items()}
    return Constants(levels, coupling, implicit, _scale(x), scale_y, meter.exchanges, calls)


def _double(point: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), float), point)


def _scale(point: PyTree) -> float:
    return float(tree.norm(point)) / np.sqrt(tree.dimension(point))


@dataclass
class _Meter:
    """Measures at one point and counts what it costs."""

    case: Case
    steps: int
    epsilon: float
    exchanges: int = 0
    calls: Counter[str] = field(default_factory=Counter)

    def book(self, kind: str, passes: int, samples: str = "train") -> None:
        """So many passes over all samples."""
        part = self.case.data.validation if samples == "valid" else None
        self.calls[kind] += passes * (part or self.case.data.training).samples

    def level(self, name: str, part: Part) -> Level:
        """All constants of a function."""
        case, data = self.case, self.case.data
        fixed, moving = _split(case, part)
        flat, unravel = ravel_pytree(_one(moving) if part.personal else moving)
        steps = min(self.steps, flat.size)
        products = "products"
        if Term.of(part.function).function is not None and name in case.problem.without_derivatives:
            products = "values"

        def f(client: Client, z: Array) -> Any:
            args = (fixed, unravel(z)) if part.variable else (unravel(z), fixed)
            return getattr(client, part.samples).full_mean(part.function).silent(*args)

        def each_sample(client: Client, z: Array) -> Any:
            args = (fixed, unravel(z)) if part.variable else (unravel(z), fixed)
            samples = getattr(client, part.samples)
            oracle = samples.full_mean(part.function)
            slopes = jax.vmap(
                lambda s: jax.grad(lambda z: oracle.term.function(*_put(args, part, unravel(z)), s))(z)
            )
            return slopes(oracle.samples), oracle.weigh()

        grad = _differences if products == "values" else jax.grad
        own = (
            _stacked(moving, data.clients)
            if part.personal
            else jnp.broadcast_to(flat, (data.clients, flat.size))
        )
        shares = data.shares(case.weights)
        measured = jax.jit(partial(_measured, f, grad, steps))(data, own, shares)
        values, slopes, each, mean, apart = jax.tree.map(np.asarray, measured)
        spectra = [ends(a, b)[:2] for a, b in zip(each[0], each[1], strict=True)]
        low, high = (np.array([pair[k] for pair in spectra]) for k in (0, 1))
        common = ends(*mean)[:2] if not part.personal else (low.min(), high.max())
        unlike = max((max(map(abs, ends(a, b)[:2])) for a, b in zip(*apart, strict=True)), default=0.0)
        share = np.asarray(shares)
        slope = share @ slopes
        noise = 0.0
        if products != "values" and Term.of(part.function).reads == "sample":
            noise = float(np.sqrt(share @ np.asarray(jax.jit(partial(_noise, each_sample))(data, own))))
        self.book(products, 3 * steps, part.samples)
        self.book("gradients", 2, part.samples)
        self.book("values", 1 + LINES * (CUT + 1), part.samples)
        self.exchanges += 2 * steps + 2 + LINES
        value = float(share @ values)
        return Level(
            L=float(common[1]),
            mu=float(common[0]),
            client_L=high,
            client_mu=low,
            gradient=float(np.linalg.norm(slope)),
            heterogeneity=float(np.sqrt(share @ ((slopes - slope) ** 2).sum(1))),
            curvature_heterogeneity=float(unlike),
            noise=noise,
            kink=self._kink(
                lambda z, data: shares @ data.each_client(f, jnp.broadcast_to(z, own.shape)), flat
            ),
            value=value,
            rounding=self.epsilon * abs(value),
        )

    def _kink(self, f: Callable[[Array, Placed], Any], flat: Array) -> float:
        """How much of the change of slope along a line happens in one of its intervals, at the worst."""
        width = SHORT * (float(jnp.linalg.norm(flat)) or 1.0)
        lines = jax.random.normal(jax.random.key(3), (LINES, flat.size), flat.dtype)
        lines = lines / jnp.linalg.norm(lines, axis=1, keepdims=True)
        steps = jnp.linspace(-width, width, CUT + 1)
        along = jax.jit(
            lambda data: jax.lax.map(lambda d: jax.lax.map(lambda t: f(flat + t * d, data), steps), lines)
        )
        values = np.asarray(along(self.case.data))
        bends = np.abs(np.diff(values, n=2, axis=1))
        # a smooth function bends alike everywhere; at a kink one interval has almost all of it
        floor = 1e-12 * np.abs(values).max() + 1e-300
        share = bends.max(1) / np.maximum(bends.sum(1), floor * CUT)
        return float(np.clip((share.max() - 4 / CUT) / (1 - 4 / CUT), 0, 1))

    def coupling(self, part: Part) -> float:
        """The largest singular value of ∇²_xy h, by Lanczos' method on its square."""
        x, y, case = self.case.x, self.case.y, self.case
        flat, unravel = ravel_pytree(x)
        steps = min(self.steps, flat.size)

        def square(v: Array, data: Placed) -> Array:
            def slope(x: PyTree) -> PyTree:
                mean = partial(data.mean, part.function, shares=data.shares(case.weights))
                return jax.grad(lambda y: mean(x, y))(y)

            mixed = jax.jvp(slope, (x,), (unravel(v),))[1]
            return ravel_pytree(jax.vjp(slope, x)[1](mixed)[0])[0]

        run = jax.jit(lambda v, data: lanczos(lambda v: square(v, data), v, steps)[:2])
        alpha, beta = (np.asarray(found) for found in run(start_of(flat), case.data))
        self.book("products", 2 * steps)
        self.exchanges += 2 * steps
        return float(np.sqrt(max(ends(alpha, beta)[1], 0.0)))

    def implicit(self, directions: int) -> np.ndarray:
        """The curvature of F along random directions; empty where there is no F, or it is the loss itself."""
        if directions == 0 or isinstance(self.case.problem, Minimization | Selection):
            return np.zeros(0)
        try:
            objective = objective_of(self.case.problem, self.case)
        except NotCertifiable:
            return np.zeros(0)
        flat, unravel = ravel_pytree(objective.x)
        width = 1e-4 * (float(jnp.linalg.norm(flat)) or 1.0)
        found = []
        for d in np.random.default_rng(0).normal(size=(directions, flat.size)):
            d /= np.linalg.norm(d)
            ahead, behind = (objective.evaluate(unravel(flat + t * width * d))[1] for t in (1, -1))
            found.append(float(d @ np.asarray(ravel_pytree(tree.sub(ahead, behind))[0])) / (2 * width))
        self.book("gradients", 2 * directions)
        self.exchanges += 2 * directions
        return np.array(found)

    def objective(self) -> Level:
        """Of a composition: the clients have no objectives of their own, so that there is only its mean's."""
        objective = objective_of(self.case.problem, self.case)
        flat, unravel = ravel_pytree(objective.x)
        steps, width = min(self.steps, flat.size), 1e-4 * (float(jnp.linalg.norm(flat)) or 1.0)

        def slope(z: Array) -> np.ndarray:
            return np.asarray(ravel_pytree(objective.evaluate(unravel(jnp.asarray(z)))[1])[0])

        low, high = _lanczos_on_host(
            lambda v: (slope(flat + width * v) - slope(flat - width * v)) / (2 * width),
            np.asarray(flat),
            steps,
        )
        value, gradient = objective.evaluate(objective.x)
        self.book("gradients", 2 * steps + 1)
        self.exchanges += 2 * steps + 1
        none, size = np.zeros(0), float(tree.norm(gradient))
        rounding = self.epsilon * abs(float(value))
        return Level(high, low, none, none, size, 0.0, 0.0, 0.0, 0.0, float(value), rounding)

    def follower(self, problem: MPEC) -> Level:
        """Of the followers' map: ‖∇_y G‖ and the least eigenvalue of its symmetric part, over all samples."""
        case, data = self.case, self.case.data
        y = _one(case.y) if _has_axis(case.y, data.clients) else case.y
        flat, unravel = ravel_pytree(y)
        steps = min(self.steps, flat.size)

        def of_sample(sample: PyTree) -> Any:
            def G(z: Array) -> Array:
                return ravel_pytree(problem.follower(case.x, unravel(z), sample))[0]

            def product(v: Array) -> Array:
                return jax.jvp(G, (flat,), (v,))[1]

            def transposed(v: Array) -> Array:
                return jax.vjp(G, flat)[1](v)[0]

            v = start_of(flat)
            square = lanczos(lambda v: transposed(product(v)), v, steps)[:2]
            return square, lanczos(lambda v: (product(v) + transposed(v)) / 2, v, steps)[:2], G(flat)

        square, symmetric, G = jax.tree.map(np.asarray, jax.jit(jax.vmap(of_sample))(data.train))
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
        return Level(
            float(L.max()), float(mu.min()), L_of, mu_of, size, apart, 0.0, noise, 0.0, np.nan, np.nan
        )


def _split(case: Case, part: Part) -> tuple[PyTree, PyTree]:
    """The argument that is kept, and the one that is differentiated by."""
    return (case.x, case.y) if part.variable else (case.y, case.x)


def _put(args: tuple[PyTree, PyTree], part: Part, moving: PyTree) -> tuple[PyTree, PyTree]:
    return (args[0], moving) if part.variable else (moving, args[1])


def _has_axis(y: PyTree, clients: int) -> bool:
    return all(np.ndim(leaf) > 0 and np.shape(leaf)[0] == clients for leaf in jax.tree.leaves(y))


def _one(y: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[0], y)


def _stacked(y: PyTree, clients: int) -> Array:
    """Every client's own vector, flat."""
    return jax.vmap(lambda own: ravel_pytree(own)[0])(y)


def _measured(f: Function, grad: Any, steps: int, data: Placed, own: Array, shares: Array) -> Any:
    """Values, slopes, and the Lanczos numbers of each client, of the mean, and of what lies between them."""
    start = start_of(own[0])

    def product(client: Client, z: Array, v: Array) -> Array:
        if grad is _differences:
            width = 1e-3 * (1 + jnp.linalg.norm(z)) / jnp.linalg.norm(v)
            slope = grad(lambda z: f(client, z))
            return (slope(z + width * v) - slope(z - width * v)) / (2 * width)
        return jax.jvp(grad(lambda z: f(client, z)), (z,), (v,))[1]

    def mean(v: Array) -> Array:
        return shares @ data.each_client(lambda client, z: product(client, z, v), own)

    each = data.each_client(lambda c, z: lanczos(partial(product, c, z), start, steps)[:2], own)
    common = lanczos(mean, start, steps)[:2]
    apart = data.each_client(
        lambda c, z: lanczos(lambda v: product(c, z, v) - mean(v), start, min(steps, 8))[:2], own
    )
    values = data.each_client(f, own)
    slopes = data.each_client(lambda client, z: grad(lambda z: f(client, z))(z), own)
    return values, slopes, each, common, apart


def _noise(each_sample: Function, data: Placed, own: Array) -> Array:
    """Every client's mean square distance of a sample's gradient from their mean."""

    def one(client: Client, z: Array) -> Array:
        slopes, weights = each_sample(client, z)
        return weights @ ((slopes - weights @ slopes) ** 2).sum(1)

    return data.each_client(one, own)


def _differences(f: Callable[[Array], Any]) -> Callable[[Array], Array]:
    """The gradient by central differences."""

    def gradient(z: Array) -> Array:
        width = jnp.finfo(z.dtype).eps ** (1 / 3) * (1 + jnp.abs(z).max())
        around = width * jnp.eye(z.size, dtype=z.dtype)
        return jax.lax.map(lambda d: (f(z + d) - f(z - d)) / (2 * width), around)

    return gradient


def _lanczos_on_host(
    product: Callable[[np.ndarray], np.ndarray], like: np.ndarray, steps: int
) -> tuple[float, float]:
    """The extreme eigenvalues where products need a search of their own."""
    v = np.asarray(start_of(jnp.asarray(like)))
    basis, alpha, beta = np.zeros((steps, like.size)), np.zeros(steps), np.zeros(steps)
    v = v / np.linalg.norm(v)
    for k in range(steps):
        basis[k] = v
        w = product(v)
        alpha[k] = v @ w
        for _ in range(2):
            w = w - basis.T @ (basis @ w)
        beta[k] = np.linalg.norm(w)
        if beta[k] <= 1e-10 * np.abs(alpha).max():
            return ends(alpha[: k + 1], np.append(beta[:k], 0.0))[:2]
        v = w / beta[k]
    return ends(alpha, beta)[:2]
