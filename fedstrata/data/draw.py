"""The picture of a split."""

from typing import TYPE_CHECKING, Any

import numpy as np

from fedstrata.support.lazy import extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_LEGEND = 20  # more classes than this get a colour scale


def stacked_bars(parts: list[np.ndarray], labels: np.ndarray | None, title: str) -> "Figure":
    """One bar per client, stacked by class.

    Args:
        parts: The sample indices of each client.
        labels: The class of each sample, or None to draw the sizes only.
        title: The title of the picture.

    Returns:
        The matplotlib figure.
    """
    with extra("lab", "The picture of a split"):
        import matplotlib
        from matplotlib.figure import Figure

    clients = len(parts)
    # A plain Figure: no pyplot state, so nothing to close and no display needed.
    figure = Figure(figsize=(min(11.0, max(6.0, 2.5 + 0.3 * clients)), 3.8), layout="constrained")
    axes = figure.add_subplot()
    position = np.arange(clients)
    gaps = clients <= 60
    style: dict[str, Any] = {
        "width": 0.82 if gaps else 1.0,
        "linewidth": 0.4 if gaps else 0.0,
        "edgecolor": "white",
    }
    if labels is None:
        axes.bar(position, [len(part) for part in parts], color="tab:blue", **style)
    else:
        classes, members = np.unique(labels, return_inverse=True)
        counts = np.stack([np.bincount(members[part], minlength=len(classes)) for part in parts], axis=1)
        few = len(classes) <= _MAX_LEGEND
        scale = matplotlib.colormaps["viridis" if not few else "tab10" if len(classes) <= 10 else "tab20"]
        colours = scale(np.arange(len(classes)) if few else np.linspace(0, 1, len(classes)))
        bottom = np.zeros(clients)
        for value, row, colour in zip(classes, counts, colours, strict=True):
            axes.bar(position, row, bottom=bottom, color=colour, label=str(value), **style)
            bottom += row
        if few:
            handles, names = axes.get_legend_handles_labels()  # the legend reads downwards like the stack
            figure.legend(
                handles[::-1],
                names[::-1],
                title="class",
                loc="outside right upper",
                frameon=False,
                fontsize=9,
            )
        else:
            colour_bar = figure.colorbar(matplotlib.cm.ScalarMappable(cmap=scale), ax=axes, pad=0.02)
            colour_bar.set_ticks([0, 1], labels=[str(classes[0]), str(classes[-1])])
            colour_bar.set_label("class")
    axes.set(xlabel="client", ylabel="samples", title=title, xlim=(-0.6, clients - 0.4))
    if clients <= 25:
        axes.set_xticks(position)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    return figure
