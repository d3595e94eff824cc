"""What is paid once, loading and compiling: how long it takes, which would spoil a run's clock."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import local

_spent = local()  # threads may solve at the same time


@contextmanager
def compiling() -> Iterator[None]:
    """What happens inside is compiling, and timed as such."""
    began = time.perf_counter()
    try:
        yield
    finally:
        _spent.seconds = compiled_for() + time.perf_counter() - began


def compiled_for() -> float:
    """The seconds that this thread has spent compiling so far."""
    return getattr(_spent, "seconds", 0.0)


@contextmanager
def uncollected() -> Iterator[None]:
    """Switch the garbage collector off in this block: modules and traces are many objects that stay."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@contextmanager
def loading() -> Iterator[None]:
    """Modules are loaded inside: nobody looks for garbage, and what was made counts as old afterwards.

    Else the next look at young objects goes through all of JAX, which takes as long as was saved.
    """
    with uncollected():
        yield
        if gc.get_freeze_count() == 0:  # else someone keeps objects there
            gc.freeze()  # to the objects that are never looked at, and from there to the oldest
            gc.unfreeze()
