"""Hypergradient descent: solve the lower level, solve the linear system, take one step in x.

    min_x F(x) = 1/m Σ f_i(x, y(x)),   y(x) = argmin_y 1/m Σ g_i(x, y)

    1  T times:  y ← y − β mean ∇_y g_i(x, y)
    2  b ← mean ∇_y f_i(x, y);  v ← [mean ∇²_yy g_i(x, y)]⁻¹ b by N products
    3  x ← P_X(x − α mean (∇_x f_i(x, y) − ∇²_xy g_i(x, y) v))

y and v start from the previous round. With large T and N this is exact gradient descent on F, the reference
for all bilevel methods; with small T and N it is an inexact implicit method. Every mean is one exchange;
those of lines 1 and 2 count as lower-level. The solvers of line 2 are in
`fedstrata.methods._shared.implicit`; ``inverse="none"`` drops v and gives the first-order approximation ∇_x
f.

Reveals only averages. Needs gradients and Hessian-vector products, and a strongly convex lower level.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from fedstrata.core import tree
from fedstrata.core.client import Client
from fedstrata.core.fed import Fed
from fedstrata.core.method import BatchSize, Count, Positive, method
from fedstrata.core.types import Integer, Key, PyTree
from fedstrata.estimators.gradients import gradient
from fedstrata.estimators.hypergradient import Products
from fedstrata.methods._shared.implicit import Curvature, Implicit, Inverse
from fedstrata.methods._shared.rules import inner_steps, two_levels
from fedstrata.problems.classes import Bilevel
from fedstrata.problems.measured import Conditions, Practical


class State(NamedTuple):
    """The server's variables."""

    x: PyTree
    y: PyTree
    v: PyTree
    curvature: Curvature | None = None


@method
class HypergradientDescent(Implicit[Bilevel, State]):
    """Gradient descent on F(x) = f(x, y(x)).

    Args:
        alpha: the step size of x.
        beta: the step size of y.
        T: lower-level steps per round.
        N: steps of CG per round, or terms of the series.
        ell: an upper bound ℓ on the lower level's curvature, for the series; None estimates it.
        inverse: ``"cg"``, ``"series"``, ``"neumann"`` or ``"none"``.
        products: ``"exact"`` Hessian-vector products, or ``"differences"`` of gradients.
        batch_size: samples per direction; None uses the full batch.
    """

    alpha: Positive  # α
    beta: Positive  # β
    T: Count = 10
    N: Count = 10
    ell: Positive | None = None  # ℓ
    inverse: Inverse = "cg"
    products: Products = "exact"
    batch_size: BatchSize = None

    solves = (Bilevel,)
    private_samples = True
    needs = "gradients, Hessian-vector products"
    linear = frozenset({"lower"})
    server_steps = True

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """α = 0.9/L_F, β = 1/L_h, T steps of y that leave a tenth, N products that leave 10⁻³."""
        T, N = inner_steps(at)
        pair = two_levels(at, y_steps=T)
        return pair.of(cls(pair.alpha, pair.beta, T, N), cost=T + N + 2.0)

    def init(self, problem: Bilevel, x0: PyTree, y0: PyTree) -> State:
        return State(x0, y0, tree.zeros_like(y0), self.no_curvature(problem))

    def lower_gradient(self, problem: Bilevel, client: Client, key: Key, x: PyTree, y: PyTree) -> PyTree:
        return gradient(client.train.mean(problem.lower, key, self.batch_size), x, y, wrt=1)

    def round(self, problem: Bilevel, fed: Fed, key: Key, r: Integer, state: State) -> State:
        key_lower, key_upper, key_system, key_mixed = jax.random.split(key, 4)
        x = state.x

        def descend(t: Integer, y: PyTree) -> PyTree:
            slope = fed.average(self.lower_gradient, jax.random.fold_in(key_lower, t), x, y)
            return tree.axpy(-self.beta, slope, y)

        with fed.level("lower"):
            y = fed.repeat(self.T, descend, state.y)  # line 1
            h, b = fed.average(self.upper_gradients, key_upper, x, y)  # line 2
        v = self.inverse_product(fed, key_system, x, y, b, state.v, state)
        if self.inverse != "none":
            h = tree.sub(h, fed.average(self.mixed_product, key_mixed, x, y, v))
        x = problem.project_x(tree.axpy(-self.alpha, h, x))  # line 3
        return State(x, y, v, state.curvature)
