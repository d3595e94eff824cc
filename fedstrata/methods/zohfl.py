"""ZO-HFL: a hierarchical framework for heterogeneous clients (Qiu, Kim, Yousefian; Algorithms 1 and 2).

    min_x  E f₁(x, ξ) + 1/m Σ_i f₂(x, y_i(x)),    y_i(x) = argmin_{y ∈ Y_i(x)} E h_i(x, y, ζ)

    1  server: send x̂; server and client i draw v_i on the unit sphere from a shared key
    2  client i: from y⁺ = y⁻ = y_i, for t = 0, …, H_{i,r} − 1:
    3      draw ζ from D_i
    4      y^± ← P_{Y_i(x̂ ± ηv_i)}(y^± − γ̃/(t + Γ) ∇_y h_i(x̂ ± ηv_i, y^±, ζ))
    5  client i: keep the personal model y_i ← P_{Y_i(x̂)}(½(y⁺ + y⁻));
          upload g_i ← n/(2η) (f₂(x̂ + ηv_i, y⁺) − f₂(x̂ − ηv_i, y⁻)) v_i
    6  server: draw ξ from its own data; x̂ ← x̂ − γ_r (∇f₁(x̂, ξ) + the mean of g_i)

For ``fs.Bilevel(f, h, local=True)``, without f₁ and with f_i a mean over samples, f₂ is f_i on a minibatch,
the same at both ends, and the server projects x onto its set. With ``messages="scalars"`` line 5 is

    5′ client i: upload the two numbers f₂(x̂ ± ηv_i, y^±), from which the server computes g_i

which gives the same iterates. The paper uploads y⁺ and y⁻; one vector is enough. A client with H_{i,r} = 0 is
treated as if it had not been sampled: it keeps y_i, and the mean in line 6 is over the others. Both points
use the same ζ (``common_random_numbers``): line 5 multiplies the difference by n/(2η), and with independent
samples their noise too.

With its message every client sends the relative error of its models' response to x̂ ± ηv_i, one more number
(`ZOHFL.missing`), because g_i has the same relative error. It is the metric ``lower_residual``.

Theory: H_{i,r} = τ_i √(r+1), γ_r = c/√(r+1) with c = 1/(4(L₁ + L₀√n/η)); see `ZOHFL.from_theory`. Reveals
only averages; with scalars, every reply. Needs gradients of f₁ and h_i, and values of f₂.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core import tree
from fedstrata.core.client import Client, Oracle, steps_of
from fedstrata.core.counting import count, loop
from fedstrata.core.fed import Fed, Remember
from fedstrata.core.method import (
    BatchSize,
    Count,
    LocalSteps,
    Method,
    Moment,
    Positive,
    Reveals,
    by_options,
    method,
)
from fedstrata.core.types import Integer, Key, PyTree, Real
from fedstrata.estimators.gradients import gradient
from fedstrata.estimators.sphere import check_directions, combine, directions, points, scalars
from fedstrata.methods._shared.two_point import lost_in_rounding
from fedstrata.methods._shared.zeroth import by_values
from fedstrata.problems.classes import Bilevel, Personalized
from fedstrata.problems.measured import Conditions, NoRule, Practical

Hierarchical: TypeAlias = Personalized | Bilevel

RECENT = 20  # rounds over which the error of the clients' models is averaged
LARGE = 0.05  # that error at the end, above which there is a warning
MOST_STEPS = 500  # local steps in `ZOHFL.practical`, at most
CONSTANT = 1e5  # Γ in `ZOHFL.practical`: a step size that is almost constant


@dataclass(frozen=True)
class RootDecay:
    """The step sizes ``γ_r = c/(r+1)^p``, with p = ½ the root."""

    c: float
    p: float = 0.5

    def __call__(self, r: Integer) -> Any:
        return self.c / _power(r, self.p)


@dataclass(frozen=True)
class RootGrowth:
    """The numbers of local steps ``H_{i,r} = ⌈τ_i (r+1)^q⌉``; ``tau`` is a number, or one per client."""

    tau: float | tuple[float, ...]
    q: float = 0.5

    def __call__(self, r: Integer) -> Any:
        return jnp.ceil(jnp.asarray(self.tau) * _power(r, self.q)).astype(jnp.int32)


def _power(r: Integer, p: float) -> Any:
    """``(r+1)^p``; roots of squares are exact, because `RootGrowth` rounds up."""
    return jnp.sqrt(r + 1.0) if p == 0.5 else (r + 1.0) ** p


class State(NamedTuple):
    """The server's iterate, and the error of the clients' models in recent rounds."""

    x: PyTree  # x̂
    missing: jax.Array


@method
class ZOHFL(Method[Hierarchical, State]):
    """A server's model x, by gradients and two-point estimates, and personal models y_i, by SGD.

    Args:
        gamma: the step size γ_r of the server: a number, or a schedule such as ``RootDecay(0.01)``.
        eta: the smoothing radius η.
        H: local steps per round: an integer, one per client (0: does not take part), or a function of the
            round that returns either, such as ``RootGrowth(20)``.
        gamma_client: the clients' step size in their t-th step is γ̃/(t + Γ); this is γ̃.
        Gamma: the offset Γ in that step size.
        batch_size: samples per step of a client; None uses all.
        server_batch_size: samples per step of the server; None uses all.
        messages: ``"vectors"`` or ``"scalars"``.
        common_random_numbers: whether both points use the same samples; the paper draws independent ones.
        directions: the number of directions v per client and round; g_i averages their estimates.
        orthogonal: whether the directions of a client are orthogonal.
    """

    gamma: Positive  # γ_r
    eta: Positive  # η
    H: LocalSteps = 1
    gamma_client: Positive = 0.1  # γ̃
    Gamma: Positive = 1.0  # Γ
    batch_size: BatchSize = None
    server_batch_size: BatchSize = None
    messages: Literal["vectors", "scalars"] = "vectors"
    common_random_numbers: bool = True
    directions: Count = 1
    orthogonal: bool = False

    solves = (Personalized, Bilevel)
    local = True
    exact = "divides small differences of values"
    needs = "gradients of the server's and the clients' losses, values of the coupling"

    @classmethod
    def differentiates(cls, problem: Hierarchical) -> tuple[str, ...]:
        coupling = [level for level in problem.levels if (level.variable, level.arguments) == ("x", "xy")]
        return tuple(level.name for level in problem.levels if level not in coupling)

    @classmethod
    def needs_for(cls, problem: Hierarchical) -> str:
        return "values of f, gradients of h" if problem.local else cls.needs

    @classmethod
    def refuses(cls, problem: Hierarchical) -> str | None:
        if not problem.personal:
            return "ZOHFL needs a local lower level: use fs.Bilevel(…, local=True)."
        if not problem.set_of_x.shared:
            return "ZOHFL: the server updates x, so it cannot use a client-dependent project_x(x, client)."
        return None

    @classmethod
    def from_theory(
        cls,
        *,
        L1: float,
        L0: float,
        n: int,
        mu: float,
        L_h: float,
        eta: float = 0.1,
        tau: float | tuple[float, ...] = 1.0,
        p: float = 0.5,
        q: float = 0.5,
        **options: Any,
    ) -> ZOHFL:
        """The rules of Theorem 1: γ_r = c/√(r+1), c = 1/(4(L₁ + L₀√n/η)), H_{i,r} = ⌈τ_i√(r+1)⌉.

        Theorem 2, by which ‖∇f^η‖ comes arbitrarily close to 0 almost surely, needs γ_r = c/(r+1)^p with
        p > ½ and H_{i,r} = ⌈τ_i(r+1)^q⌉ with p + q > 1 (Remark 3), for example p=0.75.

        The clients' step size is γ̃/(t + Γ) with γ̃ = 2/μ (the proposition needs μγ̃ > 1) and Γ =
        4(L_h/μ)², the smallest that keeps it below μ/(2L_h²).

        Args:
            L1: the Lipschitz constant of ∇f₁.
            L0: the Lipschitz constant of the implicit f₂.
            n: the dimension of x.
            mu: the modulus of strong convexity of the clients' h_i.
            L_h: the Lipschitz constant of the ∇h_i.
            eta: the smoothing radius η.
            tau: the factor τ of H, or one for each client; at least 1.
            p: the exponent of γ_r, from ½ to 1.
            q: the exponent of H_{i,r}, at least ½.
            **options: other hyper-parameters.

        >>> import fedstrata as fs
        >>> m = fs.ZOHFL.from_theory(L1=1.0, L0=1.0, n=4, mu=1.0, L_h=2.0, eta=0.5, tau=2.0)
        >>> m.gamma, m.H, m.gamma_client, m.Gamma
        (RootDecay(c=0.05, p=0.5), RootGrowth(tau=2.0, q=0.5), 2.0, 16.0)
        """
        if not (L1 >= 0 and L0 > 0 and n >= 1 and 0 < mu <= L_h and eta > 0 and np.min(tau) >= 1):
            raise ValueError(
                "ZOHFL.from_theory needs L1 ≥ 0, L0 > 0, n ≥ 1, 0 < mu ≤ L_h, eta > 0 and tau ≥ 1, but "
                f"L1={L1}, L0={L0}, n={n}, mu={mu}, L_h={L_h}, eta={eta}, tau={tau}."
            )
        if not (0.5 <= p <= 1 and q >= 0.5):
            raise ValueError(f"ZOHFL.from_theory needs ½ ≤ p ≤ 1 and q ≥ ½, but p={p}, q={q}.")
        c = 1 / (4 * (L1 + L0 * math.sqrt(n) / eta))
        return cls(RootDecay(c, p), eta, RootGrowth(tau, q), 2 / mu, 4 * (L_h / mu) ** 2, **options)

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """γ̃/(t + Γ) ≈ 1/L_h with a large Γ, H = κ_h ln 100 steps, γ and η by `zeroth`."""
        (own,) = (level.name for level in at.problem.levels if level.solved_by == "client")
        fit = at[own]
        if not fit.condition < np.inf:
            raise NoRule("the clients' losses are not strongly convex at the start")
        H = int(np.clip(np.ceil(fit.condition * np.log(100)), 1, MOST_STEPS))
        options, rate, reasons, fades = by_values(at, at.F, own=True)
        del options["two_sided"]
        its = cls(H=H, gamma_client=CONSTANT / fit.L, Gamma=CONSTANT, **options)
        return Practical(its, rate, (*reasons, "clients' steps of 1/L, H = κ ln 100"), fades)

    @by_options
    def reveals_on(self, problem: Hierarchical) -> Reveals:
        return "replies" if self.messages == "scalars" else "averages"

    def cautions(self, moment: Moment) -> list[str]:
        return lost_in_rounding(self, "eta", moment) + self._of_the_fits(moment)

    def init(self, problem: Hierarchical, x0: PyTree, y0: PyTree) -> State:
        check_directions("ZOHFL", self.directions, self.orthogonal, x0)
        return State(x0, jnp.zeros(()))

    def metrics(self, state: State) -> dict[str, jax.Array]:
        """The relative error of the models' response to x̂ ± ηv_i: the clients' mean, over recent rounds."""
        return {"lower_residual": state.missing}

    def _of_the_fits(self, moment: Moment) -> list[str]:
        """A warning if the clients' models have not converged."""
        if not moment.ended or (missing := float(moment.state.missing)) <= LARGE:
            return []
        return [
            f"ZOHFL: the clients' models have not converged: their response to a change of x still has a "
            f"relative error of about {missing:.0%} at the end (the metric lower_residual). The estimate of "
            "f₂'s gradient has the same error. Give more steps H, and a gamma_client near one over the "
            "curvature of the clients' losses; if those are ill-conditioned, multiply both Gamma and "
            "gamma_client by the same large factor, so that the step size stays nearly constant."
        ]

    def memory(self, problem: Hierarchical, x0: PyTree, y0: PyTree) -> PyTree:
        return y0  # y_i

    def output(self, state: State, memory: PyTree) -> tuple[PyTree, PyTree]:
        return state.x, memory

    def draw(self, key: Key, x: PyTree) -> PyTree:
        """The directions ηv_i of a client (line 1), stacked, drawn with the key of its phase."""
        return directions(jax.random.split(key)[0], x, self.eta, self.directions, self.orthogonal)

    def personalize(self, problem: Hierarchical, client: Client, key: Key, x: PyTree) -> Remember:
        """Lines 2 to 5: the values of f₂ at all ``x̂ ± ηv_i``, and the personal model."""
        its_lower = problem.levels[-1]
        z = points(x, self.draw(key, x), two_sided=True)
        ends = 2 * self.directions
        y = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (ends, *leaf.shape)), client.memory)

        def sample(key: Key) -> Oracle:
            return client.train.mean(its_lower, key, self.batch_size)

        def descend(f: Oracle, x: PyTree, y: PyTree, gamma: Real) -> PyTree:
            y = tree.axpy(-gamma, jax.grad(f.silent, argnums=1)(x, y), y)
            return problem.project_y(y, x, client)

        def step(y: PyTree, key: Key, t: Integer) -> PyTree:
            gamma = self.gamma_client / (t + self.Gamma)
            f = sample(key)  # line 3
            f.book("gradients", ends)
            if self.common_random_numbers or self.batch_size is None:
                return jax.vmap(lambda x, y: descend(f, x, y, gamma))(z, y)  # line 4
            keys = jax.random.split(key, ends)
            return jax.vmap(lambda key, x, y: descend(sample(key), x, y, gamma))(keys, z, y)

        H = steps_of(self.H, client)
        y = loop(H, step, jax.random.split(key)[1], y, indexed=True)  # line 2
        missing = self.missing(problem, client, sample(jax.random.fold_in(key, 1)), z, y)
        values = self.coupled(problem, client, jax.random.fold_in(key, 2), z, y)
        mean = problem.project_y(jax.tree.map(lambda leaf: leaf.mean(0), y), x, client)
        kept = tree.where(H > 0, mean, client.memory)
        return Remember((values, missing), kept)  # line 5′

    def coupled(self, problem: Hierarchical, client: Client, key: Key, z: PyTree, y: PyTree) -> jax.Array:
        """f₂ at all x̂ ± ηv_i and the models y^± for them."""
        ends = 2 * self.directions
        if problem.local:
            f = client.valid.mean(problem.levels[0], key, self.batch_size)
            f.book("values", ends)
            return jax.vmap(f.silent)(z, y)
        count("values", ends)
        return jax.vmap(lambda x, y: problem.levels[1](x, y, client))(z, y)

    def missing(self, problem: Hierarchical, client: Client, f: Oracle, z: PyTree, y: PyTree) -> jax.Array:
        """The relative error of y⁺ − y⁻, estimated by the length of a Newton step along its residual.

        Only the difference enters g_i, and the noise of the samples cancels in it. The residual alone would
        be small if h_i has little curvature, however large the error, so it is divided by the curvature
        along it. These evaluations are not counted.
        """
        unit = self.gamma_client / self.Gamma  # the step size of the projected gradient residual

        def residual(x: PyTree, y: PyTree) -> PyTree:
            g = jax.grad(f.silent, argnums=1)(x, y)
            if problem.project_y.trivial:
                return g
            step = problem.project_y(tree.axpy(-unit, g, y), x, client)
            return tree.scale(1 / unit, tree.sub(y, step))

        def of_pair(x: PyTree, y: PyTree) -> jax.Array:  # both ends of one direction, stacked
            ends = jax.vmap(residual)(x, y)
            r = jax.tree.map(lambda leaf: (leaf[0] - leaf[1]) / 2, ends)
            answer = tree.norm(jax.tree.map(lambda leaf: (leaf[0] - leaf[1]) / 2, y))
            size = tree.norm(r)
            tiny = jnp.finfo(size.dtype).tiny
            # by a finite difference: a loss may have only first derivatives
            t = jnp.where(answer > 0, answer / jnp.maximum(size, tiny), 1)
            at, its = jax.tree.map(lambda leaf: leaf[0], ((x, y), ends))
            along = tree.sub(residual(at[0], tree.axpy(t, r, at[1])), its)
            to_go = t * size**3 / jnp.maximum(jnp.abs(tree.dot(r, along)), tiny)
            return jnp.where(size > 0, to_go / jnp.maximum(to_go + answer, tiny), 0)

        def pairs(leaf: jax.Array) -> jax.Array:  # `points` lists all x̂ + ηv first, then all x̂ − ηv
            return jnp.stack([leaf[: self.directions], leaf[self.directions :]], 1)

        return jax.vmap(of_pair)(jax.tree.map(pairs, z), jax.tree.map(pairs, y)).mean().astype(float)

    def estimate(self, values: jax.Array, v: PyTree) -> PyTree:
        """g_i (line 5) from the values at both ends of every direction, where ‖v‖ = η."""
        return combine(scalars(values, tree.dimension(v) // self.directions, self.eta, two_sided=True), v)

    def personalize_vector(self, problem: Hierarchical, client: Client, key: Key, x: PyTree) -> Remember:
        (values, missing), kept = self.personalize(problem, client, key, x)
        return Remember((self.estimate(values, self.draw(key, x)), missing), kept)  # line 5

    def round(self, problem: Hierarchical, fed: Fed, key: Key, r: Integer, state: State) -> State:
        x, clients = state.x, fed.cohort
        weights = fed.weights_of(clients, fed.at_work(self.H))
        if self.messages == "vectors":
            g, missing = fed.average(self.personalize_vector, key, x, weights=fed.at_work(self.H))
        else:
            values, each_missing = fed.gather(self.personalize, key, x)
            missing = combine(weights, each_missing)

            def add(total: PyTree, one: tuple[Any, Any, Any]) -> tuple[PyTree, None]:
                index, weight, of_client = one
                v = self.draw(jax.random.fold_in(key, index), x)
                return tree.axpy(weight, self.estimate(of_client, v), total), None

            g = jax.lax.scan(add, tree.zeros_like(x), (clients, weights, values))[0]
        # if no client takes a step, only f₁ counts
        anyone = jnp.broadcast_to(jnp.asarray(self.H) > 0, (fed.clients,))[clients].any()
        direction = tree.scale(jnp.where(anyone, 1, 0), g)
        if fed.server is not None and not problem.local:
            key_server = jax.random.fold_in(key, fed.clients)
            f = fed.server.mean(problem.levels[0], key_server, self.server_batch_size)
            direction = tree.add(direction, gradient(f, x))
        share = jnp.where(anyone, 1 / jnp.minimum(r + 1, RECENT), 0)
        recent = state.missing + share * (missing - state.missing).astype(state.missing.dtype)
        x = problem.set_of_x(tree.axpy(-self.gamma, direction, x))
        return State(x, recent)  # line 6
