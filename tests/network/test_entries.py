"""Where a site's samples come from: a function, a CSV file, a store; and what is no entry is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tomllib
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

import fedstrata as fs
from fedstrata.data.federated import DataError
from fedstrata.engines.network import Policy
from fedstrata.engines.network.host import Host
from fedstrata.lab.cli import app, load
from fedstrata.lab.experiments.networked import Server, check, entry_of, opener, terms_of
from fedstrata.lab.experiments.settings import SECTIONS
from fedstrata.lab.experiments.settings import read as read_settings
from fedstrata.lab.report.page import markdown
from fedstrata.support.writing import locked

from .test_host import Hosts

X = np.arange(8, dtype=np.float32).reshape(4, 2)
Y = np.array([0, 1, 1, 0], np.int32)


def assert_client(data, i, x, y):
    found = data.client(i, "train")
    np.testing.assert_array_equal(found["x"], x)
    np.testing.assert_array_equal(found["y"], y)


def test_a_csv_file(tmp_path):
    rows = "\n".join(f"{a},{y},{b}" for (a, b), y in zip(X.tolist(), Y.tolist(), strict=True))
    (tmp_path / "own.csv").write_text("a,sick,b\n" + rows + "\n")
    data = entry_of("own.csv", "sick", tmp_path)()
    assert data.clients == 1
    assert_client(data, 0, X, Y)
    assert entry_of("own.csv", "sick", tmp_path, valid_fraction=0.5)().valid_sizes.tolist() == [2]
    with pytest.raises(DataError, match="--label names the one that becomes y"):
        entry_of("own.csv", "y", tmp_path)()
    (tmp_path / "words.csv").write_text("a,y\nhigh,1\nlow,0\n")
    with pytest.raises(DataError, match="not numbers"):
        entry_of("words.csv", "y", tmp_path)()
    with pytest.raises(DataError, match="not found"):
        entry_of("other.csv", "y", tmp_path)()


def test_a_store_of_several_clients(tmp_path):
    fs.data.write_store(tmp_path / "store", [{"x": X, "y": Y}, {"x": X[:2], "y": Y[:2]}])
    data = entry_of("store", folder=tmp_path)()
    assert data.clients == 2
    assert data.source is None  # a site has its samples in memory
    assert_client(data, 0, X, Y)
    assert_client(data, 1, X[:2], Y[:2])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="not a store"):
        entry_of("empty", folder=tmp_path)()


def test_a_function_returns_a_client_several_or_federated_data(tmp_path):
    fs.data.write_store(tmp_path / "store", [{"x": X, "y": Y}])
    (tmp_path / "clinic_entries.py").write_text(
        "import numpy as np, fedstrata as fs\n"
        "own = {'x': np.arange(8, dtype=np.float32).reshape(4, 2), 'y': np.array([0, 1, 1, 0], np.int32)}\n"
        "def one(): return own\n"
        "def two(): return [own, own]\n"
        f"store = fs.data.open_store({str(tmp_path / 'store')!r})\n"
        "def streamed(): return fs.FederatedData.from_source(store)\n"
    )
    for name, clients in (("one", 1), ("two", 2), ("streamed", 1)):
        data = entry_of(f"clinic_entries:{name}", folder=tmp_path)()
        assert data.clients == clients
        assert_client(data, clients - 1, X, Y)


@pytest.mark.parametrize("where", ["somewhere", "no_such_module:samples", "math:no_such_function"])
def test_what_is_no_entry_is_said(where, tmp_path):
    with pytest.raises(DataError, match=where.partition(":")[0]):
        entry_of(where, folder=tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "import os\ndef samples():\n    return os.environ['NO_SUCH_FILE']\n",
            "line 3: KeyError: 'NO_SUCH_FILE'",
        ),
        ("def samples():\n    return {'x': 1 / 0}\n", "line 2: ZeroDivisionError"),
        ("x = 1 / 0\n", "line 1: ZeroDivisionError"),
        ("def samples(\n", "line 1: SyntaxError"),
    ],
)
def test_what_a_site_s_own_file_does_wrong_is_said_with_its_line(text, words, tmp_path, request):
    name = f"clinic_{abs(hash(request.node.name))}"  # a module is imported once
    (tmp_path / f"{name}.py").write_text(text)
    with pytest.raises(DataError, match=f"--data {name}:samples, {words}"):
        entry_of(f"{name}:samples", folder=tmp_path)()


TEXT = """
import jax.numpy as jnp
import fedstrata as fs
from fedstrata.lab.experiments.base import Experiment, Task
from fedstrata.lab.report import Column, TableSpec


