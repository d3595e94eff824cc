"""Every registered experiment: its quick run, its page in the documentation, its place in the registry."""

import time
from pathlib import Path

import numpy as np
import pytest

from fedstrata.lab import ExperimentError
from fedstrata.lab.experiments import registry
from fedstrata.lab.experiments.data import LOADERS
from fedstrata.lab.experiments.runner import prepare, run_experiment
from fedstrata.lab.report import load_report

ALL = {name: registry.find(name) for name in registry.names()}
PAGES = Path(__file__).parents[2] / "reproductions"


def test_there_are_experiments():
    assert {"demo", "fedrzo-relu", "fedrzo-softplus", "fedrzo-cifar"} <= ALL.keys()
    assert all(name == experiment.name for name, experiment in ALL.items())


@pytest.mark.parametrize("name", ALL)
def test_the_list_says_what_the_definition_says(name):
    fields = [getattr(ALL[name], field) for field in registry.Headline._fields]
    assert registry.headline(name) == tuple(fields)


def test_a_headline_is_written_out(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "folder", lambda: tmp_path)
    (tmp_path / "a_b.py").write_text('EXPERIMENT = Experiment(name="a-b", title=TITLE)\n')
    (tmp_path / "none.py").write_text("x = 1\n")
    assert registry.names() == ["a-b", "demo", "none"]
    with pytest.raises(ExperimentError, match=r"a_b\.py: .*title.* must be literals"):
        registry.headline("a-b")
    with pytest.raises(ExperimentError, match=r"none\.py defines no EXPERIMENT"):
        registry.headline("none")


QUICKEST = ("demo",)


# The self-tuned row of strfedavg-sparse is about the step that this tells of.
@pytest.mark.filterwarnings("ignore:StRFedAvg. the primary loss curves:UserWarning")
@pytest.mark.filterwarnings("ignore:StRFedAvg. the rule 'convex', the paper's, keeps η:UserWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICKEST else pytest.mark.slow) for n in ALL]
)
def test_quick(name, tmp_path):
    experiment = ALL[name]
    wall, own = time.perf_counter(), time.process_time()
    page = run_experiment(prepare(experiment, quick=True), tmp_path, progress=False)
    # On a busy machine the clock on the wall says nothing.
    taken = min(time.perf_counter() - wall, time.process_time() - own)
    assert page.stat().st_size > 1000
    report = load_report(tmp_path)
    for found in report.runs:
        for series, values in found.history.items():
            assert np.isfinite(values).all(), f"{found.label}, {found.setting}: {series}"
    assert taken < 40  # 32 s at most on two slow cores with nothing compiled before


@pytest.mark.parametrize("name", ALL)
def test_definition_is_complete(name):
    experiment = ALL[name]
    assert experiment.quick, "give quick="
    assert set(experiment.needs) <= LOADERS.keys()
    described = " ".join(page.read_text(encoding="utf-8") for page in PAGES.glob("*.md"))
    assert f"fedstrata reproduce {name}" in described or f"fedstrata {name}" in described, (
        f"no page of reproductions/ says `fedstrata reproduce {name}`"
    )
