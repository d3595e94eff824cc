"""FedMSA: federated multi-sequence stochastic approximation (Tarzanagh, Li, Sharma, Oymak; Algorithm 1).

    find x, z¹ … z^N with  Σ_m P^m(x, Z) = 0  and  Σ_m S^{m,n}(z^{n−1}, zⁿ) = 0,   z⁰ = x

    1  in round r = 0: ρ = 1 and K = 1
    2  client m, of those that take part: draw ξ;
           h^m ← p^m(x_r, Z_r; ξ) + (1−ρ) (h_{r−1} − p^m(x_{r−1}, Z_{r−1}; ξ)),   q^m likewise with s^m
    3  server: (h_r, q_r) ← the mean of (h^m, q^m), sent to the chosen clients
    4  a chosen client, k = 1 … K from (x, Z) = (x_r, Z_r) and (h, q) = (h_r, q_r):
    5      k > 1: draw ξ;  h ← h + p^m(x, Z; ξ) − p^m(x⁻, Z⁻; ξ),  (x⁻, Z⁻) the point before;  q likewise
    6      x ← x − α h,   zⁿ ← zⁿ − β_n qⁿ
    7  server: (x_{r+1}, Z_{r+1}) ← the mean of the chosen clients' (x, Z)

Line 2 uses the same sample at both points, and so does line 5. (At k = 1 both points are equal, so (h, q) is
unchanged.) The server holds h_{r−1}, so a client sends p(x_r) − (1−ρ) p(x_{r−1}). With full batches of all
clients, h_r is the mean of p^m(x_r, Z_r) for any ρ, by induction from r = 0; then the previous point is
neither sent nor evaluated. With full batches the map before a local step is the map after the previous one.
Algorithm 1 chooses one client; the paper's experiments average ten.

For minimax problems with full batches of all clients, and ``clients=m``, lines 4 to 7 are FedGDA-GT (Sun, Wei
2022): w ← w − γ (G_i(w) − G_i(w_r) + the mean of G_j(w_r)), with the operator G = (∇_x f, −∇_y f).

The maps of bilevel, minimax and compositional problems are in `fedstrata.estimators.sequences`; the paper's
(10a) prints ∇_x f for ∇_w f. A composition's values (and adjoints) are computed exactly before round 0, one
exchange each. The adjoint form avoids products of the Jacobians of several levels at one client; Gao (ICML
2024) has a Jacobian-vector estimator for the same purpose. The paper returns a random iterate
(`fedstrata.random_iterate`); here it is the last one.

Reveals only averages; with ``clients=1`` the chosen client's point, and for a composition's level in the log
domain each client's log g before round 0. Needs gradients, for bilevel problems also Hessian-vector products,
and a strongly convex lower level (in general, a strongly monotone S). A set of y is refused, except in
minimax problems if it does not depend on x.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedstrata.core import tree
from fedstrata.core.client import Client, steps_of
from fedstrata.core.counting import loop
from fedstrata.core.fed import Fed
from fedstrata.core.method import (
    BatchSize,
    Count,
    LocalSteps,
    PerSequence,
    Positive,
    Reveals,
    Unit,
    by_options,
    method,
)
from fedstrata.core.problem import Problem
from fedstrata.core.types import Integer, Key, PyTree, Real
from fedstrata.estimators import sequences
from fedstrata.estimators.hypergradient import Products
from fedstrata.methods._shared.rules import coupled, unlike
from fedstrata.methods._shared.sequences import Point, Sequences, step
from fedstrata.problems.measured import Conditions, Practical

CHOSEN = 10  # clients in `FedMSA.practical`


class State(NamedTuple):
    """The server's point, the previous point, and the direction there."""

    x: PyTree
    Z: tuple[PyTree, ...]
    before: Point  # (x_{r−1}, Z_{r−1})
    direction: Point  # (h_{r−1}, q_{r−1})


