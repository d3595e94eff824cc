"""The progress of an experiment: bars in a terminal, a line for each finished run elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import progress as bars
from rich.console import Console

from fedstrata.lab.experiments.base import Setting
from fedstrata.lab.report import RunRecord
from fedstrata.solving.result import BOOKKEEPING
from fedstrata.solving.track import Row, Run, Tracker
from fedstrata.support.compiled import loaded

_SHOWN = 8  # numbers of a run that fit on a line


class Display:
    """The number of finished runs, and the progress of the current one.

    Args:
        total: the number of runs.
        done: how many of them are there already.
        metrics: which to show first.
        console: where.
        enabled: whether to show anything.
    """

    def __init__(
        self, total: int, done: int, metrics: Sequence[str], console: Console | None, enabled: bool
    ) -> None:
        self.total, self.done, self.metrics, self.enabled = total, done, metrics, enabled
        self.console = console or Console()
        self._bar: Any = None
        self._loaded = loaded()

    def __enter__(self) -> Display:
        if self.enabled and self.done:
            self.console.print(f"{self.done} of {self.total} runs are already done.")
        if self.enabled and self.console.is_terminal and self.done < self.total:
            self._bar = bars.Progress(
                bars.TextColumn("{task.description}"), bars.BarColumn(bar_width=24),
                bars.MofNCompleteColumn(), bars.TimeElapsedColumn(),
                bars.TextColumn("{task.fields[metrics]}"), console=self.console, transient=True,
            )  # fmt: skip
            self._all = self._bar.add_task("runs", total=self.total, completed=self.done, metrics="")
            self._one = self._bar.add_task("", total=None, metrics="")
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def started(self, setting: Setting, others: int = 0) -> None:
        """A run begins, perhaps side by side with others."""
        if self._bar is not None:
            words = setting.run + (f" and {others} more" if others else "")
            self._bar.reset(self._one, total=None, description=words, metrics="compiling")

    def advanced(self, row: Row, rounds: int) -> None:
        """A run has a new evaluation."""
        if self._bar is not None:
            words = self._latest({name: [value] for name, value in row.items()})
            self._bar.update(self._one, completed=int(row["round"]), total=rounds, metrics=words)

    def finished(self, setting: Setting, runs: Sequence[RunRecord]) -> None:
        """A run is stored."""
        self.done += 1
        if self._bar is not None:
            self._bar.update(self._all, completed=self.done)
        if self.enabled:
            words = self._latest(runs[-1].history) if runs else "nothing"
            words += f"  {runs[-1].verdict}" if runs and runs[-1].verdict else ""
            took = f"{sum(run.seconds for run in runs):.1f} s"
            if loaded() > self._loaded:
                took += ", compiled programs found on disk"
            self._loaded = loaded()
            self.console.print(
                f"[{self.done}/{self.total}] {setting.run} ({took}): {words}",
                markup=False,
                highlight=False,
                soft_wrap=self._bar is None,
                no_wrap=None if self._bar is None else True,
                overflow=None if self._bar is None else "ellipsis",
            )

    def _latest(self, history: Mapping[str, Any]) -> str:
        names = [name for name in self.metrics if name in history]
        names += [name for name in history if name not in names and name not in BOOKKEEPING]
        return "  ".join(f"{name} {history[name][-1]:.4g}" for name in names[:_SHOWN])


class Watch(Tracker):
    """Shows a run of `solve` on a display, without cutting it into single evaluations."""

    def __init__(self, display: Display) -> None:
        self.display = display

    def open(self, runs: Sequence[Run]) -> None:
        self.rounds = runs[0].parameters["rounds"]

    def log(self, lane: int, rows: Sequence[Row]) -> None:
        self.display.advanced(rows[-1], self.rounds)
