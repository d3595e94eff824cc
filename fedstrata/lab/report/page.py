"""The HTML page: one file that holds everything it shows, on a phone, on dark paper, without a network."""

from __future__ import annotations

import base64
import functools
import gzip
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

from fedstrata.lab.report.clients import by_client
from fedstrata.lab.report.curves import Plot, build_plot
from fedstrata.lab.report.headline import certified, headline
from fedstrata.lab.report.interactive import figure
from fedstrata.lab.report.plots import draw, to_svg
from fedstrata.lab.report.records import MEASURED_ON, RunRecord
from fedstrata.lab.report.specs import Claim, Definition
from fedstrata.lab.report.split import plot_of
from fedstrata.lab.report.statistics import name, show
from fedstrata.lab.report.tables import Table, build_table, ledger_table
from fedstrata.lab.report.typesetting import capital, formula, label_of, readable, typeset
from fedstrata.support.html import text as _text


@dataclass(frozen=True)
class Section:
    """A part of the page; left out where it has no body."""

    anchor: str
    title: str
    body: str


Plots = Mapping[str, tuple[Plot, bytes]]
DEVIATION = "Deviation is relative to what the paper printed."


def render(definition: Definition, runs: Sequence[RunRecord], table: Table, plots: Plots) -> str:
    """The page of a report, as HTML.

    Args:
        definition: the content of `config.json`.
        runs: the runs.
        table: the headline table.
        plots: by the plot's name, its numbers and its static picture (SVG).
    """
    shown = sections(definition, runs, table, plots)
    body = lead(definition, table, plots) + "".join(map(section, shown))
    return page(definition.title, _summary(definition, runs), shown, body)


def page(title: str, summary: str, shown: Sequence[Section], body: str) -> str:
    """A whole page around its body."""
    return string.Template(_asset("page.html")).substitute(
        title=_text(title),
        summary=_text(summary),
        css=_asset("page.css"),
        nav=" ".join(f'<a href="#{s.anchor}">{_text(s.title)}</a>' for s in shown),
        main=body,
        plotly=_plotly() if 'class="plot"' in body else "",
        script=_asset("page.js"),
    )


def lead(definition: Definition, table: Table, plots: Plots, prefix: str = "") -> str:
    """The top of the page: a sentence and the main plot."""
    main = figures(dict(list(plots.items())[:1]), prefix)
    return f'<section id="{prefix}top" class="lead">\n{sentence(definition, table)}\n{main}</section>\n'


def sentence(definition: Definition, table: Table) -> str:
    """The first paragraph of the findings, or what the table says."""
    first = definition.findings.strip().partition("\n\n")[0]
    said = markdown(first) if first else f"<p>{typeset(headline(table))}</p>"
    return said + (f"<p>{typeset(judged)}</p>" if (judged := certified(table)) else "")


def sections(
    definition: Definition, runs: Sequence[RunRecord], table: Table, plots: Plots, prefix: str = ""
) -> list[Section]:
    """The sections that follow."""
    rest = definition.findings.strip().partition("\n\n")[2]
    others = figures(dict(list(plots.items())[1:]), prefix) + _left_out(definition, plots)
    notes = f'<div class="notes">{markdown(definition.notes)}</div>' if definition.notes else ""
    made = [
        Section("findings", "Findings", f'<div class="prose">{markdown(rest)}</div>' if rest else ""),
        Section("results", "Results", results(runs, table)),
        Section("plots", "More plots", others),
        Section("clients", "Results by client", _clients(definition, runs, prefix)),
        Section("solved", "Problem and settings", _definitions(definition.config)),
        Section("split", "Samples of each client", _split(definition, prefix)),
        Section("paper", "Comparison with the paper", _paper(definition, runs)),
        Section("ledger", "Communication", _ledger(definition, runs)),
        Section("reproduce", "How to reproduce this", _reproduce(definition, runs)),
        Section("notes", "Notes", notes),
    ]
    return [replace(section, anchor=prefix + section.anchor) for section in made if section.body]


