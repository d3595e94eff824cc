"""FedOpt: optimisers at clients and server (Reddi et al. 2021, Adaptive Federated Optimization; Algorithm 1).

    min_x  1/m Σ_i E f_i(x, ξ)   over X

    1  server: send x to the clients S that take part
    2  client i, with a new state of ClientOpt, H times from z_i = x:
    3      draw ξ from D_i;  g ← ∇f_i(P_X(z_i), ξ)
    4      z_i ← ClientOpt(z_i, g)
    5  client i: send x − z_i
    6  server: Δ ← the mean over S of the x − z_i
    7  server: x ← P_X(ServerOpt(x, Δ)), which keeps its state

Both are optax optimisers. ServerOpt takes Δ as its gradient (the paper's Δ_t is −Δ):

    FedAvg       client=optax.sgd(γ), server=optax.sgd(1.0)
    FedAvgM      server=optax.sgd(1.0, momentum=0.9)                    (Hsu, Qi, Brown 2019)
    FedAdagrad   server=optax.adagrad(η, initial_accumulator_value=τ², eps=0.0)
    FedAdam      server=optax.adam(η, b1=0.9, b2=0.99, eps=τ)
    FedYogi      server=optax.yogi(η, b1=0.9, b2=0.99, eps=τ)

The paper's τ = 10⁻³ differs much from optax's defaults and matters, because pseudo-gradients are small. The
paper's Algorithm 2 divides by √v + τ like optax, but starts from v ≥ τ² without bias correction; here optax's
own rules apply.

A schedule of ServerOpt counts rounds. A schedule of ClientOpt counts local steps and restarts in every round,
like its momentum. P_X is used if all clients share the set; if each client has its own set, it projects each
of its steps, and the server's point may lie outside the sets, as in FedAvg. A client with H = 0 is not in S.

An adaptive ServerOpt scales each coordinate separately, but P_X is Euclidean: over a box the limit is
correct, over a ball or a simplex it is not the minimiser. An adaptive ClientOpt normalises gradients before
they are averaged: when clients differ, it converges at any step size to a point that does not minimise the
mean loss (with Adam, whose first step is a sign, nearer to a median). The certificate detects both.

Reveals only averages. Needs gradients.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedstrata.core import tree
from fedstrata.core.client import Client, steps_of
from fedstrata.core.counting import loop
from fedstrata.core.fed import Fed
from fedstrata.core.method import BatchSize, LocalSteps, Method, Moment, method
from fedstrata.core.types import Integer, Key, PyTree
from fedstrata.estimators.gradients import gradient
from fedstrata.methods._shared.rules import descent, own_sets
from fedstrata.problems.classes import Minimization
from fedstrata.problems.measured import Conditions, Practical
from fedstrata.support.optimisers import first_like
from fedstrata.support.points import nonfinite_leaves

Optimiser = Annotated[optax.GradientTransformation, "an optax optimiser such as optax.adam(1e-2)"]

SCHEDULES = ("ScaleByScheduleState", "WrappedScheduleState")  # the optax states of a schedule


class State(NamedTuple):
    """The server's iterate and the state of its optimiser."""

    x: PyTree
    server: PyTree


