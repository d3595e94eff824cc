"""The same plots for the page, as plotly figures: plain dicts that plotly.js draws.

`assets/page.js` puts in what depends on the reader: the width decides how many panels stand side by side, the
theme decides the colours (each trace says in its ``meta`` which one it wants).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fedstrata.lab.report.curves import DASHES, PALETTE, Curve, Panel, Plot
from fedstrata.lab.report.records import ReportError
from fedstrata.lab.report.typesetting import label_of, readable, typeset

_DASH = dict(zip(DASHES, ("solid", "dash", "dot", "dashdot"), strict=True))


def figure(plot: Plot) -> dict[str, Any]:
    """A plot as plotly's ``{"data": …, "layout": …}``."""
    traces: list[dict[str, Any]] = []
    layout: dict[str, Any] = {"annotations": [], "shapes": [], "hovermode": "closest"}
    rows = {tuple(panel.grid.rows) for panel in plot.panels if panel.grid}
    once = plot.spec.kind == "line" or len(rows) == 1  # the axis of the leftmost panel serves all
    layout["meta"] = {"panels": len(plot.panels), "kind": plot.spec.kind, "shared": once}
    if len(plot.along) > 1:
        layout["meta"] |= {"x": plot.spec.x, "along": {axis: label_of(axis) for axis in plot.along}}
        layout["meta"]["along"][plot.spec.x] = typeset(plot.x_label)
    seen: set[str] = set()
    for k, panel in enumerate(plot.panels):
        end = "" if k == 0 else str(k + 1)
        axes = {"xaxis": f"x{end}", "yaxis": f"y{end}"}
        layout[f"xaxis{end}"], layout[f"yaxis{end}"] = _axes(plot, end)
        if panel.title:
            where = {"x": 0, "y": 1, "xref": f"x{end} domain", "yref": f"y{end} domain"}
            title = where | {"text": typeset(panel.title), "showarrow": False}
            layout["annotations"].append(title | {"xanchor": "left", "yanchor": "bottom"})
        for reference in panel.references:
            shape, note = _reference(plot, reference.axis, reference.value, reference.label, end)
            layout["shapes"].append(shape | {"name": reference.axis})
            layout["annotations"].append(note)
        if panel.grid is not None:
            traces.append(_heatmap(plot, panel) | axes)
        for curve in panel.curves:
            shared = axes | {"legendgroup": typeset(curve.name), "name": typeset(curve.name)}
            if plot.spec.kind == "line":
                traces += [trace | shared for trace in _line(plot, curve, first=curve.name not in seen)]
            else:
                traces.append(_bar(curve, first=curve.name not in seen) | shared)
            seen.add(curve.name)
    alone = plot.spec.kind == "bar" and all(list(c.x) == [c.name] for p in plot.panels for c in p.curves)
    layout["showlegend"] = False  # the page has its own, which all plots share
    layout["meta"]["legend"] = len(seen) > 1 and not alone
    if plot.spec.kind == "bar":
        layout |= {
            "barmode": "overlay" if alone else "group",
            "bargap": 0.35 if alone else 0.2,
            "bargroupgap": 0.07,
        }
    if plot.spec.kind == "heatmap":
        layout["coloraxis"] = _colour_axis(plot)
    return {"data": traces, "layout": layout}


def _axes(plot: Plot, end: str) -> tuple[dict[str, Any], dict[str, Any]]:
    spec = plot.spec
    x: dict[str, Any] = {"title": {"text": typeset(plot.x_label)}, "anchor": f"y{end}"}
    y_label = readable(spec.down) if spec.kind == "heatmap" else plot.y_label
    y: dict[str, Any] = {"title": {"text": typeset(y_label)}, "anchor": f"x{end}"}
    if spec.kind != "line":
        x["type"] = "category"
    elif spec.log_x:
        x |= {"type": "log", "exponentformat": "power", "dtick": 1}
    if spec.x.startswith("bytes"):
        x |= {"tickformat": "~s", "ticksuffix": "B", "ticklabeloverflow": "hide past domain"}
    if spec.kind == "heatmap":
        y |= {"type": "category", "autorange": "reversed"}
    elif spec.log_y:
        y |= {"type": "log", "exponentformat": "power"}
    if end and spec.kind == "line":
        x["matches"], y["matches"] = "x", "y"
    return x, y


