"""The content of a report: its table, its plots, the paper's numbers. `config.json` keeps it all."""

from __future__ import annotations

import re
from dataclasses import field
from typing import Any, Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from fedstrata.lab.report.records import Scalar

_STRICT = ConfigDict(extra="forbid", defer_build=True)

Outcome = Literal["reproduced", "partly", "not reproduced", "not tested"]
Reduce = Literal["final", "first", "min", "max", "best", "mean_last", "reach", "ledger", "run", "certificate"]


@dataclass(frozen=True, config=_STRICT)
class Column:
    """One number per run, shown as mean ± standard error over the seeds.

    Args:
        metric: a series of the history, an entry of the ledger (``reduce="ledger"``), ``"seconds"``
            (``reduce="run"``), or of the certificate (``reduce="certificate"``) ``objective``, ``value``,
            ``relative`` or ``distance``.
        reduce: how a series becomes a number. ``best`` is the minimum or the maximum, as ``better`` says;
            ``mean_last`` the mean of the ``last`` recorded values; ``reach`` the value of the series ``at``
            when the metric first meets ``target`` (infinite where it never does). What is not a number
            stays so: a run that diverged has no minimum.
        title: the column's heading; made from the other fields where it is empty.
        format: how to print: a format such as ``.3f`` or ``.1%``, ``bytes`` for kB and MB, or empty for two
            digits of the standard error.
        better: which direction is better; a row that is best beyond the error is then marked.
        last: how many values ``mean_last`` takes.
        target: see ``reach``.
        at: see ``reach``.
        optional: whether the column is left out where no run has the metric; else that is an error.
    """

    metric: str
    reduce: Reduce = "final"
    title: str = ""
    format: str = ""
    better: Literal["low", "high", ""] = ""
    last: int = 10
    target: float | None = None
    at: str = "round"
    optional: bool = False

    def __post_init__(self) -> None:
        if self.reduce in ("best", "reach") and not self.better:
            raise ValueError(f"column {self.metric!r}: reduce={self.reduce!r} needs better='low' or 'high'")
        if self.reduce == "reach" and self.target is None:
            raise ValueError(f"column {self.metric!r}: reduce='reach' needs a target")
        if self.reduce == "run" and self.metric != "seconds":
            raise ValueError(f"column {self.metric!r}: a run's own number is 'seconds'")
        if self.last < 1:
            raise ValueError(f"column {self.metric!r}: last={self.last}; take at least one value")
        if self.format and self.format != "bytes":
            try:
                format(0.5, self.format)
            except ValueError as error:
                raise ValueError(
                    f"column {self.metric!r}: {self.format!r} is not a format for numbers"
                ) from error

    @property
    def heading(self) -> str:
        """The title, or one made from the other fields."""
        sign = "≤" if self.better == "low" else "≥"
        return self.title or {
            "final": self.metric,
            "first": f"first {self.metric}",
            "min": f"min {self.metric}",
            "max": f"max {self.metric}",
            "best": f"best {self.metric}",
            "mean_last": f"{self.metric} (mean of last {self.last})",
            "reach": f"{self.at} until {self.metric} {sign} {self.target}",
            "ledger": self.metric.replace("_", " ").replace(".", ": "),
            "run": self.metric,
        }.get(self.reduce, self.metric)


@dataclass(frozen=True, config=_STRICT)
class TableSpec:
    """A table: one row per combination of ``rows``, each number over the seeds.

    Args:
        columns: the numbers.
        rows: what tells the rows apart: ``label``, ``method`` or keys of the settings.
        across: a key of the settings whose values are laid out side by side, as papers often do.
        paper: whether what the paper printed, and the deviation from it, stand beside the numbers.
    """

    columns: tuple[Column, ...]
    rows: tuple[str, ...] = ("label",)
    across: str | None = None
    paper: bool = True

    def __post_init__(self) -> None:
        if not self.columns or not self.rows:
            raise ValueError("a table needs at least one column and one key of its rows")
        headings = [column.heading for column in self.columns]
        if len(set(headings)) < len(headings):
            raise ValueError(f"two columns have the same heading: {headings}; give one a title")
        if self.across in self.rows:
            raise ValueError(f"{self.across!r} cannot be both down and across")


@dataclass(frozen=True, config=_STRICT)
class Reference:
    """A line to compare with: a known optimum, a level that the paper printed.

    Args:
        value: where it is.
        label: what it is.
        axis: the axis that the value is on.
        panel: the panel it belongs to; None is every panel.
    """

    value: float
    label: str
    axis: Literal["x", "y"] = "y"
    panel: Scalar = None


