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


# The self-tuned row of strfedavg-sparse is about the step that this tells of.


def run(name, folder, **changes):
    """Every number of a quick run is finite, and it ends with a page."""
    page = run_experiment(prepare(ALL[name], quick=True, changes=changes), folder, progress=False)
    assert page.stat().st_size > 1000
    for found in load_report(folder).runs:
        for series, values in found.history.items():
            assert np.isfinite(values).all(), f"{found.label}, {found.setting}: {series}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_three_rounds(name, tmp_path):
    run(name, tmp_path, **{key: 3 for key in ("rounds",) if key in ALL[name].parameters})


@pytest.mark.long
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("name", ALL)
def test_quick(name, tmp_path):
    wall, own = time.perf_counter(), time.process_time()
    run(name, tmp_path)
    # On a busy machine the clock on the wall says nothing.
    taken = min(time.perf_counter() - wall, time.process_time() - own)
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
