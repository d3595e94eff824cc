"""Methods of descent ascent beside Local SGDA: by hand, by reductions, and their limits in closed form."""

from __future__ import annotations

import numpy as np
import pytest

import fedstrata as fs

pytestmark = pytest.mark.usefixtures("x64")
N, P = 2, 3


@pytest.fixture(scope="module")
def saddle():
    return fs.quadratic_minimax(clients=3, n=N, p=P)


@pytest.fixture(scope="module")
def noisy():
    return fs.quadratic_minimax(clients=3, n=N, p=P, samples=4, noise=0.5)


def solve(saddle, method, rounds, **more):
    more = {"progress": False, "eval_every": rounds, "certify": False, **more}
    return fs.solve(saddle.problem, method, saddle.data, np.ones(N), y0=np.ones(P), rounds=rounds, **more)


def point(result):
    return np.concatenate([result.x, result.y])


def maps(saddle):
    """The clients' M_i and b_i, and the signs of their operators G_i(z) = s (M_i z − b_i)."""
    M, b = (np.asarray(saddle.data.stacked()[k])[:, 0] for k in "Mb")
    return M, b, np.array([1.0] * N + [-1.0] * P)


def distance(saddle, result):
    return np.linalg.norm(point(result) - np.concatenate([saddle.x_star, saddle.y_star]))


LIKE_LOCAL_SGDA = {
    "fessgda": fs.FESSGDA(0.05, 0.1, K=3, p=0.0, batch_size=2),
    "fedsgda-plus": fs.FedSGDAPlus(0.05, 0.1, K=1, batch_size=2),
    "normalized-sgda": fs.NormalizedSGDA(0.05, 0.1, K=3, batch_size=2),
}


@pytest.mark.parametrize(
    "name", ["fessgda", pytest.param("fedsgda-plus", marks=pytest.mark.slow), "normalized-sgda"]
)
def test_reduces_to_local_sgda(noisy, name):
    """Without the quadratic term; and where a snapshot is always the point itself."""
    method = LIKE_LOCAL_SGDA[name]
    same = fs.LocalSGDA(0.05, 0.1, tau=method.K, batch_size=2)
    np.testing.assert_allclose(point(solve(noisy, method, 3)), point(solve(noisy, same, 3)), rtol=1e-12)


def test_a_round_of_fessgda_by_hand(saddle):
    M, b, s = maps(saddle)
    eta, g = np.array([0.05] * N + [0.1] * P), np.array([0.8] * N + [0.9] * P)
    z = start = np.ones(N + P)
    centre = start[:N]
    for _ in range(2):
        ends = []
        for i in range(3):
            own = z
            for _ in range(2):
                own = own - eta * s * (M[i] @ own - b[i])
            ends.append(own)
        moved = z + g * (np.mean(ends, axis=0) - z)
        moved[:N] -= 0.05 * 0.8 * 2 * 1.5 * (z[:N] - centre)
        z = moved
        centre = centre + 0.3 * (z[:N] - centre)
    method = fs.FESSGDA(0.05, 0.1, K=2, p=1.5, beta=0.3, eta_xg=0.8, eta_yg=0.9)
    np.testing.assert_allclose(point(solve(saddle, method, 2)), z, rtol=1e-12)


def test_unlike_numbers_of_steps_pull_by_their_mean(saddle):
    """With steps 1, 2, 3 and 2, 2, 2 the pull to z is the same, whatever the clients' own ends."""
    far = fs.FESSGDA(1e-9, 1e-9, K=np.array([1, 2, 3]), p=1e8, beta=0.5)
    even = fs.FESSGDA(1e-9, 1e-9, K=2, p=1e8, beta=0.5)
    np.testing.assert_allclose(point(solve(saddle, far, 3)), point(solve(saddle, even, 3)), rtol=1e-6)


def test_normalised_steps_are_not_pulled_by_their_numbers(saddle):
    """Numbers of 1, 4 and 7: the bias falls with the step sizes, Local SGDA's stays."""
    K = np.array([1, 4, 7])
    off = {}
    for cls in (fs.NormalizedSGDA, fs.LocalSGDA):
        off[cls] = [distance(saddle, solve(saddle, cls(0.02 / k, 0.02 / k, K), 2000 * k)) for k in (1, 4)]
    first, second = off[fs.NormalizedSGDA]
    assert second < first / 3  # of order 1: about a fourth
    assert off[fs.LocalSGDA][1] > 0.5 * off[fs.LocalSGDA][0]


def test_smoothing_solves_a_game_on_which_descent_ascent_turns_for_ever():
    """f = x y: descent ascent lengthens (x, y) by √(1 + η²); with p = 2 eigenvalues are < 1."""
    data = fs.FederatedData.from_clients([{"a": np.ones(1)}] * 2)
    game = fs.Minimax(lambda x, y, s: s["a"] * x * y)

    def size(method):
        options = {"y0": 1.0, "rounds": 400, "eval_every": 400, "progress": False, "certify": False}
        result = fs.solve(game, method, data, 1.0, **options)
        return np.hypot(float(result.x), float(result.y))

    turns = size(fs.LocalSGDA(0.1, 0.1))
    assert turns == pytest.approx(np.sqrt(2) * 1.01**200, rel=1e-9)
    x, y, z = np.eye(3)
    x, y = x - 0.1 * y - 0.2 * (x - z), y + 0.1 * x
    step = np.array([x, y, z + 0.2 * (x - z)])
    assert np.abs(np.linalg.eigvals(step)).max() < 1
    end = np.linalg.matrix_power(step, 400) @ np.ones(3)
    assert size(fs.FESSGDA(0.1, 0.1, p=2.0, beta=0.2)) == pytest.approx(np.hypot(*end[:2]), rel=1e-9)


