"""Small pieces of HTML for notebooks, which take the page's own colours and fonts."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

import numpy as np

_CELL = "padding:2px 10px 2px 0;text-align:{};border:0;background:none"


def text(value: object) -> str:
    """A value as text, with markup escaped."""
    return html.escape(str(value))


def number(value: float) -> str:
    """A number in a few digits; a dash for NaN."""
    if isinstance(value, int | np.integer):
        return f"{value:,}"
    return "–" if math.isnan(value) else f"{value:.4g}"


def table(rows: Sequence[Sequence[str]], left: int | None = 1) -> str:
    """A table of texts, its head first; the first ``left`` columns are words, all of them if None."""
    head, *body = rows
    left = len(head) if left is None else left

    def line(tag: str, cells: Sequence[str]) -> str:
        aligned = ("left" if j < left else "right" for j in range(len(cells)))
        inner = (
            f'<{tag} style="{_CELL.format(side)}">{text(cell)}</{tag}>'
            for side, cell in zip(aligned, cells, strict=True)
        )
        return f"<tr>{''.join(inner)}</tr>"

    cells = "".join(line("td", row) for row in body)
    top = f"<thead>{line('th', head)}</thead>" if any(head) else ""
    return f'<table style="border-collapse:collapse;border:0">{top}<tbody>{cells}</tbody></table>'


def note(words: str) -> str:
    """A line of words, or nothing."""
    return f"<div>{text(words)}</div>" if words else ""


def titled(title: str, *parts: str) -> str:
    """Parts under a title."""
    return f"<div><div><strong>{text(title)}</strong></div>{''.join(parts)}</div>"


def facts(title: str, pairs: Mapping[str, object]) -> str:
    """Names and values under a title."""
    return titled(title, table([("", ""), *((name, str(value)) for name, value in pairs.items())], left=2))
