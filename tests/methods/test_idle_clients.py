"""A client with no local steps in a round takes no part in it, whatever the method: limits in closed form."""

import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs

pytestmark = pytest.mark.usefixtures("x64")

SIZES = (4, 2, 3)
STEPS = np.array([1, 2, 0])  # the last client is idle, so that the others keep their numbers
RNG = np.random.default_rng(5)
CURVES = (0.5, 1.0, 2.0)
CLIENTS = [
    {"q": np.full(n, q), "c": RNG.normal(size=(n, 2)) + 4 * q, "d": RNG.normal(size=n)}
    for n, q in zip(SIZES, CURVES, strict=True)
]
ALL, WORKING = (fs.FederatedData.from_clients(CLIENTS[:k]) for k in (3, 2))
X0 = {"w": np.array([0.3, -0.2])}
MINIMIZATION = fs.Minimization(lambda x, s: s["q"] * ((x["w"] - s["c"]) ** 2).sum() / 2)
MINIMAX = fs.Minimax(lambda x, y, s: s["q"] * ((x["w"] - s["c"]) ** 2).sum() / 2 + y * x["w"][0] - y**2 / 2)
BILEVEL = fs.Bilevel(
    upper=lambda x, y, s: s["q"] * ((x["w"] - s["c"]) ** 2).sum() / 2 + (y - s["d"]) ** 2 / 2,
    lower=lambda x, y, s: s["q"] * (y - x["w"][0] - s["d"]) ** 2 / 2,
    same_samples=True,
)
GAME = fs.MPEC(
    leader=lambda x, y, s: s["q"] * ((x["w"] - s["c"]) ** 2).sum() / 2 + y * x["w"][1],
    follower=lambda x, y, s: y - x["w"][0] - s["d"],
    project_y=lambda y: jnp.maximum(y, 0),
)


def solve(problem, method, data, rounds=3, **options):
    y0 = None if problem is MINIMIZATION else np.zeros(())
    options = {
        "weights": "size",
        "progress": False,
        "eval_every": rounds,
        "default_metrics": False,
        **options,
    }
    return fs.solve(problem, method, data, X0, y0=y0, rounds=rounds, **options)


METHODS = {
    "FedAvg": (MINIMIZATION, lambda H: fs.FedAvg(0.1, H=H)),
    "FedProx": (MINIMIZATION, lambda H: fs.FedProx(0.1, 0.5, H=H)),
    "FedMSPP": (MINIMIZATION, lambda H: fs.FedMSPP(0.5, 0.1, H=H)),
    "FedZO": (MINIMIZATION, lambda H: fs.FedZO(0.05, 1e-3, H=H)),
    "FedRZO": (MINIMIZATION, lambda H: fs.FedRZO(0.05, 1e-3, H=H)),
    "LocalSGDA": (MINIMAX, lambda H: fs.LocalSGDA(0.1, 0.1, tau=H)),
    "SimFBO": (BILEVEL, lambda H: fs.SimFBO(*[0.1] * 6, tau=H)),
    "FedRZOTwoStage": (GAME, lambda H: fs.FedRZOTwoStage(0.05, 1e-2, H=H, alpha=0.5)),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "FedAvg" else pytest.mark.slow) for n in METHODS]
)
def test_an_idle_client_is_as_none(name):
    problem, method = METHODS[name]
    found = solve(problem, method(STEPS), ALL)
    expected = solve(problem, method(STEPS[:2]), WORKING)
    np.testing.assert_allclose(found.x["w"], expected.x["w"], rtol=1e-12)
    assert np.abs(found.x["w"] - X0["w"]).min() > 1e-3  # it moves


def best(clients):
    q, c = (np.concatenate([client[k] for client in clients]) for k in "qc")
    return (q[:, None] * c).sum(0) / q.sum()


def every_other(r):
    """The last client works in every other round."""
    return jnp.where(jnp.arange(3) == 2, 3 * (r % 2), 2)


@pytest.mark.slow
@pytest.mark.parametrize("participation", [1.0, 2])
def test_where_scaffold_ends(participation):
    """Idle for good: the optimum of the others. Idle at times: everyone's, as with partial participation."""
    for K, expected in ((STEPS, best(CLIENTS[:2])), (every_other, best(CLIENTS))):
        method = fs.SCAFFOLD(0.05, K=K)
        result = solve(MINIMIZATION, method, ALL, 2000, participation=participation)
        np.testing.assert_allclose(result.x["w"], expected, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("method", [fs.FedNest(0.2, 0.3, T=2, tau=STEPS, ell=4.0, N=100, inverse="series"),
                                    fs.FedMSA(0.1, 0.3, K=STEPS, clients=3)])  # fmt: skip
def test_who_computes_means_counts_in_the_limit(method):
    """FedNest and FedMSA ask all clients for their maps, idle ones too: the limit is everyone's."""
    q, c, d = (np.concatenate([client[k] for client in CLIENTS]) for k in "qcd")
    shift = (q * d).sum() / q.sum()  # y(x) = x₀ + shift
    matrix = np.diag([q.mean() + 1, q.mean()])
    expected = np.linalg.solve(matrix, (q[:, None] * c).mean(0) + np.array([d.mean() - shift, 0]))
    result = solve(BILEVEL, method, ALL, 1500)
    np.testing.assert_allclose(result.x["w"], expected, atol=1e-7)


def test_where_nobody_works_nothing_moves():
    nobody = np.zeros(3, int)
    for method in (fs.FedAvg(0.1, H=nobody), fs.SCAFFOLD(0.1, K=nobody)):
        np.testing.assert_array_equal(solve(MINIMIZATION, method, ALL).x["w"], X0["w"])


def test_unlike_numbers_of_steps_weigh_clients_and_the_certificate_says_so():
    """½(x − a)², a = 0, 0, 0, 1, 9, the last with ten steps: short ones end near 91/14, not at 2."""
    data = fs.FederatedData.from_clients([{"a": np.array([a])} for a in (0.0, 0.0, 0.0, 1.0, 9.0)])
    problem = fs.Minimization(lambda x, s: 0.5 * (x - s["a"]) ** 2)
    H = np.array([1, 1, 1, 1, 10])

    def found(method):
        return fs.solve(problem, method, data, np.array(20.0), rounds=6000, eval_every=50, progress=False)

    biased = found(fs.FedAvg(1e-3, H))
    assert float(biased.x) == pytest.approx(91 / 14, rel=1e-2)
    assert biased.certificate.verdict == "biased by drift"
    assert "set H=1" in biased.certificate.advice
    assert float(found(fs.SCAFFOLD(1e-3, 1.0, H)).x) == pytest.approx(2, rel=1e-2)
