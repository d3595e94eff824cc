"""Sites that join a run: known, forgotten and refused, forgotten and taken as new, with other data."""

from __future__ import annotations

import itertools
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedstrata.data import Preparation, from_csv
from fedstrata.data.federated import FederatedData
from fedstrata.data.tables import Encoding
from fedstrata.engines.network import Failure, Network, Request, RoundFailed, Text, wire
from fedstrata.engines.network.engine import part
from fedstrata.engines.network.federation import Federation, _described, made_up
from fedstrata.engines.network.host import Host, columns_of, form_of
from fedstrata.engines.network.rules import Asks
from fedstrata.solving.pose import pose
from fedstrata.solving.sent import exchanges_of
from fedstrata.testing.cases import all_cases

CASES = {case.name: case for case in all_cases()}
TERMS = {"experiment": "text"}


@dataclass(frozen=True)
class Opened:
    case: Any
    data: Any

    def text(self, clients, server):
        whole = replace(made_up(form_of(self.data), clients), server=server)
        run = pose(self.case.problem, self.case.method, whole, self.case.x0, rounds=3)
        return Text.of(run.setup, run.method, run.carry, server, run.rounds), run.common

    def asks(self):
        whole = made_up(form_of(self.data), 5)
        run = pose(self.case.problem, self.case.method, whole, self.case.x0, rounds=3)
        phases = tuple(one.phase for one in exchanges_of(run) if one.gathered)
        return Asks(self.case.name, phases, run.setup.secure, run.rounds)


class Hosts:
    """Sites in this process whose connections can be made new."""

    rejoins = True

    def __init__(self, folder, name="scaffold", sites=2, case=None):
        self.case, self.folder = case or CASES[name], folder
        self.names = [f"site-{i}" for i in range(sites)]
        self.sent, self.received, self.took = [0] * sites, [0] * sites, [0.0] * sites
        self.sessions = [0] * sites
        self.hosts = [None] * sites
        for i in range(sites):
            self.restart(i)

    def data(self, i):
        return part(self.case.data, np.array([i]))

    def restart(self, i, data=None):
        own = self.data(i) if data is None else data
        self.hosts[i] = Host(TERMS, lambda n: Opened(self.case, own), self.folder / self.names[i])
        self.sessions[i] += 1

    def identity(self, clients):
        """Of the run as the server poses it."""
        return Opened(self.case, self.case.data).text(clients, None)[1]

    def session(self, i):
        return self.sessions[i]

    def wait(self, sites, seconds):
        return list(sites)

    def heed(self, stopping):
        pass

    def exchange(self, requests, timeout):
        replies, failures = {}, {}
        for i, request in requests.items():
            reply = Request(*wire.unpack(self.hosts[i].answer(wire.pack(*request))))
            if "error" in reply.header:
                failures[i] = Failure("error", reply.header["error"])
            else:
                replies[i] = reply
        return replies, failures


def joined(hosts, anew, run="run"):
    """A federation that has joined its sites; what it tells."""
    there, told = Federation(hosts, run, 0, TERMS, anew), []
    remote = there.gather()
    there.pose(int(remote.sizes.sum()), len(remote.sizes), None, hosts.identity(len(remote.sizes)))
    there.tell = lambda *words: told.append(words)
    assert not there.join({0: [0], 1: [0]})
    return there, told


def test_a_site_that_remembers_is_not_taken_anew(tmp_path):
    hosts = Hosts(tmp_path)
    there, told = joined(hosts, anew=True)
    states = hosts.hosts[1].site.states
    states.leave(5, jax.tree.map(lambda leaf: leaf + 1, states.memory))
    hosts.restart(1)
    assert not there.join({0: [0], 1: [5]})
    assert told == []
    jax.tree.map(np.testing.assert_array_equal, states.memory, hosts.hosts[1].site.states.at(5))


def test_another_run_has_other_noise(tmp_path):
    """Of the same noise, the difference of two runs' answers would have none; a restart keeps it."""
    hosts, secrets = Hosts(tmp_path), []
    for run in ("one", "other", "one"):
        joined(hosts, False, run)
        secrets.append(hosts.hosts[0].site.secret)
    assert secrets[0] == secrets[2] != secrets[1]


def renamed(loss):
    def f(point, one):
        """The same under another name."""
        return loss(point, one)

    return f


@pytest.mark.parametrize(
    ("other", "words"),
    [(renamed, None), (lambda loss: lambda x, s: 2 * loss(x, s), "round: another program")],
)
def test_a_site_joins_with_the_same_program_alone(other, words, tmp_path):
    """However it is written: a helper of its own may have another loss, or another docstring."""
    hosts = Hosts(tmp_path)
    there, _ = joined(hosts, anew=False)
    problem = replace(hosts.case.problem, loss=other(hosts.case.problem.loss))
    hosts.case = replace(hosts.case, problem=problem)
    hosts.restart(1)
    failures = there.join({0: [0], 1: [0]})
    assert (words is None and not failures) or words in failures[1].why


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
    failures = there.join({0: [0], 1: [5]})
    assert list(failures) == [1]
    assert "remembers nothing" in failures[1].why
    assert told == []


