"""The folder of a report: written as a whole or not at all, and read back to make its page again."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fedstrata.lab.report.curves import build_plot, undrawn
from fedstrata.lab.report.page import render
from fedstrata.lab.report.plots import draw, to_png, to_svg
from fedstrata.lab.report.records import ReportError, RunRecord, read_runs, write_history, write_runs
from fedstrata.lab.report.specs import Definition, PaperClaims, PlotSpec, Split, TableSpec
from fedstrata.lab.report.tables import Table, build_table
from fedstrata.support.threads import cores
from fedstrata.support.writing import beside

_PACKAGES = (
    "fedstrata", "jax", "jaxlib", "numpy", "scipy", "optax", "lineax", "nvflare", "matplotlib", "plotly",
)  # fmt: skip
_ADAPTER = TypeAdapter(Definition)


@dataclass(frozen=True)
class Report:
    """The content of a report's folder: its definition, its runs, and the table made of them."""

    definition: Definition
    runs: list[RunRecord]
    table: Table

    @property
    def left_out(self) -> list[str]:
        """The plots that none of the runs has a series for, each as a sentence."""
        return [why for spec in self.definition.plots if (why := undrawn(self.runs, spec))]


def write_report(
    folder: str | os.PathLike[str],
    title: str,
    runs: Sequence[RunRecord],
    *,
    config: Mapping[str, Any],
    table: TableSpec,
    plots: Sequence[PlotSpec] = (),
    paper: PaperClaims | None = None,
    findings: str = "",
    notes: str = "",
    split: Split | None = None,
    command: str = "",
) -> Path:
    """Write a report's folder.

    It holds `config.json`, `runs.csv` and `history.csv`, and what is made from them: `table.csv`, `table.md`,
    `plots/` and `report.html`. Everything is made in a temporary folder first, so that a failure leaves the
    folder as it was. A report that was there is replaced; other files in the folder stay.

    Args:
        folder: where; it is made if need be.
        title: the page's title.
        runs: the run records.
        config: what was solved; its keys (problem, data, settings, …) head the page. Anything that JSON can
            hold.
        table: the headline table.
        plots: the plots.
        paper: what the paper printed.
        findings: Markdown, what came out. Its first paragraph is the first thing on the page, above the first
            plot; where it is empty, a sentence is made of the table.
        notes: Markdown, at the end of the page.
        split: how the samples are distributed over the clients (`split_of`).
        command: the exact command that does all this again.

    Returns:
        The path of the page.

    Raises:
        ReportError: if the runs do not fit the table or the plots. A plot whose series no run has is left
            out, and the page says so.
    """
    versions, machine = environment()
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    definition = Definition(
        title=title, table=table, plots=tuple(plots), paper=paper, findings=findings, notes=notes,
        split=split, command=command, written=now, config=json.loads(_json(config)), versions=versions,
        machine=machine,
    )  # fmt: skip
    files = {"runs.csv": write_runs(runs).encode(), "history.csv": write_history(runs).encode()}
    sums = {file: hashlib.sha256(data).hexdigest() for file, data in files.items()}
    definition = replace(definition, sha256=sums)
    made = _derived(definition, runs)
    files |= {"config.json": (_json(_ADAPTER.dump_python(definition)) + "\n").encode()}
    return _put(Path(folder), files | made)


def load_report(folder: str | os.PathLike[str]) -> Report:
    """Read a report's folder.

    Raises:
        ReportError: if the folder, or a file in it, is missing, damaged or not this report's.
    """
    place = Path(folder)
    if not place.is_dir():
        raise ReportError(f"the folder {str(place)!r} does not exist")
    text = _read(place, "config.json")
    try:
        definition = _ADAPTER.validate_python(json.loads(text))
    except json.JSONDecodeError as error:
        raise ReportError(f"{place / 'config.json'} is not valid JSON: {error}") from error
    except RecursionError as error:
        raise ReportError(f"{place / 'config.json'} is nested too deeply to be read") from error
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(map(str, first["loc"])) or "the whole"
        raise ReportError(
            f"{place / 'config.json'} is not the definition of a report: {at}: {first['msg']}"
        ) from error
    data = {}
    for file in ("runs.csv", "history.csv"):
        data[file] = _read(place, file)
        if hashlib.sha256(data[file].encode()).hexdigest() != definition.sha256.get(file):
            raise ReportError(
                f"{place / file} is not what the report was written with (its checksum differs from the one "
                "in config.json): get the file back, or run the experiment again"
            )
    runs = read_runs(data["runs.csv"], data["history.csv"])
    return Report(definition, runs, build_table(runs, definition.table, definition.paper))


