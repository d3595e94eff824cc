"""Tutorials: Python files in cells (``# %%``), their recorded outputs, and notebooks made of both.

The files run as they are (`python docs/tutorials/bilevel.py`), open as notebooks in editors that know the
percent format, and are run by the tests. What a page shows is recorded by

    python -m docs.record [NAME …]

in ``docs/tutorials/outputs/``, so that building the site runs nothing. A test says where a recording is older
than its code.
"""

import contextlib
import hashlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent / "tutorials"
OUTPUTS = FOLDER / "outputs"
INK = "#010203"  # drawn in the colour of the page's text, light or dark
STYLE = {
    **dict.fromkeys(["text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"], INK),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.grid": True,
    "grid.color": "#80808040",
    "legend.frameon": False,
    "figure.figsize": (7.0, 3.0),
    "figure.constrained_layout.use": True,
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
}
_BAR = re.compile("rounds .*━")  # of a run that took longer than two seconds


class Cell(NamedTuple):
    """One cell: Markdown or code."""

    kind: str
    text: str


def cells(source: str) -> list[Cell]:
    """The cells of a file in the percent format."""
    found = []
    for part in re.split(r"^# %%", source, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        if head.strip() == "[markdown]":
            body = re.sub(r"^# ?", "", body, flags=re.MULTILINE)
        elif head.strip():
            raise ValueError(f"A cell begins with '# %%' or '# %% [markdown]', not with '# %%{head}'.")
        found.append(Cell("markdown" if head.strip() else "code", body.strip("\n")))
    return found


def fingerprint(source: str) -> str:
    """Of the code alone: words may change without another run."""
    return hashlib.sha256("\n".join(c.text for c in cells(source) if c.kind == "code").encode()).hexdigest()


def names() -> list[str]:
    """The tutorials, in the order of their names."""
    return sorted(path.stem for path in FOLDER.glob("*.py"))


def read(name: str) -> str:
    """A tutorial's source."""
    return (FOLDER / f"{name}.py").read_text("utf-8")


def recorded(name: str) -> dict[str, Any]:
    """``code``, the fingerprint, and ``outputs``: for each code cell its ``text`` and its ``pictures``."""
    return json.loads((OUTPUTS / f"{name}.json").read_text("utf-8"))


def record(name: str) -> None:
    """Run a tutorial and keep what its cells print and draw."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    mpl.rcParams.update({**STYLE, "svg.hashsalt": name})
    source, outputs, space = read(name), [], {"__name__": "__main__"}
    drawn: dict[str, str] = {}
    for cell in cells(source):
        if cell.kind == "markdown":
            continue
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(cell.text, f"{name}.py", "exec"), space)
        pictures = []
        for number in plt.get_fignums():
            pictures.append(f"{name}-{len(drawn) + 1}.svg")
            drawn[pictures[-1]] = svg(plt.figure(number), pictures[-1].removesuffix(".svg"))
        plt.close("all")
        lines = [line for line in printed.getvalue().splitlines() if not _BAR.match(line)]
        outputs.append({"text": "\n".join(lines), "pictures": pictures})
    OUTPUTS.mkdir(exist_ok=True)
    for old in OUTPUTS.glob(f"{name}-[0-9].svg"):
        old.unlink()
    for picture, text in drawn.items():
        (OUTPUTS / picture).write_text(text, "utf-8")
    kept = json.dumps({"code": fingerprint(source), "outputs": outputs}, indent=1, ensure_ascii=False)
    (OUTPUTS / f"{name}.json").write_text(f"{kept}\n", "utf-8")


def svg(figure: Any, prefix: str) -> str:
    """A figure as an element for a page: the text's colour, ids of its own, a label in words."""
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    drawn = file.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", drawn, flags=re.DOTALL)
    drawn = re.sub(r'\b(id="|url\(#|href="#)', rf"\g<1>{prefix}-", drawn).replace(INK, "currentColor")
    label = "; ".join(axes.get_title("left") or axes.get_ylabel() for axes in figure.axes)
    drawn = re.sub(
        r'^<svg ([^>]*?)width="[^"]*" height="[^"]*"', rf'<svg role="img" aria-label="{label}" \1', drawn
    )
    return "\n".join(line.rstrip() for line in drawn.splitlines() if line.strip()) + "\n"


def notebook(name: str) -> str:
    """A tutorial as a Jupyter notebook (nbformat 4.5)."""
    outputs = iter(recorded(name)["outputs"])
    found: list[dict[str, Any]] = []
    for number, cell in enumerate(cells(read(name))):
        entry: dict[str, Any] = {"cell_type": cell.kind, "id": f"{name}-{number}", "metadata": {}}
        entry["source"] = cell.text
        if cell.kind == "code":
            output = next(outputs)
            shown: list[dict[str, Any]] = []
            if output["text"]:
                shown.append({"output_type": "stream", "name": "stdout", "text": f"{output['text']}\n"})
            for picture in output["pictures"]:
                image = {"image/svg+xml": (OUTPUTS / picture).read_text("utf-8")}
                shown.append({"output_type": "display_data", "data": image, "metadata": {}})
            entry |= {"execution_count": None, "outputs": shown}
        found.append(entry)
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return json.dumps(
        {"cells": found, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}, ensure_ascii=False
    )


def as_file(picture: Path) -> str:
    """A recorded picture as a file of its own, whose ink follows the reader's theme."""
    ink = "svg{color:#1f2328}@media (prefers-color-scheme:dark){svg{color:#e4e7eb}}"
    return re.sub(r"<svg [^>]*>", rf"\g<0><style>{ink}</style>", picture.read_text("utf-8"), count=1)


if __name__ == "__main__":
    for chosen in sys.argv[1:] or names():
        record(chosen)