def _split(definition: Definition, prefix: str) -> str:
    if definition.split is None:
        return ""
    plot = plot_of(definition.split)
    return figures({"split": (plot, to_svg(draw(plot)))}, prefix)


def _left_out(definition: Definition, plots: Plots) -> str:
    """The plots whose series no run has."""
    missing = [spec for spec in definition.plots if spec.stem not in plots]
    said = "; ".join(f"{label_of(spec.y)} by {label_of(spec.x)}" for spec in missing)
    return f"<p>Not drawn, because no run has the series: {typeset(said)}.</p>" if missing else ""


def section(part: Section) -> str:
    """A part with its heading."""
    return f'<section id="{part.anchor}">\n<h2>{_text(part.title)}</h2>\n{part.body}\n</section>\n'


def article(
    definition: Definition, runs: Sequence[RunRecord], table: Table, plots: Plots, prefix: str, name: str
) -> str:
    """A whole report on a page of several."""
    parts = sections(definition, runs, table, plots, prefix)
    about = f"{definition.title} · {_summary(definition, runs)}"
    inside = lead(definition, table, plots, prefix) + "".join(map(section, parts))
    return (
        f'<article id="{prefix}report" class="report"><h2>{_text(name)}</h2>'
        f'<p class="summary">{_text(about)}</p>\n{inside}</article>\n'
    )


def figures(plots: Plots, prefix: str = "") -> str:
    """Plots below each other."""
    return "".join(_figure(stem, *both, prefix) for stem, both in plots.items())


@functools.cache
def _asset(file: str) -> str:
    return resources.files("fedstrata.lab.report").joinpath("assets", file).read_text("utf-8")


@functools.cache
def _plotly() -> str:
    # Compressed, plotly.js takes 2 MB of the page instead of 5; page.js unpacks it.
    packed = base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()
    return f'<script type="text/plain" id="plotly">{packed}</script>'


def markdown(text: str) -> str:
    """Markdown as HTML: tags in it are shown, not obeyed; pictures, which would be fetched, become links."""
    reader = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
    return str(reader.render(text))


def _summary(definition: Definition, runs: Sequence[RunRecord]) -> str:
    methods, seeds = {run.label for run in runs}, {run.seed for run in runs}
    parts = [_count(len(runs), "run"), _count(len(methods), "method"), _count(len(seeds), "seed")]
    sampled = sorted({f"metrics on {run.setting[MEASURED_ON]}" for run in runs if MEASURED_ON in run.setting})
    return " · ".join([*parts, *filter(None, [definition.written[:10]]), *sampled])


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
        f"<dt>{_text(readable(key))}</dt>"
        f"<dd>{formula(value) if key == 'problem' and type(value) is str else _value(value)}</dd>"
        for key, value in config.items()
    )
    return f"<dl>{''.join(items)}</dl>"


def _value(value: object) -> str:
    match value:
        case Mapping():
            pairs = (
                f"<li><span>{typeset(readable(k))}</span> {_value(inner)}</li>" for k, inner in value.items()
            )
            return f'<ul class="pairs">{"".join(pairs)}</ul>' if value else "–"
        case list() | tuple() if any(type(inner) in (dict, list, tuple) for inner in value):
            return "".join(f"<div>{_value(inner)}</div>" for inner in value)
        case list() | tuple():
            return ", ".join(_value(inner) for inner in value) or "–"
        case None | bool() | int() | float() | str():
            return _text(show(value))
    return _text(value)


