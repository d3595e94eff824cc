"""Tables of means and standard errors over seeds, beside what a paper printed, in four formats."""

from __future__ import annotations

import io
import math
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import rich.table
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.text import Text

from fedstrata.lab.report.records import ReportError, RunRecord, Scalar, as_dict, to_csv, union
from fedstrata.lab.report.specs import Claim, Column, PaperClaims, TableSpec
from fedstrata.lab.report.statistics import check_keys, group, mean_error, number, paired_p, show
from fedstrata.lab.report.typesetting import readable
from fedstrata.support import html

if TYPE_CHECKING:
    from fedstrata.core.counting import Ledger

CHANCE = 0.05  # the level of the tests that decide what is best


@dataclass(frozen=True)
class Cell:
    """A number over seeds, and what the paper printed for it."""

    values: tuple[float, ...]
    claim: Claim | None = None
    seeds: tuple[int, ...] = ()

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return mean_error(self.values)[0]

    @property
    def error(self) -> float:
        """The standard error of the mean; NaN for a single seed."""
        return mean_error(self.values)[1]

    @property
    def by_seed(self) -> dict[int, float]:
        """The values by their seeds."""
        return dict(zip(self.seeds, self.values, strict=True))

    @property
    def deviation(self) -> float:
        """(mean − printed) / |printed|; NaN without a claim, or where zero was printed."""
        if self.claim is None or self.claim.value == 0 or not self.values:
            return math.nan
        return (self.mean - self.claim.value) / abs(self.claim.value)


@dataclass(frozen=True)
class Head:
    """A column of the finished table: what it shows, for which value of ``across``, with claims or not."""

    column: Column
    across: Scalar
    title: str
    claimed: bool


@dataclass(frozen=True)
class Row:
    """A row of the finished table."""

    values: tuple[Scalar, ...]
    seeds: str
    cells: tuple[Cell, ...]
    verdicts: tuple[str, ...] = ()

    @property
    def certificate(self) -> str:
        """The verdicts of its runs: one for all, or how many have which."""
        counts = Counter(verdict or "not certified" for verdict in self.verdicts)
        if len(counts) == 1:
            return next(iter(self.verdicts)) or "–"
        return ", ".join(f"{number} {verdict}" for verdict, number in counts.most_common())


