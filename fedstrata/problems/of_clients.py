"""Objectives other than the clients' mean loss: fair losses, and losses of personal models.

A method that minimises one of these returns it in `Method.judged_as`. The history then has its ``objective``
and the ``personal`` loss beside the loss of x, and `fedstrata.certify` and `fedstrata.diagnose` use it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from fedstrata.core import tree
from fedstrata.core.client import Client
from fedstrata.core.problem import FUNCTION, Mean
from fedstrata.core.term import Applied, Term
from fedstrata.core.types import Array, Function, PyTree, Real
from fedstrata.problems import risks
from fedstrata.problems.classes import Bilevel, Minimization


@dataclass(frozen=True)
class WorstClient(Minimization):
    """``min_x max_i E f_i(x, ξ)``: the largest of the clients' losses instead of their mean.

    Attributes:
        rho: ρ of ``max_λ Σ λ_i f_i − ρ/2 mean((mλ − 1)²)`` over mixtures λ of m clients; 0 is the largest.
    """

    rho: Any = 0.0

    def mixed(self, weights: Array, losses: Array) -> Array:
        """The mixture of the losses, less the penalty of its weights."""
        return weights @ losses - self.rho / 2 * ((len(weights) * weights - 1) ** 2).mean()

    def risk(self, losses: Array, shares: Array | None = None) -> Array:
        """The largest mixture of all clients' losses."""
        if not self.rho:
            return jnp.max(losses)
        return risks.Chi2Penalty(self.rho).value(losses)


@dataclass(frozen=True)
class OwnModels(Minimization):
    """``min_x`` of the clients' mean loss; every client also has a personal model y_i."""

    personal = True

    def measure(self, mean: Mean, x: PyTree, y: PyTree) -> dict[str, Any]:
        """The loss at x, and the mean of the clients' losses at their own models."""
        metrics = super().measure(mean, x, y)
        return metrics if y is None else {**metrics, "personal": mean(self.loss, each=y)}


@dataclass(frozen=True)
class Envelopes(Bilevel):
    """``min_x 1/m Σ_i min_y E f_i(y, ξ) + λ/2 ‖y − x‖²``, the Moreau envelopes of the clients' losses."""

    loss: Function = field(metadata=FUNCTION, kw_only=True)

    settling = ("objective",)

    @classmethod
    def of(cls, loss: Function, lam: Real) -> Envelopes:
        """From the loss of one model."""
        term = Term.of(loss)
        both = Term(Applied(_near, term, lam), term.reads)
        return cls(both, both, loss=loss, same_samples=True, local=True)

    def measure(self, mean: Mean, x: PyTree, y: PyTree) -> dict[str, Any]:
        """The loss at x, at the clients' models, and at these with the distance to x."""
        personal, objective = mean(self.loss, each=y), mean(self.lower, x, each=y)
        return {"loss": mean(self.loss, x), "personal": personal, "objective": objective}


def _near(loss: Function, lam: Real, x: PyTree, y: PyTree, sample: PyTree) -> Any:
    apart = tree.sub(y, x)
    return loss(y, sample) + lam / 2 * tree.dot(apart, apart)


@dataclass(frozen=True)
class OfClients(OwnModels):
    """``min_x`` of the mean of a function of each client's own mean loss."""

    objective: ClassVar[str] = "objective"

    def client_value(self, x: PyTree, client: Client) -> Any:
        """One client's term of the mean."""
        raise NotImplementedError

    def measure(self, mean: Mean, x: PyTree, y: PyTree) -> dict[str, Any]:
        """The mean loss, and the objective."""
        return {**super().measure(mean, x, y), "objective": mean(self.client_value, x, part="client")}


@dataclass(frozen=True)
class PowerOfLosses(OfClients):
    """``min_x 1/m Σ_i f_i(x)^(q+1)/(q+1)``."""

    q: Any = 0.0
    personal = False

    def client_value(self, x: PyTree, client: Client) -> Any:
        return client.train.full_mean(self.loss).silent(x) ** (self.q + 1) / (self.q + 1)


@dataclass(frozen=True)
class Adapted(OfClients):
    """``min_x 1/m Σ_i f_i(x − α ∇f_i(x))``: the loss after one gradient step of each client."""

    alpha: Any = 0.0

    def client_value(self, x: PyTree, client: Client) -> Any:
        loss = client.train.full_mean(self.loss).silent
        return loss(tree.axpy(-self.alpha, jax.grad(loss)(x), x))


@dataclass(frozen=True)
class RiskOfClients(Minimization):
    """``min_x`` of a risk of the clients' mean losses F_i: λ log mean exp(F_i/λ), or their CVaR.

    Attributes:
        kind: ``"kl"`` or ``"cvar"``.
        level: λ of the KL risk; for the CVaR, the fraction of the clients that counts.
    """

    kind: Literal["kl", "cvar"] = "kl"
    level: Any = 1.0

    settling = ("objective",)

    def risk(self, losses: Array, shares: Array) -> Array:
        """The risk of all clients' losses."""
        its: risks.Risk = risks.KL(self.level) if self.kind == "kl" else risks.CVaR(self.level)
        return its.value(losses, shares)

    def measure(self, mean: Mean, x: PyTree, y: PyTree) -> dict[str, Any]:
        """The mean loss, and the risk; for the CVaR, at the threshold y."""
        loss = mean(self.loss, x)
        if self.kind == "kl":  # shifted by the mean loss, so that it does not overflow early
            return {
                "loss": loss,
                "objective": loss + self.level * jnp.log(mean(self.client_value, x, loss, part="client")),
            }
        return {"loss": loss, "objective": y + mean(self.client_value, x, y, part="client")}

    def client_value(self, x: PyTree, centre: Any, client: Client) -> Any:
        """One client's term: exp((F_i − c)/λ), or (F_i − s)₊/α."""
        above = client.train.full_mean(self.loss).silent(x) - centre
        return jnp.exp(above / self.level) if self.kind == "kl" else jax.nn.relu(above) / self.level
