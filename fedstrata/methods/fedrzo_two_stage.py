"""FedRZO_2s: zeroth-order federated averaging over equilibria (Qiu, Shanbhag, Yousefian; Algorithms 4 and 5).

    min_x  1/m Σ_i E f_i(x, y(x, ξ), ξ)   over  ∩ X_i,   y(x, ξ) solves VI(Y(x, ξ), G(x, ·, ξ))

    1  server: send x̂ to every client
    2  client i, H times from x = x̂ (k counts all steps so far):
    3      draw ξ from D_i, and v on the sphere of radius η
    4      y⁰ ← y(x, ξ) and y⁺ ← y(x+v, ξ), each by t_k = ⌈τ ln(k+1)⌉ steps of a VI solver:
               y ← P_{Y(x, ξ)}(y − α G(x, y, ξ))
    5      g ← n/η² (f_i(x+v, y⁺, ξ) − f_i(x, y⁰, ξ)) v
    6      x ← x − γ (g + (x − P_{X_i}(x))/η)
    7  server: x̂ ← the mean of the clients' x

The lower level needs no communication: every client solves its own followers' game, one for each sample.
With τ = None line 4 stops by the residual instead, ‖y − P_Y(y − αG)‖/α ≤ tol · ‖G(y₀)‖; with α = None the
solver chooses its step size (`fedstrata.estimators.vi`). Theorem 2 asks for α = μ/L² and
τ ≥ −1/ln(1 − 1/κ²), κ = L/μ.

Clients send the residual along with their reply, as two numbers. The history has it as ``lower_residual``,
and a warning says if the equilibria were not found. With τ the residual may be large at first, so only the
last step counts. With τ, and with a given solution or solver, the residual uses α = ‖y − y₀‖/‖G(y) − G(y₀)‖;
the values of G for it are not counted, like those of metrics.

Without local sets the server can replay line 6 from H scalars (``messages="scalars"``), as in
`fedstrata.methods.fedrzo`.

Reveals only averages; with scalars, every reply. Needs function values, and values of the followers' map G.
The result's ``y`` holds each client's mean response to its last samples, at the x of its last step;
two-sided, it is the mean of the responses at x ± v, which differs by O(η²).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core import tree
from fedstrata.core.client import Client, steps_of
from fedstrata.core.counting import count, loop
from fedstrata.core.fed import Fed, Remember
from fedstrata.core.method import (
    BatchSize,
    Count,
    LocalSteps,
    Moment,
    NonNegative,
    Positive,
    Reveals,
    by_options,
    method,
)
from fedstrata.core.types import Array, Function, Integer, Key, PyTree, Real
from fedstrata.estimators import vi
from fedstrata.estimators.sphere import check_directions, combine, points, scalars, theory_steps
from fedstrata.methods._shared.two_point import Replayed
from fedstrata.methods._shared.zeroth import by_values
from fedstrata.problems.classes import MPEC
from fedstrata.problems.measured import Conditions, Practical

WORST = 1e30  # replaces a residual that is not finite
STIFF, DENSE = 100.0, 200  # the least condition number, and the most entries of y, for Newton's method
LARGE = 0.1  # the relative residual that t_k steps should reach by the end
Solver = Callable[[Function, Function, PyTree], PyTree]
Lower = (
    Literal["projection", "extragradient", "accelerated", "newton", "solution"]
    | Annotated[Solver, "a function (G, project, y) -> y"]
)


class State(NamedTuple):
    """The server's iterate, the number of local steps so far, and how well the equilibria were solved."""

    x: PyTree  # x̂
    k: jax.Array
    quality: jax.Array  # the clients' mean of `Walk.quality` in the last round


class Memory(NamedTuple):
    """A client's mean response, and the response to start from."""

    y: PyTree
    y0: PyTree


class Walk(NamedTuple):
    """The carry of the local steps.

    The point, the samples' starts, the mean response, the scalars; and a pair, the last relative residual and
    the number of steps in which it stayed large (with τ: whether it did in the last).
    """

    x: PyTree
    start: PyTree
    y: PyTree
    scalars: jax.Array
    quality: jax.Array


