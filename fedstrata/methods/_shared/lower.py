"""Federated solvers of a lower level, y(x) = argmin over Y(x) of 1/m Σ E h_i(x, ·, ζ), at several x at once.

This module has the papers' rules and the parts that any solver needs; the default is in
`fedstrata.methods._shared.accurate`.

All points share every exchange: a message holds the stacked iterates of all points, so two points need one
exchange of twice the size. Any method for `Minimization` can be the solver: its phases see one point at a
time, as the problem ``min_y h(x, y)`` over Y(x), while its ``round`` sees the stack.

Three solvers follow the papers' rules. For m clients, and modulus μ_h and condition number κ_h = L_h/μ_h of
the lower level, a_r = max{m, 4κ_h, r} + 1 grows with the upper level's round r, and the number of local steps
is T = 2 a_r ln a_r:

    "local_sgd"   Local SGD, γ = 1/(μ_h a_r), averaged every ⌈T/m⌉ steps, about m exchanges (Algorithm 3)
    "fedac"       FedAC, averaged about m^⅓ times, η = min{1/L_h, 4K ln²T/(μ_h T²)}, L_h = κ_h μ_h
    "lfd"         LFD, averaged about (mT')^⅓ times, γ = 4/(μ_h (a + t)) after t steps

LFD takes a = max{m, 4κ_h} + 1 and T' = 2 a ln a (1 + (r+1)^⅔/m) steps: Theorem 1 asks for T ~ (r+1)^⅔/m,
which gives Table 2's r^{2/9} exchanges per round; the exchanges of Local SGD and FedAC do not depend on T.

If the user gives the number of exchanges, each has ⌈T/exchanges⌉ local steps: more exchanges, less drift.

A user's own solver is an object with ``solve(problem, fed, key, r, x, y) -> y``; see `LowerSolver`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp

from fedstrata.core import tree
from fedstrata.core.client import Client
from fedstrata.core.counting import each
from fedstrata.core.fed import Fed
from fedstrata.core.method import Method
from fedstrata.core.term import Term
from fedstrata.core.types import Integer, Phase, PyTree, Real
from fedstrata.estimators.curvature import power_iteration
from fedstrata.methods.fedac import FedAC
from fedstrata.methods.lfd import LFD
from fedstrata.problems.classes import Bilevel, Minimization
from fedstrata.problems.terms import calling


@runtime_checkable
class LowerSolver(Protocol):
    """The interface of a user's own lower-level solver.

    >>> class Newton:  # the exact solution of a quadratic lower level, from averages alone
    ...     def gradient_and_hessian(self, problem, client, key, y):
    ...         h = client.mean(problem.loss, key, None).silent
    ...         return jax.grad(h)(y), jax.hessian(h)(y)
    ...
    ...     def solve(self, problem, fed, key, r, x, y):
    ...         gradient, hessian = fed.average(self.gradient_and_hessian, key, y)
    ...         return y - jnp.linalg.solve(hessian, gradient[..., None])[..., 0]
    >>> isinstance(Newton(), LowerSolver)
    True
    """

    def solve(self, problem: Any, fed: Fed, key: jax.Array, r: Integer, x: PyTree, y: PyTree) -> PyTree:
        """Improve ``y`` towards y(x).

        Args:
            problem: the whole problem.
            fed: its verbs run phases of this object, ``phase(self, problem, client, key, *message)``, at each
                point separately; there ``problem`` is the lower level as a `Minimization`. Messages and
                replies have the points on their first axis.
            key: the random key of this call.
            r: the round of the upper level.
            x: the points, stacked on the first axis.
            y: the starts, stacked likewise.
        """


Schedules = Callable[[Integer], dict[str, Any]]


class Tuning(NamedTuple):
    """A rule's choice for one round of the upper level."""

    rounds: Integer  # exchanges
    values: Schedules  # hyper-parameters by the lower level's round


