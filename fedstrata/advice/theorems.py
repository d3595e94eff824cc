"""The prescriptions of the papers' theorems for a measured problem, condition by condition, and their rates.

Each theorem bounds E‖∇F‖² by terms of the number of steps. The measured constants give the number that brings
the bound below ε = (accuracy · ‖∇F(x0)‖)², and ``from_theory`` then gives the method; strongly convex losses
have linear rates instead. Lipschitz constants are measured at the start: L₀ is √(‖∇F‖² + heterogeneity² +
noise²), and F(x0) − F* is estimated by half of ‖∇F‖ times the reach.

`practical` rules take longer steps. The ratio of rounds is the price of a guarantee for all functions with
these constants.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fedstrata import methods
from fedstrata.core.method import Method
from fedstrata.problems.classes import Minimax
from fedstrata.problems.measured import Conditions, Measured

LARGEST = 1e60  # steps


class Condition(NamedTuple):
    """One condition of a theorem.

    Attributes:
        words: the condition, in words.
        where: its theorem and equation.
        value: the numbers of this problem.
        holds: whether it holds; None if measurements at a point cannot tell.
    """

    words: str
    where: str
    value: str
    holds: bool | None

    def __str__(self) -> str:
        said = {True: "holds", False: "fails", None: "not measured"}[self.holds]
        return f"{self.words} ({self.where}): {self.value}, {said}"


class Theory(NamedTuple):
    """The prescription of a theorem.

    Attributes:
        theorem: the method, and the theorem's number.
        method: the method with its step sizes; None if the conditions cannot be met.
        rounds: the rounds that it guarantees for the accuracy; infinite if it guarantees none.
        conditions: all its conditions.
    """

    theorem: str
    method: Method | None
    rounds: float
    conditions: tuple[Condition, ...]

    def __str__(self) -> str:
        rounds = f"{self.rounds:.3g} rounds" if math.isfinite(self.rounds) else "no number of rounds"
        head = f"{self.theorem}: {rounds}, {self.method!r}" if self.method else f"{self.theorem}: {rounds}"
        return "\n    ".join([head, *map(str, self.conditions)])


Prescription: TypeAlias = Callable[[Conditions, float], Theory]
THEOREMS: dict[type[Method], Prescription] = {}


def theorem(*classes: type[Method]) -> Callable[[Prescription], Prescription]:
    """Register a theorem's prescription for some methods."""

    def register(prescription: Prescription) -> Prescription:
        THEOREMS.update(dict.fromkeys(classes, prescription))
        return prescription

    return register


def _at_most(words: str, where: str, value: float, bound: float) -> Condition:
    return Condition(words, where, f"{value:.3g} ≤ {bound:.3g}", value <= bound * (1 + 1e-9))


def _positive(words: str, where: str, value: float) -> Condition:
    return Condition(words, where, f"{value:.3g}", value > 0)


def _fall(F: Measured) -> float:
    """An estimate of F(x0) − F*."""
    return F.gradient * F.reach / 2 if F.reach > 0 else math.inf


def _fewest(bound: Callable[[float], float], enough: float) -> float:
    """The smallest number of steps, to one per cent, at which a decreasing bound is small enough."""
    low, high = 1.0, LARGEST
    if not bound(high) <= enough:
        return math.inf
    while high > 1.01 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if bound(middle) <= enough else (middle, high)
    return high


def _everybody(at: Conditions, where: str) -> Condition:
    return Condition("all clients in a round", where, f"{at.participants} of {at.clients}", not at.partial)


def _sets(at: Conditions) -> tuple[float, str]:
    """B₂ of the sets' dissimilarity, and in words."""
    X = at.problem.set_of_x
    return (0.0, "no set") if X.trivial else (1.0, "one set" if X.shared else "clients' own sets")


# Linear rates


