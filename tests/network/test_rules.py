"""A site's own policy, and a server that asks for more than it allows."""

import datetime
import re
import shutil
from collections import Counter

import numpy as np
import pytest
from typer.testing import CliRunner

from fedstrata.engines.network import Network, RoundFailed, SiteRefused, kits
from fedstrata.engines.network.allowance import Allowance
from fedstrata.engines.network.audit import Audit, read
from fedstrata.engines.network.federation import Federation, made_up
from fedstrata.engines.network.rules import Asks, Rules
from fedstrata.lab.cli import app
from fedstrata.lab.experiments.approval import POLICY, SitePolicy

from .test_entries import TEXT
from .test_host import TERMS, Hosts

MIDNIGHT = datetime.time(0)


def start(tmp_path, rules, name, starter=None):
    """A run of one round on two sites, of which the second has rules."""
    hosts = Hosts(tmp_path, name)
    hosts.hosts[1].rules, hosts.hosts[1].audit = rules, Audit(tmp_path / "account", "site-1")
    if starter is not None:
        hosts.hosts[1].identity = kits.Identity(starter.kit.parent / "site-1", hosts.names)
    there = Federation(hosts, "run", 0, TERMS, starter=starter)
    remote = there.gather()
    there.pose(int(remote.sizes.sum()), 2, None, hosts.identity(2))
    data, engine = made_up(there.form, 2), Network(remote)
    hosts.case.run(rounds=1, participation=1.0, engine=engine, data=data, default_metrics=False)
    return hosts.hosts[1].site


@pytest.mark.parametrize(
    ("name", "rules", "words"),
    [
        ("fedavg", {"approved": {"scaffold"}}, r"This site has not approved this run \(fedavg\)"),
        ("afl", {"reveals": "averages"}, "allows averages alone, and the run asks for single replies: "),
        ("fedavg", {"secure": True}, "needs secure sums"),
        ("fedavg", {"rounds": 2}, "has 3 rounds, and this site's policy allows 2"),
        ("fedavg", {"answers": 0}, "has answered 0 exchanges, and its policy allows no more"),
        ("fedavg", {"memory": 0}, "'local_steps' would take"),
        ("fedavg", {"hours": (MIDNIGHT, datetime.time(0, 0, 0, 1))}, "at this time of the day"),
    ],
)
def test_a_server_that_asks_for_more_is_refused_in_words(name, rules, words, tmp_path):
    with pytest.raises(RoundFailed, match=f"site-1: .*{words}"):
        start(tmp_path, Rules(**rules), name)


class Replayed(kits.Identity):
    """Signs another run than the one that is asked for."""

    run = "run"

    def proof(self, run, content, what=kits.MASK_KEY):
        return super().proof(self.run, content if self.run != run else bytes(32), what)


@pytest.fixture(scope="module")
def people(tmp_path_factory):
    """Kits of a person who may start runs, of another one, and of a person of another federation."""
    here, elsewhere = tmp_path_factory.mktemp("here"), tmp_path_factory.mktemp("elsewhere")
    kits.make(here, ["site-0", "site-1", "ada", "bo"], ["localhost"])
    kits.make(elsewhere, ["ada"], ["localhost"])
    shutil.copytree(here / "site-1", elsewhere / "site-1")
    return {"ada": here / "ada", "bo": here / "bo", "server": here / "server", "false": elsewhere / "ada"}


@pytest.mark.parametrize(
    ("who", "run", "words"),
    [
        (None, None, "nobody has signed this one"),
        ("bo", None, r"The start of a run is of \['bo'\], and only \['ada'\] are accepted"),
        ("server", None, r"is of \['server'\]"),  # what a thief of the server's kit has
        ("false", None, "not signed by a party of this federation"),
        ("ada", "other", "not signed by a party"),  # a signature of another run of hers
        ("ada", "run", "ada has signed another one"),
    ],
)
def test_a_site_is_asked_in_runs_of_those_whom_it_lets_start_them(who, run, words, people, tmp_path):
    rules, starter = Rules(starters=["ada"]), None
    if who is not None:
        starter = kits.Identity(people[who]) if run is None else Replayed(people[who])
        starter.run = run
    with pytest.raises(RoundFailed, match=f"site-1: This site takes part in runs that ada starts.*{words}"):
        start(tmp_path, rules, "fedavg", starter)


def test_a_run_that_one_of_them_has_signed_is_answered(people, tmp_path):
    start(tmp_path, Rules(starters=["ada", "eve"]), "fedavg", kits.Identity(people["ada"]))
    started = [line for line in read(tmp_path / "account") if line["event"] == "started"]
    assert [(line["run"], line["by"]) for line in started] == [("run", "ada")]


