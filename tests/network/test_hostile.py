"""Hostile processes on 127.0.0.1: refused and logged, and the run comes to the same end."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import grpc
import pytest

from fedstrata.engines.network.kits import make

from .faults import ROOT, Federation, environment, simulated
from .hostile import ATTACKS, LIMIT
from .test_grpc import Dialled, echo

pytestmark = pytest.mark.slow


@pytest.fixture
def federation(tmp_path):
    made = Federation(tmp_path, "timeout = 2.0", federation=f"message_bytes = {LIMIT}")
    make(tmp_path / "foreign", ["berlin"], ["localhost"])
    yield made
    made.close()


def strangers(federation):
    """No TLS, no certificate, another authority's for a site's name, a name that is no site, the server's."""
    kits = federation.folder / "kits"
    return {
        "no TLS": None,
        "anonymous": kits / "paris",
        "foreign": federation.folder / "foreign" / "berlin",
        "no site": kits / "paris",
        "server": kits / "server",
    }


def start_hostile(federation, name):
    with (federation.folder / f"{name}.log").open("ab") as stream:
        federation.processes[name] = subprocess.Popen(
            [sys.executable, "-m", "tests.network.hostile", str(federation.folder / "kits" / name)],
            cwd=ROOT, env=environment(), stdout=stream, stderr=subprocess.STDOUT,
        )  # fmt: skip


def test_a_hostile_site_and_strangers_change_nothing(federation):
    for name in ("berlin", "lyon"):
        federation.start_site(name)
    start_hostile(federation, "turin")
    federation.start_server()
    federation.until(lambda: federation.round() >= 1)
    for who, kit in strangers(federation).items():
        stranger = Dialled(SimpleNamespace(port=federation.port), kit, echo, anonymous=who == "anonymous")
        stranger.thread.join(20)
        refused = grpc.StatusCode.PERMISSION_DENIED if who == "no site" else grpc.StatusCode.UNAVAILABLE
        assert stranger.ended is refused, who
        stranger.close()
    found, wanted = federation.finish(), simulated()
    for name in ("x0", "x1", "x2"):
        assert abs(found[name] - wanted[name]) < 1e-5
    assert (found["gradients"], found["up"]) == (wanted["gradients"], wanted["up"])
    told, done = federation.log("server"), federation.log("turin")
    for name, (_, words) in ATTACKS.items():
        assert f"attack: {name}" in done
        assert words in told, name
    assert "refused 'paris' from ipv" in told
    for name in ("berlin", "lyon"):  # unharmed: connected once, and never waited for in vain
        assert f"{name} is gone" not in told.split("Report:")[0]
        assert f": {name}: " not in told
