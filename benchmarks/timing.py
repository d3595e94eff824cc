"""Interleaved timing: every program in turn, several times, so that a busy machine disturbs all alike."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

TRACK = "FEDSTRATA_BENCH"  # the variable with the file that tracked ratios are added to
Run = Callable[[], Any]
Open = Callable[[], AbstractContextManager[Run]]


@dataclass(frozen=True)
class Timing:
    """Seconds of one program.

    Attributes:
        name: of the program.
        start: to set it up and run it the first time, compiling and starting processes included.
        seconds: of each of its repetitions after that.
        result: what the first run returned.
    """

    name: str
    start: float
    seconds: tuple[float, ...]
    result: Any

    @property
    def least(self) -> float:
        """What else the machine does touches this one least."""
        return min(self.seconds)

    @property
    def median(self) -> float:
        """The time of a usual repetition."""
        return statistics.median(self.seconds)


def interleave(programs: Mapping[str, Open], repetitions: int = 5) -> list[Timing]:
    """Time programs that return when they are done; all are set up and run once before."""
    runs: dict[str, Run] = {}
    first: dict[str, tuple[float, Any]] = {}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    with ExitStack() as stack:
        for name, opened in programs.items():
            began = time.perf_counter()
            runs[name] = stack.enter_context(opened())
            result = runs[name]()
            first[name] = time.perf_counter() - began, result
        for _ in range(repetitions):
            for name, run in runs.items():
                began = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - began)
    return [Timing(name, first[name][0], tuple(times), first[name][1]) for name, times in seconds.items()]


def track(name: str, seconds: Sequence[float], reference: float, to: str) -> float:
    """Keep a ratio for the page that shows them over time, where `python -m benchmarks` asks for it.

    Args:
        name: what was timed.
        seconds: of its repetitions.
        reference: the least time of what it is compared with.
        to: what that is.

    Returns:
        The ratio of the least times; less is better.
    """
    ratio = min(seconds) / reference
    if file := os.environ.get(TRACK):
        extra = {"ratio": round(ratio, 4), "to": to}
        entry = {"group": None, "name": name, "fullname": name, "params": None, "param": None}
        with open(file, "a", encoding="utf-8") as lines:
            lines.write(json.dumps(entry | {"extra_info": extra, "stats": _stats(seconds)}) + "\n")
    return ratio


def _stats(seconds: Sequence[float]) -> dict[str, Any]:
    """The fields of pytest-benchmark."""
    mean, (q1, median, q3) = statistics.mean(seconds), statistics.quantiles(seconds, method="inclusive")
    return {
        "min": min(seconds), "max": max(seconds), "mean": mean, "stddev": statistics.stdev(seconds),
        "median": median, "q1": q1, "q3": q3, "iqr": q3 - q1, "ops": 1 / mean, "total": sum(seconds),
        "rounds": len(seconds), "iterations": 1, "outliers": "",
    }  # fmt: skip


def table(
    title: str,
    timings: list[Timing],
    reference: str,
    rounds: int,
    judge: tuple[str, Callable[[Any], float]],
    note: str = "",
) -> str:
    """Markdown, the quickest first: times of one round, the ratio to the reference, the start, and the
    result.

    Args:
        title: what was done.
        timings: of the programs.
        reference: the program to whose least time the others' are divided.
        rounds: how many rounds a run has.
        judge: a name and a number for a result, to see that all programs do the same.
        note: a line below.
    """
    name, value = judge
    base = next(t.least for t in timings if t.name == reference)
    head = ["program", "ms a round (least)", "(median)", f"ratio to {reference}", "start, s", name]
    lines = [f"### {title}", "", f"| {' | '.join(head)} |", "|---" + "|---:" * (len(head) - 1) + "|"]
    for t in sorted(timings, key=lambda t: t.least):
        least, median = (f"{1e3 * s / rounds:.3g}" for s in (t.least, t.median))
        cells = [t.name, least, median, f"{t.least / base:.2f}", f"{t.start:.1f}", f"{value(t.result):.4f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", note] if note else lines)
