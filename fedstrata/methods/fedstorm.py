"""FedSTORM: STORM estimates in every local step, on coupled sequences.

    find x, z¹ … z^N with  Σ_i P_i(x, Z) = 0  and  Σ_i S_iⁿ(z^{n−1}, zⁿ) = 0,   z⁰ = x

    1  before round 0: (h, q) ← the mean of all clients' (P_i, S_i)(x, Z), of all samples
    2  server: send (x, Z) and (h, q) to the clients that take part
    3  client i, I times from there:  x_i ← x_i − α h_i,   z_iⁿ ← z_iⁿ − β_n q_iⁿ
    4      except in the last step: draw ξ;  (h_i, q_i) ← M_i(now; ξ) + (1 − c) ((h_i, q_i) − M_i(before; ξ)),
           M_i = (P_i, S_i), before and now the points on both sides of the step
    5  server: (x⁺, Z⁺) ← the mean of (x_i, Z_i)
    6  client i: line 4 for its last step, with now = (x⁺, Z⁺)
    7  server: (h, q) ← the mean of (h_i, q_i),   (x, Z) ← (x⁺, Z⁺)

If every client has its own lower level, ``fs.Bilevel(…, local=True)``, Z_i and q_i never leave client i:
lines 5 and 7 average only x_i and h_i, and client i evaluates line 6 at (x⁺, Z_i).

This follows FedBiOAcc and FedBiOAcc-Local (Li, Huang, Huang 2023, bilevel) and FedSGDA-M (Wu, Sun, Hu, Zhang,
Huang 2023, minimax), of which only the abstracts were available: the originals may draw independent samples,
project v onto a ball, or average the estimates at another time. In them α decreases like (u + r)^−⅓, and c
like α². c = 1 is local steps with plain estimates (as in FedBiO); c = 0 never discards the first estimate.
With c > 0 and I > 2 clients drift by about c α (I − 1)(I − 2)/2; with c = 0, full batches and all clients
they do not, and the limit is exact, as it is for I = 2. With a compressing channel take c > 0, because c = 0
never discards compression errors. I = 1 is STORM on the mean. `fedstrata.FedMSA`, in contrast, applies c once
per round, at the server, and then lets a few chosen clients take steps.

The server projects onto sets, and maps are evaluated at projections, as in `fedstrata.FedAvg`. Lines 2 to 5
are one exchange and line 6 is another: line 5 also sends (1 − c) ((h_i, q_i) − M_i(before; ξ)), and line 6
sends M_i(now; ξ) for the same ξ, so that clients need no memory. A composition's values and adjoints are
exact before round 0.

Reveals only averages. Needs gradients, for bilevel problems also Hessian-vector products.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core import tree
from fedstrata.core.client import Client
from fedstrata.core.counting import loop
from fedstrata.core.fed import Fed, Remember
from fedstrata.core.method import BatchSize, Count, PerSequence, Positive, Unit, method
from fedstrata.core.problem import Problem
from fedstrata.core.types import Integer, Key, PyTree
from fedstrata.estimators import sequences
from fedstrata.estimators.hypergradient import Products
from fedstrata.methods._shared.rules import coupled, unlike
from fedstrata.methods._shared.sequences import Point, Sequences
from fedstrata.problems.classes import Bilevel, Minimax
from fedstrata.problems.measured import Conditions, Practical


class State(NamedTuple):
    """The server's point and the estimates there; in a local problem Z and q are empty."""

    x: PyTree
    Z: tuple[PyTree, ...]
    direction: Point  # (h, q)
    scaling: PyTree = None  # of `AdaFedSTORM`


class Own(NamedTuple):
    """The memory of a client of a local problem: its Z, the estimate q, and the x of that estimate."""

    Z: tuple[PyTree, ...]
    q: tuple[PyTree, ...]
    x: PyTree


