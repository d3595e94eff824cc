"""The command line: what it prints, where it writes, how it fails."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedstrata
from fedstrata.lab import ExperimentError
from fedstrata.lab.cli import app, load, parse
from fedstrata.lab.experiments.data import present
from fedstrata.lab.experiments.registry import find, headline, names

FILE = """
title = "A file"
rounds = 2
seeds = 1
data = { name = "breast_cancer", clients = 3 }
problem = { name = "logistic" }
methods = [{ name = "FedAvg", gamma = 0.5, H = 1 }]
"""

PYTHON = """
from fedstrata.lab import Column, Experiment, RunRecord, TableSpec


def build(s):
    return RunRecord("point", s.cell, s.seed, {"round": [0], "loss": [s.height]}, {}, 0.0, "none")


EXPERIMENT = Experiment(
    name="mine", title="Mine", description="A point.", parameters={"height": 1.0}, build=build, seeds=1,
    table=TableSpec((Column("loss"),)),
)
"""


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def call(*words, code=0):
        result = CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})
        assert result.exit_code == code, result.output
        return result

    return call


COMMAND = """
import sys
from typer.testing import CliRunner
from fedstrata.lab.cli import app
for words in sys.argv[1:]:
    assert CliRunner().invoke(app, words.split()).exit_code == 0
