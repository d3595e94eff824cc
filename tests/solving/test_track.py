"""Trackers: they log all that the history has, and cut nothing."""

import csv
import json
import os
import socket
import struct
import subprocess
import sys
import time
import types
import urllib.request
from collections import defaultdict

import numpy as np
import pytest

import fedstrata as fs
from fedstrata.engines.simulated import Simulated

DATA = fs.FederatedData.from_clients([{"a": np.array([[1.0], [3.0]])}, {"a": np.array([[0.0]])}])


def loss(x, s):
    return 0.5 * ((x - s["a"]) ** 2).sum()


PROBLEM = fs.Minimization(loss)


def solve(*callbacks, rounds=60, gamma=0.1, **options):
    options = {"progress": False, "callbacks": callbacks, **options}
    return fs.solve(PROBLEM, fs.FedAvg(gamma), DATA, np.zeros(1), rounds=rounds, **options)


class Counting(Simulated):
    """How often the run is cut."""

    calls = 0

    def advance(self, *args):
        Counting.calls += 1
        return super().advance(*args)


def cuts(*callbacks):
    Counting.calls = 0
    solve(*callbacks, rounds=400, engine=Counting())
    return Counting.calls


def test_trackers_cut_nothing(tmp_path):
    assert cuts(lambda progressed: None) == 401  # what other callbacks do
    assert cuts(fs.track.Csv(tmp_path / "a.csv")) < 60
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 402


