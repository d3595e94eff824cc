"""A search's scores over one or two hyper-parameters, and a comparison's performance profiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from fedstrata.lab.report.plots import STYLE, blank


def plot_trials(trials: Sequence[tuple[Mapping[str, Any], float]], names: Sequence[str]) -> Figure:
    """A line over one hyper-parameter, a heat map over two: the best score of the others; grey diverged.

    Colours are the scores' distance above the best, so that its unit does not count.
    """
    with mpl.rc_context(STYLE):
        figure = blank()
        ax = figure.subplots()
        best: dict[tuple[Any, ...], float] = {}
        for values, score in trials:
            at = tuple(_rounded(values[name]) for name in names)
            best[at] = min(best.get(at, np.inf), score)
        axes = [sorted({at[k] for at in best}, key=_order) for k in range(len(names))]
        finite = [score for score in best.values() if np.isfinite(score)]
        if len(names) == 1:
            shown = [best[(value,)] for value in axes[0]]
            ax.plot([str(value) for value in axes[0]], np.where(np.isfinite(shown), shown, np.nan), "o-")
            ax.set_xlabel(names[0])
            ax.set_ylabel("score")
            return figure
        least = min(finite, default=0.0)
        above = np.array([[best.get((a, b), np.nan) - least for b in axes[1]] for a in axes[0]])
        positive = above[np.isfinite(above) & (above > 0)]
        floor = positive.min() if positive.size else 1.0
        norm = LogNorm(floor, max(float(np.median(positive)) if positive.size else 1.0, 10 * floor))
        mesh = ax.imshow(
            np.where(np.isfinite(above), np.maximum(above, floor), np.nan),
            norm=norm, aspect="auto", origin="lower", cmap="viridis_r",
        )  # fmt: skip
        ax.set_facecolor("0.8")
        ax.set_xticks(range(len(axes[1])), [str(value) for value in axes[1]], rotation=45)
        ax.set_yticks(range(len(axes[0])), [str(value) for value in axes[0]])
        ax.set_xlabel(names[1])
        ax.set_ylabel(names[0])
        figure.colorbar(mesh, ax=ax, label="score above the best", extend="max")
        return figure


def plot_profiles(profiles: Mapping[str, tuple[np.ndarray, np.ndarray]], cost: str) -> Figure:
    """Dolan and Moré's: the share of runs that a method solves within τ times the best one's cost."""
    with mpl.rc_context(STYLE):
        figure = blank()
        ax = figure.subplots()
        for name, (tau, share) in profiles.items():
            ax.step(tau, share, where="post", label=name)
        ax.set_xscale("log")
        ax.set_ylim(-0.02, 1.02)
        ax.set_xlabel(f"τ: {cost} to the target, as a multiple of the best method's")
        ax.set_ylabel("share of runs solved")
        ax.legend(frameon=False)
        return figure


def _rounded(value: Any) -> Any:
    return float(f"{value:.3g}") if isinstance(value, float) else value


def _order(value: Any) -> Any:
    return (0, value, "") if isinstance(value, int | float) else (1, 0, str(value))