"""

USED = """
import resource, sys
heavy = sorted(sys.modules.keys() & {"jax", "numpy", "matplotlib", "plotly"})
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime, *heavy)
"""


def started(program, *words):
    """CPU time of a process and the heavy modules in it."""
    done = subprocess.run(
        [sys.executable, "-c", program + USED, *words], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    taken, *heavy = done.stdout.split()
    return float(taken), heavy


def test_what_needs_no_jax_starts_quickly():
    """Before JAX alone would be there; of three processes each, as other work adds to their time too."""
    _, heavy = started(COMMAND, "--help", "--version", "run --help", "list --json", "list")
    assert heavy == []
    ours, jax = (min(started(*one)[0] for _ in range(3)) for one in ((COMMAND, "list"), ("import jax",)))
    assert ours < jax


def test_the_module_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "fedstrata", "run", "nothing"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("Error: Unknown experiment 'nothing'.")
    assert "Traceback" not in done.stderr


def test_list_names_every_experiment(invoke):
    output = invoke("list").output
    for name in names():
        (line,) = [line for line in output.splitlines() if re.match(rf"\s*{name}\s", line)]
        assert headline(name).title.split()[0] in line
    assert "mnist (else digits)" in output


def test_version(invoke):
    assert invoke("--version").output == f"fedstrata {fedstrata.__version__}\n"
    root = Path(__file__).parents[1]
    assert f"\nversion: {fedstrata.__version__}\n" in (root / "CITATION.cff").read_text("utf-8")
    assert f"\n## [{fedstrata.__version__}]" in (root / "CHANGELOG.md").read_text("utf-8")


@pytest.mark.parametrize(
    "words", [(), ("run",), ("reproduce",), ("list",), ("doctor",), ("net",), ("net", "try")]
)
def test_flags_take_no_value(invoke, words):
    help = invoke(*words, "--help").output
    assert "--help" in help
    assert "bool" not in help.lower()


def test_colours_can_be_turned_off():
    words = [sys.executable, "-m", "fedstrata", "run", "--help"]
    plain = {**os.environ, "FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "xterm-256color"}
    colours = {name: value for name, value in plain.items() if name != "NO_COLOR"}
    coloured = re.compile(r"\x1b\[(?:\d+;)*(?:3\d|4\d|9[0-7])(?:;\d+)*m")
    with_, without = (
        subprocess.run(words, capture_output=True, env=env).stdout.decode() for env in (colours, plain)
    )
    assert coloured.search(with_)
    assert not coloured.search(without)


def test_the_shell_completes_commands_and_names():
    def completed(line):
        asked = {
            "_FEDSTRATA_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(line.count(" ")),
        }
        words = [sys.executable, "-c", "from fedstrata.lab.cli import app; app(prog_name='fedstrata')"]
        return subprocess.run(
            words, capture_output=True, text=True, env={**os.environ, **asked}
        ).stdout.split()

    assert completed("fedstrata rep") == ["reproduce", "report"]
    assert completed("fedstrata run fedrzo-r") == ["fedrzo-relu"]


def test_list_as_json(invoke):
    told = json.loads(invoke("list", "--json").stdout)
    assert [one["name"] for one in told] == names()
    (relu,) = [one for one in told if one["name"] == "fedrzo-relu"]
    assert relu["needs"] == ["mnist"]
    assert relu["fallback"]["data"] == "digits"


def test_list_tells_of_one(invoke):
    output = " ".join(invoke("list", "selection-fair").output.split())
    e = find("selection-fair")
    for words in (e.title, *e.parameters, *e.grid_keys, e.full_time, f"{len(e.settings)} runs", "Claims"):
        assert words in output
    told = json.loads(invoke("list", "selection-fair", "--json").stdout)
    assert told["parameters"] == e.parameters
    assert told["seeds"] == e.seeds
    assert told["data"] == [{"name": name, "present": present(name)} for name in e.needs]
    Path("mine.py").write_text(PYTHON)
    assert json.loads(invoke("list", "mine.py", "--json").stdout)["parameters"] == {"height": 1.0}
    assert "Did you mean" in invoke("list", "selection-fare", code=2).stderr


def test_runs_and_reports_as_json(invoke, tmp_path):
    Path("mine.py").write_text(PYTHON)
    result = invoke("run", "mine.py", "--set", "height=3,nan", "--out", "there", "--json")
    told = json.loads(result.stdout)
    assert "Mine" in result.stderr
    assert told["page"] == str(tmp_path / "there" / "report.html")
    assert {row["height"]: row["cells"]["loss"]["mean"] for row in told["table"]} == {3.0: 3.0, None: None}
    assert [run["last"]["loss"] for run in told["runs"]] == [3.0, None]
    again = json.loads(invoke("report", "there", "--json").stdout)
    assert again == told
    invoke("run", "mine.py", "--set", "height=text", "--json", code=2)


def test_reproduce_takes_seeds(invoke, tmp_path, monkeypatch):
    Path("mine.py").write_text(PYTHON)
    mine = load("mine.py")
    monkeypatch.setattr("fedstrata.lab.experiments.registry.find", lambda name: mine)
    told = json.loads(invoke("reproduce", "mine", "--seeds", "3", "--json").stdout)
    assert [run["seed"] for run in told["runs"]] == [0, 1, 2]
    assert told["command"] == "fedstrata reproduce mine --seeds 3"


def test_doctor_tells_what_there_is(invoke, monkeypatch):
    import jax
    import numpy as np

    monkeypatch.setenv("FEDSTRATA_DATA", "nowhere")
    told = json.loads(invoke("doctor", "--json", code=1).stdout)
    assert told["trouble"] == [
        "FEDSTRATA_DATA is nowhere, which is not a folder. Create it, or unset the variable."
    ]
    assert told["versions"]["numpy"] == np.__version__
    assert [d["platform"] for d in told["devices"]] == [d.platform for d in jax.devices()]
    assert told["data"]["sets"]["mnist"] is present("mnist")
    extras = {extra["name"]: extra for extra in told["extras"]}
    pyproject = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))
    assert extras.keys() == pyproject["project"]["optional-dependencies"].keys()
    assert all(extra["purpose"] for extra in told["extras"])
    without_torch = importlib.util.find_spec("torch") is None
    assert ("torch is missing" in extras["torch"]["missing"]) is without_torch
    assert ("torch is missing" in extras["test"]["missing"]) is without_torch  # by way of another extra
    assert all(extra["installed"] is not bool(extra["missing"]) for extra in told["extras"])
    assert not any("pytest" in words for words in extras["dev"]["missing"])
    monkeypatch.delenv("FEDSTRATA_DATA")
    output = " ".join(invoke("doctor").output.split())
    assert "No problems found." in output
    assert "NVIDIA GPUs" in output


def test_doctor_finds_what_does_not_fit(monkeypatch):
    from importlib import metadata

    from fedstrata.lab.experiments import doctor

    monkeypatch.setattr(
        metadata, "requires", lambda name: ["numpy<1", 'no-such-thing>=2; extra == "gpu"', "jax"]
    )
    monkeypatch.setattr(doctor, "SOURCE", Path("nowhere"))  # as installed
    trouble = []
    extras, _ = doctor._requirements(trouble)
    assert re.match("numpy is 2.*, not <1: run pip install", trouble[0])
    assert len(trouble) == 1
    (gpu,) = [extra for extra in extras if extra["name"] == "gpu"]
    assert gpu["missing"] == ["no-such-thing is missing"]
    assert re.search(r"pip install .*\[gpu\]'", gpu["install"])


def test_the_status_of_a_network_run_that_has_ended(invoke, tmp_path):
    (tmp_path / "out").mkdir()
    assert "No run is under way" in invoke("net", "status", "out", code=2).output
    (tmp_path / "out" / "report.html").touch()
    assert "The run in out has ended. Report: " in invoke("net", "status", "out").output


@pytest.mark.slow
def test_warnings_are_kept(invoke, tmp_path):
    """Once for all seeds, in the terminal and on the page, also where the runs are there already."""
    (tmp_path / "a.toml").write_text(FILE)
    for _ in range(2):
        output = invoke("run", "a.toml", "--set", "gamma=300", "--seeds", "2", "--out", "out").output
        output = " ".join(output.split())
        assert output.count("FedAvg ran away: ") == 1
        assert re.search(r"FedAvg, seed 0: FedAvg ran away: loss .* So in 1 other run\.", output)
        assert "FedAvg ran away: " in (tmp_path / "out" / "report.html").read_text("utf-8")
    assert "<dt>methods</dt><dd>" in (tmp_path / "out" / "report.html").read_text("utf-8")


@pytest.mark.slow
def test_a_learnt_weight_that_ran_away_is_told_of(invoke, tmp_path):
    """Its logarithm is x, which a step of 5000 sends to where float32's exponential is 0."""
    example = Path(__file__).parents[1] / "examples" / "toml" / "bilevel.toml"
    words = ("--set", "alpha=5000", "--set", "method=FedMSA", "--out", "out")
    invoke("run", str(example), "--quick", *words)
    page = (tmp_path / "out" / "report.html").read_text("utf-8")
    assert re.search("not finite: FedMSA, seed 0: weight", page)


