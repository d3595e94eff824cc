"""A thousand exchanges with three sites, one of them killed every fifty: it completes, and memory is flat."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path

import pytest

from .faults import SITES, Federation

pytestmark = pytest.mark.long
ROUNDS = 500  # each with its evaluation: a thousand exchanges


def resident(pid: int) -> int:
    """Kilobytes in memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1])
    raise AssertionError("no VmRSS")


def test_soak(tmp_path):
    federation = Federation(tmp_path, words=("--set", f"rounds={ROUNDS}"))
    try:
        federation.start()
        federation.until(lambda: federation.round() >= 25)
        server = federation.processes["server"]
        before = after = resident(server.pid)
        first, killed = resident(federation.processes[SITES[2]].pid), []
        for r, name in zip(range(25, ROUNDS, 25), itertools.cycle(SITES[:2])):
            federation.until(lambda r=r: federation.round() >= r or server.poll() is not None)
            if server.poll() is not None:
                break
            if name == SITES[0] and r > 25:
                after = resident(server.pid)
            killed.append(resident(federation.processes[name].pid))
            federation.signal(name, signal.SIGKILL)
            federation.start_site(name)
            steady = resident(federation.processes[SITES[2]].pid)  # this one is never killed
        found = federation.finish(300)
        assert found["round"] == ROUNDS
        assert after < 1.3 * before + 50_000
        assert max(steady, *killed) < 1.3 * first + 50_000
    finally:
        federation.close()
