"""The HTML page: one file that holds everything it shows, on a phone, on dark paper, without a network."""

from __future__ import annotations

import base64
import functools
import gzip
import html
import json
import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

import numpy as np
from markdown_it import MarkdownIt
from plotly.offline import get_plotlyjs

from fedstrata.report.curves import Plot
from fedstrata.report.interactive import figure
from fedstrata.report.records import RunRecord
from fedstrata.report.specs import Claim, Definition
from fedstrata.report.statistics import name, show
from fedstrata.report.tables import (
    Table,
    build_table,
    cell_text,
    claim_text,
    deviation_text,
    ledger_table,
    mean_text,
)


@dataclass(frozen=True)
class Section:
    """A part of the page; left out where it has no body."""

    anchor: str
    title: str
    body: str


def render(
    definition: Definition, runs: Sequence[RunRecord], table: Table, plots: Mapping[str, tuple[Plot, bytes]]
) -> str:
    """The page.

    Args:
        definition: the content of `config.json`.
        runs: the runs.
        table: the headline table.
        plots: by the plot's name, its numbers and its static picture (SVG).
    """
    sections = [
        Section("findings", "What came out", markdown(definition.findings)),
        Section("solved", "What was solved", _definitions(definition.config)),
        Section("results", "Results", _results(runs, table)),
        Section("plots", "Plots", "".join(_figure(stem, *both) for stem, both in plots.items())),
        Section("paper", "What the paper printed", _paper(definition, runs)),
        Section("ledger", "What was communicated", _ledger(definition, runs)),
        Section("reproduce", "How to get this again", _reproduce(definition, runs)),
        Section(
            "notes",
            "Notes",
            f'<div class="notes">{markdown(definition.notes)}</div>' if definition.notes else "",
        ),
    ]
    shown = [section for section in sections if section.body]
    page = string.Template(_asset("page.html"))
    return page.substitute(
        title=_text(definition.title),
        summary=_text(_summary(definition, runs)),
        css=_asset("page.css"),
        early="<script>document.documentElement.classList.add('js')</script>" if plots else "",
        nav=" ".join(f'<a href="#{s.anchor}">{s.title}</a>' for s in shown),
        main="\n".join(f'<section id="{s.anchor}">\n<h2>{s.title}</h2>\n{s.body}\n</section>' for s in shown),
        scripts=_scripts() if plots else "",
    )


@functools.cache
def _asset(file: str) -> str:
    return resources.files("fedstrata.report").joinpath("assets", file).read_text("utf-8")


@functools.cache
def _scripts() -> str:
    # Compressed, plotly.js takes 2 MB of the page instead of 5; page.js unpacks it.
    packed = base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()
    return f'<script type="text/plain" id="plotly">{packed}</script>\n<script>\n{_asset("page.js")}</script>'


def _text(value: object) -> str:
    return html.escape(str(value))


def markdown(text: str) -> str:
    """Markdown as HTML: tags in it are shown, not obeyed; pictures, which would be fetched, become links."""
    reader = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
    return str(reader.render(text))


def _summary(definition: Definition, runs: Sequence[RunRecord]) -> str:
    methods, seeds = {run.method for run in runs}, {run.seed for run in runs}
    parts = [_count(len(runs), "run"), _count(len(methods), "method"), _count(len(seeds), "seed")]
    parts.append(f"{duration(sum(run.seconds for run in runs))} of computing")
    return " · ".join([*parts, *filter(None, [definition.written[:10]])])


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' * (n != 1)}"


def duration(seconds: float) -> str:
    """Seconds, minutes or hours.

    >>> duration(0.1234), duration(75), duration(4000)
    ('0.123 s', '1 min 15 s', '1 h 7 min')
    """
    if not math.isfinite(seconds):
        return "unknown time"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {round(seconds / 60) % 60} min"


def _definitions(config: Mapping[str, Any]) -> str:
    if not config:
        return ""
    items = (
        f"<dt>{_text(key.replace('_', ' '))}</dt><dd>{_value(value)}</dd>" for key, value in config.items()
    )
    return f"<dl>{''.join(items)}</dl>"


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        pairs = (f"<li><span>{_text(key)}</span> {_value(inner)}</li>" for key, inner in value.items())
        return f'<ul class="pairs">{"".join(pairs)}</ul>' if value else "–"
    if isinstance(value, list | tuple):
        if any(isinstance(inner, Mapping | list | tuple) for inner in value):
            return "".join(f"<div>{_value(inner)}</div>" for inner in value)
        return ", ".join(_value(inner) for inner in value) or "–"
    return (
        _text(show(value)) if value is None or isinstance(value, bool | int | float | str) else _text(value)
    )


def _results(runs: Sequence[RunRecord], table: Table) -> str:
    single = all(len(cell.values) < 2 for row in table.rows for cell in row.cells)
    words = "One seed each." if single else "Mean ± standard error over the seeds."
    if any(table.best(j) for j in range(len(table.heads))):
        words += " A dot marks the best mean of a column."
    if any(head.claimed for head in table.heads):
        words += " Deviation is relative to what the paper printed."
    return _broken(runs) + _table(table, words)


