"""FedNest: federated bilevel, minimax and compositional optimisation (Tarzanagh et al. 2022).

    min_x 1/m Σ f_i(x, y(x)),   y(x) = argmin_y 1/m Σ g_i(x, y)

    1  T times (FedInn):
    2      server: q ← mean ∇_y g_i(x, y)
    3      client i, τ times from y_i = y, one sample each:
               y_i ← y_i − β/τ (∇_y g_i(x, y_i) − ∇_y g_i(x, y) + q)
    4      server: y ← mean y_i
    5  (FedOut) server: b ← mean ∇_y f_i(x, y)
    6  (FedIHGP) server: p ← (N/ℓ) b, then N' times, N' uniform in 0 … N − 1:  p ← mean (I − ∇²_yy g_i/ℓ) p
    7  server: h ← mean (∇_x f_i(x, y) − ∇²_xy g_i(x, y) p)
    8  client i, τ times from x_i = x, one sample each:
           x_i ← x_i − α/τ (∇_x f_i(x_i, y) − ∇_x f_i(x, y) + h)
    9  server: x ← mean x_i

Minimax (max over y of f): g = −f, and h ← mean ∇_x f_i(x, y), without lines 5 and 6. Composition (two levels,
h(x) + f(g(x))): line 2 has q ← mean (y − g_i(x)); lines 5 to 8 have p ← mean ∇f_i(y) and ∇_x f_i =
∇h_i(x) + ∇g_i(x) p, without an inverse. Line 5 also sends ∇_x f_i, for line 7.

The indirect part of h is held constant in line 8: if f does not depend on x directly, more than one local
step has no effect. ``inverse`` selects other solvers of the linear system
(`fedstrata.methods._shared.implicit`). With minibatches every factor of line 6 draws its own samples, as
the paper's analysis requires; CG keeps one batch. The exchanges of lines 2 to 6 count as lower-level.
Reveals only averages. Needs gradients, for bilevel problems Hessian-vector products, and a strongly convex
lower level whose largest curvature is at most ℓ, which is estimated if not given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedstrata.core import tree
from fedstrata.core.client import Client, steps_of
from fedstrata.core.counting import loop
from fedstrata.core.fed import Fed
from fedstrata.core.method import BatchSize, Count, LocalSteps, Positive, method
from fedstrata.core.problem import Problem
from fedstrata.core.types import Integer, Key, PyTree, Real
from fedstrata.estimators.compositional import chain_of, followed
from fedstrata.estimators.gradients import gradient
from fedstrata.estimators.hypergradient import Products
from fedstrata.estimators.sequences import gap, linearised
from fedstrata.methods._shared.implicit import Curvature, Implicit, Inverse
from fedstrata.methods._shared.rules import composed, inner_steps, two_levels
from fedstrata.problems.classes import Bilevel, Composition, Minimax
from fedstrata.problems.measured import Conditions, Practical

Direction = Callable[[PyTree], PyTree]
Draw = Callable[[Key], Direction]
Nested = Bilevel | Minimax | Composition


class State(NamedTuple):
    """The server's variables, and the last solution of the linear system."""

    x: PyTree
    y: PyTree
    p: PyTree
    curvature: Curvature | None = None


