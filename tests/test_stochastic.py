"""Losses that draw: one key for each ξ, none in evaluations; augmentation given to the data."""

import jax
import numpy as np
import pytest

import fedstrata as fs

pytestmark = pytest.mark.slow  # the kit has a row that draws

rng = np.random.default_rng(0)
clients = [{"a": rng.normal(i, 1, (4 + i, 3))} for i in range(4)]
data = fs.FederatedData.from_clients(clients)
x0 = np.ones(3)


def plain(x, sample):
    return 0.5 * ((x - sample["a"]) ** 2).sum()


def noise(key, size=1e3):
    return 0.0 if key is None else size * jax.random.normal(key)


@fs.stochastic
def constant(x, sample, key):
    """Noise that a difference at one ξ does not see, and any other does."""
    return plain(x, sample) + noise(key)


@fs.stochastic
def sloped(x, sample, key):
    return plain(x, sample) + noise(key, 0.1) * x.sum()


def solved(loss, method, data=data, **options):
    return fs.solve(fs.Minimization(loss), method, data, x0, rounds=3, progress=False, **options)


@pytest.mark.parametrize("batch_size", [None, 2])
def test_two_points_at_one_xi_share_the_key(x64, batch_size):
    method = fs.FedRZO(gamma=0.01, eta=0.1, H=2, batch_size=batch_size)
    with_noise, without = solved(constant, method), solved(plain, method)
    np.testing.assert_allclose(with_noise.x, without.x, rtol=1e-8)
    np.testing.assert_allclose(with_noise.history["loss"], without.history["loss"], rtol=1e-8)


def test_a_full_batch_draws_once_a_step_and_evaluations_do_not():
    """With one client and H = 1 the noise of round r is the mean of its samples' draws, all of them new."""
    one = fs.FederatedData.from_clients([{"a": np.zeros((50, 3))}])
    x = solved(sloped, fs.FedAvg(gamma=0.1), one)
    moved = np.asarray(x.x) - 0.9**3
    assert np.ptp(moved) < 1e-6
    assert 0 < abs(moved[0]) < 5 * 0.1 * 0.1 * np.sqrt(3 / 50)
    assert np.isclose(x.history["loss"][0], 1.5)
    assert not np.allclose(solved(sloped, fs.FedAvg(gamma=0.1), one, seed=1).x, x.x, atol=1e-6)


def test_one_that_ignores_its_key_is_the_plain_loss(x64):
    for method in (fs.FedAvg(0.1, H=2, batch_size=3), fs.SCAFFOLD(eta_l=0.1, eta_g=1.0, K=2, batch_size=3)):
        ignoring = solved(fs.stochastic(lambda x, sample, key: plain(x, sample)), method)
        np.testing.assert_array_equal(ignoring.x, solved(plain, method).x)


def test_what_is_made_of_it_draws_too(x64):
    """Noise with mean zero in both levels moves the run, and shared noise in a difference does not."""
    upper = fs.stochastic(lambda x, y, s, key: plain(y, s) + (x**2).sum() + noise(key))
    lower = fs.stochastic(lambda x, y, s, key: plain(y - x, s) + noise(key, 0.1) * y.sum())
    problem = fs.Bilevel(upper, lower, same_samples=True)
    quiet = fs.Bilevel(
        lambda x, y, s: plain(y, s) + (x**2).sum(), lambda x, y, s: plain(y - x, s), same_samples=True
    )
    for made in (problem, fs.as_multisequence(problem)):
        start = np.zeros(3) if made is problem else ((np.zeros(3), np.zeros(3)),)
        run = fs.solve(made, fs.FedMSA(0.01, 0.01, K=2, batch_size=2), data, x0, y0=start, rounds=2,
                       progress=False)  # fmt: skip
        other = quiet if made is problem else fs.as_multisequence(quiet)
        still = fs.solve(other, fs.FedMSA(0.01, 0.01, K=2, batch_size=2), data, x0, y0=start, rounds=2,
                         progress=False)  # fmt: skip
        gaps = [
            np.abs(a - b).max() for a, b in zip(jax.tree.leaves(run.y), jax.tree.leaves(still.y), strict=True)
        ]
        assert 0 < max(gaps) < 0.1
        first = next(iter(run.history.keys() & still.history.keys() - {"seconds", "round"}))
        assert np.isclose(run.history[first][0], still.history[first][0])


def test_evaluate_and_batches():
    loss = fs.stochastic(lambda x, s, key: plain(x, s) + noise(key), evaluate=lambda x, s: plain(x, s) + 7)
    assert solved(loss, fs.FedAvg(0.1)).history["loss"][0] == pytest.approx(
        7 + solved(plain, fs.FedAvg(0.1)).history["loss"][0]
    )

    @fs.per_batch
    @fs.stochastic
    def batch(x, batch, key):
        assert key is None or key.shape == ()
        return jax.vmap(plain, (None, 0))(x, batch).mean() + noise(key) * x[0]

    method = fs.FedAvg(0.1, batch_size=2)
    assert not np.allclose(solved(batch, method, default_metrics=False).x[0], x0[0], atol=0.5)


def test_mistakes():
    with pytest.raises(TypeError, match="calls a function marked"):
        fs.Minimization(lambda x, sample: constant(x, sample) + 1.0)
    with pytest.raises(TypeError, match="with a key it returns"):
        solved(fs.stochastic(lambda x, s, key: plain(x, s) if key is None else x), fs.FedAvg(0.1))
    with pytest.raises(fs.DataError, match="must return a sample like"):
        data.augmented(lambda sample, key: {"a": sample["a"][:2]})


def test_augmented_data_is_evaluated_as_it_is():
    """Samples moved by one: the limit is the mean plus one, the loss there that of the real samples."""
    moved = data.augmented(lambda sample, key: {"a": sample["a"] + 1})
    run = fs.solve(fs.Minimization(plain), fs.FedAvg(0.5), moved, x0, rounds=60, progress=False)
    mean = np.mean([c["a"].mean(0) for c in clients], 0)
    np.testing.assert_allclose(run.x, mean + 1, rtol=1e-5)
    exact = np.mean([(0.5 * (c["a"] - mean - 1) ** 2).sum(1).mean() for c in clients])
    assert run.history["loss"][-1] == pytest.approx(exact, rel=1e-5)


def test_dropout_of_pytorch():
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(3, 1, bias=False))
    with torch.no_grad():
        module[1].weight.fill_(1.0)
    loss = fs.from_torch(module, torch.nn.functional.mse_loss)
    own = [{"x": np.ones((3, 3), np.float32), "y": np.zeros((3, 1), np.float32)} for _ in range(4)]
    federated = fs.FederatedData.from_clients(own)
    problem = fs.Minimization(loss)

    def run(method, **options):
        return fs.solve(problem, method, federated, loss.x0, rounds=2, progress=False, **options)

    found = run(fs.FedAvg(0.01, H=2, batch_size=2))
    assert found.history["loss"][0] == pytest.approx(9.0)  # without dropout
    x = found.x["1.weight"]
    assert np.ptp(x) > 1e-4  # which inputs were dropped shows
    for engine in (fs.engines.Simulated(chunk=1), "debug"):
        other = run(fs.FedAvg(0.01, H=2, batch_size=2), engine=engine).x["1.weight"]
        np.testing.assert_allclose(other, x, rtol=1e-5)
    # the loss is a multiple of w² at one mask: two points at one ξ differ by what the mask leaves
    values = run(fs.FedRZO(gamma=1e-4, eta=1e-2, H=1, batch_size=2)).x["1.weight"]
    assert np.abs(np.asarray(values) - 1).max() < 0.1
