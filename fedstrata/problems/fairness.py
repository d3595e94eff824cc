"""Learning under fairness constraints: ``min_x h(x)  s.t.  c(g(x)) ≤ 0``, h and g means over clients.

As a composition, the constraints enter as a penalty on the largest violation, smoothed:

    h(x) + ρ λ log(1 + Σ_j exp(c_j/λ)),   which tends to h + ρ max(0, max_j c_j) as λ → 0

That limit is an exact penalty for ρ above the sum of the constraints' multipliers. PDSGD uses the constraints
directly. The minimax form weighs them, ``min_x max_q h + ρ Σ_j q_j c_j − ρλ Σ_j q_j log q_j``, over the
simplex with one extra entry, q_0, for c_0 = 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core.problem import FUNCTION, Mean
from fedstrata.core.term import Applied, Term
from fedstrata.core.types import DType, Function, PyTree, Weights
from fedstrata.data.federated import DataError, FederatedData
from fedstrata.problems.classes import Composition, Minimax
from fedstrata.problems.dro import Dual, Floored, by_group, clients_mean, group_sizes, ratio
from fedstrata.problems.terms import calling, on_same_samples, per_sample
from fedstrata.support.words import misspelt


@dataclass(frozen=True)
class Constrained(Composition):
    """``min_x E h(x, ξ)  s.t.  c(E g(x, ξ)) ≤ 0``, as a penalised composition; see `penalised`.

    Attributes:
        inner: the inner function g, ``inner(x, sample)``.
        constraints: ``constraints(g)`` returns a vector whose entries must be at most 0.
        count: the number of constraints.
        rho: the penalty parameter ρ.
        lam: the smoothing λ of the penalty.
        linear: for the minimax form, ``linear(data, weights)`` returns a function ``c(x, sample)`` whose mean
            over clients with these weights is c(g(x)); or None.
    """

    inner: Function = field(metadata=FUNCTION, kw_only=True)
    constraints: Function = field(kw_only=True)
    count: int = field(kw_only=True)
    rho: float = field(default=1.0, kw_only=True)
    lam: float = field(default=0.01, kw_only=True)
    linear: Function | None = field(default=None, kw_only=True)

    objective = None  # it may increase if the start violates the constraints
    settling = ("objective",)

    def measure(self, mean: Mean, x: PyTree, y: PyTree) -> dict[str, Any]:
        """The objective, h, and the largest violation."""
        g, loss = mean(self.inner, x), mean(Term.of(self.plain), x)
        violation = jnp.max(jax.nn.relu(self.constraints(g)))
        return {"objective": loss + self.levels[-1](g), "loss": loss, "violation": violation}

    def exact(self) -> Hard:
        """The problem with constraints instead of the penalty, as `PDSGD` solves it."""
        return Hard(**{f.name: vars(self)[f.name] for f in fields(self)})

    def minimax(self, data: FederatedData, weights: Weights = "uniform") -> Dual:
        """The minimax form, whose second variable is the weights of the constraints.

        Args:
            data: the clients' samples.
            weights: the clients' weights, as given to `fedstrata.solve`; the groups' sizes depend on them.
        """
        rho, lam = self.rho, self.lam
        if self.linear is None:
            raise TypeError("These constraints are not means over samples, so they have no minimax form.")
        plain, violation = on_same_samples(Term.of(self.plain), Term.of(self.linear(data, weights)))

        def payoff(x: PyTree, q: jax.Array, sample: PyTree) -> jax.Array:
            gain = jnp.vdot(q[1:], violation(x, sample)) - lam * jax.scipy.special.xlogy(q, q).sum()
            return plain(x, sample) + rho * gain

        q0 = np.full(self.count + 1, 1 / (self.count + 1))
        term = calling(payoff, plain, violation)
        return Dual(Minimax(term, None, Floored(1e-8), made_for=weights), data, q0)


class Hard(Constrained):
    """``min_x E h(x, ξ)  s.t.  c(E g(x, ξ)) ≤ 0``, without a penalty."""


def penalised(
    loss: Function,
    inner: Function,
    constraints: Function,
    count: int,
    *,
    rho: float = 1.0,
    lam: float = 0.01,
    linear: Function | None = None,
) -> Constrained:
    """The penalised composition of a constrained problem; for the arguments see `Constrained`.

    >>> import fedstrata as fs
    >>> problem = fs.fairness.penalised(  # min E(x − a)² s.t. E(x·b) ≤ 1
    ...     lambda x, s: (x - s["a"]) ** 2, lambda x, s: x * s["b"], lambda g: g[None] - 1, count=1, rho=10.0
    ... )
    """
    if rho <= 0 or lam <= 0:
        raise ValueError(
            f"The penalty rho and its smoothing lam must be positive, but got {rho!r} and {lam!r}."
        )

    def penalty(g: PyTree) -> jax.Array:
        c = constraints(g) / lam
        return rho * lam * jax.nn.logsumexp(jnp.concatenate([jnp.zeros((1,), c.dtype), c]))

    return Constrained(
        (inner, penalty),
        loss,
        inner=inner,
        constraints=constraints,
        count=count,
        rho=rho,
        lam=lam,
        linear=linear,
    )


def label_of(sample: PyTree) -> Any:
    """A sample's label, its entry ``"y"``."""
    return sample["y"]


