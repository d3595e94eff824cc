"""Threads that work on large arrays of the host, where NumPy releases the interpreter's lock."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import numpy as np

Found = TypeVar("Found")

MOST = 8  # threads, which is as many as a host's memory keeps busy


def cores() -> int:
    """The number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MOST, "fedstrata-rows")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_workers.cache_clear)  # a child has none of its parent's threads


def in_threads(work: Callable[[slice], Found], rows: int, parts: int) -> list[Found]:
    """``work`` of slices of so many rows, at most ``parts``, in half of the cores: a run uses the others."""
    parts = min(MOST, cores() // 2, parts)
    if parts < 2:
        return [work(slice(0, rows))]
    ends = np.linspace(0, rows, parts + 1).astype(int).tolist()
    return list(_workers().map(work, map(slice, ends[:-1], ends[1:])))
