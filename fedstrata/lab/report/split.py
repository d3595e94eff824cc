"""How the samples are distributed over the clients: counts by class, or sizes, as a plot like any other."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from fedstrata.data.samples import by_name
from fedstrata.lab.report.curves import Curve, HeatMap, Panel, Plot
from fedstrata.lab.report.plots import draw
from fedstrata.lab.report.specs import PlotSpec, Split
from fedstrata.lab.report.statistics import Interval

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
    labels = by_name(data.train).get(label)
    if type(labels) is np.ndarray and labels.ndim == 1 and len(sizes) <= BARS:
        values = np.unique(labels)
        if len(values) <= CLASSES and np.all(values == np.round(values)):
            parts = np.split(labels, np.cumsum(sizes)[:-1])
            counts = np.array([[np.sum(part == value) for part in parts] for value in values])
            classes = {
                f"{int(value)}": tuple(map(int, row)) for value, row in zip(values, counts, strict=True)
            }
    names = tuple(map(str, data.names)) if data.names and len(sizes) <= BARS else ()
    return Split(sizes, classes, names, caption)


def figure_of(data: FederatedData, label: str = "y") -> Figure:
    """The split as a figure."""
    return draw(plot_of(split_of(data, label)))


def plot_of(split: Split) -> Plot:
    """The split as a plot: how many samples of each class a client has, or their sizes alone."""
    names = [*(split.names or [f"client {i}" for i in range(len(split.sizes))])]
    total, m = sum(split.sizes), len(split.sizes)
    words = f"{m} clients, {total} training samples, {min(split.sizes)} to {max(split.sizes)} each."
    caption = " ".join(filter(None, [words, split.caption]))
    if split.classes and m <= BARS:
        spec = PlotSpec("samples", "class", "heatmap", down="client", name="split", title="Samples by class")
        counts = np.array(list(split.classes.values()), float).T
        sized = [f"{name} ({size})" for name, size in zip(names, split.sizes, strict=True)]
        return Plot(
            spec, [Panel("", [], HeatMap([*split.classes], sized, counts), [])], caption, "class", "samples"
        )
    spec = PlotSpec("samples", "client", "bar", name="split", title="Samples of each client")
    if m <= BARS:
        return _bars(spec, names, np.array(split.sizes), caption, "client", "training samples")
    counts, edges = np.histogram(split.sizes, bins=min(24, len(set(split.sizes))))
    ranges = [f"{low:.0f}–{high:.0f}" for low, high in itertools.pairwise(edges)]
    return _bars(spec, ranges, counts, caption, "training samples", "clients")


def _bars(spec: PlotSpec, x: list[str], heights: np.ndarray, caption: str, below: str, beside: str) -> Plot:
    nothing = np.full(len(x), np.nan)
    curve = Curve(beside, 0, x, Interval(heights.astype(float), nothing, nothing), 1)
    return Plot(spec, [Panel("", [curve], None, [])], caption, below, beside)
