"""What is particular to an engine: bounded memory, sampled clients only, devices, processes, callbacks."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.core.fed import Setup
from fedstrata.data.storage import FlatSamples, Placed, SizeGroup
from fedstrata.engines import simulated, streamed_run
from fedstrata.engines.engine import Carry
from fedstrata.engines.simulated import CACHED, Simulated, trace_advance
from fedstrata.methods.fedavg import State


def loss(x, sample):
    return 0.5 * ((x - sample["a"]) ** 2).sum()


problem = fs.Minimization(loss)


def program_memory(clients, dimension, chunk, participants=None):
    """Bytes of temporaries of the compiled rounds, the data and the parameters aside."""
    shape = jax.ShapeDtypeStruct
    number = shape((clients,), jnp.int32)
    part = FlatSamples({"a": shape((clients, 1), jnp.float32)}, number, number, clients, 1, 1)
    data = Placed(part, None, None, None, None, clients, (SizeGroup(clients, 1, 0),))
    setup = Setup(problem, clients, participants or clients, measure_problem=False)
    carry = Carry(State(shape((dimension,), jnp.float32)), None)
    engine = Simulated(chunk=chunk)
    integer = shape((), jnp.int32)
    args = (
        fs.FedAvg(gamma=0.1, H=2),
        carry,
        shape((), jnp.uint32),
        data,
        integer,
        integer,
        shape((engine.evaluations_at_once,), jnp.int32),
    )
    compiled = jax.jit(lambda *a: trace_advance(engine, setup, *a)[0]).lower(*args).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_chunks_bound_the_memory():
    unchunked = program_memory(1_000, 10_000, None)
    assert unchunked >= 1_000 * 10_000 * 4  # every upload at once
    assert program_memory(100_000, 10_000, 1_000) <= 1.1 * unchunked
    assert program_memory(100_000, 10_000, 1) <= 0.1 * unchunked


@pytest.mark.parametrize(("batch_size", "side_by_side"), [(1, 16), (None, 3)])
def test_blocks_keep_what_clients_go_through_in_cache(batch_size, side_by_side, monkeypatch):
    chosen = []
    block = Simulated.block
    monkeypatch.setattr(Simulated, "block", lambda *args: chosen.append(block(*args)) or chosen[-1])
    data = fs.FederatedData.from_clients([{"a": np.ones((4, CACHED // 16))} for _ in range(32)])
    fs.solve(
        problem, fs.FedAvg(gamma=0.1, batch_size=batch_size), data, np.zeros(CACHED // 16), rounds=0,
        default_metrics=False, progress=False,
    )  # fmt: skip
    assert set(chosen) == {side_by_side}


@pytest.mark.slow
def test_strides_of_a_gpu_change_nothing(monkeypatch):
    """Rounds between evaluations run in strides of a common divisor, and one by one where there is none."""
    data = fs.FederatedData.from_clients([{"a": np.full((3, 2), i, np.float32)} for i in range(4)])
    method = fs.FedAvg(gamma=0.1, H=2, batch_size=1)

    def run(rounds, every):
        return fs.solve(problem, method, data, np.zeros(2, np.float32), rounds=rounds, eval_every=every,
                        participation=2, progress=False)  # fmt: skip

    def diverge():
        with pytest.raises(fs.Diverged) as caught:
            fs.solve(problem, fs.FedAvg(gamma=10.0), data, np.ones(2, np.float32), rounds=60, eval_every=20,
                     progress=False)  # fmt: skip
        return str(caught.value)

    def many(engine):
        """Of more clients than are shuffled to draw a few; unlike ones, drawn by size."""
        clients = [{"a": np.full((1 + i % 3, 2), i / 1100, np.float32)} for i in range(1100)]
        return fs.solve(problem, method, fs.FederatedData.from_clients(clients), np.zeros(2, np.float32),
                        rounds=8, eval_every=4, participation=7, weights="size", engine=engine,
                        progress=False).x  # fmt: skip

    plain, words, often = {both: run(*both) for both in ((12, 4), (7, 3))}, diverge(), many("simulated")
    monkeypatch.setattr(simulated.jax, "default_backend", lambda: "gpu")
    assert simulated.strided(Setup(problem, 4, 4), np.array([0, 50, 50])).stride == 25
    for both, its in plain.items():
        strided = run(*both)
        np.testing.assert_allclose(strided.x, its.x, rtol=1e-6)
        np.testing.assert_allclose(strided.history["loss"], its.history["loss"], rtol=1e-6)
        assert strided.ledger == its.ledger
    for engine in ("simulated", "streamed"):
        np.testing.assert_allclose(many(engine), often, rtol=1e-6)
    strides = []
    spied = streamed_run.in_strides
    monkeypatch.setattr(
        streamed_run, "in_strides", lambda *args: strides.append(int(np.gcd.reduce(args[3]))) or spied(*args)
    )
    for ahead in (None, 3, 9):  # all windows of a run have the same stride, and so the same program
        np.testing.assert_allclose(many(fs.engines.Streamed(ahead=ahead)), often, rtol=1e-6)
    assert strides == [4] * 2 + [2] * 4 + [4] * 2
    assert diverge() == words  # the same round, though the state is looked at only now and then


def test_only_sampled_clients_are_computed():
    visited = []

    def counting(x, sample):
        jax.debug.callback(lambda i: visited.append(int(i)), sample["client"])
        return loss(x, {"a": sample["a"]})

    data = fs.FederatedData.from_clients([{"a": np.ones((1, 2))} for _ in range(20)]).with_client_index()
    for chunk in (None, 1, 2):
        visited.clear()
        fs.solve(
            fs.Minimization(counting), fs.FedAvg(gamma=0.1), data, np.zeros(2), rounds=5, participation=3,
            engine=Simulated(chunk=chunk), default_metrics=False, progress=False,
        )  # fmt: skip
        jax.effects_barrier()
        if chunk == 2:  # three clients in blocks of two: one place is padding
            assert len(visited) == 5 * 4
        else:
            assert len(visited) == 5 * 3


def numpy_loss(x, sample):
    """An ordinary program: no JAX, no gradient."""
    assert isinstance(x, np.ndarray)
    return float(sum(abs(float(u) - float(v)) for u, v in zip(x, sample["a"], strict=True)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "vectorized"),
    [
        ("simulated", True),
        pytest.param("debug", True, marks=pytest.mark.slow),
        pytest.param("sharded", False, marks=pytest.mark.slow),
        pytest.param(Simulated(chunk=1), False, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_black_box_equals_the_same_loss_in_jax(engine, vectorized):
    def many(x, sample):
        return np.abs(x - sample["a"]).sum(-1)

    box = fs.black_box(many, vectorized=True) if vectorized else fs.black_box(numpy_loss)
    data = fs.FederatedData.from_clients([{"a": np.ones((2, 2))}, {"a": -np.ones((3, 2))}])
    method = fs.FedRZO(gamma=0.1, eta=0.1, H=2, batch_size=2)
    arguments = {"rounds": 2, "engine": engine, "progress": False}
    plain = fs.solve(
        fs.Minimization(lambda x, s: jnp.abs(x - s["a"]).sum()), method, data, np.full(2, 0.3), **arguments
    )
    boxed = fs.solve(fs.Minimization(box), method, data, np.full(2, 0.3), **arguments)
    np.testing.assert_allclose(boxed.x, plain.x, rtol=1e-5)
    np.testing.assert_allclose(boxed.history["loss"], plain.history["loss"], rtol=1e-5)


@pytest.mark.slow
def test_black_box_may_be_a_torch_function():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install '.[bench]'")
    box = fs.black_box(lambda x, s: torch.nn.functional.l1_loss(torch.tensor(x), torch.tensor(s["a"])).item())
    data = fs.FederatedData.from_clients([{"a": np.ones((2, 2), np.float32)}])
    result = fs.solve(
        fs.Minimization(box), fs.FedRZO(gamma=0.1, eta=0.1), data, np.zeros(2), rounds=1, progress=False
    )
    np.testing.assert_allclose(result.history["loss"][0], 1.0)


@pytest.mark.slow
def test_black_box_that_returns_nonsense_is_named():
    box = fs.black_box(lambda x, sample: "much")
    data = fs.FederatedData.from_clients([{"a": np.ones((2, 2))}])
    with pytest.raises(Exception, match="must return one number, but returned 'much'"):
        fs.solve(
            fs.Minimization(box), fs.FedRZO(gamma=0.1, eta=0.1), data, np.zeros(2), rounds=1, engine="debug"
        )


def test_sharded_uses_the_devices():
    data = fs.FederatedData.from_clients([{"a": np.ones((n, 2))} for n in (1, 2, 3, 2, 1)])
    engine = fs.engines.Sharded.over(jax.devices()[:4])
    placed = engine.place(data)
    assert len(placed.training.leaves["a"].sharding.device_set) == 4
    assert placed.training.sizes.shape == (8,)  # five clients on four devices: three rows of padding
    assert placed.training.leaves["a"].addressable_shards[0].data.shape[0] == 2 * 3  # the longest has three
    np.testing.assert_array_equal(placed.train["a"], data.train["a"])


PROCESS = """
import sys, jax, numpy as np
number = int(sys.argv[1])
jax.distributed.initialize(sys.argv[2], num_processes=2, process_id=number)
assert jax.process_count() == 2 and len(jax.devices()) == 4
import fedstrata as fs

