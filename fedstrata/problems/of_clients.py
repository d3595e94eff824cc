"""What methods minimise in place of the clients' mean loss, where that is another function of their losses.

A method returns one of these in `Method.judged_as`: the history then has its ``objective`` beside the loss,
and `fedstrata.certify` and `fedstrata.diagnose` judge by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from fedstrata.core import tree
from fedstrata.core.client import Client
from fedstrata.core.problem import Mean
from fedstrata.core.types import PyTree
from fedstrata.problems.classes import Minimization


@dataclass(frozen=True)
class WorstClient(Minimization):
    """``min_x max_i E f_i(x, ξ)``: the largest of the clients' losses in place of their mean."""


@dataclass(frozen=True)
class OfClients(Minimization):
    """``min_x`` of the mean of a function of each client's own mean loss."""

    objective: ClassVar[str] = "objective"

    def own(self, x: PyTree, client: Client) -> Any:
        """A client's term."""
        raise NotImplementedError

    def measure(self, mean: Mean, x: PyTree, y: PyTree) -> dict[str, Any]:
        """The mean loss, and what is minimised."""
        return {**super().measure(mean, x, y), "objective": mean(self.own, x, part="client")}


@dataclass(frozen=True)
class PowerOfLosses(OfClients):
    """``min_x 1/m Σ_i f_i(x)^(q+1)/(q+1)``."""

    q: float = 0.0

    def own(self, x: PyTree, client: Client) -> Any:
        """See `OfClients.own`."""
        return client.train.full_mean(self.loss).silent(x) ** (self.q + 1) / (self.q + 1)


@dataclass(frozen=True)
class Adapted(OfClients):
    """``min_x 1/m Σ_i f_i(x − α ∇f_i(x))``: every client takes a gradient step of its own first."""

    alpha: float = 0.0

    def own(self, x: PyTree, client: Client) -> Any:
        """See `OfClients.own`."""
        loss = client.train.full_mean(self.loss).silent
        return loss(tree.axpy(-self.alpha, jax.grad(loss)(x), x))
