"""Who takes part, and what each then counts for: against the probabilities and means on paper."""

from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.core.cohorts import MANY, by_weight, threshold
from fedstrata.engines.rounds import uniformly

ZIPF = np.random.default_rng(0).zipf(1.5, 2 * MANY + 500).clip(1, 2000)  # more than are shuffled one by one


@pytest.mark.parametrize(
    ("sizes", "count", "theta"),
    [
        ([1, 9], 1, 10.0),  # π = 1/10, 9/10
        ([1, 2, 3, 50], 2, 6.0),  # the last for certain, one of the others
        pytest.param(
            [1, 1, 5, 20], 3, 2.0, marks=pytest.mark.slow
        ),  # who is certain only once another one is
        pytest.param([5, 5, 5], 2, 7.5, marks=pytest.mark.slow),
        pytest.param(ZIPF, 100, None, marks=pytest.mark.slow),
    ],
)
def test_clients_are_drawn_by_weight_and_count_what_they_should(sizes, count, theta):
    """π_i = min(1, n_i/θ), nobody twice, and max(n_i, θ) sum to all weight in every draw."""
    sizes, draws = np.asarray(sizes), 20_000
    n = jnp.asarray(sizes, jnp.int32)
    of = threshold(n, count)
    found = float(of.rest / of.left)
    if theta is not None:
        assert found == pytest.approx(theta)
    probabilities = np.minimum(1, sizes / found)
    assert probabilities.sum() == pytest.approx(count, rel=1e-6)
    keys = jax.random.split(jax.random.key(1), draws)
    drawn = np.asarray(jax.jit(jax.vmap(lambda key: by_weight(key, n, count, of)))(keys))
    assert (np.diff(drawn, axis=1) > 0).all()
    often = np.bincount(drawn.reshape(-1), minlength=len(sizes)) / draws
    deviation = np.sqrt(probabilities * (1 - probabilities) / draws)
    assert (np.abs(often - probabilities) <= 5 * deviation + 1e-6).all()
    counts = np.asarray(of.counts(n[drawn])).sum(1)
    np.testing.assert_allclose(counts, sizes.sum(), rtol=1e-6)


@pytest.mark.slow
def test_a_few_of_many_are_drawn_evenly():
    """Every client equally likely, no one twice: against the binomial distribution."""
    clients, count, draws = MANY + 1, 20, 4_000
    drawn = np.asarray(
        jax.jit(jax.vmap(lambda k: uniformly(k, clients, count)))(jax.random.split(jax.random.key(0), draws))
    )
    assert all(len(set(row)) == count for row in drawn.tolist())
    assert drawn.min() >= 0
    assert drawn.max() < clients
    tenths = np.bincount(drawn.reshape(-1) * 10 // clients, minlength=10)
    expected = draws * count / 10
    np.testing.assert_allclose(tenths, expected, atol=5 * np.sqrt(expected))
    # where draws coincide, as they must with so many, all sets stay equally likely
    pairs = jax.vmap(lambda k: jnp.sort(uniformly(k, clients, clients // 8)))(
        jax.random.split(jax.random.key(1), 50)
    )
    assert (np.diff(np.asarray(pairs), axis=1) > 0).all()


CLIENTS = [{"a": np.full(n, float(v))} for n, v in ((1, 0.0), (9, 1.0), (2, -3.0), (4, 2.0))]
OPTIMUM = np.concatenate([client["a"] for client in CLIENTS]).mean()


def square(x, s):
    return (x - s["a"]) ** 2 / 2


def time_mean(problem, method, y0=None, rounds=20_000):
    """The mean of the iterates after the start, and its deviation from batches of them."""
    result = fs.solve(
        problem, method, fs.FederatedData.from_clients(CLIENTS), np.float64(0.0), y0=y0, rounds=rounds,
        participation=2, weights="size", metrics={"at": lambda x, y: x}, eval_every=10, progress=False,
    )  # fmt: skip
    means = result.history["at"][-1600:].reshape(16, -1).mean(1)
    return means.mean(), means.std(ddof=1) / 4


METHODS = {
    "FedAvg": fs.FedAvg(0.05),
    "FedProx": fs.FedProx(0.05),
    "FedRZO": fs.FedRZO(0.05, 0.05, batch_size=None, two_sided=True),
    "FedRZO, scalars": fs.FedRZO(0.05, 0.05, batch_size=None, two_sided=True, messages="scalars"),
    "LFD": fs.LFD(0.05, devices=1),
    "FedAvg, steps by client": fs.FedAvg(0.05, H=(1, 1, 1, 1)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [m if m == "FedAvg" else pytest.param(m, marks=pytest.mark.slow) for m in METHODS]
)
def test_sampled_clients_with_weights_have_everyones_solution_on_average(name, x64):
    """A linear iteration: the mean over time is exact, whoever is drawn."""
    mean, deviation = time_mean(fs.Minimization(square), METHODS[name])
    uniform = np.mean([np.concatenate([p["a"], q["a"]]).mean() for p, q in combinations(CLIENTS, 2)])
    assert abs(uniform - OPTIMUM) > 10 * deviation  # where cohorts drawn evenly would end
    assert abs(mean - OPTIMUM) <= 5 * deviation


@pytest.mark.slow
@pytest.mark.parametrize("clients", [1, 2])
def test_a_sample_of_a_cohort_has_everyones_solution_on_average(clients, x64):
    """FedMSA's second draw, from those of the first; a bilevel problem whose y is the mean of the data."""
    problem = fs.Bilevel(
        lambda x, y, s: (x - y) ** 2 / 2, lambda x, y, s: (y - s["a"]) ** 2 / 2, same_samples=True
    )
    mean, deviation = time_mean(problem, fs.FedMSA(0.05, 0.05, K=3, clients=clients), np.float64(0.0))
    assert deviation < 0.05
    assert abs(mean - OPTIMUM) <= 5 * deviation


def test_equal_clients_are_drawn_as_without_weights():
    """Then weights say nothing, and the run is the same."""
    data = fs.FederatedData.from_clients([{"a": np.full(3, float(v))} for v in range(5)])
    runs = [
        fs.solve(fs.Minimization(square), fs.FedAvg(0.1), data, np.float64(0.0), rounds=5, participation=2,
                 weights=weights, progress=False).x
        for weights in ("uniform", "size")
    ]  # fmt: skip
    np.testing.assert_allclose(runs[0], runs[1], rtol=1e-6)


def test_more_samples_than_can_be_drawn_by_are_refused():
    """Sizes are added as 32-bit numbers, which would go round silently."""
    many = fs.FederatedData.from_source(
        fs.data.FromFunction(
            [2**30, 2**30, 5], lambda client: {"a": np.zeros(1)}, {"a": jax.ShapeDtypeStruct((), float)}
        )
    )
    with pytest.raises(ValueError, match="2³¹ samples"):
        fs.solve(
            fs.Minimization(square), fs.FedAvg(0.1), many, 0.0, rounds=1, participation=2, weights="size"
        )
