"""Every write fails once, at every place: the run ends equal all the same, or stops with the reason.

All that is kept goes through `fedstrata.support.writing`. The steps of a write are to open a file, to write
(half of it arrives), to flush it, to rename it, and to flush the folder.
"""

from __future__ import annotations

import errno
import os
import warnings
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.engines.network import Network, Policy, host
from fedstrata.engines.network.federation import Federation, made_up
from fedstrata.lab.experiments import runner
from fedstrata.support import writing

from .experiments.conftest import make
from .network.test_host import CASES, TERMS, Hosts


class Disk:
    """Stands for `os` and `open` in `fedstrata.support.writing`: step ``failing`` of all fails, once."""

    def __init__(self, failing=None):
        self.failing, self.steps, self.failed = failing, 0, ""

    def _step(self, name, number):
        self.steps += 1
        if self.steps - 1 == self.failing:
            self.failed = name
            raise OSError(number, os.strerror(number))

    def open(self, file, mode):
        self._step("open", errno.ENOSPC)
        stream = open(file, mode)  # noqa: SIM115
        write = stream.write

        class Stream:
            __enter__ = lambda own: own  # noqa: E731
            __exit__ = lambda own, *error: stream.close()  # noqa: E731
            flush, fileno = stream.flush, stream.fileno

            def write(own, content):
                write(content[: len(content) // 2])
                self._step("write", errno.ENOSPC)
                write(content[len(content) // 2 :])

        return Stream()

    def fsync(self, number):
        self._step("fsync", errno.EIO)  # and no more: a thousand of them take seconds

    def replace(self, *files):
        self._step("replace", errno.EIO)
        os.replace(*files)

    def __enter__(self):
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(writing, "open", self.open, raising=False)
        names = ("getpid", "unlink", "open", "close", "kill", "O_RDONLY")
        known = {name: getattr(os, name) for name in names}
        self.patch.setattr(writing, "os", SimpleNamespace(**known, fsync=self.fsync, replace=self.replace))
        return self

    def __exit__(self, *error):
        self.patch.undo()


def every_place(run):
    """Disks that fail at every step of what ``run(disk)`` writes."""
    with Disk() as whole:
        run(whole)
    assert whole.steps >= 20
    return [Disk(step) for step in range(whole.steps)]


def tried(disk, run):
    """What a run comes to on a disk, or None; and the reason for which it stopped, or its first warning."""
    with disk, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            found = run()
        except (OSError, fs.CheckpointError) as error:
            return None, str(error)
    return found, str(told[0].message) if told else ""


A = np.arange(6.0).reshape(3, 2)
DATA = fs.FederatedData.from_clients([{"a": A}, {"a": A + 1}])
PROBLEM = fs.Minimization(lambda x, s: 0.5 * ((x - s["a"]) ** 2).sum())


def test_a_checkpoint_that_fails_costs_nothing(tmp_path):
    def solve(folder, **changes):
        saving = fs.Checkpoint(folder, every_rounds=1)
        arguments = {"rounds": 4, "progress": False, "checkpoint": saving, **changes}
        return fs.solve(PROBLEM, fs.SCAFFOLD(eta_l=0.1, K=2), DATA, np.zeros(2), **arguments)

    places = every_place(lambda disk: solve(tmp_path / "whole"))
    wanted = solve(tmp_path / "wanted")
    stopped = 0
    for disk in places:
        folder = tmp_path / str(disk.failing)
        found, why = tried(disk, lambda folder=folder: solve(folder))
        assert ("cannot be written" if found is None else "could not be written after round") in why
        stopped += found is None
        again = solve(folder, resume=True)
        for result in (found or again, again):
            np.testing.assert_array_equal(result.x, wanted.x)
            assert result.ledger == wanted.ledger
        assert {file.name for file in folder.iterdir()} == {"checkpoint.safetensors"}
    assert stopped == 5  # the steps of the trial before anything is computed


def test_an_experiment_goes_on_where_its_store_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "report_runs", lambda prepared, folder, runs, *rest: runs)

    def run(folder):
        return runner.run_experiment(make(seeds=1), folder, together=False, progress=False, models=True)

    def values(runs):
        return [(run.label, run.history["loss"].tolist()) for run in runs]

    places = every_place(lambda disk: run(tmp_path / "whole"))
    wanted = values(run(tmp_path / "whole"))
    for disk in places:
        folder = tmp_path / str(disk.failing)
        found, why = tried(disk, lambda folder=folder: run(folder))
        assert found is not None or os.strerror(errno.ENOSPC) in why or os.strerror(errno.EIO) in why
        assert found is None or values(found) == wanted
        assert disk.failed
        assert values(run(folder)) == wanted


class Restarting(Hosts):
    """A site whose disk fails may end for it, and is started again."""

    def __init__(self, *args, disk, restarts):
        self.disk, self.restarts, self.ended = disk, restarts, False
        super().__init__(*args)

    def exchange(self, requests, timeout):
        replies, failures = super().exchange(requests, timeout)
        if self.restarts and self.disk.failed and not self.ended and failures:
            self.ended = True
            for i in failures:
                self.restart(i)
        return replies, failures


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.slow
def test_a_federation_ends_equal_whichever_write_fails(restarts, tmp_path, monkeypatch):
    """The server's and the sites'. A site that could not keep its memory does not apply a round twice."""
    case, engine = CASES["scaffold"], Network(policy=Policy(retries=1))
    programs = {}  # of all hosts together: they have one text
    monkeypatch.setattr(host.Host, "_compiled", lambda *_: programs)
    clients = 2

    def run(disk, folder):
        hosts = Restarting(folder / "sites", "scaffold", clients, disk=disk, restarts=restarts)
        there = Federation(hosts, "run", 0, TERMS)
        engine.remote = remote = there.gather()
        there.pose(int(remote.sizes.sum()), clients, None, hosts.identity(clients))
        saving = fs.Checkpoint(folder / "run", every_rounds=1)
        options = {"checkpoint": saving, "data": made_up(there.form, clients), "default_metrics": False}
        return case.run(rounds=2, engine=engine, **options)

    places = every_place(lambda disk: run(disk, tmp_path / "whole"))
    wanted = run(Disk(), tmp_path / "wanted")
    for disk in places:
        found, why = tried(disk, lambda disk=disk: run(disk, tmp_path / str(disk.failing)))
        assert disk.failed
        if found is None:
            assert "cannot be written" in why
            continue
        jax.tree.map(np.testing.assert_array_equal, found.x, wanted.x)
        assert found.ledger == wanted.ledger
