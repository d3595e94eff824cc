"""The numbers that a plot draws, the same for its static and its interactive form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from fedstrata.report.records import ReportError, RunRecord, Scalar, union
from fedstrata.report.specs import PlotSpec, Reference
from fedstrata.report.statistics import LEVEL, Interval, check_keys, group, name, number, show, t_interval

POINTS = 1000  # of a line; more cannot be told apart on a screen

Dash = Literal["solid", "dashed", "dotted", "dashdot"]

# Okabe and Ito's colours, which the colour-blind can tell apart, without the yellow that paper swallows.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#b2528c", "#e69f00", "#56b4e9", "#4d4d4d")
DASHES: tuple[Dash, ...] = ("solid", "dashed", "dotted", "dashdot")


@dataclass(frozen=True)
class Curve:
    """A line, or the bars of one colour."""

    name: str
    colour: int
    x: np.ndarray | list[str]
    y: Interval
    seeds: int


@dataclass(frozen=True)
class Grid:
    """A heat-map's cells; NaN where there is no run."""

    columns: list[str]
    rows: list[str]
    means: np.ndarray


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    curves: list[Curve]
    grid: Grid | None
    references: list[Reference]


@dataclass(frozen=True)
class Plot:
    """All that is drawn, and the words below it."""

    spec: PlotSpec
    panels: list[Panel]
    caption: str
    x_label: str
    y_label: str


def build_plot(runs: Sequence[RunRecord], spec: PlotSpec) -> Plot:
    """The numbers of a plot.

    Args:
        runs: the runs; those without the metric are left out.
        spec: what to draw.

    Raises:
        ReportError: where no run has the metric, or a line would average over more than seeds.
    """
    if spec.series:
        runs = [one for run in runs for one in _apart(run, spec)]
    kept = [run for run in runs if _drawable(run, spec)]
    if not kept:
        raise ReportError(f"plot {spec.stem!r}: no run has {spec.y!r}{_hint(runs, spec)}")
    keys = [spec.panels, spec.down, *spec.lines, spec.x if spec.kind != "line" else ""]
    check_keys(kept, filter(None, keys))
    colours = _looks(kept, spec.lines)
    panels = []
    for value, members in _split(kept, spec.panels).items():
        references = [r for r in spec.references if r.panel is None or r.panel == value]
        title = name(spec.panels, value) if spec.panels else ""
        if spec.kind == "heatmap":
            panels.append(Panel(title, [], _grid(members, spec), []))
        else:
            make = _lines if spec.kind == "line" else _bars
            panels.append(Panel(title, make(members, spec, colours), None, references))
    caption = _caption(spec, panels)
    if spec.log_y:
        panels = _above_zero(panels)
    x_label = spec.x_label or label_of(spec.x)
    y_label = spec.y_label or (label_of(spec.y) if spec.kind == "line" else label_of(spec.column.heading))
    return Plot(spec, panels, caption, x_label, y_label)


def _apart(run: RunRecord, spec: PlotSpec) -> list[RunRecord]:
    """A run for each of the series, which it has under the metric's name."""
    return [
        replace(
            run,
            setting={**run.setting, "series": series},
            history={**run.history, spec.y: run.history[series]},
        )
        for series in spec.series
        if series in run.history
    ]


def _looks(runs: Sequence[RunRecord], keys: Sequence[str]) -> dict[str, int]:
    """A number for every line: its colour and, in steps of the palette's length, its dashes.

    Where there are more lines than colours, the first key chooses the colour and the others the dashes.
    """
    names = {_name(run, keys): (_name(run, keys[:1]), _name(run, keys[1:])) for run in runs}
    hues, strokes = (list(dict.fromkeys(part)) for part in zip(*names.values(), strict=True))
    if len(names) > len(PALETTE) >= len(hues) and len(strokes) <= len(DASHES):
        return {
            line: hues.index(hue) + len(PALETTE) * strokes.index(stroke)
            for line, (hue, stroke) in names.items()
        }
    return {line: k for k, line in enumerate(names)}


def _above_zero(panels: list[Panel]) -> list[Panel]:
    """Intervals cut at a tenth of the smallest mean: a logarithmic axis cannot show their part below zero."""
    means = np.concatenate([curve.y.mean for panel in panels for curve in panel.curves] or [np.ones(1)])
    floor = min(means[means > 0], default=1.0) / 10

    def cut(curve: Curve) -> Curve:
        return replace(curve, y=curve.y._replace(low=np.where(curve.y.low < floor, floor, curve.y.low)))

    return [replace(panel, curves=[cut(curve) for curve in panel.curves]) for panel in panels]


def label_of(series: str) -> str:
    """A series' name on an axis."""
    known = {"round": "communication round", "bytes_up": "bytes uploaded", "seconds": "time [s]"}
    return known.get(series, series.replace("_", " "))


