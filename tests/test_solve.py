"""The loop over rounds: checks, history, stopping, checkpoints that survive a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedstrata as fs
from fedstrata.core.fed import Setup
from fedstrata.engines.debug import DebugFed
from fedstrata.engines.programs import kept
from fedstrata.solving import loop
from fedstrata.solving.pose import pose

A = np.array([[1.0, 0.2], [0.2, 0.5]])


def loss(x, sample):
    return 0.5 * ((x - sample["a"]) ** 2).sum()


problem = fs.Minimization(loss)
data = fs.FederatedData.from_clients([{"a": A}, {"a": A + 1}, {"a": A[:1] - 1}])
method = fs.FedAvg(gamma=0.1, H=2)
x0 = np.zeros(2)


def solve(**changes):
    arguments = {"problem": problem, "method": method, "data": data, "x0": x0, "rounds": 6, "progress": False}
    return fs.solve(**{**arguments, **changes})


def test_history_and_evaluations():
    every = solve()
    assert every.history["round"].tolist() == [0, 1, 2, 3, 4, 5, 6]
    sparse = solve(eval_every=4)
    assert sparse.history["round"].tolist() == [0, 4, 6]
    np.testing.assert_array_equal(sparse.history["loss"], every.history["loss"][[0, 4, 6]])
    np.testing.assert_array_equal(sparse.x, every.x)
    assert every.history["bytes_up"].tolist() == [24 * r for r in range(7)]
    per_round, rest = divmod(every.ledger.oracle_calls, 6)
    assert (rest, every.history["oracle_calls"].tolist()) == (0, [per_round * r for r in range(7)])
    assert (np.diff(every.history["seconds"]) >= 0).all()
    means = [np.mean([0.5 * ((0 - c) ** 2).sum(1).mean() for c in (A, A + 1, A[:1] - 1)])]
    np.testing.assert_allclose(every.history["loss"][0], means[0], rtol=1e-6)


def test_zero_rounds_is_the_start():
    result = solve(rounds=0)
    np.testing.assert_array_equal(result.x, x0)
    assert result.history["round"].tolist() == [0]
    assert result.ledger == fs.Ledger()


def test_metrics_of_every_kind():
    metrics = {
        "norm": lambda x, y: jnp.linalg.norm(x),
        "first": lambda state: state.x[0],
        "test": lambda x, y, data: ((x - data.test["a"]) ** 2).mean(),
    }
    with_test = fs.FederatedData.from_clients([{"a": A}], test={"a": A})
    result = solve(data=with_test, metrics=metrics, rounds=2)
    np.testing.assert_allclose(result.history["norm"][-1], np.linalg.norm(result.x), rtol=1e-6)
    np.testing.assert_allclose(result.history["first"][-1], result.x[0], rtol=1e-6)
    np.testing.assert_allclose(
        result.history["test"][-1], ((np.asarray(result.x) - A) ** 2).mean(), rtol=1e-6
    )
    assert "loss" not in solve(default_metrics=False).history


def test_step_sizes_may_be_schedules():
    schedule = optax.exponential_decay(0.1, transition_steps=1, decay_rate=0.5)
    result = solve(method=fs.FedAvg(gamma=schedule), rounds=3)
    x = x0
    for gamma in (0.1, 0.05, 0.025):
        x = np.mean([x - gamma * (x - c.mean(0)) for c in (A, A + 1, A[:1] - 1)], axis=0)
    np.testing.assert_allclose(result.x, x, rtol=1e-5)


def test_valid_data_is_where_upper_levels_sample():
    bilevel = fs.Bilevel(upper=lambda x, y, s: s["a"].sum(), lower=lambda x, y, s: s["a"].sum())
    federated = fs.FederatedData.from_clients([{"a": A}], valid=[{"a": 10 * A}])
    setup = Setup(bilevel, 1, 1)
    fed = DebugFed(setup, federated.placed(), None, None)
    values = bilevel.measure(fed.mean, jnp.zeros(2), jnp.zeros(2))
    np.testing.assert_allclose(
        [values["upper"], values["lower"]], [10 * A.sum(1).mean(), A.sum(1).mean()], rtol=1e-6
    )


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"problem": loss}, TypeError, "problem object such as fs.Minimization"),
        ({"method": fs.FedAvg}, TypeError, "method object such as"),
        ({"data": [A]}, TypeError, "FederatedData.from_clients"),
        ({"rounds": -1}, ValueError, "rounds must be a whole number"),
        ({"eval_every": 0}, ValueError, "eval_every"),
        ({"participation": 4}, ValueError, "not between 1 and 3"),
        ({"participation": 0.0}, ValueError, "fraction in"),
        ({"engine": "quantum"}, ValueError, "Unknown engine 'quantum'.*debug.*sharded.*simulated"),
        ({"weights": "loud"}, ValueError, "'uniform' or 'size'"),
        ({"x0": np.zeros(3)}, TypeError, "ONE sample"),
        ({"x0": np.array([0.0, np.nan])}, ValueError, "x0 is not finite"),
        ({"x0": "here"}, TypeError, "x0 is not an array"),
        ({"x0": np.ones(2, complex)}, TypeError, "x0 is complex"),
        ({"x0": None}, ValueError, "x0 has no numbers"),
        ({"metrics": {"m": 3}}, TypeError, "metric 'm' must be a function"),
        ({"metrics": {"m": lambda x, y: x}}, TypeError, "must be one number"),
        ({"metrics": {"m": lambda x, y: "far"}}, TypeError, "'m' must be one number, but is a str"),
        ({"metrics": {"m": lambda x, y: None}}, TypeError, "'m' must be one number, but is a NoneType"),
        ({"metrics": {"m": lambda x, y: x["w"]}}, TypeError, "metric 'm' cannot be evaluated"),
        ({"metrics": {"round": lambda x, y: 0.0}}, ValueError, "taken"),
        ({"metrics": {"loss": lambda x, y: 0.0}}, ValueError, "'loss' is taken by the problem's own"),
        ({"y0": np.zeros(2)}, ValueError, "Minimization has one variable: leave y0 out"),
        ({"seed": 2**32}, ValueError, "seed must be a whole number between 0 and 4294967295"),
        ({"rounds": True}, ValueError, "rounds must be a whole number"),
        (
            {"method": fs.FedAvg(0.1, H=np.array([1, 2]))},
            ValueError,
            "H has 2 numbers, but there are 3 clients",
        ),
        (
            {"method": fs.FedAvg(lambda r: 0.2 - 0.1 * r)},
            ValueError,
            r"gamma must be .* returns -0\.\d+ .* round 3",
        ),
        ({"method": fs.FedAvg(lambda r: jnp.nan * r)}, ValueError, "gamma must be .* returns nan .* round 0"),
        (
            {"method": fs.FedAvg(0.1, H=lambda r: 2 - r)},
            ValueError,
            r"H must be .* returns 0 \(int32\) at round 2",
        ),
        ({"method": fs.FedAvg(0.1, H=lambda r: r - 1)}, ValueError, "H must be .* returns -1 .* round 0"),
        (
            {"method": fs.FedAvg(0.1, H=lambda r: 2.5 + r)},
            ValueError,
            r"H must be .* returns 2\.5 \(float32\)",
        ),
        ({"problem": fs.Minimization(lambda x, s: x - s["a"])}, TypeError, "one real number"),
        ({"problem": fs.Minimization(lambda x, s: {"f": x.sum()})}, TypeError, "but returns a dict of"),
        ({"resume": True}, ValueError, "checkpoint path"),
        (
            {"problem": fs.Bilevel(lambda x, y, s: 0.0, lambda x, y, s: 0.0)},
            TypeError,
            "FedAvg solves Minimization",
        ),
    ],
)
def test_bad_arguments_say_what_to_do(changes, error, message):
    with pytest.raises(error, match=message):
        solve(**changes)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: fs.FedAvg(gamma=-0.1),
            "gamma must be a positive number or a function of the round, but is -0.1",
        ),
        (lambda: fs.FedAvg(gamma=0.1, H=0), "H must be a whole number ≥ 1"),
        (lambda: fs.FedAvg(gamma=0.1, H=np.array([1, -2])), r"an array with one \(≥ 0\) for each client"),
        (lambda: fs.FedAvg(gamma=float("nan")), "gamma must be"),
        (
            lambda: fs.FedAvg(gamma=0.1, batch_size=0),
            "batch_size must be a whole number ≥ 1 or None for the full",
        ),
        (lambda: fs.Scaffnew(gamma=0.1, p=1.5), r"p must be a number in \(0, 1\]"),
        (lambda: fs.engines.Simulated(chunk=0), "chunk must be"),
        (lambda: fs.EarlyStop("loss"), "patience or a target"),
        (lambda: fs.Checkpoint("here", every_rounds=0), "every_rounds"),
    ],
)
def test_bad_values_are_found_when_an_object_is_built(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_schedules_are_looked_at_over_the_whole_horizon():
    falling = fs.FedAvg(gamma=lambda r: 0.1 - 1e-9 * r)
    with pytest.raises(ValueError, match=r"gamma must be .* returns -"):
        solve(method=falling, rounds=2 * 10**8)
    solve(method=falling, rounds=2)
    solve(method=fs.FedAvg(gamma=optax.linear_schedule(0.1, 0.0, 3)), rounds=6)  # fades to nothing


def test_a_level_without_validation_data_is_told():
    def two(x, y, s):
        return ((x - s["a"]) ** 2).sum() + ((y - x) ** 2).sum()

    method = fs.SOBA(0.1, 0.1)
    arguments = {"x0": np.zeros(2), "y0": np.zeros(2), "rounds": 1}
    words = (
        r"no validation part: Bilevel.upper is evaluated on the training.*valid_fraction.*same_samples=True"
    )
    with pytest.warns(UserWarning, match=words):
        pose(fs.Bilevel(two, two), method, data, **arguments)
    held_out = fs.FederatedData.from_clients([{"a": A}] * 2, valid=[{"a": A}] * 2)
    selection = fs.Selection(loss, lambda x, s: (x**2).sum())
    with pytest.warns(UserWarning, match=r"Selection.secondary is evaluated on the training"):
        pose(selection, fs.IPIRFedAvg(0.1, 0.1), data, x0, rounds=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pose(fs.Bilevel(two, two), method, held_out, **arguments)
        pose(fs.Bilevel(two, two, same_samples=True), method, data, **arguments)
        known = fs.Selection(loss, lambda x: (x**2).sum())
        pose(known, fs.IPIRFedAvg(0.1, 0.1, inner="warm"), data, x0, rounds=1)


def test_divergence_names_round_quantity_and_hint(tmp_path):
    # Each round multiplies the distance by (1 − 1000)², so float32 overflows in the seventh round (10⁶ each).
    fast = fs.FedAvg(gamma=1000.0, H=2)
    with pytest.raises(
        fs.Diverged, match=r"not finite after round \d+.*Lower gamma alone, 1e\+03, to "
    ) as caught:
        solve(method=fast, rounds=50, checkpoint=tmp_path)
    assert np.isfinite(np.asarray(caught.value.result.x)).all()
    assert caught.value.result.status == "diverged"
    assert (tmp_path / "checkpoint.safetensors").exists()


@pytest.mark.slow
def test_divergence_of_many_variables_stays_readable():
    problem = fs.Minimization(lambda x, s: sum((v - s["a"].sum()) ** 2 for v in x))
    data = fs.FederatedData.from_clients([{"a": np.ones((2, 1), np.float32)}] * 2)
    with pytest.raises(fs.Diverged, match=r"\(.*\[0\].*\[3\] and 26 more\) is not finite") as caught:
        fs.solve(problem, fs.FedAvg(gamma=1e6), data, [0.0] * 30, rounds=50, eval_every=50, progress=False)
    assert "[4]" not in str(caught.value)


@pytest.mark.slow
def test_debug_engine_names_the_client():
    def picky(x, sample):
        return jnp.where(sample["a"].sum() < 0, jnp.nan, 1.0) * (x**2).sum()

    with pytest.raises(
        fs.ClientError, match=r"round 0, phase 'local_steps', client 2: the upload is not finite"
    ):
        solve(problem=fs.Minimization(picky), engine="debug", x0=np.ones(2), default_metrics=False)
    with pytest.raises(fs.ClientError, match=r"round 0, phase 'evaluation', client 2"):
        solve(problem=fs.Minimization(picky), engine="debug", x0=np.ones(2))


@pytest.mark.slow
def test_debug_engine_finds_indices_outside():
    """A label 2 of two classes gives a plausible loss in JAX: it is named, with its client."""

    def cross_entropy(x, s):
        return -jax.nn.log_softmax(x * s["u"])[s["y"]]

    clients = [{"u": np.ones((n, 2)), "y": np.array(y)} for n, y in ((3, [0, 1, 1]), (2, [1, 2]))]
    labelled = fs.FederatedData.from_clients(clients)
    arguments = {"problem": fs.Minimization(cross_entropy), "data": labelled, "rounds": 1}
    assert np.isfinite(solve(**arguments).history["loss"]).all()
    with pytest.raises(
        fs.ClientError, match=r"phase 'evaluation', client 1: .*index 2 is out of bounds.*0 … K−1"
    ):
        solve(**arguments, engine="debug")
    with pytest.raises(fs.ClientError, match=r"round 0, phase 'local_steps', client 1: .*out of bounds"):
        solve(**arguments, engine="debug", default_metrics=False)
    good = fs.FederatedData.from_clients([clients[0], {"u": np.ones((2, 2)), "y": np.array([1, 0])}])
    arguments["data"] = good
    eager, compiled = solve(**arguments, engine="debug"), solve(**arguments)
    np.testing.assert_allclose(eager.x, compiled.x, rtol=1e-6)
    assert eager.ledger == compiled.ledger


def test_early_stop_and_callbacks():
    result = solve(rounds=500, callbacks=[fs.EarlyStop("loss", target=2.0)])
    assert result.status == "stopped"
    assert result.history["loss"][-1] <= 2.0
    seen = []
    patient = solve(
        rounds=2000,
        callbacks=[fs.EarlyStop("loss", patience=5, min_delta=1e-7), lambda p: seen.append(p.round)],
    )
    assert patient.status == "stopped"
    assert 0 < len(patient.history["loss"]) < 2000
    assert seen[-1] == patient.ledger.rounds
    with pytest.raises(KeyError, match="unknown metric 'accuracy'"):
        solve(callbacks=[fs.EarlyStop("accuracy", target=1.0)])


def test_callbacks_see_every_evaluation():
    seen = []
    solve(rounds=7, eval_every=3, callbacks=[lambda p: seen.append((p.round, len(p.history["loss"])))])
    assert seen == [(0, 1), (3, 2), (6, 3), (7, 4)]


def test_checkpoints_come_every_so_many_rounds(monkeypatch, tmp_path):
    saved = []
    monkeypatch.setattr(loop, "save_arrays", lambda file, arrays, facts: saved.append(facts["round"]))
    solve(rounds=100, checkpoint=fs.Checkpoint(tmp_path, every_rounds=30))
    assert saved == [30, 60, 90, 100]


def test_chunks_between_looks_do_not_matter(monkeypatch):
    whole = solve(rounds=30)
    monkeypatch.setattr(loop, "PAUSE", 0.0)
    pieces = solve(rounds=30)
    np.testing.assert_array_equal(whole.x, pieces.x)
    np.testing.assert_array_equal(whole.history["loss"], pieces.history["loss"])


def test_checkpoint_errors(tmp_path):
    solve(rounds=2, checkpoint=tmp_path)
    with pytest.raises(fs.CheckpointError, match=r"exists already.*resume=True"):
        solve(rounds=3, checkpoint=tmp_path)
    with pytest.raises(fs.CheckpointError, match=r"another run.*seed: 0 there, 1 here"):
        solve(rounds=3, checkpoint=tmp_path, resume=True, seed=1)
    with pytest.raises(fs.CheckpointError, match="past rounds=1"):
        solve(rounds=1, checkpoint=tmp_path, resume=True)
    file = tmp_path / "checkpoint.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(fs.CheckpointError, match="damaged"):
        solve(rounds=3, checkpoint=tmp_path, resume=True)
    file.write_bytes(b"not a checkpoint")
    with pytest.raises(fs.CheckpointError, match=r"damaged.*Delete it"):
        solve(rounds=3, checkpoint=tmp_path, resume=True)
    solve(rounds=3, checkpoint=fs.Checkpoint(tmp_path, overwrite=True))


def test_save_and_load(tmp_path):
    result = solve(x0={"w": np.zeros(2)}, problem=fs.Minimization(lambda x, s: loss(x["w"], s)))
    result.save(tmp_path)
    loaded = fs.Result.load(tmp_path)
    np.testing.assert_array_equal(loaded.x["w"], result.x["w"])
    assert loaded.y is None
    assert loaded.ledger == result.ledger
    assert loaded.method == {"name": "FedAvg", "gamma": 0.1, "H": 2, "batch_size": None}
    np.testing.assert_array_equal(loaded.history["loss"], result.history["loss"])
    with pytest.raises(fs.CheckpointError, match="Checkpoint not found"):
        fs.Result.load(tmp_path / "nowhere")


def test_plot_and_table(tmp_path):
    result = solve()
    result.plot(path=tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 1000
    assert result.table().row_count > 0


PROGRAM = """
import sys, time
import numpy as np
import fedstrata as fs

