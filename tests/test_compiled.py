"""What is paid once: compiled programs on disk, which a second process finds, and loading modules."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import jax
import pytest

import fedstrata as fs
from fedstrata.support.compiled import VARIABLE
from fedstrata.support.lazy import loading


@pytest.fixture
def nothing_set(monkeypatch):
    """As in a process that nobody told anything; what the other tests use comes back."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.delenv(VARIABLE, raising=False)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_who_decides(nothing_set, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(VARIABLE, "off")
    assert fs.keep_compiled() is None
    assert jax.config.jax_compilation_cache_dir is None
    monkeypatch.setenv(VARIABLE, str(tmp_path / "asked"))
    assert fs.keep_compiled() == tmp_path / "asked"
    assert (tmp_path / "asked").is_dir()
    monkeypatch.delenv(VARIABLE)
    assert fs.keep_compiled() == tmp_path / "asked"  # what is set up stays
    assert fs.keep_compiled(tmp_path / "given") == tmp_path / "given"
    jax.config.update("jax_compilation_cache_dir", None)
    assert fs.keep_compiled().parent.name == "fedstrata"


def test_a_folder_that_cannot_be_made(nothing_set, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file" / "folder"))
    assert fs.keep_compiled() is None  # the run matters more
    with pytest.raises(OSError, match="file"):
        fs.keep_compiled(tmp_path / "file" / "folder")


COUNTING = """
import atexit
import jax.monitoring
from fedstrata.lab.cli import app

events = []
jax.monitoring.register_event_listener(lambda event, **more: events.append(event))
atexit.register(lambda: print("found:", events.count("/jax/compilation_cache/cache_hits")))
app()
"""


@pytest.mark.slow
def test_a_second_process_finds_the_programs(tmp_path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    environment |= {VARIABLE: str(tmp_path / "kept"), "JAX_PLATFORMS": "cpu"}

    def run() -> str:
        words = [
            "run",
            "demo",
            "--quick",
            "--fresh",
            "--out",
            str(tmp_path / "out"),
            "--set",
            "method=FedMSA",
        ]
        done = subprocess.run(
            [sys.executable, "-c", COUNTING, *words], env=environment, capture_output=True, text=True,
            timeout=300, check=True,
        )  # fmt: skip
        return done.stdout

    told = " ".join(run().split())
    assert "Compiled programs are kept in" in told
    assert told.endswith("found: 0")
    assert "found on disk" not in told
    kept = [path for path in Path(tmp_path / "kept").iterdir() if path.name.endswith("-cache")]
    assert kept
    told = run()
    assert int(told.rpartition("found: ")[2]) >= len(kept)
    assert "compiled programs found on disk" in " ".join(told.split())


def test_loading_keeps_garbage_for_a_whole_look():
    class Cycle:
        def __init__(self):
            self.me = self

    with loading():
        assert not gc.isenabled()
        gone = weakref.ref(Cycle())
    assert (gc.isenabled(), gc.get_freeze_count()) == (True, 0)
    gc.collect(0)
    assert gone() is not None  # it counts as old
    gc.collect()
    assert gone() is None


def test_loading_leaves_frozen_objects_alone():
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with loading():
            pass
        assert gc.get_freeze_count() == frozen > 0
    finally:
        gc.unfreeze()
