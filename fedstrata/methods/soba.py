"""SOBA, the centralised single loop (Dagréou, Ablin, Vaiter, Moreau 2022), for any number of sequences.

    find x, z¹ … z^N with  Σ_m P^m(x, Z) = 0  and  Σ_m S^{m,n}(z^{n−1}, zⁿ) = 0,   z⁰ = x

    1  client m: draw ξ; h^m ← p^m(x, Z; ξ),  q^m ← s^m(x, Z; ξ)
    2  server: x ← P_X(x − α mean h^m),   zⁿ ← zⁿ − β_n mean q^{m,n}

One update per exchange, the same as on the pooled data. For bilevel problems this is SOBA, for compositions
and general sequences the single-timescale method of Shen and Chen (2022). It is FedMSA with ρ = 1 and K =
1, and its reference.

Under a robust mean, ``fs.Channel(mean=fs.TrimmedMean(0.2))``, it is BR-FedBi, which withstands hostile
clients (ICLR 2026).

Reveals only averages, and for a composition's level in the log domain each client's log g before round 0.
Needs what FedMSA needs.
"""

from __future__ import annotations

from typing import NamedTuple

from fedstrata.core.client import Client
from fedstrata.core.fed import Fed
from fedstrata.core.method import BatchSize, PerSequence, Positive, method
from fedstrata.core.problem import Problem
from fedstrata.core.types import Integer, Key, PyTree
from fedstrata.estimators import sequences
from fedstrata.estimators.hypergradient import Products
from fedstrata.methods._shared.rules import coupled
from fedstrata.methods._shared.sequences import Point, Sequences, step
from fedstrata.problems.measured import Conditions, Practical


class State(NamedTuple):
    """The server's point."""

    x: PyTree
    Z: tuple[PyTree, ...]


@method
class SOBA(Sequences[State]):
    """One simultaneous step of all sequences per exchange.

    Args:
        alpha: the step size of x.
        beta: the step size of the sequences: one number, or an array with one per sequence.
        adjoint: whether to track the adjoints of a composition too; see `fedstrata.methods.fedmsa`.
        products: ``"exact"`` Hessian-vector products, or ``"differences"`` of gradients.
        batch_size: samples per evaluation of a map; None uses the full batch.
    """

    alpha: Positive  # α
    beta: PerSequence[Positive]  # β_n
    adjoint: bool = True
    products: Products = "exact"
    batch_size: BatchSize = None

    server_steps = True

    private_samples = True

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """By `fedstrata.methods._shared.rules.coupled`."""
        pair = coupled(at)
        return pair.of(cls(pair.alpha, pair.beta))

    def init(self, problem: Problem, x0: PyTree, y0: PyTree) -> State:
        return State(x0, sequences.start(problem, x0, y0, self.adjoint))

    def start(self, problem: Problem, fed: Fed, key: Key, state: State) -> State:
        return State(state.x, self.exact_start(problem, fed, key, state.x, state.Z))

    def maps(self, problem: Problem, client: Client, key: Key, x: PyTree, Z: PyTree) -> Point:
        return Point(*sequences.draw(problem, client, key, self.batch_size, self.products)(x, Z))

    def round(self, problem: Problem, fed: Fed, key: Key, r: Integer, state: State) -> State:
        direction = fed.average(self.maps, key, state.x, state.Z)  # line 1
        return State(*step(problem, self.alpha, self.beta, Point(*state), direction))  # line 2
