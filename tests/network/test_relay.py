"""Regions: a relay is a site to the server, and the server of its sites."""

import contextlib
import csv
import itertools
import json
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import replace

import jax
import numpy as np
import pytest

from fedstrata.data.federated import FederatedData
from fedstrata.engines.network import Failure, Network, Policy, host, wire
from fedstrata.engines.network.engine import part
from fedstrata.engines.network.federation import Federation, made_up
from fedstrata.engines.network.relay import FILE, Relay

from . import test_host
from .faults import ROOT, environment
from .test_host import TERMS, Hosts, other_values

REGIONS = ((0, 1), (1, 3))  # the clients of each, one at a site
AWAY = Failure("away", "it is not connected")


def alike(name):
    """A case whose three clients have equally many samples, for which sites compile once."""
    case = test_host.CASES[name]
    rows = [jax.tree.map(lambda leaf: leaf[:3], case.data.client(i)) for i in range(3)]
    return replace(case, data=FederatedData.from_clients(rows))


CASES = {name: alike(name) for name in ("scaffold", "fedrzo-scalars")}


class Region(Hosts):
    """The sites of a region; one of them may be away."""

    away = None

    def __init__(self, folder, name, first, last):
        self.first = first
        super().__init__(folder, name, last - first, CASES[name])

    def data(self, i):
        return part(self.case.data, np.array([self.first + i]))

    def exchange(self, requests, timeout):
        gone, self.away = self.away, None
        replies, failures = super().exchange({i: r for i, r in requests.items() if i != gone}, timeout)
        return replies, failures | (
            {gone: Failure("away", "it is not connected")} if gone in requests else {}
        )


class Regions(Hosts):
    """The server's sites, which are relays; ``between`` is called before each exchange with its number."""

    def __init__(self, folder, name, between=lambda number, regions: None):
        self.regions = [Region(folder / f"r{i}", name, *ends) for i, ends in enumerate(REGIONS)]
        self.count, self.between = itertools.count(), between
        super().__init__(folder, name, len(REGIONS), CASES[name])

    def restart(self, i, data=None):
        self.hosts[i] = Relay(self.regions[i], self.folder / f"relay-{i}", patience=1.0)
        self.sessions[i] += 1

    def exchange(self, requests, timeout):
        before = list(self.sessions)
        if any(request.header["op"] == "exchange" for request in requests.values()):
            self.between(next(self.count), self)
        gone = {i for i in requests if self.sessions[i] != before[i]}
        replies, failures = super().exchange({i: r for i, r in requests.items() if i not in gone}, timeout)
        return replies, failures | dict.fromkeys(gone, AWAY)


@pytest.fixture(autouse=True)
def one_text(monkeypatch):
    programs = {}
    monkeypatch.setattr(host.Host, "_compiled", lambda *_: programs)


def solved(hosts, rounds=3):
    there = Federation(hosts, "run", 0, TERMS)
    engine = Network(remote := there.gather(), policy=Policy(retries=0))
    there.pose(int(remote.sizes.sum()), 3, None, hosts.identity(3))
    return hosts.case.run(rounds=rounds, engine=engine, data=made_up(there.form, 3))


