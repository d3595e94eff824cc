"""The numbers that a plot draws, the same for its static and its interactive form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from fedstrata.lab.report.records import ReportError, RunRecord, Scalar, union
from fedstrata.lab.report.specs import PlotSpec, Reference
from fedstrata.lab.report.statistics import (
    FEW,
    LEVEL,
    Interval,
    check_keys,
    group,
    log_interval,
    name,
    number,
    show,
    t_interval,
)
from fedstrata.lab.report.typesetting import capital, label_of, readable

SWITCH = ("round", "exchanges", "bytes_up", "oracle_calls", "seconds")  # what a line can be drawn along
POINTS = 1000  # of a line; more cannot be told apart on a screen

Dash = Literal["solid", "dashed", "dotted", "dashdot"]

# Okabe and Ito's colours, which the colour-blind can tell apart, without the yellow that paper swallows.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#b2528c", "#e69f00", "#56b4e9", "#4d4d4d")
PALETTE_DARK = ("#4aa8e0", "#f08a4b", "#35c79b", "#dd8fc0", "#f0b840", "#9bd4f5", "#b8bec5")  # on dark paper
DASHES: tuple[Dash, ...] = ("solid", "dashed", "dotted", "dashdot")


@dataclass(frozen=True)
class Curve:
    """A line, or the bars of one colour.

    Args:
        name: in the legend.
        colour: its number; beyond the palette's length the dashes differ.
        x: where its points are.
        y: their means and intervals.
        seeds: how many.
        runs: the values of each seed, where there are two or three.
        label: the method's, where the line is of one.
        along: the same points along other axes.
    """

    name: str
    colour: int
    x: np.ndarray | list[str]
    y: Interval
    seeds: int
    label: str = ""
    along: Mapping[str, np.ndarray] = field(default_factory=dict)
    runs: Sequence[np.ndarray] = ()


@dataclass(frozen=True)
class HeatMap:
    """A heat-map's cells; NaN where runs are missing."""

    columns: list[str]
    rows: list[str]
    means: np.ndarray


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    curves: list[Curve]
    grid: HeatMap | None
    references: list[Reference]


@dataclass(frozen=True)
class Plot:
    """The panels of a plot, and its caption."""

    spec: PlotSpec
    panels: list[Panel]
    caption: str
    x_label: str
    y_label: str
    along: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The title above the plot."""
        return self.spec.title or f"{capital(self.y_label)} by {self.x_label}"


def build_plot(runs: Sequence[RunRecord], spec: PlotSpec) -> Plot:
    """The numbers of a plot.

    Args:
        runs: the runs; those without the metric are left out.
        spec: what to draw.

    Raises:
        ReportError: if no run has the metric, or a line would average over more than seeds.
    """
    if why := undrawn(runs, spec):
        raise ReportError(why)
    runs = _of_series(runs, spec)
    kept = [run for run in runs if _drawable(run, spec)]
    keys = [spec.panels, spec.down, *spec.lines, spec.x if spec.kind != "line" else ""]
    check_keys(kept, filter(None, keys))
    spec, common = _without_common(kept, spec)
    colours = _looks(runs, spec.lines)  # of all: a method has one colour, whoever else has the metric
    along = _along(kept, spec)
    panels = []
    for value, members in _split(kept, spec.panels).items():
        references = [r for r in spec.references if r.panel is None or r.panel == value]
        title = name(spec.panels, value) if spec.panels else ""
        if spec.kind == "heatmap":
            panels.append(Panel(title, [], _grid(members, spec), []))
        elif spec.kind == "line":
            panels.append(Panel(title, _lines(members, spec, colours, along), None, references))
        else:
            panels.append(Panel(title, _bars(members, spec, colours), None, references))
    x_label = spec.x_label or label_of(spec.x)
    y_label = spec.y_label or (label_of(spec.y) if spec.kind == "line" else readable(spec.column.heading))
    return Plot(spec, panels, _caption(spec, panels, common), x_label, y_label, along)


def undrawn(runs: Sequence[RunRecord], spec: PlotSpec) -> str:
    """Why a plot cannot be drawn: no run has its series. Empty if it can be.

    A choice of methods may leave none that has the metric: a page is then made without the plot, and says so.
    """
    if any(_drawable(run, spec) for run in _of_series(runs, spec)):
        return ""
    beside = f" beside {spec.x!r}" if spec.kind == "line" else ""
    known = union(run.history for run in runs)
    return f"plot {spec.stem!r}: no run has {spec.y!r}{beside}; the histories have {known}"


def _without_common(runs: Sequence[RunRecord], spec: PlotSpec) -> tuple[PlotSpec, list[str]]:
    """The plot without the keys that are the same for all its lines, which need not be in every name.

    Where they are settings, the caption says them.
    """
    varied = [key for key in spec.lines if len({repr(run.value(key)) for run in runs}) > 1]
    if not varied or len(varied) == len(spec.lines):
        return spec, []
    constant = [key for key in spec.lines if key not in (*varied, spec.panels, "label", "method")]
    shown = [name(key, runs[0].value(key)) for key in constant if runs[0].value(key) is not None]
    return replace(spec, lines=tuple(varied)), shown


def _along(runs: Sequence[RunRecord], spec: PlotSpec) -> tuple[str, ...]:
    """The axes that a reader can choose from: those that every run has, where the plot's own is one."""
    if spec.kind != "line" or spec.x not in SWITCH:
        return ()
    return tuple(
        axis for axis in SWITCH if all(axis in run.history and run.history[axis][-1] > 0 for run in runs)
    )