def groups_of(sample: PyTree) -> Any:
    """A sample's proxy groups if it has them (see `noisy_groups`), else its group."""
    return sample["proxy"] if "proxy" in sample else sample["group"]


def equal_opportunity(
    score: Function,
    loss: Function,
    groups: int,
    epsilon: float = 0.05,
    *,
    rho: float = 1.0,
    lam: float = 0.01,
    proxies: int = 1,
    label_of: Function = label_of,
    groups_of: Function = groups_of,
) -> Constrained:
    """``min E ℓ  s.t.  tpr(group j) ≥ tpr(all) − ε`` for all groups, or all proxy groups, j.

    The true positive rate of a group is E[σ(score) | y = 1, j], a ratio of two means; the sigmoid σ makes it
    differentiable.

    Args:
        score: ``score(x, sample)``, positive if the label 1 is predicted.
        loss: ``loss(x, sample)``.
        groups: the number of groups.
        epsilon: the allowed difference ε.
        rho: the penalty parameter of the largest violation.
        lam: the smoothing of the maximum.
        proxies: the number of proxy groups of each sample; see `noisy_groups`.
        label_of: a sample's label, 0 or 1.
        groups_of: a sample's group, or the vector of its ``proxies`` proxy groups.
    """
    if groups < 1 or proxies < 1 or epsilon < 0:
        raise ValueError(
            f"equal_opportunity: groups and proxies must be at least 1 and epsilon at least 0, "
            f"but got {groups!r}, {proxies!r} and {epsilon!r}."
        )

    score = per_sample(score, "equal_opportunity: score", "every sample counts in its own groups")
    rates = _Rates(score, groups, epsilon, label_of, groups_of)
    return penalised(
        loss, rates.inner, rates.constraints, proxies * groups, rho=rho, lam=lam, linear=rates.linear
    )


@dataclass(frozen=True)
class _Rates:
    """The true positive rates of all samples and of the groups, as ratios of means."""

    score: Function
    groups: int
    epsilon: float
    label_of: Function
    groups_of: Function

    def positives(self, sample: PyTree, dtype: DType) -> tuple[jax.Array, jax.Array]:
        """Whether the sample is positive, and the same for each proxy and group it belongs to."""
        positive = jnp.asarray(self.label_of(sample) == 1, dtype)
        members = jax.nn.one_hot(self.groups_of(sample), self.groups, dtype=dtype).reshape(-1)
        return positive, positive * members

    def inner(self, x: PyTree, sample: PyTree) -> dict[str, jax.Array]:
        hit = jax.nn.sigmoid(self.score(x, sample))
        positive, members = self.positives(sample, hit.dtype)
        return {
            "hits": positive * hit,
            "positives": positive,
            "group hits": members * hit,
            "group positives": members,
        }

    def constraints(self, g: dict[str, jax.Array]) -> jax.Array:
        rate, rates = ratio(g["hits"], g["positives"]), ratio(g["group hits"], g["group positives"])
        return jnp.where(g["group positives"] > 0, rate - rates, 0) - self.epsilon

    def linear(self, data: FederatedData, weights: Weights) -> Function:
        dtype = jnp.result_type(float)
        positive = clients_mean(data, lambda sample: self.positives(sample, dtype)[0], weights)
        members = clients_mean(data, lambda sample: self.positives(sample, dtype)[1], weights)
        if positive <= 0 or (members <= 0).any():
            raise DataError("The minimax form needs samples with label 1 in every group.")

        def violation(x: PyTree, sample: PyTree) -> jax.Array:
            hit = jax.nn.sigmoid(self.score(x, sample))
            one, mine = self.positives(sample, hit.dtype)
            return hit * (one / positive - mine / members) - self.epsilon

        return violation


