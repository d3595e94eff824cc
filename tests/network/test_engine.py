"""The network engine with sites in this process: the iterates, ledgers and refusals of every other engine."""

from __future__ import annotations

import dataclasses
import gc
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import pjit
from jax._src.core import EvalTrace

import fedstrata as fs
from fedstrata.engines.network import (
    Failure,
    Local,
    Network,
    Place,
    Policy,
    Request,
    RoundFailed,
    Site,
    SiteRefused,
    Text,
    TooFewSites,
    WireError,
)
from fedstrata.engines.network.engine import part
from fedstrata.engines.network.timing import MANY, Slot, Timing
from fedstrata.solving import loop, progress
from fedstrata.solving.pose import pose
from fedstrata.testing.cases import all_cases, samples

from .faults import environment

CASES = {case.name: case for case in all_cases()}


def assert_same(a, b, tolerance):
    for u, v in zip(jax.tree.leaves((a.x, a.y)), jax.tree.leaves((b.x, b.y)), strict=True):
        assert np.abs(u - v).max() <= tolerance * max(1.0, np.abs(u).max())
    assert a.history.keys() == b.history.keys()
    assert a.ledger == b.ledger


def maps():
    """What this process maps: compiled programs above all."""
    return len(Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="the system does not tell what a process maps"
)
@pytest.mark.slow
def test_a_run_leaves_nothing_behind():
    """A compiled program holds its callbacks where the collector cannot see them."""
    counts = []
    for _ in range(3):
        engine = Network()
        CASES["fedavg"].run(engine=engine)
        gone = [weakref.ref(engine), *(weakref.ref(site) for site in engine._sites)]
        del engine
        gc.collect()
        assert not any(one() for one in gone)
        counts.append(maps())
    assert counts[2] - counts[1] < 20  # it was 850 a run


@pytest.mark.slow
def test_a_site_sends_one_weighted_sum():
    case = CASES["fedavg"]
    alone, shared = Network(), Network(clients_per_site=5)
    case.run(engine=alone, default_metrics=False)
    case.run(engine=shared, default_metrics=False)
    assert len(shared.transport.names) == 1
    assert sum(shared.transport.received) < sum(alone.transport.received) / 3


@pytest.mark.slow
def test_headers_are_small():
    """What a message has besides the leaves: header, clients, weights, key, padding."""
    case, engine = CASES["fedavg"], Network()
    result = case.run(engine=engine, default_metrics=False)
    messages = result.ledger.exchanges * 5
    assert 0 < sum(engine.transport.sent) - result.ledger.bytes_down <= 220 * messages
    assert 0 < sum(engine.transport.received) - result.ledger.bytes_up <= 110 * messages


def test_one_core_is_refused_before_anything_is_compiled(monkeypatch):
    """JAX hangs in callbacks where its only thread waits for what it has to copy."""
    monkeypatch.setattr("fedstrata.engines.engine.cores", lambda: 1)
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    with pytest.raises(RuntimeError, match="JAX_NUM_CPU_DEVICES=2"):
        run()


ONE_CORE = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import numpy as np
import fedstrata as fs