def _of_series(runs: Sequence[RunRecord], spec: PlotSpec) -> Sequence[RunRecord]:
    """A run for each of the plot's series, which it has under the metric's name."""
    if not spec.series:
        return runs
    return [
        replace(
            run,
            setting={**run.setting, "series": series},
            history={**run.history, spec.y: run.history[series]},
        )
        for run in runs
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


def _drawable(run: RunRecord, spec: PlotSpec) -> bool:
    if spec.kind == "line":
        return spec.y in run.history and spec.x in run.history
    return number(run, spec.column) is not None


def _name(run: RunRecord, keys: Sequence[str]) -> str:
    return ", ".join(name(key, run.value(key)) for key in keys)


def _split(runs: Sequence[RunRecord], key: str | None) -> dict[Scalar, list[RunRecord]]:
    panels: dict[Scalar, list[RunRecord]] = {}
    for run in runs:
        panels.setdefault(run.value(key) if key else None, []).append(run)
    return panels


def _interval(values: np.ndarray, spec: PlotSpec) -> Interval:
    """On a logarithmic axis in its own space: an interval there is as long above the mean as below."""
    return log_interval(values) if spec.log_y else t_interval(values)


def _method(run: RunRecord, spec: PlotSpec) -> str:
    return run.label if "label" in spec.lines or "method" in spec.lines else ""


def _lines(
    runs: Sequence[RunRecord], spec: PlotSpec, colours: dict[str, int], along: Sequence[str]
) -> list[Curve]:
    curves = []
    for members in group(runs, spec.lines).values():
        rounds = members[0].history["round"]
        for run in members[1:]:
            rounds = np.intersect1d(rounds, run.history["round"])
        if not len(rounds):
            raise ReportError(
                f"plot {spec.stem!r}: the seeds of {members[0].label!r} share no recorded round"
            )
        last = len(rounds) - 1
        keep = rounds[np.unique(np.linspace(0, last, min(last + 1, POINTS)).round().astype(int))]
        at = [np.searchsorted(run.history["round"], keep) for run in members]

        def of(series: str, members: list[RunRecord] = members, at: list[np.ndarray] = at) -> np.ndarray:
            return np.array([run.history[series][i] for run, i in zip(members, at, strict=True)], float)

        x, y = of(spec.x).mean(axis=0), of(spec.y)
        others = {axis: of(axis).mean(axis=0) for axis in along}
        line = _name(members[0], spec.lines)
        if spec.log_x and (x > 0).any():  # a line from zero would run level to the edge of the axis
            others = {axis: values[x > 0] for axis, values in others.items()}
            x, y = x[x > 0], y[:, x > 0]
        label = _method(members[0], spec)
        shown = np.where(y > 0, y, np.nan) if spec.log_y else y
        single = tuple(shown) if 1 < len(members) <= FEW else ()
        curves.append(Curve(line, colours[line], x, _interval(y, spec), len(members), label, others, single))
    return curves


def _category(run: RunRecord, key: str) -> str:
    return name(key, run.value(key)) if key == "series" else show(run.value(key))


def _bars(runs: Sequence[RunRecord], spec: PlotSpec, colours: dict[str, int]) -> list[Curve]:
    categories = list(dict.fromkeys(_category(run, spec.x) for run in runs))
    cells: dict[str, dict[str, tuple[Interval, int]]] = {}
    labels: dict[str, str] = {}
    keys = tuple(dict.fromkeys((*spec.lines, spec.x)))
    for members in group(runs, keys).values():
        values = np.array([number(run, spec.column) for run in members], float)
        line, category = _name(members[0], spec.lines), _category(members[0], spec.x)
        cells.setdefault(line, {})[category] = (_interval(values, spec), len(members))
        labels[line] = _method(members[0], spec)
    curves = []
    for line, bars in cells.items():
        x = [category for category in categories if category in bars]
        stacked = Interval(*(np.array([bars[c][0][k] for c in x]) for k in range(3)))
        seeds = min(n for _, n in bars.values())
        curves.append(Curve(line, colours[line], x, stacked, seeds, labels[line]))
    return curves


def _grid(runs: Sequence[RunRecord], spec: PlotSpec) -> HeatMap:
    columns = list(dict.fromkeys(show(run.value(spec.x)) for run in runs))
    rows = list(dict.fromkeys(show(run.value(spec.down)) for run in runs))
    means = np.full((len(rows), len(columns)), np.nan)
    for members in group(runs, (spec.down, spec.x)).values():
        values = np.array([number(run, spec.column) for run in members], float)
        means[
            rows.index(show(members[0].value(spec.down))), columns.index(show(members[0].value(spec.x)))
        ] = values.mean()
    return HeatMap(columns, rows, means)


def _caption(spec: PlotSpec, panels: Sequence[Panel], common: Sequence[str]) -> str:
    curves = [curve for panel in panels for curve in panel.curves]
    seeds = [curve.seeds for curve in curves]
    sentences = [spec.caption] if spec.caption else []
    if common:
        sentences.append(f"All with {', '.join(common)}.")
    if spec.kind == "heatmap":
        sentences.append("Each cell is a mean over the seeds.")
    elif max(seeds) < 2:
        sentences.append("One seed each, so without confidence intervals.")
    else:
        count = f"{min(seeds)}" if min(seeds) == max(seeds) else f"{min(seeds)} to {max(seeds)}"
        drawn, band = ("Lines", "bands") if spec.kind == "line" else ("Bars", "whiskers")
        mean, what = ("geometric means", "mean of the logarithms") if spec.log_y else ("means", "mean")
        means = f"{drawn} are {mean} over {count} seeds"
        if max(seeds) <= FEW:
            few = "thin lines" if spec.kind == "line" else f"{band} reach from the lowest to the highest of"
            sentences.append(f"{means}, {few} the single runs.")
        else:
            sentences.append(f"{means}, {band} Student's t-intervals of {LEVEL:.0%} for the {what}.")
    if spec.kind == "line" and spec.x != "round" and max(seeds) > 1:
        sentences.append("A point averages the same round of all seeds, along both axes.")
    if spec.log_y and max(seeds, default=0) > 1 and any(np.isnan(curve.y.mean).any() for curve in curves):
        sentences.append("Points with a seed that is not above zero are left out: the axis is logarithmic.")
    if any(len(curve.x) == POINTS for curve in curves):
        sentences.append(f"Of long histories {POINTS} rounds are drawn, evenly chosen.")
    return " ".join(sentences)