def troubled(number, regions):
    """What may happen to a region in the middle of a run."""
    if number == 2:
        regions.regions[1].away = 1
    if number == 3:
        regions.regions[1].restart(0)
    if number == 4:
        regions.restart(1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scaffold", "fedrzo-scalars"])
def test_regions_are_as_simulated_whatever_happens_to_them(name, tmp_path):
    hosts = Regions(tmp_path, name, troubled)
    found, wanted = solved(hosts), CASES[name].run(rounds=3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found.x, wanted.x)
    np.testing.assert_allclose(found.history["loss"], wanted.history["loss"], rtol=1e-4)
    assert found.ledger == wanted.ledger
    assert next(hosts.count) > 4  # all of it has happened


@pytest.fixture
def joined(tmp_path):
    """A relay of two sites that has joined a run, and what it is asked next."""
    hosts = Regions(tmp_path, "scaffold")
    there = Federation(hosts, "run", 0, TERMS)
    remote = there.gather()
    there.pose(int(remote.sizes.sum()), 3, None, hosts.identity(3))
    assert not there.join({0: [0], 1: [0]})
    return hosts, there


def asked(hosts, header, *arrays):
    """What the second region answers."""
    return wire.unpack(hosts.hosts[1].answer(wire.pack({"run": "run", "seq": 9, **header}, list(arrays))))[0]


@pytest.mark.parametrize(
    ("header", "arrays", "words"),
    [
        ({"op": "keys"}, [], "not there behind a relay"),
        ({"op": "dance"}, [], "Unknown request"),
        ({"op": "join", "run": "other"}, [], "not opened"),
        ({"op": "exchange", "states": [5]}, [], "does not know it"),
        ({"op": "exchange", "states": [0]}, [], "without clients"),
        ({"op": "exchange", "states": [0]}, [[0], [1.0], [0]], "not this region's"),
        ({"op": "exchange", "states": [0]}, [[1, 2], [1.0], [0]], "without clients"),
        ({"op": "exchange", "states": [0]}, [[1], [1.0], [0]], "site-0: The header"),  # the site's own words
        ({"op": "memory"}, [], "site-0: This site does not share"),
        ({"op": "open", "run": "../x", "number": 0}, [], "name of the run"),
    ],
)
def test_what_a_relay_does_not_do(joined, header, arrays, words):
    assert words in asked(joined[0], header, *map(np.array, arrays))["error"]


def test_a_relay_goes_on_from_its_newest_folder_alone(joined):
    hosts, there = joined
    file = hosts.folder / "relay-1" / "run" / FILE
    hosts.hosts[1]._keep({0: [0, 0], 7: [0, 7]})
    backup = file.read_bytes()
    hosts.hosts[1]._keep({7: [0, 7], 8: [8, 7]})
    there.begin(False)

    def again():
        hosts.regions[1].restart(0)
        hosts.restart(1)
        return there.join({0: [0], 1: [8]})[1].why

    assert "site-0: This site" in again()  # the relay knows the state, its sites do not
    file.write_bytes(backup)
    assert "restored from a backup" in again()
    file.write_bytes(backup.replace(b"7", b"8", 1))
    assert "is damaged" in again()
    file.unlink()
    assert "remembers nothing of the run" in again()


def test_a_region_with_other_data_is_known_by_it(joined):
    hosts, there = joined
    hosts.regions[1].restart(1, other_values(hosts.regions[1].data(1)))
    hosts.restart(1)
    assert there.join({0: [0], 1: [0]})[1].why == "it came back with other data"


HEARTS = ROOT / "examples" / "hospitals"
ROUNDS = 600
SIMULATED = """
import numpy as np, fedstrata as fs, hearts
from fedstrata.engines.network.engine import part
task = hearts.EXPERIMENT.build(hearts.EXPERIMENT.settings[0])
data = part(task.data, np.array([0, 2, 3]))
options = {"seed": 0, "rounds": %d, "weights": "size", "eval_every": 5, "progress": False}
print(fs.solve(task.problem, task.method, data, task.x0, **options).history["loss"][-1])
"""


@pytest.mark.long
def test_processes_of_a_region_and_its_relay_are_killed(tmp_path):
    """Cleveland dials the server; Zurich and Long Beach dial a relay."""
    command, same = [sys.executable, "-m", "fedstrata", "net"], ["--set", f"rounds={ROUNDS}"]
    started = {}

    def done(*words):
        subprocess.run([*command, *map(str, words)], check=True, env=environment(), timeout=250, cwd=tmp_path)

    def start(name, *words, **more):
        with (tmp_path / f"{name}.log").open("ab") as log:
            arguments = {"stdout": log, "stderr": log, "cwd": HEARTS, "env": environment() | more}
            started[name] = subprocess.Popen([*command, *map(str, words)], **arguments)

    def site(name, region, file):
        kit = tmp_path / region / "kits" / name
        start(name, "site", kit, "--data", "clinic:samples", "--once", *same, HEART_FILE=file)

    def relay():
        kits = tmp_path / "above" / "kits" / "south", tmp_path / "below" / "kits" / "server"
        start("south", "relay", *kits, "--out", tmp_path / "south", "--once")

    for region, names in (("above", "cleveland,south"), ("below", "zurich,longbeach")):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        where = ["--listen", f"127.0.0.1:{port}", "--address", f"localhost:{port}"]
        done("init", tmp_path / region, "--sites", names, "--experiment", "hearts.py", *where)
        shutil.copy(HEARTS / "hearts.py", tmp_path / region)
        done("kits", tmp_path / region)
    out = tmp_path / "out"
    try:
        site("cleveland", "above", "cleveland.csv")
        site("zurich", "below", "zurich.csv")
        site("longbeach", "below", "long-beach.csv")
        relay()
        start("run", "run", "hearts.py", tmp_path / "above" / "kits" / "server", "--out", out, *same)
        for name, again in (("south", relay), ("zurich", lambda: site("zurich", "below", "zurich.csv"))):
            progressed(out, started["run"])
            started[name].kill()
            started[name].wait(10)
            again()
        assert started["run"].wait(200) == 0, (tmp_path / "run.log").read_text()
    finally:
        for process in started.values():
            process.kill()
            process.wait(10)
    (file,) = (out / "finished").glob("*.json")
    rows = list(csv.DictReader(json.loads(file.read_text())["history"].splitlines()))
    told = subprocess.run(
        [sys.executable, "-c", SIMULATED % ROUNDS], cwd=HEARTS, env=environment(), check=True,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert int(rows[-1]["round"]) == ROUNDS
    assert float(rows[-1]["loss"]) == pytest.approx(float(told.stdout.split()[-1]), rel=1e-4)
    done("audit", out / "audit.jsonl", tmp_path / "above" / "kits" / "south" / "state" / "audit.jsonl")
    done("audit", tmp_path / "south" / "audit.jsonl", tmp_path / "below/kits/zurich/state/audit.jsonl")


def progressed(out, process):
    """Wait for twenty rounds more."""
    first, end = None, time.monotonic() + 120
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError, ValueError):
            now = json.loads((out / "network.json").read_text())["round"] or 0
            first = now if first is None else first
            if now >= first + 20:
                return
        time.sleep(0.1)
    raise AssertionError("the run does not go on")
