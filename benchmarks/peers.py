"""FedStrata and its peers as clients become many: rounds a second and memory, at 100 and at 10,000 clients.

The same FedAvg as in `fedavg_softmax` (`alternatives` has the programs) on softmax regression 64 × 10 with 50
samples a client, of whom 100 take 10 steps on batches of 16 in a round. Every program is a process of its
own: its memory is what it and its children have, at most, above the interpreter with NumPy and the data. The
loss is that after 20 rounds; who does these in an instant is timed over more of them. What is not installed,
or takes too long, is said by name. A program may live in an environment of its own:

    python -m benchmarks.peers --python FedJAX=/tmp/fedjax/bin/python --python pfl=/tmp/pfl/bin/python
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from .alternatives import ALTERNATIVES, Case
from .timing import Run

CLIENTS, PART, ROUNDS, LIMIT = (100, 10_000), 100, 20, 150
INSTANT, LONG = 0.25, 10.0  # seconds that a timed run should take, and after which none is repeated
SAMPLES, FEATURES, STEPS, BATCH = 50, 64, 10, 16
PROGRAMS = (
    "fedstrata",
    "JAX by hand, vmap",
    "PyTorch loop",
    "torch.func.vmap",
    "DrJAX",
    "FedJAX",
    "pfl",
    "Flower",
)


def case_of(clients: int) -> Case:
    """The clients' data, labelled by a linear model."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((clients, SAMPLES, FEATURES), dtype=np.float32)
    labels = (x @ rng.standard_normal((FEATURES, 10), dtype=np.float32)).argmax(-1).astype(np.int32)
    return Case(x, labels, PART, ROUNDS, steps=STEPS, batch=BATCH)


def tree_bytes() -> int:
    """What this process and its descendants have of their own, without pages of files."""
    parents, found = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                lines = [line.split() for line in (folder / "status").read_text().splitlines()]
            except OSError:  # it has ended
                continue
            facts = {words[0]: int(words[1]) for words in lines if words[0] in ("PPid:", "RssAnon:")}
            parents[int(folder.name)], found[int(folder.name)] = facts["PPid:"], facts.get("RssAnon:", 0)
    mine = {Path("/proc/self").resolve().name and int(Path("/proc/self").resolve().name)}
    while more := {child for child, parent in parents.items() if parent in mine} - mine:
        mine |= more
    return 1024 * sum(found.get(process, 0) for process in mine)


class Peak(threading.Thread):
    """The most that there was, looked at ten times a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.over = 0, False

    def run(self) -> None:
        while not self.over:
            self.most = max(self.most, tree_bytes())
            time.sleep(0.1)


def least(run: Run) -> float:
    """Seconds of a run, the least of three where it is not long."""
    times: list[float] = []
    while len(times) < 3 and sum(times) < LONG:
        at = time.perf_counter()
        run()
        times.append(time.perf_counter() - at)
    return min(times)


def measure(name: str, clients: int) -> dict[str, float]:
    """One program in this process."""
    case = case_of(clients)
    before, peak, began = tree_bytes(), Peak(), time.perf_counter()
    peak.start()
    with ALTERNATIVES[name].open(case) as run:
        params = run()
        start = time.perf_counter() - began
        seconds = least(run)
    peak.over = True
    rate = case.rounds / seconds
    if seconds < INSTANT:
        longer = replace(case, rounds=case.rounds * math.ceil(INSTANT / seconds))
        with ALTERNATIVES[name].open(longer) as run:
            run()
            rate = longer.rounds / least(run)
    return {"rate": rate, "start": start, "memory": peak.most - before, "loss": case.loss(params)}


def row(name: str, clients: int, python: str) -> dict[str, float] | str:
    """The same in a process of its own, or why there is nothing."""
    words = [python, "-m", "benchmarks.peers", "--one", name, str(clients)]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=LIMIT, cwd=Path(__file__).parents[1]
        )
    except subprocess.TimeoutExpired:
        return f"not done after {LIMIT} s"
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or ["failed"])[-1]
    found = json.loads(done.stdout.splitlines()[-1])
    return found if isinstance(found, dict) else "not installed"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS)
    parser.add_argument("--programs", nargs="+", default=PROGRAMS, choices=PROGRAMS)
    parser.add_argument("--python", action="append", default=[], metavar="PROGRAM=PATH")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        name, clients = options.one
        print(json.dumps(measure(name, int(clients)) if ALTERNATIVES[name].installed else None))
        return
    pythons = dict(pair.split("=", 1) for pair in options.python)
    print(f"## Peers: FedAvg, softmax regression {FEATURES} × 10, {PART} clients a round\n")
    head = ["program", "clients", "rounds a second", "ratio to fedstrata", "start, s", "memory, MB", "loss"]
    print(f"| {' | '.join(head)} |\n|---{'|---:' * (len(head) - 1)}|", flush=True)
    missing: dict[str, str] = {}
    ours: dict[int, float] = {}
    for clients in options.clients:
        for name in options.programs:
            found = row(name, clients, pythons.get(name, sys.executable))
            if isinstance(found, str):
                missing[f"{name} ({clients:,} clients)"] = found
                continue
            if name == "fedstrata":
                ours[clients] = found["rate"]
            ratio = f"{found['rate'] / ours[clients]:.2f}" if clients in ours else "–"
            cells = [name, f"{clients:,}", f"{found['rate']:.3g}", ratio]
            cells += [f"{found['start']:.1f}", f"{found['memory'] / 1e6:.0f}", f"{found['loss']:.4f}"]
            print(f"| {' | '.join(cells)} |", flush=True)
    print("".join(f"\nLeft out: {name}, {why}." for name, why in missing.items()) + "\n")


if __name__ == "__main__":
    main()