def results(runs: Sequence[RunRecord], table: Table) -> str:
    """The headline table, and which runs diverged."""
    single = all(len(cell.values) < 2 for row in table.rows for cell in row.cells)
    said = (
        "One seed each, so nothing is marked as best." if single else "Mean ± standard error over the seeds."
    )
    if not single and any(head.column.better for head in table.heads):
        marked = any(table.best(j) for j in range(len(table.heads)))
        said += (
            " A dot marks what is better than every rival in a paired t-test over the seeds (two-sided, 5 %)."
            if marked
            else " Nothing is better than every rival in a paired t-test over the seeds (two-sided, 5 %)."
        )
    if any(head.claimed for head in table.heads):
        said += f" {DEVIATION}"
    return _broken(runs) + _table(table, said, "results") + _advice(runs)


def _clients(definition: Definition, runs: Sequence[RunRecord], prefix: str) -> str:
    spec = definition.table
    parts = []
    for found in by_client(runs, [*spec.rows, *filter(None, [spec.across])]):
        plots = {plot.stem: build_plot(runs, plot) for plot in found.plots}
        drawn = {stem: (plot, to_svg(draw(plot))) for stem, plot in plots.items()}
        said = f"{capital(readable(found.metric))} at the end of the runs, over the clients; "
        table = _table(found.table, said + "mean ± standard error over the seeds.", found.plots[-1].stem)
        parts.append(figures(drawn, prefix) + table)
    return "".join(parts)


def _advice(runs: Sequence[RunRecord]) -> str:
    """The advice for runs that are known not to be solved."""
    found: dict[str, list[str]] = {}
    for run in runs:
        if advice := run.certificate.get("advice"):
            found.setdefault(f"{run.verdict}: {advice}", []).append(_who(run))
    if not found:
        return ""
    items = "".join(
        f"<li>{typeset(_some(who))}: {typeset(advice)}</li>" for advice, who in list(found.items())[:20]
    )
    return f"<details><summary>What to change in runs that are not solved</summary><ul>{items}</ul></details>"


def _who(run: RunRecord) -> str:
    return f"{run.label}{''.join(f', {name(k, v)}' for k, v in run.setting.items())}, seed {run.seed}"


def _some(words: Sequence[str]) -> str:
    return "; ".join(words[:8]) + (f"; and {len(words) - 8} more" if len(words) > 8 else "")


def _broken(runs: Sequence[RunRecord]) -> str:
    """A warning about runs whose history is not finite."""
    found = [
        f"{_who(run)}: {series}"
        for run in runs
        for series, values in run.history.items()
        if not np.isfinite(values[-1])
    ]
    if not found:
        return ""
    return f'<p class="warning">Some runs ended with values that are not finite: {_text(_some(found))}.</p>'


def _table(table: Table, said: str, file: str) -> str:
    head, lines, bold = table.texts()
    keys = len(table.keys)
    kinds = ["key"] * keys + [""]
    for column in table.heads:
        kinds += [""] + ["paper", "paper"] * column.claimed
    kinds += ["text"] * table.certified
    top = "".join(_head(text, kind) for text, kind in zip(head, kinds, strict=True))
    rows = []
    for row, line, mark in zip(table.rows, lines, bold, strict=True):
        cells = [f'<th scope="row" class="key">{typeset(text)}</th>' for text in line[:keys]]
        numbers = [math.nan]
        for column, cell in zip(table.heads, row.cells, strict=True):
            claim = cell.claim.value if cell.claim else math.nan
            numbers += [cell.mean, *([claim, cell.deviation] if column.claimed else [])]
        numbers += [math.nan] * table.certified
        for text, number, kind, best in zip(line[keys:], numbers, kinds[keys:], mark[keys:], strict=True):
            value = f' data-value="{number!r}"' if math.isfinite(number) else ""
            cells.append(f'<td class="{"best" if best else kind}"{value}>{_text(text)}</td>')
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return _scroll(top, "".join(rows), said, file, table.to_csv())


def _head(text: str, kind: str = "") -> str:
    return f'<th scope="col" class="{kind}"><button type="button">{typeset(text)}</button></th>'