@theorem(methods.FedAvg, methods.LFD)
def _descent(at: Conditions, accuracy: float) -> Theory:
    its, where = at["loss"], "Nesterov 2004, Theorem 2.1.15"
    step = 2 / (its.L + its.mu) if its.mu > 0 else 1 / its.L
    rounds = math.log(1 / accuracy) * (its.condition + 1) / 2 if its.mu > 0 else math.inf
    conditions = (
        _positive("strong convexity, mu > 0", where, its.mu),
        _at_most("gamma ≤ 2/(L + mu)", where, step, 2 / (its.L + max(its.mu, 0))),
        Condition("H = 1: with more the limit drifts", "Karimireddy et al. 2020, Theorem II", "1", True),
        _everybody(at, where),
    )
    return Theory("FedAvg with H = 1, gradient descent", methods.FedAvg(step), rounds, conditions)


@theorem(methods.Scaffnew)
def _scaffnew(at: Conditions, accuracy: float) -> Theory:
    its, where = at["loss"], "Mishchenko et al. 2022, Theorem 3.6"
    L = float(its.client_L.max(initial=its.L))
    p = min(math.sqrt(max(its.mu, 0.0) / L), 1.0)
    rounds = 2 * math.log(1 / accuracy) / p if p > 0 else math.inf  # p² of the square in a step, 1/p steps
    conditions = (
        _positive("every loss strongly convex, mu > 0", where, float(its.client_mu.min(initial=its.mu))),
        _at_most("gamma ≤ 1/max L_i", where, 1 / L, 1 / L),
        Condition("p = 1/√kappa is best", f"{where}, (9)", f"{p:.3g}", True),
        _everybody(at, where),
    )
    method = methods.Scaffnew(1 / L, p) if p > 0 else None
    return Theory("Scaffnew, Theorem 3.6", method, rounds, conditions)


@theorem(methods.SCAFFOLD)
def _scaffold(at: Conditions, accuracy: float) -> Theory:
    its, where, part = at["loss"], "Karimireddy et al. 2020, Theorem VII", at.participants / at.clients
    L, strong = float(its.client_L.max(initial=its.L)), _positive("strong convexity, mu > 0", "A4", its.mu)
    if not its.mu > 0:
        return Theory("SCAFFOLD, Theorem VII", None, math.inf, (strong,))
    one, two = 1 / (81 * L), part / (15 * its.mu)
    eta = min(one, two)
    rounds = math.log(1 / accuracy**2) / min(part / 30, its.mu / (162 * L))
    free = at.problem.set_of_x.trivial
    conditions = (
        strong,
        Condition("x has no set", where, "no set" if free else "a set", free),
        _at_most("eta_l ≤ 1/(81 L K eta_g), K = eta_g = 1", where, eta, one),
        _at_most("eta_l ≤ S/(15 mu N K eta_g)", where, eta, two),
        _at_most("max(162 L/mu, 30 N/S) ≤ R", where, max(162 * L / its.mu, 30 / part), rounds),
    )
    return Theory("SCAFFOLD, Theorem VII", methods.SCAFFOLD(eta), rounds, conditions)


@theorem(methods.FedAC)
def _fedac(at: Conditions, accuracy: float) -> Theory:
    its, where = at["loss"], "Yuan, Ma 2020, Theorem 3.1"
    if not its.mu > 0:
        return Theory("FedAC, Theorem 3.1", None, math.inf, (_positive("mu > 0", where, its.mu),))
    rate = math.sqrt(its.mu / its.L)
    conditions = (
        _positive("strong convexity, mu > 0", where, its.mu),
        _at_most("eta ≤ 1/L", where, 1 / its.L, 1 / its.L),
        Condition("alike clients, or K = 1", "Assumption 1", "K = 1", True),
        _everybody(at, where),
    )
    rounds = 3 * math.log(1 / accuracy**2) / rate  # exp(−√(eta mu/K) KR/3) bounds the square
    return Theory("FedAC, Theorem 3.1", methods.FedAC(1 / its.L, its.mu), rounds, conditions)