def _drawable(run: RunRecord, spec: PlotSpec) -> bool:
    if spec.kind == "line":
        return spec.y in run.history and spec.x in run.history
    return number(run, spec.column) is not None


def _hint(runs: Sequence[RunRecord], spec: PlotSpec) -> str:
    beside = f" beside {spec.x!r}" if spec.kind == "line" else ""
    return f"{beside}; the histories have {union(run.history for run in runs)}"


def _name(run: RunRecord, keys: Sequence[str]) -> str:
    return ", ".join(name(key, run.value(key)) for key in keys)


def _split(runs: Sequence[RunRecord], key: str | None) -> dict[Scalar, list[RunRecord]]:
    panels: dict[Scalar, list[RunRecord]] = {}
    for run in runs:
        panels.setdefault(run.value(key) if key else None, []).append(run)
    return panels


def _lines(runs: Sequence[RunRecord], spec: PlotSpec, colours: dict[str, int]) -> list[Curve]:
    curves = []
    for members in group(runs, spec.lines).values():
        rounds = members[0].history["round"]
        for run in members[1:]:
            rounds = np.intersect1d(rounds, run.history["round"])
        if not len(rounds):
            raise ReportError(
                f"plot {spec.stem!r}: the seeds of {members[0].label!r} share no recorded round"
            )
        keep = rounds[_thin(len(rounds))]
        at = [np.searchsorted(run.history["round"], keep) for run in members]
        x = np.mean([run.history[spec.x][i] for run, i in zip(members, at, strict=True)], axis=0)
        y = np.array([run.history[spec.y][i] for run, i in zip(members, at, strict=True)], float)
        line = _name(members[0], spec.lines)
        if spec.log_x and (x > 0).any():  # a line from zero would run level to the edge of the axis
            x, y = x[x > 0], y[:, x > 0]
        curves.append(Curve(line, colours[line], x, t_interval(y), len(members)))
    return curves


def _thin(length: int) -> np.ndarray:
    return np.unique(np.linspace(0, length - 1, min(length, POINTS)).round().astype(int))


def _bars(runs: Sequence[RunRecord], spec: PlotSpec, colours: dict[str, int]) -> list[Curve]:
    categories = list(dict.fromkeys(show(run.value(spec.x)) for run in runs))
    cells: dict[str, dict[str, tuple[Interval, int]]] = {}
    keys = tuple(dict.fromkeys((*spec.lines, spec.x)))
    for members in group(runs, keys).values():
        values = np.array([number(run, spec.column) for run in members], float)
        line, category = _name(members[0], spec.lines), show(members[0].value(spec.x))
        cells.setdefault(line, {})[category] = (t_interval(values), len(members))
    curves = []
    for line, bars in cells.items():
        x = [category for category in categories if category in bars]
        stacked = Interval(*(np.array([bars[c][0][k] for c in x]) for k in range(3)))
        curves.append(Curve(line, colours[line], x, stacked, min(n for _, n in bars.values())))
    return curves


def _grid(runs: Sequence[RunRecord], spec: PlotSpec) -> Grid:
    columns = list(dict.fromkeys(show(run.value(spec.x)) for run in runs))
    rows = list(dict.fromkeys(show(run.value(spec.down)) for run in runs))
    means = np.full((len(rows), len(columns)), np.nan)
    for members in group(runs, (spec.down, spec.x)).values():
        values = np.array([number(run, spec.column) for run in members], float)
        means[
            rows.index(show(members[0].value(spec.down))), columns.index(show(members[0].value(spec.x)))
        ] = values.mean()
    return Grid(columns, rows, means)


def _caption(spec: PlotSpec, panels: Sequence[Panel]) -> str:
    seeds = [curve.seeds for panel in panels for curve in panel.curves]
    words = [spec.caption] if spec.caption else []
    if spec.kind == "heatmap":
        words.append("Each cell is a mean over the seeds.")
    elif max(seeds) < 2:
        words.append("One seed each, so without confidence intervals.")
    else:
        count = f"{min(seeds)}" if min(seeds) == max(seeds) else f"{min(seeds)} to {max(seeds)}"
        drawn = "Lines are means" if spec.kind == "line" else "Bars are means"
        band = "bands" if spec.kind == "line" else "whiskers"
        words.append(f"{drawn} over {count} seeds, {band} Student's t-intervals of {LEVEL:.0%} for the mean.")
    if spec.kind == "line" and spec.x != "round" and max(seeds) > 1:
        words.append("A point averages the same round of all seeds, along both axes.")
    if spec.log_y and any((curve.y.low <= 0).any() for panel in panels for curve in panel.curves):
        words.append("An interval that reaches below zero is cut, as the axis is logarithmic.")
    if any(len(curve.x) == POINTS for panel in panels for curve in panel.curves):
        words.append(f"Of long histories {POINTS} rounds are drawn, evenly chosen.")
    return " ".join(words)