def loss(x, sample):
    return 0.5 * ((x - sample["a"]) ** 2).sum()

clients = [{"a": np.random.default_rng(i).normal(size=(5 + i, 4))} for i in range(4)]
data = fs.FederatedData.from_clients(clients)
method = fs.SCAFFOLD(eta_l=0.01, K=3, batch_size=2)
checkpoint = fs.Checkpoint(sys.argv[1], every_rounds=1) if sys.argv[1] != "-" else None
slow = [lambda progress: time.sleep(float(sys.argv[3]))]
try:
    result = fs.solve(
        fs.Minimization(loss), method, data, np.zeros(4), rounds=400, participation=2, seed=7, eval_every=5,
        checkpoint=checkpoint, resume=checkpoint is not None, progress=False, callbacks=slow,
    )
except KeyboardInterrupt as interruption:
    result = interruption.result
print(result.status, result.ledger.rounds)
np.savez(sys.argv[2], x=result.x, c=result.state.c, loss=result.history["loss"], up=result.ledger.bytes_up)
"""


@pytest.fixture
def program(tmp_path):
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(PROGRAM))

    def start(*args):
        root = str(Path(__file__).parents[1])
        environment = {**os.environ, "PYTHONPATH": root}
        return subprocess.Popen(
            [sys.executable, str(file), *map(str, args)], env=environment, stdout=subprocess.PIPE
        )

    return start


def wait_for(file, process):
    until = time.monotonic() + 60
    while not file.exists():
        assert process.poll() is None, "the program ended before its first checkpoint"
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.slow
def test_resume_after_sigkill_is_bit_for_bit(program, tmp_path):
    killed = program(tmp_path / "run", tmp_path / "killed.npz", 0.05)
    wait_for(tmp_path / "run" / "checkpoint.safetensors", killed)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    assert not (tmp_path / "killed.npz").exists()
    resumed = program(tmp_path / "run", tmp_path / "resumed.npz", 0)
    whole = program("-", tmp_path / "whole.npz", 0)
    for process in (resumed, whole):
        process.communicate(timeout=120)
        assert process.returncode == 0
    a, b = np.load(tmp_path / "resumed.npz"), np.load(tmp_path / "whole.npz")
    for name in b.files:
        np.testing.assert_array_equal(a[name], b[name])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_signals_save_and_end_the_run(number, program, tmp_path):
    """Ctrl-C raises what there is; SIGTERM ends the process. Both can be resumed to the end."""
    interrupted = program(tmp_path / "run", tmp_path / "partial.npz", 0.2)
    wait_for(tmp_path / "run" / "checkpoint.safetensors", interrupted)
    interrupted.send_signal(number)
    output, _ = interrupted.communicate(timeout=60)
    if number == signal.SIGTERM:
        assert interrupted.returncode == -signal.SIGTERM
        assert not (tmp_path / "partial.npz").exists()
    else:
        status, rounds = output.split()
        assert (interrupted.returncode, status) == (0, b"interrupted")
        assert 0 < int(rounds) < 400
        assert np.isfinite(np.load(tmp_path / "partial.npz")["x"]).all()
    resumed = program(tmp_path / "run", tmp_path / "resumed.npz", 0)
    assert resumed.communicate(timeout=120)[0].split() == [b"done", b"400"]


def test_ctrl_c_ends_a_loop_over_runs():
    """An interruption is a KeyboardInterrupt, so that a script's loop over runs ends with it."""
    finished = []

    def press(progressed):
        if len(finished) == 1 and progressed.round == 2:
            signal.raise_signal(signal.SIGINT)

    def script():
        for gamma in (0.1, 0.2, 0.3):
            finished.append(solve(method=fs.FedAvg(gamma=gamma), rounds=9, callbacks=[press]))

    with pytest.raises(KeyboardInterrupt) as caught:
        script()
    assert len(finished) == 1
    assert (caught.value.result.status, caught.value.result.ledger.rounds) == ("interrupted", 2)


