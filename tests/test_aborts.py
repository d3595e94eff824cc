"""An abort waits where the first process is gone, and tells; any other abort is what it was."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "fedstrata" / "engines" / "aborts.py"
PROGRAM = """
import os, runpy, sys, threading, time
module = runpy.run_path(sys.argv[1])
told, hold = threading.Event(), module["hold_aborts"]
hold.__globals__["HELD"] = 1.0
hold(sys.argv[2], told, lambda: "process 0 is gone")
threading.Thread(target=os.abort, daemon=True).start()
if sys.argv[3] == "tells":
    time.sleep(0.5)
    told.set()
    print("told by itself", flush=True)
    sys.exit(3)
time.sleep(60)
"""


def run(address, how):
    """What a process writes, and its exit status, in which a thread aborts."""
    command = [sys.executable, "-c", PROGRAM, str(FILE), address, how]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return ended.stdout + ended.stderr, ended.returncode


@pytest.fixture
def nobody():
    """An address where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def test_an_abort_tells_where_the_program_does_not(nobody):
    said, status = run(nobody, "sleeps")
    assert (said.strip(), status) == ("PeerLost: process 0 is gone", 1)


def test_an_abort_lets_the_program_tell(nobody):
    said, status = run(nobody, "tells")
    assert (said.strip(), status) == ("told by itself", 3)


def test_another_abort_goes_on():
    with socket.create_server(("127.0.0.1", 0)) as server:
        said, status = run(f"127.0.0.1:{server.getsockname()[1]}", "sleeps")
    assert "PeerLost" not in said
    assert status == -6
