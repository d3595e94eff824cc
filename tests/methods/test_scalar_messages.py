"""DeComFL, HiSo and FedKSeed: limits in closed form, reductions, and messages of scalars."""

import math

import jax
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.methods._shared.scalars import directions

N = 4
rng = np.random.default_rng(0)
PARTS = [{"a": rng.normal(size=(n, N)), "b": rng.normal(size=n)} for n in (5, 8, 6)]
DATA = fs.FederatedData.from_clients(PARTS)
ALIKE = fs.FederatedData.from_clients(PARTS[:1] * 4)
X0 = {"u": np.zeros(1), "v": np.full(N - 1, 0.5)}


def loss(x, s):
    return 0.5 * (s["a"][0] * x["u"][0] + s["a"][1:] @ x["v"] - s["b"]) ** 2


PROBLEM = fs.Minimization(loss)
H = np.mean([p["a"].T @ p["a"] / len(p["b"]) for p in PARTS], 0)
SLOPE = np.mean([p["a"].T @ p["b"] / len(p["b"]) for p in PARTS], 0)


def flat(x):
    return np.concatenate([x["u"], x["v"]])


def solve(method, data=DATA, rounds=50, x0=X0, **more):
    return fs.solve(PROBLEM, method, data, x0, rounds=rounds, progress=False, certify=False, **more)


@pytest.mark.parametrize("cls", [fs.DeComFL, fs.HiSo])
def test_the_limit_is_exact_for_unlike_clients(cls):
    """The directions are shared, so that the mean of the scalars vanishes where the mean gradient does."""
    more = {"nu": 1.0} if cls is fs.HiSo else {}
    found = solve(cls(0.1, 0.01, P=4, two_sided=True, **more), rounds=1000)
    np.testing.assert_allclose(flat(found.x), np.linalg.solve(H, SLOPE), atol=1e-4)


def test_a_round_is_a_step_along_what_everybody_draws():
    """x₁ = x₀ − η/P Σ_p u_p u_pᵀ ∇f(x₀), as two-sided differences of quadratics are exact."""
    eta, P = 0.1, 3
    found = solve(fs.DeComFL(eta, 0.1, P=P, two_sided=True), rounds=1)
    u = directions(found.state.last.words, 0, jax.tree.map(np.float32, X0), P)
    U = np.concatenate([np.asarray(u["u"]), np.asarray(u["v"])], axis=1)
    x0 = flat(X0)
    np.testing.assert_allclose(flat(found.x), x0 - eta / P * U.T @ (U @ (H @ x0 - SLOPE)), atol=1e-4)


@pytest.mark.slow
def test_random_directions_keep_what_their_theorem_promises():
    """In the mean of eight seeds, as the theorem bounds an expectation."""
    theory = fs.plan(PROBLEM, DATA, X0, method=fs.DeComFL).theory
    assert all(condition.holds for condition in theory.conditions)
    best = np.linalg.solve(H, SLOPE)
    more = {"seeds": range(8), "rounds": int(theory.rounds) + 1, "progress": False, "default_metrics": False}
    found = fs.sweep(PROBLEM, theory.method, DATA, X0, **more)
    away = np.mean([((flat(run.x) - best) ** 2).sum() for run in found])
    assert away <= 1e-4 * ((flat(X0) - best) ** 2).sum()


@pytest.mark.slow
def test_hiso_that_forgets_nothing_is_decomfl():
    one, other = (solve(m(0.05, 0.05, K=2, P=2, batch_size=2)) for m in (fs.DeComFL, _unshaped))
    np.testing.assert_allclose(flat(one.x), flat(other.x), atol=1e-6)


def _unshaped(eta, mu, **options):
    return fs.HiSo(eta, mu, nu=1.0, **options)


def test_hisos_curvature_is_the_mean_of_squares():
    nu, eta = 0.7, 0.05
    before, after = (solve(fs.HiSo(eta, 0.1, nu=nu, P=2, two_sided=True), rounds=r) for r in (3, 4))
    moved = (flat(before.x) - flat(after.x)) / eta
    expected = nu * flat(before.state.H) + (1 - nu) * moved**2
    np.testing.assert_allclose(flat(after.state.H), expected, rtol=1e-3)


@pytest.mark.parametrize("method", [fs.DeComFL(0.05, 0.05, K=2), fs.HiSo(0.05, 0.05, nu=0.9, K=2)])
@pytest.mark.slow
def test_clients_that_are_alike_may_stay_away(method):
    """Whether the server sends the record or the point, the iterates are the same."""
    some, everyone = (solve(method, ALIKE, participation=p) for p in (2, 4))
    np.testing.assert_allclose(flat(some.x), flat(everyone.x), atol=1e-5)


@pytest.mark.parametrize(
    ("method", "up", "down"),
    [
        (fs.DeComFL(0.01, 0.1, K=3, P=2), 6, 6 + 1),
        (fs.HiSo(0.01, 0.1, K=3, P=2), 6, 6 + 2),
        (fs.FedKSeed(0.01, 0.1, K=7, tau=3), 7, 7),
    ],
)
def test_messages_do_not_grow_with_the_dimension(method, up, down):
    numbers = []
    for n in (N - 1, 50):
        data = fs.FederatedData.from_clients([{"a": np.ones((2, n + 1)), "b": np.ones(2)}] * 3)
        (one,) = fs.exchanges(PROBLEM, method, data, {"u": np.zeros(1), "v": np.zeros(n)})
        numbers.append([sum(math.prod(shape) for shape, _ in way) for way in (one.shapes, one.sent)])
    assert numbers[0] == numbers[1]
    assert numbers[0][0] == up
    assert numbers[0][1] >= down  # and the key


@pytest.mark.slow
def test_few_seeds_span_what_can_be_reached():
    """One client, K = 2: the minimiser over x₀ + span(z₁, z₂), where all its s vanish."""
    method = fs.FedKSeed(0.03, 0.1, K=2, tau=5)
    data = fs.FederatedData.from_clients(PARTS[:1])
    found = solve(method, data, 400)
    x0, a, b = flat(X0), PARTS[0]["a"], PARTS[0]["b"]
    z = [method.direction(j, jax.tree.map(np.float32, X0)) for j in range(2)]
    Z = np.stack([np.concatenate([d["u"][0], d["v"][0]]) for d in z])
    best = x0 + Z.T @ np.linalg.lstsq(a @ Z.T, b - a @ x0, rcond=None)[0]
    np.testing.assert_allclose(flat(found.x), best, atol=1e-3)


@pytest.mark.slow
def test_what_the_server_sends_is_where_it_stands():
    method = fs.FedKSeed(lambda r: 0.1 / (1 + r), 0.1, K=5, tau=np.array([1, 0, 4]), batch_size=2)
    found = solve(method, rounds=6, participation=2)
    assert np.abs(flat(found.x) - flat(X0)).max() > 0
    np.testing.assert_allclose(flat(method.at(0).moved(X0, found.state.A)), flat(found.x), atol=1e-5)


@pytest.mark.parametrize("cls", [fs.DeComFL, fs.HiSo, fs.FedKSeed])
def test_a_set_is_refused(cls):
    problem = fs.Minimization(loss, project=fs.sets.Ball(1.0))
    with pytest.raises(ValueError, match="Use FedRZO or FedZO"):
        fs.solve(problem, cls(0.1, 0.1), DATA, X0, rounds=1)