def test_a_site_that_has_forgotten_is_taken_anew_where_the_policy_says_so(tmp_path):
    hosts = Hosts(tmp_path)
    there, told = joined(hosts, anew=True)
    forget(hosts, 1)
    assert not there.join({0: [0], 1: [7, 5]})
    assert told == [("site-1", "taken as a new site, as it remembered nothing of the run")]
    states = hosts.hosts[1].site.states
    assert all(states.at(n) is not None for n in (5, 7))  # what the server may come back to


def test_without_memory_there_is_nothing_to_forget(tmp_path):
    hosts = Hosts(tmp_path, "fedavg")
    there, told = joined(hosts, anew=False)
    forget(hosts, 1)
    assert not there.join({0: [0], 1: [0]})
    assert told == []


class Boasting(Hosts):
    """Sites that say they have more samples than anybody can count."""

    def exchange(self, requests, timeout):
        replies, failures = super().exchange(requests, timeout)
        most = [np.full(1, 2**31 - 1, np.int32), np.zeros(0, np.int32)]
        return {i: Request(reply.header, most) for i, reply in replies.items()}, failures


def test_claims_that_nobody_can_count_are_refused(tmp_path):
    with pytest.raises(ValueError, match="2 clients have 4294967294 samples, most of them at site-0"):
        Federation(Boasting(tmp_path, "fedavg"), "run", 0, TERMS).gather()
    hosts = Hosts(tmp_path, "fedavg")
    there = Federation(hosts, "run", 0, TERMS)
    there.gather()
    for total, clients in ((2**31, 2), (12, 2**31), (0, 2), (12, 0)):
        there.pose(total, clients, None, {})
        assert "than can be counted" in there.join({0: [0]})[0].why


def other_values(data):
    """As many rows of the same form."""
    return FederatedData.from_clients([jax.tree.map(lambda leaf: leaf + 1, data.client(0))])


def test_what_a_peer_claims_takes_no_memory():
    """A million clients with a sample of 256 MB each: 256 TB, if zeros were made of it."""
    data = made_up({"train": {"a": ["float32", [2**26]]}, "valid": {"b": ["int8", [2**28]]}}, 10**6)
    assert data.clients == 10**6
    assert data.sample_of("valid")["b"].shape == (2**28,)


@pytest.mark.parametrize("name", ["scaffold", "fedavg"])
def test_a_site_that_comes_back_with_other_data_is_refused(name, tmp_path):
    hosts = Hosts(tmp_path, name)
    there, _ = joined(hosts, anew=True)
    hosts.restart(1, data=other_values(hosts.data(1)))
    assert there.join({0: [0], 1: [0]})[1].why == "it came back with other data"
    forget(hosts, 1)  # nor with an empty disk
    hosts.restart(1, data=other_values(hosts.data(1)))
    assert there.join({0: [0], 1: [0]})[1].why == "it came back with other data"


def test_a_site_knows_that_its_data_is_another(tmp_path):
    """Also where the server has forgotten, or does not care."""
    hosts = Hosts(tmp_path)
    joined(hosts, anew=False)
    hosts.restart(1, data=other_values(hosts.data(1)))
    there = Federation(hosts, "run", 0, TERMS)
    remote = there.gather()
    there.pose(int(remote.sizes.sum()), len(remote.sizes), None, hosts.identity(len(remote.sizes)))
    there.begin(False)
    assert "samples are not those with which it took part" in there.join({0: [0], 1: [0]})[1].why


def test_the_servers_word_for_the_data_says_nothing_of_it(tmp_path):
    """It is the site's secret that makes it, and another run has another."""

    def word(secret, run):
        hosts = Hosts(tmp_path)
        for host in hosts.hosts:
            host.secret = secret
        return Federation(hosts, run, 0, TERMS).gather().data[0]

    words = [word(b"one", "run"), word(b"other", "run"), word(b"one", "another")]
    assert len({*words, CASES["scaffold"].data.fingerprint}) == 4
    assert words[0] == word(b"one", "run")


def test_a_site_restored_from_a_backup_is_refused(tmp_path):
    hosts = Hosts(tmp_path / "sites")
    there, _ = joined(hosts, anew=True)
    states = hosts.hosts[1].site.states
    states.leave(5, states.memory)
    shutil.copytree(tmp_path / "sites", tmp_path / "backup")
    states.leave(7, states.memory)
    states.go_to([7])
    shutil.rmtree(tmp_path / "sites")
    shutil.move(tmp_path / "backup", tmp_path / "sites")
    hosts.restart(1)
    assert "restored from a backup" in there.join({0: [0], 1: [7]})[1].why