def rebuild(folder: str | os.PathLike[str]) -> Path:
    """Make a report's table, plots and page again from its `config.json`, `runs.csv` and `history.csv`.

    The table's and the plots' definitions and the notes can be changed in `config.json` beforehand.

    Returns:
        The path of the page.

    Raises:
        ReportError: if the folder cannot be read.
    """
    report = load_report(folder)
    return _put(Path(folder), _derived(report.definition, report.runs))


def _derived(definition: Definition, runs: Sequence[RunRecord]) -> dict[str, bytes]:
    """Every file that follows from the definition and the runs."""
    table = build_table(runs, definition.table, definition.paper)
    files = {"table.csv": table.to_csv().encode(), "table.md": table.to_markdown().encode()}
    drawn = {}
    for spec in definition.plots:
        if undrawn(runs, spec):
            continue  # the page names it
        plot = build_plot(runs, spec)
        picture = draw(plot)
        svg = to_svg(picture)
        files |= {f"plots/{spec.stem}.png": to_png(picture), f"plots/{spec.stem}.svg": svg}
        drawn[spec.stem] = (plot, svg)
    return files | {"report.html": render(definition, runs, table, drawn).encode()}


def environment() -> tuple[dict[str, str], dict[str, Any]]:
    """The versions of what computes, and the machine (without its name or its user's)."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    machine: dict[str, Any] = {
        "system": platform.platform(terse=True),
        "processor": _processor(),
        "cores": cores(),
    }
    if "jax" in sys.modules:  # nothing was solved without it
        devices = [device.device_kind for device in sys.modules["jax"].devices()]
        machine["devices"] = [f"{devices.count(kind)} × {kind}" for kind in dict.fromkeys(devices)]
    return versions, machine


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _json(value: object) -> str:
    def plain(other: Any) -> Any:
        if hasattr(other, "tolist"):
            return other.tolist()
        if isinstance(other, os.PathLike):
            return os.fspath(other)
        raise ReportError(f"config holds {other!r}, which JSON cannot hold; turn it into numbers and strings")

    return json.dumps(value, indent=1, ensure_ascii=False, default=plain)


def _read(place: Path, file: str) -> str:
    try:
        return (place / file).read_bytes().decode("utf-8")
    except FileNotFoundError as error:
        raise ReportError(
            f"{str(place)!r} has no {file}: it is not the folder of a report, or the report is incomplete"
        ) from error
    except UnicodeDecodeError as error:
        raise ReportError(f"{place / file} is damaged: {error}") from error


def _put(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Put files into a folder: all of them are on disk before the first takes its place."""
    if folder.exists() and not folder.is_dir():
        raise ReportError(f"{str(folder)!r} is a file, where the report's folder should be")
    # Inside a folder that is there: it may be a volume, whose files cannot be moved in from beside it.
    with beside(folder / "report" if folder.exists() else folder) as stage:
        for file, data in files.items():
            path = stage / file
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
        if not folder.exists():
            stage.rename(folder)
            return folder / "report.html"
        (folder / "plots").mkdir(exist_ok=True)
        for file in files:
            os.replace(stage / file, folder / file)
    for old in (folder / "plots").iterdir():
        if old.suffix in (".png", ".svg") and f"plots/{old.name}" not in files:
            old.unlink()
    return folder / "report.html"