@method
class FedRZOTwoStage(Replayed[MPEC, State]):
    """``H`` local steps of size ``gamma`` along two-point estimates of radius ``eta``, at equilibria.

    Args:
        gamma: the step size γ.
        eta: the smoothing radius η.
        H: local steps per round.
        lower: ``"extragradient"`` (for any monotone G); ``"projection"`` (the paper's, for a strongly
            monotone G); ``"accelerated"`` (for a potential game); ``"newton"`` (for any condition number, if
            G has derivatives and y is small); ``"solution"`` (the problem's closed form); or a function
            ``(G, project, y) -> y``.
        alpha: the solver's step size α; None chooses one.
        tau: the factor τ in t_k = ⌈τ ln(k+1)⌉ solver steps; None stops by ``tol``.
        pace: t_k = ⌈τ ln(pace·k + 1)⌉; with m clients, ``pace=m`` lets k count the steps of all clients.
        tol: the residual at which to stop, relative to ‖G‖ at ``y0``. A given solution or solver that leaves
            ten times as much, and more than rounding does, raises a warning.
        max_steps: the largest number of solver steps without ``tau``.
        warm_start: whether to start from the last response instead of ``y0``, the paper's choice.
        batch_size: samples per function value, each with its own equilibrium; None uses all.
        messages: ``"vectors"``, or ``"scalars"`` if no client has a set.
        two_sided: use ``n/(2η²) (f(x+v) − f(x−v)) v`` in line 5. Its mean is ∇f^η too, but the even part of f
            cancels, whose noise of order η does not vanish at the solution.
        directions: the number of directions v per step; g averages their estimates.
        orthogonal: whether the directions of a step are orthogonal.
    """

    gamma: Positive  # γ
    eta: Positive  # η
    H: LocalSteps = 1
    lower: Lower = "extragradient"
    alpha: Positive | None = None  # α
    tau: NonNegative | None = None  # τ
    tol: Positive = 1e-6
    max_steps: Count = vi.MAX_STEPS
    warm_start: bool = False
    batch_size: BatchSize = 1
    messages: Literal["vectors", "scalars"] = "vectors"
    two_sided: bool = False
    directions: Count = 1
    orthogonal: bool = False
    pace: Positive = 1.0

    solves = (MPEC,)
    needs = "function values, values of the followers' map"

    @classmethod
    def from_theory(
        cls,
        *,
        K: int,
        clients: int,
        mu: float,
        L: float,
        eta: float = 0.1,
        L0: float | None = None,
        n: int = 1,
        B2: float = 1.0,
        **options: Any,
    ) -> FedRZOTwoStage:
        """The rules of Theorem 2: γ = √(m/K), H = ⌈(K/m³)^¼⌉, α = μ/L², τ = −1/ln(1 − 1/κ²), κ = L/μ.

        Args:
            K: local steps of a client in total; run ``rounds = ⌈K/H⌉``.
            clients: the number of clients m.
            mu: the modulus μ of strong monotonicity of the followers' map.
            L: the Lipschitz constant of the followers' map.
            eta: the smoothing radius η.
            L0: the Lipschitz constant of the implicit objective. If given, γ is kept below the theorem's
                bounds 1/(12√6 H B₂√Θ₂), Θ₂ = 5(L₀n + 1)²/(8η²), and η/(16(L₀n + 1)), and below Lemma 13's
                1/(√24 H), which the theorem omits; for large K all of them hold anyway.
            n: the dimension of x, for that bound.
            B2: B₂ of the sets' dissimilarity, mean dist²(x, X_i) ≤ B₁² + B₂² ‖x − mean P_{X_i}(x)‖², for that
                bound: 1 if all clients share one set, 0 without sets.
            **options: other hyper-parameters.

        >>> import fedstrata as fs
        >>> m = fs.FedRZOTwoStage.from_theory(K=2000, clients=5, mu=1.0, L=2.0)
        >>> m.gamma, m.H, m.alpha, round(m.tau, 3)
        (0.05, 2, 0.25, 3.476)
        """
        if not 0 < mu <= L:
            raise ValueError(f"FedRZOTwoStage.from_theory needs 0 < mu ≤ L, but mu={mu}, L={L}.")
        gamma, H = theory_steps(K, clients)
        if L0 is not None:
            gamma = min(gamma, eta / (16 * (L0 * n + 1)), 1 / (math.sqrt(24) * H))
            if B2 > 0:
                gamma = min(gamma, eta / (12 * math.sqrt(6 * 5 / 8) * H * B2 * (L0 * n + 1)))
        tau = -1 / math.log1p(-((mu / L) ** 2)) if mu < L else 1.0
        rules: dict[str, Any] = {"lower": "projection", "alpha": mu / L**2, "tau": tau}
        return cls(gamma, eta, H, **{**rules, **options})

    @by_options
    def reveals_on(self, problem: MPEC) -> Reveals:
        return "replies" if self.messages == "scalars" else "averages"

    def cautions(self, moment: Moment) -> list[str]:
        return super().cautions(moment) + self._of_the_followers(moment)

    def check(self, problem: MPEC, clients: int) -> None:
        super().check(problem, clients)
        if self.lower == "solution" and problem.solution is None:
            raise ValueError("FedRZOTwoStage: lower='solution' needs MPEC(…, solution=…).")
        if self.lower == "newton" and "follower" in problem.without_derivatives:
            raise ValueError(
                "FedRZOTwoStage: lower='newton' needs derivatives of the followers' map, which has values "
                "only. Give lower='extragradient'."
            )

    @property
    def given(self) -> bool:
        """Whether the user gave the solver of line 4."""
        return self.lower == "solution" or callable(self.lower)

    @property
    def timed(self) -> bool:
        """Whether the solver takes t_k steps."""
        return self.tau is not None and not self.given

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """By `fedstrata.methods._shared.zeroth` on F(x) = f(x, y(x)), at equilibria of all samples.

        Newton's method finds them if extragradient steps would be many, and y is not large.
        """
        kappa = at["follower"].condition
        options, rate, reasons, fades = by_values(at, at.F, own=True, condition=kappa)
        if kappa > STIFF and at.dimension_y <= DENSE and "follower" not in at.problem.without_derivatives:
            options |= {"lower": "newton"}
            reasons = (*reasons, f"Newton's method for followers of condition {kappa:.2g}")
        return Practical(cls(batch_size=None, **options), rate, reasons, fades)

    def init(self, problem: MPEC, x0: PyTree, y0: PyTree) -> State:
        check_directions("FedRZOTwoStage", self.directions, self.orthogonal, x0)
        return State(x0, jnp.int32(0), jnp.array([1.0, 0.0]))

    def metrics(self, state: State) -> dict[str, jax.Array]:
        """The residual of the last equilibria, relative to that at ``y0``."""
        return {"lower_residual": state.quality[0]}

    def _of_the_followers(self, moment: Moment) -> list[str]:
        """A warning if the followers' equilibria were not found in the last round."""
        if not moment.ended or not moment.state.quality[1] > 0:
            return []
        residual = float(moment.state.quality[0])
        name = "your solver" if callable(self.lower) else f"lower={self.lower!r}"
        told = f"FedRZOTwoStage: in the last round {name} did not find the followers' equilibria"
        end = f"their residual was {residual:.2g} times that at y0. x and y may be wrong."
        if self.timed:
            return [
                f"{told} in the number of steps that tau={float(np.asarray(self.tau)):g} gives: {end} Give a "
                "larger tau, or leave it out: the solver then stops by its residual."
            ]
        if self.given:
            return [
                f"{told} to ten times tol={self.tol:g}: {end} Check that it solves the variational "
                "inequality at every x and takes enough steps. If its accuracy is good enough for you, give "
                "a larger tol."
            ]
        other = "" if self.lower == "extragradient" else " (lower='extragradient' needs no more than that)"
        return [
            f"{told} to tol={self.tol:g} within max_steps={self.max_steps}: {end} Check that the followers' "
            f"map is monotone in y{other}, and give a larger max_steps or a smaller alpha. In float32, "
            "rounding may be the limit."
        ]

    def memory(self, problem: MPEC, x0: PyTree, y0: PyTree) -> Memory:
        return Memory(y0, y0)

    def output(self, state: State, memory: Memory) -> tuple[PyTree, PyTree]:
        return state.x, memory.y

    def respond(
        self, problem: MPEC, x: PyTree, start: PyTree, y0: PyTree, samples: PyTree, real: Array, k: Integer
    ) -> tuple[PyTree, Any, Array]:
        """The equilibria (line 4) at stacked points for stacked samples.

        Also returns the number of evaluations of G, and a pair: the relative residual, and whether it is too
        large. All equilibria are solved together and stop together. Samples that are not ``real`` pad a
        client's arrays: they keep their start, so that steps and step sizes do not depend on the padding.
        """

        def everywhere(function: Function) -> Function:  # of (x, y, sample), over points and samples
            return jax.vmap(jax.vmap(function, in_axes=(None, 0, 0)), in_axes=(0, 0, None))

        def only_real(y: PyTree, other: PyTree) -> PyTree:
            def choose(a: Array, b: Array) -> Array:
                return jnp.where(real.reshape(1, -1, *[1] * (a.ndim - 2)), a, b)

            return jax.tree.map(choose, y, other)

        zero = tree.zeros_like(start)

        def G(y: PyTree) -> PyTree:
            return only_real(everywhere(problem.follower)(x, y, samples), zero)

        def project(y: PyTree) -> PyTree:
            return only_real(everywhere(lambda x, y, s: problem.project_y(y, x, s))(x, y, samples), zero)

        lower, solution = self.lower, problem.solution
        begin, at_y0 = only_real(start, zero), G(y0)
        scale = tree.norm(at_y0)

        def measured(y: PyTree) -> Array:  # with its own α, because the solver's may have any size
            away = tree.sub(y, only_real(y0, zero))
            alpha = vi.secant_step(away, tree.sub(G(y), at_y0))
            residual = vi.residual(G, project, y, alpha) / alpha
            rounding = 4 * jnp.finfo(residual.dtype).eps
            # the start may be so good that no residual is small relative to that of the start
            still = jnp.where(tree.norm(away) > 0, jnp.maximum(self.tol, rounding), rounding)
            return self.judged(residual, scale, still * tree.norm(y) / alpha)

        if self.given:

            def given_response(x: PyTree, y: PyTree, s: PyTree) -> PyTree:
                if callable(lower):
                    return lower(lambda y: problem.follower(x, y, s), lambda y: problem.project_y(y, x, s), y)
                assert solution is not None  # `check` ensures it
                return solution(x, s)

            y = only_real(everywhere(given_response)(x, start, samples), zero)
            return only_real(y, start), 0, measured(y)
        options: vi.Options = {"alpha": self.alpha, "tol": self.tol, "max_steps": self.max_steps}
        if self.tau is not None:
            k_steps = jnp.ceil(self.tau * jnp.log1p(self.pace * jnp.asarray(k, float))).astype(jnp.int32)
            options = {"alpha": self.alpha, "steps": k_steps}
        if lower == "newton":
            solved = self.one_by_one(problem, x, begin, samples, real, scale, options)
        else:
            # the same probe at every point and sample, so that their number does not matter
            probe = jax.tree.map(lambda leaf: jnp.broadcast_to(vi.uneven(leaf[0, 0]), leaf.shape), start)
            solver = vi.SOLVERS[lower]  # type: ignore[index]
            solved = solver(G, project, begin, **{**options, "probe": only_real(probe, zero), "scale": scale})
        if self.tau is not None:
            return only_real(solved.y, start), solved.values, measured(solved.y)
        return only_real(solved.y, start), solved.values + 1, self.judged(solved.residual, scale)

    def one_by_one(
        self,
        problem: MPEC,
        x: PyTree,
        start: PyTree,
        samples: PyTree,
        real: Array,
        scale: Array,
        options: vi.Options,
    ) -> vi.Solution:
        """Newton's method for each inequality separately, whose Jacobian is in its own y only."""
        share = scale / jnp.sqrt(jnp.maximum(real.sum(), 1) * len(jax.tree.leaves(x)[0]))
        options = {**options, "scale": share}

        def one(x: PyTree, y: PyTree, sample: PyTree, real: Array) -> vi.Solution:
            def G(y: PyTree) -> PyTree:
                return tree.scale(real, problem.follower(x, y, sample))

            return vi.newton(G, lambda y: problem.project_y(y, x, sample), y, **options)

        every = jax.vmap(jax.vmap(one, in_axes=(None, 0, 0, 0)), in_axes=(0, 0, None, None))
        found = every(x, start, samples, real.astype(scale.dtype))
        residual = jnp.sqrt(jnp.sum(found.residual**2 * real))
        return found._replace(values=found.values.max(), residual=residual)

    def judged(self, residual: Array, scale: Array, small: Real = 0.0) -> Array:
        """The residual relative to ``scale``, and whether it exceeds both the tolerance and ``small``."""
        relative = residual / jnp.where(scale > 0, scale, 1)
        enough = jnp.maximum(10 * self.tol, jnp.sqrt(jnp.finfo(relative.dtype).eps))
        if self.timed:
            enough = jnp.maximum(LARGE, enough)
        large = ~((relative <= enough) | (residual <= small))
        quality = jnp.stack([jnp.nan_to_num(relative, nan=WORST, posinf=WORST), large])
        return quality.astype(jnp.result_type(float))

    def walk(self, problem: MPEC, client: Client, key: Key, x: PyTree, k: Integer) -> Walk:
        """The local steps."""
        length = client.train.rows if self.batch_size is None else self.batch_size
        ends = 2 * self.directions if self.two_sided else 1 + self.directions

        def spread(y: PyTree, *shape: int) -> PyTree:
            return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (*shape, *leaf.shape)), y)

        y0 = spread(client.memory.y0, ends, length)

        def step(walk: Walk, key: Key, h: Integer) -> Walk:
            key_xi, key_v = jax.random.split(key)
            f = client.mean(problem.leader, key_xi, self.batch_size)  # line 3
            v = self.draw(key_v, walk.x)
            z, weights = points(walk.x, v, self.two_sided), f.weigh()
            starts = spread(walk.start, ends)
            y, values, quality = self.respond(problem, z, starts, y0, f.samples, weights > 0, k + h)  # line 4
            each = jax.vmap(jax.vmap(problem.leader, in_axes=(None, 0, 0)), in_axes=(0, 0, None))(
                z, y, f.samples
            )
            f.book("values", ends)
            count("values", ends, values * f.size)
            s = scalars(each @ weights.astype(each.dtype), tree.dimension(x), self.eta, self.two_sided)
            x_new = self.descend(problem, client, walk.x, s, v)  # lines 5, 6
            y = jax.tree.map(lambda leaf: leaf.mean(0) if self.two_sided else leaf[0], y)
            mean = combine(weights, y)
            start = walk.start
            if self.warm_start:  # a full batch meets the same samples again
                start = y if self.batch_size is None else spread(mean, length)
            kept = walk.scalars
            if self.messages == "scalars":
                kept = kept.at[h].set(s.astype(kept.dtype))
            if not self.timed:
                quality = quality.at[1].add(walk.quality[1])
            return Walk(x_new, start, mean, kept, quality)

        steps = self.H if self.messages == "scalars" else 0
        kept = jnp.zeros((steps, self.directions), jnp.result_type(*jax.tree.leaves(x)))
        start = client.memory.y if self.warm_start else client.memory.y0
        begin = Walk(x, spread(start, length), client.memory.y, kept, jnp.zeros((2,)))
        return loop(steps_of(self.H, client), step, key, begin, indexed=True)  # line 2

    def local_steps(self, problem: MPEC, client: Client, key: Key, x: PyTree, k: Integer = 0) -> Remember:
        walk = self.walk(problem, client, key, x, k)
        return Remember((walk.x, walk.quality), Memory(walk.y, client.memory.y0))

    def local_scalars(self, problem: MPEC, client: Client, key: Key, x: PyTree, k: Integer = 0) -> Remember:
        walk = self.walk(problem, client, key, x, k)
        return Remember((walk.scalars, walk.quality), Memory(walk.y, client.memory.y0))

    def round(self, problem: MPEC, fed: Fed, key: Key, r: Integer, state: State) -> State:
        message = (state.x,) if self.tau is None else (state.x, state.k)
        k = state.k + jnp.max(jnp.asarray(self.H))
        if self.messages == "vectors":
            known = state.x, np.zeros(2, jnp.result_type(float))
            at_work = fed.at_work(self.H)
            x, quality = fed.average(self.local_steps, key, *message, weights=at_work, around=known)  # 1, 7
            return State(x, k, quality)
        replies, qualities = fed.gather(self.local_scalars, key, *message)
        x = self.replay_all(fed, key, replies, state.x)
        return State(x, k, combine(fed.cohort_weights, qualities))
