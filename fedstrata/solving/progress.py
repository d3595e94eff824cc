"""A progress bar for anything that takes longer than two seconds."""

from __future__ import annotations

import shutil
import sys
import time
from datetime import timedelta

PATIENCE = 2.0  # seconds before a bar appears
EVERY = 0.5  # seconds between two of its steps
BAR = 24  # characters


class Progress:
    """A bar with the rounds done, the time left and the current metrics."""

    def __init__(self, total: int, done: int = 0, enabled: bool = True, label: str = "rounds") -> None:
        self.total, self.done, self.enabled, self.label = total, done, enabled, label
        self._first = done
        self._began = self._shown = time.perf_counter()
        self._width = 0

    def __enter__(self) -> Progress:
        return self

    def update(self, done: int, metrics: dict[str, float]) -> None:
        """Move the bar; it appears with the first update after two seconds, and moves twice a second."""
        self.done, now = done, time.perf_counter()
        if not self.enabled or now - self._shown < (EVERY if self._width else PATIENCE):
            return
        self._shown = now
        left = (now - self._began) / max(1, done - self._first) * (self.total - done)
        bar = "█" * round(BAR * done / self.total)
        words = [f"{self.label} {bar:░<{BAR}} {done}/{self.total}", f"{timedelta(seconds=round(left))} left"]
        line = "  ".join([*words, *(f"{name} {value:.4g}" for name, value in metrics.items())])
        line = line[: shutil.get_terminal_size().columns - 1]
        print(f"\r{line:<{self._width}}", end="", file=sys.stderr, flush=True)
        self._width = len(line)

    def __exit__(self, *error: object) -> None:
        if self._width:
            print(file=sys.stderr)