@dataclass(frozen=True, config=_STRICT)
class PlotSpec:
    """A plot, static and interactive.

    Args:
        y: the metric.
        x: in a line plot a series of the history (``round``, ``bytes_up``, ``exchanges``, ``seconds``, …); in
            a bar plot or a heat-map ``label`` or a key of the settings.
        kind: lines with bands over the seeds, bars with intervals over the seeds, or a heat-map of means.
        title: above the plot.
        caption: below the plot, before the words on the intervals.
        name: the file's name, without its ending; made from the other fields where it is empty.
        x_label: of the axis.
        y_label: of the axis.
        log_x: a logarithmic axis.
        log_y: a logarithmic axis of the metric (the colours, in a heat-map).
        lines: what tells lines, or bars of different colour, apart.
        panels: a key of the settings, or ``label``; one panel per value.
        down: the key of a heat-map's rows.
        reduce: how a run's series becomes a number, in a bar plot or a heat-map; see `Column`.
        better: see `Column`.
        last: see `Column`.
        references: lines to compare with.
        series: of the history, which are then drawn as one metric ``y``, each run as several that the key
            ``series`` tells apart: ``x="series"`` sets bars of several metrics side by side.
    """

    y: str
    x: str = "round"
    kind: Literal["line", "bar", "heatmap"] = "line"
    title: str = ""
    caption: str = ""
    name: str = ""
    x_label: str = ""
    y_label: str = ""
    log_x: bool = False
    log_y: bool = False
    lines: tuple[str, ...] = ("label",)
    panels: str | None = None
    down: str = ""
    reduce: Reduce = "final"
    better: Literal["low", "high", ""] = ""
    last: int = 10
    references: tuple[Reference, ...] = ()
    series: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind == "heatmap" and not self.down:
            raise ValueError(f"heat-map of {self.y!r}: name the key of its rows, down=")
        if self.kind == "heatmap" and self.references:
            raise ValueError(f"heat-map of {self.y!r}: a heat-map has no reference lines")
        if self.kind != "line":
            if self.reduce == "reach":
                raise ValueError(f"plot of {self.y!r}: reduce='reach' is for tables, it may be infinite")
            _ = self.column
        if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", self.stem):
            raise ValueError(
                f"{self.stem!r} is not a valid name for a plot's file: small letters, digits, - and _ only"
            )

    @property
    def stem(self) -> str:
        """The file's name, without its ending."""
        made = "-".join(filter(None, [self.y, "by", self.x, self.panels]))
        return self.name or re.sub(r"[^a-z0-9_]+", "-", made.lower()).strip("-_")

    @property
    def column(self) -> Column:
        """The number that a bar, or a heat-map's cell, shows."""
        return Column(self.y, self.reduce, title=self.y_label, better=self.better, last=self.last)


@dataclass(frozen=True, config=_STRICT)
class Claim:
    """A number that the paper printed.

    Args:
        where: the row (and the value of ``across``) that it belongs to, ``{"label": "FedRZO", "H": 20}``.
        column: the heading of the table's column.
        value: the number.
        error: the ± that was printed with it.
    """

    where: dict[str, Scalar]
    column: str
    value: float
    error: float | None = None


@dataclass(frozen=True, config=_STRICT)
class Statement:
    """Something that the paper says or shows without printing the number, and what we saw."""

    text: str
    found: str
    verdict: Outcome


@dataclass(frozen=True, config=_STRICT)
class PaperClaims:
    """The paper's numbers and statements.

    Args:
        source: the paper and its table or figure.
        claims: numbers.
        statements: everything else.
    """

    source: str
    claims: tuple[Claim, ...] = ()
    statements: tuple[Statement, ...] = ()


@dataclass(frozen=True, config=_STRICT)
class Split:
    """How the samples are distributed over the clients; `split_of` makes it from data.

    Args:
        sizes: how many training samples each client has.
        classes: class → how many of them each client has; empty without classes.
        names: of the clients; empty where they have none.
        caption: below the picture.
    """

    sizes: tuple[int, ...]
    classes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    caption: str = ""

    def __post_init__(self) -> None:
        for what, values in (("names", self.names), *self.classes.items()):
            if len(values) not in ({len(self.sizes), 0} if what == "names" else {len(self.sizes)}):
                raise ValueError(f"a split of {len(self.sizes)} clients has {len(values)} {what}")


@dataclass(frozen=True, config=_STRICT)
class Definition:
    """The content of `config.json`: all of a report but its runs."""

    title: str
    table: TableSpec
    format: Literal[1] = 1
    plots: tuple[PlotSpec, ...] = ()
    paper: PaperClaims | None = None
    findings: str = ""
    notes: str = ""
    split: Split | None = None
    command: str = ""
    written: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    sha256: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        stems = [plot.stem for plot in self.plots]
        if len(set(stems)) < len(stems):
            raise ValueError(f"two plots have the same name: {stems}; give one a name")
