"""The precision of products: rounded arguments and values, everything else as it was."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs

pytestmark = pytest.mark.slow  # of the quick tests, the rows of methods and of the kit would fail as well

rng = np.random.default_rng(0)
data = fs.FederatedData.from_clients(
    [{"a": rng.normal(size=(5, 4)), "b": rng.normal(size=5)} for _ in range(3)]
)


def loss(x, sample):
    return 0.5 * (sample["a"] @ x - sample["b"]) ** 2


def solved(precision="float32", method=None, function=loss, **options):
    method = method or fs.FedAvg(0.1)
    problem, options = fs.Minimization(function), {"rounds": 1, "progress": False, **options}
    return fs.solve(problem, method, data, np.ones(4), precision=precision, **options)


def rounded(a):
    return np.asarray(jnp.asarray(a, jnp.bfloat16), np.float64)


@pytest.mark.parametrize("engine", ["simulated", "debug", fs.engines.Simulated(chunk=1)])
def test_a_step_by_hand(engine):
    """aᵀx and its derivative by products of bfloat16; the mean over samples and the step are float32."""
    a, b = (
        np.stack([data.client(i)["a"] for i in range(3)]),
        np.stack([data.client(i)["b"] for i in range(3)]),
    )
    residual = rounded(rounded(a) @ np.ones(4)) - b
    each = rounded(rounded(residual / 5)[..., None] * rounded(a))
    found = solved("bfloat16", engine=engine)
    np.testing.assert_allclose(found.x, 1 - 0.1 * each.sum(1).mean(0), atol=2e-3)
    exact = 1 - 0.1 * ((a @ np.ones(4) - b)[..., None] * a).mean((0, 1))
    assert 1e-5 < np.abs(found.x - exact).max() < 2e-2
    assert found.x.dtype == np.float32


def test_metrics_are_exact_and_a_products_own_precision_is_kept():
    assert solved("bfloat16").history["loss"][0] == pytest.approx(solved().history["loss"][0], rel=1e-6)

    def careful(x, sample):
        return 0.5 * (jnp.dot(sample["a"], x, precision="highest") - sample["b"]) ** 2

    np.testing.assert_array_equal(solved("bfloat16", function=careful).x, solved(function=careful).x)
    np.testing.assert_allclose(solved("highest").x, solved().x, rtol=1e-6)


def test_hypergradients_are_taken_through_it():
    lower = lambda x, y, s: loss(y, s) + 0.5 * ((y - x) ** 2).sum()  # noqa: E731
    problem = fs.Bilevel(lambda x, y, s: loss(y, s), lower, same_samples=True)

    def run(precision):
        options = {"y0": np.zeros(4), "rounds": 3, "progress": False, "precision": precision}
        return fs.solve(problem, fs.FedMSA(0.1, 0.1, K=2), data, np.ones(4), **options)

    runs = run("float32"), run("bfloat16")
    gap = jax.tree.leaves(jax.tree.map(lambda a, b: np.abs(a - b).max(), runs[0].x, runs[1].x))
    assert 1e-7 < max(gap) < 2e-2


def test_what_does_not_bear_it_is_refused():
    with pytest.raises(ValueError, match="divides small differences of values"):
        solved("bfloat16", fs.FedRZO(gamma=0.1, eta=0.1, H=1))
    bilevel = fs.Bilevel(lambda x, y, s: loss(y, s), lambda x, y, s: loss(y, s), same_samples=True)
    for problem, method, why in (
        (bilevel, fs.FedMSA(0.1, 0.1, products="differences"), "small differences of gradients"),
        (bilevel, fs.FedF2SA(0.1, 0.1), "multiplies small differences"),
        (fs.Selection(loss, loss, same_samples=True), fs.IPIRFedAvg(0.1, 0.1), "times a small η"),
    ):
        with pytest.raises(ValueError, match=why):
            fs.solve(problem, method, data, np.ones(4), y0=None if problem is not bilevel else np.ones(4),
                     rounds=1, precision="bfloat16")  # fmt: skip
    with pytest.raises(ValueError, match="precision must be one of"):
        solved("float16")
