"""The examples run as they are."""

import re
import runpy
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest

import fedstrata as fs

ROOT = Path(__file__).parents[1]
# Run in test_docs.py or in a test below, which look at what comes out.
ELSEWHERE = ("quickstart", "csv_to_fair_model", "swapped_labels")
EXAMPLES = [path for path in sorted((ROOT / "examples").glob("*.py")) if path.stem not in ELSEWHERE]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # shown to who runs it
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.slow
def test_the_fair_model_is_fair(monkeypatch):
    monkeypatch.chdir(ROOT)
    fair = runpy.run_path(str(ROOT / "examples" / "csv_to_fair_model.py"))
    data, model = fair["data"], fair["model"]
    problem, method = fs.Minimization(model.loss), fs.FedAvg(gamma=0.3)
    mean = fs.solve(problem, method, data, model.init(0), rounds=400, progress=False)
    each = [
        [jax.vmap(model.loss, (None, 0))(x, data.client(i)).mean() for i in range(data.clients)]
        for x in (fair["result"].x, mean.x)
    ]
    assert max(each[0]) < max(each[1]) - 0.01  # the worst hospital has gained
    assert sum(each[0]) > sum(each[1])  # which is not for nothing


def test_contributors_read_what_runs():
    shown = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    assert (ROOT / "examples" / "own_method.py").read_text("utf-8").rstrip() in shown


def test_the_walks_name_files_that_there_are():
    walks = (ROOT / "CONTRIBUTING.md").read_text("utf-8").split("## Three walks")[1].split("\n## ")[0]
    files = [name for name in re.findall(r"`([\w/]+\.py)`", walks) if "yours" not in name]
    assert len(files) > 15
    for name in files:
        assert (ROOT / "fedstrata" / name).exists() or (ROOT / name).exists(), name


def test_the_walk_through_a_solve_names_what_runs():
    walk = (ROOT / "CONTRIBUTING.md").read_text("utf-8").split("**`fs.solve(")[1].split("**`fedstrata run")[0]
    named, others = set(re.findall(r"`([\w/]+\.py)`", walk)), walk.split("by rooms:")[1]
    for room, names in re.findall(r"`([\w/]+/)` ([^`]+)", others):
        words = re.sub(r"\(.*?\)| with| and|[;.]", "", names, flags=re.DOTALL)
        named |= {f"{room}{name.strip()}.py" for name in words.split(",") if name.strip()}

    ran: set[str] = set()

    def note(frame: types.FrameType, event: str, _: object) -> None:
        ran.add(frame.f_code.co_filename)

    h = lambda x, y, s: ((y - x - s["a"]) ** 2).sum()  # noqa: E731
    problem = fs.Bilevel(lambda x, y, s: (x**2 + y**2).sum(), h, same_samples=True)
    data = fs.FederatedData.from_clients([{"a": np.ones((4, 3))}, {"a": np.zeros((4, 3))}])
    solve, method = fs.solve, fs.FedMSA(alpha=0.1, beta=0.1, K=2)
    fs.engines.Simulated()  # loaded: what runs is meant
    sys.setprofile(note)
    try:
        solve(problem, method, data, np.ones(3), y0=np.ones(3), rounds=1, progress=False, certify=False)
    finally:
        sys.setprofile(None)
    package = ROOT / "fedstrata"
    found = {str(Path(f).relative_to(package)) for f in ran if Path(f).is_relative_to(package)}
    # What listens, or is collected, after other tests.
    left = {"advice/price.py", "support/compiled.py", "support/private_jax.py"}
    assert found - left == named
    assert f"code of {len(named)} files" in walk


@pytest.mark.slow
def test_the_first_figure_of_the_readme(capsys, monkeypatch):
    """A learnt trust beats FedAvg wherever labels are swapped, and costs nothing where they are not."""
    monkeypatch.setattr(sys, "argv", ["swapped_labels.py"])  # its argument is a file to draw into
    module = runpy.run_path(str(ROOT / "examples" / "swapped_labels.py"), run_name="__main__")
    intact, *swapped = module["rows"].values()
    (low, high), gains = module["interval"](intact[2], intact[0]), []
    assert low < 0 < high
    for all_records, checked, trusted in swapped:
        assert module["interval"](trusted, all_records)[0] > 0
        gains.append(100 * (trusted.mean() - all_records.mean()))
        assert 1 < 100 * (trusted.mean() - checked.mean()) < 5
    said = re.search(r"(\d+) to (\d+) points more\s+\(all", (ROOT / "README.md").read_text("utf-8"))
    np.testing.assert_allclose([min(gains), max(gains)], [int(said[1]), int(said[2])], atol=1.0)
    assert "Zurich" in capsys.readouterr().out
