"""The same sites inside a real NVIDIA FLARE system on 127.0.0.1, with its kits, in jobs without code."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.flare_system import ADMIN, SERVER, System

from .faults import EXPERIMENT, SITES, environment, history, simulated

pytest.importorskip("nvflare", reason='no NVIDIA FLARE: pip install "fedstrata[flare]"')
pytestmark = pytest.mark.slow
ROUNDS = "rounds=150"


class Trial(System):
    """FedStrata's kits in it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, SITES, environment() | {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache")})
        names = ", ".join(f'"{name}"' for name in SITES)
        text = (
            '[server]\nlisten = "127.0.0.1:0"\naddress = "localhost:0"\nhosts = ["localhost"]\n'
            f'[federation]\nsites = [{names}]\nexperiment = "faults.py"\n[policy]\ntimeout = 10.0\n'
        )
        for party in (*self.parties, ADMIN):
            (self.kits / party / "federation.toml").write_text(text)
            (self.kits / party / "faults.py").write_text(EXPERIMENT)

    def net(self, *words: str, fails: bool = False) -> str:
        return self.python("-m", "fedstrata", "net", *words, fails=fails)

    def files(self, party: str) -> str:
        """All that a party has written, without its copy of the text."""
        found = [self.folder / f"{party}.log", *(f for f in (self.kits / party).rglob("*") if f.is_file())]
        return "".join(f.read_text(errors="replace") for f in found if f.suffix != ".py")

    def kept(self, party: str) -> int:
        """How many times the clients of a site have remembered something."""
        return sum(1 for _ in (self.kits / party / "fedstrata").rglob("before_*"))


@pytest.fixture
def system(tmp_path):
    made = Trial(tmp_path)
    yield made
    made.close()


def test_a_run_outlives_a_site_that_is_killed(system):
    kits = system.kits
    told = system.net("flare", str(kits / "berlin"), "--data", "nowhere:samples", fails=True)
    assert "nowhere" in told
    system.net("flare", str(kits / SERVER), "--set", ROUNDS)
    for name in SITES:
        assert "fits" in system.net("flare", str(kits / name), "--simulated", "--set", ROUNDS)
    boom = system.folder / "boom"
    boom.touch()  # an exception at a site, once
    for party in system.parties:
        system.start(party, **({"FAULTS_BOOM": str(boom)} if party == "berlin" else {}))
    asked = ("run", "faults.py", str(kits / ADMIN), "--out", "out", "--set", ROUNDS)
    told = system.net(*asked, fails=True)
    assert "berlin: It is not ready" in told
    assert not boom.exists()
    assert "patient 17" in system.files("berlin")
    assert "patient 17" not in system.files(SERVER) + told  # what an exception says stays at the site
    words = [sys.executable, "-m", "fedstrata", "net", *asked, "--resume"]
    with (system.folder / "run.log").open("wb") as stream:
        run = subprocess.Popen(
            words, cwd=system.folder, env=system.environment, stdout=stream, stderr=subprocess.STDOUT
        )
    try:
        end = time.monotonic() + 200
        while system.kept("lyon") < 10:
            assert time.monotonic() < end, (system.folder / "run.log").read_text()[-3000:]
            assert run.poll() is None, (system.folder / "run.log").read_text()[-3000:]
            time.sleep(0.1)
        system.kill("lyon")
        time.sleep(3)
        system.start("lyon")
        assert run.wait(400) == 0, (system.folder / "run.log").read_text()[-3000:]
    finally:
        if run.poll() is None:
            run.kill()
            run.wait()
    told = (system.folder / "run.log").read_text()
    assert "goes on from the checkpoint" in told
    found, wanted = history(system.folder / "out")[-1], simulated(rounds=150)
    for name in ("x0", "x1", "x2"):
        assert abs(found[name] - wanted[name]) < 1e-5
    assert (found["gradients"], found["up"]) == (wanted["gradients"], wanted["up"])  # nothing twice
    assert not list(kits.rglob("custom"))  # no code travelled
    assert "The network" in (system.folder / "out" / "report.html").read_text("utf-8")
    # Another text than the server's is said, and nothing is tried again.
    assert "another text" in system.net("run", "faults.py", str(kits / ADMIN), "--out", "other", fails=True)


def test_kits_of_flares_provisioning_open_our_own_connections(system):
    """Over gRPC, without a FLARE system."""
    from fedstrata.engines.network.grpc_server import GrpcServer
    from fedstrata.engines.network.kits import name_of

    from .test_grpc import Dialled, ask, echo

    server = GrpcServer(SITES, system.kits / SERVER)
    try:
        assert name_of(system.kits / "lyon") == "lyon"
        site = Dialled(server, system.kits / "lyon", echo)
        assert server.wait([1], 20) == [1]
        assert not ask(server, site=1)[1]
        site.close()
    finally:
        server.close()


def test_no_site_answers_another(tmp_path):
    """In a job of FLARE sites can call each other; FLARE says who calls."""
    from types import SimpleNamespace

    from nvflare.collab.api.context import set_call_context

    from fedstrata.engines.network import wire
    from fedstrata.engines.network.flare import Answering

    class Site(Answering):
        def host(self, kit, name):
            raise ZeroDivisionError("patient 17")

    site, message = Site(), wire.pack({"op": "open", "seq": 7}, [])
    workspace = SimpleNamespace(get_root_dir=lambda: str(tmp_path))
    try:
        for caller, words in (("lyon", "Only the server"), ("server", "ZeroDivisionError")):
            context = SimpleNamespace(caller=caller, workspace=workspace, app=SimpleNamespace(name="berlin"))
            set_call_context(context)
            site.prepare()
            header, _ = wire.unpack(site.answer(message))
            assert words in header["error"]
            assert "patient" not in header["error"]
        assert header["seq"] == 7
    finally:
        set_call_context(None)