@theorem(methods.LocalSGDA, methods.NormalizedSGDA, methods.FedSGDAPlus, methods.FESSGDA, methods.CODASCA)
def _monotone(at: Conditions, accuracy: float) -> Theory:
    """‖z⁺ − z*‖² ≤ (1 − 2γμ + γ²L²)‖z − z*‖², which is least for γ = μ/L²."""
    f, h, where = at["payoff"], at["lower"], "Facchinei, Pang 2003, Theorem 12.1.2"
    mu, L = min(f.mu, h.mu), max(f.L, h.L) + (at.constants.coupling or 0.0)
    conditions = (
        _positive("strongly convex in x, strongly concave in y, mu > 0", where, mu),
        Condition("gamma < 2 mu/L², L with the coupling", where, f"{max(mu, 0) / L**2:.3g}", mu > 0),
        Condition("one local step: with more the limit drifts", "Deng, Mahdavi 2021", "1", True),
        _everybody(at, where),
    )
    name = "descent ascent with one step size, Theorem 12.1.2"
    if not mu > 0:
        return Theory(name, None, math.inf, conditions)
    rounds = 2 * math.log(1 / accuracy) / -math.log1p(-((mu / L) ** 2)) if mu < L else 1.0
    return Theory(name, methods.LocalSGDA(mu / L**2, mu / L**2), rounds, conditions)


@theorem(methods.FedAPD)
def _fedapd(at: Conditions, accuracy: float) -> Theory:
    its, where = at["loss"], "Hamedani, Aybat 2021, Theorem 2.1"
    L, mu = float(its.client_L.max(initial=its.L)), float(its.client_mu.min(initial=its.mu))
    strong = _positive("every loss strongly convex, mu > 0", where, mu)
    if not mu > 0:
        return Theory("FedAPD, Theorem 2.1", None, math.inf, (strong,))
    spread = at.clients * its.heterogeneity**2
    method = methods.FedAPD.from_theory(L=L, mu=mu, spread=spread)
    least, way = 6 * L / mu, its.reach if its.reach > 0 else math.nan
    # (3 r₀/(μ a²)) (2 L + 2 ‖J‖²/(L way²)) = accuracy², ‖λ_0 − λ*‖² ≤ 2
    a = math.sqrt(3 * least / mu * (2 * L + 2 * spread / (L * way**2))) / accuracy
    conditions = (
        strong,
        _at_most("L + eta_lam ‖J‖² ≤ 1/gamma at r = 0", where, 2 * L, 2 * L),
        Condition("‖J‖² of the clients' losses", where, f"{spread:.3g} at the start", None),
        Condition("local steps are not in the theorem", where, "J = 1", True),
        _everybody(at, where),
    )
    return Theory("FedAPD, Theorem 2.1", method, max(a - least, 1.0), conditions)


# Zeroth order


class _Steps(NamedTuple):
    """γ = √(m/K), H = ⌈(K/m³)^¼⌉."""

    gamma: float
    H: int

    @classmethod
    def of(cls, K: float, m: int) -> _Steps:
        return cls(math.sqrt(m / K), max(1, math.ceil((K / m**3) ** 0.25)))


@theorem(methods.DeComFL)
def _decomfl(at: Conditions, accuracy: float) -> Theory:
    """In E‖x − x*‖² ≤ 2/μ (E F − F*), from the bound of F."""
    its, n, where = at["loss"], at.dimension, "Nesterov, Spokoiny 2017, Theorem 8"
    if not its.mu > 0:
        return Theory("DeComFL, Theorem 8", None, math.inf, (_positive("mu > 0", where, its.mu),))
    kappa, way = its.L / its.mu, its.reach if its.reach > 0 else math.nan
    width = accuracy * way / (1.2 * kappa * (n + 4))  # half of the square of the accuracy is the floor's
    rounds = 8 * (n + 4) * kappa * math.log(2 * kappa / accuracy**2)
    conditions = (
        _positive("strong convexity, mu > 0", where, its.mu),
        _at_most("eta ≤ 1/(4 (n + 4) L)", where, 1 / (4 * (n + 4) * its.L), 1 / (4 * (n + 4) * its.L)),
        Condition("mu, by which kappa delta is half of the accuracy's square", where, f"{width:.3g}", True),
        Condition("K = P = 1, full batches", where, "1", True),
        _everybody(at, where),
    )
    return Theory(
        "DeComFL, Theorem 8", methods.DeComFL.from_theory(L=its.L, n=n, mu=width), rounds, conditions
    )


