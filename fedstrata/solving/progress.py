"""A progress bar for anything that takes longer than two seconds."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

PATIENCE = 2.0  # seconds before a bar appears


class Progress:
    """Rounds done, time left and the current metrics."""

    def __init__(self, total: int, done: int = 0, enabled: bool = True, label: str = "rounds") -> None:
        self.total, self.done, self.enabled, self.label = total, done, enabled, label
        self._bar: Any = None
        self._began = time.perf_counter()

    def __enter__(self) -> Progress:
        return self

    def update(self, done: int, metrics: dict[str, float]) -> None:
        """Move the bar; it appears with the first update after two seconds."""
        self.done = done
        if not self.enabled or (self._bar is None and time.perf_counter() - self._began < PATIENCE):
            return
        if self._bar is None:
            from rich import progress

            self._bar = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TimeRemainingColumn(),
                progress.TextColumn("{task.fields[metrics]}"),
            )
            self._bar.start()
            self._task = self._bar.add_task(self.label, total=self.total, metrics="")
        words = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        self._bar.update(self._task, completed=done, metrics=words)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
