"""Work on large arrays of the host: some rows in each of several threads, where NumPy leaves Python alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import numpy as np

Found = TypeVar("Found")

LARGE = 2**22  # bytes from which threads are quicker
MOST = 8  # threads, which is as many as a host's memory keeps busy


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MOST, "fedstrata-rows")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_workers.cache_clear)  # a child has none of its parent's threads


def by_rows(work: Callable[[slice], Found], array: np.ndarray) -> list[Found]:
    """``work`` of slices that make up the rows of an array, in half of the cores: a run computes meanwhile.

    Example:
        >>> by_rows(lambda these: int(np.arange(5)[these].sum()), np.arange(5))
        [10]
    """
    parts = min(MOST, cores() // 2, array.nbytes // LARGE)
    if parts < 2:
        return [work(slice(0, len(array)))]
    ends = np.linspace(0, len(array), parts + 1).astype(int).tolist()
    return list(_workers().map(work, map(slice, ends[:-1], ends[1:])))