clients = [{"a": np.random.default_rng(i).normal(size=(3 + i, 2))} for i in range(5)]
data = fs.FederatedData.from_clients(clients)
problem = fs.Minimization(lambda x, s: 0.5 * ((x - s["a"]) ** 2).sum())
method = fs.SCAFFOLD(eta_l=0.1, K=2, batch_size=2)
arguments = dict(rounds=4, seed=3, participation=3, progress=False)
together = fs.solve(problem, method, data, np.zeros(2), engine="sharded", checkpoint=sys.argv[3], **arguments)
np.savez(f"{sys.argv[3]}/process{number}.npz", x=together.x, loss=together.history["loss"])
"""


def start_two(program, *words):
    """Two processes of one program on this machine."""
    return start(2, program, *words)


def start(processes, program, *words):
    """Some processes of one program on this machine."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "JAX_NUM_CPU_DEVICES": "2"}
    environment["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = "gloo"
    address = f"127.0.0.1:{free_port()}"
    return [
        subprocess.Popen(
            [sys.executable, str(program), str(i), address, *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for i in range(processes)
    ]


def end(processes):
    for process in processes:
        process.kill()
        process.communicate()


SHARE = """
import os, sys, jax, numpy as np
import fedstrata as fs
number, address, _, processes = sys.argv[1:5]
host, port = address.split(":")  # as SLURM would say it, whose job decides the port
slurm = dict(JOB_ID=port, STEP_NODELIST=host, NTASKS=processes, PROCID=number, LOCALID=number)
os.environ.update({f"SLURM_{name}": value for name, value in slurm.items()})
fs.engines.connect()
sizes = np.arange(13) % 4 + 2
mine = fs.engines.Sharded().clients_here(13)
def own(i):
    assert i in mine, f"client {i} is not here"
    return {"a": np.random.default_rng(i).normal(size=(sizes[i], 2)).astype(np.float32)}
form = {"a": jax.ShapeDtypeStruct((2,), np.float32)}
source = fs.data.FromFunction(sizes, own, form)
data = fs.FederatedData.from_source(source, valid=source)
problem = fs.Minimization(lambda x, s: 0.5 * ((x - s["a"]) ** 2).sum())
method = fs.SCAFFOLD(eta_l=0.1, K=2, batch_size=2)
arguments = dict(rounds=4, seed=3, participation=4, engine="sharded", progress=False)
result = fs.solve(problem, method, data, np.zeros(2), **arguments)
held = fs.engines.Sharded().place(data).training.leaves["a"]
share = sum(shard.data.nbytes for shard in held.addressable_shards) / held.nbytes
print("done", share, *np.asarray(result.x).tolist())
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.long)])
def test_every_process_reads_its_own_clients_alone(processes, tmp_path):
    program = tmp_path / "share.py"
    program.write_text(SHARE)
    running, outputs = start(processes, program, str(tmp_path), str(processes)), []
    try:
        outputs = [process.communicate(timeout=240)[0].decode() for process in running]
    finally:
        end(running)
    assert [process.returncode for process in running] == [0] * processes, "\n".join(outputs)
    sizes = np.arange(13) % 4 + 2
    clients = [
        {"a": np.random.default_rng(i).normal(size=(n, 2)).astype(np.float32)} for i, n in enumerate(sizes)
    ]
    data = fs.FederatedData.from_clients(clients, valid=clients)
    method = fs.SCAFFOLD(eta_l=0.1, K=2, batch_size=2)
    alone = fs.solve(problem, method, data, np.zeros(2), rounds=4, seed=3, participation=4, progress=False)
    for output in outputs:
        (done,) = [line.split() for line in output.splitlines() if line.startswith("done")]
        assert float(done[1]) == 1 / processes
        np.testing.assert_allclose([float(v) for v in done[2:]], alone.x, rtol=1e-5)


@pytest.mark.slow
def test_two_processes(tmp_path):
    program = tmp_path / "process.py"
    program.write_text(textwrap.dedent(PROCESS))
    processes, outputs = start_two(program, str(tmp_path)), []
    try:
        outputs = [process.communicate(timeout=180)[0] for process in processes]
    finally:
        end(processes)
    assert [process.returncode for process in processes] == [0, 0], b"\n".join(outputs).decode()
    data = fs.FederatedData.from_clients(
        [{"a": np.random.default_rng(i).normal(size=(3 + i, 2))} for i in range(5)]
    )
    method = fs.SCAFFOLD(eta_l=0.1, K=2, batch_size=2)
    alone = fs.solve(problem, method, data, np.zeros(2), rounds=4, seed=3, participation=3, progress=False)
    for i in range(2):
        found = np.load(tmp_path / f"process{i}.npz")
        np.testing.assert_allclose(found["x"], alone.x, rtol=1e-5)
        np.testing.assert_allclose(found["loss"], alone.history["loss"], rtol=1e-5)


LASTING = """
import sys, time, jax, numpy as np
import fedstrata as fs
fs.engines.connect(sys.argv[2], 2, int(sys.argv[1]))
mine = fs.engines.Sharded().clients_here(5)
def own(i):
    assert i in mine, f"client {i} is not here"
    return {"a": np.random.default_rng(i).normal(size=(3, 2))}
form = {"a": jax.ShapeDtypeStruct((2,), float)}
data = fs.FederatedData.from_source(fs.data.FromFunction([3] * 5, own, form))
problem = fs.Minimization(lambda x, s: 0.5 * ((x - s["a"]) ** 2).sum())
result = fs.solve(
    problem, fs.SCAFFOLD(eta_l=0.01, K=2, batch_size=2), data, np.zeros(2), rounds=200, engine="sharded",
    checkpoint=fs.Checkpoint(sys.argv[3], every_rounds=5), resume=True, progress=False,
    callbacks=[lambda progressed: time.sleep(float(sys.argv[4]))],
)
print("done", result.ledger.rounds, *np.asarray(result.x).tolist())
"""


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.long)])
def test_a_lost_process_is_told_and_a_restart_resumes(victim, tmp_path):
    program, run = tmp_path / "lasting.py", tmp_path / "run"
    program.write_text(LASTING)
    processes = start_two(program, str(run), "0.1")
    try:
        until = time.monotonic() + 90
        while not (run / "checkpoint.safetensors").exists():
            assert time.monotonic() < until
            assert [process.poll() for process in processes] == [None, None]
            time.sleep(0.1)
        processes[victim].kill()
        words, _ = processes[1 - victim].communicate(timeout=30)
    finally:
        end(processes)
    told = f"PeerLost: Process {1 - victim} of 2 lost process {victim}, which has ended".encode()
    assert told in words, words
    assert b"resume=True" in words
    assert processes[1 - victim].returncode in (1, -6)  # JAX aborts those who lost the first
    again, outputs = start_two(program, str(run), "0"), []
    try:
        outputs = [process.communicate(timeout=120)[0].decode() for process in again]
    finally:
        end(again)
    data = fs.FederatedData.from_clients(
        [{"a": np.random.default_rng(i).normal(size=(3, 2))} for i in range(5)]
    )
    method = fs.SCAFFOLD(eta_l=0.01, K=2, batch_size=2)
    alone = fs.solve(problem, method, data, np.zeros(2), rounds=200, progress=False)
    for output in outputs:
        (done,) = [line.split() for line in output.splitlines() if line.startswith("done")]
        assert done[1] == "200"
        np.testing.assert_allclose([float(v) for v in done[2:]], alone.x, rtol=1e-5)


@pytest.mark.parametrize("kind", [ValueError, jax.errors.JaxRuntimeError])
def test_both_kinds_of_errors_by_which_jax_tells_of_a_lost_process(kind, monkeypatch):
    """A collective that fails while it is waited for is a runtime error, one that fails at once is not."""
    from fedstrata.engines import sharded

    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(sharded, "_missing", lambda number: [2])
    monkeypatch.setattr(sharded, "_lost", threading.Event())
    gloo = "UNKNOWN: Gloo all-reduce failed: Connection closed by peer [127.0.0.1]:8420"
    with (
        pytest.raises(sharded.PeerLost, match=r"Process 0 of 3 lost process 2, .*resume=True"),
        sharded._together(),
    ):
        raise kind(gloo)
    with pytest.raises(kind, match="shapes"), sharded._together():
        raise kind("shapes do not fit")


def free_port():
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_programs_that_call_python_are_known():
    """Two of them at once could wait for each other's threads, so a sweep does not start them together."""
    from fedstrata.support.digest import Reader

    shape = jax.ShapeDtypeStruct((), np.float32)

    def asks(x):
        return jax.lax.fori_loop(0, 2, lambda t, x: jax.pure_callback(np.float32, shape, x), x)

    for function in (asks, lambda x: x + 1):
        reader = Reader()
        reader.text(jax.make_jaxpr(function)(np.float32(1)))
        assert reader.calls_host == (function is asks)
