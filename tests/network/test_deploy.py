"""What `deploy/` has can be read, and speaks of options and numbers that there are."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from typer.testing import CliRunner

from fedstrata.engines.network import kits
from fedstrata.engines.network.watching import as_text
from fedstrata.lab.cli import app
from fedstrata.lab.experiments.net import _gauges, write_settings
from tests.network.faults import environment, free_port
from tests.network.test_watching import FACTS

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def test_the_dashboard_asks_for_numbers_that_are_served():
    served = as_text(_gauges(FACTS))
    panels = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    for panel in panels:
        names = re.findall(r"fedstrata_\w+", panel["targets"][0]["expr"])
        assert names
        assert all(f"# TYPE {name} " in served for name in names)


@pytest.mark.parametrize("command", ["run", "site"])
def test_services_use_options_that_there_are(command):
    help_ = CliRunner().invoke(app, ["net", command, "--help"], env={"COLUMNS": "200"}).output
    name = {"run": "server", "site": "site"}[command]
    unit = (DEPLOY / "systemd" / f"fedstrata-{name}.service").read_text()
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes" / f"{name}.yaml").read_text()))
    pod = documents[0]["spec"]["template"]["spec"]
    words = re.search(rf"net {command} .*", unit)[0].split() + pod["containers"][0]["args"]
    options = {word for word in words if word.startswith("--")}
    assert "--watch" in options
    assert all(option in help_ for option in options)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True


def test_a_set_of_jobs_has_as_many_processes_as_it_says():
    jobs = yaml.safe_load((DEPLOY / "kubernetes" / "simulation.yaml").read_text())
    (one,) = jobs["spec"]["replicatedJobs"]
    job = one["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    told = {entry["name"]: entry["value"] for entry in container["env"]}
    assert int(told["PROCESSES"]) == job["completions"] == job["parallelism"]
    first = f"{jobs['metadata']['name']}-{one['name']}-0-0.{jobs['spec']['network']['subdomain']}"
    assert told["ADDRESS"].startswith(f"{first}:")
    assert job["backoffLimit"] == 0  # the set starts again as a whole
    assert job["template"]["spec"]["securityContext"]["runAsNonRoot"] is True


def test_an_image_is_made_of_what_there_is():
    text = (DEPLOY / "Containerfile").read_text()
    copied = " ".join(re.findall(r"^COPY (?!--)(.*) \S+$", text, re.M)).split()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {*copied} == {"pyproject.toml", project["readme"], *project["license-files"], "fedstrata"}
    assert all((ROOT / path).exists() for path in copied)
    assert json.loads(re.search(r"^ENTRYPOINT (.*)", text, re.M)[1])[0] in project["scripts"]
    users = re.findall(r"^USER (\d+):", text, re.M)
    assert users
    assert users[-1] != "0"


@pytest.mark.slow
@pytest.mark.parametrize("who", ["server", "berlin"])
def test_the_first_process_of_a_container_ends_when_it_is_asked(who, tmp_path):
    """A system gives such a process no signal that it does not handle."""
    if not shutil.which("unshare") or subprocess.run(["unshare", "-rpf", "true"], check=False).returncode:
        pytest.skip("no namespaces for processes here")
    kits.make(tmp_path / "kits", ["berlin"], ["localhost"])
    write_settings(tmp_path, ["berlin"], "demo", f"127.0.0.1:{free_port()}", f"localhost:{free_port()}")
    kit = tmp_path / "kits" / who
    shutil.copy(tmp_path / "federation.toml", kit)
    words = {"server": ["run", "demo", str(kit), "--out", "out"], "berlin": ["site", str(kit), "--simulated"]}
    told = tmp_path / "log"
    command = ["unshare", "-rpf", "--kill-child", sys.executable, "-m", "fedstrata", "net", *words[who]]
    with (
        told.open("wb") as log,
        subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=log, stderr=log) as outer,
    ):
        try:
            waits = {"server": "waiting for berlin", "berlin": "no connection to"}[who]
            end = time.monotonic() + 60
            while waits not in told.read_text():
                assert outer.poll() is None, told.read_text()
                assert time.monotonic() < end
                time.sleep(0.05)
            (inner,) = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
            os.kill(int(inner), signal.SIGTERM)
            assert outer.wait(10) == 128 + signal.SIGTERM
        finally:
            outer.kill()


@pytest.mark.parametrize(
    ("owner", "mode", "own", "read"),
    [
        (7, 0o600, 7, False),
        (7, 0o640, 7, True),
        (0, 0o640, 0, True),
        (0, 0o440, 7, False),
        (0, 0o444, 7, True),
    ],
)
def test_a_key_of_roots_may_be_for_the_group_of_a_service(owner, mode, own, read, monkeypatch):
    """As a Kubernetes secret is with `fsGroup`."""
    monkeypatch.setattr(os, "geteuid", lambda: own, raising=False)
    key = SimpleNamespace(stat=lambda: SimpleNamespace(st_uid=owner, st_mode=0o100000 | mode))
    assert kits._others_read(key) is read
