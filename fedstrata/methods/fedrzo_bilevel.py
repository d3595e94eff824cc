"""FedRZO_bl: randomised implicit zeroth-order federated averaging (Qiu, Shanbhag, Yousefian; Algorithm 2).

    min_x  1/m Σ_i E f_i(x, y(x), ξ)   over  ∩ X_i,
    y(x) = argmin over Y(x) of 1/m Σ_i E h_i(x, ·, ζ)

    1  server: draw v on the sphere of radius η; send x̂ and v to the clients, which keep them for the round
    2  together: y⁰ ≈ y(x̂) and y⁺ ≈ y(x̂ + v), by a federated solver, both in the same exchanges
    3  server: send y⁰, y⁺
    4  client i, H times from x = x̂:
    5      draw ξ from D_i
    6      g ← n/η² (f_i(x + v, y⁺, ξ) − f_i(x, y⁰, ξ)) v
    7      x ← x − γ (g + (x − P_{X_i}(x))/η)
    8  server: x̂ ← the mean of the clients' x

y⁰ and y⁺ are held constant during the local steps (delayed), so H steps cost one solution of the lower level.
Without local sets every client's steps are multiples of v, and one number per client is enough
(``messages="scalars"``):

    1′ server: send x̂ and a seed, from which server and clients draw v
    7′ client i: upload s, the sum over its steps of n/η² (f_i(x + v, y⁺, ξ) − f_i(x, y⁰, ξ))
    8′ server: x̂ ← x̂ − γ · mean(s) · v

With two-sided differences line 2 solves at x̂ ± v, and line 6 is n/(2η²) (f_i(x + v, y⁺, ξ) −
f_i(x − v, y⁻, ξ)) v. With several directions line 2 solves at x̂ and every x̂ + v_j, still in the same
exchanges, and line 6 averages over them.

With partial participation only the cohort runs lines 3 to 8, but all clients run lines 1 and 2: solving the
cohort's own lower level, y_S(x̂), would drive x̂ to a fixed point of E f_S(x, y_S(x)), a different problem.

The paper's solvers of line 2 take many local steps between two averages and need constants from the user
(``lower="local_sgd"`` is its Algorithm 3). The default needs no constants and averages every step, until the
residual of the lower level is small: `fedstrata.methods._shared.accurate`.

Reveals what the lower level's solver reveals, by default only averages. Needs function values of the upper
level, gradients of the lower one and, by default and without a set of y, Hessian-vector products.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.core import tree
from fedstrata.core.client import Client, steps_of
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
from fedstrata.estimators.sphere import check_directions, combine, points, scalars, theory_steps
from fedstrata.methods._shared.accurate import BUDGET, Accurate, LowerReport
from fedstrata.methods._shared.lower import (
    TUNED,
    WORST,
    LowerSolver,
    PointwiseFed,
    RuleInput,
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
from fedstrata.methods._shared.two_point import TwoPoint
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


SOLVED, EXCHANGES = 1e-4, 50.0  # in `FedRZOBilevel.practical`: lower_tol, and about the exchanges of a round


class State(NamedTuple):
    """The server's iterate, the lower-level solution and its start, and estimates of the lower level."""

    x: PyTree  # x̂
    y: PyTree  # y⁰ of the last round
    y0: PyTree
    constants: tuple[jax.Array, jax.Array] | None  # μ_h and κ_h, if a rule needs them and the user gave none
    report: LowerReport | None  # of the accurate solver