def test_a_run_goes_on_with_its_own_sites_and_their_data(tmp_path):
    hosts = Hosts(tmp_path)
    noted = {"sites": hosts.names, "states": [5, 7]}

    def recalled(**changes):
        remote = Federation(hosts, "run", 0, TERMS).gather()
        engine = Network(remote)
        engine.place(remote.form)
        engine.recall(3, {**noted, "data": list(remote.data), **changes})
        return engine

    assert recalled().noted(3)["states"] == [5, 7]
    with pytest.raises(RoundFailed, match="round 3: site-1: it came back with other data"):
        recalled(data=[recalled().remote.data[0], "another"])
    with pytest.raises(ValueError, match="numbered in their order"):
        recalled(sites=hosts.names[::-1])


def test_numbers_grow_where_the_servers_clock_was_set_back(tmp_path, monkeypatch):
    """A restarted server counts on from what the sites have seen, in their processes or on their disks."""
    hosts = Hosts(tmp_path)
    joined(hosts, anew=False)
    now = time.time_ns()
    hosts.hosts[0].seen = now // 1000 + 5  # answered
    for i in (0, 1):
        states = hosts.hosts[i].site.states
        states.leave(now // 1000 + 5 + i, states.memory)
    hosts.restart(1)
    monkeypatch.setattr(time, "time_ns", lambda: now - 10**15)  # eleven days
    remote = Federation(hosts, "run", 0, TERMS).gather()
    assert remote.seen == now // 1000 + 6
    engine = Network(remote)
    engine.place(remote.form)
    numbers = [engine._tick() for _ in range(3)]
    assert remote.seen < numbers[0] < numbers[1] < numbers[2]
    hosts.hosts[0].seen = 2**80  # a lie, which would spoil the numbers for ever
    assert Federation(hosts, "run", 0, TERMS).gather().seen == now // 1000 + 6


class Noting(Hosts):
    """Notes the numbers of requests, which name states."""

    def __init__(self, *args):
        super().__init__(*args)
        self.numbers = []

    def exchange(self, requests, timeout):
        self.numbers += {r.header["seq"] for r in requests.values() if r.header["op"] == "exchange"}
        return super().exchange(requests, timeout)


@pytest.mark.slow
def test_numbers_never_repeat_over_restarts_of_the_server(tmp_path, monkeypatch):
    """The server goes back to its checkpoint three times, its clock set back every time."""
    hosts, case = Noting(tmp_path / "sites", "scaffold", 5), CASES["scaffold"]
    real, told = time.time_ns, []
    for restart in range(3):
        monkeypatch.setattr(time, "time_ns", lambda restart=restart: real() - restart * 10**15)
        there = Federation(hosts, "run", 0, TERMS)
        remote = there.gather()
        there.pose(int(remote.sizes.sum()), 5, None, hosts.identity(5))
        hosts.numbers.clear()
        engine = Network(remote)
        options = {"checkpoint": tmp_path / "run", "resume": restart > 0}
        result = case.run(rounds=restart + 1, engine=engine, data=made_up(there.form, 5), **options)
        told.append(list(hosts.numbers))
    assert len(told[1]) >= 1
    everything = list(itertools.chain(*told))
    assert everything == sorted(set(everything))
    for u, v in zip(jax.tree.leaves(result.x), jax.tree.leaves(case.run(rounds=3).x), strict=True):
        np.testing.assert_allclose(u, v, rtol=1e-5, atol=1e-6)


plain = st.one_of(st.none(), st.booleans(), st.integers(-(2**40), 2**40), st.sampled_from(["a", "float32"]))
names = st.sampled_from(["train", "valid", "a"])
anything = st.recursive(
    plain,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)),
    max_leaves=6,
)
some, none = np.ones(2, np.int32), np.zeros(0, np.int32)
sizes = st.lists(st.sampled_from([some, none, -some, np.ones(2)]), max_size=3)


@given(anything, anything, sizes)
@example({"train": None}, 0, [some, none])
@example({"train": {"a": [["float32"], []]}}, 0, [some, none])
@example({"train": {"a": ["float32", [1] * 80]}}, 0, [some, none])
@example({"train": {"a": ["float64", [2**27]]}}, 0, [some, none])
@example({"train": {"a": ["float32", [3]]}}, 0, [some, none])
def test_whatever_a_site_says_of_its_data_is_refused_or_read(form, seen, arrays):
    try:
        found, said, number = _described(Request({"form": form, "seen": seen}, arrays))
    except wire.WireError:
        return
    assert (said, number) == (form, seen)
    assert (found[0] > 0).all()