def _scroll(head: str, body: str, said: str = "", file: str = "table", exact: str = "") -> str:
    """A table that can be sorted and taken away; on a narrow screen it scrolls sideways.

    Args:
        head: its headings.
        body: its rows.
        said: below it.
        file: what it is called when it is saved.
        exact: the CSV file with all digits; where it is empty, the page makes one of what the cells show.
    """
    inside = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    note = f'<p class="note">{_text(said)}</p>' if said else ""
    tools = (
        '<div class="tools"><button type="button" data-do="copy">Copy</button>'
        '<button type="button" data-do="csv">CSV</button></div>'
    )
    csv = f'<script type="text/csv">{_json(exact)}</script>' if exact else ""
    return (
        f'<div class="table" data-name="{file}">{tools}<div class="scroll" tabindex="0">{inside}</div>'
        f"{note}{csv}</div>"
    )


def _json(value: object) -> str:
    """JSON that can stand inside a script element."""
    made = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return made.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _figure(stem: str, plot: Plot, svg: bytes, prefix: str = "") -> str:
    picture = base64.b64encode(svg).decode()
    title = _text(plot.title)
    return (
        f"<figure><h3>{typeset(plot.title)}</h3>\n"
        f'<div class="plot" data-figure="figure-{prefix}{stem}" data-name="{stem}"><div class="axes"></div>'
        f'<div class="drawn" role="img" aria-label="{title}"></div>'
        f'<img alt="{title}" src="data:image/svg+xml;base64,{picture}"><div class="legend"></div></div>\n'
        f"<figcaption>{typeset(plot.caption)}</figcaption>\n"
        f'<script type="application/json" id="figure-{prefix}{stem}">{_json(figure(plot))}</script>'
        "</figure>\n"
    )


def _paper(definition: Definition, runs: Sequence[RunRecord]) -> str:
    """The paper's statements; its numbers are in the table of results, or here if that has none."""
    paper = definition.paper
    if paper is None:
        return ""
    table = build_table(runs, replace(definition.table, paper=True), paper)
    parts = [f"<p>Source: {_text(paper.source)}.</p>"]
    if paper.claims and not definition.table.paper:
        parts.append(_table(table, DEVIATION, "paper"))
    shown = [cell.claim for row in table.rows for cell in row.cells if cell.claim and cell.values]
    if rest := [claim for claim in paper.claims if claim not in shown]:
        said = f"{_count(len(rest), 'printed number')} {'was' if len(rest) == 1 else 'were'} not run here"
        rows = "".join(f"<tr>{_where(c)}<td>{c.value:g}</td></tr>" for c in rest)
        body = _scroll(_head("where", "text") + _head("quantity", "text") + _head("paper"), rows)
        parts.append(f"<details><summary>{said}</summary>{body}</details>")
    if paper.statements:
        top = "".join(_head(t, "text") for t in ("the paper says", "here", "verdict"))
        rows = "".join(
            f'<tr><td class="text">{_text(s.text)}</td><td class="text">{_text(s.found)}</td>'
            f'<td class="text"><span class="tag {s.verdict.replace(" ", "-")}">{s.verdict}</span></td></tr>'
            for s in paper.statements
        )
        parts.append(_scroll(top, rows))
    return "\n".join(parts)


def _where(claim: Claim) -> str:
    where = ", ".join(name(key, value) for key, value in claim.where.items())
    return f'<td class="text">{typeset(where)}</td><td class="text">{typeset(readable(claim.column))}</td>'


def _ledger(definition: Definition, runs: Sequence[RunRecord]) -> str:
    spec = definition.table
    rows = [*spec.rows, *filter(None, [spec.across])]
    table, levels = ledger_table(runs, rows), ledger_table(runs, rows, by_level=True)
    said = (
        "Whole runs; mean ± standard error over the seeds where they differ. Up is from the clients to the "
        "server; an exchange is one message down and one up; a round is one averaging of the main variable."
    )
    apart = f"<details><summary>By level</summary>{_table(levels, '', 'levels')}</details>" if levels else ""
    return _table(table, said, "communicated") + apart if table else ""


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