@method
class FedSTORM(Sequences[State]):
    """``I`` local steps whose estimates are corrected at the previous point, on the same sample.

    Args:
        alpha: the step size of x.
        beta: the step size of the sequences: one number, or an array with one per sequence.
        c: the fraction of the old estimate that a step discards: 1 is a plain estimate, 0 keeps all of it.
        I: local steps per round.
        adjoint: in compositions, track the adjoints too; see `FedMSA`.
        products: ``"exact"`` Hessian-vector products, or ``"differences"`` of gradients.
        batch_size: samples per evaluation of a map; None uses the full batch.
    """

    alpha: Positive  # α
    beta: PerSequence[Positive]  # β_n
    c: Unit = 0.1
    I: Count = 1
    adjoint: bool = True
    products: Products = "exact"
    batch_size: BatchSize = None

    private_samples = True
    local = True

    @classmethod
    def refuses(cls, problem: Problem) -> str | None:
        if problem.local and not isinstance(problem, Bilevel):
            return "FedSTORM does not take local compositions: use FCSGM or LocalSCGDM."
        return super().refuses(problem)

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """As FedMSA's, with c = 0, which has no drift; with partial participation c = 1/R."""
        steps, drift = unlike(at)
        pair = coupled(at, drift=drift, steady=True)
        c = 1 / at.rounds if at.partial else 0.0
        return pair.of(cls(pair.alpha, pair.beta, c, steps), rate=steps**0.5 * pair.rate, cost=2.0)

    def init(self, problem: Problem, x0: PyTree, y0: PyTree) -> State:
        Z = () if problem.local else sequences.start(problem, x0, y0, self.adjoint)
        return State(x0, Z, Point(*tree.zeros_like((x0, Z))))

    def memory(self, problem: Problem, x0: PyTree, y0: PyTree) -> Own | None:
        if not problem.local:
            return None
        Z = sequences.start(problem, x0, y0)
        return Own(Z, tree.zeros_like(Z), x0)

    def output(self, state: State, memory: Own | None) -> tuple[PyTree, PyTree]:
        return state.x, sequences.second(state.Z if memory is None else memory.Z)

    def start(self, problem: Problem, fed: Fed, key: Key, state: State) -> State:
        Z = self.exact_start(problem, fed, key, state.x, state.Z)
        return state._replace(Z=Z, direction=fed.average(self.first, key, Point(state.x, Z)))  # line 1

    def first(self, problem: Problem, client: Client, key: Key, now: Point) -> Point | Remember:
        maps = self.maps(problem, client, key, None)
        if not problem.local:
            return maps(now)
        h, q = maps(Point(now.x, client.memory.Z))
        return Remember(Point(h, ()), client.memory._replace(q=q))

    def maps(self, problem: Problem, client: Client, key: Key, batch: int | None) -> Callable[[Point], Point]:
        """M_i on a new minibatch."""
        drawn = sequences.draw(problem, client, key, batch, self.products)
        return lambda at: Point(*drawn(*inside(problem, at)))

    def scaled(self, direction: Point, *scaling: PyTree) -> Point:
        """The direction of line 3; `AdaFedSTORM` rescales it."""
        return direction

    def move(self, problem: Problem, client: Client, at: Point, direction: Point) -> Point:
        """Line 3."""
        x = problem.set_of_x.own(tree.axpy(-self.alpha, direction.x, at.x), client)
        beta = jnp.broadcast_to(jnp.asarray(self.beta), (len(at.Z),))
        pairs = enumerate(zip(at.Z, direction.Z, strict=True))
        return Point(x, tuple(tree.axpy(-beta[n], q, z) for n, (z, q) in pairs))

    def local_steps(
        self, problem: Problem, client: Client, key: Key, start: Point, direction: Point, *scaling: PyTree
    ) -> tuple[Point, Point] | Remember:
        key_steps, key_last, _ = jax.random.split(key, 3)
        if problem.local:
            start, direction = Point(start.x, client.memory.Z), Point(direction.x, client.memory.q)

        def one(both: tuple[Point, Point], key: Key) -> tuple[Point, Point]:
            before, direction = both
            now = self.move(problem, client, before, self.scaled(direction, *scaling))
            maps = self.maps(problem, client, key, self.batch_size)
            left = tree.sub(direction, maps(before))
            return now, tree.axpy(1 - self.c, left, maps(now))  # line 4

        before, direction = loop(self.I - 1, one, key_steps, (start, direction))
        now = self.move(problem, client, before, self.scaled(direction, *scaling))
        maps = self.maps(problem, client, key_last, self.batch_size)
        left = tree.scale(1 - self.c, tree.sub(direction, maps(before)))
        if not problem.local:
            return now, left
        return Remember((Point(now.x, ()), Point(left.x, ())), Own(now.Z, left.Z, now.x))

    def late_steps(
        self, problem: Problem, client: Client, key: Key, start: Point, direction: Point
    ) -> tuple[Point, Point] | Remember:
        """``local_steps`` of a client that may have missed rounds, so that its q belongs to an older x."""
        own: Own = client.memory
        maps = self.maps(problem, client, jax.random.split(key, 3)[2], self.batch_size)
        change = tree.sub(maps(Point(start.x, own.Z)).Z, maps(Point(own.x, own.Z)).Z)
        client = dataclasses.replace(client, memory=own._replace(q=tree.add(own.q, change)))
        return self.local_steps(problem, client, key, start, direction)

    def last_estimate(self, problem: Problem, client: Client, key: Key, now: Point) -> Point | Remember:
        """Line 6, without the part that was sent in line 5."""
        maps = self.maps(problem, client, jax.random.split(key, 3)[1], self.batch_size)
        if not problem.local:
            return maps(now)
        own: Own = client.memory
        h, q = maps(Point(now.x, own.Z))
        return Remember(Point(h, ()), Own(own.Z, tree.add(own.q, q), now.x))

    def round(self, problem: Problem, fed: Fed, key: Key, r: Integer, state: State) -> State:
        start = Point(state.x, state.Z)
        # the second part is a difference already, so its reference is zero
        around = (start, jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), state.direction))
        late = problem.local and fed.participants < fed.clients
        steps = self.late_steps if late else self.local_steps
        now, left = fed.average(steps, key, start, state.direction, around=around)  # line 2
        now = inside(problem, now)  # line 5
        direction = tree.add(left, fed.average(self.last_estimate, key, now))  # line 7
        return State(now.x, now.Z, direction)


def inside(problem: Problem, at: Point) -> Point:
    """The projection onto the sets that all clients share."""
    x = problem.set_of_x.common(at.x)
    if isinstance(problem, Minimax):
        return Point(x, (sequences.Follower(problem.project_y(at.Z[0].y)),))
    return Point(x, at.Z)