def loss(w, sample):
    return 0.5 * (sample["x"] @ w - sample["y"]) ** 2


def build(s):
    return Task(fs.Minimization(loss), fs.FedAvg(0.1, H=2), None, jnp.zeros(2), rounds=3)


EXPERIMENT = Experiment(
    name="checked", title="Checked", description="A small problem.", grid={}, parameters={"a": 1}, seeds=1,
    build=build, table=TableSpec((Column("loss"),)),
)
"""


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ({"x": X, "y": Y}, None),
        ({"x": X}, "y"),
        ({"x": X[:, :1], "y": Y}, "loss"),
        ({"x": X, "y": np.full(4, np.nan, np.float32)}, "NaN"),
    ],
    ids=["fits", "no label", "other features", "nan"],
)
def test_a_site_checks_its_data_against_the_text_before_it_joins(samples, words, tmp_path):
    (tmp_path / "text.py").write_text(TEXT)
    opens = opener(load(str(tmp_path / "text.py")), lambda: fs.FederatedData.from_clients([samples]), None)
    if words is None:
        assert check(opens).clients == 1
    else:
        with pytest.raises(DataError, match=words):  # which the command line tells in one message
            check(opens)


AUGMENTED = TEXT.replace(", None, jnp.zeros(2)", ", DATA, jnp.zeros(2)").replace(
    "def build",
    """def turned(sample, key):
    return {**sample, "x": -sample["x"]}


own = {"x": jnp.ones((4, 2)), "y": jnp.ones(4, jnp.int32)}
DATA = fs.FederatedData.from_clients([own, own]).augmented(turned)