def test_run_a_file(invoke, tmp_path):
    (tmp_path / "a file.toml").write_text(FILE)
    asked, page = ("run", "a file.toml", "--set", "gamma=0.1,0.5", "--seeds", "2"), "runs/a-file/report.html"
    page = tmp_path / page
    for part in ("1/3", "2/3"):  # of an array job: two of four settings, then one
        assert f"Part {part[0]} of 3 is stored" in invoke(*asked, "--shard", part).output
    assert not page.exists()
    assert "--shard takes I/N" in invoke(*asked, "--shard", "3/2", code=2).output
    output = invoke(*asked).output
    assert "A file" in output
    assert "3 of 4 runs are already done." in output
    assert "[4/4] FedAvg, gamma=" in output
    assert output.splitlines()[-1] == f"Report: {page}"
    config = json.loads((page.parent / "config.json").read_text())
    assert config["command"] == "fedstrata run 'a file.toml' --seeds 2 --set gamma=0.1,0.5"
    again = invoke(*asked).output
    assert "4 of 4 runs are already done." in again
    fresh = invoke(*asked, "--fresh").output
    assert "[4/4]" in fresh


def test_quick_runs_have_their_own_folder(invoke, tmp_path):
    (tmp_path / "mine.toml").write_text(FILE + "quick = { rounds = 1 }\n")
    output = invoke("run", "mine.toml", "--quick").output
    assert "A quick run" in output
    assert (tmp_path / "runs" / "mine-quick" / "report.html").exists()


def test_run_python(invoke, tmp_path):
    (tmp_path / "mine.py").write_text(PYTHON)
    output = invoke("run", "mine.py", "--set", "height=3", "--out", "there").output
    assert "loss 3" in output
    assert (tmp_path / "there" / "table.csv").exists()
    (tmp_path / "wrong.py").write_text(PYTHON.replace("build=build", "build=None"))
    assert "wrong.py, line 9: build: Input should be callable" in invoke("run", "wrong.py", code=2).stderr
    (tmp_path / "none.py").write_text("x = 1\n")
    assert "none.py defines no EXPERIMENT" in invoke("run", "none.py", code=2).stderr


def test_report_makes_the_page_again(invoke, tmp_path):
    (tmp_path / "mine.py").write_text(PYTHON)
    invoke("run", "mine.py", "--out", "there")
    page = tmp_path / "there" / "report.html"
    before = page.read_bytes()
    page.unlink()
    assert invoke("report", "there").output.strip() == str(page)
    assert page.read_bytes() == before
    assert "does not exist" in invoke("report", "nowhere", code=2).stderr
    shutil.copytree(tmp_path / "there", tmp_path / "here")
    both = invoke("report", "there", "here", "--compare").output.strip()
    assert both == str(tmp_path / "compare.html")
    assert "· here" in Path(both).read_text()
    assert invoke("report", "there", "here").output.split() == [str(page), str(tmp_path / "here/report.html")]
    assert "two folders or more" in invoke("report", "there", "--compare", code=2).stderr
    assert "--out is for --compare" in invoke("report", "there", "--out", "x.html", code=2).stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", "fedrzo-rely"), r"Unknown experiment 'fedrzo-rely'\. Did you mean 'fedrzo-relu'"),
        (("reproduce", "nothing"), "Unknown experiment 'nothing'"),
        (("run", "none.toml"), "none.toml does not exist"),
        (("run", "demo", "--set", "rounds"), "--set needs KEY=VALUE"),
        (("run", "demo", "--set", "rounds=many"), "rounds must be a whole number"),
        (("run", "demo", "--set", "round=3"), r"no 'round'\. Did you mean 'rounds'"),
        (
            ("run", "demo", "--set", "method=FedSGD"),
            "no method 'FedSGD'; it has alone, FedMSA, FedRZOBilevel",
        ),
        (("run", "demo", "--set", "gamma=-1"), "FedRZOBilevel: gamma must be a positive number"),
        (("solve", "demo", "--budget", "bites=9"), "budget has no 'bites': it may limit rounds, bytes"),
    ],
)
def test_mistakes_get_a_message_and_code_2(invoke, words, message):
    result = invoke(*words, code=2)
    assert re.search(message, result.stderr)
    assert "Traceback" not in result.output


