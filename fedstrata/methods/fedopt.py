"""FedOpt: optimisers on both sides (Reddi et al. 2021, Adaptive Federated Optimization; Algorithm 1).

    min_x  1/m Σ_i E f_i(x, ξ)   over X

    1  server: send x to the clients S that take part
    2  client i, with a new state of ClientOpt, H times from x_i = x:
    3      draw ξ from D_i;  g ← ∇f_i(x_i, ξ)
    4      x_i ← P_{X_i}(ClientOpt(x_i, g))
    5  client i: send x − x_i
    6  server: Δ ← the mean over S of the x − x_i
    7  server: x ← P_X(ServerOpt(x, Δ)), whose state stays

Both are optimisers of optax, for which Δ stands in the place of a gradient (the paper's Δ_t is its negative):

    FedAvg       client=optax.sgd(γ), server=optax.sgd(1.0)
    FedAvgM      server=optax.sgd(1.0, momentum=0.9)                    (Hsu, Qi, Brown 2019)
    FedAdagrad   server=optax.adagrad(η, initial_accumulator_value=τ², eps=0.0)
    FedAdam      server=optax.adam(η, b1=0.9, b2=0.99, eps=τ)
    FedYogi      server=optax.yogi(η, b1=0.9, b2=0.99, eps=τ)

The paper's τ = 10⁻³ is far from optax's defaults, and matters: pseudo-gradients are small. Its Algorithm 2
divides by √v + τ as optax does, but starts from v ≥ τ² and corrects no bias; here optax's own rules hold.

A schedule of ServerOpt runs over the rounds. One of ClientOpt runs over the local steps and begins anew in
every round, like its momentum. P_X is there where the set is the same for all clients; where each has its
own, the server's point may lie outside of them, as in FedAvg. A client with H = 0 is not in S.

Reveals only averages. Needs gradients.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedstrata.core import tree
from fedstrata.core.client import Client, steps_of
from fedstrata.core.counting import loop
from fedstrata.core.fed import Fed
from fedstrata.core.method import BatchSize, LocalSteps, Method, method
from fedstrata.core.optimisers import first_like
from fedstrata.core.types import Integer, Key, PyTree
from fedstrata.estimators.gradients import gradient
from fedstrata.problems.classes import Minimization

Optimiser = Annotated[optax.GradientTransformation, "an optax optimiser such as optax.adam(1e-2)"]

SCHEDULES = ("ScaleByScheduleState", "WrappedScheduleState")  # what optax keeps for one


class State(NamedTuple):
    """The server's iterate, and what its optimiser keeps."""

    x: PyTree
    server: PyTree


@method
class FedOpt(Method[Minimization, State]):
    """``H`` local steps of one optax optimiser, whose mean change is the gradient of another at the server.

    Args:
        client: the clients' optimiser, which begins anew in every round.
        server: the server's optimiser, which keeps its state over the rounds.
        H: local steps of a round: a number, one per client, or a function of the round.
        batch_size: samples of a minibatch; None is all of a client's samples.

    >>> import numpy as np, optax, fedstrata as fs
    >>> data = fs.FederatedData.from_clients([{"a": np.ones((2, 1))}, {"a": np.zeros((2, 1))}])
    >>> problem = fs.Minimization(lambda x, s: 0.5 * ((x - s["a"]) ** 2).sum())
    >>> fedadam = fs.FedOpt(client=optax.sgd(0.1), server=optax.adam(0.1, b2=0.99, eps=1e-3), H=5)
    >>> result = fs.solve(problem, fedadam, data, np.zeros(1), rounds=200, progress=False)
    >>> round(float(result.x[0]), 3)
    0.5
    """

    client: Optimiser
    server: Optimiser
    H: LocalSteps = 1
    batch_size: BatchSize = None

    solves = (Minimization,)

    def __post_init__(self) -> None:
        super().__post_init__()
        for side in ("client", "server"):
            object.__setattr__(self, side, first_like(getattr(self, side)))

    def cautions(self, problem: Minimization, rounds: int) -> list[str]:
        try:
            kept = jax.eval_shape(self.client.init, jnp.zeros(1))
        except Exception:  # made for parameters of a certain form
            return []
        if not optax.tree.get_all_with_path(kept, "count", _of_schedule):
            return []
        return [
            "FedOpt: the client's optimiser has a schedule, which runs over the local steps and begins anew "
            "in every round, as clients keep nothing between rounds. For a step that falls from round to "
            "round, give the schedule to the server's optimiser."
        ]

    def init(self, problem: Minimization, x0: PyTree, y0: PyTree) -> State:
        for side in ("client", "server"):
            _try_out(side, getattr(self, side), x0)
        return State(x0, self.server.init(x0))

    def local_steps(self, problem: Minimization, client: Client, key: Key, x: PyTree) -> PyTree:
        def step(at: tuple[PyTree, PyTree], key: Key) -> tuple[PyTree, PyTree]:
            x_i, kept = at
            f = client.mean(problem.loss, key, self.batch_size)  # line 3
            x_i, kept = _step(self.client, gradient(f, x_i), kept, x_i)
            return problem.project(x_i, client), kept  # line 4

        x_i, _ = loop(steps_of(self.H, client), step, key, (x, self.client.init(x)))  # line 2
        return tree.sub(x, x_i)  # line 5

    def round(self, problem: Minimization, fed: Fed, key: Key, r: Integer, state: State) -> State:
        delta = fed.average(self.local_steps, key, state.x, weights=fed.at_work(self.H))  # lines 1, 6
        x, server = _step(self.server, delta, state.server, state.x)
        return State(problem.project(x) if problem.project.shared else x, server)  # line 7


def _step(
    optimiser: optax.GradientTransformation, g: PyTree, kept: PyTree, x: PyTree
) -> tuple[PyTree, PyTree]:
    """One step; what the optimiser keeps stays of its dtypes, as loops require."""
    updates, after = optimiser.update(g, kept, x)
    after = jax.tree.map(lambda new, old: jnp.asarray(new, jnp.result_type(old)), after, kept)
    return optax.apply_updates(x, updates), after


def _of_schedule(path: tuple[object, ...], _: object) -> bool:
    return any(getattr(key, "tuple_name", "") in SCHEDULES for key in path)


def _try_out(side: str, optimiser: optax.GradientTransformation, x: PyTree) -> None:
    """Raise where an optimiser cannot take a step from ``x`` by a gradient alone."""
    try:
        kept = optimiser.init(x)
        updates, after = jax.eval_shape(lambda g, kept: optimiser.update(g, kept, x), x, kept)
    except Exception as error:
        raise TypeError(
            f"FedOpt: the optimiser {side}= cannot take a step from x0: {type(error).__name__}: {error}\n"
            "It gets a gradient and the parameters; optimisers that ask for more (a value, a function for "
            "line searches) cannot be used here."
        ) from error
    if _forms(updates) != _forms(x) or _forms(after) != _forms(kept):
        raise TypeError(f"FedOpt: the optimiser {side}= changes the form of its state or of x0 in a step.")
    if bad := tree.nonfinite_leaves(jax.tree.map(jnp.asarray, kept)):
        raise ValueError(
            f"FedOpt: the state of the optimiser {side}= begins with what is not finite ({', '.join(bad)}), "
            "which could not be told from a run that diverged."
        )


def _forms(state: PyTree) -> tuple[object, list[tuple[int, ...]]]:
    return jax.tree.structure(state), [jnp.shape(leaf) for leaf in jax.tree.leaves(state)]