@theorem(methods.FedRZO)
def _fedrzo(at: Conditions, accuracy: float) -> Theory:
    F, n, m, (B2, sets) = at["loss"], at.dimension, at.clients, _sets(at)
    eta, L0 = _width(at, F), math.hypot(F.gradient, F.heterogeneity, F.noise)  # L₀ of one sample
    nu, where = F.noise, "Qiu, Shanbhag, Yousefian, Proposition 1"

    def bound(K: float) -> float:
        gamma, H = _Steps.of(K, m)
        first = 8 * _fall(F) / (gamma * (K + 1))
        second = 12 * gamma * L0 * n**3 / (eta * m) * (2 * nu**2 / eta**2 + L0**2)
        last = 6 * n**2 * nu**2 / eta**2 + (3 + 4 * B2**2) * L0**2 * n**2
        return first + second + 36 * (H * gamma * (L0 * n + 1) / eta) ** 2 * last

    K = _fewest(bound, (accuracy * F.gradient) ** 2)
    gamma, H = _Steps.of(min(K, LARGEST), m)
    conditions = [
        _at_most("gamma = √(m/K) ≤ eta/(4 (L0 n + 1))", f"{where} (i)", gamma, eta / (4 * (L0 * n + 1))),
        _at_most("gamma ≤ 1/(4H)", f"{where} (i)", gamma, 1 / (4 * H)),
        _at_most("m³ ≤ K", f"{where} (iii)", float(m) ** 3, K),
        Condition("clients' losses are L0-Lipschitz", "Assumption 1", f"{L0:.3g} at the start", None),
        Condition(
            "B1 = 0 of the clients' sets", "Assumption 1", sets, None if sets.startswith("cl") else True
        ),
    ]
    if B2 > 0:
        most = eta / (12 * math.sqrt(3) * B2 * (L0 * n + 1) * H)
        conditions.insert(2, _at_most("gamma ≤ eta/(12√3 B2 (L0 n + 1) H)", f"{where} (i)", gamma, most))
    method = None
    if math.isfinite(K):
        method = methods.FedRZO.from_theory(K=math.ceil(K), clients=m, eta=eta, L0=L0, n=n, B2=B2)
    return Theory("FedRZO, Proposition 1", method, K / H, tuple(conditions))


def _width(at: Conditions, F: Measured) -> float:
    """η by the practical rule."""
    return 1e-2 * (max(F.reach, at.constants.scale_x * math.sqrt(at.dimension)) or 1.0)


@theorem(methods.FedRZOBilevel, methods.FedRZOMinimax)
def _fedrzo_bilevel(at: Conditions, accuracy: float) -> Theory:
    F, h, n, m, (B2, sets) = at.F, at["lower"], at.dimension, at.clients, _sets(at)
    eta, L0, L0_y = _width(at, F), F.gradient, at.constants.slope_y or 0.0
    where, coupling = "Qiu, Shanbhag, Yousefian, Theorem 1", at.constants.coupling or 0.0
    strong = _positive("h strongly convex in y, mu_h > 0", "Assumption 2", h.mu)
    if not h.mu > 0:
        return Theory("FedRZO_bl, Theorem 1", None, math.inf, (strong,))
    one = 3 * (L0 * n + 1) * n**2 / (2 * eta) * L0**2
    two = 5 * (L0 * n + 1) ** 2 / (8 * eta**2)
    three = 20 * (n * coupling * L0_y / (eta * h.mu)) ** 2
    five = (96 * B2**2 + 1) * L0**2 * n**2

    def bound(K: float) -> float:
        gamma, H = _Steps.of(K, m)
        return 8 * _fall(F) / (gamma * K) + 8 * gamma * one + 8 * (H * gamma) ** 2 * max(two, three) * five

    K = _fewest(bound, (accuracy * F.gradient) ** 2)
    gamma, H = _Steps.of(min(K, LARGEST), m)
    slowest = max(2, math.sqrt(0.1 * three), 4 * B2 * math.sqrt(3 * max(two, three)))
    conditions = (
        strong,
        _at_most(
            "gamma = √(m/K) ≤ 1/(4H max{2, √(0.1Θ3), 4B2√(3Θ2), 4B2√(3Θ3)})",
            where,
            gamma,
            1 / (4 * H * slowest),
        ),
        _at_most("gamma ≤ eta/(24 (L0 n + 1))", where, gamma, eta / (24 * (L0 * n + 1))),
        _at_most("m³ ≤ K", f"{where} (iii)", float(m) ** 3, K),
        Condition("eps_r of order 1/(m T_r), T_r of order (r + 1)^⅔/m", f"{where} (ii)", "local_sgd", None),
        Condition("Θ1/m: Θ1, as all clients share v (docs/errata.md)", f"{where} (i)", f"{one:.3g}", False),
        Condition(
            "B1 = 0 of the clients' sets", "Assumption 2", sets, None if sets.startswith("cl") else True
        ),
    )
    method = None
    if math.isfinite(K):
        cls = methods.FedRZOMinimax if isinstance(at.problem, Minimax) else methods.FedRZOBilevel
        lower = {"mu_h": h.mu, "kappa_h": max(h.L / h.mu, 1.0), "L0_y": L0_y, "L_hx": coupling}
        method = cls.from_theory(K=math.ceil(K), clients=m, eta=eta, L0=L0, n=n, B2=B2, **lower)
    return Theory("FedRZO_bl, Theorem 1", method, K / H, conditions)


