"""The documentation builds without a warning, and what it shows is what runs."""

import inspect
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import minimize, minimize_scalar

import fedstrata as fs
from docs.build import build
from fedstrata.engines import ENGINES

ROOT = Path(__file__).parents[1]
METHODS = fs.METHODS
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The documentation as plain Markdown."""
    folder = tmp_path_factory.mktemp("built")
    build(folder)
    return folder


@pytest.mark.slow
def test_pages_are_plain_markdown(built):
    """Every name has its page, tables lead there, formulas are MathML, and nothing is left to be put in."""
    pages = {
        path.relative_to(built / "docs").as_posix(): path.read_text("utf-8") for path in built.rglob("*.md")
    }
    for name in fs.__all__:
        assert pages[f"api/{name}.md"].startswith(f"# fs.{name}\n")
    for name, cls in METHODS.items():
        if cls.__module__.startswith("fedstrata."):
            assert f"](../api/{name}.md)" in pages["methods/index.md"]
    for path in (ROOT / "docs" / "tutorials").glob("*.py"):
        page = pages[f"tutorials/{path.stem}.md"]
        assert "<math" in page
        assert "$$" not in page
        assert (
            json.loads((built / "docs/tutorials" / f"{path.stem}.ipynb").read_text("utf-8"))["nbformat"] == 4
        )
        pictures = re.findall(r"!\[.*?\]\((.+?)\)", page)
        assert pictures
        assert all((built / "docs/tutorials" / picture).is_file() for picture in pictures)
    left = re.compile(r"^--8<--|^:::|<!-- (names|rest|methods|reveals|history)", re.MULTILINE)
    assert [page for page, text in pages.items() if left.search(text)] == []


@pytest.mark.slow
def test_site_builds_without_warnings(built):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(built / "mkdocs.yml")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    # Nothing is fetched when a page is opened, and there are few enough tabs to read.
    fetched = re.compile(r'<(?:script|img)[^>]+src="https?:|<link[^>]+rel="stylesheet"[^>]+href="https?:')
    pages = {path: path.read_text("utf-8") for path in (built / "site").rglob("*.html")}
    assert [path for path, page in pages.items() if fetched.search(page)] == []
    assert pages[built / "site" / "index.html"].count('class="md-tabs__item') <= 7


def test_every_method_is_advised_about():
    page = (ROOT / "docs" / "methods" / "index.md").read_text(encoding="utf-8")
    advised = set(re.findall(r"\w+", " ".join(re.findall(r"^\|[^|]*\|([^|]*)\|", page, re.MULTILINE))))
    assert {name for name, cls in METHODS.items() if cls.__module__.startswith("fedstrata.")} <= advised


def test_every_argument_of_a_method_is_documented():
    for name, cls in METHODS.items():
        own = [one.__doc__ for one in cls.__mro__ if one.__doc__ and "hyperparameters" in vars(one)]
        words = "\n".join(inspect.cleandoc(text) for text in own)  # Python 3.13 does this itself
        described = set(re.findall(r"\w+", " ".join(re.findall(r"^ {4}([\w, ]+):", words, re.MULTILINE))))
        assert set(cls.hyperparameters) <= described, name


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", (ROOT / page).read_text(encoding="utf-8"))
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_paper_cites_what_its_bibliography_has():
    cited = set(re.findall(r"@(\w+)", (ROOT / "paper.md").read_text("utf-8").split("# Summary")[1]))
    assert cited == set(re.findall(r"^@\w+\{(\w+),", (ROOT / "paper.bib").read_text("utf-8"), re.MULTILINE))


@pytest.mark.parametrize(("example", "most"), [("quickstart", 11), ("csv_to_fair_model", 12)])
def test_readme_shows_examples_that_are_short(example, most):
    code = (ROOT / "examples" / f"{example}.py").read_text(encoding="utf-8")
    assert f"```python\n{code}```" in README
    assert len(list(filter(None, code.splitlines()))) <= most


@pytest.mark.slow
def test_readme_shows_the_example_that_runs(capsys):
    """And whose answer is the one of an exact solver under a scalar search."""
    example = ROOT / "examples" / "quickstart.py"
    result = runpy.run_path(str(example))["result"]
    last = capsys.readouterr().out.splitlines()[-1]  # a bar may stand above it
    printed = re.findall(r"-?\d+\.\d+", last)
    assert f"It prints −{printed[0][1:]} and {printed[1]}" in README

    data = fs.data.heart(valid_fraction=0.2)

    def part(samples, sizes):
        return np.asarray(samples["x"], float), samples["y"], np.repeat(1 / (len(sizes) * sizes), sizes)

    def loss(w, x, y, shares, ridge):
        scores = x @ w
        slope = x.T @ (shares * (1 / (1 + np.exp(-scores)) - y)) + ridge * w
        return shares @ (np.logaddexp(0, scores) - y * scores) + 0.5 * ridge * w @ w, slope

    train, valid = part(data.train, data.sizes), part(data.valid, data.valid_sizes)

    def upper(log_ridge):
        options = {"ftol": 1e-15, "gtol": 1e-9, "maxiter": 1000}
        w = minimize(loss, np.zeros(22), (*train, np.exp(log_ridge)), "L-BFGS-B", jac=True, options=options).x
        return loss(w, *valid, 0.0)[0]

    exact = minimize_scalar(upper, bounds=(-8, 2), method="bounded")
    assert abs(result.x - exact.x) < 5e-3  # what two printed digits say
    assert abs(result.history["upper"][-1] - exact.fun) < 5e-4


def test_readme_names_the_methods_and_engines_that_there_are():
    section = README.split("[start:methods]")[1].split("[end:methods]")[0]
    table, unwritten = section.split("Being written:") if "Being written:" in section else (section, "")
    rows = [line.split("|")[2] for line in table.splitlines() if line.startswith("|")][2:]
    claimed = {name for row in rows for name in re.findall(r"\w+", row)}
    assert set(METHODS) <= claimed
    assert claimed - set(re.findall(r"\w+", unwritten)) <= set(METHODS)

    engines = README.split("## Engines")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", engines, re.MULTILINE)) == set(ENGINES)