BAD = {
    "deep.toml": (f"a = {'[' * 5000}{']' * 5000}", "deep.toml is nested too deeply"),
    "deeper.toml": (FILE + f"grid = {{ H = {'[' * 200}{']' * 200} }}", "deeper.toml"),
    "nan.toml": (
        FILE.replace('"logistic"', '"logistic", lam = nan'),
        "logistic: lam must be a finite number ≥ 0",
    ),
    "text.toml": (
        FILE.replace('"logistic"', '"logistic", lam = "a"'),
        "problem.model: lam must be a valid number, but is 'a'",
    ),
    "long.toml": (FILE.replace("rounds = 2", f"rounds = {10**21}"), "rounds must be a whole number between"),
    "missing.py": ("\nimport no_such_module", "missing.py, line 2: ModuleNotFoundError: No module named"),
    "wrong.py": ("x = 1\ndef (", "wrong.py, line 2: SyntaxError"),
    "failing.py": ("def f():\n    1 / 0\nf()", "failing.py, line 2: ZeroDivisionError"),
    "leaving.py": ("import sys\nsys.exit(0)", "leaving.py, line 2: SystemExit"),
    "other.py": (
        "EXPERIMENT = {}",
        "other.py: EXPERIMENT must be a fedstrata.lab.Experiment, but is a dict",
    ),
    "named.py": (
        PYTHON.replace("EXPERIMENT", "EXPERIMENTS"),
        "named.py defines no EXPERIMENT. Its EXPERIMENTS is",
    ),
    "field.py": (
        PYTHON.replace("seeds=1", "seeds='a'"),
        "field.py, line 9: seeds: Input should be a valid integer",
    ),
    "unknown.py": (
        "import fedstrata as fs\nfs.FedAverage",
        "unknown.py, line 2: AttributeError: module 'fedstrata' has",
    ),
    "setting.py": (PYTHON.replace("s.height", "s.weight"), "The setting has no 'weight'; it has height"),
    "late.py": (PYTHON.replace("[s.height]", "[no_name]"), "late.py, line 6: NameError: name 'no_name'"),
    "nothing.py": (PYTHON.replace("return RunRecord", "RunRecord"), "build must return a Task"),
}


def test_a_run_that_is_known_not_to_be_solved_has_an_exit_code_of_its_own(invoke):
    Path("mine.toml").write_text(FILE.replace('"logistic"', '"logistic", lam = 0.1'))
    assert "Not solved: 1 of 1 runs" in invoke("run", "mine.toml", "--certify", code=4).stderr
    assert "By the certificates no run is solved (1 on its way)" in Path("runs/mine/report.html").read_text()
    invoke("run", "mine.toml", code=4)  # what is stored remembers it
    invoke("run", "mine.toml", "--certify", "--quick")
    more = invoke("run", "mine.toml", "--certify", "--set", "rounds=300", "--json").stdout
    assert json.loads(more)["runs"][0]["certificate"]["verdict"] == "solved"
    assert json.loads(more)["table"][0]["certificate"] == "solved"