@pytest.mark.filterwarnings("ignore:2 of the 6 runs diverged")
def test_a_sweep_has_what_a_run_has(tmp_path):
    """Divergence of some lanes, callbacks, checkpoints, resuming and interruption."""
    grid = [fs.FedAvg(gamma=g) for g in (0.1, 1e30, 0.3)]
    arguments = {"rounds": 12, "seeds": (0, 1), "progress": False}
    with pytest.warns(UserWarning, match=r"2 of the 6 runs diverged, FedAvg\(gamma=1e\+30\)"):
        whole = fs.sweep(problem, grid, data, x0, **arguments)
    assert [r.status for r in whole] == ["done", "done", "diverged", "diverged", "done", "done"]
    assert all(np.isfinite(r.x).all() and np.isfinite(r.history["loss"]).all() for r in whole)
    single = solve(method=grid[2], rounds=12, seed=1)
    np.testing.assert_allclose(whole[5].x, single.x, rtol=1e-6)

    def press(progressed):
        if progressed.round == 5 and progressed.lane == 0:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as caught:
        fs.sweep(problem, grid, data, x0, checkpoint=tmp_path, callbacks=[press], **arguments)
    assert [r.status for r in caught.value.result] == [
        "interrupted", "interrupted", "diverged", "diverged", "interrupted", "interrupted",
    ]  # fmt: skip
    resumed = fs.sweep(problem, grid, data, x0, checkpoint=tmp_path, resume=True, **arguments)
    for a, b in zip(resumed, whole, strict=True):
        np.testing.assert_array_equal(a.x, b.x)
        np.testing.assert_array_equal(a.history["loss"], b.history["loss"])
        assert (a.status, a.ledger) == (b.status, b.ledger)
    stopped = fs.sweep(
        problem, grid, data, x0, callbacks=[lambda p: p.lane == 4 and p.round == 3], **arguments
    )
    assert [r.ledger.rounds for r in stopped] == [12, 12, 0, 0, 3, 12]
    np.testing.assert_allclose(stopped[4].x, solve(method=grid[2], rounds=3).x, rtol=1e-6)