@dataclass(frozen=True)
class Table:
    """A finished table.

    Args:
        keys: what tells its rows apart.
        heads: its columns.
        rows: its rows.
    """

    keys: tuple[str, ...]
    heads: tuple[Head, ...]
    rows: tuple[Row, ...]

    @property
    def certified(self) -> bool:
        """Whether any of its runs has a certificate: its verdict is then the last column."""
        return any(map(any, (row.verdicts for row in self.rows)))

    def rivals(self) -> list[list[int]]:
        """The rows that compete: methods within a setting; a table of settings alone is one competition.

        A row without one of the settings' keys, as a reference often is, competes in every setting that it
        fits.
        """
        names = {"label", "method"} & set(self.keys)
        settings = [
            tuple(v for key, v in zip(self.keys, row.values, strict=True) if names and key not in names)
            for row in self.rows
        ]
        whole = dict.fromkeys(setting for setting in settings if None not in setting)
        found: dict[tuple[Scalar, ...], list[int]] = {}
        for i, setting in enumerate(settings):
            fits = [w for w in whole if all(v in (None, o) for v, o in zip(setting, w, strict=True))]
            for place in fits or [setting]:
                found.setdefault(place, []).append(i)
        return list(found.values())

    def best(self, j: int) -> set[int]:
        """The rows that are best in column ``j``, setting by setting, beyond the error.

        A row is best where a paired t-test over the seeds finds it better than each of its rivals
        (two-sided, level 5 %; a claim about all rivals needs no correction, as each must be beaten). With one
        seed nothing is. A rival that has no finite number in any seed is beaten; one that lacks some forbids
        the mark. A row that competes in several settings must be best in all of them.
        """
        column = self.heads[j].column
        if not column.better:
            return set()
        sign = 1 if column.better == "low" or column.reduce == "reach" else -1
        ahead = [(rows, self._ahead(j, sign, rows)) for rows in self.rivals()]
        return {
            i for _, i in ahead if i is not None and all(i == first for rows, first in ahead if i in rows)
        }

    def _ahead(self, j: int, sign: int, rows: Sequence[int]) -> int | None:
        cells = {i: self.rows[i].cells[j] for i in rows if self.rows[i].cells[j].values}
        finite = {i: cell for i, cell in cells.items() if math.isfinite(cell.mean)}
        if not finite or len(cells) < 2:
            return None
        first = min(finite, key=lambda i: sign * finite[i].mean)
        ours = cells[first].by_seed
        for i, cell in cells.items():
            if i == first:
                continue
            if not any(map(math.isfinite, cell.values)):
                beaten = len(ours) > 1
            else:
                beaten = sign * (cell.mean - cells[first].mean) > 0 and paired_p(ours, cell.by_seed) < CHANCE
            if not beaten:
                return None
        return first

    def to_csv(self) -> str:
        """Plain numbers: mean, se, and where there is a claim paper and deviation (a fraction)."""
        head = [*self.keys, "seeds"]
        for column in self.heads:
            head += [f"{column.title} mean", f"{column.title} se"]
            head += [f"{column.title} paper", f"{column.title} deviation"] * column.claimed
        lines = [[*head, *["certificate"] * self.certified]]
        for row in self.rows:
            line = [show(value) for value in row.values] + [row.seeds]
            for column, cell in zip(self.heads, row.cells, strict=True):
                line += [repr(cell.mean) if cell.values else "", _plain(cell.error)]
                if column.claimed:
                    line += [_plain(cell.claim.value) if cell.claim else "", _plain(cell.deviation)]
            lines.append([*line, *[row.certificate] * self.certified])
        return to_csv(lines)

    def texts(self) -> tuple[list[str], list[list[str]], list[list[bool]]]:
        """Headings, cells as a reader wants them, and which of them are the best of their column."""
        head, bests = [*map(readable, self.keys), "seeds"], [self.best(j) for j in range(len(self.heads))]
        for column in self.heads:
            head += [readable(column.title), *(["paper", "deviation"] if column.claimed else [])]
        lines, bold = [], []
        for i, row in enumerate(self.rows):
            line, mark = [*(show(value) for value in row.values), row.seeds], [False] * (len(self.keys) + 1)
            for j, (column, cell) in enumerate(zip(self.heads, row.cells, strict=True)):
                line.append(cell_text(cell, column.column))
                mark.append(i in bests[j])
                if column.claimed:
                    line += [claim_text(cell.claim, column.column), deviation_text(cell.deviation)]
                    mark += [False, False]
            lines.append([*line, *[row.certificate] * self.certified])
            bold.append([*mark, *[False] * self.certified])
        return [*head, *["certificate"] * self.certified], lines, bold

    def to_markdown(self) -> str:
        """A table that GitHub and MkDocs show; the best of a column in bold."""
        head, lines, bold = self.texts()
        rows = [
            [f"**{_md(text)}**" if best else _md(text) for text, best in zip(line, mark, strict=True)]
            for line, mark in zip(lines, bold, strict=True)
        ]
        rule = [":---" if j < len(self.keys) else "---:" for j in range(len(head))]
        return "".join(f"| {' | '.join(row)} |\n" for row in [list(map(_md, head)), rule, *rows])

    def to_rich(self, title: str = "") -> WideTable:
        """A table for the terminal; what does not fit beside each other stands in blocks below each other."""
        return WideTable(title, *self.texts(), keys=len(self.keys))


