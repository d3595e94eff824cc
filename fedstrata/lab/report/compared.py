"""Several reports in one page: side by side where they show the same, and each by itself."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fedstrata.lab.report.curves import build_plot, undrawn
from fedstrata.lab.report.folder import Report, load_report
from fedstrata.lab.report.page import Plots, Section, article, figures, page, results, section, sentence
from fedstrata.lab.report.plots import draw, to_svg
from fedstrata.lab.report.records import ReportError, RunRecord
from fedstrata.lab.report.specs import PlotSpec
from fedstrata.lab.report.tables import build_table
from fedstrata.lab.report.typesetting import typeset
from fedstrata.support.writing import write_atomically


def compare(
    folders: Sequence[str | os.PathLike[str]], file: str | os.PathLike[str] = "compare.html", title: str = ""
) -> Path:
    """Write one page about several reports.

    Where their tables have columns in common, a table of all runs stands first, and where they have plots in
    common, these plots with the lines of all; a method's name then ends with the folder's. Below it, each
    report is there as a whole.

    Args:
        folders: of the reports, two or more.
        file: the page.
        title: of the page; made of the reports' where it is empty.

    Returns:
        The path of the page.

    Raises:
        ReportError: if a folder cannot be read, or there are fewer than two.
    """
    if len(folders) < 2:
        raise ReportError("a comparison needs two folders or more")
    places = [Path(folder) for folder in folders]
    if len({place.resolve() for place in places}) < len(places):
        raise ReportError("a folder is given twice; a report cannot be compared with itself")
    names = _names(places)
    reports = dict(zip(names, map(load_report, places), strict=True))
    shown = [Section("together", "Side by side", _together(reports))]
    parts = [_first(reports), *(section(part) for part in shown if part.body)]
    for k, (name, report) in enumerate(reports.items()):
        drawn = _drawn(report.definition.plots, report.runs)
        made = article(report.definition, report.runs, report.table, drawn, f"r{k}-", name)
        shown.append(Section(f"r{k}-report", name, made))
        parts.append(made)
    titles = dict.fromkeys(report.definition.title for report in reports.values())
    summary = f"{len(reports)} reports · {sum(len(report.runs) for report in reports.values())} runs"
    links = [part for part in shown if part.body]
    text = page(title or " / ".join(titles), summary, links, "".join(parts))
    target = Path(file)
    write_atomically(target, text.encode())
    return target


def _names(places: Sequence[Path]) -> list[str]:
    """The folders' names, with as much of their path as tells them apart."""
    parts = [place.resolve().parts for place in places]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(place) for place in places]


def _first(reports: dict[str, Report]) -> str:
    """A sentence about each."""
    items = "".join(
        f'<h3><a href="#r{k}-report">{typeset(name)}</a></h3>\n{sentence(report.definition, report.table)}'
        for k, (name, report) in enumerate(reports.items())
    )
    return f'<section id="top" class="lead each">{items}</section>\n'


def _together(reports: dict[str, Report]) -> str:
    """The common part of the reports: one table, and each plot once."""
    runs = [
        replace(run, label=f"{run.label} · {name}") for name, report in reports.items() for run in report.runs
    ]
    definitions = [report.definition for report in reports.values()]
    first = definitions[0]
    columns = tuple(c for c in first.table.columns if all(c in d.table.columns for d in definitions))
    keys = [key for d in definitions for key in (*d.table.rows, d.table.across) if key]
    rows = dict.fromkeys(["label", *(key for key in keys if key != "method")])
    table = ""
    if columns:
        spec = replace(first.table, columns=columns, rows=tuple(rows), across=None, paper=False)
        table = results(runs, build_table(runs, spec))
    common = [
        replace(
            plot, lines=tuple(dict.fromkeys(("label", *plot.lines))) if plot.panels != "label" else plot.lines
        )
        for plot in first.plots
        if plot.kind != "heatmap" and all(plot in d.plots for d in definitions)
    ]
    return table + figures(_drawn(common, runs), "all-")


def _drawn(specs: Sequence[PlotSpec], runs: Sequence[RunRecord]) -> Plots:
    plots = {spec.stem: build_plot(runs, spec) for spec in specs if not undrawn(runs, spec)}
    return {stem: (plot, to_svg(draw(plot))) for stem, plot in plots.items()}
