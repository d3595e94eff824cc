"""Checkpoints: damage anywhere is found, nothing is left behind, and what was computed is never lost."""

import json
import os
import stat
import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.support.sealed import UNSEALED, is_whole, load_arrays, save_arrays, sealed

A = np.arange(6.0).reshape(3, 2)
data = fs.FederatedData.from_clients([{"a": A}, {"a": A + 1}])
problem = fs.Minimization(lambda x, s: 0.5 * ((x - s["a"]) ** 2).sum())


def solve(path=None, **changes):
    arguments = {"rounds": 4, "progress": False, "checkpoint": path, **changes}
    return fs.solve(problem, fs.SCAFFOLD(eta_l=0.1, K=2), data, np.zeros(2), **arguments)


def test_every_changed_byte_is_found(tmp_path):
    file = tmp_path / "some.safetensors"
    half = np.asarray(jnp.arange(3, dtype=jnp.bfloat16))
    written = {"a": half, "b/c": np.ones((2, 2), np.int32)}
    save_arrays(file, written, {"round": 3, "name": "x"})
    arrays, facts = load_arrays(file)
    assert facts == {"round": 3, "name": "x"}
    assert all(arrays[name].dtype == array.dtype for name, array in written.items())
    assert all(np.array_equal(arrays[name], array) for name, array in written.items())
    whole = file.read_bytes()
    for byte in range(len(whole)):
        broken = bytearray(whole)
        broken[byte] ^= 1 << byte % 8
        file.write_bytes(broken)
        with pytest.raises(fs.CheckpointError, match=r"some.safetensors.*(damaged|format)"):
            load_arrays(file)
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(fs.CheckpointError, match=r"some.safetensors is damaged"):
            load_arrays(file)
    file.write_bytes(whole + b" ")
    with pytest.raises(fs.CheckpointError, match="damaged"):
        load_arrays(file)


def test_the_digest_is_part_of_the_text():
    content = json.dumps({"sha256": UNSEALED, "text": 'a "sha256": "…" ö'}).encode()
    assert is_whole(sealed(content))
    assert json.loads(sealed(content))["text"] == 'a "sha256": "…" ö'
    assert not is_whole(content)


def test_another_format_is_named(tmp_path, monkeypatch):
    file = tmp_path / "checkpoint.safetensors"
    with monkeypatch.context() as other:
        other.setattr("fedstrata.support.sealed.VERSION", 1)
        save_arrays(file, {"a": np.ones(1)}, {})
    with pytest.raises(fs.CheckpointError, match=r"has the format 1, this version reads 4"):
        load_arrays(file)


def test_a_result_is_no_run(tmp_path):
    solve().save(tmp_path)
    os.rename(tmp_path / "result.safetensors", tmp_path / "checkpoint.safetensors")
    with pytest.raises(fs.CheckpointError, match="a saved result, not a run"):
        solve(tmp_path, resume=True)


def test_modes_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        solve(tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "checkpoint.safetensors").stat().st_mode) == 0o640


def test_strays_of_the_dead_are_removed(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    names = [".checkpoint.safetensors.x7abc", f".checkpoint.safetensors.{ended.pid}.abcd"]
    kept = [f".checkpoint.safetensors.{os.getpid()}.abcd", ".other.1", "notes.txt"]
    for name in [*names, *kept]:
        (tmp_path / name).write_bytes(b"")
    solve(tmp_path)
    assert sorted(f.name for f in tmp_path.iterdir()) == sorted([*kept, "checkpoint.safetensors"])


@pytest.mark.parametrize("below", ["file/run", "folder.safetensors"])
def test_a_folder_is_tried_before_anything_is_computed(below, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "folder.safetensors").mkdir()

    def forbidden(x, s):
        raise AssertionError("computed")

    with pytest.raises(fs.CheckpointError, match=r"cannot be written \(.*\)\. Give another path"):
        fs.solve(
            problem, fs.FedAvg(0.1), data, np.zeros(2), rounds=1, checkpoint=tmp_path / below,
            metrics={"m": forbidden},
        )  # fmt: skip
    assert not list((tmp_path / "folder.safetensors").iterdir())


def test_a_resumed_history_is_the_undisturbed_one(tmp_path):
    arguments = {
        "eval_every": 3,
        "metrics": {"zeta": lambda x, y: jnp.log(x[0]), "alpha": lambda x, y: x.sum()},  # NaN at the start
    }
    whole = solve(rounds=11, **arguments)
    solve(tmp_path, rounds=6, **arguments)
    resumed = solve(tmp_path, rounds=11, resume=True, **arguments)
    assert list(resumed.history) == list(whole.history)
    for name in whole.history:
        assert resumed.history[name].dtype == whole.history[name].dtype
        if name != "seconds":
            assert resumed.history[name].tobytes() == whole.history[name].tobytes()
    assert resumed.ledger == whole.ledger


def test_long_runs_begin_at_once():
    """Nothing is laid out for all rounds before the first one."""
    began = time.perf_counter()
    first = solve(rounds=3 * 10**8, callbacks=[lambda progressed: True])
    assert (first.status, first.ledger.rounds) == ("stopped", 0)
    (lane,) = fs.sweep(
        problem, fs.FedAvg(0.1), data, np.zeros(2), rounds=3 * 10**8, progress=False,
        callbacks=[lambda progressed: True],
    )  # fmt: skip
    assert lane.status == "stopped"
    assert time.perf_counter() - began < 20
    with pytest.raises(ValueError, match="rounds must be a whole number between 0 and"):
        solve(rounds=10**21)


def test_every_method_plans_for_any_horizon_at_once():
    from fedstrata.testing.cases import all_cases

    began = time.perf_counter()
    for case in all_cases():
        case.method.plan(2**31 - 2)
    assert time.perf_counter() - began < 20