def test_a_server_that_asks_within_the_rules_is_answered_and_for_more_rounds_refused(tmp_path):
    rules = {"approved": {"fedavg"}, "reveals": "averages", "rounds": 3, "answers": 100, "memory": 1000}
    site = start(tmp_path, Rules(**rules, hours=(MIDNIGHT, datetime.time.max)), "fedavg")
    ((number, (header, _)),) = [site.last]
    request = {"what": ["round", 0, "local_steps", 2], "round": 4, "states": [header["state"]]}
    with pytest.raises(SiteRefused, match="has 3 rounds, and no round 4"):
        site.call({"seq": number + 1, **request}, [np.zeros(1)] * 3)
    joined, *asked = [line for line in read(tmp_path / "account") if line["op"] != "open"]
    assert len(joined["digest"]) == 24
    assert {line["shows"] for line in asked} == {"the site's mean"}


def test_hours_may_go_over_midnight():
    night = Rules(hours=(datetime.time(20), datetime.time(6)))
    assert [night.open_at(datetime.time(h)) for h in (19, 20, 23, 0, 5, 6)] == [
        False,
        True,
        True,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rouds = 3", r"policy.toml: There is no 'rouds' among the entries.* 'rounds'"),
        ("rounds = -1", "rounds must be a whole number from 1 to"),
        ("secure = 1", "secure must be true or false, but is 1"),
        ('hours = "8-25"', "hours must be two times of the day, HH:MM-HH:MM"),
        ("epsilon = inf", "epsilon must be a number above 0"),
        ("upload = 0.0", "upload must be megabits per second, a number above 0"),
        ('starters = "ada"', "starters must be a list of names, but is 'ada'"),
    ],
)
def test_what_is_wrong_in_a_policy_is_told(text, words, tmp_path):
    (tmp_path / POLICY).write_text(text)
    with pytest.raises(ValueError, match=words):
        SitePolicy.of(tmp_path)


@pytest.fixture
def kit(tmp_path):
    """A site's kit, with an experiment in it."""
    kits.make(tmp_path, ["zurich", "lyon"], ["localhost"])
    found = tmp_path / "zurich"
    (found / "text.py").write_text(TEXT.replace("FedAvg(0.1, ", "FedAvg(s.a, ").replace("seeds=1", "seeds=2"))
    (found / "samples.csv").write_text("u,v,y\n1,2,3\n4,5,6\n")
    (found / "federation.toml").write_text(
        '[server]\nlisten = "127.0.0.1:1"\naddress = "localhost:1"\nhosts = ["localhost"]\n'
        '[federation]\nsites = ["zurich", "lyon"]\nexperiment = "text.py"\n'
    )
    return found


def test_a_person_sees_what_a_run_would_ask_and_approves_it_once(kit):
    def command(*words, **options):
        data = ["--data", str(kit / "samples.csv")]
        return CliRunner().invoke(app, ["net", "approve", str(kit), *data, *words], **options)

    def admitted(change):
        found = command("--set", f"a={change}", input="n\n").output
        digest = re.search(r"Digest (\w+)", found)[1]
        try:
            SitePolicy.of(kit).rules(kit).admit(Asks(digest, (), False, 3))
        except SiteRefused:
            return False
        return True

    assert admitted(1)
    (kit / POLICY).write_text("approval = true")
    assert not admitted(1)
    told = command(input="y\n")
    assert told.exit_code == 0
    assert "| local_steps (main) | each round | 2 numbers | 2 numbers | this site's mean |" in told.output
    assert "2 runs of 3 rounds" in told.output  # seeds ask the same
    assert "No noise is added" in told.output
    (kit / POLICY).unlink()
    assert admitted(1)
    assert not admitted(2)  # other hyper-parameters: nobody has looked at them


def test_a_draft_for_an_ethics_board_has_what_the_text_asks(kit):
    (kit / POLICY).write_text("rounds = 10\nepsilon = 2.0")
    file = kit / "draft.md"
    words = ["net", "approve", str(kit), "--data", str(kit / "samples.csv"), "--document", str(file)]
    assert CliRunner().invoke(app, words).exit_code == 0
    text = file.read_text("utf-8")
    for found in (
        "This site: zurich",
        "lyon",
        "u, v",
        "| local_steps (main) |",
        "rounds = 10",
        "epsilon = 2.0",
    ):
        assert found in text
    assert not (kit / "approved.json").exists()


def test_every_changed_byte_of_a_spent_budget_is_found(tmp_path):
    file = tmp_path / "privacy.json"
    spent = {"train": Counter({(0.5, 0.25): 100})}
    Allowance(file, 1e9, 1e-5).spend(spent)
    assert Allowance(file, 1e9, 1e-5).spent == spent
    whole = file.read_bytes()
    for place, byte in enumerate(whole):
        file.write_bytes(whole[:place] + bytes([byte ^ 1 << place % 8]) + whole[place + 1 :])
        with pytest.raises(ValueError, match="is damaged"):
            Allowance(file, 1e9, 1e-5)
