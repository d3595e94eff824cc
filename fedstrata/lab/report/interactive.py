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
    if (limits := plot.limits()) is not None:
        layout["meta"]["limits"] = _numbers(np.log10(limits) if plot.spec.log_y else np.array(limits))
    seen: set[str] = set()
    for k, panel in enumerate(plot.panels):
        end = "" if k == 0 else str(k + 1)
        axes = {"xaxis": f"x{end}", "yaxis": f"y{end}"}
        layout[f"xaxis{end}"], layout[f"yaxis{end}"] = _axes(plot, end)
        if panel.title:
            where = {"x": 0, "y": 1, "xref": f"x{end} domain", "yref": f"y{end} domain"}
            layout["annotations"].append(
                {
                    **where,
                    "text": _text(panel.title),
                    "showarrow": False,
                    "xanchor": "left",
                    "yanchor": "bottom",
                }
            )
        for reference in panel.references:
            shape, note = _reference(plot, reference.axis, reference.value, reference.label, end)
            layout["shapes"].append(shape | {"name": reference.axis})
            layout["annotations"].append(note)
        if panel.grid is not None:
            traces.append(_heatmap(plot, panel) | axes)
        for curve in panel.curves:
            shared = axes | {"legendgroup": _text(curve.name), "name": _text(curve.name)}
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
    x: dict[str, Any] = {"title": {"text": _text(plot.x_label)}, "anchor": f"y{end}"}
    y_label = readable(spec.down) if spec.kind == "heatmap" else plot.y_label
    y: dict[str, Any] = {"title": {"text": _text(y_label)}, "anchor": f"x{end}"}
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
        "fillcolor": f"rgba{(*_rgb(colour), 0.16)}",
        "line": {"width": 0},
        "meta": meta | {"role": "band"},
        "hoverinfo": "skip",
        "showlegend": False,
    }
    return [band, mean]


def _bar(curve: Curve, *, first: bool) -> dict[str, Any]:
    trace = {
        "type": "bar",
        "x": [_text(str(category)) for category in curve.x],
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
        "x": [_text(text) for text in panel.grid.columns],
        "y": [_text(text) for text in panel.grid.rows],
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
    bar: dict[str, Any] = {
        "title": {"text": _text(plot.y_label), "side": "right", "font": {"size": 12.5}},
        "thickness": 12,
        "outlinewidth": 0,
    }
    if plot.spec.log_y:
        shown = [panel.grid.means for panel in plot.panels if panel.grid is not None]
        ticks = _decades(np.concatenate([means.ravel() for means in shown]))
        bar |= {"tickvals": [math.log10(tick) for tick in ticks], "ticktext": [f"{tick:g}" for tick in ticks]}
    return {"colorscale": "Cividis", "colorbar": bar}


def _decades(values: np.ndarray) -> list[float]:
    """The numbers 1, 2, 5 times powers of ten in the values' range; only the powers where those are many."""
    positive = values[values > 0]
    if not len(positive):
        return []
    low, high = float(positive.min()), float(positive.max())
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1, 2, 5) if len(powers) <= 4 else (1,)
    return [tick for power in powers for digit in digits if low <= (tick := digit * 10.0**power) <= high]


def _reference(
    plot: Plot, axis: str, value: float, label: str, end: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    logarithmic = plot.spec.log_y if axis == "y" else plot.spec.log_x
    # Plotly places shapes by value but annotations on a logarithmic axis by exponent.
    place = math.log10(value) if logarithmic and value > 0 else value
    line = {"type": "line", "line": {"width": 1, "dash": "dash"}, "layer": "above"}
    note = {"text": _text(label), "showarrow": False, "name": f"reference {axis}"}
    if axis == "y":
        refs = {"xref": f"x{end} domain", "yref": f"y{end}"}
        return (
            line | refs | {"x0": 0, "x1": 1, "y0": value, "y1": value},
            note | refs | {"x": 0, "y": place, "xanchor": "left", "yanchor": "bottom"},
        )
    refs = {"xref": f"x{end}", "yref": f"y{end} domain"}
    return (
        line | refs | {"x0": value, "x1": value, "y0": 0, "y1": 1},
        note | refs | {"x": place, "y": 1, "xanchor": "left", "yanchor": "top"},
    )


def _look(curve: Curve) -> tuple[str, str]:
    return PALETTE[curve.colour % len(PALETTE)], _DASH[DASHES[curve.colour // len(PALETTE) % len(DASHES)]]


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _numbers(values: np.ndarray) -> list[float | None]:
    """Six digits are what a screen can show; JSON has no NaN."""
    return [
        float(f"{value:.6g}") if math.isfinite(value) else None
        for value in np.asarray(values, float).tolist()
    ]


def _text(text: str) -> str:
    return typeset(text)  # plotly reads tags in names
