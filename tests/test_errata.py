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