@dataclass(frozen=True)
class WideTable:
    """A table for the terminal, its columns in as many blocks as its width needs, each with the rows' keys.

    No cell is cut as long as the keys and one column fit; headings are wrapped between words. `print` shows
    it as wide as the terminal, or as a page where there is none, and a notebook as its own table.
    """

    title: str
    head: Sequence[str]
    lines: Sequence[Sequence[str]]
    bold: Sequence[Sequence[bool]]
    keys: int
    caption: str = ""

    @property
    def row_count(self) -> int:
        """How many rows there are."""
        return len(self.lines)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        """The blocks that Rich prints."""
        common = list(range(self.keys))
        block, title = list(common), self.title
        for j in range(self.keys, len(self.head)):
            wider = self._part([*block, j], title)
            least = Measurement.get(console, options.update(max_width=10**4), wider).minimum
            if len(block) > self.keys and least > options.max_width:
                yield self._part(block, title)
                block, title = list(common), ""
            block.append(j)
        yield self._part(block, title)
        if self.caption:
            yield Text(self.caption, style="table.caption")

    def _part(self, columns: Sequence[int], title: str) -> rich.table.Table:
        table = rich.table.Table(
            title=Text(title) if title else None, header_style="bold", box=rich.box.SIMPLE_HEAD
        )
        for j in columns:
            texts = [*self.head[j].split(), *(line[j] for line in self.lines)]
            width = max(map(cell_len, texts), default=1)
            table.add_column(
                Text(self.head[j]), justify="left" if j < self.keys else "right", min_width=width
            )
        for line, mark in zip(self.lines, self.bold, strict=True):
            table.add_row(*(Text(line[j], style="bold" if mark[j] else "") for j in columns))
        return table

    def __str__(self) -> str:
        width = shutil.get_terminal_size((110, 24)).columns
        file = io.StringIO()
        Console(file=file, width=width, color_system=None, force_jupyter=False).print(self)
        text = "\n".join(line.rstrip() for line in file.getvalue().splitlines()).strip("\n")
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        return text.encode(encoding, "replace").decode(encoding)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None, **_: Any) -> dict[str, str]:
        """For a notebook: Rich's own would break the words below at the width of the numbers."""
        return {"text/plain": str(self), "text/html": self.to_html()}

    def to_html(self) -> str:
        """For a notebook's page."""
        return html.table([self.head, *self.lines], left=self.keys) + html.note(self.caption)


def build_table(runs: Sequence[RunRecord], spec: TableSpec, paper: PaperClaims | None = None) -> Table:
    """The table of some runs.

    Args:
        runs: the runs.
        spec: what it shows.
        paper: what was printed; a claim about a row that no run belongs to is left out.

    Raises:
        ReportError: if a row would average over more than seeds; where a column, a key or a claim names
            nothing.

    >>> loss = lambda seed, last: RunRecord("A", {}, seed, {"round": [0, 1], "loss": [9, last]}, {}, 0.0, "A")
    >>> table = build_table([loss(0, 1.0), loss(1, 2.0)], TableSpec((Column("loss"),)))
    >>> print(table.to_markdown())
    | method | seeds | loss |
    | :--- | ---: | ---: |
    | A | 2 | 1.50 ± 0.50 |
    """
    if not runs:
        raise ReportError("a table needs runs, but the list is empty")
    across = (spec.across,) if spec.across else ()
    check_keys(runs, spec.rows + across)
    groups = group(runs, spec.rows + across)
    missing = [column for column in spec.columns if all(number(run, column) is None for run in runs)]
    spec = replace(spec, columns=tuple(c for c in spec.columns if not (c in missing and c.optional)))
    for column in missing:
        if not column.optional:
            raise ReportError(
                f"no run has the metric of column {column.heading!r}: {_available(runs, column)}"
            )
    check_claims(runs, spec, paper)
    claims = paper.claims if paper and spec.paper else ()

    heads = []
    for value in dict.fromkeys(key[-1] for key in groups) if across else [None]:
        for column in spec.columns:
            place = f"{spec.across} = {show(value)}"
            alone = f"{column.heading}, {place}" if len(spec.columns) > 1 else place
            heads.append(Head(column, value, alone if across else column.heading, claimed=False))

    rows = []
    for values in dict.fromkeys(key[: len(spec.rows)] for key in groups):
        verdicts: dict[int, str] = {}
        cells, counts = [], set()
        for head in heads:
            members = groups.get((*values, head.across) if across else values, [])
            counts |= {len(members)} - {0}
            verdicts |= {id(run): run.verdict for run in members}
            found = {run.seed: x for run in members if (x := number(run, head.column)) is not None}
            claim = _claim(claims, members, head.column)
            cells.append(Cell(tuple(found.values()), claim, tuple(found)))
        seeds = str(min(counts)) if len(counts) == 1 else f"{min(counts)}–{max(counts)}"
        rows.append(Row(values, seeds, tuple(cells), tuple(verdicts.values())))
    made = [cell.claim for row in rows for cell in row.cells if cell.claim]
    for claim in made:
        if sum(claim is other for other in made) > 1:
            raise ReportError(
                f"the claim {claim.where} = {claim.value} fits several rows; say more in where="
            )
    heads = [
        Head(h.column, h.across, h.title, claimed=any(row.cells[j].claim for row in rows))
        for j, h in enumerate(heads)
    ]
    return Table(spec.rows, tuple(heads), tuple(rows))