@method
class FedNest(Implicit[Nested, State]):
    """Nested loops: ``T`` inner rounds of ``tau`` SVRG steps in y, then ``tau`` SVRG steps in x.

    Args:
        alpha: the step size of x in a round; a local step has size α/τ.
        beta: the step size of y in an inner round; a local step has size β/τ.
        T: inner rounds per round.
        tau: local steps: an integer, or one per client.
        N: terms of the Neumann series, or steps of CG.
        ell: an upper bound ℓ on the curvature of the lower level; None estimates it before the first round.
        inverse: ``"neumann"`` (the paper's), ``"series"``, ``"cg"`` or ``"none"``.
        products: ``"exact"`` Hessian-vector products, or ``"differences"`` of gradients.
        batch_size: samples per gradient; None uses the full batch.
        redraw: with partial participation, whether to draw a new cohort for each inner round, as the paper's
            program does; otherwise a round has one cohort.
    """

    alpha: Positive  # α
    beta: Positive  # β
    T: Count = 1
    tau: LocalSteps = 1  # τ
    N: Count = 5
    ell: Positive | None = None  # ℓ
    inverse: Inverse = "neumann"
    products: Products = "exact"
    batch_size: BatchSize = None
    redraw: bool = False

    solves = (Bilevel, Minimax, Composition)
    needs = "gradients, in bilevel problems Hessian-vector products"
    linear = frozenset({"lower"})

    @classmethod
    def refuses(cls, problem: Problem) -> str | None:
        match problem:
            case Composition() if (N := len(chain_of(problem).inner)) != 1:
                return f"FedNest needs a composition with one inner mean, but this one has {N}. Use FedMSA."
        return super().refuses(problem)

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """β = 1/L_h, T averagings that leave a tenth of y's error, τ = 1; conjugate gradients for line 6.

        The paper draws N', which adds noise. For a composition β = 1, T = 1: y is then g(x).
        """
        if not at.problem.has_y:
            steps = composed(at)
            return steps.of(cls(steps.gamma, 1.0, inverse="cg"), "beta = 1", cost=4.0)
        T, N = inner_steps(at)
        pair = two_levels(at, y_steps=T)
        its = cls(pair.alpha, pair.beta, T, N=N, inverse="cg")
        return pair.of(its, cost=2.0 * T + 2 + (N + 1 if isinstance(at.problem, Bilevel) else 0))

    def init(self, problem: Nested, x0: PyTree, y0: PyTree) -> State:
        match problem:
            case Composition():
                (y,) = followed(problem, y0)
            case _:
                y = y0
        return State(x0, y, tree.zeros_like(y), self.no_curvature(problem))

    def lower_direction(self, problem: Nested, client: Client, key: Key, x: PyTree) -> Direction:
        """``y ↦ ∇_y g_i(x, y)`` on a new minibatch."""
        match problem:
            case Composition():
                residual = gap(chain_of(problem).inner[0], client, key, self.batch_size)
                return lambda y: tree.scale(-1, residual(x, y))
            case Minimax():
                f = client.train.mean(problem.payoff, key, self.batch_size)
                return lambda y: tree.scale(-1, gradient(f, x, y, wrt=1))
        g = client.train.mean(problem.lower, key, self.batch_size)
        return lambda y: gradient(g, x, y, wrt=1)

    def upper_direction(self, problem: Nested, client: Client, key: Key, y: PyTree, p: PyTree) -> Direction:
        """``x ↦ ∇_x f_i(x, y)`` on a new minibatch; in a composition ∇h_i(x) + ∇g_i(x) p."""
        match problem:
            case Composition():
                chain = chain_of(problem)
                key_g, key_h = jax.random.split(key)
                g = gap(chain.inner[0], client, key_g, self.batch_size)
                if chain.plain is None:
                    return lambda x: linearised(g, x, y)[1](p)
                h = client.train.mean(chain.plain, key_h, self.batch_size)
                return lambda x: tree.add(linearised(g, x, y)[1](p), gradient(h, x))
            case Minimax():
                mean = client.train.mean(problem.payoff, key, self.batch_size)
            case _:
                mean = client.valid.mean(problem.upper, key, self.batch_size)
        return lambda x: gradient(mean, x, y)

    def local_svrg(
        self,
        client: Client,
        key: Key,
        draw: Draw,
        start: PyTree,
        mean: PyTree,
        step: Real,
        project: Direction,
    ) -> PyTree:
        """τ steps of size step/τ along the client's direction, corrected to equal ``mean`` at ``start``."""
        tau = steps_of(self.tau, client)
        length = step / jnp.maximum(tau, 1)
        full = self.batch_size is None
        if full and isinstance(tau, int) and tau == 1:
            return project(tree.axpy(-length, mean, start))
        anchor = draw(key)(start) if full else None

        def one(at: PyTree, key: Key) -> PyTree:
            direction = draw(key)
            correction = tree.sub(mean, anchor if full else direction(start))
            return project(tree.axpy(-length, tree.add(direction(at), correction), at))

        return loop(tau, one, key, start)

    def inner_mean(self, problem: Nested, client: Client, key: Key, x: PyTree, y: PyTree) -> PyTree:
        return self.lower_direction(problem, client, key, x)(y)

    def inner_steps(
        self, problem: Nested, client: Client, key: Key, x: PyTree, y: PyTree, q: PyTree
    ) -> PyTree:
        def draw(key: Key) -> Direction:
            return self.lower_direction(problem, client, key, x)

        def project(y: PyTree) -> PyTree:
            # a bilevel problem with a set of y is refused; a composition has none
            return problem.sets["project_y"](y) if "project_y" in problem.sets else y

        return self.local_svrg(client, key, draw, y, q, self.beta, project)

    def outer_mean(
        self, problem: Nested, client: Client, key: Key, x: PyTree, y: PyTree, p: PyTree
    ) -> PyTree:
        return self.upper_direction(problem, client, key, y, p)(x)

    def outer_steps(
        self, problem: Nested, client: Client, key: Key, x: PyTree, y: PyTree, p: PyTree, h: PyTree
    ) -> PyTree:
        def draw(key: Key) -> Direction:
            return self.upper_direction(problem, client, key, y, p)

        def project(x: PyTree) -> PyTree:
            return problem.set_of_x(x, client)

        return self.local_svrg(client, key, draw, x, h, self.alpha, project)

    def outer_slope(self, problem: Composition, client: Client, key: Key, y: PyTree) -> PyTree:
        return gradient(client.train.mean(chain_of(problem).outer, key, self.batch_size), y)

    def slope(self, problem: Composition, fed: Fed, key: Key, y: PyTree) -> PyTree:
        """∇f(y); needs an exchange if f is a mean over clients."""
        chain = chain_of(problem)
        if not chain.federated:
            return jax.grad(chain.outer)(y)
        with fed.level("lower"):
            return fed.average(self.outer_slope, key, y)

    def round(self, problem: Nested, fed: Fed, key: Key, r: Integer, state: State) -> State:
        x, at_work = state.x, fed.at_work(self.tau)
        redraw = self.redraw and fed.participants < fed.clients
        key_inner, key_slope, key_system, key_h, key_outer = jax.random.split(key, 5)

        def inner(t: Integer, y: PyTree) -> PyTree:
            key_q, key_steps = jax.random.split(jax.random.fold_in(key_inner, t))
            of, weights = None, at_work
            if redraw:
                key_cohort = jax.random.fold_in(key_inner, -1 - t)
                of = fed.redraw(key_cohort)
                weights = fed.at_work(self.tau, of)
            q = fed.average(self.inner_mean, key_q, x, y, of=of)  # line 2
            message = (self.inner_steps, key_steps, x, y, q)
            return fed.average(*message, of=of, weights=weights, around=y)  # lines 3, 4

        with fed.level("lower"):
            y = fed.repeat(self.T, inner, state.y)  # line 1
        p = state.p
        match problem:
            case Bilevel():
                with fed.level("lower"):
                    direct, b = fed.average(self.upper_gradients, key_slope, x, y)  # line 5
                p = self.inverse_product(fed, key_system, x, y, b, p, state)  # line 6
                h = direct
                if self.inverse != "none":
                    h = tree.sub(direct, fed.average(self.mixed_product, key_h, x, y, p))  # line 7
            case Composition():
                p = self.slope(problem, fed, key_slope, y)
                h = fed.average(self.outer_mean, key_h, x, y, p)
            case _:
                h = fed.average(self.outer_mean, key_h, x, y, p)
        x = fed.average(self.outer_steps, key_outer, x, y, p, h, weights=at_work, around=x)  # lines 8, 9
        return State(x, y, p, state.curvature)
