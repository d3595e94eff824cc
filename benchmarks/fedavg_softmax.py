"""FedAvg on softmax regression 784 × 10: 100 clients, of which all or 10 take part.

Every alternative does the same arithmetic, which `alternatives` describes; the loss after the first run
shows it. What is timed are rounds alone: each program is set up and run once before, and Flower's processes
stay up. Flower is timed after the others, because its processes would disturb them.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from .alternatives import ALTERNATIVES, Alternative, Case
from .timing import interleave, table, track

CLIENTS, SAMPLES, FEATURES, CLASSES = 100, 600, 784, 10
ROUNDS = {CLIENTS: 2, 10: 20}  # how many to time, by how many take part
REFERENCE = "JAX by hand, vmap"


def make_data(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Inputs of about the length of MNIST's images, and the classes that a linear model would give them."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((CLIENTS, SAMPLES, FEATURES), dtype=np.float32) * np.float32(
        10 / np.sqrt(FEATURES)
    )
    scores = x @ rng.standard_normal((FEATURES, CLASSES), dtype=np.float32)
    return x, scores.argmax(-1).astype(np.int32)


def compare(case: Case, found: dict[str, Alternative]) -> str:
    """The table of one case."""
    programs = {name: partial(alternative.open, case) for name, alternative in found.items()}
    apart = [name for name, alternative in found.items() if alternative.apart]
    timings = interleave({name: opened for name, opened in programs.items() if name not in apart})
    for name in apart:
        timings += interleave({name: programs[name]}, repetitions=3)
    least = {t.name: t.least for t in timings}
    best = min(seconds for name, seconds in least.items() if name.startswith("JAX by hand"))
    ours = next(t.seconds for t in timings if t.name == "fedstrata")
    title = f"{case.participants} of {case.clients} clients"
    ratio = track(f"FedAvg's rounds, {title}", ours, best, "the best by hand")
    return table(
        f"{title} × {case.steps} steps × batch {case.batch}",
        timings,
        REFERENCE,
        case.rounds,
        (f"loss after {case.rounds} rounds", case.loss),
        f"fedstrata / best program by hand: {ratio:.2f}",
    )


def main() -> None:
    """Print the two tables."""
    found = {name: alternative for name, alternative in ALTERNATIVES.items() if alternative.installed}
    missing = [name for name in ALTERNATIVES if name not in found]
    print("## FedAvg, softmax regression 784 × 10\n")
    if missing:
        print(f"Not installed, so left out (see docs/benchmarks.md): {', '.join(missing)}.\n")
    x, y = make_data()
    for participants, rounds in ROUNDS.items():
        print(compare(Case(x, y, participants, rounds), found), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
