"""FedRZO_bl: randomised implicit zeroth-order federated averaging (Qiu, Shanbhag, Yousefian; Algorithm 2).

    min_x  1/m Σ_i E f_i(x, y(x), ξ)   over  ∩ X_i,
    y(x) = argmin over Y(x) of 1/m Σ_i E h_i(x, ·, ζ)

    1  server: draw v on the sphere of radius η; send x̂ and v to the clients, who keep them for the round
    2  together: y⁰ ≈ y(x̂) and y⁺ ≈ y(x̂ + v), by a federated solver that does both in the same exchanges
    3  server: send y⁰, y⁺
    4  client i, H times from x = x̂:
    5      draw ξ from D_i
    6      g ← n/η² (f_i(x + v, y⁺, ξ) − f_i(x, y⁰, ξ)) v
    7      x ← x − γ (g + (x − P_{X_i}(x))/η)
    8  server: x̂ ← the mean of the clients' x

y⁰ and y⁺ stay what they are through the local steps (delayed), so H steps cost one solution of the lower
level. Without local sets all steps of all clients are along v, and one number per client is enough
(``messages="scalars"``):

    1′ server: send x̂ and a seed; everyone draws v from it
    7′ client i: upload s, the sum over its steps of n/η² (f_i(x + v, y⁺, ξ) − f_i(x, y⁰, ξ))
    8′ server: x̂ ← x̂ − γ · mean(s) · v

Two-sided, line 2 is at x̂ ± v, and line 6 is n/(2η²) (f_i(x + v, y⁺, ξ) − f_i(x − v, y⁻, ξ)) v. With several
directions line 2 is at x̂ and every x̂ + v_j, still in the same exchanges, and line 6 is the mean over them.

Where not all clients take part in a round, those who do have lines 3 to 8, and lines 1 and 2 are everyone's:
the solution y_S(x̂) of a cohort's own lower level would lead x̂ to the fixed point of E f_S(x, y_S(x)),
another problem.

The paper's solvers of line 2 do many local steps between two averages, with constants that the user knows
(``lower="local_sgd"`` is its Algorithm 3). The default needs none and averages every step, until the residual
of the lower level is small: `fedstrata.methods._shared.accurate`.

Reveals what the lower level's solver reveals, by default only averages. Needs function values of the upper
level, gradients of the lower one, and by default products with its Hessian where y has no set.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core import tree
from fedstrata.core.client import Client, Samples, steps_of
from fedstrata.core.counting import each, loop
from fedstrata.core.fed import Fed, Remember
from fedstrata.core.method import (
    BatchSize,
    Count,
    Counts,
    LocalSteps,
    Method,
    Moment,
    Positive,
    Reveals,
    by_options,
    method,
)
from fedstrata.core.problem import Problem
from fedstrata.core.term import Term
from fedstrata.core.types import Integer, Key, PyTree
from fedstrata.estimators.curvature import hessian_product
from fedstrata.estimators.sphere import check_directions, combine, directions, points, scalars, theory_steps
from fedstrata.methods._shared.accurate import BUDGET, Accurate, LowerReport
from fedstrata.methods._shared.lower import (
    TUNED,
    WORST,
    Constants,
    LowerSolver,
    PointwiseFed,
    clipped,
    estimate_constants,
    lower_level,
    lower_levels,
    one_point,
    pointwise,
    solve_pointwise,
    spread,
    whole,
)
from fedstrata.methods._shared.pull import overshooting
from fedstrata.methods._shared.rounding import lost_in_rounding
from fedstrata.methods._shared.zeroth import by_values
from fedstrata.problems.classes import Bilevel, Minimax, Minimization
from fedstrata.problems.conversions import as_bilevel
from fedstrata.problems.measured import Conditions, Practical

Implicit = Bilevel | Minimax
Lower = (
    Literal["accurate", "local_sgd", "fedac", "lfd"]
    | Annotated[Method, "a method for Minimization"]
    | Annotated[LowerSolver, "an object with solve(problem, fed, key, r, x, y)"]
)


SOLVED, EXCHANGES = 1e-4, 50.0  # in `FedRZOBilevel.practical`: lower_tol, and about what a round takes


class State(NamedTuple):
    """The server's iterate, the lower level's solution, where that starts, and what was estimated of it."""

    x: PyTree  # x̂
    y: PyTree  # y⁰ of the last round
    y0: PyTree
    constants: tuple[jax.Array, jax.Array] | None  # μ_h and κ_h, where a rule needs them and nobody gave them
    report: LowerReport | None  # of the accurate solver


@method
class FedRZOBilevel(Method[Implicit, State]):
    """``H`` local steps along a shared two-point estimate of the implicit objective.

    The result's ``y`` is the lower-level solution at the x̂ with which the last round began.

    Args:
        gamma: step size γ.
        eta: smoothing radius η.
        H: local steps.
        batch_size: samples per function value of the upper level; None for all.
        lower: the lower level's solver: ``"accurate"``, until the residual is small, however the clients
            differ (see `fedstrata.methods._shared.accurate`); ``"local_sgd"``, ``"fedac"``, ``"lfd"`` with
            the papers' rules (see `fedstrata.methods._shared.lower`); a method for `Minimization` with
            hyper-parameters of its own, e.g. ``fs.FedAvg(0.1, H=5)``, whose schedules count the lower level's
            rounds; or an object with ``solve`` (see `fedstrata.methods._shared.lower.LowerSolver`).
        lower_rounds: exchanges of the lower level per round: a number or a function of the round. To
            ``"accurate"`` it is the most that it may take, None is 1000. A rule's local steps are divided
            among them, None is the rule's own number.
        lower_tol: when ``"accurate"`` has the lower level's solutions well enough: their error, in parts of
            how far those of a round's points lie apart.
        lower_batch_size: samples per gradient of the lower level. ``"rule"``: all of them for ``"accurate"``,
            ``batch_size`` for the papers' rules, as is ``"same"``.
        warm_start: start the lower level from the last round's solution, and not from y0, as in the paper;
            None: ``"accurate"`` does, the others do not.
        mu_h: modulus μ_h of strong convexity of the lower level, for the papers' rules. None: it and κ_h are
            estimated before the first round, from the curvature at the start; 40 exchanges, the ledger's
            level ``"scaling"``. They stay what they were there, wherever x goes.
        kappa_h: condition number κ_h of the lower level, for the papers' rules.
        messages: ``"vectors"``, or ``"scalars"`` where there is no local set.
        two_sided: whether to use x̂ + v and x̂ − v.
        directions: how many v are drawn in a round.
        orthogonal: whether they are orthogonal.
        common_random_numbers: whether the lower level draws the same samples at all points. With independent
            ones the noise of y⁺ − y⁰ is divided by η.
    """

    gamma: Positive  # γ
    eta: Positive  # η
    H: LocalSteps = 1
    batch_size: BatchSize = 1
    lower: Lower = "accurate"
    lower_rounds: Counts | None = None
    lower_tol: Positive = 1e-3
    lower_batch_size: BatchSize | Literal["rule", "same"] = "rule"
    warm_start: bool | None = None
    mu_h: Positive | None = None  # μ_h
    kappa_h: Positive | None = None  # κ_h
    messages: Literal["vectors", "scalars"] = "vectors"
    two_sided: bool = False
    directions: Count = 1
    orthogonal: bool = False
    common_random_numbers: bool = True

    solves: ClassVar[tuple[type[Problem], ...]] = (Bilevel,)
    sums_steps: ClassVar[str | None] = "H"
    needs = "function values of the upper level, gradients of the lower (and Hessian products, by default)"
    linear = frozenset({"lower", "scaling"})

    @classmethod
    def differentiates(cls, problem: Implicit) -> tuple[str, ...]:
        return ("lower", "payoff")

    @classmethod
    def from_theory(
        cls,
        *,
        K: int,
        clients: int,
        eta: float = 0.1,
        L0: float | None = None,
        n: int = 1,
        mu_h: float | None = None,
        kappa_h: float | None = None,
        L0_y: float | None = None,
        L_hx: float | None = None,
        B2: float = 1.0,
        **options: Any,
    ) -> FedRZOBilevel:
        """The rules of Theorem 1: γ = √(m/K), H = ⌈(K/m³)^¼⌉, and Algorithm 3's schedule for the lower level.

        Args:
            K: local steps in total; run ``rounds = ⌈K/H⌉``.
            clients: their number m.
            eta: smoothing radius η.
            L0: Lipschitz constant of the implicit objective. Where it is given, γ is kept below the theorem's
                bounds, which hold by themselves once K is large: η/(24(L₀n + 1)) and 1/(4H max{2, √(0.1Θ₃),
                4B₂√(3Θ₂), 4B₂√(3Θ₃)}), Θ₂ = 5(L₀n + 1)²/(8η²), Θ₃ = 20 (n L_hx L0_y/(η μ_h))².
            n: dimension of x, for that bound.
            mu_h: modulus of strong convexity of the lower level; None: estimated.
            kappa_h: its condition number.
            L0_y: Lipschitz constant of f in y, for that bound.
            L_hx: Lipschitz constant of ∇_y h in x, for that bound, which takes L_hx/μ_h for that of y(x).
                Where a set Y(x) moves that is wrong: give μ_h times the Lipschitz constant of y(x) then.
            B2: B₂ of the sets' dissimilarity, mean dist²(x, X_i) ≤ B₁² + B₂² ‖x − mean P_{X_i}(x)‖², for that
                bound; 1 where all clients have one set, 0 where there is none.
            options: further hyper-parameters.
        """
        gamma, H = theory_steps(K, clients)
        if L0 is not None:
            if mu_h is None or L0_y is None or L_hx is None:
                raise ValueError(
                    f"{cls.__name__}.from_theory: the bound with L0 needs mu_h, L0_y and L_hx too."
                )
            theta_2 = 5 * (L0 * n + 1) ** 2 / (8 * eta**2)  # Θ₂
            theta_3 = 20 * (n * L_hx * L0_y / (eta * mu_h)) ** 2  # Θ₃
            sets = 4 * B2 * math.sqrt(3 * max(theta_2, theta_3))
            slowest = max(2, math.sqrt(0.1 * theta_3), sets)
            gamma = min(gamma, 1 / (4 * H * slowest), eta / (24 * (L0 * n + 1)))
        options = {"lower": "local_sgd", **options}
        return cls(gamma, eta, H, mu_h=mu_h, kappa_h=kappa_h, **options)

    @by_options
    def reveals_on(self, problem: Implicit) -> Reveals:
        if isinstance(self.lower, str):
            return "averages"
        if isinstance(self.lower, Method):
            return self.lower.reveals_on(Minimization(lambda y, sample: 0.0))
        return "replies"  # a solver of the user's may gather

    def cautions(self, moment: Moment) -> list[str]:
        told = overshooting(self, moment) + lost_in_rounding(self, "eta", moment)
        return super().cautions(moment) + told + self._of_the_constants(moment) + self._of_the_lower(moment)

    def check(self, problem: Implicit, clients: int) -> None:
        """Whether the options fit each other and the problem."""
        name = type(self).__name__
        super().check(problem, clients)
        if self.messages == "scalars" and not problem.project_x.trivial:
            raise ValueError(
                f"{name}: with local sets the steps are not along v alone; use messages='vectors'."
            )
        if (self.mu_h is None) != (self.kappa_h is None):
            raise ValueError(f"{name}: give both mu_h and kappa_h, or neither, to have them estimated.")
        if self.accurate and self.mu_h is not None:
            raise ValueError(
                f"{name}: mu_h and kappa_h are for the papers' rules; name one, as lower='local_sgd', or "
                "leave them out: lower='accurate' needs no constants."
            )
        if self.accurate and problem.project_y.arity > 2:
            raise ValueError(
                f"{name}: lower='accurate' needs one set of y for all clients, and this problem's depends on "
                "the client. Use lower='lfd', 'local_sgd' or 'fedac', which average the clients' projections."
            )
        if isinstance(self.lower, Method):
            self._check_method(name, self.lower, clients)
        elif not isinstance(self.lower, str) and self.lower_rounds is not None:
            raise ValueError(f"{name}: lower_rounds means nothing to a solver of your own; leave it out.")

    def _check_method(self, name: str, lower: Method, clients: int) -> None:
        solver = type(lower).__name__
        if Minimization not in lower.solves:
            raise ValueError(f"{name}: lower={solver} does not solve Minimization.")
        level = Minimization(lambda y, sample: 0.0)
        if lower.memory(level, np.zeros(1), None) is not None or lower.starts():
            raise ValueError(
                f"{name}: lower={solver} needs clients that remember, and the lower level starts afresh in "
                "every round, at points where they have nothing to remember. Against drift there is "
                "lower='accurate'; FedAvg, FedAC and LFD remember nothing."
            )
        if self.lower_rounds is None:
            raise ValueError(f"{name}: say how many rounds of {solver} the lower level gets: lower_rounds=….")
        lower.check(level, clients)

    def bilevel(self, problem: Implicit) -> Bilevel:
        """The problem as a bilevel one: a payoff above, its negative below."""
        return as_bilevel(problem)

    def samples(self, problem: Implicit, client: Client) -> Samples:
        """Where the upper level draws; a payoff's levels are one, and draw alike."""
        return client.valid if isinstance(problem, Bilevel) else client.train

    @property
    def accurate(self) -> bool:
        """Whether the lower level is solved by its residual."""
        return self.lower == "accurate"

    @property
    def solver(self) -> Any:
        """The lower level's solver; for a rule, one whose hyper-parameters the rule will replace."""
        if not isinstance(self.lower, str):
            return self.lower
        size: Any = self.lower_batch_size
        if self.accurate:
            size = {"rule": None, "same": self.batch_size}.get(size, size)
            return Accurate(self.lower_tol, size)
        return TUNED[self.lower].solver(self.batch_size if size in ("rule", "same") else size)

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """By `fedstrata.methods._shared.zeroth` on F(x) = f(x, y(x)), with the accurate lower solver."""
        options, rate, reasons, fades = by_values(at, at.F, own=False)
        its = cls(batch_size=None, lower_tol=SOLVED, **options)
        return Practical(its, rate, reasons, fades, cost=EXCHANGES)

    def init(self, problem: Implicit, x0: PyTree, y0: PyTree) -> State:
        """Nothing is solved yet."""
        check_directions(type(self).__name__, self.directions, self.orthogonal, x0)
        one: Any = np.ones((), jnp.result_type(*jax.tree.leaves(y0)))
        report = LowerReport.blank(y0) if self.accurate else None
        return State(x0, y0, y0, (one, one) if self.estimates else None, report)

    @property
    def estimates(self) -> bool:
        """Whether a rule needs μ_h and κ_h, and nobody gave them."""
        return isinstance(self.lower, str) and not self.accurate and self.mu_h is None

    def start(self, problem: Implicit, fed: Fed, key: Key, state: State) -> State:
        """Measure the residual at the start; or estimate μ_h and κ_h, where they are needed."""
        if self.accurate:
            bilevel, (x, y) = self.bilevel(problem), (one_point(state.x), one_point(state.y))
            with fed.level("lower"):
                g = fed.average(self.lower_gradient, key, state.x, state.y)
            return state._replace(report=self.solver.first_look(lower_levels(bilevel, x), one_point(g), y))
        if not self.estimates:
            return state

        def product(v: PyTree) -> PyTree:
            return fed.average(self.curve, key, state.x, state.y, v)

        with fed.level("scaling"):
            found = estimate_constants(product, fed.repeat, key, one_point(state.y))
        return state._replace(
            constants=jax.tree.map(lambda new, old: new.astype(old.dtype), found, state.constants)
        )

    def lower_gradient(self, problem: Implicit, client: Client, key: Key, x: PyTree, y: PyTree) -> PyTree:
        """``∇_y h_i(x, y)``."""
        return self.solver.gradients(lower_level(self.bilevel(problem), x), client, key, y)

    def _of_the_constants(self, moment: Moment) -> list[str]:
        """Where the curvature at the start is not within what the rules' estimates can tell."""
        started = moment.state is not None and not moment.ended and moment.state.constants is not None
        if not started or not clipped(moment.state.constants[1]):
            return []
        return [
            f"{type(self).__name__}: the lower level's condition number at the start is {WORST} or more, and "
            f"lower={self.lower!r} goes on as if it were {WORST}, so that its y will be off. Give mu_h and "
            "kappa_h, or use lower='accurate'."
        ]

    def metrics(self, state: State) -> dict[str, jax.Array]:
        """The residual of the last round's lower level, where it is measured."""
        return {} if state.report is None else {"lower_residual": state.report.residual}

    def _of_the_lower(self, moment: Moment) -> list[str]:
        """Where the lower level was not solved, in more than one round of a hundred."""
        state = moment.state
        if not moment.ended or state.report is None or 100 * state.report.short <= state.report.rounds:
            return []
        most = BUDGET if self.lower_rounds is None else self.lower_rounds
        within = f" within lower_rounds={most} exchanges" if isinstance(most, int) else ""
        return [
            f"{type(self).__name__}: in {int(state.report.short)} of {int(state.report.rounds)} rounds the "
            f"lower level was not solved to lower_tol={self.lower_tol:g}{within}; its residual was "
            f"{float(state.report.residual):.2g} at the end. x and y may be wrong. Give more lower_rounds; "
            "look whether the lower level is strongly convex in y; in float32 and with a small eta rounding "
            "is the limit: use float64 or a larger eta."
        ]

    def curve(self, problem: Implicit, client: Client, key: Key, x: PyTree, y: PyTree, v: PyTree) -> PyTree:
        """``∇²_yy h_i(x, y) v`` for stacked directions."""
        loss = Term.of(lower_level(self.bilevel(problem), x).loss)
        whole_client = loss.reads == "sample"
        h = client.train.mean(loss, key, None if whole_client else self.solver.batch_size)
        return each(lambda v: hessian_product(h, y, v), v)

    def memory(self, problem: Implicit, x0: PyTree, y0: PyTree) -> PyTree:
        """x̂ and the directions of the round, at every client."""
        return x0, jax.tree.map(lambda leaf: np.zeros((self.directions, *leaf.shape), leaf.dtype), x0)

    def draw(self, seed: jax.Array, x: PyTree) -> PyTree:
        """The directions of a round, stacked."""
        return directions(jax.random.wrap_key_data(seed), x, self.eta, self.directions, self.orthogonal)

    def keep(self, problem: Implicit, client: Client, key: Key, x: PyTree, v: PyTree) -> Remember:
        """Line 1; no reply is needed."""
        return Remember((), (x, self.draw(v, x) if self.messages == "scalars" else v))

    def at_points(
        self,
        problem: Implicit,
        client: Client,
        key: Key,
        values: dict[str, Any],
        *message: PyTree,
        phase: str,
    ) -> PyTree:
        """Line 2: one phase of the lower level's solver, at all points."""
        solver = self.solver.replaced(values) if values else self.solver
        x, v = client.memory
        return pointwise(
            getattr(solver, phase),
            self.bilevel(problem),
            client,
            key,
            points(x, v, self.two_sided),
            message,
            self.common_random_numbers,
        )

    def local_steps(self, problem: Implicit, client: Client, key: Key, y: PyTree) -> PyTree:
        """Lines 4 to 7; ``y`` has the solution at every point. The upload is x − x̂, or the scalars' sum."""
        bilevel = self.bilevel(problem)
        x_hat, v = client.memory
        n = tree.dimension(x_hat)

        def step(carry: tuple[PyTree, jax.Array], key: Key) -> tuple[PyTree, jax.Array]:
            x, total = carry
            f = self.samples(problem, client).mean(bilevel.upper, key, self.batch_size)  # line 5
            s = scalars(each(f, points(x, v, self.two_sided), y), n, self.eta, self.two_sided)
            pull = tree.scale(1 / self.eta, tree.sub(x, bilevel.project_x(x, client)))
            x = tree.axpy(-self.gamma, tree.add(combine(s, v), pull), x)  # lines 6, 7
            return x, total + s.astype(total.dtype)

        nothing = jnp.zeros((self.directions,), jnp.result_type(*jax.tree.leaves(x_hat)))
        x, total = loop(steps_of(self.H, client), step, key, (x_hat, nothing))  # line 4
        return tree.sub(x, x_hat) if self.messages == "vectors" else total

    def solve_lower(
        self, problem: Implicit, fed: Fed, key: Key, r: Integer, state: State, x: PyTree, y: PyTree
    ) -> tuple[PyTree, LowerReport | None]:
        """Line 2: the solutions at the points ``x``, from ``y``, and the accurate solver's report."""
        pointwise_fed = PointwiseFed(fed, self.at_points, {})
        rounds: Any = self.lower_rounds
        if rounds is not None and not isinstance(rounds, int):
            rounds = whole(rounds)
        if state.report is not None:
            levels, budget = lower_levels(self.bilevel(problem), x), BUDGET if rounds is None else rounds
            return self.solver.solve(levels, pointwise_fed.verbs, key, y, state.report, budget)
        if isinstance(self.lower, str):
            mu_h, kappa_h = state.constants or (self.mu_h, self.kappa_h)
            rounds, values = TUNED[self.lower].tune(Constants(fed.participants, r, mu_h, kappa_h, rounds))
        elif isinstance(self.lower, Method):
            values = self.lower.scheduled
        else:
            return self.lower.solve(problem, pointwise_fed.verbs, key, r, x, y), None
        bilevel = self.bilevel(problem)
        return solve_pointwise(self.solver, rounds, values, bilevel, pointwise_fed, key, x, y), None

    def round(self, problem: Implicit, fed: Fed, key: Key, r: Integer, state: State) -> State:
        """Lines 1 to 8."""
        key_v, key_keep, key_lower, key_steps = jax.random.split(key, 4)
        x, seed = state.x, jax.random.key_data(key_v)
        v = self.draw(seed, x)
        where = points(x, v, self.two_sided)
        warm = self.accurate if self.warm_start is None else self.warm_start
        start = spread(state.y if warm else state.y0, where)
        with fed.everybody():
            fed.average(self.keep, key_keep, x, seed if self.messages == "scalars" else v)  # line 1
            with fed.level("lower"):
                y, report = self.solve_lower(problem, fed, key_lower, r, state, where, start)  # line 2
        reply = fed.average(self.local_steps, key_steps, y, weights=fed.at_work(self.H))  # line 3
        moved = reply if self.messages == "vectors" else tree.scale(-self.gamma, combine(reply, v))
        return state._replace(x=tree.add(x, moved), y=self.at_centre(problem, x, y), report=report)

    def at_centre(self, problem: Implicit, x: PyTree, y: PyTree) -> PyTree:
        """The solution at x̂; two-sided, the middle of those around it, put into Y(x̂) if all share that."""
        if not self.two_sided:
            return jax.tree.map(lambda leaf: leaf[0], y)
        middle = jax.tree.map(lambda leaf: leaf.mean(0), y)
        return middle if problem.project_y.arity > 2 else problem.project_y(middle, x)