@theorem(methods.FedRZOTwoStage)
def _two_stage(at: Conditions, accuracy: float) -> Theory:
    F, G, n, m, (B2, sets) = at.F, at["follower"], at.dimension, at.clients, _sets(at)
    eta, L0, where = _width(at, F), F.gradient, "Qiu, Shanbhag, Yousefian, Theorem 2"
    strong = _positive("followers strongly monotone, mu_F > 0", "Assumption 3", G.mu)
    if not G.mu > 0:
        return Theory("FedRZO_2s, Theorem 2", None, math.inf, (strong,))
    one = (L0 * n + 1) * n**2 / eta * L0**2
    two = 5 * (L0 * n + 1) ** 2 / (8 * eta**2)
    five = 9 * (4 * B2**2 + 1) * L0**2 * n**2

    def bound(K: float) -> float:
        gamma, H = _Steps.of(K, m)
        return 8 * _fall(F) / (gamma * K) + 8 * gamma * one / m + 8 * (H * gamma) ** 2 * two * five

    K = _fewest(bound, (accuracy * F.gradient) ** 2)
    gamma, H = _Steps.of(min(K, LARGEST), m)
    alpha, kappa = G.mu / G.L**2, G.L / G.mu
    tau = -1 / math.log1p(-(kappa**-2)) if kappa > 1 else 1.0
    conditions = [
        strong,
        Condition("alpha = mu_F/L_F²", f"{where} (i)", f"{alpha:.3g}", True),
        Condition("tau ≥ −1/ln(1 − 1/kappa²)", f"{where} (iii)", f"{tau:.3g}", True),
        _at_most("gamma = √(m/K) ≤ eta/(16 (L0 n + 1))", f"{where} (ii)", gamma, eta / (16 * (L0 * n + 1))),
        _at_most("gamma ≤ 1/(√24 H), which (ii) leaves out", "Lemma 13 (ii)", gamma, 1 / (math.sqrt(24) * H)),
        _at_most("m³ ≤ K", f"{where} (iv)", float(m) ** 3, K),
        Condition(
            "B1 = 0 of the clients' sets", "Assumption 3", sets, None if sets.startswith("cl") else True
        ),
    ]
    if B2 > 0:
        most = 1 / (12 * math.sqrt(6 * two) * H * B2)
        conditions.insert(4, _at_most("gamma ≤ 1/(12√6 H B2 √Θ2)", f"{where} (ii)", gamma, most))
    method = None
    if math.isfinite(K):
        method = methods.FedRZOTwoStage.from_theory(
            K=math.ceil(K), clients=m, mu=G.mu, L=max(G.L, G.mu), eta=eta, L0=L0, n=n, B2=B2
        )
    return Theory("FedRZO_2s, Theorem 2", method, K / H, tuple(conditions))


