"""Keep compiled programs on disk, for later processes."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import jax.monitoring

VARIABLE = "FEDSTRATA_COMPILED"  # a folder, or "off"; it decides for the command line
_loaded = [0]  # programs that were found on disk
LEAST = 0.1  # seconds of compiling from which a program is worth a file: a phase at a site takes 0.2 to 0.6


def keep_compiled(folder: str | os.PathLike[str] | None = None) -> Path | None:
    """Keep compiled programs in a folder, for this process and those after it: JAX's compilation cache.

    The command line does so by itself. JAX tells programs apart by their text, the devices and its version,
    so that a stale one is never used; the folder may be removed at any time.

    Args:
        folder: where; by default ``FEDSTRATA_COMPILED``, else ``~/.cache/fedstrata/compiled``.

    Returns:
        The folder; None where ``FEDSTRATA_COMPILED=off`` and no other is given, and where it cannot be made.
        A folder that was set up before, by ``JAX_COMPILATION_CACHE_DIR`` or in the program, stays unless
        another is given.
    """
    if folder is None and (already := jax.config.jax_compilation_cache_dir):  # type: ignore[attr-defined]
        return Path(already)
    asked = os.environ.get(VARIABLE, "")
    if folder is None and asked.lower() in ("off", "0", "no", "false"):
        return None
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    path = Path(folder or asked or f"{cache}/fedstrata/compiled").expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        if folder is not None:
            raise
        return None
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST)
    return path


def loaded() -> int:
    """The number of programs that this process found on disk so far, and did not compile."""
    return _loaded[0]


def _listen(event: str, **_: str | int) -> None:
    _loaded[0] += event == "/jax/compilation_cache/cache_hits"


jax.monitoring.register_event_listener(_listen)