def rows(file):
    with open(file, newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def test_csv_is_the_history(tmp_path):
    file = tmp_path / "runs" / "run.csv"
    result = solve(fs.track.Csv(file))
    found = rows(file)
    assert list(found[0]) == list(result.history)
    for name, values in result.history.items():
        np.testing.assert_array_equal([float(row[name]) for row in found], values)


def test_csv_of_a_sweep_names_the_runs(tmp_path):
    tracker = fs.track.Csv(tmp_path / "a.csv")
    methods = [fs.FedAvg(0.1), fs.FedAvg(0.5)]
    fs.sweep(PROBLEM, methods, DATA, np.zeros(1), rounds=3, seeds=[0, 7], callbacks=[tracker], progress=False)
    found = rows(tmp_path / "a.csv")
    assert [row["run"] for row in found].count("FedAvg-seed7") == 8
    assert len(found) == 16


def test_csv_keeps_what_is_there(tmp_path):
    file = tmp_path / "a.csv"
    solve(fs.track.Csv(file), rounds=1)
    before = file.read_bytes()
    with pytest.raises(FileExistsError, match=r"a\.csv exists already"):
        solve(fs.track.Csv(file), rounds=1)
    assert file.read_bytes() == before
    solve(fs.track.Csv(file, overwrite=True), rounds=2)
    assert len(rows(file)) == 3


def test_a_resumed_run_is_whole(tmp_path):
    file, saved = tmp_path / "a.csv", tmp_path / "a.ckpt"
    solve(fs.track.Csv(file), rounds=5, checkpoint=saved)
    result = solve(fs.track.Csv(file), rounds=9, checkpoint=saved, resume=True)
    assert [float(row["loss"]) for row in rows(file)] == result.history["loss"].tolist()


class Kept(fs.track.Tracker):
    def __init__(self):
        self.runs, self.rows, self.statuses = [], defaultdict(list), None

    def open(self, runs):
        self.runs = runs

    def log(self, lane, rows):
        self.rows[lane] += rows

    def close(self, statuses):
        self.statuses = statuses


def test_what_a_tracker_is_told():
    kept = Kept()
    solve(kept, rounds=2, seed=3)
    (run,) = kept.runs
    assert run.name == "FedAvg-seed3"
    assert not run.resumed
    told = {"method": "FedAvg", "problem": "Minimization", "seed": 3, "gamma": 0.1, "H": 1, "rounds": 2}
    assert told.items() <= run.parameters.items()
    assert [row["round"] for row in kept.rows[0]] == [0, 1, 2]
    assert kept.statuses == ["done"]


def test_how_a_run_ended():
    kept = Kept()
    solve(kept, fs.EarlyStop("loss", target=1e9))
    assert kept.statuses == ["stopped"]
    with pytest.raises(fs.Diverged):
        solve(kept, gamma=1e30)
    assert kept.statuses == ["diverged"]

    def broken(progressed):
        raise RuntimeError

    with pytest.raises(RuntimeError):
        solve(kept, broken)
    assert kept.statuses == ["failed"]


def test_a_tracker_that_fails_costs_nothing(tmp_path):
    class Failing(Kept):
        def log(self, lane, rows):
            raise ConnectionError("gone")

    other = fs.track.Csv(tmp_path / "a.csv")
    with pytest.warns(UserWarning, match=r"fs\.track\.Failing failed \(ConnectionError: gone\)") as caught:
        result = solve(Failing(), other)
    assert len(caught) == 1
    assert result.history["round"][-1] == 60
    assert len(rows(tmp_path / "a.csv")) == 61


def test_what_cannot_be_opened_is_an_error_before_anything(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    kept = Kept()
    with pytest.raises(
        ImportError, match=r"TensorBoard needs tensorboardX: pip install 'fedstrata\[track\]'"
    ):
        solve(kept, fs.track.TensorBoard(tmp_path))
    assert kept.rows == {}
    assert kept.statuses == ["failed"]


def events(folder):
    """Scalars of TensorBoard's files: records of a length, its checksum, an event, its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    found = defaultdict(dict)
    for file in folder.glob("events*"):
        data, at = file.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack("<Q", data[at : at + 8])
            event = Event.FromString(data[at + 12 : at + 12 + length])
            at += length + 16
            for value in event.summary.value:
                if value.WhichOneof("value") == "simple_value":
                    found[value.tag][event.step] = value.simple_value
    return found


def test_tensorboard_has_the_history(tmp_path):
    pytest.importorskip(
        "tensorboardX", reason="tensorboardX is not installed: pip install 'fedstrata[track]'"
    )
    tracker = fs.track.TensorBoard(tmp_path)
    result = solve(tracker)
    found = events(tmp_path / "FedAvg-seed0")
    assert found.keys() == result.history.keys() - {"round"}
    assert list(found["loss"]) == result.history["round"].tolist()
    np.testing.assert_allclose(list(found["loss"].values()), result.history["loss"], rtol=1e-6)
    solve(tracker, rounds=3)  # another run has another folder
    assert len(events(tmp_path / "FedAvg-seed0-2")["loss"]) == 4


class FakeRun:
    def __init__(self, options):
        self.options, self.logged, self.summary, self.code = options, [], {}, None

    def log(self, row, step):
        self.logged.append((step, row))

    def finish(self, exit_code):
        self.code = exit_code


def test_wandb_is_given_everything(monkeypatch):
    runs = []
    fake = types.ModuleType("wandb")
    fake.init = lambda **options: runs.append(FakeRun(options)) or runs[-1]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    result = solve(fs.track.WandB("hospitals", mode="offline"), rounds=4)
    (run,) = runs
    assert run.options["project"] == "hospitals"
    assert run.options["mode"] == "offline"
    assert run.options["config"]["gamma"] == 0.1
    assert [step for step, _ in run.logged] == [0, 1, 2, 3, 4]
    assert [row["loss"] for _, row in run.logged] == result.history["loss"].tolist()
    assert run.summary["status"] == "done"
    assert run.code == 0


def wandb_rows(file):
    """Step → the values logged there, from W&B's own file: records in blocks of 32 KB, as LevelDB's logs."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts, found = file.read_bytes(), 7, b"", {}
    while at + 7 <= len(data):
        if (rest := -at % 2**15) and rest < 7:
            at += rest
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the end of one
            record, parts = Record.FromString(parts), b""
            if record.WhichOneof("record_type") == "history":
                row = {(i.key or i.nested_key[0]): json.loads(i.value_json) for i in record.history.item}
                found[row["_step"]] = row
    return found


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of wandb's own modules
def test_wandb_has_the_history_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed: pip install 'fedstrata[test-long]'")
    monkeypatch.setenv("WANDB_SILENT", "true")
    result = solve(fs.track.WandB("hospitals", mode="offline", dir=str(tmp_path)), rounds=300)
    wandb.teardown()  # its own process writes the end of the file
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    found = wandb_rows(file)
    assert list(found) == result.history["round"].tolist()
    np.testing.assert_allclose([row["loss"] for row in found.values()], result.history["loss"])
    assert [row["bytes_up"] for row in found.values()] == result.history["bytes_up"].tolist()


@pytest.fixture
def mlflow_server(tmp_path):
    """MLflow's own server on loopback, with SQLite."""
    pytest.importorskip("mlflow.server.handlers", reason="no mlflow: pip install 'fedstrata[test-long]'")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db", "--workers", "1"]
    command += ["--artifacts-destination", str(tmp_path / "artifacts")]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=tmp_path, start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            assert process.poll() is None, (tmp_path / "log").read_text()
            try:
                with urllib.request.urlopen(f"{address}/health", timeout=1):
                    break
            except OSError:
                time.sleep(0.5)
        yield address
    finally:
        os.killpg(process.pid, 15)  # it has workers of its own, in a session that is ours
        process.wait(20)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of mlflow's own modules
def test_mlflow_has_the_history(mlflow_server):
    import mlflow

    tracker = fs.track.MLflow(mlflow_server, experiment="hospitals", tags={"who": "test"})
    result = solve(tracker, rounds=300)
    client = mlflow.MlflowClient(tracking_uri=mlflow_server)
    run = client.get_run(tracker.run_ids[0])
    assert run.info.run_name == "FedAvg-seed0"
    assert run.info.status == "FINISHED"
    assert run.data.params["gamma"] == "0.1"
    assert {"who": "test", "fedstrata.status": "done"}.items() <= run.data.tags.items()
    metrics = sorted(client.get_metric_history(tracker.run_ids[0], "loss"), key=lambda m: m.step)
    assert [m.step for m in metrics] == result.history["round"].tolist()
    np.testing.assert_allclose([m.value for m in metrics], result.history["loss"])
    assert client.get_experiment_by_name("hospitals") is not None