@pytest.mark.parametrize("name", BAD)
def test_bad_files_get_a_message_and_code_2(invoke, name):
    text, message = BAD[name]
    Path(name).write_text(text)
    result = invoke("run", name, code=2)
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_bad_values_and_folders_get_a_message_and_code_2(invoke, tmp_path, monkeypatch):
    Path("mine.toml").write_text(FILE)
    assert "gamma must be a positive number" in invoke("run", "mine.toml", "--set", "gamma=-1", code=2).stderr
    Path("large.toml").write_text(FILE.replace('name = "logistic"', f'name = "mlp", hidden = {10**15}'))
    assert "Error: Unable to allocate" in invoke("run", "large.toml", code=2).stderr
    Path("file").write_text("")
    assert "cannot be written" in invoke("run", "mine.toml", "--out", "file/below", code=2).stderr
    invoke("run", "mine.toml", "--out", "out")
    Path("out/config.json").write_text("[" * 100_000)
    assert "nested too deeply" in invoke("report", "out", code=2).stderr

    def broken(*args, **options):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("fedstrata.lab.experiments.runner.write_report", broken)
    assert "Input/output error" in invoke("run", "mine.toml", "--out", "other", code=2).stderr


def test_missing_data_says_how_to_get_it(invoke, tmp_path, monkeypatch):
    import pooch

    def offline(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(pooch, "retrieve", offline)
    monkeypatch.setenv("FEDSTRATA_DATA", str(tmp_path))
    words = ("run", "fedrzo-relu", "--quick", "--set", "data=mnist")
    monkeypatch.setattr("fedstrata.lab.experiments.runner.present", lambda name: True)
    message = invoke(*words, code=2).stderr
    assert "Error: The data set 'mnist' was not found." in message
    assert "FEDSTRATA_DATA" in message


def test_debug_shows_where_it_happened(invoke):
    result = CliRunner().invoke(app, ["run", "demo", "--set", "gamma=-1", "--debug", "--out", "x"])
    assert isinstance(result.exception, ExperimentError)


@pytest.mark.slow
def test_demo(invoke, tmp_path):
    output = invoke("demo", "--seeds", "1").output
    assert "FedRZOBilevel" in output
    words = " ".join(output.split())
    assert "Against what each hospital learns alone" in words
    assert "the patients of 1 of 5 folds tested" in words
    page = tmp_path / "runs" / "demo" / "report.html"
    assert output.splitlines()[-1] == f"Report: {page}"
    table = (page.parent / "table.csv").read_text().splitlines()
    assert [line.split(",")[0].strip('"') for line in table[1:3]] == ["each alone", "one for all (FedMSA)"]
    assert len(table) == 1 + 5
    assert ">Findings<" in page.read_text("utf-8")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("H=5", 5),
        ("H=5.0", 5.0),
        ("H=1e-3", 1e-3),
        ("H=true", True),
        ("H=none", None),
        ("H=mnist", "mnist"),
        ('H="5"', "5"),
        ("H=1,2", [1, 2]),
        ("H=[1, 2]", [1, 2]),
        ("H=a=b", "a=b"),
        ('H="a, b"', "a, b"),
        ('H="a, b", c', ["a, b", "c"]),
        ("H=a\\, b,c", ["a, b", "c"]),
        ('H=["a,b", 2]', ["a,b", 2]),
        ("H=x[1]", "x[1]"),
        ('H=a "b", c', ['a "b"', "c"]),
        ("H=a\\b", "a\\b"),
    ],
)
def test_values_have_types(text, value):
    found = parse([text])["H"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("words", [["H"], ["=5"], ["H="], ["H=1", "H=2"]])
def test_assignments_that_are_none(words):
    with pytest.raises(ExperimentError, match="--set"):
        parse(words)


def test_the_pages_examples_are_experiments(invoke, tmp_path):
    page = (Path(__file__).parents[1] / "docs" / "command-line.md").read_text(encoding="utf-8")
    for language, suffix, cells in (("toml", ".toml", 12), ("python", ".py", 6)):
        (block,) = re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)
        file = tmp_path / f"example{suffix}"
        file.write_text(block)
        experiment = load(str(file)).change({"seeds": 1})
        assert len(experiment.settings) == cells
        assert experiment.build(experiment.settings[0]).data.clients == 10
    for command in re.findall(r"^fedstrata (\w+)", page, flags=re.MULTILINE):
        invoke(command, "--help")


def test_one_core_is_one_message_before_anything_is_made(invoke, monkeypatch, tmp_path):
    """A network's exchanges can hang there: no folder, no certificates, no processes."""
    import jax

    from fedstrata.engines import engine

    monkeypatch.setattr(engine, "cores", lambda: 1)
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    found = invoke("net", "try", "demo", "--out", "there", code=2)
    assert re.fullmatch(r"Error: .*one core\. Set JAX_NUM_CPU_DEVICES=2 before it starts\.\n", found.stderr)
    assert not found.stdout
    found = invoke("net", "run", "demo", str(tmp_path), "--out", "there", code=2)
    assert "one core" in found.stderr
    assert not (tmp_path / "there").exists()
