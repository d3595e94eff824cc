"""Tutorials: they run, and their pages show what they print and draw."""

import re
import runpy
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from docs import record as tutorials
from docs.build import tutorial_page

ROOT = Path(__file__).parents[1]

CLASSES = {
    "bilevel": "Bilevel",
    "minimax": "Minimax",
    "mpec": "MPEC",
    "selection": "Selection",
    "personalised": "Personalized",
    "composition": "Composition",
    "robust": "dro",
    "multi-sequence": "MultiSequence",
    "minimisation": "Minimization",
}


def test_there_is_one_for_each_problem_class():
    assert set(CLASSES) <= set(tutorials.names())
    for name, used in CLASSES.items():
        assert f"fs.{used}" in tutorials.read(name)


@pytest.mark.parametrize("name", tutorials.names())
def test_the_page_shows_this_code(name):
    source = tutorials.read(name)
    compile(source, f"{name}.py", "exec")
    record = tutorials.recorded(name)
    again = f"The code of {name} was changed since: python -m docs.record {name}"
    assert record["code"] == tutorials.fingerprint(source), again
    assert any(output["pictures"] for output in record["outputs"])
    page = tutorial_page(name)
    assert page.startswith("# ")
    assert "$$" in page
    assert "## When not to use this" in page
    assert all(cell.text in page for cell in tutorials.cells(source))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # shown to who runs it
@pytest.mark.parametrize("name", tutorials.names())
def test_it_runs_and_its_claims_hold(name, capsys):
    runpy.run_path(str(ROOT / "docs" / "tutorials" / f"{name}.py"), run_name="__main__")
    assert capsys.readouterr().out
    plt.close("all")


HOWTOS = sorted(path.stem for path in (ROOT / "docs" / "howto").glob("*.md"))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", [name for name in HOWTOS if name not in ("index", "own-method")])
def test_the_code_of_a_how_to_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "howto" / f"{name}.md").read_text("utf-8")
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    exec(compile(code, f"{name}.md", "exec"), {"__name__": "__main__"})


def test_cells_are_read_as_editors_read_them():
    source = "# %% [markdown]\n# # Title\n#\n# words\n\n# %%\nx = 1\n\n# a comment\n"
    assert tutorials.cells(source) == [("markdown", "# Title\n\nwords"), ("code", "x = 1\n\n# a comment")]
    with pytest.raises(ValueError, match="begins with"):
        tutorials.cells("# %% [raw]\nx")