@method
class FedMSA(Sequences[State]):
    """Multi-sequence stochastic approximation with ``K`` local steps of ``clients`` chosen clients.

    Args:
        alpha: the step size of x.
        beta: the step size of the sequences: one number, or an array with one per sequence.
        rho: the momentum ρ of the first exchange; small values forget slowly. With minibatches use ρ ≥ 0.1
            or ``full_start``.
        K: local steps per round.
        clients: the number of clients that take local steps.
        adjoint: whether to track the adjoints of a composition too; False is the paper's form, which is
            biased when clients differ.
        products: ``"exact"`` Hessian-vector products, or ``"differences"`` of gradients (a first-order
            method).
        batch_size: samples per evaluation of a map; None uses the full batch.
        full_start: whether to compute the first (h, q) on the full batches of all clients, in one exchange
            before round 0, which then uses ρ like later rounds; otherwise the noise of the first minibatches
            lasts for 1/ρ rounds.
    """

    alpha: Positive  # α
    beta: PerSequence[Positive]  # β_n
    rho: Unit = 0.5  # ρ
    K: LocalSteps = 1
    clients: Count = 1
    adjoint: bool = True
    products: Products = "exact"
    batch_size: BatchSize = None
    full_start: bool = False

    private_samples = True

    @classmethod
    def from_theory(
        cls,
        *,
        R: int,
        K: int = 1,
        tau: float = 1.0,
        L: float = 1.0,
        c_alpha: float = 1.0,
        c_beta: float = 1.0,
        **options: Any,
    ) -> FedMSA:
        """The orders of Theorem 3.1: ρ = 1/R, α = c_α/(τK), β = c_β/(τK), and a full start for so small a ρ.

        α and β are also kept below 1/L, which the proof needs in (43) and the theorem hides in its O(·): if
        the clients hardly differ, τ is small, but steps longer than those of one client still diverge.

        Args:
            R: rounds.
            K: local steps.
            tau: τ, a bound on the difference of the derivatives of the clients' maps.
            L: the Lipschitz constant of the maps.
            c_alpha: the constant of O(·) in α.
            c_beta: the constant of O(·) in β.
            options: other hyper-parameters.

        >>> import fedstrata as fs
        >>> fs.FedMSA.from_theory(R=100, K=5, c_alpha=0.5).rho, fs.FedMSA.from_theory(R=100, K=5).alpha
        (0.01, 0.2)
        """
        if R < 1 or K < 1 or not tau > 0 or not L > 0:
            raise ValueError(
                f"FedMSA.from_theory needs R, K ≥ 1 and tau, L > 0, but got {R}, {K}, {tau}, {L}."
            )
        options = {"full_start": True, **options}
        alpha, beta = (min(c / (tau * K), 1 / L) for c in (c_alpha, c_beta))
        return cls(alpha, beta, 1 / R, K, **options)

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """By `fedstrata.methods._shared.rules.coupled`; with a part of the clients ρ = 1/R, full start."""
        K, drift = unlike(at)
        pair = coupled(at, drift=drift, steady=True)
        options: dict[str, Any] = {"rho": 1 / at.rounds, "full_start": True} if at.partial else {}
        its = cls(pair.alpha, pair.beta, K=K, clients=min(at.participants, CHOSEN), **options)
        return pair.of(its, rate=K**0.5 * pair.rate, cost=2.0)

    @by_options
    def reveals_on(self, problem: Problem) -> Reveals:
        return "replies" if self.clients == 1 else super().reveals_on(problem)

    def check(self, problem: Problem, clients: int) -> None:
        super().check(problem, clients)
        if self.clients > clients:
            raise ValueError(
                f"FedMSA: clients={self.clients} is more than the {clients} clients of the data."
            )

    def bias(self) -> str | None:
        if self.adjoint:
            return None
        return (
            "With adjoint=False, the paper's form, and several federated levels, the mean of a product of "
            "Jacobians is not the product of their means. Use adjoint=True, which is exact."
        )

    def init(self, problem: Problem, x0: PyTree, y0: PyTree) -> State:
        Z = sequences.start(problem, x0, y0, self.adjoint)
        return State(x0, Z, Point(x0, Z), Point(*tree.zeros_like((x0, Z))))

    def start(self, problem: Problem, fed: Fed, key: Key, state: State) -> State:
        Z = self.exact_start(problem, fed, key, state.x, state.Z)
        now, direction = Point(state.x, Z), state.direction
        if self.full_start and not self.cancels(fed):
            direction = fed.average(self.full_maps, key, now)
        return state._replace(Z=Z, before=now, direction=direction)

    def cancels(self, fed: Fed) -> bool:
        """Whether h_r is the mean of p^m(x_r, Z_r) for any ρ."""
        return self.batch_size is None and fed.participants == fed.clients

    def full_maps(self, problem: Problem, client: Client, key: Key, now: Point) -> Point:
        return Point(*sequences.draw(problem, client, key, None, self.products)(*now))

    def maps(self, problem: Problem, client: Client, key: Key, now: Point) -> Point:
        """Line 2 if the momentum cancels."""
        return Point(*sequences.draw(problem, client, key, self.batch_size, self.products)(*now))

    def momentum(
        self, problem: Problem, client: Client, key: Key, keep: Real, now: Point, before: Point
    ) -> Point:
        """Line 2 without h_{r−1}, which the server adds."""
        maps = sequences.draw(problem, client, key, self.batch_size, self.products)
        return Point(*tree.axpy(-keep, maps(*before), maps(*now)))

    def move(
        self, problem: Problem, client: Client, point: Point, direction: Point, factor: Real = 1
    ) -> Point:
        """Line 6, with step sizes multiplied by ``factor``."""
        return step(problem, factor * self.alpha, factor * jnp.asarray(self.beta), point, direction, client)

    def local_steps(
        self, problem: Problem, client: Client, key: Key, begun: Integer, point: Point, direction: Point
    ) -> Point:
        """Lines 4 to 6; ``begun`` is 0 in round 0, else 1."""
        K = steps_of(self.K, client)
        full, static = self.batch_size is None, isinstance(K, int)
        # a loop of static length is faster: in round 0 all steps but the last have size zero
        length = K - 1 if static else jnp.where(begun, jnp.maximum(K - 1, 0), 0)

        def maps(key: Key) -> Any:
            drawn = sequences.draw(problem, client, key, self.batch_size, self.products)
            return lambda point: Point(*drawn(*point))

        whole = maps(key) if full else None  # the full batch, read once for all steps

        def one(carry: tuple[Point, Point, Any], key: Key) -> tuple[Point, Point, Any]:
            point, direction, seen = carry
            at = whole or maps(key)
            moved = self.move(problem, client, point, direction, begun)
            after, before = at(moved), seen if full else at(point)
            direction = tree.add(direction, tree.sub(after, before))  # line 5
            return moved, direction, after if full else None

        if not static or K > 1:
            seen = whole(point) if whole else None
            point, direction, _ = loop(length, one, key, (point, direction, seen))
        return self.move(problem, client, point, direction, 1 if static else K > 0)

    def round(self, problem: Problem, fed: Fed, key: Key, r: Integer, state: State) -> State:
        key_maps, key_chosen, key_local = jax.random.split(key, 3)
        now = Point(state.x, state.Z)
        if self.cancels(fed):
            direction = fed.average(self.maps, key_maps, now)  # lines 2, 3
        else:
            keep = 1 - self.rho if self.full_start else jnp.where(r == 0, 0.0, 1 - self.rho)  # line 1
            change = fed.average(self.momentum, key_maps, keep, now, state.before)  # line 2
            direction = tree.axpy(keep, state.direction, change)  # line 3
        chosen = fed.sample(key_chosen, self.clients)
        begun = jnp.asarray(r > 0, jnp.int32)  # line 1
        message = (self.local_steps, key_local, begun, now, direction)
        x, Z = fed.average(*message, of=chosen, weights=fed.at_work(self.K, chosen), around=now)
        return State(x, Z, now, direction)  # lines 4, 7
