"""Arrays that functions read and no method changes: one copy, as an argument of compiled programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.engines import programs

rng = np.random.default_rng(0)
data = fs.FederatedData.from_clients(
    [{"a": rng.normal(size=(4 + i, 3)), "b": rng.normal(size=4 + i)} for i in range(3)]
)
base = {"w": np.array([1.0, 2.0, 3.0], np.float32)}
x0 = np.zeros(3)


def loss(x, s, frozen):
    return (s["a"] @ (frozen["w"] + x) - s["b"]) ** 2 / 2


def lower(x, y, s, frozen):
    return loss(y, s, frozen) + 0.5 * jnp.exp(x) * (y @ y)


def closed(x, s):
    return loss(x, s, base)


def solved(problem, method=None, x0=x0, **options):
    method = fs.FedAvg(0.1, H=2) if method is None else method
    return fs.solve(problem, method, data, x0, rounds=4, progress=False, **options)


@pytest.mark.parametrize("engine", ["simulated", "network"])
def test_it_is_the_loss_that_closes_over_them(engine):
    frozen = solved(fs.Minimization(loss, frozen=base), engine=engine)
    over = solved(fs.Minimization(closed), engine=engine)
    np.testing.assert_array_equal(frozen.x, over.x)
    np.testing.assert_array_equal(frozen.history["loss"], over.history["loss"])


def test_every_function_of_a_problem_gets_them():
    bilevel = fs.Bilevel(lambda x, y, s, f: loss(y, s, f), lower, same_samples=True, frozen=base)
    over = fs.Bilevel(lambda x, y, s: closed(y, s), lambda x, y, s: lower(x, y, s, base), same_samples=True)
    method = fs.FedMSA(0.05, 0.1, K=2)
    runs = [solved(problem, method, np.float32(0), y0=x0) for problem in (bilevel, over)]
    np.testing.assert_allclose(runs[0].x, runs[1].x, rtol=1e-6)

    selection = fs.Selection(loss, lambda x: x @ x, frozen=base)  # a known function reads x alone
    assert selection.h.loss.draws is False
    assert len(selection.held) == 1
    risk = fs.dro.cvar(fs.with_frozen(loss, base), 0.5)
    assert len(risk.held) == 1


def test_one_that_draws_gets_its_key_before_them():
    @fs.stochastic
    def drawing(x, s, key, frozen):
        return loss(x, s, frozen) + (0.0 if key is None else jax.random.normal(key) * x.sum())

    @fs.stochastic
    def over(x, s, key):
        return closed(x, s) + (0.0 if key is None else jax.random.normal(key) * x.sum())

    found = solved(fs.Minimization(drawing, frozen=base)), solved(fs.Minimization(over))
    np.testing.assert_allclose(found[0].x, found[1].x, rtol=1e-6)


def test_other_arrays_compile_nothing_and_are_another_run(tmp_path):
    def problem(shift):
        return fs.Minimization(loss, frozen={"w": base["w"] + np.float32(shift)})

    first = solved(problem(0.0), checkpoint=tmp_path)
    kept = programs.kept()
    second = solved(problem(1.0))
    assert programs.kept() <= kept  # old programs of other tests may have been let go
    assert not np.allclose(first.x, second.x)
    with pytest.raises(fs.CheckpointError, match=r"frozen\[0\]: other contents"):
        solved(problem(1.0), checkpoint=tmp_path, resume=True)


def test_whole_numbers_that_would_wrap_around_are_refused():
    with pytest.raises(ValueError, match=r"frozen\['base'\] has whole numbers from 0 to 1099511627776"):
        fs.Minimization(loss, frozen={"base": np.array([0, 2**40])})
    with jax.enable_x64(True):
        assert fs.Minimization(loss, frozen=np.array([2**40])).frozen.arrays[0] == 2**40


@pytest.mark.slow
def test_there_is_one_copy(tmp_path):
    """In runs of any number of clients, in certificates and in measurements."""
    large = {"w": np.ones(3, np.float32), "unused": rng.normal(size=(400, 500)).astype(np.float32)}

    def bulky(x, s, frozen):
        return loss(x, s, frozen) + 1e-3 * jnp.tanh(frozen["unused"] @ jnp.full(500, x[0])).sum()

    problem = fs.Minimization(bulky, frozen=large)
    before = programs.kept()
    result = solved(problem, engine=fs.engines.Simulated(chunk=None), certify=False)
    assert fs.certify(result).verdict
    assert fs.constants(problem, data, x0).levels
    copies = [a for a in jax.live_arrays() if a.shape == (400, 500)]
    assert len(copies) == 1
    for run in programs.kept() - before:
        memory = run.memory_analysis()
        assert memory.temp_size_in_bytes < copies[0].nbytes  # clients side by side read the same one
        assert memory.generated_code_size_in_bytes < copies[0].nbytes
