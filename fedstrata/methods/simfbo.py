"""SimFBO: a simple federated bilevel method without nested loops (Yang, Xiao, Ji 2023).

    min_x 1/m Σ f_i(x, y(x)),   y(x) = argmin_y 1/m Σ g_i(x, y)

    1  client i, τ_i times from (x_i, y_i, v_i) = (x, y, v), with samples drawn each time:
    2      d_y ← ∇_y g_i,   d_v ← ∇²_yy g_i v_i − ∇_y f_i,   d_x ← ∇_x f_i − ∇²_xy g_i v_i   at (x_i, y_i)
    3      y_i ← y_i − η_y d_y,   v_i ← v_i − η_v d_v,   x_i ← x_i − η_x d_x
    4  client i: send the means of its d_y, d_v, d_x over the τ_i steps
    5  server: y ← y − γ_y mean d_y,   v ← P_r(v − γ_v mean d_v),   x ← P_X(x − γ_x mean d_x)

P_r is the projection onto the ball of radius r, which contains the solution if r ≥ ‖∇_y f‖/μ_g. Uploads are
means over a client's steps (the paper's ShroFBO) instead of sums, so that clients with different τ_i have
equal weight; with the same τ for all, the two differ by a factor in γ. A round has one exchange. When
clients differ, the bias is of order η τ. τ = 1 is SOBA for any η.

Reveals only averages. Needs gradients and Hessian-vector products, and a strongly convex lower level.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import optax

from fedstrata.core import tree
from fedstrata.core.client import Client, steps_of
from fedstrata.core.counting import loop
from fedstrata.core.fed import Fed
from fedstrata.core.method import BatchSize, LocalSteps, Method, Positive, method
from fedstrata.core.types import Integer, Key, PyTree
from fedstrata.estimators import sequences
from fedstrata.estimators.hypergradient import Coupled, Products
from fedstrata.methods._shared.rules import two_levels
from fedstrata.methods._shared.sequences import refused_sets
from fedstrata.problems.classes import Bilevel
from fedstrata.problems.measured import Conditions, Practical


class Point(NamedTuple):
    """The three variables, or their directions."""

    x: PyTree
    y: PyTree
    v: PyTree


UNCUT = 1e15  # the radius in `SimFBO.practical`; its square is finite in float32


class State(NamedTuple):
    """The server's variables."""

    x: PyTree
    y: PyTree
    v: PyTree


@method
class SimFBO(Method[Bilevel, State]):
    """Simultaneous local steps of x, y and v, and server steps along the mean directions.

    Args:
        gamma_x, gamma_y, gamma_v: the step sizes of the server.
        eta_x, eta_y, eta_v: the local step sizes.
        tau: local steps: an integer, or one per client.
        radius: the radius r of the ball that contains v.
        products: ``"exact"`` Hessian-vector products, or ``"differences"`` of gradients.
        batch_size: samples per direction; None uses the full batch.
    """

    gamma_x: Positive  # γ_x
    gamma_y: Positive  # γ_y
    gamma_v: Positive  # γ_v
    eta_x: Positive  # η_x
    eta_y: Positive  # η_y
    eta_v: Positive  # η_v
    tau: LocalSteps = 1  # τ
    radius: Positive = 1e4  # r
    products: Products = "exact"
    batch_size: BatchSize = None

    solves = (Bilevel,)
    private_samples = True
    needs = "gradients, Hessian-vector products"
    drifts = "tau"

    @classmethod
    def refuses(cls, problem: Bilevel) -> str | None:
        return refused_sets(cls.__name__, problem, server=True)

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """τ = 1, which has no drift; α and β as FedMSA's, and a radius without effect."""
        pair = two_levels(at)
        x, y = pair.alpha, pair.beta
        return pair.of(cls(x, y, y, x, y, y, radius=UNCUT), "radius large enough to have no effect")

    def init(self, problem: Bilevel, x0: PyTree, y0: PyTree) -> State:
        return State(x0, y0, tree.zeros_like(y0))

    def local_directions(
        self, problem: Bilevel, client: Client, key: Key, x: PyTree, y: PyTree, v: PyTree
    ) -> Point:
        tau = steps_of(self.tau, client)

        def step(carry: tuple[Point, Point], key: Key) -> tuple[Point, Point]:
            at, total = carry
            maps = sequences.draw(problem, client, key, self.batch_size, self.products)
            d_x, (d,) = maps(at.x, (Coupled(at.y, at.v),))  # line 2
            moved = Point(
                tree.axpy(-self.eta_x, d_x, at.x),
                tree.axpy(-self.eta_y, d.w, at.y),
                tree.axpy(-self.eta_v, d.v, at.v),
            )  # line 3
            return moved, tree.add(total, Point(d_x, d.w, d.v))

        start = Point(x, y, v)
        _, total = loop(tau, step, key, (start, tree.zeros_like(start)))  # line 1
        return tree.scale(1 / jnp.maximum(tau, 1), total)  # line 4

    def round(self, problem: Bilevel, fed: Fed, key: Key, r: Integer, state: State) -> State:
        mean = fed.average(self.local_directions, key, *state, weights=fed.at_work(self.tau))
        v = tree.axpy(-self.gamma_v, mean.v, state.v)  # line 5, and below
        v = optax.projections.projection_l2_ball(v, self.radius)
        x = tree.axpy(-self.gamma_x, mean.x, state.x)
        y = tree.axpy(-self.gamma_y, mean.y, state.y)
        return State(problem.project_x(x), y, v)