entries = st.sampled_from(["run", "what", "states", "number", "terms", "identity", "server", "clients"])
ops = st.sampled_from(["open", "join", "exchange", "memory", "other"])


@given(st.dictionaries(entries, anything, max_size=4), ops)
def test_a_site_answers_whatever_comes(header, op):
    host = Host(TERMS, lambda n: Opened(CASES["fedavg"], CASES["fedavg"].data), Path("nowhere"))
    for message in (wire.pack({**header, "op": op, "seq": 7}, []), wire.pack(header, []), b"noise"):
        answered, _ = wire.unpack(host.answer(message))
        assert "error" in answered
    assert host.site is None


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"op": "open", "run": "../run", "number": 0, "terms": TERMS}, "name of the run"),
        (
            {"op": "open", "run": "run", "number": 0, "terms": {"experiment": "other"}},
            "experiment: 'other' there, 'text' here",
        ),
        ({"op": "exchange", "run": "run"}, "not joined"),
        ({"op": "memory", "run": "run"}, "--share"),
        ({"op": "shutdown"}, "Unknown request"),
        ({"op": "open", "run": "run", "number": "0", "terms": TERMS}, "number"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_a_site_does_not_do(header, words, tmp_path):
    hosts = Hosts(tmp_path)
    _, failures = hosts.exchange({0: Request({**header, "seq": 1}, [])}, 1.0)
    assert words in failures[0].why


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ("b,a,ill\n1,2,no\n3,4,yes\n", "'x': its column 0 is 'b' at site-1, 'a' at site-0"),
        ("a,b,ill\n1,2,maybe\n3,4,yes\n", "'y': its class 0 is 'maybe' at site-1, 'no' at site-0"),
        ("ill,a,b\nno,1,2\nyes,3,4\n", None),
    ],
)
def test_columns_in_another_order_are_told(tmp_path, other, words):
    """Shapes agree, and a mean over sites would mix one's pulse with another's age."""
    hosts = Hosts(tmp_path, "fedavg")
    for i, text in enumerate(("a,b,ill\n1,2,no\n3,4,yes\n", other)):
        file = tmp_path / f"{i}.csv"
        file.write_text(text)
        own = from_csv(file, label="ill", encode=True)
        hosts.hosts[i] = Host(TERMS, lambda n, own=own: Opened(hosts.case, own), tmp_path)
    there = Federation(hosts, "run", 0, TERMS)
    if words is None:
        assert there.gather().sizes.tolist() == [2, 2]
    else:
        with pytest.raises(ValueError, match=words):
            there.gather()


def test_so_many_columns_that_they_would_fill_a_header_are_told_apart():
    def data(names):
        encoding = Encoding(names, None, {}, None)
        made = FederatedData.from_clients([{"x": np.ones((2, 3))}])
        return replace(made, preparation=Preparation((encoding,)))

    names = tuple(f"gene {i}" for i in range(10_000))
    one, other = columns_of(data(names)), columns_of(data(names[::-1]))
    assert one == columns_of(data(names))
    assert one != other
    assert len(one["x"][0]) < 100


def test_states_of_an_ended_experiment_go_when_another_one_begins(tmp_path):
    hosts = Hosts(tmp_path, sites=1)

    def states():
        return sorted(path.name for path in (tmp_path / "site-0").iterdir())

    def begin(run):
        there = Federation(hosts, run, 0, TERMS)
        remote = there.gather()
        there.pose(int(remote.sizes.sum()), 1, None, hosts.identity(1))
        remote.fresh(True)
        assert there.join({0: [0]}) == {}

    begin("first-0")
    begin("first-1")
    assert states() == ["first-0", "first-1"]
    hosts.exchange({0: Request({"op": "done", "seq": 1}, [])}, 1.0)
    hosts.restart(0)
    begin("first-2")  # the same experiment goes on: models of its other runs can still be fetched
    assert states() == ["first-0", "first-1", "first-2"]
    begin("second-0")
    assert states() == ["first-2", "second-0"]  # the one that had not ended stays


def test_all_runs_of_an_experiment_have_the_same_samples(tmp_path):
    """Where a site has its own: it refuses to open the next run with others, also after a restart."""

    def opened(own, run):
        host = Host(TERMS, lambda n: Opened(CASES["fedavg"], own), tmp_path, steady=True)
        request = {"op": "open", "seq": 1, "run": run, "number": 0, "terms": TERMS}
        return wire.unpack(host.answer(wire.pack(request, [])))[0].get("error", "")

    own = part(CASES["fedavg"].data, np.array([0]))
    assert opened(own, "first-0") == opened(own, "first-1") == ""
    assert "not those with which it took part in the experiment" in opened(other_values(own), "first-2")
    assert opened(own, "first-2") == opened(other_values(own), "second-0") == ""