@dataclass(frozen=True)
class RuleInput:
    """The rules' input: m clients, round r, modulus μ_h, condition number κ_h, and the user's exchanges."""

    m: int
    r: Integer
    mu: Any
    kappa: Any
    exchanges: Integer | None = None

    @property
    def a(self) -> jax.Array:
        """a_r = max{m, 4κ_h, r} + 1."""
        return jnp.maximum(jnp.maximum(self.m, 4 * self.kappa), self.r) + 1

    @property
    def T(self) -> jax.Array:
        """2 a_r ln a_r local steps."""
        return 2 * self.a * jnp.log(self.a)

    def split(self, local: Real, T: Real | None = None) -> tuple[Integer, Integer]:
        """Exchanges and local steps for each: about ``local``, unless the user chose the exchanges."""
        T = self.T if T is None else T
        if self.exchanges is not None:
            return self.exchanges, whole(T / self.exchanges)
        local = whole(local)
        return whole(T / local), local


def whole(number: Real) -> jax.Array:
    """Rounded up, as an integer."""
    return jnp.ceil(number).astype(jnp.int32)


def local_sgd(c: RuleInput) -> Tuning:
    """Algorithm 3: γ = 1/(μ_h a_r), ⌈T/m⌉ local steps."""
    exchanges, tau = c.split(c.T / c.m)
    return Tuning(exchanges, lambda t: {"gamma": 1 / (c.mu * c.a), "tau": tau})


def fedac(c: RuleInput) -> Tuning:
    """About m^⅓ exchanges; η such that the contraction over T steps is exp(−2 ln T), at most 1/L_h."""
    exchanges, K = c.split(c.T / whole(c.m ** (1 / 3)))
    eta = jnp.minimum(1 / (c.kappa * c.mu), 4 * K * jnp.log(c.T) ** 2 / (c.mu * c.T**2))
    return Tuning(exchanges, lambda t: {"eta": eta, "mu": c.mu, "K": K})


def lfd(c: RuleInput) -> Tuning:
    """About (mT')^⅓ exchanges, where T' grows as r^⅔; γ decreases from 4/(μ_h a)."""
    first = replace(c, r=0)
    T = first.T * (1 + (c.r + 1) ** (2 / 3) / c.m)
    exchanges, tau = c.split(T / whole((c.m * T) ** (1 / 3)), T)
    return Tuning(exchanges, lambda t: {"gamma": 4 / (c.mu * (first.a + t * tau)), "tau": tau})


class Rule(NamedTuple):
    """A solver and a paper's rule, which replaces the solver's hyper-parameters."""

    tune: Callable[[RuleInput], Tuning]
    solver: Callable[[int | None], Method]  # from the batch size


TUNED = {
    "local_sgd": Rule(local_sgd, lambda batch_size: LFD(1.0, batch_size=batch_size)),  # with all devices
    "fedac": Rule(fedac, lambda batch_size: FedAC(1.0, 1.0, batch_size=batch_size)),
    "lfd": Rule(lfd, lambda batch_size: LFD(1.0, batch_size=batch_size)),
}


POWER_STEPS = 20
WORST = 50  # the largest condition number that is estimated


def estimate_constants(
    product: Callable[[PyTree], PyTree], repeat: Callable[..., Any], key: jax.Array, like: PyTree
) -> tuple[jax.Array, jax.Array]:
    """μ_h and κ_h from the lower level's Hessian at one point, by power iteration on ∇²h and on L − ∇²h.

    L_h is twice the estimate, because one client's level may have more curvature than the mean. κ_h is at
    most twice `WORST`, because T grows with κ_h and the estimate of μ_h is not exact; see `clipped`. A level
    without curvature, such as one that is linear in y, gets 0.1 and 10.

    Args:
        product: applies ∇²h to stacked directions.
        repeat: the loop of ``fed``.
        key: the random key of the start.
        like: a stacked direction; only its shapes matter.
    """
    keys = jax.random.split(key)
    L = power_iteration(product, repeat, POWER_STEPS, keys[0], like)[0]

    def shifted(v: PyTree) -> PyTree:
        return tree.sub(tree.scale(L, v), product(v))

    gap = power_iteration(shifted, repeat, POWER_STEPS, keys[1], like)[0]
    mu = jnp.clip(L - gap, L / WORST, L)
    curved = L > 0
    return jnp.where(curved, mu, 0.1), jnp.where(curved, 2 * L / jnp.where(curved, mu, 1), 10.0)


