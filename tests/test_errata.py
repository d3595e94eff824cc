"""What docs/errata.md says of formulas as they are printed, by computation."""

import math

import numpy as np
import pytest

import fedstrata as fs

LOSSES = np.array([0.3, 1.2, 0.7, 2.5])
M = len(LOSSES)


@pytest.mark.parametrize("lam", [0.5, 2.0])
def test_kl_lacks_its_factor(lam):
    """004, (4): max over p of Σpℓ − λ Σ p log(pm) is λ log mean exp(ℓ/λ), λ times what is printed."""
    p = np.exp(LOSSES / lam) / np.exp(LOSSES / lam).sum()
    maximum = p @ LOSSES - lam * (p * np.log(p * M)).sum()
    printed = math.log(np.exp(LOSSES / lam).mean())
    assert maximum == pytest.approx(lam * printed)
    assert maximum != pytest.approx(printed, rel=1e-3)


def test_chi2_has_the_wrong_sign_and_lacks_the_mean():
    """004, (5): max of Σpℓ − λ m/2 Σ(p − 1/m)² is mean + variance/(2λ); printed is −variance/(2λ)."""
    lam = 4.0
    p = 1 / M + (LOSSES - LOSSES.mean()) / (lam * M)
    assert (p > 0).all()
    assert p.sum() == pytest.approx(1)
    maximum = p @ LOSSES - lam * M / 2 * ((p - 1 / M) ** 2).sum()
    printed = LOSSES.mean() ** 2 / (2 * lam) - (LOSSES**2).mean() / (2 * lam)
    assert maximum == pytest.approx(LOSSES.mean() + LOSSES.var() / (2 * lam))
    assert printed == pytest.approx(-LOSSES.var() / (2 * lam))


def test_the_gradient_of_zo_hfl_lacks_its_factor_and_the_servers_part():
    """001, below (6): for f₂ = cᵀx the printed mean of (f₂(x + ηv) − f₂(x − ηv)) v is 2η/n of ∇f₂."""
    n, eta, c = 3, 0.2, np.array([1.0, -2.0, 0.5])
    v = np.concatenate([np.eye(n), -np.eye(n)])  # a design with the sphere's second moments
    printed = np.mean([(c @ (eta * w) - c @ (-eta * w)) * w for w in v], axis=0)
    np.testing.assert_allclose(printed, 2 * eta / n * c)
    np.testing.assert_allclose(n / (2 * eta) * printed, c)


def test_a_shared_direction_is_not_averaged_over_clients_and_biases_later_steps():
    """000, Lemma 9 (v) and (i): with one v for all, E‖ḡ‖² has no part that falls like 1/m; x_k depends on v.

    For f_i = ½‖x‖², g = n/η² (vᵀx + η²/2) v: E‖ḡ‖² = n‖x‖² + n²η²/4 for any m, and after a step the mean of g
    is (1 − γn)x, where that of ∇f is (1 − γ)x.
    """
    n, eta, gamma, x = 4, 0.5, 0.01, np.array([1.0, -2.0, 0.5, 3.0])
    v = eta * np.concatenate([np.eye(n), -np.eye(n)])  # a design with the sphere's second moments

    def estimate(x, v):
        return n / eta**2 * (v @ x + eta**2 / 2) * v

    for m in (1, 64):
        squares = [(np.mean([estimate(x, w)] * m, axis=0) ** 2).sum() for w in v]
        assert np.mean(squares) == pytest.approx(n * (x @ x) + n**2 * eta**2 / 4)
    after = [x - gamma * estimate(x, w) for w in v]
    np.testing.assert_allclose(np.mean(after, axis=0), (1 - gamma) * x)
    second = np.mean([estimate(y, w) for y, w in zip(after, v, strict=True)], axis=0)
    np.testing.assert_allclose(second, (1 - gamma * n) * x)


def test_a_set_that_moves_moves_the_solution():
    """000, Lemma 2 and Θ₃: y(x) maximises x² + y over y ≤ −x, the paper's example, where ∇²_xy f = 0."""
    grid = np.linspace(-1, 1, 2001)
    y = [max(grid[grid <= -x + 1e-9], key=lambda y, x=x: x**2 + y) for x in (0.1, 0.4)]
    assert abs(y[1] - y[0]) == pytest.approx(0.3)  # and not L_hx/μ_h · 0.3 = 0


