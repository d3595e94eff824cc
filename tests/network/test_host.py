"""Sites that join a run: known, forgotten and refused, forgotten and taken anew, with other data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import pytest

from fedstrata.engines.network import Failure, Request, Text, wire
from fedstrata.engines.network.engine import part
from fedstrata.engines.network.federation import Federation, made_up
from fedstrata.engines.network.host import Host, form_of
from fedstrata.solving.pose import pose

from ..cases import all_cases

CASES = {case.name: case for case in all_cases()}


@dataclass(frozen=True)
class Opened:
    case: Any
    data: Any

    def text(self, clients, server):
        whole = replace(made_up(form_of(self.data), clients), server=server)
        run = pose(self.case.problem, self.case.method, whole, self.case.x0, rounds=3)
        return Text.of(run.setup, run.method, run.carry, server), "posed"


class Hosts:
    """Sites in this process whose connections can be made new."""

    rejoins = True

    def __init__(self, folder, name="scaffold", sites=2):
        self.case, self.folder = CASES[name], folder
        self.names = [f"site-{i}" for i in range(sites)]
        self.sent, self.received = [0] * sites, [0] * sites
        self.sessions = [0] * sites
        self.hosts = [None] * sites
        for i in range(sites):
            self.restart(i)

    def restart(self, i, clients=None):
        own = part(self.case.data, np.array([i]) if clients is None else clients)
        self.hosts[i] = Host("text", lambda n: Opened(self.case, own), self.folder / self.names[i])
        self.sessions[i] += 1

    def session(self, i):
        return self.sessions[i]

    def wait(self, sites, seconds):
        return list(sites)

    def exchange(self, requests, timeout):
        replies, failures = {}, {}
        for i, request in requests.items():
            reply = Request(*wire.unpack(self.hosts[i].answer(wire.pack(*request))))
            if "error" in reply.header:
                failures[i] = Failure("error", reply.header["error"])
            else:
                replies[i] = reply
        return replies, failures


def joined(hosts, anew):
    """A federation that has joined its sites; what it tells."""
    there, told = Federation(hosts, "run", 0, "text", anew), []
    remote = there.gather()
    there.pose(int(remote.sizes.sum()), len(remote.sizes), None, "posed")
    there.tell = lambda *words: told.append(words)
    assert not there._join([0, 1])
    return there, told


def test_a_site_that_remembers_is_not_taken_anew(tmp_path):
    hosts = Hosts(tmp_path)
    there, told = joined(hosts, anew=True)
    site = hosts.hosts[1].site
    site.memory = jax.tree.map(lambda leaf: leaf + 1, site.memory)
    site._write("now", site.memory)
    hosts.restart(1)
    assert not there._join([0, 1])
    assert told == []
    jax.tree.map(np.testing.assert_array_equal, site.memory, hosts.hosts[1].site.memory)


def forget(hosts, i):
    """Its process and its disk are gone."""
    for file in (hosts.folder / hosts.names[i]).rglob("*"):
        if file.is_file():
            file.unlink()
    hosts.restart(i)


def test_a_site_that_has_forgotten_is_refused(tmp_path):
    hosts = Hosts(tmp_path)
    there, told = joined(hosts, anew=False)
    forget(hosts, 1)
    failures = there._join([0, 1])
    assert list(failures) == [1]
    assert "remembers nothing" in failures[1].why
    assert told == []


def test_a_site_that_has_forgotten_is_taken_anew_where_the_policy_says_so(tmp_path):
    hosts = Hosts(tmp_path)
    there, told = joined(hosts, anew=True)
    forget(hosts, 1)
    assert not there._join([0, 1])
    assert told == [("site-1", "taken anew, as it remembered nothing of the run")]
    assert (tmp_path / "site-1" / "run" / "now").exists()


def test_without_memory_there_is_nothing_to_forget(tmp_path):
    hosts = Hosts(tmp_path, "fedavg")
    there, told = joined(hosts, anew=False)
    forget(hosts, 1)
    assert not there._join([0, 1])
    assert told == []


def test_a_site_that_comes_back_with_other_data_is_refused(tmp_path):
    hosts = Hosts(tmp_path)
    there, _ = joined(hosts, anew=True)
    hosts.restart(1, clients=np.array([0]))
    assert there._join([0, 1])[1].why == "it came back with other data"


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"op": "open", "run": "../run", "number": 0, "fingerprint": "text"}, "no name"),
        ({"op": "open", "run": "run", "number": 0, "fingerprint": "other"}, "another text"),
        ({"op": "exchange", "run": "run"}, "not joined"),
        ({"op": "memory", "run": "run"}, "--share"),
        ({"op": "shutdown"}, "no request"),
        ({"op": "open", "run": "run", "number": "0", "fingerprint": "text"}, "number"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_a_site_does_not_do(header, words, tmp_path):
    hosts = Hosts(tmp_path)
    _, failures = hosts.exchange({0: Request({**header, "seq": 1}, [])}, 1.0)
    assert words in failures[0].why