@pytest.mark.parametrize("some", [2, fs.Poisson(0.5), fs.Buffered(2)], ids=["two", "poisson", "buffered"])
def test_sweep_equals_single_runs(some):
    grid = [fs.FedAvg(gamma=g, H=2, batch_size=1) for g in (0.05, 0.2)]
    together = fs.sweep(problem, grid, data, x0, rounds=4, seeds=(3, 4), participation=some, progress=False)
    single = [solve(method=m, rounds=4, seed=s, participation=some) for m in grid for s in (3, 4)]
    for a, b in zip(together, single, strict=True):
        np.testing.assert_allclose(a.x, b.x, rtol=1e-5)
        np.testing.assert_allclose(a.history["loss"], b.history["loss"], rtol=1e-5)
        assert a.ledger == b.ledger
    with pytest.raises(ValueError, match="one class"):
        fs.sweep(problem, [fs.FedAvg(gamma=0.1), fs.FedProx(gamma=0.1)], data, x0, rounds=1)


def _compiled(functions):
    """What solving with each of these losses gives, and how many programs are compiled for it."""
    found = []
    for function in functions:
        before = kept()
        found.append(solve(problem=fs.Minimization(function)).x)
        found.append(len(kept() - before))
    return found


def test_a_function_defined_anew_is_recognised():
    """As in a notebook whose cell is run again; what it closes over must be the same too."""

    def make(target, scale=1.25):
        return lambda x, s: scale * ((x - s["a"] - target) ** 2).sum()

    at = np.zeros(2)
    x1, first, x2, second, x3, third = _compiled([make(at), make(at.copy()), make(at + 1)])
    assert (first, second, third) == (1, 0, 1)
    np.testing.assert_array_equal(x1, x2)
    assert np.abs(x3 - x1).max() > 1e-3


