"""Interleaved timing: every alternative in turn, several times, so that a busy machine disturbs all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Seconds of one alternative: the median and the least of its repetitions."""

    name: str
    median: float
    least: float


def interleave(alternatives: dict[str, Callable[[], object]], repetitions: int = 5) -> list[Timing]:
    """Time functions that block until they are done; each is called once before, to compile and to warm up."""
    for run in alternatives.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in alternatives}
    for _ in range(repetitions):
        for name, run in alternatives.items():
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    return [Timing(name, statistics.median(times), min(times)) for name, times in seconds.items()]


def table(title: str, timings: list[Timing], reference: str, note: str = "") -> str:
    """Markdown: milliseconds and the ratio to the reference, by the least time, which disturbances touch least."""
    base = next(t for t in timings if t.name == reference)
    lines = [f"### {title}", "", f"| program | ms (least) | ms (median) | ratio to {reference} |", "|---|---:|---:|---:|"]
    for timing in sorted(timings, key=lambda t: t.least):
        ratio = timing.least / base.least
        lines.append(f"| {timing.name} | {1e3 * timing.least:.1f} | {1e3 * timing.median:.1f} | {ratio:.2f} |")
    return "\n".join([*lines, "", note]) if note else "\n".join(lines)
