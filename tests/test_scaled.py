"""Bytes that are converted when samples are taken: the same iterates as from floats, in every engine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs

SIZES, MEAN, DEVIATION = (5, 9, 3), 100.0, (50.0, 60.0, 70.0)


def clients(convert):
    rng = np.random.default_rng(0)
    made = [{"x": rng.integers(0, 256, (n, 3), np.uint8), "y": rng.integers(0, 2, n)} for n in (*SIZES, 4)]
    if convert:
        dtype = jnp.result_type(float)
        scale = np.asarray(MEAN, dtype), np.asarray(DEVIATION, dtype)
        made = [{**one, "x": (one["x"].astype(dtype) - scale[0]) / scale[1]} for one in made]
    return made


def data_of(convert, source=False):
    *own, pooled = clients(convert)
    data = fs.FederatedData.from_clients(own, valid=own[::-1], test=pooled, server=pooled)
    if source:
        form = {"x": jax.ShapeDtypeStruct((3,), own[0]["x"].dtype), "y": jax.ShapeDtypeStruct((), np.int64)}
        read = fs.data.FromFunction(SIZES, own.__getitem__, form)
        data = fs.FederatedData.from_source(read, test=pooled, server=pooled)
    return data if convert else data.scaled(x=(MEAN, DEVIATION))


def loss(x, sample):
    assert jnp.issubdtype(sample["x"].dtype, jnp.floating)
    return jnp.logaddexp(0, (1 - 2 * sample["y"]) * (sample["x"] @ x))


def test_loss(x, y, data):
    return jax.vmap(loss, (None, 0))(x, data.test).mean() + jax.vmap(loss, (None, 0))(x, data.server).mean()


test_loss.__test__ = False


def solved(data, engine="simulated", **options):
    method = fs.FedAvg(gamma=0.1, H=2, batch_size=4)
    given = {"rounds": 3, "metrics": {"test": test_loss}, "progress": False, "participation": 2, **options}
    return fs.solve(fs.Minimization(loss), method, data, np.zeros(3), engine=engine, **given)


def same(one, other):
    """Up to the rounding of one conversion."""
    eps = 20 * np.finfo(jnp.result_type(float)).eps
    np.testing.assert_allclose(one.x, other.x, rtol=eps, atol=eps)
    for name in one.history.keys() & {"loss", "test"}:
        np.testing.assert_allclose(one.history[name], other.history[name], rtol=eps)


@pytest.mark.parametrize("source", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_same_iterates_as_from_floats(source):
    metrics = {} if source else {"test": test_loss}  # a stream is read in blocks
    one = solved(data_of(False, source), "streamed" if source else "simulated", metrics=metrics)
    same(one, solved(data_of(True), metrics=metrics))


@pytest.mark.slow
@pytest.mark.parametrize("engine", [pytest.param("debug", marks=pytest.mark.long), "sharded", "network"])
def test_the_same_iterates_in_every_engine(engine):
    metrics = {"test": test_loss} if engine != "network" else {}
    one, other = (solved(data_of(convert), engine, metrics=metrics) for convert in (False, True))
    np.testing.assert_allclose(one.x, other.x, rtol=1e-5)
    np.testing.assert_allclose(one.history["loss"], other.history["loss"], rtol=1e-5)


@pytest.mark.slow
def test_the_same_iterates_in_single_precision_and_of_a_server():
    problem = fs.Personalized(loss, lambda x, y: ((x - y) ** 2).sum(), lambda x, y, s: loss(y, s))
    method = fs.ZOHFL(gamma=0.01, eta=0.1, H=2, batch_size=2, server_batch_size=2)
    with jax.enable_x64(False):
        same(solved(data_of(False)), solved(data_of(True)))
        one, other = (
            fs.solve(problem, method, data_of(convert), np.zeros(3), y0=np.zeros(3), rounds=2, progress=False)
            for convert in (False, True)
        )
    np.testing.assert_allclose(one.x, other.x, rtol=1e-3, atol=1e-5)


def test_bytes_stay_bytes():
    data = data_of(False)
    placed = data.placed()
    assert placed.training.leaves["x"].values.dtype == np.uint8
    assert data.train["x"].dtype == np.uint8
    assert data.sample_of()["x"].dtype == jnp.result_type(float)
    np.testing.assert_allclose(data.client(1)["x"], data_of(True).client(1)["x"], rtol=1e-15)
    x, floats = data.train["x"].values, data_of(True).train["x"]
    assert data.nbytes < data_of(True).nbytes
    assert x.nbytes * floats.itemsize == floats.nbytes
    assert data.fingerprint != data.load([0, 1, 2]).scaled(y=(0, 1)).fingerprint


def test_mistakes_are_named():
    data = fs.FederatedData.from_clients(clients(False))
    with pytest.raises(fs.DataError, match=r"Unknown array 'z'; .* scaled: 'x', 'y'"):
        data.scaled(z=(0, 1))
    with pytest.raises(fs.DataError, match="deviation > 0"):
        data.scaled(x=(0, 0))
    with pytest.raises(fs.DataError, match="broadcast against a sample"):
        data.scaled(x=(0, (1, 2)))
    with pytest.raises(fs.DataError, match="Unknown array 'x'"):
        data.scaled(x=(0, 1)).scaled(x=(0, 1))