def test_a_value_that_a_function_reads_may_change():
    class Known:
        offset = 0.0

    class Model:
        target = 0.0

        def loss(self, x, s):
            moved = x - shift[0] - scale - self.target - Known.offset
            return 0.5 * (moved**2).sum() + 0 * s["a"].sum()

    shift, scale, model = np.zeros(1), 0.0, Model()
    moving = fs.Minimization(model.loss)

    def found():
        result = solve(problem=moving, method=fs.FedAvg(gamma=1.0), rounds=1)
        assert fs.certify(result).solved
        return float(result.x[0])

    assert found() == 0
    # what is seen at all is tested beside `fedstrata.support.digest.current`
    scale, shift[0], model.target = 1.0, 1.0, 1.0
    assert found() == 3
    Known.offset = 1.0
    assert found() == 4


def test_what_a_function_does_besides_is_no_part_of_its_program():
    def make():
        count = 0

        def counting(x, s):
            nonlocal count
            count += 1
            return ((x - 1.75 * s["a"]) ** 2).sum()

        return counting

    _, first, _, second = _compiled([make(), make()])
    assert (first, second) == (1, 0)


def test_a_program_that_calls_the_host_is_compiled_for_each_function():
    def ask():  # a program of the user's own, whatever it holds
        host = np.float32(1.75)
        form = jax.ShapeDtypeStruct((), np.float32)
        return lambda x, s: (
            ((x - s["a"]) ** 2).sum()
            + jax.lax.stop_gradient(jax.pure_callback(lambda: host, form, vmap_method="sequential"))
        )

    _, first, _, second = _compiled([ask(), ask()])
    assert (first, second) == (1, 1)


def test_a_set_that_holds_arrays_is_found_again():
    bounded = fs.Minimization(loss, project=fs.sets.Box(np.zeros(2), np.full(2, 0.1)))
    first = solve(problem=bounded)
    before = len(kept())
    second = solve(problem=bounded)
    assert len(kept()) == before
    np.testing.assert_array_equal(first.x, second.x)
    assert float(jnp.max(first.x)) <= 0.1 + 1e-6
    assert jax.tree.leaves(first.x)
