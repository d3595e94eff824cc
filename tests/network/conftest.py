"""Every exchange of every row is a program of its own: too many for one process unless they are dropped."""

import gc

import jax
import pytest

from fedstrata.engines import programs


@pytest.fixture(autouse=True)
def _few_programs():
    yield
    programs._programs.clear()
    jax.clear_caches()
    gc.collect()
