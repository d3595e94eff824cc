"""Static plots with matplotlib: PNG and SVG files of a report, and the quick look at one run's history."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter

from fedstrata.lab.report.curves import DASHES, PALETTE, PALETTE_DARK, Curve, Dash, Panel, Plot
from fedstrata.lab.report.records import ReportError
from fedstrata.lab.report.statistics import FEW
from fedstrata.lab.report.typesetting import label_of, readable, scripted
from fedstrata.solving.result import BOOKKEEPING

COLOUR_MAP = "cividis"

# On dark paper; SVG files hold both and follow the reader's theme.
DARK = {
    "#1f2328": "#e4e7eb",
    "#424a53": "#c3cad2",
    "#57606a": "#9aa4af",
    "#8c959f": "#6e7781",
    "#e4e8ec": "#30363d",
    "#24292f": "#d0d7de",
    "#ffffff": "#14171b",
    **dict(zip(PALETTE, PALETTE_DARK, strict=True)),
}

STYLE = mpl.rc_params_from_file(
    str(resources.files("fedstrata.lab.report").joinpath("assets", "report.mplstyle")),
    use_default_template=False,
)
NOTE: dict[str, Any] = {"fontsize": 8, "color": "#57606a"}


def blank(width: float = 6.8, height: float = 3.7) -> Figure:
    """An empty figure that needs no display."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw(plot: Plot) -> Figure:
    """A plot as a matplotlib figure."""
    with mpl.rc_context(STYLE):
        spec, count = plot.spec, len(plot.panels)
        columns = 2 if count == 4 else min(count, 3)
        rows = -(-count // columns)
        size = (6.8, 3.7) if count == 1 else (3.3 * columns + 0.6, 2.7 * rows + 0.7)
        if count == 1 and (only := plot.panels[0].grid):
            size = (6.8, max(3.7, 0.2 * len(only.rows)))
        figure = blank(*size)
        same = spec.kind == "line"
        grid = figure.subplots(rows, columns, squeeze=False, sharey=same, sharex=same)
        axes = list(grid.flat)
        norm = _norm(plot)
        for k, (ax, panel) in enumerate(zip(axes, plot.panels, strict=False)):
            _draw_panel(ax, plot, panel, norm)
            ax.set_title(_plain(panel.title))
            if k % columns == 0:
                ax.set_ylabel(_plain(readable(spec.down) if spec.kind == "heatmap" else plot.y_label))
            elif panel.grid and (left := plot.panels[k - 1].grid) and left.rows == panel.grid.rows:
                ax.tick_params(labelleft=False)
            if k >= count - columns:
                ax.set_xlabel(_plain(plot.x_label))
                ax.tick_params(labelbottom=True)
        for ax in axes[count:]:
            ax.remove()
        if spec.kind == "heatmap":
            mappable = axes[0].collections[0]
            bar = figure.colorbar(mappable, ax=axes[:count], label=_plain(plot.y_label), shrink=0.9)
            bar.outline.set_visible(False)
        else:
            _legend(figure, plot)
        if spec.title:
            figure.suptitle(_plain(spec.title), x=0.01, ha="left", fontsize=11, fontweight="bold")
        return figure


def _draw_panel(ax: Axes, plot: Plot, panel: Panel, norm: Normalize | None) -> None:
    spec = plot.spec
    if panel.grid is not None:
        _draw_grid(ax, plot, panel, norm)
        return
    if spec.kind == "line":
        for curve in panel.curves:
            look: dict[str, Any] = {"color": _colour(curve), "linestyle": _dash(curve)}
            for values in curve.runs:
                ax.plot(curve.x, values, **look, linewidth=0.7, alpha=0.55)
            if curve.seeds > FEW:
                band: Any = (curve.x, curve.y.low, curve.y.high)
                ax.fill_between(*band, color=look["color"], alpha=0.16, linewidth=0, zorder=1.5)
            ax.plot(curve.x, curve.y.mean, **look)
    else:
        _draw_bars(ax, panel.curves)
    for reference in panel.references:
        level, text = reference.value, _plain(reference.label)
        stroke: dict[str, Any] = {"color": "#57606a", "linewidth": 1, "linestyle": (0, (4, 3)), "zorder": 1.8}
        if reference.axis == "y":
            ax.axhline(level, **stroke)
            ax.text(0.01, level, text, transform=ax.get_yaxis_transform(), va="bottom", **NOTE)
        else:
            ax.axvline(level, **stroke)
            ax.text(level, 0.99, text, transform=ax.get_xaxis_transform(), va="top", **NOTE)
    if spec.log_x:
        ax.set_xscale("log")
    if spec.log_y:
        ax.set_yscale("log")
    if spec.kind == "line":
        ax.margins(x=0.01)
        if spec.x.startswith("bytes") and not spec.log_x:
            ax.xaxis.set_major_formatter(EngFormatter("B"))


def _draw_bars(ax: Axes, curves: Sequence[Curve]) -> None:
    categories = list(dict.fromkeys(category for curve in curves for category in curve.x))
    alone = all(list(curve.x) == [curve.name] for curve in curves)
    width = 0.6 if alone else 0.8 / len(curves)
    for k, curve in enumerate(curves):
        shift = 0.0 if alone else (k - (len(curves) - 1) / 2) * width
        at = [categories.index(category) + shift for category in curve.x]
        half = np.maximum([curve.y.mean - curve.y.low, curve.y.high - curve.y.mean], 0)
        ax.bar(
            at,
            curve.y.mean,
            width * 0.92,
            color=_colour(curve),
            yerr=half.tolist() if curve.seeds > 1 else None,  # of arrays, NumPy < 2.4 warns inside Matplotlib
            error_kw={"ecolor": "#24292f", "elinewidth": 1, "capsize": 2.5},
        )
    turned = 90 if len("".join(categories)) > 80 else 0
    ax.set_xticks(range(len(categories)), [_plain(category) for category in categories], rotation=turned)
    ax.grid(visible=False, axis="x")


def _draw_grid(ax: Axes, plot: Plot, panel: Panel, norm: Normalize | None) -> None:
    grid = panel.grid
    if grid is None:
        return
    mesh = ax.pcolormesh(
        np.ma.masked_invalid(grid.means), cmap=COLOUR_MAP, norm=norm, edgecolors="white", linewidth=1
    )
    ax.set_xticks(np.arange(len(grid.columns)) + 0.5, [_plain(text) for text in grid.columns])
    ax.set_yticks(np.arange(len(grid.rows)) + 0.5, [_plain(text) for text in grid.rows])
    ax.invert_yaxis()
    ax.grid(visible=False)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    if grid.means.size > 80:
        return
    for (i, j), value in np.ndenumerate(grid.means):
        if np.isfinite(value):
            dark = sum(mesh.cmap(mesh.norm(value))[:3]) < 1.4
            colour = "white" if dark else "#1f2329"  # no theme's: it is read on the cell
            ax.text(j + 0.5, i + 0.5, f"{value:.3g}", ha="center", va="center", fontsize=8, color=colour)


def _norm(plot: Plot) -> Normalize | None:
    grids = [panel.grid.means for panel in plot.panels if panel.grid is not None]
    if not grids:
        return None
    values = np.concatenate([grid.ravel() for grid in grids])
    values = values[np.isfinite(values) & ((values > 0) | (not plot.spec.log_y))]
    low, high = (values.min(), values.max()) if len(values) else (0.1, 1.0)
    return LogNorm(low, high) if plot.spec.log_y else Normalize(low, high)


def _legend(figure: Figure, plot: Plot) -> None:
    """Names below the panels, unless the axis has them or there is one."""
    curves = {curve.name: curve for panel in plot.panels for curve in panel.curves}
    line = plot.spec.kind == "line"
    if len(curves) == 1 or (not line and all(list(curve.x) == [curve.name] for curve in curves.values())):
        return
    marks = [
        Line2D([], [], color=_colour(c), linestyle=_dash(c)) if line else Patch(color=_colour(c))
        for c in curves.values()
    ]
    widest = max(map(len, curves))
    columns = max(1, min(len(curves), int(figure.get_figwidth() * 14 / (widest + 6))))
    figure.legend(marks, [_plain(n) for n in curves], loc="outside lower left", ncols=columns, fontsize=8.5)


def _colour(curve: Curve) -> str:
    return PALETTE[curve.colour % len(PALETTE)]


def _dash(curve: Curve) -> Dash:
    return DASHES[curve.colour // len(PALETTE) % len(DASHES)]


def _plain(text: str) -> str:
    """Text as it is, but for scripts: a dollar sign does not start mathematics."""

    def script(base: str, mark: str, inner: str) -> str:
        if not re.fullmatch(r"[\w+−*·-]+", inner):
            return escape(f"{base}{mark}{inner}")
        return f"{escape(base)}${mark}{{\\mathdefault{{{inner}}}}}$"

    def escape(part: str) -> str:
        return part.replace("$", r"\$")

    return scripted(text, escape, script)


def to_png(figure: Figure) -> bytes:
    """A figure as a PNG file."""
    file = io.BytesIO()
    with mpl.rc_context(STYLE):
        figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def to_svg(figure: Figure) -> bytes:
    """A figure as an SVG file without a background, in the colours of the theme that it is read in.

    In a browser the theme is the reader's, or that of the page around it (``color-scheme``); a program that
    knows no themes shows the light one.
    """
    file = io.BytesIO()
    with mpl.rc_context(STYLE):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    rules = "".join(
        f'[style*="{way}: {light}"]{{{way}:{dark} !important}}'
        for light, dark in DARK.items()
        for way in ("fill", "stroke")
    )
    style = f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>"
    return re.sub(rb"(<svg [^>]*>)", lambda found: found[1] + style.encode(), file.getvalue(), count=1)


def inline_svg(figure: Figure) -> str:
    """A figure as an SVG element, for notebooks."""
    drawn = to_svg(figure).decode()
    return drawn[drawn.index("<svg") :]


def plot_history(
    history: Mapping[str, Any],
    metrics: Sequence[str] | None = None,
    *,
    x: str = "round",
    log_x: bool = False,
    log_y: bool | Sequence[str] = False,
    title: str = "",
    figure: Figure | None = None,
) -> Figure:
    """One panel per metric of one run's history.

    Args:
        history: series of equal length, ``"round"`` among them.
        metrics: which series; all but the rounds, the time and what was communicated, where None.
        x: the series along the axis.
        log_x: a logarithmic axis.
        log_y: a logarithmic axis for all metrics, or for those named.
        title: above the panels.
        figure: where to draw (``plt.figure()`` for a window); a new figure where None.

    Returns:
        The figure: ``figure.savefig("history.png")``.

    Raises:
        ReportError: if the history lacks a series.
    """
    chosen = [name for name in history if name not in (*BOOKKEEPING, x)] if metrics is None else list(metrics)
    if missing := [name for name in (x, *chosen) if name not in history]:
        raise ReportError(f"the history has no {missing}; it has {list(history)}")
    if not chosen:
        raise ReportError(
            f"the history has no metrics, only {list(history)}; pass metrics= to solve, or name some here"
        )
    with mpl.rc_context(STYLE):
        columns = min(len(chosen), 3)
        rows = -(-len(chosen) // columns)
        if figure is None:
            figure = blank(3.4 * columns + 0.4, 2.6 * rows + 0.3)
        axes = list(figure.subplots(rows, columns, squeeze=False, sharex=True).flat)
        for k, (ax, metric) in enumerate(zip(axes, chosen, strict=False)):
            ax.plot(np.asarray(history[x]), np.asarray(history[metric]), color=PALETTE[0])
            ax.set_title(_plain(label_of(metric)))
            ax.margins(x=0.01)
            if log_x:
                ax.set_xscale("log")
            if log_y is True or (not isinstance(log_y, bool) and metric in log_y):
                ax.set_yscale("log")
            if k >= len(chosen) - columns:
                ax.set_xlabel(_plain(label_of(x)))
                ax.tick_params(labelbottom=True)
        for ax in axes[len(chosen) :]:
            ax.remove()
        if title:
            figure.suptitle(_plain(title), x=0.01, ha="left", fontsize=11, fontweight="bold")
        return figure
