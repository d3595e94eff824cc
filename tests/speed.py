"""CPU time of processes, and what limits are in parts of: a second is not the same on all machines."""

from __future__ import annotations

import subprocess
import sys
from functools import cache

USED = """
import resource, sys
heavy = sorted(sys.modules.keys() & {"jax", "numpy", "matplotlib", "plotly"})
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime, *heavy)
"""


def started(program: str, *words: str) -> tuple[float, list[str]]:
    """CPU time of a process and the heavy modules in it; of three, as other work adds to this time too."""

    def once() -> tuple[float, list[str]]:
        done = subprocess.run([sys.executable, "-c", program + USED, *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        taken, *heavy = done.stdout.split()
        return float(taken), heavy

    return min(once() for _ in range(3))


@cache
def importing_jax() -> float:
    """Seconds of CPU time: 0.8 to 1.5."""
    return started("import jax")[0]
