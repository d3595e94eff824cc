"""Small pieces of HTML for notebooks: tables, bars and curves that take the page's own colours and fonts."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

import numpy as np

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito: for all eyes
_CELL = "padding:2px 10px 2px 0;text-align:{};border:0;background:none"


def text(value: object) -> str:
    """Anything as text, with markup escaped."""
    return html.escape(str(value))


def number(value: float) -> str:
    """A number in a few digits; a dash for one that is not known."""
    if isinstance(value, int | np.integer):
        return f"{value:,}"
    return "–" if math.isnan(value) else f"{value:.4g}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table of texts, the first ``left`` columns of which are words."""

    def line(tag: str, cells: Sequence[str]) -> str:
        aligned = ("left" if j < left else "right" for j in range(len(cells)))
        inner = (
            f'<{tag} style="{_CELL.format(side)}">{text(cell)}</{tag}>'
            for side, cell in zip(aligned, cells, strict=True)
        )
        return f"<tr>{''.join(inner)}</tr>"

    body = "".join(line("td", row) for row in rows)
    top = f"<thead>{line('th', head)}</thead>" if any(head) else ""
    return f'<table style="border-collapse:collapse;border:0">{top}<tbody>{body}</tbody></table>'


def note(words: str) -> str:
    """A line of words, or nothing."""
    return f"<div>{text(words)}</div>" if words else ""


def titled(title: str, *parts: str) -> str:
    """Parts under a title."""
    return f"<div><div><strong>{text(title)}</strong></div>{''.join(parts)}</div>"


def facts(title: str, pairs: Mapping[str, object]) -> str:
    """Names and values under a title."""
    return titled(title, table(("", ""), [(name, str(value)) for name, value in pairs.items()], left=2))


def bars(
    values: Sequence[float] | np.ndarray,
    label: str,
    width: int = 360,
    height: int = 60,
    names: Sequence[str] | None = None,
) -> str:
    """Bars side by side, as an inline drawing; of very many, means of neighbours.

    Args:
        values: their heights.
        label: what they are, for those who cannot see them.
        width: of the drawing, in pixels.
        height: of the bars.
        names: below the bars, as far as there is room, and where the pointer is.
    """
    heights = np.asarray(values, float)
    if len(heights) > width // 2:
        heights, names = np.array([part.mean() for part in np.array_split(heights, width // 2)]), None
    step, top = width / len(heights), max(float(heights.max()), 1e-300)
    drawn = "".join(
        f'<rect x="{j * step:.2f}" y="{height * (1 - h / top):.2f}" width="{max(step * 0.85, 0.8):.2f}" '
        f'height="{height * h / top:.2f}" fill="{COLOURS[0]}">'
        f"<title>{text(names[j] if names else j)}: {h:,.6g}</title></rect>"
        for j, h in enumerate(heights)
    )
    if names is None or max(map(len, names)) * 6.5 > step:
        return _svg(drawn, width, height, label)
    below = "".join(
        f'<text x="{j * step:.2f}" y="{height + 13}" font-size="11" fill="currentColor">{text(name)}</text>'
        for j, name in enumerate(names)
    )
    return _svg(drawn + below, width, height + 18, label)


def curves(
    x: np.ndarray, series: Mapping[str, np.ndarray], label: str, width: int = 360, height: int = 140
) -> str:
    """Curves over a common axis, each in its own range from its least to its largest value, with a legend."""
    drawn, legend = [], []
    span = float(x[-1] - x[0]) or 1.0
    for j, (name, values) in enumerate(series.items()):
        colour = COLOURS[j % len(COLOURS)]
        good = np.isfinite(values)
        if not good.any():
            continue
        low, high = float(values[good].min()), float(values[good].max())
        across = (x[good] - x[0]) / span * (width - 8) + 4
        up = height - 6 - (values[good] - low) / ((high - low) or 1.0) * (height - 12)
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(across, up, strict=True))
        drawn.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        legend.append(f'<span style="color:{colour}">■</span> {text(name)} ({number(low)} to {number(high)})')
    frame = (
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" fill="none" stroke="currentColor" '
    )
    return _svg(frame + 'stroke-opacity="0.3"/>' + "".join(drawn), width, height, label) + (
        f"<div>{' &#160; '.join(legend)}</div>"
    )


def _svg(inner: str, width: int, height: int, label: str) -> str:
    return (
        f'<svg role="img" aria-label="{text(label)}" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" style="max-width:100%">{inner}</svg>'
    )