def check_claims(runs: Sequence[RunRecord], spec: TableSpec, paper: PaperClaims | None) -> None:
    """Refuse claims about columns or keys that the table does not have."""
    headings = [column.heading for column in spec.columns]
    for claim in paper.claims if paper else ():
        if claim.column not in headings:
            raise ReportError(f"a claim is about the column {claim.column!r}; the table has {headings}")
        check_keys(runs, claim.where)


def _claim(claims: Sequence[Claim], members: Sequence[RunRecord], column: Column) -> Claim | None:
    for claim in claims if members else ():
        if claim.column == column.heading and all(members[0].value(k) == v for k, v in claim.where.items()):
            return claim
    return None


def _available(runs: Sequence[RunRecord], column: Column) -> str:
    if column.reduce == "certificate":
        return f"the certificates have {union(run.certificate for run in runs)}"
    if column.reduce == "ledger":
        return f"the ledgers have {union(run.ledger for run in runs)}"
    return f"the histories have {union(run.history for run in runs)}"


FIRST = ("rounds", "lower_rounds", "exchanges", "bytes_up", "bytes_down", "floats_up", "floats_down")


def ledger_table(runs: Sequence[RunRecord], rows: Sequence[str], *, by_level: bool = False) -> Table | None:
    """The counts of the ledgers, per row; None if there are none.

    Args:
        runs: the runs.
        rows: what tells the rows apart.
        by_level: the traffic of each level, where there are several, instead of the totals and the time.
    """
    names = union(run.ledger for run in runs)
    if by_level:
        names = [n for n in names if n.startswith("levels.") and "floats" not in n]
        if len({name.split(".")[1] for name in names}) < 2:
            return None
    else:
        totals = [name for name in names if not name.startswith("levels.")]
        names = sorted(
            totals, key=lambda n: FIRST.index(n) if n in FIRST else len(FIRST) + (n != "oracle_calls")
        )
    columns = [
        Column(n, "ledger", n.removeprefix("levels.").replace(".", ": ").replace("_", " "), format=_form(n))
        for n in names
    ]
    if not columns:
        return None
    time = [] if by_level else [Column("seconds", "run")]
    return build_table(runs, TableSpec((*columns, *time), tuple(rows), paper=False))


def _form(entry: str) -> str:
    return "bytes" if "bytes" in entry else ""


def history_table(
    history: Mapping[str, Any],
    ledger: Ledger | Mapping[str, Any] | None = None,
    *,
    title: str = "",
    rows: int = 11,
) -> WideTable:
    """A run's history for the terminal: some rounds, evenly chosen, the first and the last among them.

    Args:
        history: series of equal length, ``"round"`` among them.
        ledger: stands below the table where it is given.
        title: above the table.
        rows: how many rounds to show at most.
    """
    series = {name: np.asarray(values) for name, values in history.items()}
    names = ["round", *(name for name in series if name != "round")]
    length = len(series["round"])
    chosen = np.unique(np.linspace(0, length - 1, min(rows, length)).round().astype(int))

    def text(name: str, i: int) -> str:
        # a metric of the host that ends with a number was not measured where it has none
        gap = math.isnan(series[name][i]) and not math.isnan(series[name][-1])
        return "" if gap else number_text(series[name][i].item())

    lines = [[text(name, i) for name in names] for i in chosen]
    counts = {} if ledger is None else {k: v for k, v in as_dict(ledger).items() if type(v) in (int, float)}
    caption = ", ".join(
        f"{name.replace('_', ' ')} {mean_text(value, math.nan, _form(name))}"
        for name, value in counts.items()
        if value
    )
    return WideTable(title, names, lines, [[False] * len(names)] * len(lines), keys=1, caption=caption)


