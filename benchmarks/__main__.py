"""``python -m benchmarks [NAME …]``: every benchmark, or those named, each in a process of its own."""

from __future__ import annotations

import importlib.metadata
import os
import pkgutil
import platform
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def main(names: list[str]) -> None:
    """Run them, below a line about the machine."""
    modules = [module.name for module in pkgutil.iter_modules([str(FOLDER)])]
    known = [name for name in modules if name not in ("__main__", "timing", "flare_system", "alternatives")]
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise SystemExit(f"There is no benchmark {', '.join(unknown)}; there are {', '.join(known)}.")
    python, jax = platform.python_version(), importlib.metadata.version("jax")
    print(f"{os.cpu_count()} cores, {platform.machine()}; Python {python}, JAX {jax}\n", flush=True)
    for name in names or known:
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], cwd=FOLDER.parent, check=True)


main(sys.argv[1:])
