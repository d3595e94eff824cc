"""What every test shares: the CPU with eight devices, one seed, a compilation cache, the data folder."""

import gc
import os
import random
from collections.abc import Iterator
from pathlib import Path

# Read when jax and matplotlib are imported; inherited by the processes that tests start.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("MPLBACKEND", "agg")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
# Tests are thousands of small programs: most of their time would go into optimising them (see `optimized`).
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import hypothesis
import jax
import numpy as np
import pytest

from fedstrata.engines import programs
from fedstrata.solving import certificate

# Runs of tests are not judged unasked: most are a few rounds long, and some count what is compiled.
certificate.ALLOWANCE.left = -1e9
MAPS = Path("/proc/self/maps")  # Linux allows 65,530 of them
# Docstrings' examples that compile more than a quick test may.
SLOW_EXAMPLES = {
    f"fedstrata.{name}"
    for name in (
        "advice.plan.plan",
        "advice.recommend.recommend",
        "advice.tune.tune",
        "testing.conformance.check_engine",
    )
}
_compiled = [0]  # programs, since the maps were last counted
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: _compiled.__setitem__(
        0, _compiled[0] + event.endswith("backend_compile_duration")
    )
)

# Compiling makes the first example slow, hence no deadline.
hypothesis.settings.register_profile("fedstrata", derandomize=True, deadline=None)
hypothesis.settings.load_profile("fedstrata")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What runs at night is not quick either: ``-m "not slow"`` means the quick tests alone."""
    for item in items:
        if item.get_closest_marker("long") or item.name in SLOW_EXAMPLES:
            item.add_marker("slow")


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - libraries draw from the global generator


def _drop_programs() -> None:
    programs._programs.clear()
    jax.clear_caches()
    gc.collect()


@pytest.fixture(autouse=True)
def _few_programs() -> Iterator[None]:
    """Thousands of programs exhaust what a process may map: now and then they are dropped.

    Not sooner: what is dropped is compiled again, and looking for garbage takes a second by then.
    """
    yield
    if _compiled[0] > 200 and MAPS.exists():
        _compiled[0] = 0
        if MAPS.read_bytes().count(b"\n") > 30_000:
            _drop_programs()


@pytest.fixture
def x64() -> Iterator[None]:
    """Float64 for the length of one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def optimized() -> Iterator[None]:
    """The compiler as users have it: for tests that measure speed, or compute longer than they compile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "0")
        _drop_programs()
        jax.config.update("jax_disable_most_optimizations", False)
        yield
    jax.config.update("jax_disable_most_optimizations", os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real data, which does not come with the project."""
    folder = os.environ.get("FEDSTRATA_DATA")
    if not folder:
        pytest.skip("no real data: set FEDSTRATA_DATA to the folder that docs/data.md describes")
    if not Path(folder).is_dir():
        pytest.fail(
            f"FEDSTRATA_DATA is {folder!r}, which is no folder; unset it to skip the tests on real data"
        )
    return Path(folder)
