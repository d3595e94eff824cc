"""A run inside Flower: SuperLink and three SuperNodes on loopback, whose sites dial our own server."""

import os
import time
from pathlib import Path

import pytest

from benchmarks.flower_system import BIN, System, free_port

from .faults import EXPERIMENT, SITES, environment, history, simulated

pytest.importorskip("flwr")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not (BIN / "flower-superlink").exists(), reason="Flower's programs are not here"),
]


@pytest.fixture
def federation(tmp_path):
    """Folders of the server's part and of three nodes; in each, the file and the experiment."""
    port = free_port()
    names = ", ".join(f'"{name}"' for name in SITES)
    text = (
        f'[server]\nlisten = "127.0.0.1:{port}"\naddress = "localhost:{port}"\nhosts = ["localhost"]\n'
        f'[federation]\nsites = [{names}]\nexperiment = "faults.py"\n'
    )
    for party in ("server", *SITES):
        (tmp_path / party).mkdir(mode=0o700)
        (tmp_path / party / "federation.toml").write_text(text)
        (tmp_path / party / "faults.py").write_text(EXPERIMENT)
    return tmp_path


@pytest.mark.parametrize(("messages", "rounds"), [(False, 200), (True, 2)])
def test_nodes_become_sites_for_the_length_of_a_run(messages, rounds, federation):
    """They dial our own server or, where Flower's port is the only one, each message is a process there."""
    from fedstrata.lab.experiments.flower import write_app

    for party in ("server", *SITES):
        text = EXPERIMENT.replace('{"rounds": 200}', f'{{"rounds": {rounds}}}')
        (federation / party / "faults.py").write_text(text)
    out = federation / "out"
    write_app(federation / "app", federation / "server", out)
    nodes = [f'kit="{federation / name}" site="{name}"' for name in SITES]
    (federation / "logs").mkdir()
    with System(federation / "logs", nodes, environment()) as system:
        began = time.monotonic()
        system.run(federation / "app", "--run-config", f"messages={str(messages).lower()}")
        while not (out / "manifest.json").exists() and not (out / "report.html").exists():
            assert time.monotonic() < began + 480, system.logs()[-3000:]
            time.sleep(0.5)
        print(f"{time.monotonic() - began:.0f} s from `flwr run` to the report")
        found, wanted = history(out)[-1], simulated(rounds=rounds)
        for name in ("x0", "x1", "x2"):
            assert abs(found[name] - wanted[name]) < 1e-5
        assert (found["gradients"], found["up"]) == (wanted["gradients"], wanted["up"])
        for name in SITES:  # the key was made at the node, and stayed there
            assert (federation / name / "key.pem").stat().st_mode & 0o077 == 0
            assert (federation / name / "state" / "audit.jsonl").is_file()
        assert not list(Path(out).rglob("key.pem"))
    assert os.name == "posix"