problem = fs.Minimization(lambda x, sample: 0.5 * ((x - sample["a"]) ** 2).sum())
data = fs.FederatedData.from_clients([{"a": np.ones(1, np.float32)}] * 2)
x0 = np.zeros(2_000_000, np.float32)
method = fs.FedAvg(0.1, H=1, batch_size=None)
options = {"engine": "network", "progress": False, "default_metrics": False}
result = fs.solve(problem, method, data, x0, rounds=3, **options)
print(np.abs(result.x - (1 - 0.9**3)).max())
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="the system does not bind processes to cores"
)
@pytest.mark.parametrize("devices", ["1", "2"])
def test_on_one_core_large_arrays_pass_as_the_error_says(devices):
    env = environment() | {"JAX_NUM_CPU_DEVICES": devices}
    done = subprocess.run(
        [sys.executable, "-c", ONE_CORE], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    if devices == "1":
        assert done.returncode == 1
        assert "Set JAX_NUM_CPU_DEVICES=2" in done.stderr
    else:
        assert float(done.stdout) < 1e-6, done.stderr


@pytest.fixture
def eager(monkeypatch):
    """The names of what is run step by step, outside of the compiled programs."""
    seen, process, call = [], EvalTrace.process_primitive, pjit._run_python_pjit

    def processed(self, primitive, *rest):
        seen.append(primitive.name)
        return process(self, primitive, *rest)

    def called(params, leaves, function, *rest):
        seen.append(function.__name__)
        return call(params, leaves, function, *rest)

    jax.clear_caches()
    monkeypatch.setattr(EvalTrace, "process_primitive", processed)
    monkeypatch.setattr(pjit, "_run_python_pjit", called)
    monkeypatch.setattr(pjit, "_get_fastpath_data", lambda *args: None)  # else, only a first call is seen
    return seen


@pytest.mark.parametrize("name", ["fedavg", pytest.param("fednest", marks=pytest.mark.slow)])
def test_no_step_of_a_round_runs_eagerly(name, eager, caplog):
    """Once every exchange was met, and compiled: neither at the server nor at the sites."""
    rounds = []

    def compiled():
        return sum("Finished XLA compilation" in record.getMessage() for record in caplog.records)

    def note(progressed):
        rounds.append((list(eager), compiled()))
        eager.clear()

    def sum_up(x):
        for _ in range(2):
            x = jnp.sin(x + 1)
        return x

    with jax.log_compiles(), caplog.at_level("WARNING", "jax._src.dispatch"):
        engine = Network(clients_per_site=5)  # a site that is asked for the first time compiles
        CASES[name].run(engine=engine, rounds=8, default_metrics=False, callbacks=[note])
        before = compiled()
        sum_up(jnp.ones(3))
    assert eager.count("sin") == eager.count("add") == 2  # what is looked for
    assert compiled() > before > 0
    assert len(rounds) == 9
    assert [ran for ran, _ in rounds[6:]] == [[], [], []]
    assert {number for _, number in rounds[5:]} == {before}


class Shaky(Local):
    """Fails some exchanges before or after the sites have done their part."""

    def __init__(self, local, failing):
        super().__init__(local.sites)
        self.failing, self.count = failing, 0

    def exchange(self, requests, timeout):
        self.count += 1
        if self.count in self.failing:
            some = dict(list(requests.items())[:3])
            super().exchange(some, timeout)
            return {}, {4: Failure("late", "made up")}
        return super().exchange(requests, timeout)


class ShakyNetwork(Network):
    failing: tuple[int, ...] = ()

    def _join(self, *args):
        fresh = self._sites is None
        super()._join(*args)
        if fresh:
            self.transport = Shaky(self.transport, self.failing)


@pytest.mark.parametrize("name", ["scaffold", "fednest"])
@pytest.mark.slow
def test_a_failed_round_is_done_again_as_if_for_the_first_time(name):
    engine = ShakyNetwork()
    engine.failing = (2, 5, 6, 9)
    case = CASES[name]
    assert_same(case.run(rounds=4), case.run(rounds=4, engine=engine), 1e-5)
    assert len(engine.events) == 4
    assert engine.failed["site-4"] == 4


def loss(x, sample):
    return 0.5 * (sample["a"] @ x["w"] - sample["b"]) ** 2


DATA = fs.FederatedData.from_clients(samples(0))
X0 = {"w": np.zeros(3)}
PROBLEM = fs.Minimization(loss)


def run(method=None, **options):
    arguments = {"rounds": 2, "progress": False, "engine": "network", **options}
    return fs.solve(PROBLEM, method or fs.FedAvg(gamma=0.1, H=2), DATA, X0, **arguments)


def test_metrics_that_need_samples_are_refused():
    with pytest.raises(ValueError, match="samples stay at the sites"):
        run(metrics={"size": lambda x, y, data: data.sizes.sum()})
    assert run(metrics={"norm": lambda x, y: jnp.abs(x["w"]).sum()}).history["norm"][-1] > 0


def test_metrics_that_read_personal_models_are_refused():
    with pytest.raises(ValueError, match="stays at the sites"):
        CASES["zohfl"].run(engine="network", metrics={"y": lambda x, y: y["c"].sum()})


def test_progress_is_shown_as_elsewhere(monkeypatch, capsys):
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(progress, "EVERY", 0.0)
    shown = []
    for engine in ("simulated", "network"):
        run(engine=engine, progress=True)
        shown.append(re.sub(r"\d:\d\d:\d\d", "", capsys.readouterr().err).split())
    assert shown[0] == shown[1]
    assert {"rounds", "2/2", "loss"} <= set(shown[1])


def test_a_number_for_every_sample_is_refused():
    """The server must know how long a reply is; how many samples a site has is its own affair."""
    case = CASES["fastdro"]
    with pytest.raises(ValueError, match="give the method a batch_size"):
        case.run(engine="network", method=dataclasses.replace(case.method, batch_size=None))


def test_divergence_is_told_as_elsewhere():
    with pytest.raises(fs.Diverged):
        run(fs.FedAvg(gamma=1e25, H=4), rounds=6)


class Smuggler(fs.FedAvg):
    """A wrong text: its phase reads the state without being sent it."""

    def round(self, problem, fed, key, r, state):
        return state._replace(x=fed.average(lambda problem, client, key: state.x, key))


def test_a_phase_that_reads_the_server_is_refused():
    jax.tree_util.register_pytree_node(Smuggler, lambda m: ([], m.H), lambda H, _: Smuggler(gamma=0.1, H=H))
    with pytest.raises(RoundFailed, match="only the server has"):
        run(Smuggler(gamma=0.1, H=2), engine=Network(policy=Policy(retries=0)))


def posed_site(folder=None, clients=(0,)):
    case = CASES["scaffold"]
    posed = pose(case.problem, case.method, case.data, case.x0, rounds=3)
    clients = np.array(clients, np.int32)
    text = Text.of(posed.setup, posed.method, posed.carry)
    return Site(text, part(posed.data, clients), Place(clients, int(np.sum(posed.data.sizes))), folder)


@pytest.fixture(scope="module")
def site():
    return posed_site()


def request(site, r=0, states=(0,), **changes):
    """A valid request for the only exchange of SCAFFOLD's round, with changes."""
    state = site.text.state
    leaves = [np.ones(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves((state.x, state.c))]
    header = {
        "op": "exchange", "what": ["round", 0, "local_steps", 5], "round": r, "states": list(states),
        "seq": 1 if site.last is None else site.last[0] + 1,
    }  # fmt: skip
    arrays = [np.array([0], np.int32), np.array([1.0], np.float32), np.zeros(2, np.uint32), *leaves]
    for place, array in changes.pop("arrays", {}).items():
        arrays[place] = array
    return {**header, **changes}, arrays


@pytest.mark.parametrize(
    "changes",
    [
        {"what": ["shutdown", 0, "local_steps", 5]},
        {"what": ["round", 1, "local_steps", 5]},
        {"what": ["round", -1, "local_steps", 5]},
        {"what": ["round", 0, "other", 5]},
        {"what": ["round", 0, "local_steps", 6]},
        {"what": ["round", 0, "local_steps"]},
        {"what": ["round", True, "local_steps", 5]},
        {"seq": 0},
        {"seq": None},
        {"round": "0"},
        {"round": 2**31},
        {"round": -2},
        {"states": [1] * 9},
        {"states": []},
        {"states": [-1]},
        {"states": [10**6]},  # no message has this number
        {"arrays": {0: np.array([1], np.int32)}},
        {"arrays": {0: np.array([0, 0], np.int32)}},
        {"arrays": {0: np.zeros(0, np.int32)}},
        {"arrays": {1: np.array([np.nan], np.float32)}},
        {"arrays": {1: np.array([0.5, 0.5], np.float32)}},
        {"arrays": {2: np.zeros(3, np.uint32)}},
        {"arrays": {3: np.zeros((2, 2), np.float32)}},
        {"arrays": {3: np.zeros(3, np.float64)}},
    ],
    ids=str,
)
def test_a_site_refuses_what_is_not_in_its_text(site, changes):
    left = site.call(*request(site))[0]["state"]
    before = jax.tree.map(np.copy, site.states.memory)
    with pytest.raises((SiteRefused, WireError)):
        site.call(*request(site, **{"states": [left], **changes}))
    assert site.states.newest == site.states.number == left
    jax.tree.map(np.testing.assert_array_equal, before, site.states.memory)


def test_the_same_message_twice_has_the_same_answer(site):
    asked = request(site, r=7)
    head, first = site.call(*asked)
    memory = site.states.memory
    again, second = site.call(*asked)
    assert again == head
    assert site.states.memory is memory
    jax.tree.map(np.testing.assert_array_equal, first, second)


def same(a, b):
    return all(np.array_equal(u, v) for u, v in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.mark.parametrize("on_disk", [True, False])
def test_a_request_says_which_memory_it_builds_on(on_disk, tmp_path):
    site = posed_site(tmp_path if on_disk else None)
    site.states.start()
    states, memories = [0], [site.states.memory]

    def ask(site, r, *named):
        return site.call(*request(site, r, [states[j] for j in named]))[0]["state"]

    for r in range(3):
        states.append(ask(site, r, r, 0))
        memories.append(site.states.memory)
    assert len(set(states)) == 4
    assert not same(memories[2], memories[3])
    late = ask(site, 2, 2, 0)  # a retry, or a late answer to a round that others do again without it
    assert same(site.states.memory, memories[3])
    assert late not in states
    ask(site, 3, 2, 0)  # asked again where it did not take part
    assert same(site.states.memory, memories[3])
    again = ask(site, 0, 0)  # the server went back to its checkpoint
    assert same(site.states.memory, memories[1])
    with pytest.raises(SiteRefused, match="restored from a backup"):
        ask(site, 2, 2)  # which it said it would never need
    if on_disk:
        restarted = posed_site(tmp_path)
        restarted._programs, restarted.last = site._programs, site.last
        restarted.states.check([again])
        restarted.call(*request(restarted, 1, [again]))
        assert same(restarted.states.memory, memories[2])
        names = {f"state_{n}.safetensors" for n in (again, restarted.states.number)}
        assert {file.name for file in tmp_path.iterdir()} == names


def test_every_changed_byte_of_a_memory_is_found(tmp_path):
    site = posed_site(tmp_path)
    site.states.start()
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    payload = sum(leaf.nbytes for leaf in jax.tree.leaves(site.states.memory))
    assert payload > 0
    for place in range(len(whole) - payload, len(whole)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        with pytest.raises(SiteRefused, match=r"damaged.*, or empty it and let the policy"):
            site.states.check([0])
    file.write_bytes(whole)
    site.states.check([0])
    file.rename(file.with_name("state_5.safetensors"))
    with pytest.raises(SiteRefused, match="renamed"):
        posed_site(tmp_path).states.check([5])


class Away(Local):
    """Site 1 does not answer in some rounds; one that is late has done its part, and says so in the last."""

    def __init__(self, local, away, kind):
        super().__init__(local.sites)
        self.away, self.kind, self.round, self.under_way = away, kind, 0, 0

    def exchange(self, requests, timeout):
        self.round = next(iter(requests.values())).header["round"]
        gone = {i: Failure(self.kind, "made up") for i in requests if i == 1 and self.round in self.away}
        there = {i: r for i, r in requests.items() if i not in gone or self.kind == "late"}
        before = self.received[1]
        replies, failures = super().exchange(there, timeout)
        if gone:
            self.under_way, self.received[1] = self.received[1] - before, before
        if self.round == max(self.away):
            self.received[1] += self.under_way
        return {i: reply for i, reply in replies.items() if i not in gone}, {**failures, **gone}

    def wait(self, sites, seconds):
        back = self.round + (seconds == 0) not in self.away  # asked before the next round, or within one
        return [i for i in sites if i != 1 or back or self.kind == "late"]


class AwayNetwork(Network):
    kind = "away"

    def _join(self, *args):
        fresh = self._sites is None
        super()._join(*args)
        if fresh:
            self.transport = Away(self.transport, {1, 2}, self.kind)


@pytest.mark.parametrize(
    ("weights", "kind"),
    [("uniform", "late"), ("uniform", "away"), ("size", "away")],
)
@pytest.mark.slow
def test_dropping_a_site_is_the_same_participation(weights, kind):
    """Rounds 1 and 2 without client 1, as simulated with that trace of dropouts.

    A late answer leaves nothing behind: SCAFFOLD's control variates are those of before. A site that is late
    and stays connected is not asked again until it has answered.
    """
    case = CASES["scaffold"]
    engine = AwayNetwork(policy=Policy("drop", after=0.01))
    engine.kind = kind
    options = {"rounds": 4, "weights": weights, "eval_every": 4, "default_metrics": False}
    result = case.run(engine=engine, **options)
    there = np.ones((4, 5), bool)
    there[1:3, 1] = False
    wanted = case.run(dropouts=fs.Dropouts(trace=there), **options)
    jax.tree.map(lambda u, v: np.testing.assert_allclose(u, v, rtol=1e-5, atol=1e-6), wanted.x, result.x)
    told = [(event["round"], event["what"]) for event in engine.events if "made up" not in event["what"]]
    assert told == [(1, "dropped"), (3, "readmitted")]
    assert result.history["present/site-1"].tolist() == [1, 0]  # not in all of the rounds
    assert result.history["present/site-0"].tolist() == [1, 1]


@pytest.mark.slow
def test_too_few_sites_stop_the_run_and_it_is_saved(tmp_path):
    case = CASES["scaffold"]
    engine = AwayNetwork(policy=Policy("drop", after=0.01, min_sites=5))
    with pytest.raises(TooFewSites, match="fewer than 5"):
        case.run(engine=engine, rounds=4, checkpoint=tmp_path)
    resumed = case.run(engine=Network(policy=Policy("drop")), rounds=4, checkpoint=tmp_path, resume=True)
    assert all(resumed.history[f"present/site-{i}"].tolist() == [1] * 5 for i in range(5))
    history = {name: values for name, values in resumed.history.items() if "present" not in name}
    assert_same(case.run(rounds=4), dataclasses.replace(resumed, history=history), 1e-5)


class Hanging(Local):
    """Site 1 is gone for good in round 2, and then the run is asked to end, once or twice."""

    signals = 1

    def exchange(self, requests, timeout):
        if next(iter(requests.values())).header["round"] < 2:
            return super().exchange(requests, timeout)
        return {}, {1: Failure("away", "made up")}

    def wait(self, sites, seconds):
        time.sleep(0.01)
        if self.signals:
            self.signals -= 1
            signal.raise_signal(signal.SIGINT)
        return [i for i in sites if i != 1]


class HangingNetwork(Network):
    def _join(self, *args):
        super()._join(*args)
        self.transport = Hanging(self.transport.sites)


@pytest.mark.parametrize(("signals", "grace"), [(1, 0.1), (2, 60.0)])
@pytest.mark.slow
def test_a_run_that_waits_for_a_site_ends_when_it_is_asked_and_is_saved(
    signals, grace, tmp_path, monkeypatch
):
    monkeypatch.setattr(loop, "GRACE", grace)
    monkeypatch.setattr(Hanging, "signals", signals)
    case, options = CASES["scaffold"], {"rounds": 3, "default_metrics": False}
    saving = fs.Checkpoint(tmp_path, every_seconds=1e9)
    with pytest.raises(KeyboardInterrupt):
        case.run(engine=HangingNetwork(), checkpoint=saving, **options)
    resumed = case.run(engine="network", checkpoint=tmp_path, resume=True, **options)
    assert_same(case.run(**options), resumed, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [("wait", "drop"), ("drop", "wait")])
def test_a_run_resumed_under_another_policy_says_where_it_does_not_know(first, then, tmp_path):
    case = CASES["scaffold"]
    case.run(engine=Network(policy=Policy(first)), rounds=2, checkpoint=tmp_path)
    resumed = case.run(engine=Network(policy=Policy(then)), rounds=4, checkpoint=tmp_path, resume=True)
    assert {len(values) for values in resumed.history.values()} == {5}
    known = np.isfinite(resumed.history["present/site-0"])
    assert known.tolist() == [(r <= 2) == (first == "drop") for r in range(5)]
    history = {name: values for name, values in resumed.history.items() if "present" not in name}
    assert_same(case.run(rounds=4), dataclasses.replace(resumed, history=history), 1e-5)


def test_deadlines_adapt_to_durations_seen():
    """The first exchange apart, then ten times the usual time of the slowest site."""
    timing, two = Timing(500.0, 2.0), [Slot(0, "round", 0, 2), Slot(1, "round", 0, 2)]
    assert timing.deadline(two) == 500
    timing.note(two, [90.0, 90.0])  # they compile
    timing.note(two, [0.01, 0.0])
    assert timing.deadline(two) == 2
    for seconds in (*[3.0] * 30, 500.0):  # one nap
        timing.note(two, [0.01, seconds])
    assert timing.deadline(two) == 30
    assert timing.deadline(two[:1]) == 2
    assert timing.deadline([two[0]._replace(k=1)]) == 500
    assert timing.deadline([two[0]._replace(participants=1)]) == 500  # one was dropped: the others compile
    timing.stretch = 2  # it was late
    assert timing.deadline(two) == 60
    timing.forget(1)  # it was away, or dropped
    assert timing.deadline(two) == 500


def test_each_first_exchange_of_a_site_has_time_to_compile():
    """Sites of four and of one client: which of them take part changes from round to round."""
    engine = Network(clients_per_site=4)
    run(engine=engine, participation=3, rounds=6, default_metrics=False)
    assert len(engine.timing._took) == len(engine._sites[0]._programs) > 2  # the sites differ in form


def test_a_site_that_is_nearly_always_the_last_is_named_once():
    timing, three = Timing(500.0, 2.0), [Slot(i, "round", 0, 3) for i in range(3)]
    told = []
    for _ in range(2 * MANY):  # in the first they compile
        told.append(timing.note(three, [0.01, 0.06, 0.02]))
    assert [place for place, site in enumerate(told) if site is not None] == [MANY]
    assert told[MANY] == 1
    assert timing.last == {1: timing.timed}
    assert timing.waited[1] == pytest.approx(0.04 * timing.timed)


class Liar(Local):
    """One site's replies are altered."""

    def __init__(self, local, alter):
        super().__init__(local.sites)
        self.alter = alter

    def exchange(self, requests, timeout):
        replies, failures = super().exchange(requests, timeout)
        if 2 in replies:
            header, arrays = replies[2]
            replies[2] = Request(*self.alter(dict(header), [np.array(a) for a in arrays]))
        return replies, failures


class LyingNetwork(Network):
    alter = None

    def _join(self, *args):
        fresh = self._sites is None
        super()._join(*args)
        if fresh:
            self.transport = Liar(self.transport, self.alter)


@pytest.mark.parametrize(
    ("alter", "words"),
    [
        (lambda h, a: (h, [np.full_like(u, np.nan) for u in a]), "not finite"),
        (lambda h, a: (h, [u[None] for u in a]), "where the text has"),
        (lambda h, a: (h, [u.astype(np.float64) for u in a]), "where the text has"),
        (lambda h, a: (h, a[:-1]), "where the text has"),
        (lambda h, a: ({**h, "counts": {"gradients": -5}}, a), "counts are not valid"),
        (lambda h, a: ({**h, "counts": {"other": 5}}, a), "counts are not valid"),
        (lambda h, a: ({**h, "seq": 1}, a), "another message"),
    ],
    ids=["nan", "shape", "dtype", "fewer", "negative", "unknown", "number"],
)
def test_a_site_that_lies_is_named_and_can_be_dropped(alter, words):
    engine = LyingNetwork(policy=Policy(retries=1))
    engine.alter = alter
    with pytest.raises(RoundFailed, match=f"site-2: .*{words}"):
        run(engine=engine, default_metrics=False)
    assert engine.failed == {"site-2": 2}


def evaluating(factor, policy=None):
    """Site 2 multiplies its evaluations."""
    engine = LyingNetwork(policy=policy)
    scaled = np.float32(factor)
    engine.alter = lambda header, arrays: (header, [u * scaled if u.ndim == 0 else u for u in arrays])
    return engine


def test_an_evaluation_that_is_not_finite_is_one_sites():
    """As simulated, it would be called divergence."""
    with pytest.raises(
        RoundFailed, match=r"round 0, measure 0 \(evaluation\): site-2: its evaluation is not"
    ):
        run(engine=evaluating(np.nan, Policy(retries=0)))


@pytest.mark.parametrize(("factor", "told"), [(-1e9, 1), (1e5, 0)])
def test_a_reply_that_dwarfs_all_others_is_told_once(factor, told):
    """It is no failure: how large a loss may be nobody knows."""
    engine = evaluating(factor)
    run(engine=engine)
    assert [event["site"] for event in engine.events] == ["site-2"] * told
    assert all("its evaluation (evaluation) is 4e+08 times any" in event["what"] for event in engine.events)


def test_a_site_that_lies_is_dropped_where_the_policy_says_so():
    engine = LyingNetwork(policy=Policy("drop", retries=0, after=0.01))
    engine.alter = lambda header, arrays: (header, [np.full_like(u, np.nan) for u in arrays])
    result = run(engine=engine, rounds=1, default_metrics=False)
    assert np.isfinite(result.x["w"]).all()
    assert engine.events[-1] == {"round": 0, "site": "site-2", "what": "dropped"}
