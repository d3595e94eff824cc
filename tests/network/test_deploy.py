"""What `deploy/` has can be read, and speaks of options and numbers that there are."""

import json
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from fedstrata.engines.network.watching import as_text
from fedstrata.lab.cli import app
from fedstrata.lab.experiments.net import _gauges
from tests.network.test_watching import FACTS

DEPLOY = Path(__file__).parents[2] / "deploy"


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