def _line(plot: Plot, curve: Curve, *, first: bool) -> list[dict[str, Any]]:
    x = np.asarray(curve.x, float)
    if plot.spec.log_x:
        x = np.where(x > 0, x, np.nan)
    colour, dash = _look(curve)
    meta = {"colour": curve.colour % len(PALETTE), "label": typeset(curve.label)}
    mean: dict[str, Any] = {
        "type": "scatter",
        "mode": "lines",
        "x": _numbers(x),
        "y": _numbers(curve.y.mean),
        "line": {"color": colour, "dash": dash, "width": 2},
        "meta": meta | {"role": "line", "along": {a: _numbers(v) for a, v in curve.along.items()}},
        "showlegend": first,
    }
    about = "<b>%{y:.5~g}</b> at %{xaxis.title.text} %{x:.6~g}"
    if curve.seeds < 2:
        mean["hovertemplate"] = f"{about}<extra>%{{fullData.name}}</extra>"
        return [mean]
    mean["customdata"] = [[a, b] for a, b in zip(_numbers(curve.y.low), _numbers(curve.y.high), strict=True)]
    which = "runs" if curve.runs else "95 %"
    interval = f"{which}: %{{customdata[0]:.4g}} to %{{customdata[1]:.4g}}"
    mean["hovertemplate"] = f"{about}<br>{interval}<extra>%{{fullData.name}}, {curve.seeds} seeds</extra>"
    if curve.runs:
        thin = {**mean, "line": mean["line"] | {"width": 0.8}, "opacity": 0.55, "showlegend": False}
        thin = {key: value for key, value in thin.items() if key not in ("customdata", "hovertemplate")}
        return [*({**thin, "y": _numbers(values), "hoverinfo": "skip"} for values in curve.runs), mean]
    finite = np.isfinite(x) & np.isfinite(curve.y.low) & np.isfinite(curve.y.high)
    x, low, high = x[finite], curve.y.low[finite], curve.y.high[finite]
    band = {
        "type": "scatter",
        "mode": "lines",
        "x": _numbers(np.concatenate([x, x[::-1]])),
        "y": _numbers(np.concatenate([high, low[::-1]])),
        "fill": "toself",
        "fillcolor": f"rgba{(*bytes.fromhex(colour[1:]), 0.16)}",
        "line": {"width": 0},
        "meta": meta | {"role": "band"},
        "hoverinfo": "skip",
        "showlegend": False,
    }
    return [band, mean]


def _bar(curve: Curve, *, first: bool) -> dict[str, Any]:
    trace = {
        "type": "bar",
        "x": [typeset(str(category)) for category in curve.x],
        "y": _numbers(curve.y.mean),
        "marker": {"color": _look(curve)[0]},
        "meta": {"colour": curve.colour % len(PALETTE), "role": "bar", "label": typeset(curve.label)},
        "showlegend": first,
        "hovertemplate": "<b>%{y:.5~g}</b>, %{xaxis.title.text} %{x}<extra>%{fullData.name}</extra>",
    }
    if curve.seeds > 1:
        up, down = curve.y.high - curve.y.mean, curve.y.mean - curve.y.low
        bounds = {"type": "data", "symmetric": False, "array": _numbers(up), "arrayminus": _numbers(down)}
        trace["error_y"] = bounds | {"thickness": 1.2, "width": 4}
    return trace


def _heatmap(plot: Plot, panel: Panel) -> dict[str, Any]:
    if panel.grid is None:
        raise ReportError("a heat-map needs a grid")
    means = panel.grid.means
    shown = np.where(means > 0, np.log10(np.where(means > 0, means, 1)), np.nan) if plot.spec.log_y else means
    return {
        "type": "heatmap",
        "x": [typeset(text) for text in panel.grid.columns],
        "y": [typeset(text) for text in panel.grid.rows],
        "z": [_numbers(row) for row in shown],
        "text": [["" if math.isnan(value) else f"{value:.3g}" for value in row] for row in means],
        "texttemplate": "%{text}" if means.size <= 80 else "",
        "hovertemplate": "<b>%{text}</b><br>%{xaxis.title.text} %{x}<br>%{yaxis.title.text} %{y}<extra/>",
        "xgap": 2,
        "ygap": 2,
        "coloraxis": "coloraxis",
        "meta": {"role": "heatmap"},
    }


def _colour_axis(plot: Plot) -> dict[str, Any]:
    label = f"log₁₀ {plot.y_label}" if plot.spec.log_y else plot.y_label
    title = {"text": typeset(label), "side": "right", "font": {"size": 12.5}}
    return {"colorscale": "Cividis", "colorbar": {"title": title, "thickness": 12, "outlinewidth": 0}}


def _reference(
    plot: Plot, axis: str, value: float, label: str, end: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    logarithmic = plot.spec.log_y if axis == "y" else plot.spec.log_x
    # Plotly places shapes by value but annotations on a logarithmic axis by exponent.
    place = math.log10(value) if logarithmic and value > 0 else value
    level, axis_of = ("y", "x") if axis == "y" else ("x", "y")
    refs = {f"{level}ref": f"{level}{end}", f"{axis_of}ref": f"{axis_of}{end} domain"}
    ends = {f"{level}0": value, f"{level}1": value, f"{axis_of}0": 0, f"{axis_of}1": 1}
    note = {level: place, axis_of: int(axis == "x"), "text": typeset(label), "showarrow": False}
    return (
        refs | ends | {"type": "line", "line": {"width": 1, "dash": "dash"}, "layer": "above"},
        refs
        | note
        | {"name": f"reference {axis}", "xanchor": "left", "yanchor": "bottom" if axis == "y" else "top"},
    )


def _look(curve: Curve) -> tuple[str, str]:
    return PALETTE[curve.colour % len(PALETTE)], _DASH[DASHES[curve.colour // len(PALETTE) % len(DASHES)]]


def _numbers(values: np.ndarray) -> list[float | None]:
    """Six digits are what a screen can show; JSON has no NaN."""
    return [
        float(f"{value:.6g}") if math.isfinite(value) else None
        for value in np.asarray(values, float).tolist()
    ]
