"""FastDRO: steps along the worst case of the minibatch (Levy, Carmon, Duchi, Sidford 2020), in parallel.

    min_x  max_q  E[q ℓ(x, ξ)] − penalty(q)   over densities q of the samples

    1  server: send x;  client k: draw B_k, send its losses
    2  server: on all the losses, find the maximiser q_i = density(ℓ_i, dual); send the dual, a few numbers
    3  client k: the mean over B_k of q_i ∇ℓ_i, with q_i held constant
    4  server: x ← x − η (the clients' mean of that)

The problem defines the set of q: χ² ball (`dro.chi2_ball`), χ² penalty (`dro.chi2(…, nonnegative=True)`),
CVaR (`dro.cvar`: the worst part α of the minibatch), KL-CVaR (`dro.kl_cvar`), KL, semideviation. A
threshold η is found by bisection instead of gradient steps; the result has that of the last minibatch
beside x. The direction is the gradient of the minibatch's objective. It is biased for the objective of all
samples; the bias decreases with the total size of the clients' minibatches. Other compositions have no
maximiser over samples; for them the method is MBSGD.

Reveals each client's losses on its minibatch (for other compositions, what MBSGD reveals). Needs gradients.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedstrata.core import tree
from fedstrata.core.client import Client
from fedstrata.core.fed import Fed, Remember
from fedstrata.core.method import BatchSize, Positive, Reveals, by_options, method
from fedstrata.core.types import Integer, Key, PyTree
from fedstrata.estimators.gradients import gradient
from fedstrata.methods._shared.compositional import AlongTheMean, State
from fedstrata.methods._shared.rules import biased_where_partial, composed
from fedstrata.problems.classes import Composition
from fedstrata.problems.dro import DRO, Lifted
from fedstrata.problems.measured import Conditions, Practical
from fedstrata.problems.risks import threshold_of


@method
class FastDRO(AlongTheMean):
    """Steps of size ``eta`` along the gradient of the minibatch's worst case.

    Args:
        eta: the step size.
        batch_size: the size of a client's minibatch; None uses all samples, and the direction has no bias.
    """

    eta: Positive  # η
    batch_size: BatchSize = None

    needs = "gradients"

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """η = 1/L_F, with F the risk minimised over its threshold, and full batches."""
        steps = composed(at, threshold=isinstance(at.problem, DRO))
        return steps.of(cls(steps.gamma), cost=2.0, doubts=biased_where_partial(at))

    @by_options
    def reveals_on(self, problem: Composition) -> Reveals:
        return "replies" if isinstance(problem, DRO) else super().reveals_on(problem)

    def losses(self, problem: DRO, client: Client, key: Key, x: PyTree) -> Remember:
        """Line 1."""
        loss = client.train.mean(problem.loss, key, self.batch_size)
        weights = None if self.batch_size is not None else loss.weigh()
        return Remember((loss.each(x), weights), client.memory._replace(x=x) if problem.lifted else x)

    def weighted(self, problem: DRO, client: Client, key: Key, dual: PyTree) -> PyTree:
        """Line 3."""
        loss, risk = problem.loss, problem.risk

        def one(x: PyTree, sample: PyTree) -> jax.Array:
            value = loss(x, sample)
            return jax.lax.stop_gradient(risk.density(value, dual)) * value

        x = client.memory.x if problem.lifted else client.memory
        return gradient(client.train.mean(one, key, self.batch_size), x)

    def round(self, problem: Composition, fed: Fed, key: Key, r: Integer, state: State) -> State:
        if not isinstance(problem, DRO):
            return State(tree.axpy(-self.eta, self.gradient(problem, fed, key, state.x), state.x))
        x = state.x.x if problem.lifted else state.x
        losses, within = fed.gather(self.losses, key, x)  # line 1
        within = jnp.full_like(losses, 1 / losses.shape[1]) if within is None else within
        weights = (fed.cohort_weights[:, None] * within).astype(losses.dtype)
        dual = problem.risk.dual(losses.reshape(-1), weights.reshape(-1))  # line 2
        x = tree.axpy(-self.eta, fed.average(self.weighted, key, dual), x)  # lines 3, 4
        return State(Lifted(x, threshold_of(dual)) if problem.lifted else x)
