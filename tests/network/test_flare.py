"""The same sites inside a real NVIDIA FLARE system on 127.0.0.1, with its kits, in jobs without code."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from benchmarks.flare_system import ADMIN, SERVER, System
from fedstrata.support.sealed import CheckpointError, load_arrays

from .faults import EXPERIMENT, SITES, environment, history, simulated, without

pytest.importorskip("nvflare", reason='no NVIDIA FLARE: pip install "fedstrata[flare]"')
psutil = pytest.importorskip("psutil")  # comes with it
pytestmark = pytest.mark.long
ROUNDS = "rounds=150"


class Trial(System):
    """FedStrata's kits in it."""

    def __init__(self, folder: Path, policy: str = "timeout = 10.0") -> None:
        super().__init__(folder, SITES, environment() | {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache")})
        names = ", ".join(f'"{name}"' for name in SITES)
        text = (
            '[server]\nlisten = "127.0.0.1:0"\naddress = "localhost:0"\nhosts = ["localhost"]\n'
            f'[federation]\nsites = [{names}]\nexperiment = "faults.py"\n[policy]\n{policy}\n'
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

    def round(self, party: str) -> int:
        """The last round of which a site remembers something, or −1."""
        rounds = [-1]
        for file in (self.kits / party / "fedstrata").rglob("state_*"):
            with suppress(CheckpointError):  # it goes as another comes
                rounds.append(load_arrays(file)[1]["round"])
        return max(rounds)

    def prepare(self) -> None:
        """Every party says what it does, and starts."""
        self.net("flare", str(self.kits / SERVER), "--set", ROUNDS)
        for name in SITES:
            self.net("flare", str(self.kits / name), "--simulated", "--set", ROUNDS)
        for party in self.parties:
            self.start(party)

    def submit(self, *more: str) -> None:
        """An administrator's process, which sees the run through."""
        words = ["run", "faults.py", str(self.kits / ADMIN), "--out", "out", "--set", ROUNDS, *more]
        with (self.folder / "run.log").open("ab") as stream, listening():
            self.run = subprocess.Popen(
                [sys.executable, "-m", "fedstrata", "net", *words], cwd=self.folder, env=self.environment,
                stdout=stream, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def told(self) -> str:
        """What the administrator's processes said."""
        return (self.folder / "run.log").read_text(errors="replace")

    def until(self, true: Callable[[], bool], seconds: float = 200.0) -> None:
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, self.told()[-3000:]
            assert self.run.poll() is None, self.told()[-3000:]
            time.sleep(0.1)

    def close(self) -> None:
        run = getattr(self, "run", None)
        if run is not None and run.poll() is None:
            run.kill()
            run.wait()
        super().close()


@contextmanager
def listening() -> Iterator[None]:
    """Processes started here hear Ctrl-C, also where these tests run in a shell's background.

    A function between fork and exec could say it too, but JAX's threads forbid the fork.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture
def system(tmp_path, request):
    made = Trial(tmp_path, *([request.param] if hasattr(request, "param") else []))
    yield made
    made.close()


def assert_undisturbed(system):
    found, wanted = history(system.folder / "out")[-1], simulated(rounds=150)
    for name in ("x0", "x1", "x2"):
        assert abs(found[name] - wanted[name]) < 1e-5
    assert (found["gradients"], found["up"]) == (wanted["gradients"], wanted["up"])  # nothing twice


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
    system.submit("--resume")
    system.until(lambda: system.round("lyon") >= 10)
    system.kill("lyon")
    time.sleep(3)
    system.start("lyon")
    assert system.run.wait(400) == 0, system.told()[-3000:]
    assert "continues from the checkpoint" in system.told()
    assert_undisturbed(system)
    assert not list(kits.rglob("custom"))  # no code travelled
    assert "The network" in (system.folder / "out" / "report.html").read_text("utf-8")
    # Other parameters than the server's are said, and nothing is tried again.
    told = system.net("run", "faults.py", str(kits / ADMIN), "--out", "other", fails=True)
    assert "parameters.rounds" in told


def test_a_run_outlives_ctrl_c_and_a_server_that_is_killed(system):
    system.prepare()
    system.submit()
    system.until(lambda: system.round("lyon") >= 10)
    system.run.send_signal(signal.SIGINT)
    assert system.run.wait(100) == 130, system.told()[-3000:]
    assert "the job is aborted" in system.told()
    before = system.round("lyon")
    assert before < 149
    system.submit("--resume")
    system.until(lambda: system.round("lyon") >= before + 10)
    system.kill(SERVER)
    time.sleep(3)
    system.start(SERVER)
    assert system.run.wait(500) == 0, system.told()[-3000:]
    assert "no word from FLARE's server" in system.told()
    assert_undisturbed(system)


@pytest.mark.parametrize("system", ['missing = "drop"\nafter = 0.2\ntimeout = 3.0'], indirect=True)
def test_a_site_that_sleeps_is_dropped_where_the_policy_says_so(system):
    system.prepare()
    system.submit()
    system.until(lambda: system.round("lyon") >= 10)
    asleep = psutil.Process(system.processes["lyon"].pid).children(recursive=True)
    for process in asleep:
        process.suspend()  # the site's part of the job
    log, dropped = system.folder / f"{SERVER}.log", r"round (\d+): lyon: dropped"
    system.until(lambda: re.search(dropped, log.read_text(errors="replace")) is not None)
    for process in asleep:
        process.resume()  # FLARE's job does not end before; it is not taken in again
    assert system.run.wait(400) == 0, system.told()[-3000:]
    rows, first = history(system.folder / "out"), int(re.search(dropped, log.read_text(errors="replace"))[1])
    assert 10 <= first < 150
    assert [row["present/lyon"] for row in rows if row["round"] != first] == [
        float(row["round"] < first) for row in rows if row["round"] != first
    ]
    assert all(row["present/turin"] == 1 for row in rows)
    wanted = without(1, range(first, 150), rounds=150)
    for j, name in enumerate(("x0", "x1", "x2")):
        assert abs(rows[-1][name] - wanted[j]) < 1e-5


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
