"""``python -m benchmarks [NAME …]``: every benchmark, or those named, as tables of ratios."""

from __future__ import annotations

import importlib
import pkgutil
import platform
import sys
from pathlib import Path

import jax


def main(names: list[str]) -> None:
    """Run the modules of this folder that have a ``main``."""
    modules = (m.name for m in pkgutil.iter_modules([str(Path(__file__).parent)]) if not m.ispkg)
    known = [name for name in modules if name not in ("__main__", "timing")]
    unknown = set(names) - set(known)
    if unknown:
        raise SystemExit(f"There is no benchmark {', '.join(sorted(unknown))}; there are {', '.join(known)}.")
    device = jax.devices()[0].device_kind
    print(f"{platform.processor() or platform.machine()}, JAX {jax.__version__} on {device}\n")
    for name in names or known:
        importlib.import_module(f"benchmarks.{name}").main()


main(sys.argv[1:])
