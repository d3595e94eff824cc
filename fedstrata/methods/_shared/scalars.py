"""Shared by the methods whose clients know a round's directions, so that they send only scalars.

u_kp = H^(−½) z_kp,   z_kp ~ N(0, I) from (key, k, p), the same for all clients;   H = 1 if there is none
s_kp = (f(x + μ u_kp) − f(x))/μ,  or two-sided  (f(x + μ u_kp) − f(x − μ u_kp))/(2μ)
x ← x − η/P Σ_p s_kp u_kp                                                           a step, or its replay
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedstrata.core import tree
from fedstrata.core.client import Client, Oracle
from fedstrata.core.counting import loop
from fedstrata.core.method import Method, Moment, StateT
from fedstrata.core.types import Array, Integer, Key, PyTree, Real
from fedstrata.estimators.sphere import combine, estimate_of_mean
from fedstrata.methods._shared.two_point import lost_in_rounding
from fedstrata.methods._shared.zeroth import Choice, by_values
from fedstrata.problems.classes import Minimization
from fedstrata.problems.measured import Conditions, Measured

NARROW = 0.1  # μ, of the radius in `zeroth.by_values`
TO_REPLAY = 0x7365  # folded into a round's key for its directions


class StepRecord(NamedTuple):
    """The message from which clients replay a round.

    Attributes:
        words: the data of the random key.
        scalars: the clients' mean of s_kp; K × P.
        eta: the step size.
    """

    words: Array
    scalars: Array
    eta: Array


class ScalarsOnly(Method[Minimization, StateT]):
    """Base of these methods; ``width`` names the field of the width of the differences."""

    solves = (Minimization,)
    needs = "function values"
    width: ClassVar[str] = "mu"

    @classmethod
    def differentiates(cls, problem: Minimization) -> tuple[str, ...]:
        return ()

    @classmethod
    def refuses(cls, problem: Minimization) -> str | None:
        if problem.project.trivial:
            return None
        return f"{cls.__name__}: with a set, scalars do not determine the steps. Use FedRZO or FedZO."

    def cautions(self, moment: Moment) -> list[str]:
        return super().cautions(moment) + lost_in_rounding(self, self.width, moment, of_entries=True)


def nothing(K: int, P: int, like: PyTree) -> StepRecord:
    """The message of the first round, whose replay leaves x unchanged."""
    real = jnp.result_type(*jax.tree.leaves(like))
    return StepRecord(jax.random.key_data(jax.random.key(0)), jnp.zeros((K, P), real), jnp.zeros((), real))


def words_of(key: Key) -> Array:
    """The data of the key for a round's directions, which the server sends."""
    return jax.random.key_data(jax.random.fold_in(key, TO_REPLAY))


def normals(key: Key, like: PyTree, count: int, H: PyTree = None) -> PyTree:
    """``H^(−½) z``, z normal, stacked."""

    def one(key: Key) -> PyTree:
        z = optax.tree.random_like(key, like, jax.random.normal)
        return z if H is None else jax.tree.map(lambda a, h: a / jnp.sqrt(h), z, H)

    return jax.vmap(one)(jax.random.split(key, count))


def directions(words: Array, k: Integer, like: PyTree, count: int, H: PyTree = None) -> PyTree:
    """The directions u_k1 … u_kP of local step k."""
    return normals(jax.random.fold_in(jax.random.wrap_key_data(words), k), like, count, H)


def slopes(f: Oracle, x: PyTree, u: PyTree, mu: Real, two_sided: bool) -> Array:
    """The scalars s_1 … s_P of an oracle along stacked directions."""
    count = jax.tree.leaves(u)[0].shape[0]
    found = estimate_of_mean(f, x, tree.scale(mu, u), mu, two_sided)
    return found * (mu * count / tree.dimension(x))  # without its n/(bμ)


def step(x: PyTree, s: Array, u: PyTree, eta: Real) -> PyTree:
    """``x − η/P Σ_p s_p u_p``."""
    return tree.axpy(-eta / s.shape[0], combine(s, u), x)


def replayed(x: PyTree, sent: StepRecord, H: PyTree = None) -> PyTree:
    """The point after the steps of a round."""
    K, P = sent.scalars.shape

    def again(x: PyTree, _: Key, k: Integer) -> PyTree:
        return step(x, sent.scalars[k], directions(sent.words, k, x, P, H), sent.eta)

    return loop(K, again, jax.random.key(0), x, indexed=True)


def local_scalars(
    problem: Minimization,
    client: Client,
    key: Key,
    x: PyTree,
    words: Array,
    eta: Real,
    options: tuple[int, int, Real, bool, int | None],
    H: PyTree = None,
) -> Array:
    """The scalars s_kp of a client's local steps from x.

    Args:
        problem: the problem with the loss.
        client: the client.
        key: the random key of its minibatches.
        x: the start of the steps.
        words: the data of the directions' key.
        eta: the step size.
        options: K, P, μ, whether differences are two-sided, and the minibatch size.
        H: the curvature that scales the directions; None is 1.
    """
    K, P, mu, two_sided, batch_size = options

    def one(carry: tuple[PyTree, Array], key: Key, k: Integer) -> tuple[PyTree, Array]:
        x, scalars = carry
        u = directions(words, k, x, P, H)
        s = slopes(client.mean(problem.loss, key, batch_size), x, u, mu, two_sided)
        return step(x, s, u, eta), scalars.at[k].set(s.astype(scalars.dtype))

    scalars = jnp.zeros((K, P), jnp.result_type(*jax.tree.leaves(x)))
    return loop(K, one, key, (x, scalars), indexed=True)[1]


def by_normals(at: Conditions, its: Measured) -> tuple[Choice, float]:
    """The rule for P = min(n, 32) normal directions that all clients share, and its growth of ‖g‖².

    E‖g‖² = (1 + (n + 1)/P) ‖∇f‖², so γ = 1/(L (1 + (n + 1)/P)); μ is a tenth of the radius η/√n.
    """
    found, n = by_values(at, its, own=False), at.dimension
    P = int(found.options["directions"])
    return found, 1 + (n + 1) / P