@theorem(methods.ZOHFL)
def _zohfl(at: Conditions, accuracy: float) -> Theory:
    (own,) = (level.name for level in at.problem.levels if level.solved_by == "client")
    F, h, n, where = at.F, at[own], at.dimension, "Qiu, Kim, Yousefian, Theorem 1"
    eta, L0, L1 = _width(at, F), F.gradient, max(F.L, 0.0)
    strong = _positive("clients' h_i strongly convex, mu > 0", "Assumption 1", h.mu)
    if not (h.mu > 0 and L0 > 0):
        return Theory("ZO-HFL, Theorem 1", None, math.inf, (strong,))
    smooth = L1 + L0 * math.sqrt(n) / eta
    largest = 4 * smooth * (2 * abs(F.value) + _fall(F)) + 64 * math.sqrt(2 * math.pi) * L0**2 * n
    largest += 6 * (n * L0 / eta) ** 2
    R = (largest / (accuracy * F.gradient) ** 2) ** 2
    conditions = (
        strong,
        _at_most("gamma_0 ≤ eta/(4 (eta L1 + L0 √n))", where, 1 / (4 * smooth), 1 / (4 * smooth)),
        _at_most(
            "gamma_i/(t + Gamma) ≤ mu/(2 L_h²)", f"{where} (i)", h.mu / (2 * h.L**2), h.mu / (2 * h.L**2)
        ),
        Condition("H_{i,r} = tau √(r + 1), tau ≥ 1", f"{where} (ii)", "tau = 1", True),
        Condition(
            "divided by gamma_r the bound telescopes", f"{where} (ii)", "up to ln R (docs/errata.md)", False
        ),
        Condition(
            "L0 of f2, L1 of f1", "Assumption 1", f"those of F at the start, {L0:.3g} and {L1:.3g}", None
        ),
    )
    method = methods.ZOHFL.from_theory(L1=L1, L0=L0, n=n, mu=h.mu, L_h=max(h.L, h.mu), eta=eta)
    return Theory("ZO-HFL, Theorem 1", method, R, conditions)


# Coupled sequences, compositions, selection


@theorem(methods.FedMSA)
def _fedmsa(at: Conditions, accuracy: float) -> Theory:
    F, where = at.F, "Tarzanagh, Li, Sharma, Oymak, Theorem 3.1"
    h = at.constants.levels.get("lower")
    unlike = max((its.curvature_heterogeneity for its in at.constants.levels.values()), default=0.0)
    L = max(its.L for its in at.constants.levels.values())
    tau, strong = unlike or L, h is None or h.mu > 0
    alpha = min(1 / tau, 1 / L)
    R = 4 * _fall(F) / (alpha * (accuracy * F.gradient) ** 2) if F.gradient > 0 else 0.0
    conditions = (
        Condition(
            "S strongly monotone", "Assumption A5, with ≥", "–" if h is None else f"{h.mu:.3g}", strong
        ),
        Condition("rho of order 1/R", where, f"{1 / max(R, 1):.3g}", True),
        _at_most("alpha, beta of order 1/(tau K), K = 1", where, alpha, 1 / tau),
        _at_most("alpha < 1/L, which the theorem leaves to its O(·)", "(43)", alpha, 1 / L),
        Condition("the constants that O(·) hides", f"{where}, (48)", "1", None),
    )
    method = methods.FedMSA.from_theory(R=max(1, math.ceil(R)), tau=tau, L=L) if math.isfinite(R) else None
    return Theory("FedMSA, Theorem 3.1", method, R, conditions)


@theorem(methods.FedDRO)
def _feddro(at: Conditions, accuracy: float) -> Theory:
    F, K, where = at.F, at.clients, "FedDRO, Theorem F.1"
    least = 4 * (F.L * K + 8) ** 2 / K
    first = (2 * _fall(F) / (accuracy * F.gradient) ** 2) ** 2 / K if F.gradient > 0 else 1.0
    T = max(least, first, 16.0 * K)
    conditions = (
        _at_most("T ≥ T_th, its first term: 4 (L_Φ K + 8 B_g²)²/K, B_g = 1", where, least, T),
        Condition("B_g, L_f of the levels, by which beta = 4 B_g⁴ L_f² eta", where, "1", None),
        Condition(
            "bounded ∇h, ∇g, ∇f; smooth levels", "Assumptions 3.2 to 3.4", f"kink {F.kink:.2g}", not F.kinked
        ),
        _everybody(at, "Algorithm 2"),
    )
    if not math.isfinite(T):
        return Theory("FedDRO, Theorem F.1", None, math.inf, conditions)
    method = methods.FedDRO.from_theory(T=math.ceil(T), clients=K)
    return Theory("FedDRO, Theorem F.1", method, T / method.I, conditions)


