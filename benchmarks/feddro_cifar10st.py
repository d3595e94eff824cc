"""FedDRO on CIFAR10-ST with ResNet20 on a GPU: a round's seconds beside plain PyTorch's.

    python -m benchmarks.feddro_cifar10st run runs.json            # CIFAR-10 in FEDSTRATA_DATA

FedStrata's ways of computing a round (clients side by side or one by one, convolutions as products or as they
are) and the same rounds in plain PyTorch, where that is installed: all are compiled side by side, then timed
one at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing as mp
import os
import platform
import queue
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.alternatives import pytorch_feddro
from benchmarks.alternatives.pytorch_feddro import Setting

COMPILING = 120.0  # seconds that programs wait for each other before they are timed
BOUND = 0.5  # of PDSGD's constraints, which are not timed
SETTING = Setting()
# convolutions of clients side by side as products, as they are, and clients one by one
VARIANTS = [("products", None), ("as they are", None), ("as they are", 1)]


def load(limit: int | None = None) -> dict[str, np.ndarray]:
    """CIFAR10-ST and the test images; ``limit`` of each, for trials."""
    import fedstrata as fs
    from reproductions import _cifar10st as st

    arrays = dict(fs.data.load("cifar10"))
    chosen = st.keep_last(arrays["y_train"])
    arrays |= {name: arrays[name][chosen] for name in ("x_train", "y_train")}
    return {name: array[:limit] for name, array in arrays.items()}


class Turns(NamedTuple):
    """Programs that are timed one at a time, once all of them are compiled."""

    ready: Any
    lock: Any

    def wait(self) -> None:
        """Until the others are compiled, or until one of them has not made it."""
        with contextlib.suppress(threading.BrokenBarrierError):
            self.ready.wait(timeout=COMPILING)


def timed(options: Any, arrays: Any, variant: tuple[str, int | None], turns: Turns, out: Any) -> None:
    """Images a second for one way of writing it."""
    import fedstrata as fs
    from reproductions import _cifar10st as st

    conv, chunk = variant
    data, model = st.federated(arrays, SETTING.clients, SETTING.seed), st.network(options.network)
    engine = fs.engines.Simulated(chunk=chunk, rewrite=conv == "products")

    def go(name: str, rounds: int) -> float:
        began = time.perf_counter()
        fs.solve(
            st.problems(model, SETTING.lam, BOUND)[name],
            st.method(name, 0.01, SETTING.I, SETTING.beta, SETTING.batch),
            data,
            model.init(SETTING.seed),
            rounds=rounds,
            eval_every=max(rounds, 1),
            engine=engine,
            default_metrics=False,
            progress=False,
        )
        return time.perf_counter() - began

    names = ("FedDRO", "average loss")
    compiled = {name: go(name, 1) for name in names}
    turns.wait()
    for name in names:
        with turns.lock:
            few, many = (
                min(go(name, 2) for _ in range(2)),
                min(go(name, 2 + options.timing) for _ in range(2)),
            )
        if many <= few:
            out.put(
                {
                    "program": f"FedStrata {name}",
                    "convolutions": conv,
                    "error": "too few rounds (--timing) to time",
                }
            )
            continue
        seconds = (many - few) / options.timing
        rate = SETTING.clients * SETTING.I * SETTING.batch / seconds
        out.put(
            {
                "program": f"FedStrata {name}",
                "convolutions": conv,
                "clients": "one by one" if chunk else "side by side",
                "seconds per round": seconds,
                "images per second": rate,
                "compiling": compiled[name],
            }
        )


def machine() -> dict[str, str]:
    """What it ran on."""
    import jax

    facts = {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "device": str(jax.devices()[0].device_kind),
    }
    try:
        import torch

        facts["torch"] = torch.__version__
    except ImportError:
        pass
    return facts


def run(options: Any) -> None:
    """Time everything, and write what came out."""
    began = time.perf_counter()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    context = mp.get_context("spawn")
    arrays, out = load(options.limit), context.Queue()
    variants = VARIANTS[: options.variants]
    turns = Turns(context.Barrier(len(variants) + 1), context.Lock())
    programs = [context.Process(target=timed, args=(options, arrays, v, turns, out)) for v in variants]
    programs.append(context.Process(target=pytorch_feddro.timed, args=(SETTING, arrays, turns, out)))
    rows = _collect(programs, out, options.seconds)
    for row in rows:
        print(json.dumps(row), flush=True)
    content = {
        "command": " ".join(["python", "-m", "benchmarks.feddro_cifar10st", *sys.argv[1:]]),
        "machine": machine(),
        **SETTING._asdict(),
        "network": options.network,
        "timing": rows,
        "seconds": time.perf_counter() - began,
    }
    Path(options.target).write_text(json.dumps(content, indent=1))
    print(f"{content['seconds']:.0f} s in all: {options.target}")


def _collect(processes: list[Any], out: Any, seconds: float) -> list[dict[str, Any]]:
    """What processes put into a queue, until all are done or the time is up."""
    for process in processes:
        process.start()
    found, until = [], time.perf_counter() + seconds
    while time.perf_counter() < until and (any(p.is_alive() for p in processes) or not out.empty()):
        with contextlib.suppress(queue.Empty):
            found.append(out.get(timeout=1.0))
    for process in processes:
        if process.is_alive():
            process.terminate()
    return found


def main() -> None:
    """Read the arguments."""
    if len(sys.argv) == 1:
        gpu = shutil.which("nvidia-smi") and subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, check=False
        )
        words = "a GPU is here" if gpu and gpu.returncode == 0 else "it needs a GPU"
        print(f"feddro_cifar10st: {words}; see its first lines for the command.")
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run")
    running.add_argument("target")
    running.add_argument("--network", default="resnet20")
    running.add_argument("--timing", type=int, default=50, help="rounds that are timed")
    running.add_argument("--seconds", type=float, default=150.0, help="at most, in all")
    running.add_argument("--variants", type=int, default=len(VARIANTS))
    running.add_argument("--limit", type=int, default=None, help="images, for trials")
    running.set_defaults(go=run)
    options = parser.parse_args()
    options.go(options)


if __name__ == "__main__":
    main()