def bounded_group_loss(
    loss: Function,
    groups: int,
    bound: float,
    *,
    rho: float = 1.0,
    lam: float = 0.01,
    group_of: Function = lambda sample: sample["group"],
) -> Constrained:
    """``min E ℓ  s.t.  E[ℓ | group j] ≤ bound`` for all groups j."""
    loss = per_sample(loss, "bounded_group_loss: loss", "every sample counts in its own group")

    inner = Applied(by_group, loss, groups, group_of)

    def constraints(g: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jnp.where(g[1] > 0, ratio(*g) - bound, 0)

    def linear(data: FederatedData, weights: Weights) -> Function:
        sizes = group_sizes(data, groups, group_of, weights)

        def violation(x: PyTree, sample: PyTree) -> jax.Array:
            return inner(x, sample)[0] / sizes - bound

        return violation

    return penalised(loss, inner, constraints, groups, rho=rho, lam=lam, linear=linear)


def noisy_groups(
    data: FederatedData, groups: int, noise: float = 0.3, proxies: int = 10, seed: int = 0
) -> FederatedData:
    """Replace training groups by noisy ones, and draw proxy groups given the noisy group.

    With probability ``noise`` a training sample's ``group`` is replaced by another one. From
    P(group | noisy group) each sample then draws ``proxies`` groups, its entry ``proxy``. A constraint that
    holds for the groups of every proxy is robust to the noise. The test data keeps its true groups.

    Raises:
        DataError: if the samples have no ``group``.
    """
    if not isinstance(data.train, dict) or "group" not in data.train:
        raise DataError("noisy_groups needs samples that are dicts with an entry 'group'.")
    if not 0 <= noise < 1 or groups < 2:
        raise ValueError(
            f"noisy_groups: noise must be in [0, 1) and groups at least 2, but got {noise!r} and {groups!r}."
        )
    rng = np.random.default_rng(seed)
    true = np.asarray(data.train["group"])
    flipped = (true + rng.integers(1, groups, true.shape)) % groups
    noisy = np.where(rng.random(true.shape) < noise, flipped, true)
    given_true = np.where(np.eye(groups, dtype=bool), 1 - noise, noise / (groups - 1))  # P(noisy | true)
    prior = np.bincount(true, minlength=groups) / len(true)
    joint = prior[:, None] * given_true
    cumulative = np.cumsum(joint / joint.sum(0), axis=0)  # P(true ≤ · | noisy)
    draws = rng.random((*true.shape, proxies, 1))
    proxy = (draws > cumulative.T[noisy][:, None, :]).sum(-1).clip(0, groups - 1)
    train = {**data.train, "group": noisy.astype(np.int32), "proxy": proxy.astype(np.int32)}
    return replace(data, train=train)


def worst_violation(
    score: Function, groups: int, epsilon: float = 0.05, *, label_of: Function = label_of
) -> Callable[[PyTree, PyTree, FederatedData], jax.Array]:
    """A metric: the largest ``(tpr(all) − ε − tpr(group))₊`` on the test data, with ``score > 0``."""
    score = per_sample(score, "worst_violation: score", "every sample is decided by itself")

    def metric(x: PyTree, y: PyTree, data: FederatedData) -> jax.Array:
        hit = jax.vmap(score, in_axes=(None, 0))(x, data.test) > 0
        positive = jax.vmap(label_of)(data.test) == 1
        member = jax.nn.one_hot(data.test["group"], groups) * positive[:, None]
        rates = ratio((member * hit[:, None]).sum(0), member.sum(0))
        rate = (hit & positive).sum() / positive.sum()
        return jnp.max(jax.nn.relu(rate - epsilon - rates))

    return metric


if not TYPE_CHECKING:  # for type checkers, a module with __getattr__ has every name
    __getattr__ = misspelt(__name__)