def test_a_snapshot_is_kept_for_some_rounds(saddle):
    """S = 2, K = 1, η = ½, by hand."""
    M, b, _ = maps(saddle)
    M, b = M.mean(0), b.mean(0)
    z = np.ones(N + P)
    for r in range(4):
        if r % 2 == 0:
            kept = z[:N]
        seen = np.concatenate([kept, z[N:]])
        step = np.concatenate([-0.05 * (M @ z - b)[:N], 0.1 * (M @ seen - b)[N:]])
        z = z + 0.5 * step
    method = fs.FedSGDAPlus(0.05, 0.1, S=2, eta=0.5)
    np.testing.assert_allclose(point(solve(saddle, method, 4)), z, rtol=1e-12)


@pytest.mark.slow
def test_descent_ascent_keeps_what_its_theorem_promises(saddle):
    theory = fs.plan(saddle.problem, saddle.data, np.ones(N), np.ones(P), method=fs.LocalSGDA).theory
    assert all(condition.holds for condition in theory.conditions)
    result = solve(saddle, theory.method, int(np.ceil(theory.rounds)))
    away = np.linalg.norm(np.ones(N + P) - np.concatenate([saddle.x_star, saddle.y_star]))
    assert distance(saddle, result) <= 0.01 * away


# Control variates


def test_fedgda_gt_is_fedmsa_with_all_clients(saddle):
    """FedGDA-GT (Sun, Wei 2022): w_i ← w_i − γ (G_i(w_i) − G_i(w) + Ḡ), K times, then the mean."""
    M, b, s = maps(saddle)

    def G(i, z):
        return s * (M[i] @ z - b[i])

    z = np.ones(N + P)
    for _ in range(3):
        mean, ends = np.mean([G(i, z) for i in range(3)], axis=0), []
        for i in range(3):
            own = z
            for _ in range(4):
                own = own - 0.05 * (G(i, own) - G(i, z) + mean)
            ends.append(own)
        z = np.mean(ends, axis=0)
    # FedMSA's first round has K = 1, which is a step of descent ascent: one more round, from the same point
    method = fs.FedMSA(0.05, 0.05, K=4, clients=3)
    x0, y0 = _before(saddle, 0.05)
    first = fs.solve(saddle.problem, method, saddle.data, x0, y0=y0, rounds=4, progress=False)
    np.testing.assert_allclose(point(first), z, rtol=1e-10)


def _before(saddle, gamma):
    """A point from which one step of descent ascent leads to ones; and y0 as a dict of arguments."""
    M, b, s = maps(saddle)
    A = np.eye(N + P) - gamma * s[:, None] * M.mean(0)
    z = np.linalg.solve(A, np.ones(N + P) - gamma * s * b.mean(0))
    return z[:N], z[N:]


def test_codasca_without_stages_is_scaffold_on_the_operator(saddle):
    """Two rounds by hand: c_i is the mean of the client's operators, and c the clients' mean of them."""
    M, b, s = maps(saddle)
    z, c, eta = np.ones(N + P), np.zeros((3, N + P)), np.array([0.05] * N + [0.1] * P)
    for _ in range(2):
        ends, new = [], []
        for i in range(3):
            own, seen = z, []
            for _ in range(3):
                g = s * (M[i] @ own - b[i])
                seen.append(g)
                own = own - eta * (g - c[i] + c.mean(0))
            ends.append(own)
            new.append(np.mean(seen, axis=0))
        z, c = z + 0.8 * (np.mean(ends, axis=0) - z), np.array(new)
    method = fs.CODASCA(0.05, I=3, eta_y=0.1, eta_g=0.8)
    np.testing.assert_allclose(point(solve(saddle, method, 2)), z, rtol=1e-12)


def test_the_stages_of_codasca(saddle):
    """Two rounds with η, then steps of η/3 and a pull to the mean of both rounds' x; I = 1, by hand."""
    M, b, s = maps(saddle)
    M, b = M.mean(0), b.mean(0)
    z, reference, seen = np.ones(N + P), np.ones(N), []
    for r in range(3):
        pull = np.concatenate([0.7 * (z[:N] - reference), np.zeros(P)])
        z = z - (0.1 if r < 2 else 0.1 / 3) * (s * (M @ z - b) + pull)
        seen.append(z[:N])
        if r == 1:
            reference = np.mean(seen, axis=0)
    result = solve(saddle, fs.CODASCA(0.1, 0.7, rounds=2), 3)
    np.testing.assert_allclose(point(result), z, rtol=1e-12)


CORRECTED = {
    "scaffnew": fs.Scaffnew(0.1, 0.3),
    "codasca": fs.CODASCA(0.1, I=4, rounds=1000),
}


@pytest.mark.parametrize("name", CORRECTED)
def test_control_variates_find_the_saddle_point(saddle, name):
    assert distance(saddle, solve(saddle, CORRECTED[name], 600)) < 1e-9


def test_scaffnew_with_certain_communication_is_descent_ascent(saddle):
    same = fs.LocalSGDA(0.1, 0.1)
    np.testing.assert_allclose(
        point(solve(saddle, fs.Scaffnew(0.1, 1.0), 5)), point(solve(saddle, same, 5)), rtol=1e-12
    )


def test_sets_are_refused_by_control_variates(saddle):
    bounded = fs.Minimax(saddle.problem.payoff, project_y=fs.sets.Ball(1.0))
    for cls in (fs.Scaffnew, fs.CODASCA):
        assert f"{cls.__name__}'s control variates assume that the variables have no set" in cls.refuses(
            bounded
        )
