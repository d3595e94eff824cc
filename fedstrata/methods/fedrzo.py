"""FedRZO_nn: randomised zeroth-order, locally projected averaging (Qiu, Shanbhag, Yousefian; Algorithm 1).

    min_x  1/m Σ_i E f_i(x, ξ)   over  ∩ X_i

    1  server: send x̂ to every client
    2  client i, H times from x = x̂:
    3      draw ξ from D_i, and v on the sphere of radius η
    4      g ← n/η² (f_i(x+v, ξ) − f_i(x, ξ)) v
    5      x ← x − γ (g + (x − P_{X_i}(x))/η)
    6  server: x̂ ← the mean of the clients' x

Without local sets, a client's steps are H scalars times directions that the server can draw too:

    5′ client i: upload the scalars s_k = n/η² (f_i(x+v, ξ) − f_i(x, ξ)), k < H
    6′ server: x̂ ← x̂ − γ · the mean over the clients of Σ_k s_k v_k

This gives the same iterates with n/H times less to upload (``messages="scalars"``). With b directions per
step, line 4 averages over them and a client uploads b·H scalars.

Not in the paper: with ``shared_directions=True`` all clients use the same v in a step, drawn from a key that
the server sends. The server then needs only the mean of their scalars, so it sees no single reply, and
privacy noise is added to b·H numbers instead of n. With separate directions x keeps fluctuating when clients
differ: at the solution their gradients cancel, but estimates along different v do not, even on full batches.
With shared directions, two-sided differences and full batches, x converges to the solution.

Reveals only averages; with scalars of separate directions, every reply. Needs function values only.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from fedstrata.core import tree
from fedstrata.core.client import Client, steps_of
from fedstrata.core.counting import loop
from fedstrata.core.fed import Fed
from fedstrata.core.method import BatchSize, Count, LocalSteps, Positive, Reveals, by_options, method
from fedstrata.core.types import Array, Integer, Key, PyTree
from fedstrata.estimators.sphere import check_directions, estimate_of_mean, theory_steps
from fedstrata.methods._shared.two_point import Replayed
from fedstrata.methods._shared.zeroth import ACCURATE, MOST, by_values, value_doubts
from fedstrata.methods.fedavg import State
from fedstrata.problems.classes import Minimization
from fedstrata.problems.measured import Conditions, Practical

SHARED = 0x7368  # folded into a round's key for the directions that all clients share


@method
class FedRZO(Replayed[Minimization, State]):
    """``H`` local steps of size ``gamma`` along two-point estimates of radius ``eta``, with local sets.

    Args:
        gamma: the step size γ.
        eta: the smoothing radius η.
        H: local steps per round.
        batch_size: samples per function value; None uses all.
        messages: ``"vectors"``, or ``"scalars"`` if no client has a set.
        two_sided: use ``n/(2η²) (f(x+v) − f(x−v)) v`` in line 4. Its mean is ∇f^η too, but the even part of f
            cancels, whose noise of order η does not vanish at the solution.
        directions: the number of directions v per step; g averages their estimates.
        orthogonal: whether the directions of a step are orthogonal.
        shared_directions: whether all clients use the same directions.
    """

    gamma: Positive  # γ
    eta: Positive  # η
    H: LocalSteps = 1
    batch_size: BatchSize = 1
    messages: Literal["vectors", "scalars"] = "vectors"
    two_sided: bool = False
    directions: Count = 1
    orthogonal: bool = False
    shared_directions: bool = False

    solves = (Minimization,)
    private_samples = True
    needs = "function values"

    @classmethod
    def from_theory(
        cls,
        *,
        K: int,
        clients: int,
        eta: float = 0.1,
        L0: float | None = None,
        n: int = 1,
        B2: float = 1.0,
        delta: float | None = None,
        **options: Any,
    ) -> FedRZO:
        """The rules of Proposition 1: γ = √(m/K), H = ⌈(K/m³)^¼⌉.

        Args:
            K: local steps of a client in total; run ``rounds = ⌈K/H⌉``.
            clients: the number of clients m.
            eta: the smoothing radius η.
            L0: the Lipschitz constant L₀ of the clients' losses. If given, γ is kept below the proposition's
                bounds 1/(4H), η/(4(L₀n + 1)) (printed without the 1, which comes from the sets) and
                η/(12√3 B₂(L₀n + 1)H); for large K they hold anyway.
            n: the dimension of x, for that bound.
            B2: B₂ of the sets' dissimilarity, mean dist²(x, X_i) ≤ B₁² + B₂² ‖x − mean P_{X_i}(x)‖², for that
                bound: 1 if all clients share one set, 0 without sets.
            delta: δ of Proposition 2: η becomes δ/max{2, nL₀}, for which a point with ∇f^η = 0 is
                δ-Clarke stationary; without sets (``B2=0``) it becomes δ/2 for any L₀.
            **options: other hyper-parameters.

        >>> import fedstrata as fs
        >>> fs.FedRZO.from_theory(K=10_000, clients=4).gamma, fs.FedRZO.from_theory(K=10_000, clients=4).H
        (0.02, 4)
        """
        gamma, H = theory_steps(K, clients)
        if delta is not None and B2 > 0 and L0 is None:
            raise ValueError(
                "FedRZO.from_theory: with sets, Proposition 2's η needs L0. Give L0, or B2=0 if there are "
                "no sets."
            )
        if delta is not None:
            eta = delta / max(2.0, n * L0 if B2 > 0 and L0 is not None else 0.0)
        if L0 is not None:
            gamma = min(gamma, 1 / (4 * H), eta / (4 * (L0 * n + (B2 > 0))))
            if B2 > 0:
                gamma = min(gamma, eta / (12 * math.sqrt(3) * B2 * (L0 * n + 1) * H))
        return cls(gamma, eta, H, **options)

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """By `fedstrata.methods._shared.zeroth`, with full batches and H = 1.

        Clients that differ share their directions if γ is constant: with separate ones x would not converge.
        """
        its = at["loss"]
        stays = not (its.kinked or at.partial) and at.dimension > MOST
        shared = stays and its.heterogeneity > ACCURATE * its.gradient
        options, rate, reasons, fades = by_values(at, its, own=not shared)
        method = cls(batch_size=None, shared_directions=shared, **options)
        reasons = (*reasons, "shared directions, because clients differ") if shared else reasons
        return Practical(method, rate, reasons, fades, doubts=value_doubts(at))

    @by_options
    def reveals_on(self, problem: Minimization) -> Reveals:
        return "replies" if self.messages == "scalars" and not self.shared_directions else "averages"

    def init(self, problem: Minimization, x0: PyTree, y0: PyTree) -> State:
        check_directions("FedRZO", self.directions, self.orthogonal, x0)
        return State(x0)

    def key_of(self, key: Key, k: Integer, *words: Array) -> Key:
        """The key of the directions of local step k: the client's, or from the key data ``words`` of all."""
        return jax.random.fold_in(jax.random.wrap_key_data(words[0]), k) if words else super().key_of(key, k)

    def scalar_step(
        self, problem: Minimization, client: Client, key: Key, x: PyTree, k: Integer, words: PyTree
    ) -> tuple[Array, PyTree]:
        """One local step: the scalars and the next point."""
        f = client.mean(problem.loss, jax.random.split(key)[0], self.batch_size)  # line 3
        v = self.draw(self.key_of(key, k, *words), x)
        s = estimate_of_mean(f, x, v, self.eta, self.two_sided)  # line 4
        return s, self.descend(problem, client, x, s, v)  # line 5

    def local_steps(
        self, problem: Minimization, client: Client, key: Key, x: PyTree, *words: Array
    ) -> PyTree:
        def step(x: PyTree, key: Key, k: Integer) -> PyTree:
            return self.scalar_step(problem, client, key, x, k, words)[1]

        return loop(steps_of(self.H, client), step, key, x, indexed=True)  # line 2

    def local_scalars(
        self, problem: Minimization, client: Client, key: Key, x: PyTree, *words: Array
    ) -> Array:
        def step(carry: tuple[PyTree, Array], key: Key, k: Integer) -> tuple[PyTree, Array]:
            s, x = self.scalar_step(problem, client, key, carry[0], k, words)
            return x, carry[1].at[k].set(s.astype(carry[1].dtype))

        scalars = jnp.zeros((self.H, self.directions), jnp.result_type(*jax.tree.leaves(x)))
        return loop(self.H, step, key, (x, scalars), indexed=True)[1]  # line 5′

    def round(self, problem: Minimization, fed: Fed, key: Key, r: Integer, state: State) -> State:
        x = state.x
        words = (jax.random.key_data(jax.random.fold_in(key, SHARED)),) if self.shared_directions else ()
        if self.messages == "vectors":
            at_work = fed.at_work(self.H)
            return State(fed.average(self.local_steps, key, x, *words, weights=at_work, around=x))  # 1, 6
        if self.shared_directions:
            mean = fed.average(self.local_scalars, key, x, *words)
            moved = self.replay(jax.random.fold_in(key, 0), mean, x, *words)
            return State(tree.axpy(-self.gamma, moved, x))  # line 6′
        return State(self.replay_all(fed, key, fed.gather(self.local_scalars, key, x), x))  # line 6′
