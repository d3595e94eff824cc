"""The split drawn: a bar for each client, as long as it has samples, coloured by their classes."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

import numpy as np

from fedstrata.lab.report.curves import PALETTE
from fedstrata.lab.report.specs import Split

if TYPE_CHECKING:
    from fedstrata.data.federated import FederatedData

CLASSES = 20  # more cannot be told apart
BARS = 60  # of clients; more are counted by their size instead


def split_of(data: FederatedData, label: str = "y", caption: str = "") -> Split:
    """How data is split.

    Args:
        data: the data.
        label: the array of classes; where there is none in memory, it has many values, or there are many
            clients, only sizes are kept.
        caption: below the picture.
    """
    sizes, classes = tuple(map(int, data.sizes)), {}
    labels = data.train.get(label) if isinstance(data.train, dict) else None
    if isinstance(labels, np.ndarray) and labels.ndim == 1 and len(sizes) <= BARS:
        values = np.unique(labels)
        if len(values) <= CLASSES and np.all(values == np.round(values)):
            parts = np.split(labels, np.cumsum(sizes)[:-1])
            counts = np.array([[np.sum(part == value) for part in parts] for value in values])
            classes = {
                f"{int(value)}": tuple(map(int, row)) for value, row in zip(values, counts, strict=True)
            }
    names = tuple(map(str, data.names)) if data.names and len(sizes) <= BARS else ()
    return Split(sizes, classes, names, caption)


def drawn(split: Split) -> str:
    """The split as HTML."""
    total, m = sum(split.sizes), len(split.sizes)
    words = f"{m} clients, {total} training samples, {min(split.sizes)} to {max(split.sizes)} each."
    body = _bars(split) if m <= BARS else _histogram(split)
    caption = " ".join(filter(None, [words, split.caption]))
    return f"<figure>{body}<figcaption>{html.escape(caption)}</figcaption></figure>"


def _bars(split: Split) -> str:
    names = split.names or tuple(f"client {i}" for i in range(len(split.sizes)))
    classes = split.classes or {"samples": split.sizes}
    rows = []
    for i, (name, size) in enumerate(zip(names, split.sizes, strict=True)):
        parts = "".join(
            f'<span class="{_look(k)}" style="width:{100 * counts[i] / max(split.sizes):.2f}%" '
            f'title="{html.escape(name)}, {html.escape(c)}: {counts[i]}"></span>'
            for k, (c, counts) in enumerate(classes.items())
            if counts[i]
        )
        rows.append(
            f'<div class="client"><span class="who">{html.escape(name)}</span>'
            f'<span class="bar">{parts}<span class="count">{size}</span></span></div>'
        )
    keys = "".join(
        f'<span><span class="key-mark {_look(k)}"></span>{html.escape(c)}</span>'
        for k, c in enumerate(split.classes)
    )
    legend = f'<div class="split-keys">class {keys}</div>' if keys else ""
    dense = " dense" if len(split.sizes) > 12 else ""
    return f'<div class="split{dense}">{"".join(rows)}</div>{legend}'


def _histogram(split: Split) -> str:
    counts, edges = np.histogram(split.sizes, bins=min(24, len(set(split.sizes))))
    rows = "".join(
        f'<div class="client"><span class="who">{low:.0f}–{high:.0f} samples</span>'
        f'<span class="bar"><span class="c0" style="width:{100 * n / max(counts):.2f}%"></span>'
        f'<span class="count">{n} clients</span></span></div>'
        for n, low, high in zip(counts, edges[:-1], edges[1:], strict=True)
        if n
    )
    return f'<div class="split dense">{rows}</div>'


def _look(k: int) -> str:
    """The class of the style sheet: a colour of the palette, paler the second and third time."""
    return f"c{k % len(PALETTE)} pale{k // len(PALETTE)}"
