"""Every registered experiment: its quick run, its page in the documentation, its place in the registry."""

import time
from pathlib import Path

import numpy as np
import pytest

from fedstrata.experiments import registry
from fedstrata.experiments.data import LOADERS
from fedstrata.experiments.runner import prepare, run
from fedstrata.report import load_report

ALL = registry.experiments()
DOCS = Path(__file__).parents[2] / "docs" / "experiments"


def test_there_are_experiments():
    assert {"demo", "fedrzo-relu", "fedrzo-softplus", "fedrzo-cifar"} <= ALL.keys()
    assert all(name == experiment.name for name, experiment in ALL.items())


@pytest.mark.parametrize("name", ALL)
def test_find_gives_what_the_list_has(name):
    assert registry.find(name) is ALL[name]


QUICKEST = ("demo",)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICKEST else pytest.mark.slow) for n in ALL]
)
def test_quick(name, tmp_path):
    experiment = ALL[name]
    wall, own = time.perf_counter(), time.process_time()
    page = run(prepare(experiment, quick=True), tmp_path, progress=False)
    # On a busy machine the clock on the wall says nothing.
    taken = min(time.perf_counter() - wall, time.process_time() - own)
    assert page.stat().st_size > 1000
    report = load_report(tmp_path)
    for found in report.runs:
        for series, values in found.history.items():
            assert np.isfinite(values).all(), f"{found.label}, {found.setting}: {series}"
    assert taken < 20


@pytest.mark.parametrize("name", ALL)
def test_definition_is_complete(name):
    experiment = ALL[name]
    assert experiment.quick, "give quick="
    assert set(experiment.needs) <= LOADERS.keys()
    described = " ".join(page.read_text(encoding="utf-8") for page in DOCS.glob("*.md"))
    assert f"fedstrata reproduce {name}" in described or f"fedstrata {name}" in described, (
        f"no page of docs/experiments says `fedstrata reproduce {name}`"
    )
