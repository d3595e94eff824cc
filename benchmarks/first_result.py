"""How long until the first result of the demo's problem, in a fresh process without a compilation cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

from .timing import track

METHODS = ("FedRZOBilevel", "FedMSA")
PARTS = ("Python", "import fedstrata", "experiment and data", "first chunk", "first round")
REPETITIONS = 3


def child(method: str) -> None:
    """Print the clock as each part is done: the first chunk compiles the rounds and evaluates the start."""
    clock = [time.time()]
    import fedstrata as fs

    clock.append(time.time())
    from fedstrata.lab.experiments.registry import find

    demo = find("demo")  # as the command line does
    task = next(demo.build(s) for s in demo.settings if s.method == method)
    clock.append(time.time())
    fs.solve(
        task.problem,
        task.method,
        task.data,
        task.x0,
        y0=task.y0,
        rounds=1,
        metrics=task.metrics,
        callbacks=(lambda progressed: clock.append(time.time()),),
        progress=False,
    )
    print(json.dumps(clock))


def fresh() -> dict[str, str]:
    """The environment of a process without a compilation cache, whose modules keep their bytecode."""
    dropped = ("JAX_COMPILATION_CACHE", "PYTHONDONTWRITEBYTECODE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return kept | {"JAX_ENABLE_COMPILATION_CACHE": "false"}


def jax_start() -> float:
    """Seconds of a process that compiles one small function with JAX."""
    began = time.time()
    program = "import jax; jax.jit(lambda x: x + 1)(1.0).block_until_ready()"
    subprocess.run([sys.executable, "-c", program], env=fresh(), check=True)
    return time.time() - began


def measure(method: str) -> dict[str, float]:
    """Seconds of each part, in a process of its own.

    Modules have their bytecode, as an installer leaves it: the first process writes what is missing.
    """
    began = time.time()
    output = subprocess.run(
        [sys.executable, "-m", "benchmarks.first_result", method],
        env=fresh(),
        cwd=Path(__file__).parents[1],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    clock = [began, *json.loads(output)]
    return dict(zip(PARTS, (b - a for a, b in pairwise(clock)), strict=True))


def main() -> None:
    """Print the quickest of a few processes for each method."""
    print("## Time to the first result of the demo, a fresh process without compilation cache\n")
    print(f"| method | {' | '.join(PARTS)} | together |")
    print("|---" + "|---:" * (len(PARTS) + 1) + "|")
    least_start = min(jax_start() for _ in range(REPETITIONS))
    for method in METHODS:
        measured = [measure(method) for _ in range(REPETITIONS)]
        least = min(measured, key=lambda parts: sum(parts.values()))
        cells = [*least.values(), sum(least.values())]
        seconds = [sum(parts.values()) for parts in measured]
        track(f"first result of the demo, {method}", seconds, least_start, "a first jax.jit")
        print(f"| {method} | {' | '.join(f'{seconds:.2f} s' for seconds in cells)} |", flush=True)
    print()


if __name__ == "__main__":
    child(sys.argv[1]) if sys.argv[1:] else main()