@theorem(methods.DSFedDRO)
def _ds_feddro(at: Conditions, accuracy: float) -> Theory:
    where = "FedDRO, Theorem 5.2"
    conditions = (
        Condition("gamma_x of order √(K/T)", where, "does not converge as printed (docs/errata.md)", False),
    )
    return Theory("DS-FedDRO, Theorem 5.2", None, math.inf, conditions)


@theorem(methods.StRFedAvg)
def _str_fedavg(at: Conditions, accuracy: float) -> Theory:
    f, where = at.constants.levels.get("secondary"), "Ebrahimi, Qiu, Cui, Yousefian"
    mu = 0.0 if f is None or not f.L > 0 else max(f.mu, 0.0) / f.L
    a, b, B = (2 / 3, 1 / 3, 0.0) if mu > 0 else (1 / 2, 1 / 4, 0.0)
    least = 64 * (1 + B**2)
    R = max(least ** (1 / a) / mu if mu > 0 else least ** (1 / a), accuracy ** (-1 / b))
    name = "Theorem 1, case i" if mu > 0 else "Theorem 2, case i"
    conditions = (
        _at_most(
            "R ≥ (64 (1 + B²) L_h²)^{1/a}/mu_f, with h/L_h",
            f"{where}, {name}",
            least ** (1 / a) / (mu or 1),
            R,
        ),
        Condition("eta = R^{−b} is as small as the accuracy", f"{where}, {name}", f"b = {b:.3g}", None),
        Condition("B, G of the gradients' dissimilarity", "Assumption 2", "B = 0", None),
        Condition("full batches", "W, Y", "sigma = 0", True),
    )
    rule: Any = "strongly_convex" if mu > 0 else "convex"
    method = methods.StRFedAvg(rule, mu_f=mu if mu > 0 else None, R=float(np.ceil(R)))
    return Theory(f"StR-FedAvg, {name}", method, R, conditions)


@theorem(methods.IPIRFedAvg)
def _ipir_fedavg(at: Conditions, accuracy: float) -> Theory:
    """By the first term of (i-1), λ = 1/L_f; the outer iteration t takes t rounds (Remark 4)."""
    f, where = at["secondary"], "Ebrahimi, Qiu, Cui, Yousefian, Theorem 3"
    lam = 1 / f.step
    smooth = max(f.L, -f.mu) + 2 / lam
    T = 2 * smooth * _fall(f) / (accuracy * f.gradient) ** 2
    conditions = (
        Condition("X* alpha-weak sharp of order above 1", f"{where}, case i", "–", None),
        _at_most("gamma ≤ 1/(L_f + 2/lambda)", f"{where}, proof of (i-1)", 1 / smooth, 1 / smooth),
        Condition(
            "gamma_t = t^{−7/12}, eta_t = 2 ln t/t^{5/12}, t rounds", f"{where}, case i", "paper", True
        ),
        Condition("G, M, kappa of the later terms, the slowest T^{−5/(12 kappa)}", "(i-1)", "–", None),
    )
    method = methods.IPIRFedAvg(1 / smooth, lam, inner="paper")
    return Theory("IPIR-FedAvg, Theorem 3", method, T**2 / 2, conditions)


def theory(cls: type[Method], at: Conditions, accuracy: float) -> Theory | None:
    """The prescription of the method's theorem; None without one."""
    found = THEOREMS.get(cls)
    if found is None:
        return None
    try:
        return found(at, accuracy)
    except (KeyError, ValueError, ArithmeticError):  # the theorem does not cover the problem or its constants
        return None