@method
class FedOpt(Method[Minimization, State]):
    """``H`` local steps of one optax optimiser; their mean change is the gradient of the server's optimiser.

    Args:
        client: the clients' optimiser, whose state restarts in every round.
        server: the server's optimiser, whose state is kept over the rounds.
        H: local steps per round: an integer, one per client, or a function of the round.
        batch_size: the minibatch size; None uses all of a client's samples.

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
    private_samples = True
    drifts = "H"

    def __post_init__(self) -> None:
        super().__post_init__()
        for side in ("client", "server"):
            object.__setattr__(self, side, first_like(vars(self)[side]))

    def cautions(self, moment: Moment) -> list[str]:
        """A warning if the clients' optimiser has a schedule."""
        try:
            kept = jax.eval_shape(self.client.init, jnp.zeros(1))
        except Exception:  # an optimiser for parameters with a particular structure
            return []
        if moment.state is not None or not optax.tree.get_all_with_path(kept, "count", _of_schedule):
            return []
        return [
            "FedOpt: the client's optimiser has a schedule, which counts the local steps and restarts in "
            "every round, because clients keep no state between rounds. For a step size that decreases "
            "over the rounds, give the schedule to the server's optimiser."
        ]

    def bias(self) -> str | None:
        if np.max(np.asarray(self.at(0).H)) > 1:
            return None
        return (
            "An optimiser that scales each coordinate, such as Adam, is biased at the clients, and at the "
            "server if x has a set other than a box. Use client=optax.sgd(…), and over such a set "
            "server=optax.sgd(1.0)."
        )

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """FedAvgM with Nesterov's momentum (√κ − 1)/(√κ + 1) and H = 1; without κ plain steps."""
        its = at["loss"]
        steps, free = descent(at, its), at.problem.set_of_x.trivial
        if steps.fades or not free or not its.mu > 0 or at.compressed:  # whose errors momentum adds up
            return steps.of(cls(optax.sgd(1.0), optax.sgd(steps.gamma)), doubts=own_sets(at))
        root = float(np.sqrt(steps.rate))
        server = optax.sgd(1.0, momentum=(1 - root) / (1 + root), nesterov=True)
        return steps.of(cls(optax.sgd(steps.gamma), server), "the server's momentum by kappa", rate=root)

    def init(self, problem: Minimization, x0: PyTree, y0: PyTree) -> State:
        for side in ("client", "server"):
            _try_out(side, vars(self)[side], x0)
        return State(x0, self.server.init(x0))

    def local_steps(self, problem: Minimization, client: Client, key: Key, x: PyTree) -> PyTree:
        def step(at: tuple[PyTree, PyTree], key: Key) -> tuple[PyTree, PyTree]:
            z, kept = at
            f = client.mean(problem.loss, key, self.batch_size)
            g = gradient(f, problem.project.common(z))  # line 3
            z, kept = _step(self.client, g, kept, z)
            return problem.project.own(z, client), kept  # line 4

        z, _ = loop(steps_of(self.H, client), step, key, (x, self.client.init(x)))  # line 2
        return tree.sub(x, z)  # line 5

    def round(self, problem: Minimization, fed: Fed, key: Key, r: Integer, state: State) -> State:
        delta = fed.average(self.local_steps, key, state.x, weights=fed.at_work(self.H))  # lines 1, 6
        x, server = _step(self.server, delta, state.server, state.x)
        return State(problem.project.common(x), server)  # line 7


def _step(
    optimiser: optax.GradientTransformation, g: PyTree, kept: PyTree, x: PyTree
) -> tuple[PyTree, PyTree]:
    """One step; the optimiser's state keeps its dtypes, as loops require."""
    updates, after = optimiser.update(g, kept, x)
    after = jax.tree.map(lambda new, old: jnp.asarray(new, jnp.result_type(old)), after, kept)
    return optax.apply_updates(x, updates), after


def _of_schedule(path: tuple[object, ...], _: object) -> bool:
    return any(getattr(key, "tuple_name", "") in SCHEDULES for key in path)


def _try_out(side: str, optimiser: optax.GradientTransformation, x: PyTree) -> None:
    """Raise if an optimiser cannot take a step from ``x`` with only a gradient."""
    try:
        kept = optimiser.init(x)
        updates, after = jax.eval_shape(lambda g, kept: optimiser.update(g, kept, x), x, kept)
    except Exception as error:
        raise TypeError(
            f"FedOpt: the optimiser {side}= cannot take a step from x0: {type(error).__name__}: {error}\n"
            "It gets a gradient and the parameters; optimisers that need more (a value, or a function for a "
            "line search) cannot be used here."
        ) from error
    if _forms(updates) != _forms(x) or _forms(after) != _forms(kept):
        raise TypeError(
            f"FedOpt: the optimiser {side}= changes the structure of its state or of x0 in a step."
        )
    if bad := nonfinite_leaves(jax.tree.map(jnp.asarray, kept)):
        raise ValueError(
            f"FedOpt: the initial state of the optimiser {side}= is not finite ({', '.join(bad)}), so a "
            "run that diverges could not be detected."
        )


def _forms(state: PyTree) -> tuple[object, list[tuple[int, ...]]]:
    return jax.tree.structure(state), [jnp.shape(leaf) for leaf in jax.tree.leaves(state)]
