"""Faults of real processes on 127.0.0.1: the final iterate is that of a run without them."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import fedstrata as fs
from fedstrata.support.sealed import load_arrays

from .faults import EXPERIMENT, Federation, environment, forgetting, simulated, without

pytestmark = pytest.mark.slow  # the rest of the faults runs at night


@pytest.fixture(scope="module")
def undisturbed():
    """The same run, simulated."""
    return simulated()


@pytest.fixture
def federation(tmp_path, request):
    made = Federation(tmp_path, getattr(request, "param", ""))
    yield made
    made.close()


def assert_same(found, wanted):
    """The same point, and nothing counted twice."""
    for name in ("x0", "x1", "x2"):
        assert abs(found[name] - wanted[name]) < 1e-5
    assert found["gradients"] == wanted["gradients"]
    assert found["up"] == wanted["up"]


def past(federation, r):
    return lambda: federation.round() >= r


def test_an_exception_and_killed_sites_and_server_change_nothing(federation, undisturbed):
    for name in ("berlin", "lyon", "turin"):
        federation.start_site(name)
    federation.start_server()
    federation.until(lambda: "fits" in federation.log("berlin"))
    (federation.folder / "boom-berlin").touch()
    federation.until(past(federation, 5))
    assert "ZeroDivisionError" in federation.log("server")
    assert "failed: ZeroDivisionError (" in federation.log("berlin")
    assert "patient 17" not in federation.log("server") + federation.log("berlin")
    federation.signal("lyon", signal.SIGKILL)  # somewhere between exchanges, or within one
    federation.start_site("lyon")
    federation.until(past(federation, federation.round() + 20))
    federation.signal("turin", signal.SIGSTOP)
    time.sleep(0.5)  # within an exchange: the others have answered
    federation.signal("turin", signal.SIGKILL)
    federation.start_site("turin")
    federation.until(past(federation, federation.round() + 20))
    federation.signal("server", signal.SIGKILL)
    federation.signal("berlin", signal.SIGKILL)
    federation.start_site("berlin")
    federation.start_server("--resume")
    assert_same(federation.finish(), undisturbed)
    assert "turin: away" in federation.log("server")


@pytest.mark.long
@pytest.mark.parametrize("federation", ["timeout = 2.0"], indirect=True)
def test_a_site_that_sleeps_longer_than_the_timeout_is_waited_for(federation, undisturbed):
    federation.start()
    federation.until(past(federation, 10))
    federation.signal("turin", signal.SIGSTOP)
    time.sleep(6)
    federation.signal("turin", signal.SIGCONT)
    assert_same(federation.finish(), undisturbed)
    assert "turin: late" in federation.log("server")


@pytest.mark.long
@pytest.mark.parametrize("federation", ['missing = "drop"\nafter = 0.2\ntimeout = 1.5'], indirect=True)
def test_late_answers_of_a_site_that_was_dropped_leave_nothing_behind(federation):
    federation.start()
    federation.until(past(federation, 10))
    federation.signal("turin", signal.SIGSTOP)
    time.sleep(5)  # it is there and silent: dropped, and asked again in the next round
    federation.signal("turin", signal.SIGCONT)
    found = federation.finish()
    told = federation.log("server")
    assert "turin: late" in told
    events = re.findall(r"round (\d+): turin: (dropped|readmitted)", told)
    assert [what for _, what in events] == ["dropped", "readmitted"] * (len(events) // 2)
    rounds = [int(r) for r, _ in events]
    # It may be dropped in an evaluation, and be back in the round of that number.
    away = {r for first, last in zip(rounds[::2], rounds[1::2], strict=True) for r in range(first, last)}
    assert away
    wanted = without(2, away)
    np.testing.assert_allclose([found[f"x{j}"] for j in range(3)], wanted, atol=1e-5)
    assert away <= {int(row["round"]) - 1 for row in federation.history() if row["present/turin"] == 0}


@pytest.mark.long
@pytest.mark.parametrize("federation", ['missing = "drop"\nafter = 0.2\ntimeout = 120.0'], indirect=True)
def test_a_site_that_is_away_is_dropped_and_readmitted(federation):
    federation.start()
    federation.until(past(federation, 10))
    federation.signal("lyon", signal.SIGKILL)
    federation.until(lambda: "lyon: dropped" in federation.log("server"))
    federation.until(past(federation, federation.round() + 5))
    with federation.slowed("turin"):  # or the rounds would be over before lyon has started
        federation.start_site("lyon")
        federation.until(lambda: "lyon: readmitted" in federation.log("server"))
    found = federation.finish()
    (first,), (last,) = (
        [int(r) for r in re.findall(rf"round (\d+): lyon: {what}", federation.log("server"))]
        for what in ("dropped", "readmitted")
    )
    assert last - first >= 5
    wanted = without(1, range(first, last))  # weights renormalised, and its memory kept meanwhile
    np.testing.assert_allclose([found[f"x{j}"] for j in range(3)], wanted, atol=1e-5)
    present = np.array([row["present/lyon"] for row in federation.history()])
    assert present[:10].all()
    assert present[-1] == 1
    assert 5 <= (present == 0).sum() < len(present)
    assert all(row["present/turin"] == 1 for row in federation.history())


@pytest.mark.long
@pytest.mark.parametrize(
    "federation", ['missing = "drop"\nafter = 0.2\nmin_sites = 3\ntimeout = 5.0'], indirect=True
)
def test_too_few_sites_stop_the_run_with_a_checkpoint(federation, undisturbed):
    federation.start()
    federation.until(past(federation, 10))
    federation.signal("lyon", signal.SIGKILL)
    assert federation.processes["server"].wait(60) == 3
    assert "may not continue with fewer than 3" in federation.log("server")
    assert list((federation.out / "unfinished").iterdir())
    federation.start_site("lyon")
    federation.start_server("--resume")
    assert_same(federation.finish(), undisturbed)


@pytest.mark.long
@pytest.mark.parametrize("silent", [False, True])
def test_a_server_that_waits_for_a_site_ends_within_ten_seconds_and_is_saved(federation, undisturbed, silent):
    federation.start()
    federation.until(past(federation, 10))
    federation.signal("lyon", signal.SIGSTOP if silent else signal.SIGKILL)  # in an exchange, or gone
    time.sleep(1)
    reached = federation.round()
    federation.signal("server", signal.SIGTERM)
    assert federation.processes["server"].wait(10) == -signal.SIGTERM
    if silent:
        federation.signal("lyon", signal.SIGKILL)
    (file,) = (federation.out / "unfinished").iterdir()
    assert load_arrays(file)[1]["round"] >= reached
    federation.start_site("lyon")
    federation.start_server("--resume")
    assert_same(federation.finish(), undisturbed)


def test_a_site_with_an_empty_disk_is_refused_and_one_with_another_text_too(federation, undisturbed):
    federation.start()
    federation.until(past(federation, 10))
    federation.signal("lyon", signal.SIGKILL)
    state = federation.folder / "kits" / "lyon" / "state"
    shutil.move(state, federation.folder / "kept")
    federation.start_site("lyon")
    assert federation.processes["server"].wait(120) == 3
    assert "remembers nothing" in federation.log("server")
    federation.signal("lyon", signal.SIGKILL)
    shutil.rmtree(state, ignore_errors=True)
    shutil.move(federation.folder / "kept", state)
    federation.start_site("lyon", "--set", "rounds=7")
    federation.start_server("--resume")
    assert federation.processes["server"].wait(120) == 3
    assert "parameters.rounds" in federation.log("server")
    federation.signal("lyon", signal.SIGKILL)
    federation.start_site("lyon")
    federation.start_server("--resume")
    assert_same(federation.finish(), undisturbed)


@pytest.mark.long
@pytest.mark.parametrize("federation", ["anew = true"], indirect=True)
def test_a_site_with_an_empty_disk_is_taken_anew_where_the_policy_says_so(federation):
    federation.start()
    federation.until(past(federation, 10))
    federation.signal("lyon", signal.SIGKILL)
    shutil.rmtree(federation.folder / "kits" / "lyon" / "state")
    federation.start_site("lyon")
    found = federation.finish()
    told = re.findall(r"round (\d+): lyon: taken as a new site", federation.log("server"))
    assert len(told) == 1
    wanted = forgetting(1, int(told[0]))
    np.testing.assert_allclose([found[f"x{j}"] for j in range(3)], wanted, atol=1e-5)
    assert "taken as a new site" in (federation.out / "report.html").read_text("utf-8")


@pytest.mark.long
@pytest.mark.parametrize("federation", ["timeout = 120.0"], indirect=True)
def test_status_stop_resume_and_collect(federation, undisturbed):
    for name in ("berlin", "turin"):
        federation.start_site(name)
    federation.start_server()

    def waiting():
        return (federation.out / "network.json").exists() and "connected" in federation.command(
            "status", "out"
        )

    federation.until(waiting)
    told = federation.command("status", "out")
    assert "no round yet" in told
    assert "lyon: away" in told
    federation.start_site("lyon", "--share")
    federation.until(past(federation, 10))
    with federation.slowed("turin"):  # or the rounds would be over before a command has started
        told = federation.command("status", "out")
        assert all(f"{name}: connected" in told for name in ("berlin", "lyon", "turin"))
        assert re.search(r"round \d+ of 200", told)
        assert "Asked process" in federation.command("stop", "out")
    assert federation.processes["server"].wait(60) == 130
    assert "the same command with --resume continues there" in federation.log("server")
    assert "No run is under way" in federation.command("status", "out", fails=True)
    words = (str(federation.experiment), "kits/server", "--out", "out")
    assert "--resume" in federation.command("run", *words, fails=True)
    federation.start_server("--resume")
    assert_same(found := federation.finish(), undisturbed)
    (model,) = (federation.out / "models").iterdir()
    np.testing.assert_allclose(fs.Result.load(model).x, [found[f"x{j}"] for j in range(3)], rtol=1e-6)
    swapped = (words[0], "kits/lyon", "--out", "other")
    assert "the kit of the site 'lyon'" in federation.command("run", *swapped, fails=True)
    assert "[1/1] SCAFFOLD, seed 0" in federation.log("server")  # the display of any run
    page = (federation.out / "report.html").read_text("utf-8")
    for words_ in ("The network", "sent to it", "received", "waited for", "failures", "attempts at rounds"):
        assert words_ in page
    told = federation.command("collect", *words)
    assert "berlin: This site does not share" in told
    assert [file.name for file in (federation.out / "collected" / "run-0").iterdir()] == ["lyon.safetensors"]


def test_the_demo_works_in_one_command(tmp_path):
    words = [sys.executable, "-m", "fedstrata", "net", "try", "demo", "--quick", "--out", "out"]
    words += ["--set", "rounds=4", "--set", "method=FedMSA"]  # a site compiles each method for itself
    done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert "The network" in (tmp_path / "out" / "report.html").read_text("utf-8")
    for pid in re.findall(r"\d+", re.search(r"processes (.*)", done.stdout)[1]):
        assert not Path(f"/proc/{pid}").exists()


# A site whose process ends by itself: while it starts, or in the middle of the run.
DIES = """
import os, sys, threading, time
from pathlib import Path

def die(where):
    while not list((Path(where) / "state").rglob("state_1*")):  # not the first, state_0
        time.sleep(0.01)
    os._exit(7)

for word in sys.argv:
    if word.endswith("site-2"):
        if {at_once}:
            sys.exit("no room on the disk")
        threading.Thread(target=die, args=(word,), daemon=True).start()
"""


@pytest.mark.long
@pytest.mark.parametrize("at_once", [True, False])
def test_trying_tells_which_site_has_died(at_once, tmp_path):
    (tmp_path / "faults.py").write_text(DIES.format(at_once=at_once) + EXPERIMENT)
    words = [sys.executable, "-m", "fedstrata", "net", "try", "faults.py", "--out", "out"]
    done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 2, done.stderr
    assert "site-2 (process" in done.stderr
    assert ("no room on the disk" if at_once else "ended with code 7") in done.stderr
    for pid in re.findall(r"\d+", re.search(r"processes (.*)", done.stdout)[1]):
        assert not Path(f"/proc/{pid}").exists()