def build""",
)


def test_a_text_that_augments_does_so_at_sites_too(tmp_path):
    (tmp_path / "augmented.py").write_text(AUGMENTED)
    experiment = load(str(tmp_path / "augmented.py"))
    hosts = Hosts(tmp_path, "fedavg")
    own = fs.FederatedData.from_clients([{"x": X, "y": Y}])
    openers = opener(experiment, None, (0, 2)), opener(experiment, lambda: own, None)
    hosts.hosts = [Host(terms_of(experiment), opens, tmp_path) for opens in openers]
    there, *_ = Server(experiment, hosts, "run").federation(experiment.settings[0])
    assert not there.join({0: [0], 1: [0]})
    assert all(host.opened.data.augment is not None for host in hosts.hosts)


def test_a_federation_listens_on_loopback_unless_told_otherwise(tmp_path):
    folder = tmp_path / "federation"
    done = CliRunner().invoke(app, ["net", "init", str(folder), "--sites", "berlin,lyon"])
    assert done.exit_code == 0, done.output
    settings = tomllib.loads((folder / "federation.toml").read_text("utf-8"))
    assert settings["server"]["listen"].startswith("127.0.0.1:")
    assert settings["federation"]["sites"] == ["berlin", "lyon"]
    assert settings["policy"]["missing"] == "wait"
    assert {*SECTIONS["policy"]} == {"anew", *(field.name for field in fields(Policy))}
    for sites in ("berlin,berlin", "server,lyon", "../berlin", ""):
        done = CliRunner().invoke(app, ["net", "init", str(tmp_path / "other"), "--sites", sites])
        assert done.exit_code == 2
        assert not (tmp_path / "other").exists()


SETTINGS = {
    "server": {"listen": "127.0.0.1:8443", "address": "[::1]:8443", "hosts": ["localhost"]},
    "federation": {"sites": ["berlin", "lyon"]},
    "policy": {},
}


@pytest.mark.parametrize(
    ("section", "entry", "words"),
    [
        ("policy", {"anew": "no"}, "must be true or false, but is 'no'"),
        ("policy", {"timout": 3.0}, "no 'timout' among the entries.*Did you mean 'timeout'"),
        ("policy", {"timeout": float("inf")}, "must be seconds"),
        ("policy", {"timeout": float("nan")}, "must be seconds"),
        ("policy", {"after": 0}, "must be seconds"),
        ("policy", {"retries": True}, "a whole number"),
        ("policy", {"min_sites": 2.0}, "a whole number"),
        ("policy", {"min_sites": 3}, "min_sites is 3, but there are 2 sites"),
        ("policy", {"missing": "skip"}, "'wait' or 'drop'"),
        ("server", {"listen": 8443}, "must be an address, host:port, but is 8443"),
        ("server", {"listen": "127.0.0.1:99999"}, "host:port"),
        ("server", {"address": "localhost"}, "host:port"),
        ("server", {"hosts": "localhost"}, "names of hosts"),
        ("federation", {"message_bytes": 2**40}, "a whole number from 65536"),
        ("federation", {"sites": ["../../x"]}, "letters, digits and hyphens"),
        ("federation", {"sites": ["berlin", "berlin"]}, "different names"),
        ("federation", {"sites": "berlin"}, "different names"),
        ("federation", {"sites": ["berlin\n"]}, "letters, digits and hyphens"),
        ("polcy", {}, "no 'polcy' among the sections. Did you mean 'policy'"),
    ],
    ids=str,
)
def test_what_is_wrong_in_a_federations_file_is_told(section, entry, words):
    read_settings(SETTINGS)
    with pytest.raises(ValueError, match=words):
        read_settings({**SETTINGS, section: {**SETTINGS.get(section, {}), **entry}})


def test_a_sites_words_are_no_markdown():
    engine = SimpleNamespace(
        timing=SimpleNamespace(waited={}, last={0: 3}, timed=4),
        failed={},
        attempts=1,
        events=[{"round": 1, "site": "lyon", "what": "error: [a](b) **c** `d`"}],
    )
    transport = SimpleNamespace(names=["lyon"], sent=[0], received=[0])
    told = Server.remarks(SimpleNamespace(transport=transport, engines=[engine]))
    shown = markdown(told)
    assert "round 1, lyon: error: [a](b) **c** `d`" in shown
    assert "<a " not in shown
    assert ">75%</td>" in shown  # the last to answer


def test_a_folder_is_one_processs_at_a_time(tmp_path):
    refused = pytest.raises(BlockingIOError, match="A server is already running and uses")
    with locked(tmp_path, "A server"), refused, locked(tmp_path, "A server"):
        pass
    with locked(tmp_path, "A server"):
        pass


@pytest.mark.parametrize("command", ["status", "stop"])
def test_a_run_that_was_killed_is_not_under_way(command, tmp_path):
    """Its file stays, and its number may be another process's: nobody is interrupted in its place."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for pid, told in ((ended.pid, time.time()), (os.getpid(), time.time() - 3600)):
        facts = {"pid": pid, "time": told, "round": 3, "rounds": 9, "sites": {}}
        (tmp_path / "network.json").write_text(json.dumps(facts))
        done = CliRunner().invoke(app, ["net", command, str(tmp_path)])
        assert done.exit_code == 2
        assert f"The process {pid} has ended" in done.output


def test_kits_need_the_experiment_s_file(tmp_path):
    """Every party is given it, so that it must be there before the folders are made."""
    folder, invoke = tmp_path / "farms", CliRunner().invoke
    made = invoke(app, ["net", "init", str(folder), "--sites", "north,south", "--experiment", "crops.py"])
    assert "copy crops.py there" in made.output
    refused = invoke(app, ["net", "kits", str(folder)])
    assert refused.exit_code == 2
    assert "copy it there first" in refused.output
    assert not (folder / "kits").exists()
    (folder / "crops.py").write_text("")
    assert invoke(app, ["net", "kits", str(folder)]).exit_code == 0
    assert (folder / "kits" / "south" / "crops.py").is_file()