def test_theorem_1_of_zo_hfl_divides_before_it_telescopes():
    """001, Theorem 1: (4/R) Σ (f_r − f_{r+1})/γ_r, γ_r = 1/(4L√(r+1)), is no 4L(f_0 − f_R)/√R.

    All of the descent in the last round makes it four times that. In general it is at most 16L/√R times the
    largest f_r − f_R, by Abel's summation, and that may grow like Σ γ_r² ~ ln R.
    """
    L, R = 2.0, 10_000
    gamma = 1 / (4 * L * np.sqrt(np.arange(R) + 1))
    f = np.append(np.ones(R), 0.0)
    found = 4 / R * (-np.diff(f) / gamma).sum()
    assert found == pytest.approx(16 * L / math.sqrt(R))
    assert found > 4 * L * (f[0] - f[-1]) / math.sqrt(R)


def test_the_distance_and_its_gradient_differ_by_two():
    """002, (3): the gradient of ‖y − Π(y)‖²/λ is 2(y − Π(y))/λ; the text goes on with half of it."""
    lam, h, toy = 0.5, 1e-4, fs.underdetermined(clients=2, n=6, samples=2)
    pinv = np.linalg.pinv(toy.A)

    def distance(y):
        return ((pinv @ (toy.A @ y - toy.b)) ** 2).sum() / lam

    y = np.arange(6.0)
    slope = np.array([(distance(y + h * e) - distance(y - h * e)) / (2 * h) for e in np.eye(6)])
    np.testing.assert_allclose(slope, 2 * (pinv @ (toy.A @ y - toy.b)) / lam, rtol=1e-5, atol=1e-6)


def test_the_printed_envelope_is_the_norm_itself():
    """002, after (15): min over y of ‖x‖₁ + ‖x − y‖²/(2μ) is ‖x‖₁, at y = x; with ‖y‖₁ it is Huber's."""
    mu, x, grid = 0.5, 0.3, np.linspace(-2, 2, 40_001)
    assert (abs(x) + (x - grid) ** 2 / (2 * mu)).min() == pytest.approx(abs(x))
    assert (np.abs(grid) + (x - grid) ** 2 / (2 * mu)).min() == pytest.approx(x**2 / (2 * mu), abs=1e-6)


def test_the_largest_eta_of_ipir_fedavg():
    """002, Theorem 3: 2 ln t/t^{5/12} is largest at t = 11, where it is 1.77; η̂ = 11 is printed."""
    t = np.arange(1, 10_000)
    eta = 2 * np.log(t) / t ** (5 / 12)
    assert t[eta.argmax()] == 11
    assert eta.max() == pytest.approx(1.766, abs=1e-3)


def test_the_steps_of_ds_feddro_do_not_add_up():
    """004, Theorem 5.2: T steps of γ_x η = √(K/T)·√(I/T) go √(KI) in all, however large T is."""
    for T in (1e3, 1e6):
        with pytest.warns(UserWarning, match="does not converge"):
            method = fs.DSFedDRO.from_theory(T=int(T), clients=4, I=2)
        assert T * method.gamma_x * method.eta == pytest.approx(math.sqrt(4 * 2), rel=1e-6)


def test_a_map_that_is_not_monotone_meets_the_printed_condition():
    """003, A5: ⟨z − z*, S(z)⟩ ≤ λ‖z − z*‖² holds for S = −(z − z*), from which no method converges."""
    z = np.array([1.0, -2.0])  # z* = 0
    assert z @ -z <= 1.0 * (z @ z)
    assert not z @ -z >= 1e-9 * (z @ z)


def test_table_4_is_far_from_theorem_2():
    """000: α = μ/L² and τ ≥ −1/ln(1 − 1/κ²) for the Cournot game; printed are α of 1e-8 and τ = 80."""
    b, followers, low, high = 1.0, 1000, 0.09, 0.11
    mu, L = b + low, b * (followers + 1) + high  # of the map's matrix b(I + 11ᵀ) + diag(c)
    kappa = L / mu
    assert -1 / math.log1p(-(kappa**-2)) > 8e5
    assert mu / L**2 > 1e-6