@method
class FedRZOBilevel(TwoPoint[Implicit, State]):
    """``H`` local steps along a shared two-point estimate of the implicit objective.

    The result's ``y`` is the lower-level solution at the x̂ of the start of the last round.

    Args:
        gamma: the step size γ.
        eta: the smoothing radius η.
        H: local steps per round.
        batch_size: samples per function value of the upper level; None uses all.
        lower: the solver of the lower level: ``"accurate"`` iterates until the residual is small, for any
            heterogeneity (see `fedstrata.methods._shared.accurate`); ``"local_sgd"``, ``"fedac"`` and
            ``"lfd"`` follow the papers' rules (see `fedstrata.methods._shared.lower`); or a method for
            `Minimization`, e.g. ``fs.FedAvg(0.1, H=5)``, whose schedules count the rounds of the lower
            level; or an object with ``solve`` (see `fedstrata.methods._shared.lower.LowerSolver`).
        lower_rounds: exchanges of the lower level per round: a number or a function of the round. For
            ``"accurate"`` it is an upper bound, 1000 if None. A paper's rule divides its local steps among
            them; None takes the rule's own number.
        lower_tol: the error at which ``"accurate"`` stops, relative to the distance between the solutions at
            the points of a round.
        lower_batch_size: samples per gradient of the lower level. ``"rule"`` uses all for ``"accurate"`` and
            ``batch_size`` for the papers' rules; ``"same"`` is ``batch_size``.
        warm_start: whether the lower level starts from the last round's solution instead of y0, the paper's
            choice; None: with ``"accurate"`` only.
        mu_h: the modulus μ_h of strong convexity of the lower level, for the papers' rules. None estimates
            μ_h and κ_h from the curvature at the start, before the first round, in 40 exchanges (the level
            ``"scaling"`` of the ledger); the estimates are not updated as x moves.
        kappa_h: the condition number κ_h of the lower level, for the papers' rules.
        messages: ``"vectors"``, or ``"scalars"`` if no client has a set.
        two_sided: whether to use x̂ + v and x̂ − v.
        directions: the number of directions v per round.
        orthogonal: whether the directions of a round are orthogonal.
        common_random_numbers: whether the lower level draws the same samples at all points. With independent
            samples the noise of y⁺ − y⁰ is divided by η.
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
            clients: the number of clients m.
            eta: the smoothing radius η.
            L0: the Lipschitz constant of the implicit objective. If given, γ is kept below the theorem's
                bounds, which hold anyway for large K: η/(24(L₀n + 1)) and 1/(4H max{2, √(0.1Θ₃),
                4B₂√(3Θ₂), 4B₂√(3Θ₃)}), Θ₂ = 5(L₀n + 1)²/(8η²), Θ₃ = 20 (n L_hx L0_y/(η μ_h))².
            n: the dimension of x, for that bound.
            mu_h: the modulus of strong convexity of the lower level; None estimates it.
            kappa_h: the condition number of the lower level.
            L0_y: the Lipschitz constant of f in y, for that bound.
            L_hx: the Lipschitz constant of ∇_y h in x, for that bound, which takes L_hx/μ_h as the Lipschitz
                constant of y(x). If Y(x) depends on x, give μ_h times the Lipschitz constant of y(x).
            B2: B₂ of the sets' dissimilarity, mean dist²(x, X_i) ≤ B₁² + B₂² ‖x − mean P_{X_i}(x)‖², for that
                bound: 1 if all clients share one set, 0 without sets.
            options: other hyper-parameters.
        """
        gamma, H = theory_steps(K, clients)
        if L0 is not None:
            if mu_h is None or L0_y is None or L_hx is None:
                raise ValueError(f"{cls.__name__}.from_theory: with L0, give mu_h, L0_y and L_hx too.")
            theta_2 = 5 * (L0 * n + 1) ** 2 / (8 * eta**2)  # Θ₂
            theta_3 = 20 * (n * L_hx * L0_y / (eta * mu_h)) ** 2  # Θ₃
            sets = 4 * B2 * math.sqrt(3 * max(theta_2, theta_3))
            slowest = max(2, math.sqrt(0.1 * theta_3), sets)
            gamma = min(gamma, 1 / (4 * H * slowest), eta / (24 * (L0 * n + 1)))
        options = {"lower": "local_sgd", **options}
        return cls(gamma, eta, H, mu_h=mu_h, kappa_h=kappa_h, **options)

    @by_options
    def reveals_on(self, problem: Implicit) -> Reveals:
        match self.lower:
            case str():
                return "averages"
            case Method():
                return self.lower.reveals_on(Minimization(lambda y, sample: 0.0))
        return "replies"  # a user's own solver may gather

    def cautions(self, moment: Moment) -> list[str]:
        return super().cautions(moment) + self._of_the_constants(moment) + self._of_the_lower(moment)

    def check(self, problem: Implicit, clients: int) -> None:
        """Whether the options fit each other and the problem."""
        name = type(self).__name__
        super().check(problem, clients)
        if (self.mu_h is None) != (self.kappa_h is None):
            raise ValueError(f"{name}: give both mu_h and kappa_h, or neither, to have them estimated.")
        if self.accurate and self.mu_h is not None:
            raise ValueError(
                f"{name}: lower='accurate' takes no constants, but mu_h and kappa_h are given. Leave them "
                "out, or choose a paper's rule such as lower='local_sgd'."
            )
        if self.accurate and problem.project_y.arity > 2:
            raise ValueError(
                f"{name}: lower='accurate' needs one set of y for all clients, but here the set depends on "
                "the client. Use lower='lfd', 'local_sgd' or 'fedac', which average the clients' projections."
            )
        match self.lower:
            case str():
                pass
            case Method():
                self._check_method(name, self.lower, clients)
            case _ if self.lower_rounds is not None:
                raise ValueError(f"{name}: lower_rounds has no effect with your own solver; leave it out.")

    def _check_method(self, name: str, lower: Method, clients: int) -> None:
        solver = type(lower).__name__
        if Minimization not in lower.solves:
            raise ValueError(f"{name}: lower={solver} does not solve Minimization.")
        level = Minimization(lambda y, sample: 0.0)
        if lower.memory(level, np.zeros(1), None) is not None or lower.starts():
            raise ValueError(
                f"{name}: lower={solver} needs clients with memory, but the lower level restarts in every "
                "round, at new points. Use FedAvg, FedAC or LFD, which need no memory, or, against client "
                "drift, lower='accurate'."
            )
        if self.lower_rounds is None:
            raise ValueError(f"{name}: lower={solver} needs a number of rounds; give lower_rounds.")
        lower.check(level, clients)

    @property
    def accurate(self) -> bool:
        """Whether the lower level is solved by its residual."""
        return self.lower == "accurate"

    @property
    def most(self) -> int | None:
        """The largest number of exchanges of the accurate solver in a round, if it is known."""
        most = BUDGET if self.lower_rounds is None else self.lower_rounds
        return most if self.accurate and isinstance(most, int) else None

    @property
    def solver(self) -> Any:
        """The lower level's solver; a paper's rule replaces its hyper-parameters in every round."""
        size: Any = self.lower_batch_size
        match self.lower:
            case "accurate":
                return Accurate(self.lower_tol, {"rule": None, "same": self.batch_size}.get(size, size))
            case str(rule):
                return TUNED[rule].solver(self.batch_size if size in ("rule", "same") else size)
        return self.lower

    @classmethod
    def practical(cls, at: Conditions) -> Practical:
        """By `fedstrata.methods._shared.zeroth` on F(x) = f(x, y(x)), with the accurate lower solver."""
        options, rate, reasons, fades = by_values(at, at.F, own=False)
        its = cls(batch_size=None, lower_tol=SOLVED, **options)
        return Practical(its, rate, reasons, fades, cost=EXCHANGES)

    def init(self, problem: Implicit, x0: PyTree, y0: PyTree) -> State:
        check_directions(type(self).__name__, self.directions, self.orthogonal, x0)
        one: Any = np.ones((), jnp.result_type(*jax.tree.leaves(y0)))
        report = LowerReport.blank(y0) if self.accurate else None
        return State(x0, y0, y0, (one, one) if self.estimates else None, report)

    @property
    def estimates(self) -> bool:
        """Whether μ_h and κ_h must be estimated."""
        return isinstance(self.lower, str) and not self.accurate and self.mu_h is None

    def start(self, problem: Implicit, fed: Fed, key: Key, state: State) -> State:
        """Measure the residual at the start, or estimate μ_h and κ_h if needed."""
        if self.accurate:
            bilevel, (x, y) = as_bilevel(problem), (one_point(state.x), one_point(state.y))
            with fed.level("lower"):
                g = fed.average(self.lower_gradient, key, state.x, state.y)
            return state._replace(report=self.solver.first_look(lower_levels(bilevel, x), one_point(g), y))
        if not self.estimates:
            return state

        def product(v: PyTree) -> PyTree:
            return fed.average(self.curve, key, state.x, state.y, v)

        with fed.level("scaling"):
            estimated = estimate_constants(product, fed.repeat, key, one_point(state.y))
        return state._replace(
            constants=jax.tree.map(lambda new, old: new.astype(old.dtype), estimated, state.constants)
        )

    def lower_gradient(self, problem: Implicit, client: Client, key: Key, x: PyTree, y: PyTree) -> PyTree:
        """``∇_y h_i(x, y)``."""
        return self.solver.gradients(lower_level(as_bilevel(problem), x), client, key, y)

    def _of_the_constants(self, moment: Moment) -> list[str]:
        """A warning if the condition number at the start is too large to estimate."""
        started = moment.state is not None and not moment.ended and moment.state.constants is not None
        if not started or not clipped(moment.state.constants[1]):
            return []
        return [
            f"{type(self).__name__}: the lower level's condition number at the start is at least {WORST}, "
            f"the largest that is estimated. lower={self.lower!r} uses {WORST}, so its y will be inaccurate. "
            "Give mu_h and kappa_h, or use lower='accurate'."
        ]

    def metrics(self, state: State) -> dict[str, jax.Array]:
        """The residual of the last round's lower level, if it is measured."""
        return {} if state.report is None else {"lower_residual": state.report.residual}

    def _of_the_lower(self, moment: Moment) -> list[str]:
        """A warning if the lower level was not solved in the last round."""
        if not moment.ended or (report := moment.state.report) is None or report.solved:
            return []
        within = "" if self.most is None else f" within lower_rounds={self.most} exchanges"
        return [
            f"{type(self).__name__}: in the last round the lower level was not solved to "
            f"lower_tol={self.lower_tol:g}{within}; its residual was {float(report.residual):.2g}. x and y "
            "may be wrong. Give more lower_rounds, check that the lower level is strongly convex in y; in "
            "float32 with a small eta rounding may be the limit: use float64 or a larger eta."
        ]

    def curve(self, problem: Implicit, client: Client, key: Key, x: PyTree, y: PyTree, v: PyTree) -> PyTree:
        """``∇²_yy h_i(x, y) v`` for stacked directions."""
        loss = Term.of(lower_level(as_bilevel(problem), x).loss)
        whole_client = loss.reads == "sample"
        h = client.train.mean(loss, key, None if whole_client else self.solver.batch_size)
        return each(lambda v: hessian_product(h, y, v), v)

    def memory(self, problem: Implicit, x0: PyTree, y0: PyTree) -> PyTree:
        """x̂ and the directions of the round, kept by every client."""
        return x0, jax.tree.map(lambda leaf: np.zeros((self.directions, *leaf.shape), leaf.dtype), x0)

    def keep(self, problem: Implicit, client: Client, key: Key, x: PyTree, v: PyTree) -> Remember:
        """Line 1; the reply is empty."""
        if self.messages == "scalars":
            v = self.draw(jax.random.wrap_key_data(v), x)
        return Remember((), (x, v))

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
            as_bilevel(problem),
            client,
            key,
            points(x, v, self.two_sided),
            message,
            self.common_random_numbers,
        )

    def local_steps(self, problem: Implicit, client: Client, key: Key, y: PyTree) -> PyTree:
        """Lines 4 to 7; ``y`` holds the solution at every point. Uploads x − x̂, or the sum of the scalars."""
        bilevel = as_bilevel(problem)
        # both levels of a payoff draw from the training samples
        samples = client.valid if problem.levels[0].samples == "valid" else client.train
        x_hat, v = client.memory
        n = tree.dimension(x_hat)

        def step(carry: tuple[PyTree, jax.Array], key: Key) -> tuple[PyTree, jax.Array]:
            x, total = carry
            f = samples.mean(bilevel.upper, key, self.batch_size)  # line 5
            s = scalars(each(f, points(x, v, self.two_sided), y), n, self.eta, self.two_sided)
            return self.descend(bilevel, client, x, s, v), total + s.astype(total.dtype)  # lines 6, 7

        nothing = jnp.zeros((self.directions,), jnp.result_type(*jax.tree.leaves(x_hat)))
        x, total = loop(steps_of(self.H, client), step, key, (x_hat, nothing))  # line 4
        return tree.sub(x, x_hat) if self.messages == "vectors" else total

    def solve_lower(
        self, problem: Implicit, fed: Fed, key: Key, r: Integer, state: State, x: PyTree, y: PyTree
    ) -> tuple[PyTree, LowerReport | None]:
        """Line 2: the solutions at the points ``x``, from ``y``, and the report of the accurate solver."""
        pointwise_fed = PointwiseFed(fed, self.at_points, {})
        rounds: Any = self.lower_rounds
        if rounds is not None and not isinstance(rounds, int):
            rounds = whole(rounds)
        if state.report is not None:
            levels, budget = lower_levels(as_bilevel(problem), x), BUDGET if rounds is None else rounds
            return self.solver.solve(levels, pointwise_fed.verbs, key, y, state.report, budget)
        match self.lower:
            case str(rule):
                mu_h, kappa_h = state.constants or (self.mu_h, self.kappa_h)
                rounds, values = TUNED[rule].tune(RuleInput(fed.participants, r, mu_h, kappa_h, rounds))
            case Method():
                values = self.lower.scheduled
            case own_solver:
                return own_solver.solve(problem, pointwise_fed.verbs, key, r, x, y), None
        bilevel = as_bilevel(problem)
        return solve_pointwise(self.solver, rounds, values, bilevel, pointwise_fed, key, x, y), None

    def round(self, problem: Implicit, fed: Fed, key: Key, r: Integer, state: State) -> State:
        """Lines 1 to 8."""
        key_v, key_keep, key_lower, key_steps = jax.random.split(key, 4)
        x, seed = state.x, jax.random.key_data(key_v)
        v = self.draw(key_v, x)
        where = points(x, v, self.two_sided)
        warm = self.accurate if self.warm_start is None else self.warm_start
        start = spread(state.y if warm else state.y0, where)
        with fed.everybody():
            fed.average(self.keep, key_keep, x, seed if self.messages == "scalars" else v)  # line 1
            with fed.level("lower", self.most):
                y, report = self.solve_lower(problem, fed, key_lower, r, state, where, start)  # line 2
        reply = fed.average(self.local_steps, key_steps, y, weights=fed.at_work(self.H))  # line 3
        moved = reply if self.messages == "vectors" else tree.scale(-self.gamma, combine(reply, v))
        return state._replace(x=tree.add(x, moved), y=self.at_centre(problem, x, y), report=report)

    def at_centre(self, problem: Implicit, x: PyTree, y: PyTree) -> PyTree:
        """The solution at x̂; two-sided, the mean of those around it, projected onto a shared Y(x̂)."""
        if not self.two_sided:
            return jax.tree.map(lambda leaf: leaf[0], y)
        middle = jax.tree.map(lambda leaf: leaf.mean(0), y)
        return middle if problem.project_y.arity > 2 else problem.project_y(middle, x)