def _broken(runs: Sequence[RunRecord]) -> str:
    """A warning about runs whose history is not finite."""
    found = [
        f"{run.label}{''.join(f', {name(k, v)}' for k, v in run.setting.items())}, seed {run.seed}: {series}"
        for run in runs
        for series, values in run.history.items()
        if not np.isfinite(values[-1])
    ]
    if not found:
        return ""
    listed = "; ".join(found[:8]) + (f"; and {len(found) - 8} more" if len(found) > 8 else "")
    return f'<p class="warning">Some runs ended with values that are not finite: {_text(listed)}.</p>'


def _table(table: Table, words: str) -> str:
    head, lines, bold = table.texts()
    keys = len(table.keys)
    kinds = ["key"] * keys + [""]
    for column in table.heads:
        kinds += [""] + ["paper", "paper"] * column.claimed
    top = "".join(
        f'<th scope="col" class="{kind}">{_text(t)}</th>' for t, kind in zip(head, kinds, strict=True)
    )
    rows = []
    for line, mark in zip(lines, bold, strict=True):
        cells = [f'<th scope="row" class="key">{_text(text)}</th>' for text in line[:keys]]
        for text, kind, best in zip(line[keys:], kinds[keys:], mark[keys:], strict=True):
            cells.append(f'<td class="{"best" if best else kind}">{_text(text)}</td>')
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return _scroll(top, "".join(rows), words)


def _scroll(head: str, body: str, words: str = "") -> str:
    """A table that scrolls sideways on a narrow screen, and the words below it, which do not."""
    inside = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    note = f'<p class="note">{_text(words)}</p>' if words else ""
    return f'<div class="scroll" tabindex="0">{inside}</div>{note}'


def _figure(stem: str, plot: Plot, svg: bytes) -> str:
    picture = base64.b64encode(svg).decode()
    title = plot.spec.title or f"{plot.y_label} by {plot.x_label}"
    numbers = json.dumps(figure(plot), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    safe = numbers.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return (
        f"<figure><h3>{_text(title)}</h3>\n"
        f'<div class="plot" data-figure="figure-{stem}" data-name="{stem}">'
        f'<div class="drawn" role="img" aria-label="{_text(title)}"></div>'
        f'<img alt="{_text(title)}" src="data:image/svg+xml;base64,{picture}"></div>\n'
        f"<figcaption>{_text(plot.caption)}</figcaption>\n"
        f'<script type="application/json" id="figure-{stem}">{safe}</script></figure>\n'
    )


def _paper(definition: Definition, runs: Sequence[RunRecord]) -> str:
    paper = definition.paper
    if paper is None:
        return ""
    table = build_table(runs, replace(definition.table, paper=True), paper)
    parts = [f"<p>Source: {_text(paper.source)}.</p>"]
    if paper.claims:
        titles = ("where", "quantity", "paper", "here", "difference", "deviation")
        top = "".join(f'<th scope="col" class="{"text" * (t in titles[:2])}">{t}</th>' for t in titles)
        rows = "".join(_compare(claim, table) for claim in paper.claims)
        parts.append(_scroll(top, rows, "Deviation is relative to what the paper printed."))
    if paper.statements:
        top = "".join(f'<th scope="col" class="text">{t}</th>' for t in ("the paper says", "here", "verdict"))
        rows = "".join(
            f'<tr><td class="text">{_text(s.text)}</td><td class="text">{_text(s.found)}</td>'
            f'<td class="text"><span class="tag {s.verdict.replace(" ", "-")}">{s.verdict}</span></td></tr>'
            for s in paper.statements
        )
        parts.append(_scroll(top, rows))
    return "\n".join(parts)


def _compare(claim: Claim, table: Table) -> str:
    pairs = [
        (head.column, cell) for row in table.rows for head, cell in zip(table.heads, row.cells, strict=True)
    ]
    numbers = [f"{claim.value:g}", "not run", "–", "–"]
    for column, cell in pairs:
        if cell.claim == claim and cell.values:
            difference = mean_text(cell.mean - claim.value, math.nan, column.format)
            numbers = [
                claim_text(claim, column),
                cell_text(cell, column),
                difference,
                deviation_text(cell.deviation),
            ]
    where = ", ".join(name(key, value) for key, value in claim.where.items())
    words = f'<td class="text">{_text(where)}</td><td class="text">{_text(claim.column)}</td>'
    return f"<tr>{words}{''.join(f'<td>{_text(text)}</td>' for text in numbers)}</tr>"


def _ledger(definition: Definition, runs: Sequence[RunRecord]) -> str:
    spec = definition.table
    rows = [*spec.rows, *filter(None, [spec.across])]
    table, levels = ledger_table(runs, rows), ledger_table(runs, rows, by_level=True)
    words = (
        "Whole runs; mean ± standard error over the seeds where they differ. Up is from the clients to the "
        "server; an exchange is one message down and one up; a round is one averaging of the main variable."
    )
    apart = f"<h3>By level</h3>{_table(levels, '')}" if levels else ""
    return _table(table, words) + apart if table else ""


def _reproduce(definition: Definition, runs: Sequence[RunRecord]) -> str:
    times = [run.seconds for run in runs]
    facts: dict[str, Any] = {
        "seeds": ", ".join(map(str, sorted({run.seed for run in runs}))),
        "time": f"{duration(sum(times))} in all, {duration(min(times))} to {duration(max(times))} a run",
        "written": definition.written,
        "versions": definition.versions,
        "machine": definition.machine,
    }
    command = f"<pre><code>{_text(definition.command)}</code></pre>" if definition.command else ""
    return command + _definitions({key: value for key, value in facts.items() if value})