def cell_text(cell: Cell, column: Column) -> str:
    """``mean ± standard error``; a dash where there is nothing."""
    if not cell.values:
        return "–"
    if column.reduce == "reach" and math.isinf(cell.mean):
        reached = sum(map(math.isfinite, cell.values))
        return f"reached by {reached} of {len(cell.values)}" if reached else "not reached"
    return mean_text(cell.mean, cell.error, column.format)


def claim_text(claim: Claim | None, column: Column) -> str:
    """The printed number."""
    if claim is None:
        return "–"
    if column.format:
        return mean_text(claim.value, math.nan if claim.error is None else claim.error, column.format)
    return f"{claim.value:.10g}" + (f" ± {claim.error:.10g}" if claim.error is not None else "")


def deviation_text(deviation: float) -> str:
    """A signed percentage."""
    return "–" if math.isnan(deviation) else f"{100 * deviation:+.3g} %".replace("-", "−")


def mean_text(mean: float, error: float, form: str = "") -> str:
    """``mean ± error`` with two digits of the error, or in a given format.

    >>> mean_text(0.91234, 0.0021), mean_text(2.34567e-6, 1.2e-8), mean_text(0.5, 0.01, ".1%")
    ('0.9123 ± 0.0021', '(2.346 ± 0.012)e-06', '50.0% ± 1.0%')
    """
    single = math.isnan(error)
    if form == "bytes":
        unit, prefix = _unit(mean)
        return (
            bytes_text(mean) if single or error == 0 else f"{mean_text(mean / unit, error / unit)} {prefix}"
        )
    if form:
        return format(mean, form) if single else f"{mean:{form}} ± {error:{form}}"
    if single or error == 0 or not math.isfinite(mean):
        return number_text(mean)
    size = max(abs(mean), error)
    exponent = math.floor(math.log10(size))
    power = 0 if -4 <= exponent < 6 else exponent
    digits = min(max(1 - math.floor(math.log10(error)) + power, 0), 12)
    body = f"{mean / 10**power:.{digits}f} ± {error / 10**power:.{digits}f}"
    return f"({body})e{power:+03d}" if power else body


def number_text(value: float) -> str:
    """Whole numbers with all their digits, others with four.

    >>> number_text(1234567), number_text(0.123456), number_text(2e-7), number_text(float("nan"))
    ('1 234 567', '0.1235', '2e-07', 'not finite')
    """
    if not math.isfinite(value):
        return "not finite"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}".replace(",", " ") if abs(value) >= 1e4 else str(int(value))
    return f"{value:.4g}"


def bytes_text(value: float) -> str:
    """Bytes with a decimal prefix.

    >>> bytes_text(80), bytes_text(12_345), bytes_text(3.2e9)
    ('80 B', '12.3 kB', '3.2 GB')
    """
    if not math.isfinite(value):
        return "not finite"
    unit, prefix = _unit(value)
    return f"{value / unit:.3g} {prefix}"


def _unit(value: float) -> tuple[int, str]:
    for step, prefix in enumerate(("B", "kB", "MB", "GB", "TB")):
        if abs(value) < 999.5 * 1000**step:
            return 1000**step, prefix
    return 1000**5, "PB"


def _plain(value: float) -> str:
    return "" if math.isnan(value) else repr(value)


def _md(text: str) -> str:
    for mark in "\\|*_`[]<>":
        text = text.replace(mark, f"\\{mark}")
    return text.replace("\n", " ")
