"""The commands of the page "From simulation to four hospitals", run as they stand there."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from .faults import ROOT, environment

pytestmark = pytest.mark.slow
PAGE = (ROOT / "docs" / "network.md").read_text("utf-8")
COMMANDS = [
    line for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()
]


def test_the_page_works(tmp_path):
    for file in (ROOT / "examples" / "hospitals").iterdir():
        if file.suffix in (".py", ".csv"):
            shutil.copy(file, tmp_path)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    # The script `fedstrata` of this interpreter, whether or not it is installed.
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "fedstrata"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m fedstrata "$@"\n')
    script.chmod(0o755)
    env = environment() | {"PATH": f"{script.parent}:{os.environ['PATH']}"}
    sites = []
    try:
        for command in COMMANDS:
            words = command.replace("18443", port)
            if words.endswith("&"):
                words = words.removesuffix("&").replace("fedstrata net", "exec fedstrata net")
                words = re.sub(r"^(\w+=\S+) exec ", r"export \1; exec ", words)
                sites.append(subprocess.Popen(["sh", "-c", words], cwd=tmp_path, env=env))
            else:
                subprocess.run(["sh", "-c", words], cwd=tmp_path, env=env, check=True, timeout=280)
    finally:
        for process in sites:
            process.send_signal(signal.SIGTERM)
        for process in sites:
            process.wait(20)
    assert len(sites) == 4
    page = (tmp_path / "runs" / "hearts" / "report.html").read_text("utf-8")
    assert "The network" in page
    assert "budapest" in page
    (run,) = json.loads((tmp_path / "runs" / "hearts" / "manifest.json").read_text())["runs"]
    assert run["rounds"] == "60"
    assert run["round"].startswith("program ")
    assert _last_loss(tmp_path / "runs" / "hearts") == pytest.approx(_simulated(), rel=1e-4)


def _last_loss(folder: Path) -> float:
    (file,) = (folder / "finished").glob("*.json")
    return float(list(csv.DictReader(json.loads(file.read_text())["history"].splitlines()))[-1]["loss"])


def _simulated() -> float:
    code = (
        "import fedstrata as fs, hearts; m = fs.SCAFFOLD(eta_l=0.1, eta_g=1.0, K=5, batch_size=16);"
        "a = (hearts.PROBLEM, m, hearts.simulated(), hearts.X0);"
        "r = fs.solve(*a, rounds=60, weights='size', progress=False);"
        "print(r.history['loss'][-1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "examples" / "hospitals", env=environment(), check=True,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return float(done.stdout.split()[-1])