def clipped(kappa: jax.Array) -> bool:
    """Whether the condition number was too large to estimate."""
    return bool(kappa >= 2 * WORST * (1 - 1e-5))


def one_point(tree: PyTree) -> PyTree:
    """A stack of one."""
    return jax.tree.map(lambda leaf: leaf[None], tree)


def spread(y: PyTree, points: PyTree) -> PyTree:
    """The same y at all points, stacked."""
    number = jax.tree.leaves(points)[0].shape[0]
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (number, *leaf.shape)), y)


def lower_level(problem: Bilevel, x: PyTree) -> Minimization:
    """The lower level at one point: ``min_y h(x, y)`` over Y(x)."""

    def loss(y: PyTree, sample: PyTree) -> Any:
        return problem.lower(x, y, sample)

    term = calling(loss, Term.of(problem.lower))
    if problem.project_y.trivial:
        return Minimization(term)
    if problem.project_y.arity > 2:
        return Minimization(term, lambda y, client: problem.project_y(y, x, client))
    return Minimization(term, lambda y: problem.project_y(y, x))


def lower_levels(problem: Bilevel, x: PyTree) -> Minimization:
    """All lower levels as the server sees them: the sets of the stacked points, without a loss."""

    def loss(y: PyTree, sample: PyTree) -> Any:
        raise NotImplementedError("The server knows only the sets of the lower level.")

    if problem.project_y.trivial:
        return Minimization(loss)
    if problem.project_y.arity > 2:
        return Minimization(loss, lambda y, client: y)
    return Minimization(loss, lambda y: jax.vmap(problem.project_y)(y, x))


@dataclass(frozen=True)
class PointwiseFed:
    """The verbs of `Fed` for a lower-level solver: a phase runs at every point, in one exchange.

    A phase is sent as its name, and hyper-parameters that change from round to round as ``values``, so that
    a client needs only the solver.
    """

    fed: Fed
    at_points: Phase
    values: dict[str, Any]

    def average(self, phase: Phase, key: jax.Array, *message: PyTree, **options: Any) -> PyTree:
        """See `Fed.average`; messages, references and means have the points on their first axis."""
        named = partial(self.at_points, phase=phase.__name__)
        return self.fed.average(named, key, self.values, *message, **options)

    def gather(self, phase: Phase, key: jax.Array, *message: PyTree, **options: Any) -> PyTree:
        """See `Fed.gather`; the clients are on the first axis, the points on the second."""
        named = partial(self.at_points, phase=phase.__name__)
        return self.fed.gather(named, key, self.values, *message, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fed, name)

    @property
    def verbs(self) -> Fed:
        """This object, typed as the `Fed` whose verbs it offers."""
        return cast(Fed, self)


def pointwise(
    phase: Phase,
    problem: Bilevel,
    client: Client,
    key: jax.Array,
    x: PyTree,
    message: tuple[PyTree, ...],
    common_random_numbers: bool,
) -> PyTree:
    """A solver's phase at every point of ``x``, on the same samples or on independent ones."""
    client = replace(client, memory=None)
    if common_random_numbers:
        return each(lambda x, *message: phase(lower_level(problem, x), client, key, *message), x, *message)
    keys = jax.random.split(key, jax.tree.leaves(x)[0].shape[0])
    return each(
        lambda x, key, *message: phase(lower_level(problem, x), client, key, *message), x, keys, *message
    )


def solve_pointwise(
    method: Method,
    rounds: Integer,
    values: Schedules,
    problem: Bilevel,
    fed: PointwiseFed,
    key: jax.Array,
    x: PyTree,
    y: PyTree,
) -> PyTree:
    """``rounds`` rounds of a method for `Minimization` at the points ``x``, starting from ``y``."""
    levels = lower_levels(problem, x)

    def body(t: Integer, state: PyTree) -> Any:
        now = values(t)
        step = method.replaced(now) if now else method
        return step.round(levels, replace(fed, values=now).verbs, jax.random.fold_in(key, t), t, state)

    return method.output(fed.repeat(rounds, body, method.init(levels, y, None)), None)[0]
